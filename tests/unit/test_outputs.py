"""Nested outputs: losses, metrics, targets and weights by the structure of what the net gives.

The reference is plain PyTorch arithmetic.
"""

import collections
import dataclasses
import os

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fitkit
from fitkit.callbacks import EarlyStopping, ModelCheckpoint
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.losses import CompiledLoss
from fitkit.metrics import CompiledMetrics
from fitkit.outputs import SINGLE, LossHint
from tests import reference

torch.manual_seed(0)
Pair = collections.namedtuple("Pair", ["c", "d"])
P = {name: torch.randn(6, 2) for name in "acde"}
T = {name: torch.randn(6, 2) for name in "acde"}
NESTED, TARGETS = ({"a": v["a"], "b": {"c": v["c"], "d": v["d"]}} for v in (P, T))
MSE = {name: F.mse_loss(P[name], T[name]).item() for name in P}
MAE = {name: F.l1_loss(P[name], T[name]).item() for name in P}
LOSSES = {"a": "mse", "b": {"c": "mse", "d": ["mae", "mse"]}}


def of_batch(given, prediction=NESTED, target=TARGETS, weight=None, **options):
    """The total of a batch, and what is logged of each output."""
    loss = CompiledLoss(given, **options)
    loss.check(prediction, target)
    total, parts = loss(prediction, target, weight)
    if parts and not options:
        assert sum(parts.values()).item() == pytest.approx(total.item())
    return total.item(), loss.part_names


def test_losses_by_the_structure_of_the_outputs():
    total, names = of_batch(LOSSES)
    assert total == pytest.approx(MSE["a"] + MSE["c"] + MAE["d"] + MSE["d"])
    assert names == ["a_loss", "b/c_loss", "b/d_loss"]


