"""Sequences that are divided among ranks, whose attention sees the whole of them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fitkit import trees
from fitkit.errors import ConfigurationError
from fitkit.extras.launchers.group import RankGroup
from fitkit.extras.parallel.tensor import local_part
from fitkit.modes import modes_restored
from fitkit.seams.strategies import DividedModel, WrappedModel

CHECKED = 64
"""So many tokens of each rank are computed in both ways for the check, at most."""

WAYS = (
    "context_parallel divides sequences, and only attention through torch.nn.functional."
    "scaled_dot_product_attention sees the whole of them. All else must treat each token by "
    "itself, and positions must come in as an argument position_ids of forward. (nn."
    "MultiheadAttention needs need_weights=False; Hugging Face's models need "
    "attn_implementation='sdpa'.) Change the net, or leave context_parallel out."
)


class SequenceParts(DividedModel):
    """Calls a model with this rank's part of each sequence; the others have the other parts.

    Each rank has as many neighbouring tokens, in rank order. In a call, and in the backward pass
    that follows, attention gathers the keys and values of all ranks.

    Args:
        whole: the model as it is called with whole sequences.
        size: ranks that share a sequence.
        rank: this one, of all.
        group: of the ranks that share this rank's sequences.
        compute_dtype: of the net's matrix products; None for that of its outputs.

    Reference: Grattafiori et al., The Llama 3 Herd of Models, 2024, arXiv:2407.21783, section
    3.3.2: keys and values are gathered, since that suits any mask and any attention kernel.
    """

    def __init__(
        self,
        whole: WrappedModel,
        size: int,
        rank: int,
        group: RankGroup,
        compute_dtype: torch.dtype | None,
    ) -> None:
        super().__init__(whole.module, self._call_with_part)
        self.whole = whole
        self.size = size
        self._rank = rank % size
        self._group = group
        self._compute_dtype = compute_dtype
        self._attention: Callable[..., torch.Tensor] | None = None  # torch's, while ours is there
        self._dimensions: list[int | None] = []  # in which each output has tokens
        names = _inputs_of(self.module)
        self._place_of_positions = names.index("position_ids") if "position_ids" in names else None

    def _call_with_part(self, method: str, *args: Any, **kwargs: Any) -> Any:
        place = self._place_of_positions
        if place is not None and len(args) <= place and kwargs.get("position_ids") is None:
            given = next(leaf for leaf in trees.tensors([args, kwargs]) if leaf.ndim > 1)
            first = self._rank * given.shape[1]
            positions = torch.arange(first, first + given.shape[1], device=given.device)
            kwargs = {**kwargs, "position_ids": positions[None]}
        with self.attending():
            return self.whole(method, *args, **kwargs)

    # ------------------------------------------------------------------ attention

    @contextlib.contextmanager
    def attending(self) -> Iterator[None]:
        if self._attention is not None:
            yield
            return
        self._attention = F.scaled_dot_product_attention
        is_fast = torch.backends.mha.get_fastpath_enabled()
        # As an attribute, since a mode of torch's ends at the doors of functions such as
        # multi_head_attention_forward. Fast paths of whole layers call none.
        F.scaled_dot_product_attention = self._attend
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            F.scaled_dot_product_attention = self._attention
            self._attention = None
            torch.backends.mha.set_fastpath_enabled(is_fast)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Torch's function over all ranks' keys and values.

        Shapes: query (..., L, E), key (..., S, E), value (..., S, V), each this rank's part.
        """
        assert self._attention is not None
        if attn_mask is not None:
            raise ConfigurationError(
                "context_parallel can't divide an attn_mask of scaled_dot_product_attention. For "
                "causal attention pass is_causal=True without a mask; give sequences without "
                "padding, one document each."
            )
        length = query.shape[-2]
        if is_causal and length != key.shape[-2]:
            raise ConfigurationError(
                f"is_causal=True with {length} queries and {key.shape[-2]} keys: context_parallel "
                "needs as many of both."
            )
        # It takes seconds to import.
        from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import (
            flex_cp_allgather,
        )
        from torch.nn.attention.bias import causal_lower_right

        name = self._group.handle.group_name
        key, value = flex_cp_allgather(key, value, key.ndim - 2, name)
        bias = None
        if is_causal:
            seen = (self._rank + 1) * length
            key, value = key[..., :seen, :], value[..., :seen, :]
            bias = causal_lower_right(length, seen)
        F.scaled_dot_product_attention = self._attention
        try:  # a causal bias looks whether it is called by torch's own
            return self._attention(
                query, key, value, bias, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa
            )
        finally:
            F.scaled_dot_product_attention = self._attend

    # ------------------------------------------------------------------ batches

    def divide(self, x: Any, y: Any = None, weight: Any = None) -> tuple[Any, Any, Any]:
        """Return this rank's part of a batch.

        Shapes: x and y have tensors (N, T, …), and get (N, T / size, …). Those (N,) are left.

        Raises:
            ConfigurationError: lengths that differ or can't be divided, or sequences that aren't
                the same on the ranks that share them.

        Ranks:
            Collective among those that share sequences.
        """
        length = next((leaf.shape[1] for leaf in trees.tensors(x) if leaf.ndim > 1), None)
        if length is None:
            raise ConfigurationError(
                "context_parallel divides dimension 1 of the inputs, (batch, tokens, …), but a "
                "batch has none of two dimensions. Leave it out."
            )
        size = length // self.size
        if length % self.size or size < 2:
            raise ConfigurationError(
                f"Sequences of {length} tokens can't be divided among context_parallel="
                f"{self.size} ranks: each needs as many, and two at least. Pad or cut them to a "
                f"multiple of {self.size}."
            )

        def part(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.ndim < 2:
                return leaf
            if leaf.shape[1] != length:
                raise ConfigurationError(
                    f"context_parallel divides dimension 1, of {length} tokens, but a batch also "
                    f"has a tensor of shape {tuple(leaf.shape)}. Give all the same length there."
                )
            return leaf.narrow(1, self._rank * size, size).contiguous()

        for leaf in trees.tensors(y):
            if leaf.ndim < 2:
                raise ConfigurationError(
                    f"context_parallel needs a target for each token, (batch, {length}, …), but "
                    f"the targets have shape {tuple(leaf.shape)}. Leave it out."
                )
        self._check_same(trees.tensors(x))
        return trees.map_leaves(part, x), trees.map_leaves(part, y), trees.map_leaves(part, weight)

    def _check_same(self, given: list[torch.Tensor]) -> None:
        """Refuse ranks that have read different sequences, or in another order: by a sum of all
        numbers, each times its place."""
        own = torch.zeros((), dtype=torch.float64, device=given[0].device)
        for leaf in given:
            numbers = leaf.abs() if leaf.is_complex() else leaf
            places = torch.arange(1, leaf.numel() + 1, dtype=torch.float64, device=leaf.device)
            own = own + torch.dot(numbers.double().flatten(), places).nan_to_num()
        most = torch.stack([own, -own])
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group.handle)
        is_same = most[0] == -most[1]
        message = (
            "The ranks that share sequences have read different ones. context_parallel needs data "
            "that are the same on all of them: draw no random numbers in them, or seed these."
        )
        if not is_same.is_cpu:
            torch._assert_async(is_same, message)  # reading it would wait for the device
        elif not is_same:
            raise ConfigurationError(message)

    def mean(self, loss: torch.Tensor, count: Any) -> tuple[torch.Tensor, Any]:
        """As of all divided models.

        Args:
            loss: the mean over this rank's tokens.
            count: over how many of them, a number or a tensor (); None where it is all.

        Returns:
            The mean over all ranks' tokens, and their count. Its gradients are those of this rank's
            tokens, times `size`: a mean over the ranks gives the whole's.

        Ranks:
            Collective among those that share sequences.
        """
        weight = torch.as_tensor(1.0 if count is None else count, device=loss.device).double()
        own = torch.where(weight > 0, loss, torch.zeros_like(loss))  # a mean over nothing is NaN
        packed = torch.stack([own.detach().double() * weight, weight])
        dist.all_reduce(packed, group=self._group.handle)
        mean, counted = packed[0] / packed[1], packed[1]
        share = (weight * self.size / counted.clamp(min=torch.finfo(torch.float64).tiny)).to(loss)
        mine = own * share
        if count is not None:
            count = counted if isinstance(count, torch.Tensor) else counted.item()
        return mine + (mean.to(loss) - mine).detach(), count

    @torch.no_grad()
    def join(self, outputs: Any) -> Any:
        """Return the outputs for whole sequences, of all ranks' parts.

        Ranks:
            Collective among those that share sequences.
        """
        dimensions = iter(self._dimensions)

        def joined(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                if leaf is None or isinstance(leaf, (bool, int, float, str)):
                    return leaf
                raise ConfigurationError(
                    f"The net's outputs have a {type(leaf).__name__}, of which each rank has a "
                    "part: context_parallel joins tensors alone. (Hugging Face's models give a "
                    "cache unless config.use_cache = False.)"
                )
            if (dimension := next(dimensions)) is None:
                return leaf
            leaf = leaf.contiguous()
            parts = [torch.empty_like(leaf) for _ in range(self.size)]
            dist.all_gather(parts, leaf, group=self._group.handle)
            return torch.cat(parts, dimension)

        return trees.map_leaves(joined, outputs)

    # ------------------------------------------------------------------ what can't be divided

    def check(
        self, predict: Callable[[Callable[..., Any], Any], Any], x: Any, y: Any = None
    ) -> tuple[Any, Any, Any, Any]:
        """As of all divided models.

        The net is computed in both ways, for one sample's first tokens. Its weights are random
        meanwhile: in a fresh net some are zero, or so small that a difference wouldn't show.

        Ranks:
            Collective among all.
        """
        self._check_layers()
        length = next(leaf.shape[1] for leaf in trees.tensors(x) if leaf.ndim > 1)
        tokens = min(length // self.size, CHECKED) * self.size

        def short(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
                return leaf
            short = leaf[:1, :tokens] if leaf.ndim > 1 and leaf.shape[1] == length else leaf[:1]
            return short.clone()  # the net may write into it

        x, y = trees.map_leaves(short, x), trees.map_leaves(short, y)
        part_x, part_y, _ = trees.copied(self.divide(x, y))
        with modes_restored(self.module), torch.no_grad(), random_weights(self.module):
            self.module.eval()
            whole = predict(lambda *args, **kwargs: self.whole("", *args, **kwargs), x)
            try:
                part = predict(lambda *args, **kwargs: self("", *args, **kwargs), part_x)
            except (RuntimeError, IndexError) as error:
                raise ConfigurationError(
                    f"The net can't take a part of a sequence: {error}\n{WAYS}"
                ) from error
        self._compare(trees.tensors(whole), trees.tensors(part), tokens)
        return whole, y, part, part_y

    def _check_layers(self) -> None:
        for name, module in self.module.named_modules():
            if isinstance(module, _BatchNorm):
                raise ConfigurationError(
                    f"{name} is a {type(module).__name__}: under context_parallel its statistics "
                    "would be those of a rank's tokens. Take LayerNorm, or leave context_parallel "
                    "out."
                )
            if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
                raise ConfigurationError(
                    f"{name or 'The net'} is compiled, and may have torch's own attention inside: "
                    "context_parallel can't be combined with torch.compile. Write "
                    "jit_compile=False."
                )

    def _compare(self, whole: list[torch.Tensor], part: list[torch.Tensor], tokens: int) -> None:
        self._dimensions = []
        off, size = 0.0 if len(whole) == len(part) else 1.0, tokens // self.size
        tolerance = 0.0
        for one, mine in zip(whole, part, strict=False):
            pairs = list(zip(one.shape, mine.shape, strict=False))
            found = [i for i, pair in enumerate(pairs) if pair == (tokens, size)]
            self._dimensions.append(found[0] if found else None)
            expected = one.narrow(found[0], self._rank * size, size) if found else one
            if expected.shape != mine.shape:
                off = 1.0
                continue
            if not one.is_floating_point():
                off = max(off, float(not torch.equal(expected, mine)))
                continue
            dtype = self._compute_dtype if self._compute_dtype is not None else mine.dtype
            tolerance = max(tolerance, torch.finfo(dtype).eps ** 0.5)
            scale = one.double().square().mean().sqrt()
            differs = (expected.double() - mine.double()).square().mean().sqrt() / scale
            off = max(off, float(differs.nan_to_num(1.0, 1.0)))
        self._agree(
            off,
            tolerance,
            "The net gives other outputs for a sequence in parts than for the whole (with random "
            f"weights they differ by {{off:.2g}}, where rounding gives {tolerance:.0e} at most). "
            + WAYS,
        )

    def check_loss(self, whole: torch.Tensor, of_parts: torch.Tensor) -> None:
        """As of all divided models.

        Ranks:
            Collective among all.
        """
        off = ((of_parts - whole).abs() / whole.abs().clamp(min=1e-6)).double().item()
        is_known = bool(torch.isfinite(whole))
        dtype = self._compute_dtype if self._compute_dtype is not None else whole.dtype
        self._agree(
            off if is_known else 0.0,
            torch.finfo(dtype).eps ** 0.5,
            "The loss isn't a mean over tokens: for a sequence in parts it differs by {off:.2g} "
            "from that of the whole. context_parallel needs one that treats each token by itself "
            "and returns the mean, or the tokens' values. Shift labels before fit gets them.",
        )

    def _agree(self, off: float, tolerance: float, message: str) -> None:
        """Raise on all ranks where one is off by more than the tolerance."""
        found = torch.tensor(off, dtype=torch.float64, device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        if not found.item() <= tolerance:
            raise ConfigurationError(message.format(off=found.item()))

    @property
    def _device(self) -> torch.device:
        return next(iter(self.module.parameters())).device


def context_group(size: int, ranks: int, rank: int, timeout: timedelta | None) -> RankGroup:
    """Return the group of the neighbouring ranks that share this rank's sequences.

    Ranks:
        Collective among all.
    """
    groups = [list(range(first, first + size)) for first in range(0, ranks, size)]
    return RankGroup(groups, rank, dist.get_backend_config(), timeout)


@contextlib.contextmanager
def random_weights(module: nn.Module) -> Iterator[None]:
    """Give a module's parameters random numbers of a usual size meanwhile, the same on all ranks.

    Of spread parameters each rank changes its part.
    """
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    seen: set[nn.Parameter] = set()
    try:
        for part in module.modules():
            for parameter in part.parameters(recurse=False):
                held = local_part(parameter.detach())
                is_plain = held.is_floating_point() and not hasattr(held, "__tensor_flatten__")
                if parameter in seen or not is_plain:
                    continue
                seed = 1000 * len(seen) + _shard_of(parameter)
                seen.add(parameter)
                generator = torch.Generator(held.device).manual_seed(seed)
                kept.append((held, held.cpu() if held.device.type != "cpu" else held.clone()))
                if parameter.ndim < 2:
                    held.uniform_(0.5, 1.5, generator=generator)
                else:
                    # What a token is looks up is of size 1; a matrix keeps the size of its inputs.
                    usual = 1.0 if isinstance(part, nn.Embedding) else parameter.shape[-1] ** -0.5
                    held.normal_(0.0, usual, generator=generator)
        yield
    finally:
        for held, numbers in kept:
            held.copy_(numbers)


def _shard_of(parameter: Any) -> int:
    """Which part of a spread parameter a rank has; 0 for an ordinary one."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return 0
    number = 0
    for place, size, placement in zip(
        mesh.get_coordinate(), mesh.shape, parameter.placements, strict=True
    ):
        number = number if placement.is_replicate() else number * size + place
    return number


def _inputs_of(model: nn.Module) -> list[str]:
    """Return the names of what a model's forward takes: its net's, where it hands all on."""
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return []
    handed_on = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    net = getattr(model, "net", None)
    if isinstance(net, nn.Module) and all(item.kind in handed_on for item in parameters.values()):
        return _inputs_of(net)
    return list(parameters)
