"""Networks of other libraries on two processes: the weights and numbers of one."""

import pytest
import torch

from tests.networks import NETWORKS
from tests.reference import assert_same_weights

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", NETWORKS)
def test_two_processes_train_and_evaluate_as_one(name):
    network = NETWORKS[name]
    one = network.model()
    losses = one.fit(network.loader(4), epochs=2, verbose=0).history["loss"]

    two = network.model(strategy="ddp_spawn", accelerator="cpu", devices=2)
    found = two.fit(network.loader(2), epochs=2, verbose=0).history["loss"]
    assert_same_weights(two.net, one.net, atol=1e-6)
    assert found == pytest.approx(losses, rel=1e-6)
    assert two.evaluate(network.loader(2), verbose=0) == pytest.approx(
        one.evaluate(network.loader(4), verbose=0), rel=1e-6
    )
    if network.plain_output is not None:
        expected, predicted = (
            model.predict(network.loader(size), verbose=0, as_numpy=False)
            for model, size in ((one, 4), (two, 2))
        )
        if network.key is not None:
            expected, predicted = expected[network.key], predicted[network.key]
        torch.testing.assert_close(predicted, expected, rtol=0, atol=1e-5)
