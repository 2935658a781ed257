"""Modules and functions as losses, and what `resolve` refuses."""

import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fitkit.arguments import snake_case
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.own_loss import MOST_SCORES, labels_rule
from fitkit.losses import resolve
from fitkit.losses.names import KNOWN

LOGITS = torch.tensor([[1.0, -2.0, 0.5], [0.1, 0.2, 0.3], [4.0, 0.0, -1.0], [0.0, 0.0, 2.0]])
INDICES = torch.tensor([1, 0, 0, 2])
SHARES = torch.tensor([[0.2, 0.8, 0.0], [1.0, 0.0, 0.0], [0.3, 0.3, 0.4], [0.0, 0.0, 1.0]])


def squared(prediction, target):
    return ((prediction - target) ** 2).mean()


def squared_each(prediction, target):
    return ((prediction - target) ** 2).flatten(1).mean(1)


class Scaled(nn.Module):
    """A user's module with a `reduction`, as many are written."""

    def __init__(self, reduction="mean"):
        super().__init__()
        self.reduction = reduction
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, prediction, target):
        return self.scale * F.mse_loss(prediction, target, reduction=self.reduction)


def batch_for(module_class):
    """A prediction and target that the class can take."""
    if module_class is nn.MultiLabelMarginLoss:
        return LOGITS, torch.tensor([[0, 2, -1], [1, -1, -1], [2, 1, 0], [0, -1, -1]])
    if module_class in (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss):
        return LOGITS.log_softmax(1), INDICES
    if module_class in (nn.BCELoss, nn.KLDivLoss):
        return (LOGITS.sigmoid() if module_class is nn.BCELoss else LOGITS.log_softmax(1)), SHARES
    if module_class in (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss):
        return LOGITS, SHARES.round()
    return LOGITS, 2 * SHARES.round() - 1


@pytest.mark.filterwarnings("ignore:reduction")  # KLDivLoss about its default
@pytest.mark.parametrize("module_class", KNOWN)
def test_a_torch_module_is_used_as_it_is_and_unreduced_for_weights(module_class):
    module, (prediction, target) = module_class(), batch_for(module_class)
    loss = resolve(module)
    loss.check(prediction, target)
    expected = module(prediction, target)
    assert torch.equal(loss(prediction, target), expected)
    each = loss.per_sample(prediction, target)
    assert each.shape[0] == 4
    assert each.mean().item() == pytest.approx(expected.item(), rel=1e-6)
    assert module.reduction == "mean"


@pytest.mark.parametrize("module_class", KNOWN)
def test_reduction_none_means_the_mean(module_class):
    module, (prediction, target) = module_class(reduction="none"), batch_for(module_class)
    expected = module(prediction, target).mean()
    assert torch.equal(resolve(module)(prediction, target), expected)


@pytest.mark.parametrize("module_class", KNOWN)
def test_reduction_sum_is_refused_with_the_reason(module_class):
    with pytest.raises(ConfigurationError, match=r"reduction='sum'.*means over samples"):
        resolve(module_class(reduction="sum"))


def test_a_batchmean_divergence_keeps_its_scale_under_weights():
    prediction = LOGITS.log_softmax(1)
    loss = resolve(nn.KLDivLoss(reduction="batchmean"))
    assert loss.per_sample(prediction, SHARES).shape == (4,)
    assert loss.per_sample(prediction, SHARES).mean().item() == pytest.approx(
        loss(prediction, SHARES).item(), rel=1e-6
    )


@pytest.mark.parametrize(
    ("module_class", "name"),
    [(nn.CrossEntropyLoss, "cross_entropy_loss"), (nn.BCEWithLogitsLoss, "bce_with_logits_loss"),
     (nn.MSELoss, "mse_loss"), (nn.SmoothL1Loss, "smooth_l1_loss"), (nn.NLLLoss, "nll_loss"),
     (nn.KLDivLoss, "kl_div_loss")],
)  # fmt: skip
def test_a_module_is_called_by_its_class_in_snake_case(module_class, name):
    assert resolve(module_class()).name == name == snake_case(module_class.__name__)


