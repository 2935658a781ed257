"""benchmarks/agents: every reference solution passes, and what is nearly right doesn't."""

import importlib.util

import pytest

from benchmarks.agents.__main__ import main
from benchmarks.agents.programs import Runner
from benchmarks.agents.task import FOLDER, NAMES, task
from tests.limits import patience


@pytest.fixture(scope="module")
def runner():
    runner = Runner(quick=True, patience=patience(1))
    yield runner
    runner.close()


@pytest.fixture(  # ranks have tests enough
    params=[pytest.param(n, marks=pytest.mark.slow if n == "two_processes" else ()) for n in NAMES]
)
def one(request):
    one = task(request.param)
    for package in one.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    return one


def test_the_reference_solution_passes(one, runner):
    assert runner.failure(one, one.solution) is None


@pytest.mark.slow
def test_a_plausible_mistake_is_found(one, runner):
    assert runner.failure(one, one.wrong_program) is not None


def test_there_are_forty_each_with_a_task_and_a_solution():
    assert len(NAMES) == 40
    for folder in ("tasks", "solutions"):
        files = {path.stem for path in (FOLDER / folder).glob("*.py")} - {"__init__"}
        assert files == set(NAMES)
    for one in map(task, NAMES):
        assert one.wrong_program != one.solution
        assert "solution.py" in one.prompt and str(one.seconds) in one.prompt


def test_nothing_passes_that_wrote_nothing_or_failed_or_took_too_long(runner):
    arrays = task("arrays")
    assert "no history.json" in runner.failure(arrays, "pass")
    assert "ZeroDivisionError" in runner.failure(arrays, "1 / 0")
    assert "status 3" in runner.failure(arrays, "raise SystemExit(3)")
    hasty = Runner(patience=0)
    assert "took more than 1 s" in hasty.failure(arrays, "import time; time.sleep(99)")


def test_an_agents_folder_is_made_and_judged(tmp_path, capsys):
    folder = tmp_path / "new"
    assert main(["give", "19", str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == {"TASK.md", "data.npz", "start.pt"}
    (folder / "solution.py").write_text("open('probabilities.npy', 'w')")
    assert main(["check", "predictions", str(folder)]) == 1
    (folder / "solution.py").write_text(task("19").solution)
    assert main(["check", "19", str(folder)]) == 0
    assert capsys.readouterr().out.endswith("passed\n")
