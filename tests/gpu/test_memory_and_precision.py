"""Memory that runs out, layouts and number types on a real GPU."""

import gc
import os

import pytest
import torch
from torch import nn

import fitkit

X, Y = torch.randn(256, 3, 16, 16), torch.randint(0, 4, (256,))


def images(**arguments):
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip
    model = fitkit.Model(net)
    model.compile(
        **{
            "optimizer": "adam",
            "loss": "cross_entropy",
            "accelerator": "gpu",
            "devices": 1,
            **arguments,
        }
    )
    return model


def test_memory_that_ran_out_is_explained_and_free_again():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 3)
            self.width = torch.cuda.get_device_properties(0).total_memory // 4

        def forward(self, x):
            kept = [torch.zeros(self.width // 8, device=x.device) for _ in range(len(x) // 8)]
            return self.layer(x) + sum(k[:3].sum() for k in kept)

    model = fitkit.Model(Wide())
    model.compile("adam", "cross_entropy", accelerator="gpu", devices=1)
    x, y = torch.randn(256, 8), torch.randint(0, 3, (256,))
    with pytest.raises(fitkit.OutOfMemoryError, match=r"batch_size=128.*accumulate_grad_batches=2"):
        model.fit(x, y, batch_size=256, verbose=0)
    gc.collect()
    assert torch.cuda.memory_allocated() < 2**28
    model.fit(x, y, batch_size=8, verbose=0)


@pytest.mark.parametrize(
    "precision",
    [
        "32-true",
        "bf16-mixed",
        "16-mixed",
        "bf16-true",
        "64-true",
    ],
)
@pytest.mark.parametrize("memory_format", [None, "channels_last"])
def test_every_precision_learns_in_either_layout(precision, memory_format):
    model = images(precision=precision, memory_format=memory_format, learning_rate=3e-3)
    losses = model.fit(X, Y, batch_size=32, epochs=6, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    model.compile(memory_format=None)  # the optimizer's running values follow
    model.fit(X, Y, batch_size=32, verbose=0)


def test_bfloat16_is_asked_of_the_chosen_device_and_a_gpu_that_emulates_it_is_named(monkeypatch):
    last = torch.cuda.device_count() - 1

    def own(including_emulation=True):
        return including_emulation or torch.cuda.current_device() != last

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", own)
    model = fitkit.Model(nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="emulates it"):
        model.compile(
            "sgd", "cross_entropy", accelerator="gpu", devices=[last], precision="bf16-mixed"
        )


@pytest.mark.skipif("SIM_LIBRARY" in os.environ, reason="needs a real card: TF32")
def test_tf32_is_used_for_the_call_only():
    a = torch.randn(512, 512, device="cuda")
    exact = (a.double() @ a.double()).float()

    class Product(nn.Module):
        def forward(self, x):
            return x @ x

    before = torch.get_float32_matmul_precision()
    model = fitkit.Model(Product())
    errors = {}
    for word in ("highest", "high"):
        model.compile(accelerator="gpu", devices=1, matmul_precision=word)
        found = torch.from_numpy(model.predict(a.cpu(), batch_size=512, verbose=0)).cuda()
        errors[word] = (found - exact).abs().max().item()
    assert torch.get_float32_matmul_precision() == before
    if torch.cuda.get_device_capability()[0] >= 8:
        assert errors["highest"] < 0.1 * errors["high"]


def test_memory_is_among_the_logs():
    history = images(log_gpu_memory="min_max").fit(X, Y, verbose=0).history
    assert history["gpu_memory_peak_mib"][0] > 0
    assert history["gpu_memory_max_mib"][0] >= history["gpu_memory_min_mib"][0] > 0
