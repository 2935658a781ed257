"""Schedules of one word, against arithmetic by hand, whatever a training consists of."""

import functools
import math

import pytest
import torch

import fitkit
from tests.compiling import TRACED
from tests.unit.training.test_schedules import BATCHES, EPOCHS, RATE, WAYS, Watch, X, Y, fit

HEIGHTS = {
    "warmup_cosine": lambda part: 0.5 * (1 + math.cos(math.pi * part)),
    "warmup_linear": lambda part: 1 - part,
    "warmup_polynomial": lambda part: (1 - part) ** 2,
    "warmup_constant": lambda part: 1.0,
    "warmup_stable_decay": lambda part: min(1.0, (1 - part) / 0.2),
}


def expected(name, warm, total, floor=0.0):
    """The rate of each update, and the one after the last."""
    height = HEIGHTS[name]
    rates = []
    for done in range(total + 1):
        if done < warm:
            rates.append(RATE * (done + 1) / warm)
        else:
            rates.append(RATE * (floor + (1 - floor) * height((done - warm) / (total - warm))))
    return rates[:-1], rates[-1]


def compiled(schedule, every=1, **arguments):
    model = fitkit.Model(torch.nn.Linear(2, 1))
    model.compile(
        "sgd", "mse", learning_rate=RATE, accelerator="cpu", devices=1, lr_scheduler=schedule,
        accumulate_grad_batches=every, **arguments,
    )  # fmt: skip
    return model


@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, WAYS[0]) for name in HEIGHTS), *(("warmup_stable_decay", way) for way in WAYS[1:])],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_word_ends_at_its_floor_however_the_training_is_made(tmp_path, name, way):
    words = [({}, None, 0.05), ({"warmup": 0.3}, None, 0.3), ({}, 0.5, None), ({}, 0, None)]
    for options, warmup_epochs, part in words:
        for every in (1, 2):  # two batches an update leave one of five over
            updates = -(-BATCHES // every)
            total = EPOCHS * updates
            warm = (
                min(max(round(total * part), 2), total - 1)
                if part
                else round((warmup_epochs or 0) * updates)
            )
            schedule = {"scheduler": name, **options} if options else name
            compile_it = functools.partial(compiled, schedule, every, warmup_epochs=warmup_epochs)
            model, found = way(compile_it, every, tmp_path / "saved.h5")
            rates, last = expected(name, warm, total)
            what = f"{schedule}, {warmup_epochs=}, {every=}"
            assert found == pytest.approx(rates[-len(found) :], rel=1e-12), what
            assert model.optimizer.learning_rate == pytest.approx(last, abs=1e-15), what


def test_floor_power_and_decay_are_words_of_the_dict():
    model, watch = compiled({"scheduler": "warmup_cosine", "warmup": 0.2, "floor": 0.1}), Watch(1)
    fit(model, watch)
    rates, last = expected("warmup_cosine", 4, 20, floor=0.1)
    assert watch.rates == pytest.approx(rates)
    assert model.optimizer.learning_rate == pytest.approx(last) == pytest.approx(0.1 * RATE)
    model, watch = compiled({"scheduler": "warmup_polynomial", "warmup": 0, "power": 3}), Watch(1)
    fit(model, watch)
    assert watch.rates == pytest.approx([RATE * (1 - done / 20) ** 3 for done in range(20)])
    model, watch = compiled({"scheduler": "wsd", "warmup": 0, "decay": 0.5, "floor": 0.5}), Watch(1)
    fit(model, watch)
    falls = [RATE * (0.5 + 0.5 * (1 - done / 10)) for done in range(10)]
    assert watch.rates == pytest.approx([RATE] * 10 + falls)


def test_each_group_keeps_its_ratio():
    net = torch.nn.Linear(2, 1)
    groups = [{"params": [net.weight]}, {"params": [net.bias], "lr": 0.5}]
    model = fitkit.Model(net)
    schedule = {"scheduler": "warmup_linear", "warmup": 0.5, "floor": 0.2}
    optimizer = torch.optim.SGD(groups, lr=0.1)
    model.compile(optimizer, "mse", lr_scheduler=schedule, accelerator="cpu", devices=1)
    found = []
    watch = fitkit.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: found.append(
            [group["lr"] for group in optimizer.param_groups]
        )
    )
    model.fit(X, Y, batch_size=5, epochs=2, callbacks=watch, verbose=0)
    by_hand = [0.5, 1.0, 1.0, 0.6]
    assert found == [pytest.approx([0.1 * factor, 0.5 * factor]) for factor in by_hand]
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.02, 0.1])


def test_the_compiled_step_has_the_same_rates_and_weights():
    weights = []
    for jit_compile in (False, TRACED):
        torch.manual_seed(0)
        model, watch = compiled("warmup_cosine", jit_compile=jit_compile), Watch(1)
        x = torch.linspace(-1, 1, 2 * X.shape[0]).reshape(X.shape)
        model.fit(x, Y + 1, batch_size=2, epochs=EPOCHS, callbacks=watch, shuffle=False, verbose=0)
        rates = [float(rate) for rate in watch.rates]
        assert rates == pytest.approx(expected("warmup_cosine", 2, 20)[0], rel=1e-6)
        weights.append(model.net.weight.detach().clone())
    assert torch.allclose(*weights, atol=1e-6)


