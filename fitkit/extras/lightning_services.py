"""What a `LightningModule` may call: `log`, `optimizers`, `all_gather` and the rest, by fitkit.

Such a module has these methods from its own library, where they need that library's Trainer. A
class between the user's class and the library's has fitkit's in their place. So an override in the
user's class, which calls `super().log(…)`, gets fitkit's too.
"""

from __future__ import annotations

import functools
import itertools
import types
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fitkit import trees
from fitkit.extras.lightning_base import ServedModel
from fitkit.extras.lightning_hooks import BASE, Attached, base_of
from fitkit.extras.lightning_objects import HandedOptimizer, toggled, unwrapped


class Services:
    """The methods of a `LightningModule` that its trainer answers, as functions of a module."""

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Add a value to the logs, with Lightning's defaults for the hook that calls."""
        model_of(self).log_of_module(
            name,
            value,
            on_step,
            on_epoch,
            add_dataloader_idx=add_dataloader_idx,
            prog_bar=prog_bar,
            reduce_fx=reduce_fx,
            sync_dist=sync_dist,
            batch_size=batch_size,
            rank_zero_only=rank_zero_only,
        )

    def log_dict(self, dictionary: Any, *arguments: Any, **options: Any) -> None:
        """Log each entry of a dict, or of a torchmetrics `MetricCollection`."""
        options.pop("metric_attribute", None)
        for name, value in dictionary.items():
            self.log(name, value, *arguments, **options)

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0 only."""
        model_of(self).print(*values, **options)

    @property
    def device(self) -> torch.device:
        """The device of this rank; of a module that outlives its model, where its tensors are."""
        if is_served(self):
            return model_of(self).device
        held: Any = self
        tensors = itertools.chain(held.parameters(), held.buffers())
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Stack the tensors of all ranks along a new first dimension; on one rank, none is new."""
        model = model_of(self)
        collectives = model._fitkit.compilation.strategy.collectives

        def stacked(leaf: Any) -> Any:
            if isinstance(leaf, (int, float)):
                leaf = torch.tensor(leaf, device=model.device)
            if not isinstance(leaf, torch.Tensor) or collectives.world_size == 1:
                return leaf
            leaf = leaf if sync_grads else leaf.detach()
            return collectives.join_rows(leaf.unsqueeze(0))

        return trees.map_leaves(stacked, data)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or the list of several.

        Args:
            use_pl_optimizer: whether they have what Lightning's wrapper adds. Else they are torch's
                own objects.
        """
        model = model_of(self)
        found: list[Any] = list(model._made_optimizers())
        if use_pl_optimizer:
            found = [HandedOptimizer(one, toggled(model)) for one in found]
        return found[0] if len(found) == 1 else found

    def lr_schedulers(self) -> Any:
        """Return the scheduler, the list of several, or None."""
        return model_of(self).lr_schedulers()

    def manual_backward(self, loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
        """Compute the gradients of a loss, averaged over the ranks, between its hooks."""
        names = ("gradient", "retain_graph", "create_graph", "inputs")
        options.update(zip(names, arguments, strict=False))
        model = model_of(self)
        if model.hooks.has("backward"):
            options["through"] = functools.partial(model.hooks.call, "backward")
        model.hooks.ask("on_before_backward", loss)
        model.manual_backward(loss, **options)
        model.hooks.ask("on_after_backward")

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Any = None,
    ) -> None:
        """Clip the gradients of an optimizer's parameters, by default as `compile` was told."""
        model = model_of(self)
        given = model._fitkit.compilation.given
        value = given.gradient_clip_val if gradient_clip_val is None else gradient_clip_val
        way = gradient_clip_algorithm or given.gradient_clip_algorithm
        if value:
            model.clip_gradients(unwrapped(optimizer), value, getattr(way, "value", way))

    def toggle_optimizer(self, optimizer: Optimizer, optimizer_idx: int | None = None) -> None:
        """Let only this optimizer's parameters need gradients."""
        model_of(self).toggle_optimizer(unwrapped(optimizer))

    def _call_batch_hook(self, hook_name: str, *arguments: Any) -> Any:
        """Call the module's hook of a batch on its way, as `to_torchscript` and `to_onnx` do."""
        return getattr(self, hook_name)(*arguments)

    def untoggle_optimizer(self, optimizer: Any, optimizer_idx: int | None = None) -> None:
        """Let the parameters need gradients again that `toggle_optimizer` froze."""
        model_of(self).untoggle_optimizer(unwrapped(optimizer))


SERVICES: dict[str, Any] = {
    name: value for name, value in vars(Services).items() if not name.startswith("__")
}


def model_of(module: Any) -> ServedModel:
    """Return the model that serves a module."""
    model: ServedModel = vars(module)["_trainer"].fitkit_model
    return model


def is_served(module: Any) -> bool:
    """Whether fitkit answers a module, and not its own library's Trainer."""
    return getattr(vars(module).get("_trainer"), "fitkit_model", None) is not None


def has_trainer(module: Any) -> bool:
    """Whether fitkit answers a module, or has done so."""
    return hasattr(vars(module).get("_trainer"), "fitkit_model")


def attach(module: nn.Module, trainer: object) -> None:
    """Give a module, and those of its kind in it, a trainer and the services behind it."""
    for part in module.modules():
        if any(base.__name__ == BASE for base in type(part).__mro__):
            kind: Any = type(part)
            if not issubclass(kind, Attached):
                object.__setattr__(part, "__class__", served_class(kind, base_of(part)))
            vars(part)["_trainer"] = trainer


@functools.cache
def services_over(base: Any) -> type[nn.Module]:
    """Return the library's class with fitkit's services above its own."""
    services = {name: _either(ours, getattr(base, name)) for name, ours in SERVICES.items()}
    services["__module__"] = base.__module__
    return types.new_class(BASE, (base,), exec_body=lambda body: body.update(services))


@functools.cache
def served_class(kind: Any, base: Any) -> type[nn.Module]:
    """Return the class of a served module: the user's, with the services behind it."""
    named = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    bases = (Attached, kind, services_over(base))
    return types.new_class(kind.__name__, bases, exec_body=lambda body: body.update(named))


def _either(ours: Any, theirs: Any) -> Any:
    """Return a service that is ours for a module that fitkit serves, else the library's."""
    if isinstance(ours, property):
        mine, other = ours.fget, theirs.fget
        assert mine is not None
        return property(lambda module: (mine if has_trainer(module) else other)(module))

    @functools.wraps(theirs)
    def call(module: Any, *arguments: Any, **options: Any) -> Any:
        return (ours if is_served(module) else theirs)(module, *arguments, **options)

    return call
