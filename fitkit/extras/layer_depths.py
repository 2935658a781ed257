"""The layers of a net from its inputs to its outputs, for learning rates that fall with depth."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from fitkit.extras.activation_checkpointing import UNCALLED, repeated

Layers = list[list[nn.Parameter]]
"""The parameters of each layer, in the order of their names."""

CONTAINERS = (nn.Sequential, *UNCALLED)
"""What has layers, and is none."""

WITH_THE_LAST = 99999
"""In timm's matchers: a place in the layer before."""


def scales_of(net: nn.Module, layer_decay: float) -> dict[int, float]:
    """Return the factor of each parameter's rate, by its id: 1 in the last layer.

    Args:
        net: the net.
        layer_decay: the factor from each layer to the one before it.
    """
    layers = layers_of(net)
    return {
        id(parameter): layer_decay ** (len(layers) - 1 - depth)
        for depth, layer in enumerate(layers)
        for parameter in layer
    }


def layers_of(net: nn.Module) -> Layers:
    """Return the layers of a net.

    A net of timm says by `group_matcher` which they are. Otherwise the repeated blocks are layers,
    and so is what lies beside them. What has no parameter of two or more dimensions, such as a
    norm, belongs to the layer before. Parameters beside layers belong to the one after.
    """
    matcher = getattr(net, "group_matcher", None)
    if callable(matcher):
        return _matched(net, matcher(coarse=False))
    return _by_blocks(net)


def _by_blocks(net: nn.Module) -> Layers:
    blocks = repeated(net, lambda child: not isinstance(child, CONTAINERS))
    kinds = {type(block) for block in blocks}
    layers: Layers = []
    waiting: list[nn.Parameter] = []
    seen: set[int] = set()

    def unseen(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        new = [parameter for parameter in parameters if id(parameter) not in seen]
        seen.update(map(id, new))
        return new

    def add(module: nn.Module) -> None:
        inside = {type(part) for part in module.modules()} & kinds
        is_parted = module is net or isinstance(module, CONTAINERS) or inside
        if type(module) not in kinds and is_parted:
            waiting.extend(unseen(module.parameters(recurse=False)))
            for child in module.children():
                add(child)
            return
        own = unseen(module.parameters())
        if layers and not any(parameter.ndim >= 2 for parameter in own):
            layers[-1] += own
        elif own:
            layers.append([*waiting, *own])
            waiting.clear()

    add(net)
    if waiting and not layers:
        layers.append([])
    if waiting:
        layers[-1] += waiting
    return layers


def _matched(net: nn.Module, matcher: Mapping[str, Any] | Callable[[str], Any]) -> Layers:
    """Return the layers by timm's rules.

    Args:
        matcher: for each part of the net, in order: a pattern of names, whose groups number the
            layers, or a list of `(pattern, suffix)`. None for nothing. Or a function of a name.
    """
    found: dict[tuple[float, ...], list[nn.Parameter]] = {}
    for name, parameter in net.named_parameters():
        if isinstance(matcher, Mapping):
            place = _place(name, matcher)
        else:
            given = matcher(name)
            place = tuple(given) if isinstance(given, Iterable) else (given,)
        found.setdefault(place, []).append(parameter)
    layers: Layers = []
    for place in sorted(found):
        if layers and place[-1] == WITH_THE_LAST:
            layers[-1] += found[place]
        else:
            layers.append(found[place])
    return layers


def _place(name: str, matcher: Mapping[str, Any]) -> tuple[float, ...]:
    for part, given in enumerate(matcher.values()):
        patterns = given if isinstance(given, (list, tuple)) else [(given, None)]
        for pattern, suffix in patterns:
            match = None if pattern is None else re.match(pattern, name)
            if match is not None:
                groups = [group for group in match.groups() if group is not None]
                return tuple(map(float, (part, *groups, *(suffix or ()))))
    return (math.inf,)  # the head
