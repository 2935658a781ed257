"""What goes wrong at first contact, by family: what a message must name, and that its advice works.

A row is a program, the code, and key facts; each is what somebody wrote who had the wheel alone.
"""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit.errors import ConfigurationError
from tests.nets import Rows

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = np.arange(32) % 3
YES = (X[:, :3] > 0).astype("float32")
CODES = np.arange(64).reshape(32, 2) % 10


def trained(net=None, loss="cross_entropy", x=X, y=Y, **arguments):
    model = fitkit.Model(net or nn.Linear(4, 3))
    model.compile("sgd", loss, accelerator="cpu")
    model.fit(x, y, batch_size=8, verbose=0, **arguments)
    return model


def refused(code, *facts, run):
    with pytest.raises(ConfigurationError) as caught:
        run()
    assert caught.value.code == code and all(fact in str(caught.value) for fact in facts)


# ------------------------------------------------------------------ what loss and net hold


def weights(count, dtype=torch.float32):
    return torch.ones(count, dtype=dtype)


class OwnLoss(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, prediction, target):
        return functional.cross_entropy(prediction, target, weight=self.weight)


def bce(count):
    return nn.BCEWithLogitsLoss(pos_weight=weights(count))


@pytest.mark.parametrize(("loss", "y", "code", "facts"), [
    (nn.CrossEntropyLoss(weight=weights(3, torch.float64)), Y, "FK002",
     ("CrossEntropyLoss", "weight", "float64", "torch.float32")),
    (OwnLoss(weights(3, torch.float64)), Y, "FK002", ("weight", "float64")),
    (lambda p, t: functional.cross_entropy(p, t, weights(3, torch.float64)), Y, "FK002",
     ("weight", "float64")),
    (nn.CrossEntropyLoss(weight=weights(2)), Y, "FK091", ("(2,)", "3 columns")),
    (lambda p, t: functional.cross_entropy(p, t, weights(5)), Y, "FK091", ("(5,)", "3 columns")),
    (bce(2), YES, "FK091", ("pos_weight", "(2,)", "3 columns")),
    (nn.BCEWithLogitsLoss(weight=weights(8)), YES, "FK091", ("(8,)", "sample_weight")),
])  # fmt: skip
def test_the_weights_of_a_loss_are_looked_at_before_the_data(loss, y, code, facts):
    refused(code, *facts, run=lambda: trained(loss=loss, y=y))


def test_what_is_advised_for_the_weights_of_a_loss_works():
    weight = np.array([1.0, 2.0, 3.0])  # as scikit-learn computes them
    trained(loss=nn.CrossEntropyLoss(weight=torch.as_tensor(weight, dtype=torch.float32)))
    trained(loss=bce(3), y=YES)
    trained(loss=bce(1), y=YES)
    trained(loss="bce_with_logits", y=YES, sample_weight=np.ones(32))


class Centred(nn.Module):
    """Holds a float64 buffer, or makes float64 numbers on the way."""

    def __init__(self, mean):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("mean", mean) if mean is not None else None

    def forward(self, x):
        return self.layer(x - (self.mean if hasattr(self, "mean") else np.zeros(4)[0].item()))


class Making(nn.Linear):
    def forward(self, x):
        return super().forward(x * torch.ones(4, dtype=torch.float64))


def mixed():
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3).double())


@pytest.mark.parametrize(("net", "x", "facts"), [
    (mixed, X, ("0.weight is float32", "1.weight is float64", "net.to(torch.float32)")),
    (lambda: Centred(torch.zeros(4, dtype=torch.float64)), X, ("mean is float64",)),
    (lambda: nn.Sequential(Making(4, 3)), X, ("forward makes the other type",)),
    (lambda: nn.Sequential(nn.Linear(4, 3)), X.astype("int64"), ("x has shape (8, 4), int64",)),
    (lambda: nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(16, 3)), X,
     ("x has shape (8, 4), float32", "astype('int64')")),
])  # fmt: skip
def test_the_types_in_a_net_are_looked_at_before_the_data(net, x, facts):
    refused("FK002", *facts, run=lambda: trained(net(), x=x))
    if net is mixed:
        trained(net().to(torch.float32))


