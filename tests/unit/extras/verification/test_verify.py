"""`fitkit.verify`: what is equal, to how many digits, and why not."""

import copy
import math
import os
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import fitkit
from fitkit.extras.verification.trials import Trials
from fitkit.samples import Counted
from tests import nets
from tests.reference import compiled, copied_state, is_same, plain_loop

ALL = ["data", "augmentation", "repeat", "accumulated", "processes", "evaluation", "compiled",
       "resumed", "precision"]  # fmt: skip


def verified(net, x, y, loss="cross_entropy", *, devices=1, kind=fitkit.Model, data=None,
             optimizer="adam", **arguments):  # fmt: skip
    model = compiled(net, optimizer, loss, kind, **arguments)
    given = (x, y) if data is None else (data,)
    return fitkit.verify(model, *given, devices=devices, verbose=False)


def kinds(row):
    return [cause.kind for cause in row.causes]


@pytest.fixture
def data():
    return nets.classification(100, 8)


def test_a_plain_net_is_the_same_however_its_batches_are_cut(data, capsys):
    model = compiled(nets.dense(8, 16, 3), "adam", metrics=["accuracy"])
    found = fitkit.verify(model, *data)
    assert [row.name for row in found.rows] == ALL
    assert found.ok and found.causes == ()
    assert math.isinf(found["data"].digits)
    assert math.isinf(found["repeat"].digits)
    assert math.isinf(found["resumed"].digits)
    assert found["accumulated"].digits > 10
    assert found["processes"].digits > 10
    assert found["evaluation"].digits > 10
    assert 3 < found["precision"].digits < 8  # float32's
    assert found["compiled"].ok is None and "jit_compile=True" in found["compiled"].note
    assert capsys.readouterr().out.strip() == found.table == str(found)
    assert "on 2 processes" in found.table


def test_the_digits_of_a_precision_are_those_of_a_plain_loop(data):
    x, y = data
    found = verified(nets.dense(8, 16, 3), x[:32], y[:32], optimizer="sgd")
    wide, narrow, start = (nets.dense(8, 16, 3) for _ in range(3))
    for net, dtype in ((wide, torch.float64), (narrow, torch.float32)):
        net.to(dtype)
        plain_loop(net, torch.optim.SGD(net.parameters(), 1e-3), [(x[:32].to(dtype), y[:32])])
    flat = [nn.utils.parameters_to_vector(n.double().parameters()).detach()
            for n in (wide, narrow, start)]  # fmt: skip
    difference = (flat[0] - flat[1]).norm() / (flat[0] - flat[2]).norm()
    # The order of the rows is drawn, which rounds otherwise.
    assert found["precision"].digits == pytest.approx(-math.log10(difference), abs=0.7)


def test_model_random_numbers_and_files_are_as_before(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = compiled(nets.normed(), "adam", "mse", lr_scheduler="cosine")
    x = nets.normal(64, 3)
    model.fit(x, nets.normal(64, 4), verbose=0)
    model.eval()
    model.net[0].train()
    weights, optimizer = copied_state(model), copy.deepcopy(model.optimizer.state_dict())
    modes, history = [m.training for m in model.modules()], model.history
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    loader = DataLoader(list(zip(x, nets.normal(64, 4), strict=True)), 32, shuffle=True,
                        generator=torch.Generator().manual_seed(5))  # fmt: skip
    generator = loader.generator.get_state()
    fitkit.verify(model, loader, devices=1, verbose=False)
    assert is_same(weights, copied_state(model))
    assert is_same(optimizer, model.optimizer.state_dict())
    assert modes == [m.training for m in model.modules()]
    assert model.history is history
    assert torch.equal(drawn[0], torch.get_rng_state())
    assert drawn[1] == random.getstate()
    assert np.array_equal(drawn[2], np.random.get_state()[1])
    assert torch.equal(generator, loader.generator.get_state())
    assert os.listdir(tmp_path) == []


def test_batch_normalization_is_named_with_its_layer_and_what_helps(data):
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    found = verified(net, *data, devices=2)
    assert not found.ok
    assert kinds(found["accumulated"]) == kinds(found["processes"]) == ["batch_norm"]
    assert found["accumulated"].causes[0].place == "BatchNorm1d '1'"
    assert found["accumulated"].first == "0.weight"
    assert "sync_batchnorm=True" in found["processes"].causes[0].advice
    assert "equal to" in found["processes"].causes[0].advice
    assert found["evaluation"].ok and found["resumed"].ok


def test_batch_normalization_after_dropout_is_told_what_helps_too(data):
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Linear(16, 3))
    found = verified(net, *data, devices=2, optimizer="sgd")["processes"]
    assert kinds(found) == ["batch_norm"]
    assert "compile(sync_batchnorm=True): then equal to" in found.causes[0].advice