STRUCTURES = {
    "a named tuple in a dict": (
        {"a": P["a"], "b": Pair(P["c"], P["d"])},
        {"a": T["a"], "b": (T["c"], T["d"])},
        ["a_loss", "b/c_loss", "b/d_loss"],
    ),
    "tuples in a list": (
        [P["a"], (P["c"], P["d"])],
        [T["a"], [T["c"], T["d"]]],
        ["output_0_loss", "output_1/output_0_loss", "output_1/output_1_loss"],
    ),
    "three levels": (
        {"a": P["a"], "b": {"x": {"c": P["c"]}, "y": (P["d"],)}},
        {"a": T["a"], "b": {"x": {"c": T["c"]}, "y": [T["d"]]}},
        ["a_loss", "b/x/c_loss", "b/y/output_0_loss"],
    ),
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_one_word_for_a_whole_structure(kind):
    prediction, target, names = STRUCTURES[kind]
    first = next(iter(prediction)) if isinstance(prediction, dict) else None
    for given in ("mse", ["mse"] * 2, ["mse"] * 3, {"a": "mse", "b": "mse"} if first else "mse"):
        total, found = of_batch(given, prediction, target)
        assert total == pytest.approx(MSE["a"] + MSE["c"] + MSE["d"])
        assert found == names


def test_a_list_is_one_loss_a_nested_output_where_there_are_several_and_adds_up_where_one_is():
    at_b = of_batch({"b": ["mse", "mae"]})
    assert at_b == (pytest.approx(MSE["c"] + MAE["d"]), ["b/c_loss", "b/d_loss"])
    at_a = of_batch({"a": ["mse", "mae"], "b": {"c": []}})
    assert at_a == (pytest.approx(MSE["a"] + MAE["a"]), [])
    of_three = of_batch(["mse", "mae", "mse"])  # as Keras counts
    assert of_three[0] == pytest.approx(MSE["a"] + MAE["c"] + MSE["d"])
    for given in (["mse", "mae"], [["mse", "mae"]]):
        assert of_batch(given, P["a"], T["a"]) == (pytest.approx(MSE["a"] + MAE["a"]), [])


def test_an_output_may_be_named_as_its_log_is():
    total, names = of_batch({"b/c": "mse", "a": "mae"})
    assert total == pytest.approx(MSE["c"] + MAE["a"])
    assert names == ["a_loss", "b/c_loss"]
    assert of_batch("mse", target={"a": T["a"], "b/c": T["c"], "b/d": T["d"]})[0] == (
        pytest.approx(MSE["a"] + MSE["c"] + MSE["d"])
    )


def test_targets_of_the_trained_outputs_alone_are_matched_in_order():
    expected = pytest.approx(MSE["a"] + MSE["d"])
    given = {"a": "mse", "b": {"d": "mse"}}
    for target in (
        [T["a"], T["d"]],
        [T["a"], {"d": T["d"]}],
        [T["a"], [None, T["d"]]],
        [T["a"], T["c"], T["d"]],
        {"a": T["a"], "b": {"d": T["d"]}},
        TARGETS,
    ):
        assert of_batch(given, target=target)[0] == expected
    assert of_batch({"b": {"d": "mse"}}, target=T["d"])[0] == pytest.approx(MSE["d"])


def test_a_function_for_a_structure_gets_the_structure():
    def both(prediction, target):
        return F.mse_loss(prediction["c"] + prediction["d"], target["c"] + target["d"])

    def against_one(prediction, target):
        return F.mse_loss(prediction["c"] * prediction["d"], target)

    of_both = F.mse_loss(P["c"] + P["d"], T["c"] + T["d"]).item()
    total, names = of_batch({"a": "mse", "b": both}, loss_weights={"b": 0.5})
    assert total == pytest.approx(MSE["a"] + 0.5 * of_both)
    assert names == ["a_loss", "b_loss"]
    total, _ = of_batch({"a": "mse", "b": against_one}, target={"a": T["a"], "b": T["e"]})
    assert total == pytest.approx(MSE["a"] + F.mse_loss(P["c"] * P["d"], T["e"]).item())
    total, names = of_batch({"b": both, "b/c": "mae"})
    assert (total, names) == (pytest.approx(of_both + MAE["c"]), ["b_loss", "b/c_loss"])
    whole, names = of_batch(lambda p, t: both(p["b"], t["b"]))
    assert (whole, names) == (pytest.approx(of_both), [])
    with pytest.raises(ConfigurationError, match=r"loss_weights has .* for the output 'b'.*\(1\)"):
        of_batch({"a": "mse", "b": both}, loss_weights={"b": [1, 2]})


def test_loss_weights_by_the_same_structure():
    one_each = {"a": 2, "b": {"c": 3.0, "d": [0.5, 0.25]}}
    total, _ = of_batch(LOSSES, loss_weights=one_each)
    expected = 2 * MSE["a"] + 3 * MSE["c"] + 0.5 * MAE["d"] + 0.25 * MSE["d"]
    assert total == pytest.approx(expected)
    shared = of_batch(LOSSES, loss_weights={"b": 3})[0]
    assert shared == pytest.approx(MSE["a"] + 3 * (MSE["c"] + MAE["d"] + MSE["d"]))
    for weights in ([2, 3, 0.5], [2, [3, 0.5]], {"a": 2, "b/c": 3, "b/d": 0.5}):
        total, _ = of_batch(LOSSES, loss_weights=weights)
        expected = 2 * MSE["a"] + 3 * MSE["c"] + 0.5 * (MAE["d"] + MSE["d"])
        assert total == pytest.approx(expected)
    total, _ = of_batch(["mse", "mae"], P["a"], T["a"], loss_weights=[2, 0.5])
    assert total == pytest.approx(2 * MSE["a"] + 0.5 * MAE["a"])


def test_sample_weights_by_the_same_structure():
    w = torch.tensor([0.5, 0.0, 2.0, 1.0, 1.0, 3.0])
    each = {name: (w * (P[name] - T[name]).square().mean(1)).mean().item() for name in P}
    for weight, weighted in (
        (w, "acd"), ({"b": w}, "cd"), ({"b": {"d": w}}, "d"), ([None, [w, None]], "c"),
        ([w, None, None], "a"),
    ):  # fmt: skip
        total, _ = of_batch("mse", weight=weight)
        expected = sum(each[name] if name in weighted else MSE[name] for name in "acd")
        assert total == pytest.approx(expected)
    total, _ = of_batch({"b": {"d": ["mse", "mse"]}}, weight={"b": {"d": w}})
    assert total == pytest.approx(2 * each["d"])
    with pytest.raises(ConfigurationError, match="sample_weight of the output 'b' is a dict"):
        of_batch({"b": lambda p, t: p["c"].mean(1)}, weight={"b": {"c": w}})


@pytest.mark.parametrize(
    ("given", "target", "text"),
    [
        ({"a": "mse", "b": {"x": "mse"}}, TARGETS, r"loss at 'b' names \['x'\].*there are \['b/c'"),
        ({"b": ["mse"] * 3}, TARGETS, r"loss at 'b' has 3 entries.*2 outputs there"),
        ({"a": {"x": "mse"}}, TARGETS, r"loss at 'a' has 1 entries, but the net has one output"),
        ({"a": ["mse", None]}, TARGETS, r"loss at 'a' has 2 entries, but the net has one output"),
        ("mse", {"a": T["a"], "b": T["c"]}, r"target at 'b' is a Tensor.*2 outputs there"),
        ("mse", {"a": T["a"], "b": {"x": T["c"]}}, r"target at 'b' names \['x'\]"),
        ("mse", {"a": T["a"], "b": {"c": T["c"]}}, "Output 'b/d'.*y is missing"),
        ("mse", [T["a"], T["c"]], "target has 2 entries, but the net has 3 outputs"),
    ],
)
def test_structures_that_do_not_fit_are_refused_with_the_place(given, target, text):
    with pytest.raises(ConfigurationError, match=text):
        of_batch(given, target=target)


def test_an_output_s_hint_is_that_of_the_loss_that_says_something():
    loss = CompiledLoss({"b": {"d": [lambda p, t: p.mean(), "bce_with_logits"]}, "a": "mse"})
    loss.check(NESTED, {"a": T["a"], "b": {"d": (T["d"] > 0).float()}})
    assert loss.hint("b/d").task == "binary"
    assert loss.hint("b") == LossHint()


# ---- metrics ----


def logged(metrics, prediction=NESTED, target=TARGETS, weight=None, weighted=None):
    meters = CompiledMetrics(metrics, weighted).begin()
    meters.start(prediction, target, lambda _: LossHint(task="regression"))
    for rows in (slice(0, 4), slice(4, 6)):
        cut = [fitkit.trees.map_leaves(lambda leaf, rows=rows: leaf[rows], part)
               for part in (prediction, target)]  # fmt: skip
        meters.update(*cut, None if weight is None else weight[rows])
    return meters.results()


def test_metrics_by_the_structure_of_the_outputs():
    found = logged({"a": ["mae"], "b": {"c": "mse", "d": ["mae", "mse"]}})
    expected = {"a_mae": MAE["a"], "b/c_mse": MSE["c"], "b/d_mae": MAE["d"], "b/d_mse": MSE["d"]}
    assert found == pytest.approx(expected)
    assert list(logged({"a": {"x": "mae"}, "b": {"d": {"y": "mse"}}})) == ["a_x", "b/d_y"]
    assert list(logged({"b/d": "mae"})) == ["b/d_mae"]
    assert list(logged([["mae"], [["mse"], None]])) == ["a_mae", "b/c_mse"]
    assert list(logged([["mae"], None, ["mse"]])) == ["a_mae", "b/d_mse"]


def test_metrics_for_a_whole_structure_are_each_output_s():
    names = ["a_mae", "b/c_mae", "b/d_mae"]
    assert logged("mae") == pytest.approx({n: MAE[n[-5]] for n in names})
    assert list(logged(["mae", "mse"])) == [n for m in names for n in (m, m.replace("ae", "se"))]
    assert list(logged({"b": ["mae"]})) == names[1:]
    assert list(logged(["mae"], target={"b": {"d": T["d"]}})) == ["b/d_mae"]
    assert list(logged({"b": ["mae"]}, target={"b": {"d": T["d"]}})) == ["b/d_mae"]


def test_a_function_for_a_structure_s_metric_gets_the_structure():
    def apart(prediction, target):
        return (prediction["c"] - target["d"]).abs().mean(1)

    found = logged({"a": "mae", "b": ["mse", apart]})
    assert list(found) == ["a_mae", "b_apart", "b/c_mse", "b/d_mse"]
    assert found["b_apart"] == pytest.approx((P["c"] - T["d"]).abs().mean().item())
    one = logged([lambda p, t: (p[0] if isinstance(p, tuple) else p).mean(1) - t.mean(1)],
                 {"a": P["a"], "b": (P["c"], P["d"])}, {"a": T["a"], "b": T["e"]})  # fmt: skip
    assert list(one) == ["a_lambda", "b_lambda"]
    assert one["b_lambda"] == pytest.approx((P["c"] - T["e"]).mean().item(), abs=1e-6)


def test_weighted_metrics_of_nested_outputs():
    w = torch.tensor([0.5, 0.0, 2.0, 1.0, 1.0, 3.0])
    found = logged({"b": {"c": "mae"}}, weight=w, weighted={"b": {"c": "mae"}})
    absolute = (P["c"] - T["c"]).abs().mean(1)
    assert found["b/c_mae"] == pytest.approx(MAE["c"])
    assert found["b/c_weighted_mae"] == pytest.approx(((w * absolute).sum() / w.sum()).item())


@pytest.mark.parametrize(
    ("metrics", "target", "text"),
    [
        ({"b": {"x": ["mae"]}}, TARGETS, r"metrics at 'b' names \['x'\]"),
        ({"b": [["mae"], ["mae"], ["mae"]]}, TARGETS, r"metrics at 'b' has 3 lists.*2 outputs"),
        ({"a": {"x": ["mae"]}}, TARGETS, "the net has one output there"),
        ({"b": lambda p, t: 0.0}, [T["a"], T["c"], T["d"]], "given for the output 'b', but"),
        ({"b": {"c": "mae"}}, {"a": T["a"], "b": {"d": T["d"]}}, r"output 'b/c'.*\['a', 'b/d'\]"),
    ],
)
def test_metrics_that_do_not_fit_are_refused_with_the_place(metrics, target, text):
    with pytest.raises(ConfigurationError, match=text):
        logged(metrics, target=target)


def test_what_is_no_metric_or_loss_is_refused_before_data_are_seen():
    with pytest.raises(ArgumentTypeError, match="metrics has 3"):
        CompiledMetrics({"b": {"c": [3]}})
    with pytest.raises(ConfigurationError, match="no_such"):
        CompiledLoss({"b": {"c": ["mse", "no_such"]}})
    with pytest.raises(ArgumentTypeError, match=r"loss_weights\['b'\]\['c'\]"):
        CompiledLoss(LOSSES, {"b": {"c": "2"}})
    assert CompiledLoss([["bce"]]).hint(SINGLE).task == "binary"


# ---- a model ----


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 6)

    def forward(self, x):
        a, c, d = self.head(self.body(x).tanh()).split(2, dim=1)
        return {"a": a, "b": Pair(c, d)}