@pytest.mark.parametrize("module_class", [nn.MSELoss, nn.BCEWithLogitsLoss, nn.HuberLoss])
def test_torch_s_modules_get_targets_of_the_prediction_s_shape_and_type(module_class):
    prediction, target = torch.tensor([[0.2], [0.9], [0.4]]), torch.tensor([0, 1, 1])
    loss = resolve(module_class())
    assert torch.equal(
        loss(prediction, target), module_class()(prediction, target.float().reshape(3, 1))
    )
    with pytest.raises(ConfigurationError, match=r"\(3, 1\).*\(3, 2\)"):
        loss(prediction, torch.zeros(3, 2))


def test_cross_entropy_loss_takes_int32_columns_and_its_options_stay():
    module = nn.CrossEntropyLoss(
        weight=torch.tensor([1.0, 2.0, 3.0]), ignore_index=2, label_smoothing=0.1
    )
    loss = resolve(module)
    target = INDICES.int().reshape(4, 1)
    loss.check(LOGITS, target)
    assert torch.equal(loss(LOGITS, target), module(LOGITS, INDICES))
    expected = F.cross_entropy(
        LOGITS, INDICES, module.weight, ignore_index=2, label_smoothing=0.1, reduction="none"
    )
    assert torch.equal(loss.per_sample(LOGITS, target), expected)


def test_a_moved_module_s_weights_count_for_per_sample_values_too():
    module = nn.CrossEntropyLoss(weight=torch.ones(3))
    loss = resolve(module)
    loss.to("meta")
    assert loss._each.weight.device.type == "meta"
    assert module.weight.device.type == "meta"


@pytest.mark.parametrize("function", [F.mse_loss, F.l1_loss, F.huber_loss])
def test_a_torch_function_is_known_like_its_name(function):
    loss = resolve(function)
    assert loss.name == function.__name__
    assert loss.hint.task == "regression"
    assert loss.per_sample(torch.ones(3, 1), torch.zeros(3)).shape == (3, 1)


@pytest.mark.parametrize("kind", [nn.MSELoss, nn.CrossEntropyLoss, Scaled])
def test_a_class_is_refused_with_the_parentheses_it_lacks(kind):
    with pytest.raises(ArgumentTypeError, match=rf"loss={kind.__name__}\(\)"):
        resolve(kind)


@pytest.mark.parametrize("thing", [3, 0.5, torch.ones(3), object()])
def test_what_is_no_loss_is_refused(thing):
    with pytest.raises(ArgumentTypeError, match=r"must be a name, a torch\.nn loss"):
        resolve(thing)


@pytest.mark.parametrize(
    "loss", [nn.TripletMarginLoss(), nn.CosineEmbeddingLoss(), nn.GaussianNLLLoss(), nn.CTCLoss(),
             lambda prediction: prediction.mean()],
)  # fmt: skip
def test_a_loss_of_other_arguments_is_refused_at_once(loss):
    with pytest.raises(ConfigurationError, match=r"called with \(prediction, target\)"):
        resolve(loss)


def test_keras_s_order_of_arguments_is_refused():
    def mape(y_true, y_pred):
        return ((y_true - y_pred) / y_true).abs().mean()

    with pytest.raises(ConfigurationError, match=r"mape takes \(y_true, y_pred\).*swap"):
        resolve(mape)


def test_a_function_may_give_a_scalar_or_values_per_sample():
    prediction, target = torch.rand(5, 2, requires_grad=True), torch.rand(5, 2)
    scalar, each = resolve(squared), resolve(squared_each)
    assert (scalar.name, each.name) == ("squared", "squared_each")
    assert torch.equal(scalar(prediction, target), squared(prediction, target))
    assert torch.equal(each(prediction, target), squared_each(prediction, target).mean())
    assert each.per_sample(prediction, target).shape == (5,)
    with pytest.raises(ConfigurationError, match=r"squared gives one number.*need one per sample"):
        scalar.per_sample(prediction, target)


