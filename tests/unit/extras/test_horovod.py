"""Horovod's engine by a fake of the calls that are used; tests/engines runs the real one."""

import importlib.util
import sys
import types

import pytest
import torch
from torch import nn

import fitkit
from fitkit.distributed.world import World
from fitkit.extras.horovod import (
    HorovodGradients,
    broadcast_state,
    join_horovod,
)
from fitkit.strategies import HorovodStrategy


class DistributedOptimizer:
    """Exchanges each gradient once after so many backward passes, as horovod.torch 0.28.1 does.

    The fake's exchange doubles a gradient, so that one that is exchanged twice or not shows.
    """

    def __init__(self, optimizer, named_parameters=None, compression=None):
        self.compression, self.passes = compression, 1
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self._handles, self._grad_accs = {}, []
        self.delay = dict.fromkeys(self.params, 1)
        for parameter in self.params:
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(lambda *_, p=parameter: self.count(p))
            self._grad_accs.append(node)

    def set_backward_passes_per_step(self, passes):
        self.passes = passes
        self.delay = dict.fromkeys(self.params, passes)

    def count(self, parameter):
        assert not self._handles.get(parameter), "Gradients were computed more than ..."
        assert self.delay[parameter] > 0
        self.delay[parameter] -= 1
        self._handles[parameter] = self.delay[parameter] == 0

    def synchronize(self):
        for parameter in self.params:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.mul_(2)
            self.delay[parameter] = self.passes
        self._handles.clear()


class Fake(types.ModuleType):
    Compression = types.SimpleNamespace(fp16="half", none="none")
    DistributedOptimizer = DistributedOptimizer
    place = (0, 2)
    begun = 0

    def is_initialized(self):
        return self.begun > 0

    def init(self):
        self.begun += 1

    def rank(self):
        return self.place[0]

    def size(self):
        return self.place[1]

    def broadcast_parameters(self, params, root_rank):
        assert root_rank == 0
        for tensor in params.values():
            tensor.fill_(3)

    def broadcast_object(self, obj, root_rank=0, name=None):
        assert root_rank == 0 and name  # without one the object's type would be it
        return obj if self.rank() == 0 else self.told


@pytest.fixture
def hvd(monkeypatch):
    fake = Fake("horovod.torch")
    parent = types.ModuleType("horovod")
    parent.torch = fake
    monkeypatch.setitem(sys.modules, "horovod", parent)
    monkeypatch.setitem(sys.modules, "horovod.torch", fake)
    return fake


def gradients_of(hvd, net, compression=None):
    return HorovodGradients(hvd, [torch.optim.SGD(net.parameters(), 0.1)], compression)


def test_each_group_of_batches_is_exchanged_once_at_its_end_or_where_it_is_cut(hvd):
    net = nn.Linear(2, 1)
    gradients = gradients_of(hvd, net)
    x = torch.ones(1, 2)
    gradients.backward(net(x).sum())
    assert net.weight.grad.tolist() == [[2.0, 2.0]]
    net.zero_grad()
    for _ in range(2):
        with gradients.accumulating():
            gradients.backward(net(x).sum())
    assert net.weight.grad.tolist() == [[2.0, 2.0]]  # two batches, here alone
    gradients.backward(net(x).sum())
    assert net.weight.grad.tolist() == [[6.0, 6.0]]
    net.zero_grad()
    with gradients.accumulating():
        gradients.backward(net(x).sum())
    gradients.average_gradients([])
    assert net.weight.grad.tolist() == [[2.0, 2.0]]


def test_hooks_leave_with_the_training_and_frozen_parameters_take_no_part(hvd):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    net[0].requires_grad_(False)
    gradients = gradients_of(hvd, net, "fp16")
    exchange = gradients._exchange
    assert exchange.compression == "half" and exchange.params == list(net[1].parameters())
    gradients.end(wanted=True)
    del gradients
    net(torch.ones(1, 2)).sum().backward()
    assert not exchange._handles


def test_other_ranks_take_rank_zeros_numbers_and_states(hvd):
    nets = [nn.Linear(2, 1) for _ in range(2)]
    first, second = (torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for net in nets)
    nets[0](torch.ones(1, 2)).sum().backward()
    first.step()
    hvd.told = [first.state_dict()]
    hvd.place = (1, 2)
    broadcast_state(hvd, nets[1], [second])
    assert nets[1].weight.tolist() == [[3.0, 3.0]]
    assert second.state_dict()["state"][0]["momentum_buffer"].tolist() == [[1.0, 1.0]]


def test_the_engine_is_joined_once_and_its_ranks_must_be_the_launchers(hvd):
    join_horovod(World(0, 2))
    join_horovod(World(0, 2))
    assert hvd.begun == 1
    with pytest.raises(fitkit.ConfigurationError, match="rank 0 of 2, .* rank 1 of 2"):
        join_horovod(World(1, 2))


@pytest.mark.skipif(importlib.util.find_spec("horovod") is not None, reason="horovod is installed")
def test_without_the_package_an_error_names_the_extra_but_its_name_alone_needs_none():
    model = fitkit.Model(nn.Linear(2, 2))
    options = {"accelerator": "cpu", "devices": 1}
    with pytest.raises(ImportError, match=r"pip install 'torch-fitkit\[horovod\]'"):
        model.compile("sgd", "mse", strategy=HorovodStrategy(engine="horovod"), **options)
    model.compile("sgd", "mse", strategy="horovod", **options)
    assert model.fit(torch.ones(4, 2), torch.ones(4, 2), verbose=0).history["loss"]


def test_the_engine_needs_its_launcher(hvd):
    model = fitkit.Model(nn.Linear(2, 2))
    with pytest.raises(fitkit.ConfigurationError, match="horovodrun -np 2"):
        model.compile(
            "sgd", "mse", accelerator="cpu", devices=2, strategy=HorovodStrategy(engine="horovod")
        )


@pytest.mark.parametrize("options", [{"engine": "mpi"}, {"compression": "int8"}])
def test_other_engines_and_compressions_are_refused(options):
    with pytest.raises(fitkit.ConfigurationError, match=next(iter(options))):
        HorovodStrategy(**options)
