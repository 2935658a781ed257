"""`jit_compile` in `evaluate` and `predict`: eager PyTorch's numbers, nothing compiled twice."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit.extras.jit import evaluation
from fitkit.extras.jit.graph_calls import GraphCalls
from tests.compiling import TRACED, Branching, compiled_anew, every_second

torch.manual_seed(0)
X = torch.randn(85, 6, dtype=torch.float64)
Y, VALUES = torch.randint(0, 3, (85,)), torch.randn(85, 3, dtype=torch.float64)
IGNORED = torch.where(torch.arange(85) % 3 == 0, -100, Y)
WEIGHTS = torch.rand(85, dtype=torch.float64)


@pytest.fixture(autouse=True, scope="module")
def as_in_a_new_process():
    """Torch remembers which numbers have changed, from models of other tests, too."""
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def small_nets_are_compiled(monkeypatch):
    """So that nets which are quick to compile can be tested."""
    monkeypatch.setattr(evaluation, "FEWEST_FUSED", 0)


def net():
    torch.manual_seed(1)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
    return nn.Sequential(*layers).double()


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(6, 3), "b": nn.Linear(6, 3)})

    def forward(self, x):
        return {name: layer(x) for name, layer in self.layers.items()}


def squares(prediction, target):
    return ((prediction - target) ** 2).mean(1)


def distance(prediction, target):
    return (prediction - target).abs().max()


def model_of(make=net, loss="cross_entropy", metrics=("accuracy",), **more):
    torch.manual_seed(1)
    model = fitkit.Model(make().double())
    metrics = list(metrics) if metrics else None
    model.compile("adam", loss, metrics=metrics, accelerator="cpu", **more)
    return model


def by_hand(make, x=X):
    torch.manual_seed(1)
    with torch.no_grad():
        return make().double().eval()(x)


CROSS_ENTROPY = {"loss": lambda p: F.cross_entropy(p, Y), "accuracy": lambda p: p.argmax(1) == Y}
CASES = {
    "losses of many batches at once": ({}, {"y": Y}, CROSS_ENTROPY),
    "a loss alone": ({"metrics": None}, {"y": Y}, {"loss": CROSS_ENTROPY["loss"]}),
    "labels that don't count": (
        {"metrics": None}, {"y": IGNORED}, {"loss": lambda p: F.cross_entropy(p, IGNORED)},
    ),
    "functions of one's own": (
        {"loss": squares, "metrics": [squares]}, {"y": VALUES},
        {"loss": lambda p: squares(p, VALUES), "squares": lambda p: squares(p, VALUES)},
    ),
    "weights": (
        {"loss": squares, "metrics": None}, {"y": VALUES, "sample_weight": WEIGHTS},
        {"loss": lambda p: squares(p, VALUES) * WEIGHTS},
    ),
    "several outputs": (
        {"make": TwoOutputs, "loss": {"a": "cross_entropy", "b": "mse"}, "metrics": None},
        {"y": {"a": Y, "b": VALUES}},
        {
            "a_loss": lambda p: F.cross_entropy(p["a"], Y),
            "b_loss": lambda p: squares(p["b"], VALUES),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize("name", every_second(CASES))
def test_an_evaluation_gives_what_plain_pytorch_gives_and_compiles_once(name, steps, recwarn):
    compiled, data, wanted = CASES[name]
    model = model_of(**compiled, jit_compile=TRACED, steps_per_execution=steps)
    evaluate = partial(model.evaluate, X, batch_size=8, verbose=0, return_dict=True, **data)
    compiled_anew()
    found = evaluate()
    assert compiled_anew() == 1
    prediction = by_hand(compiled.get("make", net))
    for log, value in wanted.items():
        assert found[log] == pytest.approx(value(prediction).double().mean().item(), abs=1e-12)
    assert evaluate() == found
    assert compiled_anew() == 0
    assert not [w for w in recwarn if "jit_compile" in str(w.message)]


@pytest.mark.parametrize("steps", [1, 6])
def test_predictions_are_those_of_plain_pytorch_in_their_order(steps):
    model = model_of(jit_compile=TRACED, steps_per_execution=steps)
    compiled_anew()
    found = model.predict(X, batch_size=8, verbose=0)
    np.testing.assert_allclose(found, by_hand(net).numpy(), rtol=0, atol=1e-12)
    assert compiled_anew() == 1
    model.predict(X, batch_size=8, verbose=0)
    assert compiled_anew() == 0
    several = model_of(TwoOutputs, jit_compile=TRACED, steps_per_execution=steps)
    outputs = several.predict(DataLoader(TensorDataset(X), batch_size=8), verbose=0)
    for name, wanted in by_hand(TwoOutputs).items():
        np.testing.assert_allclose(outputs[name], wanted.numpy(), rtol=0, atol=1e-12)


def test_batches_that_wait_are_copies():
    def batches():
        x, y = X[:8].clone(), Y[:8].clone()
        for start in range(0, 80, 8):
            x.copy_(X[start : start + 8])
            y.copy_(Y[start : start + 8])
            yield x, y

    model = model_of(jit_compile=TRACED, steps_per_execution=4)
    found = model.evaluate(iter(batches()), verbose=0, return_dict=True)
    wanted = F.cross_entropy(by_hand(net)[:80], Y[:80]).item()
    assert found["loss"] == pytest.approx(wanted, abs=1e-12)
    outputs = model.predict(iter(batches()), verbose=0)
    np.testing.assert_allclose(outputs, by_hand(net)[:80].numpy(), rtol=0, atol=1e-12)


def test_callbacks_see_the_same_moments_logs_and_outputs():
    class Noting(fitkit.callbacks.Callback):
        def on_test_batch_end(self, batch, logs):
            heard.append((batch, round(logs["loss"], 10)))

        def on_predict_batch_end(self, batch, logs):
            heard.append((batch, np.round(np.asarray(logs["outputs"]), 10).tolist()))

    def run(**more):
        heard.clear()
        model = model_of(**more)
        model.evaluate(X, Y, batch_size=8, verbose=0, callbacks=[Noting()])
        model.predict(X, batch_size=8, verbose=0, callbacks=[Noting()])
        return list(heard)

    heard = []
    for steps in (1, 5):
        plain = run(steps_per_execution=steps)
        assert run(jit_compile=TRACED, steps_per_execution=steps) == plain


class Doubling(fitkit.callbacks.Callback):
    """Changes between two batches what the net computes."""

    def on_test_batch_end(self, batch, logs):
        self.model.net.factor = 2.0 if batch >= 5 else 1.0


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.factor = nn.Linear(6, 3).double(), 1.0

    def forward(self, x):
        return self.layer(x) * self.factor


@pytest.mark.parametrize(
    ("callbacks", "steps", "unchecked"), [([], 1, 14), ([], 4, 0), ([Doubling], 1, 7)]
)
def test_torch_checks_a_compiled_pass_after_other_code(callbacks, steps, unchecked, monkeypatch):
    def run(**more):
        model = model_of(Scaled, steps_per_execution=steps, **more)
        hooks = [kind() for kind in callbacks]
        found = model.evaluate(X[:80], Y[:80], batch_size=8, verbose=0, callbacks=hooks)
        return found, model.predict(X[:80], batch_size=8, verbose=0)

    found, repeat = [], GraphCalls.repeat
    monkeypatch.setattr(
        GraphCalls, "repeat", lambda graph, given: found.append(repeat(graph, given)) or found[-1]
    )
    (values, outputs), (wanted, expected) = run(jit_compile=TRACED), run()
    assert values == pytest.approx(wanted, abs=1e-12)
    np.testing.assert_allclose(outputs, expected, rtol=0, atol=1e-12)
    assert len([one for one in found if one is not None]) == unchecked


def test_validations_and_evaluations_share_what_is_compiled():
    model = model_of(jit_compile=TRACED)
    model.evaluate(X, Y, batch_size=8, verbose=0)
    compiled_anew()
    fit = partial(model.fit, X[:48], Y[:48], batch_size=8, epochs=2, verbose=0)
    fit(validation_data=(X, Y))
    assert compiled_anew() == 1  # the training's step
    model.evaluate(X, Y, batch_size=8, verbose=0)
    fit(validation_data=(X, Y), initial_epoch=1)
    assert compiled_anew() == 0


def test_batches_of_many_lengths_share_one_program():
    model = model_of(jit_compile=TRACED)
    lengths = [8, 8, 3, 5, 8, 7, 4, 6, 9, 2]
    parts = list(zip(X[:60].split(lengths), Y[:60].split(lengths), strict=True))
    compiled_anew()
    found = model.evaluate(iter(parts), verbose=0, return_dict=True)
    assert compiled_anew() == 2
    wanted = F.cross_entropy(by_hand(net)[:60], Y[:60]).item()
    assert found["loss"] == pytest.approx(wanted, abs=1e-12)


def test_a_net_of_which_nothing_is_gained_is_evaluated_as_written(monkeypatch):
    monkeypatch.setattr(evaluation, "FEWEST_FUSED", 24)
    model, twin = model_of(jit_compile=TRACED), model_of()
    compiled_anew()
    for one in (model, twin):
        one.found = one.evaluate(X, Y, batch_size=8, verbose=0), one.predict(X, verbose=0)
    assert compiled_anew() == 0
    assert model.found[0] == twin.found[0]
    np.testing.assert_array_equal(model.found[1], twin.found[1])
    assert model.net._compiled_call_impl is not None


@pytest.mark.parametrize("steps", [1, 4])
def test_a_net_that_cannot_be_traced_whole_is_named_once_and_evaluates_the_same(steps):
    model = model_of(Branching, jit_compile=TRACED, steps_per_execution=steps)
    with pytest.warns(UserWarning, match=r"alone in the evaluation.*compiling.py") as seen:
        found = model.evaluate(X, Y, batch_size=8, verbose=0, return_dict=True)
    assert len([w for w in seen if "jit_compile" in str(w.message)]) == 1
    wanted = F.cross_entropy(by_hand(Branching), Y).item()
    assert found["loss"] == pytest.approx(wanted, abs=1e-12)


def test_a_batch_that_does_not_fit_is_named_as_without_compiling(recwarn):
    model = model_of(jit_compile=TRACED)
    data = [(X[:8], Y[:8])] * 3 + [(X[:8, :4], Y[:8])] * 2
    with pytest.raises(fitkit.ConfigurationError, match="4"):
        model.evaluate(iter(data), verbose=0)
    assert not [w for w in recwarn if "jit_compile" in str(w.message)]


def test_what_is_compiled_is_said_and_a_copy_compiles_for_itself(capsys):
    model = model_of(jit_compile=TRACED)
    model.evaluate(X, Y, batch_size=8, verbose=2)
    assert capsys.readouterr().out.count("compiling the evaluation …") == 1
    assert not copy.deepcopy(model)._fitkit.compiler.of_passes
    model.compile(loss="nll_loss")
    assert not model._fitkit.compiler.of_passes
