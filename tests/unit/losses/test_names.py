"""What each name means: torch's names bit for bit, Keras's by its formulas written in NumPy."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fitkit.errors import ConfigurationError
from fitkit.losses import resolve
from fitkit.losses.names import LOSSES

EPSILON = 1e-7
ROWS = np.array([[0.1, 0.7, 0.2], [0.5, 0.25, 0.25], [0.0, 0.01, 0.99], [1.0, 0.0, 0.0]])
LABELS = np.array([1, 0, 0, 2])
ONE_HOT = np.eye(3)[LABELS]
SHARES = np.array([[0.1, 0.9], [0.5, 1.0], [0.0, 0.3]])
YES_NO = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 0.3]])
VALUES = np.array([[1.5, -2.0], [0.25, 3.0], [-0.5, 0.0]])
TRUTHS = np.array([[1.0, 2.0], [-0.5, 0.0], [4.0, 0.1]])


def clip(values):
    # In float32, as Keras computes: there 1 - EPSILON is 1 - 1.19e-7.
    bounds = np.float32(EPSILON), np.float32(1 - EPSILON)
    return np.clip(values.astype(np.float32), *bounds).astype(np.float64)


def binary_terms(p, t):
    return -(t * np.log(clip(p)) + (1 - t) * np.log(1 - clip(p)))


def unit(values):
    return values / np.maximum(np.linalg.norm(values, axis=-1, keepdims=True), EPSILON)


FOCUS = (1 - (YES_NO * SHARES + (1 - YES_NO) * (1 - SHARES))) ** 2

KERAS = {
    "sparse_categorical_crossentropy": (ROWS, LABELS, -np.log(clip(ROWS[range(4), LABELS]))),
    "categorical_crossentropy": (ROWS, ONE_HOT, -np.log(clip(ROWS[range(4), LABELS]))),
    "categorical_focal_crossentropy": (
        ROWS, ONE_HOT,
        -(0.25 * (1 - clip(ROWS)) ** 2 * ONE_HOT * np.log(clip(ROWS))).sum(-1),
    ),
    "binary_crossentropy": (SHARES, YES_NO, binary_terms(SHARES, YES_NO).mean(-1)),
    "binary_focal_crossentropy": (
        SHARES, YES_NO, (FOCUS * binary_terms(SHARES, YES_NO)).mean(-1)
    ),
    "mean_squared_error": (VALUES, TRUTHS, ((VALUES - TRUTHS) ** 2).mean(-1)),
    "mean_absolute_error": (VALUES, TRUTHS, np.abs(VALUES - TRUTHS).mean(-1)),
    "mae": (VALUES, TRUTHS, np.abs(VALUES - TRUTHS).mean(-1)),
    "mean_absolute_percentage_error": (
        VALUES, TRUTHS,
        100 * (np.abs(TRUTHS - VALUES) / np.maximum(np.abs(TRUTHS), EPSILON)).mean(-1),
    ),
    "mape": (
        VALUES[:1], TRUTHS[:1], np.array([100 * (0.5 / 1.0 + 4.0 / 2.0) / 2])
    ),
    "mean_squared_logarithmic_error": (
        VALUES, TRUTHS,
        ((np.log(np.maximum(VALUES, EPSILON) + 1)
          - np.log(np.maximum(TRUTHS, EPSILON) + 1)) ** 2).mean(-1),
    ),
    "msle": (VALUES[:1], np.array([[1.5, 1.0]]), np.array([math.log(2.0) ** 2 / 2])),
    "log_cosh": (VALUES, TRUTHS, np.log(np.cosh(VALUES - TRUTHS)).mean(-1)),
    "cosine_similarity": (VALUES, TRUTHS, -(unit(VALUES) * unit(TRUTHS)).sum(-1)),
    "kl_divergence": (
        ROWS, ROWS[::-1],
        (np.clip(ROWS[::-1], EPSILON, 1)
         * np.log(np.clip(ROWS[::-1], EPSILON, 1) / np.clip(ROWS, EPSILON, 1))).sum(-1),
    ),
    "kld": (
        ROWS[:2], np.array([[0.0, 1.0, 0.0], [0.5, 0.25, 0.25]]),
        np.array([-math.log(0.7), 0.0]),
    ),
    "poisson": (SHARES, TRUTHS, (SHARES - TRUTHS * np.log(SHARES + EPSILON)).mean(-1)),
    "hinge": (VALUES, np.round(YES_NO),
              np.maximum(1 - (2 * np.round(YES_NO) - 1) * VALUES, 0).mean(-1)),
    "squared_hinge": (VALUES, 2 * np.round(YES_NO) - 1,
                      (np.maximum(1 - (2 * np.round(YES_NO) - 1) * VALUES, 0) ** 2).mean(-1)),
    "categorical_hinge": (
        np.array([[2.0, -1.0, 0.5], [0.1, 0.2, 0.3]]), np.array([[1.0, 0, 0], [0, 1.0, 0]]),
        # No wrong score is below 0: the true class counts as 0 in the maximum.
        np.array([max(0.5 - 2.0 + 1, 0), max(0.3 - 0.2 + 1, 0)]),
    ),
}  # fmt: skip

LOGITS = torch.tensor([[1.0, -2.0, 0.5], [0.1, 0.2, 0.3], [4.0, 0.0, -1.0], [0.0, 0.0, 2.0]])
INDICES = torch.tensor([1, 0, 0, 2])
SOFT = torch.tensor([[0.2, 0.8, 0.0], [1.0, 0.0, 0.0], [0.3, 0.3, 0.4], [0.0, 0.0, 1.0]])
NUMBERS = torch.tensor([[1.0, 2.0, 0.0], [-0.5, 0.0, 9.0], [4.0, 0.1, 1.0], [3.0, 0.0, 2.0]])
SIGNS = torch.tensor([[1.0, -1.0, 1.0], [-1.0, -1.0, 1.0], [1.0, 1.0, -1.0], [1.0, -1.0, -1.0]])

TORCH = {
    "cross_entropy": (F.cross_entropy, LOGITS, INDICES),
    "cross entropy": (F.cross_entropy, LOGITS, SOFT),
    "CrossEntropyLoss": (F.cross_entropy, LOGITS, INDICES),
    "nll": (F.nll_loss, LOGITS.log_softmax(1), INDICES),
    "nll_loss": (F.nll_loss, LOGITS.log_softmax(1), INDICES),
    "bce": (F.binary_cross_entropy, LOGITS.sigmoid(), SOFT),
    "binary_cross_entropy": (F.binary_cross_entropy, LOGITS.sigmoid(), SOFT),
    "bce_with_logits": (F.binary_cross_entropy_with_logits, LOGITS, SOFT),
    "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, LOGITS, SOFT),
    "mse": (F.mse_loss, LOGITS, NUMBERS),
    "MSE_loss": (F.mse_loss, LOGITS, NUMBERS),
    "l1": (F.l1_loss, LOGITS, NUMBERS),
    "l1_loss": (F.l1_loss, LOGITS, NUMBERS),
    "huber": (F.huber_loss, LOGITS, NUMBERS),
    "smooth_l1": (F.smooth_l1_loss, LOGITS, NUMBERS),
    "poisson_nll": (F.poisson_nll_loss, LOGITS, NUMBERS),
    "soft_margin": (F.soft_margin_loss, LOGITS, SIGNS),
    "multi_margin": (F.multi_margin_loss, LOGITS, INDICES),
    "multilabel_margin": (
        F.multilabel_margin_loss, LOGITS,
        torch.tensor([[0, 2, -1], [1, -1, -1], [2, 1, 0], [0, -1, -1]]),
    ),
    "multilabel_soft_margin": (F.multilabel_soft_margin_loss, LOGITS, SOFT.round()),
    "hinge_embedding": (F.hinge_embedding_loss, LOGITS, SIGNS),
}  # fmt: skip


@pytest.mark.parametrize("name", KERAS)
def test_a_keras_name_computes_keras_s_formula(name):
    rows, truths, expected = KERAS[name]
    prediction = torch.tensor(rows, dtype=torch.float32)
    target = torch.tensor(truths.copy())
    loss = resolve(name)
    assert loss(prediction, target).item() == pytest.approx(expected.mean(), rel=2e-5, abs=1e-6)
    each = loss.per_sample(prediction, target)
    each = each.reshape(len(expected), -1).mean(1)
    np.testing.assert_allclose(each.numpy(), expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", KERAS)
def test_a_keras_name_has_finite_gradients_even_at_its_edges(name):
    rows, truths, _ = KERAS[name]
    prediction = torch.tensor(rows, dtype=torch.float32, requires_grad=True)
    resolve(name)(prediction, torch.tensor(truths.copy())).backward()
    assert torch.isfinite(prediction.grad).all()


@pytest.mark.parametrize("name", TORCH)
def test_a_torch_name_is_torch_s_function_bit_for_bit(name):
    function, prediction, target = TORCH[name]
    loss = resolve(name)
    assert torch.equal(loss(prediction, target), function(prediction, target))
    assert torch.equal(
        loss.per_sample(prediction, target), function(prediction, target, reduction="none")
    )


def test_every_name_was_compared_with_numpy_or_torch():
    compared = {id(LOSSES[name]) for name in [*KERAS, *TORCH, "kl_div"]}
    assert {name for name in LOSSES if id(LOSSES[name]) not in compared} == set()


def test_kl_div_is_the_divergence_per_sample_not_per_value():
    prediction = LOGITS.log_softmax(1)
    expected = (SOFT * (SOFT.clamp_min(1e-30).log() - prediction)).sum() / 4
    loss = resolve("kl_div")
    assert torch.equal(loss(prediction, SOFT), F.kl_div(prediction, SOFT, reduction="batchmean"))
    assert loss(prediction, SOFT).item() == pytest.approx(expected.item(), rel=1e-6)
    assert loss.per_sample(prediction, SOFT).mean().item() == pytest.approx(expected.item())


@pytest.mark.parametrize("name", ["mse", "huber", "log_cosh", "hinge", "poisson", "mape"])
def test_one_value_a_sample_may_come_without_a_second_dimension(name):
    prediction, target = torch.tensor([0.5, 2.0, 1.0]), torch.tensor([1.0, 1.0, -1.0])
    loss = resolve(name)
    column = loss(prediction[:, None], target[:, None])
    assert loss(prediction, target).item() == pytest.approx(column.item())
    assert loss.per_sample(prediction, target).shape == (3,)


def test_keras_rows_are_scaled_to_sum_to_one():
    prediction, target = torch.tensor([[0.2, 0.2], [0.3, 0.1]]), torch.tensor([0, 0])
    expected = -(math.log(0.5) + math.log(0.75)) / 2
    for name, labels in (
        ("sparse_categorical_crossentropy", target),
        ("categorical_crossentropy", F.one_hot(target, 2)),
    ):
        assert resolve(name)(prediction, labels).item() == pytest.approx(expected, rel=1e-6)


def test_keras_s_bce_and_torch_s_differ_where_a_probability_is_zero():
    prediction, target = torch.tensor([[0.0]]), torch.tensor([[1.0]])
    assert resolve("binary_cross_entropy")(prediction, target).item() == 100.0
    keras = resolve("binary_crossentropy")(prediction, target).item()
    assert keras == pytest.approx(-math.log(1e-7), rel=1e-5)
    assert resolve("BinaryCrossentropy")(prediction, target).item() == keras


@pytest.mark.parametrize("name", ["crossentropy", "CrossEntropy", "ce", "CE"])
def test_a_name_that_keras_resolves_by_shape_is_refused_with_its_candidates(name):
    with pytest.raises(ConfigurationError, match=r"'cross_entropy'.*'binary_crossentropy'"):
        resolve(name)


@pytest.mark.parametrize(
    "name", ["binary_cross_entropy", "Binary Cross Entropy", "binary-cross-entropy", "BCE"]
)
def test_torch_s_binary_cross_entropy_is_meant_however_its_words_are_parted(name):
    assert LOSSES[name] is LOSSES["bce"]
    assert name in LOSSES


@pytest.mark.parametrize(
    "name", ["binary_crossentropy", "BinaryCrossentropy", "binary crossentropy"]
)
def test_keras_s_binary_crossentropy_is_one_word_in_the_end(name):
    assert LOSSES[name] is LOSSES["binarycrossentropy"] is not LOSSES["bce"]


def test_every_name_is_listed_and_resolves_to_what_is_registered_under_it():
    assert {"binary_cross_entropy", "binary_crossentropy", "cross_entropy"} <= set(LOSSES)
    assert "ce" not in LOSSES
    with pytest.raises(ConfigurationError, match="'binary_cross_entropy'.*'binary_crossentropy'"):
        resolve("no_such_loss")


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigurationError, match="Did you mean 'cross_entropy'"):
        resolve("cros_entropy")


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.int32, (4,)), (torch.uint8, (4, 1)), (torch.int64, (4, 1)), (torch.float32, (4,)),
     (torch.float64, (4, 1)), (torch.int16, (4,))],
)  # fmt: skip
@pytest.mark.parametrize("name", ["cross_entropy", "nll", "multi_margin"])
def test_class_indices_of_any_type_and_shape_mean_the_same(name, dtype, shape):
    prediction = LOGITS.log_softmax(1)
    loss = resolve(name)
    target = INDICES.to(dtype).reshape(shape)
    loss.check(prediction, target)
    assert torch.equal(loss(prediction, target), loss(prediction, INDICES))


def test_bool_labels_are_classes_zero_and_one():
    target = torch.tensor([True, False, False, True])
    loss = resolve("cross_entropy")
    assert torch.equal(loss(LOGITS, target), F.cross_entropy(LOGITS, target.long()))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool])
def test_one_hot_labels_of_any_type_mean_their_indices(dtype):
    target = F.one_hot(INDICES, 3).to(dtype)
    loss = resolve("cross_entropy")
    loss.check(LOGITS, target)
    assert loss(LOGITS, target).item() == pytest.approx(F.cross_entropy(LOGITS, INDICES).item())


def test_cross_entropy_has_classes_in_axis_one():
    prediction, target = torch.randn(2, 5, 4, 3), torch.randint(5, (2, 4, 3))
    loss = resolve("cross_entropy")
    loss.check(prediction, target)
    expected = F.cross_entropy(prediction, target)
    assert torch.equal(loss(prediction, target), expected)
    assert torch.equal(loss(prediction, target.unsqueeze(1).int()), expected)
    assert loss.per_sample(prediction, target).shape == (2, 4, 3)


@pytest.mark.parametrize("layout", ["last", "last, column", "axis 1", "axis 1, channel"])
def test_sparse_categorical_crossentropy_finds_the_class_axis_by_the_target(layout):
    prediction, target = torch.rand(2, 4, 6, 5).softmax(-1), torch.randint(5, (2, 4, 6))
    expected = -prediction.gather(-1, target.unsqueeze(-1)).log().mean()
    if layout.startswith("axis 1"):
        prediction = prediction.movedim(-1, 1)
    if layout == "last, column":
        target = target.unsqueeze(-1)
    if layout == "axis 1, channel":
        target = target.unsqueeze(1)
    loss = resolve("sparse_categorical_crossentropy")
    loss.check(prediction, target.float())
    assert loss(prediction, target.int()).item() == pytest.approx(expected.item(), rel=1e-5)
    assert loss.per_sample(prediction, target).shape == (2, 4, 6)


@pytest.mark.parametrize("name", ["mse", "bce_with_logits", "binary_crossentropy", "hinge"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64, torch.float32])
def test_a_flat_target_meets_a_column_and_a_column_a_flat_prediction(name, dtype):
    column, target = torch.tensor([[0.2], [0.9], [0.4]]), torch.tensor([0, 1, 1]).to(dtype)
    loss = resolve(name)
    expected = loss(column, target.float().reshape(3, 1))
    assert torch.equal(loss(column, target), expected)
    assert loss(column[:, 0], target[:, None]).item() == pytest.approx(expected.item())
    assert loss(column, target).dtype is torch.float32


@pytest.mark.parametrize(
    ("ours", "theirs"), [((3, 1), (1, 3)), ((3, 2), (3,)), ((3, 2), (3, 1)), ((3,), (1,)),
                         ((3, 1), (3, 2))],
)  # fmt: skip
@pytest.mark.parametrize("name", ["mse", "bce_with_logits", "poisson", "cosine_similarity"])
def test_shapes_that_torch_would_broadcast_are_refused_with_both(name, ours, theirs):
    with pytest.raises(ConfigurationError) as caught:
        resolve(name)(torch.rand(ours), torch.rand(theirs))
    assert str(ours) in str(caught.value)
    assert str(theirs) in str(caught.value)


@pytest.mark.parametrize("name", ["mse", "bce", "huber", "soft_margin", "binary_crossentropy"])
def test_a_half_precision_prediction_is_compared_in_float32(name):
    prediction, target = torch.full((3, 1), 0.5).bfloat16(), torch.tensor([1.0, 1.0, 1.0])
    value = resolve(name)(prediction, target)
    assert value.dtype is torch.float32
    assert value.item() == pytest.approx(resolve(name)(prediction.float(), target).item())


HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("target", [torch.tensor([[257]]), torch.tensor([257.0])])
@pytest.mark.parametrize("half", HALVES)
def test_a_large_target_is_not_rounded_beside_a_half_precision_net(half, target):
    prediction = torch.zeros(1, 1, dtype=half, requires_grad=True)
    value = resolve("mse")(prediction, target)
    assert value.item() == 66049.0
    value.backward()
    assert prediction.grad.dtype is half
    weighted = resolve("mse").weighted(prediction, target, torch.tensor([1.001]))
    assert weighted.item() == pytest.approx(66049 * 1.001)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", [*KERAS, *TORCH, "kl_div"])
def test_every_loss_of_a_half_precision_prediction_is_that_of_the_same_numbers_in_float32(
    name, half
):
    rows, truths = KERAS[name][:2] if name in KERAS else (TORCH.get(name) or (0, LOGITS, SOFT))[1:]
    prediction, target = (torch.as_tensor(part.copy() if name in KERAS else part) for part in
                          (rows, truths))  # fmt: skip
    prediction = prediction.to(half)
    target = target.float() if target.is_floating_point() else target
    loss = resolve(name)
    assert torch.equal(loss(prediction, target), loss(prediction.float(), target))
    assert loss(prediction, target).dtype is torch.float32
    each = loss.per_sample(prediction, target)
    assert torch.equal(each, loss.per_sample(prediction.float(), target))


def test_a_module_s_class_weights_meet_half_precision_logits():
    module = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    logits = LOGITS.bfloat16()
    assert torch.equal(resolve(module)(logits, INDICES), module(logits.float(), INDICES))


@pytest.mark.parametrize("name", ["bce", "binary_crossentropy", "cross_entropy", "mse"])
def test_losses_work_within_a_bfloat16_autocast(name):
    prediction = torch.tensor([[0.25, 0.75]], requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        value = resolve(name)(prediction.bfloat16(), torch.tensor([[0.0, 1.0]]))
    value.backward()
    assert value.item() == pytest.approx(
        resolve(name)(prediction, torch.tensor([[0.0, 1.0]])).item(), rel=1e-2
    )


def test_the_name_is_as_given():
    assert resolve("MSE").name == "MSE"
    assert resolve("mean_squared_error").name == "mean_squared_error"


@pytest.mark.parametrize(
    ("name", "takes", "task"),
    [
        ("cross_entropy", "logits", "classes"),
        ("nll", "log_probabilities", "classes"),
        ("sparse_categorical_crossentropy", "probabilities", "classes"),
        ("bce", "probabilities", "binary"),
        ("binary_focal_crossentropy", "probabilities", "binary"),
        ("bce_with_logits", "logits", "binary"),
        ("mae", None, "regression"),
        ("hinge", None, None),
    ],
)
def test_a_loss_tells_what_predictions_and_targets_are(name, takes, task):
    hint = resolve(name).hint
    assert (hint.takes, hint.task) == (takes, task)
