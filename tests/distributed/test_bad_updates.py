"""Faults in updates, on one and two ranks: named, and left out as in a plain loop without them.

One run of torchrun makes all trainings of two ranks: `python -m torch.distributed.run … this file`.
"""

import math
import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import fitkit
from fitkit.callbacks import LambdaCallback, SkipBadUpdates
from fitkit.extras.watches import NonFiniteError
from tests.limits import patience

pytestmark = pytest.mark.timeout(300)

SAMPLES, BATCH, BAD = 64, 4, 21
BAD_BATCH = BAD // BATCH


def data(fault):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(SAMPLES, 4, generator=generator) + 0.5
    y = x.sum(1, keepdim=True)
    if fault == "a nan row":
        x[BAD] = math.nan
    if fault == "an inf label":
        y[BAD] = math.inf
    if fault == "a bad shard":
        x[BAD - BAD % BATCH : BAD - BAD % BATCH + BATCH, 2:] = math.nan
    if fault == "an overflow":
        x[BAD] = 3e38
    if fault == "a bad gradient":
        x[BAD] = 0.0
    return x, y


class Rooted(nn.Module):
    """At 0 the root's value is finite, and its gradient isn't."""

    def __init__(self):
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(4)), nn.Linear(4, 1)

    def forward(self, x):
        return self.layer((x * self.scale).abs().sqrt())


def net(fault):
    torch.manual_seed(1)
    if fault == "a bad gradient":
        return Rooted()
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))


DATA = ("a nan row", "an inf label", "a bad shard", "an overflow", "a bad gradient")
CASES = {
    **{f"{fault}, {every}": (fault, every, {}) for fault in DATA for every in (1, 2)},
    "bf16-mixed overflow, 1": ("an overflow", 1, {"precision": "bf16-mixed"}),
    "bf16-mixed overflow, 2": ("an overflow", 2, {"precision": "bf16-mixed"}),
    "16-mixed, 1": ("a nan row", 1, {"precision": "16-mixed"}),
    "a rate that explodes, 1": ("a rate that explodes", 1, {}),
    "compiled, 1": ("a nan row", 1, {"jit_compile": True}),
    "compiled, 2": ("an inf label", 2, {"jit_compile": True}),
    "fsdp, 1": ("a nan row", 1, {"strategy": "fsdp"}),
    "fsdp, 2": ("a bad gradient", 2, {"strategy": "fsdp"}),
    "fsdp, a rate that explodes": ("a rate that explodes", 1, {"strategy": "fsdp"}),
    "ddp_sharded, 2": ("an inf label", 2, {"strategy": "ddp_sharded"}),
}
"""The fault, the batches of an update on each rank, and what else is compiled."""


