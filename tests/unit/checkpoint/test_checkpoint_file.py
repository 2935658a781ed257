"""Checkpoints: weights and state in one file, all of it checked before anything is changed."""

import copy

import pytest
import torch

from fitkit.checkpoint import (
    check_fused_state,
    check_optimizer_state,
    fitting_weights,
    load_weights,
    open_checkpoint,
    save_checkpoint,
    save_weights,
    write_container,
)
from fitkit.errors import ArgumentTypeError, CheckpointError, ConfigurationError
from tests.nets import normed
from tests.reference import assert_same_weights


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.h5"


def trained(kind=torch.optim.AdamW):
    module = normed()
    optimizer = kind(module.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        module(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    return module, optimizer


def test_weights_and_state_come_back_together(path):
    module, optimizer = trained()
    save_checkpoint(path, module.state_dict(), {"optimizer": optimizer.state_dict(), "epoch": 3})
    other = normed()
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.path == str(path)
        assert checkpoint.software["torch"] == torch.__version__
        assert checkpoint.state["epoch"] == 3
        ready = fitting_weights(checkpoint.weights, checkpoint.path, other)
        assert not torch.equal(other[0].weight, module[0].weight)  # nothing is changed yet
        ready.assign()
        state = checkpoint.state["optimizer"]
    assert_same_weights(other, module)
    assert torch.equal(state["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_the_state_stays_as_it_is_when_the_file_is_gone(path):
    save_checkpoint(path, {}, {"a": torch.arange(100_000)})
    with open_checkpoint(path) as checkpoint:
        state = checkpoint.state
    with open(path, "r+b") as file:
        file.truncate(0)
    assert torch.equal(state["a"], torch.arange(100_000))


def test_a_checkpoint_is_a_file_of_weights_too(path):
    module, optimizer = trained()
    save_checkpoint(path, module.state_dict(), {"optimizer": optimizer.state_dict()})
    other = normed()
    load_weights(path, other)
    assert torch.equal(other[0].weight, module[0].weight)


def test_weights_that_the_state_shares_are_written_once(path):
    module = torch.nn.Linear(300, 300)
    save_checkpoint(path, module.state_dict(), {"average": module.weight})
    assert path.stat().st_size < 1.1 * module.weight.nbytes


def test_a_file_without_a_state_says_what_it_is(path, tmp_path):
    save_weights(path, normed().state_dict())
    with pytest.raises(CheckpointError, match="FK054"):
        open_checkpoint(path).__enter__()
    write_container(path, {"kind": "profile", "state": {"dict": {}}}, [])
    with pytest.raises(CheckpointError, match="holds 'profile', not 'checkpoint'"):
        open_checkpoint(path).__enter__()
    with pytest.raises(CheckpointError, match="has no weights in it: it holds 'profile'"):
        load_weights(path, normed())
    with pytest.raises(FileNotFoundError):
        open_checkpoint(tmp_path / "missing.h5").__enter__()


def test_a_state_or_name_that_cannot_be_is_refused_and_the_old_file_stays(path, tmp_path):
    save_checkpoint(path, {}, {"epoch": 1})
    with pytest.raises(
        ConfigurationError, match=r"state\['callbacks'\]\[1\]=.*could store a Linear"
    ):
        save_checkpoint(path, {}, {"callbacks": [0, torch.nn.Linear(1, 1)]})
    with pytest.raises(ArgumentTypeError, match="must be a dict"):
        save_checkpoint(path, {}, None)
    with pytest.raises(ConfigurationError, match=r"'\.safetensors' holds weights alone"):
        save_checkpoint(tmp_path / "run.safetensors", {}, {})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.state == {"epoch": 1}


OPTIMIZERS = ["Adafactor", "Adagrad", "Adam", "ASGD", "LBFGS", "NAdam", "RMSprop", "Rprop", "SGD"]


def with_state(name, *shapes, momentum=None):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    options = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    optimizer = getattr(torch.optim, name)(parameters, lr=0.1, **options)

    def closure():
        optimizer.zero_grad()
        loss = sum(item.square().sum() for item in parameters)
        loss.backward()
        return loss

    optimizer.step(closure)
    return optimizer


def fresh(name, *shapes):
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    return getattr(torch.optim, name)(parameters, lr=0.1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_fits_the_optimizer_it_came_from_and_one_like_it(name):
    optimizer = with_state(name, (4, 3), (4,), (2, 3, 4))
    check_optimizer_state(optimizer, optimizer.state_dict())
    check_optimizer_state(fresh(name, (4, 3), (4,), (2, 3, 4)), optimizer.state_dict())


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "LBFGS"])
def test_a_state_for_parameters_of_other_shapes_does_not_fit_a_new_optimizer(name):
    state = with_state(name, (4, 3), (4,)).state_dict()
    with pytest.raises(CheckpointError, match=r"(?s)what differs .*parameter 0: '.*\(5, 3\)"):
        check_optimizer_state(fresh(name, (5, 3), (4,)), state)


@pytest.fixture
def state():
    return with_state("Adam", (4, 3), (4,)).state_dict()


def refusal(state, optimizer=None):
    optimizer = optimizer or fresh("Adam", (4, 3), (4,))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointError) as caught:
        check_optimizer_state(optimizer, state)
    assert optimizer.state_dict() == before
    return str(caught.value)


def test_what_does_not_fit_is_listed_at_once(state):
    state["state"][0]["exp_avg"] = torch.ones(3, 4)
    state["state"][1]["exp_avg_sq"] = torch.ones(4, dtype=torch.complex64)
    state["param_groups"][0]["betas"] = 0.9
    message = refusal(state)
    assert "doesn't fit this Adam; nothing was loaded" in message
    assert "parameter 0: 'exp_avg' is float32 (3, 4), the parameter float32 (4, 3)" in message
    assert "parameter 1: 'exp_avg_sq' is complex64 (4,), the parameter float32 (4,)" in message
    assert "group 0 has betas=0.9, the optimizer (0.9, 0.999)" in message
    assert "what differs (3)" in message


def test_a_state_of_another_number_of_parameters_or_groups_is_refused(state):
    assert "its groups have [2] parameters, the optimizer's [1]" in refusal(
        state, fresh("Adam", (4, 3))
    )


def test_the_state_of_another_kind_of_optimizer_is_refused(state):
    assert "group 0 has no 'dampening'" in refusal(state, fresh("SGD", (4, 3), (4,)))
    other = with_state("SGD", (4, 3), (4,)).state_dict()
    assert "group 0 has no 'betas', so another kind of optimizer made it" in refusal(other)


def test_a_state_lacking_a_tensor_that_the_optimizer_keeps_is_refused(state):
    del state["state"][1]["exp_avg_sq"]
    optimizer = with_state("Adam", (4, 3), (4,))
    with pytest.raises(CheckpointError, match="parameter 1: 'exp_avg_sq' is missing"):
        check_optimizer_state(optimizer, state)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: [],
        lambda state: {},
        lambda state: {**state, "state": []},
        lambda state: {**state, "param_groups": {}},
        lambda state: {**state, "param_groups": [{"params": 3}]},
        lambda state: {**state, "param_groups": [{**state["param_groups"][0], "params": [0, 0]}]},
        lambda state: {**state, "param_groups": [{**state["param_groups"][0], "params": [[], 1]}]},
        lambda state: {**state, "state": {0: 1}},
        lambda state: {**state, "state": {7: {}}},
    ],
    ids=range(9),
)
def test_what_is_no_state_of_an_optimizer_is_refused(state, spoil):
    assert "doesn't fit this Adam" in refusal(spoil(state))


