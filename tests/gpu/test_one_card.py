"""What one card is enough for: ranks that share it, memory against the machine's figures, failures.

Programs of their own where a test ends a process or leaves the card broken in it.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fitkit
from benchmarks.gpu_nets import NETS
from fitkit.callbacks import Callback
from tests.nets import classification

ROOT = Path(__file__).parents[2]
IS_SIMULATED = "SIM_LIBRARY" in os.environ
MIB = 2**20

PROGRAM = """
import json
import os
import sys

import torch
from torch import nn

import fitkit
from tests.nets import classification

ranks = int(os.environ.get("WORLD_SIZE", 1))
x, y = classification(203, 6)
torch.manual_seed(1)
model = fitkit.Model(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))
given = json.loads(sys.argv[1])
if given:
    given["strategy"] = fitkit.strategies.DDPStrategy(process_group_backend=given["strategy"])
model.compile(
    "adam", "cross_entropy", metrics=["accuracy"], learning_rate=0.02, accelerator="gpu", devices=1,
    **given,
)
history = model.fit(x, y, batch_size=16 // ranks, epochs=3, shuffle=False, verbose=0).history
scores = model.evaluate(x, y, verbose=0)
if os.environ.get("RANK", "0") == "0":
    print(json.dumps([history, scores, str(model.device)]))
"""


def run(arguments, *launcher, program=PROGRAM):
    """Start the program, with `compile(**arguments)`, under a launcher if one is named."""
    return subprocess.Popen(
        [sys.executable, *(launcher or ["-c", program]), json.dumps(arguments)],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def printed(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1]) if out.strip() else None


def test_two_ranks_on_one_card_over_gloo_learn_what_one_process_does(tmp_path):
    """As on two machines that see one GPU each; NCCL would refuse the card they share."""
    program = tmp_path / "program.py"
    program.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{PROGRAM}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one = run({})
    two = [
        run(
            {"num_nodes": 2, "strategy": "gloo"},
            "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={rank}",
            "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}", str(program),
        )
        for rank in range(2)
    ]  # fmt: skip
    (history, scores, _), (shared, shared_scores, device) = printed(one), printed(two[0])
    printed(two[1])
    assert device == "cuda:0"
    assert shared_scores == pytest.approx(scores, rel=1e-4)
    for name, values in history.items():
        assert shared[name] == pytest.approx(values, rel=1e-4), name


def test_the_free_card_is_found_and_is_trained_on():
    assert fitkit.find_usable_cuda_devices(1) == [0]
    model = fitkit.Model(nn.Linear(6, 3))
    model.compile("sgd", "cross_entropy", accelerator="gpu", devices=1, auto_select_gpus=True)
    model.fit(*classification(32, 6), verbose=0)
    assert model.device.type == "cuda"


@pytest.mark.skipif(IS_SIMULATED, reason="needs nvidia-smi")
def test_logged_memory_is_what_the_machine_says():
    model = fitkit.Model(nn.Linear(2048, 2048))
    model.compile("adam", "mse", accelerator="gpu", devices=1, log_gpu_memory="all")
    seen = []

    class Asked(Callback):
        def on_epoch_end(self, epoch, logs):
            query = "nvidia-smi -i 0 --query-gpu=memory.used --format=csv,noheader,nounits"
            seen.append(float(subprocess.check_output(query.split())))

    x = torch.randn(64, 2048)
    history = model.fit(x, x, epochs=2, verbose=0, callbacks=[Asked()]).history
    # The driver keeps some hundred MiB for itself, which one of the two may leave out.
    assert history["gpu_0_memory_mib"][-1] == pytest.approx(seen[-1], abs=1024)
    assert history["gpu_memory_peak_mib"][-1] == pytest.approx(
        torch.cuda.max_memory_allocated() / MIB, rel=0.05
    )


@pytest.mark.parametrize("name", sorted(NETS))
def test_a_plan_is_near_what_training_takes(name):
    """Within 15 % of torch's peak, whether the net is on the card already or not."""
    if IS_SIMULATED and name != "mlp":
        pytest.skip("the CPU's kernels hold for a moment what a card's don't")
    gc.collect()
    others = torch.cuda.memory_allocated()  # what other tests hold
    task = NETS[name]()
    torch.manual_seed(0)
    model = fitkit.Model(task.net())
    model.compile("adam", "cross_entropy", accelerator="gpu", devices=1)
    batch = task.batch()
    (before,) = fitkit.plan(model, 1, "single", batch).costs.values()
    model.fit([batch], verbose=0)
    (after,) = fitkit.plan(model, 1, "single", batch).costs.values()
    assert after == before
    torch.cuda.reset_peak_memory_stats()
    model.fit([batch] * 3, verbose=0)
    measured = torch.cuda.max_memory_allocated() - others
    assert after.memory == pytest.approx(measured, rel=0.15), after


class Interrupt(Callback):
    """Sends Ctrl-C while the device still computes the third batch."""

    def on_train_batch_end(self, batch, logs):
        if batch == 2:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_in_a_step_leaves_a_model_that_goes_on():
    x, y = classification(256, 6)
    model = fitkit.Model(nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3)))
    model.compile("adam", "cross_entropy", accelerator="gpu", devices=1)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, batch_size=16, verbose=0, callbacks=[Interrupt()])
    torch.cuda.synchronize()
    assert model.evaluate(x, y, verbose=0) > 0
    model.fit(x, y, batch_size=16, verbose=0)


@pytest.mark.skipif(IS_SIMULATED, reason="the CPU's kernels check labels themselves")
def test_an_assert_on_the_device_ends_the_call_with_an_error_within_seconds():
    broken = PROGRAM.replace("torch.manual_seed(1)", "y[7] = 99")
    process = run({}, program=broken)
    _, err = process.communicate(timeout=90)
    assert process.returncode not in (0, -signal.SIGSEGV, -signal.SIGABRT), err
    assert "99" in err or "device-side assert" in err