def test_several_optimizers_that_step_together_end_together():
    net = torch.nn.Linear(2, 1)
    both = [torch.optim.SGD([net.weight], lr=0.1), torch.optim.Adam([net.bias], lr=0.2)]
    model = fitkit.Model(net)
    model.compile(both, "mse", lr_scheduler="warmup_cosine", accelerator="cpu", devices=1)
    model.fit(X, Y, batch_size=2, epochs=2, verbose=0)
    assert [optimizer.param_groups[0]["lr"] for optimizer in both] == [0, 0]


@pytest.mark.parametrize("warmup_epochs", [None, 1.5])
def test_a_callback_that_changes_the_accumulation_changes_the_length(tmp_path, warmup_epochs):
    numbers = {0: 5, 1: 3, 2: 3, 3: 1}  # updates of each epoch, of 5 batches
    total = sum(numbers.values())
    warm = 2 if warmup_epochs is None else round(5 + 0.5 * 3)
    rates, last = expected("warmup_cosine", warm, total)

    class ByUpdate(Watch):
        """Keeps the rate after each batch, and how many updates were made."""

        def on_train_batch_begin(self, batch, logs):
            pass

        def on_train_batch_end(self, batch, logs):
            self.rates.append((self.model.global_step, self.model.optimizer.learning_rate))
            super().on_train_batch_end(batch, logs)

    def run(watch, **arguments):
        model = compiled("warmup_cosine", warmup_epochs=warmup_epochs)
        accumulation = fitkit.callbacks.GradientAccumulationScheduler({1: 2, 3: 5})
        fit(model, [accumulation, watch], **arguments)
        return model

    path = tmp_path / "saved.h5"
    watch, begun, rest = ByUpdate(1), ByUpdate(1, path, (2, 1)), ByUpdate(1)
    assert run(watch).global_step == total
    for updates, rate in watch.rates:
        assert rate == pytest.approx([*rates, last][updates], abs=1e-15), updates
    run(begun)
    run(rest, resume_from=path)
    assert begun.rates + rest.rates == watch.rates


def test_a_training_of_one_update_is_not_all_warm_up():
    model, watch = compiled({"scheduler": "warmup_linear", "warmup": 0.9}), Watch(1)
    model.fit(X, Y, batch_size=len(X), epochs=1, callbacks=watch, verbose=0)
    assert watch.rates == [RATE]
    assert model.optimizer.learning_rate == 0


def test_data_without_a_length_need_steps_per_epoch():
    model = compiled("warmup_cosine")
    with pytest.raises(fitkit.ConfigurationError, match="Give fit steps_per_epoch"):
        model.fit(((X, Y) for _ in range(8)), verbose=0)
    model.fit(((X, Y) for _ in range(8)), epochs=2, steps_per_epoch=4, verbose=0)
    assert model.optimizer.learning_rate == 0


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"scheduler": "wsd", "power": 2}, "'warmup', 'floor' and 'decay'"),
        ({"scheduler": "wsd", "decay": 2}, "decay=2 must be above 0 and below 1"),
        ({"scheduler": "warmup_cosine", "floor": 1}, "floor=1 must be at least 0 and below 1"),
        ({"scheduler": "warmup_cosine", "warmup": "2"}, "warmup='2' must be a number"),
        ({"scheduler": "cosine", "warmup": 0.1}, "'frequency' and 'monitor'"),
    ],
)
def test_other_words_are_refused_at_once(schedule, message):
    with pytest.raises(fitkit.ConfigurationError, match=message):
        compiled(schedule)


def test_a_warm_up_is_given_once():
    with pytest.raises(fitkit.ConfigurationError, match="were both given"):
        compiled({"scheduler": "warmup_cosine", "warmup": 0.1}, warmup_epochs=1)


def test_a_checkpoint_changes_only_the_position():
    model = compiled("warmup_cosine")
    fit(model, [])
    scheduler = model._fitkit.fit_state.schedulers[0].scheduler
    state = {**scheduler.state_dict(), "step": 3, "height": 4}
    scheduler.load_state_dict(state)
    assert callable(scheduler.step) and callable(scheduler.height)
    with pytest.raises(ValueError, match="no position"):
        scheduler.load_state_dict({**state, "last_epoch": -1})


@pytest.mark.parametrize(("updates", "warm"), [(9, 2), (3, 2), (2, 1), (60, 3)])
def test_a_short_training_warms_up_too(updates, warm):
    model, watch = compiled("warmup_cosine"), Watch(1)
    x, y = torch.ones(updates, 2), torch.ones(updates, 1)
    model.fit(x, y, batch_size=1, epochs=1, callbacks=watch, verbose=0)
    assert watch.rates == pytest.approx(expected("warmup_cosine", warm, updates)[0])
