"""keras-hub's networks, built from a configuration: as Keras trains them, on two processes too."""

import os

import numpy as np
import pytest

import fitkit

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras")
if keras.backend.backend() != "torch":
    pytest.skip("Keras runs on another backend", allow_module_level=True)
models = pytest.importorskip("keras_hub").models

pytestmark = pytest.mark.timeout(120)

ROWS = 16
TOKENS = np.random.default_rng(0).integers(1, 50, size=(ROWS, 8))
PADDING = (np.arange(8) < (3 + np.arange(ROWS) % 6)[:, None]).astype("int32")
SMALL = {
    "vocabulary_size": 50, "num_layers": 2, "num_heads": 2, "hidden_dim": 16,
    "intermediate_dim": 32, "max_sequence_length": 8, "dropout": 0.0,
}  # fmt: skip


def bert():
    backbone = models.BertBackbone(**SMALL)
    x = {"token_ids": TOKENS, "segment_ids": TOKENS * 0, "padding_mask": PADDING}
    net = models.BertTextClassifier(backbone, num_classes=3, preprocessor=None, dropout=0.0)
    return net, x, np.arange(ROWS) * 7 % 3


def gpt2():
    net = models.GPT2CausalLM(models.GPT2Backbone(**SMALL), preprocessor=None)
    return net, {"token_ids": TOKENS, "padding_mask": PADDING}, np.roll(TOKENS, -1, 1)


@pytest.mark.parametrize("make", [bert, gpt2])
def test_a_network_of_keras_hub_trains_as_by_keras(make):
    logs, weights = [], []
    for devices in (0, 1, 2):
        keras.utils.set_random_seed(3)
        net, x, y = make()
        settings = {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
        options = {"epochs": 2, "shuffle": False, "verbose": 0, "validation_data": (x, y)}
        if devices:
            model = fitkit.Model(net)
            model.compile("sgd", learning_rate=0.1, accelerator="cpu", devices=devices, **settings)
            history = model.fit(x, y, batch_size=8 // devices, **options)
        else:  # keras-hub's own compile adds metrics, its fit reads by TensorFlow
            keras.Model.compile(net, keras.optimizers.SGD(0.1), **settings)
            history = keras.Model.fit(net, x, y, batch_size=8, **options)
        logs.append(history.history)
        weights.append([variable.numpy() for variable in net.variables])
    for found in logs[1:]:
        for name in ("loss", "val_loss"):
            assert found[name] == pytest.approx(logs[0][name], abs=1e-5)
    for found in weights[1:]:
        assert max(abs(a - b).max() for a, b in zip(weights[0], found, strict=True)) < 1e-6
