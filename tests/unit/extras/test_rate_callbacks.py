"""Callbacks that set or log learning rates, group batches, or unfreeze: by hand arithmetic."""

import numpy as np
import pytest
import torch

import fitkit
from fitkit.callbacks import (
    BackboneFinetuning,
    Callback,
    GradientAccumulationScheduler,
    GradualUnfreezing,
    LearningRateMonitor,
    LearningRateScheduler,
)
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.rate_callbacks import rate_of, set_rate
from fitkit.fit_state import FitState
from tests.nets import regression
from tests.reference import assert_same_weights, plain_loop, slices

X, Y = regression(12, 2)


def linear(**arguments):
    model = fitkit.Model(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse", **{"learning_rate": 1e-3, **arguments})
    return model


class Rates(Callback):
    """Notes the rate of each update."""

    def __init__(self):
        self.seen = []

    def on_train_batch_begin(self, batch, logs=None):
        self.seen.append(rate_of(self.model))


# ------------------------------------------------------------------ LearningRateScheduler


def test_a_schedule_sets_each_epochs_rate_and_logs_it(capsys):
    model, rates = linear(), Rates()
    asked = []

    def schedule(epoch, rate):
        asked.append((epoch, rate))
        return 0.1 / (epoch + 1)

    callback = LearningRateScheduler(schedule, verbose=1)
    history = model.fit(X, Y, epochs=3, verbose=0, callbacks=[callback, rates]).history
    assert rates.seen == history["learning_rate"] == [0.1, 0.05, 0.1 / 3]
    assert asked == [(0, 1e-3), (1, 0.1), (2, 0.05)]
    assert capsys.readouterr().out.splitlines()[0] == "Epoch 1: the learning rate is 0.1."


def test_a_schedule_of_the_epoch_alone_is_known_by_its_signature():
    model = linear()
    history = model.fit(
        X, Y, epochs=2, verbose=0, callbacks=LearningRateScheduler(lambda epoch: 1.0 - epoch / 2)
    ).history
    assert history["learning_rate"] == [1.0, 0.5]
    # An error of the schedule's own isn't taken for the other form.
    with pytest.raises(TypeError, match="unsupported operand"):
        model.fit(X, Y, verbose=0, callbacks=LearningRateScheduler(lambda epoch, rate: rate + ""))


@pytest.mark.parametrize("given", [None, 1e-3, lambda: 1, lambda a, b, c: 1])
def test_what_is_no_schedule_fails_at_construction(given):
    with pytest.raises(ArgumentTypeError, match="epoch"):
        LearningRateScheduler(given)


@pytest.mark.parametrize(("given", "text"), [("fast", "number"), (-1, "at least 0"), (None, "nu")])
def test_what_is_no_rate_is_said_with_its_epoch(given, text):
    with pytest.raises(ConfigurationError, match=f"epoch 0.*{text}"):
        linear().fit(X, Y, verbose=0, callbacks=LearningRateScheduler(lambda epoch: given))


def test_groups_keep_their_ratios_and_tensors_stay_tensors():
    net = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1))
    model = fitkit.Model(net)
    first, second = net[0].parameters(), net[1].parameters()
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam(
        [{"params": first, "lr": rate}, {"params": second, "lr": 0.05}], capturable=False
    )
    model.compile(optimizer, "mse")
    set_rate(model, 0.1)
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == pytest.approx(0.1)
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.01)
    set_rate(model, 0.0)
    set_rate(model, 0.2)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.2, 0.2])


# ------------------------------------------------------------------ LearningRateMonitor


def test_the_monitor_logs_what_the_epochs_last_step_used():
    model = linear(
        learning_rate=1.0,
        lr_scheduler={
            "scheduler": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
            "interval": "step",
        },
    )
    monitor = LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)
    history = model.fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=monitor).history
    assert monitor.rates == [1, 0.5, 0.25, 0.125, 0.0625, 0.03125]
    assert history["learning_rate"] == [0.25, 0.03125]
    assert history["momentum"] == history["weight_decay"] == [0, 0]
    model.compile("adam", learning_rate=0.1, lr_scheduler=lambda o: _halving(o))
    history = model.fit(X, Y, epochs=2, verbose=0, callbacks=LearningRateMonitor()).history
    assert history["learning_rate"] == [0.1, 0.05]


