"""The host waits for a device within no step, whatever the data and the options."""

import itertools
import time

import pytest
import simulation
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import fitkit
from fitkit.extras import data_advice
from fitkit.training.data_wait import DataWait

pytestmark = pytest.mark.skipif(simulation.KIND != "cuda", reason="CUDA's waits are counted")
SIZE = 8


def data(kind, steps):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, 6, generator=generator).repeat(steps, 1)
    y = torch.randint(3, (SIZE,), generator=generator).repeat(steps)
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": SIZE}
    if kind == "pinned":
        return {"x": DataLoader(TensorDataset(x, y), SIZE, pin_memory=True)}

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(zip(x, y, strict=True))

    return {"x": DataLoader(Stream(), SIZE), "steps_per_epoch": steps}


def waits(model, verb, kind, steps):
    """The places in fitkit at which the host waits in a call, each time it does."""
    given = data(kind, steps)
    if verb != "fit":
        given.pop("steps_per_epoch", None)
    if verb == "predict":
        given.pop("y", None)
    with simulation.recorded("wait") as seen:
        getattr(model, verb)(**given, verbose=0)
    return [place(stack) for _, _, stack in seen]


def place(stack):
    """The innermost line of fitkit in a stack."""
    lines = [line for line in stack.split("\n") if "/fitkit/" in line]
    return lines[0].rpartition("/fitkit/")[2] if lines else stack.split("\n")[0]


OPTIONS = {
    "plain": {},
    "metrics": {"metrics": ["accuracy", "f1"]},
    "clipped": {"gradient_clip_val": 1.0},
    "accumulated": {"accumulate_grad_batches": 2},
    "schedule": {"lr_scheduler": {"scheduler": "cosine", "interval": "step"}},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "16-mixed": {"precision": "16-mixed"},
    "compiled": {"jit_compile": True},
    "compiled schedule": {
        "jit_compile": True,
        "lr_scheduler": {"scheduler": "cosine", "interval": "step"},
    },
    "groups": {"steps_per_execution": 4},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", ["arrays", "pinned", "stream"])
def test_no_step_waits_for_the_device(kind, option):
    torch.manual_seed(0)
    model = fitkit.Model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    model.compile("adam", "cross_entropy", accelerator="gpu", devices=[1], **OPTIONS[option])
    model.fit(**data(kind, 4), verbose=0)
    few, many = (waits(model, "fit", kind, steps) for steps in (16, 48))
    assert len(few) == len(many), many


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
@pytest.mark.parametrize("kind", ["arrays", "pinned", "stream"])
def test_no_batch_of_an_evaluation_waits_for_the_device(kind, verb):
    torch.manual_seed(0)
    model = fitkit.Model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    model.compile("adam", "cross_entropy", metrics=["accuracy"], accelerator="gpu", devices=[1])
    waits(model, verb, kind, 4)
    few, many = (waits(model, verb, kind, steps) for steps in (16, 48))
    assert len(few) == len(many), many


# Where the host waits once a call: its file, and the functions there.
PLACES = {
    "accelerators.py": {"move"},  # the net goes to the device
    "data/arrays.py": {"fingerprints"},  # state that state dicts leave out, before the first fit
    "losses/guards.py": {"_bounds", "suspicion"},  # the first batch's values
    # The same; and the bounds of later batches' labels, once where values are read.
    "metrics/conversions.py": {"_check_targets", "_is_between_0_and", "_check_bounds"},
    "metrics/group.py": {"_plain", "loss_sums"},  # results at the end
    "metrics/sums.py": {"result", "to"},
    "extras/torchmetrics_objects.py": {"update", "to", "_counts_nothing"},  # the first batch
    "tensors.py": {"first_spoiled"},  # the weights at a fit's end
    "training/running_values.py": {"sums"},  # results at the end
    "training/tally.py": {"per_sample"},  # the labels of an accumulated update's first batch
    "extras/jit/optimizer.py": {"<setcomp>", "__init__"},  # compiling
    "extras/jit/proof.py": {"_change", "_distance", "_norm"},  # a graph's first call
}


def test_the_host_waits_at_listed_places_alone():
    found = set()
    for kind, option in zip(itertools.cycle(("stream", "arrays", "pinned")), OPTIONS.values()):
        torch.manual_seed(0)
        model = fitkit.Model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
        model.compile("adam", "cross_entropy", accelerator="gpu", devices=[1], **option)
        for verb in ("fit", "evaluate", "predict"):
            found.update(waits(model, verb, kind, 16))
    places = {(line.partition(":")[0], line.partition(" ")[2]) for line in found}
    listed = {(file, function) for file, functions in PLACES.items() for function in functions}
    assert places == listed


class Slow(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.ones(6), torch.tensor(index % 3)


@pytest.mark.parametrize("busy", [False, True])
def test_a_wait_for_data_counts_where_the_device_has_nothing_to_do_and_asking_never_waits(
    busy, monkeypatch, capsys
):
    monkeypatch.setattr(data_advice, "LEAST_S", 0.0)
    if busy:  # nothing overlaps here
        monkeypatch.setattr(DataWait, "_is_idle", lambda self: False)
    model = fitkit.Model(nn.Linear(6, 3))
    model.compile("sgd", "cross_entropy", accelerator="gpu", devices=1)
    with simulation.recorded("wait") as seen:
        history = model.fit(DataLoader(Slow(), SIZE), verbose=2)
    assert not [stack for _, _, stack in seen if "data_wait.py" in stack]
    share = history.params["data_wait"]
    assert share == 0.0 if busy else share > 0.5
    assert ("num_workers=" in capsys.readouterr().out) is not busy
