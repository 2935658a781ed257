"""Names, trees, outputs, argument checks, seeds."""

import copy
import pickle
import random
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch

import fitkit
from fitkit import arguments, outputs, trees
from fitkit.errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigurationError,
    OutOfMemoryError,
)
from fitkit.registry import Registry

Pair = namedtuple("Pair", "a b")


def test_a_name_is_found_in_any_case_and_with_or_without_underscores():
    registry = Registry("loss")
    registry.add("mean_squared_error", 1, "mse")
    assert registry["MeanSquaredError"] == registry["MSE"] == registry["mean-squared-error"] == 1


def test_an_unknown_name_gets_the_nearest_and_all_names():
    registry = Registry("optimizer", hint="Or an instance.")
    registry.add("Adam", 1)
    registry.add("SGD", 2)
    with pytest.raises(ConfigurationError) as caught:
        registry["adm"]
    message = str(caught.value)
    assert "'adm'" in message and "Did you mean 'Adam'?" in message and "'SGD'" in message
    assert message.endswith("Or an instance. (FK028: python -m fitkit explain FK028)")


def test_a_promised_name_is_imported_when_it_is_looked_up_and_belongs_to_its_entry():
    registry = Registry("kind")
    registry.promise("collections:OrderedDict", "Ordered")
    assert "ordered" in registry and list(registry) == ["Ordered"]
    with pytest.raises(ValueError, match="'ORDERED' is there already"):
        registry.add("ORDERED", dict)
    assert registry["ordered"] is OrderedDict is registry.add("Ordered", OrderedDict)
    assert registry.holds("ordered", OrderedDict)
    assert not registry.holds("ordered", dict) and not registry.holds("other", OrderedDict)


def test_a_promise_outlives_an_import_that_fails(monkeypatch, tmp_path):
    registry = Registry("kind")
    registry.promise("comes_later_to_the_path:thing", "later")
    with pytest.raises(ImportError):
        registry["later"]
    (tmp_path / "comes_later_to_the_path.py").write_text("thing = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "later" in registry and registry["later"] == 3


def test_map_leaves_keeps_containers():
    tree = {"a": [1, (2, 3)], "b": Pair(4, 5)}
    mapped = trees.map_leaves(lambda leaf: leaf * 10, tree)
    assert mapped == {"a": [10, (20, 30)], "b": Pair(40, 50)}
    assert isinstance(mapped["b"], Pair)


def test_concatenate_joins_along_the_batch_and_scalars_become_a_vector():
    one = {"x": torch.ones(2, 3), "s": torch.tensor(1.0)}
    two = {"x": torch.zeros(1, 3), "s": torch.tensor(2.0)}
    joined = trees.concatenate([one, two])
    assert joined["x"].shape == (3, 3)
    assert joined["s"].tolist() == [1.0, 2.0]


def test_outputs_have_names():
    tensor = torch.zeros(1)
    assert list(outputs.named_outputs(tensor)) == [""]
    assert list(outputs.named_outputs((tensor, tensor))) == [None, "output_0", "output_1"]
    nested = {"a": tensor, "b": {"c": tensor, "d": [tensor, tensor]}}
    names = ["a", "b", "b/c", "b/d", "b/d/output_0", "b/d/output_1"]
    assert list(outputs.named_outputs(nested)) == [None, *names]
    found = outputs.Outputs(outputs.named_outputs(nested))
    assert found.names == ["a", "b/c", "b/d/output_0", "b/d/output_1"]
    assert found.outputs_in("b") == found.names[1:]
    with pytest.raises(ConfigurationError, match="Two of the net's outputs have the name 'b/c'"):
        outputs.named_outputs({"b": {"c": tensor}, "b/c": tensor})


def test_targets_that_do_not_match_the_outputs_are_named():
    names = outputs.Outputs(outputs.named_outputs({"a": 1, "b": 2}))
    with pytest.raises(ConfigurationError, match=r"target has 1 entries.*2 outputs"):
        outputs.by_output([1], names, "target")
    with pytest.raises(ConfigurationError, match=r"\['c'\].*\['a', 'b'\]"):
        outputs.by_output({"c": 1}, names, "target")


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (True, ArgumentTypeError, "bool"),
        (2.0, ArgumentTypeError, "float"),
        ("3", ArgumentTypeError, "str"),
        (0, ConfigurationError, "at least 1"),
        (-4, ConfigurationError, "-4"),
    ],
)
def test_a_count_must_be_a_positive_int(value, error, words):
    with pytest.raises(error, match=words):
        arguments.check_count("epochs", value)


def test_numpy_integers_are_counts():
    arguments.check_count("epochs", np.int64(3))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0, "x", True])
def test_a_number_must_be_finite_and_within_its_bounds(value):
    with pytest.raises(ConfigurationError):
        arguments.check_number("clip", value, above=0)


def test_a_seed_makes_every_generator_repeat():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    assert fitkit.set_seed(7) == 7
    first = draw()
    fitkit.set_seed(7)
    assert draw() == first
    fitkit.set_seed(8)
    assert draw() != first


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "7", True, None])
def test_a_seed_must_be_a_number_that_all_generators_take(seed):
    with pytest.raises(ConfigurationError):
        fitkit.set_seed(seed)


def test_errors_are_what_python_users_expect_too():
    assert issubclass(fitkit.ConfigurationError, ValueError)
    assert issubclass(ArgumentTypeError, TypeError)
    assert issubclass(fitkit.CheckpointError, OSError)
    assert issubclass(fitkit.CheckpointError, ValueError)
    assert issubclass(fitkit.WorkerError, RuntimeError)
    for error in (fitkit.ConfigurationError, fitkit.CheckpointError, fitkit.WorkerError):
        assert issubclass(error, fitkit.FitkitError)


def test_an_error_with_a_code_ends_with_it_and_keeps_it_on_its_way_to_another_process():
    for kind in (ConfigurationError, ArgumentTypeError, CheckpointError, OutOfMemoryError):
        error = kind("x is empty.", code="FK005")
        assert str(error) == "x is empty. (FK005: python -m fitkit explain FK005)"
        for same in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert (type(same), str(same), same.code) == (kind, str(error), "FK005")
        assert str(kind("x is empty.")) == "x is empty." and kind("x is empty.").code is None


def test_dir_shows_what_is_public_and_nothing_else():
    import fitkit

    assert sorted(fitkit.__all__) == dir(fitkit)
    assert all(hasattr(fitkit, name) for name in dir(fitkit))
