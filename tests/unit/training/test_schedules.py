"""Schedules as long as the training, against torch's own, whatever a training consists of."""

import functools
import itertools

import pytest
import torch
from torch.optim import lr_scheduler

import fitkit
from fitkit.callbacks import Callback, ModelCheckpoint

RATE, BATCHES, EPOCHS = 0.1, 5, 4
X, Y = torch.zeros(2 * BATCHES, 2), torch.zeros(2 * BATCHES, 1)
LAST = {
    "cosine": lambda optimizer, length: lr_scheduler.CosineAnnealingLR(optimizer, length),
    "polynomial": lambda optimizer, length: lr_scheduler.PolynomialLR(optimizer, length),
    "one_cycle": lambda optimizer, length: lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=length
    ),
}


def expected(name, interval, warm_up, updates):
    """The rate of each update, and the one after the last, by a loop over torch's scheduler."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RATE)
    waits = round((warm_up or 0) * updates)
    by_step = (interval or ("step" if name == "one_cycle" else "epoch")) == "step"
    ends = [updates * (epoch + 1) for epoch in range(EPOCHS)]
    length = ends[-1] - waits if by_step else sum(end >= waits for end in ends)
    scheduler, rates = LAST[name](optimizer, length), []
    first = optimizer.param_groups[0]["lr"]

    def move():
        if name != "one_cycle" or scheduler.last_epoch + 1 < length:
            scheduler.step()

    for done in range(ends[-1]):
        now = optimizer.param_groups[0]["lr"]
        rates.append(first * (done + 1) / waits if done < waits else now)
        optimizer.step()
        made = done + 1
        if (by_step and made > waits) or (not by_step and made in ends and made >= waits):
            move()
    return rates, optimizer.param_groups[0]["lr"]


class Watch(Callback):
    """Keeps each update's rate, and may save and stop after a batch."""

    def __init__(self, every, path=None, stop=None):
        self.every, self.path, self.stop, self.rates = every, path, stop, []

    def on_train_batch_begin(self, batch, logs):
        if batch % self.every == 0:
            self.rates.append(self.model.optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, batch, logs):
        if self.stop == (self.model.current_epoch, batch):
            self.model.save(self.path)
            self.model.stop_training = True


def compiled(name, interval, warm_up, every):
    model = fitkit.Model(torch.nn.Linear(2, 1))
    schedule = {"scheduler": name, "interval": interval} if interval else name
    model.compile(
        "sgd", "mse", learning_rate=RATE, accelerator="cpu", lr_scheduler=schedule,
        warmup_epochs=warm_up, accumulate_grad_batches=every,
    )  # fmt: skip
    return model


def fit(model, callbacks, epochs=EPOCHS, **arguments):
    model.fit(X, Y, batch_size=2, epochs=epochs, callbacks=callbacks, verbose=0, **arguments)


def one_run(compile_it, every, path):
    model, watch = compile_it(), Watch(every)
    fit(model, watch)
    return model, watch.rates


def resumed_with_more_epochs(compile_it, every, path):
    """A training of two epochs, longer in a new process."""
    fit(compile_it(), ModelCheckpoint(path), epochs=2)
    model, watch = compile_it(), Watch(every)
    fit(model, watch, resume_from=path)
    return model, watch.rates


def resumed_by_the_same_model(compile_it, every, path):
    model, watch = compile_it(), Watch(every)
    fit(model, ModelCheckpoint(path), epochs=3)
    fit(model, [], epochs=1)
    fit(model, watch, resume_from=path)
    return model, watch.rates


def resumed_within_an_epoch(compile_it, every, path):
    """The same, and another length: of a training cut in its third epoch."""
    fit(compile_it(), Watch(every, path, (2, 2 * every - 1)), epochs=EPOCHS + 1)
    model, watch = compile_it(), Watch(every)
    fit(model, watch, resume_from=path)
    return model, watch.rates


