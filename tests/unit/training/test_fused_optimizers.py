"""Optimizers given by name make their step in one pass where they can, and only there."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F

import fitkit
from fitkit.errors import ConfigurationError
from fitkit.optimizers import OPTIMIZERS
from fitkit.training.update import ready_optimizers
from tests.nets import classification, dense
from tests.reference import assert_same_weights, plain_loop, slices

X, LABELS = classification(48, 6, seed=1)
NAMES = ["adam", "adamw", "sgd", "adagrad"]


def compiled(optimizer, net=None, **arguments):
    model = fitkit.Model(dense(6, 8, 3) if net is None else net)
    model.compile(optimizer, "cross_entropy", accelerator="cpu", devices=1, **arguments)
    return model


def fit(model, x=X, epochs=1, **arguments):
    model.fit(x, LABELS, batch_size=16, epochs=epochs, shuffle=False, verbose=0, **arguments)
    return model


def is_fused(model):
    groups = model.optimizer.param_groups
    found = {group["fused"] for group in groups}
    assert found <= {None, False, True}
    assert len(found) == 1
    return found == {True}


@pytest.mark.parametrize("name", NAMES)
def test_a_fused_step_differs_from_torchs_default_in_the_last_bits_only(name):
    model, theirs = compiled(name, learning_rate=0.01), dense(6, 8, 3)
    optimizer = OPTIMIZERS[name](theirs.parameters(), lr=0.01)
    fit(model, epochs=100)
    assert is_fused(model)
    plain_loop(theirs, optimizer, slices(X, LABELS, 16), 100)
    assert_same_weights(model.net, theirs, rtol=1e-5, atol=1e-6)  # seen: 3e-7


@pytest.mark.parametrize(
    "given",
    [
        torch.optim.Adam,
        functools.partial(torch.optim.SGD, lr=0.1),
        lambda parameters: torch.optim.AdamW(parameters),
        "instance",
        "rmsprop",
        "nadam",
    ],
)
def test_an_optimizer_that_is_the_users_own_stays_as_it_was_made(given):
    net = dense(6, 8, 3)
    model = compiled(torch.optim.Adam(net.parameters()) if given == "instance" else given, net)
    fit(model)
    assert "fused" not in model.optimizer.defaults or not is_fused(model)


class Configured(fitkit.Model):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def test_configure_optimizers_is_the_users_own():
    model = Configured(dense(6, 8, 3))
    model.compile(loss="cross_entropy", accelerator="cpu", devices=1)
    assert not is_fused(fit(model))
    model.compile("adam")
    assert is_fused(fit(model))


def test_the_users_word_in_the_groups_counts():
    for name, value in (("fused", False), ("foreach", True), ("differentiable", True)):
        model = compiled("adam")
        assert is_fused(model)
        model.optimizer.param_groups[0][name] = value
        ready_optimizers(model)
        assert not is_fused(model)
        assert not model.optimizer._step_supports_amp_scaling  # a GradScaler's question


class WithExtra(torch.nn.Module):
    def __init__(self, extra):
        super().__init__()
        self.net = dense(6, 8, 3)
        self.extra = extra

    def forward(self, x):
        return self.net(x) + self.extra.abs().sum().float() * 0.1


@pytest.mark.parametrize("name", NAMES)
def test_parameters_that_no_fused_step_takes_or_takes_well_get_torchs_default(name):
    complex_too = WithExtra(torch.nn.Parameter(torch.ones(3, dtype=torch.complex64)))
    for net in (complex_too, dense(6, 8, 3).bfloat16()):
        plain = copy.deepcopy(net)
        assert not is_fused(fit(compiled(name, net)))
        assert_same_weights(net, fit(compiled(OPTIMIZERS[name], plain)).net)


class Gapped(torch.nn.Module):
    """Its weights are every third column of a larger matrix."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(6, 9)[:, ::3])

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize("name", NAMES)
def test_parameters_with_gaps_between_their_numbers_are_learned_as_others(name):
    ours, theirs = Gapped(), Gapped()
    optimizer = OPTIMIZERS[name](theirs.parameters(), lr=0.1)
    fit(compiled(name, ours, learning_rate=0.1))
    plain_loop(theirs, optimizer, slices(X, LABELS, 16))
    assert_same_weights(ours, theirs)


class Assigned(fitkit.Model):
    """Sets gradients that lie in memory otherwise than the weights."""

    automatic_optimization = False

    def training_step(self, batch, index):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        parameters = list(self.net.parameters())
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(loss, parameters), strict=True
        ):
            parameter.grad = gradient.t().contiguous().t()
        self.optimizers().step()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_any_layout_are_learned_from(name):
    plain = fit(compiled(functools.partial(OPTIMIZERS[name], lr=0.1)))
    by_hand = Assigned(dense(6, 8, 3))
    by_hand.compile(name, learning_rate=0.1, accelerator="cpu", devices=1)
    assert_same_weights(fit(by_hand).net, plain.net)