def test_frozen_batch_normalization_makes_no_difference(data):
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    net[1].eval()
    assert verified(net, *data).ok


class DrawsInForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nets.linear(8, 16), nets.linear(16, 3)

    def forward(self, x):
        noise = torch.randn_like(x) + torch.rand(len(x), 1) + torch.empty_like(x).exponential_()
        drawn = F.gumbel_softmax(self.one(F.dropout(x + 0.1 * noise, 0.3, self.training)))
        return self.two(drawn * torch.bernoulli(torch.full_like(drawn, 0.7)))


class Sequences(nn.Module):
    """Reads a sample as 4 steps of 2 numbers, with the batch in the middle."""

    def __init__(self, body):
        super().__init__()
        self.body, self.last = body, nets.linear(8, 3)
        self.first = nets.linear(2, 8)

    def forward(self, x):
        steps = self.first(x.view(-1, 4, 2)).transpose(0, 1)
        found = self.body(steps)
        return self.last((found[0] if isinstance(found, tuple) else found).mean(0))


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.2)
    return Sequences(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


DRAWING = {
    "dropout": lambda: nn.Sequential(
        nets.linear(8, 16), nn.Dropout(0.3, True), nets.linear(16, 9), nn.AlphaDropout(0.3),
        nets.linear(9, 3),
    ),
    "functions": lambda: nn.Sequential(DrawsInForward(), nn.Tanh()),
    "attention": encoder,
    "recurrent": lambda: Sequences(nn.LSTM(8, 8, 2, dropout=0.3)),
    "checkpointed": lambda: Checkpointed(nn.Sequential(nn.Dropout(0.3), nets.linear(8, 3))),
}  # fmt: skip


class Checkpointed(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)


@pytest.mark.parametrize("name", DRAWING)
def test_nets_that_draw_are_compared_exactly(data, name):
    torch.manual_seed(0)
    model = compiled(DRAWING[name](), "adam")
    trials = Trials(model, [tuple(part[:32] for part in data)], 2, None)
    others = [trials.accumulated(4)]
    if name == "attention":
        others.append(trials.on_processes())
    unmasked = trials.reference(masked=False)
    assert trials.compared(trials.reference(), unmasked)[0] > 0.1  # other numbers than torch's
    for other in others:
        assert trials.compared(trials.reference(), other)[0] < 1e-6


def test_a_fault_is_found_behind_layers_that_draw(data):
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 9),
                        nn.AlphaDropout(0.2), nn.BatchNorm1d(9), nn.Linear(9, 3))  # fmt: skip
    found = verified(net, *data)
    assert [(c.kind, c.place) for c in found["accumulated"].causes] == [
        ("batch_norm", "BatchNorm1d '5'")
    ]
    assert found["resumed"].ok  # the checkpoint has the random numbers
    assert "by rows" in found["accumulated"].note


def test_layers_that_draw_in_other_ways_are_named_and_then_left_out(data):
    net = nn.Sequential(nn.Linear(8, 16), nn.RReLU(), nn.Linear(16, 9), nn.BatchNorm1d(9),
                        nn.Linear(9, 3))  # fmt: skip
    found = verified(net, *data)
    assert [(c.kind, c.place) for c in found["accumulated"].causes] == [
        ("dropout", "RReLU '1'"), ("batch_norm", "BatchNorm1d '3'")
    ]  # fmt: skip


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def test_a_layer_that_mixes_samples_is_named_in_training_and_evaluation(data):
    found = verified(nn.Sequential(nets.linear(8, 16), Centred(), nets.linear(16, 3)), *data)
    for row in (found["accumulated"], found["evaluation"]):
        assert [(c.kind, c.place) for c in row.causes] == [("layer", "Centred '1'")]


def ignoring(prediction, target):
    return F.cross_entropy(prediction, target, ignore_index=-100)


def summed(prediction, target):
    return F.cross_entropy(prediction, target, reduction="sum")


def contrastive(prediction, target):
    return F.cross_entropy(prediction @ prediction.T, torch.arange(len(prediction)))


