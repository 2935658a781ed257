"""Named classification metrics equal scikit-learn's on the whole data."""

import numpy as np
import pytest
import torch

from fitkit.errors import ConfigurationError
from fitkit.outputs import LossHint

reference = pytest.importorskip("sklearn.metrics")

CLASSES = LossHint("logits", "classes")
BINARY = LossHint("logits", "binary")


@pytest.fixture(scope="module")
def multiclass():
    generator = torch.Generator().manual_seed(1)
    target = torch.randint(4, (150,), generator=generator)
    logits = 3 * torch.randn(150, 4, generator=generator)
    logits[torch.arange(150), target] += 1
    return logits, target


@pytest.fixture(scope="module")
def binary():
    generator = torch.Generator().manual_seed(2)
    target = torch.randint(2, (150,), generator=generator)
    return 2 * torch.randn(150, generator=generator) + target, target


@pytest.fixture(scope="module")
def multilabel():
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(2, (150, 3), generator=generator)
    return 2 * torch.randn(150, 3, generator=generator) + target, target


def macro(function):
    return lambda t, p: function(t, p, average="macro")


def specificity(target, prediction):
    classes = range(prediction.max() + 1) if prediction.max() > 1 else [1]
    return np.mean([reference.recall_score(target != c, prediction != c) for c in classes])


BY_LABEL = {
    "accuracy": reference.accuracy_score,
    "acc": reference.accuracy_score,
    "exact_match": reference.accuracy_score,
    "hamming_distance": reference.hamming_loss,
    "balanced_accuracy": reference.balanced_accuracy_score,
    "cohen_kappa": reference.cohen_kappa_score,
    "matthews_corrcoef": reference.matthews_corrcoef,
    "mcc": reference.matthews_corrcoef,
    "specificity": specificity,
}
BY_LABEL_AND_AVERAGE = {
    "precision": reference.precision_score,
    "recall": reference.recall_score,
    "sensitivity": reference.recall_score,
    "f1": reference.f1_score,
    "F1-Score": reference.f1_score,
    "dice": reference.f1_score,
    "jaccard": reference.jaccard_score,
    "iou": reference.jaccard_score,
}


@pytest.mark.parametrize("name", [*BY_LABEL, *BY_LABEL_AND_AVERAGE])
def test_a_multiclass_metric_by_label_equals_scikit_learn(measure, multiclass, name):
    logits, target = multiclass
    function = BY_LABEL.get(name) or macro(BY_LABEL_AND_AVERAGE[name])
    found = measure(name, logits, target, hint=CLASSES)
    assert found == {name: pytest.approx(function(target.numpy(), logits.argmax(1).numpy()), 1e-5)}


@pytest.mark.parametrize("name", [*BY_LABEL, *BY_LABEL_AND_AVERAGE])
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_a_binary_metric_by_label_equals_scikit_learn(measure, binary, name, shape):
    logits, target = binary
    function = BY_LABEL.get(name) or BY_LABEL_AND_AVERAGE[name]
    found = measure(name, logits.reshape(shape), target, hint=BINARY)
    assert found[name] == pytest.approx(function(target.numpy(), (logits > 0).numpy()), 1e-5)


@pytest.mark.parametrize("name", BY_LABEL_AND_AVERAGE)
def test_a_multilabel_metric_by_label_equals_scikit_learn(measure, multilabel, name):
    logits, target = multilabel
    expected = macro(BY_LABEL_AND_AVERAGE[name])(target.numpy(), (logits > 0).numpy())
    assert measure(name, logits, target, hint=BINARY)[name] == pytest.approx(expected, 1e-5)


def test_multilabel_accuracy_is_over_all_entries_and_exact_match_over_samples(measure, multilabel):
    logits, target = multilabel
    right = (logits > 0) == target.bool()
    found = measure(["accuracy", "exact_match", "hamming_loss"], logits, target, hint=BINARY)
    assert found["accuracy"] == pytest.approx(right.float().mean().item())
    assert found["exact_match"] == pytest.approx(right.all(1).float().mean().item())
    assert found["hamming_loss"] == pytest.approx(1 - found["accuracy"])


@pytest.mark.parametrize("name", ["auc", "auroc", "roc_auc"])
def test_areas_under_roc_curves_equal_scikit_learn(measure, multiclass, binary, multilabel, name):
    logits, target = multiclass
    shares = logits.double().softmax(1)
    expected = reference.roc_auc_score(target, shares, multi_class="ovr", average="macro")
    assert measure(name, logits, target, hint=CLASSES)[name] == pytest.approx(expected, 1e-5)
    for logits, target in (binary, multilabel):
        expected = reference.roc_auc_score(target, logits)
        assert measure(name, logits, target, hint=BINARY)[name] == pytest.approx(expected, 1e-5)


def test_average_precision_equals_scikit_learn(measure, multiclass, binary, multilabel):
    name = "average_precision"
    logits, target = multiclass
    one_hot = torch.nn.functional.one_hot(target)
    expected = reference.average_precision_score(one_hot, logits.double().softmax(1))
    assert measure(name, logits, target, hint=CLASSES)[name] == pytest.approx(expected, 1e-5)
    for logits, target in (binary, multilabel):
        expected = reference.average_precision_score(target, logits)
        assert measure(name, logits, target, hint=BINARY)[name] == pytest.approx(expected, 1e-5)


