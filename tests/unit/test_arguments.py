"""Checks of arguments: what they return, and how a message shows what was given."""

import collections
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fitkit
from fitkit.arguments import check_choice, check_count, check_flag, check_number, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError


@dataclasses.dataclass
class Point:
    x: object
    y: int = 2


Pair = collections.namedtuple("Pair", ["a", "b"])
SHORT = [
    None, 3, -1.5, "a'b", b"x", True, [], (), (1,), (1, 2), set(), {1}, frozenset({2}), frozenset(),
    {"a": [1, {"b": None}]}, Point([1]), Pair(1, "z"), range(3), np.float64,
]  # fmt: skip


class Loud:
    """Counts how often it is shown; with `fails`, its repr raises."""

    def __init__(self, fails=False):
        self.shown, self.fails = 0, fails

    def __repr__(self):
        self.shown += 1
        if self.fails:
            raise RuntimeError("no")
        return "loud"


@pytest.mark.parametrize("value", SHORT, ids=repr)
def test_a_short_value_is_shown_as_python_shows_it(value):
    assert describe(value) == repr(value)


def nested(make, levels):
    found = 0
    for _ in range(levels):
        found = make(found)
    return found


@pytest.mark.parametrize(
    "value",
    [
        nested(lambda one: [one, one], 500),
        nested(lambda one: (one, one), 60),
        nested(lambda one: {"a": one, "b": one}, 60),
        nested(lambda one: Point(Pair(one, SimpleNamespace(c=one))), 60),
        nested(lambda one: collections.OrderedDict(a=one, b=one), 60),
        "x" * 10**7,
        10**5000,
        [10**5000] * 10**6,
    ],
    ids=["lists", "tuples", "dicts", "records", "ordered", "text", "number", "numbers"],
)
def test_what_no_memory_could_show_is_shown_in_one_line(value):
    assert len(describe(value)) <= 80


def test_only_what_is_shown_is_asked_for_its_repr():
    one = Loud()
    assert describe([one] * 10**6).startswith("list [loud, loud")
    assert one.shown < 20
    assert "Loud" in describe([Loud(fails=True)])
    assert describe([torch.zeros(2, 3)]) == "[Tensor of shape (2, 3)]"


@pytest.mark.parametrize("make", [np.int64, np.int8, np.array, torch.tensor])
def test_whole_numbers_in_other_containers_become_ints(make):
    found = check_count("n", make(3))
    assert found == 3 and type(found) is int
    assert check_count("n", None, optional=True) is None
    with pytest.raises(ConfigurationError):
        check_count("n", make(0))


@pytest.mark.parametrize(
    "value", [True, np.bool_(True), torch.tensor(True), 2.0, np.float32(2), "2"]
)
def test_what_is_no_whole_number_is_refused(value):
    with pytest.raises(ArgumentTypeError):
        check_count("n", value)


def test_other_numbers_flags_and_words_become_pythons_own():
    assert check_number("x", np.float32(0.5)) == 0.5
    kinds = [check_number("x", np.float32(0.5)), check_number("x", np.int16(2))]
    assert list(map(type, kinds)) == [float, int]
    assert check_flag("x", np.bool_(False)) is False
    assert type(check_choice("x", np.str_("a"), ("a", "b"))) is str
    with pytest.raises(ConfigurationError):
        check_number("x", np.float64("nan"))


def test_verbs_and_callbacks_take_numpys_numbers():
    """As a search over `np.arange` gives them, with the numbers of Python's own."""
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True)
    weights = []
    for whole, real, flag in ((int, float, bool), (np.int64, np.float64, np.bool_)):
        torch.manual_seed(0)
        model = fitkit.Model(torch.nn.Linear(4, 1))
        model.compile(
            "sgd", "mse", learning_rate=real(0.1), accumulate_grad_batches=whole(2),
            devices=whole(1), accelerator="cpu", sync_batchnorm=flag(False),
            gradient_clip_val=real(1.0), steps_per_execution=whole(1), precision=whole(32),
        )  # fmt: skip
        callbacks = [
            fitkit.callbacks.EarlyStopping(patience=whole(5), restore_best_weights=flag(True)),
            fitkit.callbacks.GradientAccumulationScheduler({whole(1): whole(1)}),
            fitkit.callbacks.EMA(real(0.5), update_every_n_steps=whole(1)),
        ]
        model.fit(
            x, y, batch_size=whole(8), epochs=whole(3), initial_epoch=whole(1), verbose=whole(0),
            steps_per_epoch=whole(3), validation_split=real(0.25), validation_freq=whole(1),
            validation_batch_size=whole(4), validation_steps=whole(1), shuffle=flag(False),
            callbacks=callbacks,
        )  # fmt: skip
        model.evaluate(x, y, batch_size=whole(8), steps=whole(2), verbose=whole(0))
        model.predict(x, batch_size=whole(8), verbose=whole(0))
        weights.append(model.net.weight.detach().clone())
    assert torch.equal(*weights)
