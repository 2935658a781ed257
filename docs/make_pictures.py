"""What the README shows, made anew: the first program of the README, run in a terminal.

    python docs/make_pictures.py                   # or: make pictures; writes docs/pictures
    python docs/make_pictures.py --out FOLDER      # to look whether it works

Needs Linux or macOS, matplotlib and scikit-learn.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import re
import struct
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
COLUMNS, ROWS = 92, 30
SEED = "import fitkit; fitkit.set_seed(0)\n"
DRAWN = """
history.plot(path="curves.png", size=(8, 3))
from fitkit.pictures import confusion_matrix
guesses = model.predict(x / 16, verbose=0).argmax(axis=1)
confusion_matrix(y, guesses, size=(4.4, 4), path="confusion.png")
"""
PICTURES = ("curves.png", "confusion.png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    program = first_program(ROOT / "README.md")
    with tempfile.TemporaryDirectory() as folder:
        status, output = in_terminal(SEED + program + DRAWN, Path(folder))
        if status:
            print(f"The README's program ended with status {status}:\n{output}", file=sys.stderr)
            return 1
        for name in PICTURES:
            (out / name).write_bytes((Path(folder) / name).read_bytes())
    lines = ["$ python digits.py", *on_screen(output)]
    (out / "terminal.svg").write_text(as_svg(lines))
    for path in sorted(out.iterdir()):
        print(f"{path}  {path.stat().st_size / 1000:.0f} kB")
    return 0


def first_program(page: Path) -> str:
    """Return the first Python block of a page."""
    found = re.search(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no Python block"
    return found.group(1)


def in_terminal(program: str, folder: Path) -> tuple[int, str]:
    """Run a program in a terminal of its own, in a folder: its status, and all that it wrote."""
    (folder / "digits.py").write_text(program)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        settings = {"PYTHONPATH": path, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **settings, "COLUMNS": str(COLUMNS), "MPLBACKEND": "Agg"}
        for name in ("NO_COLOR", "CI", "FITKIT_VERBOSE", "PY_COLORS"):
            environment.pop(name, None)
        os.execve(sys.executable, [sys.executable, "digits.py"], environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    written = io.BytesIO()
    try:
        while chunk := os.read(terminal, 65536):
            written.write(chunk)
    except OSError:  # how Linux says that the program has ended
        pass
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), written.getvalue().decode()


def on_screen(output: str) -> list[str]:
    """Return the lines that the terminal shows at the end; what was drawn over is gone."""
    lines = output.rstrip().replace("\r\n", "\n").split("\n")
    return [re.sub(r"\x1b\[\?25[lh]", "", line).split("\r\x1b[2K")[-1] for line in lines]


def as_svg(lines: list[str]) -> str:
    """Return a window with these lines."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for line in lines:
        console.print(Text.from_ansi(line), no_wrap=True, crop=True)
    return console.export_svg(title="fitkit", unique_id="fitkit")


if __name__ == "__main__":
    sys.exit(main())
