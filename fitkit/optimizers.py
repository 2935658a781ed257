"""Optimizers from names, classes, partials, factories and instances."""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from fitkit.arguments import check_number, describe
from fitkit.closures import uses_closure
from fitkit.distributed.in_place import held_by as held_by
from fitkit.errors import ArgumentTypeError, ConfigurationError, warn
from fitkit.modes import kept_in_evaluation
from fitkit.registry import Registry, imported_on_demand, nearest, subclass_of
from fitkit.shortcuts import Shortcut

OPTIMIZERS: Registry[type[Optimizer]] = Registry(
    "optimizer",
    hint="Or give a class, a functools.partial, a factory or an instance.",
    group="fitkit.optimizers",
    accepts=subclass_of(Optimizer, or_maker=True),
    expected="a subclass of torch.optim.Optimizer, or a function that makes one",
)
for _name, _class in vars(torch.optim).items():
    if isinstance(_class, type) and issubclass(_class, Optimizer) and _class is not Optimizer:
        OPTIMIZERS.add(_name, _class)
OPTIMIZERS.promise("fitkit.extras.bagua:QAdamOptimizer", "QAdam", "QAdamOptimizer")

Arranges = Callable[[list[nn.Parameter]], Any]
"""Makes of parameters what an optimizer takes: them, or groups of them."""

NET_OPTIMIZERS: Registry[
    Callable[[nn.Module, list[nn.Parameter], dict[str, Any], Arranges], list[Optimizer]]
] = Registry("optimizer")
"""Names that stand for several optimizers, each over some parts of a net. An entry makes them of
the net, the parameters to train, the settings, and what arranges an optimizer's parameters."""
NET_OPTIMIZERS.promise("fitkit.extras.muon:beside_adamw", "Muon")

if TYPE_CHECKING:
    from fitkit.extras.bagua import QAdamOptimizer as QAdamOptimizer
    from fitkit.extras.muon import muon as muon
    from fitkit.extras.parameter_groups import parameter_groups as parameter_groups
