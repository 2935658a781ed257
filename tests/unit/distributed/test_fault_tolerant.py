"""Replicas that come and go, by a fake of torchft; tests/engines runs the real one."""

import importlib.util
import sys
import types

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit.data.parts import part_of
from fitkit.data.sources import make_source
from fitkit.distributed.strategies.fault_tolerant import ReplicaGroup
from fitkit.strategies import FaultTolerantStrategy


class Manager:
    """One of two replicas; the other's sums are given. Calls are made in torchft's order."""

    others = None  # what the other replica adds to the exchange
    state = None  # what a replica that is behind gets
    failure = None

    def __init__(self, load_state_dict, state_dict, **options):
        self.load, self.give, self.options = load_state_dict, state_dict, options
        self.calls = []
        type(self).last = self

    def start_quorum(self):
        self.calls.append("quorum")

    def allreduce(self, tensor, reduce_op):
        self.calls.append("exchange")
        assert reduce_op == torch.distributed.ReduceOp.SUM
        if self.state is not None:
            tensor.zero_()
        if self.others is not None:
            tensor += self.others
        return types.SimpleNamespace(wait=lambda: True)

    def errored(self):
        return self.failure

    def should_commit(self):
        self.calls.append("commit")
        state, type(self).state = self.state, None
        if state is not None:
            self.load(state)
        return self.failure is None

    def shutdown(self, wait):
        self.calls.append("end")


@pytest.fixture
def manager(monkeypatch):
    fake = types.ModuleType("torchft")
    group = lambda timeout: types.SimpleNamespace(shutdown=lambda: None)  # noqa: E731
    fake.ProcessGroupGloo = fake.ProcessGroupNCCL = group
    fake.Manager = type("Manager", (Manager,), {})
    monkeypatch.setitem(sys.modules, "torchft", fake)
    return fake.Manager


def group_of(**options):
    limits = {"timeout": None, "patience": None, "device": torch.device("cpu")}
    return ReplicaGroup(0, 2, "http://there:1", 1, **limits, give=dict, take=print, **options)


def test_gradients_are_averaged_over_those_that_give_some(manager):
    used, unused, net = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Module()
    group = group_of()
    used.grad = torch.tensor([1.0, 2.0])
    manager.others = torch.tensor([3.0, 4.0, 0.0, 1.0, 0.0, 1.0])  # gradients, who used which, one
    assert group.average([used, unused], net, contributes=True) == 2
    assert used.grad.tolist() == [4.0, 6.0] and unused.grad is None  # each gave its samples' part
    manager.others = None
    used.grad = torch.tensor([1.0, 2.0])
    assert group.average([used, unused], net, contributes=True) == 1
    assert used.grad.tolist() == [2.0, 4.0]  # of half of the samples, now all
    manager.others = torch.tensor([3.0, 4.0, 5.0, 1.0, 1.0, 1.0])
    assert group.average([used, unused], net, contributes=False) == 1
    assert used.grad.tolist() == [6.0, 8.0] and unused.grad.tolist() == [10.0]


def test_running_statistics_are_averaged_and_a_failed_exchange_changes_nothing(manager):
    net = nn.BatchNorm1d(1, affine=False)
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    net.running_mean.fill_(2.0)
    group = group_of()
    manager.others = torch.tensor([1.0, 6.0, 3.0, 1.0, 1.0])
    group.average([parameter], net, contributes=True)
    assert net.running_mean.tolist() == [4.0] and net.running_var.tolist() == [2.0]
    manager.failure = types.SimpleNamespace(original_exception=OSError("it left"))
    assert group.average([parameter], net, contributes=True) == 0
    assert net.running_mean.tolist() == [4.0]
    with pytest.warns(UserWarning, match="An update is left out.*it left"):
        assert not group.commits()


def replicas(monkeypatch, number=0, count=2):
    monkeypatch.setenv("REPLICA_GROUP_ID", str(number))
    monkeypatch.setenv("NUM_REPLICA_GROUPS", str(count))


