"""evaluate computes losses of many batches at once: they are still the mean over what counts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fitkit
from fitkit import ConfigurationError

SAMPLES, BATCH = 75, 8  # a last batch of 3
LABELS = torch.arange(SAMPLES) % 3
SOME_IGNORED = torch.where(torch.arange(SAMPLES) % 20 == 19, -100, LABELS)
ONE_HOT = F.one_hot(LABELS, 3)
VALUES = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1))
INPUTS = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))


CASES = {
    "cross_entropy": ("cross_entropy", F.cross_entropy, LABELS),
    "ignored labels": ("cross_entropy", F.cross_entropy, SOME_IGNORED),
    "one label that doesn't count": (
        nn.CrossEntropyLoss(ignore_index=1),
        lambda p, y: F.cross_entropy(p, y, ignore_index=1),
        LABELS,
    ),
    "weights of classes": (
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 4.0])),
        lambda p, y: F.cross_entropy(p, y, weight=torch.tensor([1.0, 2.0, 4.0]).double()),
        LABELS,
    ),
    "smoothed labels": (
        nn.CrossEntropyLoss(label_smoothing=0.1),
        lambda p, y: F.cross_entropy(p, y, label_smoothing=0.1),
        LABELS,
    ),
    "one-hot": ("cross_entropy", lambda p, y: F.cross_entropy(p, y.double()), ONE_HOT),
    "mse": ("mse", lambda p, y: F.mse_loss(p, y.double()), VALUES),
    "kl_div": (
        nn.KLDivLoss(reduction="batchmean"),
        lambda p, y: F.kl_div(p, y.double(), reduction="batchmean"),
        VALUES.softmax(1),
    ),
    "bce_with_logits": (
        "bce_with_logits",
        lambda p, y: F.binary_cross_entropy_with_logits(p, y.double()),
        ONE_HOT.float(),
    ),
    "a function of one's own": (
        lambda p, y: (p - y).abs().amax(),
        lambda p, y: (p - y.double()).abs().amax(),
        VALUES,
    ),
}


def model_for(loss, metrics):
    torch.manual_seed(0)
    model = fitkit.Model(nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1)))
    model.compile("sgd", loss, metrics=metrics, accelerator="cpu")
    return model


COUNTED = {"ignored labels", "one label that doesn't count", "weights of classes"}
"""Whose mean is over labels or their weights: that of all samples at once."""


def mean_of_batches(model, function, target, batch=BATCH):
    """Over batches, weighed by their samples, in float64."""
    net = model.net.double()
    total = sum(
        function(net(x.double()), y).item() * len(y)
        for x, y in zip(INPUTS.split(batch), target.split(batch), strict=True)
    )
    model.net.float()
    return total / SAMPLES


@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_the_mean_of_the_batches_losses(case):
    loss, function, target = CASES[case]
    model = model_for(loss, [lambda p, y: p.mean(), "mse"] if target.ndim > 1 else ["accuracy"])
    whole = SAMPLES if case in COUNTED else BATCH
    expected = mean_of_batches(model, function, target, whole)
    for _ in range(2):
        values = model.evaluate(INPUTS, target, batch_size=BATCH, verbose=0, return_dict=True)
        assert values["loss"] == pytest.approx(expected, rel=1e-6)


def test_positions_within_samples_count_alike():
    x, y = torch.randn(20, 5, 4), torch.randint(3, (20, 6))

    class Sequences(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 18)

        def forward(self, x):
            return self.layer(x).mean(1).reshape(-1, 3, 6)

    torch.manual_seed(0)
    model = fitkit.Model(Sequences())
    model.compile("sgd", "cross_entropy", metrics=["accuracy"], accelerator="cpu")
    found = model.evaluate(x, y, batch_size=3, verbose=0, return_dict=True)["loss"]
    assert found == pytest.approx(F.cross_entropy(model.net(x), y).item(), rel=1e-6)


def test_who_reads_values_meanwhile_changes_no_bit():
    class Reads(fitkit.callbacks.Callback):
        def __init__(self):
            self.losses = []

        def on_test_batch_end(self, batch, logs):
            self.losses.append(logs["loss"])

    model, reads = model_for("cross_entropy", ["accuracy"]), Reads()
    unread = model.evaluate(INPUTS, LABELS, batch_size=BATCH, verbose=0)
    read = model.evaluate(INPUTS, LABELS, batch_size=BATCH, verbose=0, callbacks=[reads])
    assert read == unread
    with torch.no_grad():
        running = [
            F.cross_entropy(model.net(INPUTS[:end]), LABELS[:end]).item()
            for end in [*range(BATCH, SAMPLES, BATCH), SAMPLES]
        ]
    assert reads.losses == pytest.approx(running, rel=1e-5)


def test_each_epochs_validation_begins_anew():
    """The second pass's first batch waits with the others, and counts once."""
    model = model_for("cross_entropy", ["accuracy"])
    losses = []

    class Judge(fitkit.callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            model.net.eval()
            with torch.no_grad():
                losses.append(F.cross_entropy(model.net(INPUTS), LABELS).item())

    data = INPUTS, LABELS
    history = model.fit(
        *data, batch_size=BATCH, epochs=3, validation_data=data, callbacks=[Judge()], verbose=0
    )
    assert history.history["val_loss"] == pytest.approx(losses, rel=1e-5)


def loss_of(net, loss, x, y, metrics=("mse",)):
    """The loss that evaluate gives."""
    model = fitkit.Model(net)
    model.compile("sgd", loss, metrics=list(metrics), accelerator="cpu")
    return model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)["loss"]


