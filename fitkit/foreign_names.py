"""Names of Keras, Lightning, Accelerate and skorch that fitkit doesn't have, and what to write.

Names that fitkit has, too, aren't listed. The error for an unknown argument or attribute ends with
a row's sentence, and so does the warning about a method that is never called. The pages
docs/from-keras.md and docs/from-lightning.md show the rows.
"""

from __future__ import annotations

_LOADER_OPTIONS = "Give a DataLoader({}) as x."
_OTHER_VERB = "Write {} instead."
_IN_FIT = "Write fit({})."
_IN_COMPILE = "Write compile({}) before."
_IN_CALLBACKS = "Write fit(callbacks=[{}])."

_EPOCHS = "Write model.history, which lists each epoch's values by name."
_TRAINABLE = "Write [p for p in model.parameters() if p.requires_grad]."

_PASSES = {
    "max_epochs": "epochs=…",
    "max_steps": "steps_per_epoch=…",
    "limit_train_batches": "steps_per_epoch=…",
    "limit_val_batches": "validation_steps=…",
    "check_val_every_n_epoch": "validation_freq=…",
    "val_check_interval": 'validation_freq=0.25, or {"batches": 100} for a number of batches',
    "enable_progress_bar": "verbose=0",
    "resume_from_checkpoint": "resume_from=path",
    "fast_dev_run": "steps_per_epoch=1, validation_steps=1",
    "overfit_batches": "[batch], epochs=…",
    "enable_checkpointing": "callbacks=[ModelCheckpoint(…)]",
    "profiler": "callbacks=[fitkit.callbacks.Profiler()]",
    "detect_anomaly": "callbacks=[DetectNonFinite()]",
    "terminate_on_nan": "callbacks=[TerminateOnNaN()]",
    "logger": "callbacks=[fitkit.loggers.…]",
}
"""Arguments of Lightning's Trainer that are `fit`'s here."""

_READING = {
    ("Keras", "workers"): _LOADER_OPTIONS.format("num_workers=…"),
    ("Keras", "use_multiprocessing"): _LOADER_OPTIONS.format("num_workers=…"),
    ("Keras", "max_queue_size"): _LOADER_OPTIONS.format("prefetch_factor=…"),
    ("Lightning", "num_workers"): _LOADER_OPTIONS.format("num_workers=…"),
    ("Lightning", "datamodule"): "Give its loaders as x (and validation_data).",
    ("Lightning", "model"): "Leave it out: fit, evaluate and predict are methods of the model.",
    ("Lightning", "devices"): _IN_COMPILE.format("devices=…"),
    ("skorch", "device"): _IN_COMPILE.format('accelerator="cuda"'),
    **{
        ("Lightning", name): _IN_COMPILE.format(f"{name}=…")
        for name in ("accelerator", "strategy", "precision")
    },
}
"""Arguments of `fit`, `evaluate` and `predict` alike."""

_KERAS_SAVES = {
    ("Keras", "overwrite"): "An existing file is replaced completely or not at all.",
    ("Keras", "save_format"): "The suffix sets the format: .h5, .safetensors or .pt.",
    ("Keras", "include_optimizer"): "save includes it; save_weights doesn't.",
}

_ESTIMATOR = {
    ("skorch", "module"): "Write net=…; its parameters are net__….",
    ("skorch", "criterion"): "Write loss=….",
    ("skorch", "lr"): "Write learning_rate=….",
    ("skorch", "max_epochs"): "Write epochs=….",
    ("skorch", "train_split"): "Write validation_split=0.2. There is no split by default.",
    ("skorch", "device"): 'Write compile_options={"accelerator": "cuda"}.',
    ("skorch", "iterator_train"): 'Write fit_options={"shuffle": …}, batch_size=….',
    ("skorch", "iterator_valid"): 'Write fit_options={"validation_batch_size": …}.',
    ("skorch", "warm_start"): "Write partial_fit, which continues the training.",
}
_FITTED = {
    ("skorch", "history"): "Write history_, which lists each epoch's values by name.",
    ("skorch", "module_"): "Write net_.",
    ("skorch", "optimizer_"): "Write model_.optimizer.",
    ("skorch", "initialize"): "Leave it out: fit makes the net.",
    ("skorch", "save_params"): "Write model_.save_weights(path), or pickle the estimator.",
    ("skorch", "load_params"): "Write model_.load_weights(path), after a fit or partial_fit.",
}

