"""A net's loss as a whole: several outputs, weights, the net's own loss."""

import collections
import dataclasses

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.losses import CompiledLoss
from fitkit.outputs import SINGLE, LossHint

LOGITS = torch.tensor([[1.0, -2.0, 0.5], [0.1, 0.2, 0.3], [4.0, 0.0, -1.0], [0.0, 0.0, 2.0]])
INDICES = torch.tensor([1, 0, 0, 2])
NUMBERS, TRUTHS = torch.tensor([[1.0], [2.0], [0.5], [0.0]]), torch.tensor([0.0, 2.0, 1.0, -1.0])
CROSS_ENTROPY, MSE = F.cross_entropy(LOGITS, INDICES), F.mse_loss(NUMBERS[:, 0], TRUTHS)
EACH_CROSS_ENTROPY = F.cross_entropy(LOGITS, INDICES, reduction="none")
EACH_SQUARE = (NUMBERS[:, 0] - TRUTHS) ** 2
WEIGHT = torch.tensor([0.5, 0.0, 2.0, 1.0])

Pair = collections.namedtuple("Pair", ["kind", "size"])


@dataclasses.dataclass
class ModelOutput:
    loss: torch.Tensor | None
    logits: torch.Tensor


def vae_loss(prediction, target):
    reconstruction, mean = prediction
    return F.mse_loss(reconstruction, target) + 0.1 * mean.square().mean()


def raises(text, loss, *arguments, prediction=None, target=None, **options):
    with pytest.raises(ConfigurationError, match=text):
        CompiledLoss(loss, *arguments, **options).check(prediction, target)


def test_one_output_s_loss_is_the_total_and_has_no_parts():
    loss = CompiledLoss("cross_entropy")
    loss.check(LOGITS, INDICES)
    total, parts = loss(LOGITS, INDICES)
    assert torch.equal(total, CROSS_ENTROPY)
    assert parts == {}
    assert loss.part_names == []


def test_a_batch_may_come_before_the_check():
    total, parts = CompiledLoss("cross_entropy")(LOGITS, INDICES)
    assert torch.equal(total, CROSS_ENTROPY)
    assert parts == {}


@pytest.mark.parametrize(
    ("prediction", "target"),
    [
        ((LOGITS,), INDICES),
        ([LOGITS], [INDICES]),
        ({"a": LOGITS}, INDICES),
        ({"a": LOGITS}, {"a": INDICES}),
        (LOGITS, {"y": INDICES}),
        (ModelOutput(None, LOGITS), INDICES),
    ],
)
def test_a_wrapped_single_output_is_unwrapped(prediction, target):
    loss = CompiledLoss("cross_entropy")
    loss.check(prediction, target)
    assert torch.equal(loss(prediction, target)[0], CROSS_ENTROPY)


def test_training_and_validation_data_may_differ_in_structure():
    loss = CompiledLoss("cross_entropy")
    loss.check(LOGITS, INDICES)
    loss.check(LOGITS, [INDICES])
    assert torch.equal(loss(LOGITS, INDICES)[0], CROSS_ENTROPY)
    assert torch.equal(loss(LOGITS, [INDICES])[0], CROSS_ENTROPY)
    loss.check(LOGITS, INDICES)
    assert torch.equal(loss(LOGITS, [INDICES])[0], CROSS_ENTROPY)


