"""Trainings on simulated devices have the CPU's numbers, by strategy, data, precision, option."""

import itertools

import pytest
import simulation
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit.extras.launchers.workers import end_workers

ROWS, SIZE = 32, 8
ONE = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1))
TWO = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(2))
LABELS = torch.randint(3, (ROWS,), generator=torch.Generator().manual_seed(3))
IGNORING = torch.where(torch.arange(ROWS) % 5 == 2, -100, LABELS)
ALONE = {"mps": 1}.get(simulation.KIND)  # an Apple GPU has no index
HERE = ALONE or [1]
needs_several = pytest.mark.skipif(simulation.KIND == "mps", reason="there is one Apple GPU")


class Net(nn.Module):
    """Takes one input or two, by position or by name."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, one, two=None):
        return self.last(torch.tanh(self.first(one if two is None else one + two)))


class Scaled(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, prediction, target):
        return F.cross_entropy(prediction * self.scale, target)


DATA = {
    "arrays": lambda y, size: {"x": ONE, "y": y, "batch_size": size},
    "loader": lambda y, size: {"x": DataLoader(TensorDataset(ONE, y), size)},
    "pinned": lambda y, size: {"x": DataLoader(TensorDataset(ONE, y), size, pin_memory=True)},
    "batches": lambda y, size: {"x": [*zip(ONE.split(size), y.split(size), strict=True)]},
    "tuple": lambda y, size: {"x": (ONE, TWO), "y": y, "batch_size": size},
    "dict": lambda y, size: {"x": {"one": ONE, "two": TWO}, "y": y, "batch_size": size},
}
OPTIONS = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.05},
    "accumulated": {"accumulate_grad_batches": 2},
    "ignored labels": {},
    "weights": {},
    "resumed": {},
    "loss with a parameter": {"loss": Scaled},
    "schedule": {"lr_scheduler": {"scheduler": "cosine", "interval": "step"}},
}


def trained(folder, data, option, devices, ranks=1, **hardware):
    """The weights and the history of a training, and what evaluate and predict say after it."""

    def made():
        torch.manual_seed(0)
        model = fitkit.Model(Net())
        options = {"loss": "cross_entropy", "metrics": ["accuracy"], **OPTIONS[option]}
        loss = options.pop("loss")
        loss = loss() if isinstance(loss, type) else loss
        model.compile("adam", loss, learning_rate=0.01, devices=devices, **options, **hardware)
        return model

    given = DATA[data](IGNORING if option == "ignored labels" else LABELS, SIZE // ranks)
    given |= {"shuffle": False, "verbose": 0}
    if option == "weights":
        given["class_weight"] = {0: 1.0, 1: 3.0, 2: 0.5}
    model = made()
    if option == "resumed":
        model.fit(**given, epochs=1)
        model.save(folder / "half.h5")
        model = made()
        given["resume_from"] = folder / "half.h5"
    history = model.fit(**given, epochs=2).history
    for name in ("shuffle", "class_weight", "resume_from"):
        given.pop(name, None)
    values = model.evaluate(**given, return_dict=True)
    given.pop("y", None)
    predicted = torch.from_numpy(model.predict(**given))
    weights = {name: one.detach().cpu() for name, one in model.net.state_dict().items()}
    return weights, history, values, predicted


def same(found, wanted, tolerance):
    for one, other in zip(found[:3], wanted[:3], strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            torch.testing.assert_close(
                torch.as_tensor(one[name]), torch.as_tensor(value), rtol=tolerance, atol=tolerance
            )
    torch.testing.assert_close(found[3], wanted[3], rtol=tolerance, atol=tolerance)


def check(folder, data, option, devices, ranks=1, tolerance=2e-6, precision=32, **hardware):
    wanted = trained(folder, data, option, 1, accelerator="cpu", precision=precision)
    before = torch.accelerator.current_device_index()
    found = trained(
        folder, data, option, devices, ranks, accelerator="gpu", precision=precision, **hardware
    )
    assert torch.accelerator.current_device_index() == before
    same(found, wanted, tolerance)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("data", DATA)
def test_one_device_has_the_cpus_numbers(tmp_path, data, option):
    check(tmp_path, data, option, HERE)


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("bf16-mixed", 3e-2), ("16-mixed", 5e-3), ("64-true", 1e-12)]
)
@pytest.mark.parametrize("data", ["arrays", "pinned"])
def test_precisions_have_the_cpus_numbers(tmp_path, data, precision, tolerance):
    if simulation.KIND == "mps" and precision == "64-true":
        with pytest.raises(fitkit.ConfigurationError, match="FK038"):
            fitkit.Model(Net()).compile(accelerator="gpu", precision=precision)
        return
    check(tmp_path, data, "plain", HERE, precision=precision, tolerance=tolerance)


STRATEGIES = ["dp", "ddp_spawn", "ddp_sharded", "fsdp", "bagua"]


def lacks_replicas(strategy):
    """torch's functions for replicas come with CUDA's builds alone."""
    return strategy == "dp" and simulation.KIND == "npu"


def pairs():
    """Each strategy with each option, and by turns with each kind of data."""
    kinds = itertools.cycle(DATA)
    for strategy in STRATEGIES:
        for option in OPTIONS:
            if (strategy, option) != ("fsdp", "loss with a parameter"):  # is refused
                yield pytest.param(strategy, next(kinds), option, id=f"{strategy}-{option}")
        next(kinds)  # so that a strategy meets an option with other data than the one before


@needs_several
@pytest.mark.parametrize(("strategy", "data", "option"), [*pairs()])
def test_two_devices_have_the_cpus_numbers(tmp_path, strategy, data, option):
    ranks = 1 if strategy == "dp" else 2
    if lacks_replicas(strategy):
        with pytest.raises(fitkit.ConfigurationError, match="strategy='ddp'"):
            fitkit.Model(Net()).compile(accelerator="gpu", devices=[1, 3], strategy=strategy)
        return
    check(tmp_path, data, option, [1, 3], ranks, strategy=strategy)


@needs_several
@pytest.mark.parametrize(("devices", "strategy"), [(2, "auto"), (-1, "dp"), (-1, "ddp_spawn")])
def test_other_numbers_of_devices_have_the_cpus_numbers(tmp_path, devices, strategy):
    if lacks_replicas(strategy):
        pytest.skip("dp is refused")
    end_workers()
    ranks = {2: 2, -1: 4}[devices] if strategy != "dp" else 1
    check(tmp_path, "arrays", "ignored labels", devices, ranks, strategy=strategy)
    end_workers()


class CallsSuper(fitkit.Model):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


@needs_several
@pytest.mark.parametrize("kind", [fitkit.Model, CallsSuper])
def test_replicas_ask_a_teacher_and_metrics_on_their_devices(kind):
    if lacks_replicas("dp"):
        pytest.skip("dp is refused")
    found = []
    for hardware in ({"devices": 1, "accelerator": "cpu"}, {"devices": [1, 3], "strategy": "dp"}):
        torch.manual_seed(0)
        model, teacher = kind(Net()), Net()
        model.compile(
            "sgd", fitkit.losses.Distillation(teacher), metrics=["accuracy"], learning_rate=0.1,
            **{"accelerator": "gpu", **hardware},
        )  # fmt: skip
        history = model.fit(ONE, LABELS, batch_size=SIZE, epochs=2, shuffle=False, verbose=0)
        found.append((model.net.first.weight.detach().cpu(), history.history["accuracy"]))
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-5)
