"""Hugging Face models: their dict batches, their own loss, their data sets, their export."""

import copy

import pytest
import torch
from torch.utils.data import Dataset

import fitkit

transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 30, (20, 6), generator=torch.Generator().manual_seed(0))


def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=8, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


class Rows(Dataset):
    def __len__(self):
        return len(IDS)

    def __getitem__(self, index):
        ids = IDS[index]
        return {"input_ids": ids, "attention_mask": (ids > 2).long(), "labels": ids[0] % 3}


def rows_of_datasets():
    datasets = pytest.importorskip("datasets")
    items = [Rows()[index] for index in range(len(IDS))]
    columns = {name: [item[name].tolist() for item in items] for name in items[0]}
    return datasets.Dataset.from_dict(columns).with_format("torch")


@pytest.mark.parametrize("rows", [Rows, rows_of_datasets], ids=["torch", "datasets"])
def test_it_learns_by_its_own_loss_as_in_a_plain_loop(rows):
    plain = bert()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        for start in range(0, 20, 8):
            batch = [Rows()[index] for index in range(start, min(start + 8, 20))]
            inputs = {name: torch.stack([row[name] for row in batch]) for name in batch[0]}
            loss = plain(**inputs).loss
            losses.append(float(loss.detach()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model = fitkit.Model(bert())
    model.compile("sgd", metrics=["accuracy"], learning_rate=0.1)
    history = model.fit(rows(), batch_size=8, epochs=2, shuffle=False, verbose=0).history
    weights = [8 / 20, 8 / 20, 4 / 20]
    expected = [sum(w * x for w, x in zip(weights, part, strict=True))
                for part in (losses[:3], losses[3:])]
    assert history["loss"] == pytest.approx(expected, rel=1e-5)
    for found, wanted in zip(model.net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)
    assert 0 <= history["accuracy"][-1] <= 1


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_it_exports_with_inputs_by_keyword(tmp_path, suffix):
    if suffix == "onnx":
        pytest.importorskip("onnxscript")
    model, path = fitkit.Model(bert()), tmp_path / f"bert.{suffix}"
    example = {"input_ids": IDS[:2], "attention_mask": torch.ones_like(IDS[:2])}
    model.export(path, example=example)
    given = {"input_ids": IDS[:5], "attention_mask": (IDS[:5] > 2).long()}
    with torch.no_grad():
        wanted = copy.deepcopy(model.net).eval()(**given).logits
    if suffix == "pt2":
        found = torch.export.load(path).module()(**given).logits
    else:
        session = pytest.importorskip("onnxruntime").InferenceSession(str(path))
        found = session.run(None, {name: value.numpy() for name, value in given.items()})[0]
        found = torch.as_tensor(found)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
