"""Batches come to the GPU right, whatever they are, and predictions come back."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit.data import to_device as feeding


def model_on(accelerator, **arguments):
    torch.manual_seed(1)
    model = fitkit.Model(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3)))
    model.compile(
        **{
            "optimizer": "sgd",
            "loss": "cross_entropy",
            "metrics": ["accuracy"],
            "accelerator": accelerator,
            "devices": 1,
            **arguments,
        }
    )
    return model


X, Y = torch.randn(500, 8), torch.randint(0, 3, (500,))
ONE = {"accelerator": "gpu", "devices": 1}


def data(kind):
    if kind == "loader":
        return (DataLoader(TensorDataset(X, Y), 16),), {}
    if kind == "numpy batches":
        return ([(X[i:i + 16].numpy(), Y[i:i + 16].numpy().astype(np.int32))
                 for i in range(0, 500, 16)],), {}  # fmt: skip
    return (X, Y), {"batch_size": 16, "shuffle": kind == "shuffled arrays"}


@pytest.mark.parametrize("kind", ["loader", "numpy batches", "arrays", "shuffled arrays"])
@pytest.mark.parametrize("resident", [True, False])
def test_a_gpu_learns_from_the_same_batches_as_the_cpu(kind, resident, monkeypatch):
    monkeypatch.setattr(feeding, "RESIDENT_FRACTION", 0.25 if resident else 0.0)
    histories = []
    for accelerator in ("cpu", "gpu"):
        torch.manual_seed(2)
        arguments, options = data(kind)
        model = model_on(accelerator)
        history = model.fit(*arguments, **options, epochs=3, verbose=0, validation_data=(X, Y))
        histories.append(history.history)
    for name, expected in histories[0].items():
        assert histories[1][name] == pytest.approx(expected, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("kind", ["loader", "numpy batches"])
@pytest.mark.parametrize("mine", [False, True])
def test_a_later_batch_is_checked_on_its_way(kind, mine):
    class Mine(fitkit.Model):
        def transfer_batch_to_device(self, batch, device):
            return tuple(torch.as_tensor(part).to(device) for part in batch)

    def batches(*parts):
        if kind == "loader":
            return DataLoader(TensorDataset(*parts), 250)
        return [tuple(part[i : i + 250].numpy() for part in parts) for i in (0, 250)]

    model = (Mine if mine else fitkit.Model)(nn.Linear(8, 3))
    model.compile("sgd", lambda p, t: nn.functional.cross_entropy(p, t), **ONE)
    labels, weights = Y.clone(), torch.ones(500)
    labels[400], weights[400] = -100, -1
    with pytest.warns(UserWarning, match="labels of -100"):
        model.evaluate(batches(X, labels), verbose=0)
    model.compile("sgd", "cross_entropy", **ONE)
    with pytest.raises(fitkit.ConfigurationError, match="finite number from 0"):
        model.fit(batches(X, Y, weights), verbose=0)


@dataclasses.dataclass
class Record:
    nodes: torch.Tensor
    name: str


class Opaque:
    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device):
        return Opaque(self.tensor.to(device))


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x):
        inner = getattr(x, "nodes", getattr(x, "tensor", x))
        torch.cuda._sleep(200_000)  # so that copies would overtake what is computed
        return self.layer(inner.sum(1, keepdim=True) * 1.0)


@pytest.mark.parametrize("kind", [lambda t: Record(t, "a"), Opaque, lambda t: t])
def test_every_batch_arrives_whole_though_copies_run_beside_the_steps(kind):
    batches = [torch.full((64, 1000), float(i)) for i in range(60)]
    model = fitkit.Model(Sums())
    model.compile(loss="mse", accelerator="gpu", devices=1)
    outputs = model.predict(((kind(batch),) for batch in batches), verbose=0)
    weight, bias = (p.item() for p in model.net.layer.parameters())
    expected = np.repeat([i * 1000 * weight + bias for i in range(60)], 64)
    np.testing.assert_allclose(outputs[:, 0], expected, rtol=1e-4, atol=1e-3)


def test_sparse_and_nested_batches_arrive():
    class Total(nn.Module):
        def forward(self, x):
            assert x.is_cuda
            return x.to_dense().sum(1) if x.layout is torch.sparse_coo else x.sum(1)

    model = fitkit.Model(Total())
    model.compile(accelerator="gpu", devices=1)
    batches = [(torch.eye(4).to_sparse(),), (torch.ones(4, 3),)]
    np.testing.assert_allclose(model.predict(iter(batches), verbose=0), [1.0] * 4 + [3.0] * 4)


def test_predictions_never_pile_up_on_the_device():
    model = fitkit.Model(nn.Linear(8, 4096))
    model.compile(accelerator="gpu", devices=1)
    few, many = torch.randn(8 * 512, 8), torch.randn(64 * 512, 8)
    peaks = []
    for x in (few, few, many):
        torch.cuda.reset_peak_memory_stats()
        outputs = model.predict(x, batch_size=512, verbose=0)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[2] < 1.5 * peaks[1]
    expected = model.net.cpu()(many[-5:]).detach()
    torch.testing.assert_close(torch.from_numpy(outputs[-5:]), expected, rtol=1e-2, atol=1e-2)


def test_a_hook_of_the_models_own_moves_batches():
    class Own(fitkit.Model):
        def transfer_batch_to_device(self, batch, device):
            return tuple(part.to(device, non_blocking=True) for part in batch)

    model = Own(nn.Linear(8, 3))
    model.compile("sgd", "cross_entropy", accelerator="gpu", devices=1)
    assert len(model.fit(X, Y, verbose=0, epochs=2).history["loss"]) == 2


def test_the_place_of_a_cut_training_is_exact(tmp_path):
    class Cut(fitkit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            if self.model.current_epoch == 1 and batch == 7:
                self.model.save(tmp_path / "cut.h5")

    def trained(**options):
        model = model_on("gpu", deterministic="warn")
        torch.manual_seed(3)
        loader = DataLoader(TensorDataset(X, Y), 16, shuffle=True)
        model.fit(loader, epochs=3, steps_per_epoch=20, verbose=0, **options)
        return [p.cpu() for p in model.parameters()]

    expected = trained(callbacks=[Cut()])
    for mine, theirs in zip(trained(resume_from=tmp_path / "cut.h5"), expected, strict=True):
        assert torch.equal(mine, theirs)
