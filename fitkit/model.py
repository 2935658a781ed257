"""Model: any network, with the verbs compile, fit, evaluate and predict."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, overload

import torch
from torch import nn
from torch.optim import Optimizer

from fitkit import model_names, trees
from fitkit.arguments import check_flag, describe, only_known_arguments
from fitkit.callbacks.base import Callbacks
from fitkit.callbacks.history import History
from fitkit.data.class_weights import ClassWeights
from fitkit.distributed.launchers import InlineLauncher, Launcher
from fitkit.distributed.precision import Precision
from fitkit.distributed.strategies import Strategy
from fitkit.errors import ArgumentTypeError
from fitkit.hooks import STAGES, check_callbacks, check_steps, evaluation_stage, overridden
from fitkit.logging_options import is_metric
from fitkit.model_names import GivesWay, NotHere, check_attribute, check_definitions, public_names
from fitkit.modes import in_use
from fitkit.module import Module
from fitkit.optimizers import with_rate
from fitkit.pictures.html import Results
from fitkit.training.evaluate import run_evaluate, run_predict
from fitkit.training.fit import run_fit
from fitkit.training.on_batch import KeptSteps, evaluate_batch, fit_batch, predict_batch
from fitkit.training.optimizing import FitState
from fitkit.training.own_step import StepContexts
from fitkit.training.resume import Progress, check_data, checkpoint_to_resume
from fitkit.training.settings import Compilation, EvaluateArguments, FitArguments
from fitkit.training.snapshot import load, restored_model, save, save_weights
from fitkit.training.step import caller_of
from fitkit.training.surroundings import compile_net, surroundings
from fitkit.typing import (
    UNSET,
    AcceleratorName,
    Arrays,
    Data,
    DevicesArgument,
    FilePath,
    LossArgument,
    LossWeights,
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


@dataclasses.dataclass
class Record:
    """What fitkit itself keeps on a model, under one name, so that all others are the user's.

    Attributes:
        compilation: what `compile` was given, and what it resolved to.
        fit_state: optimizers, schedulers and counters, over several calls of `fit`.
        contexts: what runs on the model right now, in which thread.
        batch_size: of the last `fit`; None before.
        kept_steps: what `train_on_batch` and its kin have built.
        log_names: of the values that the last pass gave; None before.
        hidden_names: logged with `prog_bar=False`, which the progress bar leaves out.
        compiled_update: what `jit_compile` has compiled of the training's steps; None before.
        compiled_passes: the same of evaluations and predictions.
    """

    compilation: Compilation
    fit_state: FitState
    contexts: StepContexts
    kept_steps: KeptSteps = dataclasses.field(default_factory=KeptSteps)
    batch_size: int | None = None
    log_names: list[str] | None = None
    hidden_names: set[str] = dataclasses.field(default_factory=set)
    compiled_update: Any = None
    compiled_passes: dict[str, Any] = dataclasses.field(default_factory=dict)


class Model(Module):
    """A network that can be trained, evaluated and used with one line each.

    Args:
        net: the network; any `torch.nn.Module`. Calling the model calls it. A subclass may
            define its own layers and `forward` instead, and leave it out.

    A subclass may also override the hooks of `Module` (`training_step`, `configure_optimizers`, …)
    and call what it offers (`log`, `all_gather`, `manual_backward`, …).

    Attributes:
        net: the network that was given, or None.
        history: the `History` of the last `fit`; None before.
        stop_training: set it in a callback to end `fit` after the current batch or epoch.
        stop_evaluating, stop_predicting: the same for `evaluate` (or a validation) and `predict`.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 3))
        >>> model.compile("adam", "cross_entropy", metrics=["accuracy"])
        >>> x, y = torch.randn(64, 4), torch.randint(3, (64,))
        >>> history = model.fit(x, y, epochs=2, verbose=0)
        >>> model.predict(x[:5]).shape
        (5, 3)

    Raises:
        ArgumentTypeError: `net` isn't a module.
    """

    _fitkit: Record
    history: History | None

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self._fitkit = Record(Compilation.default(), FitState(), StepContexts())
        if isinstance(net, type) and issubclass(net, nn.Module):
            raise ArgumentTypeError(
                f"net is the class {net.__name__}, not a network. Write {net.__name__}(…)."
            )
        if net is not None and not isinstance(net, nn.Module):
            raise ArgumentTypeError(f"net={describe(net)} must be a torch.nn.Module.")
        if isinstance(net, Model):
            raise ArgumentTypeError("net is a fitkit.Model already; use it as it is.")
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

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As torch's; of a wrapped net its own state dict is taken too, without the prefix.

        Args:
            state_dict: names as in `model.state_dict()`, or as in `model.net.state_dict()`.
            strict: whether missing or unexpected names are an error. Default True.
            assign: whether the tensors themselves become the weights. Default False: copied.
        """
        module: nn.Module = self._weights_module()
        if module is not self and isinstance(state_dict, Mapping):
            outer, inner = self.state_dict().keys(), module.state_dict().keys()
            if outer.isdisjoint(state_dict) and not inner.isdisjoint(state_dict):
                return module.load_state_dict(state_dict, strict=strict, assign=assign)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    load_state_dict.copies_as_torch = True  # type: ignore[attr-defined] # for checkpoint/weights.py

    # ------------------------------------------------------------------ compile

    @only_known_arguments
    def compile(
        self,
        optimizer: OptimizerArgument | Unset = UNSET,
        loss: LossArgument | Unset = UNSET,
        metrics: MetricsArgument | Unset = UNSET,
        *,
        learning_rate: float | Unset | None = UNSET,
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
        memory_format: Literal["channels_last"] | Unset | None = UNSET,
        steps_per_execution: int | Unset = UNSET,
        effective_batch_size: int | Unset | None = UNSET,
        gpus: DevicesArgument | Unset | None = UNSET,
    ) -> None:
        """Say how to train, and on what. All is checked here; nothing runs yet.

        Every argument is optional. What a call leaves out keeps what an earlier call set, else
        its default. Replaces `nn.Module.compile`; `jit_compile=True` asks for `torch.compile`.

        Args:
            optimizer: a name (any `torch.optim` class, in any case, with torch's defaults), a
                dict of a name and other settings (`{"name": "adam", "eps": 1e-5}`), a
                class, a `functools.partial`, a factory `params -> Optimizer`, an instance over
                this model's parameters, or a list of instances over disjoint parts of them,
                which step together. `"muon"` is Muon for hidden matrices and AdamW for all else
                (`fitkit.optimizers.muon`). Default: the subclass's `configure_optimizers`,
                else `"adam"`. Giving one begins anew; a call without it keeps the optimizer and
                its state.
            loss: a name, an `nn.Module`, a callable `(prediction, target) -> scalar`; lists and
                dicts of them for several outputs, nested as these are. torch's names take what
                torch's losses take (`"cross_entropy"`: logits), Keras's names what Keras's take
                (`"sparse_categorical_crossentropy"`: probabilities). Default None: the net's
                output must carry `.loss`.
            metrics: names, `torchmetrics.Metric` objects (used through copies) or callables
                `(prediction, target)`; a list, or by output as `loss`. Default none.
            learning_rate: of an optimizer given by name, class, partial or factory. Default
                the optimizer's own. Given alone it changes the rate and keeps the state.
            loss_weights: one weight an output, as `loss` is nested; the loss is their sum.
            weighted_metrics: metrics that count samples by their weight (the weighted mean).
            target: which entry of dict batches holds the targets, where the data give no `y`; the
                net gets the others. For several outputs a list of names or a dict
                `{output: name}`. Default None: `"labels"` or `"label"`, which the net gets, too.
            lr_scheduler: a name, class, partial, factory `optimizer -> scheduler` or instance;
                or a dict with `"scheduler"`, `"interval"` (`"epoch"` or `"step"`), `"frequency"`
                (of how many of these it moves once; default 1) and `"monitor"` (the log that
                `ReduceLROnPlateau` watches). Without an interval
                `OneCycleLR` and `CyclicLR` move at each update, others once an epoch. Names that
                need the training's length (`"cosine"`, `"one_cycle"`, `"polynomial"`) get it
                from each `fit` and begin anew with it; all others go on over several fits.
            devices: which devices; `"auto"` by default.
            accelerator: `"auto"` (default), `"cpu"`, `"gpu"`, `"cuda"`, `"mps"`.
            strategy: `"auto"` (default), a strategy's name, or an object.
            num_nodes: machines. Default 1.
            precision: `"32-true"` (default), `"64-true"`, `"16-mixed"` (or 16), `"bf16-mixed"`
                (or `"bf16"`), `"16-true"`, `"bf16-true"`, `"fp8-mixed"` (or `"fp8"`), or an object
                of `fitkit.precisions`. Mixed ones keep float32 weights and compute in the
                narrower type; 16-mixed scales the loss and leaves out updates whose
                gradients aren't finite. "-true" ones cast the net itself, with the next run or
                `load`;
                compiled back it gets its own dtypes again, without the digits rounded off.
                Losses and metrics are computed in float32 or more.
            accumulate_grad_batches: batches whose gradients make one update: their mean over
                samples, as of one larger batch. Default 1.
            gradient_clip_val: limit of the gradients; default none.
            gradient_clip_algorithm: `"norm"` (of all together; default) or `"value"`.
            sync_batchnorm: whether batch normalisation sees the batches of all ranks. Default
                False: each rank normalises its own.
            replace_sampler: whether a loader's sampler is dealt out among the ranks. Default True.
            benchmark: `torch.backends.cudnn.benchmark` for the length of each call; None
                (default) leaves it.
            deterministic: True, False or `"warn"`: torch's deterministic algorithms, for the
                length of each call; None (default) leaves them.
            jit_compile: True for `torch.compile` of the whole step (forward, loss, gradients,
                update), also of your own `training_step`, and of the net and loss in `evaluate` and
                `predict`, as far as that can be compiled; or a dict of its options.
            matmul_precision: `"highest"` (float32 throughout), `"high"` (TF32 on CUDA) or
                `"medium"` (bfloat16 where the device has kernels for it): of float32 matrix
                products, as `torch.set_float32_matmul_precision` means it, for the length of each
                call; None (default) leaves it.
            memory_format: `"channels_last"` lays out images and convolutions' weights so for the
                length of each call, which tensor cores compute faster; None (default) leaves it.
            gpus: the older spelling: None or 0 for the CPU, else `accelerator="gpu",
                devices=gpus`.
            scale_lr: `"linear"` or `"sqrt"`: multiply the rate by the number of ranks, or its
                root. Default None: not at all.
            warmup_epochs: epochs (or a fraction) over which the rate rises to that, from the
                unscaled rate (from 0 where nothing is scaled); a scheduler waits. Default none.
            auto_select_gpus: whether a count in `devices` (or -1) means GPUs that nobody else
                uses, the freest first; as `fitkit.find_usable_cuda_devices` does.
            log_gpu_memory: `"all"` or `"min_max"`: the GPUs' memory among the epoch's logs, as
                `fitkit.callbacks.DeviceStatsMonitor` gives it. Default None.
            steps_per_execution: batches between two calls of the callbacks' batch hooks, in
                `fit`, `evaluate` and `predict`: a hook gets the first batch's number at the
                beginning, the last one's (with the logs then) at the end. Default 1.
            effective_batch_size: samples that an update of `fit` sees, over all devices. The
                batch of each rank, of `fit`'s `batch_size` samples at the most, and the number of
                batches that are accumulated follow from it, so the updates are the same on any
                number of devices. A `DataLoader` keeps its batches. Default None.

        Raises:
            ConfigurationError, ArgumentTypeError: something that can't be; the model stays
                compiled as it was.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 3))
            >>> model.compile("adamw", "cross_entropy", metrics=["accuracy"], learning_rate=3e-4)
            >>> model.compile(accelerator="cpu", devices=2)  # all else stays as it was
        """
        arguments = _given(locals())
        compilation = self._fitkit.compilation.updated(arguments, self)
        if jit_compile is not UNSET:
            compile_net(self, jit_compile)
        self._fitkit.compilation, self._fitkit.compiled_update = compilation, None
        self._fitkit.compiled_passes = {}
        if optimizer is not UNSET:
            self._fitkit.fit_state.drop_optimizers()
        if lr_scheduler is not UNSET:
            self._fitkit.fit_state.drop_schedulers()
        if any(given is not UNSET for given in (loss, metrics, weighted_metrics)):
            self._fitkit.log_names = None
        if learning_rate is not UNSET and learning_rate is not None:
            self._fitkit.fit_state.set_rate(learning_rate)

    # ------------------------------------------------------------------ the verbs

    @only_known_arguments
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
        """Train.

        Layers that you have put into evaluation mode (a backbone with frozen batch normalization)
        stay in it; a net that is in evaluation mode as a whole, every module of it, trains. All
        modes are as before at the end.

        Args:
            x: a `DataLoader`, a `Dataset`, arrays or tensors (or a tuple or dict of them, with
                `y`), or any iterable of batches `(x, y)` or `(x, y, sample_weight)`. A dict of
                inputs goes to the net by keyword.
            y: the targets of arrays: (N, ...), or a tuple, list or dict for several outputs.
            batch_size: samples in a batch of arrays or a Dataset, in each process; with
                `compile(effective_batch_size=…)` the most samples of it. Default 32.
            epochs: the final epoch's number, as `initial_epoch` counts. Default 1.
            verbose: 0 silent, 1 a progress bar, 2 a line an epoch; `"auto"` (default): 1 in a
                terminal or notebook, else 2.
            callbacks: a callback or a list of them.
            validation_split: the fraction at the data's end that validates, cut off before
                shuffling. Default 0.
            validation_data: `(x, y)`, `(x, y, sample_weight)`, a loader or a Dataset; wins over
                `validation_split`.
            shuffle: whether arrays and Datasets are read in a new order each epoch (default);
                `"batch"` permutes within each batch only.
            class_weight: class number → weight, for training only; others weigh 1.
            sample_weight: (N,) weights of arrays' samples. Each sample's loss is multiplied by
                its weight, and the sum is divided by the number of samples.
            initial_epoch: the first epoch's number. Default 0.
            steps_per_epoch: batches in an epoch; the next epoch goes on where the last one
                stopped, and data that can be read again start anew at their end. Default None:
                one pass.
            validation_steps: batches of each validation. Default None: all.
            validation_batch_size: default `batch_size`.
            validation_freq: validate after every so many epochs, or a list of epochs' numbers
                from 1; within epochs a fraction of the epoch's batches (0.2), or
                `{"batches": 100}`, and at epochs' ends. Default 1.
            resume_from: a checkpoint to go on from as if the training had never been cut, or
                `"last"` for the newest that the callbacks know (from the beginning where there
                is none). Give the data, the callbacks and `epochs` as before. What contradicts
                the file is refused before it is loaded, or named in a warning.

        Returns:
            The history: `history.history["loss"]` is a list with one float an epoch.

        Raises:
            ConfigurationError, ArgumentTypeError: something that can't be. Where it is seen
                only in the first batch, the model is as it was before.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 1))
            >>> model.compile("adam", "mse")
            >>> x = torch.randn(64, 4)
            >>> history = model.fit(x, x.sum(1), epochs=3, validation_split=0.25, verbose=0)
            >>> len(history.history["val_loss"])
            3
        """
        arguments = FitArguments(**_given(locals(), leave_out="resume_from"))
        with in_use(self, "fit", alone=True):
            path = checkpoint_to_resume(resume_from, arguments.callback_list.callbacks)
            if path is not None:
                for callback in arguments.callback_list.callbacks:
                    callback.prepare_optimizers(self)
                load(self, path, functools.partial(self._check_place, arguments))
            self._prepare(arguments)
            history: History = self._launcher().launch(run_fit, self, arguments)
        return history

    def _check_place(self, arguments: FitArguments, progress: Progress | None) -> None:
        """Let a fit begin where another was cut, if its data are the same."""
        if progress is not None:
            arguments.resumed, arguments.initial_epoch = progress, progress.epoch
        self._prepare(arguments)
        if progress is not None:
            check_data(arguments.source, progress)

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
        return_dict: bool = False,
    ) -> Any: ...

    @only_known_arguments
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
    ) -> Any:
        """The loss and the metrics over a data set, in evaluation mode and without gradients.

        Args:
            x, y, batch_size, sample_weight: as in `fit`.
            verbose: as in `fit`; `"auto"` shows a bar once it has taken a second.
            steps: the number of batches to read. Default None: all.
            callbacks: their test hooks are called.
            return_dict: whether to return a dict by name.

        Returns:
            The loss as a float; with metrics a list `[loss, metric, …]` in the order of
            `metrics_names`; with `return_dict` a dict. Means are over samples.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Identity())
            >>> model.compile(loss="mse", metrics=["mae"])
            >>> model.evaluate(torch.ones(8, 1), torch.zeros(8, 1), verbose=0, return_dict=True)
            {'loss': 1.0, 'mae': 1.0}
        """
        check_flag("return_dict", return_dict)
        arguments = EvaluateArguments(**_given(locals(), leave_out="return_dict"))
        with self._computing("evaluate"):
            self._prepare(arguments)
            values = self._launcher().launch(run_evaluate, self, arguments)
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
        as_numpy: bool,
    ) -> Any: ...

    @only_known_arguments
    def predict(
        self,
        x: Data,
        *,
        batch_size: int = 32,
        verbose: Verbose = "auto",
        steps: int | None = None,
        callbacks: Callbacks = None,
        as_numpy: bool = True,
    ) -> Any:
        """The net's outputs for all inputs, in their order.

        Args:
            x, batch_size: as in `fit`; targets in batches are not looked at.
            verbose, steps: as in `evaluate`.
            callbacks: their predict hooks are called.
            as_numpy: whether to return NumPy arrays (default) or tensors on the CPU.

        Returns:
            The structure that the net gives (tensor, tuple, dict), joined over the batches.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 3))
            >>> model.predict(torch.randn(100, 4), verbose=0).shape
            (100, 3)
        """
        check_flag("as_numpy", as_numpy)
        arguments = EvaluateArguments(**_given(locals(), leave_out="as_numpy"))
        with self._computing("predict"):
            self._prepare(arguments)
            outputs = self._launcher().launch(run_predict, self, arguments)
        return trees.to_numpy(outputs) if as_numpy else outputs

    def _computing(self, verb: str) -> AbstractContextManager[None]:
        """Surrounds a call that computes and changes nothing, beside which other threads may make
        such calls.

        Not where there are several processes or replicas, which take part in one call at a time,
        and not where steps of the model's own count in metrics that are part of the model.
        """
        strategy = self._fitkit.compilation.strategy
        alone = strategy.world.size > 1 or strategy.replicas > 1
        if not alone and verb in ("evaluate", "test_on_batch") and evaluation_stage(self):
            alone = any(map(is_metric, self.modules()))
        return in_use(self, verb, alone=alone)

    def _prepare(self, arguments: FitArguments | EvaluateArguments) -> None:
        """Check what a call needs of the model, and make its data's sources: once a call."""
        if arguments.source is not None:
            return
        strategy = self._fitkit.compilation.strategy
        check_steps(self)
        check_callbacks(arguments.callback_list.callbacks)
        has_steps = any(overridden(self, f"{stage}_step") for stage in STAGES)
        if self.net is None and type(self).forward is Module.forward and not has_steps:
            self.forward()  # says what is missing
        arguments.prepare(
            strategy.precision.input_dtype(self),
            strategy.data_rank_count,
            self._fitkit.compilation.effective_batch_size,
        )

    def _launcher(self) -> Launcher:
        """What brings a call to every rank; within a run (in a callback) all ranks are here."""
        strategy = self._fitkit.compilation.strategy
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
        return_dict: bool = False,
    ) -> Any: ...

    @only_known_arguments
    def train_on_batch(
        self,
        x: Arrays,
        y: Arrays | None = None,
        sample_weight: Arrays | None = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """One update on one batch; layers in evaluation mode stay so, as in `fit`.

        Learning-rate schedulers and `accumulate_grad_batches` take no part in it.

        Args:
            x, y, sample_weight, class_weight: one batch of arrays or tensors, as in `fit`.
            return_dict: as in `evaluate`.

        Returns:
            The batch's loss and metrics before the update, as `evaluate` returns them.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 1))
            >>> model.compile("adam", "mse")
            >>> for step in range(3):
            ...     loss = model.train_on_batch(torch.ones(8, 4), torch.ones(8))
        """
        weights = None if class_weight is None else ClassWeights(class_weight)
        check_flag("return_dict", return_dict)
        with in_use(self, "train_on_batch", alone=True), surroundings(self, "train_on_batch"):
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
        return_dict: bool = False,
    ) -> Any: ...

    @only_known_arguments
    def test_on_batch(
        self,
        x: Arrays,
        y: Arrays | None = None,
        sample_weight: Arrays | None = None,
        return_dict: bool = False,
    ) -> Any:
        """One batch's loss and metrics, as `evaluate` returns them.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 1))
            >>> model.compile("adam", "mse")
            >>> sorted(model.test_on_batch(torch.ones(8, 4), torch.ones(8), return_dict=True))
            ['loss']
        """
        check_flag("return_dict", return_dict)
        with self._computing("test_on_batch"), surroundings(self, "test_on_batch"):
            values = evaluate_batch(self, (x, y, sample_weight))
        return _as_asked(values, return_dict)

    @only_known_arguments
    def predict_on_batch(self, x: Arrays) -> NumpyOutput:
        """The net's outputs for one batch, as NumPy arrays.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 1))
            >>> model.compile("adam", "mse")
            >>> model.predict_on_batch(torch.ones(8, 4)).shape
            (8, 1)
        """
        with self._computing("predict_on_batch"), surroundings(self, "predict_on_batch"):
            return trees.to_numpy(predict_batch(self, x))

    # ------------------------------------------------------------------ what a run left

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer (the first of several); made at the first look (or `fit`) after `compile`.

        It is torch's, or the very object that was given. As in Keras its `learning_rate` (and
        `lr`) can be read, and set for all of its groups; a scheduler moves on from there as its
        class does.

        Raises:
            ConfigurationError: it can't be made; never an AttributeError, which
                `nn.Module` would hide.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 1))
            >>> model.compile("adam", "mse")
            >>> model.optimizer.learning_rate = 0.01
            >>> model.optimizer.param_groups[0]["lr"]
            0.01
        """
        return with_rate(self._fitkit.fit_state.optimizers_for(self)[0])

    @property
    def metrics_names(self) -> list[str]:
        """The names of what `evaluate` returns, in its order.

        Names that depend on the net's outputs are known after the first pass over data.

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
        """Samples in one step, over all devices and nodes; None before `fit` has seen data.

        Where `compile` was given it: samples in one update.
        """
        asked: int | None = self._fitkit.compilation.effective_batch_size
        if asked is not None:
            return asked
        if self._fitkit.batch_size is None:
            return None
        return self._fitkit.batch_size * self._fitkit.compilation.strategy.data_rank_count

    @property
    def device(self) -> torch.device:
        """This rank's device; inside a replica of `dp` that replica's."""
        replicas: torch.device | None = vars(self).get("_replica_device")
        return replicas or self._fitkit.compilation.strategy.device

    @property
    def device_ids(self) -> list[int]:
        """The indices of the run's devices, in rank order."""
        return list(self._fitkit.compilation.strategy.device_ids)

    @property
    def global_rank(self) -> int:
        """This process's rank among all."""
        return self._fitkit.compilation.strategy.world.rank

    @property
    def local_rank(self) -> int:
        """This process's rank among those of its node."""
        return self._fitkit.compilation.strategy.world.local_rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._fitkit.compilation.strategy.world.size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    # ------------------------------------------------------------------ Keras's looks at weights

    get_weights: GivesWay = GivesWay(model_names.get_weights)
    set_weights: GivesWay = GivesWay(model_names.set_weights)
    count_params: GivesWay = GivesWay(model_names.count_params)
    layers: GivesWay = GivesWay(model_names.layers, is_property=True)
    load_from_checkpoint: NotHere = NotHere()

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """As torch's, which refuses names that there are: a layer may have a name of Keras's."""
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
        """Print the net's layers with their parameters, and shapes where they can be known.

        Args:
            example: a batch of inputs; adds output shapes, memory and multiply-adds.
            input_shape: the shape of one sample, instead of an example.
            depth: levels of nesting to show. Default None: all.
            print_fn: called with the text instead of printing it.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 1))
            >>> model.compile("adam", "mse")
            >>> model.summary(input_shape=(4,), print_fn=lambda text: None)
        """
        from fitkit.summary import summarize

        calls = example is not None or input_shape is not None
        with in_use(self, "summary", alone=True) if calls else nullcontext():
            summary = summarize(
                self.net if self._weights_module() is self.net else self,
                example,
                input_shape=input_shape,
                depth=depth,
                run=lambda net, inputs: caller_of(self)(net, inputs),
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

        The model stays as it is. The file is run on batches of two sizes and compared with the
        net before it takes its place.

        Args:
            path: an existing file is replaced, whole or not at all.
            format: `"torch_export"` (`.pt2`, for `torch.export.load(path).module()`) or `"onnx"`
                (`.onnx`). Default: by the path's suffix.
            example: a batch of inputs such as `predict` takes.
            input_shape: instead, the shape of one sample, as `(1, 28, 28)`, or a dict or tuple of
                shapes for several inputs.
            dynamic_batch: whether the file takes batches of any size (default), or of the
                example's only.
            dynamic_shapes: other free dimensions, as `torch.export.export` takes them; the file
                is compared on the example then.
            opset_version: of ONNX's operators. Default: torch's choice.
            check: whether the file is compared with the net. Default True.

        Raises:
            ConfigurationError: torch can't export the net (its reason is in the message), or
                the file computes something else.
            MissingPackageError: ONNX needs `pip install 'fitkit[onnx]'`.
            CheckpointError: the file can't be written; one that was there is untouched.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 1))
            >>> model.compile("adam", "mse")
            >>> model.export("model.pt2", example=torch.ones(8, 4))
            >>> torch.export.load("model.pt2").module()(torch.ones(3, 4)).shape
            torch.Size([3, 1])
        """
        from fitkit.export import export

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
        """How a notebook shows it: what was compiled, its layers, their parameters."""
        from fitkit.pictures.html import model_html
        from fitkit.summary import summarize

        net = self._weights_module()
        return model_html(type(net).__name__, self._fitkit.compilation.given, summarize(net))

    @only_known_arguments
    def save(self, path: FilePath) -> None:
        """Write weights, optimizers, schedulers, progress and history to one file.

        Args:
            path: its name ends in `.h5`; it may be a URL (`s3://…`, docs/checkpoints.md). An
                existing file is replaced, whole or not at all. A name
                that ends in `.dcp` asks for a folder to which every rank writes what it has.

        Ranks:
            Collective within a run (in a callback): all ranks call it, rank 0 writes (a folder:
            all do).

        Raises:
            CheckpointError: the file can't be written; one that was there is untouched.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 1))
            >>> model.compile("adam", "mse")
            >>> model.save("model.h5")
            >>> model.load("model.h5")
        """
        save(self, path)

    @only_known_arguments
    def load(self, path: FilePath) -> None:
        """Put back what `save` wrote, into a model that is built and compiled as it was.

        To go on with the training write `fit(…, resume_from=path)`, which loads by itself.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointError: damaged, or not for this model; the model is as it was.

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
        """Write the weights to a file, whole or not at all.

        Args:
            path: the suffix chooses the format: `.h5`, `.safetensors`, `.pt`, `.pth`. A wrapped
                net's weights get the net's own names.
            trainable_only: whether parameters that don't learn (`requires_grad`) are left out: an
                adapter's file, without its base. `load_weights` puts it back onto the base.
                Default False.

        Raises:
            CheckpointError: the file can't be written; one that was there is untouched.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 1))
            >>> model.compile("adam", "mse")
            >>> model.save_weights("weights.safetensors")
        """
        check_flag("trainable_only", trainable_only)
        save_weights(self, path, trainable_only=trainable_only)

    @only_known_arguments
    def load_weights(
        self, path: FilePath, *, strict: bool = True, skip_mismatch: bool = False
    ) -> Any:
        """Read weights from a file.

        Args:
            path: a file that `save_weights` or `save` wrote, a `.safetensors`, or a state dict
                from `torch.save` (which is never unpickled beyond tensors).
            strict: whether missing or unexpected names are an error. Default True.
            skip_mismatch: whether weights of another shape are left out, with a warning.
                Default False.

        Returns:
            The names that were `missing` in the file, `unexpected` and `skipped`. A file of
            `trainable_only=True` leaves the rest of the net as it is: those are `missing`.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointError: damaged, or not for this net; the model is as it was.

        Example:
            >>> import torch, fitkit
            >>> model = fitkit.Model(torch.nn.Linear(4, 1))
            >>> model.compile("adam", "mse")
            >>> model.save_weights("weights.pt")
            >>> missing = fitkit.Model(torch.nn.Linear(4, 1)).load_weights("weights.pt")
        """
        from fitkit.checkpoint import load_weights

        precision = self._fitkit.compilation.strategy.precision
        widths = [p.dtype.itemsize for p in self.parameters() if p.is_floating_point()]
        with in_use(self, "load_weights", alone=True):
            if widths and precision.input_dtype(self).itemsize > max(widths):
                # First: the file's weights would lose digits in a module that is narrower still.
                precision.convert(self)
            module = self._weights_module()
            return load_weights(path, module, strict=strict, skip_mismatch=skip_mismatch)

    def _weights_module(self) -> nn.Module:
        """The module whose names stand in weight files: the net, where the model only wraps it."""
        if isinstance(self.net, nn.Module) and list(self._modules) == ["net"]:
            beside = [*self.parameters(recurse=False), *self.buffers(recurse=False)]
            if not beside:
                return self.net
        return self


def load_model(path: FilePath, net: nn.Module = None) -> Model:  # type: ignore[assignment]
    """A compiled model from a checkpoint whose loss and metrics were given by name.

    The optimizer was given by name too, or as an instance of a class of `torch.optim`.

    Args:
        path: a file that `Model.save` wrote. Names in it are looked up among fitkit's own;
            nothing is imported or unpickled.
        net: the network, built as it was.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: damaged, not for this net, or objects were compiled, which no file can
            hold; the message says what to compile.

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
            f"net is a fitkit.Model already. Write net.load({describe(path)}) instead."
        )
    model: Model = restored_model(path, net, Model)
    return model


def _given(local: dict[str, Any], leave_out: str = "") -> dict[str, Any]:
    """A verb's arguments by name, from its local names at its begin."""
    return {name: value for name, value in local.items() if name not in ("self", leave_out)}


def _as_asked(values: dict[str, Any], return_dict: bool) -> Any:
    """A verb's values: a dict, a list, or the loss alone."""
    if return_dict:
        return Results(values)
    found = list(values.values())
    return found[0] if len(found) == 1 else found or None
