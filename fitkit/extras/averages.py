"""Averages of the weights over a training: moving average and stochastic weight averaging."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from fitkit import trees
from fitkit.arguments import check_choice, check_count, check_flag, check_number, plain
from fitkit.buffers import Place, places_of
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.rate_callbacks import groups_of
from fitkit.modes import kept_in_evaluation, modes_restored, to_training
from fitkit.seams.callbacks import Callback, Logs, run_of, share_buffers
from fitkit.seams.files import plain_name
from fitkit.seams.networks import Module, guest_of
from fitkit.seams.optimizers import put_rate
from fitkit.seams.strategies import as_parts

Average = Callable[[list[torch.Tensor], list[torch.Tensor], int], Any]
"""Updates averages with current values, given the number of updates before."""

WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
"""The dtype of averages of half types: small steps would be rounded away."""


RUNNING = frozenset({"running_mean", "running_var", "moving_mean", "moving_variance"})
"""The names of running statistics in torch's and in Keras's layers, and in those made like them."""


def is_running_statistic(name: str) -> bool:
    """Whether a buffer is a mean over batches, by its name: what an average may be taken of.

    Other buffers mean nothing between two steps. An average of unit vectors, such as those of a
    spectral normalization, isn't one; a queue's average is no sample; a counter's no count.
    """
    return re.split("[./]", name)[-1] in RUNNING  # Keras's paths have slashes


class AveragedWeights:
    """Averages of a model's parameters and running statistics, kept outside the model.

    Integers and other buffers stay out: the model keeps those of its last step.

    Args:
        model: the model to average. The averages start from its current weights.
        average: an in-place function (averages, values, number before).
        buffers: whether to average running statistics, too.

    Attributes:
        count: the number of averaged updates.
    """

    def __init__(self, model: Module, average: Average, *, buffers: bool) -> None:
        parameters = {**places_of(model, buffers=False), **_of_losses(model)}
        found = {
            name: place
            for name, place in {**places_of(model, buffers=buffers), **parameters}.items()
            if place.tensor is not None
            and trees.is_inexact(place.tensor)
            and (name in parameters or is_running_statistic(name))
        }
        self.names: list[str] = list(map(plain_name, found))  # files know no wrappers
        self._places = list(found.values())
        self._averages = [_widened(tensor).clone() for tensor in self._tensors]
        self._average = average
        self._own: list[torch.Tensor] | None = None
        self.count: int = 0

    @property
    def _tensors(self) -> list[torch.Tensor]:
        """The model's current tensors. A module may have replaced its buffers."""
        return [place.holder[place.key] for place in self._places]  # type: ignore[misc]

    @property
    def is_in_use(self) -> bool:
        """Whether the model currently holds the averages."""
        return self._own is not None

    @torch.no_grad()
    def update(self) -> None:
        """Add the model's current weights to the average."""
        assert self._own is None, "the model has the averages themselves"
        by_kind: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for number, (mean, tensor) in enumerate(zip(self._averages, self._tensors, strict=True)):
            if mean.shape != tensor.shape:  # a buffer that was resized: its average begins again
                self._averages[number] = _widened(tensor).clone()
                continue
            means, values = by_kind.setdefault((mean.dtype, type(mean)), ([], []))
            means.append(mean)
            values.append(_widened(tensor))
        for means, values in by_kind.values():
            self._average(means, values, self.count)
        self.count += 1

    @torch.no_grad()
    def put_in(self) -> None:
        """Put the averages into the model, in place. Does nothing if they are there."""
        if self._own is None:
            self._own = [tensor.detach().clone() for tensor in self._tensors]
            for place, own, mean in zip(self._places, self._own, self._averages, strict=True):
                if mean.shape == own.shape:
                    place.put(mean)

    @torch.no_grad()
    def take_out(self) -> None:
        """Give the model its own weights back. Does nothing if it has them."""
        if self._own is not None:
            for place, own in zip(self._places, self._own, strict=True):
                place.put(own)
            self._own = None

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by name, their count, and the model's own weights if they are
        swapped.
        """
        own = None if self._own is None else dict(zip(self.names, self._own, strict=True))
        averages = dict(zip(self.names, self._averages, strict=True))
        return {"count": self.count, "averages": averages, "own": own}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. The model has the same weights as then."""
        self.count = int(state["count"])
        self._take(state["averages"], self._averages)
        self._own = None
        if state["own"] is not None:
            self._own = [tensor.detach().clone() for tensor in self._tensors]
            self._take(state["own"], self._own)

    def _take(self, saved: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        by_name = {plain_name(name): value for name, value in saved.items()}
        for name, tensor in zip(self.names, tensors, strict=True):
            if name in by_name:  # older files lack those of losses
                tensor.copy_(as_parts(by_name[name], tensor))


def _of_losses(model: Module) -> dict[str, Place]:
    """Return where the modules beside the model have parameters that learn."""
    places = model._fitkit.compilation.trained(model).places_beside()
    return {n: p for n, p in places.items() if p.tensor is not None and p.tensor.requires_grad}


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    wide = WIDE.get(detached.dtype)
    return detached if wide is None else detached.to(wide)


def _move_average(
    decay: float,
    warms_up: bool,
    averages: list[torch.Tensor],
    values: list[torch.Tensor],
    count: int,
) -> None:
    if warms_up:
        decay = min(decay, (1 + count) / (10 + count))
    get_ema_multi_avg_fn(decay)(averages, values, count)  # torch's function itself isn't pickled


def _add_to_mean(averages: list[torch.Tensor], values: list[torch.Tensor], count: int) -> None:
    get_swa_multi_avg_fn()(averages, values, count)


class EMA(Callback):
    """Keeps a moving average of the weights, for validation and for the final model.

    After each update, `average = decay · average + (1 - decay) · weights`. It starts from the
    weights at the beginning of `fit`. The model holds the average during each validation and after
    the end of `fit`, also after an error or Ctrl-C. So `evaluate`, `predict` and `save` use it
    then. What another callback saves or keeps because of a validation's value is the average,
    too. A training that resumes from such a file continues with its own weights.

    Args:
        decay: how slowly the average follows the weights, from 0 to below 1. Default 0.999.
        update_every_n_steps: the number of weight updates per update of the average. Default 1.
        update_starting_at_epoch: the first epoch (from 0) that is averaged. Before it, the average
            equals the weights. Default 0.
        use_buffers: whether to average running statistics, too: buffers named `running_mean` or
            `running_var`, as in torch's norm layers and in those made like them, and Keras's
            `moving_mean` and `moving_variance`. Other buffers, such as the vectors of a spectral
            normalization, queues and ranges, are those of the last step. Default True.
        swap_on_epoch: whether the average stays in the model from the validation until the next
            epoch begins. Callbacks after this one in the list then save or copy the average at
            the end of each epoch. Default False.
        warmup: whether the decay rises from 0.1: after t updates of the average it is
            `min(decay, (1 + t) / (10 + t))`, as TensorFlow's `num_updates` has it. So the first
            weights are forgotten soon. Default False.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> ema = fitkit.callbacks.EMA(0.99)
        >>> history = model.fit(x, x.sum(1), epochs=2, verbose=0, callbacks=[ema])

    Raises:
        ConfigurationError, ArgumentTypeError: an argument is invalid.

    Ranks:
        Each rank keeps its own average. Equal weights give equal averages.

    Reference: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992.
    """

    stops_alike = True
    each_batch = True
    swaps_weights = True

    def __init__(
        self,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_epoch: int = 0,
        use_buffers: bool = True,
        swap_on_epoch: bool = False,
        warmup: bool = False,
    ) -> None:
        decay = check_number("decay", decay, minimum=0, below=1)
        update_every_n_steps = check_count("update_every_n_steps", update_every_n_steps)
        update_starting_at_epoch = check_count(
            "update_starting_at_epoch", update_starting_at_epoch, minimum=0
        )
        use_buffers = check_flag("use_buffers", use_buffers)
        swap_on_epoch = check_flag("swap_on_epoch", swap_on_epoch)
        warmup = check_flag("warmup", warmup)
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_epoch = update_starting_at_epoch
        self.use_buffers = use_buffers
        self.swap_on_epoch = swap_on_epoch
        self.warmup = warmup
        self._weights: AveragedWeights | None = None
        self._seen = 0

    def _state_for_ranks(self, strategy: object) -> dict[str, Any]:
        return {**super()._state_for_ranks(strategy), "_weights": None}

    @property
    def weights(self) -> AveragedWeights:
        """The average, created when `fit` begins."""
        assert self._weights is not None, "fit has not begun"
        return self._weights

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.add_cleanup(self._leave)
        self._begin_average()
        self._seen = self.model.global_step

    def _begin_average(self) -> None:
        average = partial(_move_average, self.decay, self.warmup)
        self._weights = AveragedWeights(self.model, average, buffers=self.use_buffers)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self.weights.take_out()
        run = run_of(self.model)
        is_resumed = run is not None and run.steps_done > 0  # within this epoch
        if epoch == self.update_starting_at_epoch and self.weights.count == 0 and not is_resumed:
            self._begin_average()

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        # With accumulated gradients not every batch makes an update.
        updates = self.model.global_step
        if updates - self._seen >= self.update_every_n_steps:
            self._seen = updates
            if not self._is_early():
                self.weights.update()

    def on_test_begin(self, logs: Logs | None = None) -> None:
        if self.params.get("stage") == "fit":
            self._finish_epoch()
            self._put_in()

    def on_test_end(self, logs: Logs) -> None:
        if self.params.get("stage") == "fit" and not self.swap_on_epoch:
            self.weights.take_out()

    @contextlib.contextmanager
    def as_validated(self) -> Iterator[None]:
        if self._weights is None or self.weights.is_in_use:
            yield
            return
        self._finish_epoch()
        self._put_in()
        try:
            yield
        finally:
            self.weights.take_out()

    def on_validation_within_epoch(self, batch: int, logs: dict[str, Any]) -> None:
        self.weights.take_out()  # even with swap_on_epoch: the epoch's training continues

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self._finish_epoch()
        if self.swap_on_epoch:
            self._put_in()

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._put_in()

    def _leave(self) -> None:
        """Leave the average in the model, however fit ends. It makes no collective calls."""
        weights, self._weights = self._weights, None
        if weights is not None and not self._is_early():
            weights.put_in()

    def _finish_epoch(self) -> None:
        """Include an update that the end of the epoch made from an incomplete group of batches."""
        if not self.weights.is_in_use:
            self.on_train_batch_end(0, {})

    def _put_in(self) -> None:
        if self._weights is None or self.weights.is_in_use or self._is_early():
            return
        self.weights.put_in()
        share_buffers(self.model)

    def _is_early(self) -> bool:
        """Whether the average still equals the weights."""
        return self.model.current_epoch < self.update_starting_at_epoch

    def state_dict(self) -> dict[str, Any]:
        return {} if self._weights is None else {**self._weights.state_dict(), "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.weights.load_state_dict(state)
            self._seen = int(state.get("seen", self._seen))


class SwapEMAWeights(EMA):
    """Keras's name for `EMA`. Here `swap_on_epoch` is the first argument.

    Args:
        swap_on_epoch: as in `EMA`. Default False.
        decay: as in `EMA`. Keras sets it in the optimizer (`ema_momentum`). Default 0.99.
        **options: the other arguments of `EMA`.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> swap = fitkit.callbacks.SwapEMAWeights(swap_on_epoch=True)
        >>> history = model.fit(x, x.sum(1), epochs=2, verbose=0, callbacks=[swap])
    """

    def __init__(self, swap_on_epoch: bool = False, decay: float = 0.99, **options: Any) -> None:
        super().__init__(decay, swap_on_epoch=swap_on_epoch, **options)


CURVES: dict[str, Callable[[float], float]] = {
    "cos": lambda part: (1 - math.cos(math.pi * part)) / 2,
    "linear": lambda part: part,
}
"""The progress of the rate at each part of the annealing, both from 0 to 1."""


class StochasticWeightAveraging(Callback):
    """Averages the weights at the ends of the last epochs, at a constant, high learning rate.

    From epoch `swa_epoch_start` on, the rates move to `swa_lrs` over `annealing_epochs` epochs. The
    weights at the end of each of these epochs enter a plain mean. When `fit` ends, the model gets
    the mean, also after an error or Ctrl-C. Before the first of these epochs has ended, it keeps
    its weights. Validations use the current weights. So the best weights of
    `EarlyStopping(restore_best_weights=True)` aren't the mean, and the model gets them instead.

    The running statistics of batch normalization don't match averaged weights. They are computed
    again from `bn_data`. Without it, or after an error, they are averaged like the weights, which
    is often close. Other buffers are those of the last step, as in `EMA`.

    Args:
        swa_lrs: the learning rate of the averaged epochs, above 0. A list sets one rate per
            parameter group.
        swa_epoch_start: the first averaged epoch, as a number from 0 or a fraction of `epochs`.
            Default 0.8.
        annealing_epochs: the number of epochs in which the rates move to `swa_lrs`. Default 10.
        annealing_strategy: `"cos"` (default) or `"linear"`.
        bn_data: batches of inputs (or `(inputs, …)`), such as a DataLoader. It must be iterable
            several times, on every rank. Default None.

    Attributes:
        averaged: the number of epochs in the mean.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> swa = fitkit.callbacks.StochasticWeightAveraging(swa_lrs=0.01)
        >>> history = model.fit(x, x.sum(1), epochs=4, verbose=0, callbacks=[swa])

    Raises:
        ConfigurationError, ArgumentTypeError: an argument is invalid. Also when fit begins, if a
            scheduler sets the rates at each step.

    Reference: Izmailov et al., Averaging Weights Leads to Wider Optima and Better
    Generalization, 2018, arXiv:1803.05407.
    """

    stops_alike = True
    swaps_weights = True

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: str = "cos",
        bn_data: Iterable[Any] | None = None,
    ) -> None:
        if isinstance(swa_lrs, (list, tuple)):
            swa_lrs = [check_number("swa_lrs", rate, above=0) for rate in swa_lrs]
        else:
            swa_lrs = check_number("swa_lrs", swa_lrs, above=0)
        swa_epoch_start = plain(swa_epoch_start)
        if isinstance(swa_epoch_start, float):
            swa_epoch_start = check_number("swa_epoch_start", swa_epoch_start, minimum=0, below=1)
        else:
            swa_epoch_start = check_count("swa_epoch_start", swa_epoch_start, minimum=0)
        annealing_epochs = check_count("annealing_epochs", annealing_epochs, minimum=0)
        annealing_strategy = check_choice("annealing_strategy", annealing_strategy, tuple(CURVES))
        # Not `iter(bn_data)`: a DataLoader would draw from the training's random numbers.
        is_spent = hasattr(bn_data, "__next__")
        if bn_data is not None and (is_spent or not isinstance(bn_data, Iterable)):
            raise ArgumentTypeError(
                "bn_data must be batches that can be read more than once, like a DataLoader or a "
                "list of tensors."
            )
        self.swa_lrs = swa_lrs
        self.swa_epoch_start = swa_epoch_start
        self.annealing_epochs = annealing_epochs
        self.annealing_strategy = annealing_strategy
        self.bn_data = bn_data
        self._reset()

    def _reset(self) -> None:
        self.averaged: int = 0
        self._weights: AveragedWeights | None = None
        self._rates: list[float] = []
        self._first = 0

    def _state_for_ranks(self, strategy: object) -> dict[str, Any]:
        return {**super()._state_for_ranks(strategy), "_weights": None}

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._reset()
        if any(plan.interval == "step" for plan in self.model._fitkit.fit_state.schedulers):
            raise ConfigurationError(
                "StochasticWeightAveraging sets the learning rate of each epoch, but an "
                "lr_scheduler sets it at each step. Use an lr_scheduler with interval='epoch', or "
                "none."
            )
        start = self.swa_epoch_start
        epochs = int(self.params["epochs"])
        self._first = int(epochs * start) if isinstance(start, float) else start
        if self._first >= epochs:
            raise ConfigurationError(
                f"swa_epoch_start={start} is after the last epoch: fit has epochs={epochs}."
            )
        if self.bn_data is not None and guest_of(self.model) is not None:
            raise ConfigurationError(
                "bn_data renews the statistics of torch's batch normalization, and this net has "
                "its own. Leave bn_data out: then they are averaged like the weights."
            )
        self._targets()
        self.add_cleanup(self._leave)

    def _targets(self) -> list[float]:
        groups = len(list(groups_of(self.model)))
        if not isinstance(self.swa_lrs, (list, tuple)):
            return [float(self.swa_lrs)] * groups
        if len(self.swa_lrs) != groups:
            raise ConfigurationError(
                f"swa_lrs has {len(self.swa_lrs)} rates, but the optimizer has {groups} "
                "parameter groups."
            )
        return [float(rate) for rate in self.swa_lrs]

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        if self._weights is not None:
            self._weights.take_out()  # a file that was saved after the end of a fit has the mean
        if epoch < self._first:
            return
        if not self._rates:
            self._rates = [float(group["lr"]) for group in groups_of(self.model)]
        passed = epoch - self._first
        part = min(passed / self.annealing_epochs, 1.0) if self.annealing_epochs else 1.0
        done = CURVES[self.annealing_strategy](part)
        changes = zip(groups_of(self.model), self._rates, self._targets(), strict=True)
        for group, begin, target in changes:
            put_rate(group, target if done == 1.0 else begin + (target - begin) * done)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        if epoch < self._first:
            return
        if self._weights is None:
            self._begin_average()
        assert self._weights is not None
        self._weights.update()
        self.averaged = self._weights.count

    def _begin_average(self) -> None:
        self._weights = AveragedWeights(self.model, _add_to_mean, buffers=True)

    def _leave(self) -> None:
        """Leave the mean in the model, however fit ends."""
        weights, self._weights = self._weights, None
        if weights is not None:
            weights.put_in()

    def on_train_end(self, logs: Logs | None = None) -> None:
        if self._weights is None:
            return
        self._weights.put_in()
        if self.bn_data is not None:
            renew_statistics(self.model, self.bn_data, self.model.device)

    def state_dict(self) -> dict[str, Any]:
        weights = None if self._weights is None else self._weights.state_dict()
        return {"averaged": self.averaged, "rates": self._rates, "weights": weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.averaged = int(state["averaged"])
        self._rates = list(state["rates"])
        if state["weights"] is not None:
            self._begin_average()
            assert self._weights is not None
            self._weights.load_state_dict(state["weights"])


@torch.no_grad()
def renew_statistics(model: torch.nn.Module, data: Iterable[Any], device: torch.device) -> None:
    """Compute the running statistics of batch normalization again, as plain means over batches.

    Layers that stay in evaluation mode during training keep theirs.
    """
    kept = kept_in_evaluation(model)
    layers = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        and module.track_running_stats
        and module not in kept
    ]
    if not layers:
        return

    def moved(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # in torch: a plain mean instead of a moving one
    try:
        with modes_restored(model):
            to_training(model, kept)
            for batch in data:
                inputs = batch[0] if isinstance(batch, (list, tuple)) else batch
                _forward(model, trees.map_leaves(moved, inputs))
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


def _forward(model: torch.nn.Module, inputs: Any) -> None:
    if isinstance(inputs, dict):
        model(**inputs)
    elif isinstance(inputs, tuple):
        model(*inputs)
    else:
        model(inputs)
