"""The hooks of a `LightningModule` at checkpoints: what they see, and what they change."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NoReturn

from fitkit.errors import CheckpointError, ConfigurationError, warn_once
from fitkit.extras.lightning_base import ServedModel
from fitkit.extras.lightning_hooks import Hooks, defines_hook
from fitkit.seams.files import OpenWeights, Scope, check_plain
from fitkit.seams.networks import attributes_restorer

ELSEWHERE = ("optimizer_states", "lr_schedulers", "callbacks", "loops")
"""What Lightning's checkpoints have, and fitkit's keep in a form of their own."""

LEFT_OUT = "is_left_out"


class HookCheckpoint(dict[str, Any]):
    """A checkpoint as hooks see it: a dict that says in a sentence what it doesn't have."""

    def __missing__(self, name: str) -> NoReturn:
        known = ", ".join(map(repr, self))
        why = (
            "fitkit keeps it in a form of its own"
            if name in ELSEWHERE
            else "on_save_checkpoint hasn't added it to this file"
        )
        raise KeyError(f"The checkpoint has no {name!r}: {why}. It has {known}.")

    def __delitem__(self, name: str) -> None:
        self[name]  # says what is missing
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        return super().pop(name, *default) if default or name in self else self[name]

    def checked_state(self, hook: str, given: set[str]) -> dict[str, Any]:
        """Return the weights that a hook leaves in a checkpoint.

        Args:
            given: the names that the hook got.

        Raises:
            ConfigurationError: they are no state dict, or the hook set what fitkit doesn't read.
        """
        for name in ELSEWHERE:
            if name in self and name not in given:
                raise ConfigurationError(
                    f"{hook} set checkpoint[{name!r}], which fitkit keeps in a form of its own. "
                    "Leave that out.",
                    code="FK083",
                )
        state = self["state_dict"]
        if not isinstance(state, Mapping):
            raise ConfigurationError(
                f"{hook} set checkpoint['state_dict'] to a {type(state).__name__}. Set a dict of "
                "tensors by their names.",
                code="FK083",
            )
        return dict(state)


def saved_by_hook(model: ServedModel, weights: Any) -> tuple[Any, dict[str, Any]]:
    """Return the weights that `on_save_checkpoint` leaves for a checkpoint, and what it adds.

    What callbacks that the module brings have for files is there, too. Without a fit since a load,
    it is what the file had: those of the saved training aren't here.

    Args:
        weights: the module's.
    """
    hooks, stored = model.hooks, model._fitkit.fit_state.stored_added
    if stored is None:
        states = {one.state_key: own for one in _with_states(hooks) if (own := one.state_dict())}
        is_kept = bool(states) and _is_plain(states, "a callback's state_dict")
        own, call = {"callbacks": states} if is_kept else {}, hooks.call
    else:
        own = {name: value for name, value in stored.items() if name != LEFT_OUT}
        call = hooks.call_own
    if not hooks.has("on_save_checkpoint"):
        return weights, own
    hook = f"{hooks.kind.__name__}.on_save_checkpoint"
    state = weights.copy()
    known = _known(model, state, epoch=model.current_epoch, global_step=model.global_step)
    theirs = {name: one for name, one in own.items() if name == "callbacks"}
    checkpoint = HookCheckpoint({**known, **theirs})
    given = set(checkpoint)
    call("on_save_checkpoint", checkpoint)
    kept: OrderedDict[str, Any] = OrderedDict(checkpoint.checked_state(hook, given))
    kept._metadata = getattr(weights, "_metadata", {})  # type: ignore[attr-defined]
    added = {name: value for name, value in checkpoint.items() if name not in given}
    if not _is_plain(added, f"what {hook} adds"):
        return weights, {**own, LEFT_OUT: True}  # as if there were no hook: none will load them
    return kept, {**own, **added}


def _is_plain(content: dict[str, Any], place: str) -> bool:
    """Whether files can hold something; say so if they can't."""
    try:
        check_plain(content, place)
    except ConfigurationError as error:
        warn_once(f"{error} Files leave all of it out, and it isn't given back.")
        return False
    return True


