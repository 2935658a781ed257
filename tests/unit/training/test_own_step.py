"""A model's own steps, against loops written by hand."""

import copy
import dataclasses
from functools import partial

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

import fitkit
from tests.nets import classes_in_turn, linear
from tests.reference import assert_same_weights, plain_loop, slices

X, Y = classes_in_turn(50, 4)
BATCHES = slices(X, Y, 16)
QUIET = {"verbose": 0, "shuffle": False, "batch_size": 16}


class Classifier(fitkit.Model):
    def __init__(self):
        super().__init__()
        self.layer = linear(4, 3, seed=1)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def by_hand(epochs, scheduler=None):
    """The weights, and each epoch's batch losses, of a loop written by hand."""
    net, losses = linear(4, 3, seed=1), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    moves = scheduler(optimizer) if scheduler else None
    for _ in range(epochs):
        losses.append([plain_loop(net, optimizer, [batch])[0] for batch in BATCHES])
        if moves:
            moves.step()
    return net, losses


def weighted(losses):
    return sum(loss * len(y) for loss, (_, y) in zip(losses, BATCHES, strict=True)) / len(X)


@pytest.mark.parametrize("returns", ["loss", "dict"])
def test_a_training_step_learns_as_the_same_loop_by_hand(returns):
    class Own(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if returns == "loss" else {"loss": loss, "size": len(batch[1])}

    model = Own()
    history = model.fit(X, Y, epochs=2, **QUIET).history
    net, losses = by_hand(2)
    assert torch.equal(model.layer.weight, net.weight)
    assert history == {"loss": pytest.approx([weighted(epoch) for epoch in losses], rel=1e-6)}
    assert model.global_step == 8 and model.current_epoch == 1


def test_the_own_step_may_ask_for_the_compiled_loss_and_metrics():
    class Own(Classifier):
        def training_step(self, batch, batch_idx):
            return fitkit.Model.training_step(self, batch, batch_idx) * 1.0

    plain = Classifier.__mro__[1](linear(4, 3, seed=1))
    model = Own()
    for each in (plain, model):
        each.compile(torch.optim.SGD(each.parameters(), 0.1), "cross_entropy", ["accuracy"])
    wanted, found = (each.fit(X, Y, epochs=2, **QUIET).history for each in (plain, model))
    assert found["accuracy"] == wanted["accuracy"]
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-6)


def test_logged_values_are_reduced_as_asked():
    class Own(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("mean", loss)
            self.log("number", batch_idx, reduce_fx="sum")
            self.log("low", loss, reduce_fx=torch.min)
            self.log("high", loss, reduce_fx="max")
            self.log("last", loss, on_step=True)
            self.log("both", loss, on_step=True, on_epoch=True)
            self.log("weighed", float(batch_idx), batch_size=batch_idx + 1)
            return loss

    history = Own().fit(X, Y, **QUIET).history
    _, (losses,) = by_hand(1)
    close = pytest.approx
    assert {name: values[0] for name, values in history.items()} == {
        "loss": close(weighted(losses)), "mean": close(weighted(losses)), "number": 6.0,
        "low": close(min(losses)), "high": close(max(losses)), "last": close(losses[-1]),
        "both_step": close(losses[-1]), "both_epoch": close(weighted(losses)),
        "weighed": close((0 + 2 + 6 + 12) / 10),
    }  # fmt: skip


def test_batch_logs_have_the_latest_value_and_the_running_mean():
    class Own(Classifier):
        def training_step(self, batch, batch_idx):
            self.log("a", batch_idx, on_step=True)
            self.log("b", batch_idx, batch_size=1)
            return super().training_step(batch, batch_idx)

    seen = []
    note = fitkit.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append((logs["a"], logs["b"]))
    )
    Own().fit(X, Y, callbacks=note, **QUIET)
    assert seen == [(0, 0), (1, 0.5), (2, 1), (3, 1.5)]


def test_a_torchmetrics_object_counts_an_epoch_and_begins_anew():
    class Own(Classifier):
        def __init__(self):
            super().__init__()
            self.f1 = torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro")

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.f1.update(self(x), y)
            self.log("f1", self.f1)

    model = Own()
    history = model.fit(X, Y, epochs=2, validation_data=(X, Y), **QUIET).history
    judge = torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro")
    assert history["val_f1"][-1] == pytest.approx(judge(model(X), Y).item())
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(history["val_f1"][-1])
    assert not model.f1.update_called


def test_a_torchmetrics_object_may_give_the_loss():
    class Own(Classifier):
        def __init__(self):
            super().__init__()
            self.mse = torchmetrics.MeanSquaredError()

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = self.mse(self(x).flatten(), F.one_hot(y, 3).float().flatten())
            self.log("mse", self.mse, on_step=True, on_epoch=True)
            return loss

    model = Own()
    model.fit(X, Y, **QUIET)
    again = copy.deepcopy(model)  # with the graph of the last batch's loss
    for one in (model, again):
        torch.manual_seed(1)
        history = one.fit(X, Y, **QUIET).history
        assert history["mse_epoch"] == pytest.approx(history["loss"])
    assert_same_weights(model, again)


