"""Break each promise of the core: python -m tests.mutants [word …]

A mutant is one line of fitkit, changed in a scratch copy. The tests named beside it must fail on
it. Words choose mutants by their promise or file. It prints a table, and ends with status 1 if a
mutant lives: then a promise has no test, or the line does nothing. `fitkit` is never touched.

`tests/test_mutants.py` sees that each place is there once, so that whoever rewrites a line takes
its mutant along. Promises about GPUs have their own, in `tests/simulated_gpu/mutants.py`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.limits import patience

ROOT = Path(__file__).parents[1]
SECONDS = 180
"""For one mutant's tests. What hangs has noticed it."""
UNIT, RANKS = "tests/unit", "tests/distributed"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A promise, the change that breaks it, and the tests that must notice.

    Attributes:
        promise: what users lose.
        file: below `fitkit/`.
        old: the text of a line or a part of one, which the file has exactly once.
        new: what stands there instead.
        tests: pytest's arguments.
    """

    promise: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def fault(self, root: Path = ROOT) -> str | None:
        """Why it can't be planted; None if it can."""
        path = root / "fitkit" / self.file
        if not path.is_file():
            return f"{self.promise!r}: there is no file fitkit/{self.file}"
        found = path.read_text().count(self.old)
        if found != 1:
            return f"{self.promise!r}: fitkit/{self.file} has {found} times, not once: {self.old!r}"
        missing = [name for name in self.tests if name.startswith("tests/")]
        missing = [name for name in missing if not (root / name).exists()]
        return f"{self.promise!r}: there is no {missing[0]}" if missing else None


# ---------------------------------------------------------------------- ends of lifetimes

ENDS = [
    Mutant(
        "the second pass over the data has another order, also with steps_per_epoch",
        "data/batches.py",
        "        progress.number += 1\n",
        "        pass\n",
        (f"{UNIT}/data/test_batches.py", "-k", "order_of_its_own"),
    ),
    Mutant(
        "a warm-up that the fit didn't finish leaves no low rate behind",
        "training/rates.py",
        "            scope.callback(self._warm_up.end)\n",
        "            pass\n",
        (f"{UNIT}/training/test_rates.py",),
    ),
    Mutant(
        "an evaluation after one that failed counts its own samples only",
        "training/logged.py",
        "                self._lent.callback(metric.reset)\n",
        "                pass\n",
        (f"{UNIT}/training/test_evaluate.py", "-k", "failed"),
    ),
    Mutant(
        "scale_lr scales a schedule's floor, too",
        "fit_state.py",
        '                for name in ("initial_lr", "max_lr", "min_lr"):\n',
        '                for name in ("initial_lr", "max_lr"):\n',
        (f"{UNIT}/training/test_rates.py",),
    ),
]

# ---------------------------------------------------------------------- parts of an update

PARTS = [
    Mutant(
        "the parts of several ranks weigh as one batch",
        "training/weighing.py",
        "scale * ranks / max(whole, TINY)",
        "scale / max(whole, TINY)",
        (f"{UNIT}/training/test_weighing.py",),
    ),
    Mutant(
        "gradients weighed by an estimate are corrected",
        "training/weighing.py",
        "return expected / whole if whole not in (0, expected) else None",
        "return None",
        (f"{UNIT}/training/test_weighing.py",),
    ),
    Mutant(
        "gradients weighed by an estimate are corrected without a look at the device",
        "training/weighing.py",
        "torch.where(whole > 0, expected / whole, 1.0)",
        "torch.where(whole > 0, whole / expected, 1.0)",
        (f"{UNIT}/training/test_weighing.py",),
    ),
    Mutant(
        "a part that counts nothing adds nothing",
        "training/weighing.py",
        "return torch.where(count > 0, loss, 0.0)",
        "return loss",
        (f"{UNIT}/training/test_weighing.py",),
    ),
    Mutant(
        "a short last group counts the samples that it has",
        "training/weighing.py",
        "        self.samples += batch.total\n",
        "        self.samples += batch.samples\n",
        (f"{UNIT}/training/test_weighing.py",),
    ),
    Mutant(
        "an estimate rounds nothing",
        "training/weighing.py",
        "2.0 ** round(math.log2(count / samples))",
        "count / samples",
        (f"{UNIT}/training/test_weighing.py",),
    ),
    Mutant(
        "counts of all ranks travel with the gradients",
        "training/tally.py",
        "number = carrier.grad.item() * ranks",
        "number = carrier.grad.item()",
        (f"{UNIT}/training/test_tally.py",),
    ),
    Mutant(
        "gradients are clipped by the norm of all of them",
        "training/applier.py",
        "            clip_grads_with_norm_(parameters, self._clip_value, norm)\n",
        "            pass\n",
        (f"{UNIT}/training/test_clipping.py",),
    ),
]

