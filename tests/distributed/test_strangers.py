"""What another user of the machine can reach of ranks that one process starts."""

import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import fitkit
from fitkit.callbacks import LambdaCallback
from fitkit.extras.launchers import group, process_group
from fitkit.extras.launchers.private_folder import private_folder
from fitkit.extras.launchers.workers import end_workers
from tests.limits import patience

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc"),
]

LISTENS = "0A"

STRANGER = """
    import encodings.idna, os, socket, sys
    if os.getuid() == 0:  # now, as another user may not even read this Python
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    folder, *ports = sys.argv[1:]
    for path in (folder, folder + "/1"):
        try:
            os.listdir(path) if path == folder else open(path, "ab")
            print("reached", path)
        except PermissionError:
            pass
    for port in ports:
        with socket.create_connection(("127.0.0.1", int(port)), timeout=5) as connection:
            connection.sendall(os.urandom(4096))
"""


def sockets_of(process):
    """The inodes of a process's sockets."""
    found = set()
    for path in Path(f"/proc/{process}/fd").iterdir():
        try:
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(path))
        except OSError:
            continue
        found.update([match[1]] if match else [])
    return found


def listening(processes):
    """The addresses (as the kernel writes them) and ports where processes listen."""
    inodes = set().union(*map(sockets_of, processes))
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:] if Path(table).exists() else []:
            fields = line.split()
            if fields[3] == LISTENS and fields[9] in inodes:
                address, port = fields[1].split(":")
                found.append((address, int(port, 16)))
    return found


def children():
    out = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "pid="], capture_output=True, text=True
    ).stdout
    return [pid for pid in map(int, out.split()) if os.path.exists(f"/proc/{pid}/fd")]


def visit(folder, ports):
    """What a stranger gets to; where tests run as root, he is another user."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", textwrap.dedent(STRANGER), str(folder), *map(str, ports)],
        capture_output=True, text=True, timeout=patience(60), cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 6, generator=generator), torch.arange(64) % 3


def train(callbacks=None, strategy="ddp_spawn", **arguments):
    torch.manual_seed(0)
    model = fitkit.Model(torch.nn.Linear(6, 3))
    model.compile(
        "sgd", "cross_entropy", accelerator="cpu", devices=2, strategy=strategy, **arguments
    )
    x, y = data()
    fit = {"epochs": 2, "batch_size": 8, "shuffle": False, "verbose": 0}
    return model.fit(x, y, callbacks=callbacks, **fit).history["loss"]


@pytest.mark.parametrize("strategy", ["ddp_spawn", "fsdp"])
def test_a_stranger_finds_no_store_of_workers_and_disturbs_nothing(strategy):
    seen = []

    def look(batch, logs):
        if os.getpid() == caller and not seen:
            here = listening([caller, *children()])
            seen.extend(place for place in here if place not in earlier)
            folders = list(private_folder().glob(f"ranks-{caller}-*"))
            reached = visit(folders[-1], [port for _, port in seen])
            assert os.getuid() != 0 or reached == ""
            assert folders[-1].stat().st_mode & 0o777 == 0o700

    caller = os.getpid()
    undisturbed = train(strategy=strategy)
    earlier = listening([caller, *children()])  # what other tests' failures still hold
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    callback = LambdaCallback(on_train_batch_end=look)
    assert train(callback, strategy=strategy) == undisturbed
    # At most one of gloo's for each rank and group (fsdp has two; what an earlier test left is
    # used again), and nothing beside: no store.
    groups = 2 if strategy == "fsdp" else 1
    assert {address for address, _ in seen} == {"0100007F"} and len(seen) <= 2 * groups, seen
    assert os.environ.get("GLOO_SOCKET_IFNAME") == before


def test_the_workers_folder_goes_with_them():
    train()
    assert list(private_folder().glob(f"ranks-{os.getpid()}-*"))
    end_workers()
    assert not list(private_folder().glob(f"ranks-{os.getpid()}-*"))


def test_a_script_s_ranks_have_no_store_that_a_stranger_could_reach(tmp_path):
    script = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import os, test_strangers as t
        from fitkit.callbacks import LambdaCallback
        def look(batch, logs):
            if os.environ["RANK"] == "0" and batch == 1:
                found = t.listening([os.getpid(), *t.children()])
                reached = t.visit(os.environ["FITKIT_MEETING"], [port for _, port in found])
                print([address for address, _ in found], os.getuid() and "" or reached)
        t.train(LambdaCallback(on_train_batch_end=look), strategy="ddp")
        print(os.environ["FITKIT_MEETING"])
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, "train.py"], capture_output=True, text=True,
        timeout=patience(100), cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second, folder = done.stdout.splitlines()
    assert first.strip() == second.strip() == "['0100007F', '0100007F']"
    assert not os.path.exists(folder)


class RunsCode:
    """Leaves a file when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return exec, (f"import os; open('{self.folder}/ran-' + str(os.getpid()), 'w').close()",)