# ------------------------------------------------------------------ embeddings


def table(size=10, kind=nn.Embedding):
    if kind is nn.EmbeddingBag:
        return nn.Sequential(kind(size, 4), nn.Linear(4, 3))
    return nn.Sequential(kind(size, 4), nn.Flatten(), nn.Linear(8, 3))


@pytest.mark.parametrize("verb", ["fit", "predict"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(("index", "advice"), [
    (-1, "x + 1 with num_embeddings=11"), (10, "num_embeddings=11"), (41, "num_embeddings=42"),
])  # fmt: skip
def test_an_index_that_an_embedding_lacks_is_named_with_layer_and_size(verb, kind, index, advice):
    codes = CODES.copy()
    codes[5, 1] = index
    model = fitkit.Model(table(kind=kind))
    model.compile("sgd", "cross_entropy", accelerator="cpu")
    run = model.predict if verb == "predict" else lambda x: model.fit(x, Y, verbose=0)
    facts = ("layer '0'", f"{kind.__name__}(10, 4", "from 0 to 9", f"got {index}.", advice)
    refused("FK012", *facts, run=lambda: run(codes))
    moved = 1 if index < 0 else 0
    trained(table(max(11, index + 1), kind), x=codes + moved)  # what is advised works


class OwnStep(fitkit.Model):
    def __init__(self, net, loss=functional.cross_entropy):
        super().__init__(net)
        self.own_loss = loss

    def training_step(self, batch, batch_idx):
        return self.own_loss(self(batch[0]), batch[1])


def test_own_steps_are_told_the_same_of_an_index_and_of_the_weights_of_a_loss():
    def run(net, x, **loss):
        model = OwnStep(net, **loss)
        model.compile("sgd", accelerator="cpu")
        model.fit(x, Y, batch_size=8, verbose=0)

    facts = ("layer '0'", "Embedding(10, 4", "from 0 to 9", "got 10.")
    refused("FK012", *facts, run=lambda: run(table(), np.where(CODES == 9, 10, CODES)))
    heavy = nn.CrossEntropyLoss(weight=weights(3, torch.float64))
    refused("FK002", "weight", "float64", run=lambda: run(nn.Linear(4, 3), X, loss=heavy))

    def failing(prediction, target):
        raise RuntimeError("the user's")

    with pytest.raises(RuntimeError, match="the user's"):
        run(nn.Linear(4, 3), X, loss=failing)


# ------------------------------------------------------------------ numbers that aren't finite


def said(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return " ".join(str(one.message) for one in caught)


def with_nan():
    x = X.copy()
    x[20, 2] = np.nan
    return x


def evaluated(x, y=Y):
    model = fitkit.Model(nn.Linear(4, 3))
    model.compile("sgd", "cross_entropy", accelerator="cpu")
    model.evaluate(x, y, verbose=0)


def as_loader(x):
    return DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(Y)), 8)


@pytest.mark.parametrize("run", [
    lambda x: trained(x=x), evaluated, lambda x: evaluated(as_loader(x), None),
    lambda x: evaluated(Rows(x, Y), None),
])  # fmt: skip
def test_the_row_and_column_of_a_number_that_is_not_finite_are_named(run):
    message = said(lambda: run(with_nan()))
    assert "x of sample 20 is nan at column 2" in message
    assert ("DetectNonFinite" in message) == ("In epoch" in message)  # evaluate has no fit


@pytest.mark.parametrize("run", [lambda x: trained(x=x), evaluated])
def test_a_column_of_a_data_frame_is_named(run):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(with_nan(), columns=["a", "b", "age", "d"])
    assert "x of sample 20 is nan at column 'age'" in said(lambda: run(frame))


def test_what_isnt_finite_in_validation_data_is_named_with_its_set():
    sets = {"day": (X, Y), "night": as_loader(with_nan())}
    message = said(lambda: trained(validation_data=sets))
    assert "val_night_loss is nan" in message
    assert "In the validation data 'night', x of sample 20 is nan at column 2." in message


def test_weights_that_a_training_spoiled_are_named_by_evaluate():
    model = fitkit.Model(nn.Linear(4, 3))
    model.compile("sgd", "cross_entropy", accelerator="cpu")
    with torch.no_grad():
        model.net.weight[0, 0] = torch.nan
    assert "weight isn't finite" in said(lambda: model.evaluate(X, Y, verbose=0))


@pytest.mark.parametrize(("net", "loss"), [
    (lambda: nn.Linear(4, 3), "cross_entropy"), (lambda: nn.Linear(4, 1), "bce_with_logits"),
])  # fmt: skip
def test_labels_that_are_nan_are_missing_labels(net, loss):
    y = (Y % 2).astype("float32")
    y[3] = np.nan
    refused("FK092", "1 that are nan", "numpy.isfinite(y)", run=lambda: trained(net(), loss, y=y))
    keep = np.isfinite(y)
    trained(net(), loss, x=X[keep], y=y[keep])
    weight = keep.astype("float32")
    trained(net(), loss, y=np.where(keep, y, 0), sample_weight=weight)


# ------------------------------------------------------------------ data and arguments


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, a, b):
        return self.layer(torch.cat([a, b], 1))


