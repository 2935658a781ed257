"""Networks of other libraries train, resume, are evaluated and predict as in plain PyTorch."""

import pytest
import torch

from fitkit.callbacks import ModelCheckpoint
from tests.networks import NETWORKS, RATE, SAMPLES
from tests.reference import assert_same_weights

BATCH, EPOCHS = 4, 2


@pytest.fixture(params=NETWORKS)
def network(request):
    return NETWORKS[request.param]


def test_fit_and_resume(network, tmp_path):
    net, means = network.fresh(), []
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    for _ in range(EPOCHS):
        total = count = 0
        for batch in network.loader(BATCH):
            optimizer.zero_grad()
            loss = network.plain_loss(net, batch)
            loss.backward()
            optimizer.step()
            total += loss.item() * network.count(batch)
            count += network.count(batch)
        means.append(total / count)

    model, saves = network.model(), ModelCheckpoint(tmp_path / "{epoch}.h5")
    history = model.fit(network.loader(BATCH), epochs=EPOCHS, verbose=0, callbacks=saves)
    assert_same_weights(model.net, net, atol=1e-6)
    assert history.history["loss"] == pytest.approx(means, rel=1e-6)

    again = network.model()
    again.fit(network.loader(BATCH), epochs=EPOCHS, verbose=0, resume_from=tmp_path / "1.h5")
    assert_same_weights(again.net, model.net)


def test_evaluate_and_predict(network):
    net = network.fresh().eval()
    loader = network.loader(BATCH)
    model = network.model()
    found = model.evaluate(loader, verbose=0)
    with torch.no_grad():
        whole = next(iter(network.loader(SAMPLES)))
        assert abs(found - network.plain_loss(net, whole).item()) < 1e-6
        if network.plain_output is None:
            return
        net.eval()
        output = network.plain_output(net, whole)
    predicted = model.predict(loader, verbose=0, as_numpy=False)
    if network.key is not None:
        predicted = predicted[network.key]
    torch.testing.assert_close(predicted, output, rtol=0, atol=1e-6)