def resumed_as_it_was(compile_it, every, path):
    fit(compile_it(), Watch(every, path, (1, 2 * every - 1)))
    model, watch = compile_it(), Watch(every)
    fit(model, watch, resume_from=path)
    return model, watch.rates


def loaded(compile_it, every, path):
    fit(compile_it(), ModelCheckpoint(path), epochs=2)
    model, watch = compile_it(), Watch(every)
    model.load(path)
    fit(model, watch, initial_epoch=2)
    return model, watch.rates


def in_two_calls(compile_it, every, path):
    model, watch = compile_it(), Watch(every)
    fit(model, [], epochs=2)
    fit(model, watch, initial_epoch=2)
    return model, watch.rates


WAYS = [
    one_run, resumed_with_more_epochs, resumed_by_the_same_model, resumed_within_an_epoch,
    resumed_as_it_was, loaded, in_two_calls,
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "way"),
    [*(("cosine", way) for way in WAYS), *itertools.product(("polynomial", "one_cycle"), WAYS[:2])],
    ids=lambda one: getattr(one, "__name__", one),
)
@pytest.mark.parametrize("interval", [None, "epoch", "step"])
def test_a_schedule_ends_with_the_training_however_that_is_made(tmp_path, name, interval, way):
    for warm_up, every in ((None, 2), (1, 1), (2.2, 2)):
        compile_it = functools.partial(compiled, name, interval, warm_up, every)
        model, found = way(compile_it, every, tmp_path / "saved.h5")
        rates, last = expected(name, interval, warm_up, -(-BATCHES // every))
        what = f"warmup_epochs={warm_up}, accumulate_grad_batches={every}"
        assert found == pytest.approx(rates[-len(found) :], rel=1e-12), what
        assert model.optimizer.param_groups[0]["lr"] == pytest.approx(last, abs=1e-12), what


@pytest.mark.filterwarnings("ignore:.*saved by a model with other compile settings")
def test_a_rate_before_the_end_of_a_warm_up_is_not_taken_for_the_rate(tmp_path):
    fit(compiled(None, None, 3, 1), ModelCheckpoint(tmp_path / "a.h5"), epochs=1)
    for arguments in ({"resume_from": tmp_path / "a.h5"}, {"initial_epoch": 1}):
        for warm_up, rates in ((3, [RATE * (6 + done) / 15 for done in range(5)]), (0, [RATE] * 5)):
            model, watch = compiled(None, None, warm_up, 1), Watch(1)
            if "initial_epoch" in arguments:
                model.load(tmp_path / "a.h5")
            fit(model, watch, epochs=2, **arguments)
            assert watch.rates == pytest.approx(rates)


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (
            functools.partial(lr_scheduler.CosineAnnealingLR, eta_min=0.02),
            lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS, eta_min=0.02),
        ),
        (
            lr_scheduler.CosineAnnealingLR,
            lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS),
        ),
        (
            functools.partial(lr_scheduler.OneCycleLR, max_lr=0.3),
            lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=EPOCHS * BATCHES),
        ),
        (
            functools.partial(lr_scheduler.CosineAnnealingLR, T_max=2),
            lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 2),
        ),
    ],
    ids=["eta_min", "class", "max_lr", "own length"],
)
def test_a_length_that_nobody_gave_is_the_trainings(given, made):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RATE)
    scheduler, rates = made(optimizer), []
    by_step = isinstance(scheduler, lr_scheduler.OneCycleLR)
    for done in range(1, EPOCHS * BATCHES + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if done < EPOCHS * BATCHES and (by_step or done % BATCHES == 0):
            scheduler.step()
    watch = Watch(1)
    fit(compiled(given, None, None, 1), watch)
    assert watch.rates == pytest.approx(rates, rel=1e-12)


def test_arguments_that_are_missing_are_asked_for_by_the_classs_name():
    model = compiled(functools.partial(lr_scheduler.StepLR, gamma=0.1), None, None, 1)
    with pytest.raises(fitkit.ConfigurationError, match=r"functools\.partial\(StepLR, …\)"):
        fit(model, [])
