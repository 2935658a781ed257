"""A plugin of pytest's for runs with simulated GPUs (`-p plugin`): a race fails its test.

Where SIM_TESTS lets tests for the CPU run on a device (cpu_tests.py), those that can't are skipped,
and `CPU_ALONE` says why.
"""

import os
import re
import tempfile

import pytest
import simulation
from cpu_tests import WHERE

_log = tempfile.NamedTemporaryFile("r", prefix="races-of-ranks-")  # noqa: SIM115
os.environ["SIM_LOG"] = _log.name

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
    "a group of NCCL's, which gloo carries here, has connections that gloo alone hasn't": {
        "test_a_stranger_finds_no_store_of_workers_and_disturbs_nothing",
        "test_a_script_s_ranks_have_no_store_that_a_stranger_could_reach",
    },
    "what the CPU alone refuses is tested": {
        "test_cpus_have_nothing_to_bring_to_main_memory",
    },
    "the compiler's pass for the CPU is tested": {
        "test_no_pattern_of_the_compiler_overlooks_a_factor",
    },
}


def pytest_collection_modifyitems(items):
    for item in items if WHERE else ():
        for why, names in CPU_ALONE.items():
            if item.name in names or getattr(item, "originalname", None) in names:
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    del simulation.events[:]
    _log.seek(0, os.SEEK_END)
    outcome = yield
    races = sorted(
        {f"{what}\n{stack}" for kind, what, stack in simulation.events if kind == "race"}
    )
    logged = re.split("^race in process ", _log.read(), flags=re.M)[1:]
    races += [race for race in logged if not race.startswith(f"{os.getpid()}:")]
    if races and outcome.excinfo is None:
        outcome.force_exception(AssertionError("A race on a device:\n" + "\n".join(races[:3])))
