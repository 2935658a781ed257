"""GitHub's workflows call only what is there, and run what setup.cfg promises."""

import configparser
import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
requirements = pytest.importorskip("packaging.requirements")

CHECKOUT = Path(__file__).resolve().parents[2]
FOLDER = CHECKOUT / ".github" / "workflows"
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yml"))}
SETTINGS = configparser.ConfigParser()
SETTINGS.read(CHECKOUT / "setup.cfg")

STEPS = [
    pytest.param(job, step, id=f"{workflow}-{name}-{index}")
    for workflow, content in WORKFLOWS.items()
    for name, job in content["jobs"].items()
    for index, step in enumerate(job["steps"])
]
RUN = [case for case in STEPS if "run" in case.values[1]]
USED = [case for case in STEPS if "uses" in case.values[1]]


def triggers(workflow):
    """YAML 1.1 reads the key `on` as True."""
    return WORKFLOWS[workflow][True]


def targets():
    return re.search(r"^\.PHONY: (help .*)", (CHECKOUT / "Makefile").read_text(), re.M)[1].split()


def required(extra):
    """The packages of an extra of setup.cfg, with those of the extras that it takes in."""
    lines = SETTINGS["options.extras_require"][extra].split("\n")
    return {requirements.Requirement(line).name for line in lines if line and line[0] != "#"}


def check_line(line, extras):
    """One command: what it calls exists, in the checkout or in what the job has installed."""
    words = re.sub(r"\$\{\{.*?\}\}", "", line).split()
    if words[0] == "make":
        assert words[1] in targets(), line
        makefile = (CHECKOUT / "Makefile").read_text()
        for word in words[2:]:
            assert f"$({word.partition('=')[0]}" in makefile, word
    elif words[0] == "bash":
        assert (CHECKOUT / words[1]).is_file(), line
    elif words[:4] == ["python", "-m", "pip", "install"]:
        extras.update(re.findall(r"\.\[(\w+)\]", line))
        assert extras and all(required(extra) for extra in extras), line
    elif words[:2] == ["python", "-m"]:
        assert words[2] in {"pip"}.union(*map(required, extras)), line
        for word in words[3:]:
            assert "/" not in word or word == "build/docs" or (CHECKOUT / word).exists(), word
    elif words[0] == "grep":
        assert (CHECKOUT / words[-1]).is_file(), line
    else:
        pytest.fail(f"what is {words[0]!r}? Teach this test to check it")


@pytest.mark.parametrize(("job", "step"), RUN)
def test_what_a_step_runs_is_there(job, step):
    extras = set()
    for other in job["steps"]:  # what was installed before
        for line in other.get("run", "").splitlines():
            if line.strip():
                check_line(line, extras)
        if other is step:
            break


@pytest.mark.parametrize(("job", "step"), USED)
def test_an_action_is_held_to_a_major_release(job, step):
    action = r"actions/[\w-]+@v\d+|pypa/gh-action-pypi-publish@release/v\d+"
    assert re.fullmatch(action, step["uses"])


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_no_workflow_may_write_or_runs_for_ever(workflow):
    assert WORKFLOWS[workflow]["permissions"] == {"contents": "read"}
    for name, job in WORKFLOWS[workflow]["jobs"].items():
        assert job["timeout-minutes"] <= 180, name
        # Only the matrix: a branch's name, say, is text that others write.
        for step in job["steps"]:
            found = re.findall(r"\$\{\{\s*([\w.]+)", step.get("run", ""))
            assert all(name.startswith("matrix.") for name in found), step


def test_the_matrix_is_what_setup_cfg_promises():
    matrix = WORKFLOWS["tests"]["jobs"]["linux"]["strategy"]["matrix"]
    classifiers = SETTINGS["metadata"]["classifiers"]
    claimed = re.findall(r"Python :: (3\.\d+)", classifiers)
    assert {claimed[0], claimed[-1]} <= set(matrix["python"]) <= set(claimed)
    oldest = re.search(r"^torch>=([\d.]+)$", SETTINGS["options"]["install_requires"], re.M)[1]
    assert matrix["torch"] == [oldest, ""]
    systems = WORKFLOWS["tests"]["jobs"]["other-systems"]["strategy"]["matrix"]["system"]
    assert systems == ["macos-latest", "windows-latest"]
    newest = WORKFLOWS["weekly"]["jobs"]["newest"]["steps"][1]["with"]["python-version"]
    assert newest == claimed[-1]


def test_a_release_is_built_checked_and_published_without_a_password():
    assert triggers("release") == {"push": {"tags": ["v*"]}}
    build, publish = WORKFLOWS["release"]["jobs"].values()
    assert {"run": "make release"} in build["steps"]
    assert publish["needs"] == "build"
    assert publish["permissions"] == {"id-token": "write"}
    assert "with" not in publish["steps"][-1]
    assert "secrets." not in (FOLDER / "release.yml").read_text()


def test_the_newest_of_everything_runs_each_week():
    (every,) = triggers("weekly")["schedule"]
    assert every["cron"].split()[2:4] == ["*", "*"] and every["cron"].split()[4].isdigit()
    text = (FOLDER / "weekly.yml").read_text()
    # Make's other targets have an environment of pinned versions.
    assert "constraints" not in text
    assert set(re.findall(r"make [\w-]+", text)) == {"make test-with-newest"}
