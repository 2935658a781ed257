"""Parts of a batch, replicas, and their outputs as one: against plain PyTorch."""

import copy
import dataclasses
import threading
import traceback
import warnings
from collections import OrderedDict, namedtuple
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from fitkit.errors import ConfigurationError
from fitkit.extras.dp import Replicas, _callers_modes
from fitkit.extras.rows import gather, part_sizes, split

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Batch:
    image: torch.Tensor
    caption: list
    scale: float = 2.0


class OnlyByKeyword(OrderedDict):
    """As Hugging Face's outputs: a mapping that can't be built from pairs."""

    def __init__(self, **entries):
        super().__init__(entries)


def replicas(module, count=2, **options):
    return Replicas(module, (CPU,) * count, **options)


# ---------------------------------------------------------------------- parts


@pytest.mark.parametrize(
    ("samples", "parts", "sizes"),
    [(5, 2, [3, 2]), (4, 3, [2, 1, 1]), (6, 3, [2, 2, 2]), (2, 3, [1, 1]), (0, 2, [0])],
)
def test_parts_differ_by_at_most_one_sample_and_the_larger_come_first(samples, parts, sizes):
    assert part_sizes(samples, parts) == sizes
    rows = torch.arange(samples * 2).view(samples, 2)
    found = split({"x": rows}, parts)
    assert [len(part["x"]) for part in found] == sizes
    assert torch.equal(torch.cat([part["x"] for part in found]), rows)


def test_what_has_a_row_for_each_sample_is_divided_and_the_rest_goes_to_every_part():
    x, table = torch.arange(5.0), torch.zeros(4, 5)
    tree = (
        {"pair": Pair(x, Batch(x * 2, list("abcde")))},
        {"names": tuple("vwxyz"), "size": (7, 8), "table": table, "one": torch.tensor(3.0)},
    )
    first, second = split(tree, 2)
    pair, rest = second[0]["pair"], second[1]
    assert isinstance(pair, Pair) and pair.left.tolist() == [3, 4]
    assert (pair.right.image.tolist(), pair.right.caption) == ([6, 8], ["d", "e"])
    assert pair.right.scale == 2.0 and rest["size"] == (7, 8) and rest["names"] == ("y", "z")
    assert rest["table"] is table and rest["one"].item() == 3
    assert first[0]["pair"].right.caption == ["a", "b", "c"]


def test_packed_sequences_are_refused_because_their_rows_are_no_samples():
    with pytest.raises(ConfigurationError, match="PackedSequence.*pack them in the step"):
        split((pack_sequence([torch.ones(3), torch.ones(2)]), torch.ones(2)), 2)


# ---------------------------------------------------------------------- outputs


def test_outputs_are_gathered_by_their_structure():
    outputs = [
        {"rows": torch.full((n, 2), float(n)), "loss": torch.tensor(float(n)), "n": n,
         "pair": Pair(n > 1, None), "names": ["a"] * n, "more": OnlyByKeyword(x=torch.ones(n)),
         "word": "w", "batch": Batch(torch.ones(n), [n])}
        for n in (2, 1)
    ]  # fmt: skip
    whole = gather(outputs)
    assert whole["rows"].tolist() == [[2, 2], [2, 2], [1, 1]]
    assert whole["loss"].tolist() == [2, 1] and whole["n"].tolist() == [2, 1]
    assert whole["pair"].left.tolist() == [True, False] and whole["pair"].right is None
    assert whole["names"] == ["a"] * 3 and whole["word"] == ["w", "w"]
    assert type(whole["more"]) is OnlyByKeyword and whole["more"]["x"].tolist() == [1, 1, 1]
    assert whole["batch"].image.tolist() == [1, 1, 1]
    assert whole["batch"].caption[0].tolist() == [2, 1]
    assert gather([torch.tensor(4.0)]).tolist() == [4]


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([{"a": torch.ones(2, 3)}, {"a": torch.ones(2, 4)}], r"\['a'\].*\(2, 3\).*\(2, 4\)"),
        ([{"a": torch.ones(2)}, {"b": torch.ones(2)}], r"keys \['a'\].*keys \['b'\]"),
        ([torch.tensor(1.0), None], "a tensor.*replica 1 None"),
        ([None, torch.tensor(1.0)], "None.*replica 1 a tensor"),
        ([torch.tensor(1.0), torch.ones(1)], r"tensor \(\).*tensor \(1,\)"),
        ([(torch.ones(1),), torch.ones(1)], "a tuple of 1.*a tensor"),
        ([torch.ones(1), 3], "a tensor.*a int"),
    ],
)
def test_outputs_of_unlike_replicas_are_refused_with_what_each_returned(outputs, message):
    with pytest.raises(ConfigurationError, match=message):
        gather(outputs)


