"""Ways to average gradients in DDP's place, by name: `DDPStrategy(comm_hook="bf16")`.

This file has no postponed annotations: torch compares a hook's with its own classes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from fitkit.arguments import describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.registry import Registry
from fitkit.tensors import FlatTensors

POWER_SGD_OPTIONS = (
    "matrix_approximation_rank",
    "start_powerSGD_iter",
    "min_compression_rate",
    "use_error_feedback",
    "warm_start",
    "orthogonalization_epsilon",
    "random_seed",
)
"""Of torch's `PowerSGDState`."""

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def _no_state(options: Mapping[str, Any]) -> None:
    """Return the first argument of a hook that needs none."""


@dataclasses.dataclass(frozen=True)
class NamedHook:
    """A hook of DDP's by its name.

    Attributes:
        hook: averages a bucket.
        make_state: gives its first argument, in a process that has joined the group, from the
            options that the user gave as `comm_hook_state`.
        options: the names of those that it takes.
    """

    hook: Hook
    make_state: Callable[[Mapping[str, Any]], Any] = _no_state
    options: tuple[str, ...] = ()


def hook_of(mean: Callable[[torch.Tensor], torch.Tensor]) -> Hook:
    """Return a hook that replaces each bucket by what `mean` makes of its numbers, in one
    vector.
    """

    def averaged(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        gradients = FlatTensors([buffer])
        gradients.write(mean(gradients.read()))
        devices: Any = None if buffer.is_cpu else [buffer.device]
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        future.set_result(buffer)
        return future

    return averaged


def fp16_mean(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the mean of a bucket's numbers as float16, which reach 65,504."""
    return _mean_as(torch.float16, bucket)


def bf16_mean(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the mean of a bucket's numbers as bfloat16, with any backend; torch's own refuses
    gloo.
    """
    return _mean_as(torch.bfloat16, bucket)


def _mean_as(dtype: torch.dtype, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    # Divided before the sum, which half types couldn't hold.
    small = buffer.to(dtype).div_(dist.get_world_size())
    future = dist.all_reduce(small, async_op=True).get_future()

    def widened(done: Any) -> torch.Tensor:
        found = done.value()
        return buffer.copy_(found[0] if isinstance(found, list) else found)

    result: torch.futures.Future[torch.Tensor] = future.then(widened)
    return result


def power_sgd(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's PowerSGD, one bucket after the other.

    It chains exchanges; with several buckets under way at once gloo pairs up those of different
    buckets, and ends the process (torch 2.13).

    Reference: Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization, 2019, arXiv:1905.13727.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

    future = powerSGD_hook(state, bucket)
    future.wait()
    return future


def _power_sgd_state(options: Mapping[str, Any]) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    try:
        return PowerSGDState(process_group=None, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigurationError(
            f"comm_hook_state={dict(options)} can't be taken by torch's PowerSGDState: {error}"
        ) from error


COMM_HOOKS: Registry[NamedHook] = Registry(
    "comm_hook",
    hint="Or give a function (state, bucket) -> Future. Post-local SGD averages weights, not "
    "gradients: write strategy=BaguaStrategy(algorithm='post_local_sgd').",
)
COMM_HOOKS.add("fp16", NamedHook(fp16_mean))
COMM_HOOKS.add("bf16", NamedHook(bf16_mean))
COMM_HOOKS.add("powersgd", NamedHook(power_sgd, _power_sgd_state, POWER_SGD_OPTIONS))


def check_hook(given: object, state: object) -> None:
    """Refuse what is no hook, and options that a named one doesn't take.

    Args:
        given: a function, a name, or None for DDP's own averaging.
        state: with a function, its first argument; with a name, a dict of options or None.

    Raises:
        ConfigurationError, ArgumentTypeError: with what to write instead.
    """
    if isinstance(given, str):
        named = COMM_HOOKS[given]
        if state is not None and not isinstance(state, Mapping):
            raise ArgumentTypeError(
                f"comm_hook_state={describe(state)} must be a dict of options with "
                f"comm_hook={given!r}."
            )
        unknown = [str(name) for name in state or {} if name not in named.options]
        if unknown:
            raise ArgumentTypeError(
                f"comm_hook={given!r} has no option {unknown[0]!r}. comm_hook_state takes: "
                f"{', '.join(named.options) or 'none'}."
            )
    elif given is not None and not callable(given):
        names = ", ".join(map(repr, COMM_HOOKS))
        raise ArgumentTypeError(
            f"comm_hook={describe(given)} must be a function (state, bucket) -> Future, or one of "
            f"{names}."
        )


def resolve_hook(given: Any, state: Any) -> tuple[Any, Any]:
    """Return the arguments of torch's `register_comm_hook`, in a process that has joined the group.

    Args: as for `check_hook`.

    Raises:
        ConfigurationError: options whose values the hook refuses.
    """
    if not isinstance(given, str):
        return state, given
    named = COMM_HOOKS[given]
    return named.make_state(state or {}), named.hook
