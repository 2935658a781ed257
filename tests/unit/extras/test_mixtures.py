"""`CombinedLoader(weights=…)`: a mixture of loaders, whose shares are exact in each pass."""

import collections

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fitkit
from fitkit import callbacks
from fitkit.data import CombinedLoader
from fitkit.errors import ArgumentTypeError
from fitkit.extras.launchers.workers import end_workers
from tests.nets import linear


def loader(rows, size, offset, **options):
    """Batches whose rows are numbered from an offset, with the number as the target."""
    numbers = torch.arange(float(offset), offset + rows)
    data = TensorDataset(torch.stack([numbers, torch.ones(rows)], 1) / 100, numbers[:, None])
    return DataLoader(data, size, **{"shuffle": True, **options})


class Stream(IterableDataset):
    def __init__(self, offset):
        self.offset = offset

    def __iter__(self):
        return iter(torch.arange(float(self.offset), self.offset + 4000))


class Keeps(fitkit.Model):
    """Notes the targets that it is given, and draws random numbers in each step."""

    def __init__(self):
        super().__init__(linear(2, 1, seed=1))
        self.given = []

    def training_step(self, batch, batch_idx):
        self.given.append(batch[1].flatten().tolist())
        loss = super().training_step(batch, batch_idx)
        return torch.nn.functional.dropout(loss, 0.1)


def trained(mixture, model=None, *, epochs=2, given=(), **options):
    torch.manual_seed(3)
    if model is None:
        model = Keeps()
        model.compile("sgd", "mse", learning_rate=1e-5)
    model.fit(mixture, epochs=epochs, verbose=0, callbacks=list(given), **options)
    return model


