"""Streams on real ranks: whatever they draw or ask for, all data once, or a refusal."""

import random

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

import fitkit
from tests.nets import linear

pytestmark = pytest.mark.timeout(60)


class Shuffled(IterableDataset):
    """Draws its order, and more for each sample, from the random numbers of its process."""

    def __iter__(self):
        order = list(range(14))
        random.shuffle(order)
        for index in torch.tensor(order)[torch.randperm(14)]:
            torch.rand(())
            yield torch.full((4,), float(index))


class ByRank(IterableDataset):
    def __iter__(self):
        for index in range(dist.get_rank(), 14, dist.get_world_size()):
            yield torch.full((4,), float(index))


class Declared(ByRank):
    shards_itself = True


class Inputs(fitkit.Model):
    """Predicts its inputs, with dropout's numbers drawn in between."""

    def predict_step(self, batch, batch_idx):
        torch.rand(batch_idx + 1)
        return batch.amax(1)


def read(stream, **options):
    torch.manual_seed(0)
    model = Inputs(linear(4, 1))
    model.compile(accelerator="cpu", devices=2, strategy="ddp_spawn")
    return model.predict(DataLoader(stream, 2, **options), verbose=0).tolist()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("stream", [Shuffled, Declared])
def test_a_stream_is_read_once_in_all(stream, workers):
    found = read(stream(), num_workers=workers)
    assert sorted(found) == list(range(14))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_gives_each_rank_its_part_without_saying_so_is_refused(workers):
    with pytest.raises(fitkit.ConfigurationError, match=r"FK044"):
        read(ByRank(), num_workers=workers)


def test_steps_of_a_stream_that_rank_zero_hands_out_end_on_all_ranks_at_once():
    torch.manual_seed(0)
    model = fitkit.Model(linear(4, 1))
    model.compile("sgd", "mse", accelerator="cpu", devices=2, strategy="ddp_spawn")
    for steps in (1, 3, 4, 9):
        numbers = iter(range(100))
        batches = ((torch.full((2, 4), float(n)), torch.zeros(2, 1)) for n in numbers)
        assert model.predict(batches, steps=steps, verbose=0).shape == (2 * steps, 1)
        batches = ((torch.full((2, 4), 1.0), torch.zeros(2, 1)) for n in numbers)
        loss = model.evaluate(batches, steps=steps, verbose=0)
        expected = model.net(torch.ones(1, 4)).item() ** 2
        assert loss == pytest.approx(expected)
        assert next(numbers) == 2 * steps  # nothing more was read
