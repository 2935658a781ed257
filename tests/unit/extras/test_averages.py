"""Averaged weights: against sums by hand, and where they stand in the model."""

import copy

import pytest
import torch

import fitkit
from fitkit.callbacks import (
    EMA,
    Callback,
    EarlyStopping,
    StochasticWeightAveraging,
    SwapEMAWeights,
)
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.averages import renew_statistics

X = torch.randn(8, 1, generator=torch.Generator().manual_seed(0))
Y = 3 * X


def scale(rate=0.1, net=None, **arguments):
    torch.manual_seed(0)
    model = fitkit.Model(net or torch.nn.Linear(1, 1, bias=False))
    model.compile("sgd", "mse", learning_rate=rate, **arguments)
    return model


def weight(model):
    return model.net.weight.item()


class Notes(Callback):
    """Notes the weight after each update, in each validation, and at each epoch's end."""

    def __init__(self):
        self.updates, self.validated, self.ended = [], [], []

    def on_train_batch_end(self, batch, logs):
        self.updates.append(weight(self.model))

    def on_test_batch_begin(self, batch, logs=None):
        self.validated.append(weight(self.model))

    def on_epoch_end(self, epoch, logs):
        self.ended.append(weight(self.model))


def moving(values, decay, start):
    average, found = start, []
    for value in values:
        average = decay * average + (1 - decay) * value
        found.append(average)
    return found


# ------------------------------------------------------------------ EMA


def test_validations_and_the_finished_model_use_the_moving_average():
    model, notes = scale(), Notes()
    start = weight(model)
    options = {"batch_size": 4, "validation_data": (X, Y), "validation_batch_size": 8}
    model.fit(X, Y, epochs=3, verbose=0, callbacks=[notes, EMA(0.9)], **options)
    expected = moving(notes.updates, 0.9, start)
    assert notes.validated == pytest.approx(expected[1::2], abs=1e-6)
    assert notes.ended == pytest.approx(notes.updates[1::2], abs=1e-7)  # its own again
    assert weight(model) == pytest.approx(expected[-1], abs=1e-6)
    # The training itself is that without the average.
    plain, other = scale(), Notes()
    plain.fit(X, Y, epochs=3, verbose=0, callbacks=other, batch_size=4, shuffle=True)
    assert len(other.updates) == len(notes.updates)


def test_the_average_follows_updates_and_not_batches():
    model, notes = scale(accumulate_grad_batches=3), Notes()
    start = weight(model)
    model.fit(X, Y, batch_size=2, epochs=2, verbose=0, callbacks=[notes, EMA(0.5)])
    # 4 batches an epoch: an update after the third, and one at the epoch's end.
    assert model._fitkit.fit_state.updates == 4
    after = [notes.updates[2], notes.ended[0], notes.updates[6], notes.ended[1]]
    assert weight(model) == pytest.approx(moving(after, 0.5, start)[-1], abs=1e-6)


def test_it_can_begin_later_and_move_less_often():
    model, notes = scale(), Notes()
    average = EMA(0.5, update_every_n_steps=2, update_starting_at_epoch=1)
    model.fit(X, Y, batch_size=2, epochs=2, verbose=0, callbacks=[notes, average])
    expected = moving([notes.updates[5], notes.updates[7]], 0.5, notes.updates[3])
    assert weight(model) == pytest.approx(expected[-1], abs=1e-6)
    model, notes = scale(), Notes()
    late = EMA(0.5, update_starting_at_epoch=5)
    options = {"validation_data": (X, Y)}
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[notes, late], **options)
    assert weight(model) == notes.updates[-1] and notes.validated == notes.ended


def test_callbacks_after_it_see_the_average_with_swap_on_epoch():
    model, notes = scale(), Notes()
    average = SwapEMAWeights(swap_on_epoch=True, decay=0.5)
    stop = EarlyStopping(restore_best_weights=True, patience=9)
    options = {"validation_data": (X, Y)}
    model.optimizer.param_groups[0]["lr"] = -0.1  # It gets worse each epoch.
    model.fit(X, Y, epochs=3, verbose=0, callbacks=[average, notes, stop], **options)
    assert notes.ended == pytest.approx(notes.validated, abs=1e-7)
    assert stop.best_epoch == 0
    assert weight(model) == pytest.approx(notes.validated[0], abs=1e-6)


