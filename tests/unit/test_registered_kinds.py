"""What a name may stand for, and what a wrong kind of entry is answered."""

import importlib
import sys

import pytest
import torch
from torch import nn

import fitkit
from fitkit.seams import (
    CALLBACKS,
    FORMATS,
    LOSSES,
    METRICS,
    OPTIMIZERS,
    PRECISIONS,
    SCHEDULERS,
    STRATEGIES,
    Callback,
    Precision,
    SingleDevice,
)

REGISTRIES = (
    CALLBACKS, FORMATS, LOSSES, METRICS, OPTIMIZERS, PRECISIONS, SCHEDULERS, STRATEGIES
)  # fmt: skip
X, Y = torch.ones(4, 2), torch.ones(4, 1)


@pytest.fixture(autouse=True)
def _names_as_before(monkeypatch):
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
        monkeypatch.setattr(registry, "_spelling", dict(registry._spelling))


class Own(Callback):
    pass


class Format:
    def write(self, path, weights):
        raise NotImplementedError

    def open(self, path):
        raise NotImplementedError


def model_of(**options):
    model = fitkit.Model(nn.Linear(2, 1))
    model.compile(**{"optimizer": "sgd", "loss": "mse", **options})
    return model


def with_callback(name):
    model_of().fit(X, Y, verbose=0, callbacks=name)


def wrong_function():
    return 3


USES = [
    (CALLBACKS, Own(), with_callback, "Own"),
    (CALLBACKS, nn.Linear, with_callback, "Linear"),
    (PRECISIONS, Precision(), lambda name: model_of(precision=name), "Precision"),
    (PRECISIONS, wrong_function, lambda name: model_of(precision=name), "wrong_function"),
    (STRATEGIES, SingleDevice(), lambda name: model_of(strategy=name), "SingleDevice"),
    (OPTIMIZERS, nn.Linear, lambda name: model_of(optimizer=name), "Linear"),
    (OPTIMIZERS, "adam", lambda name: model_of(optimizer=name), "'adam'"),
    (SCHEDULERS, torch.optim.SGD, lambda name: model_of(lr_scheduler=name), "SGD"),
    (SCHEDULERS, 3, lambda name: model_of(lr_scheduler=name), "int"),
    (LOSSES, 3, lambda name: model_of(loss=name), "int"),
    (LOSSES, nn.MSELoss, lambda name: model_of(loss=name), "MSELoss"),
    (METRICS, 3, lambda name: model_of(metrics=[name]), "int"),
    (METRICS, nn.MSELoss, lambda name: model_of(metrics=[name]), "MSELoss"),
]


@pytest.mark.parametrize(("registry", "entry", "use", "given"), USES)
def test_a_wrong_kind_of_entry_says_what_was_given_and_what_is_expected(
    registry, entry, use, given
):
    registry.add("wrong_one", entry)
    with pytest.raises(fitkit.FitkitError) as caught:
        use("wrong_one")
    message = str(caught.value)
    assert isinstance(caught.value, TypeError)
    assert message.startswith(f"{registry.kind}='wrong_one' is registered as ")
    assert given in message and message.endswith(f"which isn't {registry.expected}.")


def test_a_wrong_format_is_told_by_its_own_name_and_harms_no_other(tmp_path):
    FORMATS.add(".wrong", Format)
    model = model_of()
    with pytest.raises(TypeError, match="the class Format, which isn't an object with write"):
        model.save_weights(tmp_path / "w.wrong")
    FORMATS.add("dotless", Format())
    with pytest.raises(fitkit.ConfigurationError, match="registered as 'dotless', without its dot"):
        model.save_weights(tmp_path / "w.dotless")
    assert list(tmp_path.iterdir()) == []
    fitkit.callbacks.ModelCheckpoint(tmp_path / "w.safetensors", save_weights_only=True)


def test_a_wrong_metric_harms_no_other():
    METRICS.add("wrong_one", 3)
    with pytest.raises(fitkit.ConfigurationError, match="accuracy"):
        model_of(weighted_metrics=["auc"])


def test_a_wrong_entry_can_be_replaced_as_by_a_cell_that_runs_again():
    def cell(base):
        class Again(base):
            pass

        CALLBACKS.add("again", Again)

    cell(nn.Linear)
    cell(Callback)
    with_callback("again")