def test_a_second_input_that_was_taken_for_the_target_is_named():
    model = fitkit.Model(TwoInputs())
    model.compile("sgd", "cross_entropy", accelerator="cpu")
    a = torch.from_numpy(X)
    refused("FK003", "predict((a, b))", run=lambda: model.predict(TensorDataset(a, a)))
    refused("FK003", "((a, b), y)", run=lambda: model.fit(TensorDataset(a, a), verbose=0))
    assert model.predict((a, a)).shape == (32, 3)
    model.fit([((a, a), torch.from_numpy(Y))], verbose=0)


@pytest.mark.parametrize(("x", "y", "advice"), [
    (X, [torch.tensor(int(label)) for label in Y], "numpy.stack(y)"),
    (X, [np.array([label]) for label in Y], "numpy.stack(y)"),
    (X, [int(label) for label in Y], "numpy.asarray(y)"),
    (list(torch.from_numpy(X)), Y, "numpy.stack(x)"),
    (list(X), list(torch.from_numpy(Y)), "numpy.stack(y)"),
])  # fmt: skip
def test_a_list_of_samples_is_answered_with_stack(x, y, advice):
    with pytest.raises(ConfigurationError) as caught:
        trained(x=x, y=y)
    assert advice in str(caught.value)
    names = {"x": x, "y": y, "numpy": np}
    names[advice[-2]] = eval(advice, names)  # what is advised, followed
    x, y = (np.asarray(names[name]) for name in "xy")
    assert len(x) == len(y) == 32
    trained(x=x, y=y)


def test_a_list_of_inputs_of_other_lengths_is_no_list_of_samples():
    with pytest.raises(ConfigurationError) as caught:
        trained(x=[X, X[:5]])
    assert caught.value.code == "FK005" and "stack" not in str(caught.value)


def test_negative_weights_are_answered_with_a_training_step():
    factor = np.where(Y, 1.0, -1.0).astype("float32")
    with pytest.raises(ConfigurationError, match="training_step.*reduction='none'"):
        trained(sample_weight=factor)

    class Advantage(fitkit.Model):
        def training_step(self, batch, batch_idx):
            x, y, factor = batch
            losses = functional.cross_entropy(self(x), y, reduction="none")
            return (factor * losses).mean()

    model = Advantage(nn.Linear(4, 3))
    model.compile("sgd", accelerator="cpu")
    model.fit([tuple(map(torch.from_numpy, (X, Y, factor)))], verbose=0)


