"""A student that learns from a teacher has the weights of a loop written by hand."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fitkit
from fitkit.losses import Distillation
from tests.compiling import TRACED
from tests.nets import classification, dense, normal
from tests.reference import assert_same_weights, copied_state, slices

ALPHA, T, RATE = 0.3, 4.0, 0.2
X, Y = classification(48, 5)
WIDE = X.double()


def student():
    return dense(5, 8, 3, seed=1).double()


def teacher():
    """A net whose numbers differ in training mode, and that learns."""
    torch.manual_seed(2)
    first, last = nn.Linear(5, 16), nn.Linear(16, 3)
    made = nn.Sequential(first, nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(), last)
    made[1].running_mean.copy_(normal(16))
    return made.double()


def by_hand(logits, labels, taught, hard=F.cross_entropy, alpha=ALPHA, temperature=T):
    """Hinton's loss, by the definition of the divergence."""
    p, q = (taught / temperature).softmax(1), (logits / temperature).softmax(1)
    divergence = (p * (p.log() - q.log())).sum(1).mean()
    return alpha * hard(logits, labels) + (1 - alpha) * temperature**2 * divergence


def trained_by_hand(net, taught, batches, loss=by_hand, epochs=2):
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    taught = copy.deepcopy(taught).eval()
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            with torch.no_grad():
                answers = taught(x)
            loss(net(x), y, answers).backward()
            optimizer.step()
    return net


def compiled(net, loss, kind=fitkit.Model, **more):
    model = kind(net)
    model.compile("sgd", loss, learning_rate=RATE, **{"devices": 1, "accelerator": "cpu", **more})
    return model


def fitted(model, x=WIDE, y=Y, batch_size=16, **more):
    options = {"batch_size": batch_size, "epochs": 2, "shuffle": False, "verbose": 0}
    model.fit(x, y, **{**options, **more})
    return model


EXPECTED = {}


def expected():
    if not EXPECTED:
        EXPECTED["net"] = trained_by_hand(student(), teacher(), slices(WIDE, Y, 16))
    return EXPECTED["net"]


