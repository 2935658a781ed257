"""Training on XLA devices by an adapter whose devices are the CPU; no TPU was ever there."""

import functools
import importlib.util
import os
import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import fitkit
from fitkit.distributed.devices import Machine, choose_kind, parse_devices
from fitkit.distributed.resolve import resolve_strategy
from fitkit.distributed.world import World
from fitkit.extras.launchers.workers import end_workers
from fitkit.extras.xla_adapters import TorchTPU, TorchXLA
from fitkit.strategies import XLAAdapter, XLAStrategy
from tests.nets import classes_in_turn, dense
from tests.reference import assert_same_weights, plain_loop, slices

ARE_ABSENT = all(importlib.util.find_spec(name) is None for name in ("torch_tpu", "torch_xla"))


class OnCPU:
    """Devices that are the CPU; gloo stands in for their own network."""

    backend = "gloo"

    def __init__(self, devices=2, reached=None):
        self.devices, self.reached = devices, reached
        self.launched, self.steps, self.sums = [], 0, 0

    def count(self):
        return self.devices

    def launch(self, ranks):
        self.launched.append(ranks)

    def device(self, world, local_ranks):
        assert 0 <= world.local_rank < local_ranks
        return torch.device("cpu")

    def world_size(self):
        return self.reached or dist.get_world_size()

    def step(self):
        self.steps += 1

    def sum(self, tensors):
        self.sums += 1
        for tensor in tensors:
            dist.all_reduce(tensor)


@pytest.fixture(autouse=True, scope="module")
def no_workers_left():
    yield
    end_workers()


X, Y = classes_in_turn(52, 6, seed=1)


def net():
    return dense(6, 33, 3)


def compiled(ranks, adapter=None, **options):
    model = fitkit.Model(net())
    model.compile(
        "adam",
        "cross_entropy",
        learning_rate=0.01,
        accelerator="tpu",
        devices=ranks,
        strategy=XLAStrategy(adapter or OnCPU()),
        gradient_clip_val=0.5,
        **options,
    )
    return model


def fit(model, ranks, **options):
    return model.fit(X, Y, batch_size=12 // ranks, shuffle=False, verbose=0, **options)


def plainly(epochs, group=1):
    module = net()
    adam = torch.optim.Adam(module.parameters(), 0.01)
    plain_loop(module, adam, slices(X, Y, 12 * group), epochs, clip=0.5)
    return module


same = functools.partial(assert_same_weights, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_trains_evaluates_predicts_saves_and_resumes_as_plain_pytorch_does(ranks, tmp_path):
    adapter = OnCPU()
    model, reference = compiled(ranks, adapter), plainly(2)
    save = fitkit.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: model.save(tmp_path / f"{epoch}.h5")
    )
    history = fit(model, ranks, epochs=2, callbacks=save, validation_data=(X[:37], Y[:37])).history
    same(model.net, reference)
    assert model.world_size == ranks and adapter.launched == [ranks]
    # Ten updates, each one exchange; and the batches of two validations.
    assert adapter.sums == (10 if ranks == 2 else 0) and adapter.steps >= 10 + 2
    with torch.no_grad():
        outputs = reference(X[:37])
    expected = F.cross_entropy(outputs, Y[:37]).item()
    assert history["val_loss"][-1] == pytest.approx(expected, abs=1e-5)
    assert model.evaluate(X[:37], Y[:37], verbose=0) == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(
        torch.tensor(model.predict(X[:37], verbose=0)), outputs, rtol=0, atol=1e-4
    )
    for other in (1, ranks):
        resumed = compiled(other)
        fit(resumed, other, epochs=2, resume_from=tmp_path / "0.h5")
        same(resumed.net, reference)


def test_accumulated_groups_and_several_optimizers_are_averaged_once():
    adapter = OnCPU()
    model = compiled(2, adapter, accumulate_grad_batches=3)
    fit(model, 2, epochs=2)
    same(model.net, plainly(2, group=3))
    assert adapter.sums == 4  # two groups an epoch, of which the second is short

    class Two(fitkit.Model):
        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.net[0], self.net[2])]

        def training_step(self, batch, batch_idx, optimizer_idx):
            x, y = batch
            return F.cross_entropy(self(x), y)

    both, reference = Two(net()), net()
    both.compile(accelerator="tpu", devices=2, strategy=XLAStrategy(OnCPU()))
    both.fit(X[:48], Y[:48], batch_size=6, shuffle=False, verbose=0)
    for rows in torch.arange(48).split(12):
        for part in (reference[0], reference[2]):
            reference.zero_grad()
            F.cross_entropy(reference(X[rows]), Y[rows]).backward()
            torch.optim.SGD(part.parameters(), 0.1).step()
    same(both.net, reference)


def test_fewer_processes_within_reach_than_ranks_end_the_call():
    model = compiled(2, OnCPU(reached=1))
    with pytest.raises(fitkit.WorkerError, match="2 ranks, but .* reach 1 processes"):
        fit(model, 2)
    assert not torch.distributed.is_initialized()


def found(devices="auto", accelerator="auto", strategy="auto", **options):
    machine = options.pop("machine", Machine())
    return resolve_strategy(
        devices, accelerator, strategy, "32-true", machine=machine, environment={}, **options
    )


