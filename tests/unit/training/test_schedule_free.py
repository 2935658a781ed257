"""Optimizers that train at other weights than those that evaluate: against loops by hand."""

import importlib

import pytest
import torch
from torch.nn import functional as F

import fitkit
from fitkit.callbacks import Callback, ModelCheckpoint
from tests import reference
from tests.nets import classes_in_turn, dense

X, Y = classes_in_turn(64, 5)
BATCHES = list(zip(X.split(16), Y.split(16), strict=True))
QUIET = {"verbose": 0, "shuffle": False, "batch_size": 16}


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Schedule-free SGD as its authors write it: `train` shows y, `eval` shows x."""

    def __init__(self, params, lr=0.5, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum, "k": 0, "train_mode": False})

    def train(self):
        self._switch(True)

    def eval(self):
        self._switch(False)

    @torch.no_grad()
    def _switch(self, trains):
        for group in self.param_groups:
            beta = group["momentum"]
            if group["train_mode"] != trains:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - beta if trains else 1 - 1 / beta)
                group["train_mode"] = trains

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"], "a step is made in train mode"
            part, beta, lr = 1 / (group["k"] + 1), group["momentum"], group["lr"]
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, part)
                    p.add_(p.grad, alpha=lr * (beta * (1 - part) - 1))
                    z.sub_(p.grad, alpha=lr)


def published(name):
    try:
        return getattr(importlib.import_module("schedulefree"), name)
    except ImportError:
        return None


KINDS = {
    "own": ScheduleFreeSGD,
    "SGDScheduleFree": published("SGDScheduleFree"),
    "AdamWScheduleFree": published("AdamWScheduleFree"),
    "RAdamScheduleFree": published("RAdamScheduleFree"),
}
each_kind = pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=pytest.mark.skipif(kind is None, reason="schedulefree isn't there"))
    for kind in KINDS.values()
], ids=list(KINDS))  # fmt: skip


def compiled(kind, **arguments):
    return reference.compiled(
        dense(5, 8, 3, seed=1),
        lambda params: kind(params, lr=0.5),
        metrics=["accuracy"],
        **arguments,
    )


def by_hand(kind, epochs):
    """The net in evaluation mode, and its losses on X after each epoch."""
    trained, losses = dense(5, 8, 3, seed=1), []
    optimizer = kind(trained.parameters(), lr=0.5)
    for _ in range(epochs):
        optimizer.train()
        reference.plain_loop(trained, optimizer, BATCHES)
        optimizer.eval()
        with torch.no_grad():
            losses.append(F.cross_entropy(trained(X), Y).item())
    return trained, losses


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@each_kind
def test_validation_and_the_end_have_the_weights_that_evaluate(kind):
    model = compiled(kind)
    history = model.fit(X, Y, epochs=3, validation_data=(X, Y), **QUIET).history
    trained, losses = by_hand(kind, 3)
    assert torch.equal(weights(model), weights(trained))
    assert history["val_loss"] == pytest.approx(losses, abs=1e-6)
    assert model.evaluate(X, Y, verbose=0)[0] == pytest.approx(losses[-1], abs=1e-6)
    unvalidated = compiled(kind)
    unvalidated.fit(X, Y, epochs=3, **QUIET)
    assert torch.equal(weights(unvalidated), weights(model))


class Looking(Callback):
    """Evaluates, predicts and saves within an epoch."""

    def __init__(self, folder):
        self.folder, self.losses = folder, []

    def on_train_batch_end(self, batch, logs):
        if batch == 1:
            before = weights(self.model).clone()
            self.losses.append(self.model.evaluate(X, Y, verbose=0)[0])
            with torch.no_grad():
                probed = dense(5, 8, 3, seed=1)
                self.model.save_weights(self.folder / "w.pt")
                probed.load_state_dict(torch.load(self.folder / "w.pt"))
                self.saved = F.cross_entropy(probed(X), Y).item()
                outputs = torch.from_numpy(self.model.predict(X, verbose=0))
                self.predicted = F.cross_entropy(outputs, Y).item()
                self.tested = self.model.test_on_batch(X, Y)[0]
                self.model.save(self.folder / "m.h5")
            assert torch.equal(weights(self.model), before)


@each_kind
def test_looks_within_an_epoch_see_other_weights_and_change_nothing(kind, tmp_path):
    model, alone = compiled(kind), compiled(kind)
    looks = Looking(tmp_path)
    model.fit(X, Y, epochs=2, callbacks=looks, **QUIET)
    alone.fit(X, Y, epochs=2, **QUIET)
    assert torch.equal(weights(model), weights(alone))
    trained = dense(5, 8, 3, seed=1)
    optimizer = kind(trained.parameters(), lr=0.5)
    optimizer.train()
    reference.plain_loop(trained, optimizer, BATCHES[:2])
    optimizer.eval()
    with torch.no_grad():
        expected = F.cross_entropy(trained(X), Y).item()
    assert looks.losses[0] == pytest.approx(expected, abs=1e-6)
    assert looks.saved == pytest.approx(looks.losses[1], abs=1e-6)
    assert looks.predicted == pytest.approx(looks.losses[1], abs=1e-6)
    assert looks.tested == pytest.approx(looks.losses[1], abs=1e-6)


@each_kind
def test_a_resumed_training_is_the_uncut_one_to_the_bit(kind, tmp_path):
    whole = compiled(kind)
    saves = ModelCheckpoint(str(tmp_path / "{step}.h5"), every_n_train_steps=1, asynchronous=True)
    history = whole.fit(X, Y, epochs=3, callbacks=saves, **QUIET).history
    for step in (1, 4, 7):  # within an epoch, after an epoch's last batch, within a later one
        cut = compiled(kind)
        again = ModelCheckpoint(str(tmp_path / "again{step}.h5"), every_n_train_steps=1)
        found = cut.fit(
            X, Y, epochs=3, callbacks=again, resume_from=tmp_path / f"{step}.h5", **QUIET
        ).history
        assert torch.equal(weights(cut), weights(whole))
        assert found == history


def test_a_file_that_is_loaded_and_saved_again_keeps_the_weights_to_train_at(tmp_path):
    saves = ModelCheckpoint(str(tmp_path / "{step}.h5"), every_n_train_steps=3)
    compiled(ScheduleFreeSGD).fit(X, Y, epochs=1, callbacks=saves, **QUIET)
    again = compiled(ScheduleFreeSGD)
    again.load(tmp_path / "3.h5")
    again.save(tmp_path / "again.h5")
    kept = []
    for name in ("3.h5", "again.h5"):
        with fitkit.checkpoint.open_checkpoint(tmp_path / name) as file:
            kept.append(file.state["training"]["optimizers"][0]["weights"])
    assert len(kept[1]) == len(list(again.parameters()))
    assert all(map(torch.equal, *kept))


@each_kind
def test_a_file_saved_at_an_epochs_end_has_the_weights_that_evaluate(kind, tmp_path):
    whole, cut = compiled(kind), compiled(kind)
    saves = ModelCheckpoint(str(tmp_path / "{epoch}.h5"))
    whole.fit(X, Y, epochs=3, callbacks=saves, **QUIET)
    loaded = fitkit.Model(dense(5, 8, 3, seed=1))
    loaded.load_weights(tmp_path / "2.h5")
    assert torch.equal(weights(loaded), weights(by_hand(kind, 2)[0]))
    cut.fit(X, Y, epochs=3, resume_from=tmp_path / "2.h5", **QUIET)
    assert torch.equal(weights(cut), weights(whole))


def test_weights_alone_within_an_epoch_are_those_that_evaluate(tmp_path):
    model = compiled(ScheduleFreeSGD)
    saves = ModelCheckpoint(
        str(tmp_path / "{step}.pt"), every_n_train_steps=2, save_weights_only=True
    )
    whole = ModelCheckpoint(str(tmp_path / "{step}.h5"), every_n_train_steps=2)
    model.fit(X, Y, epochs=1, callbacks=[saves, whole], **QUIET)
    alone, of_whole = dense(5, 8, 3, seed=1), fitkit.Model(dense(5, 8, 3, seed=1))
    alone.load_state_dict(torch.load(tmp_path / "2.pt"))
    of_whole.load_weights(tmp_path / "2.h5")
    assert torch.equal(weights(alone), weights(of_whole))


def test_a_failing_fit_leaves_the_weights_that_evaluate_and_a_file_that_goes_on(tmp_path):
    class Failing(Callback):
        def on_train_batch_end(self, batch, logs):
            if self.model.global_step == 6:
                raise RuntimeError("cut")

    whole, cut, on = (compiled(ScheduleFreeSGD) for _ in range(3))
    whole.fit(X, Y, epochs=3, **QUIET)
    saves = ModelCheckpoint(str(tmp_path / "{epoch}.h5"), save_on_exception=True)
    with pytest.raises(RuntimeError, match="cut"):
        cut.fit(X, Y, epochs=3, callbacks=[Failing(), saves], **QUIET)
    assert not cut.optimizer.param_groups[0]["train_mode"]
    on.fit(X, Y, epochs=3, resume_from=tmp_path / "exception.h5", **QUIET)
    assert torch.equal(weights(on), weights(whole))


def test_single_batches_train_and_evaluate():
    model, trained = compiled(ScheduleFreeSGD), dense(5, 8, 3, seed=1)
    optimizer = ScheduleFreeSGD(trained.parameters())
    for x, y in BATCHES:
        model.train_on_batch(x, y)
        optimizer.train()
        reference.plain_loop(trained, optimizer, [(x, y)])
        optimizer.eval()
        assert torch.equal(weights(model), weights(trained))


def test_a_fit_within_a_fits_epoch_goes_back_to_training():
    class Inner(Callback):
        def on_train_batch_end(self, batch, logs):
            if batch == 1 and not self.done:
                self.done = True
                self.model.fit(X, Y, epochs=1, **QUIET)
                assert self.model.optimizer.param_groups[0]["train_mode"]

    inner = Inner()
    inner.done = False
    model = compiled(ScheduleFreeSGD)
    model.fit(X, Y, epochs=2, callbacks=inner, **QUIET)
    assert model.global_step == 12
    assert not model.optimizer.param_groups[0]["train_mode"]


def test_forged_weights_to_train_at_are_refused(tmp_path):
    model = compiled(ScheduleFreeSGD)
    saves = ModelCheckpoint(str(tmp_path / "{step}.h5"), every_n_train_steps=2)
    model.fit(X, Y, epochs=1, callbacks=saves, **QUIET)
    other = fitkit.Model(dense(5, 8, 3, seed=1))
    other.compile(lambda params: ScheduleFreeSGD(list(params)[:2]), "cross_entropy")
    with pytest.raises(fitkit.CheckpointError):
        other.load(tmp_path / "2.h5")
