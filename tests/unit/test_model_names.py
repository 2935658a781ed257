"""Names of a model: Keras's looks at weights, and what a subclass may call its own."""

import numpy as np
import pytest
import torch

import fitkit
from tests.nets import classification

X, Y = classification(24, 4)


def test_keras_get_weights_and_set_weights_put_back_the_best_weights():
    net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    model = fitkit.Model(net)
    model.compile("sgd", "cross_entropy", learning_rate=0.5)
    before = model.get_weights()
    assert [w.shape for w in before] == [tuple(t.shape) for t in net.state_dict().values()]
    predicted = model.predict(X, verbose=0)
    kept = []

    class Best(fitkit.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            kept.append(self.model.get_weights())

    model.fit(X, Y, epochs=2, callbacks=Best(), verbose=0)
    assert not np.array_equal(kept[0][0], kept[1][0])
    assert np.array_equal(kept[1][0], net[0].weight.detach().numpy())
    model.set_weights(before)
    assert np.array_equal(model.predict(X, verbose=0), predicted)
    with pytest.raises(fitkit.ConfigurationError, match=r"1 arrays of the shapes \(5, 4\)"):
        model.set_weights(before[:1])
    before[0][:] = 0  # arrays of their own
    assert net[0].weight.abs().sum() > 0


def test_keras_count_params_and_layers():
    net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    model = fitkit.Model(net)
    assert model.count_params() == 4 * 5 + 5 + 5 * 3 + 3
    assert model.layers == [net[0], net[1], net[2]]
    assert model.layers[0].weight is net[0].weight
    assert fitkit.Model(net[0]).layers == [net[0]]
    with pytest.raises(fitkit.ConfigurationError, match="lazy"):
        fitkit.Model(torch.nn.LazyLinear(3)).count_params()


def test_a_subclass_may_use_keras_names_for_its_own():
    class Stacked(fitkit.Model):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)])
            self.count_params = 7

        @property
        def get_weights(self):
            return "mine"

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = Stacked()
    assert isinstance(model.layers, torch.nn.ModuleList)
    assert (model.count_params, model.get_weights) == (7, "mine")
    model.compile("sgd", "cross_entropy")
    model.fit(X, Y, verbose=0)
    other = fitkit.Model()
    other.add_module("layers", torch.nn.Linear(4, 3))
    assert isinstance(other.layers, torch.nn.Linear)


def test_a_subclass_may_call_its_attributes_as_it_likes():
    class Own(fitkit.Model):
        def __init__(self):
            super().__init__(torch.nn.Linear(4, 4))
            self.running, self.hands_on, self.fit_state, self.loss = 0.0, 1.0, {"a": 1}, "own"
            self.compilation = torch.nn.Linear(2, 2)
            self.state, self.metrics, self.begin_fit, self.remember_names = 1, [], 2, 3

        def training_step(self, batch, batch_idx):
            self.running += 1.0
            return super().training_step(batch, batch_idx)

    model = Own()
    model.compile("sgd", "mse")
    model.fit(X, X, batch_size=6, verbose=0)
    model.evaluate(X, X, verbose=0)
    assert (model.running, model.hands_on, model.fit_state) == (4.0, 1.0, {"a": 1})


def test_a_public_name_with_another_meaning_is_told_at_once():
    with pytest.raises(fitkit.ConfigurationError, match=r"the name 'device'.*'own_device'"):

        class Placed(fitkit.Model):
            device = "cpu"

    class Summing(fitkit.Model):
        def __init__(self):
            super().__init__()
            self.summary = torch.nn.Linear(1, 1)

    with pytest.raises(fitkit.ConfigurationError, match="can't use the name 'summary'"):
        Summing()
    model = fitkit.Model(torch.nn.Linear(4, 4))
    for name, value in (("optimizer", 1), ("history", []), ("global_step", 0), ("fit", None)):
        with pytest.raises(fitkit.ConfigurationError, match=f"can't use the name '{name}'"):
            setattr(model, name, value)
    model.training_step = lambda batch, batch_idx: None  # a hook may be replaced


def test_fitkits_own_calls_of_a_verb_do_not_meet_a_subclass_with_other_arguments(tmp_path):
    class Own(fitkit.Model):
        def compile(self, rate):
            super().compile("sgd", "mse", learning_rate=rate, accelerator="cpu", devices=1)

        def fit(self, data, epochs=2):
            return super().fit(*data, epochs=epochs, verbose=0)

        def evaluate(self, data):
            return super().evaluate(*data, verbose=0)

        def predict(self):
            return super().predict(self.mine, verbose=0)

        def test_on_batch(self, both):
            return super().test_on_batch(*both)

        def save(self, folder, name):
            return super().save(folder / f"{name}.h5")

        def load(self, folder, name):
            return super().load(folder / f"{name}.h5")

    x, y = torch.randn(32, 4), torch.randn(32, 1)
    model, plain = Own(torch.nn.Linear(4, 1)), torch.nn.Linear(4, 1)
    plain.load_state_dict(model.net.state_dict())
    model.compile(0.1)
    model.mine = x
    assert len(model.fit((x, y)).epoch) == 2
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(plain(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(model.net.weight, plain.weight)
    loss = torch.nn.functional.mse_loss(plain(x), y).item()
    assert model.evaluate((x, y)) == pytest.approx(loss, rel=1e-5)
    assert model.test_on_batch((x, y)) == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(model.predict(), plain(x).detach(), rtol=1e-4, atol=1e-6)
    model.save(tmp_path, "kept")
    model.load(tmp_path, "kept")
    again = fitkit.callbacks.EvaluateEvery(x, y, name="again")
    best = fitkit.callbacks.ModelCheckpoint(tmp_path / "best.h5", monitor="val_loss")
    logs = fitkit.Model.fit(
        model, x, y, validation_data=(x, y), callbacks=[again, best], verbose=0
    ).history
    assert logs["again_loss"] == logs["val_loss"]
    assert (tmp_path / "best.h5").exists()
    assert fitkit.verify(model, x, y, devices=1, verbose=False).ok
    assert fitkit.plan(model, 2, "ddp", (x, y)).costs["ddp"].parameters == 4 * 5
    assert fitkit.tune.batch_size(model, x, y, max_val=8) == 8
    assert fitkit.tune.learning_rate(model, x, y, num_training=10).losses