@pytest.mark.parametrize(("loss", "kind", "word"), [
    (ignoring, "ignored_labels", "'count'"), (contrastive, "loss", "undivided"),
])  # fmt: skip
def test_a_loss_that_is_no_mean_over_samples_is_told_with_what_to_write(data, loss, kind, word):
    x, y = data
    if loss is ignoring:
        y[torch.rand(100, generator=torch.Generator().manual_seed(3)) < 0.4] = -100
    found = verified(nets.dense(8, 16, 3), x, y, loss)
    assert kinds(found["accumulated"]) == kinds(found["evaluation"]) == [kind]
    assert word in found["accumulated"].causes[0].advice
    if loss is ignoring:  # the advice holds
        assert verified(nets.dense(8, 16, 3), x, y, "cross_entropy").ok


def test_a_loss_that_sums_is_told_in_the_words_that_refuse_it(data):
    found = verified(nets.dense(8, 16, 3), *data, summed)
    assert found["accumulated"].ok is None
    assert "sums over the samples of a batch" in found["accumulated"].note
    assert kinds(found["evaluation"]) == ["loss"]


class OwnStep(fitkit.Model):
    counts = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = ignoring(self(x), y)
        return {"loss": loss, "count": (y != -100).sum()} if self.counts else loss


class CountingStep(OwnStep):
    counts = True


def test_a_step_of_the_models_own_is_equal_where_it_says_what_it_counts(data):
    x, y = data
    y[::3] = -100
    y[:40] = -100
    found = verified(nets.dense(8, 16, 3), x, y, None, kind=OwnStep)
    assert kinds(found["accumulated"]) == ["ignored_labels"]
    assert "training_step" in found["accumulated"].causes[0].advice
    found = verified(nets.dense(8, 16, 3), x, y, None, kind=CountingStep)
    assert found["accumulated"].ok


def largest(prediction, target):
    return prediction.max()


def test_a_metric_that_is_no_mean_over_samples_is_named(data):
    found = verified(nets.dense(8, 16, 3), *data, metrics=["accuracy", largest])
    assert found["accumulated"].ok
    assert kinds(found["evaluation"]) == ["metric"]
    assert found["evaluation"].causes[0].place == "'largest'"


