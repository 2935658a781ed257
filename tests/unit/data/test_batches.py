"""Batches without rows, and third entries that are no weights."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fitkit
from fitkit.data.arrays import ArraySource
from fitkit.data.batches import CountedSource, is_empty
from fitkit.errors import ConfigurationError
from tests.nets import classes_in_turn
from tests.reference import assert_same_weights

X, Y = classes_in_turn(30, 8)
FULL = list(zip(X.split(10), Y.split(10), strict=True))
EMPTY = (X[:0], Y[:0])


def compiled(net=None, kind=fitkit.Model, loss="cross_entropy", **options):
    torch.manual_seed(1)
    model = kind(net or torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 3)))
    model.compile("adam", loss, metrics=["accuracy"] if loss == "cross_entropy" else None,
                  accelerator="cpu", **options)  # fmt: skip
    return model


@pytest.mark.parametrize("data", ["arrays", "loader"])
def test_each_pass_has_an_order_of_its_own_however_epochs_are_cut(data):
    class Sees(fitkit.Model):
        def training_step(self, batch, batch_idx):
            seen.extend(batch[1].tolist())
            return self(batch[0]).sum()

    seen, y = [], torch.arange(30)
    model = compiled(kind=Sees, loss=None)
    shuffled = DataLoader(TensorDataset(X, y), 10, shuffle=True)
    given, size = ((X, y), {"batch_size": 10}) if data == "arrays" else ((shuffled,), {})
    model.fit(*given, **size, steps_per_epoch=2, epochs=6, verbose=0)
    passes = [seen[start : start + 30] for start in range(0, 120, 30)]
    assert all(sorted(one) == list(range(30)) for one in passes)
    assert len(set(map(tuple, passes))) == 4


def with_empty(place):
    return [*FULL[:place], EMPTY, *FULL[place:]]


@pytest.mark.parametrize("place", range(4))
def test_an_empty_batch_in_any_place_changes_nothing(place):
    expected, model = compiled(), compiled()
    plain = expected.fit(FULL, validation_data=FULL, epochs=2, verbose=0)
    data = with_empty(place)
    found = model.fit(data, validation_data=data, epochs=2, verbose=0)
    assert found.history == plain.history
    assert np.isfinite(found.history["val_loss"]).all()
    assert model.global_step == 6
    assert_same_weights(model, expected)
    assert model.evaluate(data, verbose=0) == expected.evaluate(FULL, verbose=0)
    assert (model.predict(data, verbose=0) == expected.predict(FULL, verbose=0)).all()


@pytest.mark.parametrize("place", [0, 1, 3])
def test_it_adds_nothing_to_accumulated_gradients(place):
    expected, model = (compiled(accumulate_grad_batches=3) for _ in range(2))
    expected.fit(FULL, verbose=0)
    model.fit(with_empty(place), verbose=0)
    assert model.global_step == expected.global_step == 1
    assert_same_weights(model, expected)


def test_a_net_that_takes_no_empty_batch_never_sees_one():
    class Viewed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)

        def forward(self, x):
            return self.linear(self.norm(x).view(x.shape[0], -1))  # torch refuses that of 0 rows

    model = compiled(Viewed())
    model.fit(with_empty(0), verbose=0)
    assert np.isfinite(model.evaluate(with_empty(2), verbose=0)).all()
    assert model.predict((b for b in with_empty(1)), verbose=0).shape == (30, 3)


def test_own_steps_and_callbacks_never_see_one():
    seen = []

    class Own(fitkit.Model):
        def training_step(self, batch, batch_idx):
            seen.append((batch_idx, len(batch[0])))
            return super().training_step(batch, batch_idx)

    hooks = []
    model = compiled(kind=Own)
    told = fitkit.callbacks.LambdaCallback(
        on_train_batch_begin=lambda index, logs: hooks.append(index),
        on_train_batch_end=lambda index, logs: hooks.append(logs["loss"]),
    )
    model.fit(with_empty(1), callbacks=[told], verbose=0)
    assert seen == [(0, 10), (2, 10), (3, 10)]
    assert hooks[::2] == [0, 2, 3]
    assert np.isfinite(hooks).all()


@pytest.mark.parametrize("group", [2, 3])
def test_groups_of_batches_end_where_they_would(group):
    ends, outputs = [], []
    model = compiled(steps_per_execution=group)
    data = [EMPTY, FULL[0], EMPTY, EMPTY, FULL[1], EMPTY, FULL[2]]
    told = fitkit.callbacks.LambdaCallback(
        on_train_batch_end=lambda index, logs: ends.append(index),
        on_predict_batch_end=lambda index, logs: outputs.append(logs["outputs"]),
    )
    model.fit(data, callbacks=[told], verbose=0)
    assert ends == {2: [1, 5, 6], 3: [2, 5, 6]}[group]
    whole = model.predict(data, callbacks=[told], verbose=0)
    assert np.array_equal(np.concatenate(outputs), whole)
    assert whole.shape == (30, 3)


def test_it_counts_among_the_steps_that_are_asked_for():
    model = compiled()
    model.fit(with_empty(1), steps_per_epoch=2, epochs=2, verbose=0)  # full, empty; full, full
    assert model.global_step == 3
    expected = compiled()
    assert model.evaluate(with_empty(1), steps=2, verbose=0) == pytest.approx(
        model.evaluate(FULL[:1], verbose=0)
    )
    assert expected.predict(with_empty(1), steps=3, verbose=0).shape == (20, 3)


def test_a_collate_that_keeps_nothing_gives_one():
    data = TensorDataset(X, Y)

    def kept(samples):
        rows = [sample for sample in samples if sample[1] != 0]
        x = torch.stack([x for x, _ in rows]) if rows else torch.empty(0, 8)
        return x, torch.tensor([int(y) for _, y in rows], dtype=torch.int64)

    model = compiled()
    history = model.fit(DataLoader(data, batch_size=1, collate_fn=kept), verbose=0)
    assert model.global_step == 20
    assert np.isfinite(history.history["loss"][0])


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.fit([EMPTY, EMPTY], verbose=0),
        lambda model: model.fit((EMPTY for _ in range(5)), steps_per_epoch=2, verbose=0),
        lambda model: model.fit(FULL, validation_data=[EMPTY], verbose=0),
        lambda model: model.evaluate([EMPTY], verbose=0),
        lambda model: model.predict([EMPTY], verbose=0),
    ],
    ids=["fit", "steps", "validation", "evaluate", "predict"],
)
def test_nothing_but_empty_batches_is_refused(call):
    with pytest.raises(ConfigurationError, match="empty: .*samples"):
        call(compiled())


def test_images_without_objects_are_no_empty_batch():
    image = torch.zeros(3, 4, 4)
    assert not is_empty(([image], [{"boxes": torch.empty(0, 4), "labels": torch.empty(0)}]))
    assert not is_empty(([torch.empty(0, 4)], torch.zeros(1)))
    assert is_empty({"a": np.empty((0, 2)), "b": (torch.empty(0),)})
    assert not is_empty("text")


# ---------------------------------------------------------------------- third entries


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_weights_are_finite_numbers_from_0(wrong):
    weight = torch.ones(30)
    weight[7] = wrong
    with pytest.raises(ConfigurationError, match=r"several targets are \(x, \(y, y2\)\)"):
        compiled().fit([(X, Y, weight)], verbose=0)
    with pytest.raises(ConfigurationError, match="sample_weight holds"):
        compiled().fit(X, Y, sample_weight=weight.numpy(), verbose=0)
    with pytest.raises(ConfigurationError, match="sample_weight holds"):
        compiled().evaluate(TensorDataset(X, Y, weight), verbose=0)


def test_a_second_target_as_third_entry_is_told_of():
    target = X[:, :3]
    model = compiled(loss="mse")
    for y2 in (target.abs(), Y):
        for data in ([(X, target, y2)], TensorDataset(X, target, y2)):
            with pytest.warns(UserWarning, match=r"second target, write \(x, \(y, y2\)\)"):
                model.fit(data, verbose=0)


def test_weights_by_sample_and_by_position_bring_no_word(recwarn):
    compiled().fit([(X, Y, torch.rand(30, 1))], verbose=0)
    compiled().fit(X, Y, sample_weight=np.arange(30), verbose=0)
    tagger = compiled(torch.nn.Conv1d(8, 3, 1))
    labels = Y[:, None].expand(30, 5)
    tagger.fit([(X[:, :, None].expand(30, 8, 5), labels, labels != 0)], verbose=0)
    assert not [one for one in recwarn.list if "third entry" in str(one.message)]


# ---------------------------------------------------------------------- class weights


class Samples(Dataset):
    def __len__(self):
        return 30

    def __getitem__(self, index):
        return X[index], Y[index]


@pytest.mark.parametrize(
    "data",
    [(X, Y), (DataLoader(Samples(), 10),), (FULL,)],
    ids=["arrays", "loader", "list"],
)
def test_classes_that_no_label_has_are_named_once(data):
    with pytest.warns(UserWarning, match=r"classes \[7, 9\]") as told:
        compiled().fit(*data, class_weight={9: 1.0, 1: 2.0, 7: 3.0}, epochs=3, verbose=0)
    assert len([one for one in told.list if "class_weight" in str(one.message)]) == 1


def test_classes_that_are_there_bring_no_word(recwarn):
    for data in ((X, Y), (FULL,)):
        compiled().fit(*data, class_weight={0: 1.0, 1: 2.0, 2: 3.0}, verbose=0)
    assert not [one for one in recwarn.list if "class_weight" in str(one.message)]


def test_class_weights_multiply_weights_in_a_column():
    weights = torch.rand(30, generator=torch.Generator().manual_seed(2))
    model = compiled()
    with torch.no_grad():
        each = torch.nn.functional.cross_entropy(model.net(X), Y, reduction="none")
    expected = (each * weights * torch.tensor([1.0, 2.0, 4.0])[Y]).mean().item()
    loss = model.train_on_batch(X, Y, weights[:, None], {0: 1.0, 1: 2.0, 2: 4.0})
    assert (loss[0] if isinstance(loss, list) else loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("samples", [0, 1, 4, 9, 12])
@pytest.mark.parametrize("skip", [0, 1, 2, 5])
def test_rows_of_arrays_are_counted_without_a_look_at_them(samples, skip):
    source = ArraySource((torch.arange(float(samples)),), 4)
    batches = CountedSource(source).batches(0, skip)
    found = [(len(one.data[0]), one.samples, one.total) for one in batches]
    assert found == [(size, size, size) for size, _, _ in found]
    assert [size for size, _, _ in found] == [len(x) for (x,) in source.batches(0, skip)]
