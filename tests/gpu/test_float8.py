"""8-bit floats, multiplied by a GPU that can."""

import pytest
import torch
from torch import nn

import fitkit
from fitkit.precisions import Float8Mixed

X, Y = torch.randn(400, 64), torch.randint(0, 5, (400,))
MULTIPLIES = (8, 9)


@pytest.fixture(autouse=True)
def torchao(cuda):
    pytest.importorskip("torchao.float8")


def trained(precision, **arguments):
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 5)
    )
    model = fitkit.Model(net)
    model.compile(
        **{
            "optimizer": "adam",
            "loss": "cross_entropy",
            "accelerator": "gpu",
            "devices": 1,
            "precision": precision,
            **arguments,
        }
    )
    # Batches of 37, and a last one of 30: no multiples of 16.
    losses = model.fit(X, Y, batch_size=37, epochs=4, verbose=0, shuffle=False).history["loss"]
    assert type(net[2]).__name__ == "Float8Linear" and net[2].weight.dtype is torch.float32
    return losses


def needs_products():
    if torch.cuda.get_device_capability() < MULTIPLIES:
        pytest.skip("needs compute capability 8.9")


@pytest.mark.parametrize("arguments", [
    {}, {"jit_compile": True}, {"accumulate_grad_batches": 2},
], ids=str)  # fmt: skip
def test_the_gpus_products_learn_what_emulated_ones_do(arguments):
    needs_products()
    accumulated = {name: arguments[name] for name in arguments if name.startswith("accumulate")}
    expected = trained(Float8Mixed(emulate=True), **accumulated)
    assert trained("fp8", **arguments) == pytest.approx(expected, rel=0.03)
    assert expected[-1] < expected[0]


def test_an_older_gpu_is_refused():
    if torch.cuda.get_device_capability() >= MULTIPLIES:
        pytest.skip("needs an older GPU")
    with pytest.raises(fitkit.ConfigurationError, match="compute capability"):
        trained("fp8")