FOREIGN: dict[str, dict[tuple[str, str], str]] = {
    "compile": {
        ("Keras", "lr"): "Write learning_rate=….",
        ("Keras", "run_eagerly"): "Leave it out: PyTorch is eager.",
        ("Keras", "auto_scale_loss"): 'Leave it out: precision="16-mixed" scales the loss.',
        ("Keras", "distribute"): "Write devices=2.",
        ("Keras", "epochs"): _IN_FIT.format("epochs=…"),
        ("Keras", "batch_size"): _IN_FIT.format("batch_size=…"),
        ("Keras", "callbacks"): _IN_FIT.format("callbacks=[…]"),
        **{("Lightning", name): _IN_FIT.format(ours) for name, ours in _PASSES.items()},
        ("Lightning", "log_every_n_steps"): "Give a logger update_freq=n, which logs the mean of n "
        'losses, or update_freq="batch", which logs each.',
        ("Lightning", "enable_model_summary"): "Write model.summary().",
        ("Lightning", "default_root_dir"): "Give the callbacks that write files a path.",
        ("Lightning", "auto_lr_find"): "Write fitkit.tune.learning_rate(model, x, y).",
        ("Lightning", "auto_scale_batch_size"): "Write fitkit.tune.batch_size(model, x, y).",
        ("Lightning", "num_processes"): 'Write accelerator="cpu", devices=….',
        ("Lightning", "tpu_cores"): 'Write accelerator="tpu", devices=….',
        ("Lightning", "use_distributed_sampler"): "Write replace_sampler=….",
        ("Lightning", "replace_sampler_ddp"): "Write replace_sampler=….",
        ("Lightning", "amp_backend"): 'Write precision="16-mixed" or "bf16-mixed".',
        ("Lightning", "plugins"): "Give strategy=… or precision=… an object.",
        ("Accelerate", "mixed_precision"): 'Write precision="bf16-mixed" or "16-mixed".',
        ("Accelerate", "gradient_accumulation_steps"): "Write accumulate_grad_batches=….",
        ("Accelerate", "max_grad_norm"): "Write gradient_clip_val=….",
        ("Accelerate", "cpu"): 'Write accelerator="cpu".',
        ("Accelerate", "split_batches"): "Write effective_batch_size=….",
        ("Accelerate", "fsdp_plugin"): 'Write strategy="fsdp".',
        ("Accelerate", "deepspeed_plugin"): 'Write strategy="deepspeed".',
        ("Accelerate", "log_with"): _IN_CALLBACKS.format("fitkit.loggers.…"),
        ("Accelerate", "project_dir"): "Give the callbacks that write files a path.",
        ("Accelerate", "kwargs_handlers"): "Write strategy=fitkit.strategies.DDPStrategy(…).",
        ("Accelerate", "step_scheduler_with_optimizer"): 'Write lr_scheduler={"scheduler": …, '
        '"interval": "step"}.',
        ("Accelerate", "even_batches"): "Leave it out: ranks may have different numbers of "
        "samples.",
        ("Accelerate", "dispatch_batches"): "Leave it out: rank 0 reads plain iterables.",
        ("skorch", "criterion"): "Write loss=….",
        ("skorch", "train_split"): _IN_FIT.format("validation_split=0.2"),
        ("skorch", "iterator_train"): "Give fit a DataLoader.",
        ("skorch", "device"): 'Write accelerator="cuda".',
    },
    "fit": {
        **_READING,
        ("Keras", "nb_epoch"): "Write epochs=….",
        ("Keras", "lr"): _IN_COMPILE.format("learning_rate=…"),
        ("Keras", "optimizer"): _IN_COMPILE.format("optimizer=…"),
        ("Keras", "loss"): _IN_COMPILE.format("loss=…"),
        ("Keras", "metrics"): _IN_COMPILE.format("metrics=[…]"),
        ("Lightning", "accumulate_grad_batches"): _IN_COMPILE.format("accumulate_grad_batches=…"),
        ("Lightning", "gradient_clip_val"): _IN_COMPILE.format("gradient_clip_val=…"),
        **{("Lightning", name): _IN_FIT.format(ours) for name, ours in _PASSES.items()},
        ("Lightning", "train_dataloaders"): "Write fit(loader).",
        ("Lightning", "val_dataloaders"): "Write validation_data=loader.",
        ("Lightning", "ckpt_path"): "Write resume_from=path.",
        ("skorch", "train_split"): "Write validation_split=0.2.",
    },
    "evaluate": {
        **_READING,
        ("Keras", "metrics"): _IN_COMPILE.format("metrics=[…]"),
        ("Lightning", "dataloaders"): "Write evaluate(loader).",
        ("Lightning", "limit_test_batches"): "Write evaluate(steps=…).",
        ("Lightning", "ckpt_path"): "Write model.load(path) before.",
    },
    "predict": {
        **_READING,
        ("Lightning", "dataloaders"): "Write predict(loader).",
        ("Lightning", "limit_predict_batches"): "Write predict(steps=…).",
        ("Lightning", "ckpt_path"): "Write model.load(path) before.",
        ("Lightning", "return_predictions"): "Leave it out: predict returns them.",
    },
    "save": _KERAS_SAVES,
    "save_weights": _KERAS_SAVES,
    "load_weights": {
        ("Keras", "by_name"): "Weights are matched by name. Write strict=False to load a part of "
        "them.",
    },
    "fitkit.Model": {
        ("Keras", "weights"): "Write list(model.parameters()).",
        ("Keras", "variables"): "Write list(model.parameters()).",
        ("Keras", "trainable_weights"): _TRAINABLE,
        ("Keras", "trainable_variables"): _TRAINABLE,
        ("Keras", "get_layer"): "Write model.net.get_submodule(name).",
        ("Keras", "add"): "Make the net first: fitkit.Model(torch.nn.Sequential(…)).",
        ("Keras", "add_loss"): "Override training_step, which returns the loss.",
        ("Keras", "add_metric"): "Write self.log(name, value) in a step.",
        ("Keras", "get_config"): "PyTorch's nets are code: keep that, and save the weights.",
        ("Keras", "to_json"): "PyTorch's nets are code: keep that, and save the weights.",
        ("Keras", "fit_generator"): _OTHER_VERB.format("fit"),
        ("Keras", "evaluate_generator"): _OTHER_VERB.format("evaluate"),
        ("Keras", "predict_generator"): _OTHER_VERB.format("predict"),
        ("Keras", "predict_classes"): "Write model.predict(x).argmax(1).",
        ("Keras", "reset_metrics"): "Each pass resets its metrics.",
        ("Keras", "train_step"): "Override training_step(self, batch, batch_idx).",
        ("Keras", "input_shape"): "PyTorch's nets don't know it; model.summary(x) shows shapes.",
        ("Keras", "output_shape"): "PyTorch's nets don't know it; model.summary(x) shows shapes.",
        ("Lightning", "trainer"): "The model has is_global_zero, current_epoch, global_step and "
        "world_size itself. compile's lr_scheduler gets its length from fit.",
        ("Lightning", "logger"): "Write self.log(name, value); loggers are callbacks of fit.",
        ("Lightning", "hparams"): "Call self.save_hyperparameters() in __init__.",
        ("Lightning", "load_from_checkpoint"): "Build the model and write model.load(path) "
        "or load_weights(path). Or write fitkit.load_model(path, net).",
        ("Lightning", "callback_metrics"): _EPOCHS,
        ("Lightning", "logged_metrics"): _EPOCHS,
        ("Lightning", "to_onnx"): 'Write model.export("net.onnx").',
        ("Lightning", "to_torchscript"): 'Write model.export("net.pt2").',
        ("Lightning", "validate"): _OTHER_VERB.format("evaluate"),
        ("Lightning", "test"): _OTHER_VERB.format("evaluate"),
        ("Lightning", "train_dataloader"): "Give the data to fit(loader).",
        ("Accelerate", "prepare"): "Leave it out: fit moves and wraps what it needs.",
        ("Accelerate", "unwrap_model"): "Leave it out: the model is never wrapped; its net is net.",
        ("Lightning", "estimated_stepping_batches"): 'Write compile(lr_scheduler="one_cycle"), '
        "which gets its length from fit.",
        ("Accelerate", "gather"): "Write model.all_gather(value).",
        ("Accelerate", "gather_for_metrics"): "Leave it out: metrics cover all ranks' samples.",
        ("Accelerate", "is_main_process"): "Write model.is_global_zero.",
        ("Accelerate", "num_processes"): "Write model.world_size.",
        ("Accelerate", "process_index"): "Write model.global_rank.",
        ("Accelerate", "clip_grad_norm_"): "Write model.clip_gradients(optimizer, 1.0).",
        ("Accelerate", "is_local_main_process"): "Write model.local_rank == 0.",
        ("Accelerate", "local_process_index"): "Write model.local_rank.",
        ("Accelerate", "accumulate"): "Write compile(accumulate_grad_batches=…).",
        ("Accelerate", "backward"): "fit does it; in a training_step write self.manual_backward.",
        ("Accelerate", "autocast"): 'Leave it out: compile(precision="bf16-mixed") does it.',
        ("Accelerate", "reduce"): "Write for example model.all_gather(value).mean(0).",
        ("Accelerate", "wait_for_everyone"): "Leave it out: files are complete when the next call "
        "returns.",
        ("Accelerate", "save_state"): "Write model.save(path), or give fit a ModelCheckpoint.",
        ("Accelerate", "load_state"): "Write fit(resume_from=path), or model.load(path).",
        ("Accelerate", "skip_first_batches"): "Leave it out: fit(resume_from=path) skips them.",
        ("Accelerate", "save_model"): "Write model.save_weights(path).",
        ("Accelerate", "get_state_dict"): "Write model.net.state_dict().",
        ("Accelerate", "register_for_checkpointing"): "Give a callback a state_dict.",
        ("Accelerate", "init_trackers"): _IN_CALLBACKS.format("fitkit.loggers.…"),
        ("Accelerate", "end_training"): "Leave it out: loggers and workers end by themselves.",
        ("skorch", "partial_fit"): "Write model.fit again. It continues with the optimizer's "
        "state.",
        ("skorch", "predict_proba"): "Write fitkit.sklearn.Classifier(net), which has it.",
        ("skorch", "score"): "Write fitkit.sklearn.Classifier(net), or model.evaluate.",
        ("skorch", "module_"): "Write model.net.",
        ("skorch", "history_"): "Write model.history.",
        ("skorch", "save_params"): "Write model.save_weights(path), or model.save(path) for all.",
        ("skorch", "load_params"): "Write model.load_weights(path), or model.load(path) for all.",
    },
    "fitkit": {
        ("Keras", "Sequential"): "Write fitkit.Model(torch.nn.Sequential(…)).",
        ("Keras", "layers"): "Layers are torch.nn's.",
        ("Keras", "Input"): "Leave it out: PyTorch's nets need none.",
        ("Keras", "models"): "Write fitkit.Model and fitkit.load_model.",
        ("Keras", "applications"): "Nets come from torchvision, timm or Hugging Face.",
        ("Keras", "utils"): "Write torch.nn.functional.one_hot for to_categorical, and "
        "fitkit.set_seed for set_random_seed.",
        ("Keras", "mixed_precision"): 'Write compile(precision="bf16-mixed").',
        ("Keras", "distribution"): "Write compile(devices=2).",
        ("Keras", "backend"): "Write torch.",
        ("Keras", "ops"): "Write torch.",
        ("Lightning", "Trainer"): "Its arguments are compile's and fit's.",
        ("Lightning", "LightningModule"): "Write fitkit.Model.",
        ("Lightning", "LightningDataModule"): "Give the loaders to fit, evaluate and predict.",
        ("Lightning", "seed_everything"): "Write fitkit.set_seed.",
        ("Accelerate", "Accelerator"): "Its arguments are compile's; fit makes the steps.",
        ("Accelerate", "skip_first_batches"): "Leave it out: fit(resume_from=path) skips them.",
        ("Accelerate", "notebook_launcher"): "Leave it out: compile(devices=2) does it.",
        ("Accelerate", "find_executable_batch_size"): "Write fitkit.tune.batch_size(model, x, y).",
        ("skorch", "NeuralNet"): "Write fitkit.Model(net), or fitkit.sklearn.Classifier(net).",
        ("skorch", "NeuralNetClassifier"): "Write fitkit.sklearn.Classifier(net).",
        ("skorch", "NeuralNetRegressor"): "Write fitkit.sklearn.Regressor(net).",
    },
    "fitkit.callbacks": {
        ("Keras", "RemoteMonitor"): "Write LambdaCallback(on_epoch_end=…), which posts the logs.",
        ("Lightning", "TQDMProgressBar"): "Write ProgressBar, or fit(verbose=1).",
        ("Lightning", "RichProgressBar"): "Write ProgressBar, or fit(verbose=1).",
        ("Lightning", "ModelSummary"): "Write model.summary().",
        ("Lightning", "LearningRateFinder"): "Write fitkit.tune.learning_rate(model, x, y).",
        ("Lightning", "BatchSizeFinder"): "Write fitkit.tune.batch_size(model, x, y).",
        ("Lightning", "GPUStatsMonitor"): "Write DeviceStatsMonitor.",
        ("Lightning", "WeightAveraging"): "Write EMA, or StochasticWeightAveraging.",
        ("Lightning", "EMAWeightAveraging"): "Write EMA.",
        ("Lightning", "BaseFinetuning"): "Write GradualUnfreezing({epoch: names of modules}).",
        ("Lightning", "BasePredictionWriter"): "Write a callback with on_predict_batch_end.",
        ("Lightning", "OnExceptionCheckpoint"): "Write ModelCheckpoint(save_on_exception=True).",
        ("Lightning", "SpikeDetection"): "Write DetectLossSpike.",
        ("skorch", "EpochScoring"): "Write MetricCallback, or compile(metrics=[…]).",
        ("skorch", "Checkpoint"): "Write ModelCheckpoint.",
        ("skorch", "TrainEndCheckpoint"): "Write model.save(path) after fit.",
        ("skorch", "LoadInitState"): "Write fit(resume_from=path).",
        ("skorch", "LRScheduler"): "Write compile(lr_scheduler=…).",
        ("skorch", "GradientNormClipping"): "Write compile(gradient_clip_val=…).",
        ("skorch", "Freezer"): "Write model.net.part.requires_grad_(False).",
        ("skorch", "PrintLog"): "Write fit(verbose=2).",
    },
    "EarlyStopping": {
        ("Lightning", "strict"): "Leave it out: a name that the logs don't have is an error.",
        ("Lightning", "check_on_train_epoch_end"): "Leave it out: it checks once the epoch's "
        "values are complete.",
        ("Lightning", "log_rank_zero_only"): "Leave it out: only rank 0 prints.",
    },
    "ModelCheckpoint": {
        ("Lightning", "auto_insert_metric_name"): "Leave it out: fitkit never adds prefixes to "
        "names.",
        ("Lightning", "save_on_train_epoch_end"): "Leave it out: it saves after the validation.",
        ("Lightning", "enable_version_counter"): "Leave it out: existing files are replaced.",
    },
    "Classifier": _ESTIMATOR,
    "Regressor": _ESTIMATOR,
    "fitkit.sklearn.Classifier": _FITTED,
    "fitkit.sklearn.Regressor": _FITTED,
    "fitkit.loggers": {
        ("Lightning", "CometLogger"): "Subclass Logger: its log_scalars sends an epoch's values.",
        ("Lightning", "NeptuneLogger"): "Subclass Logger: its log_scalars sends an epoch's values.",
    },
}  # fmt: skip
"""The place (a verb, a class or a module) → (the peer, its name) → what to write here."""

