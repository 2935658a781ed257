"""What is checked with a step's first batch: all that shows before an update."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fitkit import trees
from fitkit.data.batches import check_weights, warn_of_second_target
from fitkit.distributed.wrapped_model import DividedModel, ReplicatedModel, WrappedModel
from fitkit.errors import ConfigurationError
from fitkit.guests import Guest
from fitkit.losses import Ask, CompiledLoss
from fitkit.metrics.compiled import CompiledMetrics
from fitkit.modes import modes_restored
from fitkit.training.net_call import NetCall
from fitkit.typing import Outputs, Tree

WEIGHTS = "A batch's third entry is the sample weights (several targets are (x, (y, y2))); it"


@dataclasses.dataclass(frozen=True)
class DataFacts:
    """What a step knows of its data.

    Attributes:
        name: the data's name for messages.
        targets: all targets of in-memory data (for several data sets, a list). Their labels are
            checked at the first batch, and decide whether an evaluation's losses are joined.
        keeps_batches: whether batches are rows of arrays, whose memory stays unchanged while others
            are read, and not a generator's.
    """

    name: str = "x"
    targets: Sequence[Any] = ()
    keeps_batches: bool = False


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a step's first batch has shown.

    Attributes:
        had_target: whether it had targets.
        checks_labels: whether the labels of each batch are checked.
    """

    had_target: bool = False
    checks_labels: bool = False


NOTHING_SEEN = Seen()


def check_parts(data: DataFacts, x: Tree, y: Tree, weight: Tree) -> None:
    """Refuse an invalid first batch before the net gets it."""
    check_inputs(x, weight, data.name)
    if data.targets and data.targets[0] is None:  # the user named none, as for arrays
        warn_of_second_target(y, weight)


def check_inputs(x: Tree, weight: Tree, name: str) -> None:
    """Refuse a batch without a tensor of inputs, or with invalid weights.

    Raises:
        ConfigurationError: with what the batch holds.
    """
    if not any(isinstance(leaf, torch.Tensor) for leaf in trees.leaves(x)):
        plain = (int, float, str, bytes, type(None), np.ndarray)
        if all(isinstance(leaf, plain) for leaf in trees.leaves(x)):
            from fitkit.extras.explain import shape_words

            raise ConfigurationError(
                f"A batch of {name} has no tensor: {shape_words(x, 'its input')}. A batch is "
                "(x, y) or (x, y, sample_weight) of tensors or NumPy arrays. If the data are one "
                "batch, such as one graph, write [batch]."
            )
    wrong = [leaf for leaf in trees.leaves(weight) if not isinstance(leaf, torch.Tensor)]
    if any(leaf is not None for leaf in wrong):
        raise ConfigurationError(
            f"A batch's sample_weight holds a {type(wrong[0]).__name__}; it must be a tensor or "
            "array of one weight per sample. Leave out a third entry of another meaning, such as "
            "names of files, in a collate_fn, or write a training_step."
        )
    check_weights(weight, WEIGHTS)


def check_sequences(
    net: NetCall, loss: CompiledLoss | None, sequences: DividedModel, x: Tree, y: Tree
) -> None:
    """Refuse a net or a loss that can't be computed from parts of sequences."""

    def outputs(forward: Callable[..., Any], x: Tree) -> Any:
        return net(x, net.in_precision(forward))

    if loss is None:
        sequences.check(outputs, x)
        return
    if loss.own is not None:
        raise ConfigurationError(
            "A net that computes its own loss sees only a part of each sequence under "
            "context_parallel. Give compile a loss, and fit (x, y) with the label of each "
            "token in its place."
        )
    if loss.takes_inputs:
        raise ConfigurationError(
            "A teacher would see only a part of each sequence under context_parallel. Leave "
            "context_parallel out, or train without a teacher."
        )
    whole, y, part, y_part = sequences.check(outputs, x, y)
    if not loss.has_user_code:
        return
    with torch.no_grad():
        fresh = loss.begin()
        (term, *_) = fresh.terms(part, y_part, None, is_part=True)
        sequences.check_loss(
            fresh(whole, y)[0], term.scale * sequences.mean(term.value, term.count)[0]
        )


def ask_net(
    net: NetCall, loss: CompiledLoss, outputs: Outputs, x: Tree, y: Tree, *, is_part: bool
) -> None:
    """Find out what a net's own loss is the mean over, by asking it in other ways."""
    own = loss.own
    if own is None or own.is_decided or not isinstance(x, Mapping):
        return
    module = net.wrapped.module

    def computed(inputs: Tree) -> Any:
        with modes_restored(module), torch.no_grad():
            module.eval()
            return net(trees.copied(inputs), net.in_precision(module))

    from fitkit.extras.own_loss import ask

    # A net that ranks hold in parts must be called equally often on all of them.
    asks_rows = not net.waits_for_ranks
    ask(own, module, net.caller, computed, outputs, x, y, is_part=is_part, asks_rows=asks_rows)


@torch.no_grad()
def check_loss_and_metrics(
    net: NetCall,
    loss: CompiledLoss,
    meters: CompiledMetrics | None,
    guest: Guest,
    outputs: Outputs,
    y: Tree,
    ask: Ask | None,
    device: torch.device,
) -> None:
    """Decide which loss and which metrics meet which output; refuse what can't be meant.

    Args:
        device: the model's, where the metrics are.
    """
    loss.check(outputs, y, ask)
    if meters is not None:
        hint = functools.partial(loss.hint, net=net.wrapped.module)
        shown, labels = brought((outputs, y), net.wrapped, device)
        shown, labels, _ = guest.for_metrics(shown, labels, None)
        meters.start(shown, labels, hint, loss.trained)


def brought(values: Tree, wrapped: WrappedModel, device: torch.device) -> Any:
    """Return a replica's values on the model's device, where the metrics are."""
    if not isinstance(wrapped, ReplicatedModel):
        return values
    return trees.map_leaves(
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, values
    )