# ---------------------------------------------------------------------- a whole net's outputs


class Returns(nn.Module):
    """A net whose forward is a function."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.function(self, x)


@dataclasses.dataclass
class Out:
    loss: torch.Tensor
    logits: torch.Tensor


class PlainOut:
    def __init__(self, loss, logits):
        self.loss, self.logits = loss, logits


@pytest.mark.parametrize("kind", [dict, OnlyByKeyword, Out, PlainOut])
@pytest.mark.parametrize("samples", [5, 1])
def test_a_loss_that_a_net_computes_becomes_the_mean_over_samples(kind, samples):
    net = Returns(lambda self, x: kind(loss=self.layer(x).pow(2).mean(), logits=self.layer(x)))
    x = torch.randn(samples, 3)
    wrapped = replicas(net)
    found = wrapped("", x)
    loss, logits = (
        (found["loss"], found["logits"]) if isinstance(found, dict) else (found.loss, found.logits)
    )
    torch.testing.assert_close(loss, net.layer(x).pow(2).mean())
    torch.testing.assert_close(logits, net.layer(x))
    assert wrapped.weights == ([3, 2] if samples == 5 else [1]) and wrapped.module is net


def test_inputs_by_position_and_keyword_are_divided_together():
    class Net(nn.Module):
        def forward(self, left, mask, scale=1.0, right=None):
            return (left + right) * mask.sum() * scale

    left, right = torch.randn(5, 2), torch.randn(5, 2)
    found = replicas(Net(), 3)("", left, torch.ones(2), right=right, scale=0.5)
    torch.testing.assert_close(found, left + right)


# ---------------------------------------------------------------------- learning


class Norms(nn.Module):
    """Layers whose replicas could go wrong: shared, recurrent, weight-normed, with buffers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.again = self.first
        self.tied = nn.Linear(4, 6)
        self.tied.weight = self.first.weight
        self.rnn = nn.GRU(6, 5, batch_first=True)
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))
        self.register_buffer("calls", torch.zeros(()))

    def step(self, batch, batch_idx):
        x, y = batch
        self.calls = self.calls + 1
        hidden, _ = self.rnn(self.again(x) + self.tied(x))
        return nn.functional.cross_entropy(self.last(self.norm(hidden[:, -1])), y)


def test_gradients_and_buffers_are_those_of_plain_pytorch_on_the_parts():
    torch.manual_seed(0)
    net = Norms()
    plain = copy.deepcopy(net)
    x, y = torch.randn(7, 3, 4), torch.randint(3, (7,))
    wrapped = replicas(net, 3)
    losses = wrapped("step", (x, y), 0)
    weights = torch.tensor(wrapped.weights) / 7
    (losses * weights).sum().backward()

    kept = {}
    for index, rows in enumerate((slice(0, 3), slice(3, 5), slice(5, 7))):
        begun = {name: buffer.clone() for name, buffer in plain.named_buffers()}
        loss = plain.step((x[rows], y[rows]), 0)
        (loss * (rows.stop - rows.start) / 7).backward()
        kept = kept or {name: buffer.clone() for name, buffer in plain.named_buffers()}
        plain.load_state_dict(begun, strict=False)
        torch.testing.assert_close(losses[index], loss)
    for (name, mine), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)
    for name, buffer in net.named_buffers():
        torch.testing.assert_close(buffer, kept[name], msg=name)
    assert net.calls == 1 and "calls" in net._buffers


def modes_in(module, x):
    """The modes of the thread that calls this."""
    return {
        "thread": [threading.get_ident()], "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(), "training": module.training,
        "half": module.layer(x).dtype == torch.bfloat16,
        "shared": torch.is_autocast_cache_enabled(),
    }  # fmt: skip


def test_the_callers_modes_hold_in_the_replicas():
    wrapped = replicas(Returns(modes_in).eval())
    x = torch.randn(2, 3)
    found = wrapped("", x)
    assert found["grad"].all() and not found["half"].any() and not found["inference"].any()
    assert len(found["thread"][0]) == 2 and not found["training"].any()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = wrapped("", x)
    assert found["half"].all() and not found["grad"].any() and not found["shared"].any()
    with torch.inference_mode():
        assert wrapped("", x)["inference"].all()
    assert not wrapped("", x)["half"].any()