def compiled(**options):
    model = fitkit.Model(nn.Linear(1, 1, bias=False))
    model.compile(torch.optim.SGD(model.parameters(), 0.1), "mse", accelerator="cpu",
                  strategy=FaultTolerantStrategy("http://there:1"), **options)  # fmt: skip
    return model


def test_one_that_joins_goes_on_where_the_others_are_with_their_gradients(manager, monkeypatch):
    replicas(monkeypatch)
    x, y = torch.ones(16, 1), torch.zeros(16, 1)

    class Catch(fitkit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            steps.append((self.model.current_epoch, batch))

    steps, told = [], []
    first = compiled()
    with torch.no_grad():
        first.net.weight.fill_(1.0)

    def tell(batch, logs=None):  # what a replica gives at the update of its second epoch's batch 1
        if first.current_epoch == 1 and batch == 1:
            strategy = first._fitkit.compilation.strategy
            strategy._attempts -= 1  # as in the update that has just been made
            told.append(torch.utils._pytree.tree_map(
                lambda v: v.clone() if isinstance(v, torch.Tensor) else v, strategy._give()))

    first.fit(x, y, batch_size=2, epochs=3, shuffle=False, verbose=0,
              callbacks=fitkit.callbacks.LambdaCallback(on_batch_end=tell))
    (weight,) = (value.item() for value in told[0]["training"]["weights"].values())
    second = compiled()
    manager.state = told[0]
    manager.others = torch.tensor([0.25, 1.0, 1.0])  # one replica's gradient, used, one

    def alone(batch, logs=None):
        manager.others = None

    second.fit(x, y, batch_size=2, epochs=3, shuffle=False, verbose=0,
               callbacks=[Catch(), fitkit.callbacks.LambdaCallback(on_batch_begin=alone)])
    assert steps == [(1, 2), (1, 3), *((2, batch) for batch in range(4))]
    # Joined by the others' gradient (twice a half); then each step is w -= 0.1 * 2 * w.
    expected = (weight - 0.1 * 0.5) * 0.8**6
    assert second.net.weight.item() == pytest.approx(expected, abs=1e-6)
    assert second.history.epoch == [0, 1, 2] and second._fitkit.fit_state.updates == 6 + 7


def test_a_replica_that_fell_behind_says_so(manager, monkeypatch):
    replicas(monkeypatch)
    model = compiled()
    strategy = model._fitkit.compilation.strategy

    def late(batch, logs=None):
        manager.state = {"attempts": 7, "trains": True, "training": None}

    with pytest.raises(fitkit.WorkerError, match="seen 1 updates, the others 7.*Start it again"):
        model.fit(torch.ones(8, 1), torch.ones(8, 1), batch_size=2, verbose=0,
                  callbacks=fitkit.callbacks.LambdaCallback(on_batch_end=late))
    assert strategy._group is None and manager.last.calls[-1] == "end"


def test_parts_are_one_order_dealt_out_and_joined_give_all():
    rows = torch.arange(23)
    loader = DataLoader(TensorDataset(rows), batch_size=3, shuffle=True)
    arrays = [make_source(rows.float()[:, None], rows, batch_size=3, shuffle=True)
              for _ in range(2)]
    arrays[0].seed = arrays[1].seed = 5
    loaders = [make_source(loader), make_source(loader)]
    for sources in (arrays, loaders):
        parts = [part_of(source, number, 2) for number, source in enumerate(sources)]
        torch.randn(3)  # whatever else was drawn
        for number in (0, 1):
            steps = [list(part.batches(number)) for part in parts]
            assert [s.total for s in steps[0]] == [6, 6, 6, 5] == [s.total for s in steps[1]]
            seen = torch.cat([s.batch[-1][:s.count] for part in steps for s in part])
            assert seen.sort().values.tolist() == list(range(23))
            rest = list(parts[1].batches(number, skip=6))
            assert [s.batch[-1].tolist() for s in rest] == [steps[1][3].batch[-1].tolist()]
    orders = [torch.cat([s.batch[-1] for s in parts[0].batches(number)]) for number in (0, 1)]
    assert orders[0].tolist() != orders[1].tolist()


def test_a_stream_gives_each_part_every_nth_batch_and_no_step_that_isnt_full():
    stream = [(torch.full((2, 1), float(i)), torch.zeros(2, 1)) for i in range(5)]
    parts = [part_of(make_source(stream), number, 2) for number in (0, 1)]
    found = [[share.batch[0][0].item() for share in part.batches(0)] for part in parts]
    assert found == [[0, 2], [1, 3]]


@pytest.mark.parametrize(("number", "count"), [("2", "2"), ("", "2"), ("0", ""), ("a", "2")])
def test_variables_that_make_no_sense_are_refused(manager, monkeypatch, number, count):
    replicas(monkeypatch, number, count)
    with pytest.raises(fitkit.ConfigurationError, match="REPLICA_GROUP_ID"):
        compiled()


def test_what_replicas_cant_do_is_refused_before_anything_runs(manager, monkeypatch):
    replicas(monkeypatch)
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    model = fitkit.Model(nn.Linear(1, 1))
    options = {"accelerator": "cpu", "strategy": "fault_tolerant"}
    with pytest.raises(fitkit.ConfigurationError, match="where the lighthouse is"):
        model.compile("sgd", "mse", **options)
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://there:1")
    with pytest.raises(fitkit.ConfigurationError, match="one device in a process"):
        model.compile("sgd", "mse", devices=2, **options)
    with pytest.raises(fitkit.ConfigurationError, match="unscaled"):
        model.compile("sgd", "mse", precision="16-mixed", **options)
    model.compile("sgd", "mse", sync_batchnorm=True, **options)
    with pytest.raises(fitkit.ConfigurationError, match="sync_batchnorm"):
        model.fit(torch.ones(4, 1), torch.ones(4, 1), verbose=0)
    model = fitkit.Model(nn.Linear(1, 1))
    model.compile(torch.optim.LBFGS(model.parameters()), "mse", **options)
    with pytest.raises(fitkit.ConfigurationError, match="LBFGS"):
        model.fit(torch.ones(4, 1), torch.ones(4, 1), verbose=0)


def test_without_the_variables_it_is_an_ordinary_training(manager, monkeypatch):
    for name in ("REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS"):
        monkeypatch.delenv(name, raising=False)
    model = compiled()
    model.fit(torch.ones(4, 1), torch.ones(4, 1), verbose=0)
    assert not hasattr(manager, "last") and model.effective_batch_size == 32


@pytest.mark.skipif(importlib.util.find_spec("torchft") is not None, reason="torchft is installed")
def test_without_the_package_an_error_names_the_extra():
    with pytest.raises(ImportError, match=r"pip install 'fitkit\[fault-tolerant\]'"):
        compiled()


def test_a_file_from_amid_an_epoch_keeps_its_place_under_another_strategy(
    manager, monkeypatch, tmp_path
):
    replicas(monkeypatch)
    x, y = torch.arange(16.0)[:, None] / 16, torch.zeros(16, 1)
    seen = []

    class Net(fitkit.Model):
        def training_step(self, batch, batch_idx):
            seen.extend((batch[0][:, 0] * 16).int().tolist())
            return super().training_step(batch, batch_idx)

    def made(**options):
        model = Net(nn.Linear(1, 1, bias=False))
        model.compile("sgd", "mse", accelerator="cpu", **options)
        return model

    half = made(strategy=FaultTolerantStrategy("http://there:1"))
    half.fit(x, y, batch_size=2, shuffle=False, verbose=0,
             callbacks=fitkit.callbacks.LambdaCallback(
                 on_batch_end=lambda batch, logs: batch == 1 and half.save(tmp_path / "2.h5")))
    assert seen == [0, 1, 4, 5, 8, 9, 12, 13]  # of batches in turn, every other
    seen.clear()
    made(devices=1).fit(x, y, batch_size=2, shuffle=False, verbose=0,
                        resume_from=tmp_path / "2.h5")
    assert seen == [8, 9, 10, 11, 12, 13, 14, 15]
