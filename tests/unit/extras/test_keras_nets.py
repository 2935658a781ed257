"""Networks of Keras train as Keras's own `fit` trains them: the same losses, weights and state."""

import copy
import functools
import os
import pickle
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch

import fitkit
from fitkit.extras.launchers.workers import end_workers

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras")
if keras.backend.backend() != "torch":
    pytest.skip("Keras runs on another backend", allow_module_level=True)
kl, ops = keras.layers, keras.ops

ROWS = 64
RATE = {"learning_rate": 0.05, "momentum": 0.9}


def numbers(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape).astype("float32")


X, Y, STEPS = numbers(ROWS, 8), numbers(ROWS, 1), numbers(ROWS, 6, 4)
IMAGES, TOKENS = numbers(ROWS, 8, 8, 3), np.arange(ROWS * 6).reshape(ROWS, 6) * 7 % 11 + 1


def sequential(*layers, shape=(8,)):
    return keras.Sequential([keras.Input(shape), *layers, kl.Dense(1)])


class Subclassed(keras.Model):
    """A network whose layers are made in its constructor and built by its first batch."""

    def __init__(self, width):
        super().__init__()
        self.first, self.drop = kl.Dense(width, activation="tanh"), kl.Dropout(0.3, seed=4)
        self.last = kl.Dense(1)

    def call(self, inputs, training=False):
        return self.last(self.drop(self.first(inputs), training=training))


class Scaled(kl.Layer):
    """A layer of one's own, with a weight, a loss and a counter that doesn't learn."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, inputs, training=False):
        if training:
            self.calls.assign(self.calls + 1)
        self.add_loss(0.01 * ops.mean(ops.abs(inputs * self.scale)))
        return inputs * self.scale + (0.1 if training else 0.0)


class Counting(kl.Layer):
    """A layer that measures what goes through it, and more in training."""

    def __init__(self):
        super().__init__()
        self.size = keras.metrics.Mean(name="size")
        self.total = keras.metrics.Sum(name="total")

    def call(self, inputs, training=False):
        self.size.update_state(ops.mean(inputs, -1))
        self.total.update_state(ops.sum(inputs) * (2.0 if training else 1.0))
        return inputs


class Configured(kl.Layer):
    """A layer whose numbers follow settings of Keras in the process that calls it."""

    def call(self, inputs):
        first = keras.config.image_data_format() == "channels_first"
        return inputs * (2.0 if first else 1.0) + keras.config.epsilon()


class Inferring(keras.Model):
    """A network whose call takes no training flag, so that its layers infer."""

    def __init__(self):
        super().__init__()
        self.drop, self.last = kl.Dropout(0.5, seed=1), kl.Dense(1)

    def call(self, inputs):
        return self.last(self.drop(inputs))


class OneWay(keras.Model):
    """A network of several inputs in a dict, that isn't functional."""

    def __init__(self):
        super().__init__()
        self.a, self.b = kl.Dense(3), kl.Dense(3)

    def call(self, inputs):
        return ops.sum(self.a(inputs["left"]) * self.b(inputs["right"]), -1, keepdims=True)


class Backbone(keras.Model):
    """A network of inputs and outputs in a subclass, as keras-hub's backbones are."""

    def __init__(self, width):
        tokens, mask = keras.Input((6,), name="tokens"), keras.Input((6,), name="mask")
        steps = kl.Embedding(12, width, name="embedding")(tokens)
        steps = kl.MultiHeadAttention(2, width)(steps, steps, attention_mask=mask[:, None] > 0)
        pooled = kl.LayerNormalization()(steps)[:, 0]
        outputs = {"steps": steps, "pooled": kl.Dense(width, activation="tanh")(pooled)}
        super().__init__(inputs={"tokens": tokens, "mask": mask}, outputs=outputs)
        self.width = width


class OnBackbone(keras.Model):
    """A task over a backbone, as keras-hub's classifiers are."""

    def __init__(self, width):
        backbone, head = Backbone(width), kl.Dense(1, name="head")
        inputs = backbone.input
        super().__init__(inputs=inputs, outputs=head(backbone(inputs)["pooled"]))
        self.backbone, self.head = backbone, head


def two_inputs():
    left, right = keras.Input((8,), name="left"), keras.Input((8,), name="right")
    joined = kl.Concatenate()([kl.Dense(4)(left), kl.Dense(4)(right)])
    return keras.Model([left, right], kl.Dense(1)(joined))


def two_outputs():
    inputs = keras.Input((8,))
    shared = kl.Dense(8, activation="relu", kernel_regularizer="l2")(inputs)
    return keras.Model(inputs, [kl.Dense(1, name="a")(shared), kl.Dense(2, name="b")(shared)])


def dict_outputs():
    inputs = keras.Input((8,))
    shared = kl.Dense(8, activation="relu")(inputs)
    return keras.Model(inputs, {"a": kl.Dense(1)(shared), "b": kl.Dense(2)(shared)})


def shared_layer():
    left, right, dense = keras.Input((8,)), keras.Input((8,)), kl.Dense(4, kernel_regularizer="l1")
    return keras.Model([left, right], kl.Dense(1)(kl.Subtract()([dense(left), dense(right)])))


def frozen():
    net = sequential(kl.Dense(8, kernel_regularizer="l2"), kl.BatchNormalization(), kl.Dense(4))
    net.layers[0].trainable = net.layers[1].trainable = False
    return net


def adapted():
    layer = kl.Normalization()
    layer.adapt(X * 3 + 1)
    return sequential(layer, kl.Dense(4, activation="gelu"))


def nested():
    inner = keras.Sequential([kl.Dense(4, use_bias=False), kl.BatchNormalization(), kl.ReLU()])
    return sequential(inner, kl.Dropout(0.2, seed=9))


def masked():
    return keras.Sequential([
        kl.Embedding(13, 4, mask_zero=True), kl.LSTM(5, return_sequences=True), kl.Dense(1)
    ])  # fmt: skip


def two_masked():
    inputs = keras.Input((6,))
    steps = kl.Embedding(13, 4, mask_zero=True)(inputs)
    whole = kl.GlobalAveragePooling1D()(steps)
    return keras.Model(inputs, [kl.Dense(1, name="each")(steps), kl.Dense(2, name="all")(whole)])


ENDING = TOKENS.copy()
ENDING[:, 4:] = 0
ENDING[::2, 3] = 0  # each batch of 16 counts as many steps
UNEVEN = np.where(np.arange(6) < 1 + (np.arange(ROWS) % 6)[:, None], TOKENS, 0)

