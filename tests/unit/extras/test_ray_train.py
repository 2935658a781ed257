"""Reports to Ray Train, which is made up here; tests/engines/test_ray.py has a real cluster."""

import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

import fitkit
from fitkit.callbacks import RayTrainReport

X, Y = torch.randn(24, 3, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 2


class MadeUpRay:
    """What `ray.train` does on one worker: it keeps what is reported."""

    def __init__(self, folder):
        self.folder, self.values, self.kept = folder, [], []
        self.Checkpoint = SimpleNamespace(from_directory=lambda path: path)

    def report(self, values, checkpoint=None):
        self.values.append(values)
        if checkpoint is not None:
            self.kept.append(self.folder / f"checkpoint-{len(self.values)}")
            shutil.copytree(checkpoint, self.kept[-1])

    def get_checkpoint(self):
        if not self.kept:
            return None
        newest = self.kept[-1]
        return SimpleNamespace(
            to_directory=lambda path: shutil.copytree(newest, path, dirs_exist_ok=True)
        )


@pytest.fixture
def ray(tmp_path, monkeypatch):
    train = MadeUpRay(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(train=train))
    monkeypatch.setitem(sys.modules, "ray.train", train)
    return train


def train(report, epochs, end=None):
    torch.manual_seed(4)
    model = fitkit.Model(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.5)))
    model.compile("adam", "cross_entropy", accelerator="cpu")
    ends = fitkit.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: end and end(epoch))
    history = model.fit(
        X, Y, batch_size=5, epochs=epochs, verbose=0, callbacks=[report, ends],
        resume_from=report.last_checkpoint(),
    )  # fmt: skip
    return model, history


def test_each_epoch_s_values_are_reported_with_a_checkpoint(ray):
    _, history = train(RayTrainReport(), 3)
    losses = history.history["loss"]
    assert ray.values == [{"epoch": n + 1, "loss": losses[n]} for n in range(3)]
    assert [path.name for path in ray.kept[-1].iterdir()] == ["model.h5"] and len(ray.kept) == 3


@pytest.mark.parametrize(("save_freq", "count"), [(2, 3), (5, 1), (9, 1), (None, 0)])
def test_checkpoints_may_be_rarer_than_values(ray, save_freq, count):
    train(RayTrainReport(save_freq), 5)
    assert len(ray.values) == 5 and len(ray.kept) == count


def test_the_next_attempt_goes_on_as_if_nothing_had_happened(ray):
    whole, _ = train(RayTrainReport(), 4)
    ray.kept.clear()

    def end(epoch):
        if epoch == 2:
            raise KeyError("mine")

    with pytest.raises(KeyError):
        train(RayTrainReport(), 4, end)
    assert len(ray.kept) == 2
    found, history = train(RayTrainReport(), 4)
    for one, other in zip(whole.parameters(), found.parameters(), strict=True):
        assert torch.equal(one, other)
    assert len(history.history["loss"]) == 4


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"torch-fitkit\[ray\]"):
        RayTrainReport().last_checkpoint()
    with pytest.raises(fitkit.ConfigurationError, match="save_freq"):
        RayTrainReport(0)
