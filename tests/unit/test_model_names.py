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