def _halving(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def test_further_groups_get_numbers():
    net = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1))
    model = fitkit.Model(net)
    groups = [{"params": layer.parameters(), "lr": 0.1 + i} for i, layer in enumerate(net)]
    model.compile(torch.optim.SGD(groups), "mse")
    history = model.fit(X, Y, verbose=0, callbacks=LearningRateMonitor()).history
    assert (history["learning_rate"], history["learning_rate_1"]) == ([0.1], [1.1])


def test_lightnings_names_of_groups_stand_in_the_logs():
    net = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1))
    model = fitkit.Model(net)
    groups = [{"params": net[0].parameters(), "name": "head"}, {"params": net[1].parameters()}]
    model.compile(torch.optim.SGD(groups, lr=0.1, momentum=0.5), "mse")
    monitor = LearningRateMonitor(log_momentum=True)
    history = model.fit(X, Y, verbose=0, callbacks=monitor).history
    assert history["learning_rate/head"] == history["learning_rate_1"] == [0.1]
    assert history["momentum/head"] == history["momentum_1"] == [0.5]
    assert "learning_rate" not in history


def test_a_schedulers_name_is_what_lightnings_monitor_calls_the_rates():
    class Named(fitkit.Model):
        def configure_optimizers(self):
            parts = [{"params": [p]} for p in self.net.parameters()]
            optimizer = torch.optim.SGD(parts, lr=1.0)
            return [optimizer], [{"scheduler": _halving(optimizer), "name": "mine"}]

    model = Named(torch.nn.Linear(2, 1))
    model.compile(loss="mse")
    monitor = LearningRateMonitor(log_weight_decay=True)
    history = model.fit(X, Y, epochs=2, verbose=0, callbacks=monitor).history
    assert history["mine"] == history["mine_1"] == [1.0, 0.5]
    assert history["mine-weight_decay"] == [0, 0]
    assert "learning_rate" not in history


# ------------------------------------------------------------------ accumulation


@pytest.mark.skipif(not hasattr(FitState(), "accumulate"), reason="needs FitState.accumulate")
def test_batches_are_grouped_as_the_epochs_schedule_says():
    model = linear(learning_rate=0.1)
    reference = torch.nn.Linear(2, 1)
    reference.load_state_dict(model.net.state_dict())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    scheduler = GradientAccumulationScheduler({1: 2, 2: 5})
    # 6 batches of 2: singly; in pairs; 5 and the last one alone.
    for size in (2, 4, 10):
        plain_loop(reference, optimizer, slices(X, Y, size), loss=torch.nn.functional.mse_loss)
    updates = []

    class Counts(Callback):
        def on_epoch_end(self, epoch, logs):
            updates.append(self.model._fitkit.fit_state.updates)

    model.fit(
        X, Y, batch_size=2, epochs=3, shuffle=False, verbose=0, callbacks=[scheduler, Counts()]
    )
    assert updates == [6, 9, 11]
    assert_same_weights(model.net, reference, rtol=1e-5, atol=1e-6)
    model.fit(X, Y, batch_size=2, verbose=0)
    assert model._fitkit.fit_state.updates == 17  # compile's own number again


@pytest.mark.parametrize(
    ("given", "error"),
    [({}, ConfigurationError), ({0: 0}, ConfigurationError), ({-1: 2}, ConfigurationError),
     ({0: 1.5}, ArgumentTypeError), ([2], ArgumentTypeError), ({True: 2}, ArgumentTypeError)],
)  # fmt: skip
def test_a_wrong_schedule_of_groups_fails_at_construction(given, error):
    with pytest.raises(error):
        GradientAccumulationScheduler(given)


def test_the_last_entry_that_has_begun_counts():
    scheduler = GradientAccumulationScheduler({4: 2, 1: 8})
    assert [scheduler.batches_in(epoch) for epoch in (0, 1, 3, 4, 9)] == [None, 8, 8, 2, 2]


# ------------------------------------------------------------------ BackboneFinetuning


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4))
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.backbone(x))


class Watches(Callback):
    """Notes weights and rates at each epoch's end."""

    def __init__(self):
        self.weights, self.means, self.scales, self.rates = [], [], [], []

    def on_epoch_end(self, epoch, logs):
        net = self.model.net
        self.weights.append(net.backbone[0].weight.detach().clone())
        self.scales.append(net.backbone[1].weight.detach().clone())
        self.means.append(net.backbone[1].running_mean.clone())
        self.rates.append([group["lr"] for group in self.model.optimizer.param_groups])


