"""Uneven sequences in batches: padding, packing, batches of like lengths."""

import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import fitkit
from fitkit.data import BucketBatchSampler, pack, pad
from fitkit.errors import ArgumentTypeError, ConfigurationError
from tests.nets import normal

LENGTHS = [3, 7, 2, 5, 5, 1, 6, 4, 2, 7, 3, 5]


def documents(count=12):
    generator = torch.Generator().manual_seed(0)
    sizes = [LENGTHS[number % len(LENGTHS)] for number in range(count)]
    return [torch.randint(1, 20, (size + 1,), generator=generator) for size in sizes]


# ---------------------------------------------------------------------- pad


def test_dicts_are_padded_with_a_mask_and_ignored_labels():
    samples = [
        {"input_ids": [5, 6, 7], "labels": np.array([5, 6, 7]), "kind": 1},
        {"input_ids": [8], "labels": np.array([8]), "kind": 0},
    ]
    batch = pad(9)(samples)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch["labels"].tolist() == [[5, 6, 7], [8, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["kind"].tolist() == [1, 0]


def test_what_there_is_of_masks_is_padded_with_zeros_on_the_left_too():
    samples = [
        {"input_ids": [5, 6], "attention_mask": [1, 1], "token_type_ids": [1, 1], "labels": 1},
        {"input_ids": [8], "attention_mask": [1], "token_type_ids": [1], "labels": 0},
    ]
    batch = pad(9, side="left", multiple_of=4)(samples)
    assert batch["input_ids"].tolist() == [[9, 9, 5, 6], [9, 9, 9, 8]]
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1], [0, 0, 0, 1]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 1, 1], [0, 0, 0, 1]]
    assert batch["labels"].tolist() == [1, 0]


def test_tuples_are_padded_with_their_lengths_if_asked():
    samples = [(torch.ones(3, 2), torch.tensor([1, 2, 3])), (torch.ones(1, 2), torch.tensor([4]))]
    x, y = pad(-1.0)(samples)
    assert x.shape == (2, 3, 2)
    assert x[1, 1:].eq(-1).all()
    assert y.tolist() == [[1, 2, 3], [4, -100, -100]]
    (x, lengths), y = pad(lengths=True)(samples)
    assert lengths.tolist() == [3, 1]
    assert pad()([torch.ones(2), torch.ones(1)]).tolist() == [[1, 1], [1, 0]]


def test_entries_of_one_size_are_joined_as_they_are():
    samples = [{"input_ids": [1] * n, "pixels": torch.ones(3, 4, 4)} for n in (2, 5)]
    assert pad(multiple_of=8)(samples)["pixels"].shape == (2, 3, 4, 4)


def test_padding_that_would_count_is_refused():
    samples = [(torch.ones(3), torch.ones(3)), (torch.ones(1), torch.ones(1))]
    with pytest.raises(ConfigurationError, match=r"would count in the loss.*labels=0\.0"):
        pad()(samples)
    assert pad(labels=0.0)(samples)[1].tolist() == [[1, 1, 1], [1, 0, 0]]
    with pytest.raises(ConfigurationError, match="without a sequence"):
        pad()([(1, 2), (3, 4)])
    with pytest.raises(ConfigurationError, match="different entries"):
        pad()([{"input_ids": [1]}, {"input_ids": [1], "labels": [1]}])
    with pytest.raises(ConfigurationError, match="side"):
        pad(side="top")


def test_padded_batches_train_as_each_sequence_alone():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.head = nn.Embedding(20, 4), nn.Linear(4, 20)

        def forward(self, tokens):
            return self.head(self.embedding(tokens)).mT

    data = [(document[:-1], document[1:]) for document in documents()]
    one, other = Tagger(), Tagger()
    model = fitkit.Model(one)
    model.compile("sgd", "cross_entropy", learning_rate=0.5, accelerator="cpu", devices=1)
    model.fit(DataLoader(data, 4, collate_fn=pad()), epochs=2, verbose=0)
    optimizer = torch.optim.SGD(other.parameters(), 0.5)
    for _ in range(2):
        for start in range(0, 12, 4):
            part = data[start : start + 4]
            tokens = sum(len(x) for x, _ in part)
            optimizer.zero_grad()
            losses = [F.cross_entropy(other(x[None]), y[None], reduction="sum") for x, y in part]
            (sum(losses) / tokens).backward()
            optimizer.step()
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=1e-6)


