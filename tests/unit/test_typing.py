"""The types of what users give: the names are the registries', and run as they are written."""

import copy
import inspect
import pickle
import re
import typing
from pathlib import Path

import pytest
import torch

import fitkit
from fitkit.typing import UNSET, Name, OptimizerName, SchedulerName, Unset
from tests import names

PINNED = re.search(
    r"^torch==(\S+)$",
    (Path(__file__).parents[2] / "requirements" / "constraints.txt").read_text(),
    re.MULTILINE,
)[1]


@pytest.mark.skipif(
    torch.__version__.partition("+")[0] != PINNED,
    reason=f"the names have the optimizers and schedulers of torch {PINNED}",
)
def test_the_names_are_those_of_the_registries():
    """After a change of the registries, or of torch: `python -m tests.names`."""
    before, inside, after = names.parts()
    assert before and inside and after
    assert inside == names.registered()


def test_each_spelling_is_known():
    from fitkit.optimizers import OPTIMIZERS
    from fitkit.schedulers import SCHEDULERS

    assert all(name in OPTIMIZERS for name in typing.get_args(OptimizerName))
    assert all(name in SCHEDULERS for name in typing.get_args(SchedulerName))


def test_a_name_is_its_text():
    model = fitkit.Model(torch.nn.Linear(1, 1))
    model.compile(Name("ADAMW"))
    assert type(model.optimizer).__name__ == "AdamW"
    with pytest.raises(fitkit.ConfigurationError, match=r"Did you mean 'Adam'\?"):
        model.compile(Name("adma"))


def test_what_is_left_out_shows_as_dots_and_stays_one_object():
    parameters = inspect.signature(fitkit.Model.compile).parameters
    assert all(p.default is UNSET for name, p in parameters.items() if name != "self")
    assert str(parameters["precision"]).endswith(" = ...")
    assert pickle.loads(pickle.dumps(UNSET)) is copy.deepcopy(UNSET) is UNSET
    assert list(Unset) == [UNSET]