# ---------------------------------------------------------------------- values

VALUES = [
    Mutant(
        "a mean over an epoch weighs batches by their samples",
        "training/running_values.py",
        "                self._read += number * count\n                self._count += count\n",
        "                self._read += number\n                self._count += 1\n",
        (f"{UNIT}/training/test_against_plain_torch.py",),
    ),
    Mutant(
        "values of all ranks are sums over counts, never means of means",
        "training/log.py",
        "means[name] = sum(total for total, _ in pairs) / count if count else EMPTY_MEAN",
        "means[name] = sum(t / c for t, c in pairs if c) / len(pairs) if count else EMPTY_MEAN",
        (f"{RANKS}/test_counts.py",),
    ),
    Mutant(
        "losses that wait with the metrics count",
        "training/log.py",
        "        return total + more, count + samples\n",
        "        return total, count\n",
        (f"{UNIT}/training/test_evaluate_joined_losses.py",),
    ),
    Mutant(
        "several steps' means count each",
        "training/running_values.py",
        "            self.added += 1\n            self._read += number * count\n",
        "            self.added += 1\n            self._read += number\n",
        (f"{UNIT}/extras/jit/test_compiled_step.py", "-k", "several_steps_in_one_call"),
    ),
    Mutant(
        "an epoch begins with no sums of the one before",
        "training/log.py",
        "            scope.callback(meters.reset)\n",
        "            pass\n",
        (f"{UNIT}/training/test_evaluate.py", f"{UNIT}/training/test_against_plain_torch.py"),
    ),
    Mutant(
        "labels that are ignored count for nothing",
        "losses/formulas.py",
        "        counts = target != self._ignore_index\n",
        "        counts = torch.ones_like(target, dtype=torch.bool)\n",
        (f"{RANKS}/test_counts.py",),
    ),
]

# ---------------------------------------------------------------------- data

DATA = [
    Mutant(
        "each sample is one rank's",
        "extras/data_on_ranks/sharding.py",
        "            if index % self.size == self.ranks.rank:\n",
        "            if index % self.size == 0:\n",
        (f"{UNIT}/extras/data_on_ranks/test_sharding.py",),
    ),
    Mutant(
        "a last step that isn't full is dealt out evenly",
        "extras/data_on_ranks/sharding.py",
        "bounds = [index * total // size for index in (rank, rank + 1)]",
        "bounds = [rank * len(step[0]), (rank + 1) * len(step[0])]",
        (f"{UNIT}/extras/data_on_ranks/test_sharding.py",),
    ),
    Mutant(
        "a rank without a batch repeats one that doesn't count",
        "extras/data_on_ranks/sharding.py",
        "            yield Batch(last, count, total)\n",
        "            yield Batch(last, max(count, 1), total)\n",
        (f"{UNIT}/extras/data_on_ranks/test_sharding.py",),
    ),
    Mutant(
        "evaluation deals the batches of one process out in turn",
        "extras/data_on_ranks/sharding.py",
        "return read(order.all(self._limit)[self.ranks.rank :: self.size])",
        "return read(order.all(self._limit)[:: self.size])",
        (f"{UNIT}/extras/data_on_ranks/test_sharding.py",),
    ),
    Mutant(
        "a batch that is computed again is the same though the step wrote into it",
        "training/evaluate.py",
        "                batch.is_lent = True  # it may come again\n",
        "                batch.is_lent = False\n",
        (f"{UNIT}/training/test_evaluate.py", "-k", "in_step"),
    ),
    Mutant(
        "whoever gets a batch may write into its inputs",
        "data/to_device.py",
        "            moved = self._laid_out(self._sent(leaf, dtype, is_lent))\n"
        "            return own_copy(moved) if is_lent and _share(moved, leaf) else moved\n",
        "            return self._laid_out(self._sent(leaf, dtype, is_lent))\n",
        (f"{UNIT}/training/test_batches_belong_to_their_code.py",),
    ),
    Mutant(
        "whoever gets a batch may write into its targets",
        "data/to_device.py",
        "            moved = self._sent(leaf, dtype, is_lent)\n"
        "            return own_copy(moved) if is_lent and _share(moved, leaf) else moved\n",
        "            return self._sent(leaf, dtype, is_lent)\n",
        (f"{UNIT}/training/test_batches_belong_to_their_code.py",),
    ),
    Mutant(
        "a plain pair is copied where it is lent",
        "data/to_device.py",
        "return tuple(map(own_copy, batch)) if is_lent else batch",
        "return batch",
        (f"{UNIT}/training/test_batches_belong_to_their_code.py",),
    ),
]