NETS = {
    "dense": (lambda: sequential(kl.Dense(16, activation="relu")), X, Y),
    "regularizers": (
        lambda: sequential(kl.Dense(16, kernel_regularizer="l2", bias_regularizer="l1")), X, Y
    ),
    "activity": (lambda: sequential(kl.Dense(16, activity_regularizer="l2")), X, Y),
    "batch norm": (
        lambda: sequential(kl.Dense(16, use_bias=False), kl.BatchNormalization(), kl.ReLU()), X, Y
    ),
    "noise": (
        lambda: sequential(kl.GaussianNoise(0.3, seed=3), kl.Dense(9), kl.Dropout(0.5, seed=1)),
        X, Y,
    ),
    "constraints": (
        lambda: sequential(
            kl.Dense(16, kernel_constraint=keras.constraints.MaxNorm(0.5)),
            kl.Dense(4, kernel_constraint="non_neg"),
        ), X, Y,
    ),
    "convolutions": (
        lambda: sequential(
            kl.Conv2D(4, 3, use_bias=False), kl.BatchNormalization(), kl.ReLU(), kl.MaxPool2D(),
            kl.SpatialDropout2D(0.2, seed=2), kl.GlobalAveragePooling2D(), shape=(8, 8, 3),
        ), IMAGES, Y,
    ),
    "augmentation": (
        lambda: sequential(
            kl.RandomFlip(seed=5), kl.Conv2D(2, 3), kl.Flatten(), shape=(8, 8, 3)
        ), IMAGES, Y,
    ),
    "recurrent": (
        lambda: sequential(kl.LSTM(5, recurrent_dropout=0.2, seed=6), shape=(6, 4)), STEPS, Y
    ),
    "attention": (
        lambda: sequential(
            kl.Dense(4), kl.LayerNormalization(), kl.GlobalAveragePooling1D(), shape=(6, 4)
        ), STEPS, Y,
    ),
    "embedding": (
        lambda: keras.Sequential([kl.Embedding(13, 4), kl.GRU(4), kl.Dense(1)]), TOKENS, Y
    ),
    "mask": (masked, ENDING, numbers(ROWS, 6, 1)),
    "two outputs, one masked": (two_masked, ENDING, [numbers(ROWS, 6, 1), numbers(ROWS, 2)]),
    "spectral": (
        lambda: sequential(kl.SpectralNormalization(kl.Dense(6)), kl.Dense(2)), X, Y
    ),
    "subclass": (lambda: Subclassed(6), X, Y),
    "own layer": (lambda: sequential(kl.Dense(4), Scaled()), X, Y),
    "no training flag": (Inferring, X, Y),
    "lone layer": (lambda: kl.Dense(1, kernel_regularizer="l2"), X, Y),
    "two inputs": (two_inputs, [X, X[::-1].copy()], Y),
    "inputs by name": (two_inputs, {"left": X, "right": X[::-1].copy()}, Y),
    "dict input": (OneWay, {"left": X, "right": X[::-1].copy()}, Y),
    "two outputs": (two_outputs, X, [Y, numbers(ROWS, 2)]),
    "dict outputs": (dict_outputs, X, {"a": Y, "b": numbers(ROWS, 2)}),
    "shared layer": (shared_layer, [X, X[::-1].copy()], Y),
    "functional subclasses": (
        lambda: OnBackbone(4), {"tokens": TOKENS, "mask": (TOKENS > 3) * 1}, Y
    ),
    "frozen": (frozen, X, Y),
    "normalization": (adapted, X * 3 + 1, Y),
    "nested": (nested, X, Y),
    "metrics": (lambda: sequential(kl.Dense(4), Counting()), X, Y),
    "torch module": (
        lambda: sequential(kl.TorchModuleWrapper(torch.nn.BatchNorm1d(8)), kl.Dense(4)), X, Y
    ),
}  # fmt: skip


def made(name):
    keras.utils.set_random_seed(7)
    return NETS[name][0]()


def as_keras_model(net):
    """A network that has Keras's `fit`; a lone layer gets one."""
    return net if isinstance(net, keras.Model) else keras.Sequential([net])


def trained_by_keras(name, epochs=3):
    net, (_, x, y) = as_keras_model(made(name)), NETS[name]
    net.compile(keras.optimizers.SGD(**RATE), "mse", metrics=metrics_for(y))
    first = as_rows(x, slice(20)), as_rows(y, slice(20))
    fitted = net.fit(
        x, y, batch_size=16, epochs=epochs, shuffle=False, validation_data=first, verbose=0
    )
    return net, fitted.history


def metrics_for(y):
    if isinstance(y, list):
        return [["mae"], ["mae"]]
    return {name: ["mae"] for name in y} if isinstance(y, dict) else ["mae"]


def compiled(net, y=Y, **settings):
    model = fitkit.Model(net)
    model.compile(
        {"name": "sgd", "momentum": 0.9}, "mse", metrics=metrics_for(y), learning_rate=0.05,
        **settings,
    )  # fmt: skip
    return model


def as_rows(data, rows):
    if isinstance(data, list):
        return [part[rows] for part in data]
    return {k: part[rows] for k, part in data.items()} if isinstance(data, dict) else data[rows]


def differences(one, other):
    pairs = zip(one.variables, other.variables, strict=True)
    return [float((a.value - b.value).detach().abs().max()) for a, b in pairs]


@pytest.mark.parametrize("name", NETS)
def test_a_network_trains_as_by_keras(name):
    _, x, y = NETS[name]
    theirs, expected = trained_by_keras(name)
    ours = made(name)
    first = as_rows(x, slice(20)), as_rows(y, slice(20))
    model = compiled(ours, y)
    found = model.fit(
        x, y, batch_size=16, epochs=3, shuffle=False, validation_data=first, verbose=0
    ).history

    if "mask" in name:  # ours is a mean over the steps that count, whatever the batches
        expected = {k: v for k, v in expected.items() if not k.startswith("val_")}
    if name == "metrics":  # Keras gives a validation's sum for the training's, too
        assert expected.pop("total") == expected["val_total"]
    assert set(expected) <= set(found)
    for log in expected:
        assert found[log] == pytest.approx(expected[log], abs=1e-5, rel=1e-5), log
    assert max(differences(theirs, as_keras_model(ours))) < 1e-5