def _with_states(hooks: Hooks) -> list[Any]:
    """Return the brought callbacks with a state that isn't among the module's weights."""
    parts = {id(part) for part in hooks.module.modules()}
    return [one for one in hooks.beside if defines_hook(one, "state_dict") and id(one) not in parts]


def loaded_by_hook(
    model: ServedModel, weights: OpenWeights, beside: Any, undo: Scope
) -> OpenWeights:
    """Return the weights that `on_load_checkpoint` leaves of an open checkpoint.

    A file of weights alone has nothing for the hook, which isn't called.

    Args:
        beside: returns all else in the file.
        undo: gets what undoes what the hook does.
    """
    hooks = model.hooks
    rest = beside() if hooks.beside or hooks.has("on_load_checkpoint") else {}
    added = rest.get("added") or {}
    if not rest or LEFT_OUT in added:
        _keep_for_callbacks(model, added)
        return weights
    hook = f"{hooks.kind.__name__}.on_load_checkpoint"
    content = weights.content([*weights.describe(), *weights.extra]).state_dict()
    before = dict(content)
    if "training" in rest:  # fitkit's
        progress = rest.get("progress") or {}
        epoch, updates = progress.get("epoch", 0), rest["training"].get("updates", 0)
        rest = {
            **_known(model, content, epoch=epoch, global_step=updates),
            **added,
        }
    checkpoint = HookCheckpoint({**rest, "state_dict": content})
    given, parameters = set(checkpoint), [id(one) for one in model.parameters()]
    undo.callback(model._fitkit.fit_state.restorer())
    undo.callback(attributes_restorer(hooks.module.modules()))
    try:
        hooks.call_own("on_load_checkpoint", checkpoint)
    except KeyError as error:
        name = error.args[0] if error.args else error
        raise CheckpointError(f"{weights.path} can't be loaded: {hook} failed ({name}).") from error
    _keep_for_callbacks(model, checkpoint)
    kept = checkpoint.checked_state(hook, given)
    if [id(one) for one in model.parameters()] != parameters:
        model._fitkit.fit_state.drop_optimizers()  # they hold what the hook has replaced
    is_same = kept.keys() == before.keys() and all(kept[name] is before[name] for name in kept)
    return weights if is_same else weights.replaced(kept)


def _keep_for_callbacks(model: ServedModel, content: Mapping[str, Any]) -> None:
    """Keep what a fit resumes from for the brought callbacks, which each rank has."""
    if model.hooks.beside and model.run is None and model.trainer.is_running("fit"):
        others = {name: value for name, value in content.items() if name != "state_dict"}
        model.resumed = others


def resume_callbacks(model: ServedModel) -> None:
    """Give the callbacks that the module brings what a resumed checkpoint has for them.

    Raises:
        CheckpointError: a callback can't take it.
    """
    hooks, others = model.hooks, model.resumed
    assert others is not None
    checkpoint = HookCheckpoint({**others, "state_dict": model.net.state_dict()})
    states = others.get("callbacks", {})
    try:
        if LEFT_OUT not in others:
            hooks.call_beside("on_load_checkpoint", checkpoint)
        for one in hooks.beside:
            if one.state_key in states:
                one.load_state_dict(copy.deepcopy(states[one.state_key]))
    except Exception as error:
        raise CheckpointError(
            "A callback that configure_callbacks returned can't resume from the checkpoint "
            f"({type(error).__name__}: {error})."
        ) from error


def _known(model: ServedModel, state: Any, *, epoch: int, global_step: int) -> dict[str, Any]:
    """Return what hooks find in a checkpoint of Lightning's, as far as fitkit knows it."""
    module = model.net
    return {
        "epoch": epoch,
        "global_step": global_step,
        "state_dict": state,
        "hparams_name": getattr(module, "_hparams_name", None),
        "hyper_parameters": dict(module.hparams),
    }
