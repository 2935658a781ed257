"""Submodules whose parameters are divided among ranks that compute the same batch together."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fitkit.arguments import check_choice, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.sharding.sharded_module import shares_parameters
from fitkit.seams.strategies import Collectives

STYLES = ("colwise", "rowwise")


def check_plan(ranks: int, plan: Any) -> None:
    """Refuse an invalid plan.

    Args:
        ranks: how many compute a batch together.
        plan: the style of each submodule, by its name in the net; None where `ranks` is 1.
    """
    if (ranks > 1) != bool(plan):
        raise ConfigurationError(
            f"tensor_parallel={ranks} with tensor_parallel_plan={describe(plan)}: a plan is needed "
            "where several ranks compute a batch together, and only there. Write, for example, "
            "tensor_parallel=2, tensor_parallel_plan={'0': 'colwise', '2': 'rowwise'}."
        )
    if plan is None:
        return
    if not isinstance(plan, Mapping) or not all(isinstance(name, str) for name in plan):
        raise ArgumentTypeError(
            f"tensor_parallel_plan={describe(plan)} must be a dict from submodules' names to "
            "styles."
        )
    for name, style in plan.items():
        if isinstance(style, str):
            check_choice(f"tensor_parallel_plan[{name!r}]", style, STYLES)
        elif not any(kind.__name__ == "ParallelStyle" for kind in type(style).__mro__):
            # By its name, as the class itself takes a second to import.
            raise ArgumentTypeError(
                f"tensor_parallel_plan[{name!r}]={describe(style)} must be 'colwise', 'rowwise' or "
                "a ParallelStyle of torch.distributed.tensor.parallel."
            )


class TensorParallel:
    """A plan for one module.

    Args:
        net: the module whose submodules the plan names.
        plan: the style of each; `*` in a name stands for one part of it (`"layers.*.up"`).
        mesh: the ranks that compute a batch together.
        collectives: of all ranks.

    Raises:
        ConfigurationError: a name that fits no submodule, or a submodule whose parameters others
            have, too.
    """

    def __init__(
        self, net: nn.Module, plan: Mapping[str, Any], mesh: Any, collectives: Collectives
    ) -> None:
        self._mesh = mesh
        self._collectives = collectives
        self._styles: dict[nn.Module, Any] = {}
        for pattern, style in plan.items():
            for part in _named_by(net, pattern):
                if shares_parameters(part, net):
                    raise ConfigurationError(
                        f"tensor_parallel_plan names {pattern!r}, whose parameters another "
                        "submodule has, too (tied weights): they can't be divided. Leave it out of "
                        "the plan."
                    )
                if isinstance(style, str):
                    _check_divides(part, pattern, style, mesh.size())
                self._styles[part] = style

    def divide(self, parts: Iterable[nn.Module]) -> None:
        """Divide the parameters of those of these submodules that the plan names.

        Ranks:
            Collective.
        """
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        kinds = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
        for part in parts:
            style = self._styles.get(part)
            if style is not None:
                made = kinds[style]() if isinstance(style, str) else style
                parallelize_module(part, self._mesh, made)

    def scale(self, gradients: list[torch.Tensor], factor: Any) -> None:
        """Multiply gradients, which may be spread over different meshes, by a number."""
        for gradient in gradients:
            local_part(gradient).mul_(factor)

    @torch.no_grad()
    def clip(self, gradients: list[torch.Tensor], limit: float, algorithm: str) -> None:
        """Limit the gradients as `Engine.clip` does.

        Ranks:
            Collective.
        """
        if algorithm == "norm":
            self.scale(gradients, min(limit / (self.norm(gradients) + 1e-6), 1.0))
            return
        for gradient in gradients:
            local_part(gradient).clamp_(-limit, limit)

    def norm(self, tensors: Iterable[torch.Tensor]) -> float:
        """Return the norm of all tensors together, which may be spread over different meshes.

        Ranks:
            Collective.
        """
        total = 0.0
        for tensor in tensors:
            squares = local_part(tensor).double().square().sum()
            total += float(squares) * _distinct(tensor) / self._collectives.world_size
        (summed,) = self._collectives.sums([total])
        return math.sqrt(summed)


def divided_in(net: nn.Module, plan: Mapping[str, Any]) -> set[nn.Parameter]:
    """Return the parameters that a plan divides.

    Raises:
        ConfigurationError: a name that fits no submodule.
    """
    found: set[nn.Parameter] = set()
    for pattern, style in plan.items():
        for part in _named_by(net, pattern):
            # What "rowwise" adds after the sum, both have.
            undivided = getattr(part, "bias", None) if style == "rowwise" else None
            found.update(p for p in part.parameters() if p is not undivided)
    return found


def _named_by(net: nn.Module, pattern: str) -> list[nn.Module]:
    """Return the submodules that a name in a plan means."""
    form = re.escape(pattern).replace(r"\*", r"[^.]+")
    found = [part for name, part in net.named_modules() if re.fullmatch(form, name)]
    if not found:
        names = ", ".join(name for name, _ in net.named_modules() if name)
        raise ConfigurationError(
            f"tensor_parallel_plan names {pattern!r}, which the net doesn't have. It has: "
            f"{names[:500]}."
        )
    return found


def _check_divides(part: nn.Module, name: str, style: str, ranks: int) -> None:
    """Refuse what torch's styles can't divide, or only into unequal parts that don't fit."""
    if not isinstance(part, (nn.Linear, nn.Embedding)):
        raise ConfigurationError(
            f"tensor_parallel_plan has {style!r} for {name!r}, a {type(part).__name__}: only "
            "Linear and Embedding are divided so. Name its parts, or give a ParallelStyle."
        )
    by_first = (style == "colwise") == isinstance(part, nn.Linear)
    size = part.weight.shape[0 if by_first else 1]
    if size % ranks:
        raise ConfigurationError(
            f"tensor_parallel_plan has {style!r} for {name!r}, but its {size} "
            f"{'outputs' if style == 'colwise' else 'inputs'} can't be divided equally among "
            f"{ranks} ranks. Choose a size that tensor_parallel={ranks} divides."
        )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor: all of an ordinary one; shares its memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _distinct(tensor: Any) -> int:
    """Among how many ranks a tensor is divided; on the others its parts are repeated."""
    count = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        count *= 1 if placement.is_replicate() else size
    return count
