"""What a package manager, a type checker and the first import see."""

import ast
import configparser
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("packaging")
from packaging.markers import default_environment
from packaging.requirements import Requirement

from tests.limits import patience

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


def test_extras_are_named_by_the_distribution_since_fitkit_is_another_package():
    assert CONFIGURATION["metadata"]["name"] == "torch-fitkit"
    texts = [CHECKOUT / "README.md", CHECKOUT / "CHANGELOG.md"]
    for folder in ("fitkit", "docs", "examples"):
        texts += [p for p in (CHECKOUT / folder).rglob("*") if p.suffix in (".py", ".md", ".json")]
    wrong = re.compile(r"(?<![-\w])fitkit\[[a-z]|pip install '?fitkit\b")
    found = [str(p) for p in texts if wrong.search(p.read_text(encoding="utf-8"))]
    assert found == []


def test_a_namesake_in_the_same_folder_is_said(tmp_path):
    from fitkit.namesake import warn_of_namesake

    (tmp_path / "fitkit").mkdir()
    (tmp_path / "torch_fitkit-0.1.0.dist-info").mkdir()
    warn_of_namesake(tmp_path / "fitkit")
    (tmp_path / "fitkit-0.2.1.dist-info").mkdir()
    with pytest.warns(UserWarning, match="fitkit 0.2.1"):
        warn_of_namesake(tmp_path / "fitkit")


def test_files_beside_the_code_are_shipped():
    beside = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert "py.typed" in beside
    assert beside == set(CONFIGURATION["options.package_data"]["fitkit"].split())


def test_editors_find_an_editable_installation():
    """setuptools makes one of a .pth file where `package_dir` says so, else of an import hook."""
    assert CONFIGURATION["options"]["package_dir"].split() == ["=", "."]


def test_the_demo_installs_what_it_imports_and_no_more():
    makefile = (CHECKOUT / "Makefile").read_text()
    recipe = makefile.partition("\n$(DEMO): ")[2].partition("\n$(STAMP): ")[0]
    taken = re.findall(r"\.\[([\w,]+)\]", recipe)
    assert taken == ["plot,sklearn"] and "\ndemo: $(DEMO)\n" in makefile
    asked = {r.name for extra in taken[0].split(",") for r in extras()[extra]}
    asked |= {r.name for r in requirements(CONFIGURATION["options"]["install_requires"].strip())}
    program = (CHECKOUT / "examples" / "digits.py").read_text()
    imported = set(re.findall(r"^ *(?:from|import) (\w+)", program, re.MULTILINE))
    imported -= {*sys.stdlib_module_names, "fitkit"}
    outside = {{"sklearn": "scikit-learn"}.get(name, name) for name in imported}
    assert outside <= asked and {"matplotlib", "scikit-learn"} <= outside


def test_every_folder_with_code_is_a_package_that_the_wheel_takes_along():
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    missing = [str(f.relative_to(CHECKOUT)) for f in folders if not (f / "__init__.py").is_file()]
    assert missing == []


def test_importing_fitkit_imports_nothing_heavy_besides_torch():
    code = f"import sys, fitkit; fitkit.Model; print([m for m in {HEAVY} if m in sys.modules])"
    command = [sys.executable, "-c", code]
    outcome = subprocess.run(
        command, cwd=CHECKOUT, capture_output=True, text=True, timeout=patience(60)
    )
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