KINDS = {
    "tuple": (["cross_entropy", "mse"], (LOGITS, NUMBERS), (INDICES, TRUTHS),
              ["output_0_loss", "output_1_loss"]),
    "dict": ({"kind": "cross_entropy", "size": "mse"}, {"kind": LOGITS, "size": NUMBERS},
             {"size": TRUTHS, "kind": INDICES}, ["kind_loss", "size_loss"]),
    "named tuple": ({"size": "mse", "kind": "cross_entropy"}, Pair(LOGITS, NUMBERS),
                    [INDICES, TRUTHS], ["kind_loss", "size_loss"]),
    "list for a dict": (["cross_entropy", nn.MSELoss()], {"kind": LOGITS, "size": NUMBERS},
                        [INDICES, TRUTHS], ["kind_loss", "size_loss"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_several_outputs_losses_add_up(kind):
    given, prediction, target, names = KINDS[kind]
    loss = CompiledLoss(given)
    loss.check(prediction, target)
    total, parts = loss(prediction, target)
    assert total.item() == pytest.approx((CROSS_ENTROPY + MSE).item())
    assert loss.part_names == list(parts) == names
    assert [part.item() for part in parts.values()] == pytest.approx(
        [CROSS_ENTROPY.item(), MSE.item()]
    )


def test_loss_weights_scale_the_total_and_not_the_parts():
    given, prediction, target, _ = KINDS["dict"]
    for scales in ([2.0, 0.5], {"size": 0.5, "kind": 2}):
        loss = CompiledLoss(given, scales)
        loss.check(prediction, target)
        total, parts = loss(prediction, target)
        assert total.item() == pytest.approx((2 * CROSS_ENTROPY + 0.5 * MSE).item())
        assert parts["kind_loss"].item() == pytest.approx(CROSS_ENTROPY.item())
    loss = CompiledLoss(given, {"size": 3.0})
    assert loss(prediction, target)[0].item() == pytest.approx((CROSS_ENTROPY + 3 * MSE).item())


@pytest.mark.parametrize("scales", [3, [3.0], {"a": 3.0}])
def test_a_single_output_may_have_a_loss_weight(scales):
    loss = CompiledLoss("cross_entropy", scales)
    loss.check(LOGITS, INDICES)
    total, parts = loss(LOGITS, INDICES)
    assert total.item() == pytest.approx(3 * CROSS_ENTROPY.item())
    assert parts == {}


@pytest.mark.parametrize("given", ["mse", nn.MSELoss(), F.mse_loss])
def test_one_loss_for_several_outputs_holds_for_each(given):
    loss = CompiledLoss(given)
    prediction, target = (NUMBERS, NUMBERS + 1), (TRUTHS, TRUTHS)
    loss.check(prediction, target)
    total, parts = loss(prediction, target)
    assert total.item() == pytest.approx((MSE + F.mse_loss(NUMBERS[:, 0] + 1, TRUTHS)).item())
    assert list(parts) == ["output_0_loss", "output_1_loss"]
    assert loss.hint("output_1").task == "regression"


def test_one_function_for_several_outputs_gets_them_all():
    loss = CompiledLoss(vae_loss)
    prediction = (NUMBERS.clone().requires_grad_(), torch.full((4, 2), 2.0))
    loss.check(prediction, TRUTHS[:, None])
    total, parts = loss(prediction, TRUTHS[:, None])
    assert total.item() == pytest.approx(MSE.item() + 0.4)
    assert parts == {}
    total.backward()
    assert loss.hint("output_0") == LossHint()
    scaled = CompiledLoss(vae_loss, 10)
    assert scaled(prediction, TRUTHS[:, None])[0].item() == pytest.approx(10 * total.item())
    raises("takes all outputs at once", vae_loss, [1, 2], prediction=prediction, target=TRUTHS)


def test_a_function_for_one_output_gets_that_output():
    def of_tensor(prediction, target):
        assert isinstance(prediction, torch.Tensor)
        return F.mse_loss(prediction.squeeze(1), target)

    assert torch.equal(CompiledLoss(of_tensor)(NUMBERS, TRUTHS)[0], MSE)
    listed = CompiledLoss(["cross_entropy", of_tensor])
    listed.check((LOGITS, NUMBERS), (INDICES, TRUTHS))
    assert listed((LOGITS, NUMBERS), (INDICES, TRUTHS))[1]["output_1_loss"].item() == MSE.item()


@pytest.mark.parametrize(
    "target", [INDICES, [INDICES, None], {"kind": INDICES}, {"kind": INDICES, "size": TRUTHS}]
)
@pytest.mark.parametrize("given", [["cross_entropy", None], {"kind": "cross_entropy"}])
def test_an_output_without_a_loss_is_not_trained_and_needs_no_target(given, target):
    loss = CompiledLoss(given)
    prediction = {"kind": LOGITS, "size": NUMBERS}
    loss.check(prediction, target)
    total, parts = loss(prediction, target)
    assert torch.equal(total, CROSS_ENTROPY)
    assert parts == {}
    assert loss.hint("kind").task == "classes"
    assert loss.hint("size") == LossHint()


def test_the_net_s_own_loss_is_taken_where_none_is_given():
    own = torch.tensor(2.5, requires_grad=True)
    for prediction in (ModelOutput(own, LOGITS), {"loss": own, "logits": LOGITS}):
        loss = CompiledLoss(None)
        loss.check(prediction, None)
        total, parts = loss(prediction, None)
        assert total is own
        assert parts == {}
    gathered = CompiledLoss(None)(ModelOutput(torch.tensor([1.0, 2.0]), LOGITS), None)[0]
    assert gathered.item() == 1.5
    assert CompiledLoss(None, 2.0)(ModelOutput(own, LOGITS), None)[0].item() == 5.0


@pytest.mark.parametrize("prediction", [LOGITS, {"logits": LOGITS}, ModelOutput(None, LOGITS)])
def test_without_any_loss_compile_is_asked_for_one(prediction):
    raises("given no loss.*Give compile a loss", None, prediction=prediction)
    with pytest.raises(ConfigurationError, match="Give compile a loss"):
        CompiledLoss(None)(prediction, None)


def test_sample_weights_multiply_and_the_number_of_samples_divides():
    loss = CompiledLoss("cross_entropy")
    loss.check(LOGITS, INDICES)
    expected = (WEIGHT * EACH_CROSS_ENTROPY).sum() / 4
    for weight in (WEIGHT, WEIGHT.double(), WEIGHT[:, None], [WEIGHT]):
        total, _ = loss(LOGITS, INDICES, weight)
        assert total.item() == pytest.approx(expected.item())
        assert total.dtype is torch.float32
    ones = loss(LOGITS, INDICES, torch.ones(4, dtype=torch.int64))[0]
    assert ones.item() == pytest.approx(CROSS_ENTROPY.item())


def test_weights_of_several_outputs_are_one_or_one_each():
    given, prediction, target, _ = KINDS["dict"]
    loss = CompiledLoss(given)
    loss.check(prediction, target)
    weighted = (WEIGHT * EACH_CROSS_ENTROPY).mean().item(), (WEIGHT * EACH_SQUARE).mean().item()
    assert loss(prediction, target, WEIGHT)[0].item() == pytest.approx(sum(weighted))
    total, parts = loss(prediction, target, {"size": WEIGHT})
    assert total.item() == pytest.approx(CROSS_ENTROPY.item() + weighted[1])
    assert parts["size_loss"].item() == pytest.approx(weighted[1])
    total, _ = loss(prediction, target, [WEIGHT, None])
    assert total.item() == pytest.approx(weighted[0] + MSE.item())


def test_weights_of_samples_meet_the_mean_over_positions_and_weights_of_positions_each():
    prediction, target = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4)
    squares = (prediction - target) ** 2
    for shape in ((2,), (2, 3), (2, 3, 5), (2, 3, 5, 4)):
        weight = torch.rand(shape)
        values = squares.mean(tuple(range(len(shape), 4))) if len(shape) < 4 else squares
        expected = (weight * values).sum() / values.numel()
        total, _ = CompiledLoss("mse")(prediction, target, weight)
        assert total.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("shape", [(3,), (4, 2), (), (2, 2)])
def test_weights_of_another_shape_are_refused_with_both(shape):
    with pytest.raises(ConfigurationError, match=r"sample_weight of shape .*\(4,\)"):
        CompiledLoss("cross_entropy")(LOGITS, INDICES, torch.ones(shape))


TABLE = torch.tensor([1.0, 2.0, 3.0])


def test_class_weights_of_a_module_divide_as_torch_does_under_sample_weights_too():
    loss = CompiledLoss(nn.CrossEntropyLoss(weight=TABLE))
    assert torch.equal(loss(LOGITS, INDICES)[0], F.cross_entropy(LOGITS, INDICES, TABLE))
    expected = (WEIGHT * TABLE[INDICES] * EACH_CROSS_ENTROPY).sum() / TABLE[INDICES].sum()
    assert loss(LOGITS, INDICES, WEIGHT)[0].item() == pytest.approx(expected.item())


def test_ignored_labels_divide_as_torch_does_under_sample_weights_too():
    target = torch.tensor([1, -100, 0, -100])
    each = F.cross_entropy(LOGITS, target, reduction="none")
    for given in ("cross_entropy", nn.CrossEntropyLoss(), F.cross_entropy):
        total, _ = CompiledLoss(given)(LOGITS, target, WEIGHT)
        assert total.item() == pytest.approx((WEIGHT * each).sum().item() / 2)


@pytest.mark.parametrize(
    "loss",
    [
        "cross_entropy",
        nn.CrossEntropyLoss(weight=TABLE),
        nn.CrossEntropyLoss(weight=TABLE, ignore_index=2),
        nn.CrossEntropyLoss(weight=TABLE, ignore_index=2, label_smoothing=0.2),
        nn.CrossEntropyLoss(ignore_index=255, label_smoothing=0.2),
        nn.CrossEntropyLoss(weight=TABLE, reduction="none"),
        nn.NLLLoss(weight=TABLE, ignore_index=0),
    ],
)
@pytest.mark.parametrize("positions", [(), (5,), (2, 3)])
def test_sample_weights_of_one_change_no_loss(loss, positions):
    prediction = torch.randn(6, 3, *positions).log_softmax(1)
    target = torch.randint(3, (6, *positions))
    target[0] = getattr(loss, "ignore_index", -100 if loss == "cross_entropy" else 1)
    target[1] = 1  # counts, or there were nothing to divide by
    compiled = CompiledLoss(loss)
    expected = compiled(prediction, target)[0].item()
    for shape in {(6,), (6, *positions)}:
        assert compiled(prediction, target, torch.ones(shape))[0].item() == pytest.approx(expected)


def test_class_weights_beside_soft_targets_divide_by_the_samples_as_in_torch():
    target, module = LOGITS.softmax(1), nn.CrossEntropyLoss(weight=TABLE)
    total, _ = CompiledLoss(module)(LOGITS, target, torch.ones(4))
    assert total.item() == pytest.approx(module(LOGITS, target).item())


def test_positions_that_are_ignored_do_not_divide_a_weighted_sum():
    prediction, target = torch.randn(2, 3, 4), torch.randint(3, (2, 4))
    target[0, 1:] = -100
    each = F.cross_entropy(prediction, target, reduction="none")
    total, _ = CompiledLoss("cross_entropy")(prediction, target, torch.tensor([2.0, 0.5]))
    assert total.item() == pytest.approx((2 * each[0].sum() + 0.5 * each[1].sum()).item() / 5)


def test_weights_need_values_per_sample():
    target = TRUTHS[:, None]
    with pytest.raises(ConfigurationError, match="gives one number for the whole batch"):
        CompiledLoss(vae_loss)((NUMBERS, NUMBERS), target, WEIGHT)
    with pytest.raises(ConfigurationError, match="weights can't reach it"):
        CompiledLoss(None)(ModelOutput(torch.tensor(1.0), LOGITS), None, WEIGHT)

    def each(prediction, target):
        return (prediction[0] - target).square().mean(1) + 0 * prediction[1].mean(1)

    total, _ = CompiledLoss(each)((NUMBERS, NUMBERS), target, WEIGHT)
    assert total.item() == pytest.approx((WEIGHT * EACH_SQUARE).mean().item())


def test_gradients_reach_every_trained_output():
    given, _, target, _ = KINDS["dict"]
    kind, size = LOGITS.clone().requires_grad_(), NUMBERS.clone().requires_grad_()
    total, parts = CompiledLoss(given, [2.0, 0.5])({"kind": kind, "size": size}, target, WEIGHT)
    total.backward()
    assert kind.grad.abs().sum() > 0
    assert size.grad.abs().sum() > 0
    assert not any(part.requires_grad for part in parts.values())


def test_structures_that_do_not_fit_are_refused():
    pair, targets = (LOGITS, NUMBERS), (INDICES, TRUTHS)
    raises(r"\['b'\].*output_0", {"b": "mse"}, prediction=pair, target=targets)
    raises("loss has 3 entries", ["mse"] * 3, prediction=pair, target=targets)
    raises("loss has 2 entries, but the net has one output", {"a": "mse", "b": "mse"},
           prediction=NUMBERS, target=TRUTHS)  # fmt: skip
    raises("target has 1 entries", ["cross_entropy", "mse"], prediction=pair, target=[INDICES])
    raises("target is a Tensor", ["cross_entropy", "mse"], prediction=pair, target=INDICES)
    raises("Output 'b': loss='mse'.*y is missing", {"a": "cross_entropy", "b": "mse"},
           prediction={"a": LOGITS, "b": NUMBERS}, target={"a": INDICES})  # fmt: skip
    raises("is one number, but the net has 2 outputs", "mse", 2.0, prediction=pair, target=targets)
    raises("y is missing", ["cross_entropy", "mse"], prediction=pair)
    raises("'c'", "mse", prediction={"a": NUMBERS}, target={"c": TRUTHS})


def test_an_output_s_mistake_is_reported_with_its_name():
    raises("Output 'kind': loss='cross_entropy' takes labels", {"kind": "cross_entropy"},
           prediction={"kind": LOGITS, "size": NUMBERS}, target={"kind": INDICES + 1})  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "scales", "error", "text"),
    [
        (["mse", "no_such_loss"], None, ConfigurationError, "no_such_loss"),
        ([None, None], None, ConfigurationError, "trains no output"),
        ({}, None, ConfigurationError, "trains no output"),
        ([nn.MSELoss], None, ArgumentTypeError, r"MSELoss\(\)"),
        ("mse", "2", ArgumentTypeError, "loss_weights"),
        ("mse", float("nan"), ConfigurationError, "finite"),
        (["mse", "mae"], [1.0, True], ArgumentTypeError, r"loss_weights\[1\]"),
        (["mse", "mae"], [1.0], ConfigurationError, "1 entries, but loss has 2"),
        ({"a": "mse"}, {"b": 1.0}, ConfigurationError, r"names \['b'\]"),
    ],
)
def test_what_can_be_refused_before_data_are_seen_is(loss, scales, error, text):
    with pytest.raises(error, match=text):
        CompiledLoss(loss, scales)


