"""Packed documents and Hugging Face's data sets, over ranks: the numbers of one process."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fitkit
from fitkit.data import BucketBatchSampler, pack
from tests.reference import assert_same_weights

datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.timeout(120)


class Tagger(nn.Module):
    """Looks at no other position, so rows may be packed in any way."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.positions = nn.Embedding(20, 8), nn.Embedding(16, 8)
        self.head = nn.Linear(8, 20)

    def forward(self, input_ids, position_ids):
        return self.head(self.embedding(input_ids) + self.positions(position_ids)).mT.double()


def pairs(samples):
    """The samples as `pack` takes them for a net that gives logits alone."""
    rows = [sample.get("json", sample) for sample in samples]  # WebDataset has it by its suffix
    return pack(16)([torch.as_tensor(row["input_ids"]) for row in rows])


def documents():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(2, 16, (60,), generator=generator).tolist()
    return [{"input_ids": torch.randint(20, (n,), generator=generator).tolist()} for n in sizes]


def write_shards(wds):
    """Three files of twenty documents."""
    whole = documents()
    for shard in range(3):
        with wds.TarWriter(f"documents-{shard}.tar") as file:
            for number, sample in enumerate(whole[20 * shard : 20 * shard + 20]):
                file.write({"__key__": f"{shard}{number:02d}", "json": sample})


def loader(kind, size, group):
    if kind == "web":
        wds = pytest.importorskip("webdataset")
        web = wds.WebDataset("documents-{0..2}.tar", shardshuffle=False, nodesplitter=None)
        return DataLoader(web.decode(), size, collate_fn=pairs)
    whole = datasets.Dataset.from_list(documents())
    if kind == "stream":
        return DataLoader(whole.to_iterable_dataset(num_shards=2), size, collate_fn=pairs)
    lengths = [len(sample["input_ids"]) for sample in whole]
    # A window of one update's documents: the same ones, whatever the batch of a rank.
    batches = BucketBatchSampler(lengths, size, shuffle=False, window=group)
    return DataLoader(whole, batch_sampler=batches, collate_fn=pairs)


def trained(kind, ranks, resume_from=None, save_at=None):
    class Cut(fitkit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            if self.model.global_step == 3 and save_at is not None:
                self.model.save(save_at)

    model = fitkit.Model(Tagger())
    model.compile("adamw", "cross_entropy", learning_rate=0.01, accelerator="cpu", devices=ranks)
    callbacks = [Cut()] if save_at else None
    data = loader(kind, 12 // ranks, ranks)
    history = model.fit(data, epochs=2, verbose=0, callbacks=callbacks, resume_from=resume_from)
    return model, history.history["loss"]


@pytest.mark.parametrize("kind", ["memory", "stream", "web"])
def test_two_ranks_learn_as_one_and_go_on_within_an_epoch(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if kind == "web":
        write_shards(pytest.importorskip("webdataset"))
    one, losses = trained(kind, 1)
    two, found = trained(kind, 2, save_at=tmp_path / "cut.h5")
    assert found == pytest.approx(losses, rel=1e-5)
    assert_same_weights(two, one, atol=1e-4)
    again, _ = trained(kind, 2, resume_from=tmp_path / "cut.h5")
    assert_same_weights(again, two)
