"""Learning rates for several ranks, and the warm-up."""

import pytest
import torch

import fitkit
from fitkit.fit_state import FitState


@pytest.mark.parametrize(("scaling", "factor"), [(None, 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_rates_are_scaled_once_and_corrected_for_another_number_of_ranks(scaling, factor):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    state = FitState([optimizer])
    for _ in range(2):
        assert state.scale_rates(scaling, 4) == factor
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * factor)
    state.scale_rates(scaling, 1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_all_rates_of_a_running_schedule_are_scaled():
    """Its floor, too: torch's schedule keeps its rates in the optimizer's groups."""

    def schedule(peak):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(
            optimizer, peak, total_steps=6, div_factor=4, final_div_factor=2
        )

    def rates(optimizer, scheduler):
        found = []
        for _ in range(5):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    scaled, plain = schedule(0.4), schedule(0.8)
    FitState([scaled[0]]).scale_rates("linear", 2)
    found = rates(*scaled)
    assert found == pytest.approx(rates(*plain))
    assert found[-1] == pytest.approx(0.8 / 4 / 2)


def test_a_fit_that_ends_within_the_warm_up_leaves_the_rate_that_was_given():
    model = fitkit.Model(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse", learning_rate=0.1, warmup_epochs=4)
    model.fit(torch.zeros(6, 2), torch.zeros(6), batch_size=2, epochs=2, verbose=0)
    assert model.optimizer.param_groups[0]["lr"] == 0.1


def test_the_warm_up_rises_linearly_and_the_scheduler_waits_for_it():
    rates = []
    model = fitkit.Model(torch.nn.Linear(2, 1))
    model.compile(
        "sgd",
        "mse",
        learning_rate=0.4,
        warmup_epochs=2,
        lr_scheduler=(lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)),
    )
    watch = fitkit.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: rates.append(model.optimizer.param_groups[0]["lr"])
    )
    model.fit(torch.zeros(4, 2), torch.zeros(4), batch_size=2, epochs=4, callbacks=watch, verbose=0)
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.2, 0.2, 0.1, 0.1])


def test_a_warm_up_aims_at_a_rate_that_is_set_meanwhile():
    rates = []
    model = fitkit.Model(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse", learning_rate=0.4, warmup_epochs=2)

    def begin(epoch, logs):
        if epoch == 1:
            model.optimizer.learning_rate = 0.8

    watch = fitkit.callbacks.LambdaCallback(
        on_epoch_begin=begin,
        on_train_batch_begin=(lambda batch, logs: rates.append(model.optimizer.learning_rate)),
    )
    model.fit(torch.zeros(4, 2), torch.zeros(4), batch_size=2, epochs=3, callbacks=watch, verbose=0)
    assert rates == pytest.approx([0.1, 0.2, 0.8, 0.8, 0.8, 0.8])


@pytest.mark.parametrize("arguments", [{"scale_lr": "cubic"}, {"warmup_epochs": -1}])
def test_other_words_are_refused(arguments):
    with pytest.raises(fitkit.ConfigurationError):
        fitkit.Model(torch.nn.Linear(2, 1)).compile(**arguments)