def test_the_callers_modes_are_carried_to_another_thread():
    net, x = Returns(modes_in), torch.randn(1, 3)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        modes = _callers_modes(share_casts=False)

    def call():
        with modes():
            inside = net(x)
        return inside, net(x)

    with ThreadPoolExecutor(1) as threads:
        inside, after = threads.submit(call).result(20)
    assert inside["inference"] and inside["half"] and not inside["shared"] and not inside["grad"]
    assert after["grad"] and after["shared"] and not after["inference"] and not after["half"]


def test_replicas_on_the_cpu_draw_random_numbers_in_their_order():
    net = nn.Dropout()
    torch.manual_seed(3)
    found = replicas(net, 3)("", torch.ones(7, 5))
    torch.manual_seed(3)
    assert torch.equal(found, torch.cat([net(part) for part in torch.ones(7, 5).split((3, 2, 2))]))


# ---------------------------------------------------------------------- what goes wrong


def test_a_replicas_error_comes_as_it_was_raised_and_says_which_replica():
    def fail(self, x):
        if x[0, 0] == 1:
            raise KeyError("mine")
        return x

    x = torch.zeros(5, 3)
    x[3:] = 1
    with pytest.raises(KeyError, match="mine") as caught:
        replicas(Returns(fail))("", x)
    shown = "".join(traceback.format_exception(caught.value))
    assert "in fail" in shown
    if hasattr(caught.value, "__notes__"):
        assert "replica 1 (of 0 to 1) on cpu, with 2 of the batch's 5 samples" in shown


def test_state_that_a_step_sets_is_lost_with_one_warning_for_each_attribute():
    def remember(self, x):
        self.hidden = x.sum()
        self._private = 1
        return x

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Returns(remember, hidden=None)

        def step(self, batch, batch_idx):
            self.count = batch_idx
            return self.inner(batch)

    net, warned = Outer(), set()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        replicas(net, 1, warned=warned)("step", torch.ones(4, 3), 7)  # the first replica's, too
        replicas(net, 2, warned=warned)("step", torch.ones(4, 3), 8)
    first, second = sorted(str(warning.message) for warning in seen)
    assert first.startswith("step sets Outer.count, which is lost: under strategy='dp'")
    assert "Returns.hidden" in second and seen[0].filename == __file__
    assert net.inner.hidden is None and not hasattr(net, "count")


def test_compiled_modules_are_refused():
    net = nn.Sequential(nn.Linear(3, 3))
    net[0].compile()
    with pytest.raises(ConfigurationError, match=r"submodule '0' is compiled.*jit_compile=False"):
        replicas(net)
    with pytest.raises(ConfigurationError, match="is compiled by torch.compile"):
        replicas(nn.Sequential(torch.compile(nn.Linear(3, 3))))


# ---------------------------------------------------------------------- hooks and metrics


def test_replicas_are_told_their_device_and_samples_and_the_module_is_told_of_them():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.size = self.own_size  # a method kept as an attribute is the replica's, too

        def _begin_replica(self, device, samples):
            self.told = (device, samples)

        def own_size(self):
            return self.told[1]

        def _end_replicas(self, modules):
            self.seen = [(module.told, module is self) for module in modules]

        def step(self, batch, batch_idx):
            return batch * self.size()

    net = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = replicas(net)("step", torch.ones(3), 0)
    assert found.tolist() == [2, 2, 1]
    assert net.seen == [((CPU, 2), False), ((CPU, 1), False)] and not hasattr(net, "told")


def test_metrics_count_what_all_replicas_saw():
    torchmetrics = pytest.importorskip("torchmetrics")
    classes = torchmetrics.classification

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = classes.MulticlassAccuracy(3)
            self.curve = classes.BinaryAUROC()
            self.mean = torchmetrics.MeanMetric()
            self.several = torchmetrics.MetricCollection(
                [classes.MulticlassPrecision(3), classes.MulticlassRecall(3)]
            )

        def step(self, batch, batch_idx):
            x, y = batch
            value = self.one(x, y)
            self.curve.update(x[:, 0], (y > 0).long())
            self.mean.update(x.mean(), weight=len(x))
            self.several.update(x, y)
            return value

    torch.manual_seed(1)
    batches = [(torch.rand(n, 3), torch.randint(3, (n,))) for n in (7, 5, 2, 1)]
    net, plain = Net(), Net()
    wrapped = replicas(net, 3)
    for index, (x, y) in enumerate(batches):
        values = wrapped("step", (x, y), index)
        plain.step((x, y), index)
        expected = [(px.argmax(1) == py).float().mean() for px, py in
                    zip(torch.tensor_split(x, len(values)), torch.tensor_split(y, len(values)),
                        strict=True)]  # fmt: skip
        assert len(values) == len(expected)
        if index == 1:  # a value asked for between the steps is no obstacle
            torch.testing.assert_close(net.several.compute(), plain.several.compute())
    for name in ("one", "curve", "mean", "several"):
        mine, theirs = getattr(net, name).compute(), getattr(plain, name).compute()
        torch.testing.assert_close(mine, theirs, msg=name)
    rows = torch.cat(net.curve.preds)
    torch.testing.assert_close(rows, torch.cat([x[:, 0] for x, _ in batches]))