def finetuned(epochs=5, **options):
    torch.manual_seed(0)
    model = fitkit.Model(Net())
    model.compile(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), "mse")
    watches, begin = Watches(), model.net.backbone[0].weight.detach().clone()
    callback = BackboneFinetuning(2, **options)
    model.fit(X, Y, epochs=epochs, verbose=0, callbacks=[callback, watches])
    return model, watches, begin


def test_the_backbone_waits_then_learns_at_its_own_growing_rate():
    model, watches, begin = finetuned(backbone_initial_ratio_lr=0.3)
    assert torch.equal(watches.weights[0], begin) and torch.equal(watches.weights[1], begin)
    assert not torch.equal(watches.weights[2], begin)
    assert [rates[0] for rates in watches.rates] == [0.1] * 5
    # From epoch 2 on 0.3 of the head's rate, doubled each epoch, and never above it.
    assert [r[1] for r in watches.rates][2:] == pytest.approx([0.03, 0.06, 0.1])
    assert not torch.equal(watches.scales[0], torch.ones(4))  # train_bn
    held = [p for group in model.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()} and len(held) == 6
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_without_train_bn_its_statistics_wait_too_and_alignment_is_optional():
    _, watches, _ = finetuned(
        train_bn=False, backbone_initial_lr=0.08, should_align=False, lambda_func=lambda epoch: 3
    )
    assert torch.equal(watches.means[1], torch.zeros(4))
    assert torch.equal(watches.scales[1], torch.ones(4))
    assert not torch.equal(watches.means[2], torch.zeros(4))
    assert [r[1] for r in watches.rates][2:] == pytest.approx([0.08, 0.24, 0.72])


def test_a_training_that_ends_before_leaves_the_backbone_free_and_fits_again():
    model, _, begin = finetuned(epochs=1)
    assert all(parameter.requires_grad for parameter in model.parameters())
    again = Watches()
    model.fit(X, Y, epochs=3, verbose=0, callbacks=[BackboneFinetuning(2), again])
    assert len(model.optimizer.param_groups) == 2
    assert torch.equal(again.weights[1], begin) and not torch.equal(again.weights[2], begin)


def test_a_frozen_part_learns_as_plain_pytorch_does():
    torch.manual_seed(0)
    net = torch.nn.Sequential()
    net.add_module("backbone", torch.nn.Linear(2, 4))
    net.add_module("head", torch.nn.Linear(4, 1))
    reference = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
    reference.load_state_dict(dict(zip(reference.state_dict(), net.state_dict().values(),
                                       strict=True)))  # fmt: skip
    groups = [{"params": reference[1].parameters()}, {"params": reference[0].parameters()}]
    optimizer = torch.optim.Adam(groups, lr=0.01)
    for epoch in range(3):
        reference[0].requires_grad_(epoch > 0)
        if epoch > 0:
            optimizer.param_groups[1]["lr"] = (None, 0.001, 0.002)[epoch]
        plain_loop(reference, optimizer, [(X, Y)], loss=torch.nn.functional.mse_loss)
    model = fitkit.Model(net)
    model.compile("adam", "mse", learning_rate=0.01)
    model.fit(X, Y, epochs=3, shuffle=False, verbose=0, callbacks=BackboneFinetuning(1))
    for one, two in zip(net.parameters(), reference.parameters(), strict=True):
        assert np.allclose(one.detach(), two.detach(), atol=1e-6)


def test_a_part_that_is_not_there_and_one_that_is_all_are_refused():
    model = fitkit.Model(Net())
    model.compile("sgd", "mse")
    with pytest.raises(ConfigurationError, match=r"'body'.*'backbone', 'head'"):
        model.fit(X, Y, verbose=0, callbacks=BackboneFinetuning(backbone="body"))
    model.net.head.requires_grad_(False)
    with pytest.raises(ConfigurationError, match="nothing would be left"):
        model.fit(X, Y, verbose=0, callbacks=BackboneFinetuning())
    model.net.head.requires_grad_(True)
    model.compile(lr_scheduler="cosine")
    with pytest.raises(ConfigurationError, match="lr_scheduler"):
        model.fit(X, Y, verbose=0, callbacks=BackboneFinetuning())


