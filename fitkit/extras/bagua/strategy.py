"""Bagua's algorithms: data parallelism that synchronizes the ranks by other means than DDP."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from fitkit import trees
from fitkit.errors import ArgumentTypeError
from fitkit.extras.bagua import ALGORITHMS, Algorithm, Peers
from fitkit.extras.comm_hooks import hook_of
from fitkit.extras.ddp import DDP, DDPWrapper
from fitkit.registry import nearest
from fitkit.seams.strategies import Assignment, Collectives, Engine, Strategy, WrappedModel, held_by
from fitkit.tensors import FlatTensors


class Bagua(DDP):
    """Runs one process with a copy of the module per device, and synchronizes them by an algorithm.

    Under some algorithms the ranks hold different weights while they learn. Weights and optimizer
    states are then averaged at the end of each epoch, before evaluations and before saves. Running
    statistics are averaged under every algorithm. So evaluations are exact, and your model has the
    mean weights afterwards.

    Args:
        algorithm: `"gradient_allreduce"`, `"bytegrad"`, `"decentralized"`,
            `"low_precision_decentralized"`, `"async"`, `"qadam"` or `"post_local_sgd"`.
        options: the algorithm's options (`peer_selection_mode`, `communication_interval` of
            `"decentralized"`; `sync_interval_ms`, `warmup_steps` of `"async"`; `warmup_steps`,
            `period` of `"post_local_sgd"`), and those of `DDPStrategy` except its hooks.

    Reference: Gan et al., BAGUA: Scaling up Distributed Learning with System Relaxations, 2021,
    arXiv:2107.01499. Each algorithm's own docstring names its paper.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse", accelerator="cpu", devices=2,
        ...               strategy=fitkit.strategies.BaguaStrategy(algorithm="bytegrad"))
    """

    name = "bagua"
    starts = "workers"
    has_engine = True

    def __init__(self, algorithm: str = "gradient_allreduce", **options: Any) -> None:
        if not isinstance(algorithm, str):
            raise ArgumentTypeError(
                f"algorithm={algorithm!r} must be one of {', '.join(map(repr, ALGORITHMS))}."
            )
        chosen = ALGORITHMS[algorithm]
        own = _arguments(chosen)
        general = [name for name in _arguments(DDP) if not name.startswith("comm_hook")]
        for name in options:
            if name not in own and name not in general:
                raise _unknown_option(algorithm, name, own, general)
        super().__init__(**{k: v for k, v in options.items() if k not in own})
        self.algorithm: Algorithm = chosen(**{k: v for k, v in options.items() if k in own})

    def connect(self, assignment: Assignment) -> Strategy:
        super().connect(assignment)
        self.algorithm = copy.copy(self.algorithm)  # which holds a training's state
        self.algorithm.check(self.world.size, assignment.precision, self.device)
        return self

    def leave(self) -> None:
        self.finish()
        self.algorithm.leave()
        super().leave()

    # ------------------------------------------------------------------ the module

    def wrap_for_training(
        self, module: torch.nn.Module, *, averages: bool = True, **options: bool
    ) -> WrappedModel:
        # Compression rounds, so it can't carry counts.
        wrapped = super().wrap_for_training(module, averages=averages)
        through = wrapped.wrapper
        if not isinstance(through, DDPWrapper):
            return wrapped

        def call(method: str, *args: Any, **kwargs: Any) -> Any:
            # Through DDP if gradients are averaged, otherwise past it.
            chosen = through if self.algorithm.averages_gradients else wrapped.call
            return chosen(method, *args, **kwargs)

        wrapped.wrapper = call
        return wrapped

    def configure_ddp(self, module: torch.nn.Module) -> torch.nn.Module:
        wrapped = super().configure_ddp(module)
        if self.algorithm.compresses:
            register: Any = wrapped
            register.register_comm_hook(None, hook_of(self.algorithm.mean))
        return wrapped

    def engine_for(self, module: torch.nn.Module, optimizers: list[Optimizer]) -> Engine | None:
        self.algorithm.check_optimizers(optimizers)
        if self.collectives.world_size == 1:
            return None
        peers = Peers(self.collectives, self.timeout)
        return BaguaEngine(self.algorithm, self.collectives, peers, module, optimizers)


class BaguaEngine(Engine):
    """Synchronizes the ranks' modules after each update, as the algorithm does.

    Args:
        algorithm: the algorithm.
        collectives, peers: the ranks.
        module: the module in training, with equal weights on all ranks.
        optimizers: the optimizers of its parameters.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        collectives: Collectives,
        peers: Peers,
        module: torch.nn.Module,
        optimizers: list[Optimizer],
    ) -> None:
        self.replaces_ddp: bool = not algorithm.wraps
        self.keeps_apart: bool = algorithm.keeps_apart
        self._module = module
        self._has_parted = False  # whether there were updates since the ranks were last equal
        self._algorithm = algorithm
        self._collectives = collectives
        self._peers = peers
        self._optimizers = optimizers
        self._exchanged = _learning(module)
        state = getattr(getattr(module, "_fitkit", None), "fit_state", None)  # of a Model
        # Counts may differ between ranks, if each skips the steps that overflow for it.
        updates = collectives.broadcast(getattr(state, "updates", 0))
        try:
            algorithm.begin(peers, self._exchanged, optimizers, updates)
        except BaseException:
            algorithm.end()
            raise

    def rewrap(self) -> None:
        self._has_parted = True
        self.average_ranks()  # other parameters learn from now on, so the vector changes

    def average_gradients(self, parameters: list[torch.nn.Parameter]) -> bool:
        algorithm = self._algorithm
        return not algorithm.averages_gradients or algorithm.mean_gradients(parameters)

    def after_update(self) -> None:
        self._has_parted = True
        self._algorithm.after_update()

    def average_ranks(self) -> None:
        if not self._has_parted:
            return
        self._has_parted = False
        self._algorithm.flush()
        now = _learning(self._module)
        if self._algorithm.keeps_apart:
            known = {id(parameter) for parameter in now}
            frozen_since = [p for p in self._exchanged if id(p) not in known]
            average_tensors([*now, *frozen_since], self._peers)
            average_states(self._optimizers, self._peers)
        average_buffers(self._module, self._peers, self._collectives)
        self._exchanged = now
        self._algorithm.resume(now)

    def end(self, *, wanted: bool) -> None:
        self._algorithm.end()

    def abandon(self) -> None:
        self._algorithm.end()