@pytest.mark.parametrize(("call", "facts"), [
    (lambda: fitkit.Model(nn.Linear(4, 3), loss="mse"), ("model.compile(loss=…)",)),
    (lambda: fitkit.Model(nn.Linear(4, 3), "adam", "mse"), ("'adam', 'mse'", "model.compile(")),
    (lambda: fitkit.Model(net=nn.Linear(4, 3), epochs=3), ("model.fit(epochs=…)",)),
])  # fmt: skip
def test_a_model_that_is_given_more_than_a_net_names_compile(call, facts):
    with pytest.raises(TypeError) as caught:
        call()
    assert all(fact in str(caught.value) for fact in facts)


def test_a_subclass_may_take_what_it_likes():
    class Own(fitkit.Model):
        def __init__(self, size, *, loss):
            super().__init__(nn.Linear(size, 3))
            self.given = loss

    assert Own(4, loss="mse").given == "mse"


@pytest.mark.parametrize(("name", "options"), [
    ("shuffle", "fit_options"), ("steps_per_epoch", "fit_options"), ("devices", "compile_options"),
    ("precision", "compile_options"),
])  # fmt: skip
def test_an_estimator_names_the_options_for_an_argument_of_fit_or_compile(name, options):
    pytest.importorskip("sklearn")
    from fitkit.sklearn import Classifier

    with pytest.raises(TypeError, match=rf"{options}=\{{'{name}': …\}}"):
        Classifier(nn.Linear(4, 3), **{name: 1})
    value = {"shuffle": False, "steps_per_epoch": 1, "devices": 1, "precision": "32-true"}[name]
    Classifier(nn.Linear(4, 3), epochs=1, **{options: {name: value}}).fit(X, Y)


# ------------------------------------------------------------------ mixed labels, lazy layers


@pytest.mark.parametrize(("loss", "end", "code"), [
    ("sparse_categorical_crossentropy", nn.Softmax(1), "FK007"),
    ("nll", nn.LogSoftmax(1), "FK007"), (nn.MultiMarginLoss(), nn.Identity(), "FK007"),
    (lambda p, t: functional.nll_loss(p, t), nn.LogSoftmax(1), None),
])  # fmt: skip
def test_a_loss_of_class_numbers_beside_mixup_names_the_transform(loss, end, code):
    def run(loss, end):
        model = fitkit.Model(nn.Sequential(nn.Linear(4, 3), end))
        mixup = fitkit.transforms.MixUp(0.2)
        model.compile("sgd", loss, accelerator="cpu", batch_transforms=[mixup])
        model.fit(X, Y, verbose=0)

    refused(code, "MixUp", "cross_entropy", run=lambda: run(loss, end))
    run("cross_entropy", nn.Identity())
    run("categorical_crossentropy", nn.Softmax(1))


def lazy():
    net = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.LazyLinear(3))
    model = fitkit.Model(net)
    model.compile("adam", "cross_entropy", accelerator="cpu")
    return model


def test_lazy_layers_get_their_shapes_from_the_first_batch_of_fit(tmp_path):
    by_hand, model, again = lazy(), lazy(), lazy()
    for one in (by_hand, model):
        torch.manual_seed(0)  # the weights are drawn when their shapes are known
        if one is by_hand:
            one.predict_on_batch(X[:2])
        one.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    for name, value in model.state_dict().items():
        assert torch.equal(value, by_hand.state_dict()[name]), name
    assert int(model.net[1].num_batches_tracked) == 4  # the look isn't a step
    model.save(tmp_path / "model.h5")
    assert again.fit(X, Y, epochs=2, verbose=0, resume_from=tmp_path / "model.h5").epoch == [0, 1]
    lazy().fit(as_loader(X), verbose=0)
    with pytest.raises(ConfigurationError, match=r"model\.predict_on_batch"):
        lazy().fit(iter([(torch.from_numpy(X), torch.from_numpy(Y))]), verbose=0)


def test_lazy_layers_get_their_shapes_from_a_single_batch():
    by_hand, model = lazy(), lazy()
    for one in (by_hand, model):
        torch.manual_seed(0)
        if one is by_hand:
            one.predict_on_batch(X)
        one.train_on_batch(X, Y)
    for name, value in model.state_dict().items():
        assert torch.equal(value, by_hand.state_dict()[name]), name
    assert int(model.net[1].num_batches_tracked) == 1