def test_a_partial_is_called_by_its_function_and_an_object_by_its_class():
    class FancyLoss:
        def __call__(self, prediction, target):
            return (prediction - target).mean()

    assert resolve(functools.partial(F.cross_entropy, label_smoothing=0.1)).name == "cross_entropy"
    assert resolve(FancyLoss()).name == "fancy_loss"


def test_a_user_s_module_with_a_reduction_gives_values_for_weights():
    loss = resolve(Scaled())
    prediction, target = torch.ones(4, 2), torch.zeros(4, 2)
    assert loss.name == "scaled"
    assert loss(prediction, target).item() == 3.0
    assert loss.per_sample(prediction, target).shape == (4, 2)


def test_a_subclass_with_a_forward_of_its_own_is_the_user_s():
    class Focal(nn.CrossEntropyLoss):
        def forward(self, input, target):
            return super().forward(input, target) ** 2

    class Renamed(nn.CrossEntropyLoss):
        pass

    assert resolve(Focal()).hint.task is None
    assert resolve(Renamed()).hint.task == "classes"


@pytest.mark.parametrize("value", [1.5, None, [torch.ones(2)]])
def test_a_function_that_gives_no_tensor_is_refused(value):
    with pytest.raises(ConfigurationError, match="must return a tensor"):
        resolve(lambda prediction, target: value)(torch.ones(2), torch.ones(2))


def test_a_function_that_loses_the_gradient_is_refused_in_training_only():
    loss = resolve(lambda prediction, target: squared(prediction.detach(), target))
    prediction, target = torch.ones(2, 1, requires_grad=True), torch.zeros(2, 1)
    with pytest.raises(ConfigurationError, match="no gradient"):
        loss(prediction, target)
    with torch.no_grad():
        assert loss(prediction, target).item() == 1.0


def test_a_function_may_do_without_a_target_but_one_that_needs_it_says_so():
    prediction = torch.ones(2, 1, requires_grad=True)
    free = resolve(lambda prediction, target: prediction.mean())
    free.check(prediction, None)
    assert free(prediction, None).item() == 1.0
    with pytest.raises(ConfigurationError, match="squared failed without a target.*y is missing"):
        resolve(squared)(prediction, None)


@pytest.mark.parametrize("loss", ["cross_entropy", "nll", nn.CrossEntropyLoss(), Scaled(), squared,
                                  "binary_crossentropy", "bce"])  # fmt: skip
def test_a_loss_survives_pickling_and_copying(loss):
    prediction, target = torch.full((2, 2), 0.5), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    if getattr(resolve(loss).hint, "takes", None) == "log_probabilities":
        target = torch.tensor([0, 1])
    expected = resolve(loss)(prediction, target)
    for twin in (pickle.loads(pickle.dumps(resolve(loss))), copy.deepcopy(resolve(loss))):
        assert torch.equal(twin(prediction, target), expected)


@pytest.mark.parametrize("shapes", [((6, 1), (6,)), ((6,), (6, 1))])
@pytest.mark.parametrize(
    "loss",
    [
        squared,
        lambda prediction, target: (prediction.sigmoid() - target.float()).abs().mean(),
        lambda prediction, target: F.mse_loss(prediction, target),
        lambda prediction, target: torch.where(target > 0, prediction, -prediction).mean(),
        Scaled(),
    ],
)
def test_a_function_that_pairs_every_prediction_with_every_target_is_refused(loss, shapes):
    prediction, target = torch.rand(shapes[0]), torch.rand(shapes[1]) - 0.5
    with pytest.raises(ConfigurationError, match=r"\(6, 1\)|\(6,\)") as caught:
        resolve(loss).check(prediction, target)
    assert str(shapes[0]) in str(caught.value)
    assert str(shapes[1]) in str(caught.value)
    assert "(6, 6)" in str(caught.value)


@pytest.mark.parametrize(
    "loss",
    [
        lambda prediction, target: squared(prediction.squeeze(1), target),
        lambda prediction, target: squared(prediction, target.unsqueeze(1)),
        # Pairs on purpose: predictions with predictions, targets with targets.
        lambda prediction, target: (
            (prediction - prediction.squeeze(1)) * (target[:, None] - target)
        ).mean(),
        lambda prediction, target: (prediction @ target[None]).mean(),
    ],
)
def test_a_function_that_means_its_shapes_is_left_alone(loss):
    resolve(loss).check(torch.rand(6, 1), torch.rand(6))


