"""What a run records of its updates, and where two runs part."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit.__main__ import main
from fitkit.callbacks import LambdaCallback, RunFolder
from fitkit.extras.run_steps import ROW, parting, read_steps

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def fit(
    folder, x=X, seed=1, epochs=2, resume_from=None, also=(), rate=0.01, steps=None,
    shuffle=True, **options
):  # fmt: skip
    torch.manual_seed(seed)
    model = fitkit.Model(nn.Linear(4, 1))
    compiled = {"optimizer": "sgd", "loss": "mse", "accelerator": "cpu", "devices": 1}
    model.compile(learning_rate=rate, **{**compiled, **options})
    runs = RunFolder(folder)
    model.fit(
        x, Y, batch_size=8, epochs=epochs, verbose=0, callbacks=[*also, runs],
        resume_from=resume_from, steps_per_epoch=steps, shuffle=shuffle,
    )  # fmt: skip
    return model, runs, read_steps(folder)


def test_each_update_has_its_loss_rate_and_samples(tmp_path):
    seen = []
    losses = LambdaCallback(on_train_batch_end=lambda b, logs: seen.append(float(logs.batch_loss)))
    _, _, rows = fit(tmp_path / "a", also=[losses])
    assert rows["update"].tolist() == list(range(1, 13))
    assert rows["epoch"].tolist() == [0] * 6 + [1] * 6
    assert rows["loss"] == pytest.approx(seen) and set(rows["rate"]) == {0.01}
    assert len({*rows["samples"].tolist()}) == 12
    assert [bool(w) for w in rows["weights"]] == [False] * 5 + [True] + [False] * 5 + [True]


def test_parts_and_joined_steps_record_the_updates_of_whole_single_ones(tmp_path):
    _, _, whole = fit(tmp_path / "a")
    _, _, again = fit(tmp_path / "b")
    assert np.array_equal(whole, again) and "equal up to update 12" in parting(whole, again)
    _, _, joined = fit(tmp_path / "d", steps_per_execution=3)
    assert np.array_equal(whole, joined)
    _, _, parts = fit(tmp_path / "c", accumulate_grad_batches=2)
    pairs = whole["samples"].reshape(-1, 2).sum(1, dtype=np.uint64)
    assert parts["samples"].tolist() == pairs.tolist() and parts["update"].tolist() == [
        *range(1, 7)
    ]


def test_epochs_of_steps_record_the_samples_of_whole_passes(tmp_path):
    _, _, whole = fit(tmp_path / "a")
    _, _, cut = fit(tmp_path / "b", epochs=3, steps=4)
    for name in ("update", "loss", "samples"):
        assert np.array_equal(whole[name], cut[name])


class Counted(torch.utils.data.Sampler):
    """Shuffles by the number of its passes, which reading it again would move."""

    passes = 0

    def __len__(self):
        return len(X)

    def __iter__(self):
        self.passes += 1
        return iter(torch.randperm(len(X), generator=torch.Generator().manual_seed(self.passes)))


def test_a_sampler_that_keeps_state_is_not_read_once_more(tmp_path):
    sampler = Counted()
    loader = DataLoader(TensorDataset(X, Y), 8, sampler=sampler)
    torch.manual_seed(1)
    model = fitkit.Model(nn.Linear(4, 1))
    model.compile("sgd", "mse", accelerator="cpu", devices=1)
    model.fit(loader, epochs=3, verbose=0, callbacks=RunFolder(tmp_path))
    assert sampler.passes == 3 and set(read_steps(tmp_path)["samples"]) == {0}


@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_ranks_and_compiled_steps_record_what_one_process_does(jit, tmp_path):
    order = {"shuffle": False, "accumulate_grad_batches": 1 if jit else 2}
    _, _, one = fit(tmp_path / "a", **order)
    if jit:
        _, _, other = fit(tmp_path / "b", jit_compile=True, **order)
    else:
        order = {**order, "accumulate_grad_batches": 1}
        _, _, other = fit(tmp_path / "b", devices=2, **order)
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
    for name in ("update", "epoch", "rate", "samples"):
        assert np.array_equal(one[name], other[name])


@pytest.mark.parametrize("batch", [2, None])
def test_a_resumed_run_records_what_a_whole_one_does(batch, tmp_path):
    _, _, whole = fit(tmp_path / "a")
    path = tmp_path / "cut.h5"

    def save(number, logs):
        if number == batch and saves.model.current_epoch == 1:
            saves.model.save(path)
            raise KeyboardInterrupt

    saves = LambdaCallback(on_train_batch_end=save)
    if batch is None:
        _, runs, _ = fit(tmp_path / "b", epochs=1)
        path = runs.resume_path
    else:
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path / "b", also=[saves])
    also = [] if batch is None else [LambdaCallback()]
    _, _, rows = fit(tmp_path / "b", resume_from=path, also=also)
    # A folder comes last in the list: the checkpoint lacks the update in which it was saved.
    known = whole[whole["update"] != 9] if batch == 2 else whole
    assert np.array_equal(rows, known)


def test_diff_says_where_runs_part(tmp_path, capsys):
    fit(tmp_path / "a")
    other = X.clone()
    other[5] += 1
    fit(tmp_path / "data", other)
    fit(tmp_path / "seed", seed=2)
    fit(tmp_path / "rate", rate=0.02)
    found = {}
    for name in ("data", "seed", "rate"):
        main(["diff", str(tmp_path / "a"), str(tmp_path / name)])
        found[name] = " ".join(capsys.readouterr().out.split())
    assert "same samples, same rates, other loss" in found["data"]
    assert "code, weights or hardware" in found["data"]
    assert "They part at update 1: other samples" in found["seed"]
    assert "They part at update 1: same samples, other rates (0.01, 0.02)" in found["rate"]


def test_the_weights_of_the_last_equal_epoch_are_said():
    one = np.zeros(6, ROW)
    one["update"], one["epoch"], one["samples"] = range(1, 7), [0, 0, 1, 1, 2, 2], 7
    one["loss"], one["rate"], one["weights"] = 0.5, 0.1, [0, 3, 0, 4, 0, 5]
    other = one.copy()
    other["loss"][4:] = 0.25
    assert parting(one, other) == (
        "They part at update 5: same samples, same rates, other loss (0.5, 0.25) → code, weights "
        "or hardware; weights were equal at epoch 2's end."
    )
    assert "no update in common" in parting(one[:2], other[3:])
