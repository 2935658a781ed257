"""`train_on_batch` and its kin in one's own loop: what is kept, and what ends that."""

import copy
import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fitkit
from fitkit.errors import ConfigurationError
from fitkit.training import on_batch
from tests.reference import assert_same_weights

torch.manual_seed(0)
X = torch.randn(8, 4)
LABELS = torch.randint(3, (8,))


def net(seed=1, **options):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6, **options), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def compiled(module=None, optimizer="sgd", **options):
    model = fitkit.Model(net() if module is None else module)
    options = {"learning_rate": 0.1, "metrics": ["accuracy"], "accelerator": "cpu", **options}
    model.compile(optimizer, "cross_entropy", **options)
    return model


@pytest.fixture
def built(monkeypatch):
    """Counts how often a step is built, by stage."""
    counts = []
    for name in ("step_for", "predict_step_for"):
        original = getattr(on_batch, name)

        def counting(model, stage="predict", *given, original=original, **named):
            counts.append(stage)
            return original(model, *([] if stage == "predict" else [stage]), *given, **named)

        monkeypatch.setattr(on_batch, name, counting)
    return counts


def plain_step(module, optimizer, x=X, y=LABELS):
    module.train()
    optimizer.zero_grad()
    output = module(x)
    loss = F.cross_entropy(output, y)
    loss.backward()
    optimizer.step()
    return [loss.item(), (output.argmax(1) == y).float().mean().item()]


def test_a_loop_of_ones_own_builds_each_step_once_and_is_plain_torchs(built):
    model, theirs = compiled(), net()
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    for number in range(4):
        x = X + number
        expected = plain_step(theirs, optimizer, x)
        assert model.train_on_batch(x.numpy(), LABELS.numpy()) == pytest.approx(expected, rel=1e-5)
        theirs.eval()
        with torch.no_grad():
            output = theirs(x)
        loss = F.cross_entropy(output, LABELS).item()
        found = model.test_on_batch(x, LABELS, return_dict=True)
        right = (output.argmax(1) == LABELS).float().mean().item()
        assert found == pytest.approx({"loss": loss, "accuracy": right}, rel=1e-5)
        np.testing.assert_allclose(model.predict_on_batch(x), output, rtol=1e-5, atol=1e-6)
    assert_same_weights(model.net, theirs, rtol=1e-5)
    assert sorted(built) == ["predict", "test", "training"]
    assert all(parameter.grad is None for parameter in model.parameters())


def rate(model, theirs, optimizer):
    model.compile(learning_rate=0.5)
    optimizer.param_groups[0]["lr"] = 0.5


def freezing(model, theirs, optimizer):
    model.net[0].requires_grad_(False)
    theirs[0].requires_grad_(False)


def layer(model, theirs, optimizer):
    for module in (model.net, theirs):
        torch.manual_seed(5)
        module[3] = nn.Linear(6, 3)
    model.compile("sgd", learning_rate=0.1)
    optimizer.param_groups[0]["params"] = list(theirs.parameters())


def activation(model, theirs, optimizer):
    model.net[2], theirs[2] = nn.ReLU(), nn.ReLU()


def whole_net(model, theirs, optimizer):
    for module in (model.net, theirs):
        module.load_state_dict(net(7).state_dict())
    model.net = copy.deepcopy(model.net)
    model.compile("sgd", learning_rate=0.1)


def own_optimizer(model, theirs, optimizer):
    model.compile(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5))
    optimizer.param_groups[0].update(lr=0.3, momentum=0.5)


def group(model, theirs, optimizer):
    model.optimizer.param_groups[0]["weight_decay"] = 0.3
    optimizer.param_groups[0]["weight_decay"] = 0.3


def hook(model, theirs, optimizer):
    for module in (model.net, theirs):
        module.register_forward_hook(lambda module, given, output: output * 2)


def hook_of_the_model(model, theirs, optimizer):
    model.register_forward_hook(lambda module, given, output: output * 2)
    theirs.register_forward_hook(lambda module, given, output: output * 2)


def clipping(model, theirs, optimizer):
    model.compile(gradient_clip_val=0.01)
    handles = [p.register_hook(lambda grad: grad) for p in theirs.parameters()]
    assert handles
    original = optimizer.step

    def step():
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.01)
        original()

    optimizer.step = step


def fit_between(model, theirs, optimizer):
    model.fit(X, LABELS, batch_size=8, shuffle=False, verbose=0)
    plain_step(theirs, optimizer)


def loading(model, theirs, optimizer):
    state = net(9).state_dict()
    model.load_state_dict(state)
    theirs.load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [rate, freezing, layer, activation, whole_net, own_optimizer, group, hook, hook_of_the_model,
     clipping, fit_between, loading],
)  # fmt: skip
def test_what_changes_between_two_calls_counts(change):
    model, theirs = compiled(), net()
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    for _ in range(2):
        model.train_on_batch(X, LABELS)
        model.test_on_batch(X, LABELS)
        plain_step(theirs, optimizer)
    change(model, theirs, optimizer)
    for _ in range(2):
        expected = plain_step(theirs, optimizer)
        assert model.train_on_batch(X, LABELS) == pytest.approx(expected, rel=1e-5)
    theirs.eval()
    with torch.no_grad():
        expected = F.cross_entropy(theirs(X), LABELS).item()
    assert model.test_on_batch(X, LABELS)[0] == pytest.approx(expected, rel=1e-5)


def test_the_loss_and_the_metrics_may_change():
    model = compiled()
    model.train_on_batch(X, LABELS)
    model.compile(loss="multi_margin_loss", metrics=["accuracy", "recall"])
    found = model.train_on_batch(X, LABELS, return_dict=True)
    assert list(found) == ["loss", "accuracy", "recall"]