calls = []  # a list that the function itself held would be put back


def test_a_function_is_evaluated_early_only_where_shapes_are_suspicious():
    calls.clear()

    def counted(prediction, target):
        calls.append(torch.rand(1))
        return squared(prediction.reshape(-1), target.reshape(-1))

    loss = resolve(counted)
    loss.check(torch.rand(4, 2), torch.rand(4, 2))
    loss.check(torch.rand(4), torch.rand(4))
    loss.check(torch.rand(1, 1), torch.rand(1))
    assert not calls
    state = torch.get_rng_state()
    loss.check(torch.zeros(4, 1), torch.zeros(4))
    assert len(calls) == 3  # some rows as they came, in one shape, and in all pairs
    assert torch.equal(torch.get_rng_state(), state)


def test_what_a_function_raises_in_the_early_evaluation_is_left_to_the_real_one():
    def fails(prediction, target):
        raise RuntimeError("its own message")

    loss = resolve(fails)
    loss.check(torch.rand(4, 1), torch.rand(4))
    with pytest.raises(RuntimeError, match="its own message"):
        loss(torch.rand(4, 1), torch.rand(4))


def unequal(prediction, target):
    return ((prediction - target) ** 2).mean()


def wrong_type(prediction, target):
    return F.cross_entropy(prediction, target.int())


def wrong_axis(prediction, target):
    return prediction.softmax(5).mean()


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (unequal, RuntimeError),
        (wrong_type, RuntimeError),
        (wrong_axis, IndexError),
        (lambda prediction, target: F.binary_cross_entropy(prediction, target), ValueError),
        (lambda prediction, target: F.cross_entropy(prediction, target[:3]), ValueError),
        (lambda prediction, target: prediction @ target, RuntimeError),
        (lambda prediction, target: torch.stack([prediction, target]).mean(), RuntimeError),
        (Scaled(), RuntimeError),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_torch_s_errors_about_shapes_and_types_name_the_loss_and_both_shapes(loss, kind):
    prediction, target = torch.rand(4, 3), torch.tensor([0, 1, 2, 0])
    resolved = resolve(loss)
    for call in (resolved, resolved.per_sample):
        with pytest.raises(ConfigurationError) as caught:
            call(prediction, target)
        text = str(caught.value)
        assert text.startswith(f"The loss {resolved.name} can't be computed: ")
        assert "the prediction has shape (4, 3) (float32)" in text
        assert "the target has shape (4,) (int64)" in text
        assert isinstance(caught.value.__cause__, kind)


def test_shapes_in_structures_are_named_by_their_places():
    def both(prediction, target):
        return (prediction["a"] - target[0]).mean()

    text = r"prediction\['a'\] has shape \(4, 3\).*target\[0\]"
    with pytest.raises(ConfigurationError, match=text):
        resolve(both)({"a": torch.rand(4, 3)}, [torch.rand(4, 2)])


@pytest.mark.parametrize(
    "error",
    [RuntimeError("my own"), ValueError("size mismatch"), KeyError("a"), ZeroDivisionError(),
     ConfigurationError("size mismatch"), torch.OutOfMemoryError("out of memory")],
)  # fmt: skip
def test_a_loss_s_other_errors_pass_untouched(error):
    def fails(prediction, target):
        raise error

    with pytest.raises(type(error)) as caught:
        resolve(fails)(torch.rand(4, 1), torch.rand(4))
    assert caught.value is error


def test_a_function_of_a_half_precision_prediction_and_a_float32_target_has_a_gradient():
    prediction = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    loss = resolve(lambda prediction, target: F.huber_loss(prediction, target, delta=1000.0))
    value = loss(prediction, torch.full((2, 1), 257.0))
    value.backward()
    assert value.item() == 66049 / 2
    assert prediction.grad.dtype is torch.bfloat16
    seen = []
    own = resolve(lambda prediction, target: seen.append(prediction.dtype) or prediction.mean())
    own(prediction, torch.zeros(2, 1, dtype=torch.bfloat16))
    own(prediction, torch.zeros(2, dtype=torch.int64))
    assert seen == [torch.bfloat16, torch.bfloat16]