def test_validation_and_test_steps_and_their_ends():
    class Own(Classifier):
        def validation_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0]), batch[1])

        def validation_step_end(self, outputs):
            self.log("val_seen", 1, reduce_fx="sum")
            return {"loss": outputs * 2}

        def validation_epoch_end(self, outputs):
            assert not any(output["loss"].requires_grad for output in outputs)
            self.log("steps", len(outputs))

        def test_step(self, batch, batch_idx):
            assert not self.training and not torch.is_grad_enabled()
            self.log("hits", (self(batch[0]).argmax(1) == batch[1]).sum(), reduce_fx="sum")

    model = Own()
    logs = model.fit(X, Y, validation_data=(X, Y), **QUIET).history
    loss = F.cross_entropy(model(X), Y).item()
    assert logs["val_loss"] == pytest.approx([2 * loss])
    assert logs["val_seen"] == [4] and logs["val_steps"] == [4]
    hits = (model(X).argmax(1) == Y).sum().item()
    assert model.evaluate(X, Y, return_dict=True, verbose=0) == {"hits": hits}


def test_evaluate_takes_the_validation_steps_where_there_is_no_test_step():
    class Own(Classifier):
        def validation_step(self, batch, batch_idx):
            self.log("val_hits", (self(batch[0]).argmax(1) == batch[1]).sum(), reduce_fx="sum")

    model = Own()
    assert model.evaluate(X, Y, verbose=0) == (model(X).argmax(1) == Y).sum().item()


def test_predict_step_and_its_end():
    class Own(Classifier):
        def predict_step(self, batch, batch_idx):
            return {"label": super().predict_step(batch, batch_idx).argmax(1)}

        def predict_step_end(self, outputs):
            return outputs["label"] + 10

    model = Own()
    assert (model.predict(X, verbose=0) == (model(X).argmax(1) + 10).numpy()).all()


def test_training_epoch_end_takes_losses_as_tensors_and_as_lightnings_dicts():
    kept = []

    class Own(Classifier):
        def training_epoch_end(self, outputs):
            kept.append(torch.stack(outputs).tolist())
            kept.append([output["loss"].item() for output in outputs])

    Own().fit(X, Y, **QUIET)
    _, (losses,) = by_hand(1)
    assert kept == [losses, losses]


def test_transfer_batch_to_device_takes_batches_of_ones_own_kind():
    @dataclasses.dataclass
    class Pair:
        text: str
        x: torch.Tensor
        y: torch.Tensor

    class Own(Classifier):
        def transfer_batch_to_device(self, batch, device):
            assert device == self.device
            return batch.x.to(device), batch.y.to(device)

    model = Own()
    model.fit([Pair("a", x, y) for x, y in BATCHES], verbose=0)
    assert torch.equal(model.layer.weight, by_hand(1)[0].weight)
    compiled = type(
        "Compiled", (fitkit.Model,), {"transfer_batch_to_device": Own.transfer_batch_to_device}
    )(linear(4, 3, seed=1))
    compiled.compile(torch.optim.SGD(compiled.parameters(), 0.1, 0.9), "cross_entropy")
    compiled.fit([Pair("a", x, y) for x, y in BATCHES], verbose=0)
    assert torch.equal(compiled.net.weight, by_hand(1)[0].weight)


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


@pytest.mark.parametrize("shape", [
    lambda o: ([o], [halving(o)]),
    lambda o: {"optimizer": o, "lr_scheduler": halving(o)},
    lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": halving(o), "interval": "epoch"}},
    lambda o: [{"optimizer": o, "lr_scheduler": {"scheduler": halving(o), "frequency": 1}}],
])  # fmt: skip
def test_every_shape_of_configure_optimizers(shape):
    class Own(Classifier):
        def configure_optimizers(self):
            return shape(super().configure_optimizers())

    model = Own()
    model.fit(X, Y, epochs=3, **QUIET)
    assert torch.equal(model.layer.weight, by_hand(3, halving)[0].weight)
    assert isinstance(model.optimizers(), torch.optim.SGD)
    assert model.lr_schedulers().last_epoch == 3


def test_schedulers_move_by_updates_and_by_what_they_watch():
    class Own(Classifier):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
            return [optimizer], [
                {"scheduler": halving(optimizer), "interval": "step", "frequency": 2},
                {"scheduler": plateau, "monitor": "constant"},
            ]

        def training_epoch_end(self, outputs):
            self.log("constant", 1.0)

    model = Own()
    model.fit(X, Y, epochs=2, **QUIET)
    # Eight updates halve it four times; the second epoch brings nothing better than the first.
    assert model.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**4 * 0.1)


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)


