"""What changes whole training batches on the device, before their step: `batch_transforms`."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from fitkit import trees
from fitkit.arguments import describe
from fitkit.errors import ConfigurationError
from fitkit.extras.rows import rows_of
from fitkit.extras.splitting.cuts import Cuts
from fitkit.modes import modes_restored
from fitkit.outputs import named_outputs
from fitkit.random_states import kept_random_numbers
from fitkit.samples import samples_in
from fitkit.seams.data import Batch, ChangesBatches, NoRows, unpack_batch
from fitkit.seams.networks import Module, as_ours
from fitkit.seams.steps import CompiledStep, Step, forward_of, labels_inside, unpacker_of
from fitkit.seams.strategies import Collectives, Solo
from fitkit.typing import Tree

TARGET_NAMES = ("y", "target", "targets", "label", "labels")
"""A second argument of these names is the targets, even if it has a default."""


class WholeBatch:
    """The batch of all ranks, of which a rank has some neighbouring rows.

    Args:
        numbers: draws random numbers, the same on all ranks.
        samples: this rank's rows that count.
        total: the rows of all ranks.
        ranks: those that see different rows.
        find_classes: gives the number of classes that the net tells apart, by some labels and
            their place among several targets. None if there is no net.
        dtype: of targets that labels become.
        has_weights: whether the rows have sample weights.
        is_first: whether it is a training's first batch, whose values may be read on any device.

    Example:
        >>> import numpy, torch, fitkit
        >>> whole = fitkit.transforms.WholeBatch(numpy.random.default_rng(0), samples=3, total=3)
        >>> whole.rolled(torch.tensor([1, 2, 3]))
        tensor([3, 1, 2])
    """

    def __init__(
        self,
        numbers: np.random.Generator,
        samples: int,
        total: int,
        ranks: Collectives | None = None,
        find_classes: Callable[[torch.Tensor, Hashable], int] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        has_weights: bool = False,
        is_first: bool = True,
    ) -> None:
        self.numbers = numbers
        self.samples = samples
        self.total = total
        self.dtype = dtype
        self.has_weights = has_weights
        self.is_first = is_first
        self._ranks: Collectives = Solo() if ranks is None else ranks
        self._find_classes = find_classes
        self._by_rank: list[int] | None = None

    def rows(self) -> slice:
        """Return where this rank's rows are in the whole batch.

        Ranks:
            Collective, once a batch.
        """
        first = sum(self._samples_by_rank()[: self._ranks.rank])
        return slice(first, first + self.samples)

    def rolled(self, rows: torch.Tensor) -> torch.Tensor:
        """Return for each row the one before it in the whole batch; for the first, the last.

        Args:
            rows: this rank's (N, ...).

        Ranks:
            Collective.
        """
        if self._ranks.world_size == 1:
            return rows.roll(1, 0)
        counts = self._samples_by_rank()
        last_rows = self._ranks.join_rows(rows[-1:])
        # The nearest rank before this one that has rows; behind rank 0 comes the last rank.
        before = [*range(self._ranks.rank)][::-1] + [*range(len(counts))][::-1]
        giver = next((rank for rank in before if counts[rank]), self._ranks.rank)
        return torch.cat([last_rows[giver : giver + 1], rows[:-1]])

    def soft(
        self, labels: torch.Tensor, classes: int | None = None, place: Hashable = None
    ) -> torch.Tensor:
        """Return class numbers (N, ...) as probabilities (N, C, ...); floating-point ones as given.

        Args:
            labels: (N, ...), on the device.
            classes: C. Default None: as many as the net tells apart. A net with one output for
                each label, as for a yes or no, needs none: its labels become floats.
            place: their key or number among the targets of several outputs.

        Raises:
            ConfigurationError: a label isn't a class, as ignored ones. On a GPU only the first
                batch is read. Later such labels become NaN, and with them the loss.
        """
        if labels.is_floating_point():
            return labels
        count = classes or self._number_of_classes(labels, place)
        if count == 1:
            return labels.to(self.dtype)
        if labels.ndim > 1 and labels.shape[1] == 1:
            labels = labels.squeeze(1)
        if labels.is_cpu or self.is_first:
            least, largest = map(int, labels.aminmax())
            if least < 0 or largest >= count:
                raise ConfigurationError(
                    f"Labels to be mixed must be class numbers from 0 to {count - 1}, but they go "
                    f"from {least} to {largest}. Leave out rows whose labels are ignored."
                )
        places = labels.unsqueeze(1).long()
        shape = (len(labels), count, *labels.shape[1:])
        ones = torch.zeros(shape, dtype=self.dtype, device=labels.device)
        if labels.is_cpu:
            return ones.scatter_(1, places, 1.0)
        is_class = (places >= 0) & (places < count)
        ones.scatter_(1, places.clamp(0, count - 1), 1.0)
        return ones.masked_fill_(~is_class, torch.nan)

    def _number_of_classes(self, labels: torch.Tensor, place: Hashable) -> int:
        if self._find_classes is None:
            raise ConfigurationError(
                "The number of classes isn't known outside of a training. Give it: "
                "fitkit.transforms.MixUp(0.2, classes=10)."
            )
        return self._find_classes(labels, place)

    def _samples_by_rank(self) -> list[int]:
        if self._by_rank is None:
            self._by_rank = [int(count) for count in self._ranks.gather(self.samples)]
        return self._by_rank


class BatchTransform(ChangesBatches):
    """Changes the inputs and targets of a whole batch, with the same draws on any number of ranks.

    A subclass writes `apply`. An object is also a function `(x, y) -> (x, y)` of tensors, for
    loops of your own.

    Example:
        >>> import torch, fitkit
        >>> class Brighter(fitkit.transforms.BatchTransform):
        ...     def apply(self, x, y, whole):
        ...         return x * whole.numbers.uniform(0.8, 1.2), y
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse", batch_transforms=[Brighter()])
    """

    changes_batches = True
    """Whether it changes any batch. One that doesn't isn't called."""

    draws_alike = True
    """Whether what it draws is the same on all ranks that compute a batch together."""

    @abstractmethod
    def apply(self, x: Tree, y: Tree, whole: WholeBatch) -> tuple[Tree, Tree]:
        """Return a rank's inputs and targets, changed.

        Args:
            x, y: this rank's rows, on the device, in memory of their own.
            whole: what the ranks have in common.
        """

    def __call__(self, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """Change one process's batch, with draws from torch's generator."""
        seed = int(torch.randint(2**62, ()))
        rows = samples_in(x, y)
        return self.apply(x, y, WholeBatch(np.random.default_rng(seed), rows, rows))


class FunctionTransform(BatchTransform):
    """A function as a batch transform. What it draws comes from torch's generator of each rank.

    Args:
        function: of (x, y), which returns both, or of x alone.
        takes_targets: which of both. Default None: its signature says.

    Raises:
        ConfigurationError: it can't be called with one or two tensors.
    """

    draws_alike = False

    def __init__(self, function: Callable[..., Any], takes_targets: bool | None = None) -> None:
        self.function = function
        self.takes_targets: bool = (
            is_of_targets(function) if takes_targets is None else takes_targets
        )
        self.__name__: str = name_of(function)

    def __repr__(self) -> str:
        return self.__name__

    def apply(self, x: Tree, y: Tree, whole: WholeBatch) -> tuple[Tree, Tree]:
        """Return a rank's inputs and targets, changed."""
        if not self.takes_targets:
            return self.function(x), y
        found = self.function(x, y)
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise ConfigurationError(
                f"The batch transform {name_of(self)} was called with (x, y) and returned "
                f"{describe(found)}. It must return (x, y)."
            )
        return found[0], found[1]