def test_the_hint_of_one_loss_is_known_before_the_first_batch():
    assert CompiledLoss("bce").hint(SINGLE) == LossHint("probabilities", "binary")
    assert CompiledLoss(["bce"]).hint(SINGLE).task == "binary"
    assert CompiledLoss(["bce", None, "mse"]).hint(SINGLE) == LossHint()
    listed = CompiledLoss(["cross_entropy", "mse"])
    listed.check({"kind": LOGITS, "size": NUMBERS}, [INDICES, TRUTHS])
    assert listed.hint("size").task == "regression"
    assert CompiledLoss(None).hint("logits") == LossHint()


def test_all_labels_can_be_checked_once_the_classes_are_known():
    loss = CompiledLoss("cross_entropy")
    loss.check_labels(torch.tensor([99]))  # nothing is known yet
    loss.check(LOGITS, INDICES)
    loss.check_labels(torch.tensor([0, 1, 2, -100]))
    with pytest.raises(ConfigurationError, match="from 0 to 3"):
        loss.check_labels(torch.tensor([0, 3], dtype=torch.uint8))
    named = CompiledLoss(KINDS["dict"][0])
    named.check(*KINDS["dict"][1:3])
    named.check_labels({"kind": INDICES, "size": TRUTHS * 100})
    with pytest.raises(ConfigurationError, match="Output 'kind'"):
        named.check_labels({"kind": INDICES + 5, "size": TRUTHS})


