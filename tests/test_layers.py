"""Imports run one way: a module imports from lower layers and its own folder."""

import ast
from pathlib import Path

import pytest

from tests.house import largest_ring

PACKAGE = Path(__file__).parent.parent / "fitkit"

LAYERS = {
    "accelerators": 0,
    "errors": 0,
    "foreign_names": 0,
    "typing": 0,
    "version": 0,
    "registry": 1,
    "activation_checkpointing": 1,
    "trees": 1,
    "samples": 1,
    "tensors": 1,
    "arguments": 1,
    "outputs": 1,
    "random_states": 1,
    "pickling": 1,
    "buffers": 1,
    "modes": 1,
    "distributed": 2,
    "data": 3,
    "metrics": 3,
    "losses": 3,
    "optimizers": 3,
    "schedulers": 4,
    "checkpoint": 3,
    "callbacks": 9,
    "loggers": 10,
    "pictures": 4,
    "progress": 1,
    "compilation": 5,
    "fit_state": 6,
    "record": 7,
    "module": 8,
    "hooks": 9,
    "training": 10,
    "doctor": 3,
    "export": 10,
    "summary": 2,
    "model": 11,
    "model_names": 10,
    "precisions": 12,
    "strategies": 12,
    "sklearn": 12,
    "tune": 12,
    "planning": 13,
    "verification": 13,
    "__init__": 14,
    "__main__": 15,
}
"""The layer of each module or folder; what isn't named here fails the test."""

WITHIN_A_LAYER = {
    ("activation_checkpointing", "arguments"),
    ("arguments", "registry"),
    ("hooks", "callbacks"),
    ("metrics", "losses"),
    ("outputs", "trees"),
    ("random_states", "arguments"),
    ("samples", "trees"),
}
"""Imports within one layer that can't make a ring."""


def subject(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_subjects(tree: ast.AST) -> set[str]:
    """The fitkit modules that a file imports, those for annotations alone included."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "fitkit":
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fitkit."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found.update(
                alias.name.split(".")[1] for alias in node.names if alias.name.startswith("fitkit.")
            )
    return found & set(LAYERS)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_a_module_imports_only_from_lower_layers(path):
    own = subject(path)
    assert own in LAYERS, f"give {own} a layer"
    upward = [
        name
        for name in imported_subjects(ast.parse(path.read_text()))
        if name != own and LAYERS[name] >= LAYERS[own] and (own, name) not in WITHIN_A_LAYER
    ]
    assert not upward, f"{path.name} ({own}) imports {upward}"


def test_no_imports_make_a_ring():
    assert largest_ring(annotations=True) == []


def test_no_file_outgrows_its_subject():
    long = {
        str(path.relative_to(PACKAGE)): lines
        for path in PACKAGE.rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 700
    }
    # model.py is the public face: two thirds of it are docstrings and signatures.
    long.pop("model.py", None)
    assert not long
