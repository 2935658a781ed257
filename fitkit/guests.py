"""Networks of other libraries: what fitkit does for them that a torch module needs nobody to do.

Such a network has its own ways: how it is called in training, what it adds to a loss, what happens
after an update, what it keeps that doesn't learn. A `Guest` says them, and stands in the network's
place in the model. fitkit asks once at the beginning of a verb whether there is one. For a torch
module, a step asks `NO_GUEST`, which gives back what it gets.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fitkit import trees
from fitkit.errors import ConfigurationError, warn_once
from fitkit.registry import Registry
from fitkit.typing import Tree


class Guest(nn.Module):
    """A network of another library, as a torch module whose forward takes a batch's inputs whole.

    Its parameters and buffers are the network's own tensors, by the names that files have for
    them. A subclass registers them. Its methods do nothing, as for a torch module.

    Args:
        given: the network, which `model.net` returns. It isn't a submodule.
    """

    given: Any

    def __init__(self, given: object) -> None:
        super().__init__()
        vars(self)["given"] = given

    def _get_name(self) -> str:
        return type(self.given).__name__  # the user's network, in messages and tables

    @property
    def awaits_batch(self) -> bool:
        """Whether the network has no weights before its first batch, which hasn't come."""
        return False

    def check(self, model: nn.Module, verb: str) -> None:
        """Refuse settings that the network can't be trained with.

        Args:
            model: with its compiled settings.
            verb: what is called: `"compile"`, `"fit"`, `"evaluate"`, also for the validation of
                `fit`, or `"predict"`.

        Raises:
            ConfigurationError: with what to write instead.
        """

    def meant(self, argument: str, value: Any) -> Any:
        """Return losses or metrics of `compile` as fitkit calls them.

        Args:
            argument: `"loss"`, `"metrics"` or `"weighted_metrics"`.
            value: as it was given.
        """
        return value

    def prepare(self, batch: Callable[[], Tree]) -> None:
        """Get ready for a verb, before any rank begins.

        Args:
            batch: returns the inputs of a first batch, for a network that is built by them.
        """

    def begin(self, rank: int) -> None:
        """Begin a pass on a rank."""

    def compile_calls(self, options: Any) -> None:
        """Compile how the network is called from now on, or end that.

        Args:
            options: False to call it as written; True, or the keyword arguments of `torch.compile`.

        Raises:
            ConfigurationError: it can't be compiled; the default.
        """
        if options is not False:
            raise ConfigurationError(
                f"jit_compile can't compile {type(self.given).__name__}, which "
                f"{type(self).__name__} calls. Leave it out."
            )

    def synchronized(self, synchronization: Any) -> AbstractContextManager[Any]:
        """Let batch normalisations see the batches of all ranks within a block.

        Args:
            synchronization: what the synchronised layers of a training share.

        Raises:
            ConfigurationError: the network has none that can; the default.
        """
        raise ConfigurationError(
            f"sync_batchnorm=True can't synchronise {type(self.given).__name__}, which "
            f"{type(self).__name__} calls. Leave it out."
        )

    def watch(self, optimizer: Optimizer) -> None:
        """Follow an optimizer, for what must happen after each update."""

    def for_loss(self, outputs: Tree, y: Tree, weight: Tree) -> tuple[Tree, Tree, Tree]:
        """Return the outputs, targets and weights of a batch, as losses take them."""
        return outputs, y, weight

    def for_metrics(self, outputs: Tree, y: Tree, weight: Tree) -> tuple[Tree, Tree, Tree]:
        """Return what `for_loss` returned, as metrics take it."""
        return outputs, y, weight

    def with_added(
        self, loss: torch.Tensor, count: Any, terms: list[Any], *, is_part: bool
    ) -> tuple[torch.Tensor, Any, list[Any]]:
        """Return a batch's loss, what it is a mean over, and its terms, with what the network adds.

        Args:
            is_part: whether the batch is a part of what an update sees.
        """
        return loss, count, terms

    def measure(self, logged: Any) -> None:
        """Add what the network measured itself in its last call to a pass's logs.

        Args:
            logged: has `add(name, metric, options, samples)`, as for `self.log`.
        """

    def counts_to_come(self, counts: list[Any]) -> list[Any]:
        """Return what the terms of a batch will be means over, before its forward.

        Args:
            counts: by the targets alone; None for the batch's samples.
        """
        return counts