def test_labels_that_are_no_indices_are_not_checked():
    for name, prediction, target in (
        ("mse", NUMBERS, TRUTHS),
        ("cross_entropy", LOGITS, LOGITS.softmax(1)),
    ):
        loss = CompiledLoss(name)
        loss.check(prediction, target)
        loss.check_labels(target)
    CompiledLoss("mse").check_labels(TRUTHS * 50)


def test_to_moves_class_weights():
    module = nn.CrossEntropyLoss(weight=torch.ones(3))
    CompiledLoss([module, None, "mse"]).to("meta")
    assert module.weight.device.type == "meta"


def test_a_checked_loss_travels_to_another_process():
    scale = 2.0

    def scaled(prediction, target):
        return scale * F.cross_entropy(prediction, target)

    for given in ("cross_entropy", nn.CrossEntropyLoss(weight=torch.ones(3)), scaled):
        loss = CompiledLoss(given)
        loss.check(LOGITS, INDICES)
        twin = cloudpickle.loads(cloudpickle.dumps(loss))
        assert torch.equal(twin(LOGITS, INDICES)[0], loss(LOGITS, INDICES)[0])


def test_a_net_may_give_other_outputs_in_training_than_in_evaluation():
    def main_and_auxiliary(prediction, target):
        if isinstance(prediction, tuple):
            main, auxiliary = prediction
            return F.mse_loss(main[:, 0], target) + 0.4 * F.mse_loss(auxiliary[:, 0], target)
        return F.mse_loss(prediction[:, 0], target)

    loss = CompiledLoss(main_and_auxiliary)
    loss.check((NUMBERS, NUMBERS), TRUTHS)
    loss.check(NUMBERS, TRUTHS)
    assert loss((NUMBERS, NUMBERS), TRUTHS)[0].item() == pytest.approx(1.4 * MSE.item())
    assert torch.equal(loss(NUMBERS, TRUTHS)[0], MSE)


