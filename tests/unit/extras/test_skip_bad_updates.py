"""Updates that are left out: against plain loops that leave the same batches out."""

import contextlib
import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import fitkit
from fitkit.callbacks import DetectNonFinite, LambdaCallback, SkipBadUpdates
from fitkit.extras.bad_numbers import first_bad, named_samples
from fitkit.extras.watches import NonFiniteError

SAMPLES, BATCH = 48, 8


def data(*bad, value=math.nan, of="x"):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 4, generator=generator)
    y = torch.randn(SAMPLES, 1, generator=generator)
    for row in bad:
        (x if of == "x" else y)[row, -1] = value
    return x, y


def net():
    torch.manual_seed(1)
    # A bias before the normalization has only rounding for a gradient, which Adam makes steps of.
    layer = nn.Linear(4, 6, bias=False)
    return nn.Sequential(layer, nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))


def compiled(module=None, optimizer="adam", **options):
    model = fitkit.Model(module or net())
    given = {"optimizer": optimizer, "loss": "mse", "accelerator": "cpu", "devices": 1}
    model.compile(**{**given, **options})
    return model


def plain(module, x, y, groups, left_out, epochs=1):
    """The groups of batches that aren't left out, each an update."""
    optimizer = torch.optim.Adam(module.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    for _ in range(epochs):
        for number, group in enumerate(groups):
            if number in left_out:
                continue
            optimizer.zero_grad()
            for rows in group:
                loss = nn.functional.mse_loss(module(x[rows]), y[rows])
                losses.append(loss.item())
                (loss / len(group)).backward()
            optimizer.step()
            schedule.step()
    return sum(losses) / len(losses)


FAULTS = {
    "a nan in x": data(17),
    "an inf in x": data(17, value=math.inf),
    "a nan in y": data(17, of="y"),
    "an inf label": data(17, value=-math.inf, of="y"),
    "a loss that overflows": data(17, value=1e30, of="y"),
    "two": data(16, 17),
}


@pytest.mark.parametrize(
    ("fault", "every"),
    [
        ("a nan in x", 1),
        ("an inf in x", 2),
        ("a nan in y", 2),
        ("an inf label", 1),
        ("a loss that overflows", 2),
        ("two", 1),
    ],
)
def test_weights_statistics_optimizer_and_schedule_are_those_without_the_update(fault, every):
    x, y = FAULTS[fault]
    schedule = {
        "scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        "interval": "step",
    }
    model = compiled(lr_scheduler=schedule, accumulate_grad_batches=every)
    with pytest.warns(UserWarning, match="batch 2 was left out|batch 3 was left out") as said:
        history = model.fit(
            x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks="skip_bad_updates"
        )
    assert len([w for w in said if "left out" in str(w.message)]) == 1
    rows = list(torch.arange(SAMPLES).split(BATCH))
    groups = [rows[at : at + every] for at in range(0, len(rows), every)]
    expected = net()
    plain(expected, x, y, groups, {2 // every}, epochs=2)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(model.net.state_dict()[name], tensor)
    assert history["skipped"] == [1.0, 1.0] and model.global_step == 2 * (len(groups) - 1)
    assert [one["indices"] for one in history.skipped] == [list(range(16, 24))] * 2
    if every == 1:
        mean = plain(net(), x, y, groups, {2})
        assert history["loss"][0] == pytest.approx(mean, rel=1e-5)
    where = "y" if "y" in fault or "label" in fault else "x"
    if "overflows" not in fault:
        row = 16 if fault == "two" else 17
        assert f"{where} of sample {row} is " in str(said[0].message)


def test_several_optimizers_and_averages_leave_it_out_together():
    x, y = data(17)
    module = net()
    optimizers = [
        torch.optim.Adam(module[:2].parameters()),
        torch.optim.SGD(module[3:].parameters(), 0.1),
    ]
    model = compiled(module, optimizers)
    average = fitkit.callbacks.EMA(decay=0.5)
    with pytest.warns(UserWarning, match="left out"):
        model.fit(
            x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[average, SkipBadUpdates()]
        )
    others = [row for row in range(SAMPLES) if not 16 <= row < 24]
    module = net()
    optimizers = [
        torch.optim.Adam(module[:2].parameters()),
        torch.optim.SGD(module[3:].parameters(), 0.1),
    ]
    expected = compiled(module, optimizers)
    again = fitkit.callbacks.EMA(decay=0.5)
    expected.fit(x[others], y[others], batch_size=BATCH, shuffle=False, verbose=0, callbacks=again)
    for name, tensor in expected.net.state_dict().items():
        torch.testing.assert_close(model.net.state_dict()[name], tensor)


def test_after_some_in_a_row_it_raises_or_goes_back():
    x, y = data(*range(16, 48))
    with (
        pytest.raises(NonFiniteError, match="3 updates in a row.*sample 32"),
        pytest.warns(UserWarning, match="left out"),
    ):
        compiled().fit(
            x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks="skip_bad_updates"
        )
    model, seen = compiled(), []
    tell = LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(copy.deepcopy(model.net.state_dict()))
    )
    skip = SkipBadUpdates(in_a_row=2, then="restore", every=1)
    with pytest.raises(NonFiniteError), pytest.warns(UserWarning, match="left out"):
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[tell, skip])
    assert len(skip.skipped) == 4  # twice two, with the copy between
    for name, tensor in seen[0].items():  # the copy before the second update
        torch.testing.assert_close(seen[3][name], tensor)


def test_a_spike_is_left_out():
    x, y = data()
    y[40:] += 1000.0
    model = compiled(nn.Linear(4, 1), optimizer="sgd", learning_rate=1e-3)
    with pytest.warns(UserWarning, match=r"jumped to .*\(sample 40, rank 0\)"):
        history = model.fit(
            x, y, batch_size=1, epochs=1, shuffle=False, verbose=0,
            callbacks=SkipBadUpdates(spikes=20, in_a_row=99),
        )  # fmt: skip
    assert history["skipped"] == [8.0]
    assert model.net.bias.abs().max() < 5


def test_a_resumed_training_is_one_that_was_not_interrupted(tmp_path):
    x, y = data(17)
    whole, first, second = compiled(), compiled(), compiled()
    given = {"batch_size": BATCH, "verbose": 0}
    save = LambdaCallback(
        on_train_batch_end=lambda batch, logs: (
            batch == 3 and first.current_epoch == 1 and first.save(tmp_path / "a.h5")
        )
    )
    torch.manual_seed(5)
    with pytest.warns(UserWarning, match="left out"):
        expected = whole.fit(x, y, epochs=3, callbacks=SkipBadUpdates(), **given)
    torch.manual_seed(5)
    with pytest.warns(UserWarning, match="left out"):
        first.fit(x, y, epochs=2, callbacks=[SkipBadUpdates(), save], **given)
    found = second.fit(
        x, y, epochs=3, callbacks=[SkipBadUpdates(), LambdaCallback()],
        resume_from=tmp_path / "a.h5", **given,
    )  # fmt: skip
    assert found.skipped == expected.skipped and len(found.skipped) == 3
    for name, tensor in whole.net.state_dict().items():
        assert torch.equal(second.net.state_dict()[name], tensor)


class Manual(fitkit.Model):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        return None


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (Manual, {}, "makes its updates itself"),
        (fitkit.Model, {"optimizer": "lbfgs"}, "several times"),
    ],
)
def test_what_makes_updates_itself_is_refused(kind, options, words):
    model = kind(nn.Linear(4, 1))
    model.compile(
        **{"optimizer": "sgd", "loss": "mse", "accelerator": "cpu", "devices": 1, **options}
    )
    with pytest.raises(fitkit.ConfigurationError, match=words):
        model.fit(*data(), verbose=0, callbacks="skip_bad_updates")