class Thaws(fitkit.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.net[0].requires_grad_(epoch > 0)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_scheduled_momentum_meets_weights_that_learn_later(precision):
    def one_cycle(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)

    found = []
    for optimizer in ("sgd", functools.partial(torch.optim.SGD, lr=0.01)):
        model = compiled(optimizer, lr_scheduler=one_cycle, precision=precision)
        found.append(fit(model, epochs=3, callbacks=Thaws()))
    assert found[0].optimizer.param_groups[0]["momentum"] > 0
    assert_same_weights(found[0].net, found[1].net)


def test_float64_and_frozen_parameters_are_taken():
    model = compiled("adam")
    model.net[0].requires_grad_(False)
    before = copy.deepcopy(model.net[0])
    assert is_fused(fit(model))
    assert_same_weights(before, model.net[0])
    model.compile(precision="64-true")
    assert is_fused(fit(model))
    model.compile(precision="bf16-true")
    assert not is_fused(fit(model))
    model.compile(precision="32-true")
    assert is_fused(fit(model))


class Looked(torch.nn.Module):
    """Looks rows up by a function, which no module tells."""

    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Parameter(torch.randn(10, 3))

    def forward(self, x):
        return F.embedding(x, self.rows, sparse=True).sum(1)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("make", [lambda: torch.nn.EmbeddingBag(10, 3, sparse=True), Looked])
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_sparse_gradients_are_learned_from(name, make, precision):
    torch.manual_seed(0)
    net = make()
    plain = copy.deepcopy(net)
    words = torch.randint(10, (48, 4))
    model = fit(compiled(name, net, learning_rate=0.5, precision=precision), words, epochs=3)
    assert not is_fused(model)
    fit(compiled(functools.partial(OPTIMIZERS[name], lr=0.5), plain, precision=precision), words, 3)
    assert_same_weights(net, plain)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_scaled_losses_give_the_same_as_an_unfused_optimizer_and_leave_out_the_same(name, clip):
    options = {"precision": "16-mixed", "gradient_clip_val": clip}
    model = compiled(name, learning_rate=0.01, **options)
    plain = compiled(functools.partial(OPTIMIZERS[name], lr=0.01), **options)
    x = X.clone()
    x[20] = float("inf")  # one batch of three has no finite gradients
    for one in (model, plain):
        fit(one, x, epochs=4)
        assert one._fitkit.fit_state.updates == 8
    assert is_fused(model)
    assert_same_weights(model, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_a_fused_training_goes_on_unfused_and_the_other_way_round(name, tmp_path):
    own = functools.partial(OPTIMIZERS[name], lr=0.01)
    for written, read, fused in ((name, own, False), (own, name, True), (name, name, True)):
        first = fit(compiled(written, learning_rate=None if written is own else 0.01))
        first.save(tmp_path / "it.h5")
        second = compiled(read, learning_rate=None if read is own else 0.01)
        second.load(tmp_path / "it.h5")
        assert_same_weights(first, second)
        fit(second)
        assert is_fused(second) is fused
        fit(first)
        assert_same_weights(first, second, rtol=1e-5, atol=1e-6)


def test_the_steps_of_a_default_in_float64_are_counted_on(tmp_path):
    torch.set_default_dtype(torch.float64)
    try:
        model = compiled(torch.optim.Adam)
        fit(model, X.double()).save(tmp_path / "it.h5")
        other = compiled("adam")
        other.load(tmp_path / "it.h5")
        assert is_fused(fit(other, X.double()))
        assert all(state["step"] == 6 for state in other.optimizer.state.values())
    finally:
        torch.set_default_dtype(torch.float32)


def test_groups_that_are_added_later_are_fused_like_the_others():
    optimizer = fit(compiled("adam")).optimizer
    added = torch.nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": [added]})
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]
    added.grad = torch.ones(2)
    optimizer.step()
    assert added.detach().abs().sum() > 0


@pytest.mark.parametrize("given", ["adam", functools.partial(torch.optim.AdamW, fused=True)])
def test_state_of_another_size_that_the_user_has_set_is_refused_before_a_fused_step(given):
    # The step would go through its memory by the parameter's size, and beyond its end.
    model = compiled(given)
    fit(model)
    assert is_fused(model)
    state = copy.deepcopy(model.optimizer.state_dict())
    for entry in state["state"].values():
        entry["exp_avg"] = torch.ones(1)
    model.optimizer.load_state_dict(state)
    before = copy.deepcopy(model.net)
    with pytest.raises(ConfigurationError, match=r"fused=True.*'exp_avg' is float32 \(1,\)"):
        fit(model)
    assert_same_weights(model.net, before)
    model.optimizer.state.clear()
    fit(model)