def test_outputs_without_the_loss_s_are_reported_in_later_batches_too():
    loss = CompiledLoss(KINDS["dict"][0])
    loss.check(*KINDS["dict"][1:3])
    with pytest.raises(ConfigurationError, match=r"loss names \['size'\]"):
        loss({"kind": LOGITS}, {"kind": INDICES})


def test_outputs_may_have_names_that_are_no_strings():
    prediction, target = {0: LOGITS, (1, 2): NUMBERS}, {(1, 2): TRUTHS, 0: INDICES}
    for given in ({0: "cross_entropy", (1, 2): "mse"}, ["cross_entropy", "mse"]):
        loss = CompiledLoss(given, [2.0, 1.0])
        loss.check(prediction, target)
        total, parts = loss(prediction, target)
        assert total.item() == pytest.approx((2 * CROSS_ENTROPY + MSE).item())
        assert list(parts) == loss.part_names == ["0_loss", "(1, 2)_loss"]
        assert loss.hint(0).task == "classes"
    with pytest.raises(ConfigurationError, match="Output 0: loss='cross_entropy' takes labels"):
        loss.check(prediction, {**target, 0: INDICES + 1})
    scaled = CompiledLoss({0: "cross_entropy", (1, 2): "mse"}, {0: 3.0})
    total, _ = scaled(prediction, target, {0: WEIGHT})
    weighted = (WEIGHT * EACH_CROSS_ENTROPY).mean()
    assert total.item() == pytest.approx((3 * weighted + MSE).item())