def _learning(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that can learn now."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _arguments(maker: type) -> list[str]:
    """Return the names of a constructor's arguments."""
    return list(inspect.signature(maker).parameters)


def _unknown_option(
    algorithm: str, name: str, own: list[str], general: list[str]
) -> ArgumentTypeError:
    known = [*own, *general]
    close = nearest(name, known)
    suggestion = f" Did you mean {close[0]}?" if close else ""
    return ArgumentTypeError(
        f"BaguaStrategy(algorithm={algorithm!r}) has no option {name!r}.{suggestion} It takes: "
        f"{', '.join(known)}."
    )


StateKey = tuple[int, int, str, tuple[int, ...]]
"""The optimizer, its parameter, the name of the state, and its shape."""


def average_tensors(tensors: list[torch.Tensor], peers: Peers) -> None:
    """Replace tensors by their means over the ranks.

    Ranks:
        Collective.
    """
    if tensors:
        flat = FlatTensors(tensors)
        vector = flat.read()
        peers.mean(vector)
        flat.write(vector)


def average_buffers(module: torch.nn.Module, peers: Peers, collectives: Collectives) -> None:
    """Replace running statistics by their means, and counters by rank 0's.

    Ranks:
        Collective.
    """
    buffers = list(module.buffers())
    average_tensors([b for b in buffers if trees.is_inexact(b)], peers)
    collectives.broadcast_tensors([b for b in buffers if not trees.is_inexact(b)])


def average_states(optimizers: list[Optimizer], peers: Peers) -> None:
    """Replace what optimizers keep of each number of a parameter by its mean (momentum, variance).

    What only some ranks keep (their data didn't use a parameter so far) stays as it is.

    Reference: Yu et al., On the Linear Speedup Analysis of Communication Efficient Momentum SGD,
    2019, arXiv:1905.03817: momentum is averaged with the weights.

    Ranks:
        Collective.
    """
    found = dict(_states(optimizers))
    everyones = [set(keys) for keys in peers.gather(list(found))]
    shared = sorted(set.intersection(*everyones))
    average_tensors([found[key] for key in shared], peers)


def _states(optimizers: list[Optimizer]) -> Iterator[tuple[StateKey, torch.Tensor]]:
    for number, optimizer in enumerate(optimizers):
        for index, parameter in enumerate(held_by(optimizer)):
            for name, value in optimizer.state.get(parameter, {}).items():
                if (
                    isinstance(value, torch.Tensor)
                    and value.shape == parameter.shape
                    and value.device == parameter.device  # a counter may be elsewhere
                    and trees.is_inexact(value)
                ):
                    yield (number, index, str(name), tuple(value.shape)), value
