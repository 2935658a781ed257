"""Free GPUs, with pretended ones: chosen by memory and load, refused with what holds them."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras import free_devices
from fitkit.extras.free_devices import (
    GIB,
    GPU,
    MARK,
    Holder,
    examine,
    find_usable_cuda_devices,
    probe_gpus,
    run_child,
    select_free,
    why_occupied,
)
from tests.limits import patience


def gpu(index, free=80.0, used=0.5, load=0.0, holders=(), failure=None):
    return GPU(index, failure, int(free * GIB), int(used * GIB), 80 * GIB, load, tuple(holders))


TRAINING = Holder(4711, "python", 20 * GIB)
FOUR = [gpu(0, free=60, used=20, holders=[TRAINING]), gpu(1, free=77), gpu(2), gpu(3, free=78)]


def test_the_freest_comes_first_and_occupied_ones_not_at_all():
    assert select_free(-1, FOUR) == [2, 3, 1]
    assert select_free(2, FOUR) == [2, 3]


def test_equal_memory_leaves_the_choice_to_the_load_and_then_the_order():
    gpus = [gpu(0, load=0.3), gpu(1, load=0.1), gpu(2, load=0.1), gpu(3, load=None)]
    assert select_free(-1, gpus) == [3, 1, 2, 0]


def test_some_megabytes_do_not_outweigh_the_load():
    assert select_free(1, [gpu(0, free=79.9, load=0.4), gpu(1, free=79.1, load=0.0)]) == [1]


def test_more_than_are_free_is_refused_with_what_occupies_the_others():
    with pytest.raises(
        ConfigurationError,
        match=r"k=4 .* 3 of 4 are free: GPU 0 has 20.0 of 80.0 GiB in use by pid 4711 python "
        r"with 20.0 GiB\. Write k=3",
    ):
        select_free(4, FOUR)


def test_none_free_is_refused_with_all_that_is_known():
    gpus = [
        gpu(0, failure="CUDA error: all devices are busy", holders=[Holder(5)]),
        gpu(1, load=0.97, holders=[Holder(6, "small", None)]),
        gpu(2, free=10, used=70),
    ]
    with pytest.raises(ConfigurationError) as caught:
        select_free(-1, gpus)
    for part in (
        "k=-1 asks for all free GPUs, but 0 of 3 are free",
        "GPU 0 takes no tensor (CUDA error: all devices are busy by pid 5)",
        "GPU 1 is 97% busy by pid 6 small",
        "GPU 2 has 70.0 of 80.0 GiB in use",
    ):
        assert part in str(caught.value)


def test_more_than_are_visible_is_refused_with_both_numbers():
    with pytest.raises(ConfigurationError, match="k=5 .* 4 are visible"):
        select_free(5, FOUR)


def test_a_desktop_or_an_idle_context_does_not_occupy_a_gpu():
    assert why_occupied(gpu(0, used=3.9, holders=[Holder(7)])) is None  # Under 5 % of 80 GiB.
    small = dataclasses.replace(gpu(0, used=0.9), total_bytes=8 * GIB)
    assert why_occupied(small) is None
    assert why_occupied(dataclasses.replace(small, used_bytes=2 * GIB)) is not None
    assert why_occupied(gpu(0, load=0.9)) is None  # Its own driver at work: nobody is there.


@pytest.mark.parametrize("k", [True, False, 1.0, "2", None, [0]])
def test_what_is_no_whole_number_is_refused(k):
    with pytest.raises(ArgumentTypeError, match="k=.* must be an int"):
        find_usable_cuda_devices(k)


@pytest.mark.parametrize("k", [0, -2])
def test_no_gpus_and_negative_numbers_are_refused(k):
    with pytest.raises(ConfigurationError, match=f"k={k} must be a number of GPUs of at least 1"):
        find_usable_cuda_devices(k)


def test_no_cuda_at_all_is_said_without_starting_a_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ConfigurationError, match="none is visible"):
        find_usable_cuda_devices()


# The caller's own processes.


def test_the_caller_s_own_processes_and_their_children_do_not_occupy(monkeypatch):
    if not os.path.exists("/proc/self/stat"):
        pytest.skip("no /proc to see whose child a process is")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        own = [Holder(os.getpid(), "python", 10 * GIB), Holder(child.pid, "python", 9 * GIB)]
        probed = [gpu(0, free=60, used=20, holders=own), gpu(1, free=75, used=1)]
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(free_devices, "probe_gpus", lambda: probed)
        assert find_usable_cuda_devices() == [0, 1]
    finally:
        child.communicate(b"\n")


def test_another_user_s_process_occupies(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(free_devices, "probe_gpus", lambda: FOUR[:1])
    with pytest.raises(ConfigurationError, match="0 of 1 are free: GPU 0"):
        find_usable_cuda_devices()


# The child that looks.


def pretended_cuda(failing=()):
    def zeros(count, device):
        if int(device.removeprefix("cuda:")) in failing:
            raise RuntimeError("CUDA error: device busy\nwith more lines")
        return torch.zeros(count)

    cuda = SimpleNamespace(
        get_device_properties=lambda i: SimpleNamespace(total_memory=80 * GIB, uuid=f"u{i}"),
        mem_get_info=lambda i: (70 * GIB, 80 * GIB),
    )
    return cuda, zeros


class PretendedNVML:
    """Numbers GPUs by their place on the bus, which is not torch's order."""

    def __init__(self, refuses=()):
        self.refuses = refuses

    def ask(self, name, answer):
        if name in self.refuses:
            raise RuntimeError("Not supported")
        return answer

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        return {"GPU-u0": 1, "GPU-u1": 0}[uuid]

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        sizes = SimpleNamespace(free=(30 + handle) * GIB, used=20 * GIB, total=81 * GIB)
        return self.ask("memory", sizes)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        small, large = (
            SimpleNamespace(pid=2**22 + 1, usedGpuMemory=None),
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=5),
        )
        return self.ask("processes", [small, large])

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802
        return self.ask("load", SimpleNamespace(gpu=40))


