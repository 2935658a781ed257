"""A copy of a model trains as the original does, whenever and however it was made."""

import ast
import copy
import pickle
import threading
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

import fitkit
from fitkit import callbacks, loggers
from fitkit.distributed.devices import Machine
from fitkit.extras import free_devices
from fitkit.extras.bagua import ALGORITHMS
from fitkit.strategies import BaguaStrategy
from tests.nets import dense, regression
from tests.reference import assert_same_weights, plain_loop, slices

X, Y = regression(16, 4)

WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "cloudpickle": lambda value: cloudpickle.loads(cloudpickle.dumps(value)),
}
every_way = pytest.mark.parametrize("way", WAYS)
MOMENTS = ("before compile", "before fit", "within fit", "after fit")


def compile_it(model, **given):
    settings = {"learning_rate": 0.05, "accelerator": "cpu", "devices": 1, **given}
    model.compile("adam", "mse", **settings)


def compiled(**given):
    model = fitkit.Model(dense(4, 3, 1))
    compile_it(model, **given)
    return model


def fit(model, epochs=1, **options):
    model.fit(X, Y, batch_size=4, epochs=epochs, shuffle=False, verbose=0, **options)


def copied(way, moment, net, **given):
    """A model, a copy of it, and the batches that the copy has seen before."""
    model, found = fitkit.Model(net), []
    if moment == "before compile":
        found = [WAYS[way](model)]
        compile_it(found[0], **given)
        return model, found[0], 0
    compile_it(model, **given)
    if moment == "before fit":
        return model, WAYS[way](model), 0
    at_second = callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: found.append(WAYS[way](model)) if batch == 1 else 0
    )
    fit(model, steps_per_epoch=2, callbacks=at_second)
    return model, found[0] if moment == "within fit" else WAYS[way](model), 2


def plainly(net, seen):
    """The net after those batches and one pass, in plain PyTorch."""
    optimizer = torch.optim.Adam(net.parameters(), 0.05)
    batches = slices(X, Y, 4)
    plain_loop(net, optimizer, batches[:seen] + batches, loss=torch.nn.functional.mse_loss)
    return net


@every_way
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("given", [{}, {"strategy": "dp", "devices": 2}], ids=["single", "dp"])
def test_it_trains_as_the_original_does(way, moment, given):
    _, made, seen = copied(way, moment, dense(4, 3, 1), **given)
    fit(made)
    assert_same_weights(made.net, plainly(dense(4, 3, 1), seen), atol=1e-6)
    assert made.global_step == seen + 4


@every_way
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_original_trains_on_as_if_there_were_no_copy(way, moment):
    model, made, seen = copied(way, moment, dense(4, 3, 1))
    if moment == "before compile":
        compile_it(model)
    if way != "copy":  # whose net is the model's
        fit(made, epochs=2)
    made.compile("sgd", "mae", learning_rate=1.0, accelerator="cpu", devices=1)
    fit(model)
    assert_same_weights(model.net, plainly(dense(4, 3, 1), seen), atol=1e-6)


STRATEGIES = {
    "single_device": ("single_device", 1),
    **{name: (name, 2) for name in ("dp", "ddp_spawn", "ddp", "ddp_sharded", "fsdp")},
    **{f"bagua:{name}": (lambda name=name: BaguaStrategy(name), 2) for name in ALGORITHMS},
}


@every_way
@pytest.mark.parametrize("name", STRATEGIES)
def test_it_has_the_same_ranks_and_a_strategy_of_its_own(way, name):
    strategy, devices = STRATEGIES[name]
    strategy = strategy() if callable(strategy) else strategy
    model = compiled(strategy=strategy, devices=devices)
    model._fitkit.batch_size = 4
    for made in (WAYS[way](model), WAYS[way](WAYS[way](model))):
        mine, others = made._fitkit.compilation.strategy, model._fitkit.compilation.strategy
        assert mine is not others and type(mine) is type(others)
        assert type(mine.launcher) is type(others.launcher)
        for attribute in ("world_size", "effective_batch_size", "global_rank", "device_ids"):
            assert getattr(made, attribute) == getattr(model, attribute)
        assert getattr(mine, "algorithm", 1) is not getattr(others, "algorithm", 2)


