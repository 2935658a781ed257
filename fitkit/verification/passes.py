"""What a net's modules get and return, batch by batch, and the first module that differs."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import nn

from fitkit import trees
from fitkit.callbacks import Callback
from fitkit.random_states import set_seed

Pass = tuple[list[torch.Tensor], list[torch.Tensor]]
"""A module's inputs and outputs in one batch."""
Passes = dict[tuple[str, int], list[Pass]]
"""What a net's modules did in some batches, in the order in which their calls ended. The key is the
module's name and the number of its call in the batch."""


class Notes(Callback):
    """Records what a net's modules get and return, batch by batch.

    Args:
        only: records only that batch. None: all.
        path: where to save a checkpoint before that batch; "" for none.
    """

    stops_alike = True

    def __init__(self, only: int | None = None, path: str = "") -> None:
        self.passes: Passes = {}
        self._only, self._path = only, path
        self._batch = 0
        self._calls: dict[str, int] = {}
        self._inputs: list[list[torch.Tensor]] = []  # of the modules that are being called

    def follow(self, net: nn.Module) -> None:
        """Record what the modules of a net do."""
        for name, module in net.named_modules():
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
            module.register_forward_hook(functools.partial(self._leave, name))

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs.append(_copies((args, kwargs)))  # before the module may change them in place

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        inputs = self._inputs.pop()
        if self._only in (None, self._batch):
            call = self._calls[name] = self._calls.get(name, -1) + 1
            self.passes.setdefault((name, call), []).append((inputs, _copies(output)))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._batch, self._calls = batch, {}
        if self._only is None:
            # Otherwise a layer may by chance draw for two parts what it draws for the whole.
            set_seed(torch.initial_seed() % 2**31 + batch)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.on_train_batch_begin(batch)

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        if self._path and self._only == batch + 1:
            self.model.save(self._path)


def first_other(one: Passes, other: Passes, limit: float) -> str | None:
    """The first module that returns something else for the same inputs; None if there is none.

    Args:
        one: the record of one batch.
        other: the record of the same samples, in one batch or in several.
        limit: the largest difference that counts as equal, relative to the largest number.
    """
    for key, passes in one.items():
        others = other.get(key, [])
        if _alike(passes, others, 0, limit) and not _alike(passes, others, 1, limit):
            return key[0]
    return None


def _alike(passes: list[Pass], others: list[Pass], side: int, limit: float) -> bool:
    """Whether the inputs (side 0) or outputs (1), joined over batches, are the same."""
    for place in range(len(passes[0][side])):
        # A module may have returned another structure, which can't be compared.
        if not others or any(len(each[side]) <= place for each in (*passes, *others)):
            break
        whole = _joined([each[side][place] for each in passes], None)
        joined = None
        if whole is not None and whole.numel():
            joined = _joined([each[side][place] for each in others], whole.shape)
        if whole is None or joined is None:
            continue
        reach = limit * float(whole.abs().nan_to_num(0.0, 0.0, 0.0).max())
        if not torch.allclose(whole, joined, rtol=0, atol=reach, equal_nan=True):
            return False
    return True


def _copies(tree: Any) -> list[torch.Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in trees.tensors(tree)]


def _joined(tensors: list[torch.Tensor], shape: torch.Size | None) -> torch.Tensor | None:
    """Tensors of several batches joined to that shape; None if they don't fit.

    Not all layers have the batch in dimension 0.
    """
    if not tensors or tensors[0].is_nested or not tensors[0].is_floating_point():
        return None
    if len(tensors) == 1:
        return tensors[0] if shape in (None, tensors[0].shape) else None
    for dimension in range(tensors[0].ndim):
        with contextlib.suppress(RuntimeError):  # other sizes in other dimensions
            joined = torch.cat(tensors, dimension)
            if joined.shape == shape:
                return joined
    return None
