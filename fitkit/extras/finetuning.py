"""Fine-tuning: train a new head first, then a pretrained backbone, at once or layer by layer."""

from __future__ import annotations

import copy
import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fitkit.arguments import check_count, check_flag, check_number, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.rate_callbacks import optimizers_of, refuse_scheduler
from fitkit.registry import did_you_mean
from fitkit.seams.callbacks import Callback, Logs, print_on_rank_zero
from fitkit.seams.networks import Module
from fitkit.seams.optimizers import put_rate


def module_named(model: Module, name: str, what: str) -> nn.Module:
    """Return a part of the net, by its name among the net's modules.

    Args:
        what: the start of the error message, which says where the name comes from.

    Raises:
        ConfigurationError: the net has no such module.
    """
    net: nn.Module = model if model.net is None else model.net
    modules = dict(net.named_modules())
    if name in modules:
        return modules[name]
    suggestion = did_you_mean(name, filter(None, modules))
    names = ", ".join(repr(known) for known, _ in net.named_children()) or "none"
    raise ConfigurationError(
        f"{what} {name!r}, which isn't a module of the net.{suggestion} Its modules: {names}."
    )


def split_off(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """Give parameters their own groups, with the options that they have."""
    own = {id(parameter) for parameter in parameters}
    for group in list(optimizer.param_groups):
        inside = [parameter for parameter in group["params"] if id(parameter) in own]
        if inside and len(inside) < len(group["params"]):
            options = {name: value for name, value in group.items() if name != "params"}
            group["params"] = [p for p in group["params"] if id(p) not in own]
            # Not add_param_group: these parameters keep their state and their group's options.
            optimizer.param_groups.append({"params": inside, **copy.deepcopy(options)})


class _Freezing(Callback):
    """Freezes named parts of the net, and trains each from its own epoch on.

    Attributes:
        train_bn: whether batch normalization in frozen parts keeps learning.
        verbose: whether to print which part begins to learn.
    """

    stops_alike = True
    train_bn: bool
    verbose: bool
    _frozen: dict[str, list[nn.Parameter]]  # what this callback froze, by part

    def _parts(self, model: Module) -> dict[str, list[nn.Parameter]]:
        """Return the parameters of each named part."""
        raise NotImplementedError

    def _module(self, model: Module, name: str) -> nn.Module:
        """Return the module with a part's name."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_frozen": {}}

    def prepare_optimizers(self, model: Module) -> None:
        parts = self._parts(model)
        for optimizer in optimizers_of(model):
            for own in parts.values():
                split_off(optimizer, own)

    def _normalizations(self, name: str) -> list[nn.Module]:
        """Return the batch normalizations in a part."""
        kinds = nn.modules.batchnorm._BatchNorm
        inside = self._module(self.model, name).modules()
        return [module for module in inside if isinstance(module, kinds)]

    def _freezable(self, name: str) -> list[nn.Parameter]:
        """Return a part's parameters that learn now and stop while it is frozen."""
        spared = self._normalizations(name) if self.train_bn else []
        learning = {id(p) for layer in spared for p in layer.parameters()}
        own = self._parts(self.model)[name]
        return [p for p in own if p.requires_grad and id(p) not in learning]

    def _unfreeze_all(self) -> None:
        for name in list(self._frozen):
            self._unfreeze(name)

    def _freeze(self, name: str) -> None:
        self._frozen[name] = self._freezable(name)
        for parameter in self._frozen[name]:
            parameter.requires_grad, parameter.grad = False, None

    def _unfreeze(self, name: str) -> None:
        for parameter in self._frozen.pop(name, ()):
            parameter.requires_grad = True

    def _hold_statistics(self) -> None:
        """Keep the running statistics of frozen parts, without `train_bn`."""
        if self.train_bn or not self._frozen:
            return
        parts = self._parts(self.model)
        learning = {id(p) for name in parts if name not in self._frozen for p in parts[name]}
        for name in self._frozen:
            for layer in self._normalizations(name):
                if not any(id(parameter) in learning for parameter in layer.parameters()):
                    layer.eval()  # fit has just put it into training mode

    def _groups(self, name: str) -> Iterator[tuple[dict[str, Any], float | None]]:
        """Yield a part's groups, each with the rate of the first group of no part in its
        optimizer.
        """
        parts = self._parts(self.model)
        own = {id(parameter) for parameter in parts[name]}
        named = {id(parameter) for part in parts.values() for parameter in part}
        for optimizer in optimizers_of(self.model):
            firsts = [(g, id(g["params"][0])) for g in optimizer.param_groups if g["params"]]
            rest = [float(group["lr"]) for group, first in firsts if first not in named]
            for group, first in firsts:
                if first in own:
                    yield group, rest[0] if rest else None

    def _tell(self, epoch: int, name: str, group: dict[str, Any]) -> None:
        if self.verbose:
            line = f"Epoch {epoch + 1}: {name} learns at {float(group['lr']):.4g}."
            print_on_rank_zero(self.model, line)


def doubled(epoch: int) -> float:
    """Return the default of `lambda_func`."""
    return 2.0


class BackboneFinetuning(_Freezing):
    """Freezes a part of the net, and trains it from a given epoch on, at its own learning rate.

    The parameters of the part get their own parameter group in the optimizer. It stays after
    `fit`. Parameters that were already frozen stay frozen.

    Args:
        unfreeze_backbone_at_epoch: the first epoch (from 0) in which the part learns. Default 10.
        lambda_func: a function `lambda_func(epoch)` that returns the factor for the backbone's rate
            in each later epoch. Default: 2.
        backbone_initial_ratio_lr: the backbone's first rate, as a fraction of the rest's. Default
            0.1.
        backbone_initial_lr: the backbone's first rate itself. Overrides the ratio. Default None.
        should_align: whether the backbone's rate stops growing at the rest's rate. Default True.
        train_bn: whether batch normalization in the frozen part keeps learning. If not, it also
            keeps its running statistics. Default True.
        verbose: whether to print when the part is unfrozen. Default False.
        backbone: the name of the part among the net's modules. Default `"backbone"`.

    Example:
        >>> import torch, fitkit
        >>> net = torch.nn.Sequential()
        >>> net.add_module("backbone", torch.nn.Linear(4, 8))
        >>> net.add_module("head", torch.nn.Linear(8, 1))
        >>> model = fitkit.Model(net)
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> later = fitkit.callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1)
        >>> history = model.fit(x, x.sum(1), epochs=2, verbose=0, callbacks=[later])

    Raises:
        ConfigurationError, ArgumentTypeError: an argument is invalid. Also when fit begins, if the
            part doesn't exist or a scheduler also sets the rates.
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = doubled,
        backbone_initial_ratio_lr: float = 0.1,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        train_bn: bool = True,
        verbose: bool = False,
        backbone: str = "backbone",
    ) -> None:
        unfreeze_backbone_at_epoch = check_count(
            "unfreeze_backbone_at_epoch", unfreeze_backbone_at_epoch, minimum=0
        )
        if not callable(lambda_func):
            raise ArgumentTypeError(f"lambda_func={describe(lambda_func)} must be callable.")
        backbone_initial_ratio_lr = check_number(
            "backbone_initial_ratio_lr", backbone_initial_ratio_lr, above=0
        )
        backbone_initial_lr = check_number(
            "backbone_initial_lr", backbone_initial_lr, above=0, optional=True
        )
        should_align = check_flag("should_align", should_align)
        train_bn = check_flag("train_bn", train_bn)
        verbose = check_flag("verbose", verbose)
        if not isinstance(backbone, str) or not backbone:
            raise ArgumentTypeError(f"backbone={describe(backbone)} must be a module's name.")
        self.unfreeze_backbone_at_epoch = unfreeze_backbone_at_epoch
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr = backbone_initial_lr
        self.should_align = should_align
        self.train_bn = train_bn
        self.verbose = verbose
        self.backbone = backbone
        self._reset()

    def _reset(self) -> None:
        self._unfrozen_at: int | None = None
        self._frozen = {}

    def _parts(self, model: Module) -> dict[str, list[nn.Parameter]]:
        return {self.backbone: list(self._module(model, self.backbone).parameters())}

    def _module(self, model: Module, name: str) -> nn.Module:
        return module_named(model, name, "backbone is")

    def on_train_begin(self, logs: Logs | None = None) -> None:
        refuse_scheduler(self.model, type(self).__name__)
        self._reset()
        self.add_cleanup(self._unfreeze_all)  # fit may end before their epoch
        own = {id(parameter) for parameter in self._parts(self.model)[self.backbone]}
        if all(id(p) in own for p in self.model.parameters() if p.requires_grad):
            raise ConfigurationError(
                f"All trainable parameters are in {self.backbone!r}, so nothing would be left to "
                "train while it is frozen. Name a part of the net, for example the layers before "
                "the head."
            )
        self.prepare_optimizers(self.model)
        if self.params.get("initial_epoch", 0) < self.unfreeze_backbone_at_epoch:
            self._freeze(self.backbone)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        if epoch < self.unfreeze_backbone_at_epoch:
            self._hold_statistics()
            return
        begins = self._unfrozen_at is None
        if begins:
            self._unfreeze(self.backbone)
            self._unfrozen_at = epoch
        for group, rest in self._groups(self.backbone):
            if rest is None:
                continue
            if begins:
                first = self.backbone_initial_lr
                put_rate(group, rest * self.backbone_initial_ratio_lr if first is None else first)
                self._tell(epoch, self.backbone, group)
            else:
                rate = float(group["lr"]) * self.lambda_func(epoch)
                put_rate(group, min(rate, rest) if self.should_align else rate)

    def state_dict(self) -> dict[str, Any]:
        return {"unfrozen_at": self._unfrozen_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._unfrozen_at = state["unfrozen_at"]


class GradualUnfreezing(_Freezing):
    """Freezes the named parts of the net, and trains each part from its own epoch on.

    Parts that no stage names learn from the beginning. Each named part gets its own parameter group
    in the optimizer. It stays after `fit`. Parameters that were already frozen stay frozen.

    Args:
        stages: a dict from epoch (from 0) to the modules that learn from then on, by their names in
            the net: a name, a list of names, or a dict of names and learning rates. A submodule
            can have its own, earlier stage (`"backbone.layer4"`, then `"backbone"`). A name
            that appears again gets the new stage's rate.
        ratio_lr: the rate of a part without a given rate, as a fraction of the rate of the first
            group that no stage names. Default 0.1.
        train_bn: whether batch normalization in frozen parts keeps learning. If not, it also keeps
            its running statistics. Default True.
        verbose: whether to print which part begins to learn. Default False.

    Raises:
        ConfigurationError, ArgumentTypeError: an argument is invalid. Also when fit begins, if a
            part doesn't exist, nothing learns at first, or a scheduler also sets the rates.

    Example:
        >>> import torch, fitkit
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        >>> model = fitkit.Model(net)
        >>> model.compile("sgd", "mse", learning_rate=0.1)
        >>> stages = fitkit.callbacks.GradualUnfreezing({1: {"0": 0.02}})
        >>> x, y = torch.ones(8, 2), torch.ones(8, 1)
        >>> history = model.fit(x, y, epochs=2, verbose=0, callbacks=stages)
        >>> [group["lr"] for group in model.optimizer.param_groups]
        [0.1, 0.02]

    Reference: Howard & Ruder, Universal Language Model Fine-tuning for Text Classification, 2018,
    arXiv:1801.06146.
    """

    def __init__(
        self,
        stages: Mapping[int, Any],
        ratio_lr: float = 0.1,
        train_bn: bool = True,
        verbose: bool = False,
    ) -> None:
        if not isinstance(stages, Mapping) or not stages:
            raise ArgumentTypeError(
                f"stages={describe(stages)} must be a dict of epochs and module names, like "
                '{1: "layer4", 3: {"layer3": 1e-4}}.'
            )
        ratio_lr = check_number("ratio_lr", ratio_lr, above=0)
        train_bn = check_flag("train_bn", train_bn)
        verbose = check_flag("verbose", verbose)
        read = ((_epoch(epoch), _rates(epoch, named)) for epoch, named in stages.items())
        self.stages: dict[int, dict[str, float | None]] = dict(sorted(read))
        self.ratio_lr = ratio_lr
        self.train_bn = train_bn
        self.verbose = verbose
        self._reset()

    def _reset(self) -> None:
        self._done: list[int] = []
        self._frozen = {}

    def _module(self, model: Module, name: str) -> nn.Module:
        return module_named(model, name, "stages has")

    def _parts(self, model: Module) -> dict[str, list[nn.Parameter]]:
        """Return the parameters of each named module, without modules inside it that come
        earlier.
        """
        taken: set[int] = set()
        parts: dict[str, list[nn.Parameter]] = {}
        for name in [name for named in self.stages.values() for name in named]:
            if name in parts:
                continue
            parameters = self._module(model, name).parameters()
            parts[name] = [p for p in parameters if id(p) not in taken]
            taken.update(map(id, parts[name]))
            if not parts[name]:
                raise ConfigurationError(
                    f"stages has {name!r}, but all its parameters belong to earlier stages. Leave "
                    "it out."
                )
        return parts

    def on_train_begin(self, logs: Logs | None = None) -> None:
        refuse_scheduler(self.model, type(self).__name__)
        self._reset()
        self.add_cleanup(self._unfreeze_all)  # fit may end before their epoch
        self.prepare_optimizers(self.model)
        begun = self.params.get("initial_epoch", 0)
        names = dict.fromkeys(name for named in self.stages.values() for name in named)
        learns = {name for at, named in self.stages.items() if at <= begun for name in named}
        waits = [name for name in names if name not in learns]
        frozen = {id(parameter) for name in waits for parameter in self._freezable(name)}
        if all(id(p) in frozen for p in self.model.parameters() if p.requires_grad):
            raise ConfigurationError(
                f"stages={self.stages} leaves nothing to train in epoch {begun}. Leave out the "
                "head, or name it for epoch 0."
            )
        for name in waits:
            self._freeze(name)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        for at, named in self.stages.items():
            if at > epoch or at in self._done:
                continue
            self._done.append(at)
            for name, rate in named.items():
                self._let_learn(epoch, name, rate)
        self._hold_statistics()

    def _let_learn(self, epoch: int, name: str, rate: float | None) -> None:
        is_new = name in self._frozen
        self._unfreeze(name)
        for group, rest in self._groups(name):
            if rate is not None:
                put_rate(group, rate)
            elif is_new and rest is not None:
                put_rate(group, rest * self.ratio_lr)
            self._tell(epoch, name, group)

    def state_dict(self) -> dict[str, Any]:
        return {"done": list(self._done)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._done = [int(epoch) for epoch in state["done"]]
        # A stage that the first epoch here begins: its parts have waited, though not in this fit.
        known = {name for at in self._done for name in self.stages.get(at, ())}
        for at, named in self.stages.items():
            if at not in self._done and 0 < at <= self.params.get("initial_epoch", 0):
                for name in named:
                    if name not in known:
                        self._frozen.setdefault(name, [])


def _epoch(value: Any) -> int:
    if isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 0:
        return int(value)
    raise ConfigurationError(f"stages has the key {value!r}; keys are epochs, from 0.")


def _rates(epoch: Any, named: Any) -> dict[str, float | None]:
    """Return a stage's modules, each with its rate or None."""
    if isinstance(named, str):
        named = [named]
    rates = dict(named) if isinstance(named, Mapping) else dict.fromkeys(named)
    for name, rate in rates.items():
        if not isinstance(name, str) or not name:
            raise ArgumentTypeError(
                f"stages[{epoch}]={describe(named)} must be a module's name, a list of names or a "
                "dict of names and rates."
            )
        rates[name] = check_number(f"stages[{epoch}][{name!r}]", rate, above=0, optional=True)
    return rates
