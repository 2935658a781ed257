"""Batch normalisation over real gloo processes against one process on the joined batch.

Run as a script, this file is one rank: it computes all cases and writes what came out.
"""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fitkit.errors import ConfigurationError
from fitkit.extras.sync_batchnorm import synchronized
from tests.limits import patience

pytestmark = pytest.mark.timeout(90)

LAYERS = {
    "1d": lambda: nn.BatchNorm1d(4),
    "1d of sequences": lambda: nn.BatchNorm1d(4, momentum=None),
    "2d": lambda: nn.BatchNorm2d(4, momentum=0.3),
    "3d": lambda: nn.BatchNorm3d(4, eps=0.1),
    "without weights": lambda: nn.BatchNorm2d(4, affine=False),
    "without running values": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "far from 0": lambda: nn.BatchNorm1d(4),
    "double": lambda: nn.BatchNorm1d(4).double(),
}
SHAPES = {
    "1d of sequences": (4, 5),
    "2d": (4, 3, 2),
    "3d": (4, 2, 3, 2),
    "without weights": (4, 2, 2),
}
SPLITS = {  # rows of each rank; 0 is a batch without rows
    2: [(7, 3), (1, 9), (10, 0)],
    3: [(5, 3, 2), (1, 1, 8), (6, 0, 4)],
}


def layer_of(name):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return layer


def data_of(name, step):
    torch.manual_seed(step + 1)
    shape = (10, *SHAPES.get(name, (4,)))
    dtype = torch.float64 if name == "double" else torch.float32
    spread = torch.arange(1, 11, dtype=dtype).view(-1, *[1] * (len(shape) - 1))  # ranks differ
    x = torch.randn(shape, dtype=dtype) * spread + (3000 if name == "far from 0" else 3)
    return x, torch.randn(shape, dtype=dtype)


def own_rows(tensor, split, rank):
    return tensor.split(list(split))[rank]


def learn(layer, x, slopes):
    """The output and its inputs' gradient of a loss with the given slopes."""
    x = x.clone().requires_grad_()
    output = layer(x)
    (output * slopes).sum().backward()
    return output.detach(), x.grad


def values_of(layer):
    return {
        **{name: value.clone() for name, value in layer.named_buffers()},
        **{f"gradient of {name}": p.grad.clone() for name, p in layer.named_parameters()},
    }


# ---------------------------------------------------------------------- whole nets


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm2d(2),  # the inputs need no gradient
        nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(),
        nn.Linear(16, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1),
    )  # fmt: skip


def net_batches():
    torch.manual_seed(5)
    return [(torch.randn(12, 2, 3, 3) + 1, torch.randn(12, 1)) for _ in range(4)]


NET_SPLITS = {
    2: [(6, 6), (11, 1), (12, 0), (5, 7)],
    3: [(4, 4, 4), (1, 1, 10), (12, 0, 0), (3, 9, 0)],
}


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def train_net(rank, size):
    """DDP's training with the loss weighed by samples; a rank without any repeats one row."""
    net = small_net()
    keys, classes = list(net.state_dict()), [type(module) for module in net.modules()]
    wrapped = DistributedDataParallel(net)
    optimizer, outputs = sgd(net), []
    with synchronized(net) as synchronization:
        for (x, y), split in zip(net_batches(), NET_SPLITS[size], strict=True):
            mine, target = own_rows(x, split, rank), own_rows(y, split, rank)
            count = len(mine)
            synchronization.counts = count > 0
            if count == 0:
                mine, target = x[:1], y[:1]
            optimizer.zero_grad()
            output = wrapped(mine)
            (((output - target) ** 2).mean() * count * size / len(x)).backward()
            optimizer.step()
            outputs.append(output.detach()[:count])
    assert keys == list(net.state_dict()) and classes == [type(m) for m in net.modules()]
    return {"outputs": outputs, "state": net.state_dict()}


def train_joined():
    net = small_net()
    optimizer, outputs = sgd(net), []
    for x, y in net_batches():
        optimizer.zero_grad()
        output = net(x)
        ((output - y) ** 2).mean().backward()
        optimizer.step()
        outputs.append(output.detach())
    return {"outputs": outputs, "state": net.state_dict()}


# ---------------------------------------------------------------------- one rank


def compute(rank, size):
    found = {}
    for name in LAYERS:
        layer, outputs, slopes = layer_of(name), [], []
        with synchronized(layer):
            for step, split in enumerate(SPLITS[size]):
                x, given = (own_rows(part, split, rank) for part in data_of(name, step))
                output, slope = learn(layer, x, given)
                outputs.append(output)
                slopes.append(slope)
        found[name] = {"outputs": outputs, "slopes": slopes, "values": values_of(layer)}
    found["net"] = train_net(rank, size)
    found["autocast"] = in_bfloat16(layer_of("2d"), rank, SPLITS[size][0])
    found["one value"] = one_value(rank)
    return found


