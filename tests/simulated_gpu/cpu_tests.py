"""Tests that were written for the CPU run on a device, where SIM_TESTS says so.

- `SIM_TESTS=1`: `devices=1` and "auto" mean the device of this index. One other than 0 finds more.
- `SIM_TESTS=ranks`: `accelerator="cpu"` means the accelerator, so two processes have two devices.

What a test itself compares may be on two devices; what fitkit does may not. All of this holds in
every process. A rank that took "cpu" by its word would wait for the others for ever: main memory's
and the devices' tensors travel by different groups.
"""

import os
import pathlib
import sys

WHERE = os.environ.get("SIM_TESTS")
LIBRARIES = (str(pathlib.Path(__file__).resolve().parents[2] / "fitkit"), sys.prefix)


def in_main_memory(value):
    """A structure of tensors with all of them on the CPU."""
    import torch

    if isinstance(value, torch.Tensor):
        return value if value.device.type == "cpu" else value.cpu()
    if isinstance(value, dict):
        return {name: in_main_memory(one) for name, one in value.items()}
    return type(value)(map(in_main_memory, value)) if type(value) in (list, tuple) else value


def _for_tests(function):
    """`function` of values in main memory, where a test calls it, or a program that it starts."""

    def called(*given, **options):
        if not sys._getframe(1).f_code.co_filename.startswith(LIBRARIES):
            given = map(in_main_memory, given)
        return function(*given, **options)

    return called


def compare_anywhere(torch):
    """Let tests compare tensors of two devices."""
    torch.equal = _for_tests(torch.equal)
    torch.allclose = _for_tests(torch.allclose)
    torch.Tensor.numpy = _for_tests(torch.Tensor.numpy)
    close = torch.testing.assert_close

    def assert_close(actual, expected, **options):
        close(in_main_memory(actual), in_main_memory(expected), **options)

    torch.testing.assert_close = assert_close


def choose_the_device(devices):
    """Let the words for a CPU mean the accelerator; `devices` is fitkit's module."""
    choose, parse = devices.choose_kind, devices.parse_devices
    index = 1 if WHERE == "ranks" else int(WHERE)

    def choose_kind(accelerator, machine):
        return choose("gpu" if accelerator in ("cpu", "auto") else accelerator, machine)

    def parse_devices(given, kind, machine):
        found = parse(given, kind, machine)
        return (index,) if kind != "cpu" and given in ("auto", 1) else found

    devices.parse_devices = parse_devices
    if WHERE == "ranks":
        devices.choose_kind = choose_kind
