"""The user's words about hardware, resolved once into a complete Strategy."""

from __future__ import annotations

from typing import Any

from fitkit.arguments import describe
from fitkit.distributed.placement import Machine, choose_kind, device_for, parse_devices
from fitkit.distributed.precision import resolve_precision
from fitkit.distributed.strategies import STRATEGIES, Strategy
from fitkit.errors import ArgumentTypeError, ConfigurationError


def resolve_strategy(
    devices: Any,
    accelerator: Any,
    strategy: Any,
    precision: Any,
    machine: Machine | None = None,
) -> Strategy:
    """What `compile`'s words mean on a machine.

    Args:
        machine: the machine's facts; None for this one.

    Raises:
        ConfigurationError, ArgumentTypeError: words that mean nothing, or nothing here.
    """
    machine = Machine.here() if machine is None else machine
    kind = choose_kind(accelerator, machine)
    ids = parse_devices(devices, kind, machine)
    if isinstance(strategy, str) and strategy.strip().lower() == "auto":
        strategy = "single_device" if len(ids) == 1 else "ddp_spawn"
    chosen = _strategy(strategy)
    placed = tuple(device_for(kind, index) for index in ids)
    return chosen.connect(placed, ids, resolve_precision(precision))


def _strategy(strategy: Any) -> Strategy:
    if isinstance(strategy, Strategy):
        return strategy
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        raise ArgumentTypeError(
            f"strategy is the class {strategy.__name__}. Write {strategy.__name__}()."
        )
    if isinstance(strategy, str):
        return STRATEGIES[strategy]()
    raise ArgumentTypeError(
        f"strategy={describe(strategy)} must be a name or a fitkit.strategies.Strategy."
    )


def check_nodes(num_nodes: Any) -> None:
    """Refuse several nodes, which this version can't use.

    Raises:
        ConfigurationError: more than one.
    """
    if num_nodes != 1:
        raise ConfigurationError(
            f"num_nodes={num_nodes}: this version of fitkit trains on one node. Write num_nodes=1."
        )
