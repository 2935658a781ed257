"""Model: any network, with the verbs compile, fit, evaluate and predict."""

from __future__ import annotations

import copy
import inspect
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeVar, overload

from torch import nn
from torch.optim import Optimizer

from fitkit import model_names, trees
from fitkit.accelerators import is_accelerator
from fitkit.arguments import Function, check_flag, check_number, describe, only_known_arguments
from fitkit.callbacks.callback_list import Callbacks
from fitkit.callbacks.history import History, Results
from fitkit.compilation import (
    Anew,
    Compilation,
    CompileArguments,
    given_or,
    is_given,
    without_gpus,
)
from fitkit.data.sources import check_is_one_set, first_inputs
from fitkit.distributed.launchers import InlineLauncher, Launcher
from fitkit.distributed.precision import Precision
from fitkit.distributed.strategies import Strategy
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.fit_state import FitState
from fitkit.guests import as_net, as_ours, guest_of, meet_parts, model_kind, opened_data
from fitkit.hooks import STAGES, check_callbacks, check_steps, overridden
from fitkit.losses.class_weights import class_weights_of
from fitkit.model_names import GivesWay, NotHere, check_attribute, check_definitions, public_names
from fitkit.modes import in_use
from fitkit.module import Module
from fitkit.optimizers import with_rate
from fitkit.pickling import in_main_memory
from fitkit.progress import Progress
from fitkit.record import Record, StepContexts
from fitkit.scopes import Scope, undone_on_error
from fitkit.tensors import values_for_copies
from fitkit.training.caller import caller_of
from fitkit.training.compiler import new_compiler
from fitkit.training.evaluate import run_evaluate, run_predict
from fitkit.training.fit import run_fit
from fitkit.training.on_batch import KeptSteps, evaluate_batch, fit_batch, predict_batch
from fitkit.training.resume import check_data, checkpoint_to_resume, may_refuse, undone_until_begun
from fitkit.training.settings import EvaluateArguments, FitArguments
from fitkit.training.snapshot import load, restored_model, save, save_weights
from fitkit.training.surroundings import check_outside_of_loop, computing
from fitkit.typing import (
    UNSET,
    AcceleratorName,
    Arrays,
    BatchTransformsArgument,
    Data,
    DevicesArgument,
    Evaluated,
    FilePath,
    LossArgument,
    LossWeights,
    MemoryFormat,
    MetricsArgument,
    Name,
    NamedPrecision,
    NumpyOutput,
    OptimizerArgument,
    SchedulerArgument,
    StrategyName,
    TensorOutput,
    Unset,
    Verbose,
)

if TYPE_CHECKING:
    from fitkit.extras.streamed_predictions import Receiver

Arguments = TypeVar("Arguments", FitArguments, EvaluateArguments)
Made = TypeVar("Made", bound="Model")


def verb_arguments(function: Function) -> Function:
    """Let a verb refuse what it doesn't take, and say where another verb does."""

    def elsewhere(name: str) -> str:
        if name in inspect.signature(Model.compile).parameters:
            return f"Write compile({name}=…) before."
        if name in inspect.signature(Model.fit).parameters:
            return f"Write fit({name}=…)."
        return ""

    return only_known_arguments(function, elsewhere)