def test_counts_and_confusion_matrix_equal_scikit_learn(measure, multiclass, binary):
    logits, target = multiclass
    matrix = measure("confusion_matrix", logits, target, hint=CLASSES)["confusion_matrix"]
    assert isinstance(matrix, np.ndarray)
    assert (matrix == reference.confusion_matrix(target, logits.argmax(1))).all()
    logits, target = binary
    names = ["true_negatives", "false_positives", "false_negatives", "true_positives"]
    found = measure(names, logits, target, hint=BINARY)
    assert list(found.values()) == reference.confusion_matrix(target, logits > 0).ravel().tolist()


def test_negative_predictive_value_is_precision_of_the_negatives(measure, binary):
    logits, target = binary
    found = measure("negative_predictive_value", logits, target, hint=BINARY)
    expected = reference.precision_score(target == 0, logits <= 0)
    assert found["negative_predictive_value"] == pytest.approx(expected)


def test_the_calibration_error_is_that_of_probabilities(measure, binary):
    logits, target = binary
    shares, bins = logits.sigmoid(), 15
    places = (shares * bins).long()
    expected = sum(
        (shares[places == b].mean() - target[places == b].float().mean()).abs()
        * (places == b).float().mean()
        for b in range(bins)
        if (places == b).any()
    )
    assert measure("ece", logits, target, hint=BINARY)["ece"] == pytest.approx(
        expected.item(), 1e-4
    )


@pytest.mark.parametrize(
    ("name", "k"),
    [
        ("top_k_categorical_accuracy", 5),
        ("sparse_top_k_categorical_accuracy", 5),
        ("top_5_accuracy", 5),
        ("top_2_accuracy", 2),
        ("top_3_accuracy", 3),
    ],
)
def test_top_k_accuracy_equals_scikit_learn(measure, name, k):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(90, 8, generator=generator)
    target = torch.randint(8, (90,), generator=generator)
    expected = reference.top_k_accuracy_score(target, logits, k=k, labels=range(8))
    assert measure(name, logits, target, hint=CLASSES)[name] == pytest.approx(expected)
    one_hot = torch.nn.functional.one_hot(target).float()
    assert measure(name, logits, one_hot, hint=CLASSES)[name] == pytest.approx(expected)


def test_top_k_is_not_above_the_number_of_classes(measure, multiclass):
    logits, target = multiclass
    assert measure("top_5_accuracy", logits, target)["top_5_accuracy"] == 1.0


@pytest.mark.parametrize("takes", ["logits", "probabilities", "log_probabilities"])
def test_cross_entropy_is_log_loss_whatever_the_net_gives(measure, multiclass, binary, takes):
    logits, target = multiclass
    expected = reference.log_loss(target, logits.double().softmax(1))
    given = {
        "logits": logits,
        "probabilities": logits.softmax(1),
        "log_probabilities": logits.log_softmax(1),
    }[takes]
    names = ["cross_entropy", "sparse_categorical_crossentropy", "perplexity"]
    found = measure(names, given, target, hint=LossHint(takes, "classes"))
    assert list(found.values()) == pytest.approx([expected, expected, np.exp(expected)], 1e-5)
    one_hot = torch.nn.functional.one_hot(target).float()
    found = measure("categorical_crossentropy", given, one_hot, hint=LossHint(takes, "classes"))
    assert found["categorical_crossentropy"] == pytest.approx(expected, 1e-5)
    logits, target = binary
    expected = reference.log_loss(target, logits.double().sigmoid())
    given = {
        "logits": logits,
        "probabilities": logits.sigmoid(),
        "log_probabilities": torch.nn.functional.logsigmoid(logits),
    }[takes]
    for name in ("binary_crossentropy", "log_loss"):
        found = measure(name, given, target, hint=LossHint(takes, "binary"))
        assert found[name] == pytest.approx(expected, 1e-5)


def test_classes_that_a_target_never_has_do_not_shift_macro_means(measure):
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(60, 6, generator=generator)
    logits[:, 5] = -100  # never predicted
    target = torch.randint(5, (60,), generator=generator)
    found = measure(["f1", "precision", "recall"], logits, target, hint=CLASSES)
    prediction = logits.argmax(1)
    for name, value in found.items():
        expected = macro(BY_LABEL_AND_AVERAGE[name])(target, prediction)
        assert value == pytest.approx(expected, 1e-5)


def test_targets_of_minus_100_count_for_nothing(measure, multiclass):
    logits, target = multiclass
    ignoring = target.clone()
    ignoring[::3] = -100
    names = ["accuracy", "precision", "f1", "mcc", "auc", "cross_entropy", "top_2_accuracy"]
    found = measure(names, logits, ignoring, hint=CLASSES)
    kept = ignoring != -100
    expected = measure(names, logits[kept], target[kept], hint=CLASSES)
    assert found == {name: pytest.approx(value, 1e-5) for name, value in expected.items()}


def test_a_metric_without_a_form_for_the_task_says_so(measure, multilabel):
    with pytest.raises(ConfigurationError, match=r"'cohen_kappa'.*no multilabel form"):
        measure("cohen_kappa", *multilabel, hint=BINARY)
