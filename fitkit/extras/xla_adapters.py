"""Adapters to the packages that drive XLA devices: torch_tpu and torch_xla.

Neither was ever run with a TPU. docs/engines.md says what was tested.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch

from fitkit.arguments import describe
from fitkit.errors import ArgumentTypeError, MissingPackageError, missing_package, warn_once
from fitkit.registry import unknown_name
from fitkit.seams.strategies import World


@runtime_checkable
class Adapter(Protocol):
    """The six methods by which a training on XLA devices differs from any other.

    Attributes:
        backend: the backend of the ranks' process group, which exchanges what is on the CPU.

    Example:
        >>> from fitkit.strategies import XLAAdapter, XLAStrategy
        >>> def trained_by(adapter: XLAAdapter):
        ...     return XLAStrategy(adapter)
    """

    backend: str

    def count(self) -> int:
        """Return the number of this machine's devices, without claiming any."""

    def launch(self, ranks: int) -> None:
        """Prepare for so many processes on this machine. Called in the first, before the others."""

    def device(self, world: World, local_ranks: int) -> torch.device:
        """Claim this rank's device."""

    def world_size(self) -> int:
        """Return how many processes the devices' own exchanges reach, once the ranks have met."""

    def step(self) -> None:
        """Run the operations recorded since the last call, if operations are only recorded."""

    def sum(self, tensors: list[torch.Tensor]) -> None:
        """Replace tensors on the device by their sums over the ranks.

        Ranks:
            Collective.
        """


class TorchTPU:
    """Google's `torch_tpu`: eager operations, a device type `tpu`, a backend of c10d."""

    backend = "cpu:gloo,tpu:tpu_dist"

    def count(self) -> int:
        # torch has loaded it already, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 forbids that. Where it
        # is loaded and no TPU is there (0.2.0), every backward pass waits for one, on the CPU too.
        found = torch.accelerator.current_accelerator()
        is_tpu = found is not None and found.type == "tpu"
        return torch.accelerator.device_count() if is_tpu else 0

    def launch(self, ranks: int) -> None:
        if ranks > 1:
            importlib.import_module("torch_tpu")
            tpu: Any = torch.tpu  # type: ignore[attr-defined]
            tpu.distributed.set_tpu_launch_env(nproc_per_node=ranks)

    def device(self, world: World, local_ranks: int) -> torch.device:
        importlib.import_module("torch_tpu")
        with _named(world, local_ranks):
            return torch.device("tpu", torch.accelerator.current_device_index())

    def world_size(self) -> int:
        return torch.distributed.get_world_size()

    def step(self) -> None:
        """Nothing to do: operations run as they come."""

    def sum(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            torch.distributed.all_reduce(tensor)


class TorchXLA:
    """PyTorch/XLA: operations are noted, and computed at each step."""

    backend = "gloo"

    def count(self) -> int:
        kind = os.environ.get("PJRT_DEVICE", "TPU")
        if kind != "TPU":
            return 1
        return int(importlib.import_module("torch_xla._internal.tpu").num_available_chips())

    def launch(self, ranks: int) -> None:
        """Nothing to do: each process finds its chip by itself."""

    def device(self, world: World, local_ranks: int) -> torch.device:
        runtime = importlib.import_module("torch_xla._internal.pjrt")
        if world.size > 1:
            runtime.initialize_multiprocess(world.local_rank, local_ranks)
        found: torch.device = importlib.import_module("torch_xla").device()
        return found

    def world_size(self) -> int:
        return int(importlib.import_module("torch_xla.runtime").world_size())

    def step(self) -> None:
        importlib.import_module("torch_xla").sync()

    def sum(self, tensors: list[torch.Tensor]) -> None:
        model = importlib.import_module("torch_xla.core.xla_model")
        model.all_reduce(model.REDUCE_SUM, tensors)


ADAPTERS: dict[str, type[Adapter]] = {"torch_tpu": TorchTPU, "torch_xla": TorchXLA}
"""The packages. The first is the one still in development."""


def adapter_of(asked: Any) -> Adapter:
    """Return the chosen adapter.

    Args:
        asked: a package's name, an object with an adapter's methods, or None for the first
            installed package.

    Raises:
        MissingPackageError: the package isn't installed, or neither is.
        ConfigurationError, ArgumentTypeError: it isn't an adapter.
    """
    if asked is not None and not isinstance(asked, str):
        if isinstance(asked, Adapter):
            return asked
        raise ArgumentTypeError(
            f"adapter={describe(asked)} must be {', '.join(map(repr, ADAPTERS))}, None, or an "
            "object with the attributes and methods of fitkit.strategies.XLAAdapter."
        )
    if isinstance(asked, str) and asked not in ADAPTERS:
        raise unknown_name("adapter", asked, tuple(ADAPTERS))
    names = list(ADAPTERS) if asked is None else [asked]
    for name in names:
        if importlib.util.find_spec(name) is not None:
            return ADAPTERS[name]()
    raise missing_package(names[0], "tpu", "accelerator='tpu' (or 'xla')")


def device_count() -> int | None:
    """How many XLA devices this machine has; None where no package could tell."""
    try:
        return adapter_of(None).count()
    except MissingPackageError:
        return None
    except (ImportError, OSError) as error:  # built for another torch
        warn_once(f"The package for XLA devices can't be imported, so none are used: {error}")
        return 0


@contextlib.contextmanager
def _named(world: World, local_ranks: int) -> Iterator[None]:
    """Give the variables by which a runtime knows its process; a launcher's own would mean
    another.
    """
    variables = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": local_ranks,
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