def test_metrics_whose_states_can_not_be_merged_count_the_same_updates():
    torchmetrics = pytest.importorskip("torchmetrics")

    class Mine(torchmetrics.Metric):  # full_state_update is unset, as in most people's own
        def __init__(self):
            super().__init__()
            self.add_state("top", torch.tensor(0.0), dist_reduce_fx=None)
            self.add_state("rows", torch.tensor(0), dist_reduce_fx="sum")

        def update(self, x, scale=1):
            self.top = torch.maximum(self.top, x.max() * scale)
            self.rows += len(x)

        def compute(self):
            return {"top": self.top, "rows": self.rows}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.mine, self.pearson = Mine(), torchmetrics.PearsonCorrCoef()
            self.range = torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())  # one in another

        def step(self, batch, batch_idx):
            self.pearson.update(batch, batch.square())
            self.range.update(batch)
            return self.mine(batch, scale=2)["rows"]

    torch.manual_seed(5)
    net, plain = Net(), Net()
    wrapped = replicas(net, 3)
    for n in (7, 2, 4):
        x = torch.rand(n)
        assert wrapped("step", x, 0).tolist() == part_sizes(n, 3)
        for rows in split(x, 3):
            plain.step(rows, 0)
    for name in ("mine", "pearson", "range"):
        mine, theirs = getattr(net, name), getattr(plain, name)
        torch.testing.assert_close(mine.compute(), theirs.compute(), msg=name)
        assert mine._update_count == theirs._update_count


def as_torch_replicates(network, devices, detach):
    """What `nn.parallel.replicate` does on GPUs, on a CPU that is called by several names."""
    copies = []
    for index in range(len(devices)):
        made = {id(module): module._replicate_for_data_parallel() for module in network.modules()}
        for module in network.modules():
            copied = made[id(module)]
            for name, child in module._modules.items():
                copied._modules[name] = made[id(child)]
            for name, parameter in module._parameters.items():
                whole = parameter.view_as(parameter)
                setattr(copied, name, whole.detach() if detach else whole)
            if index:
                copied._buffers = {name: b.clone() for name, b in module._buffers.items()}
        copies.append(made[id(network)])
    return copies


def test_replicas_on_several_devices_keep_buffers_metrics_and_gradients(monkeypatch):
    torchmetrics = pytest.importorskip("torchmetrics")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 2)
            self.inner = nn.ModuleDict({"mean": torchmetrics.MeanMetric()})
            self.register_buffer("calls", torch.zeros(()))

        def step(self, batch, batch_idx):
            self.calls = self.calls + 1
            self.inner["mean"].update(batch)
            return self.layer(self.norm(batch))

    monkeypatch.setattr(nn.parallel, "replicate", as_torch_replicates)
    net = Net()
    plain = copy.deepcopy(net)
    x = torch.randn(5, 4)
    wrapped = Replicas(net, (torch.device("cpu", 0), torch.device("cpu", 1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            wrapped("step", x, 0).pow(2).mean().backward()
    for _ in range(2):
        second = plain.layer(copy.deepcopy(plain.norm)(x[3:]))
        first = plain.step(x[:3], 0)
        plain.inner["mean"].update(x[3:])
        torch.cat([first, second]).pow(2).mean().backward()
    torch.testing.assert_close(net.layer.weight.grad, plain.layer.weight.grad)
    assert net.calls == 2 and list(net.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(net.norm.running_mean, plain.norm.running_mean)
    torch.testing.assert_close(net.inner["mean"].compute(), plain.inner["mean"].compute())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_replicas_on_several_gpus_give_one_gpus_gradients():
    devices = (torch.device("cuda", 0), torch.device("cuda", 1))
    net = Norms()
    net.norm = nn.Identity()  # whose parts would have statistics of their own
    net.to(devices[0])
    plain = copy.deepcopy(net)
    x, y = torch.randn(5, 3, 4).to(devices[0]), torch.randint(3, (5,)).to(devices[0])
    losses = Replicas(net, devices)("step", (x, y), 0)
    (losses * torch.tensor([0.6, 0.4], device=devices[0])).sum().backward()
    plain.step((x, y), 0).backward()
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert net.calls == 1
