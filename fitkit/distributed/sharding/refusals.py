"""What can't be trained while its parameters are spread over the ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from fitkit.errors import ConfigurationError


def check_trains(
    module: nn.Module, optimizers: list[Optimizer], strategy: str, *, compiles: bool = False
) -> None:
    """Refuse what can't be trained so.

    Args:
        module: the model.
        optimizers: its optimizers.
        strategy: the strategy's name, for messages.
        compiles: whether the net may be compiled as a whole.

    Raises:
        ConfigurationError: with what to write instead.
    """
    instead = "Write strategy='ddp_sharded' or 'ddp'."
    if not getattr(module, "automatic_optimization", True):
        raise ConfigurationError(
            f"automatic_optimization = False can't be kept under strategy={strategy!r}: the "
            f"step would compute gradients while the net's parameters are gathered. {instead}"
        )
    if len(optimizers) != 1:
        raise ConfigurationError(
            f"strategy={strategy!r} trains with one optimizer, but there are {len(optimizers)}. "
            + instead
        )
    if isinstance(optimizers[0], torch.optim.LBFGS):
        raise ConfigurationError(
            "LBFGS computes the loss itself, several times a step, and looks at all parameters "
            "at once: they can't be spread over ranks. Write strategy='ddp', or take another "
            "optimizer."
        )
    if isinstance(optimizers[0], (torch.optim.Adafactor, torch.optim.SparseAdam)):
        raise ConfigurationError(
            f"{type(optimizers[0]).__name__} can't update parts of parameters, which is all that a "
            f"rank has under strategy={strategy!r}. Write strategy='ddp_sharded', or take another "
            "optimizer."
        )
    _check_modules(module, strategy, compiles=compiles)
    _check_parameters(module, optimizers[0], strategy)


def _check_modules(module: nn.Module, strategy: str, *, compiles: bool) -> None:
    for name, part in module.named_modules():
        if "_orig_mod" in part._modules:
            raise ConfigurationError(
                f"{name or 'The net'} is what torch.compile returned, whose parts "
                f"strategy={strategy!r} can't spread. Give fitkit the module itself, and write "
                "jit_compile=True."
            )
        if part._compiled_call_impl is not None and not (compiles and name in ("", "net")):
            raise ConfigurationError(
                f"{name or 'The net'} is compiled by torch.compile, which strategy={strategy!r} "
                "doesn't train so: parts of a net, under DeepSpeed, or with "
                "activation_checkpointing. Write jit_compile=False, or strategy='ddp'."
            )


def _check_parameters(module: nn.Module, optimizer: Optimizer, strategy: str) -> None:
    named = dict(module.named_parameters())
    own = set(named.values())
    if any(p not in own for group in optimizer.param_groups for p in group["params"]):
        raise ConfigurationError(
            f"The optimizer holds parameters outside the net (a loss's, say); under strategy="
            f"{strategy!r} it can't train both. Make them part of the net, or write "
            "strategy='ddp'."
        )
    learning = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    dtypes = {parameter.dtype for parameter in learning.values()}
    if len(dtypes) > 1:
        listing = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ConfigurationError(
            f"The net's parameters have several dtypes ({listing}); strategy={strategy!r} needs "
            "one. Cast the net, or write strategy='ddp_sharded'."
        )
    for name, parameter in named.items():
        if parameter.ndim == 0:
            raise ConfigurationError(
                f"{name} is a parameter of shape (), of which strategy={strategy!r} can give no "
                "rank a part. Give it the shape (1,), or write strategy='ddp_sharded'."
            )
        if not parameter.is_contiguous():
            raise ConfigurationError(
                f"{name}'s memory isn't contiguous, as strategy={strategy!r} needs it. Bring the "
                "net to torch.contiguous_format."
            )
