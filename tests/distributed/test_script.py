"""strategy="ddp" in a script: the ranks are the script again, and end with it."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from fitkit.extras.launchers.script import what_runs_instead_of_a_script
from tests.limits import patience

pytestmark = pytest.mark.timeout(90)

BEGIN = """
    import argparse, os, signal, sys, time
    import torch, fitkit
    from fitkit.callbacks import LambdaCallback
    open(f"rank{os.environ.get('RANK', 0)}.pid", "w").write(str(os.getpid()))
    rank = int(os.environ.get("RANK", 0))
    torch.manual_seed(0)
    x, y = torch.randn(103, 6), torch.randint(3, (103,))
    def compiled(devices=2, **arguments):
        torch.manual_seed(0)
        model = fitkit.Model(torch.nn.Linear(6, 3))
        model.compile("sgd", "cross_entropy", accelerator="cpu", devices=devices, **arguments)
        return model
    def at_batch(act):
        return LambdaCallback(on_train_batch_end=lambda batch, logs: act() if batch == 1 else None)
    def raises():
        raise KeyError("mine")
"""


@pytest.fixture
def start(tmp_path):
    """Starts a script (after `BEGIN`) as a user would; nothing of it is left at the end."""
    processes = []

    def start(text, *arguments, path="train.py"):
        (tmp_path / path).write_text(textwrap.dedent(BEGIN) + textwrap.dedent(text))
        process = subprocess.Popen(
            [sys.executable, *(arguments or [path])],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()
    pids = [int(path.read_text()) for path in tmp_path.glob("rank*.pid")]
    deadline = time.monotonic() + patience(15)
    while left := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)


def ended(process, seconds=60):
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def since(path):
    return time.time() - path.stat().st_mtime


@pytest.mark.slow
def test_a_module_of_a_package_with_arguments_trains_as_one_process(start, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    process = start(
        """
        parser = argparse.ArgumentParser()
        parser.add_argument("--epochs", type=int)
        epochs = parser.parse_args().epochs
        names = "MASTER_ADDR WORLD_SIZE RANK LOCAL_RANK NODE_RANK"
        def train(model, size):
            history = model.fit(x, y, epochs=epochs, batch_size=size, shuffle=False, verbose=0)
            loss = model.evaluate(x, y, verbose=0)
            return [*history.history["loss"], loss, float(model.predict(x, verbose=0).sum())]
        one = train(compiled(1), 16)  # on each rank by itself
        folder = os.getcwd()
        os.chdir("/")  # the script's name is relative to where it was started
        model = compiled(strategy="ddp")
        two = train(model, 8)
        assert len(two) == epochs + 2 and max(abs(a - b) for a, b in zip(one, two)) < 1e-5
        place = model.global_rank, model.local_rank, model.world_size, model.is_global_zero
        with open(f"{folder}/rank{rank}.txt", "w") as file:
            print(*[os.environ[name] for name in names.split()], *place, sys._xoptions['fast'],
                  file=file)
        print("once")
        """,
        "-X", "fast=7", "-m", "package.train", "--epochs", "2",
        path="package/train.py",
    )  # fmt: skip
    code, out, err = ended(process)
    assert (code, out, err) == (0, "once\n", "")
    assert (tmp_path / "rank0.txt").read_text() == "127.0.0.1 2 0 0 0 0 0 2 True 7\n"
    assert (tmp_path / "rank1.txt").read_text() == "127.0.0.1 2 1 1 0 1 1 2 False 7\n"


@pytest.mark.slow
def test_an_error_of_all_ranks_can_be_caught_and_one_of_one_rank_ends_all(start):
    process = start(
        """
        model = compiled(strategy="ddp")
        for failing in ((0, 1), (1,)):
            act = raises if rank in failing else lambda: None
            try:
                model.fit(x, y, batch_size=8, verbose=0, callbacks=at_batch(act))
            except (KeyError, fitkit.WorkerError) as error:
                print(type(error).__name__, getattr(error, "rank", ""), flush=True)
            print(model.evaluate(x, y, verbose=0) > 0, flush=True)
        act = raises if rank == 1 else lambda: None
        model.fit(x, y, batch_size=8, verbose=0, callbacks=at_batch(act))
        """
    )
    code, out, err = ended(process)
    assert code == 1
    assert out.split() == ["KeyError", "True", "WorkerError", "1", "True"]
    assert err.count("WorkerError: Rank 1 failed: KeyError: 'mine'") == 1
    assert "in raises" in err and err.count("Traceback") == 2  # rank 0's own, and rank 1's


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_script_in_seconds(start, tmp_path):
    process = start(
        """
        def kill():
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        compiled(strategy="ddp").fit(
            x, y, batch_size=8, verbose=0, callbacks=at_batch(kill if rank == 1 else lambda: None))
        """
    )
    code, _, err = ended(process)
    assert code == 1 and "WorkerError: Rank 1 was ended by SIGKILL" in err
    assert since(tmp_path / "killed") < 30


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGINT],
    ids=["kill", "ctrl-c"],
)
def test_the_ranks_go_with_rank_0(start, tmp_path, number):
    process = start(
        """
        def tell(epoch, logs):
            if epoch == 3:
                print("begin", flush=True)
                time.sleep(600 * rank)  # rank 0 waits in an exchange
        compiled(strategy="ddp").fit(
            x, y, epochs=9, verbose=0, callbacks=LambdaCallback(on_epoch_end=tell))
        """
    )
    assert process.stdout.readline() == "begin\n"
    time.sleep(0.5)
    process.send_signal(number)
    sent = time.monotonic()
    code, _, err = ended(process)
    assert code == -number and time.monotonic() - sent < patience(30)
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    other = int((tmp_path / "rank1.pid").read_text())
    while os.path.exists(f"/proc/{other}"):
        assert time.monotonic() - sent < patience(30)
        time.sleep(0.1)


def test_a_rank_that_does_not_come_to_a_call_ends_it_and_says_why(start):
    process = start(
        """
        model = compiled(strategy="ddp")
        model.fit(x, y, verbose=0)
        try:
            compiled(devices=3, strategy="ddp")
        except fitkit.ConfigurationError as error:
            print(error)
        if model.is_global_zero:
            model.evaluate(x, y, verbose=0)
        """
    )
    code, out, err = ended(process)
    assert "asks for 3 ranks, but this script already runs on 2" in out
    assert code == 1
    assert "WorkerError: 1 of 2 ranks joined this call of evaluate" in err


@pytest.mark.slow
def test_without_a_script_workers_take_part_and_it_is_said_once(start):
    process = start(
        """
        for _ in range(2):
            model = compiled(strategy="ddp")
            model.fit(x, y, verbose=0)
        print(model.world_size)
        """,
        "-c", "exec(open('train.py').read())",
    )  # fmt: skip
    code, out, err = ended(process)
    assert (code, out) == (0, "2\n")
    assert err.count("strategy='ddp' starts the script again") == 1
    assert "from standard input or the command line. It uses worker processes" in err


def test_a_test_runner_is_no_script(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/pytest", "tests"])  # pytest-xdist has others
    assert what_runs_instead_of_a_script() == "pytest"


SAVES = """
    model = compiled()
    model.fit(x, y, batch_size=8, verbose=0)
    if rank == 0:
        import fitkit.checkpoint as files
        write = files.save_checkpoint
        def slowly(*arguments):
            time.sleep(1.0)
            write(*arguments)
        files.save_checkpoint = slowly
    for path in ("first.h5", "first.h5", "weights.safetensors"):
        (model.save if path.endswith("h5") else model.save_weights)(path)
        if path.endswith("h5"):
            again = fitkit.load_model(path, torch.nn.Linear(6, 3))
        else:
            again = compiled()
            again.load_weights(path)
        assert torch.equal(again.net.weight, model.net.weight), path
    if model.is_global_zero:
        model.save("alone.h5")  # rank 0 waits for nobody
    try:
        model.save("no/such/folder/a.h5")
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
    model.fit(x, y, batch_size=8, verbose=0)
    open(f"read{rank}.txt", "w").write(failed)
