"""Checkpoints whose digest is right and whose training's state is not as fitkit writes it."""

import copy
import functools
import random
import struct

import numpy as np
import pytest
import torch

import fitkit
from fitkit.callbacks import Callback, EarlyStopping, ModelCheckpoint
from fitkit.checkpoint import check_optimizer_state, read_container, write_container
from fitkit.errors import ArgumentTypeError, CheckpointError, ConfigurationError
from fitkit.random_states import check_random_state, random_state, set_random_state
from tests import reference
from tests.nets import linear

X, Y = torch.randn(24, 4), torch.randn(24, 2)


def compiled():
    return reference.compiled(
        linear(4, 2),
        "adamw",
        "mse",
        metrics=["mae"],
        warmup_epochs=2,
        precision="16-mixed",
        accelerator="cpu",
    )


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
        compiled().fit(
            X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[EarlyStopping("loss"), Cut(path)]
        )
    with read_container(path) as reader:
        return copy.deepcopy(reader.document), [reader.read(i) for i in range(len(reader))]


def put(document, place, value):
    *way, last = place
    part = document["state"]["dict"]
    for key in way:
        part = part[key]
        part = part.get("dict", part) if isinstance(part, dict) else part
    part[last] = value


def logged(**parts):
    """Notes of a value that a step logged, as a document has them."""
    return {"dict": {"a": {"dict": {
        "options": {"dict": {}}, "running": [1.0, 2], "metric": None, **parts,
    }}}}  # fmt: skip


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
    (("progress", "noted", 0, "logged"), {"dict": {"a": "x"}}, "logged isn't a dict"),
    (
        ("progress", "noted", 0, "logged"),
        logged(),
        "the reduction of a logged value is unknown",
    ),
    (("progress", "noted", 0, "scales"), {"dict": {"a_loss": "x"}}, "a loss weight isn't a number"),
    (("progress", "callbacks"), [3], "callbacks isn't a list of dicts"),
    (("progress", "warm_up"), 3, "warm_up isn't a dict"),
    (("progress", "loader"), 3, "loader isn't a dict"),
    (("progress", "data"), 3, "data isn't a dict of plain data"),
    (("progress", "shares"), 0, "shares is 0"),
    (("progress", "warm_up", "targets"), ["x"], "a target rate of the warm-up isn't a number"),
    (("progress", "warm_up", "targets"), [0.1] * 9, "the target rates of the warm-up don't match"),
    (("progress", "noted", 0, "sums"), {"dict": {"loss": [1.0]}}, "a sum and its number"),
    (("progress", "noted", 0, "logged"), logged(running=[1.0]), "a logged value and its number"),
    (("progress", "noted", 0, "logged"), logged(latest="x"), "a logged value isn't a number"),
    (
        ("progress", "noted", 0, "logged"),
        logged(options={"dict": {"reduce_fx": "mean"}}),
        "the options of a logged value aren't those of self.log",
    ),
    (("training", "optimizers", 0, "names"), [[3]], "an optimizer's parameters have names"),
    (("training", "optimizers", 0, "names"), [3], "names has values that aren't lists"),
    (("training", "optimizers", 0, "options"), 3, "an optimizer's options aren't plain data"),
    (("training", "losses"), [{"dict": {"a": 3}}], "the state of a loss has values"),
    (("training", "scalings", 0, "scaler", "scale"), -1.0, "a loss scaler's scale=-1.0 is invalid"),
    (
        ("training", "scalings", 0, "scaler", "growth_interval"),
        "x",
        "a loss scaler's growth_interval='x' is invalid",
    ),
]


def state_of(model):
    optimizer = copy.deepcopy(model.optimizer.state_dict())
    return reference.copied_state(model), optimizer, model.global_step


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
        lambda: model.fit(
            X, Y, batch_size=8, epochs=3, verbose=0, resume_from=tmp_path / "forged.h5"
        ),
        lambda: fitkit.load_model(tmp_path / "forged.h5", torch.nn.Linear(4, 2)),
    ):
        with pytest.raises(CheckpointError, match=f"has an invalid training state: {reason}"):
            attempt()
    assert reference.is_same(state_of(model), before)