def test_a_model_that_is_evaluated_or_predicts_later_has_the_average_once():
    model = scale()
    average = EMA(0.5)
    model.fit(X, Y, verbose=0, callbacks=average)
    once = weight(model)
    model.evaluate(X, Y, verbose=0, callbacks=average)
    model.predict(X, verbose=0, callbacks=average)
    assert weight(model) == once


def test_buffers_are_averaged_too_unless_told_otherwise():
    for averages in (True, False):
        net = torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1))
        model, means = scale(net=net), []

        class Means(Callback):
            def on_train_batch_end(self, batch, logs, means=means):
                means.append(self.model.net[0].running_mean.item())

        model.fit(
            X, Y, batch_size=4, verbose=0, callbacks=[Means(), EMA(0.5, use_buffers=averages)]
        )
        expected = moving(means, 0.5, 0.0)[-1] if averages else means[-1]
        assert net[0].running_mean.item() == pytest.approx(expected, abs=1e-6)
        assert net[0].num_batches_tracked.item() == 2


class Counting(torch.nn.Module):
    """Buffers that are no means over batches: a queue, a range, a counter; and two that are."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(3, 4))
        self.register_buffer("largest", torch.tensor(0.0))
        self.register_buffer("batches", torch.tensor(0.0))
        self.register_buffer("running_mean", torch.zeros(4))  # a norm layer of one's own
        self.register_buffer("running_var", torch.ones(4))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.queue = torch.cat([self.queue[1:], x[:1].detach()])
                self.largest.copy_(torch.maximum(self.largest, x.max()))
                self.batches += 1
                self.running_mean.lerp_(x.mean(0), 0.1)
                self.running_var.lerp_(x.var(0), 0.1)
        return (x - self.running_mean) / self.running_var.sqrt()


@pytest.mark.parametrize(
    "spectral_norm",
    [torch.nn.utils.parametrizations.spectral_norm, torch.nn.utils.spectral_norm],
)
@pytest.mark.parametrize("average", [EMA(0.8), StochasticWeightAveraging(0.1, 1, 0)])
def test_only_running_statistics_are_averaged_of_all_buffers(spectral_norm, average):
    """Seven spectrally normalised layers and other buffers, against sums by hand."""
    torch.manual_seed(0)
    layers = [spectral_norm(torch.nn.Linear(4, 4)) for _ in range(7)]
    net = torch.nn.Sequential(*layers[:4], torch.nn.BatchNorm1d(4), Counting(), *layers[4:])
    plain = copy.deepcopy(net)
    x = torch.randn(32, 4)
    batches, epochs = [(x[:16], x[:16].flip(1)), (x[16:], x[16:].flip(1))], 3
    model = fitkit.Model(net)
    model.compile("sgd", "mse", learning_rate=0.1)
    model.fit(batches, epochs=epochs, verbose=0, callbacks=copy.deepcopy(average))

    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    means = {name: value.clone() for name, value in plain.state_dict().items()}
    for epoch in range(epochs):
        for number, (inputs, targets) in enumerate(batches):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(plain(inputs), targets).backward()
            optimizer.step()
            share = 0.2
            if isinstance(average, StochasticWeightAveraging):  # from epoch 1 on, at its end
                share = 1 / epoch if epoch and number == 1 else 0.0
            for name, value in plain.state_dict().items():
                is_mean = "running" in name or name in dict(plain.named_parameters())
                means[name] = torch.lerp(means[name], value, share) if is_mean else value.clone()
    found = net.state_dict()
    assert {name for name in found if "running" in name} > {"4.running_mean", "5.running_var"}
    for name, value in means.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
    plain.load_state_dict(means)
    loss = torch.nn.functional.mse_loss(plain.eval()(x), x.flip(1))
    assert model.evaluate(x, x.flip(1), verbose=0) == pytest.approx(loss.item(), rel=1e-4)


def test_averages_of_half_precision_weights_move_by_less_than_their_last_bit():
    from torch.optim.swa_utils import get_ema_multi_avg_fn

    from fitkit.extras.averages import AveragedWeights

    model = fitkit.Model(torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16))
    with torch.no_grad():
        model.net.weight.fill_(1.0)
        weights = AveragedWeights(model, get_ema_multi_avg_fn(0.999), buffers=True)
        model.net.weight.fill_(2.0)
        for _ in range(1000):
            weights.update()
    weights.put_in()
    assert weight(model) == pytest.approx(2 - 0.999**1000, abs=0.01)
    weights.take_out()
    assert weight(model) == 2.0
    weights.put_in()
    assert weight(model) == pytest.approx(2 - 0.999**1000, abs=0.01)


@pytest.mark.parametrize("on_epoch", [False, True])
def test_its_state_goes_on_after_a_restart(on_epoch):
    """Also where the checkpoint has the average as the model's weights."""
    model = scale()
    first, second = (EMA(0.9, swap_on_epoch=on_epoch) for _ in range(2))
    states = []

    class Saves(Callback):
        def on_epoch_end(self, epoch, logs):
            states.append(copy.deepcopy((first.state_dict(), self.model.net.state_dict())))

    class Loads(Callback):
        def on_train_begin(self, logs=None):
            second.load_state_dict(states[0][0])

    options = {"shuffle": False, "batch_size": 4, "verbose": 0}
    model.fit(X, Y, epochs=1, callbacks=[first, Saves()], **options)
    whole = scale()
    whole.fit(X, Y, epochs=2, callbacks=EMA(0.9), **options)
    model.net.load_state_dict(states[0][1])
    model.fit(X, Y, initial_epoch=1, epochs=2, callbacks=[second, Loads()], **options)
    assert weight(model) == pytest.approx(weight(whole), abs=1e-6)