class Model(Module):
    """A network that you can train, evaluate and use with one line each.

    Args:
        net: the network, any `torch.nn.Module`. Calling the model calls the network. A subclass
            may leave it out and define its own layers and `forward`.

    A subclass may also override the hooks of `Module` (`training_step`, `configure_optimizers`, …)
    and call its methods (`log`, `all_gather`, `manual_backward`, …).

    Attributes:
        net: the network that was given, or None.
        history: the `History` of the last `fit`; None before the first.
        stop_training: set it to True in a callback or a step to end `fit` after the current batch
            or epoch, on all ranks.
        stop_evaluating: the same for `evaluate`, or a validation, on the rank that sets it.
        stop_predicting: the same for `predict`.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 3))
        >>> model.compile("adam", "cross_entropy", metrics=["accuracy"])
        >>> x, y = torch.randn(64, 4), torch.randint(3, (64,))
        >>> history = model.fit(x, y, epochs=2, verbose=0)
        >>> model.predict(x[:5]).shape
        (5, 3)

    Raises:
        ArgumentTypeError: `net` isn't a `torch.nn.Module`.
    """

    history: History | None

    def __new__(cls: type[Made], *args: Any, **kwargs: Any) -> Made:
        """Return a model; of another library's module, one that trains it as it is."""
        net = args[0] if args else kwargs.get("net")
        kind: Any = model_kind(net) if cls is Model else None
        kind = cls if kind is None else kind
        if kind.__init__ is Model.__init__ and (len(args) > 1 or kwargs.keys() - {"net"}):
            raise _takes_the_net_alone(kind, args, kwargs)
        made: Made = super().__new__(kind)
        return made

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self._fitkit = Record(Compilation.default(), FitState(), StepContexts(), KeptSteps())
        if isinstance(net, type) and issubclass(net, nn.Module):
            raise ArgumentTypeError(
                f"net is the class {net.__name__}, not a network. Write {net.__name__}(…)."
            )
        if (kind := model_kind(net)) is not None and not isinstance(self, kind):
            _check_wraps(type(self), net)
        net = as_net(net)
        if net is not None and not isinstance(net, nn.Module):
            raise ArgumentTypeError(f"net={describe(net)} must be a torch.nn.Module.")
        if isinstance(net, Model):
            raise ArgumentTypeError("net is already a fitkit.Model. Use it as it is.")
        self.net = net
        self.history = None
        self.stop_training = False

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        check_definitions(cls, Model)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in public_names(Model):
            check_attribute(self, name, value, Model)
        super().__setattr__(name, value)

    def __copy__(self) -> Model:
        """Return a model of the same net and optimizer, which can be compiled by itself."""
        made = type(self).__new__(type(self))
        vars(made).update(self.__getstate__())
        vars(made)["_fitkit"] = copy.copy(self._fitkit)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles of the model get. An override may leave out what they
        can't.
        """
        self._fitkit.check_copy()
        state: dict[str, Any] = super().__getstate__()
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Model:
        """Return a copy on the same device."""
        made = memo[id(self)] = type(self).__new__(type(self))
        memo.update(values_for_copies(self))
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Return parts of a pickle that a machine without the accelerator can read, too."""
        reduced: Any = super().__reduce_ex__(protocol)
        tensors = itertools.chain(self.parameters(), self.buffers())
        if len(reduced) == 2 or not any(is_accelerator(tensor.device) for tensor in tensors):
            return reduced
        function, arguments, state, *others = reduced
        return function, arguments, in_main_memory(state), *others

    def _state_for_ranks(self, strategy: object) -> dict[str, Any]:
        """Return the tensors as they are, by which the call knows those that it leaves out."""
        return self.__getstate__()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict, as `torch.nn.Module.load_state_dict` does.

        A model that wraps a net also takes the net's own state dict, without the `net.` prefix.

        Args:
            state_dict: names as in `model.state_dict()`, or as in `model.net.state_dict()`.
            strict: whether missing or unexpected names are an error. Default True.
            assign: whether the given tensors become the weights. Default False: they are copied.
        """
        module: nn.Module = self._weights_module()
        if module is not self and isinstance(state_dict, Mapping):
            outer, inner = self.state_dict().keys(), module.state_dict().keys()
            if outer.isdisjoint(state_dict) and not inner.isdisjoint(state_dict):
                return module.load_state_dict(state_dict, strict=strict, assign=assign)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    load_state_dict.copies_as_torch = True  # type: ignore[attr-defined] # for checkpoint/weights.py

    # ------------------------------------------------------------------ compile

    @verb_arguments
    def compile(
        self,
        optimizer: OptimizerArgument | Unset = UNSET,
        loss: LossArgument | Unset = UNSET,
        metrics: MetricsArgument | Unset = UNSET,
        *,
        learning_rate: float | Unset | None = UNSET,
        layer_decay: float | Unset | None = UNSET,
        loss_weights: LossWeights | Unset = UNSET,
        weighted_metrics: MetricsArgument | Unset = UNSET,
        target: str | list[str] | dict[str, str] | Unset | None = UNSET,
        lr_scheduler: SchedulerArgument | Unset = UNSET,
        devices: DevicesArgument | Unset = UNSET,
        accelerator: AcceleratorName | Unset = UNSET,
        strategy: StrategyName | Name | Strategy | Unset = UNSET,
        num_nodes: int | Unset = UNSET,
        precision: NamedPrecision | Precision | Unset = UNSET,
        accumulate_grad_batches: int | Unset = UNSET,
        gradient_clip_val: float | Unset | None = UNSET,
        gradient_clip_algorithm: Literal["norm", "value"] | Unset = UNSET,
        scale_lr: Literal["linear", "sqrt"] | Unset | None = UNSET,
        warmup_epochs: float | Unset | None = UNSET,
        sync_batchnorm: bool | Unset = UNSET,
        replace_sampler: bool | Unset = UNSET,
        auto_select_gpus: bool | Unset = UNSET,
        log_gpu_memory: Literal["all", "min_max"] | Unset | None = UNSET,
        benchmark: bool | Unset | None = UNSET,
        deterministic: bool | Literal["warn"] | Unset | None = UNSET,
        jit_compile: bool | dict[str, Any] | Unset = UNSET,
        matmul_precision: Literal["highest", "high", "medium"] | Unset | None = UNSET,
        memory_format: MemoryFormat | Unset | None = UNSET,
        steps_per_execution: int | Unset = UNSET,
        effective_batch_size: int | Unset | None = UNSET,
        batch_transforms: BatchTransformsArgument | Unset = UNSET,
        out_of_memory: Literal["raise", "split"] | Unset = UNSET,
        gpus: DevicesArgument | Unset | None = UNSET,
    ) -> None:
        """Configure the model for training. The arguments are checked now; nothing runs yet.

        Every argument is optional. An argument that you leave out keeps its value from an earlier
        call, or its default. This method replaces `nn.Module.compile`; for `torch.compile`, pass
        `jit_compile=True`.

        Args:
            optimizer: a name (any `torch.optim` class, in any case, with torch's defaults), a
                dict of a name and other settings (`{"name": "adam", "eps": 1e-5}`), a class, a
                `functools.partial`, or a factory `params -> Optimizer`. It can also be an instance
                over this model's parameters, or a list of instances over disjoint parts of them,
                which step together. `"muon"` is Muon for hidden matrices and AdamW for all else
                (`fitkit.optimizers.muon`). Default: the subclass's `configure_optimizers`, or
                `"adam"`. A call that names an optimizer starts a new one. A call without this
                argument keeps the optimizer and its state.
            loss: a name, an `nn.Module` or a callable `(prediction, target) -> scalar`. For several
                outputs, pass a list or dict of losses, nested as the outputs are. torch's names
                have torch's meaning (`"cross_entropy"` takes logits). Keras's names have Keras's
                (`"sparse_categorical_crossentropy"` takes probabilities). Default None: the net's
                output must carry `.loss`.
            metrics: names, `torchmetrics.Metric` objects (fitkit copies them) or callables
                `(prediction, target)`. Pass a list, or one entry per output as for `loss`.
                Default: none.
            learning_rate: the rate of an optimizer given by name, class, partial or factory.
                Default: the optimizer's own. Given alone, it changes the rate and keeps the state.
            layer_decay: the factor of the learning rate from each layer to the one before it, such
                as 0.75. The last layer has `learning_rate`. Blocks such as a transformer's are
                layers; a net of timm says by `group_matcher` what are. As in timm, biases and the
                scales of norms don't decay then. Default None: one rate. A change drops the
                optimizer's state.
            loss_weights: one weight per output, nested as `loss` is. The total loss is the
                weighted sum.
            weighted_metrics: metrics that weigh each sample by its sample weight (weighted mean).
            target: the entry of dict batches that holds the targets, if the data have no `y`. The
                net gets the other entries. Of an object, such as a batch of graphs, it is an
                attribute, and the net gets the object whole. For several outputs, pass a list of
                names or a dict `{output: name}`. Default None: `"labels"` or `"label"`, which the
                net gets, too.
            lr_scheduler: a name, class, partial, factory `optimizer -> scheduler` or instance. Or a
                dict with `"scheduler"`, `"interval"` (`"epoch"` or `"step"`), `"frequency"` (move
                once in this many intervals; default 1) and `"monitor"` (the log that
                `ReduceLROnPlateau` watches). Without an interval, `OneCycleLR` and `CyclicLR` move
                at each update and all others once per epoch. Names that need the training's length
                (`"cosine"`, `"one_cycle"`, `"polynomial"`) get it from each `fit` and start again
                with it. So do `"warmup_cosine"`, `"warmup_linear"`, `"warmup_polynomial"`,
                `"warmup_constant"` and `"warmup_stable_decay"`, which move at each update. The
                dict may give their `"warmup"` (a part of the training, default 0.05) and their
                `"floor"` (a part of the rate, default 0). All others continue over several fits.
            devices: which devices to use: a number, a list of indices or `"auto"` (default).
            accelerator: `"auto"` (default), `"cpu"`, `"gpu"` (whichever there is), or a type
                that torch knows: `"cuda"`, `"mps"`, `"xpu"`, `"hpu"`, `"npu"`, `"xla"`, ….
            strategy: `"auto"` (default), a strategy's name, or an object of `fitkit.strategies`.
            num_nodes: the number of machines. Default 1.
            precision: `"32-true"` (default), `"64-true"`, `"16-mixed"` (or 16), `"bf16-mixed"`
                (or `"bf16"`), `"16-true"`, `"bf16-true"`, `"fp8-mixed"` (or `"fp8"`), or an object
                of `fitkit.precisions`. Mixed precisions keep float32 weights and compute in the
                narrower type. `"16-mixed"` scales the loss and skips updates whose gradients aren't
                finite. A "-true" precision casts the net itself at the next run or `load`. If you
                compile it back, the net gets its own dtypes again, but not the digits that were
                rounded off. Losses and metrics are computed in float32 or wider.
            accumulate_grad_batches: the number of batches whose gradients make one update. The
                update is the mean over their samples, as for one larger batch. Default 1.
            gradient_clip_val: the largest allowed gradient, of the parameters that the optimizer
                holds. Default: no limit.
            gradient_clip_algorithm: `"norm"` clips the norm of all gradients together (default),
                `"value"` each entry.
            sync_batchnorm: whether batch normalisation uses the batches of all ranks. Default
                False: each rank normalises its own batch.
            replace_sampler: whether fitkit divides a loader's samples among the ranks. Default
                True.
            benchmark: the value of `torch.backends.cudnn.benchmark` during each call. None
                (default) leaves it unchanged.
            deterministic: True, False or `"warn"`: whether torch uses deterministic algorithms
                during each call. None (default) leaves the setting unchanged.
            jit_compile: True to run `torch.compile` on the whole step (forward, loss, gradients,
                update), including your own `training_step`. In `evaluate` and `predict` it compiles
                the net and the loss. What torch can't compile runs as usual. Or pass a dict of
                `torch.compile`'s options.
            matmul_precision: how precisely float32 matrices are multiplied during each call, as in
                `torch.set_float32_matmul_precision`: `"highest"` (float32 throughout), `"high"`
                (TF32 on CUDA) or `"medium"` (bfloat16 where the device has kernels for it). None
                (default) leaves the setting unchanged.
            memory_format: `"channels_last"` or `torch.channels_last` stores images and the weights
                of convolutions that way during each call. Tensor cores compute faster with it.
                None (default) changes nothing.
            gpus: the older spelling: None or 0 means the CPU, any other value
                `accelerator="gpu", devices=gpus`.
            scale_lr: `"linear"` multiplies the learning rate by the number of ranks, `"sqrt"` by
                its root. Default None: no scaling.
            warmup_epochs: the number of epochs (fractions allowed) in which the rate rises to its
                full value. It starts from the unscaled rate, or from 0 if nothing is scaled. A
                scheduler waits until the warmup is over; one by name that is as long as `fit` gets
                what is left. Default: no warmup.
            auto_select_gpus: whether a count in `devices` (or -1) means GPUs that nobody else
                uses, those with the most free memory first, as
                `fitkit.find_usable_cuda_devices` picks them.
            log_gpu_memory: `"all"` or `"min_max"` adds the GPUs' memory to the epoch's logs, as
                `fitkit.callbacks.DeviceStatsMonitor` does. Default None.
            steps_per_execution: the number of batches between two calls of the callbacks' batch
                hooks, in `fit`, `evaluate` and `predict`. The begin hook gets the number of the
                first batch, the end hook that of the last one with the logs so far. Default 1.
            effective_batch_size: the number of samples in one update of `fit`, over all devices.
                Each rank's batch (at most `fit`'s `batch_size`) and the number of accumulated
                batches follow from it. So the updates are the same on any number of devices. A
                `DataLoader` keeps its batches. Default None.
            batch_transforms: a list of functions that change whole training batches on the device,
                before the step: `(x, y) -> (x, y)`, or `x -> x`. `fitkit.transforms` has MixUp,
                CutMix and RandomErasing. torchvision's transforms (v2), Kornia's and your own work
                as they are. Default None. `evaluate` and `predict` never see them.
            out_of_memory: `"split"` computes a batch that doesn't fit into memory in 2, 4, … parts,
                with the same numbers, and goes on; later batches of its shape start in parts. Each
                rank does so by itself, in `fit`, `evaluate` and `predict`. It works on one device
                and with `"ddp"` and `"ddp_spawn"`. Refused is what can't be computed in parts:
                batch normalisation in training, losses over pairs of samples, LBFGS, manual
                updates. With `jit_compile` the net alone is compiled. Default `"raise"`.

        Raises:
            ConfigurationError, ArgumentTypeError: an argument is invalid. The model keeps its
                earlier configuration.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 3))
            >>> model.compile("adamw", "cross_entropy", metrics=["accuracy"], learning_rate=3e-4)
            >>> model.compile(accelerator="cpu", devices=2)  # all else stays as it was
        """
        devices, accelerator = without_gpus(gpus, devices, accelerator)
        record, was = self._fitkit, self._fitkit.compilation.given
        given = CompileArguments(
            optimizer=given_or(as_ours("optimizer", optimizer), was.optimizer),
            loss=given_or(as_ours("loss", loss), was.loss),
            metrics=given_or(as_ours("metrics", metrics), was.metrics),
            learning_rate=given_or(as_ours("learning_rate", learning_rate), was.learning_rate),
            layer_decay=given_or(layer_decay, was.layer_decay),
            loss_weights=given_or(loss_weights, was.loss_weights),
            weighted_metrics=given_or(
                as_ours("weighted_metrics", weighted_metrics), was.weighted_metrics
            ),
            target=given_or(target, was.target),
            lr_scheduler=given_or(lr_scheduler, was.lr_scheduler),
            devices=given_or(devices, was.devices),
            accelerator=given_or(accelerator, was.accelerator),
            strategy=given_or(strategy, was.strategy),
            num_nodes=given_or(num_nodes, was.num_nodes),
            precision=given_or(precision, was.precision),
            accumulate_grad_batches=given_or(accumulate_grad_batches, was.accumulate_grad_batches),
            gradient_clip_val=given_or(gradient_clip_val, was.gradient_clip_val),
            gradient_clip_algorithm=given_or(gradient_clip_algorithm, was.gradient_clip_algorithm),
            scale_lr=given_or(scale_lr, was.scale_lr),
            warmup_epochs=given_or(warmup_epochs, was.warmup_epochs),
            sync_batchnorm=given_or(sync_batchnorm, was.sync_batchnorm),
            replace_sampler=given_or(replace_sampler, was.replace_sampler),
            auto_select_gpus=given_or(auto_select_gpus, was.auto_select_gpus),
            log_gpu_memory=given_or(log_gpu_memory, was.log_gpu_memory),
            benchmark=given_or(benchmark, was.benchmark),
            deterministic=given_or(deterministic, was.deterministic),
            jit_compile=given_or(jit_compile, was.jit_compile),
            matmul_precision=given_or(matmul_precision, was.matmul_precision),
            memory_format=given_or(memory_format, was.memory_format),
            steps_per_execution=given_or(steps_per_execution, was.steps_per_execution),
            effective_batch_size=given_or(effective_batch_size, was.effective_batch_size),
            batch_transforms=given_or(batch_transforms, was.batch_transforms),
            out_of_memory=given_or(out_of_memory, was.out_of_memory),
        )
        anew = Anew(
            optimizer=is_given(optimizer),
            learning_rate=is_given(learning_rate),
            scheduler=is_given(lr_scheduler),
            loss=is_given(loss, loss_weights),
            metrics=is_given(metrics, weighted_metrics),
            hardware=is_given(
                devices, accelerator, strategy, precision, num_nodes, auto_select_gpus
            ),
        )
        compilation = record.compilation.updated(given, anew, self)
        if is_given(jit_compile, out_of_memory):
            whole = given.out_of_memory == "raise"
            record.compiler = new_compiler(self, given.jit_compile, updates=whole)
        else:  # what was compiled is for the settings before
            record.compiler = copy.copy(record.compiler)
        record.compilation = compilation
        if (guest := guest_of(self)) is not None:
            guest.check(self, "compile")
        if anew.optimizer or given.layer_decay != was.layer_decay:
            record.fit_state.drop_optimizers()
        if anew.scheduler:
            record.fit_state.drop_schedulers()
        if is_given(loss, metrics, weighted_metrics):
            record.log_names = None
        if anew.learning_rate and given.learning_rate is not None:
            record.fit_state.set_rate(given.learning_rate)

    # ------------------------------------------------------------------ the verbs

    @verb_arguments
    def fit(
        self,
        x: Data,
        y: Arrays | None = None,
        *,
        batch_size: int = 32,
        epochs: int = 1,
        verbose: Verbose = "auto",
        callbacks: Callbacks = None,
        validation_split: float = 0.0,
        validation_data: Data | None = None,
        shuffle: bool | Literal["batch"] = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Arrays | None = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Collection[int] = 1,
        resume_from: FilePath | None = None,
    ) -> History:
        """Train the model for a number of epochs.

        Layers that you have put into evaluation mode stay in it, such as a backbone with frozen
        batch normalization. If every module of the net is in evaluation mode, the net trains. At
        the end, all modes are as they were before.

        Args:
            x: a `DataLoader`, a `Dataset`, arrays or tensors (or a tuple or dict of them, with
                `y`), or any iterable of batches `(x, y)` or `(x, y, sample_weight)`. A dict of
                inputs goes to the net by keyword.
            y: the targets of arrays: (N, ...), or a tuple, list or dict for several outputs.
            batch_size: samples per batch of arrays or a Dataset, in each process. With
                `compile(effective_batch_size=…)` it is the upper limit. Default 32.
            epochs: the number of the final epoch. Default 1. With `initial_epoch`, fewer epochs
                run.
            verbose: 0 prints nothing, 1 shows a progress bar, 2 prints one line per epoch.
                `"auto"` (default) is 1 in a terminal or notebook, else 2.
            callbacks: a callback or a list of callbacks.
            validation_split: the fraction at the end of the data to validate on. It is cut off
                before shuffling. Default 0.
            validation_data: `(x, y)`, `(x, y, sample_weight)`, a loader or a Dataset. Or a dict of
                several of them by name: `{"day": a, "night": b}` logs `val_day_loss`, …. It
                overrides `validation_split`.
            shuffle: whether arrays and Datasets are read in a new order each epoch (default).
                `"batch"` shuffles only within each batch.
            class_weight: a dict from class number to weight, used for training only. Classes that
                it doesn't name weigh 1.
            sample_weight: (N,) weights of the samples in arrays. Each sample's loss is multiplied
                by its weight, and the sum is divided by the number of samples.
            initial_epoch: the number of the first epoch. Default 0.
            steps_per_epoch: batches per epoch. The next epoch continues where the last one
                stopped, and data that can be read again start over at their end. Default None:
                one pass over the data.
            validation_steps: batches per validation. Default None: all.
            validation_batch_size: samples per validation batch. Default: `batch_size`.
            validation_freq: validate after every so many epochs, or after the epochs of a list,
                counted from 1. To validate within epochs, too, pass a fraction of the epoch's
                batches (0.2) or `{"batches": 100}`. Default 1.
            resume_from: a checkpoint from which training continues as if it had never stopped.
                `"last"` is the newest one that the callbacks know; if there is none, training
                starts from the beginning. Pass the same data and callbacks as before, and the
                same `epochs` or more. fitkit refuses what contradicts the file before it
                loads it, or warns.

        Returns:
            The history: `history.history["loss"]` is a list with one float per epoch.

        Raises:
            ConfigurationError, ArgumentTypeError: an argument or the data are invalid. If only
                the first batch shows it, the model is as it was before.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 1))
            >>> model.compile("adam", "mse")
            >>> x = torch.randn(64, 4)
            >>> history = model.fit(x, x.sum(1), epochs=3, validation_split=0.25, verbose=0)
            >>> len(history.history["val_loss"])
            3
        """
        arguments = FitArguments(
            x=x,
            y=y,
            batch_size=batch_size,
            epochs=epochs,
            verbose=verbose,
            callbacks=callbacks,
            validation_split=validation_split,
            validation_data=validation_data,
            shuffle=shuffle,
            class_weight=class_weight,
            sample_weight=sample_weight,
            initial_epoch=initial_epoch,
            steps_per_epoch=steps_per_epoch,
            validation_steps=validation_steps,
            validation_batch_size=validation_batch_size,
            validation_freq=validation_freq,
        )
        with in_use(self, "fit", alone=True):
            path = checkpoint_to_resume(resume_from, arguments.callback_list.callbacks)
            if path is None:
                arguments = _prepared(self, "fit", arguments)
                return self._launcher().launch("fit", run_fit, self, arguments)
            arguments, undo = _resumed(self, arguments, path)
            with undone_until_begun(self, undo):
                return self._launcher().launch("fit", run_fit, self, arguments)

    @overload
    def evaluate(
        self,
        x: Data,
        y: Arrays | None = None,
        *,
        batch_size: int = 32,
        verbose: Verbose = "auto",
        sample_weight: Arrays | None = None,
        steps: int | None = None,
        callbacks: Callbacks = None,
        return_dict: Literal[True],
        interval: float | None = None,
    ) -> dict[str, Any]: ...

    @overload
    def evaluate(
        self,
        x: Data,
        y: Arrays | None = None,
        *,
        batch_size: int = 32,
        verbose: Verbose = "auto",
        sample_weight: Arrays | None = None,
        steps: int | None = None,
        callbacks: Callbacks = None,
        return_dict: Literal[False] = False,
        interval: float | None = None,
    ) -> Evaluated: ...

    @overload
    def evaluate(
        self,
        x: Data,
        y: Arrays | None = None,
        *,
        batch_size: int = 32,
        verbose: Verbose = "auto",
        sample_weight: Arrays | None = None,
        steps: int | None = None,
        callbacks: Callbacks = None,
        return_dict: bool,
        interval: float | None = None,
    ) -> Any: ...

    @verb_arguments
    def evaluate(
        self,
        x: Data,
        y: Arrays | None = None,
        *,
        batch_size: int = 32,
        verbose: Verbose = "auto",
        sample_weight: Arrays | None = None,
        steps: int | None = None,
        callbacks: Callbacks = None,
        return_dict: bool = False,
        interval: float | None = None,
    ) -> Any:
        """Compute the loss and metrics over a data set, in evaluation mode, without gradients.

        Args:
            x, y, batch_size, sample_weight: as in `fit`.
            verbose: as in `fit`; `"auto"` shows a bar only after one second. Where the output is no
                terminal it prints nothing: print what is returned.
            steps: the number of batches to read. Default None: all.
            callbacks: callbacks whose test hooks are called.
            return_dict: whether to return a dict of values by name. Default False.
            interval: with `return_dict`, a level such as 0.95: beside each value stands
                `<name>_interval`, low and high, which has the mean over all samples of the kind
                so often. It is None for what isn't a mean over samples, such as `"auroc"`.
                Default None: no intervals.

        Returns:
            The loss as a float. With metrics, a list `[loss, metric, …]` in the order of
            `metrics_names`. With `return_dict`, a dict. Means are over samples.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Identity())
            >>> model.compile(loss="mse", metrics=["mae"])
            >>> model.evaluate(torch.ones(8, 1), torch.zeros(8, 1), verbose=0, return_dict=True)
            {'loss': 1.0, 'mae': 1.0}
        """
        return_dict = check_flag("return_dict", return_dict)
        interval = check_number("interval", interval, above=0, below=1, optional=True)
        if interval is not None and not return_dict:
            raise ConfigurationError(
                f"interval={interval} adds values by name. Write return_dict=True, too."
            )
        arguments = EvaluateArguments(
            x=x,
            y=y,
            batch_size=batch_size,
            verbose=verbose,
            sample_weight=sample_weight,
            steps=steps,
            callbacks=callbacks,
        )
        given = self._fitkit.compilation.given
        if y is None and given.loss is not None and given.target is None:
            check_is_one_set(x)
        with computing(self, "evaluate"):
            arguments = _prepared(self, "evaluate", arguments)
            run = partial(self._launcher().launch, "evaluate", run_evaluate, self, arguments)
            if interval is None:
                values = run()
            else:
                from fitkit.extras.intervals import with_intervals

                values = with_intervals(self, interval, run)
        return _as_asked(values, return_dict)

    @overload
    def predict(
        self,
        x: Data,
        *,
        batch_size: int = 32,
        verbose: Verbose = "auto",
        steps: int | None = None,
        callbacks: Callbacks = None,
        as_numpy: Literal[True] = True,
        out: None = None,
    ) -> NumpyOutput: ...

    @overload
    def predict(
        self,
        x: Data,
        *,
        batch_size: int = 32,
        verbose: Verbose = "auto",
        steps: int | None = None,
        callbacks: Callbacks = None,
        as_numpy: Literal[False],
        out: None = None,
    ) -> TensorOutput: ...

    @overload
    def predict(
        self,
        x: Data,
        *,
        batch_size: int = 32,
        verbose: Verbose = "auto",
        steps: int | None = None,
        callbacks: Callbacks = None,
        as_numpy: bool = True,
        out: FilePath | Callable[[Any, Any], object] | None = None,
    ) -> Any: ...

    @verb_arguments
    def predict(
        self,
        x: Data,
        *,
        batch_size: int = 32,
        verbose: Verbose = "auto",
        steps: int | None = None,
        callbacks: Callbacks = None,
        as_numpy: bool = True,
        out: FilePath | Callable[[Any, Any], object] | None = None,
    ) -> Any:
        """Compute the net's outputs for all inputs, in the order of the inputs.

        Args:
            x, batch_size: as in `fit`. Targets in batches are ignored.
            verbose, steps: as in `evaluate`.
            callbacks: callbacks whose predict hooks are called.
            as_numpy: whether to return NumPy arrays (default) or tensors on the CPU.
            out: where the outputs go as they are computed, so that memory holds a few batches. A
                `.npy` file is written whole or not at all; for several outputs `scores.npy`
                becomes `scores.a.npy`, …. A function gets each batch's outputs and the indices of
                its samples, in order and on rank 0. Default None: the outputs are returned.

        Returns:
            The net's output structure (tensor, tuple, dict), concatenated over the batches. With a
            file, the array mapped into memory, or a dict of them by the outputs' names. With a
            function, None.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 3))
            >>> model.predict(torch.randn(100, 4), verbose=0).shape
            (100, 3)
        """
        as_numpy = check_flag("as_numpy", as_numpy)
        arguments = EvaluateArguments(
            x=x, batch_size=batch_size, verbose=verbose, steps=steps, callbacks=callbacks
        )
        if out is not None:
            from fitkit.extras.predictions import receiver_for

            receiver = receiver_for(out, as_numpy=as_numpy)
            return receiver.returned(self._stream("predict", arguments, receiver))
        with computing(self, "predict"):
            arguments = _prepared(self, "predict", arguments)
            outputs = self._launcher().launch("predict", run_predict, self, arguments)
        return trees.to_numpy(outputs) if as_numpy else outputs

    @verb_arguments
    def predict_batches(
        self,
        x: Data,
        *,
        batch_size: int = 32,
        verbose: Verbose = "auto",
        steps: int | None = None,
        callbacks: Callbacks = None,
        as_numpy: bool = True,
    ) -> Iterator[Any]:
        """Iterate over the outputs of the batches, in the order of the inputs.

        A thread computes a few batches ahead, so memory holds no more. Leaving the loop ends it.

        Args:
            x, batch_size, verbose, steps, callbacks, as_numpy: as in `predict`.

        Returns:
            An iterator over the outputs of one batch after the other. Its `close()` ends it early.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 3))
            >>> x = torch.randn(100, 4)
            >>> [len(scores) for scores in model.predict_batches(x, verbose=0)]
            [32, 32, 32, 4]
        """
        from fitkit.extras.predictions import read_in_loop

        as_numpy = check_flag("as_numpy", as_numpy)
        arguments = EvaluateArguments(
            x=x, batch_size=batch_size, verbose=verbose, steps=steps, callbacks=callbacks
        )
        check_outside_of_loop(self._fitkit.compilation.strategy)
        run = partial(self._stream, "predict_batches", arguments)
        return read_in_loop(run, self._fitkit.compilation.strategy, as_numpy=as_numpy)

    def _stream(self, verb: str, arguments: EvaluateArguments, receiver: Receiver) -> Any:
        """Predict, and hand the outputs to a receiver as they come; return its result."""
        from fitkit.extras.streamed_predictions import run_streamed

        with computing(self, verb):
            arguments = _prepared(self, "predict", arguments)
            return self._launcher().launch(verb, run_streamed, self, arguments, receiver)

    def _launcher(self) -> Launcher:
        """Return what brings a call to every rank. Within a run (in a callback) all ranks are
        here.
        """
        strategy = self._fitkit.compilation.strategy
        check_outside_of_loop(strategy)
        inside = strategy.collectives.world_size > 1
        return InlineLauncher() if inside else strategy.launcher

    # ------------------------------------------------------------------ single batches

    @overload
    def train_on_batch(
        self,
        x: Arrays,
        y: Arrays | None = None,
        sample_weight: Arrays | None = None,
        class_weight: Mapping[int, float] | None = None,
        *,
        return_dict: Literal[True],
    ) -> dict[str, Any]: ...

    @overload
    def train_on_batch(
        self,
        x: Arrays,
        y: Arrays | None = None,
        sample_weight: Arrays | None = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: Literal[False] = False,
    ) -> Evaluated: ...

    @overload
    def train_on_batch(
        self,
        x: Arrays,
        y: Arrays | None = None,
        sample_weight: Arrays | None = None,
        class_weight: Mapping[int, float] | None = None,
        *,
        return_dict: bool,
    ) -> Any: ...

    @verb_arguments
    def train_on_batch(
        self,
        x: Arrays,
        y: Arrays | None = None,
        sample_weight: Arrays | None = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Make one update on one batch. Layers in evaluation mode stay in it, as in `fit`.

        Learning-rate schedulers and `accumulate_grad_batches` have no effect here.

        Args:
            x, y, sample_weight, class_weight: one batch of arrays or tensors, as in `fit`.
            return_dict: as in `evaluate`.

        Returns:
            The batch's loss and metrics before the update, in the form that `evaluate` returns.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 1))
            >>> model.compile("adam", "mse")
            >>> for step in range(3):
            ...     loss = model.train_on_batch(torch.ones(8, 4), torch.ones(8))
        """
        weights = class_weights_of(class_weight)
        return_dict = check_flag("return_dict", return_dict)
        if not self._fitkit.fit_state.optimizers:
            _build(self, "fit", lambda: x)
        values = fit_batch(self, (x, y, sample_weight), weights)
        return _as_asked(values, return_dict)

    @overload
    def test_on_batch(
        self,
        x: Arrays,
        y: Arrays | None = None,
        sample_weight: Arrays | None = None,
        *,
        return_dict: Literal[True],
    ) -> dict[str, Any]: ...

    @overload
    def test_on_batch(
        self,
        x: Arrays,
        y: Arrays | None = None,
        sample_weight: Arrays | None = None,
        return_dict: Literal[False] = False,
    ) -> Evaluated: ...

    @overload
    def test_on_batch(
        self,
        x: Arrays,
        y: Arrays | None = None,
        sample_weight: Arrays | None = None,
        *,
        return_dict: bool,
    ) -> Any: ...

    @verb_arguments
    def test_on_batch(
        self,
        x: Arrays,
        y: Arrays | None = None,
        sample_weight: Arrays | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Compute the loss and metrics of one batch, in the form that `evaluate` returns.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 1))
            >>> model.compile("adam", "mse")
            >>> sorted(model.test_on_batch(torch.ones(8, 4), torch.ones(8), return_dict=True))
            ['loss']
        """
        return_dict = check_flag("return_dict", return_dict)
        values = evaluate_batch(self, (x, y, sample_weight))
        return _as_asked(values, return_dict)

    @verb_arguments
    def predict_on_batch(self, x: Arrays) -> NumpyOutput:
        """Compute the net's outputs for one batch, as NumPy arrays.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 1))
            >>> model.compile("adam", "mse")
            >>> model.predict_on_batch(torch.ones(8, 4)).shape
            (8, 1)
        """
        outputs: NumpyOutput = predict_batch(self, x)
        return outputs

    # ------------------------------------------------------------------ what a run left

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, or the first of several. It is built on first use after `compile`.

        It is torch's own optimizer, or the object that you gave. As in Keras, you can read and set
        its `learning_rate` (or `lr`) for all parameter groups. A scheduler continues from the rate
        that you set, as its class does.

        Raises:
            ConfigurationError: the optimizer can't be built. It is never an AttributeError, which
                `nn.Module` would hide.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 1))
            >>> model.compile("adam", "mse")
            >>> model.optimizer.learning_rate = 0.01
            >>> model.optimizer.param_groups[0]["lr"]
            0.01
        """
        return with_rate(self._made_optimizers()[0])

    @property
    def metrics_names(self) -> list[str]:
        """The names of the values that `evaluate` returns, in its order.

        Names that depend on the net's outputs are known only after the first pass over data.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 1))
            >>> model.compile("adam", "mse", metrics=["mae"])
            >>> model.metrics_names
            ['loss', 'mae']
        """
        return self._fitkit.log_names or ["loss", *self._fitkit.compilation.metrics.known_names]

    @property
    def effective_batch_size(self) -> int | None:
        """Samples per step, over all devices and nodes. None before `fit` has seen data.

        Accumulation isn't counted: an update of `accumulate_grad_batches=4` has four times as many.
        If you gave `compile(effective_batch_size=…)`, it is that number: samples per update.
        """
        asked = self._fitkit.compilation.given.effective_batch_size
        if asked is not None:
            return asked
        if self._fitkit.batch_size is None:
            return None
        return self._fitkit.batch_size * self._fitkit.compilation.strategy.data_rank_count

    # ------------------------------------------------------------------ Keras's looks at weights

    get_weights: GivesWay = GivesWay(model_names.get_weights)
    set_weights: GivesWay = GivesWay(model_names.set_weights)
    count_params: GivesWay = GivesWay(model_names.count_params)
    layers: GivesWay = GivesWay(model_names.layers, is_property=True)
    load_from_checkpoint: NotHere = NotHere()

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """As torch's, which refuses existing names: a layer may have a name from Keras."""
        if isinstance(inspect.getattr_static(type(self), name, None), GivesWay):
            self._modules.setdefault(name, None)
        super().add_module(name, module)

    # ------------------------------------------------------------------ looks and files

    @only_known_arguments
    def summary(
        self,
        example: Arrays | None = None,
        *,
        input_shape: Any = None,
        depth: int | None = None,
        print_fn: Callable[[str], object] | None = None,
    ) -> None:
        """Print the net's layers with their parameters, and their shapes where known.

        Args:
            example: a batch of inputs. It adds output shapes, memory and multiply-adds.
            input_shape: the shape of one sample, instead of an example.
            depth: levels of nesting to show. Default None: all.
            print_fn: a function that gets the text instead of printing it.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 1))
            >>> model.compile("adam", "mse")
            >>> model.summary(input_shape=(4,), print_fn=lambda text: None)
        """
        from fitkit.extras.summary import of_training, summarize

        calls = example is not None or input_shape is not None
        with in_use(self, "summary", alone=True) if calls else nullcontext():
            summary = summarize(
                self.net if self._weights_module() is self.net else self,
                example,
                input_shape=input_shape,
                depth=depth,
                run=lambda net, inputs: caller_of(self)(net, inputs),
                **of_training(self),
            )
        summary.print(print_fn=print_fn)

    @only_known_arguments
    def export(
        self,
        path: FilePath,
        format: Literal["torch_export", "onnx"] | None = None,
        example: Arrays | None = None,
        *,
        input_shape: Any = None,
        dynamic_batch: bool = True,
        dynamic_shapes: Any = None,
        opset_version: int | None = None,
        check: bool = True,
    ) -> None:
        """Write the net, as it computes in evaluation mode, to a file that runs without fitkit.

        The model stays unchanged. Before the file takes its place, fitkit runs it on batches of
        two sizes and compares the outputs with the net's.

        Args:
            path: where to write. An existing file is replaced completely or not at all.
            format: `"torch_export"` (`.pt2`, for `torch.export.load(path).module()`) or `"onnx"`
                (`.onnx`). Default: by the path's suffix.
            example: a batch of inputs, as for `predict`.
            input_shape: the shape of one sample instead, such as `(1, 28, 28)`. Pass a dict or
                tuple of shapes for several inputs.
            dynamic_batch: whether the file takes batches of any size (default), or only of the
                example's size.
            dynamic_shapes: other free dimensions, as `torch.export.export` takes them. The file is
                then compared on the example.
            opset_version: the version of ONNX's operators. Default: torch's choice.
            check: whether to compare the file with the net. Default True.

        Raises:
            ConfigurationError: torch can't export the net (the message gives its reason), or the
                file computes something else.
            MissingPackageError: ONNX needs `pip install 'torch-fitkit[onnx]'`.
            CheckpointError: the file can't be written. An existing file is untouched.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 1))
            >>> model.compile("adam", "mse")
            >>> model.export("model.pt2", example=torch.ones(8, 4))
            >>> torch.export.load("model.pt2").module()(torch.ones(3, 4)).shape
            torch.Size([3, 1])
        """
        from fitkit.extras.export import export

        with in_use(self, "export", alone=True):
            export(
                self if self.net is None or type(self).forward is not Model.forward else self.net,
                path,
                format,
                example,
                caller=caller_of(self),
                input_shape=input_shape,
                dynamic_batch=dynamic_batch,
                dynamic_shapes=dynamic_shapes,
                opset_version=opset_version,
                check=check,
            )

    def _repr_html_(self) -> str:
        """Return the view in a notebook: the compiled arguments, the layers and their
        parameters.
        """
        from fitkit.extras.pictures.html import model_html
        from fitkit.extras.summary import summarize

        net = self._weights_module()
        return model_html(net._get_name(), self._fitkit.compilation.given.as_dict(), summarize(net))

    @only_known_arguments
    def save(self, path: FilePath) -> None:
        """Save weights, optimizers, schedulers, progress and history to one file.

        Args:
            path: a name that ends in `.h5`, or a URL (`s3://…`, see docs/checkpoints.md). An
                existing file is replaced completely or not at all. A name that ends in `.dcp`
                makes a folder, to which every rank writes its own part.

        Ranks:
            Collective within a run (in a callback): all ranks call it and rank 0 writes. For a
            folder, all ranks write.

        Raises:
            CheckpointError: the file can't be written. An existing file is untouched.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 1))
            >>> model.compile("adam", "mse")
            >>> model.save("model.h5")
            >>> model.load("model.h5")
        """
        check_outside_of_loop(self._fitkit.compilation.strategy)
        save(self, path)

    @only_known_arguments
    def load(self, path: FilePath) -> None:
        """Restore what `save` wrote, into a model that is built and compiled the same way.

        To continue a training, call `fit(…, resume_from=path)`, which loads the file itself.

        Args:
            path: a file or folder that `save` wrote.

        Raises:
            FileNotFoundError: the file doesn't exist.
            CheckpointError: the file is damaged, or not for this model. The model is unchanged.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 1))
            >>> model.compile("adam", "mse")
            >>> model.save("before.h5")
            >>> history = model.fit(torch.ones(8, 4), torch.ones(8), verbose=0)
            >>> model.load("before.h5")
        """
        with in_use(self, "load", alone=True):
            load(self, path)

    @only_known_arguments
    def save_weights(self, path: FilePath, *, trainable_only: bool = False) -> None:
        """Save the weights to a file. An existing file is replaced completely or not at all.

        Args:
            path: the suffix sets the format: `.h5`, `.safetensors`, `.pt` or `.pth`. If the model
                wraps a net, the weights get the net's own names.
            trainable_only: whether to leave out parameters that don't learn (`requires_grad` is
                False). This gives an adapter's file, without its base model. `load_weights` loads
                it into the base model. Default False.

        Raises:
            CheckpointError: the file can't be written. An existing file is untouched.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 1))
            >>> model.compile("adam", "mse")
            >>> model.save_weights("weights.safetensors")
        """
        trainable_only = check_flag("trainable_only", trainable_only)
        check_outside_of_loop(self._fitkit.compilation.strategy)
        save_weights(self, path, trainable_only=trainable_only)

    @only_known_arguments
    def load_weights(
        self, path: FilePath, *, strict: bool = True, skip_mismatch: bool = False
    ) -> Any:
        """Load weights from a file.

        Args:
            path: a file from `save_weights` or `save`, a `.safetensors` file, or a state dict
                from `torch.save` (only tensors in it are unpickled).
            strict: whether missing or unexpected names are an error. Default True.
            skip_mismatch: whether to skip weights of another shape, with a warning. Default False.

        Returns:
            The names that were `missing` in the file, `unexpected` and `skipped`. A file from
            `trainable_only=True` leaves the rest of the net unchanged and lists it as `missing`.

        Raises:
            FileNotFoundError: the file doesn't exist.
            CheckpointError: the file is damaged, or not for this net. The model is unchanged.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 1))
            >>> model.compile("adam", "mse")
            >>> model.save_weights("weights.pt")
            >>> missing = fitkit.Model(torch.nn.Linear(4, 1)).load_weights("weights.pt")
        """
        from fitkit.checkpoint import fitting_weights, open_weights

        precision = self._fitkit.compilation.strategy.precision
        widths = [p.dtype.itemsize for p in self.parameters() if p.is_floating_point()]
        with in_use(self, "load_weights", alone=True):
            if widths and precision.input_dtype(self).itemsize > max(widths):
                # First, or the file's weights would lose digits in a narrower module.
                precision.convert(self)
            check_flag("strict", strict)
            check_flag("skip_mismatch", skip_mismatch)
            with open_weights(path) as source, undone_on_error() as undo:
                found = self._loaded(source, source.beside, undo)
                return fitting_weights(
                    found,
                    os.fspath(path),
                    self._weights_module(),
                    strict=strict and self._loads_strictly,
                    skip_mismatch=skip_mismatch,
                ).assign()


