"""Which devices are there, and which ones the user's words mean.

Everything here is a pure function of those words and of a `Machine`, so every row of the
devices table can be tested without a GPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from collections.abc import Mapping
from typing import Any

from fitkit.accelerators import visible
from fitkit.arguments import describe
from fitkit.errors import ArgumentTypeError, ConfigurationError, missing_package
from fitkit.registry import unknown_name

ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps", "xpu", "hpu", "npu", "tpu", "xla")
"""The words that are always known. The type of any device that torch has registered is one too."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """What this machine has.

    Attributes:
        cuda_count: CUDA devices that are visible (after `CUDA_VISIBLE_DEVICES`).
        has_mps: whether Apple's GPU can be used.
        xla_count: XLA devices (TPUs); None where no package that drives them is installed.
        others: devices of other types that torch knows, by type: `{"xpu": 2}`.
    """

    cuda_count: int = 0
    has_mps: bool = False
    xla_count: int | None = None
    others: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def here(cls) -> Machine:
        """Return the machine that this process runs on."""
        others = visible()
        cuda, mps = others.pop("cuda", 0), others.pop("mps", 0)
        return cls(cuda, bool(mps), _xla_count(), others)

    def count(self, kind: str) -> int:
        """How many devices of a kind (`"cpu"`, `"cuda"`, `"mps"`, `"xla"`, …) are visible."""
        return {
            **self.others,
            "cpu": 1,
            "cuda": self.cuda_count,
            "mps": int(self.has_mps),
            "xla": self.xla_count or 0,
        }.get(kind, 0)

    def kinds(self, word: str) -> tuple[str, ...]:
        """Return the kinds of device that a word may mean here, the best first."""
        gpus = ("cuda", *self.others, "mps")
        meanings = {"auto": (*gpus, "xla", "cpu"), "gpu": gpus, "tpu": ("xla",)}
        return meanings.get(word, (word,))


def usable_cores() -> int | None:
    """How many cores this process may use; None where the system doesn't say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def overload(extra: float = 1.5) -> str | None:
    """Return what to say of a machine whose programs want more cores than it has; None where it has
    them.

    Args:
        extra: how many programs too many there are, over the last minute, before it is said.
    """
    try:
        load, cores = os.getloadavg()[0], usable_cores() or os.cpu_count() or 1
    except (AttributeError, OSError):  # Windows has no such average
        return None
    if load < cores + extra:
        return None
    what = f"{load:.0f} programs or threads want this machine's {cores} cores"
    if os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive":
        return f"{what}."
    return (
        f"{what}, and torch's threads hold a core while they wait for one another. "
        "Start Python with OMP_WAIT_POLICY=passive, or with OMP_NUM_THREADS=1."
    )


def choose_kind(accelerator: Any, machine: Machine) -> str:
    """Return the kind of device (`"cpu"`, `"cuda"`, `"mps"`, `"xla"`, …) that `accelerator` means
    here.

    Raises:
        ConfigurationError: an unknown word, or a kind that isn't there.
        MissingPackageError: XLA devices without a package that drives them.
    """
    words = (*ACCELERATORS, *(kind for kind in machine.others if kind not in ACCELERATORS))
    if not isinstance(accelerator, str) or accelerator.lower() not in words:
        if isinstance(accelerator, str):
            raise unknown_name("accelerator", accelerator, words)
        raise ArgumentTypeError(
            f"accelerator={describe(accelerator)} must be one of "
            f"{', '.join(repr(word) for word in words)}."
        )
    word = accelerator.lower()
    if word in ("tpu", "xla") and machine.xla_count is None:
        raise missing_package("torch_tpu", "tpu", f"accelerator={accelerator!r}")
    wanted = machine.kinds(word)
    for kind in wanted:
        if machine.count(kind):
            return kind
    raise ConfigurationError(
        f"accelerator={accelerator!r} asks for {' or '.join(wanted)}, but none is visible "
        f"({_seen(machine)}). Write accelerator='cpu' or 'auto'.",
        code="FK034",
    )