def test_single_batches_are_keras_s():
    theirs, ours = made("regularizers"), made("regularizers")
    theirs.compile(keras.optimizers.SGD(**RATE), "mse")
    model = compiled(ours)
    for start in (0, 16, 32):
        rows = slice(start, start + 16)
        expected = theirs.train_on_batch(X[rows], Y[rows])
        assert model.train_on_batch(X[rows], Y[rows])[0] == pytest.approx(expected, abs=1e-6)
    assert model.test_on_batch(X, Y)[0] == pytest.approx(theirs.test_on_batch(X, Y), abs=1e-6)
    assert np.allclose(model.predict_on_batch(X), theirs.predict_on_batch(X), atol=1e-6)
    assert max(differences(theirs, ours)) < 1e-6


def test_predictions_have_the_structure_that_the_network_returns():
    listed = compiled(made("two outputs"), [Y, Y]).predict(X, batch_size=20, verbose=0)
    assert [part.shape for part in listed] == [(ROWS, 1), (ROWS, 2)]
    assert set(compiled(made("dict outputs"), {"a": Y}).predict(X, verbose=0)) == {"a", "b"}


def test_the_network_is_the_model_s_net_and_keeps_keras_s_verbs(tmp_path):
    net = made("batch norm")
    model = compiled(net)
    model.fit(X, Y, verbose=0)
    assert model.net is net
    assert model.layers == net.layers
    lines = []
    net.summary(print_fn=lambda line, **_: lines.append(line))
    assert lines
    net.save(tmp_path / "net.keras")
    again = keras.models.load_model(tmp_path / "net.keras")
    expected = model.predict(X, verbose=0)
    assert np.allclose(again.predict(X, verbose=0), expected, atol=1e-6)
    assert np.allclose(fitkit.Model(again).predict(X, verbose=0), expected, atol=1e-6)


@pytest.mark.parametrize("uneven", [False, True])
def test_an_evaluation_is_exact_whatever_the_batch_size(uneven):
    tokens = UNEVEN if uneven else ENDING
    model = compiled(made("mask"))
    y = NETS["mask"][2]
    whole = model.evaluate(tokens, y, batch_size=ROWS, verbose=0)
    assert model.evaluate(tokens, y, batch_size=7, verbose=0) == pytest.approx(whole, rel=1e-5)
    counts = tokens != 0
    errors = (model.predict(tokens, verbose=0) - y)[counts]
    assert whole == pytest.approx([(errors**2).mean(), abs(errors).mean()], rel=1e-5)
    model = compiled(made("activity"))
    whole = model.evaluate(X, Y, batch_size=ROWS, verbose=0)
    assert model.evaluate(X, Y, batch_size=7, verbose=0) == pytest.approx(whole, rel=1e-5)


def test_an_adapted_loss_weighs_the_samples_of_a_mask():
    weights = np.linspace(0, 2, ROWS * 6).astype("float32").reshape(ROWS, 6)
    y = NETS["mask"][2]
    theirs, ours = made("mask"), made("mask")
    theirs.compile(keras.optimizers.SGD(**RATE), "mse")
    expected = theirs.evaluate(ENDING, y, batch_size=ROWS, sample_weight=weights, verbose=0)
    found = compiled(ours).evaluate(ENDING, y, sample_weight=weights, batch_size=ROWS, verbose=0)
    assert found[0] == pytest.approx(expected, rel=1e-5)


def test_labels_of_a_masked_network_count_as_in_keras():
    labels, found = TOKENS % 3, []
    for by_keras in (True, False):
        keras.utils.set_random_seed(2)
        net = keras.Sequential([kl.Embedding(13, 4, mask_zero=True), kl.Dense(3, "softmax")])
        model = net if by_keras else fitkit.Model(net)
        optimizer = keras.optimizers.SGD(**RATE)
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
        logs = model.fit(ENDING, labels, batch_size=16, epochs=2, shuffle=False, verbose=0).history
        found.append((net, logs))
    (theirs, expected), (ours, logs) = found
    assert max(differences(theirs, ours)) < 1e-5
    for name in expected:
        assert logs[name] == pytest.approx(expected[name], abs=1e-5)


def over_classes(y_true, y_pred):
    """A mean that a user takes over what counts, where the network's mask says so, too."""
    values = keras.losses.sparse_categorical_crossentropy(y_true, y_pred)
    counts = ops.cast(y_true > 0, values.dtype)
    return ops.sum(values * counts) / ops.sum(counts)


