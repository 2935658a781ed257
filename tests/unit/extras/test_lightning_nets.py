"""LightningModules, trained as Lightning's own Trainer trains them."""


import pytest
import torch

import fitkit

pytest.importorskip("lightning")

from tests.unit.extras.lightning_modules import (
    TRAINER,
    Recorded,
    RecordedManual,
    loader,
    made,
    pl,
    trained_by_lightning,
)

pytestmark = pytest.mark.filterwarnings("ignore")


def trained(module, train, *, seed=2, epochs=2, validation=None, **compiled):
    """Train a module by fitkit; return the model."""
    model = fitkit.Model(module)
    model.compile(**{"devices": 1, "accelerator": "cpu", **compiled})
    torch.manual_seed(seed)
    model.fit(train, validation_data=validation, epochs=epochs, verbose=0)
    return model


def assert_equal_weights(one, other, atol=0.0):
    theirs = other.state_dict()
    for name, value in one.state_dict().items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=atol)


# ---------------------------------------------------------------------- the order of hooks


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", [Recorded, RecordedManual])
def test_fit_calls_the_hooks_in_lightnings_order(kind, accumulate):
    if kind is RecordedManual and accumulate > 1:
        pytest.skip("manual optimization has no accumulation")
    theirs, ours = made(kind)
    options = {"accumulate_grad_batches": accumulate}
    if kind is Recorded:
        options["gradient_clip_val"] = 0.5
    trained_by_lightning(theirs, loader(), validation=loader(8, 4), **options)
    trained(ours, loader(), validation=loader(8, 4), **options)
    assert ours.calls == theirs.calls
    assert_equal_weights(ours, theirs)


def test_evaluate_and_predict_call_the_hooks_in_lightnings_order():
    theirs, ours = made(Recorded)
    trainer = pl.Trainer(**TRAINER)
    (tested,) = trainer.test(theirs, loader(16), verbose=False)
    expected = trainer.predict(theirs, loader(16))
    model = fitkit.Model(ours)
    model.compile(devices=1, accelerator="cpu")
    values = model.evaluate(loader(16), verbose=0, return_dict=True)
    predicted = model.predict(loader(16), verbose=0, as_numpy=False)
    assert ours.calls == theirs.calls
    assert values["test_loss"] == pytest.approx(tested["test_loss"])
    torch.testing.assert_close(predicted, torch.cat(expected), rtol=0, atol=0)
