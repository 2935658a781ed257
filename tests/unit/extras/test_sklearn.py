"""Nets under scikit-learn's rules: its own checks, and results against plain PyTorch."""

import copy
import importlib
import pickle
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import fitkit
from fitkit.sklearn import Classifier, Regressor

X, KINDS = load_iris(return_X_y=True)
NAMES = np.array(["setosa", "versicolor", "virginica"])[KINDS]


def perceptron(n_features, n_outputs, hidden=16):
    return nn.Sequential(nn.Linear(n_features, hidden), nn.ReLU(), nn.Linear(hidden, n_outputs))


def precise(n_features, n_outputs):
    """A net in float64: scikit-learn compares to seven digits."""
    return perceptron(n_features, n_outputs).double()


WEIGHTS = "A weight of 2 is a sample given twice only where both fill the same batches."


@pytest.mark.slow
@parametrize_with_checks(
    [
        Classifier(precise, learning_rate=0.02, epochs=20, dtype="float64"),
        Regressor(precise, learning_rate=0.03, epochs=50, dtype="float64"),
    ],
    expected_failed_checks=lambda _: {
        "check_sample_weight_equivalence_on_dense_data": WEIGHTS,
        "check_sample_weight_equivalence_on_sparse_data": WEIGHTS,
    },
)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def fast(**changes):
    options = {"learning_rate": 0.02, "epochs": 15, "random_state": 0, **changes}
    return Classifier(perceptron, **options)


def test_probabilities_are_the_softmax_of_the_nets_logits_and_labels_stay_strings():
    estimator = fast().fit(X, NAMES)
    assert list(estimator.classes_) == ["setosa", "versicolor", "virginica"]
    with torch.no_grad():
        logits = copy.deepcopy(estimator.net_).eval()(torch.tensor(X, dtype=torch.float32))
    wanted = torch.softmax(logits.double(), 1).numpy()
    np.testing.assert_allclose(estimator.predict_proba(X), wanted, atol=1e-6)
    assert (estimator.predict(X) == estimator.classes_[wanted.argmax(1)]).all()
    assert estimator.score(X, NAMES) > 0.9
    assert len(estimator.history_["loss"]) == 15


@pytest.mark.parametrize("loss", ["bce_with_logits", "binary_crossentropy"])
def test_two_classes_with_one_column(loss):
    def make(n_features, n_outputs):
        last = [nn.Sigmoid()] if loss == "binary_crossentropy" else []
        return nn.Sequential(nn.Linear(n_features, n_outputs), *last)

    two = KINDS < 2
    estimator = Classifier(make, loss=loss, learning_rate=0.05, epochs=20, random_state=0)
    estimator.fit(X[two], NAMES[two])
    with torch.no_grad():
        output = estimator.net_(torch.tensor(X[two], dtype=torch.float32))[:, 0].double().numpy()
    wanted = 1 / (1 + np.exp(-output)) if loss == "bce_with_logits" else output
    found = estimator.predict_proba(X[two])
    np.testing.assert_allclose(found, np.stack([1 - wanted, wanted], 1), atol=1e-6)
    assert (estimator.predict(X[two]) == NAMES[two]).mean() > 0.95
    with pytest.raises(fitkit.ConfigurationError, match="two classes, but y has 3"):
        estimator.fit(X, NAMES)


def test_a_loss_of_ones_own_predicts_but_has_no_probabilities():
    def own(prediction, target):
        return nn.functional.cross_entropy(prediction, target)

    estimator = fast(loss=own).fit(X, NAMES)
    assert estimator.score(X, NAMES) > 0.8
    with pytest.raises(fitkit.ConfigurationError, match="logits or probabilities"):
        estimator.predict_proba(X)


def test_the_nets_options_are_parameters_in_pipelines_and_grids():
    chain = make_pipeline(StandardScaler(), fast())
    grid = {"classifier__net__hidden": [1, 8], "classifier__learning_rate": [0.02]}
    search = GridSearchCV(chain, grid, cv=2).fit(X, NAMES)
    assert (
        search.best_estimator_[-1].net_[0].out_features
        == search.best_params_["classifier__net__hidden"]
    )
    assert search.best_score_ > 0.8
    assert cross_val_score(chain, X, NAMES, cv=2).mean() > 0.8


