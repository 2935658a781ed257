"""Two "hosts" on one machine: network namespaces joined by a virtual cable."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def why_not() -> str:
    """Why there can be no such hosts here; empty where there can."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "needs Linux and iproute2 (ip)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return "" if made.returncode == 0 else f"no network namespaces: {made.stderr.strip()}"


class Host:
    """A network namespace with an address, and what was started in it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = f"fitkit{os.getpid()}h{number}"
        self.cable = f"fk{os.getpid() % 100000}v{number}"
        self.address = f"10.9.0.{number}"
        self.agent: subprocess.Popen[str] | None = None

    def torchrun(self, folder: Path, script: Path, *options: str, **variables: str) -> None:
        """Start a torchrun agent here; what it prints goes to `agent<number>.log`."""
        is_host = int(self.number == 1)
        command = [
            *("ip", "netns", "exec", self.name, sys.executable, "-m", "torch.distributed.run"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=10.9.0.1:29400", "--rdzv-id=cluster"),
            *(f"--local-addr={self.address}", f"--rdzv-conf=is_host={is_host},join_timeout=60"),
            *(*options, str(script)),
        ]
        own = {
            "GLOO_SOCKET_IFNAME": self.cable,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "HOST": str(self.number),
            # Without it an elastic launch that grows waits for ever (torch 2.13).
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with open(folder / f"agent{self.number}.log", "w") as log:
            self.agent = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **own, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def wait(self, timeout_s: float) -> int:
        """The agent's exit status."""
        assert self.agent is not None
        return self.agent.wait(timeout_s)

    def unplug(self) -> None:
        """Cut the cable: nothing is said any more, and no connection is closed."""
        run("ip", "-n", self.name, "link", "set", self.cable, "down")

    def kill(self) -> None:
        """End all that runs here, without a word."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True
        ).stdout.split()
        for process in listed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        if self.agent is not None:
            self.agent.wait(10)


@contextlib.contextmanager
def two_hosts():
    """Two hosts that reach each other; at the end nothing of them is left."""
    first, second = Host(1), Host(2)
    try:
        for host in (first, second):
            run("ip", "netns", "add", host.name)
        run(
            *("ip", "link", "add", first.cable, "netns", first.name, "type", "veth"),
            *("peer", "name", second.cable, "netns", second.name),
        )
        for host in (first, second):
            run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.cable)
            for device in (host.cable, "lo"):
                run("ip", "-n", host.name, "link", "set", device, "up")
        yield first, second
    finally:
        for host in (first, second):
            host.kill()
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


def until(condition, timeout_s: float, folder: Path) -> None:
    """Wait for something; what the agents printed is in the error where it doesn't come."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            logs = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("*.log")))
            raise AssertionError(f"nothing after {timeout_s} s:\n{logs}")
        time.sleep(0.1)