def data(rows=40):
    generator = torch.Generator().manual_seed(5)
    x, *y = (torch.randn(rows, size, generator=generator) for size in (3, 2, 2, 2))
    return x, {"a": y[0], "b": {"c": y[1], "d": y[2]}}


def built(**arguments):
    torch.manual_seed(1)
    model = fitkit.Model(Net())
    options = {"loss": LOSSES, "metrics": {"b": {"d": "mae"}}, **arguments}
    model.compile("sgd", learning_rate=0.1, accelerator="cpu", **options)
    return model


def test_a_net_with_nested_outputs_trains_as_plain_pytorch_does(tmp_path):
    x, y = data()
    model, weight = built(loss_weights={"b": {"d": [1, 0.5]}}), torch.rand(40)
    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for start in range(0, 40, 8):
        rows = slice(start, start + 8)
        found = net(x[rows])
        loss = F.mse_loss(found["a"], y["a"][rows]) + F.mse_loss(found["b"].c, y["b"]["c"][rows])
        errors = found["b"].d - y["b"]["d"][rows]
        each = errors.abs().mean(1) + 0.5 * errors.square().mean(1)
        optimizer.zero_grad()
        (loss + (weight[rows] * each).mean()).backward()
        optimizer.step()
    saves = ModelCheckpoint(
        tmp_path / "{epoch}-{val_b/c_loss:.3f}.h5", monitor="val_b/c_loss", save_best_only=True
    )
    history = model.fit(
        x, y, batch_size=8, shuffle=False, verbose=0, validation_data=(x, y),
        sample_weight={"b": {"d": weight}}, callbacks=[saves, EarlyStopping("val_b/d_loss")],
    )  # fmt: skip
    for mine, plain in zip(model.net.parameters(), net.parameters(), strict=True):
        assert torch.allclose(mine, plain, atol=1e-6)
    names = ["loss", "a_loss", "b/c_loss", "b/d_loss", "b/d_mae"]
    assert list(history.history) == [*names, *(f"val_{name}" for name in names)]
    value = history["val_b/c_loss"][0]
    assert os.listdir(tmp_path) == [f"1-{value:.3f}.h5"]
    predicted = model.predict(x, verbose=0)
    assert type(predicted["b"]) is Pair
    with torch.no_grad():
        assert np.allclose(predicted["b"].d, net(x)["b"].d, atol=1e-6)
    found = model.evaluate(x, y, batch_size=7, verbose=0, return_dict=True)
    assert list(found) == names
    errors = predicted["b"].d - y["b"]["d"].numpy()
    mae, mse = np.abs(errors).mean(), np.square(errors).mean()
    assert found["b/d_mae"] == pytest.approx(mae, rel=1e-5)
    assert found["b/d_loss"] == pytest.approx(mae + mse, rel=1e-5)
    expected = found["a_loss"] + found["b/c_loss"] + mae + 0.5 * mse
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    assert found["b/c_loss"] == pytest.approx(value, rel=1e-5)