def test_a_dict_of_loss_and_logits_is_as_an_object_of_both():
    own = torch.tensor(2.5, requires_grad=True)
    for prediction in (
        {"loss": own, "logits": LOGITS},
        {"logits": LOGITS, "loss": None},
        {"loss": own, "logits": LOGITS, "hidden_states": (NUMBERS, NUMBERS)},
        {"logits": LOGITS},
        ModelOutput(own, LOGITS),
    ):
        loss = CompiledLoss("cross_entropy")
        loss.check(prediction, INDICES)
        assert torch.equal(loss(prediction, INDICES)[0], CROSS_ENTROPY)
        assert loss.hint(SINGLE).task == "classes"


def test_logits_beside_another_output_stay_one_of_two():
    loss = CompiledLoss({"logits": "cross_entropy", "size": "mse"})
    prediction, target = {"logits": LOGITS, "size": NUMBERS}, {"logits": INDICES, "size": TRUTHS}
    loss.check(prediction, target)
    assert list(loss(prediction, target)[1]) == ["logits_loss", "size_loss"]


def test_a_loss_begun_anew_remembers_nothing_and_changes_nothing():
    compiled = CompiledLoss(KINDS["dict"][0])
    outer, inner = compiled.begin(), compiled.begin()
    outer.check(*KINDS["dict"][1:3])
    assert outer.part_names == ["kind_loss", "size_loss"]
    assert compiled.part_names == inner.part_names == outer.begin().part_names == []
    assert outer.hint("size").task == "regression"
    total, _ = outer(*KINDS["dict"][1:3])
    assert total.item() == pytest.approx((CROSS_ENTROPY + MSE).item())


@pytest.mark.parametrize(
    ("loss", "label"),
    [("mse", "loss='mse'"), (None, "The net's own loss"), (["mse"], "The loss"),
     (lambda prediction, target: prediction.mean(), "The loss lambda")],
)  # fmt: skip
def test_a_loss_that_no_parameter_can_learn_from_is_refused(loss, label):
    compiled = CompiledLoss(loss)
    with pytest.raises(ConfigurationError, match=f"^{label} doesn't depend on any parameter"):
        compiled.check_learns(torch.tensor(1.0))
    compiled.check_learns(torch.tensor(1.0, requires_grad=True))
    with torch.no_grad():
        compiled.check_learns(torch.tensor(1.0))