def test_a_state_that_an_optimizer_cannot_take_leaves_the_model_as_it_was(tmp_path, written):
    document, arrays = copy.deepcopy(written[0]), written[1]
    text = document["state"]["dict"]["training"]["dict"]["optimizers"][0]["dict"]["state"]
    text["dict"]["state"]["items"][0][1]["dict"]["step"] = "x"
    write_container(tmp_path / "forged.h5", document, arrays)
    model = compiled()
    before = reference.copied_state(model)
    with pytest.raises(CheckpointError, match="'step' is 'x', not one number from 0"):
        model.load(tmp_path / "forged.h5")
    reference.assert_same_weights(model, before)
    assert model.global_step == 0
    model.fit(X, Y, verbose=0)


@pytest.mark.filterwarnings("ignore:.*with other compile settings")
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
            assert reference.is_same(state_of(model), before), part


OPTIONS = [
    ("eps", None),
    ("weight_decay", None),
    ("lr", "x"),
    ("amsgrad", 1.5),
    ("maximize", [1]),
    ("betas", {"tuple": [0.9, None]}),
    ("betas", {"tuple": [0.9, 1.0]}),
    ("eps", float("nan")),
    ("eps", {"tensor": 0}),
    ("betas", {"tuple": [0.9, {"tensor": 0}]}),
    ("lr", {"tensor": 0}),
    ("initial_lr", "x"),
    ("weight_decay", {"int": "0x" + "f" * 5_000}),
    ("amsgrad", True),
    ("amsgrad", -1),
    ("weight_decay", 1 << 70),
]


@pytest.mark.parametrize(("name", "value"), OPTIONS)
def test_options_that_no_step_can_be_made_with_are_refused(tmp_path, written, name, value):
    document, arrays = copy.deepcopy(written[0]), written[1]
    state = document["state"]["dict"]["training"]["dict"]["optimizers"][0]["dict"]["state"]
    state["dict"]["param_groups"][0]["dict"][name] = value
    write_container(tmp_path / "forged.h5", document, arrays)
    model = compiled()
    before = state_of(model)
    with pytest.raises(CheckpointError, match="doesn't fit this AdamW"):
        model.load(tmp_path / "forged.h5")
    assert reference.is_same(state_of(model), before)


def test_whole_numbers_too_long_to_show_are_refused_without_showing_them(tmp_path, written):
    for value in ({"Size": [1 << 70]}, {"int": "0x" + "f" * 5_000}):
        document, arrays = copy.deepcopy(written[0]), written[1]
        document["state"]["dict"]["training"]["dict"]["updates"] = value
        write_container(tmp_path / "forged.h5", document, arrays)
        with pytest.raises(CheckpointError):
            compiled().load(tmp_path / "forged.h5")


def test_options_of_a_compilation_too_long_to_show_are_told_of(tmp_path, written):
    document, arrays = copy.deepcopy(written[0]), written[1]
    optimizer = document["state"]["dict"]["training"]["dict"]["optimizers"][0]["dict"]
    optimizer["options"]["dict"]["eps"] = {"int": "0x" + "f" * 5_000}
    write_container(tmp_path / "forged.h5", document, arrays)
    with pytest.warns(UserWarning, match="eps=a int too long to show"):
        compiled().load(tmp_path / "forged.h5")


@pytest.mark.parametrize("shape", [(), (1,), (1, 3), (2, 1)])
@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_a_state_smaller_than_its_parameter_is_refused(tmp_path, name, shape):
    # The step in one pass would read and write beyond it.
    def make():
        model = fitkit.Model(torch.nn.Linear(3, 2, bias=False))
        model.compile(name, "mse", accelerator="cpu")
        return model

    model = make()
    model.fit(X[:, :3], Y, verbose=0)
    model.save(tmp_path / "run.h5")
    with read_container(tmp_path / "run.h5") as reader:
        document = copy.deepcopy(reader.document)
        arrays = [reader.read(i) for i in range(len(reader))]
    kept = document["state"]["dict"]["training"]["dict"]["optimizers"][0]["dict"]["state"]
    for key in ("exp_avg", "exp_avg_sq"):
        number = kept["dict"]["state"]["items"][0][1]["dict"][key]["tensor"]
        arrays[number] = torch.ones(shape)
    write_container(tmp_path / "forged.h5", document, arrays)
    for use in (
        lambda new: new.load(tmp_path / "forged.h5"),
        lambda new: new.fit(X[:, :3], Y, epochs=2, verbose=0, resume_from=tmp_path / "forged.h5"),
    ):
        new = make()
        before = new.net.weight.clone()
        with pytest.raises(CheckpointError, match="'exp_avg' is float32 .*, the parameter"):
            use(new)
        assert torch.equal(new.net.weight, before)


