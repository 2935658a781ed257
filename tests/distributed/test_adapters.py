"""Adapters under each strategy: the weights of one process, their files, and resuming."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fitkit
from fitkit.callbacks import ModelCheckpoint
from fitkit.strategies import FSDPStrategy
from tests.nets import LoRA, regression, with_adapter
from tests.reference import assert_same_weights

STRATEGIES = {
    "one process": None,
    "ddp": "ddp_spawn",
    "sharded": "ddp_sharded",
    "fsdp": FSDPStrategy(wrap=None),
    "recomputed": FSDPStrategy(wrap=torch.nn.Linear, activation_checkpointing=torch.nn.Linear),
}
X, Y = regression(48, 40)


def still():
    """An adapter's net in float64, whose running statistics don't depend on a batch's division."""
    net = with_adapter().double()
    net[1].forward = lambda x: x * net[1].weight + net[1].bias
    return net


def trained(make, x, y, strategy, loss="mse", **options):
    model = fitkit.Model(make())
    ranks = {} if strategy is None else {"strategy": strategy, "accelerator": "cpu", "devices": 2}
    model.compile("adam", loss, learning_rate=0.01, **ranks)
    size = 16 if strategy is None else 8
    model.fit(x, y, epochs=2, batch_size=size, shuffle=False, verbose=0, **options)
    return model


@pytest.mark.parametrize(
    ("strategy", "suffix"),
    [
        ("one process", ".h5"),
        ("ddp", ".h5"),
        ("sharded", ".dcp"),
        ("fsdp", ".h5"),
        ("recomputed", ".dcp"),
    ],
)
def test_the_weights_files_and_resuming(tmp_path, strategy, suffix):
    asked = STRATEGIES[strategy]
    x, y = X.double(), Y.double()
    reference = trained(still, x, y, None)
    saves = ModelCheckpoint(tmp_path / f"{{epoch}}{suffix}", trainable_only=True)
    model = trained(still, x, y, asked, callbacks=saves)
    assert_same_weights(model.net, reference.net, atol=1e-9)
    again = trained(still, x, y, asked, resume_from=tmp_path / f"1{suffix}")
    assert_same_weights(again.net, model.net, atol=0)
    # Made by several ranks, it has the digest of one process's base.
    alone = fitkit.Model(still())
    alone.load_weights(tmp_path / f"2{suffix}")
    assert_same_weights(alone.net, model.net, atol=0)


def language_model():
    peft = pytest.importorskip("peft", reason="peft isn't installed")
    transformers = pytest.importorskip("transformers", reason="transformers isn't installed")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    base = transformers.GPT2LMHeadModel(config)
    lora = peft.LoraConfig(
        r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(base, lora)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("strategy", ["one process", "ddp", "fsdp"])
def test_a_model_of_peft(tmp_path, strategy):
    language_model()  # skips without peft
    tokens = torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(1))
    data = {"input_ids": tokens, "labels": tokens}
    asked = STRATEGIES[strategy]
    reference = trained(language_model, data, None, None, loss=None)
    saves = ModelCheckpoint(tmp_path / "{epoch}.h5", trainable_only=True)
    model = trained(language_model, data, None, asked, loss=None, callbacks=saves)
    assert_same_weights(model.net, reference.net, atol=1e-5)
    again = trained(language_model, data, None, asked, loss=None, resume_from=tmp_path / "1.h5")
    assert_same_weights(again.net, model.net, atol=0)
    model.save_weights(tmp_path / "adapter.safetensors", trainable_only=True)
    assert (tmp_path / "adapter.safetensors").stat().st_size < 16_000
    twin = fitkit.Model(language_model())
    assert not twin.load_weights(tmp_path / "adapter.safetensors").unexpected
    assert_same_weights(twin.net, model.net, atol=0)
    merged = model.net.merge_and_unload()
    torch.testing.assert_close(merged(tokens).logits, twin.net(tokens).logits)


def in_half(adapters):
    """A base in bfloat16, with adapters in another type."""
    torch.manual_seed(0)
    net = nn.Sequential(LoRA(nn.Linear(40, 64)), nn.Tanh(), LoRA(nn.Linear(64, 1))).bfloat16()
    for layer in (net[0], net[2]):
        layer.down.to(adapters)
        layer.up.to(adapters)
        layer.forward = lambda x, layer=layer: (
            layer.base(x) + layer.up(layer.down(x.to(adapters))).bfloat16()
        )
    return net


def squares(prediction, target):
    return F.mse_loss(prediction.float(), target.float())


def learned_from_halves(adapters, ranks):
    """A plain loop, whose gradients are means of those of so many parts of each batch."""
    net = in_half(adapters)
    learning = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(learning, 0.01)
    for x, y in [*zip(X.split(16), Y.split(16), strict=True)] * 2:
        parts = []
        for some, theirs in zip(x.chunk(ranks), y.chunk(ranks), strict=True):
            optimizer.zero_grad()
            squares(net(some.bfloat16()), theirs).backward()
            parts.append([parameter.grad.float() for parameter in learning])
        for parameter, gradients in zip(learning, zip(*parts, strict=True), strict=True):
            parameter.grad = torch.stack(gradients).mean(0).to(adapters)
        optimizer.step()
    return net


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16], ids=str)
def test_half_adapters_differ_by_what_rounding_half_a_batch_does(strategy, adapters):
    def differs(one, other):
        pairs = zip(one.parameters(), other.parameters(), strict=True)
        return max((a.float() - b.float()).abs().max().item() for a, b in pairs)

    model = trained(lambda: in_half(adapters), X.bfloat16(), Y, STRATEGIES[strategy], loss=squares)
    halves, whole = learned_from_halves(adapters, 2), learned_from_halves(adapters, 1)
    assert differs(model.net, halves) <= 1e-6
    if adapters is torch.float32:
        assert differs(model.net, whole) < 1e-6
    else:
        assert differs(halves, whole) > 1e-3  # whichever type they are averaged in


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "sharded", "fsdp"])
def test_a_base_that_torchao_has_quantized(strategy):
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(40, 32), nn.Linear(32, 1))
    quantization.quantize_(base, quantization.Int8WeightOnlyConfig())
    net = nn.Sequential(LoRA(base[0]), nn.Tanh(), LoRA(base[1]))
    if strategy == "fsdp":
        with pytest.raises(fitkit.ConfigurationError, match="is quantized"):
            trained(lambda: copy.deepcopy(net), X, Y, STRATEGIES[strategy])
        return
    reference = trained(lambda: copy.deepcopy(net), X, Y, None).net
    model = trained(lambda: copy.deepcopy(net), X, Y, STRATEGIES[strategy])
    for one, other in zip(model.net.parameters(), reference.parameters(), strict=True):
        if one.requires_grad:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
