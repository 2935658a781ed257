"""compile(out_of_memory="split"): a batch that doesn't fit is computed in parts, exactly."""

import copy
import json

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence

import fitkit
from fitkit.errors import ConfigurationError, OutOfMemoryError
from fitkit.trees import leaves
from tests.nets import classification

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*didn't fit into memory"),
]

X, LABELS = classification(90, 6, seed=1)
IGNORED = torch.where(torch.arange(90) % 7 == 0, -100, LABELS)
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB"


class Narrow(nn.Module):
    """A net that takes at most so many rows at a time: a larger batch fails forward or backward."""

    def __init__(self, rows, fails="forward", heads=1, dropout=0.0):
        super().__init__()
        self.body, self.drop = nn.Linear(6, 16), nn.Dropout(dropout)
        self.heads = nn.ModuleList(nn.Linear(16, 3) for _ in range(heads))
        self.register_buffer("seen", torch.zeros(()))
        self.rows, self.fails = rows, fails

    def fail(self, gradient=None):
        raise torch.OutOfMemoryError(FULL)

    def forward(self, x):
        self.seen += len(x)  # which an attempt must leave as it was
        hidden = self.drop(self.body(x).relu())
        outputs = [head(hidden) for head in self.heads]
        if len(x) > self.rows and self.fails == "forward":
            self.fail()
        if len(x) > self.rows and hidden.requires_grad:
            hidden.register_hook(self.fail)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


class Writes(Narrow):
    """Writes into what it is given, before it fails."""

    def forward(self, x):
        return super().forward(x.mul_(0.5))


def trained(rows, fails="forward", *, y=LABELS, out_of_memory="split", net=None, **arguments):
    """Return the net and the history of two epochs of batches of 20."""
    fitkit.set_seed(1)
    heads = 2 if isinstance(y, tuple) else 1
    net = Narrow(rows, fails, heads) if net is None else net(rows, fails)
    loss = "cross_entropy" if heads == 1 else ["cross_entropy", "cross_entropy"]
    given = {"loss": loss, "metrics": ["accuracy"], "accelerator": "cpu", "devices": 1}
    model = fitkit.Model(net)
    model.compile("adam", **{**given, **arguments}, out_of_memory=out_of_memory)
    history = model.fit(X, y, batch_size=20, epochs=2, verbose=0)
    return model, history.history


def assert_same(one, other, within=1e-6):
    (model, history), (expected, logs) = one, other
    for name, value in expected.net.state_dict().items():
        torch.testing.assert_close(
            model.net.state_dict()[name], value, rtol=within, atol=within, msg=name
        )
    assert history.keys() == logs.keys()
    for name in logs:
        np.testing.assert_allclose(history[name], logs[name], rtol=within, atol=within)


