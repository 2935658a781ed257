"""The first batch's checks: what they refuse, what they say, and what they let pass."""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fitkit.errors import ConfigurationError
from fitkit.losses import CompiledLoss, resolve
from fitkit.losses.guards import check_broadcast, check_label_range

LOGITS = torch.tensor([[1.0, -2.0, 0.5], [0.1, 0.2, 0.3], [4.0, 0.0, -1.0], [0.0, 0.0, 2.0]])
INDICES = torch.tensor([1, 0, 0, 2])


def message(loss, prediction, target):
    with pytest.raises(ConfigurationError) as caught:
        resolve(loss).check(prediction, target)
    return str(caught.value)


def passes_silently(loss, prediction, target):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve(loss).check(prediction, target)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("sparse_categorical_crossentropy", "loss='cross_entropy'"),
        ("categorical_crossentropy", "loss='cross_entropy'"),
        ("categorical_focal_crossentropy", "End the net with a softmax"),
        ("binary_crossentropy", "loss='bce_with_logits'"),
        ("binary_focal_crossentropy", "End the net with a sigmoid"),
        ("bce", "loss='bce_with_logits'"),
        (nn.BCELoss(), "loss='bce_with_logits'"),
        ("kl_divergence", "End the net with a softmax"),
    ],
)
def test_logits_are_refused_by_losses_of_probabilities(name, remedy):
    target = INDICES if name == "sparse_categorical_crossentropy" else F.one_hot(INDICES, 3)
    text = message(name, LOGITS, target)
    assert "takes probabilities" in text
    assert "from -2 to 4" in text
    assert remedy in text


@pytest.mark.parametrize("name", ["sparse_categorical_crossentropy", "categorical_crossentropy"])
def test_class_probabilities_must_sum_to_one(name):
    target = INDICES if name.startswith("sparse") else F.one_hot(INDICES, 3)
    text = message(name, LOGITS.sigmoid(), target)
    assert "sums to" in text
    assert "loss='cross_entropy'" in text
    passes_silently(name, LOGITS.softmax(1), target)
    passes_silently(name, LOGITS.softmax(1) * 1.005, target)


def test_probabilities_pass_and_a_rounding_error_too():
    target = torch.tensor([[1.0], [0.0]])
    passes_silently("binary_crossentropy", torch.tensor([[1.0 + 1e-6], [-1e-6]]), target)
    passes_silently("bce", torch.tensor([[1.0], [0.0]]), target)


@pytest.mark.parametrize(("name", "remedy"), [("nll", "loss='cross_entropy'"),
                                              (nn.NLLLoss(), "loss='cross_entropy'"),
                                              ("kl_div", "log_softmax")])  # fmt: skip
def test_positive_log_probabilities_are_refused(name, remedy):
    target = LOGITS.softmax(1) if name == "kl_div" else INDICES
    text = message(name, LOGITS, target)
    assert "reach 4" in text
    assert remedy in text
    passes_silently(name, LOGITS.log_softmax(1), target)


