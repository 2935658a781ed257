"""What a task is, and the list of them."""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NAMES = (
    "arrays", "loader_of_dicts", "two_inputs_two_outputs", "two_processes", "resume",
    "early_stopping", "own_step", "own_loss_and_metric", "class_weights", "imbalanced",
    "mixed_precision", "accumulation", "frozen_body", "layerwise_rates", "warmup",
    "clipping", "ema", "export", "predictions", "keras_net",
    "lightning_module", "padding", "ignored_labels", "multi_label", "regression_metrics",
    "checkpoints", "foreign_weights", "distillation", "mixup", "deterministic",
    "augmentation", "out_of_memory", "first_bad_sample", "skipped_updates", "compare_rates",
    "search", "interval", "two_models", "parted_runs", "cut_epoch",
)  # fmt: skip
"""In the order of their numbers, which begin with 1."""

FOLDER = Path(__file__).parent
PREFACE = """\
Write one Python program, solution.py, that trains with the package fitkit. (Its distribution is
torch-fitkit. `python -m fitkit guide` prints how it is used.) The program is run once, as
`python solution.py`, on a CPU without a network, in a folder that holds it and the files named
below and nothing else. It has {seconds} seconds. Only the files that it writes are judged.
"""


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name, number: what to call it by.
        title: what it is about, in a line.
        prompt: what an agent is told.
        give: writes the files that the program finds into a folder.
        check: raises an `AssertionError` unless the files in a folder are right. It computes what
            is right by plain torch or NumPy, and never reads the program.
        wrong: a piece of the solution, and what makes a plausible wrong program of it.
        needs: packages beside fitkit's own.
        alone: whether the program needs an interpreter of its own.
        asked: a public thread where somebody had this question.
        seconds: the time that a program has.
    """

    name: str
    number: int
    title: str
    prompt: str
    give: Callable[[Path], None]
    check: Callable[[Path], None]
    wrong: tuple[str, str]
    needs: tuple[str, ...] = ()
    alone: bool = False
    asked: str = ""
    seconds: int = 60

    @property
    def solution(self) -> str:
        """The reference program."""
        return (FOLDER / "solutions" / f"{self.name}.py").read_text(encoding="utf-8")

    @property
    def wrong_program(self) -> str:
        """The solution with its mistake."""
        assert self.wrong[0] in self.solution, f"{self.name}: no {self.wrong[0]!r} to replace"
        return self.solution.replace(*self.wrong)


def task(name: str) -> Task:
    """Return a task by its name or number."""
    if name.isdigit() and 1 <= int(name) <= len(NAMES):
        name = NAMES[int(name) - 1]
    if name not in NAMES:
        raise SystemExit(f"There is no task {name!r}. The numbers are 1 to {len(NAMES)}.")
    module = importlib.import_module(f"benchmarks.agents.tasks.{name}")
    own = {
        word: getattr(module, word.upper())
        for word in ("needs", "alone", "asked", "seconds")
        if hasattr(module, word.upper())
    }
    seconds = own.get("seconds", Task.seconds)
    return Task(
        name=name,
        number=NAMES.index(name) + 1,
        title=(module.__doc__ or "").strip().rstrip("."),
        prompt=PREFACE.format(seconds=seconds) + "\n" + textwrap.dedent(module.PROMPT).strip(),
        give=module.give,
        check=module.check,
        wrong=module.WRONG,
        **own,
    )