def test_its_decay_rises_with_the_number_of_updates():
    model, notes = scale(), Notes()
    start = weight(model)
    options = {"shuffle": False, "batch_size": 2, "verbose": 0, "epochs": 5}
    model.fit(X, Y, callbacks=[EMA(0.5, warmup=True), notes], **options)
    average = start
    for t, value in enumerate(notes.updates):
        decay = min(0.5, (1 + t) / (10 + t))
        average = decay * average + (1 - decay) * value
    assert len(notes.updates) == 20
    assert weight(model) == pytest.approx(average, abs=1e-6)


def test_a_rising_decay_goes_on_where_a_training_was_cut(tmp_path):
    class Saves(Callback):
        def on_train_batch_end(self, batch, logs):
            if self.model.global_step == 5:
                self.model.save(tmp_path / "cut.h5")

    options = {"shuffle": False, "batch_size": 2, "verbose": 0, "epochs": 3}
    whole = scale()
    whole.fit(X, Y, callbacks=[EMA(0.9, warmup=True), Saves()], **options)
    again = scale()
    ema = EMA(0.9, warmup=True)
    again.fit(X, Y, callbacks=ema, resume_from=tmp_path / "cut.h5", **options)
    assert weight(again) == weight(whole)


# ------------------------------------------------------------------ SWA


def test_the_model_gets_the_mean_of_the_last_epochs_at_the_annealed_rate():
    model, notes = scale(rate=0.2), Notes()
    rates = []

    class Rates(Callback):
        def on_train_batch_begin(self, batch, logs=None):
            rates.append(self.model.optimizer.param_groups[0]["lr"])

    average = StochasticWeightAveraging(0.1, 0.5, annealing_epochs=2, annealing_strategy="linear")
    model.fit(X, Y, epochs=6, verbose=0, callbacks=[notes, average, Rates()])
    assert rates == pytest.approx([0.2, 0.2, 0.2, 0.2, 0.15, 0.1])
    assert average.averaged == 3
    assert weight(model) == pytest.approx(sum(notes.ended[3:]) / 3, abs=1e-6)


def test_a_training_goes_on_from_the_file_of_one_that_ended(tmp_path):
    options = {"shuffle": False, "batch_size": 2, "verbose": 0}
    whole, ended, again = scale(), scale(), scale()
    whole.fit(X, Y, epochs=4, callbacks=StochasticWeightAveraging(0.05, 1), **options)
    ended.fit(X, Y, epochs=2, callbacks=StochasticWeightAveraging(0.05, 1), **options)
    ended.save(tmp_path / "ended.h5")  # its weights are the mean
    options.update(epochs=4, resume_from=tmp_path / "ended.h5")
    again.fit(X, Y, callbacks=StochasticWeightAveraging(0.05, 1), **options)
    assert weight(again) == weight(whole)