@every_way
def test_free_gpus_are_chosen_once_for_all_copies_on_a_machine(way, monkeypatch):
    """Within a run none of its GPUs is free; a pickle may come to a machine with others."""
    choices = iter([[2, 0], [3, 1]])
    monkeypatch.setattr(free_devices, "find_usable_cuda_devices", lambda count: next(choices))
    monkeypatch.setattr(Machine, "here", lambda: Machine(cuda_count=4))
    model = fitkit.Model(dense(4, 3, 1))
    model.compile("adam", "mse", accelerator="gpu", devices=2, auto_select_gpus=True)
    again = WAYS[way](WAYS[way](model))
    again.compile(loss="mae")
    expected = (2, 0) if way in ("copy", "deepcopy") else (3, 1)
    assert again._fitkit.compilation.strategy.device_ids == expected
    again.compile(devices=1, auto_select_gpus=False)
    assert again._fitkit.compilation.strategy.device_ids == (0,)


@every_way
def test_it_keeps_the_settings_of_compile_and_the_values_of_its_scheduler(way):
    given = {
        "lr_scheduler": {"scheduler": partial(ExponentialLR, gamma=0.5), "interval": "step"},
        "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "precision": "bf16-mixed",
    }  # fmt: skip
    model, other = compiled(**given), compiled(**given)
    fit(model), fit(other)
    made = WAYS[way](model)
    fit(made), fit(other)
    assert_same_weights(made.net, other.net)
    assert made.optimizer.learning_rate == other.optimizer.learning_rate


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, prediction, target):
        return (self.scale * prediction - target).square().mean()


@every_way
def test_losses_and_optimizers_that_are_objects_come_along(way):
    def made():
        model, loss = fitkit.Model(dense(4, 1)), Scaled()
        parameters = [*model.parameters(), *loss.parameters()]
        optimizer = torch.optim.SGD(parameters, 0.05, momentum=0.9)
        model.compile(optimizer, loss, accelerator="cpu", devices=1)
        return model

    model, other = made(), made()
    fit(model), fit(other)
    copied_model = WAYS[way](model)
    fit(copied_model), fit(other)
    assert_same_weights(copied_model.net, other.net)
    mine, others = (m._fitkit.compilation.given.loss for m in (copied_model, other))
    assert torch.equal(mine.scale, others.scale)


@every_way
def test_a_strategy_that_cant_be_copied_only_describes(way):
    class Own(fitkit.strategies.SingleDeviceStrategy):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    if way in ("pickle", "cloudpickle"):
        pytest.skip("nothing pickles a lock")
    strategy = Own()
    made = WAYS[way](compiled(strategy=strategy))
    fit(made)
    assert made._fitkit.compilation.strategy.lock is strategy.lock


SAVING = {
    "ModelCheckpoint": lambda folder: callbacks.ModelCheckpoint(f"{folder}/m.h5", save_freq=2),
    "BackupAndRestore": lambda folder: callbacks.BackupAndRestore(str(folder), save_freq=2),
    "CSV": lambda folder: loggers.CSV(f"{folder}/log.csv", update_freq=2),
}


@every_way
@pytest.mark.parametrize("name", SAVING)
def test_hooks_of_a_callbacks_copy_are_its_own(way, name, tmp_path):
    original = SAVING[name](tmp_path)
    made = WAYS[way](original)
    own = [value.__self__ for value in vars(made).values() if hasattr(value, "__func__")]
    assert own and all(owner is made for owner in own)


@every_way
def test_averages_of_a_callback_come_along(way):
    average, noted = callbacks.EMA(0.5), []

    def note(batch, logs):
        mine, others = (each.weights.state_dict() for each in (average, WAYS[way](average)))
        assert mine["count"] == others["count"] == batch
        assert_same_weights(others["averages"], mine["averages"])
        noted.append(batch)

    fit(compiled(), callbacks=[average, callbacks.LambdaCallback(on_train_batch_begin=note)])
    assert noted == [0, 1, 2, 3]


@every_way
def test_an_estimator_that_was_copied_learns_on(way):
    sklearn = pytest.importorskip("fitkit.extras.sklearn")
    x, y = X.numpy(), Y.numpy().ravel()
    one, other = (
        sklearn.Regressor(dense(4, 1), random_state=0, epochs=2, verbose=0) for _ in range(2)
    )
    one.fit(x, y), other.fit(x, y)
    made = WAYS[way](one)
    made.partial_fit(x, y), other.partial_fit(x, y)
    assert (made.predict(x) == other.predict(x)).all()


def test_one_account_says_what_copies_pickles_and_ranks_get():
    """Each class of the core that says it has a row in docs/architecture.md."""
    says = {"__getstate__", "__copy__", "__deepcopy__", "__reduce__", "_state_for_ranks"}
    core, found = Path(fitkit.__file__).parent, set()
    for path in core.rglob("*.py"):
        if "extras" not in path.parts:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
                    found |= {node.name} if methods & says else set()
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    table = page.split("## What copies, pickles and ranks get")[1].split("\n## ")[0]
    assert {name for name in found if f"`{name}`" not in table} == set()
    assert "MadeAnew" in found
