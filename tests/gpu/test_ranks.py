"""Ranks on GPUs: NCCL where there are several, a refusal where they would share one."""

import pytest
import torch
from torch import nn

import fitkit
from fitkit.extras.launchers.workers import end_workers
from fitkit.strategies import FSDPStrategy
from tests.nets import classification

X, Y = classification(203, 6)


@pytest.fixture(autouse=True, scope="module")
def workers_end_with_the_tests():
    yield
    end_workers()


def trained(devices, strategy, **arguments):
    torch.manual_seed(1)
    model = fitkit.Model(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))
    model.compile(
        "sgd",
        "cross_entropy",
        metrics=["accuracy"],
        learning_rate=0.1,
        accelerator="gpu",
        devices=devices,
        strategy=strategy,
        **arguments,
    )
    size = 16 if strategy == "dp" else 16 // devices
    history = model.fit(X, Y, batch_size=size, epochs=3, shuffle=False, verbose=0)
    return history.history, model.predict(X, verbose=0)


def test_two_ranks_never_share_a_gpu():
    count = torch.cuda.device_count()
    with pytest.raises(fitkit.ConfigurationError):
        fitkit.Model(nn.Linear(2, 2)).compile(accelerator="gpu", devices=[0, 0])
    with pytest.raises(fitkit.ConfigurationError, match="visible"):
        fitkit.Model(nn.Linear(2, 2)).compile(accelerator="gpu", devices=count + 1)


@pytest.mark.parametrize("strategy", ["ddp_spawn", "dp", "fsdp", "ddp_sharded"])
@pytest.mark.parametrize("arguments", [
    {}, {"steps_per_execution": 3}, {"jit_compile": True}, {"precision": "bf16-mixed"},
], ids=str)  # fmt: skip
def test_two_gpus_learn_what_one_does(strategy, arguments):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    if strategy in ("dp", "fsdp") and "jit_compile" in arguments:
        pytest.skip("is refused")
    one, two = trained(1, "auto", **arguments), trained(2, strategy, **arguments)
    near = 5e-2 if "precision" in arguments else 1e-4
    for name, values in one[0].items():
        assert two[0][name] == pytest.approx(values, rel=near, abs=near)
    torch.testing.assert_close(*map(torch.from_numpy, (two[1], one[1])), rtol=near, atol=near)


def test_parameters_in_main_memory_learn_what_those_on_the_devices_do():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    offloaded = FSDPStrategy(nn.Linear, cpu_offload=True)
    one, two = trained(1, "auto"), trained(2, offloaded, gradient_clip_val=1e6)
    torch.testing.assert_close(*map(torch.from_numpy, (two[1], one[1])), rtol=1e-4, atol=1e-4)
