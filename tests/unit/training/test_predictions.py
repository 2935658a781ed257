"""Predictions that go to a file, a function or a loop as they are computed: those of `predict`."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit.callbacks import LambdaCallback
from tests.limits import patience
from tests.nets import dense, normal

X = normal(103, 4)


class Two(nn.Module):
    """Returns a structure of outputs."""

    def __init__(self, shape):
        super().__init__()
        self.net, self.shape = dense(4, 3), shape

    def forward(self, x):
        y = self.net(x)
        if self.shape == "dict":
            return {"a": y, "b": {"c": y[:, :1] > 0, "d": y.double()}}
        if self.shape == "tuple":
            return y, y.bfloat16()
        return y.sum()  # a number for each batch


def compiled(net=None, **arguments):
    model = fitkit.Model(dense(4, 8, 3) if net is None else net)
    model.compile("sgd", "mse", accelerator="cpu", devices=1, **arguments)
    return model


def left_over():
    return [thread.name for thread in threading.enumerate() if thread.name == "fitkit-predict"]


def bytes_of(array):
    return array.dtype, array.shape, np.asarray(array).tobytes()


def test_a_file_has_what_predict_returns_to_the_byte(tmp_path):
    model = compiled()
    found = model.predict(X, out=tmp_path / "scores.npy", verbose=0)
    assert isinstance(found, np.memmap)
    expected = model.predict(X, verbose=0)
    assert bytes_of(found) == bytes_of(expected) == bytes_of(np.load(tmp_path / "scores.npy"))
    assert os.listdir(tmp_path) == ["scores.npy"]


def test_several_outputs_have_a_file_each(tmp_path):
    model = compiled(Two("dict"))
    found = model.predict(X, out=str(tmp_path / "scores.npy"), verbose=0)
    expected = model.predict(X, verbose=0)
    flat = {"a": expected["a"], "b/c": expected["b"]["c"], "b/d": expected["b"]["d"]}
    assert {n: bytes_of(v) for n, v in found.items()} == {n: bytes_of(v) for n, v in flat.items()}
    assert sorted(os.listdir(tmp_path)) == ["scores.a.npy", "scores.b.c.npy", "scores.b.d.npy"]
    found = compiled(Two("tuple")).predict(X, out=tmp_path / "t.npy", verbose=0)
    assert list(found) == ["output_0", "output_1"]
    assert found["output_1"].dtype == np.float32  # NumPy has no bfloat16


def test_a_number_for_each_batch_becomes_a_vector(tmp_path):
    model = compiled(Two("number"))
    found = model.predict(X, out=tmp_path / "scores.npy", verbose=0)
    assert bytes_of(found) == bytes_of(model.predict(X, verbose=0))
    assert found.shape == (4,)


def test_an_existing_file_is_replaced_only_by_a_whole_one(tmp_path):
    path = tmp_path / "scores.npy"
    path.write_bytes(b"before")

    class Failing(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 3:
                raise self.error
            return x

    for error in (KeyError("mine"), KeyboardInterrupt()):
        net = Failing()
        net.error = error
        with pytest.raises(type(error)):
            compiled(net).predict(X, out=path, batch_size=8, verbose=0)
        assert path.read_bytes() == b"before"
        assert os.listdir(tmp_path) == ["scores.npy"]
    compiled().predict(X, out=path, verbose=0)
    assert np.load(path).shape == (103, 3)


@pytest.mark.parametrize("as_numpy", [True, False])
def test_a_function_gets_each_batch_and_its_indices_in_order(as_numpy):
    model, got = compiled(), []
    returned = model.predict(
        X, out=lambda *given: got.append(given), as_numpy=as_numpy, verbose=0, batch_size=10
    )
    assert returned is None
    expected = model.predict(X, verbose=0, batch_size=10)
    assert isinstance(got[0][0], np.ndarray if as_numpy else torch.Tensor)
    assert [len(outputs) for outputs, _ in got] == [10] * 10 + [3]
    assert np.array_equal(np.concatenate([indices for _, indices in got]), np.arange(103))
    assert np.concatenate([np.asarray(o) for o, _ in got]).tobytes() == expected.tobytes()


def test_the_loop_gets_each_batch_in_order():
    for net in (None, Two("dict")):
        model = compiled(net)
        batches = list(model.predict_batches(X, batch_size=10, verbose=0))
        expected = model.predict(X, batch_size=10, verbose=0)
        if net is not None:
            batches, expected = [batch["b"]["d"] for batch in batches], expected["b"]["d"]
        assert [len(batch) for batch in batches] == [10] * 10 + [3]
        assert np.concatenate(batches).tobytes() == expected.tobytes()
    assert left_over() == []


def test_outputs_are_copies():
    x = X.clone()
    for batch in compiled(nn.Identity()).predict_batches(x, verbose=0):
        batch += 1
    assert torch.equal(x, X)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x[:, :1].expand(-1, 2**17)  # 1 MiB for a batch of 2


def test_a_slow_loop_makes_the_net_wait():
    net = Counting()
    seen = []
    for number, batch in enumerate(compiled(net).predict_batches(X, batch_size=2, verbose=0)):
        threading.Event().wait(0.01)
        seen.append(net.calls - number)
        del batch
    assert len(seen) == net.calls == 52
    assert max(seen) <= 12


def children():
    """The processes that this one has started, without those that have ended, and `ps` itself."""
    command = ["ps", "--ppid", str(os.getpid()), "-o", "pid=,stat="]
    shown = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return {pid for pid, state in zip(shown[::2], shown[1::2], strict=True) if state[0] not in "RZ"}


def leave_loops():
    model = compiled()
    expected = model.predict(X, verbose=0)
    before = children()  # of other tests, such as a tracker's service
    loader = DataLoader(TensorDataset(X), 2, num_workers=1)
    for end in ("break", "raise"):
        try:
            for number, _ in enumerate(model.predict_batches(loader, verbose=0)):
                if number == 2 and end == "break":
                    break
                if number == 2:
                    raise KeyError("mine")
        except KeyError:
            pass
        gc.collect()
        assert left_over() == []
        assert children() <= before
        assert not model.stop_predicting or model.predict(X, verbose=0) is not None
        assert np.array_equal(model.predict(X, verbose=0), expected)
    model.fit(X, normal(103, 3), verbose=0)


def test_a_loop_that_is_left_leaves_nothing():
    # In a process of its own: a loader's worker is forked within a thread there, which libraries
    # that other tests have imported may not survive.
    program = f"from {__name__} import leave_loops; leave_loops()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=patience(60),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_an_iterator_that_nobody_reads_starts_nothing_and_one_in_use_can_be_closed():
    model = compiled()
    model.predict_batches(X, verbose=0)
    assert left_over() == []
    batches = model.predict_batches(X, batch_size=1, verbose=0)
    next(batches)
    batches.close()
    assert left_over() == []
    assert list(batches) == []


def test_an_error_in_the_net_reaches_the_loop():
    class Failing(nn.Module):
        def forward(self, x):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        list(compiled(Failing()).predict_batches(X, verbose=0))
    assert left_over() == []


def test_the_loop_has_the_callers_autocast():
    model = compiled()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.predict(X, verbose=0, as_numpy=False)
        found = list(model.predict_batches(X, verbose=0, as_numpy=False))
    assert expected.dtype is torch.bfloat16
    assert torch.equal(torch.cat(found), expected)


class Made(nn.Module):
    def forward(self, x):
        return torch.zeros(3).device.type == "meta" or x + 1


def test_the_loop_has_the_callers_default_device():
    with torch.device("meta"):
        found = list(compiled(Made()).predict_batches(X, verbose=0, as_numpy=False))
    assert found == [True] * 4


def test_hooks_get_the_outputs_of_their_group_of_batches(tmp_path):
    found = []
    for out in (None, tmp_path / "scores.npy"):
        seen = []
        model = compiled(steps_per_execution=3)
        watch = LambdaCallback(
            on_predict_batch_end=lambda batch, logs, seen=seen: seen.append(
                (batch, logs["outputs"].tolist())
            )
        )
        model.predict(X, batch_size=8, out=out, callbacks=watch, verbose=0)
        found.append(seen)
    assert found[0] == found[1]
    assert [batch for batch, _ in found[0]] == [2, 5, 8, 11, 12]


def test_a_callback_may_stop_it(tmp_path):
    def stop(batch, logs):
        model.stop_predicting = batch == 2

    model = compiled()
    path = tmp_path / "scores.npy"
    watch = LambdaCallback(on_predict_batch_end=stop)
    found = model.predict(X, batch_size=8, out=path, callbacks=watch, verbose=0)
    assert np.array_equal(found, model.predict(X[:24], batch_size=8, verbose=0))
    batches = list(model.predict_batches(X, batch_size=8, callbacks=watch, verbose=0))
    assert len(batches) == 3


def test_the_compiled_net_gives_the_same(tmp_path):
    model = compiled(dense(4, 8, 8, 8, 3), jit_compile=True)
    expected = model.predict(X, batch_size=8, verbose=0)
    found = model.predict(X, batch_size=8, out=tmp_path / "scores.npy", verbose=0)
    assert found.tobytes() == expected.tobytes()
    batches = list(model.predict_batches(X, batch_size=8, verbose=0))
    assert np.concatenate(batches).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        ("scores.csv", fitkit.ConfigurationError, r"must end with \.npy"),
        ("s3://bucket/scores.npy", fitkit.ConfigurationError, "is a URL"),
        ("nowhere/scores.npy", fitkit.CheckpointError, "there is no folder"),
        (3, TypeError, "must be the path of a .npy file, or a function"),
    ],
)
def test_another_place_is_refused(tmp_path, monkeypatch, out, error, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        compiled().predict(X, out=out, verbose=0)
    assert os.listdir(tmp_path) == []


def test_tensors_are_not_mapped(tmp_path):
    with pytest.raises(fitkit.ConfigurationError, match="as_numpy=False"):
        compiled().predict(X, out=tmp_path / "scores.npy", as_numpy=False, verbose=0)


class Uneven(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change, self.calls = change, 0

    def forward(self, x):
        self.calls += 1
        if self.calls < 3:
            return {"a": x}
        return self.change(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {"a": x[:, :2]}, r"float32 of shape \(4,\), then rows of float32 of shape \(2,"),
        (lambda x: {"a": x.double()}, "then rows of float64"),
        (lambda x: {"a": x, "b": x}, "different outputs: a and then a, b"),
        (lambda x: {"a": ["text"] * len(x)}, "is a str, which a .npy file can't hold"),
    ],
)
def test_what_one_array_cannot_hold_is_refused_and_leaves_no_file(tmp_path, change, message):
    with pytest.raises(fitkit.ConfigurationError, match=message):
        compiled(Uneven(change)).predict(X, out=tmp_path / "s.npy", batch_size=8, verbose=0)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (lambda x: {"nul\0": x}, "no file names can be made"),
        (lambda x: {"a.b": x, "a": {"b": x}}, "no file names can be made"),
        (lambda x: {"a/b": x, "a": {"b": x}}, "Two outputs have the name 'a/b'"),
    ],
)
def test_names_of_which_no_files_can_be_made(tmp_path, outputs, message):
    class Named(nn.Module):
        def forward(self, x):
            return outputs(x)

    with pytest.raises(fitkit.ConfigurationError, match=message):
        compiled(Named()).predict(X, out=tmp_path / "s.npy", verbose=0)
    assert os.listdir(tmp_path) == []
    name = compiled(Own()).predict(X, out=tmp_path / "s.npy", verbose=0)["../up"].filename
    assert os.path.dirname(name) == str(tmp_path)


class Own(nn.Module):
    def forward(self, x):
        return {"../up": x}


def test_no_samples_are_refused_in_each_way(tmp_path):
    model, none = compiled(), torch.zeros(0, 4)
    with pytest.raises(fitkit.ConfigurationError, match="x is empty"):
        model.predict(none, out=tmp_path / "s.npy", verbose=0)
    with pytest.raises(fitkit.ConfigurationError, match="x is empty"):
        list(model.predict_batches(none, verbose=0))
    assert os.listdir(tmp_path) == []


def test_outputs_without_columns(tmp_path):
    class Nothing(nn.Module):
        def forward(self, x):
            return x[:, :0]

    assert compiled(Nothing()).predict(X, out=tmp_path / "s.npy", verbose=0).shape == (103, 0)


def test_a_program_may_end_within_a_loop():
    script = """
        import torch, fitkit
        model = fitkit.Model(torch.nn.Linear(4, 3))
        model.compile(accelerator="cpu", devices=1)
        batches = model.predict_batches(torch.zeros(100000, 4), batch_size=1, verbose=0)
        print(next(batches).shape)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "(1, 3)\n"), done.stderr


PEAK = """
    import sys, torch, fitkit
    from glob import glob

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 10_000_000
        def __getitems__(self, indices):
            return torch.tensor(indices, dtype=torch.float32)[:, None].expand(-1, 4)

    def same(batch):
        return batch

    def peak(process):
        with open(f"/proc/{process}/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024

    def peaks():
        children = [open(file).read().split() for file in glob("/proc/self/task/*/children")]
        return sum(map(peak, ["self", *sum(children, [])]))

    def run(**arguments):
        if sys.argv[1] == "file":
            return len(model.predict(loader, verbose=0, out="scores.npy", **arguments))
        return sum(map(len, model.predict_batches(loader, verbose=0, **arguments)))

    model = fitkit.Model(torch.nn.Linear(4, 10))
    model.compile(accelerator="cpu", devices=2)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=1000, collate_fn=same)
    run(steps=20)
    before = peaks()
    assert run() == 10_000_000
    print(peaks() - before)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc")
@pytest.mark.parametrize("way", ["file", "loop"])
def test_memory_stays_bounded_for_ten_million_rows_on_two_processes(tmp_path, way):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PEAK), way], capture_output=True, text=True,
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 150  # MiB; about 55
