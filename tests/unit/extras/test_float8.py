"""8-bit floats, emulated on the CPU, against torchao used by hand in a plain loop."""

import importlib.util
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fitkit
from fitkit.distributed.precision import plain_layers, resolve_precision
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.precisions import Float8Mixed
from tests.reference import assert_same_weights, compiled

torchao_float8 = pytest.importorskip("torchao.float8")

FITTING = ("2", "4")
BATCH = 13  # no multiple of 16, the last one shorter still
torch.manual_seed(0)
X, Y = torch.randn(64, 32), torch.randint(0, 5, (64,))
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def small_net():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 48), nn.LayerNorm(48), nn.Linear(48, 64),
        nn.ReLU(), nn.Linear(64, 20), nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5),
    )  # fmt: skip


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def model_of(net, kind=fitkit.Model, **arguments):
    settings = {"accelerator": "cpu", "devices": 1, "precision": Float8Mixed(emulate=True)}
    return compiled(net, sgd, kind=kind, **{**settings, **arguments})


def fit(model, **options):
    model.fit(X, Y, **{"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0, **options})
    return model


def by_hand(batches_of_updates, clip=None):
    """A net trained by torchao, autocast and an optimizer; each update has one or more batches."""
    net = small_net()
    config = torchao_float8.Float8LinearConfig(emulate=True)
    torchao_float8.convert_to_float8_training(
        net, config=config, module_filter_fn=lambda module, name: name in FITTING
    )
    optimizer = sgd(net.parameters())
    for batches in batches_of_updates:
        optimizer.zero_grad()
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16):
                output = net(X[batch])
            (F.cross_entropy(output.float(), Y[batch]) / len(batches)).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return net


def slices(size, epochs=2):
    return [slice(i, i + size) for _ in range(epochs) for i in range(0, 64, size)]


def kinds(net):
    return {name: type(layer).__name__ for name, layer in net.named_modules() if name.isdigit()}


def float8_names(net):
    return [name for name, kind in kinds(net).items() if kind == "Float8Linear"]


# ---------------------------------------------------------------------- numbers


def test_fit_trains_as_torchao_does_by_hand():
    net = small_net()
    fit(model_of(net))
    assert_same_weights(net, by_hand([[batch] for batch in slices(BATCH)]))
    assert float8_names(net) == list(FITTING)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}


def test_accumulated_and_clipped_gradients_are_those_of_a_loop_by_hand():
    net = small_net()
    fit(model_of(net, accumulate_grad_batches=2, gradient_clip_val=0.5), batch_size=16)
    batches = slices(16)
    pairs = [batches[i : i + 2] for i in range(0, len(batches), 2)]
    assert_same_weights(net, by_hand(pairs, clip=0.5))


def test_a_step_of_ones_own_multiplies_8_bit_floats_too():
    class Own(fitkit.Model):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = F.cross_entropy(self(batch[0]).float(), batch[1])
            self.manual_backward(loss)
            optimizer.step()

    net = small_net()
    fit(model_of(net, Own))
    assert_same_weights(net, by_hand([[batch] for batch in slices(BATCH)]))


class OneThread(fitkit.callbacks.Callback):
    """A rank has fewer threads than a process alone, and the last bits depend on their number."""

    def on_train_begin(self, logs=None):
        self.threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def on_train_end(self, logs=None):
        torch.set_num_threads(self.threads)


@pytest.mark.slow
def test_two_ranks_train_as_the_mean_of_their_gradients_does():
    net, one_thread = small_net(), OneThread()
    fit(model_of(net, strategy="ddp_spawn", devices=2), batch_size=16, callbacks=one_thread)
    batches = slices(16)  # each rank has every other one
    pairs = [batches[i : i + 2] for i in range(0, len(batches), 2)]
    one_thread.on_train_begin()
    try:
        expected = by_hand(pairs)
    finally:
        one_thread.on_train_end()
    assert_same_weights(net, expected)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "dp", "ddp_sharded"])
def test_other_strategies_train_nearly_as_one_device_does(strategy):
    net, plain = small_net(), small_net()
    size = 32 if strategy == "dp" else 16
    fit(model_of(net, strategy=strategy, devices=2), batch_size=size)
    fit(model_of(plain), batch_size=32)
    assert_same_weights(net, plain, rtol=0.02, atol=5e-3)
    assert float8_names(net) == list(FITTING)


@pytest.mark.slow
def test_a_compiled_net_multiplies_8_bit_floats():
    net, plain = small_net(), small_net()
    fit(model_of(net, jit_compile={"backend": "aot_eager"}), batch_size=16)
    fit(model_of(plain), batch_size=16)
    assert_same_weights(net, plain, rtol=0.02, atol=5e-3)


# ---------------------------------------------------------------------- there and back


