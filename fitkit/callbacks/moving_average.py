"""An exponential moving average of the weights, used wherever the model is looked at."""

from __future__ import annotations

from typing import Any

from torch.optim.swa_utils import get_ema_multi_avg_fn

from fitkit.arguments import check_count, check_flag, check_number
from fitkit.callbacks.averaged_weights import AveragedWeights
from fitkit.callbacks.base import Callback, Logs
from fitkit.callbacks.learner import updates_of
from fitkit.callbacks.ranks import share_buffers


class EMA(Callback):
    """Averages the weights over the updates; validation and the finished model use the average.

    After each update `average = decay · average + (1 - decay) · weights`, from the weights that
    `fit` begins with. The average stands in the model during each validation, and from the end
    of `fit` on: `evaluate`, `predict` and `save` have it then.

    Args:
        decay: how slowly the average follows, from 0 to below 1. Default 0.999.
        update_every_n_steps: updates of the weights for each of the average. Default 1.
        update_starting_at_epoch: until the end of the epoch before (from 0) the average is the
            weights themselves. Default 0.
        use_buffers: whether floating-point buffers (running statistics) are averaged as well.
            Default True.
        swap_on_epoch: whether the average stays in the model from the validation until the next
            epoch begins, so that callbacks after this one in the list save it, or copy it, at
            an epoch's end. Default False.

    Raises:
        ConfigurationError, ArgumentTypeError: arguments that can't be.

    Ranks:
        Each rank keeps the average; equal weights give equal averages.

    Reference: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992.
    """

    stops_alike = True

    def __init__(
        self,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_epoch: int = 0,
        use_buffers: bool = True,
        swap_on_epoch: bool = False,
    ) -> None:
        check_number("decay", decay, minimum=0, below=1)
        check_count("update_every_n_steps", update_every_n_steps)
        check_count("update_starting_at_epoch", update_starting_at_epoch, minimum=0)
        check_flag("use_buffers", use_buffers)
        check_flag("swap_on_epoch", swap_on_epoch)
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_epoch = update_starting_at_epoch
        self.use_buffers = use_buffers
        self.swap_on_epoch = swap_on_epoch
        self._weights: AveragedWeights | None = None
        self._seen = 0
        self._epoch = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_weights": None}

    @property
    def weights(self) -> AveragedWeights:
        """The average; made when fit begins."""
        assert self._weights is not None, "fit has not begun"
        return self._weights

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._begin_average()
        self._seen = updates_of(self.model)

    def _begin_average(self) -> None:
        average = get_ema_multi_avg_fn(self.decay)
        self._weights = AveragedWeights(self.model, average, buffers=self.use_buffers)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self.weights.take_out()
        if epoch == self.update_starting_at_epoch and self.weights.count == 0:
            self._begin_average()
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        # With accumulated gradients not every batch makes an update.
        updates = updates_of(self.model)
        if updates - self._seen >= self.update_every_n_steps:
            self._seen = updates
            if self._epoch >= self.update_starting_at_epoch:
                self.weights.update()

    def on_test_begin(self, logs: Logs | None = None) -> None:
        if self.params.get("stage") == "fit":
            self._finish_epoch()
            self._put_in()

    def on_test_end(self, logs: Logs) -> None:
        if self.params.get("stage") == "fit" and not self.swap_on_epoch:
            self.weights.take_out()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self._finish_epoch()
        if self.swap_on_epoch:
            self._put_in()

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._put_in()
        self._weights = None

    def _finish_epoch(self) -> None:
        """Take an update that the epoch's end made of a group of batches cut short."""
        if not self.weights.is_in_use:
            self.on_train_batch_end(0, {})

    def _put_in(self) -> None:
        if self._weights is None or self.weights.is_in_use or self._is_early():
            return
        self.weights.put_in()
        share_buffers(self.model)

    def _is_early(self) -> bool:
        """Whether the average is still the weights themselves."""
        return self._epoch < self.update_starting_at_epoch

    def state_dict(self) -> dict[str, Any]:
        return {} if self._weights is None else self._weights.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.weights.load_state_dict(state)


class SwapEMAWeights(EMA):
    """Keras's name for `EMA`; `swap_on_epoch` comes first.

    Args:
        swap_on_epoch: as in `EMA`. Default False.
        decay: as in `EMA`; Keras keeps it in the optimizer (`ema_momentum`). Default 0.99.
        **options: `EMA`'s other arguments.
    """

    def __init__(self, swap_on_epoch: bool = False, decay: float = 0.99, **options: Any) -> None:
        super().__init__(decay, swap_on_epoch=swap_on_epoch, **options)