else:
    __getattr__ = imported_on_demand(
        __name__,
        {
            "QAdamOptimizer": "fitkit.extras.bagua:QAdamOptimizer",
            "muon": "fitkit.extras.muon:muon",
            "parameter_groups": "fitkit.extras.parameter_groups:parameter_groups",
        },
    )

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers that can update all parameters in one pass, on CPU and CUDA."""


@dataclasses.dataclass(frozen=True)
class OptimizerChoice:
    """The `optimizer` argument of `compile`, built once the parameters are in place.

    Attributes:
        given: the name, class, partial, factory, instance or list of instances, as given. Or a dict
            of a name and settings for its class.
        learning_rate: the rate, for all but instances. None for the optimizer's own.
        layer_decay: the factor of rates from each layer to the one before it. None for one rate.
    """

    given: Any = "adam"
    learning_rate: float | None = None
    layer_decay: float | None = None

    def __post_init__(self) -> None:
        given = self.given
        if isinstance(given, str):
            OPTIMIZERS[given]
        elif isinstance(given, dict):
            _check_settings(given)
        elif isinstance(given, type) and not issubclass(given, Optimizer):
            raise ArgumentTypeError(
                f"optimizer={given.__name__} is a class, but no torch.optim.Optimizer."
            )
        elif isinstance(given, (list, tuple)):
            _check_list(given)
        elif isinstance(given, Optimizer) or callable(given):
            pass
        else:
            raise ArgumentTypeError(
                f"optimizer={describe(given)} must be a name, a dict of a name and settings, an "
                "Optimizer class, a functools.partial of one, a factory params -> Optimizer, an "
                "instance, or a list of instances that step together."
            )

    @property
    def instances(self) -> list[Optimizer]:
        """The optimizers that the user has made; empty if fitkit makes them."""
        return instances_in(self.given)

    @property
    def is_name(self) -> bool:
        """Whether fitkit chooses the class, and so may choose how it computes."""
        return isinstance(self.given, str | dict)

    def check_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Refuse an instance over parameters that aren't among `parameters`.

        Raises:
            ConfigurationError: with the shapes of those that aren't the model's.
        """
        own = {id(parameter) for parameter in parameters}
        foreign = [
            tuple(parameter.shape)
            for optimizer in self.instances
            for parameter in held_by(optimizer)
            if id(parameter) not in own
        ]
        if foreign:
            shapes = ", ".join(str(shape) for shape in foreign[:3])
            raise ConfigurationError(
                f"The optimizer holds {len(foreign)} parameters that aren't this model's (of "
                f"shape {shapes}{', …' if len(foreign) > 3 else ''}), so it would train another "
                "net. Make it over model.parameters(), or give its name or class. Parameters of a "
                "loss belong to the model if the loss is a torch.nn.Module that holds them.",
                code="FK024",
            )

    def build(
        self, parameters: Iterable[torch.nn.Parameter], module: torch.nn.Module
    ) -> list[Optimizer]:
        """Return the optimizers over `parameters`, which step together. One, except for a list or
        "muon".

        Args:
            module: its layers show which parameters are hidden matrices.

        Raises:
            ConfigurationError: no parameters, or arguments that the optimizer refuses.
        """
        if self.instances:
            return self.instances
        held = list(parameters)
        check_trainable(held)
        options, name = {}, ""
        if isinstance(self.given, str):
            name = self.given
        elif isinstance(self.given, dict):
            name, options = self.given["name"], _settings_in(self.given)
        if self.learning_rate is not None:
            options["lr"] = self.learning_rate
        arranged: Arranges = list
        if self.layer_decay is not None:
            from fitkit.extras.parameter_groups import in_layers

            arranged = functools.partial(in_layers, module, self.layer_decay)
        if name in NET_OPTIMIZERS:
            return _by_layer(NET_OPTIMIZERS[name](module, held, options, arranged))
        maker = OPTIMIZERS[name] if name else self.given
        try:
            optimizer = maker(arranged(held), **options)
        except Exception as error:
            hint = '. Write "muon", which trains all other parameters with AdamW.'
            raise ConfigurationError(
                f"optimizer={shown(self.given)} could not be made: {error}"
                + (hint if maker is torch.optim.Muon else "")
            ) from error
        if not isinstance(optimizer, Optimizer):
            raise ArgumentTypeError(
                f"optimizer={shown(self.given)} gave a {type(optimizer).__name__}, not a "
                "torch.optim.Optimizer."
            )
        OptimizerChoice(optimizer).check_parameters(held)  # a factory may have kept one
        return _by_layer([optimizer])


def check_layer_decay(layer_decay: float | None) -> float | None:
    """Return a factor above 0 and at most 1, or None; refuse anything else."""
    layer_decay = check_number("layer_decay", layer_decay, above=0, optional=True)
    if layer_decay is not None and layer_decay > 1:
        raise ConfigurationError(f"layer_decay={layer_decay} must be at most 1.")
    return layer_decay


