"""Loaders that keep their own state: a training that was cut goes on bit for bit."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import fitkit
from fitkit.callbacks import Callback, ModelCheckpoint
from tests.nets import classes_in_turn
from tests.reference import assert_same_weights

stateful = pytest.importorskip("torchdata.stateful_dataloader")

X, Y = classes_in_turn(26, 4)


class Rows(Dataset):
    """Rows, perhaps with noise drawn where they are read (in a worker no state keeps it)."""

    def __init__(self, noisy=True):
        self.noisy = noisy

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index] + (torch.randn(4) / 9 if self.noisy else 0), Y[index]


class Chunks(IterableDataset):
    """A stream that goes on by its own state, and counts what it reads."""

    def __init__(self):
        self.position, self.order, self.read = 0, None, 0

    def __iter__(self):
        if self.order is None:
            self.order, self.position = torch.randperm(len(X)).tolist(), 0
        while self.position < len(X):
            index = self.order[self.position]
            self.position += 1
            self.read += 1
            yield X[index], Y[index]
        self.order = None

    def state_dict(self):
        return {"position": self.position, "order": self.order}

    def load_state_dict(self, state):
        self.position, self.order = state["position"], state["order"]


class Batches:
    """An iterable of the user's own that keeps its state."""

    def __init__(self):
        self.next, self.order = 0, None

    def __iter__(self):
        if self.order is None:
            self.order, self.next = torch.randperm(6).tolist(), 0
        while self.next < 6:
            chosen = slice(self.order[self.next] * 4, None)
            self.next += 1
            yield X[chosen][:4], Y[chosen][:4]
        self.order = None

    def state_dict(self):
        return {"next": self.next, "order": self.order}

    def load_state_dict(self, state):
        self.next, self.order = state["next"], state["order"]


def loader(data, **options):
    return stateful.StatefulDataLoader(data, batch_size=4, **options)


DATA = {
    "rows": lambda: loader(Rows(), shuffle=True),
    "rows with workers": lambda: loader(Rows(noisy=False), shuffle=True, num_workers=2),
    "own generator": lambda: loader(
        Rows(), shuffle=True, generator=torch.Generator().manual_seed(3)),
    "stream": lambda: loader(Chunks()),
    "iterable": Batches,
}  # fmt: skip


class Cut(Callback):
    """Saves at a moment of an epoch (after a batch, or at its end), and may end the run."""

    def __init__(self, path, epoch, batch, kill):
        self.path, self.moment, self.kill = path, (epoch, batch), kill

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs):
        self.at(batch)

    def on_epoch_end(self, epoch, logs):
        self.at(None)

    def at(self, batch):
        if (self.epoch, batch) == self.moment:
            self.model.save(self.path)
            if self.kill:
                raise KeyboardInterrupt


def compiled():
    torch.manual_seed(1)
    model = fitkit.Model(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3)))
    model.compile("adam", "cross_entropy", metrics=["accuracy"], learning_rate=0.01)
    return model


def fit(model, make_data, **options):
    torch.manual_seed(2)
    return model.fit(make_data(), epochs=4, verbose=0, **options).history


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(
    ("steps", "batch"),
    [(None, 2), (5, None)],
    ids=["whole passes, mid-epoch", "cut from a stream, epoch's end"],
)
@pytest.mark.parametrize("data", DATA, ids=str)
def test_a_loader_goes_on_by_its_own_state(tmp_path, data, batch, steps):
    path = tmp_path / "cut.h5"
    whole, cut, resumed = compiled(), compiled(), compiled()
    expected = fit(
        whole, DATA[data], steps_per_epoch=steps, callbacks=Cut(path, 1, batch, kill=False)
    )
    with pytest.raises(KeyboardInterrupt):
        fit(cut, DATA[data], steps_per_epoch=steps, callbacks=Cut(path, 1, batch, kill=True))
    torch.manual_seed(99)
    given = DATA[data]()
    history = resumed.fit(given, epochs=4, verbose=0, steps_per_epoch=steps, resume_from=path)
    assert_same_weights(resumed, whole)
    assert history.history["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    if data == "stream" and steps is None:
        left = 2 * 26 + (26 - 3 * 4 if batch is not None else 0)
        assert given.dataset.read == left  # nothing is read only to be skipped


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_after_an_epoch_that_was_broken_off_a_new_pass_begins(tmp_path):
    class Stop(Callback):
        stops_alike = True

        def on_train_batch_end(self, batch, logs):
            self.model.stop_training = self.model.current_epoch == 0 and batch == 1

    model = compiled()
    fit(model, DATA["stream"], callbacks=[Stop(), Cut(tmp_path / "cut.h5", 0, None, kill=False)])
    given = DATA["stream"]()
    compiled().fit(given, epochs=2, verbose=0, resume_from=tmp_path / "cut.h5")
    assert given.dataset.read == 26


@pytest.mark.parametrize("cut_at", [3, 4, 5])
def test_a_stream_of_hugging_face_has_all_its_steps_after_a_resume(tmp_path, cut_at):
    datasets = pytest.importorskip("datasets")
    columns = {"x": X[:24].tolist(), "label": Y[:24].tolist()}
    rows = datasets.Dataset.from_dict(columns).with_format("torch")

    class Own(fitkit.Model):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.seen = nn.Linear(4, 3), []

        def training_step(self, batch, batch_idx):
            self.seen.append(batch["x"])
            return nn.functional.cross_entropy(self.layer(batch["x"]), batch["label"])

    class Cut(Callback):
        def on_train_batch_end(self, batch, logs):
            if self.model.global_step == cut_at:
                self.model.save(tmp_path / "cut.h5")

    def trained(**options):
        model = Own()
        model.compile("adam", accelerator="cpu", devices=1)
        loader = stateful.StatefulDataLoader(rows.to_iterable_dataset(num_shards=2), 6)
        model.fit(loader, epochs=3, verbose=0, **options)
        return model

    whole, again = trained(callbacks=[Cut()]), trained(resume_from=tmp_path / "cut.h5")
    assert len(whole.seen) == 12
    torch.testing.assert_close(again.seen, whole.seen[cut_at:], rtol=0, atol=0)
    assert_same_weights(again, whole)


@pytest.mark.parametrize("kind", [stateful.StatefulDataLoader, torch.utils.data.DataLoader])
def test_a_shuffle_buffer_that_no_state_has_is_said_once(tmp_path, kind):
    datasets = pytest.importorskip("datasets")
    samples = [{"x": row.tolist(), "label": int(label)} for row, label in zip(X, Y, strict=True)]
    rows = datasets.Dataset.from_list(samples).with_format("torch")

    class Saves(Callback):
        def on_train_batch_end(self, batch, logs):
            self.model.save(tmp_path / f"{self.model.global_step}.h5")

    def said(stream, saves=True):
        model = fitkit.Model(nn.Linear(4, 3))
        model.compile("adam", "cross_entropy", target="label")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            callback = Saves() if saves else ModelCheckpoint(tmp_path / "{epoch}.h5")
            data = stream.map(lambda row: row).with_format("torch")
            model.fit(kind(data, 6), epochs=2, verbose=0, callbacks=[callback])
        return sum("shuffle" in str(each.message) for each in caught)

    stream = rows.to_iterable_dataset(num_shards=2)
    shuffled = stream.shuffle(seed=3, buffer_size=8)
    joined = datasets.interleave_datasets([stream, shuffled])
    wanted = int(kind is stateful.StatefulDataLoader)
    assert [said(stream), said(shuffled), said(joined)] == [0, wanted, wanted]
    assert said(shuffled, saves=False) == 0  # at epochs' ends the buffer is empty