def test_the_cosine_goes_half_way_in_the_middle_and_epochs_may_be_counted():
    model = scale(rate=0.3)
    average = StochasticWeightAveraging([0.1], swa_epoch_start=1, annealing_epochs=2)
    rates = []

    class Rates(Callback):
        def on_epoch_end(self, epoch, logs):
            rates.append(self.model.optimizer.param_groups[0]["lr"])

    model.fit(X, Y, epochs=5, verbose=0, callbacks=[average, Rates()])
    assert rates == pytest.approx([0.3, 0.3, 0.2, 0.1, 0.1]) and average.averaged == 4


def test_batch_statistics_are_those_of_the_averaged_net():
    net = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    model = scale(net=net)
    data = [X[:4], (X[4:], Y[4:])]
    average = StochasticWeightAveraging(0.05, 0.5, bn_data=data)
    model.fit(X, Y, epochs=4, verbose=0, callbacks=average)
    with torch.no_grad():
        hidden = net[0](X)
        mean = (hidden[:4].mean(0) + hidden[4:].mean(0)) / 2
        variance = (hidden[:4].var(0) + hidden[4:].var(0)) / 2
    assert torch.allclose(net[1].running_mean, mean, atol=1e-6)
    assert torch.allclose(net[1].running_var, variance, atol=1e-6)
    assert net[1].momentum == 0.1
    plain = torch.nn.Linear(1, 1)
    renew_statistics(plain, [X], torch.device("cpu"))  # nothing to do


def test_frozen_statistics_stay_when_those_of_the_averaged_net_are_renewed():
    net = torch.nn.Sequential(
        torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1)
    )
    net[0].eval()
    average = StochasticWeightAveraging(0.05, 0.5, bn_data=[X])
    scale(net=net).fit(X, Y, epochs=4, verbose=0, callbacks=average)
    assert torch.equal(net[0].running_mean, torch.zeros(1))
    with torch.no_grad():
        mean = net[1](X / (1 + net[0].eps) ** 0.5).mean(0)
    assert torch.allclose(net[2].running_mean, mean, atol=1e-6)
    assert [module.training for module in net] == [False, True, True]


def test_data_for_batch_statistics_are_not_begun_at_construction():
    class Drawing(torch.utils.data.IterableDataset):
        def __iter__(self):
            raise AssertionError("began")

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X), 4, shuffle=True)
    before = torch.get_rng_state()
    StochasticWeightAveraging(0.05, 1, bn_data=loader)
    StochasticWeightAveraging(0.05, 1, bn_data=Drawing())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_training_that_ends_before_keeps_its_weights():
    model, notes = scale(), Notes()
    swa = StochasticWeightAveraging(0.05)
    stop = EarlyStopping("loss", min_delta=1e9)
    model.fit(X, Y, epochs=9, verbose=0, callbacks=[notes, swa, stop])
    assert len(notes.ended) == 2 and weight(model) == notes.ended[-1] and swa.averaged == 0


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: EMA(1.0), ConfigurationError),
        (lambda: EMA(update_every_n_steps=0), ConfigurationError),
        (lambda: SwapEMAWeights("yes"), ArgumentTypeError),
        (lambda: StochasticWeightAveraging(0.0), ConfigurationError),
        (lambda: StochasticWeightAveraging([0.1, -1]), ConfigurationError),
        (lambda: StochasticWeightAveraging(0.1, 1.0), ConfigurationError),
        (lambda: StochasticWeightAveraging(0.1, -1), ConfigurationError),
        (lambda: StochasticWeightAveraging(0.1, annealing_strategy="cosine"), ConfigurationError),
        (lambda: StochasticWeightAveraging(0.1, bn_data=iter([X])), ArgumentTypeError),
    ],
)
def test_wrong_arguments_fail_at_construction(make, error):
    with pytest.raises(error):
        make()


def test_what_only_fit_can_know_fails_when_it_begins():
    with pytest.raises(ConfigurationError, match="epochs=2"):
        scale().fit(X, Y, epochs=2, verbose=0, callbacks=StochasticWeightAveraging(0.1, 2))
    with pytest.raises(ConfigurationError, match="2 rates.*1 param"):
        scale().fit(X, Y, verbose=0, callbacks=StochasticWeightAveraging([0.1, 0.2], 0))
    one_cycle = lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9)  # noqa: E731
    model = scale(lr_scheduler={"scheduler": one_cycle, "interval": "step"})
    with pytest.raises(ConfigurationError, match="at each step"):
        model.fit(X, Y, verbose=0, callbacks=StochasticWeightAveraging(0.1, 0))