def test_a_grid_may_hold_numpys_whole_numbers():
    grid = {"batch_size": np.arange(50, 151, 50), "epochs": np.array([2])}
    search = GridSearchCV(fast(), grid, cv=2).fit(X, NAMES)
    right = GridSearchCV(fast(), {"batch_size": [50, 100, 150], "epochs": [2]}, cv=2).fit(X, NAMES)
    for name in ("mean_test_score", "std_test_score"):
        assert np.array_equal(search.cv_results_[name], right.cv_results_[name])
    assert search.best_params_ == right.best_params_


def test_parameters_are_stored_as_given_and_cloned_with_the_nets_options():
    net = nn.Linear(4, 3)
    callbacks = [fitkit.callbacks.EarlyStopping("loss", patience=1)]
    estimator = Classifier(net, callbacks=callbacks, epochs=2)
    before = net.weight.clone()
    estimator.fit(X, NAMES)
    assert estimator.net is net and torch.equal(net.weight, before)
    assert not torch.equal(estimator.net_.weight, before)
    assert estimator.callbacks is callbacks and not hasattr(callbacks[0], "best_epoch_seen")
    other = fast().set_params(net__hidden=5, epochs=3)
    assert other.get_params()["net__hidden"] == 5
    assert clone(other).net_options == {"hidden": 5} and clone(other).epochs == 3
    with pytest.raises(ValueError, match="Invalid parameter"):
        other.set_params(hidden=5)
    with pytest.raises(fitkit.ConfigurationError, match="net is already a Linear"):
        Classifier(net, net_options={"hidden": 3}).fit(X, NAMES)


@pytest.mark.parametrize(
    ("optimizer", "wanted"),
    [
        ("sgd", {"name": "sgd", "momentum": 0.5}),
        ({"name": "sgd", "momentum": 0.9, "nesterov": True},
         {"name": "sgd", "momentum": 0.5, "nesterov": True}),
    ],
)  # fmt: skip
def test_an_optimizers_settings_are_parameters(optimizer, wanted):
    estimator = fast(optimizer=optimizer).set_params(optimizer__momentum=0.5)
    assert estimator.optimizer == wanted
    assert clone(estimator).get_params()["optimizer__momentum"] == 0.5
    estimator.fit(X, NAMES)
    assert estimator.model_.optimizer.param_groups[0]["momentum"] == 0.5


def test_an_optimizer_and_its_settings_change_together_and_classes_take_them():
    settings = {"optimizer__nesterov": True, "optimizer": "sgd", "optimizer__momentum": 0.5}
    estimator = fast().set_params(**settings)
    assert estimator.optimizer == {"name": "sgd", "nesterov": True, "momentum": 0.5}
    estimator = fast(optimizer=torch.optim.SGD).set_params(optimizer__momentum=0.5)
    estimator.set_params(optimizer__momentum=0.7).fit(X, NAMES)
    assert estimator.model_.optimizer.param_groups[0]["momentum"] == 0.7
    instance = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    with pytest.raises(fitkit.ConfigurationError, match="optimizer__momentum can be set if"):
        fast(optimizer=instance).set_params(optimizer__momentum=0.5)


def test_skorchs_names_in_a_grid_are_answered():
    with pytest.raises(ValueError, match=r"Invalid parameter 'lr'. Write learning_rate=…"):
        fast().set_params(lr=0.1)
    with pytest.raises(ValueError, match=r"'module__hidden'. Write net=…"):
        fast().set_params(module__hidden=3)
    with pytest.raises(TypeError, match=r"Write set_params\(net__hidden=…\) after it"):
        fast(net__hidden=3)
    with pytest.raises(AttributeError, match="object has no attribute 'nothing'"):
        getattr(fast(), "nothing")  # noqa: B009


def test_a_seed_repeats_a_fit_and_leaves_everybody_elses_random_numbers_alone():
    torch.manual_seed(3)
    np.random.seed(3)
    drawn = torch.rand(2), np.random.rand(2)
    torch.manual_seed(3)
    np.random.seed(3)
    first = fast().fit(X, NAMES).predict_proba(X)
    assert torch.equal(torch.rand(2), drawn[0]) and (np.random.rand(2) == drawn[1]).all()
    assert (fast().fit(X, NAMES).predict_proba(X) == first).all()
    assert not (fast(random_state=1).fit(X, NAMES).predict_proba(X) == first).all()