@pytest.mark.parametrize("loss", ["cross_entropy", nn.CrossEntropyLoss(), F.cross_entropy])
def test_a_softmax_before_cross_entropy_is_warned_of_once(loss):
    loss = resolve(loss)
    with pytest.warns(UserWarning, match=r"end with a softmax.*sparse_categorical"):
        loss.check(LOGITS.softmax(1), INDICES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss.check(LOGITS.softmax(1), INDICES)


def test_logits_are_not_suspected_of_a_softmax():
    for prediction in (LOGITS, LOGITS.abs(), torch.zeros(4, 3), LOGITS.log_softmax(1)):
        passes_silently("cross_entropy", prediction, INDICES)


@pytest.mark.parametrize("loss", ["bce_with_logits", nn.BCEWithLogitsLoss()])
def test_a_sigmoid_before_bce_with_logits_is_warned_of(loss):
    prediction = torch.linspace(-3, 3, 32, requires_grad=True).sigmoid().reshape(32, 1).double()
    with pytest.warns(UserWarning, match="ends with a sigmoid.*loss='bce'"):
        resolve(loss).check(prediction, torch.ones(32))


NETS = {
    "shallow": lambda: nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 1)),
    "deep": lambda: nn.Sequential(nn.Linear(30, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
                                  nn.Linear(256, 1)),
    "pooled": lambda: nn.Sequential(nn.Unflatten(1, (1, 5, 6)), nn.Conv2d(1, 8, 3), nn.ReLU(),
                                    nn.Conv2d(8, 1, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
}  # fmt: skip


@pytest.mark.parametrize("net", NETS)
def test_fresh_logits_within_0_and_1_are_not_suspected_of_a_sigmoid(net):
    within = 0
    for seed in range(60):
        torch.manual_seed(seed)
        prediction = NETS[net]()(torch.rand(64, 30))
        within += bool(((prediction > 0) & (prediction < 1)).all())
        passes_silently("bce_with_logits", prediction, torch.ones(64))
        passes_silently("bce_with_logits", prediction.detach(), torch.ones(64))
    assert within, "no seed gives what used to be suspected"


@pytest.mark.parametrize(
    "loss", ["cross_entropy", "nll", "multi_margin", nn.CrossEntropyLoss(), nn.NLLLoss(),
             "sparse_categorical_crossentropy"],
)  # fmt: skip
@pytest.mark.parametrize("wrong", [[0, 1, 2, 3], [-1, 0, 1, 2], [0, 0, 255, 1]])
def test_labels_out_of_range_are_refused_with_their_range(loss, wrong):
    takes = resolve(loss).hint.takes
    prediction = LOGITS.softmax(1) if takes == "probabilities" else LOGITS.log_softmax(1)
    text = message(loss, prediction, torch.tensor(wrong))
    assert f"from {min(wrong)} to {max(wrong)}" in text
    assert "labels from 0 to 2" in text


def test_labels_that_start_at_one_are_told_to_subtract_it():
    assert "need y - 1" in message("cross_entropy", LOGITS, torch.tensor([1, 2, 3, 1]))


def test_the_ignored_label_passes_and_only_it():
    passes_silently("cross_entropy", LOGITS, torch.tensor([0, -100, 2, 1]))
    passes_silently(nn.CrossEntropyLoss(ignore_index=255), LOGITS, torch.tensor([0, 255, 2, 1]))
    passes_silently("cross_entropy", LOGITS, torch.full((4,), -100))
    text = message(nn.CrossEntropyLoss(ignore_index=-1), LOGITS, torch.tensor([0, -2, -1, 1]))
    assert "(or -1, ignored)" in text
    assert "from -2 to 1" in text


def test_fractions_are_no_class_indices():
    assert "fractions" in message("cross_entropy", LOGITS, torch.tensor([0.0, 1.0, 0.5, 2.0]))
    passes_silently("cross_entropy", LOGITS, torch.tensor([0.0, 1.0, 1.0, 2.0]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int32, torch.float64])
def test_the_range_of_a_whole_data_set_can_be_checked(dtype):
    labels = torch.tensor([0, 1] * 100).to(dtype)
    check_label_range(labels, 2)
    check_label_range(labels[:0], 1)
    with pytest.raises(ConfigurationError, match="from 0 to 1"):
        check_label_range(labels, 1)


@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "sparse_categorical_crossentropy"])
def test_batches_of_different_lengths_are_refused_with_both(loss):
    text = message(loss, LOGITS, INDICES[:3])
    assert "4 predictions" in text
    assert "3 targets" in text


@pytest.mark.parametrize("loss", ["cross_entropy", "mse", nn.MSELoss(), F.l1_loss])
def test_a_missing_target_is_named_with_the_loss(loss):
    text = message(loss, LOGITS, None)
    assert resolve(loss).label in text
    assert "y is missing" in text


def test_a_structure_is_no_tensor():
    assert "the prediction is" in message("mse", (LOGITS, LOGITS), LOGITS)
    assert "the target is" in message("mse", LOGITS, [1, 2, 3, 4])
    assert "without dimensions" in message("mse", torch.tensor(1.0), torch.tensor(1.0))


@pytest.mark.parametrize(
    ("loss", "remedy"),
    [("cross_entropy", "bce_with_logits"), (nn.CrossEntropyLoss(), "bce_with_logits"),
     ("nll", "bce_with_logits"), ("sparse_categorical_crossentropy", "binary_crossentropy"),
     ("categorical_crossentropy", "binary_crossentropy")],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(4, 1), (4,)])
def test_one_column_is_no_choice_between_classes(loss, remedy, shape):
    target = torch.tensor([0, 1, 1, 0]).reshape(shape)
    text = message(loss, torch.zeros(shape), target)
    assert f"loss={remedy!r}" in text
    assert str(shape) in text