def test_metrics_that_see_each_batch_alone():
    def distance(prediction, target):
        return (prediction - target).abs().mean()

    model = model_for("mse", [distance])
    found = model.evaluate(INPUTS, VALUES, batch_size=BATCH, verbose=0, return_dict=True)
    with torch.no_grad():
        assert found["loss"] == pytest.approx(F.mse_loss(model.net(INPUTS), VALUES).item())
    data = {"x": INPUTS, "y": VALUES, "validation_data": (INPUTS, VALUES)}
    history = model.fit(**data, batch_size=BATCH, epochs=2, verbose=0).history
    with torch.no_grad():
        expected = F.mse_loss(model.net.eval()(INPUTS), VALUES).item()
    assert history["val_loss"][-1] == pytest.approx(expected)


def test_weights_for_the_places_of_a_batch():
    weight = torch.rand(BATCH, 1)
    x, y, net = torch.randn(9 * BATCH, 4), torch.ones(9 * BATCH, 3), nn.Linear(4, 3)
    found = loss_of(net, nn.BCEWithLogitsLoss(weight=weight), x, y)
    expected = F.binary_cross_entropy_with_logits(net(x), y, weight=weight.repeat(9, 1))
    assert found == pytest.approx(expected.item())


@pytest.mark.parametrize("loss", ["hinge", "squared_hinge"])
def test_labels_of_which_batches_have_one_kind_each(loss):
    y = (torch.arange(9 * BATCH) // 24 % 2 * 1.0).reshape(-1, 1)  # batches of 0, of 1, of 0
    x, net = torch.randn(9 * BATCH, 4), nn.Linear(4, 1)
    values = F.relu(1 - (2 * y - 1) * net(x)) ** (2 if loss == "squared_hinge" else 1)
    assert loss_of(net, loss, x, y) == pytest.approx(values.mean().item())
    with pytest.raises(ConfigurationError):  # of both ways to write labels
        loss_of(net, loss, x, (torch.arange(9 * BATCH) // 24 - 1.0).reshape(-1, 1))


def test_a_loss_to_which_one_dimension_is_one_sample():
    x, y = torch.randn(20, 4), torch.arange(20) % 2
    net = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    found = loss_of(net, "multilabel_soft_margin", x, y)
    assert found == pytest.approx(F.multilabel_soft_margin_loss(net(x), y.float()).item())


def test_rows_that_two_batches_mix_up_are_refused():
    class Shifts(nn.Linear):
        def forward(self, x):
            rows = super().forward(x)
            calls.append(len(x))
            if len(calls) == 3:
                return rows[1:]
            return torch.cat([rows[:1], rows]) if len(calls) == 5 else rows

    calls = []
    with pytest.raises(fitkit.ConfigurationError, match=r"\(7, 3\)"):
        loss_of(Shifts(4, 3), "mse", INPUTS[:64], VALUES[:64])


class Scaled(nn.CrossEntropyLoss):
    def __call__(self, prediction, target):
        return super().__call__(16 * F.normalize(prediction, dim=-1), target)


def test_a_loss_in_whose_call_the_users_code_acts_sees_each_batch():
    hooked = nn.CrossEntropyLoss()
    hooked.register_forward_pre_hook(lambda module, given: (5 * given[0].softmax(-1), given[1]))
    for loss, scores in (
        (hooked, lambda p: 5 * p.softmax(-1)),
        (Scaled(), lambda p: 16 * F.normalize(p, dim=-1)),
    ):
        model = model_for(loss, ["accuracy"])
        expected = F.cross_entropy(scores(model.net(INPUTS)), LABELS).item()
        found = model.evaluate(INPUTS, LABELS, batch_size=BATCH, verbose=0, return_dict=True)
        assert found["loss"] == pytest.approx(expected, rel=1e-5)


def test_weighted_samples_arent_joined():
    torch.manual_seed(0)
    net, x = torch.nn.Linear(4, 3), torch.randn(40, 4)
    y, weight = torch.randint(3, (40,)), torch.rand(40)
    model = fitkit.Model(net)
    model.compile("sgd", "cross_entropy", metrics=["accuracy"], accelerator="cpu")
    found = model.evaluate(x, y, sample_weight=weight, batch_size=8, verbose=0)[0]
    parts = zip(x.split(8), y.split(8), weight.split(8), strict=True)
    with torch.no_grad():
        each = [(F.cross_entropy(net(a), b, reduction="none") * w).mean() for a, b, w in parts]
    assert found == pytest.approx(torch.stack(each).mean().item(), rel=1e-6)
