"""A step is a function from a batch to its outcome; only what records it changes anything."""

import pytest
import torch
from torch import nn

import fitkit
from fitkit.data.batches import Batch
from fitkit.scopes import Scope
from fitkit.training.own_step import with_mean_loss
from fitkit.training.step_context import as_current
from fitkit.training.step_for import new_context, step_for

X, Y = torch.randn(6, 3), torch.randint(2, (6,))
BATCH = Batch((X, Y), 6, 6)


class OwnSteps(fitkit.Model):
    def training_step(self, batch, batch_idx):
        return {"loss": nn.functional.cross_entropy(self(batch[0]), batch[1]), "count": 4}

    def predict_step(self, batch, batch_idx):
        return self(batch[0]) * 2


def compiled(kind=fitkit.Model, metrics=("accuracy",)):
    torch.manual_seed(0)
    model = kind(nn.Linear(3, 2))
    model.compile("sgd", "cross_entropy", metrics=list(metrics), accelerator="cpu")
    return model


@pytest.mark.parametrize(("kind", "count"), [(fitkit.Model, None), (OwnSteps, 4)])
def test_an_outcome_is_recorded_when_somebody_records_it(kind, count):
    model = compiled(kind)
    step = step_for(model, "training")
    context = new_context(model, "training", step, Scope())
    context.batch = BATCH
    expected = nn.functional.cross_entropy(model.net(X), Y)
    with as_current(model, context):
        first, second = step(BATCH, 0), step(BATCH, 1)
    assert first.loss == second.loss == expected and second.loss.requires_grad
    if kind is OwnSteps:
        assert first.count == count
    assert context.record.sums() == {}
    for outcome in (first, second):
        step.record(BATCH, outcome, context.record)
    ((total, over),) = context.record.sums().values()
    assert over == 2 * (count or 6) and total == pytest.approx(over * expected.item())


@pytest.mark.parametrize("kind", [fitkit.Model, OwnSteps])
def test_a_batch_that_only_fills_a_place_has_an_outcome_and_records_nothing(kind):
    model = compiled(kind)
    step = step_for(model, "training")
    context = new_context(model, "training", step, Scope())
    filler = context.batch = Batch((X, Y), 0, 8)
    with as_current(model, context):
        outcome = step(filler, 0)
    step.record(filler, outcome, context.record)
    assert outcome.loss.requires_grad and context.record.sums() == {}


@pytest.mark.parametrize(("kind", "factor"), [(fitkit.Model, 1), (OwnSteps, 2)])
def test_predictions_are_outcomes_without_a_loss(kind, factor):
    model = compiled(kind)
    step = step_for(model, "predict")
    context = new_context(model, "predict", step, Scope())
    context.batch = BATCH
    with as_current(model, context), torch.no_grad():
        outcome = step(BATCH)
        assert torch.equal(outcome.outputs, factor * model.net(X))
    assert outcome.loss is None


def test_the_losses_of_replicas_are_a_mean_by_their_samples_or_counts():
    losses, counts = torch.tensor([1.0, 4.0]), torch.tensor([3, 1])
    assert with_mean_loss(losses, [2, 4]) == 3.0
    assert with_mean_loss({"loss": losses, "a": 1}, [2, 4]) == {"loss": 3.0, "a": 1}
    found = with_mean_loss({"loss": losses, "count": counts}, [2, 4])
    assert found == {"loss": 1.75, "count": 4}
    for kept in ({"a": 1}, losses.sum(), "text"):
        assert with_mean_loss(kept, [2, 4]) is kept