@dataclasses.dataclass
class Boxes:
    """An output with fields that a dict has as methods."""

    items: torch.Tensor
    keys: torch.Tensor


def test_a_dataclass_is_joined_by_its_fields_whatever_their_names():
    class Net(nn.Module):
        def forward(self, x):
            return Boxes(2 * x, x[:, :1])

    x = torch.randn(10, 3)
    found = fitkit.Model(Net()).predict(x, batch_size=4, verbose=0)
    assert set(found) == {"items", "keys"}
    np.testing.assert_allclose(found["items"], 2 * x)
    np.testing.assert_allclose(found["keys"], x[:, :1])


@pytest.mark.parametrize("as_tuples", [False, True])
def test_outputs_without_a_loss_need_no_target_in_arrays_either(as_tuples):
    x, y = data()
    a, c = y["a"], y["b"]["c"]
    target = (a, (c, None)) if as_tuples else (a, {"c": c, "d": None})
    found = [
        built(loss={"a": "mse", "b": {"c": "mse"}}, metrics={"b/c": "mae"}).fit(x, y, verbose=0)
        for y in (target, {"a": a, "b": {"c": c}}, (a, c))
    ]
    assert list(found[0].history) == ["loss", "a_loss", "b/c_loss", "b/c_mae"]
    assert found[0]["loss"] == found[1]["loss"] == found[2]["loss"]


