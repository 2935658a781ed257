"""A call of a Keras network, as written or compiled by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fitkit.extras import keras_backend  # noqa: F401

# isort: split
import torch
from keras.src.utils.tracking import TrackedList

from fitkit import trees
from fitkit.extras.jit.net import JitNet, give_own_code, name_globals, warn_of
from fitkit.extras.jit.passes import with_passes
from fitkit.extras.jit.proof import Backend
from fitkit.extras.jit.tracing import UncompiledError, compiled

Called = tuple[Any, Any, list[torch.Tensor]]
"""The outputs of a call, their masks by the same structure, and what the layers add to the loss."""


def called(net: Any, inputs: Any, training: bool) -> Called:
    """Call a network as Keras's trainer does."""
    outputs = net(inputs, training=training) if net._call_has_training_arg else net(inputs)
    return outputs, mask_of(outputs), net.losses


def mask_of(outputs: Any) -> Any:
    """Return the masks of a call's outputs, by the same structure; None where there is none."""
    return trees.map_leaves(lambda leaf: getattr(leaf, "_keras_mask", None), outputs)


class CompiledCall:
    """Calls a network in one compiled graph, or as written where that can't be.

    What torch can't put into one graph, such as dropout's own generators and loops over time steps,
    would be compiled in many small pieces, which takes minutes and makes calls slower.

    Args:
        net: the network.
        options: True, or the keyword arguments of `torch.compile`.

    Raises:
        ConfigurationError: torch refuses them.
    """

    def __init__(self, net: Any, options: Any) -> None:
        JitNet(options)  # checks them
        self._net, self._options = net, {} if options is True else options
        self._compiled: Callable[..., Called] | None = None
        self._is_given_up = False

    def __call__(self, inputs: Any, training: bool) -> Called:
        """Return what `called` does."""
        if not self._is_given_up:
            try:
                if self._compiled is None:
                    self._compiled = self._prepared()
                return self._compiled(inputs, training)
            except UncompiledError as error:
                self._give_up(error)
        return called(self._net, inputs, training)

    def _prepared(self) -> Callable[..., Called]:
        net = self._net
        name_globals(net)
        for layer in net._flatten_layers():
            for name, value in vars(layer).items():
                if isinstance(value, TrackedList) and all(isinstance(one, int) for one in value):
                    vars(layer)[name] = list(value)  # axes, which torch takes as plain lists

        def call(inputs: Any, training: bool) -> Called:
            return called(net, inputs, training)

        give_own_code(call)
        arguments = with_passes(self._options)
        name = arguments.pop("backend", "inductor")
        backend = Backend(name, CompiledCall._give_up, self)
        return compiled(call, backend, **{**arguments, "fullgraph": True})

    def _give_up(self, why: UncompiledError) -> None:
        if not self._is_given_up:
            self._is_given_up = True
            warn_of(why)
