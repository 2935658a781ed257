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


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_h5py_is_imported_only_when_a_file_is_read_or_written(file):
    tree = ast.parse(file.read_text())
    at_import = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert "h5py" not in imported(ast.Module(at_import, []))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_datasets_are_opened_in_one_place(file):
    opens = {"h5o.open", "h5d.open"} & {name for name, _ in calls(ast.parse(file.read_text()))}
    assert not opens or file.stem == "container"
