"""For callbacks and loggers: the base class, what ranks tell one another, and a run's data.

Example:
    >>> import torch, fitkit
    >>> from fitkit.seams.callbacks import CALLBACKS, Callback, from_all_ranks
    >>> class Samples(Callback):
    ...     "Logs how many batches the ranks have seen in an epoch."
    ...     def on_epoch_begin(self, epoch, logs=None):
    ...         self.batches = 0
    ...     def on_train_batch_end(self, batch, logs=None):
    ...         self.batches += 1
    ...     def on_epoch_end(self, epoch, logs):
    ...         logs["batches"] = float(sum(from_all_ranks(self.model, self.batches)))
    >>> added = CALLBACKS.add("samples", Samples)
    >>> model = fitkit.Model(torch.nn.Linear(4, 1))
    >>> model.compile("sgd", "mse", accelerator="cpu", devices=1)
    >>> x = torch.randn(64, 4)
    >>> model.fit(x, x.sum(1), batch_size=16, verbose=0, callbacks=["samples"])["batches"]
    [4.0]
"""

from fitkit.callbacks.base import (
    AnyRankFlag,
    Callback,
    Logs,
    batches_of_call,
    from_all_ranks,
    from_rank_zero,
    is_multiple_in,
    print_on_rank_zero,
    run_of,
    share_buffers,
)
from fitkit.callbacks.batch_sizes import SetsBatchSize, value_in
from fitkit.callbacks.callback_list import CALLBACKS, Callbacks, report_error
from fitkit.callbacks.checkpoint_writer import CheckpointWriter
from fitkit.callbacks.display import (
    Metrics,
    Moment,
    duration,
    encodable,
    is_terminal,
    short_count,
    speed,
)
from fitkit.callbacks.monitor import Monitor
from fitkit.data.arrays import ArraySource
from fitkit.training.surroundings import rank_source
from fitkit.training.validation_names import validation_name

__all__ = [
    "CALLBACKS",
    "AnyRankFlag",
    "ArraySource",
    "Callback",
    "Callbacks",
    "CheckpointWriter",
    "Logs",
    "Metrics",
    "Moment",
    "Monitor",
    "SetsBatchSize",
    "batches_of_call",
    "duration",
    "encodable",
    "from_all_ranks",
    "from_rank_zero",
    "is_multiple_in",
    "is_terminal",
    "print_on_rank_zero",
    "rank_source",
    "report_error",
    "run_of",
    "share_buffers",
    "short_count",
    "speed",
    "validation_name",
    "value_in",
]