def test_a_scheduler_may_have_added_options_and_an_older_torch_lack_some(state):
    group = state["param_groups"][0]
    group.update(initial_lr=0.1, max_lr=1.0)
    del group["decoupled_weight_decay"], group["foreach"]
    optimizer = fresh("Adam", (4, 3), (4,))
    check_optimizer_state(optimizer, state)
    optimizer.load_state_dict(state)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def every_optimizer():
    names = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    return sorted(names - {"Optimizer"})


def stepped(name, steps=3, **options):
    """One of torch's optimizers after some steps, and a new one like it."""
    torch.manual_seed(0)
    shapes = [(4, 3)] if name == "Muon" else [(4, 3), (4,), ()]
    if name == "SparseAdam":
        shapes = [(4, 3)]
    kind = getattr(torch.optim, name)
    made = []
    for _ in range(2):
        parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        made.append(kind(parameters, **options))
    optimizer = made[0]
    held = optimizer.param_groups[0]["params"]

    def closure():
        optimizer.zero_grad()
        loss = sum(item.square().sum() for item in held)
        loss.backward()
        if name == "SparseAdam":
            held[0].grad = held[0].grad.to_sparse()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return made


OPTIONS = {
    "Adam": [{"amsgrad": True}, {"fused": True}, {"lr": torch.tensor(0.1)}],
    "AdamW": [{"amsgrad": True}],
    "Muon": [{"momentum": 0.5}],
    "LBFGS": [{"line_search_fn": "strong_wolfe", "history_size": 2}],
    "NAdam": [{"decoupled_weight_decay": True}],
    "RMSprop": [{"momentum": 0.9}, {"centered": True}],
    "SGD": [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
}
EVERY = [(name, o) for name in every_optimizer() for o in [{}, *OPTIONS.get(name, [])]]


@pytest.mark.parametrize(("name", "options"), EVERY, ids=str)
def test_what_each_optimizer_of_torch_keeps_fits_and_nothing_else(name, options):
    old, new = stepped(name, **options)
    state = old.state_dict()
    check_optimizer_state(old, state)
    check_optimizer_state(new, state)
    spoilt = 0
    for identity, entry in state["state"].items():
        for key, value in entry.items():
            if not isinstance(value, torch.Tensor):
                continue
            # One number is whatever its class divides by; else all that is smaller or larger.
            wrong = [torch.ones(7), torch.ones(4, 1), torch.ones(2, 2, 2), "x"]
            wrong += [torch.tensor(0.5), torch.ones(1)] if value.numel() > 1 else []
            wrong += [] if value.shape == (4, 3) else [torch.ones(4, 3)]
            for other in wrong:
                if isinstance(other, torch.Tensor) and other.shape == value.shape:
                    continue
                forged = {**state["state"], identity: {**entry, key: other}}
                for optimizer in (old, new):
                    with pytest.raises(CheckpointError, match=f"parameter {identity}: '{key}'"):
                        check_optimizer_state(optimizer, {**state, "state": forged})
                spoilt += 1
    assert spoilt or name in ("SGD", "LBFGS")


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 1j, True])
def test_a_count_of_steps_is_a_number_from_zero(state, value):
    state["state"][0]["step"] = torch.tensor(value)
    assert "parameter 0: 'step' is" in refusal(state)