def _by_layer(optimizers: list[Optimizer]) -> list[Optimizer]:
    """Multiply new optimizers' rates by the factors of their layers."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if "lr_scale" in group:
                group["lr"] = group["lr"] * group["lr_scale"]
    return optimizers


def instances_in(given: Any) -> list[Optimizer]:
    """Return the optimizers that `compile` was given as instances: one, or those of a list."""
    entries = given if isinstance(given, (list, tuple)) else [given]
    return [entry for entry in entries if isinstance(entry, Optimizer)]


def _check_list(given: Any) -> None:
    """Refuse a list of anything but optimizers that can step together."""
    if not given or len(instances_in(given)) < len(given):
        raise ArgumentTypeError(
            f"optimizer={describe(given)}: a list holds optimizer instances, such as "
            "[torch.optim.Muon(matrices), torch.optim.AdamW(others)]."
        )
    for optimizer in given if len(given) > 1 else ():
        if uses_closure(optimizer):
            raise ConfigurationError(
                f"{type(optimizer).__name__} computes the loss itself, several times per step, so "
                "it can't step together with others. Give it alone."
            )
    counts = Counter(id(parameter) for optimizer in given for parameter in held_by(optimizer))
    shared = sum(count > 1 for count in counts.values())
    if shared:
        raise ConfigurationError(
            f"More than one of the optimizers holds {shared} parameters, so they would be "
            "updated twice. Give each parameter to one."
        )


class OptimizerList(Optimizer):
    """Several optimizers over disjoint parameters that make each update together.

    The update treats them as one: gradients are clipped over all, and if loss scaling skips an
    update, all of them skip it. Each keeps its own state.

    Args:
        members: the optimizers.
    """

    def __init__(self, members: list[Optimizer]) -> None:
        # torch's constructor isn't called: groups and states belong to the members.
        self.members: list[Optimizer] = members

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The current groups of all members."""
        return [group for member in self.members for group in member.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for member in self.members:
            member.step()

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.members[-1].register_step_post_hook(hook)


def members_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that step as one."""
    return optimizer.members if isinstance(optimizer, OptimizerList) else [optimizer]


def _settings_in(given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings besides the name. Files store tuples as lists."""
    settings = {name: value for name, value in given.items() if name != "name"}
    return {n: tuple(v) if isinstance(v, list) else v for n, v in settings.items()}


def _check_settings(given: dict[str, Any]) -> None:
    """Refuse a dict without a name, or with settings that the named class doesn't take."""
    if not isinstance(given.get("name"), str):
        raise ConfigurationError(
            f"optimizer={describe(given)} is a dict without the optimizer's name. Write "
            'optimizer={"name": "adam", "eps": 1e-5}.'
        )
    kind, settings = OPTIMIZERS[given["name"]], _settings_in(given)
    taken = inspect.signature(kind).parameters
    known = [name for name in taken if name not in ("params", "lr")]
    takes_any = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in taken.values())
    for name in settings:
        if name in ("lr", "learning_rate"):
            raise ConfigurationError(
                f"optimizer has the setting {name!r}. The rate is an argument of compile, so that "
                f"you can change it later. Write learning_rate={settings[name]!r} beside it."
            )
        if name not in known and not takes_any:
            close = nearest(str(name), known)
            suggestion = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise ConfigurationError(
                f"optimizer has the setting {name!r}, but {kind.__name__} has none of that name."
                f"{suggestion} It has {', '.join(known)}."
            )
    try:
        kind([torch.nn.Parameter(torch.zeros(1, 1))], **settings)
    except Exception as error:
        raise ConfigurationError(
            f"optimizer={describe(given)} could not be made: {error}"
        ) from error


UPDATES_FUSED = Shortcut("all parameters updated in one pass")


def fuse(optimizer: Optimizer, module: torch.nn.Module) -> None:
    """Let an optimizer update all parameters in one pass if it can. Otherwise torch chooses.

    Call it before each training: devices and dtypes may have changed. What the user has set in the
    groups stays, such as `fused=False`.

    Args:
        optimizer: an optimizer made from a name.
        module: the module that produces the gradients.
    """
    groups = optimizer.param_groups
    if any(group.get("fused") is False for group in groups):
        fused: bool | None = False
    elif (
        class_of(optimizer) in FUSED
        and not any(group.get("foreach") or group.get("differentiable") for group in groups)
        # torch's fused SGD fails if some parameters have a momentum and others, whose first
        # gradient came later, have none yet. And if loss scaling skips the first update, it takes
        # uninitialized memory for a momentum.
        and not any(group.get("momentum") for group in groups)
        and all(map(_can_be_fused, held_by(optimizer)))
        and not any(vars(child).get("sparse") is True for child in module.modules())
        # Steps that make their own updates may set gradients of any layout.
        and getattr(module, "automatic_optimization", True)
        and UPDATES_FUSED.is_on
    ):
        fused = True
    else:
        fused = None
    if fused or optimizer.defaults.get("fused"):
        _set_fused(optimizer, fused)


def unfuse_if_unreadable(optimizer: Optimizer) -> None:
    """Undo `fuse` if the fused step can't read the gradients.

    They are sparse, or have another memory layout than their parameters.
    """
    if optimizer.defaults.get("fused") and not all(map(_has_fitting_gradient, held_by(optimizer))):
        _set_fused(optimizer, None)