# ---------------------------------------------------------------------- pack


def test_documents_are_packed_whole_and_apart():
    found, targets = pack(6)([torch.arange(1, 5), torch.arange(5, 8), torch.arange(8, 13)])
    assert found["input_ids"].tolist() == [[8, 9, 10, 11, 5, 6], [1, 2, 3, 0, 0, 0]]
    assert targets.tolist() == [[9, 10, 11, 12, 6, 7], [2, 3, 4, -100, -100, -100]]
    assert found["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 1, 2]]


def test_no_label_of_a_dict_is_asked_for_by_another_document():
    batch = pack(5)([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5], "labels": [-100, 5]}][:1] * 2)
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, -100]] * 2
    batch = pack(5)([{"input_ids": [4, 5, 6], "labels": [-100, 5, 6], "weight": [1.0, 2.0, 3.0]}])
    assert batch["labels"].tolist() == [[-100, 5, 6, -100, -100]]
    assert batch["weight"].tolist() == [[1, 2, 3, 0, 0]]


def test_a_long_document_is_cut_and_nothing_is_lost():
    found, targets = pack(4)([torch.arange(12)])
    assert sorted(targets[targets != -100].tolist()) == list(range(1, 12))
    assert found["position_ids"].max() == 3


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_a_mask_lets_positions_see_their_document_alone(mask):
    found, _ = pack(6, mask=mask)([(torch.ones(2), torch.ones(2)), (torch.ones(3), torch.ones(3))])
    (allowed,) = found["attention_mask"][0]
    blocks = torch.block_diag(torch.ones(3, 3), torch.ones(2, 2), torch.ones(1, 1)).bool()
    assert allowed.equal(blocks.tril() if mask == "causal" else blocks)


def test_rows_can_be_at_least_so_many_and_empty_documents_are_nothing():
    found, targets = pack(4, rows=3)([torch.arange(3), torch.arange(1)])
    assert found["input_ids"].shape == targets.shape == (3, 4)
    assert (targets != -100).sum() == 2
    assert pack(4)([torch.arange(1)])[1].eq(-100).all()


def test_samples_that_are_no_documents_are_refused():
    with pytest.raises(ConfigurationError, match="got a sample with the shapes"):
        pack(4)([torch.ones(2, 3)])
    with pytest.raises(ConfigurationError, match="got a sample with the shapes"):
        pack(4)([{"input_ids": [1, 2], "labels": [1]}])
    with pytest.raises(ConfigurationError, match="got a sample with the shapes"):
        pack(4)([{"tokens": [1, 2]}])
    with pytest.raises(ConfigurationError, match="mask"):
        pack(4, mask="blocks")


def test_collates_go_to_worker_processes():
    for collate in (pad(3), pack(4, mask="full")):
        assert pickle.loads(pickle.dumps(collate)).keywords == collate.keywords


@pytest.mark.parametrize(
    ("attention", "mask"), [("sdpa", None), ("eager", None), ("sdpa", "causal")]
)
def test_packed_documents_give_a_hugging_face_model_s_loss_of_each_alone(attention, mask):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    net = transformers.LlamaForCausalLM(config).eval()
    data = [{"input_ids": document.tolist()} for document in documents()]
    batch = pack(16, mask=mask)(data)
    assert batch["input_ids"].shape[0] > 2
    packed = net(**batch).loss
    total = tokens = 0
    for sample in data:
        ids = torch.tensor([sample["input_ids"]])
        total += net(input_ids=ids, labels=ids).loss * (ids.shape[1] - 1)
        tokens += ids.shape[1] - 1
    torch.testing.assert_close(packed, total / tokens, rtol=1e-6, atol=0)