SETTINGS = {
    "plain": {},
    "ignored labels": {"y": IGNORED},
    "two outputs": {"y": (IGNORED, LABELS)},
    "accumulated": {"accumulate_grad_batches": 3},
    "two outputs, accumulated": {"y": (IGNORED, LABELS), "accumulate_grad_batches": 3},
    "an effective size": {"effective_batch_size": 40, "gradient_clip_val": 0.1},
    "dropout": {"net": lambda rows, fails: Narrow(rows, fails, dropout=0.5)},
    "a net that writes into its input": {"net": Writes},
    "values of samples": {"loss": lambda p, t: F.cross_entropy(p, t, reduction="none")},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_cut_batches_give_the_uncut_runs_numbers(name):
    settings = SETTINGS[name]
    uncut = trained(1000, out_of_memory="raise", **settings)
    on = trained(1000, **settings)
    assert on[1] == uncut[1]  # to the bit where nothing runs out
    for rows, fails in ((3, "forward"), (7, "backward")):
        cut = trained(rows, fails, **settings)
        assert_same(cut, uncut)
        torch.testing.assert_close(cut[0].net.seen, uncut[0].net.seen)


class Steps(fitkit.Model):
    """A model with a step of its own, which logs."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("own", loss, on_step=True, on_epoch=True)
        self.log("shift", float(np.random.rand() * 0 + len(x) * 0 + 2.0), on_step=False)
        self.log("rows", float(len(x)), reduce_fx="sum")
        self.log("most", loss.detach() * 0 + x.max(), reduce_fx="max")
        return loss


def test_a_step_of_ones_own_logs_each_row_once():
    def run(rows, fails, **option):
        fitkit.set_seed(1)
        model = Steps(Narrow(rows, fails))
        model.compile("adam", accelerator="cpu", devices=1, **option)
        return model, model.fit(X, LABELS, batch_size=20, epochs=2, verbose=0).history

    uncut = run(1000, "forward")
    for fails in ("forward", "backward"):
        assert_same(run(3, fails, out_of_memory="split"), uncut)


class Counts(fitkit.Model):
    """Counts correct answers by an object of its own, before what may fail."""

    def __init__(self, net):
        super().__init__(net)
        self.right = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.right((self.net.heads[0](self.net.body(x).relu()).argmax(1) == y).float())
        self.log("right", self.right, on_step=False, on_epoch=True)
        return F.cross_entropy(self.net(x), y)


def test_a_metric_that_counts_before_the_error_counts_each_row_once():
    def run(rows, fails, **option):
        fitkit.set_seed(1)
        model = Counts(Narrow(rows, fails))
        model.compile("adam", accelerator="cpu", devices=1, **option)
        return model, model.fit(X, LABELS, batch_size=20, epochs=2, verbose=0).history

    uncut = run(1000, "forward")
    for fails in ("forward", "backward"):
        assert_same(run(3, fails, out_of_memory="split"), uncut)


@pytest.mark.parametrize("own", [False, True])
def test_updates_that_are_left_out_are_those_of_the_uncut_run(own):
    x = X.clone()
    x[25], x[70] = torch.nan, 50.0  # a fault, and a spike

    def run(rows, **option):
        fitkit.set_seed(1)
        model = (Steps if own else fitkit.Model)(Narrow(rows, "backward"))
        loss = None if own else "cross_entropy"
        model.compile("adam", loss, accelerator="cpu", devices=1, **option)
        guard = fitkit.callbacks.SkipBadUpdates(spikes=0.5, in_a_row=99)
        given = {"epochs": 12, "shuffle": False, "callbacks": [guard], "verbose": 0}
        history = model.fit(x, LABELS, batch_size=20, **given).history
        assert len(guard.skipped) > 12  # spikes, too
        history.pop("most", None)  # a NaN in the batch's rows
        return model, history

    assert_same(run(3, out_of_memory="split"), run(1000))


def test_mixup_looks_at_as_many_rows_as_fit():
    mixed = {"batch_transforms": [fitkit.transforms.MixUp(0.2)], "metrics": None}
    runs = trained(3, **mixed), trained(1000, out_of_memory="raise", **mixed)
    for model, _ in runs:
        model.net.seen.zero_()  # the looks count, too
    assert_same(*runs)


def test_several_optimizers_by_turns():
    class Turns(fitkit.Model):
        def training_step(self, batch, batch_idx, optimizer_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            parts = self.net.body.parameters(), self.net.heads.parameters()
            return [torch.optim.SGD(part, 0.1) for part in parts]

    def run(rows, fails, **option):
        fitkit.set_seed(1)
        model = Turns(Narrow(rows, fails))
        model.compile(accelerator="cpu", devices=1, **option)
        return model, model.fit(X, LABELS, batch_size=20, epochs=1, verbose=0).history

    uncut = run(1000, "forward")
    for fails in ("forward", "backward"):
        cut = run(3, fails, out_of_memory="split")
        for name, value in uncut[0].net.named_parameters():
            torch.testing.assert_close(cut[0].net.get_parameter(name), value, rtol=1e-6, atol=1e-6)


def test_later_batches_of_that_shape_start_in_parts_and_it_is_said_once():
    net = Narrow(5)
    asked = []
    # In evaluation mode, once for these shapes, it is asked whether parts give the batch's loss.
    net.register_forward_pre_hook(lambda _, x: net.training and asked.append(len(x[0])))
    model = fitkit.Model(net)
    model.compile("sgd", "cross_entropy", accelerator="cpu", devices=1, out_of_memory="split")
    with pytest.warns(UserWarning, match="batch_size=5, accumulate_grad_batches=4.*FK069") as said:
        history = model.fit(X, LABELS, batch_size=20, epochs=1, shuffle=False, verbose=0)
    assert asked == [20, 10, 5, 5, 5, 5] + [5, 5, 5, 5] * 3 + [10, 5, 5]
    assert len(said) == 1
    assert history.params["parts"] == {"20 x 6, 20": 4, "10 x 6, 10": 2}


def test_a_run_s_folder_has_the_parts(tmp_path):
    model = fitkit.Model(Narrow(5))
    model.compile("sgd", "cross_entropy", accelerator="cpu", devices=1, out_of_memory="split")
    given = {"batch_size": 45, "verbose": 0, "callbacks": fitkit.callbacks.RunFolder(tmp_path)}
    model.fit(X, LABELS, **given)
    assert json.loads((tmp_path / "run.json").read_text())["parts"] == {"45 x 6, 45": 16}
    page = (tmp_path / "index.html").read_text()
    assert "<td>45 x 6, 45</td><td>16</td>" in page
    model.compile(out_of_memory="raise")
    model.net.rows = 1000
    model.fit(X, LABELS, **{**given, "callbacks": fitkit.callbacks.RunFolder(tmp_path / "whole")})
    assert "<td>16</td>" not in (tmp_path / "whole" / "index.html").read_text()


def test_other_errors_and_one_row_that_does_not_fit_stay_errors():
    with pytest.raises(OutOfMemoryError, match="FK040"):
        trained(0)
    net = Narrow(1000)
    net.fail = None
    net.rows = 0
    model = fitkit.Model(net)
    model.compile("sgd", "cross_entropy", accelerator="cpu", devices=1, out_of_memory="split")
    with pytest.raises(TypeError):
        model.fit(X, LABELS, verbose=0)


def pairs(prediction, target):
    """Compare each sample with each other."""
    return (prediction[:, None] - prediction[None]).square().mean() + F.cross_entropy(
        prediction, target
    )


def test_what_cannot_be_computed_in_parts_is_refused():
    with pytest.raises(OutOfMemoryError, match="FK068"):
        trained(3, loss=pairs)
    trained(1000, loss=pairs)
    given = {"accelerator": "cpu", "out_of_memory": "split"}
    normed = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    model = fitkit.Model(normed)
    model.compile("sgd", "cross_entropy", devices=1, **given)
    with pytest.raises(ConfigurationError, match=r"1 \(BatchNorm1d\).*FK068"):
        model.fit(X, LABELS, verbose=0)
    normed[1].eval()  # frozen
    model.fit(X, LABELS, verbose=0)
    model.compile("lbfgs")
    with pytest.raises(ConfigurationError, match="LBFGS.*FK068"):
        model.fit(X, LABELS, verbose=0)
    manual = Steps(Narrow(3))
    manual.automatic_optimization = False
    manual.compile("sgd", devices=1, **given)
    with pytest.raises(ConfigurationError, match="automatic_optimization.*FK068"):
        manual.fit(X, LABELS, verbose=0)
    for layer in (
        nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
        torch.nn.utils.spectral_norm(nn.Linear(6, 6)),
    ):
        model = fitkit.Model(nn.Sequential(layer, nn.Flatten(), nn.Linear(6, 3)))
        model.compile("sgd", "cross_entropy", devices=1, **given)
        with pytest.raises(ConfigurationError, match="FK068"):
            model.fit(X, LABELS, verbose=0)
    for wrong in ({"strategy": "fsdp"}, {"strategy": "ddp_sharded"}, {"sync_batchnorm": True}):
        with pytest.raises(ConfigurationError, match="FK068"):
            fitkit.Model(Narrow(3)).compile("sgd", "mse", devices=2, **given, **wrong)
    with pytest.raises(ConfigurationError, match="'raise', 'split'"):
        fitkit.Model(Narrow(3)).compile("sgd", "mse", out_of_memory="halve")


@pytest.mark.parametrize(
    "x",
    [
        pack_sequence([*X[:20].unsqueeze(1)]),
        torch.nested.nested_tensor([*X[:20].unsqueeze(1)], layout=torch.jagged),
        [*X[:20]],
        {"nodes": torch.randn(60, 6), "graph": torch.arange(60) // 3},
    ],
    ids=["packed", "nested", "list", "graph"],
)
def test_what_has_no_rows_is_an_error_that_says_so(x):
    class Full(nn.Linear):
        def forward(self, *given, **named):
            raise torch.OutOfMemoryError(FULL)

    model = fitkit.Model(Full(6, 3))
    model.compile("sgd", "cross_entropy", accelerator="cpu", devices=1, out_of_memory="split")
    with pytest.raises(OutOfMemoryError, match="FK068") as caught:
        model.fit([(x, LABELS[:20])], verbose=0)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


class Pairs(fitkit.Model):
    def training_step(self, batch, batch_idx):
        return pairs(self.net(batch[0]), batch[1])


class Labels(fitkit.Model):
    """Takes the mean over labels that aren't ignored, and says so where asked."""

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        return {"loss": loss, "count": (batch[1] >= 0).sum()} if self.net.says else loss


class Mixed(Narrow):
    def forward(self, x):
        return super().forward(x - x.mean(0))


def test_steps_and_nets_whose_parts_are_not_the_batch_are_refused_at_the_first_cut():
    def run(kind, net, says=True, loss=None):
        fitkit.set_seed(1)
        net.says = says
        model = kind(net)
        given = {"accelerator": "cpu", "devices": 1, "out_of_memory": "split"}
        model.compile("sgd", loss, **given)
        model.fit(X, IGNORED, batch_size=20, verbose=0)

    for kind, net, says, loss in (
        (Pairs, Narrow(5), True, None),
        (Labels, Narrow(5), False, None),
        (fitkit.Model, Mixed(5), True, "cross_entropy"),
    ):
        before = copy.deepcopy(net.state_dict())
        with pytest.raises(OutOfMemoryError, match="halves.*FK068"):
            run(kind, net, says, loss)
        for name, value in before.items():
            torch.testing.assert_close(net.state_dict()[name], value, msg=name)
        assert net.training
    run(Labels, Narrow(5))


def test_single_batches_are_cut_too():
    def values(rows, **option):
        fitkit.set_seed(1)
        model = fitkit.Model(Narrow(rows, "backward"))
        model.compile("adam", "cross_entropy", accelerator="cpu", devices=1, **option)
        return [model.train_on_batch(X[:20], LABELS[:20]) for _ in range(3)]

    assert values(4, out_of_memory="split") == pytest.approx(values(1000), rel=1e-6)


@pytest.mark.parametrize("trials", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_lengths_and_caps_at_random_change_nothing(trials):
    draw = np.random.default_rng(0)
    for trial in range(trials):
        lengths = draw.integers(1, 24, 6)
        ends = np.cumsum(lengths)
        rows = [slice(end - size, end) for end, size in zip(ends, lengths, strict=True)]
        batches = [(X[row], IGNORED[row]) for row in rows]
        runs = []
        for cap, option in ((1000, {}), (int(draw.integers(1, 9)), {"out_of_memory": "split"})):
            fitkit.set_seed(trial)
            model = fitkit.Model(Narrow(cap, ["forward", "backward"][trial % 2]))
            model.compile("adam", "cross_entropy", accelerator="cpu", devices=1, **option,
                          accumulate_grad_batches=trial % 3 + 1)  # fmt: skip
            runs.append((model, copy.deepcopy(model.fit(batches, epochs=1, verbose=0).history)))
        assert_same(runs[1], runs[0])


class Wide(nn.Module):
    """A net for evaluations that takes at most so many rows; two outputs where asked."""

    def __init__(self, rows, heads=1):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(heads))
        self.rows = rows

    def forward(self, x):
        if len(x) > self.rows:
            raise torch.OutOfMemoryError(FULL)
        outputs = [head(x) for head in self.heads]
        return outputs[0] if len(outputs) == 1 else {"a": outputs[0], "b": outputs[1]}


@pytest.mark.parametrize("several", [False, True])
def test_evaluations_and_predictions_are_cut_too(several, tmp_path):
    def values(rows, **option):
        torch.manual_seed(3)
        model = fitkit.Model(Wide(rows, 2 if several else 1))
        loss = {"a": "cross_entropy", "b": "cross_entropy"} if several else "cross_entropy"
        y = {"a": IGNORED, "b": LABELS} if several else IGNORED
        model.compile("sgd", loss, metrics=["accuracy"], accelerator="cpu", devices=1, **option)
        single = {name: part[:20] for name, part in y.items()} if several else y[:20]
        found = [
            model.evaluate(X, y, batch_size=20, return_dict=True, verbose=0),
            model.test_on_batch(X[:20], single, return_dict=True),
        ]
        predicted = [
            model.predict(X, batch_size=20, verbose=0),
            model.predict_on_batch(X[:20]),
            model.predict(X, batch_size=20, verbose=0, out=tmp_path / f"{rows}.npy"),
        ]
        streamed = list(model.predict_batches(X, batch_size=20))
        return found, predicted, streamed

    expected, cut = values(1000), values(3, out_of_memory="split")
    for one, other in zip(cut[0], expected[0], strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    for one, other in zip(cut[1] + cut[2], expected[1] + expected[2], strict=True):
        for mine, theirs in zip(leaves(one), leaves(other), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)


def test_validations_are_cut_too():
    histories = []
    for rows, option in ((1000, {}), (3, {"out_of_memory": "split"})):
        torch.manual_seed(3)
        model = fitkit.Model(Wide(rows))
        model.compile("sgd", "cross_entropy", accelerator="cpu", devices=1, **option)
        data = {"validation_data": (X, IGNORED), "validation_batch_size": 40}
        histories.append(model.fit(X, LABELS, batch_size=20, verbose=0, **data).history)
    for name, values in histories[0].items():
        assert histories[1][name] == pytest.approx(values, rel=1e-6)
