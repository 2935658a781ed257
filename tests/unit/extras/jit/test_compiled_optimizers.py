"""`jit_compile`: every optimizer of torch, with each of its options, makes its own eager updates.

The classes and their options come from `torch.optim` itself. Each option has a parameter group, so
that one compilation has all of a class.
"""

import copy
import inspect
import itertools
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import fitkit
from fitkit.extras.jit.programs import traces_gradients
from tests.compiling import HAS_COMPILER, TRACED

pytestmark = pytest.mark.skipif(not traces_gradients(), reason="this torch compiles no gradients")

torch.manual_seed(0)
X, Y = torch.randint(7, (48, 3)), torch.randint(3, (48,))
SIZE, EPOCHS, RATE = 8, 2, 0.02


class Layer(nn.Module):
    """A net of one layer, from three whole numbers (B, 3) to scores (B, 3)."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.layer = kind, LAYERS[kind]()

    def forward(self, x):
        if self.kind.startswith("embedding"):
            return self.layer(x).mean(1)
        x = x.to(next(self.parameters()).dtype) / 7
        if self.kind == "convolution":
            return self.layer(x.unsqueeze(1)).mean(-1)
        if not self.kind.startswith("recurrent"):
            return self.layer(x)
        state = torch.zeros(len(x), 3, dtype=x.dtype)
        for number in x.unbind(1):
            state = self.layer(number.unsqueeze(1), state)
        return state


LAYERS = {
    "linear": lambda: nn.Linear(3, 3),
    "convolution": lambda: nn.Conv1d(1, 3, 2),
    "embedding": lambda: nn.Embedding(7, 3),
    "recurrent": lambda: nn.GRUCell(1, 3),
    "matrix": lambda: nn.Linear(3, 3, bias=False),
    "recurrent, no biases": lambda: nn.RNNCell(1, 3, bias=False),
    "embedding, sparse": lambda: nn.Embedding(7, 3, sparse=True),
}
KINDS = {  # of the layers that a class takes
    optim.Muon: ["matrix", "embedding", "recurrent, no biases"],
    optim.SparseAdam: ["embedding, sparse"],
}
EVERY = ["linear", "convolution", "embedding", "recurrent"]


class Sum(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.parts = nn.ModuleList(map(Layer, kinds))

    def forward(self, x):
        return sum(part(x) for part in self.parts)


CLASSES = {
    name: kind
    for name, kind in vars(optim).items()
    if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
}
# A value of each option, with what else it needs; None for those that torch itself refuses here.
VALUES = {
    "lr": {"lr": 0.01},
    "momentum": {"momentum": 0.8},
    "dampening": {"momentum": 0.9, "dampening": 0.5},
    "weight_decay": {"weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "maximize": {"maximize": True, "weight_decay": 0.05},
    "foreach": {"foreach": True, "weight_decay": 0.1},
    "fused": {"fused": True, "weight_decay": 0.1},
    "betas": {"betas": (0.8, 0.95)},
    "eps": {"eps": 1e-3},
    "amsgrad": {"amsgrad": True, "weight_decay": 0.1},
    "decoupled_weight_decay": {"decoupled_weight_decay": True, "weight_decay": 0.1},
    "momentum_decay": {"momentum_decay": 0.1},
    "lr_decay": {"lr_decay": 0.1},
    "initial_accumulator_value": {"initial_accumulator_value": 0.1},
    "rho": {"rho": 0.5},
    "alpha": {"alpha": 0.5},
    "centered": {"centered": True, "momentum": 0.5},
    "lambd": {"lambd": 0.1},
    "t0": {"t0": 2.0, "lambd": 0.1},
    "etas": {"etas": (0.4, 1.3)},
    "step_sizes": {"step_sizes": (1e-3, 0.03)},
    "beta2_decay": {"beta2_decay": -0.5},
    "d": {"d": 0.5},
    "ns_coefficients": {"ns_coefficients": (3.0, -4.0, 2.0)},
    "ns_steps": {"ns_steps": 3},
    "adjust_lr_fn": {"adjust_lr_fn": "match_rms_adamw"},
    "max_iter": {"max_iter": 2},
    "max_eval": {"max_eval": 3},
    "tolerance_grad": {"tolerance_grad": 1e-3},
    "tolerance_change": {"tolerance_change": 1e-3},
    "history_size": {"history_size": 2},
    "line_search_fn": {"line_search_fn": "strong_wolfe"},
    "differentiable": None,
    "capturable": None,
}
OWN_VALUES = {  # of other forms
    (optim.Adafactor, "eps"): {"eps": (1e-20, 1e-2)},
    (optim.Adagrad, "initial_accumulator_value"): None,  # read only by `__init__`; see `BESIDE`
    (optim.RMSprop, "momentum"): {"momentum": 0.8, "maximize": True},
    (optim.SGD, "dampening"): None,  # not compiled; see `ALONE`
}
BESIDE = {optim.Adagrad: {"initial_accumulator_value": 0.1}}
# These have no function that can be traced, or one that rounds other numbers.
AS_WRITTEN = {
    optim.Adafactor, optim.ASGD, optim.Muon, optim.NAdam, optim.RAdam, optim.Rprop, optim.SparseAdam
}  # fmt: skip
HOW = {
    "one by one": {},
    "norms clipped": {"gradient_clip_val": 0.05},
    "values clipped": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulated": {"accumulate_grad_batches": 2},
    "several in a call": {"steps_per_execution": 2},
}


def options_of(kind):
    """What the groups of an optimizer have: nothing of their own, or a value of one option."""
    names = list(inspect.signature(kind).parameters)[1:]
    found = [OWN_VALUES.get((kind, name), VALUES[name]) for name in names]
    return [{}, *(one for one in found if one is not None)]


class Case:
    """Makes a net with a group of parameters for each set of options, and its optimizer."""

    def __init__(self, kind, options, all_layers=False, dtype=torch.float64, **beside):
        self.kind, self.options, self.beside = kind, options, {**BESIDE.get(kind, {}), **beside}
        layers = KINDS.get(kind, EVERY)
        self.each, self.dtype = (layers if all_layers else [None]), dtype
        turns = itertools.cycle(layers)
        self.layers = [layer or next(turns) for _ in options for layer in self.each]

    def make(self):
        torch.manual_seed(1)
        net = Sum(self.layers).to(self.dtype)
        size, parts = len(self.each), list(net.parts)
        groups = [
            {"params": [p for part in parts[i * size : (i + 1) * size] for p in part.parameters()],
             **own}
            for i, own in enumerate(self.options)
        ]  # fmt: skip
        given = {"lr": RATE, **self.beside}
        if self.kind is optim.LBFGS:  # it takes one group
            return net, self.kind(net.parameters(), **{**given, **self.options[0]})
        return net, self.kind(groups, **given)


def plainly_trained(case, how):
    net, optimizer = case.make()
    parts, clip = how.get("accumulate_grad_batches", 1), how.get("gradient_clip_val")

    def closure():
        optimizer.zero_grad()
        loss = sum(F.cross_entropy(net(x), y) / parts for x, y in batches)
        loss.backward()
        if clip and "gradient_clip_algorithm" in how:
            nn.utils.clip_grad_value_(net.parameters(), clip)
        elif clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        return loss

    for start in [*range(0, len(X), SIZE * parts)] * EPOCHS:
        group = slice(start, start + SIZE * parts)
        batches = list(zip(X[group].split(SIZE), Y[group].split(SIZE), strict=True))
        optimizer.step(closure)
    return net.state_dict()


def trained(case, how, jit_compile):
    """Train; return the net, and what was said of the optimizer."""
    net, optimizer = case.make()
    model = fitkit.Model(net)
    model.compile(optimizer, "cross_entropy", accelerator="cpu", devices=1,
                  jit_compile=jit_compile, **how)  # fmt: skip
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.fit(X, Y, batch_size=SIZE, epochs=EPOCHS, shuffle=False, verbose=0)
    return net, [str(one.message) for one in found if "jit_compile" in str(one.message)]


def check(case, how, jit_compile, atol=1e-10):
    """Compare with plain PyTorch; return what was said of the optimizer."""
    before = copy.deepcopy(case.make()[0].state_dict())
    expected = plainly_trained(case, HOW[how])
    net, said = trained(case, HOW[how], jit_compile)
    for key, value in expected.items():
        assert not torch.equal(value, before[key])
        torch.testing.assert_close(net.state_dict()[key], value, rtol=0, atol=atol, msg=key)
    return said


def cases_of(kind, **more):
    if kind is optim.LBFGS:
        return [Case(kind, [own], **more) for own in options_of(kind)]
    return [Case(kind, options_of(kind), **more)]


def hows(kind):
    """The ways of training that fitkit takes together with a class."""
    if kind is optim.LBFGS:
        return [how for how in HOW if how != "accumulated"]
    return [how for how in HOW if kind is not optim.SparseAdam or "clipped" not in how]


FAST = ("Adam", "SGD", "Muon", "LBFGS")


@pytest.mark.parametrize(
    "name",
    [
        name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(CLASSES)
    ],
)
def test_a_traced_update_is_the_optimizers_own(name):
    """Each class in one way; "several in a call" is a copy of the graph for each step."""
    kind, number = CLASSES[name], sorted(CLASSES).index(name)
    *ways, copies = hows(kind)
    how = copies if kind is optim.SGD else ways[number % len(ways)]
    said = check(cases_of(kind)[0], how, {"backend": "eager"})
    assert bool(said) == (kind in AS_WRITTEN), said


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_traced_update_is_the_optimizers_own_in_every_way_on_every_layer(name):
    for how in hows(CLASSES[name]):
        for case in cases_of(CLASSES[name], all_layers=True):
            check(case, how, {"backend": "eager"})


@pytest.mark.slow
@pytest.mark.timeout(600)
@HAS_COMPILER
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_compiled_update_is_the_optimizers_own(name, how):
    if how in hows(CLASSES[name]):
        check(cases_of(CLASSES[name])[0], how, True)


NUMBER = torch.tensor
OTHERS = {  # with what torch's own step computes otherwise than its traced function
    "dampening": (optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "a float32 rate": (optim.Adam, {"lr": NUMBER(RATE)}),
    "float32 betas": (optim.Adam, {"betas": (NUMBER(0.9), NUMBER(0.99))}),
    "a float32 decay": (optim.SGD, {"weight_decay": NUMBER(0.1)}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_an_optimizer_that_would_compute_other_numbers_steps_by_itself(name):
    kind, options = OTHERS[name]
    said = check(Case(kind, [options]), "one by one", TRACED)
    assert "steps by itself" in " ".join(said)


WIDE = partial(torch.tensor, dtype=torch.float64)
NUMBERS = {
    "a float64 rate": (optim.Adam, {"lr": WIDE(RATE)}, torch.float64),
    "float64 betas": (optim.AdamW, {"betas": (WIDE(0.9), WIDE(0.99))}, torch.float64),
    "a float32 rate for such weights": (optim.Adam, {"lr": NUMBER(RATE)}, torch.float32),
    "float32 weights": (optim.NAdam, {"weight_decay": 0.1}, torch.float32),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_tensors_among_the_settings_are_followed(name):
    kind, options, dtype = NUMBERS[name]
    atol = 1e-10 if dtype is torch.float64 else 1e-6
    assert not check(Case(kind, [options], dtype=dtype), "one by one", TRACED, atol)


@pytest.mark.parametrize("kind", [optim.Adam, optim.Adagrad, optim.NAdam])
def test_steps_are_counted_where_the_default_is_float64(kind):
    """Then the counts are float64 too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert not check(Case(kind, [{}]), "one by one", TRACED)
    finally:
        torch.set_default_dtype(before)


REFUSED = [
    (kind, name)
    for kind in CLASSES.values()
    for name in ("capturable", "differentiable")
    if name in inspect.signature(kind).parameters
]


@pytest.mark.parametrize(("kind", "name"), REFUSED[::5])  # each way, some classes
def test_what_torch_refuses_is_refused_in_its_words(kind, name):
    errors = []
    for how in (False, {"backend": "eager"}):
        with pytest.raises((AssertionError, RuntimeError)) as error:
            trained(Case(kind, [{}], **{name: True}), {}, how)
        errors.append(str(error.value))
    assert errors[0] == errors[1]
