"""Steps recorded in a CUDA graph train as plain ones do."""

import warnings

import pytest
import torch
from torch import nn

import fitkit
from fitkit.training import graphs

torch.manual_seed(0)
X, Y = torch.randn(400, 16), torch.randint(0, 5, (400,))


def trained(*, cuda_graphs, samples=400, callbacks=(), epochs=4, dropout=0.0, **arguments):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 5))
    model = fitkit.Model(net)
    model.compile(**{"optimizer": "adam", "learning_rate": 0.01, "loss": "cross_entropy",
                     "metrics": ["accuracy"], "accelerator": "gpu", "devices": 1,
                     "cuda_graphs": cuda_graphs, **arguments})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="cuda_graphs")  # says that there is no graph
        history = model.fit(X[:samples], Y[:samples], batch_size=20, epochs=epochs, verbose=0,
                            callbacks=list(callbacks), validation_data=(X, Y))
    return history.history, [p.detach().cpu() for p in model.parameters()]


def assert_close(one, other):
    for name, values in other[0].items():
        assert one[0][name] == pytest.approx(values, rel=2e-3, abs=5e-3)
    for mine, theirs in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=2e-3)


@pytest.fixture
def recordings(monkeypatch):
    made = []
    record = graphs.CudaGraphs.record

    def counted(self, work):
        made.append(1)
        return record(self, work)

    monkeypatch.setattr(graphs.CudaGraphs, "record", counted)
    return made


@pytest.mark.parametrize("arguments", [
    {}, {"optimizer": "sgd"}, {"optimizer": "adamw", "gradient_clip_val": 0.1},
    {"optimizer": "rmsprop"}, {"precision": "bf16-mixed"}, {"matmul_precision": "high"},
    {"lr_scheduler": {"scheduler": "cosine", "interval": "step"}}, {"warmup_epochs": 2},
], ids=str)  # fmt: skip
def test_repeated_steps_train_as_plain_ones_do(arguments, recordings):
    found = trained(cuda_graphs=True, **arguments)
    assert len(recordings) == 1
    assert_close(found, trained(cuda_graphs=False, **arguments))


def test_a_short_last_batch_and_a_changed_rate(recordings):
    def rates():
        return fitkit.callbacks.LearningRateScheduler(lambda epoch, rate: 0.01 / (epoch + 1))

    found = trained(cuda_graphs=True, samples=390, callbacks=[rates()])
    assert_close(found, trained(cuda_graphs=False, samples=390, callbacks=[rates()]))
    assert 1 < len(recordings) <= 1 + graphs.MOST_RECORDINGS


def test_dropout_draws_new_numbers_in_each_repetition():
    losses = []

    class Note(fitkit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            losses.append(logs.batch_loss)

    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 5))
    model = fitkit.Model(net)
    model.compile("sgd", "cross_entropy", learning_rate=1e-12, accelerator="gpu", devices=1,
                  cuda_graphs=True)
    x, y = X[:20].repeat(10, 1), Y[:20].repeat(10)
    model.fit(x, y, batch_size=20, shuffle=False, verbose=0, callbacks=[Note()])
    assert len({round(loss.item(), 6) for loss in losses}) == len(losses)


def test_a_step_that_reads_a_number_falls_back_with_a_notice():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 5)

        def forward(self, x):
            return self.layer(x) * (1.0 if x.sum().item() > 0 else 0.5)

    model = fitkit.Model(Reads())
    model.compile("sgd", "cross_entropy", accelerator="gpu", devices=1, cuda_graphs=True)
    with pytest.warns(UserWarning, match="recording failed"):
        history = model.fit(X, Y, batch_size=20, epochs=2, verbose=0).history
    assert history["loss"][1] < history["loss"][0]


def test_random_numbers_are_drawn_and_memory_is_used_again_after_a_recording_that_failed():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 5))

        def forward(self, x):
            return self.layers(x) * (1.0 if x.sum().item() > 0 else 0.5)

    model = fitkit.Model(Reads())
    model.compile("adam", "cross_entropy", accelerator="gpu", devices=1, cuda_graphs=True)
    batches = [(X[:200], Y[:200])] * 8  # no arrays: each is copied beside what is computed
    before = torch.cuda.current_stream()
    with pytest.warns(UserWarning, match="recording failed"):
        model.fit(batches, verbose=0)
    assert torch.cuda.current_stream() == before
    held = torch.cuda.memory_allocated()
    model.compile(cuda_graphs=False)
    model.fit(batches * 20, verbose=0)
    assert torch.cuda.memory_allocated() <= held + 2**20


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_layer_that_learns_later_on_gets_running_values_of_its_own(optimizer, recordings):
    class Thaw(fitkit.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.net[0].requires_grad_(epoch > 1)

    found = trained(cuda_graphs=True, optimizer=optimizer, callbacks=[Thaw()])
    assert len(recordings) == 2
    assert_close(found, trained(cuda_graphs=False, optimizer=optimizer, callbacks=[Thaw()]))


def test_steps_are_recorded_on_a_device_that_is_not_the_current_one(recordings):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    assert_close(trained(cuda_graphs=True, devices=[1]), trained(cuda_graphs=False, devices=[1]))
    assert len(recordings) == 1 and torch.cuda.current_device() == 0


def test_a_compiled_net_is_recorded_too():
    assert_close(trained(cuda_graphs=True, jit_compile=True), trained(cuda_graphs=False))
