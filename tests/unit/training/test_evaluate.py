"""evaluate and predict compute no gradients, and what they compute can be trained with."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit.data.batches import Batch
from fitkit.data.to_device import own_data
from fitkit.training.caller import Caller
from fitkit.training.evaluate import InStep

X, Y = torch.randn(20, 3), torch.randint(2, (20,))


@pytest.fixture
def modes(monkeypatch):
    """Whether each call of a linear layer was made with gradients, and in inference mode."""
    found, forward = [], nn.Linear.forward

    def telling(layer, x):
        found.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return forward(layer, x)

    monkeypatch.setattr(nn.Linear, "forward", telling)
    return found


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x)


def hooked():
    net = nn.Sequential(nn.Linear(3, 2))
    net[0].register_forward_hook(lambda module, args, output: None)
    return net


def compiled(net=None, kind=fitkit.Model, **options):
    torch.manual_seed(0)
    model = kind(nn.Sequential(nn.Linear(3, 2)) if net is None else net)
    options = {"loss": "cross_entropy", "metrics": ["accuracy"], **options}
    model.compile("sgd", **options, accelerator="cpu")
    return model


@pytest.mark.parametrize(("verb", "data"), [("evaluate", (X, Y)), ("predict", (X,))])
def test_no_batch_has_gradients_and_none_is_computed_in_inference_mode(verb, data, modes):
    getattr(compiled(), verb)(*data, batch_size=4, verbose=0)
    assert modes == [(False, False)] * 5
    assert torch.is_grad_enabled()


class OwnTransfer(fitkit.Model):
    moved = 0

    def transfer_batch_to_device(self, batch, device):
        self.moved += 1
        return batch


class OwnCall(fitkit.Model):
    def __call__(self, x):
        return super().__call__(x) * 2


def test_a_models_own_transfer_moves_each_batch():
    model = compiled(kind=OwnTransfer)
    model.evaluate(X, Y, batch_size=4, verbose=0)
    assert model.moved == 5


def test_a_models_own_call_is_made():
    model = compiled(kind=OwnCall)
    expected = 2 * model.net(X)
    torch.testing.assert_close(torch.as_tensor(model.predict(X, verbose=0)), expected.detach())


@pytest.mark.parametrize("size", [4, 20])
def test_predictions_can_be_trained_with(size):
    tensor = torch.as_tensor(compiled().predict(X, batch_size=size, verbose=0))
    assert not tensor.is_inference()
    (tensor * nn.Parameter(torch.ones(2))).sum().backward()


def test_hooks_on_the_model_itself_are_called_also_when_they_come_late():
    model, seen = compiled(), []

    class Registers(fitkit.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 2:
                self.model.register_forward_hook(lambda *args: seen.append(batch))

    model.fit(X, Y, batch_size=4, verbose=0, callbacks=Registers())
    assert len(seen) == 3
    model.predict(X, batch_size=4, verbose=0)
    assert len(seen) == 8
    model.evaluate(X, Y, batch_size=4, verbose=0)
    assert len(seen) == 13


def test_an_error_in_a_later_batch_is_explained_and_leaves_the_mode():
    x = torch.randint(3, (20, 1))
    x[18] = 7
    model = compiled(nn.Sequential(nn.Embedding(3, 2), nn.Flatten()))
    with pytest.raises(fitkit.ConfigurationError, match="FK012"):
        model.predict(x, batch_size=4, verbose=0)
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()


class LogsItsMetric(fitkit.Model):
    """Logs a metric of its own, and fails where it is told to."""

    def __init__(self):
        super().__init__(nn.Linear(3, 2))
        self.seen = torchmetrics.MeanMetric()
        self.fails = False

    def test_step(self, batch, batch_idx):
        self.seen.update(batch[1].float())
        self.log("seen", self.seen)
        if self.fails and batch_idx == 1:
            raise RuntimeError("no batch")


def test_an_evaluation_that_failed_leaves_nothing_to_the_next():
    model = LogsItsMetric()
    model.compile("sgd", accelerator="cpu", devices=1)
    model.fails = True
    with pytest.raises(RuntimeError, match="no batch"):
        model.evaluate(X[:4], torch.tensor([2, 2, 2, 2]), batch_size=2, verbose=0)
    model.fails = False
    found = model.evaluate(X[:4], torch.tensor([1, 1, 1, 1]), batch_size=2, verbose=0)
    assert found == 1.0


class Again:
    """An iterator that begins anew whenever it is asked for one."""

    def __iter__(self):
        self.count = 0
        return self

    def __next__(self):
        if self.count == 3:
            raise StopIteration
        self.count += 1
        return X[:4] * self.count


def test_an_iterator_that_begins_anew_is_asked_once():
    assert len(compiled(hooked()).predict(Again(), verbose=0)) == 12


@contextlib.contextmanager
def evaluating(net):
    net.eval()
    yield
    net.train()


NETS = {
    "torch's": lambda: nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2)
    ),
    "own": Own,
}


@pytest.mark.parametrize("kind", NETS)
def test_the_numbers_are_those_of_a_plain_loop(kind):
    net = NETS[kind]()
    model = compiled(net)
    with torch.no_grad(), evaluating(net):
        outputs = net(X[:18])
        loss = nn.functional.cross_entropy(outputs, Y[:18]).item()
    for data in ((X[:18], Y[:18]), (DataLoader(TensorDataset(X[:18], Y[:18]), 4),)):
        options = {} if len(data) == 1 else {"batch_size": 4}
        found = model.evaluate(*data, verbose=0, return_dict=True, **options)
        assert found["loss"] == pytest.approx(loss, rel=1e-6)
        assert found["accuracy"] == (outputs.argmax(1) == Y[:18]).double().mean().item()
    torch.testing.assert_close(
        torch.as_tensor(model.predict(X[:18], batch_size=4, verbose=0)), outputs
    )


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x):
        return self.encoder(x, src_key_padding_mask=x[..., 0] > 0.5).sum(1)


def test_all_batches_take_torchs_fast_path_for_evaluation():
    net, x = Masked(), torch.randn(12, 5, 8)
    model = compiled(net, loss="mse", metrics=None)
    with torch.no_grad(), evaluating(net):
        expected = net(x)
    found = torch.as_tensor(model.predict(x, batch_size=4, verbose=0))
    torch.testing.assert_close(found, expected)


def test_data_that_end_before_the_steps_are_told():
    model = fitkit.Model(Own())
    model.compile(loss="cross_entropy")
    with pytest.warns(UserWarning, match="ended after 2 of 5 batches"):
        model.evaluate(iter([(X[:10], Y[:10]), (X[10:], Y[10:])]), steps=5, verbose=0)


A, B = torch.zeros(1), torch.ones(1)


@pytest.mark.parametrize(("forward", "x", "expected"), [
    (lambda **named: None, {"a": A}, ((), {"a": A})),
    (lambda a, b: None, {1: A, 2: B}, (({1: A, 2: B},), {})),
    (lambda a, b: None, {"a": A}, ((), {"a": A})),  # the call will say what is missing
    (lambda a, b=None: None, {"c": A}, (({"c": A},), {})),
    (lambda *each: None, (A, B), ((A, B), {})),
    (lambda a, b=None: None, [A, B, A], (([A, B, A],), {})),
])  # fmt: skip
def test_how_a_net_takes_its_inputs_by_its_signature(forward, x, expected):
    assert Caller(forward).arguments(x) == expected


def test_an_epoch_without_a_batch_ends_the_training_with_the_logs_of_the_last():
    model = fitkit.Model(Own())
    model.compile("sgd", "cross_entropy")
    batches = iter([(X[:10], Y[:10]), (X[10:], Y[10:])])
    with pytest.warns(UserWarning, match="x ended in epoch 2 after 0 batches"):
        history = model.fit(batches, steps_per_epoch=2, epochs=3, verbose=0).history
    assert len(history["loss"]) == 1


def test_two_replicas_say_where_they_train_and_what_an_update_sees(capsys):
    model = fitkit.Model(Own())
    model.compile(
        "sgd", "cross_entropy", accelerator="cpu", devices=2, strategy="dp",
        accumulate_grad_batches=2,
    )  # fmt: skip
    model.fit(X, Y, batch_size=5, verbose=2)
    assert capsys.readouterr().out.startswith(
        "1 process of 2 replicas each on cpu, batches of 5 samples, "
        "an update every 2 batches (10 samples)\n"
    )
    model.compile(accumulate_grad_batches=1, sync_batchnorm=True)
    with pytest.raises(fitkit.ConfigurationError, match="sync_batchnorm=True doesn't work with"):
        model.fit(X, Y, verbose=0)


class WithAnotherRank:
    """The exchanges of a rank in step beside one that has so many batches."""

    world_size = 2

    def __init__(self, batches):
        self.left = batches

    def sums(self, facts):
        there, self.left = float(self.left > 0), self.left - 1
        return [fact + there for fact in facts]


def test_a_batch_that_a_rank_in_step_repeats_is_as_it_came():
    strategy = SimpleNamespace(collectives=WithAnotherRank(3), evaluates_in_step=True)
    found = []
    for batch in InStep(iter([Batch(torch.ones(2), 2, 2, is_lent=False)]), strategy):
        own = own_data(batch)
        found.append((own.tolist(), batch.samples))
        own.zero_()  # as a net that writes into its inputs
    assert found == [([1.0, 1.0], 2), ([1.0, 1.0], 0), ([1.0, 1.0], 0)]