# ---------------------------------------------------------------------- batches of like lengths


def sampler(**arguments):
    lengths = (normal(1000).abs() * 50).long() + 1
    return lengths, BucketBatchSampler(lengths.tolist(), **arguments)


@pytest.mark.parametrize("arguments", [{"batch_size": 16}, {"max_tokens": 2000}])
def test_each_sample_comes_once_in_batches_of_like_lengths(arguments):
    lengths, batches = sampler(window=10, **arguments)
    found = list(batches)
    assert sorted(index for batch in found for index in batch) == list(range(1000))
    assert len(found) == len(batches)
    padded = sum(len(batch) * int(lengths[batch].max()) for batch in found)
    by_chance = 16 * sum(int(part.max()) for part in lengths.split(16))
    assert padded / lengths.sum() < 1.3 < by_chance / lengths.sum()
    if "max_tokens" in arguments:
        assert all(len(batch) * int(lengths[batch].max()) <= 2000 for batch in found)
    assert found == list(batches)
    batches.set_epoch(1)
    assert found != list(batches)
    assert len(list(batches)) == len(batches)


def test_batches_can_be_whole_and_in_order():
    _, batches = sampler(batch_size=64, drop_last=True, shuffle=False)
    assert [len(batch) for batch in batches] == [64] * 15
    assert len(batches) == 15


def test_arguments_of_the_sampler_are_checked():
    with pytest.raises(ConfigurationError, match="Give one of them"):
        BucketBatchSampler([1, 2])
    with pytest.raises(ConfigurationError, match="more than max_tokens=3"):
        BucketBatchSampler([1, 4], max_tokens=3)
    with pytest.raises(ArgumentTypeError, match="each sample's length"):
        BucketBatchSampler(["a"], 2)
    with pytest.raises(ArgumentTypeError, match="each sample's length"):
        BucketBatchSampler([], 2)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.positions = nn.Embedding(20, 4), nn.Embedding(16, 4)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(4, 20))

    def forward(self, input_ids, position_ids):
        return self.head(self.embedding(input_ids) + self.positions(position_ids)).mT


def loader():
    data = documents(60)
    batches = BucketBatchSampler([len(document) for document in data], 8, seed=3)
    return DataLoader(data, batch_sampler=batches, collate_fn=pack(16))


def compiled(devices=1, strategy="auto"):
    model = fitkit.Model(Tagger())
    model.compile("adamw", "cross_entropy", learning_rate=0.01)
    model.compile(accelerator="cpu", devices=devices, strategy=strategy)
    return model


def test_a_training_cut_within_an_epoch_goes_on_bit_for_bit(tmp_path):
    class Cut(fitkit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            if self.model.global_step == 11:
                self.model.save(tmp_path / "cut.h5")

    fitkit.set_seed(0)
    whole = compiled()
    whole.fit(loader(), epochs=2, verbose=0, callbacks=[Cut()])
    resumed = compiled()
    resumed.fit(loader(), epochs=2, verbose=0, resume_from=tmp_path / "cut.h5")
    torch.testing.assert_close(whole.state_dict(), resumed.state_dict(), rtol=0, atol=0)


def test_a_hugging_face_data_set_is_split_for_validation():
    datasets = pytest.importorskip("datasets")
    columns = {"x": normal(40, 4).tolist(), "label": (torch.arange(40) % 3).tolist()}
    whole = datasets.Dataset.from_dict(columns).with_format("torch")

    class Own(fitkit.Model):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch["x"]), batch["label"])

        validation_step = training_step

    torch.manual_seed(0)
    model = Own(nn.Linear(4, 3))
    model.compile("sgd", accelerator="cpu", devices=1)
    history = model.fit(whole, validation_split=0.25, batch_size=8, verbose=0)
    last = whole.select(range(30, 40))[:]
    assert model.global_step == 4
    loss = F.cross_entropy(model(last["x"]), last["label"]).item()
    assert history.history["val_loss"] == pytest.approx([loss], rel=1e-5)
