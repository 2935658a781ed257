"""Networks of Keras 3 on its torch backend, trained as Keras's own `fit` trains them.

A `KerasNet` stands in such a network's place in a model. It calls the network as Keras's trainer
does, keeps what the call leaves behind (added losses, masks), and has the network's variables as
its parameters and buffers: what is made to learn is a parameter, all else (moving statistics,
counters, states of seeds) a buffer.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fitkit.extras.keras_backend import refusal

# isort: split
import keras
import torch
from keras.src.backend.common.keras_tensor import KerasTensor
from torch.optim import Optimizer

from fitkit import trees
from fitkit.arguments import describe
from fitkit.errors import ArgumentTypeError, ConfigurationError, warn_once
from fitkit.extras import keras_metrics, keras_norms, keras_order
from fitkit.extras.ddp import DDP
from fitkit.extras.keras_calls import Called, CompiledCall, called
from fitkit.extras.keras_pickles import CODE, put_together, taken_apart
from fitkit.extras.sharding.fsdp import FSDP
from fitkit.outputs import SINGLE
from fitkit.seams.losses import Term
from fitkit.seams.networks import Guest, Module
from fitkit.seams.strategies import SingleDevice

STEPS: dict[str, tuple[str, ...]] = {
    "fit": ("train_step", "make_train_function", "compute_metrics"),
    "evaluate": ("test_step", "make_test_function", "compute_metrics"),
    "predict": ("predict_step", "make_predict_function"),
}
"""By verb, the methods of a Keras model that only Keras's verb calls. `compute_loss` can be called.
"""

ADDED = "added_loss"
"""The log of what a network adds to losses that are means over different counts."""

APART = 1_000_003
"""What a rank's number times moves its seeds by, so that ranks draw different noise."""