_ANSWERS = {
    place: {name: sentence for (_, name), sentence in rows.items()}
    for place, rows in FOREIGN.items()
}


def instead(place: str, name: str) -> str:
    """What to write for a peer's name; empty where nobody has it.

    Args:
        place: a verb's name, `"fitkit.Model"`, or a module's name.
        name: an argument or attribute that isn't there; of skorch's `module__hidden` what stands
            before the underscores counts.
    """
    rows = _ANSWERS.get(place, {})
    return rows.get(name, "") or rows.get(name.partition("__")[0], "")


def no_attribute(module: str, name: str) -> AttributeError:
    """The error for a name that a module doesn't have."""
    missing, sentence = f"module {module!r} has no attribute {name!r}", instead(module, name)
    return AttributeError(f"{missing}. {sentence}" if sentence else missing)


def markdown(*peers: str) -> str:
    """A table of these peers' names, as the pages for their users have it."""
    rows = ["| name | what to write |", "|---|---|"]
    for place, names in FOREIGN.items():
        for (peer, name), sentence in names.items():
            if peer in peers:
                is_attribute = place.startswith("fitkit")
                shown = f"{place}.{name}" if is_attribute else f"{place}({name}=…)"
                shown = shown.replace("fitkit.Model.", "model.")
                label = f" ({peer})" if peer != peers[0] else ""
                rows.append(f"| `{shown}`{label} | {sentence} |")
    return "\n".join(rows)


