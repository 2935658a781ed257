"""Say which of two settings is better, and where that is luck."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.agents.arithmetic import classes, near, read_json, write

PROMPT = """
data.npz has x (160, 8) and y (160,) to train on, and val_x (80, 8) and val_y (80,) to validate
with: float32 inputs and class numbers from 0 to 2. The net is Linear(8, 16), ReLU,
Linear(16, 3), with torch's random starting weights, and gives logits. A run is 4 epochs by
plain SGD on the cross entropy, in batches of 16, shuffled in each epoch. What counts is the
mean validation loss after the last epoch.

Which learning rate is better? Answer twice, each time over several seeds, with a test that
errs in at most 5 % of the cases where there is no difference: for 0.003 against 0.1, called
"slow" and "fast", and for 0.1 against 0.1001, called "fast" and "same". In the second case a
difference of less than 0.05 isn't worth having. Pair the runs: those of a seed have the same
starting weights and the same order of the data.

Write far.json and close.json, for the first and for the second question, each with
"better": the better one's name, or null if neither is known to be better by a margin worth
having, "difference": the mean, over the seeds, of the second one's loss minus the first one's,
"interval": a list of two numbers around it, and "runs": a dict from each name to the losses of
its runs, in the order of the seeds.
"""
WRONG = (
    '"better": found.better',
    '"better": min(found.runs, key=lambda n: np.mean(found.runs[n]))',
)


def give(folder: Path) -> None:
    (x, y), (val_x, val_y) = classes(160), classes(80, seed=1)
    write(folder, x=x, y=y, val_x=val_x, val_y=val_y)


def check(folder: Path) -> None:
    far, close = read_json(folder, "far.json"), read_json(folder, "close.json")
    assert far["better"] == "fast", f"far.json says {far['better']!r} is better"
    assert close["better"] is None, f"close.json says {close['better']!r} is better"
    for name, found, names in (
        ("far.json", far, ("slow", "fast")),
        ("close.json", close, ("fast", "same")),
    ):
        one, other = (np.array(found["runs"][key], dtype=float) for key in names)
        assert len(one) == len(other) >= 3, f"{name}: {len(one)} and {len(other)} runs"
        assert len(set(one)) == len(one), f"{name}: runs of the seeds are the same"
        near(found["difference"], (other - one).mean(), f"{name}: difference")
        low, high = found["interval"]
        assert low < found["difference"] < high, f"{name}: the interval is {low} to {high}"
    assert far["interval"][1] < 0, f"far.json: the interval holds {far['interval'][1]}"
    assert max(map(abs, close["interval"])) < 0.05, f"close.json: {close['interval']} isn't close"
    # Rates so near each other give nearly the same losses, if a seed gives all else.
    one, other = np.array(close["runs"]["fast"]), np.array(close["runs"]["same"])
    assert np.abs(one - other).max() < 0.01, "close.json: the runs aren't paired"
    # Three classes at a rate of 0.003 stay near log(3), and at 0.1 they are learned in part.
    assert np.mean(far["runs"]["slow"]) > 1 > np.mean(far["runs"]["fast"]) > 0.3