@pytest.mark.parametrize("giving", [
    lambda o: ([o], [one_cycle(o)]),
    lambda o: {"optimizer": o, "lr_scheduler": one_cycle(o)},
    lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": one_cycle(o)}},
])  # fmt: skip
def test_a_cycle_from_configure_optimizers_moves_at_each_update(giving):
    class Own(Classifier):
        def configure_optimizers(self):
            return giving(super().configure_optimizers())

    model = Own()
    model.fit(X, Y, epochs=2, **QUIET)  # eight updates
    net = linear(4, 3, seed=1)
    expected = one_cycle(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    expected.optimizer._opt_called = True
    for _ in range(8):
        expected.step()
    assert model.lr_schedulers().last_epoch == 8
    assert model.optimizer.param_groups[0]["lr"] == expected.get_last_lr()[0]


@pytest.mark.parametrize("given", [
    one_cycle,
    partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=40),
    {"scheduler": one_cycle},
    lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, 3),
])  # fmt: skip
def test_a_cycle_that_a_factory_makes_moves_at_each_update(given):
    model = fitkit.Model(linear(4, 3, seed=1))
    model.compile("sgd", "cross_entropy", lr_scheduler=given)
    model.fit(X, Y, epochs=2, **QUIET)
    assert model.lr_schedulers().last_epoch == 8


def test_a_cycle_moves_by_epochs_where_that_is_said():
    class Own(Classifier):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = {"scheduler": one_cycle(optimizer), "interval": "epoch"}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    for model in (Own(), fitkit.Model(linear(4, 3, seed=1))):
        if not isinstance(model, Own):
            scheduler = {"scheduler": one_cycle, "interval": "epoch"}
            model.compile("sgd", "cross_entropy", lr_scheduler=scheduler)
        model.fit(X, Y, epochs=2, **QUIET)
        assert model.lr_schedulers().last_epoch == 2


def watching(**options):
    class Own(Classifier):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return [optimizer], [{"scheduler": plateau, **options}]

        def validation_step(self, batch, batch_idx):
            self.log("valid/agreement", 1.0)

    return Own()


def test_a_plateau_whose_validation_logs_no_loss_is_told_at_the_first_epochs_end():
    with pytest.raises(fitkit.ConfigurationError, match=r'(?s)loss, valid/agreement.*"monitor"'):
        watching().fit(X, Y, epochs=3, validation_data=(X, Y), **QUIET)
    later = watching(monitor="valid/agreement")
    later.fit(X, Y, epochs=4, validation_data=(X, Y), validation_freq=2, **QUIET)
    assert later.lr_schedulers().last_epoch == 2  # and epochs without a validation are no error


@pytest.mark.parametrize("monitor", [None, "giraffe"])
def test_a_plateau_that_isnt_strict_waits_with_one_warning(monitor):
    model = watching(monitor=monitor, strict=False)
    with pytest.warns(UserWarning, match="waits until the logs have it") as told:
        model.fit(X, Y, epochs=3, validation_data=(X, Y), **QUIET)
    assert len([w for w in told if "waits" in str(w.message)]) == 1
    assert model.global_step == 12
    assert model.lr_schedulers().last_epoch == 0
    with pytest.raises(fitkit.ConfigurationError, match="strict"):
        watching(strict="no").fit(X, Y, **QUIET)


def test_a_scheduler_without_a_state_is_told_before_the_training_and_saved_without(tmp_path):
    class Halving:
        def __init__(self, optimizer):
            self.optimizer = optimizer

        def step(self):
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.5

    class Own(Classifier):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return {"optimizer": optimizer, "lr_scheduler": Halving(optimizer)}

    whole, cut = Own(), Own()
    saves = fitkit.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.h5"))
    with pytest.warns(UserWarning, match="Halving has no state_dict"):
        whole.fit(X, Y, epochs=3, callbacks=saves, **QUIET)
    with pytest.warns(UserWarning, match="Halving has no state_dict"):
        cut.fit(X, Y, epochs=3, resume_from=tmp_path / "2.h5", **QUIET)
    # The rate itself is the optimizer's, and goes on.
    assert cut.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3
    assert torch.equal(cut.layer.weight, whole.layer.weight)


@pytest.mark.parametrize("returned", [
    None, [], "adam", 3, {"lr_scheduler": None}, {"optimizer": 1}, ([], []), [1, 2],
    {"optimizer": torch.optim.SGD([torch.zeros(1)], 0.1)},
    {"optimizer": torch.optim.SGD([torch.zeros(1)], 0.1), "lr_schedulers": 1},
])  # fmt: skip
def test_what_configure_optimizers_cant_return(returned):
    class Own(Classifier):
        def configure_optimizers(self):
            return returned

    with pytest.raises(fitkit.ConfigurationError):
        Own().fit(X, Y, **QUIET)


