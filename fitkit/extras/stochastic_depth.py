"""Stochastic depth: how often blocks are left out, by their depth and by epoch."""

from __future__ import annotations

from torch import nn

from fitkit.arguments import check_count, check_number
from fitkit.errors import ConfigurationError
from fitkit.seams.callbacks import Callback, Logs

Paths = list[tuple[nn.Module, str]]
"""Modules that leave blocks out, each with the name of the attribute that says how often."""


class StochasticDepth(Callback):
    """Leaves deeper blocks out more often while training: from rate 0 in the first to `rate`.

    The net has the modules that leave blocks out: those whose class is called `DropPath` or
    `StochasticDepth`, or ends like this, as timm's, torchvision's and Hugging Face's are. Block i
    of n (from 0) gets the rate `rate · i / (n - 1)`. Modules in one block get the same. After the
    run they have their own rates again.

    Args:
        rate: the rate of the last block, from 0 to below 1. Default 0.1.
        ramp_epochs: the epochs in which the rates rise to these. In epoch e (from 0) they are
            multiplied by `(e + 1) / ramp_epochs`. Default 1: the full rates from the start.

    Example:
        >>> import torch, fitkit
        >>> class DropPath(torch.nn.Module):
        ...     drop_prob = 0.0
        ...     def forward(self, x):
        ...         if not self.training or self.drop_prob == 0.0:
        ...             return x
        ...         keep = 1 - self.drop_prob
        ...         return x * torch.empty(len(x), 1).bernoulli_(keep) / keep
        >>> class Block(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer, self.drop_path = torch.nn.Linear(4, 4), DropPath()
        ...     def forward(self, x):
        ...         return x + self.drop_path(self.layer(x).relu())
        >>> net = torch.nn.Sequential(Block(), Block(), torch.nn.Linear(4, 1))
        >>> model = fitkit.Model(net)
        >>> model.compile("adam", "mse")
        >>> depth = fitkit.callbacks.StochasticDepth(0.2)
        >>> x = torch.randn(64, 4)
        >>> history = model.fit(x, x.sum(1), verbose=0, callbacks=[depth])

    Raises:
        ConfigurationError, ArgumentTypeError: an argument is invalid. Also when fit begins, if the
            net has no such modules.

    Reference: Huang et al., Deep Networks with Stochastic Depth, 2016, arXiv:1603.09382.
    """

    stops_alike = True

    def __init__(self, rate: float = 0.1, ramp_epochs: int = 1) -> None:
        rate = check_number("rate", rate, minimum=0, below=1)
        ramp_epochs = check_count("ramp_epochs", ramp_epochs)
        self.rate = rate
        self.ramp_epochs = ramp_epochs

    def on_train_begin(self, logs: Logs | None = None) -> None:
        blocks = paths_of(self.model)
        if not blocks:
            raise ConfigurationError(
                "StochasticDepth found no module in the net whose class is called DropPath or "
                "StochasticDepth. Make the net with them: timm leaves them out if drop_path_rate "
                "is 0."
            )
        for module, name in (path for block in blocks for path in block):
            self.add_cleanup(setattr, module, name, getattr(module, name))

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        blocks = paths_of(self.model)
        highest = self.rate * min(1.0, (epoch + 1) / self.ramp_epochs)
        for place, block in enumerate(blocks):
            part = place / (len(blocks) - 1) if len(blocks) > 1 else 1.0
            for module, name in block:
                setattr(module, name, highest * part)


def paths_of(net: nn.Module) -> list[Paths]:
    """Return the modules that leave blocks out, by block, in the order of depth."""
    blocks = []
    for parent in net.modules():
        paths = [
            (child, "p" if hasattr(child, "p") else "drop_prob")
            for child in parent.children()
            if type(child).__name__.endswith(("DropPath", "StochasticDepth"))
            and (hasattr(child, "p") or hasattr(child, "drop_prob"))
        ]
        if paths:
            blocks.append(paths)
    return blocks