def test_class_weights_multiply_sample_weights_by_label():
    def weighted(**arguments):
        weight = arguments.pop("sample_weight", None)
        return fast(epochs=2, **arguments).fit(X, NAMES, sample_weight=weight).predict_proba(X)

    by_class = {"setosa": 3.0, "virginica": 0.5}
    same = np.array([by_class.get(name, 1.0) for name in NAMES])
    np.testing.assert_allclose(weighted(class_weight=by_class), weighted(sample_weight=same))
    doubled = weighted(class_weight=by_class, sample_weight=np.full(150, 2.0))
    np.testing.assert_allclose(doubled, weighted(sample_weight=2 * same))
    uneven = X[:70], NAMES[:70]  # 50 and 20
    balanced = fast(class_weight="balanced", epochs=2).fit(*uneven).predict_proba(X)
    by_hand = np.where(uneven[1] == "setosa", 70 / 2 / 50, 70 / 2 / 20)
    wanted = fast(epochs=2).fit(*uneven, sample_weight=by_hand).predict_proba(X)
    np.testing.assert_allclose(balanced, wanted)


def test_partial_fit_goes_on_also_after_pickling():
    estimator = fast()
    with pytest.raises(ValueError, match="classes must be given"):
        estimator.partial_fit(X, NAMES)
    estimator.partial_fit(X[:60], NAMES[:60], classes=np.unique(NAMES))
    copied = pickle.loads(pickle.dumps(estimator))
    for _ in range(3):
        estimator.partial_fit(X, NAMES)
        copied.partial_fit(X, NAMES)
    assert estimator.model_.global_step == 2 + 3 * 5
    assert (copied.predict_proba(X) == estimator.predict_proba(X)).all()
    with pytest.raises(ValueError, match="not among classes"):
        estimator.partial_fit(X, np.full(150, "rosa"))


def test_a_regressor_predicts_in_the_targets_shape():
    x, y = load_diabetes(return_X_y=True)
    y = (y - y.mean()) / y.std()
    estimator = Regressor(perceptron, learning_rate=0.01, epochs=40, random_state=0).fit(x, y)
    assert estimator.predict(x).shape == y.shape and estimator.score(x, y) > 0.4
    both = np.stack([y, -y], axis=1)
    assert clone(estimator).fit(x, both).predict(x[:5]).shape == (5, 2)


def test_images_and_token_ids_reach_the_net_as_they_are():
    images = np.random.default_rng(0).random((12, 1, 8, 8))
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    assert Classifier(net, epochs=1).fit(images, [0, 1] * 6).predict(images).shape == (12,)
    ids = np.random.default_rng(0).integers(0, 9, (12, 5))
    net = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 2))
    assert Classifier(net, epochs=1, dtype=None).fit(ids, [0, 1] * 6).predict(ids).shape == (12,)


def test_what_is_no_net_is_said_at_fit():
    with pytest.raises(fitkit.ConfigurationError, match="net='mlp' must be"):
        Classifier("mlp").fit(X, NAMES)
    with pytest.raises(fitkit.ConfigurationError, match="made a int"):
        Classifier(lambda: 3).fit(X, NAMES)
    with pytest.raises(ValueError, match="one class"):
        fast().fit(X[:50], NAMES[:50])


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    monkeypatch.delitem(sys.modules, "fitkit.sklearn")
    monkeypatch.delitem(sys.modules, "fitkit.extras.sklearn")
    page = importlib.import_module("fitkit.sklearn")
    with pytest.raises(ImportError, match=r"pip install 'torch-fitkit\[sklearn\]'"):
        page.Classifier  # noqa: B018


def test_a_pipeline_of_tfidf_and_a_classifier_trains_on_sparse_text():
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline

    texts = ["good film", "fine good story", "bad film", "dull bad plot"] * 6
    labels = ["+", "+", "-", "-"] * 6
    pipeline = make_pipeline(
        TfidfVectorizer(),
        Classifier(lambda n_features: torch.nn.Linear(n_features, 2), epochs=10, random_state=0),
    )
    search = GridSearchCV(pipeline, {"classifier__learning_rate": [0.001, 0.1]}, cv=2)
    search.fit(texts, labels)
    assert search.best_params_ == {"classifier__learning_rate": 0.1}
    assert search.score(texts, labels) == 1.0
    x = TfidfVectorizer().fit_transform(texts)
    sparse, dense = (
        Classifier(pipeline[-1].net, random_state=0).fit(data, labels) for data in (x, x.toarray())
    )
    assert np.array_equal(sparse.predict_proba(x), dense.predict_proba(x.toarray()))
