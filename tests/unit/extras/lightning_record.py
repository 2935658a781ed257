"""Records every hook that is called of a LightningModule, its data module and its callbacks, and
what it sees.

The names come from Lightning's own classes, so a hook of a newer release is recorded, too.
"""

import ast
import inspect
import textwrap

import lightning.pytorch as pl
import torch
from lightning.pytorch.core import hooks

CALLED_BY_USERS = {
    "all_gather", "forward", "freeze", "from_datasets", "load_from_checkpoint", "log", "log_dict",
    "lr_schedulers", "optimizers", "print", "save_hyperparameters", "to_onnx", "to_tensorrt",
    "to_torchscript", "toggled_optimizer", "unfreeze",
}  # fmt: skip
"""Public methods that the Trainer doesn't call."""

LOADERS = {f"{stage}_dataloader" for stage in ("train", "val", "test", "predict")}

STEPS = {f"{stage}_step" for stage in ("training", "validation", "test", "predict")}

BEFORE = {"configure_sharded_model"}
"""Names of before, which can't be overridden together with those of today."""


def hooks_of(*classes):
    """Return the names of the methods that the Trainer calls."""
    return [
        name
        for kind in classes
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and not name.startswith("_") and name not in CALLED_BY_USERS
    ]


MODULE_HOOKS = hooks_of(
    pl.LightningModule, hooks.ModelHooks, hooks.DataHooks, hooks.CheckpointHooks
)
DATA_HOOKS = hooks_of(pl.LightningDataModule, hooks.DataHooks)
CALLBACK_HOOKS = hooks_of(pl.Callback)


def has_body(name):
    """Whether Lightning's own method does something."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(pl.LightningModule, name))))
    body = [line for line in tree.body[0].body if not isinstance(line, ast.Pass)]
    is_text = [isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) for line in body]
    raises = [isinstance(line, ast.Raise) for line in body]
    warns = [isinstance(line, ast.Expr) and "rank_zero_warn" in ast.unparse(line) for line in body]
    return not all(map(any, zip(is_text, raises, warns, strict=True)))


def shown(value):
    """Return what can be compared of an argument."""
    if isinstance(value, torch.Tensor):
        return "tensor", value.requires_grad, [round(x, 5) for x in value.flatten()[:3].tolist()]
    if isinstance(value, (list, tuple)):
        return [shown(one) for one in value]
    if isinstance(value, dict):
        return {name: shown(one) for name, one in value.items()}
    if isinstance(value, (int, float, str, type(None), torch.device)):
        return value
    optimizer = getattr(value, "optimizer", value)  # Lightning wraps some
    if isinstance(optimizer, torch.optim.Optimizer):
        return type(optimizer).__name__, [group["lr"] for group in optimizer.param_groups]
    return "a function" if callable(value) else type(value).__name__


def state_of(module, name):
    """Return what a hook can read of its module and trainer."""
    trainer, parameters = module.trainer, list(module.parameters())
    fn, stage = trainer.state.fn, trainer.state.stage
    return {
        "counters": (module.global_step, module.current_epoch),
        "trainer": (trainer.global_step, trainer.current_epoch),
        "stage": (fn.value, stage and stage.value),
        "running": (trainer.training, trainer.validating, trainer.testing, trainer.predicting),
        "is_last_batch": trainer.is_last_batch if "train_batch" in name else None,
        "modes": [part.training for part in module.modules()],
        "gradients": torch.is_grad_enabled(),
        "requires_grad": [parameter.requires_grad for parameter in parameters],
    }


def recording(kind, names, *, of_data=False):
    """Return a subclass that notes the calls of its methods by these names in `calls`."""
    optional = (LOADERS | STEPS) - set(dir_of(kind))
    kept = [name for name in names if hasattr(kind, name) and name not in optional]

    def hook_of(name):
        signature = inspect.signature(getattr(kind, name))

        def hook(self, *arguments, **named):
            given = signature.bind(self, *arguments, **named).arguments
            said = {n: shown(value) for n, value in given.items() if value is not self}
            module = (self.trainer and self.trainer.lightning_module) if of_data else self
            record = self.calls.append
            record((name, "begins", said, module and state_of(module, name)))
            found = getattr(super(made, self), name)(*arguments, **named)
            record((name, "ends", {}, module and state_of(module, name)))
            return found

        hook.__signature__ = signature
        hook.__name__ = name
        return hook

    body = {name: hook_of(name) for name in kept}
    made = type(f"Recorded{kind.__name__}", (kind,), {**body, "calls": None})
    return made


def bringing(kind, names):
    """Return a subclass that brings a callback, whose hooks by these names note their calls."""

    def hook_of(name):
        signature = inspect.signature(getattr(pl.Callback, name))

        def hook(self, *arguments, **named):
            given = dict(signature.bind(self, *arguments, **named).arguments)
            module = given.pop("pl_module", None)
            said = {n: shown(one) for n, one in given.items() if n not in ("self", "trainer")}
            seen = module and state_of(module, name)
            self.calls.append((f"callback's {name}", "begins", said, seen))
            return getattr(pl.Callback, name)(self, *arguments, **named)

        hook.__signature__ = signature
        return hook

    made = type("Noting", (pl.Callback,), {name: hook_of(name) for name in names})

    def configure_callbacks(self):
        callback = vars(self).setdefault("noting", made())
        callback.calls = self.calls
        return [callback]

    return type(kind.__name__, (kind,), {"configure_callbacks": configure_callbacks})


def dir_of(kind):
    """Return the names that a user's class has defined itself."""
    own = (k for k in kind.__mro__ if not k.__module__.startswith(("lightning.", "torch")))
    return [name for one in own for name in vars(one)]
