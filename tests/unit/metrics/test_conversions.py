"""The task is told from the first batch's shapes and dtypes, and from the loss."""

import pytest
import torch

import fitkit
from fitkit.errors import ConfigurationError
from fitkit.metrics.conversions import FirstBatch, Task, class_axis
from fitkit.outputs import LossHint

CLASSES = LossHint("logits", "classes")
BINARY = LossHint("logits", "binary")
REGRESSION = LossHint(task="regression")
UNKNOWN = LossHint()


def labels(*shape, highest=2):
    target = torch.zeros(shape, dtype=torch.long)
    target.view(-1)[0] = highest - 1
    return target


@pytest.mark.parametrize(
    ("prediction", "target", "hint", "kind", "columns"),
    [
        (torch.randn(8, 3), labels(8, highest=3), CLASSES, "multiclass", 3),
        (torch.randn(8, 3), labels(8, 1, highest=3), CLASSES, "multiclass", 3),
        (torch.randn(8, 3), labels(8, highest=3), UNKNOWN, "multiclass", 3),
        (torch.randn(8, 3), labels(8, highest=3).float(), CLASSES, "multiclass", 3),
        (torch.randn(8, 3), labels(8, highest=3).int(), CLASSES, "multiclass", 3),
        (torch.randn(8, 3, 5, 6), labels(8, 5, 6, highest=3), CLASSES, "multiclass", 3),
        (torch.randn(8, 3, 5, 6), labels(8, 1, 5, 6, highest=3), CLASSES, "multiclass", 3),
        (torch.randn(8, 5, 3), labels(8, 5, highest=3), CLASSES, "multiclass", 3),
        (torch.randn(8, 5, 3), labels(8, 5, 1, highest=3), CLASSES, "multiclass", 3),
        (torch.randn(8, 2), labels(8), UNKNOWN, "multiclass", 2),
        (torch.randn(8, 3), torch.eye(3)[[0, 1, 2, 0, 1, 2, 0, 1]], CLASSES, "multiclass", 3),
        (torch.randn(8, 3), torch.eye(3)[[0, 1, 2, 0, 1, 2, 0, 1]], REGRESSION, "multiclass", 3),
        (torch.randn(8, 3), torch.rand(8, 3).softmax(1), CLASSES, "multiclass", 3),
        (torch.randn(8, 3), labels(8, 3), BINARY, "multilabel", 3),
        (torch.randn(8, 3), labels(8, 3), UNKNOWN, "multilabel", 3),
        (torch.randn(8, 3), labels(8, 3).float(), UNKNOWN, "multilabel", 3),
        (torch.randn(8, 3), torch.eye(3)[[0, 1, 2, 0, 1, 2, 0, 1]], BINARY, "multilabel", 3),
        (torch.randn(8, 3), labels(8, 3).bool(), BINARY, "multilabel", 3),
        (torch.randn(8, 3, 5, 6), labels(8, 3, 5, 6), BINARY, "multilabel", 3),
        (torch.randn(8, 1), labels(8), BINARY, "binary", 1),
        (torch.randn(8), labels(8), BINARY, "binary", 1),
        (torch.randn(8), labels(8, 1).float(), UNKNOWN, "binary", 1),
        (torch.randn(8, 1), labels(8, 1).float(), REGRESSION, "binary", 1),
        (torch.randn(8, 1, 5, 6), labels(8, 5, 6), BINARY, "binary", 1),
        (torch.randn(8, 5, 6), labels(8, 5, 6), BINARY, "binary", 1),
        (torch.randn(8), torch.full((8,), 0.9), BINARY, "binary", 1),
    ],
)
def test_shapes_and_loss_tell_the_task(prediction, target, hint, kind, columns):
    task = FirstBatch(prediction, target, hint).task()
    assert (task.kind, task.columns) == (kind, columns)


def test_the_axis_of_classes_is_the_first_place_that_fits():
    assert class_axis(torch.Size([8, 3, 5]), torch.Size([8, 5]), (1, 2)) == 1
    assert class_axis(torch.Size([8, 5, 3]), torch.Size([8, 5]), (1, 2)) == 2
    assert class_axis(torch.Size([8, 5, 5]), torch.Size([8, 5]), (1, 2)) == 1
    assert class_axis(torch.Size([8, 1]), torch.Size([8]), (1, 1)) is None
    assert class_axis(torch.Size([8]), torch.Size([8]), (1, 0)) is None


@pytest.mark.parametrize("target", [labels(8, 5), labels(8, 5, 1)])
def test_the_axis_of_classes_is_the_loss_s_where_both_fit(target):
    prediction = torch.randn(8, 5, 5)
    for hinted, axis in ((1, 1), (-1, 2), (None, 1)):
        hint = LossHint("logits", "classes", hinted)
        if target.ndim == 2:
            assert FirstBatch(prediction, target, hint).task().axis == axis
        else:
            assert FirstBatch(prediction, target, hint).task().axis == 2
    one_hot = torch.eye(5).expand(8, 5, 5)  # sums to 1 along either
    for hinted, axis in ((1, 1), (-1, 2), (None, 1)):
        task = FirstBatch(prediction, one_hot, LossHint("logits", "classes", hinted)).task()
        assert (task.axis, task.one_hot) == (axis, True)