def in_bfloat16(layer, rank, split):
    x, given = (own_rows(part, split, rank) for part in data_of("2d", 0))
    with synchronized(layer), torch.autocast("cpu", torch.bfloat16):
        output, slope = learn(layer, x.bfloat16(), given)
    return output, slope


def one_value(rank):
    layer = nn.BatchNorm1d(2)
    with synchronized(layer):
        try:
            layer(torch.ones(1 if rank == 0 else 0, 2))
        except ConfigurationError as error:
            return str(error)


def be_a_rank(rank, folder):
    """Compute as one of three ranks, and then, unless it is the last, as one of two."""
    for size in range(3, max(rank, 1), -1):
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store of {size}", rank=rank, world_size=size
        )
        torch.save(compute(rank, size), f"{folder}/{rank} of {size}.pt")
        dist.barrier()
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What three processes have written."""
    folder = tmp_path_factory.mktemp("ranks")
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    started = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(folder)],
            stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        for process in started:
            _, errors = process.communicate(timeout=patience(75))
            assert process.returncode == 0, errors
    finally:
        for process in started:
            process.kill()
            process.wait()
    return folder


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, folder):
    return [torch.load(folder / f"{rank} of {request.param}.pt") for rank in range(request.param)]


def assert_close(found, expected, tolerance=1e-6):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_what_one_process_computes_on_the_joined_batch(ranks, name):
    layer = layer_of(name)
    # Near 3000, float32 itself has no more than 7 digits of each number.
    tolerance = 5e-4 if name == "far from 0" else 1e-9 if name == "double" else 2e-6
    for step in range(3):
        output, slope = learn(layer, *data_of(name, step))
        assert_close(torch.cat([rank[name]["outputs"][step] for rank in ranks]), output, tolerance)
        assert_close(torch.cat([rank[name]["slopes"][step] for rank in ranks]), slope, tolerance)
    for key, expected in values_of(layer).items():
        found = [rank[name]["values"][key] for rank in ranks]
        if key.startswith("gradient"):  # DDP makes a mean of these parts
            scale = expected.abs().max()
            assert_close(sum(found) / scale, expected / scale, tolerance)
        else:
            assert all(torch.equal(value, found[0]) for value in found)
            assert_close(found[0], expected, 2e-6)


def test_a_net_trains_as_one_process_on_the_joined_batch(ranks):
    expected = train_joined()
    for step, output in enumerate(expected["outputs"]):
        assert_close(torch.cat([rank["net"]["outputs"][step] for rank in ranks]), output, 5e-6)
    for rank in ranks:
        assert_close(rank["net"]["state"], expected["state"], 5e-6)


def test_half_inputs_are_summed_in_float32_and_stay_half(ranks):
    layer, (x, given) = layer_of("2d"), data_of("2d", 0)
    output, slope = learn(layer, x.bfloat16(), given)
    for number, expected in enumerate((output, slope)):
        found = torch.cat([rank["autocast"][number] for rank in ranks])
        assert found.dtype is torch.bfloat16
        assert_close(found.float(), expected.float(), 1e-2)


def test_one_value_on_all_ranks_is_refused_on_all_of_them(ranks):
    assert all("all ranks together have 1" in rank["one value"] for rank in ranks)


# ---------------------------------------------------------------------- no ranks needed


def test_layers_in_evaluation_and_copies_compute_by_themselves():
    layer, x = layer_of("2d"), data_of("2d", 0)[0]
    expected = copy.deepcopy(layer).eval()(x)
    trained = copy.deepcopy(layer)(x)
    with synchronized(layer):
        copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
        assert torch.equal(layer.eval()(x), expected)
        assert all(torch.equal(one(x), trained) for one in copies)  # no group is there to ask
    assert "forward" not in vars(layer) and torch.equal(layer.train()(x), trained)
    with synchronized(copies[0]):
        assert torch.equal(copies[0].eval()(x), copies[1].eval()(x))


def test_the_layers_are_themselves_again_after_an_error_and_after_a_training_within():
    net = small_net()
    before = [dict(vars(module)) for module in net.modules()]
    with pytest.raises(ValueError, match="expected 4D"), synchronized(net):  # noqa: PT012
        outer = net[0].forward
        with synchronized(net):
            assert net[0].forward is not outer
        assert net[0].forward is outer
        net(torch.ones(2))
    assert [dict(vars(module)) for module in net.modules()] == before


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (type("Mine", (nn.BatchNorm1d,), {"forward": lambda self, x: x})(2), "Mine has a forward"),
        (nn.SyncBatchNorm(2), "refuses CPU tensors"),
    ],
)
def test_a_layer_that_computes_otherwise_is_refused_by_its_name(layer, words):
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(layer))
    with pytest.raises(ConfigurationError, match=rf"1\.0.*{words}"), synchronized(net):
        pass
    assert "forward" not in vars(net[0])


if __name__ == "__main__":
    be_a_rank(int(sys.argv[1]), sys.argv[2])
