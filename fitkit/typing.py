"""Types for fitkit's arguments: names that editors complete and check, data, losses and more.

The names are those of the registries, which accept other spellings, too. `python -m tests.names`
writes them here. For a name that is known only at run time, use `Name`.

Example:
    >>> import torch, fitkit
    >>> from fitkit.typing import Name
    >>> chosen = "ADAMW"  # as the command line has it
    >>> fitkit.Model(torch.nn.Linear(4, 1)).compile(Name(chosen), "mse")
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NewType, Protocol, TypeAlias, TypedDict

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

Name = NewType("Name", str)
"""A name that type checkers can't know, because it is computed or registered at run time."""


class Unset(enum.Enum):
    """The default of an argument that a call leaves out. Signatures show it as `...`."""

    UNSET = "..."

    def __repr__(self) -> str:
        return "..."

    __str__ = __repr__


UNSET: Literal[Unset.UNSET] = Unset.UNSET

# --- written by `python -m tests.names` from here
OptimizerName: TypeAlias = Literal[
    "adafactor", "Adafactor", "muon", "Muon", "adadelta", "Adadelta", "adagrad", "Adagrad",
    "adam", "Adam", "adamax", "Adamax", "adamw", "AdamW", "asgd", "ASGD", "lbfgs", "LBFGS",
    "nadam", "NAdam", "radam", "RAdam", "rmsprop", "RMSprop", "rprop", "Rprop", "sgd", "SGD",
    "sparseadam", "SparseAdam", "qadam", "QAdam", "qadamoptimizer", "QAdamOptimizer",
]  # fmt: skip
LossName: TypeAlias = Literal[
    "bce", "bce_loss", "binary_cross_entropy_loss", "binary_cross_entropy", "cross_entropy",
    "cross_entropy_loss", "nll", "nll_loss", "bce_with_logits", "bce_with_logits_loss",
    "binary_cross_entropy_with_logits", "mse", "mse_loss", "mean_squared_error", "l1",
    "l1_loss", "mae", "mean_absolute_error", "huber", "huber_loss", "smooth_l1",
    "smooth_l1_loss", "poisson_nll", "poisson_nll_loss", "soft_margin", "soft_margin_loss",
    "multi_margin", "multi_margin_loss", "multilabel_margin", "multilabel_margin_loss",
    "multilabel_soft_margin", "multilabel_soft_margin_loss", "hinge_embedding",
    "hinge_embedding_loss", "kl_div", "sparse_categorical_crossentropy",
    "categorical_crossentropy", "categorical_focal_crossentropy", "binary_crossentropy",
    "binary_focal_crossentropy", "mean_absolute_percentage_error", "mape",
    "mean_squared_logarithmic_error", "msle", "log_cosh", "cosine_similarity", "kl_divergence",
    "kld", "kullback_leibler_divergence", "poisson", "hinge", "squared_hinge",
    "categorical_hinge", "BCELoss", "BCEWithLogitsLoss", "CosineSimilarity", "CrossEntropyLoss",
    "HingeEmbeddingLoss", "HuberLoss", "L1Loss", "MSELoss", "MultiLabelMarginLoss",
    "MultiLabelSoftMarginLoss", "MultiMarginLoss", "NLLLoss", "PoissonNLLLoss", "SmoothL1Loss",
    "SoftMarginLoss",
]  # fmt: skip
MetricName: TypeAlias = Literal[
    "accuracy", "acc", "binary_accuracy", "categorical_accuracy", "sparse_categorical_accuracy",
    "exact_match", "subset_accuracy", "hamming_distance", "hamming_loss",
    "top_k_categorical_accuracy", "sparse_top_k_categorical_accuracy", "top_k_accuracy",
    "top_5_accuracy", "top_2_accuracy", "top_3_accuracy", "top_10_accuracy", "cross_entropy",
    "log_loss", "binary_crossentropy", "categorical_crossentropy",
    "sparse_categorical_crossentropy", "perplexity", "mse", "mean_squared_error", "rmse",
    "root_mean_squared_error", "mae", "mean_absolute_error", "huber", "mape",
    "mean_absolute_percentage_error", "smape", "symmetric_mean_absolute_percentage_error",
    "msle", "mean_squared_logarithmic_error", "log_cosh", "log_cosh_error", "hinge",
    "squared_hinge", "poisson", "cosine_similarity", "kl_divergence", "kld",
    "kullback_leibler_divergence", "precision", "recall", "sensitivity", "f1", "f1_score",
    "dice", "specificity", "negative_predictive_value", "true_positives", "false_positives",
    "true_negatives", "false_negatives", "confusion_matrix", "balanced_accuracy", "cohen_kappa",
    "kappa", "matthews_corrcoef", "mcc", "jaccard", "jaccard_index", "iou", "mean_iou", "auc",
    "auroc", "roc_auc", "average_precision", "pr_auc", "auprc", "calibration_error", "ece",
    "r2", "r2_score", "explained_variance", "pearson", "pearson_correlation",
    "pearson_corrcoef", "spearman", "spearman_correlation", "spearman_corrcoef", "concordance",
    "concordance_correlation", "concordance_corrcoef", "relative_squared_error",
]  # fmt: skip
SchedulerName: TypeAlias = Literal[
    "lambda_lr", "LambdaLR", "lambda", "Lambda", "multiplicative_lr", "MultiplicativeLR",
    "multiplicative", "Multiplicative", "step_lr", "StepLR", "step", "Step", "multi_step_lr",
    "MultiStepLR", "multi_step", "MultiStep", "constant_lr", "ConstantLR", "constant",
    "Constant", "linear_lr", "LinearLR", "linear", "Linear", "exponential_lr", "ExponentialLR",
    "exponential", "Exponential", "sequential_lr", "SequentialLR", "sequential", "Sequential",
    "polynomial_lr", "PolynomialLR", "polynomial", "Polynomial", "cosine_annealing_lr",
    "CosineAnnealingLR", "cosine_annealing", "CosineAnnealing", "chained_scheduler",
    "ChainedScheduler", "reduce_lr_on_plateau", "ReduceLROnPlateau", "cyclic_lr", "CyclicLR",
    "cyclic", "Cyclic", "cosine_annealing_warm_restarts", "CosineAnnealingWarmRestarts",
    "one_cycle_lr", "OneCycleLR", "one_cycle", "OneCycle", "cosine", "warmup_cosine",
    "warmup_linear", "warmup_polynomial", "warmup_constant", "warmup_stable_decay", "wsd",
]  # fmt: skip
StrategyName: TypeAlias = Literal[
    "auto", "single_device", "single", "dp", "ddp", "ddp2", "ddp_spawn", "bagua", "ddp_sharded",
    "fsdp", "deepspeed", "horovod", "xla", "tpu",
]  # fmt: skip
AcceleratorName: TypeAlias = Literal[
    "auto", "cpu", "gpu", "cuda", "mps", "xpu", "hpu", "npu", "tpu", "xla",
]  # fmt: skip
PrecisionName: TypeAlias = Literal[
    "32-true", "32", "64-true", "64", "16-mixed", "16", "bf16-mixed", "bf16", "16-true",
    "bf16-true", "fp8-mixed", "fp8", "float8", "transformer-engine",
]  # fmt: skip
# --- to here