def test_several_losses_of_a_net_s_only_output_add_up():
    x, y = data()[0], torch.randn(40, 1)
    model = reference.compiled(nn.Linear(3, 1), "sgd", ["mse", "mae"], metrics=["mae", "mse"])
    history = model.fit(x, y, epochs=2, batch_size=8, verbose=0, validation_data=(x, y))
    assert list(history.history) == ["loss", "mae", "mse", "val_loss", "val_mae", "val_mse"]
    for prefix in ("", "val_"):
        both = np.array(history[f"{prefix}mae"]) + np.array(history[f"{prefix}mse"])
        assert history[f"{prefix}loss"] == pytest.approx(both.tolist(), rel=1e-5)
    assert model.train_on_batch(x, y)[0] == pytest.approx(model.test_on_batch(x, y)[0], rel=0.2)


def test_a_resumed_fit_of_nested_outputs_is_as_one_that_went_on(tmp_path):
    x, y = data()
    whole = built()
    expected = whole.fit(x, y, epochs=4, batch_size=8, verbose=0)
    built().fit(x, y, epochs=2, batch_size=8, verbose=0,
                callbacks=[ModelCheckpoint(tmp_path / "last.h5")])  # fmt: skip
    resumed = built()
    history = resumed.fit(x, y, epochs=4, batch_size=8, verbose=0,
                          resume_from=tmp_path / "last.h5")  # fmt: skip
    assert history["b/d_loss"] == expected["b/d_loss"]
    for mine, other in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, other)