NO_GUEST = Guest(None)
"""Stands for a torch module, for which there is nothing to do."""


GUESTS: Registry[type[Guest]] = Registry("net")
"""Guests by the top-level package in which their networks' base classes are."""
GUESTS.promise("fitkit.extras.keras_nets:KerasNet", "keras")


MODELS: Registry[type[nn.Module]] = Registry("net")
"""Subclasses of `Model` that train other libraries' modules, which bring their own steps and hooks.

Their keys are the top-level package and the name of the modules' base class.
"""
MODELS.promise(
    "fitkit.extras.lightning_nets:LightningModel",
    "lightning.LightningModule",
    "pytorch_lightning.LightningModule",
)


TRANSLATORS: Registry[Callable[[str, Any], Any]] = Registry("library")
"""Functions of an argument's name and an object that return what `compile` takes, by package."""
TRANSLATORS.promise("fitkit.extras.keras_objects:translated", "keras")
TRANSLATORS.promise("fitkit.extras.library_transforms:translated", "kornia", "torchvision")


@dataclasses.dataclass(frozen=True)
class OpenedData:
    """What another library's object stands for, where a verb was given it as its data.

    Attributes:
        x: the data to train on, or the only ones.
        validation_data: those to validate on, if the call names none.
        callback: follows the call on each rank, behind the caller's own callbacks.
        transfer: moves a batch to a device in the model's place; None leaves that to the model.
    """

    x: Any
    validation_data: Any
    callback: object
    transfer: Callable[[Any, torch.device], Any] | None


DATA: Registry[Callable[[nn.Module, str, Any], OpenedData | None]] = Registry("data")
"""Functions of a model, a verb and its arguments that open a library's data, by package.

None says that the arguments have other data.
"""
DATA.promise("fitkit.extras.lightning_data:opened", "lightning", "pytorch_lightning")


def opened_data(model: nn.Module, verb: str, arguments: Any) -> OpenedData | None:
    """Return what the `x` of a call stands for; None for data that fitkit reads itself."""
    package = package_of(arguments.x, DATA)
    return None if package is None else DATA[package](model, verb, arguments)


def package_of(value: object, packages: Iterable[str] | None = None) -> str | None:
    """Return the package, imported already, that has a base class of a value.

    Args:
        packages: those to look for. Default None: those in `GUESTS`.
    """
    for package in GUESTS if packages is None else packages:
        if package in sys.modules:
            for kind in type(value).__mro__:
                if kind.__module__.partition(".")[0] == package:
                    return package
    return None


def model_kind(net: object) -> type[nn.Module] | None:
    """Return the subclass of `Model` that trains a net with its own steps and hooks; None for
    others."""
    if not any(known.partition(".")[0] in sys.modules for known in MODELS):
        return None
    for kind in type(net).__mro__:
        known = f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
        if known in MODELS:
            return MODELS[known]
    return None


def as_net(value: object) -> Any:
    """Return a network as a model holds it: in a `Guest`, if it is another library's."""
    package = None if isinstance(value, Guest) else package_of(value)
    return value if package is None else GUESTS[package](value)


def meet_parts(model: nn.Module, *, warns: bool) -> None:
    """Get ready for layers of another library inside a torch module: workers get them whole.

    Args:
        warns: whether to say that nobody tells these layers what they do otherwise in training.
    """
    if not any(package in sys.modules for package in GUESTS):
        return
    part = next((part for part in model.modules() if package_of(part) is not None), None)
    package = package_of(part)
    if package is None:
        return
    GUESTS[package]  # its import says how the library's objects travel
    if warns:
        warn_once(
            f"The net has the {package} layer {type(part).__name__} inside a torch module. It "
            "infers unless it is called with training=self.training, and what it adds to the loss "
            "is left out. A net that is of Keras as a whole trains as in Keras."
        )


def as_ours(argument: str, value: Any) -> Any:
    """Return an argument of `compile` in which other libraries' objects became what it takes."""
    if all(package_of(leaf, TRANSLATORS) is None for leaf in trees.leaves(value)):
        return value

    def ours(leaf: object) -> object:
        package = package_of(leaf, TRANSLATORS)
        return leaf if package is None else TRANSLATORS[package](argument, leaf)

    return trees.map_leaves(ours, value)


def guest_of(model: nn.Module) -> Guest | None:
    """Return the guest that a model wraps; None for other networks."""
    net = model._modules.get("net")
    return net if isinstance(net, Guest) else None
