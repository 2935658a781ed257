"""The door for extras, in this package and in others: all that they may use of the core.

A capability that a reader of the core needn't know imports from here, and from public modules such
as `fitkit.callbacks`. It may also use the modules that hold no state of a training, such as
`fitkit.arguments`, `errors` and `trees`. The core never imports it: a registry or a public module
does, when somebody asks for its name. docs/contributing.md has a program for each kind. Each
registry also knows the names that installed packages add by entry points.

| you add | you subclass or write | it is found by |
|---|---|---|
| a callback, a logger | `Callback`, `fitkit.loggers.Logger` | `CALLBACKS` |
| a strategy, a way to average gradients | `Strategy`, `Engine` | `STRATEGIES` |
| a precision | `Precision` | `PRECISIONS` |
| a loss | a function, or a `Definition` of its meaning | `LOSSES` |
| a metric | a function, torchmetrics' class, or a `Named` with a `Mean` | `METRICS` |
| an optimizer, a schedule | torch's class, or a function | `OPTIMIZERS`, `SCHEDULERS` |
| a kind of network | `Guest` | `GUESTS` |
| a kind of data | a function that returns `OpenedData` | `DATA` |
| a kind of module with its own steps | `fitkit.Model` | `MODELS` |
| a format of weight files | `WeightFormat` | `FORMATS` |
| a change of whole training batches | `BatchTransform` | `compile(batch_transforms=…)` |
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
from fitkit.callbacks.callback_list import CALLBACKS, Callbacks
from fitkit.callbacks.checkpoint_writer import CheckpointWriter
from fitkit.callbacks.monitor import Monitor
from fitkit.checkpoint import remote, remove_abandoned
from fitkit.checkpoint.arrays import state_of, storable
from fitkit.checkpoint.atomic import HeldInterrupts, check_folder_of, replacing
from fitkit.checkpoint.checkpoint_file import checkpoint_in, open_stored, save_checkpoint
from fitkit.checkpoint.codec import check_plain, decode_state
from fitkit.checkpoint.container import refusals
from fitkit.checkpoint.formats import (
    FORMATS,
    SUFFIXES,
    InMemory,
    OpenWeights,
    StoredFile,
    WeightFormat,
    Weights,
    WeightSource,
    format_of,
    open_weights,
    weights_in,
)
from fitkit.checkpoint.frozen import Frozen, noted
from fitkit.checkpoint.header import FORMAT_VERSION, damaged, open_file, unreadable
from fitkit.checkpoint.remote import is_url, parent, refuse_url
from fitkit.checkpoint.sharded_folder import is_folder_name
from fitkit.checkpoint.uncompiled import plain_name
from fitkit.checkpoint.weights import save_weights
from fitkit.data.arrays import as_tensors, is_array, made_dense, samples_between
from fitkit.data.batches import Batch, NoRows, Source, marked, unpack_batch
from fitkit.data.loaders import ReadInOrder, begin_order, iterate, iterates_by_itself, seeds_apart
from fitkit.data.sharding import keeps_rows
from fitkit.data.sources import (
    DrawnSource,
    LoaderSource,
    ReadByItself,
    check_data_type,
    length_of,
    make_source,
)
from fitkit.data.to_device import own_data
from fitkit.distributed.cluster import detect
from fitkit.distributed.collectives import (
    Collectives,
    ProcessGroup,
    pack_gradients,
    together,
    unpack_gradients,
)
from fitkit.distributed.devices import Machine, choose_kind, overload, usable_cores
from fitkit.distributed.first_forward import refusing_writes
from fitkit.distributed.in_place import (
    ModuleInPlace,
    OptimizerInPlace,
    as_parts,
    held_by,
    whole,
    whole_on_host,
)
from fitkit.distributed.launchers.meeting_folder import parent_of
from fitkit.distributed.launchers.script import is_script_rank
from fitkit.distributed.meta_tensors import Unfilled
from fitkit.distributed.precision import PRECISIONS, MixedPrecision, Precision, plain_layers
from fitkit.distributed.precision.base import (
    FLOAT8,
    BFloat16Mixed,
    change_layer,
    changed_layers,
    check_pair,
    restore_dtypes,
    restore_layer,
)
from fitkit.distributed.resolve import named_strategy, resolve_strategy
from fitkit.distributed.rows import gather, part_sizes, split
from fitkit.distributed.strategies import DDP, STRATEGIES, SingleDevice
from fitkit.distributed.strategies.base import Assignment, Strategy
from fitkit.distributed.strategies.ddp import DDPWrapper
from fitkit.distributed.strategies.engine import Engine, norm_of
from fitkit.distributed.world import RankGroup, World, counting_connections, enter
from fitkit.distributed.wrapped_model import DividedModel, ReplicatedModel, StepRouter, WrappedModel
from fitkit.guests import DATA, GUESTS, MODELS, Guest, OpenedData, guest_of
from fitkit.held_modules import Untrained
from fitkit.hooks import has_own_steps, overridden
from fitkit.losses import Ask, CompiledLoss, Count, Loss, Term, checked_count, resolve
from fitkit.losses.formulas import classes, elements, full, weighted_mean
from fitkit.losses.labels import Labels
from fitkit.losses.loss import is_labels
from fitkit.losses.names import LOSSES, Definition
from fitkit.metrics import CompiledMetrics
from fitkit.metrics.conversions import as_given, matched
from fitkit.metrics.group import MetricSpec
from fitkit.metrics.named import NAMES as METRICS
from fitkit.metrics.named import Named
from fitkit.metrics.sums import Mean
from fitkit.module import Module
from fitkit.optimizer_copies import kept_apart
from fitkit.optimizers import (
    FUSED,
    HOW,
    OPTIMIZERS,
    check_trainable,
    class_of,
    first_rate,
    members_of,
    put_rate,
    uses_closure,
)
from fitkit.pickling import REDUCERS, Together
from fitkit.record import LogOptions
from fitkit.schedulers import SCHEDULERS, PlannedScheduler
from fitkit.training.applier import Applier, ScaledApplier
from fitkit.training.batch_transforms import (
    BatchTransform,
    FunctionTransform,
    WholeBatch,
    as_transform,
    name_of,
)
from fitkit.training.compiler import Compiler, NetAlone, Take, Updates
from fitkit.training.empty_parts import stop_gradients_of_nothing
from fitkit.training.own_step import OwnStep, loss_in, said_count
from fitkit.training.predictions import Elsewhere, reading_on_ranks
from fitkit.training.settings import parts_of_update
from fitkit.training.step import CompiledStep, Outcome, is_plain_wrapper, unpacker_of
from fitkit.training.tally import CarriedTally
from fitkit.training.update import Update
from fitkit.training.validation_names import validation_name

__all__ = [
    "CALLBACKS",
    "DATA",
    "DDP",
    "FLOAT8",
    "FORMATS",
    "FORMAT_VERSION",
    "FUSED",
    "GUESTS",
    "HOW",
    "LOSSES",
    "METRICS",
    "MODELS",
    "OPTIMIZERS",
    "PRECISIONS",
    "REDUCERS",
    "SCHEDULERS",
    "STRATEGIES",
    "SUFFIXES",
    "AnyRankFlag",
    "Applier",
    "Ask",
    "Assignment",
    "BFloat16Mixed",
    "Batch",
    "BatchTransform",
    "Callback",
    "Callbacks",
    "CarriedTally",
    "CheckpointWriter",
    "Collectives",
    "CompiledLoss",
    "CompiledMetrics",
    "CompiledStep",
    "Compiler",
    "Count",
    "DDPWrapper",
    "Definition",
    "DividedModel",
    "DrawnSource",
    "Elsewhere",
    "Engine",
    "Frozen",
    "FunctionTransform",
    "Guest",
    "HeldInterrupts",
    "InMemory",
    "Labels",
    "LoaderSource",
    "LogOptions",
    "Logs",
    "Loss",
    "Machine",
    "Mean",
    "MetricSpec",
    "MixedPrecision",
    "Module",
    "ModuleInPlace",
    "Monitor",
    "Named",
    "NetAlone",
    "NoRows",
    "OpenWeights",
    "OpenedData",
    "OptimizerInPlace",
    "Outcome",
    "OwnStep",
    "PlannedScheduler",
    "Precision",
    "ProcessGroup",
    "RankGroup",
    "ReadByItself",
    "ReadInOrder",
    "ReplicatedModel",
    "ScaledApplier",
    "SetsBatchSize",
    "SingleDevice",
    "Source",
    "StepRouter",
    "StoredFile",
    "Strategy",
    "Take",
    "Term",
    "Together",
    "Unfilled",
    "Untrained",
    "Update",
    "Updates",
    "WeightFormat",
    "WeightSource",
    "Weights",
    "WholeBatch",
    "World",
    "WrappedModel",
    "as_given",
    "as_parts",
    "as_tensors",
    "as_transform",
    "batches_of_call",
    "begin_order",
    "change_layer",
    "changed_layers",
    "check_data_type",
    "check_folder_of",
    "check_pair",
    "check_plain",
    "check_trainable",
    "checked_count",
    "checkpoint_in",
    "choose_kind",
    "class_of",
    "classes",
    "counting_connections",
    "damaged",
    "decode_state",
    "detect",
    "elements",
    "enter",
    "first_rate",
    "format_of",
    "from_all_ranks",
    "from_rank_zero",
    "full",
    "gather",
    "guest_of",
    "has_own_steps",
    "held_by",
    "is_array",
    "is_folder_name",
    "is_labels",
    "is_multiple_in",
    "is_plain_wrapper",
    "is_script_rank",
    "is_url",
    "iterate",
    "iterates_by_itself",
    "keeps_rows",
    "kept_apart",
    "length_of",
    "loss_in",
    "made_dense",
    "make_source",
    "marked",
    "matched",
    "members_of",
    "name_of",
    "named_strategy",
    "norm_of",
    "noted",
    "open_file",
    "open_stored",
    "open_weights",
    "overload",
    "overridden",
    "own_data",
    "pack_gradients",
    "parent",
    "parent_of",
    "part_sizes",
    "parts_of_update",
    "plain_layers",
    "plain_name",
    "print_on_rank_zero",
    "put_rate",
    "reading_on_ranks",
    "refusals",
    "refuse_url",
    "refusing_writes",
    "remote",
    "remove_abandoned",
    "replacing",
    "resolve",
    "resolve_strategy",
    "restore_dtypes",
    "restore_layer",
    "run_of",
    "said_count",
    "samples_between",
    "save_checkpoint",
    "save_weights",
    "seeds_apart",
    "share_buffers",
    "split",
    "state_of",
    "stop_gradients_of_nothing",
    "storable",
    "together",
    "unpack_batch",
    "unpack_gradients",
    "unpacker_of",
    "unreadable",
    "usable_cores",
    "uses_closure",
    "validation_name",
    "value_in",
    "weighted_mean",
    "weights_in",
    "whole",
    "whole_on_host",
]
