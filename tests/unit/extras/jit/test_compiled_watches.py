"""`jit_compile`: what changes between two steps holds for the next one, wherever it stands.

Each kind of change is made by a callback between batches, between epochs, and between two calls of
`fit`. The weights are those of the same program without compiling.
"""

import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize, prune

import fitkit
from fitkit.extras.jit.programs import traces_gradients

pytestmark = [
    pytest.mark.skipif(not traces_gradients(), reason="this torch compiles no gradients"),
    pytest.mark.filterwarnings("ignore"),
]

NUMBER, TENSOR, TABLE = 1.0, torch.zeros(3).double(), {"scale": 1.0}


@dataclasses.dataclass
class Config:
    scale: float = 1.0
    shifts: list = dataclasses.field(default_factory=lambda: [0.0])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(5, 5), 1.0

    def forward(self, x):
        return torch.tanh(self.layer(x)) * self.scale


class Net(nn.Module):
    """Reads a number from everywhere."""

    factor = 1.0

    def __init__(self, breaks):
        super().__init__()
        self.first, self.norm, self.act = nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh()
        self.block, self.out = Block(), nn.Linear(5, 3)
        self.breaks = breaks  # whether no graph can hold the whole net
        self.number, self.count, self.numbers, self.held = 1.0, 1, [1.0], {"scale": 1.0}
        self.config, self.branch, self.extra = Config(), "plain", []
        self.register_buffer("shift", torch.zeros(3))
        self.tensor = torch.zeros(3).double()
        box = [1.0]
        self.box, self.closure = box, lambda x: x * box[0]
        self.partial = functools.partial(torch.mul, other=1.0)

    def forward(self, x):
        x = self.block(self.act(self.norm(self.first(x))))
        x = self.out(x) * self.number * self.count * self.numbers[0] * self.held["scale"]
        x = self.closure(x) * self.factor * self.config.scale + self.config.shifts[0]
        x = x * NUMBER * TABLE["scale"] + TENSOR + self.tensor + self.shift
        if self.branch == "other":
            x = x.square()
        for one in self.extra:
            x = x * one
        made = torch.full((3,), 1 / 3)  # of the default dtype
        if torch.are_deterministic_algorithms_enabled():
            x = x * 0.5
        if self.breaks and float(x.sum()) > 1e6:
            x = x + 1
        return self.partial(x) + made


CHANGES = {}


def kind(change):
    CHANGES[change.__name__] = change
    return change


# ------------------------------------------------------------------ numbers of Python


@kind
def an_attribute(model):
    model.net.number *= 0.5


@kind
def an_integer(model):
    model.net.count += 1


@kind
def an_item_of_a_list(model):
    model.net.numbers[0] *= 0.5


@kind
def an_entry_of_a_dict(model):
    model.net.held["scale"] *= 0.5


@kind
def a_list_that_grows(model):
    model.net.extra.append(0.7)


@kind
def an_attribute_of_a_layer(model):
    model.net.block.scale *= 0.5


@kind
def an_attribute_of_an_object(model):
    model.net.config.scale *= 0.5


@kind
def an_item_of_an_objects_list(model):
    model.net.config.shifts[0] += 0.5


@kind
def an_object(model):
    model.net.config = Config(0.3, [0.2])


@kind
def a_class_attribute(model):
    Net.factor *= 0.5


@kind
def a_global(model):
    globals()["NUMBER"] *= 0.5


@kind
def an_entry_of_a_global(model):
    TABLE["scale"] *= 0.5


@kind
def a_closures_number(model):
    model.net.box[0] *= 0.5


@kind
def a_partial(model):
    model.net.partial = functools.partial(torch.mul, other=0.5)


@kind
def a_branch(model):
    model.net.branch = "other"


# ------------------------------------------------------------------ tensors


@kind
def a_buffer_in_place(model):
    model.net.shift.add_(torch.arange(3))


@kind
def a_buffer(model):
    model.net.shift = model.net.shift + torch.arange(3)


@kind
def a_plain_tensor(model):
    model.net.tensor = model.net.tensor + torch.arange(3)


@kind
def a_global_tensor(model):
    globals()["TENSOR"] = TENSOR + torch.arange(3)


@kind
def a_weight_in_place(model):
    with torch.no_grad():
        model.net.first.weight.mul_(0.5)


@kind
def a_weights_data(model):
    model.net.first.weight.data = model.net.first.weight.data * 0.5