def test_compiles_optimizer_wins_and_its_rate_alone_is_refused():
    model = Classifier()
    model.compile(learning_rate=0.5)
    with pytest.raises(fitkit.ConfigurationError, match="configure_optimizers"):
        model.fit(X, Y, **QUIET)
    model.compile("adam")
    model.fit(X, Y, **QUIET)
    assert isinstance(model.optimizer, torch.optim.Adam)
    assert model.optimizer.param_groups[0]["lr"] == 0.5


class Adversaries(fitkit.Model):
    """Two nets with opposite aims."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.maker, self.judge = nn.Linear(4, 4), nn.Linear(4, 1)

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.maker.parameters(), 0.01),
            torch.optim.SGD(self.judge.parameters(), 0.1),
        ]

    def losses(self, x):
        return -self.judge(self.maker(x)).mean(), lambda: F.softplus(
            self.judge(self.maker(x).detach()) - self.judge(x)
        ).mean()

    def run_by_hand(self, turns=((0, 1),)):
        maker, judge = self.configure_optimizers()
        for index, (x, _) in enumerate(BATCHES):
            for turn in turns[index % len(turns)]:
                optimizer = (maker, judge)[turn]
                loss = self.losses(x)[0] if turn == 0 else self.losses(x)[1]()
                self.zero_grad()
                loss.backward()
                optimizer.step()
        return self


class ByTurns(Adversaries):
    def training_step(self, batch, batch_idx, optimizer_idx):
        learning = {name for name, p in self.named_parameters() if p.requires_grad}
        assert all(name.startswith(("maker", "judge")[optimizer_idx]) for name in learning)
        first, second = self.losses(batch[0])
        return first if optimizer_idx == 0 else second()


class ByHand(Adversaries):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        maker, judge = self.optimizers()
        self.toggle_optimizer(maker)
        loss = self.losses(batch[0])[0]
        maker.zero_grad()
        self.manual_backward(loss)
        maker.step()
        self.untoggle_optimizer(maker)
        judge_loss = self.losses(batch[0])[1]()
        judge.zero_grad()
        self.manual_backward(judge_loss)
        judge.step()
        self.log_dict({"maker": loss, "judge": judge_loss})


@pytest.mark.parametrize("kind", [ByTurns, ByHand])
def test_two_optimizers_do_as_a_loop_by_hand(kind):
    model = kind()
    history = model.fit(X, Y, **QUIET).history
    wanted = Adversaries().run_by_hand()
    assert_same_weights(model, wanted, atol=1e-7)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.global_step == 8
    assert set(history) == ({"loss"} if kind is ByTurns else {"maker", "judge"})


def test_frequencies_give_optimizers_batches_in_turn():
    class Own(ByTurns):
        def configure_optimizers(self):
            maker, judge = super().configure_optimizers()
            return [{"optimizer": maker, "frequency": 1}, {"optimizer": judge, "frequency": 2}]

    model = Own()
    model.fit(X, Y, **QUIET)
    wanted = Adversaries().run_by_hand(turns=((0,), (1,), (1,)))
    assert_same_weights(model, wanted, atol=1e-7)


def test_a_gradient_penalty_learns_through_its_own_gradient():
    class Own(Classifier):
        def training_step(self, batch, batch_idx):
            x = batch[0].requires_grad_()
            loss = F.cross_entropy(self(x).tanh(), batch[1])
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            return loss + slope.pow(2).sum()

    model = Own()
    model.fit(X, Y, **QUIET)
    net = linear(4, 3, seed=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for x, y in BATCHES:
        x = x.clone().requires_grad_()
        loss = F.cross_entropy(net(x).tanh(), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        optimizer.zero_grad()
        (loss + slope.pow(2).sum()).backward()
        optimizer.step()
    torch.testing.assert_close(model.layer.weight, net.weight, rtol=0, atol=1e-7)


def test_lbfgs_and_accumulation_with_an_own_step():
    for options in ({"optimizer": torch.optim.LBFGS}, {"accumulate_grad_batches": 2}):
        plain, own = fitkit.Model(linear(4, 3, seed=1)), Classifier()
        plain.compile(loss="cross_entropy", **{"optimizer": "sgd", **options})
        own.compile(**{"optimizer": "sgd", **options})
        for model in (plain, own):
            model.fit(X, Y, **QUIET)
        torch.testing.assert_close(own.layer.weight, plain.net.weight, rtol=0, atol=1e-6)


def test_what_lbfgs_computes_again_is_neither_logged_nor_counted():
    class Own(fitkit.Model):
        def __init__(self, net):
            super().__init__(net)
            self.seen, self.calls = torchmetrics.MeanMetric(), 0

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.seen.update(loss.detach())
            self.log("own", loss)
            self.calls += 1
            return loss

    plain, own = fitkit.Model(linear(4, 3, seed=1)), Own(linear(4, 3, seed=1))
    for model in (plain, own):
        model.compile(partial(torch.optim.LBFGS, max_iter=4), "cross_entropy", metrics=["accuracy"])
    expected, found = (model.fit(X, Y, **QUIET).history for model in (plain, own))
    assert found["loss"] == found["own"] == pytest.approx(expected["loss"])
    assert found["accuracy"] == expected["accuracy"]
    assert own.seen._update_count == len(BATCHES) < own.calls


def test_losses_that_an_optimizer_computes_itself_cant_be_scaled():
    model = fitkit.Model(linear(4, 3))
    model.compile(torch.optim.LBFGS, "cross_entropy", accelerator="cpu", precision="16-mixed")
    with pytest.raises(fitkit.ConfigurationError, match="LBFGS"):
        model.fit(X, Y, **QUIET)


def test_a_test_step_may_return_its_loss_as_a_number():
    class Own(Classifier):
        def test_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0]), batch[1]).item()

    model = Own()
    expected = F.cross_entropy(model(X), Y).item()
    found = model.evaluate(X, Y, batch_size=16, verbose=0, return_dict=True)
    assert found["loss"] == pytest.approx(expected)


def test_a_torchmetrics_object_of_two_numbers_isnt_logged():
    class Own(Classifier):
        def __init__(self):
            super().__init__()
            self.both = torchmetrics.Accuracy("multiclass", num_classes=3, average=None)

        def training_step(self, batch, batch_idx):
            self.both.update(self(batch[0]), batch[1])
            self.log("both", self.both)
            return super().training_step(batch, batch_idx)

    with pytest.raises(fitkit.ConfigurationError, match="not one number"):
        Own().fit(X, Y, **QUIET)


def test_a_batch_whose_step_returns_none_is_left_out():
    class Own(Classifier):
        def training_step(self, batch, batch_idx):
            return None if batch_idx else super().training_step(batch, batch_idx)

    model = Own()
    model.fit(X, Y, **QUIET)
    assert model.global_step == 1


@pytest.mark.parametrize("options", [{}, {"out_of_memory": "split"}], ids=["whole", "split"])
def test_a_batch_that_is_left_out_counts_in_its_group(options):
    class Own(Classifier):
        def training_step(self, batch, batch_idx):
            return None if batch_idx in (1, 2, 3) else super().training_step(batch, batch_idx)

    model = Own()
    model.compile(accumulate_grad_batches=2, **options)
    x, y = torch.cat([X, X]), torch.cat([Y, Y])
    model.fit(x, y, **{**QUIET, "batch_size": 20})  # updates by batches 0 and 4; 2 and 3 give none
    net = linear(4, 3, seed=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for rows in (slice(20), slice(80, 100)):
        optimizer.zero_grad()
        F.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()
    assert model.global_step == 2
    assert_same_weights(model.layer, net)


@pytest.mark.parametrize(("returned", "message"), [
    (lambda loss: loss.expand(3), r"shape \(3,\)"),
    (lambda loss: {"value": loss}, "without 'loss'"),
    (lambda loss: loss.item(), "returned"),
    (lambda loss: loss.detach(), "no gradient"),
])  # fmt: skip
def test_what_a_training_step_cant_return(returned, message):
    class Own(Classifier):
        def training_step(self, batch, batch_idx):
            return returned(super().training_step(batch, batch_idx))

    model = Own()
    before = model.layer.weight.clone()
    with pytest.raises(fitkit.ConfigurationError, match=message):
        model.fit(X, Y, **QUIET)
    assert torch.equal(model.layer.weight, before)


@pytest.mark.parametrize(("log", "message"), [
    (lambda model: model.log("a", torch.zeros(3)), r"shape \(3,\)"),
    (lambda model: model.log("a", "text"), "takes a number"),
    (lambda model: model.log("a", {"b": 1}), "log_dict"),
    (lambda model: model.log(3, 1.0), "must be a string"),
    (lambda model: model.log("a", 1.0, reduce_fx="median"), "mean, sum, min, max"),
    (lambda model: model.log("a", 1.0, sync_dist=True, rank_zero_only=True), "contradict"),
    (lambda model: [model.log("a", 1.0, reduce_fx=fx) for fx in ("mean", "sum")], "before"),
    (lambda model: model.log_dict([1.0]), "takes a dict"),
    (lambda model: model.log("a", 1.0, on_step=False, on_epoch=False), "keeps the value nowhere"),
])  # fmt: skip
def test_what_cant_be_logged(log, message):
    class Own(Classifier):
        def training_step(self, batch, batch_idx):
            log(self)
            return super().training_step(batch, batch_idx)

    with pytest.raises(fitkit.ConfigurationError, match=message):
        Own().fit(X, Y, **QUIET)
    with pytest.raises(fitkit.ConfigurationError, match="outside of a run"):
        Own().log("a", 1.0)


def test_names_that_look_like_hooks_bring_a_warning_with_the_right_name():
    class Own(Classifier):
        def training_step_ends(self, outputs): ...
        def val_step(self, batch, batch_idx): ...
        def on_train_epoch_end(self): ...
        def shared_step(self, batch): ...

    with pytest.warns(UserWarning, match="never called") as caught:
        Own().fit(X, Y, **QUIET)
    messages = " ".join(str(warning.message) for warning in caught)
    assert "Did you mean training_step_end?" in messages
    assert "Did you mean validation_step?" in messages
    assert "Override training_epoch_end" in messages
    assert "shared_step" not in messages


def test_lightnings_hooks_on_a_callback_bring_a_warning_with_the_right_name():
    class Lightnings(fitkit.callbacks.Callback):
        def on_train_epoch_end(self, trainer, module): ...
        def on_validation_epoch_end(self, trainer, module): ...
        def on_train_start(self, trainer, module): ...
        def on_epoch_ends(self, epoch, logs): ...
        def on_after_backward(self, trainer, module): ...
        def on_my_mind(self): ...

        on_records = ()

    class OfBoth(fitkit.callbacks.Callback):
        def on_epoch_end(self, epoch, logs): ...
        def on_train_epoch_end(self, trainer, module): ...

    with pytest.warns(UserWarning, match="never called") as caught:
        Direct().fit(X, Y, callbacks=[Lightnings(), OfBoth(), Lightnings()], **QUIET)
    begin = "Lightnings.{} is never called by fitkit. {} (FK026: python -m fitkit explain FK026)"
    assert sorted(str(warning.message) for warning in caught) == [
        begin.format(name, advice) for name, advice in [
            (
                "on_after_backward",
                "Set automatic_optimization = False and do it in training_step.",
            ),
            ("on_epoch_ends", "Write def on_epoch_end(self, epoch, logs)."),
            ("on_train_epoch_end", "Write def on_epoch_end(self, epoch, logs)."),
            ("on_train_start", "Write def on_train_begin(self, logs)."),
            ("on_validation_epoch_end", "Write def on_test_end(self, logs)."),
        ]
    ]  # fmt: skip


def test_lightnings_setup_and_sanity_check_on_a_callback_are_told_too():
    class Lightnings(fitkit.callbacks.Callback):
        def setup(self, trainer, pl_module, stage): ...
        def teardown(self, trainer, pl_module, stage): ...
        def on_sanity_check_end(self, trainer, pl_module): ...

    class SetsUpItself(fitkit.callbacks.Callback):
        def setup(self): ...

    with pytest.warns(UserWarning, match="never called") as caught:
        Direct().fit(X, Y, callbacks=[Lightnings(), SetsUpItself()], **QUIET)
    messages = sorted(str(warning.message) for warning in caught)
    assert len(messages) == 3
    assert "Lightnings.on_sanity_check_end" in messages[0]
    assert "def on_train_begin(self, logs)" in messages[1]
    assert "def on_train_end(self, logs)" in messages[2]


@pytest.mark.parametrize(("hook", "text"), [
    (lambda self, trainer, pl_module: None, r"def on_epoch_end\(self, epoch, logs\)\..*self"),
    (lambda self, pl_module, logs: None, r"takes \(self, pl_module, logs\)"),
    (lambda self, epoch: None, r"fitkit calls it as on_epoch_end\(epoch, logs\)"),
])  # fmt: skip
def test_a_hook_with_the_arguments_of_lightnings_is_refused_before_training(hook, text):
    kind = type("Theirs", (fitkit.callbacks.Callback,), {"on_epoch_end": hook})
    with pytest.raises(fitkit.ConfigurationError, match=text):
        Direct().fit(X, Y, callbacks=kind(), **QUIET)


def test_a_step_needs_a_batch_and_nothing_that_there_isnt():
    for step in (lambda self: None, lambda self, batch, batch_idx, dataloader_idx: None):
        kind = type("Own", (Classifier,), {"training_step": step})
        with pytest.raises(fitkit.ConfigurationError, match="def training_step"):
            kind().fit(X, Y, **QUIET)


def test_manual_optimization_refuses_what_it_cant_keep():
    model = ByHand()
    model.compile(gradient_clip_val=1.0)
    with pytest.raises(fitkit.ConfigurationError, match="gradient_clip_val"):
        model.fit(X, Y, **QUIET)
    with pytest.raises(fitkit.ConfigurationError, match="training_step"):
        Classifier().manual_backward(torch.zeros(1))
    idle = fitkit.Model(linear(4, 3, seed=1))
    idle.automatic_optimization = False
    with pytest.raises(fitkit.ConfigurationError, match="no training_step"):
        idle.fit(X, Y, **QUIET)


def test_train_on_batch_and_its_kin_call_the_own_steps():
    model = ByTurns()
    model.train_on_batch(*BATCHES[0])
    assert model.global_step == 2
    own = Classifier()
    loss = own.train_on_batch(*BATCHES[0])
    x, y = BATCHES[0]
    assert loss == pytest.approx(F.cross_entropy(linear(4, 3, seed=1)(x), y).item())


def test_hooks_set_on_an_instance_count_too():
    model = fitkit.Model(linear(4, 3, seed=1))
    model.training_step = lambda batch, batch_idx: F.cross_entropy(model(batch[0]), batch[1])
    model.compile(torch.optim.SGD(model.parameters(), 0.1, 0.9))
    model.fit(X, Y, **QUIET)
    assert torch.equal(model.net.weight, by_hand(1)[0].weight)


def test_what_is_forgotten_or_ignored_brings_a_warning():
    class Silent(Classifier):
        def training_step(self, batch, batch_idx):
            F.cross_entropy(self(batch[0]), batch[1])

    with pytest.warns(UserWarning, match="Return the loss"):
        Silent().fit(X, Y, **QUIET)
    with pytest.warns(UserWarning, match="class_weight has no effect"):
        Direct().fit(X, Y, class_weight={0: 2.0}, **QUIET)


class Direct(Classifier):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.layer(batch[0]), batch[1])


def test_two_optimizers_need_to_know_whose_turn_it_is():
    class Own(Adversaries):
        def training_step(self, batch, batch_idx):
            return self.losses(batch[0])[0]

    with pytest.raises(fitkit.ConfigurationError, match="optimizer_idx"):
        Own().fit(X, Y, **QUIET)


def test_names_of_a_validation_get_their_prefix_once():
    class Own(Direct):
        def validation_step(self, batch, batch_idx):
            for name in ("value", "val_a", "valid/b", "validation.c", "val", "a"):
                self.log(name, 1.0 if name == "val_a" else 2.0)

    history = Own().fit(X, Y, validation_data=(X, Y), **QUIET).history
    assert set(history) == {"loss", "val_value", "val_a", "valid/b", "validation.c", "val"}
    assert history["val_a"] == [1.0]


def test_a_torchmetrics_object_may_be_logged_by_step_and_by_epoch():
    class Own(Direct):
        def __init__(self):
            super().__init__()
            self.sum = torchmetrics.SumMetric()

        def training_step(self, batch, batch_idx):
            self.sum(batch_idx)
            self.log("sum", self.sum, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    history = Own().fit(X, Y, **QUIET).history
    assert history["sum_step"] == [3.0] and history["sum_epoch"] == [6.0]


@pytest.mark.parametrize("other", [torchmetrics.SumMetric, lambda: torch.tensor(1.0)])
def test_a_metric_made_anew_in_each_step_is_refused(other):
    class Own(Direct):
        def training_step(self, batch, batch_idx):
            self.log("sum", other() if batch_idx else torchmetrics.SumMetric())
            return super().training_step(batch, batch_idx)

    with pytest.raises(fitkit.ConfigurationError, match="once, in __init__"):
        Own().fit(X, Y, **QUIET)


def test_without_the_epochs_value_a_name_has_the_steps():
    class Own(Direct):
        def training_step(self, batch, batch_idx):
            self.log("number", batch_idx, on_epoch=False)
            return super().training_step(batch, batch_idx)

    assert Own().fit(X, Y, **QUIET).history["number"] == [3.0]


@pytest.mark.parametrize("verb", ["predict", "predict_on_batch"])
def test_log_in_predict_is_refused(verb):
    class Own(Direct):
        def predict_step(self, batch):
            self.log("a", 1.0)
            return super().predict_step(batch)

    with pytest.raises(fitkit.ConfigurationError, match="Return the value from predict_step"):
        getattr(Own(), verb)(X)


def test_callbacks_log_with_the_batchs_weight():
    def note(batch, logs):
        model.log("batch", batch)

    for model in (Direct(), fitkit.Model(linear(4, 3, seed=1))):
        model.compile("sgd", "cross_entropy")
        callback = fitkit.callbacks.LambdaCallback(on_train_batch_end=note)
        history = model.fit(X, Y, callbacks=callback, **QUIET).history
        assert history["batch"] == [pytest.approx((0 * 16 + 1 * 16 + 2 * 16 + 3 * 2) / 50)]


@pytest.mark.parametrize("kind", ["own", "compiled", "grouped"])
def test_what_is_logged_before_a_batch_is_weighed_by_the_batch_that_begins(kind):
    """Of 16, 16, 16 and 2 samples; with `grouped` the hook is called before the first and third."""

    class Begins(fitkit.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.model.log("count", 1.0, reduce_fx="sum")
            self.model.log("mean", float(batch))
            self.model.log("weighed", float(batch), batch_size=batch + 1)

        def on_test_begin(self, logs=None):
            self.model.log("passes", 1.0, reduce_fx="sum")

        def on_test_batch_begin(self, batch, logs=None):
            self.on_train_batch_begin(batch)

    class Own(Direct):
        def validation_step(self, batch, batch_idx):
            return super().validation_step(batch, batch_idx)

    model = fitkit.Model(linear(4, 3, seed=1)) if kind == "compiled" else Own()
    model.compile("sgd", "cross_entropy", steps_per_execution=2 if kind == "grouped" else 1)
    data = {"validation_data": (X, Y), "epochs": 2}
    history = model.fit(X, Y, callbacks=Begins(), **data, **QUIET).history
    batches = [(0, 16), (2, 16)] if kind == "grouped" else [(0, 16), (1, 16), (2, 16), (3, 2)]
    mean = sum(b * n for b, n in batches) / sum(n for _, n in batches)
    by_number = sum(b * (b + 1) for b, _ in batches) / sum(b + 1 for b, _ in batches)
    for prefix in ("", "val_"):
        assert history[f"{prefix}count"] == [len(batches)] * 2
        assert history[f"{prefix}mean"] == [pytest.approx(mean)] * 2
        assert history[f"{prefix}weighed"] == [pytest.approx(by_number)] * 2
    assert history["val_passes"] == [1.0, 1.0]


def test_lightnings_smaller_conveniences():
    class Own(Direct):
        def __init__(self, width=3, *, rate=0.1, **others):
            super().__init__()
            self.save_hyperparameters(ignore="width")

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            assert dataloader_idx == 0
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def training_step(self, batch, batch_idx):
            self.log("shown", 1.0, True)
            return super().training_step(batch, batch_idx)

    model = Own(3, rate=0.2, depth=4)
    assert model.hparams == {"rate": 0.2, "depth": 4} and model.hparams.rate == 0.2
    assert model.fit(X, Y, **QUIET).history["shown"] == [1.0]
    model.freeze()
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    model.unfreeze()
    assert model.training and all(p.requires_grad for p in model.parameters())
    with pytest.raises(fitkit.ConfigurationError, match="__init__"):
        model.save_hyperparameters()


def test_a_step_may_return_an_object_with_a_loss_and_predict_texts():
    @dataclasses.dataclass
    class Output:
        loss: torch.Tensor

    class Own(Direct):
        def training_step(self, batch, batch_idx):
            return Output(super().training_step(batch, batch_idx))

        def predict_step(self, batch, batch_idx):
            return [f"class {label}" for label in self(batch[0]).argmax(1).tolist()]

    model = Own()
    model.fit(X, Y, **QUIET)
    assert torch.equal(model.layer.weight, by_hand(1)[0].weight)
    texts = [f"class {label}" for label in model(X).argmax(1).tolist()]
    assert model.predict(X, verbose=0) == texts


def test_a_list_of_loaders_is_refused_by_name():
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 8)
    with pytest.raises(fitkit.ConfigurationError, match="list of 2 loaders"):
        Direct().fit(X, Y, validation_data=[loader, loader], **QUIET)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization as it is mostly written: two half steps and no `step`."""

    def __init__(self, params, radius=0.05, lr=0.5):
        super().__init__(params, {"radius": radius, "lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr)

    @torch.no_grad()
    def first_step(self):
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in held]).norm() + 1e-12
        for p in held:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad * (self.param_groups[0]["radius"] / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()

    def step(self, closure=None):
        raise NotImplementedError("call first_step and second_step")


class Sharp(Classifier):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        x, y = batch
        for step in (optimizer.first_step, optimizer.second_step):
            loss = F.cross_entropy(self(x), y)
            self.manual_backward(loss)
            step()
        return loss

    def configure_optimizers(self):
        return SAM(self.parameters())


def test_updates_by_two_half_steps_are_counted_and_averaged(tmp_path):
    weights = []

    class Noting(fitkit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            weights.append(self.model.layer.weight.detach().clone())

    model = Sharp()
    average = model.layer.weight.detach().clone()
    model.fit(X, Y, epochs=2, callbacks=[Noting(), fitkit.callbacks.EMA(0.9)], **QUIET)
    assert model.global_step == 8
    for each in weights:
        average = 0.9 * average + 0.1 * each
    assert torch.allclose(model.layer.weight, average, atol=1e-6)
    assert not torch.equal(weights[0], weights[-1])


def test_an_epoch_without_an_update_is_told_once():
    class Hidden(Classifier):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for parameter in self.parameters():
                parameter.data.mul_(0.5)  # which torch doesn't count

    with pytest.warns(UserWarning, match="fitkit saw no update") as told:
        Hidden().fit(X, Y, epochs=3, **QUIET)
    assert len([w for w in told if "saw no update" in str(w.message)]) == 1
