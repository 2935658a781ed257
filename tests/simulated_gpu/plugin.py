"""A plugin of pytest's for runs with simulated GPUs (`-p plugin`): a race fails its test.

It also runs tests that were written for the CPU on a device, where SIM_TESTS says so:

- `SIM_TESTS=1`: `devices=1` and "auto" mean the device of this index. One other than 0 finds more.
- `SIM_TESTS=ranks`: `accelerator="cpu"` means the accelerator, so two processes have two devices.

What a test itself compares may be on two devices; what fitkit does may not. Tests that can't run
so are skipped, and `CPU_ALONE` says why.
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

FIRST_ORDER = "test_every_first_order_optimizer_by_name_is_torchs_own_with_its_defaults"
CPU_ALONE = {
    "the test computes with the trained net, on the CPU": {
        "test_a_frozen_part_learns_as_plain_pytorch_does",
        "test_a_loss_and_a_metric_by_name_suffice_for_image_and_mask",
        "test_a_step_may_return_an_object_with_a_loss_and_predict_texts",
        "test_a_torchmetrics_object_counts_an_epoch_and_begins_anew",
        "test_evaluate_takes_the_validation_steps_where_there_is_no_test_step",
        "test_evaluation_is_the_mean_over_samples_with_a_short_last_batch",
        "test_on_batch_verbs_give_the_values_before_the_update",
        "test_predict_step_and_its_end",
        "test_sample_weights_multiply_each_loss_and_divide_by_the_number_of_samples",
        "test_updates_by_two_half_steps_are_counted_and_averaged",
        "test_validation_and_test_steps_and_their_ends",
        "test_with_compiled_steps",
    },
    "the test compares bits, and torch updates several tensors at once on a GPU": {
        f"{FIRST_ORDER}[nadam]",
        f"{FIRST_ORDER}[radam]",
        f"{FIRST_ORDER}[asgd]",
        "test_a_shuffling_loader_is_read_in_the_order_of_a_plain_loop",
        "test_gradients_are_clipped_by_norm_and_by_value",
    },
    "the test forks, which CUDA refuses": {
        "test_what_a_run_leaves_that_is_killed_at_any_step_is_gone_after_the_next",
    },
    "the compiler's pass for the CPU is tested": {
        "test_no_pattern_of_the_compiler_overlooks_a_factor",
    },
}


def pytest_collection_modifyitems(items):
    for item in items if WHERE == "1" else ():
        for why, names in CPU_ALONE.items():
            if item.name in names or getattr(item, "originalname", None) in names:
                item.add_marker(pytest.mark.skip(reason=why))


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