class KerasNet(Guest):
    """A Keras network as fitkit trains it.

    Args:
        given: a `keras.Model` or layer.

    Raises:
        ConfigurationError: Keras runs on another backend than torch.
    """

    rank: int
    is_built: bool
    computes_loss: bool
    has_loss: bool
    variables: list[Any]
    seeds: list[Any]
    constrained: list[Any]
    options: Any
    calls: CompiledCall | None
    measured: dict[bool, list[keras_metrics.CalledMetric]]
    lock: Any
    left: Any
    watched: Any

    def __init__(self, given: Any) -> None:
        if keras.backend.backend() != "torch":
            raise ConfigurationError(
                f"Keras runs on {keras.backend.backend()}, but fitkit trains torch modules. Set "
                "os.environ['KERAS_BACKEND'] = 'torch' before the first import of keras.",
                code="FK080",
            )
        if not isinstance(given, keras.Layer):
            raise ArgumentTypeError(f"net={describe(given)} must be a keras.Model or a layer.")
        os.environ["KERAS_BACKEND"] = "torch"  # for workers, if a file had said it
        super().__init__(given)
        self._set_up()

    def _set_up(self) -> None:
        own = vars(self)
        own["computes_loss"] = is_own(self.given, "compute_loss")
        own.setdefault("has_loss", True)
        own.update(rank=0, is_built=False, variables=[], seeds=[], constrained=[])
        own.update(calls=None, options=False)
        metrics = keras_metrics.metrics_of(self.given)
        own["measured"] = {
            training: [keras_metrics.CalledMetric(one) for one in metrics]
            for training in (True, False)
        }
        own["lock"], own["left"] = threading.RLock(), threading.local()
        own["watched"] = weakref.WeakKeyDictionary()
        self._find_variables()

    # ------------------------------------------------------------------ variables

    def _find_variables(self) -> None:
        """Register the network's variables, if it has other ones than before."""
        net, own = self.given, vars(self)
        own["is_built"] = all(layer.built for layer in net._flatten_layers())
        variables = net.variables
        if list(map(id, variables)) == list(map(id, own["variables"])):
            return
        learning = {id(v) for layer in net._flatten_layers() for v in layer._trainable_variables}
        self._parameters.clear()
        self._buffers.clear()
        for name, variable in zip(names_of(net, variables), variables, strict=True):
            if id(variable) in learning:
                self._parameters[name] = variable._value
            else:
                self._buffers[name] = variable._value
        for number, layer in enumerate(net._flatten_layers()):
            for path, module in layer.named_modules():
                if not isinstance(module, keras.Layer):  # a torch module inside
                    for name, buffer in module.named_buffers(recurse=False):
                        place = f"torch_modules/{number}/{path}/{name}".replace(".", "/")
                        self._buffers[place] = buffer
        own["variables"] = variables
        own["constrained"] = [v for v in variables if v.constraint is not None]
        own["seeds"] = [
            sg.state for layer in net._flatten_layers() for sg in layer._seed_generators
        ]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> KerasNet:
        """As torch's, but changes each tensor in place: Keras's variables hold them, too."""
        with torch.no_grad():
            for held in (self._parameters, self._buffers):
                for tensor in held.values():
                    if tensor is not None:
                        tensor.data = fn(tensor.data)
                        if tensor.grad is not None:
                            tensor.grad.data = fn(tensor.grad.data)
        return self

    # ------------------------------------------------------------------ a call

    def forward(self, inputs: Any) -> Any:
        """Call the network in the mode of this module."""
        net, training = self.given, self.training
        with self.lock, self._on_device():
            if net.training is not training:
                net.train(training)  # for torch modules inside
            apart = self.rank * APART if training else 0
            for seed in self.seeds if apart else ():
                seed._value.data[0] += apart
            metrics = self.measured[training]
            for metric in metrics:
                metric.lend()
            try:
                outputs, self.left.masks, self.left.losses = self._called(inputs, training)
            finally:
                for seed in self.seeds if apart else ():
                    seed._value.data[0] -= apart
            self.left.measured = [(metric, metric.taken()) for metric in metrics]
        self.left.inputs = inputs if self.computes_loss else None
        if not self.is_built:
            self._find_variables()
        return outputs

    def _called(self, inputs: Any, training: bool) -> Called:
        if self.calls is not None and self.is_built:
            return self.calls(inputs, training)
        return called(self.given, inputs, training)

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Let Keras compute where the variables are."""
        device = next((str(v._value.device) for v in self.variables), None)
        if device is None or device == keras.src.backend.torch.core.get_device():
            return contextlib.nullcontext()
        return keras.device(device)

    # ------------------------------------------------------------------ what the core asks

    @property
    def awaits_batch(self) -> bool:
        self._find_variables()  # the network may have been called since
        return not (self.is_built or self.given._called)

    def check(self, model: Any, verb: str) -> None:
        given = model._fitkit.compilation.given
        strategy = model._fitkit.compilation.strategy
        net = self.given
        vars(self)["has_loss"] = given.loss is not None
        learns = verb == "fit"
        own = [name for name in STEPS.get(verb, ()) if is_own(net, name)]
        if own and not has_steps(model):
            raise refusal(
                f"{type(net).__name__} overrides Keras's {own[0]}, which only Keras's own {verb} "
                "calls. Subclass fitkit.Model and write the same as training_step (and "
                "validation_step, test_step)."
            )
        if self.computes_loss and given.loss is not None:
            raise refusal(
                f"{type(net).__name__} overrides Keras's compute_loss, which a loss given here "
                "can't reach. Leave it out; super().compute_loss takes that of net.compile(loss=…)."
            )
        plain = isinstance(strategy, (SingleDevice, DDP)) and not isinstance(strategy, FSDP)
        if not plain or strategy.replicates:
            raise refusal(
                f"strategy={strategy.name!r} replaces a network's weights by other objects, and "
                "Keras's layers would go on with theirs. Use 'ddp', 'ddp_spawn' or 'ddp_sharded'."
            )
        if given.memory_format is not None:
            raise refusal("memory_format has no meaning for Keras's kernels. Leave it out.")
        if given.sync_batchnorm:
            keras_norms.check(net)
        precision = strategy.precision.name
        policies = {layer.compute_dtype for layer in net._flatten_layers()} - {None}
        if precision not in ("32-true", "16-mixed", "bf16-mixed"):
            raise refusal(
                f"precision={precision!r} changes the type of the weights, which Keras's layers "
                "decide. Set their dtype (keras.config.set_dtype_policy) before you build the net."
            )
        if precision != "32-true" and policies - {"float32"}:
            raise refusal(
                f"The net has Keras's dtype policy {sorted(policies)[0]} and compile was given "
                f"precision={precision!r}. Use one of the two."
            )
        written = [v for v in net.variables if getattr(v, "overwrite_with_gradient", False)]
        if learns and written:
            raise refusal(
                "The net is quantized to float8, and Keras's own optimizer writes its scales. "
                "Train it first, then call net.quantize('float8')."
            )
        if learns and "float16" in policies:
            raise refusal(
                "Keras's float16, as in mixed_float16, needs a loss scaled by its own optimizer. "
                "Use mixed_bfloat16, or a float32 net and compile(precision='16-mixed')."
            )
        metrics = [metric.metric for metric in self.measured[True]]
        if metrics and has_steps(model):
            warn_once(
                f"The net has Keras's metric {metrics[0].name!r}, and the model a training_step, "
                "which logs what there is to log. Log the metric there."
            )
        for metric in metrics if strategy.world.size > 1 else ():
            if not keras_metrics.is_additive(metric):
                raise keras_metrics.not_joined(metric)

    def meant(self, argument: str, value: Any) -> Any:
        return keras_order.meant(argument, value, getattr(self.given, "_outputs_struct", None))

    def prepare(self, batch: Callable[[], Any]) -> None:
        self._find_variables()  # the network may have been called since
        if not self.is_built:
            self._build(batch)
            self._find_variables()
        learning = {id(parameter) for parameter in self._parameters.values()}
        for variable in self.variables:
            if id(variable._value) in learning:  # perhaps frozen by torch's means
                variable._trainable = variable._value.requires_grad

    def _build(self, batch: Callable[[], Any]) -> None:
        """Build what isn't built by the shapes of a batch, as Keras does: no seed moves."""

        def described(leaf: Any) -> Any:
            if leaf is None:
                return None
            leaf = torch.as_tensor(leaf)
            return KerasTensor(tuple(leaf.shape), keras.backend.standardize_dtype(leaf.dtype))

        inputs = trees.map_leaves(described, batch())
        mode = {"training": False} if self.given._call_has_training_arg else {}
        keras.src.backend.compute_output_spec(self.given, inputs, **mode)

    def begin(self, rank: int) -> None:
        vars(self)["rank"] = rank

    def compile_calls(self, options: Any) -> None:
        made = None if options is False else CompiledCall(self.given, options)
        vars(self).update(options=options, calls=made)

    def synchronized(self, synchronization: Any) -> contextlib.AbstractContextManager[Any]:
        return keras_norms.synchronized(self.given, synchronization)

    def measure(self, logged: Any) -> None:
        for metric, state in self.left.counted:
            metric.keep(state)
            logged.add(metric.metric.name, metric, keras_metrics.OPTIONS, 0)

    def group_matcher(self, coarse: bool = False) -> Callable[[str], float]:
        """Say in which layer a parameter is, as networks of timm do: for `layer_decay`."""
        places: dict[int, int] = {}
        last = 0
        for layer in layers_in(self.given):
            weights = [variable for variable in layer.variables if id(variable) not in places]
            # A norm is of the layer before it.
            last += any(len(variable.shape) > 1 for variable in weights)
            places.update((id(variable), last) for variable in weights)
        by_name = dict(zip(names_of(self.given, self.variables), self.variables, strict=True))
        return lambda name: places.get(id(by_name[name]), last)

    def watch(self, optimizer: Optimizer) -> None:
        if self.constrained and optimizer not in self.watched:
            self.watched[optimizer] = optimizer.register_step_post_hook(self._constrain)

    def _constrain(self, *arguments: Any) -> None:
        """Bring the weights back to where their constraints hold."""
        with torch.no_grad(), self._on_device():
            for variable in self.constrained:
                if variable._trainable:
                    variable.assign(variable.constraint(variable))

    def for_loss(self, outputs: Any, y: Any, weight: Any) -> tuple[Any, Any, Any]:
        self.left.counted = self.left.measured  # later calls may be for checks
        if self.computes_loss:
            return self._with_own_loss(outputs, y, weight), y, None
        if not self.has_loss and self.left.losses:
            return self._with_added_alone(outputs), y, None
        outputs, masks = (self._by_layer(tree) for tree in (outputs, self.left.masks))
        outputs = trees.map_leaves(widened, outputs)
        found = by_output(masks)
        self.left.masked, self.left.shown = found, (found, weight) if found else None
        if not found:
            return outputs, y, weight
        if isinstance(outputs, torch.Tensor):
            return outputs, y, weighed(found[SINGLE], weight)
        weights = by_name(weight, list(outputs))
        weights.update({name: weighed(mask, weights.get(name)) for name, mask in found.items()})
        return outputs, y, weights

    def _by_layer(self, tree: Any) -> Any:
        """Return what belongs to several outputs, by their layers' names, as Keras logs them."""
        if not isinstance(tree, (list, tuple)):
            return tree
        if len(tree) == 1:
            return tree[0]
        names = getattr(self.given, "output_names", None) or ()
        if len(set(names)) != len(tree):
            names = [f"output_{number}" for number in range(len(tree))]
        return dict(zip(names, tree, strict=True))

    def _with_own_loss(self, outputs: Any, y: Any, weight: Any) -> Any:
        """Return the outputs beside the loss that the network computes of them itself."""
        inputs, self.left.inputs, self.left.shown, self.left.masked = (
            self.left.inputs,
            None,
            None,
            {},
        )
        with self.lock, self._on_device():
            loss = self.given._compute_loss(inputs, y, outputs, weight, training=self.training)
        self.left.losses = []  # it has added them, as Keras's own does
        return beside_loss(loss, outputs)

    def _with_added_alone(self, outputs: Any) -> Any:
        """Return the outputs beside what the network has added, which is the whole loss."""
        loss = torch.stack([one.sum() for one in self.left.losses]).sum()
        self.left.losses, self.left.shown, self.left.masked = [], None, {}
        return beside_loss(loss, outputs)

    def for_metrics(self, outputs: Any, y: Any, weight: Any) -> tuple[Any, Any, Any]:
        if self.left.shown is None:
            return outputs, y, weight
        masks, weight = self.left.shown
        if isinstance(outputs, torch.Tensor):
            mask = masks[SINGLE]
            return chosen(mask, outputs), chosen(mask, y), of_steps(mask, weight)
        given, weights = by_name(y, list(outputs)), by_name(weight, list(outputs))
        pairs = {name: masks.get(name) for name in outputs}
        return (
            {name: chosen(mask, outputs[name]) for name, mask in pairs.items()},
            {name: chosen(pairs.get(name), one) for name, one in given.items()},
            {name: of_steps(pairs.get(name), one) for name, one in weights.items()} or None,
        )

    def with_added(
        self, loss: torch.Tensor, count: Any, terms: list[Any], *, is_part: bool
    ) -> tuple[torch.Tensor, Any, list[Any]]:
        masked = self.left.masked
        if masked and not terms:
            if SINGLE not in masked:
                raise refusal(
                    "The net has several outputs with masks, and a loss for one of them. Give each "
                    "output a loss, with loss_weights of 0."
                )
            mask = masked[SINGLE]
            refuse_ignored(count, mask)
            count = mask.sum()
        for term in terms if masked else ():
            mask = masked.get(term.name.partition("#")[0].removesuffix("_loss"))
            if mask is not None:
                refuse_ignored(term.count, mask)
                term.count = mask.sum()
        added = [one.sum() if one.ndim else one for one in self.left.losses]
        if not added:
            return loss, count, terms
        whole = torch.stack([one.to(loss.dtype) for one in added]).sum()
        if any(term.count is not None for term in terms):
            terms = [*terms, Term(ADDED, 1.0, whole, None)]
        elif count is not None and is_part:
            of_weights = self.given._get_regularization_losses()
            if len(added) > len(of_weights):
                raise refusal(
                    "The net adds losses of its own to one that is a mean over unequal counts "
                    "(masks, ignored labels), so the parts of an update can't be weighed. Train "
                    "it on one device with accumulate_grad_batches=1."
                )
        return loss + whole, count, terms

    def counts_to_come(self, counts: list[Any]) -> list[Any]:
        if self.left.masked:
            raise refusal(
                "The net has several outputs, and a mask says what counts in one. So the batches "
                "of an update can't be weighed before they are computed. Leave out "
                "accumulate_grad_batches."
            )
        return [*counts, None] if self.left.losses else counts

    # ------------------------------------------------------------------ copies

    def __getstate__(self) -> dict[str, Any]:
        return {
            "given": self.given,
            "training": self.training,
            "options": self.options,
            "has_loss": self.has_loss,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        configure(state.get("configuration", {}))
        Guest.__init__(self, state["given"])
        self.training = state["training"]
        vars(self)["has_loss"] = state["has_loss"]
        for layer in self.given._flatten_layers():  # which knows what it tracks by ids
            tracker = layer._tracker
            tracker.stored_ids = {
                name: set(map(id, store)) for name, (_, store) in tracker.config.items()
            }
        self._set_up()
        self.compile_calls(state.get("options", False))

    def _state_for_ranks(self, strategy: object) -> dict[str, Any]:
        return {**self.__getstate__(), "configuration": configuration()}

    def __deepcopy__(self, memo: dict[int, Any]) -> KerasNet:
        made = memo[id(self)] = type(self).__new__(type(self))
        data, kept = taken_apart(self.given, keeps_code=True)
        kept = [one if isinstance(one, CODE) else copy.deepcopy(one, memo) for one in kept]
        made.__setstate__({**self.__getstate__(), "given": put_together(data, kept)})
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        data, tensors = taken_apart(self.given, keeps_code=False)
        return restored, (data, tensors, self.training, self.options, self.has_loss)


def beside_loss(loss: torch.Tensor, outputs: Any) -> dict[str, Any]:
    """Return a network's outputs as those of one that computes its loss."""
    named = dict(outputs) if isinstance(outputs, Mapping) else {"logits": outputs}
    return {"loss": loss, **named}


def is_own(net: Any, name: str) -> bool:
    """Whether a method is the user's, not Keras's."""
    method = getattr(type(net), name, None)
    return method is not None and not method.__module__.startswith("keras.src.")


def has_steps(model: Any) -> bool:
    """Whether a model has a training step of its own."""
    return type(model).training_step is not Module.training_step


def layers_in(net: Any) -> list[Any]:
    """Return a network's layers from its inputs to its outputs, those of networks inside too."""
    found: list[Any] = []
    for layer in getattr(net, "layers", [net]):
        found += layers_in(layer) if keras_metrics.is_model(layer) else [layer]
    return found


# ---------------------------------------------------------------------- Keras's settings


def configuration() -> dict[str, Any]:
    """Return Keras's settings of this process that a call may ask for."""
    config = keras.config
    return {
        "floatx": config.floatx(),
        "epsilon": config.epsilon(),
        "image_data_format": config.image_data_format(),
        "dtype_policy": keras.saving.serialize_keras_object(config.dtype_policy()),
        "flash_attention": config.is_flash_attention_enabled(),
    }


def configure(settings: dict[str, Any]) -> None:
    """Give this process the settings of another."""
    if not settings:
        return
    config = keras.config
    config.set_floatx(settings["floatx"])
    config.set_epsilon(settings["epsilon"])
    config.set_image_data_format(settings["image_data_format"])
    policy = keras.saving.deserialize_keras_object(settings["dtype_policy"])
    config.set_dtype_policy(policy)
    if settings["flash_attention"]:
        config.enable_flash_attention()
    elif settings["flash_attention"] is not None:
        config.disable_flash_attention()


# ---------------------------------------------------------------------- names


def names_of(net: Any, variables: Sequence[Any]) -> list[str]:
    """Return a network's variables by Keras's paths, as the first network of a session would have
    them.

    Keras numbers layers without a name by a counter of the session: a second network of the same
    code has `dense_3` where the first has `dense`. Files should fit both. So such names are counted
    again from the network's beginning.
    """
    things = [*net._flatten_layers()]
    things += [sg for layer in things for sg in layer._seed_generators]
    counters: dict[str, int] = {}
    again: dict[str, str] = {}
    for thing in things:
        kind = keras.src.utils.naming.to_snake_case(type(thing).__name__)
        if thing.name not in again and re.fullmatch(rf"{re.escape(kind)}(_\d+)?", thing.name):
            number = counters[kind] = counters.get(kind, -1) + 1
            again[thing.name] = f"{kind}_{number}" if number else kind
    found: list[str] = []
    for variable in variables:
        parts = [again.get(part, part) for part in variable.path.split("/")]
        parts[-1] = re.sub(r"^variable_\d+$", "variable", parts[-1])
        name = "/".join(parts).replace(".", "_")
        others = sum(one == name or one.startswith(f"{name}#") for one in found)
        found.append(f"{name}#{others + 1}" if others else name)
    return found


# ---------------------------------------------------------------------- masks


def by_output(masks: Any) -> dict[Any, torch.Tensor]:
    """Return the masks of those outputs that have one."""
    named = masks if isinstance(masks, Mapping) else {SINGLE: masks}
    found = {
        name: mask
        for name, mask in named.items()
        if any(leaf is not None for leaf in trees.leaves(mask))
    }
    if not all(isinstance(mask, torch.Tensor) for mask in found.values()):
        raise refusal(
            "The net has masks in nested outputs. Return them side by side, or in a dict."
        )
    return found


def by_name(values: Any, names: list[Any]) -> dict[Any, Any]:
    """Values of several outputs by their names."""
    if values is None:
        return {}
    if isinstance(values, Mapping):
        return dict(values)
    if isinstance(values, (list, tuple)):
        return dict(zip(names, values, strict=True))
    return dict.fromkeys(names, values)


def of_steps(mask: torch.Tensor | None, weight: Any) -> Any:
    """Sample weights of the steps that a mask chooses."""
    if mask is None or weight is None:
        return weight
    weight = weight.reshape(*weight.shape, *(1,) * (mask.ndim - weight.ndim))
    return weight.expand(mask.shape)[mask.bool()]


def weighed(mask: torch.Tensor, weight: Any) -> torch.Tensor:
    """Weights under which a mean over all steps is one over those that a mask chooses."""
    counts = mask.to(torch.float32)
    number = counts.sum()
    counts = counts * torch.where(number > 0, counts.numel() / number.clamp(min=1), 0.0)
    if weight is None:
        return counts
    return counts * weight.reshape(*weight.shape, *(1,) * (counts.ndim - weight.ndim))


def chosen(mask: torch.Tensor | None, values: Any) -> Any:
    """Return the steps that a mask chooses, one after the other."""
    return values if mask is None or values is None else values[mask.bool()]


def refuse_ignored(count: Any, mask: torch.Tensor) -> None:
    """Refuse labels that a loss ignores where a mask says what counts."""
    if count is None:
        return
    message = "The net has a mask, and the loss ignores labels. Let one of them say what counts."
    if isinstance(count, torch.Tensor) and not count.is_cpu:
        torch._assert_async(count == mask.numel(), message)
    elif float(count) != mask.numel():
        raise refusal(message)


def widened(leaf: Any) -> Any:
    """Return a prediction in float32 at least, in which Keras computes losses."""
    is_half = isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)
    return leaf.float() if is_half else leaf


# ---------------------------------------------------------------------- pickles


def restored(
    data: bytes,
    tensors: list[torch.Tensor],
    training: bool,
    options: Any = False,
    has_loss: bool = True,
) -> KerasNet:
    """Return a net that was pickled."""
    made = KerasNet.__new__(KerasNet)
    given = put_together(data, tensors)
    made.__setstate__(
        {"given": given, "training": training, "options": options, "has_loss": has_loss}
    )
    return made