"""


@pytest.mark.slow
def test_every_rank_reads_what_rank_0_has_saved(start, tmp_path):
    """Ranks of torchrun, too: test_launchers.py."""
    process = start(SAVES.replace("compiled()", "compiled(strategy='ddp')"))
    output, errors = process.communicate(timeout=patience(80))
    assert process.returncode == 0, output + errors
    assert (tmp_path / "alone.h5").exists()
    assert (tmp_path / "read0.txt").read_text().startswith("CheckpointError")
    told = (tmp_path / "read1.txt").read_text()
    assert told.startswith("WorkerError: Rank 0 failed (CheckpointError")


TALKS = """
    def talks(epoch, logs):
        print("epoch", epoch, "of", os.getenv("RANK"))
        print("warned", file=sys.stderr)
        for _ in range(5000):
            print("much" * 20)
    shown = LambdaCallback(on_epoch_end=talks)
"""


@pytest.mark.slow
def test_lightnings_print_on_every_rank_is_seen_with_output_all(start):
    process = start(
        TALKS
        + """
    from fitkit.strategies import DDPStrategy
    model = compiled(strategy=DDPStrategy(output="all"))
    model.fit(x, y, epochs=2, verbose=0, callbacks=[shown])
    print("after", rank)
    """
    )
    status, out, err = ended(process)
    assert status == 0, err
    lines = out.splitlines()
    for epoch in (0, 1):
        assert lines.count(f"epoch {epoch} of 0") == 1
        assert lines.count(f"[rank 1] epoch {epoch} of 1") == 1
    assert lines.count("[rank 1] " + "much" * 20) == 10_000
    assert lines.index("[rank 1] epoch 1 of 1") < lines.index("after 0")
    assert lines.count("[rank 1] after 1") == 1  # what a script prints at its end, too
    assert err.splitlines().count("[rank 1] warned") == 2


@pytest.mark.slow
def test_without_it_the_other_ranks_print_nothing(start):
    status, out, err = ended(
        start(TALKS + "    compiled(strategy='ddp').fit(x, y, verbose=0, callbacks=[shown])\n")
    )
    assert status == 0, err
    assert "[rank 1]" not in out + err
    assert out.count("epoch 0") == 1