def test_nvml_is_asked_by_uuid_and_counts_more_than_torch():
    found = examine(0, *pretended_cuda(), PretendedNVML())
    assert (found.free_bytes, found.used_bytes, found.total_bytes) == (31 * GIB, 20 * GIB, 81 * GIB)
    assert found.load == 0.4
    assert [holder.used_bytes for holder in found.holders] == [5, None]
    assert found.failure is None


def test_without_nvml_torch_says_how_much_is_free():
    found = examine(1, *pretended_cuda(), None)
    assert (found.free_bytes, found.used_bytes, found.load) == (70 * GIB, 10 * GIB, None)


def test_what_nvml_refuses_to_say_is_left_out():
    found = examine(0, *pretended_cuda(), PretendedNVML(refuses=["processes"]))
    assert (found.free_bytes, found.holders, found.load) == (31 * GIB, (), None)
    found = examine(0, *pretended_cuda(), PretendedNVML(refuses=["memory"]))
    assert found.free_bytes == 70 * GIB


def test_a_gpu_that_takes_no_tensor_says_why_in_one_line():
    found = examine(1, *pretended_cuda(failing=[1]), PretendedNVML())
    assert found.failure == "CUDA error: device busy"
    assert found.holders


def test_what_the_child_reports_arrives_as_it_was(monkeypatch, capsys):
    cuda, zeros = pretended_cuda()
    cuda.device_count = lambda: 2
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(free_devices, "load_nvml", PretendedNVML)
    free_devices.report()
    lines = [line.removeprefix(MARK) for line in capsys.readouterr().out.splitlines()]
    monkeypatch.setattr(free_devices, "run_child", lambda code, timeout_s: (lines, ""))
    assert probe_gpus() == [examine(i, cuda, zeros, PretendedNVML()) for i in (0, 1)]


def test_a_gpu_that_never_answers_is_given_up_and_named(monkeypatch):
    first = json.dumps(dataclasses.asdict(gpu(0)))
    code = f"import time; print('{MARK}2'); print('{MARK}' + {first!r}, flush=True); time.sleep(60)"
    monkeypatch.setattr(free_devices, "run_child", lambda _, timeout_s: run_child(code, timeout_s))
    start = time.monotonic()
    found = probe_gpus(timeout_s=0.5)
    assert time.monotonic() - start < patience(5)
    assert found[0] == gpu(0)
    assert "no answer: nothing within 0.5 s" in found[1].failure


def test_a_child_that_dies_says_why(monkeypatch):
    code = "import sys; sys.exit('the driver is too old')"
    monkeypatch.setattr(free_devices, "run_child", lambda _, timeout_s: run_child(code, timeout_s))
    with pytest.raises(ConfigurationError, match="exit status 1; the driver is too old"):
        probe_gpus()


def test_the_real_child_runs_and_finds_what_torch_finds():
    assert len(probe_gpus()) == torch.cuda.device_count()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_is_found_and_no_context_is_left():
    code = (
        "from fitkit.extras.free_devices import find_usable_cuda_devices; import torch; "
        "print(find_usable_cuda_devices(1), torch.cuda.is_initialized())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patience(100)
    )
    assert done.stdout.split() == ["[0]", "False"] or "are free" in done.stderr
