"""pyright on what users write: it sees the marked mistakes and nothing else, and all is typed."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MARK = re.compile(r"# error: (\w+)$")


def pyright(*arguments, where):
    """What pyright says, as JSON; the interpreter that runs the tests is the one it asks."""
    if not importlib.util.find_spec("pyright"):
        pytest.skip("pyright isn't installed")
    if not shutil.which("node"):
        pytest.skip("pyright needs node, which isn't on the PATH")
    folder = os.path.dirname(sys.executable)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([folder, os.environ.get("PATH", "")]),
        "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1",
    }
    ended = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", *map(str, arguments)],
        cwd=where, env=environment, stdout=subprocess.PIPE, text=True, timeout=500,
    )  # fmt: skip
    return json.loads(ended.stdout[ended.stdout.index("{") :])


@pytest.mark.slow  # `make typecheck` runs it
def test_pyright_sees_the_marked_mistakes_and_no_others():
    pages = sorted(page for page in HERE.rglob("*.py") if page.name != Path(__file__).name)
    marked = [
        (page.name, number, mark[1])
        for page in pages
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if (mark := MARK.search(line))
    ]
    seen = {
        (Path(found["file"]).name, found["range"]["start"]["line"] + 1, found.get("rule"))
        for found in pyright(*pages, where=HERE)["generalDiagnostics"]
        if found["severity"] == "error"
    }
    assert sorted(seen) == marked
    mistaken = {name for name, *_ in marked if name.startswith("mistaken_")}
    assert len(mistaken) == 5 and len(pages) == 2 + 10 + 5 and len(marked) > 35


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_what_fitkit_exports_is_typed(tmp_path):
    report = pyright("--verifytypes", "fitkit", "--ignoreexternal", where=tmp_path)
    completeness = report["typeCompleteness"]
    wrong = [
        f"{symbol['name']}: {found['message']}"
        for symbol in completeness["symbols"]
        for found in symbol["diagnostics"]
        if symbol["isExported"] and not symbol["isTypeKnown"]
    ]
    assert completeness["completenessScore"] >= 0.98, "\n".join(wrong)
