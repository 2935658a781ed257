"""Docstrings: every public name has one with an example that runs, and is in the reference."""

import doctest
import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import fitkit.seams

ROOT = Path(__file__).parents[2]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
WITH_EXAMPLES = sorted(
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    for path in (ROOT / "fitkit").rglob("*.py")
    if ">>> " in path.read_text()
)
PUBLIC = (
    "fitkit",
    "fitkit.callbacks",
    "fitkit.loggers",
    "fitkit.losses",
    "fitkit.optimizers",
    "fitkit.pictures",
    "fitkit.precisions",
    "fitkit.sklearn",
    "fitkit.data",
    "fitkit.strategies",
    "fitkit.tune",
)
NEEDS = {
    "fitkit.sklearn": "sklearn",
    "fitkit.extras.pictures.confusion_matrix": "matplotlib",
    "fitkit.extras.pictures.curves": "matplotlib",
    "fitkit.extras.pictures.run_values": "matplotlib",
}
"""Modules that need an optional package, when they are imported or in their examples."""
MISSING = tuple(name for name, package in NEEDS.items() if not importlib.util.find_spec(package))
NAMES_OF_OPTIMIZERS = ["QAdamOptimizer", "muon", "parameter_groups"]
"""What fitkit.optimizers has for users; it has no __all__."""


def public_names():
    """(module, name) of all that users may write."""
    for name in PUBLIC:
        if name in MISSING:
            yield name, "all"
            continue
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", NAMES_OF_OPTIMIZERS):
            if not inspect.ismodule(getattr(module, public)):
                yield name, public


def members_of(kind):
    """The names of a class's public methods and properties that are fitkit's."""
    for name, value in inspect.getmembers(kind):
        code = value.fget if isinstance(value, property) else value
        is_ours = str(getattr(code, "__module__", "")).startswith("fitkit.")
        if not name.startswith("_") and is_ours and hasattr(kind, name):
            yield name


def reference():
    """All that the pages of the reference show: `fitkit.Model`, `fitkit.Model.fit`, …"""
    shown = set()
    for page in (ROOT / "docs" / "api").glob("*.md"):
        kind = ""
        for line in page.read_text().splitlines():
            directive = re.match(r"( *)\.\. auto\w+:: ([\w.]+)", line)
            members = re.match(r" +:members: (.+)", line)
            if directive and not directive[1]:
                kind = directive[2]
                shown.add(kind)
            elif directive:
                shown.add(f"{kind}.{directive[2]}")
            elif members:
                shown |= {f"{kind}.{name}" for name in members[1].split(", ")}
    return shown


def at(path):
    """What stands at a path such as `fitkit.Model.fit`."""
    found = fitkit
    for part in path.split(".")[1:]:
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_docstrings_run(name, tmp_path, monkeypatch):
    if name.startswith(MISSING):
        pytest.skip(f"a package isn't installed that {name} needs")
    monkeypatch.chdir(tmp_path)
    outcome = doctest.testmod(importlib.import_module(name), optionflags=FLAGS)
    assert outcome.attempted and not outcome.failed


@pytest.mark.parametrize(
    ("module", "name"), [pytest.param(*found, id=".".join(found)) for found in public_names()]
)
def test_a_public_name_has_an_example_and_stands_in_the_reference(module, name):
    if module in MISSING:
        pytest.skip(f"{NEEDS[module]} isn't installed")
    found = getattr(importlib.import_module(module), name)
    assert ">>> " in (inspect.getdoc(found) or "")
    if inspect.isclass(found):
        undocumented = [
            member for member in members_of(found) if not inspect.getdoc(getattr(found, member))
        ]
        assert undocumented == []
    shown = [path for path in reference() if path.rpartition(".")[2] == name]
    assert any(at(path) is found for path in shown), f"{module}.{name}"


def test_every_method_of_model_stands_in_the_reference():
    wanted = {f"fitkit.Model.{name}" for name in members_of(fitkit.Model)}
    absent = wanted - reference()
    assert absent <= {"fitkit.Model.forward"}


def test_each_page_of_the_door_stands_in_the_reference():
    assert {f"fitkit.seams.{page}" for page in fitkit.seams.PAGES} <= reference()


def test_the_reference_names_nothing_that_is_not_there():
    for path in reference():
        if not path.startswith(MISSING):
            at(path)
