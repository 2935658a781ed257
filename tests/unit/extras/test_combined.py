"""Lightning's `CombinedLoader`: several loaders side by side, cycled or shortest."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import fitkit
from fitkit.data import CombinedLoader
from tests.nets import linear


class Rows(Dataset):
    """Rows that aren't read by index, and count how often they are."""

    def __init__(self, count, offset=0):
        self.count, self.offset, self.read = count, offset, 0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.read += 1
        return torch.full((4,), float(self.offset + index))


def plain(count, size, shuffle=False, offset=0, **options):
    return DataLoader(Rows(count, offset), size, shuffle=shuffle, **options)


def tensors(count, size, shuffle=False, offset=0):
    rows = torch.arange(float(offset), offset + count)[:, None].expand(count, 4)
    return DataLoader(TensorDataset(rows.contiguous()), size, shuffle=shuffle)


class Recording(fitkit.Model):
    """Notes the first numbers of what it is given; its net draws random numbers in each step."""

    def __init__(self):
        super().__init__(linear(4, 1, seed=1))
        self.given = []

    def training_step(self, batch, batch_idx):
        parts = batch.values() if isinstance(batch, dict) else batch
        parts = [part[0] if isinstance(part, (list, tuple)) else part for part in parts]
        found = tuple(None if part is None else part[:, 0].tolist() for part in parts)
        self.given.append(found)
        whole = torch.cat([part for part in parts if part is not None])
        return torch.nn.functional.dropout(self(whole / 100), 0.5).square().mean()


def recorded(loader, *, epochs=2, callbacks=None, **arguments):
    torch.manual_seed(3)
    model = Recording()
    model.compile("sgd", learning_rate=0.01)
    model.fit(loader, epochs=epochs, verbose=0, callbacks=callbacks, **arguments)
    return model


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
@pytest.mark.parametrize("make", [plain, tensors])
def test_every_mode_gives_what_plain_iteration_gives(mode, make):
    combined = CombinedLoader({"a": make(6, 2), "b": make(9, 2, offset=50)}, mode)
    expected = [
        tuple(None if p is None else (p[0] if isinstance(p, list) else p)[:, 0].tolist() for p in b)
        for b in map(dict.values, combined)
    ]
    assert len(expected) == len(combined) == (3 if mode == "min_size" else 5)
    assert recorded(combined).given == expected * 2
    third = expected[3][0] if mode != "min_size" else "none"
    assert third == {"min_size": "none", "max_size_cycle": [0, 1], "max_size": None}[mode]


def test_shuffled_loaders_side_by_side_draw_as_zip_of_both_does():
    loaders = plain(6, 2, shuffle=True), tensors(9, 2, shuffle=True, offset=50)
    torch.manual_seed(3)
    model = recorded(CombinedLoader(loaders), epochs=1)
    torch.manual_seed(3)
    Recording()
    expected = [(a[:, 0].tolist(), b[:, 0].tolist()) for a, (b,) in zip(*loaders, strict=False)]
    assert model.given == expected


def test_the_shorter_one_begins_again_in_a_new_order():
    given = recorded(
        CombinedLoader([plain(6, 2, shuffle=True), plain(24, 2)], "max_size_cycle"), epochs=1
    ).given
    cycles = [
        list(itertools.chain.from_iterable(part for part, _ in given[start : start + 3]))
        for start in range(0, 12, 3)
    ]
    assert all(sorted(cycle) == list(range(6)) for cycle in cycles)
    assert len({tuple(cycle) for cycle in cycles}) > 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cut_training_goes_on_exactly_and_loads_nothing_of_before(tmp_path, workers):
    def combined():
        options = {"num_workers": workers, "persistent_workers": bool(workers)}
        return CombinedLoader(
            {"a": plain(6, 2, shuffle=True, **options), "b": plain(14, 2, shuffle=True)},
            "max_size_cycle",
        )

    def saves(batch, logs):
        if model_of.model.global_step == 12:  # in the second epoch's second cycle
            model_of.model.save(tmp_path / "cut.h5")

    model_of = fitkit.callbacks.LambdaCallback(on_train_batch_end=saves)
    whole = recorded(combined(), epochs=3, callbacks=model_of)
    data = combined()
    resumed = recorded(data, epochs=3, resume_from=tmp_path / "cut.h5")
    assert resumed.given == whole.given[12:]
    assert torch.equal(resumed.net.weight, whole.net.weight)
    if not workers:
        assert data.loaders["b"].dataset.read == 2 * 9


def test_iterables_and_streams_are_read_through():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(torch.arange(20.0)[:, None].expand(20, 4))

    batches = [torch.full((2, 4), float(i)) for i in range(3)]
    combined = CombinedLoader([DataLoader(Stream(), 4), batches], "max_size_cycle")
    given = recorded(combined, epochs=1).given
    assert [b[0] for _, b in given] == [0, 1, 2, 0, 1]
    assert given[4][0] == [16, 17, 18, 19]


def test_evaluate_and_predict_take_it():
    class Own(fitkit.Model):
        def test_step(self, batch, batch_idx):
            self.log("rows", len(batch["a"]), reduce_fx="sum")

        def predict_step(self, batch, batch_idx):
            return self(batch["a"])

    model = Own(linear(4, 1, seed=1))
    model.compile()
    both = CombinedLoader({"a": plain(6, 2), "b": plain(9, 2)})
    assert model.evaluate(both, return_dict=True, verbose=0)["rows"] == 6
    assert model.predict(both, verbose=0).shape == (6, 1)


@pytest.mark.parametrize(("loaders", "mode", "message"), [
    ({}, "min_size", "dict, list or tuple"),
    (plain(2, 1), "min_size", "dict, list or tuple"),
    ([iter([1])], "min_size", "read again"),
    ([plain(2, 1)], "sequential", "ConcatDataset"),
    ([plain(2, 1)], "max", "max_size_cycle"),
])  # fmt: skip
def test_what_cant_be_combined(loaders, mode, message):
    with pytest.raises(fitkit.FitkitError, match=message):
        CombinedLoader(loaders, mode)


def test_an_empty_loader_is_named():
    with pytest.raises(fitkit.ConfigurationError, match="is empty"):
        recorded(CombinedLoader([plain(3, 4, drop_last=True), plain(3, 1)]))