def trained(case, ranks):
    """The weights, what was left out, and the first warning."""
    fault, every, options = CASES[case]
    model = fitkit.Model(net(fault))
    model.compile(
        "sgd", "mse", learning_rate=0.01, accelerator="cpu", devices=ranks,
        accumulate_grad_batches=every, **options,
    )  # fmt: skip
    skip, more = SkipBadUpdates(), []
    if fault == "a rate that explodes":
        skip = SkipBadUpdates(in_a_row=1, then="restore", every=1)

        def explode(batch, logs):
            model.optimizer.param_groups[0]["lr"] = 1e38 if batch == 3 else 0.01

        more = [LambdaCallback(on_train_batch_begin=explode)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        history = model.fit(
            *data(fault), batch_size=BATCH, shuffle=False, verbose=0, callbacks=[*more, skip]
        )
    words = [str(one.message) for one in said if "left out" in str(one.message)]
    return {
        "weights": {name: value.clone() for name, value in model.net.state_dict().items()},
        "skipped": history.skipped, "words": words, "updates": model.global_step,
        "count": history["skipped"], "loss": history["loss"],
    }  # fmt: skip


def plain(case, ranks):
    """The weights of a loop that leaves out the bad updates, and how many it makes."""
    fault, every, options = CASES[case]
    module, (x, y) = net(fault), data(fault)
    optimizer, made = torch.optim.SGD(module.parameters(), 0.01), 0
    scaler = torch.amp.GradScaler("cpu", enabled=options.get("precision") == "16-mixed")
    size = BATCH * ranks * every
    kind = torch.bfloat16 if options.get("precision") == "bf16-mixed" else torch.float16
    for number, rows in enumerate(torch.arange(SAMPLES).split(size)):
        if fault == "a rate that explodes":
            if number in (3, 4):  # the one that explodes, and the one that shows it
                continue
        elif BAD in rows:
            continue
        optimizer.zero_grad()
        for part in rows.split(BATCH):
            with torch.autocast("cpu", kind, enabled="precision" in options):
                loss = nn.functional.mse_loss(module(x[part]).float(), y[part])
            # Each rank's is scaled whole, and may overflow so, before the ranks' mean.
            scaled = torch.autograd.grad(scaler.scale(loss / every), [*module.parameters()])
            for parameter, gradient in zip(module.parameters(), scaled, strict=True):
                before = 0 if parameter.grad is None else parameter.grad
                parameter.grad = before + gradient / ranks
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        made += scaler.get_scale() >= before  # else it has left the update out by itself
    return module.state_dict(), made


def check(case, ranks, found):
    fault, every, options = CASES[case]
    weights, updates = plain(case, ranks)
    tolerance = {"rtol": 1e-2, "atol": 1e-3} if "precision" in options else {}
    for name, value in weights.items():
        torch.testing.assert_close(found["weights"][name], value, **tolerance)
    assert found["count"] == [1.0] and len(found["words"]) == 1, found["words"]
    (one,) = found["skipped"]
    if fault == "a rate that explodes":  # one update was taken back, after it was made
        assert found["updates"] == updates + 1 and math.isfinite(found["loss"][0])
        return
    assert found["updates"] == updates
    first, last = BAD_BATCH * BATCH, BAD_BATCH * BATCH + BATCH
    if fault == "a bad gradient":  # of an update, whose batches are all finite
        size = BATCH * ranks * every
        first, last = BAD // size * size, BAD // size * size + size
    assert one["rank"] == (None if fault == "a bad gradient" and ranks > 1 else BAD_BATCH % ranks)
    assert sorted(one["indices"]) == list(range(first, last))
    words = {"a nan row": f"x of sample {BAD} is nan", "an inf label": f"y of sample {BAD} is inf",
             "a bad shard": f"x of sample {first} is nan at column 2"}  # fmt: skip
    assert words.get(fault, f"samples {first}, ") in found["words"][0]


LONG = ("compiled, 1", "compiled, 2")
ON_ONE = [
    pytest.param(case, marks=pytest.mark.slow if case in LONG else ())
    for case in CASES
    if "strategy" not in CASES[case][2]
]


@pytest.mark.parametrize("case", ON_ONE)
def test_on_one_rank(case):
    check(case, 1, trained(case, 1))


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory):
    path = tmp_path_factory.mktemp("two") / "found.pt"
    inherited = {name: value for name, value in os.environ.items() if name != "FITKIT_LAUNCHED"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", __file__, str(path)],
        capture_output=True, text=True, timeout=patience(240),
        env={**inherited, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert path.exists(), done.stderr[-3000:]
    return torch.load(path, weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks(case, of_two_ranks):
    check(case, 2, of_two_ranks[case])


def test_without_end_it_raises_with_the_place():
    case = "a nan row, 1"
    x, y = data(CASES[case][0])
    x[BAD:] = math.nan
    model = fitkit.Model(net(""))
    model.compile("sgd", "mse", accelerator="cpu", devices=1)
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(NonFiniteError, match="x of sample 28 is nan"),
    ):
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks="skip_bad_updates")


if __name__ == "__main__":
    found = {}
    for case in CASES:
        try:
            found[case] = trained(case, 2)
        except Exception as error:
            found[case] = repr(error)
            print(case, repr(error), flush=True)
    if os.environ["RANK"] == "0":
        torch.save(found, sys.argv[1])