def test_classes_in_the_last_axis_give_the_same_values(measure):
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(20, 3, 5, generator=generator)
    target = torch.randint(3, (20, 5), generator=generator)
    names = ["accuracy", "f1", "auc", "cross_entropy", "top_2_accuracy"]
    first = measure(names, logits, target, hint=CLASSES)
    last = measure(names, logits.transpose(1, 2), target, hint=CLASSES)
    assert last == pytest.approx(first)
    one_hot = torch.nn.functional.one_hot(target).float()
    last = measure(names, logits.transpose(1, 2), one_hot, hint=CLASSES)
    assert last == pytest.approx(first)


def test_the_scale_is_what_the_loss_tells_or_the_first_batch_shows():
    inside, outside, target = torch.rand(8), torch.rand(8) + 3, labels(8)
    scales = [
        FirstBatch(prediction, target, hint).task().scale
        for prediction in (inside, outside)
        for hint in (BINARY, LossHint("probabilities", "binary"), UNKNOWN, REGRESSION)
    ]
    within = ["logits", "probabilities", "probabilities", "probabilities"]
    beyond = ["logits", "probabilities", "logits", "values"]
    assert scales == within + beyond


def test_names_that_say_the_task_decide_it():
    prediction, target = torch.randn(8, 3), torch.eye(3)[[0, 1, 2, 0, 1, 2, 0, 1]]
    assert FirstBatch(prediction, target, CLASSES).task("entries").kind == "binary"
    assert FirstBatch(prediction, target, BINARY).task("classes") == Task(
        "multiclass", 3, one_hot=True, scale="logits"
    )


@pytest.mark.parametrize(
    ("prediction", "target", "hint", "message"),
    [
        (torch.randn(8, 3), torch.randn(8, 3), UNKNOWN, r"can't be told.*\(8, 3\).*float32"),
        (torch.randn(8), torch.randn(8), REGRESSION, "can't be told.*regression"),
        (torch.randn(8), labels(8, highest=5), UNKNOWN, "can't be told"),
        (torch.randn(8), labels(8, highest=5), BINARY, "from 0 to 4.*binary.*from 0 to 1"),
        (torch.randn(8, 3), labels(8, highest=4), CLASSES, "from 0 to 3.*3 columns.*from 0 to 2"),
        (torch.randn(8, 3), labels(8, highest=3) - 1, CLASSES, "from -1 to 1"),
        (torch.randn(8, 3), torch.full((8,), 0.5), CLASSES, "whole numbers"),
        (torch.randn(8, 3), labels(8, 2), CLASSES, r"\(8, 3\).*\(8, 2\)"),
        (torch.randn(8, 3), labels(7), CLASSES, r"\(8, 3\).*\(7,\)"),
        (torch.randn(8, 3), [1, 2], CLASSES, "target must be a tensor, but is"),
        ((torch.randn(8),), labels(8), CLASSES, "prediction must be a tensor"),
    ],
)
def test_what_can_not_be_classification_is_refused(prediction, target, hint, message):
    with pytest.raises(ConfigurationError, match=message):
        FirstBatch(prediction, target, hint).task()


def test_classes_are_asked_for_columns_that_are_not_there():
    with pytest.raises(ConfigurationError, match="one column per class"):
        FirstBatch(torch.randn(8), labels(8), UNKNOWN).task("classes")


def test_a_first_batch_without_samples_tells_by_its_shapes():
    first = FirstBatch(torch.randn(0, 3), torch.zeros(0, dtype=torch.long), CLASSES)
    assert first.task().kind == "multiclass"


def test_logits_that_happen_to_lie_within_0_and_1_are_read_as_logits_beside_an_unknown_loss():
    net = torch.nn.Linear(4, 1)
    torch.nn.init.constant_(net.bias, 0.3)
    torch.nn.init.constant_(net.weight, 0.01)
    x, y = torch.rand(8, 4), torch.ones(8, 1)  # logits about 0.32: all predict yes

    def own_loss(prediction, target):
        return torch.nn.functional.binary_cross_entropy_with_logits(prediction, target)

    model = fitkit.Model(net)
    model.compile("sgd", own_loss, ["accuracy"], learning_rate=1e-6, accelerator="cpu")
    assert model.train_on_batch(x, y, return_dict=True)["accuracy"] == 1.0
    assert model.evaluate(x, y, verbose=0, return_dict=True)["accuracy"] == 1.0


def test_what_ends_with_a_sigmoid_is_read_as_probabilities_beside_an_unknown_loss():
    net = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Sigmoid())
    torch.nn.init.constant_(net[0].bias, -0.5)
    torch.nn.init.constant_(net[0].weight, 0.01)
    x, y = torch.rand(8, 4), torch.ones(8, 1)  # about 0.38: all predict no

    model = fitkit.Model(net)
    model.compile(
        "sgd", lambda p, t: ((p - t) ** 2).mean(), ["accuracy"], learning_rate=1e-6,
        accelerator="cpu",
    )  # fmt: skip
    assert model.train_on_batch(x, y, return_dict=True)["accuracy"] == 0.0
    assert model.evaluate(x, y, verbose=0, return_dict=True)["accuracy"] == 0.0