def test_one_hot_and_index_targets_are_told_apart():
    shares, one_hot = LOGITS.softmax(1), F.one_hot(INDICES, 3)
    text = message("sparse_categorical_crossentropy", shares, one_hot)
    assert "loss='categorical_crossentropy'" in text
    for target in (INDICES, INDICES[:, None]):
        text = message("categorical_crossentropy", shares, target)
        assert "loss='sparse_categorical_crossentropy'" in text
    assert "argmax(1)" in message("nll", LOGITS.log_softmax(1), one_hot.float())


def test_classes_in_the_last_axis_are_told_to_move():
    text = message("cross_entropy", torch.randn(2, 7, 5), torch.zeros(2, 7, dtype=torch.int64))
    assert "movedim(-1, 1)" in text
    assert "(2, 5)" in text


def test_yes_no_labels_for_several_classes_are_no_one_hot_rows():
    text = message("cross_entropy", LOGITS, torch.tensor([[1, 1, 0]] * 4))
    assert "loss='bce_with_logits'" in text
    passes_silently("cross_entropy", LOGITS, torch.tensor([[0.5, 0.25, 0.25]] * 4))


TWO_LABELS = {(1.0, 2.0): "y - 1", (-1.0, 1.0): "(y + 1) / 2", (0.0, 255.0): "y / 255"}


@pytest.mark.parametrize(
    "loss",
    ["bce", "bce_with_logits", "binary_crossentropy", "binary_focal_crossentropy",
     "multilabel_soft_margin", nn.BCELoss(), nn.BCEWithLogitsLoss(), F.binary_cross_entropy],
)  # fmt: skip
@pytest.mark.parametrize("labels", TWO_LABELS)
def test_targets_outside_0_and_1_are_refused_by_losses_of_yes_or_no(loss, labels):
    prediction = torch.linspace(0.1, 0.9, 6)[:, None]
    target = torch.tensor(labels * 3)[:, None]
    text = message(loss, prediction, target)
    assert f"from {labels[0]:g} to {labels[1]:g}. Pass {TWO_LABELS[labels]}." in text
    assert "0, or" not in text
    message(loss, prediction, target.long())
    assert "Pass 0 and 1" in message(loss, prediction, torch.arange(6.0)[:, None])
    passes_silently(loss, prediction, torch.tensor([0.0, 1.0, 0.3, 1.0 + 1e-6, 0.0, 0.5])[:, None])
    passes_silently(loss, prediction, torch.tensor([True, False] * 3)[:, None])


@pytest.mark.parametrize(
    ("loss", "other"),
    [("categorical_crossentropy", "binary_crossentropy"),
     ("categorical_focal_crossentropy", "binary_crossentropy"),
     ("categorical_hinge", "bce_with_logits"), ("cross_entropy", "bce_with_logits"),
     (nn.CrossEntropyLoss(), "bce_with_logits")],
)  # fmt: skip
@pytest.mark.parametrize(
    ("row", "words"),
    [([1.0, 1.0, 0.0], "the sum of one is 2"), ([0.0, 0.0, 0.0], "the sum of one is 0"),
     ([0.5, 0.2, 0.2], "the sum of one is 0.9"), ([1.5, -0.5, 0.0], "down to -0.5")],
)  # fmt: skip
def test_target_rows_that_do_not_sum_to_1_are_refused(loss, other, row, words):
    takes_shares = resolve(loss).hint.takes == "probabilities"
    prediction = LOGITS.softmax(1) if takes_shares else LOGITS
    target = torch.tensor([[1.0, 0.0, 0.0], row, [0.3, 0.3, 0.4], [0.0, 0.0, 1.0]])
    text = message(loss, prediction, target)
    assert words in text
    assert f"loss={other!r}" in text
    passes_silently(loss, prediction, target[[0, 2, 3, 0]])


def test_target_rows_are_summed_along_the_loss_s_axis_of_classes():
    scores, rows = torch.randn(2, 3, 5), torch.rand(2, 3, 5).softmax(1)
    passes_silently("cross_entropy", scores, rows)
    passes_silently("categorical_crossentropy", scores.softmax(-1), rows.softmax(-1))
    assert "axis 1" in message("cross_entropy", scores, rows.softmax(-1))
    assert "axis -1" in message("categorical_crossentropy", scores.softmax(-1), rows)