class Own(fitkit.Model):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"jit_compile": TRACED},
        {"jit_compile": TRACED, "steps_per_execution": 3},
        {"kind": Own},
        {"accumulate_grad_batches": 4},
        {"devices": 2, "strategy": "dp"},
        {"devices": 2, "strategy": "ddp_spawn"},
        {"devices": 2, "strategy": "fsdp"},
    ],
    ids=str,
)
def test_the_weights_are_those_of_a_loop_written_by_hand(more):
    parts = more.get("accumulate_grad_batches", 1)
    ranks = more.get("devices", 1) if more.get("strategy") != "dp" else 1
    model = compiled(student(), Distillation(teacher(), ALPHA, T), **more)
    fitted(model, batch_size=16 // parts // ranks)
    assert_same_weights(model.net, expected(), atol=1e-9)


def test_the_teacher_stays_as_it_is_and_outside_of_everything():
    taught = teacher()
    taught[0].weight.requires_grad_(False)
    before, learns = copied_state(taught), [p.requires_grad for p in taught.parameters()]
    model = compiled(student(), Distillation(taught, ALPHA, T))
    fitted(model)
    assert all(module.training for module in taught.modules())
    assert [p.requires_grad for p in taught.parameters()] == learns
    assert all(p.grad is None for p in taught.parameters())
    assert_same_weights(before, taught)
    plain = compiled(student(), "cross_entropy")
    assert list(model.state_dict()) == list(plain.state_dict())
    assert sum(p.numel() for p in model.parameters()) == 5 * 8 + 8 + 8 * 3 + 3
    held = {id(p) for group in model.optimizer.param_groups for p in group["params"]}
    assert not held & {id(p) for p in taught.parameters()}


def test_a_file_has_no_weights_of_the_teacher(tmp_path):
    sizes, taught = {}, Distillation(teacher(), ALPHA, T)
    for name, loss in {"plain": "cross_entropy", "taught": taught}.items():
        model = fitted(compiled(student(), loss))
        model.save(tmp_path / f"{name}.h5")
        sizes[name] = (tmp_path / f"{name}.h5").stat().st_size
    assert abs(sizes["taught"] - sizes["plain"]) < 1000


def test_a_cut_training_goes_on_exactly(tmp_path):
    whole = fitted(compiled(student(), Distillation(teacher(), ALPHA, T)))
    first = fitted(compiled(student(), Distillation(teacher(), ALPHA, T)), epochs=1)
    first.save(tmp_path / "cut.h5")
    again = compiled(student(), Distillation(teacher(), ALPHA, T))
    fitted(again, resume_from=tmp_path / "cut.h5")
    assert_same_weights(again.net, whole.net)


def test_evaluate_gives_the_same_loss_and_the_metrics_of_the_labels():
    model = compiled(student(), Distillation(teacher(), ALPHA, T), metrics=["accuracy"])
    found = model.evaluate(WIDE, Y, batch_size=7, return_dict=True, verbose=0)
    logits = student()(WIDE)
    loss = by_hand(logits, Y, teacher().eval()(WIDE))
    assert found["loss"] == pytest.approx(loss.item(), abs=1e-12)
    assert found["accuracy"] == pytest.approx(float((logits.argmax(1) == Y).double().mean()))


def test_alpha_1_is_the_loss_of_the_labels():
    model = fitted(compiled(student(), Distillation(teacher(), alpha=1.0)))
    assert_same_weights(model.net, fitted(compiled(student(), "cross_entropy")).net, atol=1e-15)


class Tagger(nn.Module):
    """Classes of each place: (N, T, 5) to (N, 3, T)."""

    def __init__(self, seed):
        super().__init__()
        self.layers = dense(5, 8, 3, seed=seed).double()

    def forward(self, x):
        return self.layers(x).transpose(1, 2)


@pytest.mark.parametrize("more", [{}, {"accumulate_grad_batches": 4}, {"jit_compile": TRACED}])
@pytest.mark.parametrize("weighted", [False, True])
def test_places_whose_label_is_ignored_count_in_neither_part(more, weighted):
    x = normal(32, 6, 5).double()
    y = torch.randint(3, (32, 6), generator=torch.Generator().manual_seed(4))
    y[torch.arange(6) > torch.arange(32)[:, None] % 6] = -1
    weight = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64) if weighted else None
    hard = nn.CrossEntropyLoss(weight, ignore_index=-1)

    def loss(logits, labels, taught):
        p, q = (taught / T).log_softmax(1), (logits / T).log_softmax(1)
        each = (p.exp() * (p - q)).sum(1)[labels != -1]
        return ALPHA * hard(logits, labels) + (1 - ALPHA) * T * T * each.mean()

    plain = trained_by_hand(Tagger(0), Tagger(1), slices(x, y, 16), loss)
    model = compiled(Tagger(0), Distillation(Tagger(1), ALPHA, T, hard=hard), **more)
    fitted(model, x, y, batch_size=16 // more.get("accumulate_grad_batches", 1))
    assert_same_weights(model.net, plain, atol=1e-9)


def test_weights_of_samples_and_classes_weigh_both_parts():
    weights = torch.rand(48, generator=torch.Generator().manual_seed(5)).double()
    by_class = torch.tensor([0.5, 1.0, 2.0]).double()

    def loss(logits, labels, taught):
        p, q = (taught / T).log_softmax(1), (logits / T).log_softmax(1)
        soft = T * T * (p.exp() * (p - q)).sum(1)
        each = ALPHA * F.cross_entropy(logits, labels, reduction="none") + (1 - ALPHA) * soft
        return (each * weights * by_class[labels]).mean()

    plain = trained_by_hand(student(), teacher(), slices(WIDE, Y, 48), loss)
    model = compiled(student(), Distillation(teacher(), ALPHA, T))
    fitted(model, batch_size=48, sample_weight=weights, class_weight={0: 0.5, 1: 1.0, 2: 2.0})
    assert_same_weights(model.net, plain, atol=1e-9)


class TwoHeads(nn.Module):
    def __init__(self, seed, names=("size", "kind")):
        super().__init__()
        self.names, self.body = names, dense(5, 6, seed=seed).double()
        self.heads = nn.ModuleList(dense(6, 3, seed=seed + 1 + n).double() for n in range(2))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        hidden = self.body(x).tanh()
        return {name: head(hidden) for name, head in zip(self.names, self.heads, strict=True)}


@pytest.mark.parametrize("is_dict", [False, True])
def test_each_output_learns_from_the_teachers_of_its_name(is_dict):
    other = (Y + 1) % 3
    taught = TwoHeads(20)

    def loss(outputs, labels, answers):
        size = by_hand(outputs["size"], labels, answers["size"])
        return size + by_hand(outputs["kind"], (labels + 1) % 3, answers["kind"])

    plain = trained_by_hand(TwoHeads(10), taught, slices(WIDE, Y, 16), loss)
    one = Distillation(taught, ALPHA, T)
    model = compiled(TwoHeads(10), {"size": one, "kind": one} if is_dict else one)
    fitted(model, y={"size": Y, "kind": other})
    assert_same_weights(model.net, plain, atol=1e-9)
    found = model.evaluate(WIDE, {"size": Y, "kind": other}, return_dict=True, verbose=0)
    value = by_hand(plain(WIDE)["size"], Y, taught(WIDE)["size"]).item()
    assert found["size_loss"] == pytest.approx(value, abs=1e-9)


def test_a_teacher_of_several_outputs_is_asked_once_a_batch():
    model = compiled(TwoHeads(10), Distillation(TwoHeads(20), ALPHA, T))
    model.fit(WIDE, {"size": Y, "kind": Y}, batch_size=48, verbose=0)
    twin = model._fitkit.compilation.given.loss.soft.teacher._twin
    assert twin.calls == 1


def test_the_hard_loss_may_be_a_function():
    def smoothed(logits, labels):
        return F.cross_entropy(logits, labels, label_smoothing=0.1)

    def loss(*parts):
        return by_hand(*parts, hard=smoothed)

    plain = trained_by_hand(student(), teacher(), slices(WIDE, Y, 16), loss)
    model = fitted(compiled(student(), Distillation(teacher(), ALPHA, T, hard=smoothed)))
    assert_same_weights(model.net, plain, atol=1e-9)


def test_labels_may_be_shares_of_classes():
    shares = normal(48, 3, seed=9).double().softmax(1)
    plain = trained_by_hand(student(), teacher(), slices(WIDE, shares, 16))
    model = fitted(compiled(student(), Distillation(teacher(), ALPHA, T)), y=shares)
    assert_same_weights(model.net, plain, atol=1e-9)


class Named(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.layers = dense(5, 3, seed=seed).double()

    def forward(self, a, b):
        return self.layers(a + b)


def test_the_teacher_gets_what_the_students_forward_gets():
    half = WIDE / 2
    model = compiled(Named(0), Distillation(Named(1), ALPHA, T))
    model.fit({"b": half, "a": half}, Y, batch_size=48, shuffle=False, verbose=0)
    plain = trained_by_hand(Named(0).layers, Named(1).layers, slices(WIDE, Y, 48), epochs=1)
    assert_same_weights(model.net.layers, plain, atol=1e-9)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_the_teacher_computes_as_the_precision_needs(precision):
    net, taught = dense(5, 8, 3, seed=1), dense(5, 16, 3, seed=2)
    model = compiled(net, Distillation(taught, ALPHA, T), precision=precision)
    found = model.evaluate(X, Y, batch_size=48, verbose=0)
    logits, answers = dense(5, 8, 3, seed=1), dense(5, 16, 3, seed=2)
    x = X
    with torch.no_grad():
        if precision == "bf16-mixed":
            with torch.autocast("cpu", torch.bfloat16):
                pair = logits(x).float(), answers(x).float()
        elif precision == "bf16-true":
            x = x.bfloat16()
            pair = logits.bfloat16()(x).float(), answers(x.float())
        else:
            pair = logits.double()(x.double()), answers(x).double()
    assert found == pytest.approx(by_hand(pair[0], Y, pair[1]).item(), rel=1e-6)
    assert taught[0].weight.dtype is torch.float32
    fitted(model, X, epochs=1)


def test_a_fitkit_model_may_teach():
    taught = fitkit.Model(teacher())
    model = fitted(compiled(student(), Distillation(taught, ALPHA, T)))
    assert_same_weights(model.net, expected(), atol=1e-9)


def test_new_weights_of_the_teacher_count_from_then_on():
    taught = teacher()
    model = compiled(student(), Distillation(taught, ALPHA, T))
    before = model.evaluate(WIDE, Y, verbose=0)
    with torch.no_grad():
        taught[4].weight.mul_(3)
    after = model.evaluate(WIDE, Y, verbose=0)
    answers = taught.eval()(WIDE)
    assert after != before
    assert after == pytest.approx(by_hand(student()(WIDE), Y, answers).item(), abs=1e-12)


def test_a_copy_has_the_teacher_too():
    model = fitted(compiled(student(), Distillation(teacher(), ALPHA, T)), epochs=1)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert made.evaluate(WIDE, Y, verbose=0) == model.evaluate(WIDE, Y, verbose=0)


def test_validation_asks_the_teacher():
    model = fitted(
        compiled(student(), Distillation(teacher(), ALPHA, T)), validation_data=(WIDE, Y)
    )
    loss = by_hand(model.net(WIDE), Y, teacher().eval()(WIDE))
    assert model.history.history["val_loss"][-1] == pytest.approx(loss.item(), abs=1e-12)


@pytest.mark.parametrize(
    "arguments",
    [
        {"alpha": 1.5},
        {"alpha": -0.1},
        {"temperature": 0},
        {"teacher": lambda x: x},
        {"hard": "mse"},
        {"hard": "bce_with_logits"},
        {"hard": "sparse_categorical_crossentropy"},
        {"hard": "cross_entropi"},
        {"teacher": nn.Linear(2, 3, device="meta")},
    ],
    ids=lambda given: next(iter(given)),
)
def test_impossible_arguments_are_refused(arguments):
    with pytest.raises(fitkit.ConfigurationError):
        Distillation(**{"teacher": teacher(), **arguments})


@pytest.mark.parametrize("taught", [dense(5, 4), TwoHeads(0), dense(5, 3, 1)], ids=["4", "2", "1"])
def test_a_teacher_with_other_outputs_is_refused(taught):
    model = compiled(student(), Distillation(taught.double()))
    with pytest.raises(fitkit.ConfigurationError, match="FK065"):
        fitted(model)


def test_the_loss_needs_the_inputs():
    with pytest.raises(fitkit.ConfigurationError, match="FK065"):
        Distillation(teacher())(torch.zeros(2, 3), torch.zeros(2).long())