FilePath: TypeAlias = str | os.PathLike[str]


class Array(Protocol):
    """Anything that converts to a NumPy array: a tensor, an array, a pandas table, …"""

    def __array__(self, *arguments: Any, **options: Any) -> Any: ...


Arrays: TypeAlias = Array | tuple[Any, ...] | list[Any] | Mapping[Any, Any]
"""Arrays with the same number of samples each."""

Data: TypeAlias = DataLoader[Any] | Dataset[Any] | Arrays | Iterable[Any]
"""Arrays, data that torch reads, or an iterable of batches."""

AnyCallable: TypeAlias = Callable[..., object]
"""A function whose arguments its caller knows, such as a hook of the user's."""

BatchData: TypeAlias = object
"""A batch as the data gave it: whatever the user's collate function returns."""

Outputs: TypeAlias = object
"""What a net or a step of the user's returns: a tensor, or any structure of them."""

Tree: TypeAlias = object
"""Tensors in any structure: one tensor, or tuples, lists, dicts and dataclasses of them."""

Values: TypeAlias = dict[str, Any]
"""What was computed, by name: numbers, or a metric's arrays."""

PlainData: TypeAlias = dict[str, Any]
"""What a file can hold, by name: numbers, words, tensors, and lists and dicts of them."""

if TYPE_CHECKING:
    # Arrays, for completion. A net may return a tuple or dict, so nothing is an error.
    class NumpyOutput(np.ndarray[Any, Any], Any):
        """A net's outputs as NumPy arrays."""

    class TensorOutput(torch.Tensor, Any):
        """A net's outputs as tensors."""

        def __getitem__(self, indices: Any) -> Any: ...

    # The loss, or with metrics a list, for completion: who compiled it knows which.
    class Evaluated(float, list[Any]):  # type: ignore[misc]
        """What `evaluate` returns without names: the loss, or a list with the metrics."""

