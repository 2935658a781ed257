"""`strategy="horovod"` under horovodrun: torch.distributed in its ranks, and its own engine."""

import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.limits import patience

if importlib.util.find_spec("horovod") is None:
    pytest.skip("horovod isn't installed here: make test-engines", allow_module_level=True)
pytestmark = pytest.mark.timeout(200)

RUN = str(Path(sys.executable).parent / "horovodrun")

BEGIN = """
    import sys, torch, fitkit
    from torch import nn
    from torch.nn import functional as F
    from fitkit.callbacks import LambdaCallback
    from fitkit.strategies import HorovodStrategy
    x = torch.randn(52, 6, generator=torch.Generator().manual_seed(1))
    y = torch.arange(52) % 3
    def net(seed=0):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 3))
    def compiled(**options):
        # Each rank begins with other weights; rank 0's count.
        model = fitkit.Model(net(fitkit_rank))
        model.compile(torch.optim.AdamW(model.parameters(), 0.01), "cross_entropy",
                      accelerator="cpu", strategy=STRATEGY, **options)
        return model
    import os
    fitkit_rank = int(os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")))
    def fit(model, **options):
        return model.fit(x, y, batch_size=6, shuffle=False, verbose=0, **options)
    def plainly(epochs, clip=None, group=1):
        module = net()
        adam = torch.optim.AdamW(module.parameters(), 0.01)
        for _ in range(epochs):
            for start in range(0, len(x), 12 * group):
                adam.zero_grad()
                part = slice(start, start + 12 * group)
                F.cross_entropy(module(x[part]), y[part]).backward()
                if clip:
                    nn.utils.clip_grad_norm_(module.parameters(), clip)
                adam.step()
        return module, adam
    def differ(model, module):
        return max((p - q).abs().max().item()
                   for p, q in zip(model.parameters(), module.parameters()))
"""

EXACT = """
    model = compiled(gradient_clip_val=0.5)
    fit(model, epochs=2)
    reference, adam = plainly(2, clip=0.5)
    assert model.world_size == 2 and differ(model, reference) < 1e-5, differ(model, reference)
    for number, state in adam.state_dict()["state"].items():
        for name, value in state.items():
            mine = model.optimizer.state_dict()["state"][number][name]
            assert torch.allclose(mine, value, atol=1e-5), (number, name)
    with torch.no_grad():
        expected = F.cross_entropy(reference(x[:37]), y[:37]).item()
    assert abs(model.evaluate(x[:37], y[:37], verbose=0) - expected) < 1e-5
    assert torch.allclose(torch.tensor(model.predict(x, verbose=0)), reference(x), atol=1e-5)

    grouped = compiled(accumulate_grad_batches=3)
    fit(grouped, epochs=2)
    assert differ(grouped, plainly(2, group=3)[0]) < 1e-5

    saving = compiled()
    fit(saving, epochs=2, callbacks=LambdaCallback(
        on_epoch_end=lambda epoch, logs: saving.save(f"{epoch}.h5")))
    resumed = compiled()
    fit(resumed, epochs=2, resume_from="0.h5")
    assert differ(resumed, saving) < 1e-6 and differ(resumed, plainly(2)[0]) < 1e-5
    open(f"done{model.global_rank}", "w").close()
"""

COMPRESSED = """
    model = compiled()
    fit(model, epochs=2)
    off = differ(model, plainly(2)[0])
    assert 1e-7 < off < 1e-2, off
    frozen = compiled()
    def freeze(epoch, logs):
        frozen.net[0].requires_grad_(epoch == 1)
    fit(frozen, epochs=3, callbacks=LambdaCallback(on_epoch_begin=freeze))
    told = frozen.net[0].weight.detach().double().sum().item()
    open(f"done{model.global_rank}", "w").write(str(told))
"""

FAILS = """
    model = compiled()
    def fail(batch, logs):
        if model.global_rank == 1 and batch == 1:
            raise KeyError("mine")
    fit(model, callbacks=LambdaCallback(on_batch_end=fail))
"""


def run(tmp_path, text, strategy, launcher=None):
    path = tmp_path / "train.py"
    path.write_text(
        f"STRATEGY = None\n{textwrap.dedent(BEGIN)}\nSTRATEGY = {strategy}\n{textwrap.dedent(text)}"
    )
    launcher = launcher or [RUN, "-np", "2", "--gloo", "--network-interfaces", "lo"]
    began = time.monotonic()
    result = subprocess.run(
        [*launcher, sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True,
        timeout=patience(150), env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path),
                          "OMP_NUM_THREADS": "1"})  # fmt: skip
    return result, time.monotonic() - began


ENGINES = ["'horovod'", "HorovodStrategy(engine='horovod')"]


@pytest.mark.parametrize("strategy", ENGINES)
def test_horovodruns_ranks_train_as_plain_pytorch_does(strategy, tmp_path):
    result, _ = run(tmp_path, EXACT, strategy)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert (tmp_path / "done0").exists() and (tmp_path / "done1").exists()


def test_half_gradients_and_freezing_in_the_middle_keep_the_ranks_equal(tmp_path):
    strategy = "HorovodStrategy(engine='horovod', compression='fp16')"
    result, _ = run(tmp_path, COMPRESSED, strategy)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert (tmp_path / "done0").read_text() == (tmp_path / "done1").read_text() != ""


@pytest.mark.parametrize("strategy", ENGINES)
def test_a_rank_that_fails_ends_the_job_and_says_why(strategy, tmp_path):
    result, seconds = run(tmp_path, FAILS, strategy)
    assert result.returncode != 0 and seconds < 100
    assert "KeyError: 'mine'" in result.stdout + result.stderr


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun on this machine")
def test_mpiruns_ranks_train_as_plain_pytorch_does(tmp_path):
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    result, _ = run(tmp_path, EXACT, "'horovod'", launcher)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
