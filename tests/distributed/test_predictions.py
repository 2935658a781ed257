"""Predictions that go somewhere as they are computed, on several ranks."""

import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit.extras.launchers import workers
from tests.nets import dense, normal

pytestmark = pytest.mark.timeout(90)
X = normal(103, 4)


def compiled(**arguments):
    model = fitkit.Model(dense(4, 8, 3))
    model.compile("sgd", "mse", **{"accelerator": "cpu", "devices": 2, **arguments})
    return model


def batches_of(number):
    for index in range(number):
        yield torch.full((3, 4), float(index))


def in_each_way(model, make, path, **arguments):
    """What predict returns, and what comes by a file, a function and a loop."""
    got = []
    expected = model.predict(make(), verbose=0, **arguments)
    mapped = model.predict(make(), verbose=0, out=path, **arguments)
    model.predict(make(), verbose=0, out=lambda *given: got.append(given), **arguments)
    loop = list(model.predict_batches(make(), verbose=0, **arguments))
    assert np.array_equal(np.concatenate([indices for _, indices in got]), np.arange(len(expected)))
    return expected, mapped, np.concatenate([o for o, _ in got]), np.concatenate(loop)


@pytest.mark.parametrize("data", ["arrays", "loader", "stream", "steps of a stream"])
def test_outputs_come_in_order_on_two_ranks(tmp_path, data):
    model, arguments = compiled(), {}
    make = {
        "arrays": lambda: X,
        "loader": lambda: DataLoader(TensorDataset(X), 7, num_workers=1),
        "stream": lambda: batches_of(9),
        "steps of a stream": lambda: batches_of(9),
    }[data]
    if data == "arrays":
        arguments = {"batch_size": 2}
    elif data.startswith("steps"):
        arguments = {"steps": 5}
    found = in_each_way(model, make, tmp_path / "scores.npy", **arguments)
    assert [array.tobytes() for array in found] == [found[0].tobytes()] * 4
    assert len(found[0]) == {"stream": 27, "steps of a stream": 15}.get(data, 103)
    assert os.listdir(tmp_path) == ["scores.npy"]


def test_ranks_in_step_give_each_sample_once(tmp_path):
    model = compiled(strategy="fsdp")
    found = in_each_way(model, lambda: X[:23], tmp_path / "scores.npy", batch_size=2)
    assert [array.tobytes() for array in found] == [found[0].tobytes()] * 4


def test_a_loop_that_is_left_keeps_the_workers_and_the_model():
    model = compiled()
    expected = model.predict(X, verbose=0)
    before = [id(worker) for worker in workers._pool.processes]
    for number, _ in enumerate(model.predict_batches(X, batch_size=1, verbose=0)):
        if number == 2:
            break

    def consume():
        for _ in model.predict_batches(X, batch_size=1, verbose=0):
            raise KeyError("mine")

    with pytest.raises(KeyError):
        consume()
    assert "fitkit-predict" not in [thread.name for thread in threading.enumerate()]
    assert [id(worker) for worker in workers._pool.processes] == before
    assert np.array_equal(model.predict(X, verbose=0), expected)
    model.fit(X, normal(103, 3), verbose=0)


def test_other_calls_on_several_devices_wait_for_the_end_of_the_loop(tmp_path):
    model, other, alone = compiled(), compiled(), compiled(devices=1)
    batches = model.predict_batches(X, batch_size=1, verbose=0)
    next(batches)
    for call in (
        lambda: other.predict(X, verbose=0),
        lambda: other.fit(X, normal(103, 3), verbose=0),
        lambda: list(other.predict_batches(X, verbose=0)),
        lambda: model.save(tmp_path / "model.h5"),
        lambda: model.save_weights(tmp_path / "model.safetensors"),
    ):
        with pytest.raises(fitkit.ConfigurationError, match="End the loop first"):
            call()
    with pytest.raises(fitkit.ConfigurationError, match=r"its iterator's close\(\)"):
        model.fit(X, normal(103, 3), verbose=0)
    assert alone.predict(X, verbose=0).shape == (103, 3)
    batches.close()
    assert other.predict(X, verbose=0).shape == (103, 3)
    model.save(tmp_path / "model.h5")


class Predicting(fitkit.callbacks.Callback):
    """Predicts on all ranks, within a fit."""

    def __init__(self, path):
        self.path, self.shapes = path, []

    def on_epoch_end(self, epoch, logs):
        self.shapes.append(self.model.predict(X, batch_size=5, out=self.path, verbose=0).shape)


def test_a_callback_may_predict_into_a_file(tmp_path):
    model, predicting = compiled(), Predicting(tmp_path / "scores.npy")
    model.fit(X, normal(103, 3), verbose=0, callbacks=predicting)
    assert predicting.shapes == [(103, 3)]
    found = np.load(tmp_path / "scores.npy")
    assert np.array_equal(found, model.predict(X, batch_size=5, verbose=0))


class FailsOnRank(fitkit.Model):
    def predict_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 3:
            raise KeyError("mine")
        return batch


def test_a_rank_that_fails_leaves_no_file(tmp_path):
    model = FailsOnRank(dense(4, 3))
    model.compile(accelerator="cpu", devices=2)
    with pytest.raises(fitkit.WorkerError, match="mine"):
        model.predict(X, batch_size=2, out=tmp_path / "scores.npy", verbose=0)
    with pytest.raises(fitkit.WorkerError, match="mine"):
        list(model.predict_batches(X, batch_size=2, verbose=0))
    assert os.listdir(tmp_path) == []
    with pytest.raises(fitkit.CheckpointError, match="there is no folder"):
        compiled().predict(X, out=tmp_path / "nowhere" / "scores.npy", verbose=0)
    assert "fitkit-predict" not in [thread.name for thread in threading.enumerate()]


SCRIPT = """
    import os, torch, numpy as np, fitkit
    torch.manual_seed(0)
    model = fitkit.Model(torch.nn.Linear(4, 3))
    model.compile(accelerator="cpu", devices=2, strategy="ddp")
    x = torch.randn(103, 4)
    expected = model.predict(x, verbose=0)
    found = model.predict(x, out="scores.npy", verbose=0)
    assert found.tobytes() == expected.tobytes()
    loop = list(model.predict_batches(x, batch_size=5, verbose=0))
    # Products of other shapes may take other kernels, which differ in the last bit.
    expected = model.predict(x, batch_size=5, verbose=0)
    assert np.concatenate(loop).tobytes() == expected.tobytes()
    for number, _ in enumerate(model.predict_batches(x, batch_size=1, verbose=0)):
        if number == 3:
            break
    try:
        for _ in model.predict_batches(x, batch_size=1, verbose=0):
            if model.is_global_zero:
                break
    except fitkit.ConfigurationError as error:
        assert "Another rank has left" in str(error)
    model.predict(x, out=lambda outputs, indices: open(f"called{os.environ.get('RANK', 0)}", "w"))
    open(f"done{os.environ.get('RANK', 0)}", "w")
"""


@pytest.mark.slow
def test_each_rank_of_a_script_reads_the_loop_and_rank_zero_writes(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, "train.py"], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, timeout=80,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["called0", "done0", "done1", "scores.npy", "train.py"]