@kind
def loaded_weights(model):
    model.net.load_state_dict({k: v * 0.5 for k, v in model.net.state_dict().items()})


# ------------------------------------------------------------------ modules


def halved(module, given, output):
    return output * 0.5


@kind
def a_forward_hook(model):
    model.net.act.register_forward_hook(halved)


@kind
def a_hook_of_the_net(model):
    model.net.register_forward_hook(halved)


@kind
def a_hook_of_the_model(model):
    model.register_forward_hook(halved)


@kind
def a_hook_that_is_removed(model):
    if hasattr(model, "handle"):
        model.handle.remove()
    model.handle = model.net.act.register_forward_hook(halved)


@kind
def a_forward_pre_hook(model):
    model.net.act.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))


@kind
def a_backward_hook(model):
    model.net.act.register_full_backward_hook(lambda module, before, after: (before[0] * 0.5,))


@kind
def a_hook_of_all_modules(model):
    model.handle = register_module_forward_hook(
        lambda module, given, output: output * 0.5 if isinstance(module, nn.Tanh) else None
    )
    CLEANUPS.append(model.handle.remove)


@kind
def a_hook_of_a_weight(model):
    model.net.first.weight.register_hook(lambda gradient: gradient * 0.5)


@kind
def a_hook_after_a_gradient(model):
    def halve(weight):
        weight.grad.mul_(0.5)

    model.net.first.weight.register_post_accumulate_grad_hook(halve)


@kind
def a_mode(model):
    model.net.norm.eval()


@kind
def a_layer(model):
    model.net.act = nn.Sigmoid()


@kind
def a_method(model):
    model.net.act.forward = torch.sin


@kind
def a_method_of_the_net(model):
    own = model.net.forward
    model.net.forward = lambda x: own(x) * 0.5


class Half(nn.Module):
    def forward(self, weight):
        return weight * 0.5


@kind
def a_parametrization(model):
    parametrize.register_parametrization(model.net.first, "weight", Half())


@kind
def a_pruning(model):
    prune.l1_unstructured(model.net.first, "weight", 0.3)


@kind
def a_frozen_layer(model):
    model.net.first.requires_grad_(not model.net.first.weight.requires_grad)


@kind
def a_momentum(model):
    model.net.norm.momentum *= 0.5


@kind
def an_epsilon(model):
    model.net.norm.eps *= 100


# ------------------------------------------------------------------ the optimizer


def setting(name, value):
    def change(model):
        for group in model.optimizer.param_groups:
            group[name] = value

    change.__name__ = f"the optimizers {name}"
    return kind(change)


setting("lr", 0.03)
setting("betas", (0.5, 0.7))
setting("eps", 0.1)
setting("weight_decay", 0.3)
setting("maximize", True)


@kind
def a_rate_of_one_group(model):
    model.optimizer.param_groups[0]["lr"] *= 0.5


@kind
def a_cleared_state(model):
    model.optimizer.state.clear()


@kind
def a_parameters_state(model):
    model.optimizer.state[model.net.out.weight] = {}


@kind
def a_tensor_of_a_state(model):
    state = model.optimizer.state[model.net.out.weight]
    state["exp_avg"] = torch.zeros_like(state["exp_avg"])


@kind
def a_tensor_of_a_state_in_place(model):
    model.optimizer.state[model.net.out.weight]["exp_avg"].zero_()


@kind
def a_count_of_a_state(model):
    model.optimizer.state[model.net.out.weight]["step"] = torch.tensor(20.0)


@kind
def a_count_of_a_state_in_place(model):
    model.optimizer.state[model.net.out.weight]["step"].fill_(20.0)


@kind
def a_loaded_state(model):
    state = model.optimizer.state_dict()
    for entry in state["state"].values():
        entry["exp_avg"] = entry["exp_avg"] * 0
    model.optimizer.load_state_dict(state)


@kind
def a_parameter_taken_out_of_a_group(model):
    found = model.optimizer.param_groups[0]["params"]
    if len(found) > 2:
        found.pop(0)


@kind
def a_group_of_its_own(model):
    first, *_ = model.optimizer.param_groups
    if len(first["params"]) > 2:
        moved = first["params"].pop(0)
        model.optimizer.add_param_group({"params": [moved], "lr": 0.001})


@kind
def a_group_replaced(model):
    model.optimizer.param_groups[0] = {**model.optimizer.param_groups[0], "lr": 0.001}