def _has_fitting_gradient(parameter: torch.Tensor) -> bool:
    gradient = parameter.grad
    if gradient is None:
        return True
    if gradient.layout is not torch.strided:
        return False
    # With a single entry, autograd leaves any stride.
    strides = zip(parameter.shape, parameter.stride(), gradient.stride(), strict=True)
    return all(own == given for size, own, given in strides if size > 1)


def _can_be_fused(parameter: torch.Tensor) -> bool:
    # Not half types: fused SGD of torch 2.13 hardly changes them on a CPU.
    return (
        type(parameter) in (torch.nn.Parameter, torch.Tensor)
        and parameter.dtype in (torch.float32, torch.float64)
        and parameter.device.type in ("cpu", "cuda")
        and parameter.layout is torch.strided
        # Without gaps: on a CPU a fused step walks through memory from the first number on, and
        # would leave the parameter's own.
        and (
            parameter.is_contiguous()
            or torch.empty_like(parameter, device="meta").stride() == parameter.stride()
        )
    )


def _set_fused(optimizer: Optimizer, fused: bool | None) -> None:
    """Set what the constructor's argument sets, in all places. None lets torch choose."""
    optimizer.defaults["fused"] = fused  # groups that are added later get it from here
    optimizer._step_supports_amp_scaling = bool(fused)  # type: ignore[attr-defined]
    for group in optimizer.param_groups:
        group["fused"] = fused
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "step" in state:  # counted beside the parameter, else in main memory
                step = state["step"]
                state["step"] = step.to(parameter.device, torch.float32) if fused else step.cpu()


HOW = ("fused", "foreach", "capturable", "differentiable")
"""Options of torch's optimizers that change how a step is computed, but not its result."""


def load_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Call `optimizer.load_state_dict(state)`, but keep how it computes (`HOW`).

    The state may come from another device or version.
    """
    groups = [
        {**group, **{name: own[name] for name in HOW if name in own}}
        for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({**state, "param_groups": groups})


def check_trainable(parameters: list[torch.nn.Parameter]) -> None:
    """Refuse parameters if none of them can learn.

    Raises:
        ConfigurationError: there are none, all are frozen, or their shapes aren't known yet.
    """
    for parameter in parameters:
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise ConfigurationError(
                "The net has lazy layers whose shapes aren't known yet. Run one batch through "
                "it first: model.predict_on_batch(x[:1])."
            )
    if not parameters:
        raise ConfigurationError("The net has no parameters, so there is nothing to train.")
    if not any(parameter.requires_grad for parameter in parameters):
        raise ConfigurationError(
            "No parameter of the net requires gradients (all are frozen), so there is nothing "
            "to train. Set requires_grad = True on those that must learn.",
            code="FK023",
        )


def check_changeable(*modules: torch.nn.Module) -> None:
    """Refuse weights made under `torch.inference_mode()`: torch never changes their numbers.

    Some optimizers leave them out without a word. Statistics of normalizations count, too.

    Raises:
        ConfigurationError: with the first one's name and what to write.
    """
    for module in modules:
        kept = kept_in_evaluation(module)
        changing: list[tuple[str, torch.Tensor]] = []
        changing += [(name, one) for name, one in module.named_parameters() if one.requires_grad]
        for path, part in module.named_modules():
            if isinstance(part, torch.nn.modules.batchnorm._NormBase) and part not in kept:
                changing += part.named_buffers(path, recurse=False)
        for name, tensor in changing:
            if tensor.is_inference():
                raise ConfigurationError(
                    f"{name} of {type(module).__name__} was made under torch.inference_mode(), so "
                    "torch can't train it. Make the net outside of it (torch.no_grad() does no "
                    "harm), or take a copy there: net = copy.deepcopy(net)."
                )


def put_rate(group: dict[str, Any], rate: float) -> None:
    """Set a group's rate. A tensor (of capturable optimizers) stays a tensor."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = float(rate)


def put_rates(groups: Iterable[dict[str, Any]], rate: float) -> None:
    """Set all groups' rates. Layers' rates keep their ratio to the last layer's."""
    for group in groups:
        put_rate(group, rate * group.get("lr_scale", 1.0))