SCHEDULER = [
    ("last_epoch", "x"),
    ("last_epoch", None),
    ("gamma", {"tuple": []}),
    ("step_size", 0),
    ("step", 3),
    ("optimizer", None),
    ("_last_lr", [1.0, 2.0]),
    ("base_lrs", ["x"]),
]


@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize(("name", "value"), SCHEDULER)
def test_a_schedulers_state_of_another_kind_is_refused(tmp_path, name, value, fitted):
    def make():
        model = fitkit.Model(torch.nn.Linear(4, 2))
        scheduler = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2)
        model.compile("sgd", "mse", lr_scheduler=scheduler, accelerator="cpu")
        return model

    model = make()
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "run.h5")
    with read_container(tmp_path / "run.h5") as reader:
        document = copy.deepcopy(reader.document)
        arrays = [reader.read(i) for i in range(len(reader))]
    state = document["state"]["dict"]["training"]["dict"]["schedulers"][0]["dict"]["state"]
    state["dict"][name] = value
    write_container(tmp_path / "forged.h5", document, arrays)
    new = make()
    if fitted:
        new.fit(X, Y, verbose=0)
    before = state_of(new)
    with pytest.raises(CheckpointError, match="StepLR"):
        new.load(tmp_path / "forged.h5")
    assert reference.is_same(state_of(new), before)
    new.fit(X, Y, verbose=0)


@pytest.mark.parametrize("place", [-1, 625, 700, (1 << 31) - 1, -(1 << 31)])
def test_a_place_outside_of_numpys_numbers_is_refused(place):
    # np.random.set_state takes it, and the next draw reads there.
    state = random_state()
    state["numpy"]["state"]["pos"] = place
    with pytest.raises(ValueError, match=f"NumPy's place in it is {place}"):
        check_random_state(state)


@pytest.mark.parametrize(("left", "place"), [(600, 600), (624, 2), (2, 624), (624, 624)])
def test_a_place_from_which_torch_would_read_too_far_is_refused(left, place):
    # torch.set_rng_state takes it, and the draws that are left lead past the numbers.
    state = random_state()
    raw = state["torch"].numpy()
    raw[8:24] = np.frombuffer(struct.pack("=iiQ", left, 1, place), np.uint8)
    torch.Generator().set_state(state["torch"])
    with pytest.raises(ValueError, match=f"torch's place in it is {place}, with {left - 1}"):
        check_random_state(state)


def test_random_states_that_give_nothing_but_zeros_are_refused():
    # np.random.randn would wait for ever for another number.
    def of_python(state):
        version, numbers, gauss = state["python"]
        state["python"] = (version, [0] * 624 + [numbers[-1]], gauss)

    def of_numpy(state):
        state["numpy"]["state"]["key"][:] = 0

    def of_torch(state):
        state["torch"].numpy()[24 : 24 + 8 * 624] = 0

    for spoil in (of_python, of_numpy, of_torch):
        state = random_state()
        spoil(state)
        with pytest.raises(ValueError, match="all of it is zero"):
            check_random_state(state)


def test_random_states_are_right_wherever_the_generators_are():
    drawn = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        check_random_state(random_state([torch.Generator()]))
        for _ in range(70):  # over the end of all 624 numbers
            torch.rand(10)
            np.random.rand(5)
            random.random()
            check_random_state(random_state([torch.Generator()]))
    finally:
        torch.set_rng_state(drawn[0])
        np.random.set_state(drawn[1])
        random.setstate(drawn[2])


def test_a_random_state_of_another_device_than_the_generators_is_refused_or_left_out():
    state = random_state([torch.Generator()])
    state["torch"] = torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="a random state can't be one"):
        check_random_state(state)
    state = random_state([torch.Generator()])
    state["own"] = [torch.zeros(16, dtype=torch.uint8)]  # a GPU's
    check_random_state(state)
    generator = torch.Generator().manual_seed(3)
    set_random_state(state, [generator])
    assert generator.initial_seed() == 3


@pytest.mark.parametrize("state", [5, {"dict": {"wait": "x"}}])
def test_a_callback_that_cannot_take_its_state_is_named(tmp_path, written, state):
    document, arrays = copy.deepcopy(written[0]), written[1]
    document["state"]["dict"]["progress"]["dict"]["callbacks"][0]["dict"]["state"] = state
    write_container(tmp_path / "forged.h5", document, arrays)
    with pytest.raises(CheckpointError, match="EarlyStopping can't resume from its state"):
        compiled().fit(
            X,
            Y,
            batch_size=8,
            epochs=3,
            verbose=0,
            callbacks=EarlyStopping("loss"),
            resume_from=tmp_path / "forged.h5",
        )