@pytest.mark.parametrize(
    ("loss", "good", "bad"),
    [
        ("bce_with_logits", torch.tensor([0, 1, 1, 0]), torch.tensor([0, 1, 2, 0])),
        ("cross_entropy", F.one_hot(INDICES), F.one_hot(INDICES) * 2),
        ("categorical_hinge", F.one_hot(INDICES), torch.zeros(4, 3)),
        ("soft_margin", torch.tensor([1, -1, 1, 1]), torch.tensor([1, 0, 1, 1])),
    ],
)
def test_the_targets_of_a_whole_data_set_are_checked_too(loss, good, bad):
    compiled = CompiledLoss(loss)
    compiled.check(LOGITS if good.ndim == 2 else LOGITS[:, 0], good)
    compiled.check_labels(good.repeat(3, *[1] * (good.ndim - 1)))
    with pytest.raises(ConfigurationError, match="y|labels"):
        compiled.check_labels(torch.cat([good, bad]))


@pytest.mark.parametrize("loss", ["soft_margin", "hinge_embedding", nn.SoftMarginLoss()])
def test_zero_one_labels_are_refused_where_signs_are_meant(loss):
    assert "2 * y - 1" in message(loss, LOGITS, F.one_hot(INDICES, 3))
    passes_silently(loss, LOGITS, 2 * F.one_hot(INDICES, 3) - 1)


def test_a_loss_between_vectors_needs_them():
    assert "vector" in message("cosine_similarity", torch.rand(4), torch.rand(4))
    assert "column for each class" in message("kl_divergence", torch.rand(4), torch.rand(4))


def test_checks_leave_gradients_alone():
    prediction = LOGITS.clone().requires_grad_()
    for name in ("cross_entropy", "multi_margin"):
        resolve(name).check(prediction, INDICES)
    resolve("mse").check(prediction, LOGITS)
    assert prediction.grad is None


def test_a_message_reads_as_one_sentence_after_the_other():
    text = message("bce", LOGITS, torch.zeros(4, 3))
    assert text == (
        "loss='bce' takes probabilities, but the first batch's predictions reach from -2 to 4. "
        "If the net gives logits, write loss='bce_with_logits'; else end it with a sigmoid. "
        "(FK006: python -m fitkit explain FK006)"
    )
    assert not re.search(r"\s{2,}", text)


COLUMN = torch.linspace(-2, 3, 40)[:, None].sin()
TRUTHS = torch.linspace(-1, 4, 40).cos()
PAIRING = {
    "mean": lambda p, t: ((p - t) ** 2).mean(),
    "values": lambda p, t: (t - p).abs(),
    "sum by length": lambda p, t: ((p - t) ** 2).sum() / len(p),
    "torch's": lambda p, t: F.huber_loss(p, t),
    "expanded": lambda p, t: F.mse_loss(p.expand(-1, len(t)), t.expand(len(p), -1)),
    "weighed": lambda p, t: (t.abs() * (p - t) ** 2).mean(),
}
NOT_PAIRING = {
    "squeezed": lambda p, t: ((p.squeeze(-1) - t) ** 2).mean(),
    "reshaped": lambda p, t: F.mse_loss(p.reshape(t.shape), t),
    "pairs of samples": lambda p, t: F.relu(1 - (p - p.T) * (t[:, None] - t).sign()).mean(),
    "linear": lambda p, t: (p - t).mean(),
    "raises": lambda p, t: (p[:, 0] - t)[39],
}


@pytest.mark.parametrize("target", [TRUTHS, torch.zeros(40), torch.ones(40), TRUTHS[:2]])
@pytest.mark.parametrize("prediction", [COLUMN, torch.zeros(40, 1), torch.ones(40, 1)])
@pytest.mark.parametrize("kind", [*PAIRING, *NOT_PAIRING])
def test_a_function_that_meets_every_prediction_with_every_target(kind, prediction, target):
    function = PAIRING.get(kind) or NOT_PAIRING[kind]
    prediction = prediction[: len(target)]
    state = torch.get_rng_state()
    if kind in PAIRING:
        with pytest.raises(ConfigurationError, match="every prediction meets every target"):
            check_broadcast("loss", function, prediction, target)
    else:
        check_broadcast("loss", function, prediction, target)
    assert torch.equal(torch.get_rng_state(), state)