OTHER_NAMES = {
    "train_step": "training_step",
    "val_step": "validation_step",
    "eval_step": "validation_step",
    "evaluation_step": "validation_step",
    "train_step_end": "training_step_end",
    "val_step_end": "validation_step_end",
    "train_epoch_end": "training_epoch_end",
    "val_epoch_end": "validation_epoch_end",
    "configure_optimiser": "configure_optimizers",
    "configure_optimisers": "configure_optimizers",
    "batch_to_device": "transfer_batch_to_device",
    "prediction_step": "predict_step",
}
"""What people call our hooks, beyond slips of the pen."""

CALLBACK_HOOKS = {
    "on_fit_start": "on_train_begin",
    "on_fit_end": "on_train_end",
    "on_train_start": "on_train_begin",
    "on_train_end": "on_train_end",
    "on_epoch_start": "on_epoch_begin",
    "on_epoch_end": "on_epoch_end",
    "on_train_epoch_start": "on_epoch_begin",
    "on_train_epoch_end": "on_epoch_end",
    "on_train_batch_start": "on_train_batch_begin",
    "on_train_batch_end": "on_train_batch_end",
    "on_validation_start": "on_test_begin",
    "on_validation_end": "on_test_end",
    "on_validation_epoch_start": "on_test_begin",
    "on_validation_epoch_end": "on_test_end",
    "on_validation_batch_start": "on_test_batch_begin",
    "on_validation_batch_end": "on_test_batch_end",
    "on_test_start": "on_test_begin",
    "on_test_end": "on_test_end",
    "on_test_epoch_start": "on_test_begin",
    "on_test_epoch_end": "on_test_end",
    "on_test_batch_start": "on_test_batch_begin",
    "on_test_batch_end": "on_test_batch_end",
    "on_predict_start": "on_predict_begin",
    "on_predict_end": "on_predict_end",
    "on_predict_epoch_start": "on_predict_begin",
    "on_predict_epoch_end": "on_predict_end",
    "on_predict_batch_start": "on_predict_batch_begin",
    "on_predict_batch_end": "on_predict_batch_end",
}
"""Lightning's hooks for which fitkit's callbacks have one, and its name."""

