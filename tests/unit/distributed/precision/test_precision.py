"""Precision classes, put together as a run does it, against plain PyTorch."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

from fitkit.distributed.precision import (
    FullPrecision,
    Precision,
    match_state,
    resolve_precision,
)
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.loss_scaling import Scaling, scaled_steps

NAMES = ["32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true"]
DTYPES = {"64": torch.float64, "16": torch.float16, "bf16": torch.bfloat16}
CPU = torch.device("cpu")


def small_net():
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(64, 3),
    )  # fmt: skip
    net.register_buffer("counts", torch.arange(3))
    return net


def batches(count=4):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield (
            torch.randn(8, 1, 6, 6, generator=generator),
            torch.randint(3, (8,), generator=generator),
        )


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def dtypes(net):
    tensors = [*net.parameters(), *net.buffers()]
    return {tensor.dtype for tensor in tensors if tensor.is_floating_point()}


def train(net, precision, optimizer, clip=None, scales=(1, 1, 1, 1)):
    """Train by the pieces; whether each step counted."""
    precision.convert(net)
    match_state(optimizer)
    scaler = precision.scaler(CPU)
    scaling = None if scaler is None else Scaling(scaler)
    counted = []
    for (x, y), scale in zip(batches(), scales, strict=True):
        optimizer.zero_grad()
        x = x.to(precision.input_dtype(net))
        with precision.autocast("cpu"):
            output = net(x)
        loss = F.cross_entropy(precision.widen(output), y) * scale
        loss.backward() if scaling is None else scaling.backward(loss)
        if scaling is not None and clip:
            scaling.unscale(optimizer)
        if clip:
            clip_grad_norm_(net.parameters(), clip)
        counted.append(True if scaling is None else scaling.step(optimizer))
        if scaling is None:
            optimizer.step()
        else:
            scaling.update()
    return counted


def assert_equal(net, other):
    pairs = zip(net.state_dict().items(), other.state_dict().items(), strict=True)
    for (name, value), (other_name, expected) in pairs:
        assert name == other_name and value.dtype == expected.dtype
        assert torch.equal(value, expected), name


# ---------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("word", "name"),
    [(32, "32-true"), ("64", "64-true"), (64, "64-true"), (16, "16-mixed"), ("16", "16-mixed"),
     *((word, "fp8-mixed") for word in ("fp8", "Float8", "FP8-mixed", "transformer-engine")),
     ("bf16", "bf16-mixed"), ("BF16-Mixed", "bf16-mixed"), (" 16-TRUE ", "16-true"),
     *((name, name) for name in NAMES)],
)  # fmt: skip
def test_each_word_of_the_contract_means_its_precision(word, name):
    assert resolve_precision(word).name == name


def test_an_object_is_taken_as_it_is():
    class Mine(Precision):
        name = "mine"

    mine = Mine()
    assert resolve_precision(mine) is mine


@pytest.mark.parametrize(
    ("word", "error", "text"),
    [("half", ConfigurationError, "'16-mixed'.*'64-true'.*'bf16-true'"),
     (24, ConfigurationError, "precision='24'"),
     ("8", ConfigurationError, "lacks"), (8, ConfigurationError, "'fp8-mixed'"),
     ("int8", ConfigurationError, "8-bit"),
     ("transformer-engine-float16", ConfigurationError, "8-bit"),
     ("bf16-mixd", ConfigurationError, "Did you mean 'bf16-mixed'"),
     (torch.bfloat16, ArgumentTypeError, "bf16-mixed"), (16.0, ArgumentTypeError, "16.0"),
     (True, ArgumentTypeError, "True"), (None, ArgumentTypeError, "None")],
)  # fmt: skip
def test_other_words_are_refused_with_those_that_are_known(word, error, text):
    with pytest.raises(error, match=text) as caught:
        resolve_precision(word)
    assert all(repr(name) in str(caught.value) for name in NAMES)


# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize("name", ["64-true", "16-true", "bf16-true"])
def test_a_true_precision_trains_like_a_cast_net(name):
    net, plain = small_net(), small_net()
    dtype = DTYPES[name.split("-")[0]]
    train(net, resolve_precision(name), sgd(net))
    plain.to(dtype)
    optimizer = sgd(plain)
    for x, y in batches():
        optimizer.zero_grad()
        output = plain(x.to(dtype))
        F.cross_entropy(output if name == "64-true" else output.float(), y).backward()
        optimizer.step()
    assert_equal(net, plain)
    assert dtypes(net) == {dtype} and net.counts.dtype is torch.int64


def test_bf16_mixed_trains_like_autocast_by_hand():
    net, plain = small_net(), small_net()
    train(net, resolve_precision("bf16"), sgd(net), clip=0.1)
    optimizer = sgd(plain)
    for x, y in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = plain(x)
        assert output.dtype is torch.bfloat16
        F.cross_entropy(output.float(), y).backward()
        clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
    assert_equal(net, plain)
    assert dtypes(net) == {torch.float32}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_16_mixed_trains_like_a_scaler_by_hand_and_tells_which_steps_were_left_out(clip, fused):
    scales = (1, 1e36, 1, 1)  # the second overflows
    make = partial(torch.optim.Adam, fused=fused)
    net, plain = small_net(), small_net()
    counted = train(net, resolve_precision(16), make(net.parameters()), clip, scales)
    optimizer, scaler = make(plain.parameters()), torch.amp.GradScaler("cpu")
    for (x, y), scale in zip(batches(), scales, strict=True):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            output = plain(x)
        scaler.scale(F.cross_entropy(output.float(), y) * scale).backward()
        if clip:
            scaler.unscale_(optimizer)
            clip_grad_norm_(plain.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    assert_equal(net, plain)
    assert counted == [True, False, True, True]


def test_32_true_costs_a_step_nothing():
    precision, outputs = FullPrecision(), {"a": torch.ones(2, dtype=torch.float16)}
    assert precision.autocast("cpu") is precision.autocast("cuda")
    assert precision.widen(outputs) is outputs and precision.scaler(CPU) is None


# ---------------------------------------------------------------------- dtypes


def test_a_net_that_was_cast_gets_its_own_dtypes_back():
    net = small_net()
    net[4].double()
    own = {name: value.dtype for name, value in net.state_dict().items()}
    weight, bits = net[0].weight, net[0].weight.detach().clone()
    for name in ("bf16-true", "16-true"):
        resolve_precision(name).convert(net)
    for name in ("32-true", "bf16-mixed"):
        assert resolve_precision(name).input_dtype(net) is torch.float32
    net = pickle.loads(pickle.dumps(net))  # as another rank gets it
    resolve_precision("bf16-mixed").convert(net)
    assert {name: value.dtype for name, value in net.state_dict().items()} == own
    assert torch.equal(net[0].weight, bits.bfloat16().half().float())
    assert weight.dtype is torch.float16  # the object that the pickled net came from


def test_an_optimizer_goes_on_in_another_precision():
    net = small_net()
    optimizer = torch.optim.AdamW(net.parameters(), eps=1e-4)
    weight = net[0].weight
    for name, dtype in (("16-true", torch.float16), ("32-true", torch.float32)):
        train(net, resolve_precision(name), optimizer)
        assert net[0].weight is weight and weight.dtype is dtype
        assert optimizer.state[weight]["exp_avg"].dtype is dtype
        assert optimizer.state[weight]["step"].dtype is torch.float32
    assert optimizer.state[weight]["step"] == 8
    assert weight.isfinite().all()


def test_32_true_leaves_a_net_in_the_dtype_that_its_maker_chose():
    precision, net = FullPrecision(), small_net().double()
    precision.convert(net)
    assert dtypes(net) == {torch.float64} and precision.input_dtype(net) is torch.float64
    resolve_precision("16-true").convert(net)
    net.bfloat16()  # the user's own word counts, also after a cast
    precision.convert(net)
    assert dtypes(net) == {torch.bfloat16}


def test_complex_parameters_are_not_cast():
    net = torch.nn.Linear(2, 2)
    net.phase = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    resolve_precision("16-true").convert(net)
    assert net.phase.dtype is torch.complex64 and net.weight.dtype is torch.float16


def test_half_predictions_become_float32_in_any_structure_and_pass_gradients():
    precision = resolve_precision("16-true")
    half = torch.ones(2, dtype=torch.float16, requires_grad=True)
    tree = {"a": half, "b": (torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.int64))}
    wide = precision.widen(tree)
    assert wide["a"].dtype is torch.float32
    assert [leaf.dtype for leaf in wide["b"]] == [torch.float64, torch.int64]
    wide["a"].sum().backward()
    assert half.grad.tolist() == [1, 1]
    nothing_half = {"a": torch.ones(1)}
    assert precision.widen(nothing_half) is nothing_half


# ---------------------------------------------------------------------- scaling


def scaled_gradient(scaling, weight, number):
    scaling.backward((weight * number).sum())


def test_a_scaling_pickled_or_saved_goes_on_with_its_scale():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaling = Scaling(torch.amp.GradScaler("cpu", growth_interval=2))
    scaled_gradient(scaling, weight, float("inf"))
    assert scaling.step(optimizer) is False and weight.tolist() == [1, 1]
    scaling.update()
    loaded = Scaling(torch.amp.GradScaler("cpu", growth_interval=2))
    loaded.load_state_dict(copy.deepcopy(scaling.state_dict()))
    for one in (loaded, pickle.loads(pickle.dumps(scaling))):
        assert one.scaler.get_scale() == 2**15
        for _ in range(2):
            weight.grad = None
            scaled_gradient(one, weight, 1.0)
            assert one.step(optimizer)
            one.update()
        assert one.scaler.get_scale() == 2**16
    assert weight.tolist() == pytest.approx([0.6, 0.6])


def test_unscaling_twice_or_without_gradients_does_nothing():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaling = Scaling(torch.amp.GradScaler("cpu"))
    scaling.unscale(optimizer)
    assert scaling.step(optimizer)
    scaling.update()
    scaling.backward(weight.sum())
    for _ in range(2):
        scaling.unscale(optimizer)
    assert weight.grad.tolist() == [1, 1]
    assert scaling.step(optimizer) and weight.tolist() == [0.5, 0.5]
    scaling.update()


def test_optimizers_called_by_the_user_step_through_the_scaling():
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.5) for weight in weights]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 10)
    own, scaling, made = optimizers[0].step, Scaling(torch.amp.GradScaler("cpu")), []
    with scaled_steps(scaling, optimizers, lambda: made.append(1)):
        scaling.backward(weights[0].sum() + weights[1].sum() * float("inf"))
        for optimizer in optimizers:
            optimizer.step()
        scheduler.step()
        scaling.update()
        with pytest.raises(ConfigurationError, match="SGD"):
            optimizers[0].step(lambda: None)
    assert [weight.item() for weight in weights] == [0.5, 1.0] and made == [1]
    assert optimizers[0].step is own and "step" not in vars(optimizers[1])


def test_what_fused_steps_on_cuda_left_out_is_counted_one_step_later(monkeypatch):
    from fitkit.extras import loss_scaling as module

    class OnCuda:
        device = torch.device("cuda")

        def __init__(self, found):
            self.found = found

    class Verdict:
        def __init__(self, found_inf):
            self.left_out = lambda: found_inf.found

    monkeypatch.setattr(module, "_LateVerdict", Verdict)
    optimizer, scaling = sgd(small_net()), Scaling(torch.amp.GradScaler("cpu"))
    told = [scaling._counts(optimizer, OnCuda(found)) for found in (True, False, False, True)]
    assert told == [True, False, True, True]  # 2 were made of 4, and one more is known at the end
    assert scaling.state_dict()["overcounted"] == 1
    assert scaling._counts(optimizer, OnCuda(False)) is False


# ---------------------------------------------------------------------- what can't be


@pytest.mark.parametrize("name", NAMES)
def test_torch_trains_in_every_precision_on_the_cpu(name):
    resolve_precision(name).check(CPU)


@pytest.mark.parametrize(
    ("name", "device"), [("64-true", "mps"), ("16-mixed", "xla"), ("16-true", "xla")]
)
def test_an_impossible_pair_is_refused_with_the_table(name, device):
    with pytest.raises(ConfigurationError, match=f"{name}.*{device}.*mps: 32-true, 16-mixed"):
        resolve_precision(name).check(torch.device(device))


def test_16_mixed_refuses_weights_in_float16_by_name():
    with pytest.raises(ConfigurationError, match="0.weight is float16"):
        resolve_precision(16).convert(small_net().half())


def test_16_true_refuses_an_eps_that_float16_does_not_have():
    precision, net = resolve_precision("16-true"), small_net()
    with pytest.raises(ConfigurationError, match="Adam's eps=1e-08 is 0 in float16"):
        precision.check_optimizer(torch.optim.Adam(net.parameters()))
    for optimizer in (torch.optim.Adam(net.parameters(), eps=1e-4), sgd(net)):
        precision.check_optimizer(optimizer)
    resolve_precision("bf16-true").check_optimizer(torch.optim.Adam(net.parameters()))