def test_values_in_half_precision_meet_their_weights_in_float32():
    loss = resolve(lambda prediction, target: prediction[:, 0])
    prediction = torch.full((3, 1), 1.0, dtype=torch.bfloat16)
    weight = torch.tensor([1.001, 1.001, 1.001])
    total = loss.weighted(prediction, torch.zeros(3, dtype=torch.int64), weight)
    assert total.dtype is torch.float32
    assert total.item() == pytest.approx(1.001)


def test_lambdas_and_partials_of_partials_have_names_to_log():
    assert resolve(lambda prediction, target: prediction.mean()).name == "lambda"
    twice = functools.partial(functools.partial(squared))
    assert resolve(twice).name == "squared"


# ------------------------------------------------------------------ which label a logit is for


class CausalLMOutput(dict):
    """An output called as Hugging Face's language models call theirs."""


PLACES = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(5, (4, 6), generator=torch.Generator().manual_seed(1))
TOKENS[:, 4] = -100
TOKENS[0] = -100


def in_place(logits, labels, **options):
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)


def of_the_next(logits, labels):
    return in_place(logits[:, :-1], labels[:, 1:])


@pytest.mark.parametrize(("logits", "labels", "loss", "expected"), [
    (PLACES, TOKENS, of_the_next, "shifted"),
    (PLACES, TOKENS, in_place, "aligned"),
    (PLACES[1], TOKENS[1], in_place, "aligned"),
    (PLACES, TOKENS, lambda x, y: of_the_next(x, y).bfloat16().float(), "shifted"),
    (PLACES, TOKENS, lambda x, y: in_place(x.bfloat16(), y).float(), "aligned"),
    (PLACES / 1e3, TOKENS, of_the_next, "shifted"),  # where both are within 1e-3 of each other
    (PLACES / 1e3, TOKENS, in_place, "aligned"),
    (torch.zeros(4, 6, 5), TOKENS, of_the_next, None),
    (PLACES, TOKENS, lambda x, y: of_the_next(x, y) + 0.1, None),
    (PLACES, TOKENS, lambda x, y: in_place(x, y, label_smoothing=0.2), None),
    (PLACES, TOKENS.clamp(max=-100), lambda x, y: x.sum() * 0, None),
    (PLACES, TOKENS + 5 * (TOKENS == 4), lambda x, y: x.mean(), None),
    (PLACES, TOKENS[:, 1:], lambda x, y: x.mean(), None),
    (PLACES, PLACES, F.mse_loss, None),
    (PLACES, None, lambda x, y: x.mean(), None),
])  # fmt: skip
def test_the_nets_own_loss_tells_which_label_a_logit_is_for(
    logits, labels, loss, expected, monkeypatch
):
    for most in (MOST_SCORES, 40):  # 40: one sample after the other
        monkeypatch.setattr("fitkit.extras.own_loss.MOST_SCORES", most)
        output = {"loss": loss(logits, labels), "logits": logits}
        assert labels_rule(output, labels) == expected


@pytest.mark.parametrize(("logits", "labels", "loss", "expected"), [
    (PLACES, TOKENS, lambda x, y: of_the_next(x, y) + 0.1, "shifted"),
    (torch.zeros(4, 6, 5), TOKENS, of_the_next, "shifted"),
    (PLACES, TOKENS.clamp(max=-100), of_the_next, "shifted"),
    (PLACES, TOKENS, in_place, "aligned"),
    (PLACES, TOKENS[:, 1:], lambda x, y: x.mean(), None),  # as for CTC
])  # fmt: skip
def test_an_output_of_a_causal_language_models_class_is_shifted_in_doubt(
    logits, labels, loss, expected
):
    output = CausalLMOutput(loss=loss(logits, labels), logits=logits)
    assert labels_rule(output, labels) == expected
