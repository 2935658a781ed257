"""compile(effective_batch_size=…): the same updates on any number of devices."""

import pytest

import fitkit
from tests.nets import classification, dense
from tests.reference import assert_same_weights

pytestmark = pytest.mark.timeout(120)

X, LABELS = classification(100, 6, seed=1)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_same_line_gives_the_same_updates(ranks):
    trained = []
    for devices in (1, ranks):
        fitkit.set_seed(3)
        model = fitkit.Model(dense(6, 8, 3).double())
        model.compile("adam", "cross_entropy", learning_rate=0.01, effective_batch_size=24)
        model.compile(accelerator="cpu", devices=devices)
        losses = model.fit(X.double(), LABELS, batch_size=8, epochs=2, verbose=0)
        assert model.global_step == 10
        assert model.effective_batch_size == 24
        trained.append((model, losses.history["loss"]))
    (one, losses), (several, found) = trained
    assert_same_weights(several, one, atol=1e-9)
    assert found == pytest.approx(losses, rel=1e-9)