# ---------------------------------------------------------------------- what trains together

TRAINED = [
    Mutant(
        "submodules that you put into evaluation mode stay in it",
        "modes.py",
        "        part.training = False\n",
        "        pass\n",
        (f"{UNIT}/test_modes.py",),
    ),
    Mutant(
        "a failed call leaves the settings of its last whole update",
        "fit_state.py",
        "                put_back(group, before)\n",
        "                pass\n",
        (f"{UNIT}/callbacks/test_cleanups.py",),
    ),
    Mutant(
        "a failed call leaves the buffers of its last whole update",
        "buffers.py",
        "            place.put(value)\n\n    return restore\n",
        "            pass\n\n    return restore\n",
        (f"{UNIT}/test_trained.py", f"{UNIT}/callbacks/test_cleanups.py"),
    ),
    Mutant(
        "a loss's parameters learn",
        "trained.py",
        "return parameters_of(self.model, *self.losses.values())",
        "return parameters_of(self.model)",
        (f"{UNIT}/test_trained.py",),
    ),
    Mutant(
        "a loss's state is saved",
        "trained.py",
        "return [places for places in found if places]",
        "return []",
        (f"{UNIT}/test_trained.py",),
    ),
    Mutant(
        "a loss is converted with the net",
        "trained.py",
        "        for module in self.losses.values():\n"
        "            strategy.precision.convert_loss(module)\n",
        "",
        (f"{UNIT}/test_trained.py",),
    ),
    Mutant(
        "ranks begin with rank 0's loss",
        "trained.py",
        "        strategy.collectives.broadcast_tensors(tensors)\n",
        "        pass\n",
        (f"{RANKS}/test_trained.py", "-k", "begin_with"),
    ),
    Mutant(
        "a copy of a model has all that its optimizer holds",
        "record.py",
        '"optimizer_contents": contents_of(optimizers)}',
        '"optimizer_contents": contents_of([])}',
        (f"{UNIT}/test_optimizer_copies.py",),
    ),
    Mutant(
        "what a callback changes is undone",
        "callbacks/base.py",
        "        cleanups[self.swaps_weights].push(clean)\n",
        "        pass\n",
        (f"{UNIT}/callbacks/test_cleanups.py",),
    ),
    Mutant(
        "weights that a callback swaps in go before other clean-ups",
        "callbacks/base.py",
        "        cleanups[self.swaps_weights].push(clean)\n",
        "        cleanups[False].push(clean)\n",
        (f"{UNIT}/callbacks/test_cleanups.py",),
    ),
]

# ---------------------------------------------------------------------- resuming and files

