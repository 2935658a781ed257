"""Shares of classes as labels, smoothed or not: what torch's loss of the whole batch gives."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fitkit
from tests.compiling import TRACED
from tests.nets import linear, normal
from tests.reference import assert_same_weights

X = normal(48, 5).double()
SHARES = normal(48, 3, seed=1).double().softmax(1)
OF_CLASSES = torch.tensor([0.5, 1.0, 2.0]).double()
OF_SAMPLES = torch.linspace(0.1, 2.0, 48).double()

WAYS = [
    {},
    {"accumulate_grad_batches": 4},
    {"devices": 2, "accelerator": "cpu", "strategy": "ddp_spawn"},
    {"jit_compile": TRACED},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(
    ("of_classes", "of_samples"),
    [(OF_CLASSES, None), (OF_CLASSES, OF_SAMPLES)],
    ids=["class weights", "class and sample weights"],
)
def test_smoothed_shares_train_weigh_and_count_as_torch_does(way, of_classes, of_samples):
    options = {"weight": of_classes, "label_smoothing": 0.1}
    plain = linear(5, 3).double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for rows in torch.arange(48).split(16):
        values = F.cross_entropy(plain(X[rows]), SHARES[rows], reduction="none", **options)
        weights = 1.0 if of_samples is None else of_samples[rows]
        optimizer.zero_grad()
        (values * weights).mean().backward()
        optimizer.step()

    model = fitkit.Model(linear(5, 3).double())
    loss = nn.CrossEntropyLoss(**options)
    model.compile("sgd", loss, ["accuracy"], learning_rate=0.5, **{"devices": 1, **way})
    size = 16 // way.get("accumulate_grad_batches", 1) // way.get("devices", 1)
    model.fit(X, SHARES, batch_size=size, shuffle=False, verbose=0, sample_weight=of_samples)
    assert_same_weights(model.net, plain, atol=1e-12)

    found = model.evaluate(X, SHARES, batch_size=7, verbose=0, return_dict=True)
    logits = plain(X)
    expected = F.cross_entropy(logits, SHARES, **options).item()
    assert found["loss"] == pytest.approx(expected, abs=1e-12)
    right = (logits.argmax(1) == SHARES.argmax(1)).double().mean().item()
    assert found["accuracy"] == pytest.approx(right)
