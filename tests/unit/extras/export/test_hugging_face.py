"""Hugging Face models: their dict batches, their own loss, their data sets, their export."""

import copy

import numpy as np
import pytest
import torch
import torchmetrics
from torch.utils.data import Dataset

import fitkit

transformers = pytest.importorskip("transformers")
sklearn_metrics = pytest.importorskip("sklearn.metrics")

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
    expected = [
        sum(w * x for w, x in zip(weights, part, strict=True)) for part in (losses[:3], losses[3:])
    ]
    assert history["loss"] == pytest.approx(expected, rel=1e-5)
    for found, wanted in zip(model.net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)
    assert 0 <= history["accuracy"][-1] <= 1


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
@pytest.mark.slow
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


# ------------------------------------------------------------------ metrics beside the own loss


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 12}


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=12, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0,
        eos_token_id=0, initializer_range=0.5,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert_for_tokens():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        intermediate_size=16, max_position_embeddings=8, num_labels=5, **SMALL
    )
    return transformers.BertForTokenClassification(config)


def texts(classes):
    """Batches of 5, 5 and 2 texts of 6, 7 and 6 tokens, with places that don't count."""
    draw = torch.Generator().manual_seed(1)
    batches = []
    for count, length in ((5, 6), (5, 7), (2, 6)):
        ids = torch.randint(12, (count, length), generator=draw)
        labels = ids % classes
        labels[torch.rand(labels.shape, generator=draw) < 0.3] = -100
        labels[0] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def counted_by_hand(net, batches, shift):
    """The logits that count and their labels, of all batches."""
    rows, wanted = [], []
    for batch in batches:
        with torch.no_grad():
            logits = net.eval()(input_ids=batch["input_ids"]).logits
        logits, labels = logits.numpy(), batch["labels"].numpy()
        logits, labels = logits[:, : logits.shape[1] - shift], labels[:, shift:]
        rows.append(logits[labels != -100])
        wanted.append(labels[labels != -100])
    return np.concatenate(rows), np.concatenate(wanted)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize(("make", "classes", "shift"), [(gpt2, 12, 1), (bert_for_tokens, 5, 0)])
def test_metrics_by_name_count_what_the_nets_own_loss_counts(make, classes, shift, precision):
    seen = []

    def as_it_came(prediction, target):
        seen.append((prediction.shape[:2], target.shape))
        return 0.0

    batches = texts(classes)
    model = fitkit.Model(make())
    metrics = ["accuracy", "perplexity", "f1", torchmetrics.classification.MulticlassAccuracy(
        classes, average="micro", ignore_index=-100), as_it_came]  # fmt: skip
    model.compile("sgd", metrics=metrics, precision=precision, learning_rate=1e-3)
    found = model.evaluate(batches, verbose=0, return_dict=True)
    # The same weights in the same precision, by hand.
    logits, labels = counted_by_hand(model.net.float(), batches, shift)
    right = (logits.argmax(1) == labels).mean()
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    entropy = -logs[np.arange(len(labels)), labels].mean()
    close = 1e-6 if precision == "32-true" else 0.04
    assert found["accuracy"] == pytest.approx(right, abs=close)
    assert found["multiclass_accuracy"] == pytest.approx(right, abs=close)
    assert np.log(found["perplexity"]) == pytest.approx(entropy, abs=max(close, 1e-5))
    assert found["f1"] == pytest.approx(
        sklearn_metrics.f1_score(labels, logits.argmax(1), average="macro"), abs=max(close, 1e-6)
    )
    assert set(seen) == {(shape, shape) for shape in [(5, 6), (5, 7), (2, 6)]}


def test_a_language_models_accuracy_in_fit_is_of_the_next_token():
    batches = texts(12)
    model = fitkit.Model(gpt2())
    model.compile("sgd", metrics=["accuracy"], learning_rate=1e-12)
    model.net.eval()
    for module in model.net.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    logits, labels = counted_by_hand(model.net, batches, 1)
    history = model.fit(batches, verbose=0, validation_data=batches).history
    right = pytest.approx((logits.argmax(1) == labels).mean())
    assert history["accuracy"] == [right] and history["val_accuracy"] == [right]


def test_a_sequences_class_stays_beside_its_label():
    model = fitkit.Model(bert())
    model.compile("sgd", metrics=["accuracy"])
    found = model.evaluate(Rows(), batch_size=8, verbose=0, return_dict=True)
    rows = [Rows()[index] for index in range(len(IDS))]
    inputs = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    with torch.no_grad():
        chosen = model.net.eval()(**inputs).logits.argmax(1)
    assert found["accuracy"] == pytest.approx((chosen == inputs["labels"]).float().mean().item())