@pytest.fixture
def built(monkeypatch):
    """What setup.py gives setuptools, by the variables that GitHub sets."""
    setuptools = pytest.importorskip("setuptools")

    def run(**variables):
        for name in ("SERVER_URL", "REPOSITORY"):
            monkeypatch.delenv(f"GITHUB_{name}", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(f"GITHUB_{name}", value)
        given = {}
        monkeypatch.setattr(setuptools, "setup", lambda **words: given.update(words))
        runpy.run_path(str(CHECKOUT / "setup.py"), run_name="__main__")
        return given

    return run


def test_the_page_of_a_release_has_links_and_pictures_that_work_elsewhere(built):
    import fitkit

    given = built(SERVER_URL="https://example.org", REPOSITORY="somebody/fitkit")
    home, tag = "https://example.org/somebody/fitkit", f"v{fitkit.__version__}"
    assert given["project_urls"]["Source"] == home
    targets = re.findall(r"\]\(([^)\s]+)\)", given["long_description"])
    assert f"{home}/raw/{tag}/docs/pictures/terminal.svg" in targets
    assert f"{home}/blob/{tag}/docs/quickstart.md" in targets
    assert f"{home}/blob/{tag}/LICENSE" in targets
    assert f"{home}/actions/workflows/tests.yml/badge.svg" in targets
    assert [target for target in targets if not target.startswith("https://")] == []
    for target in [*targets, *given["project_urls"].values()]:
        path = re.sub(rf"^{home}/(raw|blob)/{tag}/|#.*", "", target)
        assert target.endswith("/issues") or "://" in path or (CHECKOUT / path).is_file(), target


def test_no_address_is_invented(built):
    given = built()
    if given.get("project_urls") is None:
        assert given == {"long_description": (CHECKOUT / "README.md").read_text(encoding="utf-8")}


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


DISTRIBUTIONS = {"sklearn": "scikit-learn"}
"""Packages whose distribution has another name."""

WITHOUT_EXTRA = {
    "IPython": "is there in a notebook, and used nowhere else",
    "packaging": "comes with torchmetrics",
    "pynvml": "replaces nvidia-smi, which does the same, where it is there",
    "scipy": "comes with scikit-learn",
    "torch_xla": "stopped at torch 2.9: the extra tpu brings torch_tpu",
}


def lazily_imported() -> dict[str, str]:
    """A file that imports it, for each package that fitkit imports or looks for by name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and node.args:
                looks = ast.unparse(node.func).endswith(("import_module", "find_spec"))
                first = node.args[0]
                if looks and isinstance(first, ast.Constant):
                    names = [str(first.value)]
            for name in names:
                found.setdefault(name.partition(".")[0], str(path.relative_to(CHECKOUT)))
    required = requirements(CONFIGURATION["options"]["install_requires"].strip())
    for name in [*sys.stdlib_module_names, *(r.name for r in required), "fitkit"]:
        found.pop(name, None)
    return found


def test_every_package_that_fitkit_imports_is_in_an_extra_for_users():
    users = [name for name in extras() if name not in ("test", "docs", "dev", "examples")]
    brought = {requirement.name for name in users for requirement in extras()[name]}
    imported = lazily_imported()
    assert {"fsspec", "matplotlib", "torchao", "torch_tpu", "deepspeed"} <= set(imported)
    lacks = {
        name: file
        for name, file in imported.items()
        if DISTRIBUTIONS.get(name, name) not in brought and name not in WITHOUT_EXTRA
    }
    assert lacks == {}
    assert set(WITHOUT_EXTRA) <= set(imported)


def test_what_language_models_train_with_is_in_an_extra():
    page = (CHECKOUT / "docs" / "language-models.md").read_text()
    needed = {n for line in re.findall(r"```python needs (.+)", page) for n in line.split(", ")}
    users = [name for name in extras() if name not in ("test", "docs", "dev", "examples")]
    assert needed <= {requirement.name for name in users for requirement in extras()[name]}


def test_the_doctor_tells_what_fitkit_sees(capsys):
    import fitkit
    from fitkit.__main__ import main

    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert printed.split()[:2] == ["fitkit", fitkit.__version__]
    assert "torch" in printed and "devices='auto'" in printed


def test_the_guide_is_printed_and_is_one_that_agents_can_take(capsys):
    from fitkit.__main__ import main

    assert main(["guide"]) == 0
    printed = capsys.readouterr().out
    assert printed == (PACKAGE / "guide.md").read_text(encoding="utf-8")
    head = re.match(r"---\nname: ([a-z-]+)\ndescription: (.+)\n---\n\n# ", printed)
    assert head and len(head[2]) <= 1024 and len(printed.splitlines()) < 240


def test_the_sample_of_the_makefile_is_there():
    makefile = (CHECKOUT / "Makefile").read_text().replace("\\\n", " ")
    sample = re.search(r"^SAMPLE := (.*)$", makefile, re.MULTILINE)[1]
    found = [
        CHECKOUT / folder / name
        for folder, names in re.findall(r"\$\(addprefix ([\w/]+), ([^)]*)\)", sample)
        for name in names.split()
    ]
    assert len(found) > 15 and all(path.exists() for path in found)
