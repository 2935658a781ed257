"""What a package manager, a type checker and the first import see."""

import ast
import configparser
import subprocess
import sys
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE = CHECKOUT / "fitkit"
CONFIGURATION = configparser.ConfigParser()
CONFIGURATION.read(CHECKOUT / "setup.cfg")

HEAVY = ["torchmetrics", "rich", "h5py", "sklearn", "matplotlib", "lightning_utilities"]


def requirements(text: str) -> list[Requirement]:
    return [Requirement(line) for line in text.splitlines() if line and line[0] not in "#-"]


def extras() -> dict[str, list[Requirement]]:
    section = CONFIGURATION["options.extras_require"]
    return {name: requirements(section[name].strip()) for name in section}


def pinned() -> dict[str, Requirement]:
    text = (CHECKOUT / "requirements" / "constraints.txt").read_text()
    return {requirement.name: requirement for requirement in requirements(text)}


def test_the_version_stands_in_one_place_and_is_read_without_importing_anything():
    module = ast.parse((PACKAGE / "version.py").read_text())
    versions = [
        node.value
        for node in module.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    ]
    assert len(versions) == 1
    version = ast.literal_eval(versions[0])

    assert CONFIGURATION["metadata"]["version"] == "attr: fitkit.version.__version__"
    for name in ["setup.cfg", "setup.py", "pyproject.toml"]:
        assert version not in (CHECKOUT / name).read_text(), name


def test_type_information_is_shipped():
    assert (PACKAGE / "py.typed").is_file()
    assert "py.typed" in CONFIGURATION["options.package_data"]["fitkit"].split()


def test_every_folder_with_code_is_a_package_that_the_wheel_takes_along():
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    missing = [str(f.relative_to(CHECKOUT)) for f in folders if not (f / "__init__.py").is_file()]
    assert missing == []


def test_importing_fitkit_imports_nothing_heavy_besides_torch():
    code = f"import sys, fitkit; fitkit.Model; print([m for m in {HEAVY} if m in sys.modules])"
    command = [sys.executable, "-c", code]
    outcome = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=60)
    assert outcome.stdout.strip() == "[]", outcome.stdout + outcome.stderr


def test_every_pinned_version_is_in_the_range_that_setup_cfg_promises():
    environment = default_environment()
    pins = pinned()
    asked = requirements(CONFIGURATION["options"]["install_requires"].strip())
    asked += [requirement for extra in extras().values() for requirement in extra]
    for requirement in asked:
        pin = pins[requirement.name]
        if pin.marker is None or pin.marker.evaluate(dict(environment)):
            version = next(iter(pin.specifier)).version
            assert requirement.specifier.contains(version), f"{pin} against {requirement}"


def test_the_supported_pythons_are_named_alike_everywhere():
    metadata = CONFIGURATION["metadata"]["classifiers"]
    for minor in range(10, 14):
        assert f"Python :: 3.{minor}" in metadata
    assert CONFIGURATION["options"]["python_requires"] == ">=3.10"
    assert CONFIGURATION["mypy"]["python_version"] == "3.10"
    assert 'target-version = "py310"' in (CHECKOUT / "pyproject.toml").read_text()


def missing_package_calls() -> list[tuple[str, str, str]]:
    """(file, package, extra) of each call of `missing_package` with literal arguments."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("missing_package"):
                words = [a.value for a in node.args[:2] if isinstance(a, ast.Constant)]
                if len(words) == 2:
                    found.append((str(path.relative_to(CHECKOUT)), *words))
    return found


def test_an_error_that_names_an_extra_names_one_that_brings_the_package():
    for file, package, extra in missing_package_calls():
        assert extra in extras(), f"{file} names the extra {extra!r}"
        assert package in {requirement.name for requirement in extras()[extra]}, file


def test_the_doctor_tells_what_fitkit_sees(capsys):
    import fitkit
    from fitkit.__main__ import main

    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert printed.split()[:2] == ["fitkit", fitkit.__version__]
    assert "torch" in printed and "devices='auto'" in printed