# ---------------------------------------------------------------------- which samples


class Rows(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return X[index], Y[index]


X, Y = data(17)
READERS = {
    "arrays": lambda: (X, Y),
    "a data set": lambda: (Rows(),),
    "a loader": lambda: (DataLoader(Rows(), batch_size=BATCH, shuffle=True),),
    "workers": lambda: (DataLoader(Rows(), batch_size=BATCH, shuffle=True, num_workers=2),),
    "tensors": lambda: (DataLoader(TensorDataset(X, Y), batch_size=BATCH, shuffle=True),),
    "a subset": lambda: (
        DataLoader(Subset(Rows(), range(10, 40)), batch_size=BATCH, shuffle=True),
    ),
}


@pytest.mark.parametrize(
    ("reader", "steps"),
    [
        ("arrays", None),
        ("arrays", 9),
        ("a data set", None),
        ("a loader", None),
        ("workers", 9),
        ("tensors", 9),
        ("a subset", None),
    ],
)
def test_samples_are_named_whatever_the_order(reader, steps):
    given, row = READERS[reader](), 7 if reader == "a subset" else 17
    skip = SkipBadUpdates()
    with pytest.warns(UserWarning, match=f"In the data, x of sample {row} is nan at column 3"):
        compiled().fit(
            *given, batch_size=BATCH, epochs=2, verbose=0, callbacks=skip, steps_per_epoch=steps
        )
    assert len(skip.skipped) >= 2 and all(row in one["indices"] for one in skip.skipped)


def test_a_stream_has_no_indices_and_the_row_of_the_batch_is_named():
    rows = [(X[at : at + BATCH], Y[at : at + BATCH]) for at in range(0, SAMPLES, BATCH)]
    with pytest.warns(UserWarning, match="can't be named.*x of sample 1 is nan at column 3"):
        history = compiled().fit(rows, verbose=0, callbacks="skip_bad_updates")
    assert history.skipped[0]["indices"] is None


def test_detect_non_finite_names_the_samples_too():
    with pytest.raises(
        NonFiniteError, match="samples 16, 17, .*; x of sample 17 is nan at column 3"
    ):
        compiled().fit(
            X, Y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=DetectNonFinite()
        )
    loader = DataLoader(Rows(), batch_size=BATCH, shuffle=True)
    with pytest.raises(NonFiniteError, match="; x of sample 17 is nan at column 3"):
        compiled().fit(loader, epochs=2, verbose=0, callbacks=DetectNonFinite())


def test_the_warning_at_an_epochs_end_names_the_data_in_memory():
    with pytest.warns(UserWarning, match="loss is nan.*In the data, y of sample 17 is inf"):
        compiled().fit(*data(17, value=math.inf, of="y"), verbose=0)


def test_the_first_number_is_named_by_part_sample_and_column():
    image = torch.zeros(2, 3, 4, 4)
    image[1, 2, 0, 3] = -math.inf
    assert first_bad({"image": image}) == "x['image'] of sample 1 is -inf at [2, 0, 3]"
    label = torch.tensor([0.0, math.nan]).numpy()
    assert first_bad((torch.zeros(2, 1), label), [5, 9]) == "y of sample 9 is nan"
    assert first_bad((torch.zeros(2), torch.ones(2, dtype=torch.long), None)) is None
    assert named_samples(list(range(30))).endswith("7, … (30 in all)")


class Reads(fitkit.callbacks.Callback):
    """Reads the values of the first batches, as a bar does, and ends the fit."""

    def on_train_batch_end(self, batch, logs):
        if batch == 2:
            raise ArithmeticError(logs["loss"])


def test_values_that_are_read_within_an_epoch_warn_at_once_and_name_the_sample():
    states = []
    for rows in (TensorDataset(torch.zeros_like(X), Y), Rows()):
        loader = DataLoader(rows, batch_size=BATCH, num_workers=1)
        words = "In epoch 1, by batch 2, loss is nan.*In the data, x of sample 17 is nan"
        with contextlib.ExitStack() as stack:
            if isinstance(rows, Rows):
                stack.enter_context(pytest.warns(UserWarning, match=words))
            stack.enter_context(pytest.raises(ArithmeticError))
            compiled().fit(loader, verbose=0, callbacks=Reads())
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