def test_words_lead_to_xla_devices_where_there_are_any(monkeypatch):
    monkeypatch.setattr("fitkit.extras.xla.adapter_of", lambda asked: OnCPU(4))
    with_tpu = Machine(xla_count=4)
    assert choose_kind("auto", with_tpu) == "xla" == choose_kind("TPU", with_tpu)
    assert choose_kind("auto", Machine(2, False, 4)) == "cuda"
    assert choose_kind("auto", Machine(xla_count=0)) == "cpu"
    assert parse_devices("auto", "xla", with_tpu) == (0, 1, 2, 3)
    for words in (("auto", "tpu"), ("auto", "auto"), (4, "xla"), (1, "tpu")):
        strategy = found(*words, machine=with_tpu)
        assert isinstance(strategy, XLAStrategy) and len(strategy.devices) == (words[0] == 1 or 4)
    assert isinstance(found(2, "auto", "tpu"), XLAStrategy)


@pytest.mark.parametrize(("words", "message"), [
    ({"accelerator": "tpu", "devices": 9}, "asks for 9 devices, but 4"),
    ({"accelerator": "tpu", "devices": [2, 3]}, "Write devices=2"),
    ({"accelerator": "tpu", "strategy": "ddp", "devices": 2}, "Write strategy='xla'"),
    ({"accelerator": "cpu", "strategy": "xla"}, "Write accelerator='tpu'"),
])  # fmt: skip
def test_words_that_dont_go_together_are_refused(words, message, monkeypatch):
    monkeypatch.setattr("fitkit.extras.xla.adapter_of", lambda asked: OnCPU(4))
    with pytest.raises(fitkit.ConfigurationError, match=message):
        found(machine=Machine(xla_count=4), **words)


def test_other_precisions_and_things_that_are_no_adapter_are_refused():
    with pytest.raises(fitkit.ConfigurationError, match="16-mixed"):
        compiled(1, precision="16-mixed")
    with pytest.raises(TypeError, match="XLAAdapter"):
        XLAStrategy(3)
    assert isinstance(OnCPU(), XLAAdapter)


@pytest.mark.skipif(not ARE_ABSENT, reason="a package for XLA devices is installed")
@pytest.mark.parametrize("words", [{"accelerator": "tpu"}, {"accelerator": "xla", "devices": 8},
                                   {"strategy": "xla"}, {"strategy": "tpu"},
                                   {"strategy": XLAStrategy("torch_xla")}])  # fmt: skip
def test_without_the_packages_an_error_names_the_extra(words):
    with pytest.raises(ImportError, match=r"pip install 'torch-fitkit\[tpu\]'"):
        fitkit.Model(nn.Linear(2, 2)).compile("sgd", "mse", **words)


def module(monkeypatch, name, **attributes):
    made = types.ModuleType(name)
    vars(made).update(attributes)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def test_torch_xla_is_called_as_its_source_says(monkeypatch):
    calls = []
    module(
        monkeypatch,
        "torch_xla",
        device=lambda: torch.device("cpu"),
        sync=lambda: calls.append("sync"),
    )
    module(monkeypatch, "torch_xla._internal.tpu", num_available_chips=lambda: 4)
    module(
        monkeypatch,
        "torch_xla._internal.pjrt",
        initialize_multiprocess=lambda *ranks: calls.append(ranks),
    )
    module(monkeypatch, "torch_xla.runtime", world_size=lambda: 4)
    module(
        monkeypatch,
        "torch_xla.core.xla_model",
        REDUCE_SUM="sum",
        all_reduce=lambda kind, tensors: calls.append((kind, len(tensors))),
    )
    adapter = TorchXLA()
    assert isinstance(adapter, XLAAdapter) and adapter.count() == 4 == adapter.world_size()
    adapter.launch(4)
    assert adapter.device(World(), 1) == torch.device("cpu") and calls == []
    adapter.device(World(1, 4, 1), 4)
    adapter.step()
    adapter.sum([torch.zeros(1), torch.zeros(1)])
    assert calls == [(1, 4), "sync", ("sum", 2)]
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert adapter.count() == 1


def test_torch_tpu_is_called_as_its_source_says(monkeypatch):
    seen = []
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    tpu = types.SimpleNamespace(
        distributed=types.SimpleNamespace(
            set_tpu_launch_env=lambda nproc_per_node: seen.append(nproc_per_node)
        )
    )
    found = types.SimpleNamespace(type="tpu")
    torchs = types.SimpleNamespace(
        current_accelerator=lambda: found,
        device_count=lambda: 4,
        current_device_index=lambda: seen.append([os.environ[name] for name in names]) or 1,
    )
    module(monkeypatch, "torch_tpu")
    monkeypatch.setattr(torch, "tpu", tpu, raising=False)
    monkeypatch.setattr(torch, "accelerator", torchs)
    monkeypatch.setattr(torch, "device", lambda kind, index: (kind, index))
    adapter = TorchTPU()
    assert isinstance(adapter, XLAAdapter) and adapter.count() == 4
    adapter.launch(1)
    adapter.launch(4)
    assert adapter.device(World(5, 8, 1, 1, 2), 4) == ("tpu", 1)
    found.type = "cuda"
    assert adapter.count() == 0
    assert seen == [4, ["5", "8", "1", "4"]] and not any(name in os.environ for name in names)