def test_a_layer_stays_the_object_that_it_is_there_and_back():
    net, calls = small_net(), []
    layer, weight = net[2], net[2].weight
    layer.register_forward_hook(lambda *_: calls.append(1))
    names, attributes = list(net.state_dict()), set(vars(layer))
    model = fit(model_of(net))
    (optimizer,) = model._fitkit.fit_state.optimizers
    momentum = optimizer.state[weight]["momentum_buffer"]
    assert net[2] is layer and layer.weight is weight and calls
    assert list(net.state_dict()) == names
    for word in ("32-true", "bf16-mixed", "64-true"):
        model.compile(precision=Float8Mixed(emulate=True))
        model.evaluate(X, Y, verbose=0)
        assert float8_names(net) == list(FITTING)
        model.compile(precision=word)
        model.evaluate(X, Y, verbose=0)
        assert type(layer) is nn.Linear and set(vars(layer)) == attributes
        assert net[2] is layer and layer.weight is weight
    assert model._fitkit.fit_state.optimizers == [optimizer]
    assert optimizer.state[weight]["momentum_buffer"] is momentum
    with plain_layers(net):
        assert type(layer) is nn.Linear
    assert type(layer) is nn.Linear


def test_layers_are_plain_for_a_while_and_multiply_8_bit_floats_again():
    net = small_net()
    Float8Mixed(emulate=True).convert(net)
    expected = net(X)
    with plain_layers(net):
        assert float8_names(net) == []
        exported = torch.export.export(net, (X,))
        assert torch.equal(exported.module()(X), small_net()(X))
    assert float8_names(net) == list(FITTING) and torch.equal(net(X), expected)


def test_a_training_goes_on_exactly_from_a_file_and_in_another_precision(tmp_path):
    path = tmp_path / "half.h5"
    whole = fit(model_of(small_net()), epochs=4)
    fit(model_of(small_net())).save(path)
    resumed = fit(model_of(small_net()), epochs=4, resume_from=path)
    assert_same_weights(resumed.net, whole.net)
    other = model_of(small_net(), precision="bf16-mixed")
    other.load(path)
    fit(other).save(path)
    resumed.load(path)
    assert_same_weights(resumed.net, other.net)


def test_layers_that_came_since_and_other_settings_are_followed():
    net = small_net()
    Float8Mixed(emulate=True).convert(net)
    layer = net[2]
    net.append(nn.ReLU())
    net.append(nn.Linear(5, 5))
    Float8Mixed(emulate=True).convert(net)
    assert net[2] is layer and float8_names(net) == list(FITTING)
    Float8Mixed().convert(net)
    assert not net[2].config.emulate
    Float8Mixed(every_layer=True).convert(net)
    assert float8_names(net) == ["0", *FITTING]
    Float8Mixed().convert(net)
    assert float8_names(net) == list(FITTING)


@pytest.mark.parametrize("odd", [
    lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)),
    lambda: type("Mine", (nn.Linear,), {})(64, 64),
    lambda: nn.Linear(64, 64).double(), lambda: nn.Linear(64, 24), lambda: nn.Linear(24, 64),
], ids=["weight_norm", "a class of one's own", "float64", "to 24", "from 24"])  # fmt: skip
def test_layers_that_torchao_would_compute_otherwise_stay(odd):
    layer = odd()
    kind = type(layer)
    net = nn.Sequential(nn.Linear(64, 64), layer, nn.Linear(64, 64), nn.Linear(64, 5))
    Float8Mixed(emulate=True).convert(net)
    assert type(layer) is kind and float8_names(net) == ["2"]


# ---------------------------------------------------------------------- refusals


def test_a_net_without_a_layer_that_fits_is_refused_with_the_sizes():
    net = nn.Sequential(nn.Linear(32, 20), nn.Linear(20, 5))
    with pytest.raises(ConfigurationError, match=r"multiples of 16.*0 \(32 to 20\), 1 \(20 to 5\)"):
        Float8Mixed(emulate=True).convert(net)
    with pytest.raises(ConfigurationError, match=r"every_layer=True"):
        Float8Mixed(emulate=True).convert(nn.Linear(64, 64))
    with pytest.raises(ConfigurationError, match="lazy"):
        Float8Mixed(emulate=True).convert(nn.Sequential(nn.LazyLinear(64), nn.Linear(64, 64)))
    layer = nn.Linear(64, 64)
    Float8Mixed(emulate=True, every_layer=True).convert(layer)
    assert type(layer).__name__ == "Float8Linear"


@pytest.mark.parametrize(("capability", "goes"), [
    ((8, 9), True), ((9, 0), True), ((12, 0), True), ((8, 6), False), ((7, 5), False),
])  # fmt: skip
def test_a_gpu_needs_compute_capability_8_9(capability, goes, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: capability >= (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "A card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    precision = resolve_precision("fp8")
    if goes:
        precision.check(CUDA)
        return
    with pytest.raises(ConfigurationError, match=r"A card has.* capability \d\.\d.*Supported:"):
        precision.check(CUDA)
    Float8Mixed(emulate=True).check(CUDA)


def test_other_devices_are_refused_and_the_cpu_is_told_how_to_emulate():
    with pytest.raises(ConfigurationError, match=r"Float8Mixed\(emulate=True\)"):
        model_of(small_net(), precision="fp8")
    for kind in ("mps", "xla"):
        for precision in (Float8Mixed(), Float8Mixed(emulate=True)):
            with pytest.raises(ConfigurationError, match="FK038"):
                precision.check(torch.device(kind))


def test_without_torchao_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "torchao", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"torch-fitkit\[fp8\]"):
        Float8Mixed(emulate=True).check(CPU)


def test_options_are_flags():
    with pytest.raises(ArgumentTypeError, match="emulate"):
        Float8Mixed(emulate=1)