def load_model(path: FilePath, net: nn.Module = None) -> Model:  # type: ignore[assignment]
    """Load a compiled model from a checkpoint, if its loss and metrics were given by name.

    The optimizer must have been given by name, too, or as an instance of a `torch.optim` class.

    Args:
        path: a file that `Model.save` wrote. fitkit looks up the names in it among its own;
            nothing is imported or unpickled.
        net: the network, built as it was when the file was saved.

    Returns:
        The model, compiled and with the saved state.

    Raises:
        FileNotFoundError: the file doesn't exist.
        CheckpointError: the file is damaged or not for this net. Or the model was compiled with
            objects, which no file can hold; the message says what to compile.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> model.save("model.h5")
        >>> again = fitkit.load_model("model.h5", torch.nn.Linear(4, 1))
        >>> bool((again.net.weight == model.net.weight).all())
        True
    """
    if isinstance(net, Model):
        raise ArgumentTypeError(
            f"net is already a fitkit.Model. Write net.load({describe(path)}) instead."
        )
    return restored_model(path, net, Model)


def _takes_the_net_alone(
    kind: type[Model], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ArgumentTypeError:
    """Return the error for a model that was made with more than a net."""
    names = [name for name in kwargs if name != "net"]
    given = ", ".join([f"{name}=…" for name in names] or map(describe, args[1:]))
    verb = "fit" if any(name in inspect.signature(Model.fit).parameters for name in names) else ""
    written = given if names else "optimizer, loss"
    return ArgumentTypeError(
        f"{kind.__name__}() takes the net alone, but was given {given}, too. Make the model first, "
        f"then write model.{verb or 'compile'}({written})."
    )


def _check_wraps(kind: type[Model], net: Any) -> None:
    """Refuse a subclass that would pass over its net's own training step.

    Raises:
        ConfigurationError: with what to write instead.
    """
    if kind.training_step is Module.training_step and hasattr(net, "training_step"):
        raise ConfigurationError(
            f"{type(net).__name__} has its own training_step, which {kind.__name__} doesn't call. "
            f"Write fitkit.Model(net), or define {kind.__name__}.training_step.",
            code="FK083",
        )


def _prepared(model: Model, verb: str, arguments: Arguments) -> Arguments:
    """Check that a model can run the call. Returns the arguments with their data sources."""
    check_steps(model)
    check_callbacks(arguments.callback_list.callbacks)
    has_steps = any(overridden(model, f"{stage}_step") for stage in STAGES)
    if model.net is None and type(model).forward is Module.forward and not has_steps:
        model.forward()  # says what is missing
    found = _with_sources(model, verb, arguments)
    if (guest := guest_of(model)) is not None:
        guest.check(model, verb)
        if isinstance(found, FitArguments) and found.held_out:
            guest.check(model, "evaluate")
    else:
        meet_parts(model, warns=not has_steps)
    _build(model, verb, lambda: first_inputs(found.source))
    return found


def _build(model: Model, verb: str, batch: Callable[[], Any]) -> None:
    """Let a first batch build what it gives the shapes of, before any rank begins: a network of
    another library, and to learn, lazy layers.
    """
    if (guest := guest_of(model)) is not None:
        guest.prepare(batch)
        return
    held = itertools.chain(model.parameters(), model.buffers())
    learns_as_compiled = verb == "fit" and not overridden(model, "training_step")
    if learns_as_compiled and any(map(nn.parameter.is_lazy, held)):
        predict_batch(model, batch())


def _with_sources(model: Model, verb: str, arguments: Arguments) -> Arguments:
    """Return a call's arguments with their data sources."""
    compilation = model._fitkit.compilation
    if (opened := opened_data(model, verb, arguments)) is not None:
        arguments = arguments.reading(opened)
    return arguments.prepared(
        compilation.strategy.precision.input_dtype(model),
        compilation.strategy.data_rank_count,
        compilation.given.effective_batch_size,
    )


def _resumed(
    model: Model, arguments: FitArguments, path: FilePath
) -> tuple[FitArguments, Scope | None]:
    """Load a checkpoint. Returns the arguments that continue where the saved run stopped, and what
    undoes the load, if something may yet refuse to continue.
    """
    # A net has the weights for those of the file only once it is built.
    _build(model, "fit", lambda: first_inputs(_with_sources(model, "fit", arguments).source))
    for callback in arguments.callback_list.callbacks:
        callback.prepare_optimizers(model)

    may_fail = False

    def agree(progress: Progress | None) -> bool:
        """Refuse other data, once the file is checked and before anything changes."""
        nonlocal arguments, may_fail
        if progress is not None:
            arguments = arguments.resumed_at(progress)
        arguments = _prepared(model, "fit", arguments)
        if progress is not None:
            check_data(arguments.source, progress)
            has_engine = model._fitkit.compilation.strategy.has_engine  # divides the weights
            may_fail = not has_engine and may_refuse(arguments.callback_list.callbacks, progress)
        return may_fail

    undo = load(model, path, agree)
    return arguments, undo if may_fail else None


def _as_asked(values: dict[str, Any], return_dict: bool) -> Any:
    """Return the values as a dict, as a list, or the loss alone."""
    if return_dict:
        return Results(values)
    found = list(values.values())
    return found[0] if len(found) == 1 else found or None