def test_the_dtype_may_change():
    model = compiled()
    model.predict_on_batch(X)
    model.train_on_batch(X, LABELS)
    model.compile(precision="64-true")
    assert model.predict_on_batch(X).dtype == np.float64
    model.train_on_batch(X, LABELS)
    assert all(p.dtype is torch.float64 for p in model.parameters())


def test_modes_are_looked_at_in_each_call():
    model, theirs = compiled(), net()
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    model.train_on_batch(X, LABELS)
    plain_step(theirs, optimizer)
    model.net[1].eval()  # its running statistics stay
    before = model.net[1].running_mean.clone()
    model.train_on_batch(X, LABELS)
    assert torch.equal(model.net[1].running_mean, before) and not model.net[1].training
    model.eval()  # a net that evaluates as a whole trains
    model.train_on_batch(X, LABELS)
    assert not torch.equal(model.net[1].running_mean, before)
    assert not any(module.training for module in model.modules())
    model.train()
    before = model.net[1].running_mean.clone()
    model.test_on_batch(X, LABELS)
    model.predict_on_batch(X)
    assert torch.equal(model.net[1].running_mean, before)
    assert all(module.training for module in model.modules())


def test_a_checkpoint_brings_its_optimizers_state(tmp_path):
    model = compiled(optimizer="adam")
    for _ in range(3):
        model.train_on_batch(X, LABELS)
    model.save(tmp_path / "m.h5")
    expected = [model.train_on_batch(X, LABELS) for _ in range(2)]
    model.load(tmp_path / "m.h5")
    assert [model.train_on_batch(X, LABELS) for _ in range(2)] == expected


@pytest.mark.parametrize("way", ["another tensor", "the same tensor"])
def test_a_state_that_no_longer_fits_is_refused_before_the_next_update(way):
    model = compiled(optimizer="adam")
    model.train_on_batch(X, LABELS)
    before = copy.deepcopy(model.net.state_dict())
    state = model.optimizer.state[model.net[0].weight]
    if way == "another tensor":
        state["exp_avg"] = torch.zeros(1)
    else:
        state["exp_avg"].data = torch.zeros(1)
    with pytest.raises(ConfigurationError, match="exp_avg"):
        model.train_on_batch(X, LABELS)
    assert_same_weights(model.net.state_dict(), before)


def test_accumulation_takes_no_part_after_a_fit_either():
    model, theirs = compiled(accumulate_grad_batches=2), net()
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    model.train_on_batch(X, LABELS)
    plain_step(theirs, optimizer)
    model.fit(X, LABELS, batch_size=8, verbose=0)
    plain_step(theirs, optimizer)
    model.train_on_batch(X, LABELS)
    plain_step(theirs, optimizer)
    assert_same_weights(model.net, theirs, rtol=1e-5)


def test_later_batches_are_checked_as_the_first_one(built):
    model = fitkit.Model(nn.Linear(4, 1))
    model.compile("sgd", "mse", accelerator="cpu")
    model.train_on_batch(X, torch.ones(8, 1))
    with pytest.raises(ConfigurationError):
        model.train_on_batch(X, torch.ones(8, 3))
    with pytest.raises(ConfigurationError, match="weight"):
        model.train_on_batch(X, torch.ones(8, 1), -torch.ones(8))
    model.train_on_batch(X[:3], torch.ones(3, 1))
    assert model.train_on_batch(X, torch.ones(8, 1), class_weight={1: 2.0}) > 0
    with pytest.raises(ConfigurationError):
        model.train_on_batch(X[:, :3], torch.ones(8, 1))
    model.train_on_batch(X, torch.ones(8, 1))


def test_an_error_leaves_the_model_as_it_was():
    model = compiled()
    model.train_on_batch(X, LABELS)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises((ConfigurationError, IndexError)):
        model.train_on_batch(X, LABELS + 5)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    model.train_on_batch(X, LABELS)


def test_a_net_that_writes_into_its_inputs_leaves_the_users_data():
    model = compiled(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3)))
    x = X.numpy().copy()
    for call in (model.train_on_batch, model.test_on_batch, lambda x, y: model.predict_on_batch(x)):
        for _ in range(3):
            call(x, LABELS)
            assert np.array_equal(x, X.numpy())


def test_a_model_with_kept_steps_goes_without_the_garbage_collector():
    model = compiled()
    model.train_on_batch(X, LABELS)
    model.test_on_batch(X, LABELS)
    model.predict_on_batch(X)
    weights = weakref.ref(model.net)
    gc.collect()
    gc.disable()
    try:
        del model
        assert weights() is None
    finally:
        gc.enable()


def test_a_copy_has_steps_of_its_own():
    model = compiled()
    model.train_on_batch(X, LABELS)
    other = copy.deepcopy(model)
    other.train_on_batch(X, LABELS)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    other.train_on_batch(X, LABELS)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())
    assert model.train_on_batch(X, LABELS) != other.train_on_batch(X, LABELS)


def test_threads_predict_and_test_at_once():
    model, wrong = compiled(), []
    expected = {
        n: (model.predict_on_batch(X + n), model.test_on_batch(X + n, LABELS)) for n in range(4)
    }

    def work(number):
        for _ in range(20):
            if not np.array_equal(model.predict_on_batch(X + number), expected[number][0]):
                wrong.append(number)
            if model.test_on_batch(X + number, LABELS) != expected[number][1]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_step_of_the_models_own_that_comes_later_is_called():
    model = compiled()
    model.train_on_batch(X, LABELS)
    called = []

    def training_step(batch, batch_idx):
        called.append(batch_idx)
        return F.cross_entropy(model.net(batch[0]), batch[1])

    model.training_step = training_step
    model.train_on_batch(X, LABELS)
    assert called == [0]