@kind
def all_groups_replaced(model):
    model.optimizer.param_groups = [{**g, "lr": 0.001} for g in model.optimizer.param_groups]


@kind
def a_hook_before_the_step(model):
    def halve(optimizer, given, named):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(p.abs().detach())

    model.optimizer.register_step_pre_hook(halve)


@kind
def a_hook_after_the_step(model):
    def halve(optimizer, given, named):
        with torch.no_grad():
            model.net.out.weight.mul_(0.9)

    model.optimizer.register_step_post_hook(halve)


@kind
def a_step_method(model):
    own = model.optimizer.step

    def step(closure=None):
        own()
        with torch.no_grad():
            model.net.out.weight.mul_(0.9)

    model.optimizer.step = step


# ------------------------------------------------------------------ torch's settings


@kind
def the_default_dtype(model):
    torch.set_default_dtype(torch.float64)


@kind
def determinism(model):
    torch.use_deterministic_algorithms(True)


@kind
def autocast(model):
    torch.set_autocast_enabled("cpu", True)


# ------------------------------------------------------------------ the data


@kind
def the_data_in_place(model):
    model.x.mul_(0.5)


CLEANUPS = []


def restore():
    globals()["NUMBER"], globals()["TENSOR"], TABLE["scale"] = 1.0, torch.zeros(3).double(), 1.0
    Net.factor = 1.0
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.set_autocast_enabled("cpu", False)
    while CLEANUPS:
        CLEANUPS.pop()()


@pytest.fixture(autouse=True)
def restored():
    yield
    restore()


class Changes(fitkit.callbacks.Callback):
    """Makes a change when an epoch begins."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.change(self.model)


class ChangesAtBatch(Changes):
    """Makes a change between batches."""

    def on_epoch_begin(self, epoch, logs=None):
        pass

    def on_train_batch_end(self, batch, logs=None):
        if self.model.current_epoch == 1 and batch == 3:
            self.change(self.model)


WHEN = ["between batches", "between epochs", "between fits"]


def trained(change, when, steps, jit_compile, breaks=False):
    """Train; return the weights and the losses."""
    restore()
    torch.manual_seed(0)
    x, y = torch.randn(32, 6).double(), torch.randint(3, (32,))
    model = fitkit.Model(Net(breaks).double())
    model.x = x
    optimizer = torch.optim.Adam(model.net.parameters(), 0.01)
    model.compile(optimizer, "cross_entropy", accelerator="cpu", devices=1,
                  steps_per_execution=steps, jit_compile=jit_compile)  # fmt: skip
    callbacks = {WHEN[0]: [ChangesAtBatch(change)], WHEN[1]: [Changes(change)]}.get(when)
    options = {"batch_size": 4, "shuffle": False, "verbose": 0}
    losses = model.fit(x, y, epochs=2, callbacks=callbacks, **options).history["loss"]
    if when == "between fits":
        change(model)
    losses += model.fit(x, y, epochs=2, **options).history["loss"]
    return {name: value.clone() for name, value in model.net.state_dict().items()}, losses


def check(name, when, steps, breaks=False):
    change = CHANGES[name]
    wanted, expected = trained(change, when, steps, False, breaks)
    found, losses = trained(change, when, steps, {"backend": "eager"}, breaks)
    assert losses == pytest.approx(expected, abs=1e-10)
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-10, msg=key)


@pytest.mark.parametrize("name", list(CHANGES)[::14])  # the slow tests have them all
def test_what_changes_between_steps_holds_for_the_next_one(name):
    number = list(CHANGES).index(name) // 14
    check(name, WHEN[number % 3], [1, 4][number % 2])


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_steps_holds_wherever_it_changes(name, when, steps):
    check(name, when, steps)


@pytest.mark.slow
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_holds_for_a_net_that_is_compiled_alone(name, when):
    check(name, when, 1, breaks=True)


@pytest.mark.parametrize("name", ["a_forward_hook", "a_hook_of_all_modules"])
def test_a_net_that_is_compiled_alone_follows_its_modules(name):
    check(name, "between epochs", 1, breaks=True)


def test_each_change_matters():
    def nothing(model):
        pass

    plain, _ = trained(nothing, "between epochs", 1, False)
    for name, change in CHANGES.items():
        if name == "autocast":  # fitkit sets it in each step
            continue
        weights, _ = trained(change, "between epochs", 1, False)
        same = weights.keys() == plain.keys()
        assert not (same and all(torch.equal(plain[k], weights[k]) for k in plain)), name