def test_a_name_may_stand_for_a_function_that_makes_a_callback_an_optimizer_or_a_schedule():
    made = []

    def callback():
        made.append(Own())
        return made[-1]

    def optimizer(params, lr=0.5):
        made.append(torch.optim.SGD(params, lr=lr))
        return made[-1]

    def schedule(optimizer):
        made.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1))
        return made[-1]

    CALLBACKS.add("from_function", callback)
    OPTIMIZERS.add("from_function", optimizer)
    SCHEDULERS.add("from_function", schedule)
    model = model_of(optimizer="from_function", lr_scheduler="from_function")
    model.fit(X, Y, verbose=0, callbacks="from_function")
    assert {type(one).__name__ for one in made} == {"Own", "SGD", "StepLR"}
    assert model.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    CALLBACKS.add("from_wrong_function", wrong_function)
    with pytest.raises(fitkit.FitkitError, match="gave 3, not a fitkit"):
        with_callback("from_wrong_function")


def test_an_entry_point_of_a_wrong_kind_is_told_in_the_same_way(tmp_path, monkeypatch):
    (tmp_path / "wrong_kinds.py").write_text(
        "from fitkit.callbacks import Callback\nthing = Callback()\n"
    )
    metadata = tmp_path / "wrong_kinds-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "".join(f"[{r.group}]\ninstalled_thing = wrong_kinds:thing\n" for r in REGISTRIES)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    try:
        for registry in REGISTRIES:
            with pytest.raises(TypeError, match="as an object of Callback, which isn't"):
                registry["installed_thing"]
    finally:
        sys.modules.pop("wrong_kinds", None)


def squares(prediction, target):
    return ((prediction - target) ** 2).mean(1)


def batch_squares(prediction, target):
    return ((prediction - target) ** 2).mean()


@pytest.mark.parametrize(
    "loss", [squares, batch_squares, nn.functional.huber_loss, nn.HuberLoss(delta=0.5)]
)
def test_a_name_of_a_function_or_torchs_loss_trains_as_the_object_does(loss):
    LOSSES.add("by_name", loss)
    torch.manual_seed(0)
    x, y, weight = torch.randn(12, 2), torch.randn(12, 1), torch.rand(12)
    options = {} if loss is batch_squares else {"sample_weight": weight}
    nets, found = [], []
    for given in (loss, "By-Name"):
        torch.manual_seed(1)
        model = model_of(loss=given)
        history = model.fit(x, y, batch_size=5, shuffle=False, verbose=0, **options)
        nets.append(model.net.weight)
        found.append((history.history["loss"], model.evaluate(x, y, verbose=0)))
    assert torch.equal(*nets) and found[0] == found[1]


def test_a_module_with_parameters_of_its_own_gets_no_name():
    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, prediction, target):
            return self.scale * (prediction - target).square().mean()

    LOSSES.add("learned", Learned())
    with pytest.raises(TypeError, match="as an object of .*Learned, which isn't a function"):
        model_of(loss="learned")


def test_a_named_function_is_a_metric_and_sample_weights_weigh_it():
    METRICS.add("squares_by_name", squares)
    torch.manual_seed(0)
    x, y, weight = torch.randn(12, 2), torch.randn(12, 1), torch.rand(12)
    model = model_of(metrics=["squares_by_name"], weighted_metrics=["squares_by_name"])
    found = model.evaluate(x, y, batch_size=5, sample_weight=weight, verbose=0, return_dict=True)
    each = (model.net(x) - y).detach().double().square()[:, 0]
    assert found["squares_by_name"] == pytest.approx(each.mean().item(), rel=1e-6)
    expected = (each * weight).sum() / weight.sum()
    assert found["weighted_squares_by_name"] == pytest.approx(expected.item(), rel=1e-6)


def test_torchmetrics_classes_objects_and_collections_are_metrics_by_name():
    torchmetrics = pytest.importorskip("torchmetrics")
    kept = torchmetrics.MinkowskiDistance(p=3)
    METRICS.add("by_class", torchmetrics.MeanAbsoluteError)
    METRICS.add("by_object", kept)
    METRICS.add("several", torchmetrics.MetricCollection([torchmetrics.MeanSquaredError()]))
    METRICS.add("needs_more", torchmetrics.MinkowskiDistance)
    torch.manual_seed(0)
    x, y = torch.randn(12, 2), torch.randn(12, 1)
    model = model_of(metrics=["by_class", "By-Object", "several"])
    error = (model.net(x) - y).detach().double().abs()
    for _ in range(2):  # no samples of an earlier call stay
        found = model.evaluate(x, y, batch_size=5, verbose=0, return_dict=True)
        assert found["by_class"] == pytest.approx(error.mean().item(), rel=1e-5)
        assert found["By-Object"] == pytest.approx((error**3).sum().item() ** (1 / 3), rel=1e-5)
        assert found["several"] == pytest.approx(error.square().mean().item(), rel=1e-5)
    assert kept._update_count == 0
    with pytest.raises(fitkit.ConfigurationError, match="weighted_metrics has MeanAbsoluteError"):
        model_of(weighted_metrics=["by_class"])
    with pytest.raises(fitkit.ConfigurationError, match="which can't be made without arguments"):
        model_of(metrics=["needs_more"])