def _seen(machine: Machine) -> str:
    found = [f"CUDA devices: {machine.cuda_count}", f"MPS: {'yes' if machine.has_mps else 'no'}"]
    found += [f"{kind} devices: {count}" for kind, count in machine.others.items()]
    if machine.xla_count is not None:
        found.append(f"XLA devices: {machine.xla_count}")
    return ", ".join(found)


def parse_devices(devices: Any, kind: str, machine: Machine) -> tuple[int, ...]:
    """Return the indices of the devices that `devices` means, in rank order.

    Args:
        devices: `"auto"`, a count, -1, a list or tuple of indices, or one of those as text
            (`"3"` is a count, `"1,3"` and `"3,"` are indices).
        kind: `"cpu"`, `"cuda"`, `"mps"` or `"xla"`. On CPU a count is a number of processes.

    Raises:
        ConfigurationError: anything else, or devices that aren't there; the message names
            what is visible.
    """
    visible = machine.count(kind)

    def refused(reason: str, code: str | None = None) -> ConfigurationError:
        shown = f"devices={describe(devices)} {reason}"
        if kind == "cpu":
            remedy = "On CPU write the number of processes, devices=1, or devices='auto'."
            return ConfigurationError(f"{shown}. {remedy}", code=code)
        listing = f"0 to {visible - 1}" if visible > 1 else "only 0"
        return ConfigurationError(
            f"{shown}. Visible {kind} devices: {visible} (index {listing}). Write devices='auto', "
            "a count like 1, or a list of indices like [0].",
            code=code,
        )

    wanted = devices  # from here on a count, a sequence of indices, or "auto"
    if isinstance(devices, str):
        wanted = _read_text(devices.strip())
        if wanted is None:
            raise refused("is neither a count nor a list of indices")
    elif isinstance(devices, bool) or not isinstance(devices, (int, list, tuple)):
        raise refused(f"is a {type(devices).__name__}")
    if isinstance(wanted, (list, tuple)):
        if not wanted:
            raise refused("names no device")
        for index in wanted:
            if isinstance(index, bool) or not isinstance(index, int):
                raise refused(f"has {index!r}, which isn't an index")
        if kind == "cpu":
            raise refused("is a list of indices, but a CPU has none", "FK036")
        if len(set(wanted)) != len(wanted):
            raise refused("names a device twice")
        absent = [str(index) for index in wanted if not 0 <= index < visible]
        if absent:
            raise refused(f"asks for {kind} device {', '.join(absent)}, which isn't there", "FK035")
        return tuple(wanted)
    if wanted == -1 and kind == "cpu":
        raise refused("has no meaning on CPU")
    count: int = visible if wanted in ("auto", -1) else wanted
    if count < 1:
        raise refused("asks for no device")
    if kind != "cpu" and count > visible:
        is_or_are = "is" if visible == 1 else "are"
        raise refused(f"asks for {count} devices, but {visible} {is_or_are} visible")
    return tuple(range(count))


def _read_text(text: str) -> Any:
    """Return what a text says, as a count, indices or "auto"; None where it says nothing of
    these.
    """
    if text.lower() == "auto":
        return "auto"
    items = [item.strip() for item in text.split(",")]
    given = [item for item in items if item]
    if not given or not all(re.fullmatch("-?[0-9]+", item) for item in given):
        return None
    return tuple(map(int, given)) if len(items) > 1 else int(text)


def older_spelling(gpus: Any) -> dict[str, Any]:
    """`gpus=` as `accelerator` and `devices`: None, 0, [], "0" and "" mean the CPU."""
    if gpus is None or (
        gpus.strip() in ("", "0")
        if isinstance(gpus, str)
        else type(gpus) in (int, list, tuple) and not gpus
    ):
        return {"accelerator": "cpu", "devices": "auto"}
    return {"accelerator": "gpu", "devices": gpus}


def _xla_count() -> int | None:
    """Return the number of XLA devices; None where no package that drives them is installed."""
    if not any(importlib.util.find_spec(package) for package in ("torch_tpu", "torch_xla")):
        return None
    from fitkit.extras.xla_adapters import device_count

    return device_count()
