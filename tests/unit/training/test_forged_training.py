"""Checkpoints whose digest is right and whose training's state is not as fitkit writes it."""

import copy
import random

import pytest
import torch

import fitkit
from fitkit.callbacks import Callback, EarlyStopping, ModelCheckpoint
from fitkit.checkpoint import read_container, write_container
from fitkit.errors import ArgumentTypeError, CheckpointError, ConfigurationError

X, Y = torch.randn(24, 4), torch.randn(24, 2)


def compiled():
    torch.manual_seed(0)
    model = fitkit.Model(torch.nn.Linear(4, 2))
    model.compile("adamw", "mse", metrics=["mae"], precision="16-mixed", accelerator="cpu",
                  warmup_epochs=2)
    return model


class Cut(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, batch, logs):
        if (self.model.current_epoch, batch) == (1, 1):
            self.model.save(self.path)
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint's document and arrays, cut within an epoch."""
    path = tmp_path_factory.mktemp("cut") / "cut.h5"
    with pytest.raises(KeyboardInterrupt):
        compiled().fit(X, Y, batch_size=8, epochs=3, verbose=0,
                       callbacks=[EarlyStopping("loss"), Cut(path)])
    with read_container(path) as reader:
        return copy.deepcopy(reader.document), [reader.read(i) for i in range(len(reader))]


def put(document, place, value):
    *way, last = place
    part = document["state"]["dict"]
    for key in way:
        part = part[key]["dict"] if isinstance(key, str) else part[key]
        part = part.get("dict", part) if isinstance(part, dict) else part
    part[last] = value


WRONG = [
    (("training", "updates"), "x", "updates='x' isn't a number"),
    (("training", "updates"), -1, "updates=-1 isn't a number"),
    (("training", "rate_factor"), {"tensor": 0}, "rate_factor=.* isn't a positive number"),
    (("training", "scalings"), 1.5, "scalings isn't a list of dicts"),
    (("training", "schedulers"), [[]], "schedulers isn't a list of dicts"),
    (("training", "optimizers"), [{"dict": {}}], "optimizers has no usable 'class'"),
    (("progress", "history"), {"dict": {}}, "history has no usable 'epoch'"),
    (("progress", "random"), [], "random is empty"),
    (("progress", "random"), [{"dict": {"python": 3}}], "a random state can't be one"),
    (("progress", "began"), [7], "a random state isn't a dict"),
    (("progress", "noted"), [1], "noted isn't a list of dicts"),
    (("progress", "callbacks"), [3], "callbacks isn't a list of dicts"),
    (("progress", "warm_up"), 3, "warm_up isn't a dict"),
    (("progress", "loader"), 3, "loader isn't a dict"),
    (("progress", "data"), 3, "data isn't a dict"),
]


def state_of(model):
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return weights, copy.deepcopy(model.optimizer.state_dict()), model.global_step


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize(("place", "value", "reason"), WRONG)
def test_a_state_of_another_form_is_refused_before_anything_changes(
    tmp_path, written, place, value, reason
):
    document, arrays = copy.deepcopy(written[0]), written[1]
    put(document, place, value)
    write_container(tmp_path / "forged.h5", document, arrays)
    model = compiled()
    model.fit(X, Y, verbose=0)
    before = state_of(model)
    for attempt in (
        lambda: model.load(tmp_path / "forged.h5"),
        lambda: model.fit(X, Y, batch_size=8, epochs=3, verbose=0,
                          resume_from=tmp_path / "forged.h5"),
        lambda: fitkit.load_model(tmp_path / "forged.h5", torch.nn.Linear(4, 2)),
    ):
        with pytest.raises(CheckpointError, match=f"is refused: of its training, {reason}"):
            attempt()
    assert same(state_of(model), before)


def test_a_state_that_an_optimizer_cannot_take_leaves_the_model_as_it_was(tmp_path, written):
    document, arrays = copy.deepcopy(written[0]), written[1]
    text = document["state"]["dict"]["training"]["dict"]["optimizers"][0]["dict"]["state"]
    text["dict"]["state"]["items"][0][1]["dict"]["step"] = "x"
    write_container(tmp_path / "forged.h5", document, arrays)
    model = compiled()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="an optimizer or a scheduler can't take"):
        model.load(tmp_path / "forged.h5")
    assert same(dict(model.state_dict()), before)
    assert model.global_step == 0
    model.fit(X, Y, verbose=0)


@pytest.mark.filterwarnings("ignore:.*was compiled otherwise")
@pytest.mark.parametrize("seed", range(3))
def test_random_changes_of_the_state_load_or_are_refused_with_the_model_as_it_was(
    tmp_path, written, seed
):
    draw = random.Random(seed)
    model = compiled()
    model.fit(X, Y, verbose=0)
    for number in range(40):
        document, arrays = copy.deepcopy(written[0]), written[1]
        part = document["state"]["dict"]
        while True:
            key = draw.choice(list(part) if isinstance(part, dict) else range(len(part)))
            inner = part[key]
            if not isinstance(inner, (dict, list)) or not inner or draw.random() < 0.25:
                break
            part = inner
        part[key] = draw.choice([None, 0, -1, 1 << 40, "x", [], {"dict": {}}, {"tensor": 0}, 1.5])
        path = tmp_path / f"{number}.h5"
        write_container(path, document, arrays)
        before = state_of(model)
        try:
            model.load(path)
        except (CheckpointError, ConfigurationError):
            assert same(state_of(model), before), part


def test_a_callback_that_cannot_take_its_state_is_named(tmp_path, written):
    document, arrays = copy.deepcopy(written[0]), written[1]
    document["state"]["dict"]["progress"]["dict"]["callbacks"][0]["dict"]["state"] = 5
    write_container(tmp_path / "forged.h5", document, arrays)
    with pytest.raises(CheckpointError, match="EarlyStopping can't go on from its state"):
        compiled().fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=EarlyStopping("loss"),
                       resume_from=tmp_path / "forged.h5")


def test_load_model_wants_a_net(tmp_path):
    with pytest.raises(ArgumentTypeError, match="net=None must be the torch.nn.Module"):
        fitkit.load_model(tmp_path / "any.h5", None)


def test_what_a_model_checkpoint_refuses_at_once():
    with pytest.raises(ConfigurationError, match="is to have the best, and save_last=True"):
        ModelCheckpoint("runs/last.h5", "loss", save_top_k=1, save_last=True)
    with pytest.raises(ConfigurationError, match="mode='x'"):
        ModelCheckpoint("{epoch}.h5", mode="x")