def owners(batches):
    """How many batches each loader gave."""
    return collections.Counter(int(batch[0]) // 1000 for batch in batches)


@pytest.mark.parametrize(
    ("rows", "weights", "mode", "shares"),
    [
        ([40, 40], [3, 1], "min_size", [10, 3]),  # 10 batches each: the first ends the pass
        ([40, 40], [3, 1], "max_size_cycle", [30, 10]),
        ([40, 8], [1, 1], "min_size", [2, 2]),
        ([40, 8], [1, 1], "max_size_cycle", [10, 10]),
        ([40, 40, 40], [0.5, 0.3, 0.2], "min_size", [10, 6, 4]),
        ([4, 4, 4], [1, 1, 5], "min_size", [0, 0, 1]),
        ([12, 12], [1e-6, 1], "min_size", [0, 3]),
        ([28, 12], [7, 3], "max_size_cycle", [7, 3]),
    ],
)
def test_a_pass_has_each_loaders_share_in_a_random_order(rows, weights, mode, shares):
    torch.manual_seed(0)  # else two orders are alike by chance, once in 120 of the last case
    loaders = [loader(count, 4, 1000 * place) for place, count in enumerate(rows)]
    mixture = CombinedLoader(loaders, mode, weights=weights)
    assert len(mixture) == sum(shares)
    passes = [[batch[1].flatten().tolist() for batch in mixture] for _ in range(2)]
    for batches in passes:
        found = owners(batches)
        assert [found[place] for place in range(len(rows))] == shares
    if sum(shares) > 8 and min(shares) > 1:
        assert [b[0] // 1000 for b in passes[0]] != [b[0] // 1000 for b in passes[1]]
    for place, share in enumerate(shares):  # a loader's rows come once before any comes again
        seen = [row for batch in passes[0] for row in batch if row // 1000 == place]
        assert len(set(seen)) == min(len(seen), rows[place]) and len(seen) == 4 * share


def test_fit_reads_what_plain_iteration_gives_and_knows_its_length():
    def mixture():
        return CombinedLoader(
            {"a": loader(40, 4, 0), "b": loader(24, 4, 1000)}, weights={"b": 1, "a": 2}
        )

    torch.manual_seed(3)
    Keeps()  # draws its first weights
    again = mixture()
    plain = [batch[1].flatten().tolist() for _ in range(2) for batch in again]
    seen = []
    notes = callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    model = trained(mixture(), given=[notes])
    assert model.given == plain  # what the step draws between two passes doesn't matter
    assert seen == 2 * list(range(15)) and owners(model.given) == {0: 20, 1: 10}
    assert model.evaluate(mixture(), verbose=0, return_dict=True)["loss"] > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cut_training_continues_exactly(workers, tmp_path):
    def mixture():
        options = {"num_workers": workers}
        loaders = [loader(40, 4, 0, **options), loader(24, 4, 1000, **options)]
        return CombinedLoader(loaders, "max_size_cycle", weights=[1, 2])

    class Cuts(callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            if self.model.global_step == 37:
                raise KeyboardInterrupt

    whole = trained(mixture())
    saves = callbacks.ModelCheckpoint(tmp_path / "a.h5", save_freq=1)
    with pytest.raises(KeyboardInterrupt):
        trained(mixture(), given=[saves, Cuts()])
    cut = trained(mixture(), resume_from=tmp_path / "a.h5")
    done = len(whole.given) - len(cut.given)
    assert 0 < done < len(whole.given) and cut.given == whole.given[done:]
    assert torch.equal(cut.net.weight, whole.net.weight)


def test_streams_are_drawn_by_weight_at_each_step():
    streams = [DataLoader(Stream(offset), 1) for offset in (0, 10_000)]
    mixture = CombinedLoader(streams, weights=[0.8, 0.2])
    torch.manual_seed(0)
    first = [int(batch) // 10_000 for batch in mixture]
    torch.manual_seed(0)
    assert first == [int(batch) // 10_000 for batch in mixture]
    assert first.count(0) == 4000  # the first ends the pass
    assert first.count(1) == pytest.approx(1000, abs=150)
    with pytest.raises(TypeError):
        len(mixture)


def test_ranks_are_dealt_the_batches_of_one_process():
    def weights(devices):
        torch.manual_seed(3)
        model = fitkit.Model(linear(2, 1, seed=1))
        hardware = {"accelerator": "cpu", "strategy": "ddp_spawn", "devices": devices}
        model.compile("sgd", "mse", learning_rate=1e-5, **hardware)
        loaders = [loader(40, 4 // devices, 0), loader(24, 4 // devices, 1000)]
        mixture = CombinedLoader(loaders, weights=[2, 1])
        history = model.fit(mixture, epochs=2, verbose=0).history
        return len(mixture), history["loss"], model.net.weight.detach().clone()

    try:
        batches, losses, found = weights(2)
    finally:
        end_workers()
    assert batches == 30 and len(losses) == 2
    # By hand: two batches of two rows, one for each rank, make an update.
    torch.manual_seed(3)
    net = linear(2, 1, seed=1)
    optimizer = torch.optim.SGD(net.parameters(), 1e-5)
    mixture = CombinedLoader([loader(40, 2, 0), loader(24, 2, 1000)], weights=[2, 1])
    for _ in range(2):
        batches = list(mixture)
        for one, other in zip(batches[::2], batches[1::2], strict=True):
            x, y = (torch.cat(pair) for pair in zip(one, other, strict=True))
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
    assert torch.allclose(found, net.weight, rtol=1e-6)


@pytest.mark.parametrize(
    ("mode", "weights", "error", "message"),
    [
        ("max_size", [1, 1], fitkit.ConfigurationError, "max_size_cycle"),
        ("min_size", [1], fitkit.ConfigurationError, "list of 2 numbers"),
        ("min_size", {"a": 1, "b": 2}, fitkit.ConfigurationError, "list of 2 numbers"),
        ("min_size", 3, fitkit.ConfigurationError, "list of 2 numbers"),
        ("min_size", [1, 0], fitkit.ConfigurationError, "above 0"),
        ("min_size", [1, float("nan")], fitkit.ConfigurationError, "finite"),
        ("min_size", [1, "2"], ArgumentTypeError, "must be a number"),
    ],
)
def test_wrong_weights_are_refused(mode, weights, error, message):
    with pytest.raises(error, match=message):
        CombinedLoader([[1], [2]], mode, weights=weights)
    if isinstance(weights, list) and len(weights) == 2 and mode == "min_size":
        with pytest.raises(fitkit.ConfigurationError, match="'a', 'b'"):
            CombinedLoader({"a": [1], "b": [2]}, weights=weights)