class Unsteady(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        noise = int.from_bytes(os.urandom(2), "big") / 2**16
        return torch.full((8,), index / 64 + noise), index % 3


def test_data_that_arent_the_same_twice_are_told_with_the_batch(data):
    found = verified(nets.dense(8, 16, 3), None, None, data=Unsteady())
    assert not found["data"].ok
    assert kinds(found["data"]) == ["data"]
    assert found["accumulated"].ok  # the batches that were read are
    (cause,) = found["augmentation"].causes
    assert (cause.kind, cause.place) == ("data", "The data set Unsteady")


class OfTheModule(Dataset):
    """Draws from a generator that no attribute leads to."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((8,), index + OUTSIDE.random()), index % 3


class Seeded(OfTheModule):
    """Draws from such a one, with the sample's seed."""

    def __getitem__(self, index):
        numbers = random.Random(fitkit.data.sample_seed())
        return torch.full((8,), index + numbers.random() + np.random.rand()), index % 3


OUTSIDE = random.Random(4)


@pytest.mark.parametrize("kind", [OfTheModule, Seeded])
def test_data_whose_numbers_are_not_the_samples_are_named(data, kind):
    wrapped = torch.utils.data.Subset(kind(), range(40))
    row = verified(nets.dense(8, 16, 3), None, None, data=wrapped)["augmentation"]
    if kind is Seeded:
        assert row.ok and math.isinf(row.digits)
    else:
        assert row.causes[0].place == "The data set OfTheModule"
        assert "sample_seed" in row.causes[0].advice


class Noise(nn.Module):
    """As a kernel that adds up in any order: other numbers each time, unless forbidden."""

    def __init__(self, obeys):
        super().__init__()
        self.obeys = obeys

    def forward(self, x):
        if self.obeys and torch.are_deterministic_algorithms_enabled():
            return x
        return x * (1 + int.from_bytes(os.urandom(2), "big") / 2**26)


@pytest.mark.parametrize(("obeys", "place"), [(True, ""), (False, "Noise '1'")])
def test_updates_that_arent_the_same_twice_are_told_first(data, obeys, place):
    net = nn.Sequential(nets.linear(8, 16), Noise(obeys), nets.linear(16, 3))
    found = verified(net, *data)
    assert [(c.kind, c.place) for c in found["repeat"].causes] == [("kernels", place)]
    assert ("deterministic=True" in found["repeat"].causes[0].advice) is obeys
    assert found["accumulated"].causes == found["repeat"].causes


class Remembers(nn.Module):
    """Keeps a running mean where no checkpoint sees it."""

    def __init__(self):
        super().__init__()
        self.mean = None

    def forward(self, x):
        if self.training:
            mean = x.detach().mean().item()
            self.mean = mean if self.mean is None else 0.5 * (self.mean + mean)
        return x - (self.mean or 0.0)


def test_a_layer_whose_state_no_checkpoint_has_is_named(data):
    net = nn.Sequential(nets.linear(8, 16), Remembers(), nets.linear(16, 3))
    found = verified(net, *data)
    assert [(c.kind, c.place) for c in found["resumed"].causes] == [("state", "Remembers '1'")]


class Narrow(nn.Module):
    def forward(self, x):
        return x.float() @ torch.eye(8)


def test_a_net_that_no_cast_reaches_is_compared_in_float32(data):
    net = nn.Sequential(Narrow(), nets.linear(8, 3))
    found = verified(net, *data, optimizer="sgd")
    assert "float32" in found.title
    assert found.ok and found["accumulated"].digits > 3


def test_the_compiled_step_is_run_where_it_is_asked_for(data):
    found = verified(nets.dense(8, 16, 3), *data, jit_compile={"backend": "eager"})
    assert found["compiled"].ok and found["compiled"].digits > 10


def test_weights_that_end_as_no_numbers_are_told(data):
    found = verified(nets.dense(8, 16, 3), *data, optimizer="sgd", learning_rate=1e200)
    assert not found.ok
    assert "finite" in found["repeat"].causes[0].words


@pytest.mark.parametrize(("given", "error", "words"), [
    ({"x": iter([])}, fitkit.ConfigurationError, "read only once"),
    ({"x": None}, TypeError, "no data"),
    ({"devices": 0}, fitkit.ConfigurationError, "devices"),
    ({"model": nn.Linear(8, 3)}, TypeError, "fitkit.Model"),
])  # fmt: skip
def test_what_cannot_be_verified_is_refused(data, given, error, words):
    model = compiled(nets.dense(8, 3))
    x, y = data
    arguments = {"model": model, "x": x, "y": None if "x" in given else y, **given}
    with pytest.raises(error, match=words):
        fitkit.verify(**arguments)


def test_a_rate_of_0_compares_nothing_and_says_so(data):
    with pytest.raises(fitkit.ConfigurationError, match="change no parameter"):
        verified(nets.dense(8, 3), *data, learning_rate=0.0)


def test_an_error_of_the_net_is_that_of_fit(data):
    with pytest.raises(fitkit.ConfigurationError, match="FK001"):
        verified(nets.dense(5, 3), *data)


def test_too_few_samples_to_be_cut_are_a_row_that_wasnt_run(data):
    x, y = data
    found = verified(nets.dense(8, 3), x[:3], y[:3])
    assert found["accumulated"].ok is None and "too small" in found["accumulated"].note
    assert "not run" in found.table


class OfBatches(fitkit.Model):
    def training_step(self, batch, batch_idx):
        rows = torch.stack([row.double().mean(0) for row in batch["rows"]])
        return (self.net(rows) ** 2).mean()


def as_lists(rows):
    return {"rows": list(rows)}


@pytest.mark.parametrize("collate", [None, as_lists], ids=["rows", "lists"])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_wrong_count_of_samples_is_found(collate, wrong, monkeypatch):
    """verify counts by itself: by rows, or by the samples that the data set gave."""
    if wrong:
        monkeypatch.setattr("fitkit.training.parts_of_batches.counted", lambda _: Counted(1))
        monkeypatch.setattr("fitkit.extras.verification.trials.samples_of", lambda _: 1)
    if collate is None:
        model = fitkit.Model(torch.nn.Linear(3, 1))
        model.compile("sgd", "mse", learning_rate=0.1, accelerator="cpu")
        data = torch.rand(24, 3), torch.rand(24, 1)
    else:
        model = OfBatches(torch.nn.Linear(3, 1))
        model.compile("sgd", learning_rate=0.1, accelerator="cpu")
        samples = [torch.rand(1 + i % 4, 3) for i in range(24)]
        data = (torch.utils.data.DataLoader(samples, 8, collate_fn=collate),)
    found = fitkit.verify(model, *data, batch_size=8, devices=1, updates=2, verbose=False)
    assert found["accumulated"].ok is not wrong, found
    if wrong:
        assert "samples" in {cause.kind for cause in found["accumulated"].causes}
