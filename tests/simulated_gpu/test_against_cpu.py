"""`verify(…, against="cpu")` names the module in which a device's kernel is at fault."""

import functools

import pytest
import simulation
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import fitkit

pytestmark = pytest.mark.skipif(simulation.KIND != "cuda", reason="kernels of one type are enough")
aten = torch.ops.aten


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(F.silu(self.layer(x)) + x)


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        )  # fmt: skip
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 12, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        out, (hidden, _) = self.lstm(x)
        return self.head(out[:, -1] + hidden[-1])


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.block(self.table(x)).mean(1))


class Tied(nn.Module):
    """A table that is a head, too, and a layer that is called twice, once computed again."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(20, 16), nn.Linear(16, 16)

    def forward(self, x):
        hidden = self.table(x).mean(1)
        hidden = hidden + checkpoint(self.layer, self.layer(hidden), use_reentrant=False)
        return F.linear(hidden, self.table.weight)[:, :3]


class Aside(nn.Module):
    """A part whose result leaves it as an attribute, beside its output, as those of experts do."""

    def __init__(self):
        super().__init__()
        self.part = nn.Linear(16, 3)

    def forward(self, x):
        self.part.kept = x.square().mean()
        return self.part(x) + self.part.kept


NETS = {
    "plain": lambda: nn.Sequential(
        nn.Linear(16, 16), nn.GELU(), Residual(), nn.Dropout(0.1), nn.Linear(16, 3)
    ),
    "images": Pooled, "series": Recurrent, "words": Words, "tied": Tied,
    "aside": lambda: nn.Sequential(nn.Linear(16, 16), Aside()),
}  # fmt: skip


def data(name):
    generator = torch.Generator().manual_seed(0)
    shape = {"images": (32, 3, 12, 12), "series": (32, 5, 8)}.get(name, (32, 16))
    x = torch.randn(shape, generator=generator)
    if name in ("words", "tied"):
        x = torch.randint(20, (32, 6), generator=generator)
    return x, torch.randint(3, (32,), generator=generator)


def row_of(name):
    torch.manual_seed(0)
    model = fitkit.Model(NETS[name]())
    model.compile("adam", "cross_entropy", accelerator="gpu", devices=1)
    found = fitkit.verify(model, *data(name), devices=1, updates=1, against="cpu", verbose=False)
    return found["device"]


@pytest.mark.parametrize("name", NETS)
def test_a_sound_device_is_called_sound(name):
    row = row_of(name)
    assert row.ok and row.digits > 12 and not row.causes, (row, row.causes)
    assert "Left out" not in row.note


def scaled(number=0, by=1 + 1e-6):
    """A kernel one of whose results is too large."""

    def change(results, *given):
        results[number].mul_(by)

    return change


def rounded(results, *given):
    """A kernel that computes in float32."""
    results[0].copy_(results[0].float())


def forgets(results, *given):
    """A kernel that leaves out a part of its result."""
    results[0].view(-1)[-1] += 1e-3


def variance(results, x, weight, bias, mean, variance, *given):
    """A running variance that is biased."""
    variance.mul_(0.999)


def leaks(results, *given):
    """Rows of a batch run into each other."""
    results[0][1:] += 1e-5 * results[0][:-1].clone()


FAULTS = [
    ("plain", "gelu", scaled(), "GELU '1'", "output"),
    ("plain", "gelu_backward", scaled(), "GELU '1'", "gradient of its input"),
    ("plain", "silu", rounded, "Residual '2'", "input for '2.norm'"),
    ("plain", "native_layer_norm_backward", scaled(1), "LayerNorm '2.norm'", "its weight"),
    ("plain", "addmm", leaks, "Linear '0'", "output"),
    ("plain", "nll_loss_forward", scaled(by=1 + 1e-4), "The step", "loss"),
    ("plain", "_log_softmax_backward_data", rounded, "The step", "gradient of the output"),
    ("images", "convolution", rounded, "Conv2d 'body.0'", "output"),
    ("images", "convolution_backward", scaled(1), "Conv2d 'body.4'", "gradient of its weight"),
    ("images", "native_batch_norm", variance, "BatchNorm2d 'body.1'", "buffer running_var"),
    ("images", "relu_", forgets, "ReLU 'body.2'", "output"),
    ("images", "max_pool2d_with_indices_backward", leaks, "MaxPool2d 'body.3'", "its input"),
    ("series", "_thnn_fused_lstm_cell", rounded, "LSTM 'lstm'", "output"),
    ("words", "_safe_softmax", leaks, "MultiheadAttention 'block.self_attn'", "output"),
    ("words", "mean.dim", scaled(), "The net itself (Words)", "input for 'head'"),
    ("words", "embedding_dense_backward", forgets, "Embedding 'table'", "gradient of its weight"),
    ("tied", "embedding_dense_backward", forgets, "Embedding 'table'", "gradient of its weight"),
]


def kernel(name, change, *given, **named):
    """Compute by the CPU, then change the results."""
    import cells  # which needs torch first

    packet, _, overload = name.partition(".")
    operation = getattr(cells, name, None) or getattr(getattr(aten, packet), overload or "default")
    away = functools.partial(tree_map, lambda v: v.cpu() if isinstance(v, torch.Tensor) else v)
    own = away(given)
    results = operation(*own, **away(named))
    changed = list(results) if isinstance(results, tuple) else [results]
    change(changed, *own)
    device = next(v.device for v in given if isinstance(v, torch.Tensor))
    for mine, before in zip(own, given, strict=True):
        if isinstance(mine, torch.Tensor) and not torch.equal(mine, before.cpu()):
            before.copy_(mine)  # what it writes into, such as running statistics
    if name.endswith("_"):
        return given[0]
    sent = [one.to(device) if isinstance(one, torch.Tensor) else one for one in changed]
    return tuple(sent) if isinstance(results, tuple) else sent[0]


@pytest.mark.parametrize(
    ("net", "name", "change", "place", "what"), FAULTS, ids=[f"{f[0]}-{f[1]}" for f in FAULTS]
)
def test_a_fault_in_a_kernel_is_named_by_the_first_module_that_has_it(
    net, name, change, place, what
):
    library = torch.library.Library("aten", "IMPL")
    library.impl(name, functools.partial(kernel, name, change), "CUDA")
    try:
        row = row_of(net)
    finally:
        library._destroy()
    assert row.ok is False
    (cause,) = row.causes
    assert cause.kind == "device" and cause.place.startswith(place), cause
    assert what in row.first, row.first