def test_a_file_that_says_otherwise_how_its_model_was_compiled_asks_for_it(tmp_path, written):
    document, arrays = copy.deepcopy(written[0]), written[1]
    put(document, ("compiled",), {"dict": {"named": 3}})
    write_container(tmp_path / "forged.h5", document, arrays)
    with pytest.raises(CheckpointError, match="doesn't say how its model was compiled"):
        fitkit.load_model(tmp_path / "forged.h5", torch.nn.Linear(4, 2))


class Named(torch.nn.Module):
    """The same parameters, in the order that is asked for."""

    def __init__(self, *names, rows=2):
        super().__init__()
        for name in names:
            self.register_parameter(name, torch.nn.Parameter(torch.ones(rows)))

    def forward(self, prediction, target=None):
        loss = sum(parameter.sum() * prediction.mean() for parameter in self.parameters())
        return prediction * self.a if target is None else loss


@pytest.mark.parametrize(("optimizer", "net", "loss", "words"), [
    ("adam", Named("b", "a"), Named("c"), "in another order"),
    ("sgd", Named("a", "b"), Named("c", rows=3), "losses with the values"),
])  # fmt: skip
def test_parameters_in_another_order_or_of_another_loss_are_told(
    tmp_path, optimizer, net, loss, words
):
    model = fitkit.Model(Named("a", "b"))
    model.compile(optimizer, Named("c"))
    model.fit(torch.randn(4, 2), torch.randn(4, 2), verbose=0)
    model.save(tmp_path / "c.h5")
    other = fitkit.Model(net)
    other.compile(optimizer, loss)
    with pytest.raises(CheckpointError, match=words):
        other.load(tmp_path / "c.h5")


def test_schedulers_that_functions_make_are_compared_when_they_are_made(tmp_path):
    def model_with(schedule):
        return reference.compiled(linear(4, 2), "sgd", "mse", lr_scheduler=schedule)

    model = model_with(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2))
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "c.h5")
    other = model_with(lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    other.load(tmp_path / "c.h5")
    with pytest.raises(CheckpointError, match="has the schedulers StepLR"):
        other.fit(X, Y, verbose=0)


def test_load_model_wants_a_net(tmp_path):
    with pytest.raises(ArgumentTypeError, match="net=None must be the torch.nn.Module"):
        fitkit.load_model(tmp_path / "any.h5", None)


def test_what_a_model_checkpoint_refuses_at_once():
    with pytest.raises(ConfigurationError, match="is for the best checkpoint, but save_last=True"):
        ModelCheckpoint("runs/last.h5", "loss", save_top_k=1, save_last=True)
    with pytest.raises(ConfigurationError, match="mode='x'"):
        ModelCheckpoint("{epoch}.h5", mode="x")


def test_the_length_of_lbfgss_history_is_a_whole_number():
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(net.parameters())
    loss = lambda: net(torch.ones(1, 2)).square().sum()  # noqa: E731

    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["history_size"] = torch.ones(3)
    with pytest.raises(CheckpointError, match="history_size"):
        check_optimizer_state(torch.optim.LBFGS(net.parameters()), state)


def test_what_only_the_optimizer_itself_refuses_leaves_the_loss_as_it_was(tmp_path):
    class Picky(torch.optim.SGD):
        def load_state_dict(self, state):
            raise KeyError("cheese")

    def made():
        loss = Named("c")
        model = reference.compiled(
            Named("a", "b"), functools.partial(Picky, lr=0.1), loss,
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        )  # fmt: skip
        model.fit(torch.randn(4, 2), torch.randn(4, 2), verbose=0)
        return model, loss

    made()[0].save(tmp_path / "c.h5")
    model, loss = made()
    before = reference.copied_state(model), loss.c.detach().clone()
    with pytest.raises(CheckpointError, match="can't take"):
        model.load(tmp_path / "c.h5")
    assert reference.is_same((reference.copied_state(model), loss.c.detach()), before)


def test_values_of_an_epoch_that_dont_fit_its_metrics_are_told(tmp_path, written):
    document, arrays = copy.deepcopy(written[0]), written[1]
    put(document, ("progress", "noted", 0, "metrics"), {"dict": {"mae": 3}})
    write_container(tmp_path / "forged.h5", document, arrays)
    with pytest.raises(CheckpointError, match="The epoch's values in the checkpoint don't match"):
        compiled().fit(X, Y, batch_size=8, epochs=3, verbose=0, resume_from=tmp_path / "forged.h5")