# ------------------------------------------------------------------ GradualUnfreezing


class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Sequential(
            torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4)
        )
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.backbone(x))


STAGES = {1: "backbone.2", 2: {"backbone": 0.02}, 3: {"backbone.2": 0.005}}


def unfrozen(stages=None, *, epochs=4, **options):
    torch.manual_seed(0)
    model = fitkit.Model(Deep())
    model.compile("sgd", "mse", learning_rate=0.1)
    seen = []

    def notes(epoch, logs):
        learning = {name for name, p in model.net.named_parameters() if p.requires_grad}
        rates = [group["lr"] for group in model.optimizer.param_groups]
        mean = model.net.backbone[1].running_mean.clone()
        seen.append((learning, rates, mean))

    callback = GradualUnfreezing(STAGES if stages is None else stages, **options)
    watch = fitkit.callbacks.LambdaCallback(on_epoch_end=notes)
    model.fit(X, Y, epochs=epochs, verbose=0, shuffle=False, callbacks=[callback, watch])
    return model, seen


def test_lightnings_base_finetuning_thaws_in_stages_with_groups_of_their_own():
    model, seen = unfrozen(train_bn=False)
    head, last = {"head.weight", "head.bias"}, {"backbone.2.weight", "backbone.2.bias"}
    everything = {name for name, _ in model.net.named_parameters()}
    assert [learning for learning, _, _ in seen] == [head, head | last, everything, everything]
    rates = [rates for _, rates, _ in seen]
    assert rates[0][0] == 0.1 and rates[1][:2] == pytest.approx([0.1, 0.01])
    assert rates[2] == pytest.approx([0.1, 0.01, 0.02])
    assert rates[3] == pytest.approx([0.1, 0.005, 0.02])
    assert torch.equal(seen[1][2], torch.zeros(4)) and not torch.equal(seen[2][2], torch.zeros(4))


def test_with_train_bn_normalization_learns_from_the_beginning():
    _, seen = unfrozen(epochs=1)
    assert {"backbone.1.weight", "backbone.1.bias"} < seen[0][0]
    assert not torch.equal(seen[0][2], torch.zeros(4))


def test_thawing_in_stages_learns_as_plain_pytorch_does():
    torch.manual_seed(0)
    net = Deep()
    parts = [net.head, net.backbone[2], torch.nn.ModuleList([net.backbone[0], net.backbone[1]])]
    optimizer = torch.optim.SGD([{"params": part.parameters()} for part in parts], lr=0.1)
    for epoch in range(4):
        parts[1].requires_grad_(epoch >= 1)
        parts[2].requires_grad_(epoch >= 2)
        optimizer.param_groups[1]["lr"] = 0.005 if epoch == 3 else 0.1 * 0.1
        optimizer.param_groups[2]["lr"] = 0.02
        net.train()
        net.backbone[1].train(epoch >= 2)
        for start in range(0, len(X), 32):
            optimizer.zero_grad()
            batch = slice(start, start + 32)
            torch.nn.functional.mse_loss(net(X[batch]), Y[batch]).backward()
            optimizer.step()
    model, _ = unfrozen(train_bn=False)
    for one, two in zip(model.net.parameters(), net.parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-6)


def test_a_training_that_ends_before_its_last_stage_leaves_all_free():
    model, _ = unfrozen(epochs=1)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(("stages", "message"), [
    ({}, "dict of epochs"),
    ([1], "dict of epochs"),
    ({-1: "head"}, "keys are epochs"),
    ({1: [3]}, "module's name"),
    ({1: {"head": 0.0}}, "above 0|greater|positive"),
    ({1: "bakbone"}, "Did you mean 'backbone'"),
    ({1: ["head", "backbone"]}, "nothing to train in epoch 0"),
    ({1: "backbone", 2: "backbone.2"}, "all its parameters belong to earlier stages"),
])  # fmt: skip
def test_stages_that_cant_be(stages, message):
    with pytest.raises(fitkit.FitkitError, match=message):
        unfrozen(stages, train_bn=False)


def test_stages_refuse_a_scheduler_beside_them():
    model = fitkit.Model(Deep())
    model.compile("sgd", "mse", lr_scheduler="cosine")
    with pytest.raises(ConfigurationError, match="lr_scheduler"):
        model.fit(X, Y, verbose=0, callbacks=GradualUnfreezing(STAGES))
