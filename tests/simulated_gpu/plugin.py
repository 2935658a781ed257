"""A plugin of pytest's for runs with simulated GPUs (`-p plugin`): a race fails its test.

It also runs tests that were written for the CPU on a device, where SIM_TESTS says so:

- `SIM_TESTS=1`: `devices=1` and "auto" mean the device of this index. One other than 0 finds more.
- `SIM_TESTS=ranks`: `accelerator="cpu"` means the accelerator, so two processes have two devices.

What a test itself compares may be on two devices; what fitkit does may not.
"""

import os
import pathlib
import sys

import pytest
import simulation
import torch
import torch.testing

WHERE = os.environ.get("SIM_TESTS")
ROOT = pathlib.Path(__file__).resolve().parents[2]
TESTS = str(ROOT / "tests")


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    del simulation.events[:]
    outcome = yield
    races = sorted(
        {f"{what}\n{stack}" for kind, what, stack in simulation.events if kind == "race"}
    )
    if races and outcome.excinfo is None:
        outcome.force_exception(AssertionError("A race on a device:\n" + "\n".join(races[:3])))


def _in_main_memory(value):
    if isinstance(value, torch.Tensor):
        return value if value.device.type == "cpu" else value.cpu()
    if isinstance(value, dict):
        return {name: _in_main_memory(one) for name, one in value.items()}
    return type(value)(map(_in_main_memory, value)) if type(value) in (list, tuple) else value


def _for_tests(function):
    """`function` of values in main memory, where a test calls it."""

    def called(*given, **options):
        if sys._getframe(1).f_code.co_filename.startswith(TESTS):
            given = map(_in_main_memory, given)
        return function(*given, **options)

    return called


def _compare_anywhere():
    torch.equal = _for_tests(torch.equal)
    torch.allclose = _for_tests(torch.allclose)
    torch.Tensor.numpy = _for_tests(torch.Tensor.numpy)
    close = torch.testing.assert_close

    def assert_close(actual, expected, **options):
        close(_in_main_memory(actual), _in_main_memory(expected), **options)

    torch.testing.assert_close = assert_close


def _choose_the_device():
    from fitkit.distributed import devices, resolve
    from fitkit.distributed.strategies import base

    choose, parse = devices.choose_kind, devices.parse_devices

    def choose_kind(accelerator, machine):
        return choose("gpu" if accelerator in ("cpu", "auto") else accelerator, machine)

    def parse_devices(given, kind, machine):
        found = parse(given, kind, machine)
        return (int(WHERE),) if kind != "cpu" and given in ("auto", 1) else found

    for module in (devices, resolve, base):
        if WHERE == "ranks" and hasattr(module, "choose_kind"):
            module.choose_kind = choose_kind
        if WHERE != "ranks" and hasattr(module, "parse_devices"):
            module.parse_devices = parse_devices


if WHERE:
    _compare_anywhere()
    _choose_the_device()