def test_a_state_of_unknown_names_or_parameters_is_refused(state):
    state["state"][0]["other"] = torch.ones(4, 3)
    assert "parameter 0: 'other' is nothing that Adam keeps" in refusal(state)
    del state["state"][0]["other"], state["state"][0]["exp_avg"]
    assert "parameter 0: 'exp_avg' is missing" in refusal(state)
    state["state"][(0, 1)] = {}
    assert "for parameter (0, 1), which is in no group" in refusal(state)


def test_an_optimizer_of_the_users_own_may_keep_what_it_likes():
    class Own(torch.optim.Adam):
        pass

    state = with_state("Adam", (4, 3)).state_dict()
    state["state"][0]["exp_avg"] = torch.ones(2)
    check_optimizer_state(Own([torch.nn.Parameter(torch.ones(4, 3))]), state)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "SGD"])
@pytest.mark.parametrize("other", [torch.ones(1), torch.ones(()), torch.ones(12), torch.ones(4, 1)])
def test_a_fused_step_is_refused_over_state_of_another_size_whoever_has_set_it(name, other):
    class Own(getattr(torch.optim, name)):
        pass

    for kind in (getattr(torch.optim, name), Own):
        parameter = torch.nn.Parameter(torch.ones(4, 3))
        parameter.grad = torch.ones(4, 3)
        options = {"momentum": 0.9} if name == "SGD" else {}
        optimizer = kind([parameter], lr=0.1, fused=True, **options)
        optimizer.step()
        check_fused_state(optimizer)
        entry = optimizer.state[parameter]
        for key in [key for key in entry if key != "step"]:
            before, entry[key] = entry[key], other
            with pytest.raises(ConfigurationError, match=f"'{key}' is float32"):
                check_fused_state(optimizer)
            entry[key] = before
        check_fused_state(optimizer)