else:
    NumpyOutput = TensorOutput = Evaluated = Any

OptimizerArgument: TypeAlias = (
    OptimizerName
    | Name
    | dict[str, Any]
    | Optimizer
    | Sequence[Optimizer]
    | type[Optimizer]
    | Callable[[Any], Optimizer]
)
"""A dict has the name and other settings. Classes, partials and factories are callables that
return an optimizer."""

OneLoss: TypeAlias = LossName | Name | Callable[[Any, Any], Any]
"""A module is a callable too."""

Nested: TypeAlias = list[Any] | tuple[Any, ...] | Mapping[Any, Any]
"""The losses of the outputs in a structure, or several losses of one output."""

LossArgument: TypeAlias = (
    OneLoss | Sequence[OneLoss | Nested | None] | Mapping[Any, OneLoss | Nested | None] | None
)
"""One for all outputs, or nested as the outputs are."""

OneMetric: TypeAlias = MetricName | Name | Callable[[Any, Any], Any]
"""A metric of torchmetrics is a callable too."""

Metrics: TypeAlias = OneMetric | Sequence[OneMetric] | Mapping[str, OneMetric]
"""The metrics of one output."""

MetricsArgument: TypeAlias = (
    OneMetric | Sequence[Metrics | Nested | None] | Mapping[Any, Metrics | Nested | None] | None
)
"""The same metrics for all outputs, or one entry per output."""

LossWeights: TypeAlias = float | Sequence[float | Nested] | Mapping[Any, float | Nested] | None

MemoryFormat: TypeAlias = Literal["channels_last"] | torch.memory_format

OneScheduler: TypeAlias = (
    SchedulerName | Name | LRScheduler | type[LRScheduler] | Callable[[Any], Any]
)
"""Classes, partials and factories are callables."""


class _OfScheduler(TypedDict):
    scheduler: OneScheduler


class SchedulerOptions(_OfScheduler, total=False):
    """A scheduler, when it moves, and the log that it watches.

    The other words are those of a schedule by name with its own warm-up.
    """

    interval: Literal["epoch", "step"] | None
    frequency: int
    monitor: str | None
    warmup: float
    floor: float
    power: float
    decay: float


SchedulerArgument: TypeAlias = OneScheduler | SchedulerOptions | None

DevicesArgument: TypeAlias = int | str | Sequence[int]
"""A count, indices, or either of these as text; or `"auto"`."""

NamedPrecision: TypeAlias = PrecisionName | Name | Literal[16, 32, 64]
"""A precision by name, or by its bits."""

BatchTransformsArgument: TypeAlias = (
    Sequence[Callable[[Any], Any] | Callable[[Any, Any], Any]] | None
)
"""Functions that change whole training batches: `(x, y) -> (x, y)`, or `x -> x`."""

CompilerOptions: TypeAlias = dict[str, Any]
"""The keyword arguments of `torch.compile`."""

Mode: TypeAlias = Literal["auto", "min", "max"]
"""Which values of a monitored name are better."""

Verbose: TypeAlias = int | Literal["auto"]
