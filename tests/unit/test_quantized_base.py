"""Adapters beside a base that torchao has quantized, against a plain loop."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fitkit
from tests.nets import LoRA, normal
from tests.reference import plain_loop, slices

pytestmark = pytest.mark.slow  # torchao takes seconds to import

X, Y = normal(48, 64), normal(48, 8, seed=1)


@pytest.fixture(scope="module")
def quantized():
    """A net whose base has integers of eight bits; adapters learn beside both layers."""
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8))
    quantization.quantize_(net, quantization.Int8WeightOnlyConfig())
    return nn.Sequential(LoRA(net[0], 4), nn.Tanh(), LoRA(net[2], 4))


def adapters(net):
    return [parameter for parameter in net.parameters() if parameter.requires_grad]


def trained(net, **options):
    model = fitkit.Model(net)
    model.compile(torch.optim.Adam(adapters(net), 0.01), "mse", accelerator="cpu", devices=1)
    model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0, **options)
    return model


def test_adapters_learn_as_in_a_plain_loop(quantized):
    model, reference = trained(copy.deepcopy(quantized)), copy.deepcopy(quantized)
    plain_loop(
        reference, torch.optim.Adam(adapters(reference), 0.01), slices(X, Y, 16), 2, loss=F.mse_loss
    )
    for one, other in zip(adapters(model.net), adapters(reference), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    before = quantized[0].base.weight.dequantize()
    assert torch.equal(model.net[0].base.weight.dequantize(), before)


def test_their_file_goes_back_onto_the_quantized_base(quantized, tmp_path, recwarn):
    model = trained(copy.deepcopy(quantized))
    model.save_weights(tmp_path / "adapter.h5", trainable_only=True)
    twin = fitkit.Model(copy.deepcopy(quantized))
    twin.load_weights(tmp_path / "adapter.h5")
    assert not [warning for warning in recwarn if "another base" in str(warning.message)]
    torch.testing.assert_close(twin.net(X), model.net(X), rtol=0, atol=0)


def test_a_plan_counts_a_byte_a_number(quantized, capsys):
    model = fitkit.Model(copy.deepcopy(quantized))
    model.compile(torch.optim.Adam(adapters(model.net), 0.01), "mse", accelerator="cpu", devices=1)
    costs = fitkit.plan(model, 1, "single_device", (X[:8], Y[:8])).costs["single_device"]
    learning = 4 * sum(parameter.numel() for parameter in adapters(model.net))
    base = costs.parameters - learning - 4 * (32 + 8)  # without the biases
    assert base == pytest.approx(64 * 32 + 32 * 8, rel=0.2)  # and a scale for each row
