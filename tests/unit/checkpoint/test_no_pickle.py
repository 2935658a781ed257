"""Rules for all of the package's code about files."""

import ast
from pathlib import Path

import pytest

import fitkit.checkpoint

FILES = sorted(Path(fitkit.checkpoint.__file__).parent.glob("*.py"))
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]


def calls(tree):
    """The calls of dotted names, as text, with the call itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_nothing_in_the_package_can_unpickle(file):
    tree = ast.parse(file.read_text())
    assert not PICKLES & set(imported(tree))
    for name, call in calls(tree):
        assert name not in ("eval", "exec", "__import__", "importlib.import_module", "np.load")
        if name in ("torch.load", "torch.serialization.load"):
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert options.get("weights_only") == "True"


def is_for_types(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_h5py_is_imported_by_the_writer_alone_and_when_it_writes(file):
    tree = ast.parse(file.read_text())
    other = [node for node in tree.body if not is_for_types(node)]
    importing = [node for node in other if "h5py" in imported(ast.Module([node], []))]
    names = [getattr(node, "name", "") for node in importing]
    assert names == (["_lay_out"] if file.stem == "container" else [])
