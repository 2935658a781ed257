"""evaluate and predict run in inference mode where nobody can notice it, and only there."""

import contextlib

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fitkit


class Telling(nn.Module):
    """Notes in which mode each batch was computed."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.modes = []

    def forward(self, x):
        self.modes.append(torch.is_inference_mode_enabled())
        return self.layer(x)


def compiled(net, **options):
    torch.manual_seed(0)
    model = fitkit.Model(net)
    options = {"loss": "cross_entropy", "metrics": ["accuracy"], **options}
    model.compile("sgd", **options, accelerator="cpu")
    return model


X, Y = torch.randn(20, 3), torch.randint(2, (20,))


def modes_of(verb, *data, net=None, **options):
    model = compiled(Telling() if net is None else net, **options.pop("compile", {}))
    given = {"verbose": 0, "batch_size": 4, **options}
    if isinstance(data[0], DataLoader):
        del given["batch_size"]
    getattr(model, verb)(*data, **given)
    return model.net.modes


@pytest.mark.parametrize(("verb", "data"), [("evaluate", (X, Y)), ("predict", (X,))])
def test_all_batches_but_the_first_are_computed_in_inference_mode(verb, data):
    assert modes_of(verb, *data) == [False, True, True, True, True]


def test_batches_of_other_shapes_are_not():
    assert modes_of("predict", X[:18]) == [False, True, True, True, False]


def test_a_loader_makes_its_batches_outside():
    made = []

    class Rows(Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            made.append(torch.is_inference_mode_enabled())
            return X[index] * 1, Y[index]

    assert modes_of("evaluate", DataLoader(Rows(), 4)) == [False, True, True]
    assert made == [False] * 12


def listening(hook):
    return fitkit.callbacks.LambdaCallback(**{hook: lambda *args: None})


class OwnStep(fitkit.Model):
    def validation_step(self, batch, batch_idx):
        return super().validation_step(batch)


@pytest.mark.parametrize(
    "options",
    [
        {"callbacks": listening("on_test_batch_end")},
        {"compile": {"loss": lambda prediction, target: prediction.square().mean()}},
        {"compile": {"metrics": [lambda prediction, target: prediction.mean()]}},
    ],
    ids=["callback", "loss", "metric"],
)
def test_not_where_code_of_the_users_gets_what_steps_make(options):
    assert not any(modes_of("evaluate", X, Y, **options))


def test_a_models_own_transfer_is_called_for_each_batch():
    class Own(fitkit.Model):
        moved = 0

        def transfer_batch_to_device(self, batch, device):
            self.moved += 1
            return batch

    model = Own(Telling())
    model.compile(loss="cross_entropy", accelerator="cpu")
    model.evaluate(X, Y, batch_size=4, verbose=0)
    model.predict(X, batch_size=4, verbose=0)
    assert model.moved == 10 and not any(model.net.modes)


def test_not_with_hooks_in_the_net_or_steps_of_the_models_own():
    net = Telling()
    net.layer.register_forward_hook(lambda module, args, output: None)
    assert not any(modes_of("predict", X, net=net))
    model = OwnStep(Telling())
    model.compile(loss="cross_entropy", accelerator="cpu")
    model.evaluate(X, Y, verbose=0)
    assert not any(model.net.modes)


def test_a_net_that_computes_gradients_still_can():
    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = nn.Linear(3, 1)

        @torch.enable_grad()
        def forward(self, x):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).square().sum(), x)[0]

    net = Force()
    weight, bias = net.energy.weight, net.energy.bias
    expected = 2 * (X @ weight.T + bias) @ weight
    found = compiled(net, loss="mse", metrics=None).predict(X, batch_size=4, verbose=0)
    np.testing.assert_allclose(found, expected.detach(), rtol=1e-5)


class Keeping(nn.Module):
    """Keeps what it has computed, as caches do, and uses it in the next call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.last = None
        self.kept = {}

    def forward(self, x):
        output = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * output.detach().mean(0)
        if self.last is not None:
            output = output * self.last.sigmoid().mean() + self.kept["outputs"][0].mean()
        self.last, self.kept["outputs"] = output.detach(), [output.detach()]
        return output * self.mean


def test_what_a_net_keeps_can_be_trained_with_afterwards():
    model = compiled(Keeping())
    model.evaluate(X, Y, batch_size=4, verbose=0)
    kept = [model.net.mean, model.net.last, model.net.kept["outputs"][0]]
    assert not any(tensor.is_inference() for tensor in kept)
    model.fit(X, Y, batch_size=4, epochs=2, validation_data=(X, Y), verbose=0)


@pytest.mark.parametrize("size", [4, 20])
def test_predictions_can_be_trained_with(size):
    found = compiled(nn.Linear(3, 2)).predict(X, batch_size=size, verbose=0)
    tensor = torch.as_tensor(found)
    assert not tensor.is_inference()
    (tensor * nn.Parameter(torch.ones(2))).sum().backward()


def test_hooks_on_the_model_itself_are_called_also_when_they_come_late():
    model, seen = compiled(nn.Linear(3, 2)), []

    class Registers(fitkit.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 2:
                self.model.register_forward_hook(lambda *args: seen.append(batch))

    model.fit(X, Y, batch_size=4, verbose=0, callbacks=Registers())
    assert len(seen) == 3
    model.predict(X, batch_size=4, verbose=0)
    assert len(seen) == 8


def test_an_error_in_a_later_batch_is_explained_and_leaves_the_mode():
    x = torch.randint(3, (20, 1))
    x[18] = 7
    model = compiled(nn.Sequential(nn.Embedding(3, 2), nn.Flatten()))
    with pytest.raises(fitkit.ConfigurationError, match="Embedding layer got an index"):
        model.predict(x, batch_size=4, verbose=0)
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()


def test_the_numbers_are_those_of_a_plain_loop():
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))
    model = compiled(net)
    loader = DataLoader(TensorDataset(X[:18], Y[:18]), 4)
    for data in ((X[:18], Y[:18]), (loader,)):
        options = {} if len(data) == 1 else {"batch_size": 4}
        found = model.evaluate(*data, verbose=0, return_dict=True, **options)
        with torch.no_grad(), _evaluating(net):
            outputs = net(X[:18])
            loss = nn.functional.cross_entropy(outputs, Y[:18]).item()
        assert found["loss"] == pytest.approx(loss, rel=1e-6)
        assert found["accuracy"] == (outputs.argmax(1) == Y[:18]).double().mean().item()


@contextlib.contextmanager
def _evaluating(net):
    net.eval()
    yield
    net.train()