def as_transform(given: object) -> BatchTransform:
    """Return what a user gave as a batch transform: one of fitkit's, a library's, a function.

    Raises:
        ConfigurationError: it can't be called with one or two tensors, or as a library's one
            returns what no loss takes.
    """
    ours = as_ours("batch_transforms", given)
    return ours if isinstance(ours, BatchTransform) else FunctionTransform(ours)


def name_of(transform: object) -> str:
    """Return a transform's name for messages."""
    return str(getattr(transform, "__name__", type(transform).__name__))


def is_of_targets(transform: Callable[..., Any]) -> bool:
    """Whether a function is called with (x, y); otherwise with x alone.

    Raises:
        ConfigurationError: it can't be called with one or two tensors.
    """
    called = transform.forward if isinstance(transform, torch.nn.Module) else transform
    try:
        given = [*inspect.signature(called).parameters.values()]
    except (TypeError, ValueError):  # a function in C
        return False
    places = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in places if p.default is p.empty]
    spreads = any(p.kind is p.VAR_POSITIONAL for p in given)
    is_named = len(places) > 1 and places[1].name in TARGET_NAMES
    named_only = [p.name for p in given if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if len(needed) > 2 or named_only or not (places or spreads):
        raise ConfigurationError(
            f"The batch transform {name_of(transform)} takes "
            f"({', '.join(p.name for p in given)}). Write a function of (x, y) that returns (x, y)."
        )
    return len(needed) == 2 or is_named or (spreads and not places)


class Draws:
    """Random numbers of single batches, by their places in a training.

    A batch's numbers are those of a new `numpy.random.Philox(key=(key, first), counter=(0, batch,
    epoch, 0))`. One generator that is moved there takes a thirtieth of the time.
    """

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._numbers = np.random.Generator(self._philox)
        self._start = self._philox.state

    def at(self, key: int, first: int, epoch: int, batch: int) -> np.random.Generator:
        """Return the generator, moved to a batch's first number.

        Args:
            key: of the training.
            first: the updates that were made before it. So a second one draws others, even if
                nothing has moved torch's generator, from which the key follows.
        """
        inner = self._start["state"]
        inner["key"][:] = key % 2**64, first
        inner["counter"][:] = 0, batch, epoch, 0
        self._philox.state = self._start
        return self._numbers


class AppliedTransforms:
    """Applies transforms to a training's batches.

    Each batch has draws of its own (`Draws`), by the fit's key, as samples have. So a training that
    was cut draws the same.

    Args:
        model: with its compiled settings.
        step: of the training.
        transforms: in their order.
        key: of the fit. None outside of one: the seed of rank 0's generator.

    Attributes:
        first: the updates before the training; a resumed one has those before it was cut.
    """

    def __init__(
        self,
        model: Module,
        step: Step,
        transforms: Sequence[BatchTransform],
        key: int | None = None,
    ) -> None:
        compilation = model._fitkit.compilation
        self._model, self._step = model, step
        self._compiled: CompiledStep = step if isinstance(step, CompiledStep) else step.compiled
        self._transforms = transforms
        self._ranks: Collectives = compilation.strategy.data_ranks
        if not step.mover.is_ours:
            raise ConfigurationError(
                "The run has batch transforms, but transfer_batch_to_device brings the batches "
                "to the device within the step. Call the transforms there, or leave the hook out."
            )
        apart = [transform for transform in transforms if not transform.draws_alike]
        if apart and compilation.strategy.ranks_per_batch > 1:
            raise ConfigurationError(
                f"Several ranks compute each batch together, but {name_of(apart[0])} draws on each "
                "rank by itself. Write a fitkit.transforms.BatchTransform, which draws alike."
            )
        self._unpack = unpacker_of(model)
        self._draws = Draws()
        self.first: int = model._fitkit.fit_state.updates
        self._key = key
        self._outputs: dict[Hashable, torch.Size] = {}  # the shapes for a batch, by name
        self._seen: Any = None  # its outputs, until the first batch's labels are changed
        self._is_first = True

    def each(self, batches: Iterator[Any], first: int = 0) -> Iterator[Any]:
        """Return a pass's batches, each changed when it is asked for.

        Args:
            first: the first one's number in its epoch.
        """
        for index, batch in enumerate(batches, first):
            yield batch if batch is NoRows else self(batch, index)

    def __call__(self, batch: Batch, index: int = 0) -> Batch:
        """Return a batch on the device, changed.

        Ranks:
            Collective.
        """
        if self._key is None:
            self._key = int(self._ranks.broadcast(torch.initial_seed()))
        x, y, weight, put_back = self._taken_apart(self._step.mover(batch))
        whole = WholeBatch(
            self._draws.at(self._key, self.first, self._model.current_epoch, index),
            batch.samples,
            batch.total,
            self._ranks,
            partial(self._found_classes, x),
            dtype=self._step.mover.transfer.wide_dtype,
            has_weights=weight is not None,
            is_first=self._is_first,
        )
        given = y
        for transform in self._transforms:
            x, y = transform.apply(x, y, whole)
        self._check_labels(given, y)
        changed = put_back(x, y)
        if self._is_first:
            self._is_first = False
            self._check(batch.data, changed)
        return Batch(changed, batch.samples, batch.total)

    def _taken_apart(self, data: Tree) -> tuple[Tree, Tree, Tree, Callable[[Tree, Tree], Any]]:
        """Return a batch's inputs, targets and weights, and what makes a batch of changed ones."""
        is_tuple = isinstance(data, (tuple, list))
        steps_alone = self._compiled is not self._step
        x, y, weight = unpack_batch(data) if steps_alone else self._unpack(data)
        loss = self._compiled.loss
        if y is None and not steps_alone and loss is not None and loss.own is None:
            y = labels_inside(x)
        if y is None:
            return x, None, None, lambda x, y: (x,) if is_tuple else x
        return x, y, weight, lambda x, y: (x, y) if weight is None else (x, y, weight)

    def _found_classes(self, x: Tree, labels: torch.Tensor, place: Hashable) -> int:
        """Return how many classes the net has for labels, by a look at its outputs for a batch.

        Ranks:
            Collective, once in a training.
        """
        if not self._outputs:
            model, strategy = self._model, self._model._fitkit.compilation.strategy
            with kept_random_numbers(), modes_restored(model), torch.no_grad():
                model.eval()
                forward = forward_of(strategy.wrap_for_evaluation(model))
                net, rows = self._compiled.net, samples_in(x, labels)

                def look(sizes: list[int]) -> Any:
                    some = rows_of(x, rows, slice(0, sizes[0])) if sizes[0] < rows else x
                    return net(some, net.in_precision(forward))

                try:
                    if model._fitkit.compilation.given.out_of_memory == "raise":
                        outputs = look([rows])
                    else:  # as many as fit
                        outputs, _ = Cuts(model, "fit").tried(Batch(x, rows, rows), look)
                except (NotImplementedError, ConfigurationError) as error:
                    if self._compiled is self._step:
                        raise
                    # Its own steps call parts of it.
                    raise ConfigurationError(
                        f"{type(model).__name__} has no forward whose outputs show how many "
                        "classes there are. Give their number: fitkit.transforms.MixUp(0.2, "
                        "classes=10)."
                    ) from error
            self._seen = outputs
            named = named_outputs(outputs).items()
            self._outputs = {n: one.shape for n, one in named if isinstance(one, torch.Tensor)}
        shapes = [*self._outputs.values()]
        is_alone = len(shapes) == 1
        shape = shapes[0] if is_alone else self._outputs.get(place, torch.Size())
        if isinstance(place, int) and place < len(shapes):
            shape = shapes[place]
        rest = labels.shape[1:]
        if not shape:
            raise ConfigurationError(
                f"The net has the outputs {[*self._outputs]}, and which one these labels belong to "
                "can't be seen. Give targets as a dict by the outputs' names, or as floats."
            )
        if shape[1:] == rest or (shape[1:] in ((), (1,)) and rest in ((), (1,))):
            return 1
        if len(shape) > 1 and (shape[2:] == rest or (len(shape) == 2 and rest == (1,))):
            return shape[1]
        raise ConfigurationError(
            f"Labels of shape {tuple(labels.shape)} become probabilities of classes, but the net's "
            f"outputs of shape {tuple(shape)} don't say how many there are. Give "
            "fitkit.transforms.MixUp(0.2, classes=10), or targets that are floats."
        )

    def _check_labels(self, before: Tree, after: Tree) -> None:
        """Refuse labels that a transform has made shares of classes, for a loss that takes class
        numbers alone.
        """
        outputs, self._seen, loss = self._seen, None, self._compiled.loss
        if outputs is None or loss is None or loss.takes_inputs or loss.class_weights is not None:
            return
        try:
            loss.begin().check(outputs, before)
        except ConfigurationError:
            return  # the loss itself will say what doesn't fit
        try:
            loss.begin().check(outputs, after)
        except ConfigurationError as error:
            if error.code != "FK007":
                raise
            names = ", ".join(map(name_of, self._transforms))
            raise ConfigurationError(
                f"The batch transforms ({names}) mix labels, which become shares of the classes, "
                "but this loss takes class numbers. Write loss='cross_entropy' for a net of "
                "logits, or 'categorical_crossentropy' for one of probabilities.",
                code="FK007",
            ) from error

    def _check(self, before: Tree, after: Tree) -> None:
        """Refuse transforms that leave out or add rows."""
        if isinstance(before, Mapping) and not isinstance(after, Mapping):
            return
        rows, now = ([len(t) for t in trees.tensors(tree) if t.ndim] for tree in (before, after))
        if rows and now and rows[0] != now[0]:
            names = ", ".join(map(name_of, self._transforms))
            raise ConfigurationError(
                f"The batch transforms ({names}) made {now[0]} rows of {rows[0]}. They must keep "
                "each row in its place."
            )


def applied(
    model: Module, step: Step, given: Iterable[object], key: int | None = None
) -> AppliedTransforms | None:
    """Return what applies transforms, whatever they were given as; None if none changes batches.

    Args:
        model: with its compiled settings.
        step: of the training.
        given: the transforms, in their order.
        key: of the fit; None outside of one.
    """
    transforms = [one for one in map(as_transform, given) if one.changes_batches]
    return AppliedTransforms(model, step, transforms, key) if transforms else None