FILES = [
    Mutant(
        "an epoch that was cut counts what it had counted",
        "progress.py",
        "noted=list(self.noted) if self.steps else [],",
        "noted=[],",
        (f"{UNIT}/training/test_resume_exactly.py",),
    ),
    Mutant(
        "other ranks go on at the same sample",
        "progress.py",
        "return -(-steps * self.shares // shares)",
        "return steps",
        (f"{UNIT}/test_progress.py",),
    ),
    Mutant(
        "a resumed training draws on from the checkpoint's random state",
        "training/fit_data.py",
        "            set_random_state(state, self.stream.generators, self._devices)\n",
        "            pass\n",
        (f"{UNIT}/training/test_resume_exactly.py",),
    ),
    Mutant(
        "a resumed epoch has the order that it began with",
        "data/batches.py",
        "            set_random_state(began, generators)\n",
        "            pass\n",
        (f"{UNIT}/training/test_resume_exactly.py", f"{UNIT}/training/test_resume.py"),
    ),
    Mutant(
        "the next epoch begins with nothing done",
        "progress.py",
        "        self.noted, self.validated = [], None\n",
        "        pass\n",
        (f"{UNIT}/test_progress.py",),
    ),
    Mutant(
        "a file is on the disk before it gets its name",
        "checkpoint/atomic.py",
        "    os.fsync(file.fileno())\n",
        "    pass\n",
        (f"{UNIT}/checkpoint/test_atomic.py",),
    ),
    Mutant(
        "a file that is being written is nobody's to remove",
        "checkpoint/atomic.py",
        "            fcntl.flock(descriptor, fcntl.LOCK_EX)\n",
        "            pass\n",
        (f"{UNIT}/checkpoint/test_atomic.py", f"{UNIT}/checkpoint/test_killed_savers.py"),
    ),
    Mutant(
        "Ctrl-C waits until an array is written",
        "checkpoint/atomic.py",
        "                    signal.signal(number, self._hold)\n",
        "                    pass\n",
        (f"{UNIT}/checkpoint/test_atomic.py",),
    ),
]

MUTANTS = [*ENDS, *PARTS, *VALUES, *DATA, *TRAINED, *FILES]
HANDFUL = [*ENDS, PARTS[0]]
"""Those that CI plants."""


# ---------------------------------------------------------------------- planting


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the tests made of a mutant.

    Attributes:
        found: whether they noticed it; None if they didn't run.
        seconds: what they took.
        said: the end of what they printed.
    """

    found: bool | None
    seconds: float
    said: str


def copied(folder: Path) -> Path:
    """Make a scratch copy of what tests need."""
    for name in ("fitkit", "tests", "docs", "benchmarks", "examples"):
        ignored = shutil.ignore_patterns("__pycache__", "build")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.cfg"):
        shutil.copy(ROOT / name, folder)
    return folder


def planted(mutant: Mutant, copy: Path) -> Outcome:
    """Run a mutant's tests in a scratch copy, which is as before at the end."""
    path = copy / "fitkit" / mutant.file
    text = path.read_text()
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    variables = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    begun = time.monotonic()
    try:
        path.write_text(text.replace(mutant.old, mutant.new))
        process = subprocess.Popen(
            [*command, *mutant.tests], cwd=copy, env=variables, start_new_session=True, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            said = process.communicate(timeout=patience(SECONDS))[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            said = process.communicate()[0] + "\n1 failed: it took too long"
    finally:
        path.write_text(text)
    # Status 1: tests failed. Anything else (no tests, a file that isn't Python) says nothing.
    found = {0: False, 1: True, -9: True}.get(process.returncode)
    return Outcome(found, time.monotonic() - begun, said)


def run(chosen: list[Mutant], at_once: int = 1) -> dict[Mutant, Outcome]:
    """Plant mutants, each for itself; print a line for each."""
    outcomes = {}
    with tempfile.TemporaryDirectory() as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(at_once):
            copies.put(copied(Path(folder, str(number))))

        def one(mutant: Mutant) -> Outcome:
            copy = copies.get()
            try:
                return planted(mutant, copy)
            finally:
                copies.put(copy)

        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            for mutant, outcome in zip(chosen, pool.map(one, chosen), strict=True):
                outcomes[mutant] = outcome
                word = {True: "found", False: "LIVES", None: "NOT RUN"}[outcome.found]
                where = f"{mutant.file}: {mutant.promise}"
                print(f"{word:<8}{outcome.seconds:5.0f} s  {where}", flush=True)
                if outcome.found is None:
                    print(outcome.said[-2000:], flush=True)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", help="parts of promises or of files' names")
    parser.add_argument("-n", "--at-once", type=int, default=2)
    given = parser.parse_args()
    chosen = [
        mutant
        for mutant in MUTANTS
        if not given.words or any(word in f"{mutant.file} {mutant.promise}" for word in given.words)
    ]
    if faults := [fault for mutant in chosen if (fault := mutant.fault())]:
        raise SystemExit("\n".join(faults))
    outcomes = run(chosen, given.at_once)
    alive = [mutant for mutant, outcome in outcomes.items() if not outcome.found]
    print(f"{len(outcomes) - len(alive)} of {len(outcomes)} mutants found")
    raise SystemExit(1 if alive else 0)


if __name__ == "__main__":
    main()
