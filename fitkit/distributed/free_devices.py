"""Which GPUs are free: the ones to train on when the user leaves the choice to fitkit.

A GPU is usable if a tensor can be placed on it (one in exclusive mode that another process holds
refuses) and nobody else occupies it. Other processes occupy it if they

- hold more than 1 GiB or 5 % of its memory, whichever is more. The driver, a desktop and an idle
  CUDA context stay below that; a training doesn't;
- or keep it more than half busy, however little they hold.

The caller's own processes don't count. The choice is made once, in the caller's process, and
handed to the ranks: asked again, it would come out differently once rank 0 holds a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from fitkit.arguments import describe
from fitkit.distributed.gpu_probe import GPU, Holder, probe_gpus
from fitkit.distributed.launchers.script_ranks import is_script_rank
from fitkit.errors import ArgumentTypeError, ConfigurationError

GIB = 2**30

CHOSEN = "FITKIT_FREE_GPUS"
"""The variable by which rank 0 hands its choices, in order, to the ranks that run its script."""

_chosen: list[list[int]] = []
"""This process's choices so far."""

OCCUPIED_BYTES, OCCUPIED_FRACTION, OCCUPIED_LOAD = GIB, 0.05, 0.5


def find_usable_cuda_devices(k: int = -1) -> list[int]:
    """The indices of free CUDA devices, those with the most free memory first.

    Whole GiB of free memory are compared; where they are equal, the less busy GPU comes first.
    No CUDA context is left in this process: the GPUs are asked by a child process. In a script
    that runs once for each rank (`strategy="ddp"`) every rank gets what rank 0 chose.

    Args:
        k: how many; -1 for all that are free, which may be fewer than there are.

    Returns:
        Indices among the visible devices (after `CUDA_VISIBLE_DEVICES`), as `devices=` takes.

    Raises:
        ConfigurationError: there is no CUDA device, or too few are free. The message says what
            occupies the others, as far as known (`pip install nvidia-ml-py` tells more).

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(2, 1))
        >>> if torch.cuda.device_count() > 1:
        ...     model.compile("adam", "mse", devices=fitkit.find_usable_cuda_devices(2))
    """
    _check_k(k)
    found = _handed_down(len(_chosen))
    if found is None:
        gpus = probe_gpus() if torch.cuda.device_count() else []
        found = select_free(k, [_without_own(gpu) for gpu in gpus])
    _chosen.append(found)
    if not _is_other_script_rank():
        os.environ[CHOSEN] = json.dumps(_chosen)
    return list(found)


def _handed_down(index: int) -> list[int] | None:
    """What rank 0 chose at its call number `index`, where it started this process afterwards.

    Raises:
        ConfigurationError: the variable doesn't hold what fitkit writes there.
    """
    if not _is_other_script_rank():
        return None
    text = os.environ.get(CHOSEN, "[]")
    if not re.fullmatch(r"\[(\[(\d{1,4}(, \d{1,4})*)?\](, )?)*\]", text, re.ASCII):
        raise ConfigurationError(
            f"{CHOSEN}={text[:80]!r} is no list of lists of device numbers, as fitkit sets it for "
            "the ranks of a script. Unset it."
        )
    choices: list[list[int]] = json.loads(text)
    return choices[index] if index < len(choices) else None


def _is_other_script_rank() -> bool:
    return is_script_rank(os.environ) and os.environ.get("RANK") != "0"


def select_free(k: int, gpus: Sequence[GPU]) -> list[int]:
    """The choice itself, by what is known of each visible GPU; see `find_usable_cuda_devices`."""
    _check_k(k)
    if not gpus:
        raise ConfigurationError(
            f"k={k} asks for CUDA devices, but none is visible (torch {torch.__version__}, "
            f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}). Write "
            "accelerator='auto' or 'cpu' with devices='auto'."
        )
    occupied = {gpu.index: reason for gpu in gpus if (reason := why_occupied(gpu))}
    free = [gpu for gpu in gpus if gpu.index not in occupied]
    if k > len(gpus):
        raise ConfigurationError(
            f"k={k} asks for {k} GPUs, but {len(gpus)} {'is' if len(gpus) == 1 else 'are'} "
            f"visible. Write k={len(gpus)} at most, or k=-1 for all that are free."
        )
    if not free or k > len(free):
        listing = "; ".join(f"GPU {index} {reason}" for index, reason in sorted(occupied.items()))
        remedy = "Wait for them to become free"
        if free:
            remedy = f"Write k={len(free)}, or k=-1 for all that are free"
        raise ConfigurationError(
            f"k={k} asks for {'all free GPUs' if k == -1 else f'{k} free GPUs'}, but "
            f"{len(free)} of {len(gpus)} {'is' if len(free) == 1 else 'are'} free: {listing}. "
            f"{remedy}, or name them yourself: devices=[…]."
        )
    free.sort(key=lambda gpu: (-(gpu.free_bytes // GIB), gpu.load or 0.0, gpu.index))
    return [gpu.index for gpu in free[: len(free) if k == -1 else k]]


def why_occupied(gpu: GPU) -> str | None:
    """What keeps a GPU from being used, to follow its name; None if it is free."""
    if gpu.failure is not None:
        return f"takes no tensor ({gpu.failure}{_by(gpu.holders)})"
    if gpu.used_bytes > max(OCCUPIED_BYTES, OCCUPIED_FRACTION * gpu.total_bytes):
        used, total = gpu.used_bytes / GIB, gpu.total_bytes / GIB
        return f"has {used:.1f} of {total:.1f} GiB in use{_by(gpu.holders)}"
    if gpu.load is not None and gpu.load > OCCUPIED_LOAD and gpu.holders:
        return f"is {gpu.load:.0%} busy{_by(gpu.holders)}"
    return None


def _by(holders: Sequence[Holder]) -> str:
    listing = [
        f"pid {holder.pid}"
        + (f" {holder.name}" if holder.name else "")
        + (f" with {holder.used_bytes / GIB:.1f} GiB" if holder.used_bytes else "")
        for holder in holders[:4]
    ]
    return f" by {', '.join(listing)}{', …' if len(holders) > 4 else ''}" if listing else ""


def _check_k(k: object) -> None:
    if isinstance(k, bool) or not isinstance(k, int):
        raise ArgumentTypeError(
            f"k={describe(k)} must be an int: a number of GPUs, or -1 for all that are free."
        )
    if k == 0 or k < -1:
        raise ConfigurationError(
            f"k={k} must be a number of GPUs of at least 1, or -1 for all that are free."
        )


def _without_own(gpu: GPU) -> GPU:
    """The GPU as it would be without the caller's own processes (its earlier workers too)."""
    own = [holder for holder in gpu.holders if _is_own(holder.pid)]
    own_bytes = sum(holder.used_bytes or 0 for holder in own)
    if not own_bytes and torch.cuda.is_initialized() and torch.cuda.memory_reserved(gpu.index):
        # In a container the driver's process numbers aren't ours. A context takes some 0.5 GiB.
        own_bytes = torch.cuda.memory_reserved(gpu.index) + GIB // 2
    own_bytes = min(own_bytes, gpu.used_bytes)
    return dataclasses.replace(
        gpu,
        used_bytes=gpu.used_bytes - own_bytes,
        free_bytes=gpu.free_bytes + own_bytes,
        holders=tuple(holder for holder in gpu.holders if holder not in own),
    )


def _is_own(pid: int) -> bool:
    """Whether a process is this one or descends from it."""
    while pid > 1 and pid != os.getpid():
        try:
            # After the name, which may hold blanks and brackets: state, parent, …
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return pid == os.getpid()
