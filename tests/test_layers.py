"""Imports run one way: a module imports from lower layers and its own folder."""

import ast
import subprocess
import sys
from pathlib import Path

from tests.house import largest_ring

PACKAGE = Path(__file__).parent.parent / "fitkit"

LAYERS = {
    "accelerators": 0,
    "errors": 0,
    "optimizer_copies": 0,
    "foreign_names": 0,
    "printing": 0,
    "shortcuts": 0,
    "typing": 0,
    "version": 0,
    "registry": 1,
    "namesake": 1,
    "guests": 2,
    "hyperparameters": 2,
    "trees": 1,
    "samples": 1,
    "batch_kinds": 1,
    "tensors": 1,
    "arguments": 1,
    "outputs": 1,
    "random_states": 1,
    "pickling": 1,
    "buffers": 1,
    "closures": 1,
    "held_modules": 1,
    "modes": 1,
    "scopes": 1,
    "distributed": 2,
    "data": 3,
    "metrics": 3,
    "losses": 3,
    "optimizers": 3,
    "schedulers": 4,
    "checkpoint": 3,
    "progress": 1,
    "pulse": 1,
    "trained": 4,
    "compilation": 5,
    "fit_state": 6,
    "record": 7,
    "module": 8,
    "callbacks": 9,
    "hooks": 9,
    "training": 10,
    "model_names": 10,
    "model": 11,
    "precisions": 12,
    "strategies": 12,
    "seams": 12,
    "extras": 13,
    "loggers": 14,
    "pictures": 14,
    "sklearn": 14,
    "transforms": 14,
    "tune": 14,
    "__init__": 15,
    "__main__": 16,
}
"""The layer of each module or folder; what isn't named here fails the test."""

STATELESS = {
    "accelerators",
    "arguments",
    "buffers",
    "errors",
    "foreign_names",
    "modes",
    "outputs",
    "printing",
    "random_states",
    "registry",
    "samples",
    "tensors",
    "trees",
    "typing",
}
"""Modules that hold nothing of a training: extras may use them beside `seams`."""

PUBLIC = {"callbacks", "model", "version"}
"""Modules from which extras may import what users import from them, too."""

FACES = {
    "__main__.py": {"commands"},
    "callbacks/history.py": {"pictures"},
    "checkpoint/weights.py": {"rehearsal"},
    "closures.py": {"bytecode"},
    "distributed/devices.py": {"xla_adapters"},
    "distributed/resolve.py": {"launchers"},
    "errors.py": {"notebook_tracebacks"},
    "optimizers.py": {"parameter_groups"},
    "fit_state.py": {"loss_scaling"},
    "losses/class_weights.py": {"class_weights"},
    "losses/guards.py": {"held_tensors"},
    "losses/loss.py": {"class_labels", "summing_losses"},
    "losses/own.py": {"own_loss"},
    "metrics/torchmetrics_adapter.py": {"torchmetrics_objects"},
    "model.py": {
        "export",
        "intervals",
        "pictures",
        "predictions",
        "streamed_predictions",
        "summary",
    },
    "distributed/meta_tensors.py": {"unfilled"},
    "training/batch_changes.py": {"batch_transforms"},
    "training/compiler.py": {"jit"},
    "training/data_wait.py": {"data_advice"},
    "training/evaluate.py": {"bad_numbers"},
    "training/first_batch.py": {"explain", "own_loss"},
    "training/fit.py": {"bad_numbers", "ranks_alike", "splitting", "sync_batchnorm"},
    "training/on_batch.py": {"bad_numbers"},
    "training/own_step.py": {"explain"},
    "training/step.py": {"explain"},
    "training/lone_watch.py": {"whereabouts"},
    "training/surroundings.py": {"data_on_ranks", "explain"},
    "training/step_for.py": {"splitting"},
    "training/update.py": {"loss_scaling", "splitting"},
    "compilation.py": {"free_devices"},
}
"""Where a verb of the core's is an extra's face: it is imported when that verb is called."""

WITHIN_A_LAYER = {
    ("arguments", "registry"),
    ("errors", "printing"),
    ("foreign_names", "errors"),
    ("hooks", "callbacks"),
    ("metrics", "losses"),
    ("outputs", "trees"),
    ("random_states", "arguments"),
    ("samples", "trees"),
    ("batch_kinds", "registry"),
    ("batch_kinds", "tensors"),
    ("samples", "batch_kinds"),
    ("trees", "batch_kinds"),
    ("trees", "tensors"),
}
"""Imports within one layer that can't make a ring."""


def subject(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_extra(path: Path) -> bool:
    return path.relative_to(PACKAGE).parts[0] == "extras"


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


def test_a_module_imports_only_from_lower_layers():
    upward = []
    for path in sorted(PACKAGE.rglob("*.py")):
        own = subject(path)
        assert own in LAYERS, f"give {own} a layer"
        upward += [
            f"{path.name} ({own}) imports {name}"
            for name in imported_subjects(ast.parse(path.read_text())) - {"extras"}
            if name != own and LAYERS[name] >= LAYERS[own] and (own, name) not in WITHIN_A_LAYER
        ]
    assert upward == []


CORE = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if not is_extra(path) and LAYERS[subject(path)] != LAYERS["tune"]
]


def test_the_core_imports_an_extra_only_where_its_verb_is_called():
    for path in CORE:
        tree = ast.parse(path.read_text())
        for_types = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for part in node.body
            for inner in ast.walk(part)
        }
        in_functions = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            for inner in ast.walk(node)
        }
        extras = {
            node: node.module.split(".")[2]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("fitkit.extras.")
            and node not in for_types
        }
        assert extras.keys() <= in_functions, path
        assert set(extras.values()) <= FACES.get(str(path.relative_to(PACKAGE)), set()), path


def test_importing_compiling_and_training_import_no_extra():
    program = """
import sys, torch, fitkit
assert not [name for name in sys.modules if name.startswith("fitkit.extras")]
model = fitkit.Model(torch.nn.Linear(2, 1))
model.compile("adam", "mse", metrics=["mae"])
x, y = torch.randn(8, 2), torch.randn(8, 1)
model.fit(x, y, validation_data=(x, y), verbose=0)
model.predict(x, verbose=0)
print([name for name in sys.modules if name.startswith("fitkit.extras")])
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout == "[]\n", found.stderr


def test_extras_come_in_by_the_door():
    beyond = set()
    for path in sorted(PACKAGE.glob("extras/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("fitkit"):
                continue
            part = (node.module + ".").split(".")[1]
            is_page = part == "seams" and node.module != "fitkit.seams"
            if part not in {*STATELESS, *PUBLIC, "extras"} and not is_page:
                beyond |= {f"{node.module}.{alias.name}" for alias in node.names}
    beyond -= {f"fitkit.{name}" for name in STATELESS}
    assert not beyond


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