def first_rate(group: dict[str, Any]) -> float:
    """Return a group's rate before a scheduler moved it. OneCycleLR notes it by another name."""
    return float(group.get("max_lr", group.get("initial_lr", group["lr"])))


def with_rate(optimizer: Optimizer) -> Optimizer:
    """Return the same object, with a readable and settable `learning_rate` and `lr`, as in Keras.

    torch's optimizers have neither, and would accept an assignment without effect. So the object
    gets a subclass of its class with the same name, as in Horovod. A name that the class or the
    object already has keeps its own meaning. Pickles and copies have the original class.
    """
    kind, own = type(optimizer), vars(optimizer)
    names = [n for n in ("learning_rate", "lr") if n not in own and not hasattr(kind, n)]
    if names and all("lr" in group for group in optimizer.param_groups):
        optimizer.__class__ = _rated(kind, tuple(names))  # type: ignore[arg-type]
    return optimizer


def class_of(optimizer: Optimizer) -> type[Optimizer]:
    """Return the optimizer's original class, without the subclass of `with_rate`."""
    return getattr(type(optimizer), "_class_without_rate", type(optimizer))


@functools.cache
def _rated(kind: type[Optimizer], names: tuple[str, ...]) -> type[Optimizer]:
    def rate_of(self: Optimizer) -> float:
        return float(self.param_groups[0]["lr"])

    def set_rate(self: Optimizer, rate: Any) -> None:
        if not isinstance(rate, (bool, str)) and hasattr(rate, "__float__"):  # arrays of one entry
            rate = float(rate)
        if callable(rate) or not isinstance(rate, float):
            raise ArgumentTypeError(
                f"learning_rate={describe(rate)} must be a number. A schedule goes to "
                "model.compile(lr_scheduler=…)."
            )
        check_number("learning_rate", rate, minimum=0)
        put_rates(self.param_groups, rate)

    def reduce(self: Optimizer, protocol: Any) -> Any:
        made = super(rated, self).__reduce_ex__(protocol)
        if made[1] == (rated,):  # pickle refuses to call another class's __new__
            return (copyreg._reconstructor, (kind, object, None), *made[2:])  # type: ignore[attr-defined]
        arguments = tuple(kind if entry is rated else entry for entry in made[1])
        return (kind if made[0] is rated else made[0], arguments, *made[2:])

    doc = "The first group's learning rate. Setting it sets all groups', layers' in their ratio."
    own: dict[str, Any] = {name: property(rate_of, set_rate, doc=doc) for name in names}
    own |= {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    own |= {"__reduce_ex__": reduce, "_class_without_rate": kind}
    rated: Any = type(kind)(kind.__name__, (kind,), own)  # type: ignore[misc]
    return rated


def shown(given: Any) -> str:
    """Return the given optimizer for a message: a name in quotes, or a class's or function's
    name.
    """
    if isinstance(given, dict):
        return repr(given)
    return repr(given) if isinstance(given, str) else getattr(given, "__name__", describe(given))


def is_schedule_free(optimizer: Optimizer) -> bool:
    """Whether an optimizer trains at other weights than those to evaluate with.

    Schedule-Free's optimizers do, and switch with `train()` and `eval()` (Defazio et al., The Road
    Less Scheduled, 2024, arXiv:2405.15682).
    """
    train, evaluate = getattr(optimizer, "train", None), getattr(optimizer, "eval", None)
    return callable(train) and callable(evaluate)


def warn_of_flags(model: torch.nn.Module) -> None:
    """Warn of Keras's `layer.trainable = False` on a torch layer, which learns all the same."""
    for path, module in model.named_modules():
        is_set = vars(module).get("trainable") is False and not _has_flag(type(module))
        if is_set and any(parameter.requires_grad for parameter in module.parameters()):
            warn(
                f"{path}.trainable = False has no effect on a torch layer, which still learns. "
                f"Write {path}.requires_grad_(False)."
            )


def _has_flag(kind: type) -> bool:
    """Whether a class defines the attribute itself, and so may give it another meaning."""
    codes = [getattr(f, "__code__", None) for base in kind.__mro__ for f in vars(base).values()]
    return any("trainable" in code.co_names for code in codes if code is not None)