@pytest.mark.parametrize(
    ("loss", "units", "y"),
    [
        (over_classes, 3, TOKENS % 3),
        ("dice", 1, (numbers(ROWS, 6, 1) > 0) * 1.0),  # Keras's, which no name of ours has
    ],
)
def test_a_loss_that_is_one_number_for_a_batch_is_keras_s_also_with_a_mask(loss, units, y):
    found = []
    for by_keras in (True, False):
        keras.utils.set_random_seed(2)
        last = kl.Dense(units, "softmax" if units > 1 else "sigmoid")
        net = keras.Sequential([kl.Embedding(13, 4, mask_zero=True), last])
        model = net if by_keras else fitkit.Model(net)
        metrics = ["categorical_hinge"] if units == 1 else []
        model.compile(keras.optimizers.SGD(**RATE), loss, metrics=metrics)
        logs = model.fit(ENDING, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
        found.append((net, logs))
    (theirs, expected), (ours, logs) = found
    assert max(differences(theirs, ours)) < 1e-5
    assert logs.keys() == expected.keys()
    for name in expected:
        assert logs[name] == pytest.approx(expected[name], abs=1e-5)


# ---------------------------------------------------------------------- cut in parts


PARTS = {
    "regularizers": (X, Y),
    "constraints": (X, Y),
    "activity": (X, Y),
    "mask": (UNEVEN, NETS["mask"][2]),
    "two outputs": (X, NETS["two outputs"][2]),
    "two outputs, one masked": (UNEVEN, NETS["two outputs, one masked"][2]),
    "functional subclasses": NETS["functional subclasses"][1:],
    "frozen": (X, Y),
    "metrics": (X, Y),
}
PROCESSES = {"accelerator": "cpu", "devices": 2, "strategy": "ddp_spawn"}


def fitted(name, **settings):
    x, y = PARTS[name]
    size = settings.pop("batch_size", 16)
    model = compiled(made(name), y, **settings)
    found = model.fit(
        x, y, batch_size=size, epochs=2, shuffle=False, validation_data=(x, y), verbose=0
    ).history
    return model, found


def same(one, other):
    (first, logs), (second, others) = one, other
    assert max(differences(first.net, second.net)) < 1e-5
    for name in logs:
        assert others[name] == pytest.approx(logs[name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(
    "name", sorted(set(PARTS) - {"frozen", "two outputs, one masked", "metrics"})
)
def test_accumulated_parts_make_the_update_of_the_whole(name):
    same(fitted(name), fitted(name, batch_size=8, accumulate_grad_batches=2))


@pytest.mark.parametrize("name", PARTS)
def test_two_processes_are_one(name):
    two = fitted(name, batch_size=8, **PROCESSES)
    same(fitted(name), two)


def test_workers_have_the_settings_of_keras_and_normalise_over_all_rows():
    def trained(size, **settings):
        keras.utils.set_random_seed(7)
        net = sequential(kl.Dense(6, use_bias=False), kl.BatchNormalization(), Configured())
        model = compiled(net, sync_batchnorm=True, **settings)
        rows = slice(56)  # the last batch is a smaller one
        history = model.fit(
            X[rows], Y[rows], batch_size=size, epochs=2, shuffle=False, verbose=0
        ).history
        return model, history

    before = keras.config.epsilon(), keras.config.image_data_format()
    keras.config.set_epsilon(0.25), keras.config.set_image_data_format("channels_first")
    try:
        same(trained(16), trained(8, **PROCESSES))
    finally:
        keras.config.set_epsilon(before[0]), keras.config.set_image_data_format(before[1])


def test_workers_that_began_before_the_backend_was_chosen_take_part(monkeypatch):
    end_workers()
    with monkeypatch.context() as before:
        before.delenv("KERAS_BACKEND", raising=False)
        model = fitkit.Model(torch.nn.Linear(8, 1))
        model.compile("sgd", "mse", **PROCESSES)
        model.fit(X, Y, verbose=0)
    same(fitted("constraints"), fitted("constraints", batch_size=8, **PROCESSES))


class Locked(kl.Layer):
    def __init__(self):
        super().__init__()
        self.guard = threading.Lock()

    def call(self, inputs):
        return inputs


def test_what_of_a_network_can_t_be_sent_is_named():
    model = compiled(sequential(kl.Dense(2), Locked()), **PROCESSES)
    named = r"^model\.net\..*\.guard is a lock"
    with pytest.raises(fitkit.ConfigurationError, match=named) as told:
        model.fit(X, Y, verbose=0)
    assert told.value.code == "FK046" and ".given" not in str(told.value)


class Around(fitkit.Model):
    """A model with a network of Keras inside, which no `Guest` stands for."""

    def __init__(self):
        super().__init__()
        self.inner = sequential(kl.Dense(4, kernel_initializer="orthogonal"), kl.Dropout(0.2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return ops.mean(ops.square(self.inner(x, training=False) - y))


def test_a_network_inside_a_model_goes_to_workers_as_it_is():
    weights = []
    for size, settings in ((16, {}), (8, PROCESSES)):
        keras.utils.set_random_seed(7)
        model = Around()
        model.compile("sgd", learning_rate=0.05, **settings)
        model.fit(X, Y, batch_size=size, epochs=2, shuffle=False, verbose=0)
        weights.append([one.detach() for one in model.parameters()])
    for one, other in zip(*weights, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_two_processes_with_sharded_optimizers_are_one():
    two = fitted("constraints", batch_size=8, accelerator="cpu", devices=2, strategy="ddp_sharded")
    same(fitted("constraints"), two)


def test_a_network_of_the_script_goes_to_workers_with_all_that_it_holds(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import keras, numpy as np, fitkit
        from keras import layers as kl

        class Net(keras.Model):  # its class isn't registered, and its arguments aren't stored
            def __init__(self, width, squashed):
                super().__init__()
                self.first, self.last, self.squashed = kl.Dense(width), kl.Dense(1), squashed
                self.parts = [kl.Dense(2), {"a": kl.Dense(2)}]
                self.drop = kl.Dropout(0.5, seed=1)

            def call(self, x, training=False):
                x = self.squashed(self.first(x))
                x = self.parts[1]["a"](self.parts[0](x))
                return self.last(self.drop(x, training=training) * 0 + x)

        x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
        y, scale, found = x[:, :1] * 2, 0.5, []
        for devices, size in ((1, 16), (2, 8)):
            keras.utils.set_random_seed(0)
            model = fitkit.Model(Net(5, lambda t: keras.ops.tanh(t * scale)))
            model.compile("sgd", "mse", learning_rate=0.1, accelerator="cpu", devices=devices)
            history = model.fit(x, y, batch_size=size, epochs=2, shuffle=False, verbose=0).history
            found.append([*history["loss"], float(abs(model.predict(x, verbose=0)).sum())])
        print(np.allclose(*found, rtol=1e-5))
        """)
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "KERAS_BACKEND": "torch"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout.strip() == "True", done.stderr


def test_ranks_draw_other_noise_and_keep_one_seed():
    net = keras.Sequential([keras.Input((8,)), kl.GaussianNoise(1.0, seed=1)])
    guest = fitkit.Model(net)._modules["net"]
    state, outputs = net.variables[0].value, []
    for rank in (0, 1, 2):
        with torch.no_grad():
            state.copy_(torch.tensor([1, 0]))
        guest.begin(rank)
        outputs.append(guest.train()(torch.zeros(2, 8)).numpy().tolist())
        assert state.tolist() == [1, 1]
    assert outputs[0] != outputs[1] != outputs[2] != outputs[0]


@pytest.mark.parametrize("parts", [2, 4])
def test_what_is_added_to_losses_over_different_counts_counts_once(parts):
    def absolute(y_true, y_pred):  # a value for each sample, so that they say how many
        return (y_pred - y_true).abs().mean(-1)

    def trained(batch_size, **settings):
        model = fitkit.Model(made("two outputs"))
        model.compile("sgd", [absolute, absolute], learning_rate=0.1, **settings)
        y = NETS["two outputs"][2]
        logs = model.fit(X, y, batch_size=batch_size, shuffle=False, verbose=0).history
        return model, logs, model.evaluate(X, y, verbose=0, return_dict=True)

    one, logs, values = trained(32)
    other, others, again = trained(32 // parts, accumulate_grad_batches=parts)
    assert max(differences(one.net, other.net)) < 1e-6
    regularized = float(sum(one.net.losses).detach())
    assert values["added_loss"] == pytest.approx(regularized, rel=1e-5)
    assert values["loss"] == pytest.approx(values["a_loss"] + values["b_loss"] + regularized)
    assert again == pytest.approx(values, rel=1e-5)
    assert others["loss"] == pytest.approx(logs["loss"], rel=1e-5)


# ---------------------------------------------------------------------- files and copies


def test_files_have_keras_s_paths_also_for_a_network_made_later(tmp_path):
    one, other = compiled(made("convolutions")), compiled(made("convolutions"))
    assert one.net.layers[0].name != other.net.layers[0].name
    names = list(one._weights_module().state_dict())
    assert names == list(other._weights_module().state_dict())
    assert "sequential/batch_normalization/moving_variance" in names
    one.fit(IMAGES, Y, verbose=0)
    for file in ("weights.h5", "weights.safetensors", "weights.pt"):
        other = compiled(made("convolutions"))
        one.save_weights(tmp_path / file)
        other.load_weights(tmp_path / file)
        assert max(differences(one.net, other.net)) == 0


def test_a_torch_module_inside_keeps_its_statistics_in_files(tmp_path):
    one, other = compiled(made("torch module")), compiled(made("torch module"))
    one.fit(X + 1, Y, verbose=0)
    one.save_weights(tmp_path / "weights.h5")
    with pytest.raises(fitkit.ConfigurationError, match="before its first batch"):
        other.load_weights(tmp_path / "weights.h5")
    other.predict_on_batch(X[:1])  # Keras builds what follows a torch module by a batch
    other.load_weights(tmp_path / "weights.h5")
    means = [model.net.layers[0].module.running_mean for model in (one, other)]
    assert means[0].abs().min() > 0
    assert torch.equal(*means)


def test_a_net_without_weights_is_built_by_a_resume_and_asks_for_a_batch_before_a_load(tmp_path):
    path, plain = tmp_path / "a.h5", tmp_path / "a.safetensors"
    whole = compiled(made("subclass"))
    whole.fit(X, Y, verbose=0)
    whole.save(path)
    whole.save_weights(plain)
    for load in (
        lambda model: model.load(path),
        lambda model: model.load_weights(plain),
        lambda model: model.load_weights(plain, strict=False),
        lambda model: fitkit.load_model(path, made("subclass")),
    ):
        model = compiled(made("subclass"))
        with pytest.raises(fitkit.ConfigurationError, match=r"predict_on_batch\(x\[:1\]\)"):
            load(model)
    model.predict_on_batch(X[:1])
    model.load_weights(plain)
    assert max(differences(whole.net, model.net)) == 0
    other = compiled(made("convolutions"))
    with pytest.raises(fitkit.CheckpointError, match="doesn't fit this Sequential"):
        other.load_weights(plain)
    assert "Sequential" in repr(other)


def test_names_that_the_user_gave_stay():
    layers = [keras.Input((2,)), kl.Dense(2, name="dense_9x"), kl.Dense(1)]
    net = keras.Sequential(layers, name="me")
    names = [name for name, _ in fitkit.Model(net)._weights_module().named_parameters()]
    assert names == ["me/dense_9x/kernel", "me/dense_9x/bias", "me/dense/kernel", "me/dense/bias"]


class SaveAt(fitkit.callbacks.Callback):
    def __init__(self, path, update):
        super().__init__()
        self.path, self.update = path, update

    def on_train_batch_end(self, batch, logs=None):
        if self.model.global_step == self.update:
            self.model.save(self.path)


@pytest.mark.parametrize("name", ["noise", "batch norm", "subclass", "metrics"])
def test_a_training_that_is_cut_goes_on_with_the_same_numbers(name, tmp_path):
    settings = {"batch_size": 16, "epochs": 3, "verbose": 0}
    whole = compiled(made(name))
    fitkit.set_seed(3)
    expected = whole.fit(X, Y, callbacks=SaveAt(tmp_path / "a.h5", 6), **settings).history
    resumed = compiled(made(name))
    found = resumed.fit(X, Y, resume_from=tmp_path / "a.h5", **settings).history
    assert found == expected
    assert max(differences(whole.net, resumed.net)) == 0


def test_the_best_weights_come_back_with_their_statistics():
    model = compiled(made("batch norm"))
    seen = []

    class Note(fitkit.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append([v.numpy().copy() for v in self.model.net.variables])

    best = fitkit.callbacks.EarlyStopping("loss", mode="max", patience=9, restore_best_weights=True)
    history = model.fit(X, Y, epochs=3, verbose=0, callbacks=[Note(), best]).history["loss"]
    chosen = seen[int(np.argmax(history))]
    for value, variable in zip(chosen, model.net.variables, strict=True):
        assert np.array_equal(value, variable.numpy())


def test_averages_are_those_of_a_torch_net():
    net, linear = keras.Sequential([keras.Input((8,)), kl.Dense(1)]), torch.nn.Linear(8, 1)
    with torch.no_grad():
        linear.weight.copy_(net.layers[0].kernel.value.T)
        linear.bias.copy_(net.layers[0].bias.value)
    for one in (net, linear):
        average = fitkit.callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1)
        swapped = fitkit.callbacks.SwapEMAWeights(decay=0.5)
        for callback in (average, swapped):
            compiled(one).fit(X, Y, epochs=3, shuffle=False, verbose=0, callbacks=callback)
    assert torch.allclose(linear.weight.T, net.layers[0].kernel.value, atol=1e-6)


@pytest.mark.parametrize("name", ["noise", "subclass", "batch norm", "two outputs"])
def test_a_copy_and_a_pickle_train_as_their_original(name):
    x, y = NETS[name][1:]
    net = made(name)
    net.compile(keras.optimizers.Adam(1e-9), "mse", metrics=metrics_for(y))
    net.fit(x, y, verbose=0)  # leaves functions and states of Keras's own
    model = compiled(net, y)
    model.fit(x, y, batch_size=16, verbose=0, shuffle=False)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for one in (model, *copies):
        one.fit(x, y, batch_size=16, verbose=0, shuffle=False)
    for one in copies:
        assert one.net is not model.net
        assert max(differences(one.net, model.net)) == 0


# ---------------------------------------------------------------------- Keras's objects


def trained_with(optimizer, loss, metrics, y=Y, net="dense"):
    """The losses and weights of a network by Keras's objects: Keras's own fit, and ours."""
    found = []
    for by_keras in (True, False):
        ours = made(net)
        model = ours if by_keras else fitkit.Model(ours)
        model.compile(optimizer(), loss(), metrics=metrics())
        history = model.fit(X, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
        found.append((ours, history))
    return found


def test_keras_s_losses_metrics_and_sgd_are_taken():
    (theirs, expected), (ours, found) = trained_with(
        lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
        lambda: keras.losses.Huber(delta=0.5),
        lambda: [keras.metrics.MeanAbsoluteError(), keras.metrics.MeanSquaredError()],
    )
    assert max(differences(theirs, ours)) < 1e-5
    assert set(expected) == set(found)
    for name in expected:
        assert found[name] == pytest.approx(expected[name], abs=1e-5)


def test_an_unsymmetric_loss_gets_target_and_prediction_in_keras_s_order():
    labels = (np.arange(ROWS) % 2)[:, None].astype("float32")
    (theirs, expected), (ours, found) = trained_with(
        lambda: keras.optimizers.SGD(0.05),
        lambda: keras.losses.BinaryCrossentropy(from_logits=True, label_smoothing=0.1),
        list,
        labels,
    )
    assert max(differences(theirs, ours)) < 1e-5
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)


def quadratic(y_true, y_pred):
    return ops.mean(ops.square(y_true - 2 * y_pred), -1)


def over(y_true, y_pred):
    return ops.maximum(y_pred - y_true, 0)


class Over:
    def __call__(self, y_true, y_pred):
        return over(y_true, y_pred)


CLASSES = np.arange(ROWS) % 3
SIGNS = (CLASSES[:, None] % 2).astype("float32")
OUTPUTS = {
    "yes or no": (1, "sigmoid", "binary_crossentropy", SIGNS),
    "yes or no, flat": (1, "sigmoid", "binary_crossentropy", SIGNS[:, 0]),
    "labels": (3, "softmax", "sparse_categorical_crossentropy", CLASSES),
    "labels in a column": (3, "softmax", "sparse_categorical_crossentropy", CLASSES[:, None]),
    "one-hot": (3, "softmax", "categorical_crossentropy", np.eye(3, dtype="float32")[CLASSES]),
    "several yes or no": (3, "sigmoid", "binary_crossentropy", (numbers(ROWS, 3) > 0) * 1.0),
    "a function": (1, None, quadratic, SIGNS),
    "a lambda": (1, None, lambda true, other: ops.square(true - 3 * other), SIGNS),
    "an object": (1, "tanh", Over(), SIGNS),
    "a partial": (1, None, functools.partial(over), SIGNS),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_functions_get_the_target_first_and_accuracy_is_keras_s(name):
    units, activation, loss, y = OUTPUTS[name]
    weights, found = [], []
    for by_keras in (True, False):
        keras.utils.set_random_seed(7)
        net = keras.Sequential([keras.Input((8,)), kl.Dense(units, activation=activation)])
        model = net if by_keras else fitkit.Model(net)
        own = [] if units > 1 or y.ndim < 2 else [quadratic, Over()]
        model.compile(keras.optimizers.SGD(0.01), loss, metrics=["accuracy", *own])
        options = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
        history = model.fit(X, y, validation_data=(X[:48], y[:48]), **options).history
        found.append(history)
        weights.append(net)
    assert max(differences(*weights)) < 1e-5
    assert found[0].keys() == found[1].keys()
    for log, values in found[0].items():
        assert found[1][log] == pytest.approx(values, abs=1e-5), log


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("metrics", [["mse", "mae"], ["mse", ["mae", "mse"]], ["mae", None]])
def test_a_list_of_metrics_has_an_entry_for_each_output(metrics, by_name):
    found = []
    for by_keras in (True, False):
        keras.utils.set_random_seed(7)
        x = keras.Input((8,))
        outputs = {name: kl.Dense(1, name=name)(x) for name in ("late", "early")}
        net = keras.Model(x, outputs if by_name else list(outputs.values()))
        model = net if by_keras else fitkit.Model(net)
        model.compile("sgd", "mse" if by_name and not by_keras else ["mse"] * 2, metrics=metrics)
        y = dict.fromkeys(outputs, Y) if by_name else [Y, Y]
        found.append(model.evaluate(X, y, verbose=0, return_dict=True))
    expected, values = found
    assert values == pytest.approx(expected, abs=1e-5)


def test_a_function_with_the_prediction_first_is_refused_by_a_keras_net():
    model = fitkit.Model(made("dense"))
    for arguments in (
        {"loss": lambda prediction, target: 0},
        {"loss": lambda inputs, targets: 0},  # torchvision's names
        {"metrics": lambda yhat, y: 0},
    ):
        with pytest.raises(fitkit.ConfigurationError) as caught:
            model.compile(**arguments)
        assert caught.value.code == "FK016"


@pytest.mark.parametrize(
    ("net", "order"), [(made("dense"), "(y_true, y_pred)"), (torch.nn.Linear(8, 1), "(prediction,")]
)
def test_an_unknown_name_says_in_which_order_a_function_gets_its_arguments(net, order):
    for argument in ("loss", "metrics"):
        with pytest.raises(fitkit.ConfigurationError) as caught:
            fitkit.Model(net).compile(**{argument: "meen_squared_error"})
        assert caught.value.code == "FK028"
        assert order in str(caught.value)
        assert "did you mean 'mean_squared_error'" in str(caught.value).lower()
        with pytest.raises(TypeError) as caught:
            fitkit.Model(net).compile(**{argument: 3})
        assert isinstance(caught.value, fitkit.ConfigurationError) and order in str(caught.value)


def test_torch_s_losses_and_metrics_keep_their_order_and_their_logits():
    model = fitkit.Model(sequential(kl.Dense(1)))
    model.compile("sgd", torch.nn.functional.binary_cross_entropy_with_logits, metrics="accuracy")
    logits = model.predict(X, verbose=0)
    found = model.evaluate(X, SIGNS, verbose=0, return_dict=True)
    assert found["accuracy"] == pytest.approx(((logits > 0) == SIGNS).mean())
    exact = torch.nn.BCEWithLogitsLoss()(torch.tensor(logits), torch.tensor(SIGNS))
    assert found["loss"] == pytest.approx(exact.item(), abs=1e-6)


def test_a_net_of_keras_names_is_loaded_with_its_accuracy(tmp_path):
    model = compiled(made("dense"))
    model.compile(metrics=["accuracy"])
    model.save(tmp_path / "a.h5")
    again = fitkit.load_model(tmp_path / "a.h5", made("dense"))
    assert again.evaluate(X, Y, verbose=0) == model.evaluate(X, Y, verbose=0)


class Autoencoder(keras.Model):
    """A network whose only losses are those that it adds itself."""

    def __init__(self):
        super().__init__()
        self.into, self.out = kl.Dense(3, kernel_regularizer="l2"), kl.Dense(8)

    def call(self, inputs):
        outputs = self.out(self.into(inputs))
        self.add_loss(ops.mean(ops.square(outputs - inputs)))
        return outputs


def test_what_a_net_adds_is_its_loss_where_it_is_given_none():
    histories, nets = [], []
    for trains, settings in ((keras.Model, {}), (fitkit.Model, {}), (fitkit.Model, PROCESSES)):
        keras.utils.set_random_seed(7)
        nets.append(Autoencoder())
        model = nets[-1] if trains is keras.Model else fitkit.Model(nets[-1])
        model.compile(keras.optimizers.SGD(0.1), **settings)
        size = 8 if settings else 16
        options = {"batch_size": size, "epochs": 2, "shuffle": False, "verbose": 0}
        histories.append(model.fit(X, validation_data=(X[:32], None), **options).history)
    for net, history in zip(nets[1:], histories[1:], strict=True):
        assert max(differences(nets[0], net)) < 1e-5
        for name, values in histories[0].items():
            assert history[name] == pytest.approx(values, abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": lambda: keras.optimizers.Adam(0.01)}, "'adam', learning_rate=0.01"),
        ({"optimizer": lambda: keras.optimizers.SGD(clipnorm=1.0)}, "SGD with clipnorm"),
        ({"loss": lambda: keras.losses.MeanSquaredError(reduction="sum")}, "reduction='sum'"),
        ({"metrics": lambda: [keras.metrics.AUC()]}, r"AUC collects batches itself.*\['auc'\]"),
        ({"metrics": lambda: [keras.metrics.Precision(0.3)]}, "Write a torchmetrics object"),
        (
            {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())},
            "precision='16-mixed'",
        ),
        ({"optimizer": lambda: type("Mine", (keras.optimizers.SGD,), {})()}, r"^Mine.*'sgd'"),
        (
            {"learning_rate": lambda: keras.optimizers.schedules.ExponentialDecay(1, 2, 0.5)},
            "as lr_scheduler",
        ),
    ],
)
def test_keras_s_objects_without_an_equal_one_are_named(arguments, message):
    model = fitkit.Model(made("dense"))
    with pytest.raises(fitkit.ConfigurationError, match=message) as caught:
        model.compile(**{name: value() for name, value in arguments.items()})
    assert caught.value.code == "FK082"


@pytest.mark.parametrize("policy", ["mixed_bfloat16"])
def test_a_policy_of_keras_trains_as_by_keras(policy):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        theirs, ours = made("batch norm"), made("batch norm")
    finally:
        keras.config.set_dtype_policy(before)
    theirs.compile(keras.optimizers.SGD(**RATE), "mse")
    expected = theirs.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    found = compiled(ours).fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-4)
    with pytest.raises(fitkit.ConfigurationError, match="one of the two"):
        compiled(ours, precision="bf16-mixed")


def test_autocast_trains_a_float32_network():
    logs = compiled(made("convolutions"), precision="bf16-mixed").fit(IMAGES, Y, verbose=0).history
    assert np.isfinite(logs["loss"]).all()


# ---------------------------------------------------------------------- what is the user's own


class OwnLoss(keras.Model):
    def __init__(self):
        super().__init__()
        self.last = kl.Dense(1, kernel_regularizer="l2")

    def call(self, inputs):
        return self.last(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.abs(y - y_pred)) * (2.0 if training else 1.0) + sum(self.losses)


class OwnMore(OwnLoss):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super(OwnLoss, self).compute_loss(x, y, y_pred, sample_weight, training) * 2


class OwnStep(OwnLoss):
    def train_step(self, data):
        return {}


class OwnFunction(OwnLoss):
    def make_train_function(self, force=False):
        return None


class OwnTest(OwnLoss):
    def test_step(self, data):
        return {}


class OwnMetrics(OwnLoss):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {}


@pytest.mark.parametrize(("kind", "loss"), [(OwnLoss, None), (OwnMore, "mse")])
def test_an_own_compute_loss_is_called(kind, loss):
    found = []
    for by_keras in (True, False):
        keras.utils.set_random_seed(1)
        net = kind()
        model = net if by_keras else fitkit.Model(net)
        net.compile(keras.optimizers.SGD(0.05), loss)  # which super().compute_loss takes
        if not by_keras:
            model.compile("sgd", learning_rate=0.05)
        fitted = model.fit(
            X, Y, batch_size=16, epochs=2, shuffle=False, validation_data=(X, Y), verbose=0
        )
        found.append((net, fitted.history))
    (theirs, expected), (ours, logs) = found
    for name in expected:
        assert logs[name] == pytest.approx(expected[name], abs=1e-5)
    assert max(differences(theirs, ours)) < 1e-5


class Stepping(fitkit.Model):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self(x), y) + sum(self.net.losses)


def test_a_step_of_one_s_own_calls_the_network_in_training():
    theirs, _ = trained_by_keras("noise")
    net = made("noise")
    model = Stepping(net)
    model.compile({"name": "sgd", "momentum": 0.9}, "mse", learning_rate=0.05)
    model.fit(X, Y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    assert max(differences(theirs, net)) < 1e-5


COMPILED = ["batch norm", "two outputs, one masked", "noise"]


@pytest.mark.filterwarnings("ignore:torch's compiler failed")
@pytest.mark.parametrize(
    "name", [COMPILED[0], *(pytest.param(name, marks=pytest.mark.slow) for name in COMPILED[1:])]
)
def test_a_compiled_network_trains_as_one_that_is_not(name):
    _, x, y = NETS[name]
    nets, logs = [made(name), made(name)], []
    for net, options in zip(nets, (False, {"backend": "aot_eager"}), strict=True):
        model = compiled(net, y, jit_compile=options)
        fitted = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        logs.append(fitted.history)
    assert logs[0] == logs[1]
    assert max(differences(*nets)) < 1e-6
    is_written = model._modules["net"].calls._is_given_up
    assert is_written == (name == "noise")  # whose draws torch's compiler leaves out


def test_rates_fall_from_layer_to_layer():
    net = sequential(kl.Dense(4), kl.BatchNormalization(), keras.Sequential([kl.Dense(3)]))
    model = compiled(net, layer_decay=0.5)
    model.fit(X, Y, verbose=0)
    rates = {
        id(parameter): group["lr"]
        for group in model._fitkit.fit_state.optimizers[0].param_groups
        for parameter in group["params"]
    }
    found = [rates[id(weight._value)] for weight in net.trainable_weights]
    assert found == [0.0125] * 4 + [0.025] * 2 + [0.05] * 2


REFUSED = {
    "memory_format": {"memory_format": "channels_last"},
    "fsdp": {"strategy": "fsdp", "accelerator": "cpu", "devices": 2},
    "'dp'": {"strategy": "dp", "accelerator": "cpu", "devices": 2},
    "64-true": {"precision": "64-true"},
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_a_network_can_t_do_is_said_by_compile(word):
    with pytest.raises(fitkit.ConfigurationError, match=word) as caught:
        fitkit.Model(made("dense")).compile("sgd", "mse", **REFUSED[word])
    assert caught.value.code == "FK081"


@pytest.mark.parametrize(
    ("kind", "method", "verbs"),
    [
        (OwnStep, "train_step", {"fit", "validated", "train_on_batch"}),
        (OwnFunction, "make_train_function", {"fit", "validated", "train_on_batch"}),
        (OwnTest, "test_step", {"evaluate", "validated", "test_on_batch"}),
        (OwnMetrics, "compute_metrics", {"fit", "validated", "train_on_batch", "evaluate",
                                         "test_on_batch"}),
    ],
)  # fmt: skip
def test_a_method_of_one_s_own_is_refused_by_the_verbs_that_keras_would_call_it_in(
    kind, method, verbs
):
    net = kind()
    model = fitkit.Model(net)
    net.compile("sgd", "mse")
    model.compile("sgd")
    calls = {
        "fit": lambda: model.fit(X, Y, verbose=0),
        "validated": lambda: model.fit(X, Y, validation_data=(X, Y), verbose=0),
        "train_on_batch": lambda: model.train_on_batch(X, Y),
        "evaluate": lambda: model.evaluate(X, Y, verbose=0),
        "test_on_batch": lambda: model.test_on_batch(X, Y),
        "predict": lambda: model.predict(X, verbose=0),
        "predict_on_batch": lambda: model.predict_on_batch(X),
    }
    for verb, call in calls.items():
        if verb in verbs:
            with pytest.raises(fitkit.ConfigurationError, match=f"overrides Keras's {method}"):
                call()
        else:
            call()
    if "evaluate" not in verbs:
        expected = net.evaluate(X, Y, verbose=0)
        assert model.evaluate(X, Y, verbose=0) == pytest.approx(expected, abs=1e-6)


def test_a_loss_beside_an_own_compute_loss_is_refused():
    with pytest.raises(fitkit.ConfigurationError, match="takes that of net.compile"):
        fitkit.Model(OwnLoss()).compile("sgd", "mse")


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have")
def test_scales_that_keras_s_optimizer_would_write_are_said():
    net = made("dense")
    net.quantize("float8")
    net.compile("sgd", "mse")
    model = compiled(net)
    with pytest.raises(fitkit.ConfigurationError, match="quantized to float8"):
        model.fit(X, Y, verbose=0)
    expected = net.evaluate(X, Y, verbose=0)
    assert model.evaluate(X, Y, verbose=0)[0] == pytest.approx(expected, abs=1e-6)


def test_what_only_training_lacks_is_no_matter_to_predictions():
    net = OwnStep()
    model = fitkit.Model(net)
    expected = net.predict(X, verbose=0)
    assert np.allclose(model.predict(X, verbose=0), expected, atol=1e-6)
    assert np.allclose(model.predict_on_batch(X), expected, atol=1e-6)


def test_data_that_are_read_once_build_no_network():
    model = compiled(kl.Dense(1))
    with pytest.raises(fitkit.ConfigurationError, match="Call the net on a batch"):
        model.fit((batch for batch in [(X, Y)]), verbose=0)
    model.net(X)
    model.fit((batch for batch in [(X, Y)]), verbose=0)


def test_a_keras_layer_inside_a_torch_module_is_said():
    model = compiled(torch.nn.Sequential(kl.Dropout(0.5), torch.nn.Linear(8, 1)))
    with pytest.warns(UserWarning, match="keras layer Dropout inside a torch module"):
        model.fit(X, Y, verbose=0)


class Largest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros")

    def update_state(self, values):
        self.value.assign(ops.maximum(self.value, ops.max(values)))

    def result(self):
        return self.value + 0


class Measuring(kl.Layer):
    def __init__(self):
        super().__init__()
        self.largest = Largest()

    def call(self, inputs):
        self.largest.update_state(inputs)
        return inputs


def test_a_metric_of_one_s_own_is_logged_on_one_process_and_refused_on_two():
    found = compiled(sequential(Measuring())).evaluate(X, Y, verbose=0, return_dict=True)
    assert found["largest"] == pytest.approx(float(X.max()))
    with pytest.raises(fitkit.ConfigurationError, match="an update_state of its own"):
        compiled(sequential(Measuring()), **PROCESSES)
    model = Stepping(sequential(Measuring()))
    with pytest.warns(UserWarning, match="Keras's metric 'largest'"):
        model.compile("sgd", learning_rate=0.05)


def test_norms_that_can_t_be_synchronised_are_said():
    with pytest.raises(fitkit.ConfigurationError, match="torch's batch normalisation inside"):
        compiled(made("torch module"), sync_batchnorm=True)


def test_losses_that_can_t_be_weighed_in_parts_are_said():
    net = keras.Sequential([
        kl.Embedding(13, 4, mask_zero=True, activity_regularizer="l2"),
        kl.LSTM(5, return_sequences=True), kl.Dense(1),
    ])  # fmt: skip
    model = compiled(net, accumulate_grad_batches=2)
    with pytest.raises(fitkit.ConfigurationError, match="parts of an update can't be weighed"):
        model.fit(UNEVEN, NETS["mask"][2], verbose=0)
    from fitkit.extras.keras_nets import refuse_ignored

    with pytest.raises(fitkit.ConfigurationError, match="Let one of them say what counts"):
        refuse_ignored(torch.tensor(5), torch.ones(2, 3, dtype=torch.bool))


def run(program, **environment):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    return done.stdout.strip() or done.stderr


def test_another_backend_is_said(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(fitkit.ConfigurationError, match=r"runs on jax.*KERAS_BACKEND") as caught:
        fitkit.Model(made("dense"))
    assert caught.value.code == "FK080"


def test_keras_is_imported_by_nobody_else():
    program = """
import sys, torch, fitkit
model = fitkit.Model(torch.nn.Linear(2, 1))
model.compile("sgd", "mse")
model.fit(torch.ones(4, 2), torch.ones(4, 1), verbose=0)
print([name for name in sys.modules if "keras" in name])
"""
    assert run(program) == "[]"
