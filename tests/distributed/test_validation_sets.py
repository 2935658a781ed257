"""Several validation sets on several ranks: the values of one process, within epochs too."""

import pytest

import fitkit
from tests.nets import dense, normal

pytestmark = pytest.mark.timeout(90)
X, Y = normal(24, 4), normal(24, 1, seed=1)


def history(devices, batch_size, **arguments):
    model = fitkit.Model(dense(4, 8, 1))
    model.compile("sgd", "mse", metrics=["mae"], accelerator="cpu", devices=devices)
    sets = {"day": (X[:7], Y[:7]), "night": [(X[7:9], Y[7:9]), (X[9:20], Y[9:20])]}
    model.fit(
        X, Y, validation_data=sets, batch_size=batch_size, epochs=2, shuffle=False, verbose=0,
        **arguments,
    )  # fmt: skip
    return model.history


@pytest.mark.filterwarnings("ignore:batch_size=.* is not used")
def test_two_ranks_have_the_values_of_one():
    alone, both = history(1, 12, validation_freq=0.5), history(2, 6, validation_freq=0.5)
    assert list(alone.history) == list(both.history)
    for name, values in alone.history.items():
        assert both.history[name] == pytest.approx(values, rel=1e-5), name
    assert len(both.validations) == len(alone.validations) == 4
    for one, two in zip(alone.validations, both.validations, strict=True):
        assert two == pytest.approx(one, rel=1e-5)