def test_an_object_from_outside_the_run_is_refused_before_it_is_unpickled(tmp_path):
    caller = os.getpid()

    def forge(epoch, logs):
        """Rank 1's message as somebody would send it who doesn't know the run's key."""
        exchange = model._fitkit.compilation.strategy.collectives
        if os.getpid() != caller:
            process_group._key = b"guessed"
        exchange.gather(RunsCode(tmp_path) if exchange.rank else None)

    model = fitkit.Model(torch.nn.Linear(6, 3))
    model.compile("sgd", "cross_entropy", accelerator="cpu", devices=2, strategy="ddp_spawn")
    with pytest.raises(fitkit.WorkerError, match="refused and not unpickled"):
        model.fit(*data(), verbose=0, callbacks=LambdaCallback(on_epoch_end=forge))
    assert not (tmp_path / f"ran-{caller}").exists()


def test_a_connection_that_is_cut_is_told_as_that_and_not_as_a_timeout():
    caller = os.getpid()

    def cut(batch, logs):
        if os.getpid() == caller and batch == 2:
            group.hang_up()

    text = r"connection between ranks was closed although no rank failed: .*after \d+ s"
    with pytest.raises(fitkit.WorkerError, match=text) as caught:
        train(LambdaCallback(on_train_batch_end=cut))
    assert "timeout (" not in str(caught.value)


IMPORT = "import fitkit; print('imported')"


def imports(**variables):
    """Status, output and errors of a session's first process that imports fitkit."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=patience(60),
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def ended_process():
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.slow
def test_variables_left_over_from_a_script_s_ranks_end_with_a_line_that_names_them():
    left_over = {
        "ended": str(ended_process()),
        "another process has the number": f"{os.getpid()}-1",
    }
    for parent in left_over.values():
        code, out, err = imports(FITKIT_LAUNCHED="1", FITKIT_PARENT=parent, RANK="1")
        assert (code, out) == (1, "")
        assert f"FITKIT_PARENT={parent}" in err and "unset FITKIT_LAUNCHED" in err


@pytest.mark.slow
def test_a_job_that_a_rank_has_started_outlives_rank_0_and_imports_fitkit(tmp_path):
    job = """
        import os, sys, time
        while any(os.path.exists(f"/proc/{pid}") for pid in sys.argv[1:]):
            time.sleep(0.05)
        import torch, fitkit
        model = fitkit.Model(torch.nn.Linear(6, 3))
        model.compile("sgd", "cross_entropy", accelerator="cpu", devices=1)
        model.fit(torch.zeros(8, 6), torch.zeros(8, dtype=torch.int64), verbose=0)
        open("unfinished", "w").write(str(model.world_size))
        os.rename("unfinished", "done")
    """
    script = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import os, subprocess, test_strangers as t
        t.train(strategy="ddp")
        if os.environ["RANK"] == "1":
            subprocess.Popen([sys.executable, "job.py", str(os.getpid()), str(os.getppid())],
                             start_new_session=True, stderr=open("said", "w"))
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    (tmp_path / "job.py").write_text(textwrap.dedent(job))
    subprocess.run(
        [sys.executable, "train.py"], check=True, timeout=patience(100), cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    deadline = time.monotonic() + patience(60)
    while not (tmp_path / "done").exists():
        assert time.monotonic() < deadline, (tmp_path / "said").read_text()
        time.sleep(0.1)
    assert (tmp_path / "done").read_text() == "1"