CALLBACK_INSTEAD = {
    "setup": "Write def on_train_begin(self, logs).",
    "teardown": "Write def on_train_end(self, logs), and def on_exception(self, error).",
    "on_sanity_check_start": "There is none; model.evaluate(…, steps=2) before fit is one.",
    "on_sanity_check_end": "There is none; model.evaluate(…, steps=2) before fit is one.",
}
"""Lightning's methods of a callback that fitkit's doesn't have, and what to write instead."""

CALLBACK_ARGUMENTS = {
    "trainer": "self.params knows the run, self.model what the trainer knew",
    "pl_module": "self.model is pl_module",
}
"""What Lightning gives to each hook of a callback, and where it is here."""

_LOADER = "Give the data to {}."
_MANUAL = "Set automatic_optimization = False and do it in training_step."
INSTEAD = {
    **{
        theirs: f"Write a callback with {ours} and give it to fit."
        for theirs, ours in CALLBACK_HOOKS.items()
    },
    "on_train_epoch_end": "Override training_epoch_end(self, outputs), or write a callback with "
    "on_epoch_end.",
    "on_validation_epoch_end": "Override validation_epoch_end(self, outputs), which gets what the "
    "steps returned.",
    "on_test_epoch_end": "Override test_epoch_end(self, outputs), which gets what the steps "
    "returned.",
    "train_dataloader": _LOADER.format("fit(loader)"),
    "val_dataloader": _LOADER.format("fit(…, validation_data=loader)"),
    "test_dataloader": _LOADER.format("evaluate(loader)"),
    "predict_dataloader": _LOADER.format("predict(loader)"),
    "predict_epoch_end": "Use what predict returns.",
    "prepare_data": "Call it before fit.",
    "on_before_backward": _MANUAL,
    "on_after_backward": _MANUAL,
    "on_before_optimizer_step": _MANUAL,
    "on_before_zero_grad": _MANUAL,
    "lr_scheduler_step": "Return the scheduler from configure_optimizers with its interval.",
    "on_before_batch_transfer": "Override transfer_batch_to_device.",
    "on_after_batch_transfer": "Override transfer_batch_to_device.",
    "on_save_checkpoint": "Give a callback a state_dict.",
    "on_load_checkpoint": "Give a callback a load_state_dict.",
    "configure_sharded_model": "Build the layers in __init__.",
    "tbptt_split_batch": "Give fit shorter sequences.",
    "get_progress_bar_dict": "Write self.log(…, prog_bar=True).",
    "optimizer_step": "Set automatic_optimization = False and step in training_step.",
    "optimizer_zero_grad": "Set automatic_optimization = False and step in training_step.",
    "configure_gradient_clipping": "Write compile(gradient_clip_val=…).",
    "configure_callbacks": "Give callbacks to fit.",
}  # fmt: skip
"""Hooks of Lightning's that fitkit doesn't call, and what to write instead."""
