"""`train_on_batch` and its kin in one's own loop: what is kept, and what ends that."""

import copy
import dataclasses
import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fitkit
from fitkit.errors import ConfigurationError
from fitkit.training import on_batch
from tests.reference import assert_same_weights

torch.manual_seed(0)
X = torch.randn(8, 4)
LABELS = torch.randint(3, (8,))


def net(seed=1, **options):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6, **options), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def compiled(module=None, optimizer="sgd", **options):
    model = fitkit.Model(net() if module is None else module)
    options = {"learning_rate": 0.1, "metrics": ["accuracy"], "accelerator": "cpu", **options}
    model.compile(optimizer, "cross_entropy", **options)
    return model


@pytest.fixture
def built(monkeypatch):
    """Counts how often a step is built, by stage."""
    counts = []
    original = on_batch.step_for

    def counting(model, stage, **named):
        counts.append(stage)
        return original(model, stage, **named)

    monkeypatch.setattr(on_batch, "step_for", counting)
    return counts


def plain_step(module, optimizer, x=X, y=LABELS):
    module.train()
    optimizer.zero_grad()
    output = module(x)
    loss = F.cross_entropy(output, y)
    loss.backward()
    optimizer.step()
    return [loss.item(), (output.argmax(1) == y).float().mean().item()]


def test_a_loop_of_ones_own_builds_each_step_once_and_is_plain_torchs(built):
    model, theirs = compiled(), net()
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    for number in range(4):
        x = X + number
        expected = plain_step(theirs, optimizer, x)
        assert model.train_on_batch(x.numpy(), LABELS.numpy()) == pytest.approx(expected, rel=1e-5)
        theirs.eval()
        with torch.no_grad():
            output = theirs(x)
        loss = F.cross_entropy(output, LABELS).item()
        found = model.test_on_batch(x, LABELS, return_dict=True)
        right = (output.argmax(1) == LABELS).float().mean().item()
        assert found == pytest.approx({"loss": loss, "accuracy": right}, rel=1e-5)
        np.testing.assert_allclose(model.predict_on_batch(x), output, rtol=1e-5, atol=1e-6)
    assert_same_weights(model.net, theirs, rtol=1e-5)
    assert sorted(built) == ["predict", "test", "training"]
    assert all(parameter.grad is None for parameter in model.parameters())


def rate(model, theirs, optimizer):
    model.compile(learning_rate=0.5)
    optimizer.param_groups[0]["lr"] = 0.5


def freezing(model, theirs, optimizer):
    model.net[0].requires_grad_(False)
    theirs[0].requires_grad_(False)


def layer(model, theirs, optimizer):
    for module in (model.net, theirs):
        torch.manual_seed(5)
        module[3] = nn.Linear(6, 3)
    model.compile("sgd", learning_rate=0.1)
    optimizer.param_groups[0]["params"] = list(theirs.parameters())


def activation(model, theirs, optimizer):
    model.net[2], theirs[2] = nn.ReLU(), nn.ReLU()


def whole_net(model, theirs, optimizer):
    for module in (model.net, theirs):
        module.load_state_dict(net(7).state_dict())
    model.net = copy.deepcopy(model.net)
    model.compile("sgd", learning_rate=0.1)


def own_optimizer(model, theirs, optimizer):
    model.compile(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5))
    optimizer.param_groups[0].update(lr=0.3, momentum=0.5)


def group(model, theirs, optimizer):
    model.optimizer.param_groups[0]["weight_decay"] = 0.3
    optimizer.param_groups[0]["weight_decay"] = 0.3


def hook(model, theirs, optimizer):
    for module in (model.net, theirs):
        module.register_forward_hook(lambda module, given, output: output * 2)


def hook_of_the_model(model, theirs, optimizer):
    model.register_forward_hook(lambda module, given, output: output * 2)
    theirs.register_forward_hook(lambda module, given, output: output * 2)


def clipping(model, theirs, optimizer):
    model.compile(gradient_clip_val=0.01)
    handles = [p.register_hook(lambda grad: grad) for p in theirs.parameters()]
    assert handles
    original = optimizer.step

    def step():
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.01)
        original()

    optimizer.step = step


def fit_between(model, theirs, optimizer):
    model.fit(X, LABELS, batch_size=8, shuffle=False, verbose=0)
    plain_step(theirs, optimizer)


def loading(model, theirs, optimizer):
    state = net(9).state_dict()
    model.load_state_dict(state)
    theirs.load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [rate, freezing, layer, activation, whole_net, own_optimizer, group, hook, hook_of_the_model,
     clipping, fit_between, loading],
)  # fmt: skip
def test_what_changes_between_two_calls_counts(change):
    model, theirs = compiled(), net()
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    for _ in range(2):
        model.train_on_batch(X, LABELS)
        model.test_on_batch(X, LABELS)
        plain_step(theirs, optimizer)
    change(model, theirs, optimizer)
    for _ in range(2):
        expected = plain_step(theirs, optimizer)
        assert model.train_on_batch(X, LABELS) == pytest.approx(expected, rel=1e-5)
    theirs.eval()
    with torch.no_grad():
        expected = F.cross_entropy(theirs(X), LABELS).item()
    assert model.test_on_batch(X, LABELS)[0] == pytest.approx(expected, rel=1e-5)


def test_the_loss_and_the_metrics_may_change():
    model = compiled()
    model.train_on_batch(X, LABELS)
    model.compile(loss="multi_margin_loss", metrics=["accuracy", "recall"])
    found = model.train_on_batch(X, LABELS, return_dict=True)
    assert list(found) == ["loss", "accuracy", "recall"]


def test_the_dtype_may_change():
    model = compiled()
    model.predict_on_batch(X)
    model.train_on_batch(X, LABELS)
    model.compile(precision="64-true")
    assert model.predict_on_batch(X).dtype == np.float64
    model.train_on_batch(X, LABELS)
    assert all(p.dtype is torch.float64 for p in model.parameters())


def test_modes_are_looked_at_in_each_call():
    model, theirs = compiled(), net()
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    model.train_on_batch(X, LABELS)
    plain_step(theirs, optimizer)
    model.net[1].eval()  # its running statistics stay
    before = model.net[1].running_mean.clone()
    model.train_on_batch(X, LABELS)
    assert torch.equal(model.net[1].running_mean, before) and not model.net[1].training
    model.eval()  # a net that evaluates as a whole trains
    model.train_on_batch(X, LABELS)
    assert not torch.equal(model.net[1].running_mean, before)
    assert not any(module.training for module in model.modules())
    model.train()
    before = model.net[1].running_mean.clone()
    model.test_on_batch(X, LABELS)
    model.predict_on_batch(X)
    assert torch.equal(model.net[1].running_mean, before)
    assert all(module.training for module in model.modules())


def test_a_checkpoint_brings_its_optimizers_state(tmp_path):
    model = compiled(optimizer="adam")
    for _ in range(3):
        model.train_on_batch(X, LABELS)
    model.save(tmp_path / "m.h5")
    expected = [model.train_on_batch(X, LABELS) for _ in range(2)]
    model.load(tmp_path / "m.h5")
    assert [model.train_on_batch(X, LABELS) for _ in range(2)] == expected


@pytest.mark.parametrize("way", ["another tensor", "the same tensor"])
def test_a_state_that_no_longer_fits_is_refused_before_the_next_update(way):
    model = compiled(optimizer="adam")
    model.train_on_batch(X, LABELS)
    before = copy.deepcopy(model.net.state_dict())
    state = model.optimizer.state[model.net[0].weight]
    if way == "another tensor":
        state["exp_avg"] = torch.zeros(1)
    else:
        state["exp_avg"].data = torch.zeros(1)
    with pytest.raises(ConfigurationError, match="exp_avg"):
        model.train_on_batch(X, LABELS)
    assert_same_weights(model.net.state_dict(), before)


def test_accumulation_takes_no_part_after_a_fit_either():
    model, theirs = compiled(accumulate_grad_batches=2), net()
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    model.train_on_batch(X, LABELS)
    plain_step(theirs, optimizer)
    model.fit(X, LABELS, batch_size=8, verbose=0)
    plain_step(theirs, optimizer)
    model.train_on_batch(X, LABELS)
    plain_step(theirs, optimizer)
    assert_same_weights(model.net, theirs, rtol=1e-5)


def test_later_batches_are_checked_as_the_first_one(built):
    model = fitkit.Model(nn.Linear(4, 1))
    model.compile("sgd", "mse", accelerator="cpu")
    model.train_on_batch(X, torch.ones(8, 1))
    with pytest.raises(ConfigurationError):
        model.train_on_batch(X, torch.ones(8, 3))
    with pytest.raises(ConfigurationError, match="weight"):
        model.train_on_batch(X, torch.ones(8, 1), -torch.ones(8))
    model.train_on_batch(X[:3], torch.ones(3, 1))
    assert model.train_on_batch(X, torch.ones(8, 1), class_weight={1: 2.0}) > 0
    with pytest.raises(ConfigurationError):
        model.train_on_batch(X[:, :3], torch.ones(8, 1))
    model.train_on_batch(X, torch.ones(8, 1))


def test_an_error_leaves_the_model_as_it_was():
    model = compiled()
    model.train_on_batch(X, LABELS)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises((ConfigurationError, IndexError)):
        model.train_on_batch(X, LABELS + 5)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    model.train_on_batch(X, LABELS)


def test_a_net_that_writes_into_its_inputs_leaves_the_users_data():
    model = compiled(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3)))
    x = X.numpy().copy()
    for call in (model.train_on_batch, model.test_on_batch, lambda x, y: model.predict_on_batch(x)):
        for _ in range(3):
            call(x, LABELS)
            assert np.array_equal(x, X.numpy())


def test_a_model_with_kept_steps_goes_without_the_garbage_collector():
    model = compiled()
    model.train_on_batch(X, LABELS)
    model.test_on_batch(X, LABELS)
    model.predict_on_batch(X)
    weights = weakref.ref(model.net)
    gc.collect()
    gc.disable()
    try:
        del model
        assert weights() is None
    finally:
        gc.enable()


def test_a_copy_has_steps_of_its_own():
    model = compiled()
    model.train_on_batch(X, LABELS)
    other = copy.deepcopy(model)
    other.train_on_batch(X, LABELS)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    other.train_on_batch(X, LABELS)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())
    assert model.train_on_batch(X, LABELS) != other.train_on_batch(X, LABELS)


def test_threads_predict_and_test_at_once():
    model, wrong = compiled(), []
    expected = {
        n: (model.predict_on_batch(X + n), model.test_on_batch(X + n, LABELS)) for n in range(4)
    }

    def work(number):
        for _ in range(20):
            if not np.array_equal(model.predict_on_batch(X + number), expected[number][0]):
                wrong.append(number)
            if model.test_on_batch(X + number, LABELS) != expected[number][1]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_step_of_the_models_own_that_comes_later_is_called():
    model = compiled()
    model.train_on_batch(X, LABELS)
    called = []

    def training_step(batch, batch_idx):
        called.append(batch_idx)
        return F.cross_entropy(model.net(batch[0]), batch[1])

    model.training_step = training_step
    model.train_on_batch(X, LABELS)
    assert called == [0]


class Net(nn.Module):
    """A net of the user's own, whose code isn't torch's."""

    def __init__(self):
        super().__init__()
        self.layers = net()

    def forward(self, x):
        return self.layers(x)


def doubled(*arguments):
    return arguments[-1] * 2


def layers_hook(model):
    model.net.get_submodule(
        "layers.0" if isinstance(model.net, Net) else "0"
    ).register_forward_hook(doubled)


def forward_of_a_layer(model):
    last = model.net.layers[3] if isinstance(model.net, Net) else model.net[3]
    last.forward = lambda x: F.linear(x, last.weight)


def forward_of_the_model(model):
    inside = model.net
    model.forward = lambda x: inside(x) * 3


def hook_everywhere(model):
    return nn.modules.module.register_module_forward_hook(doubled)


@pytest.mark.parametrize("kind", [net, Net])
@pytest.mark.parametrize(
    "change", [layers_hook, forward_of_a_layer, forward_of_the_model, hook_everywhere]
)
def test_what_comes_to_act_in_a_forward_acts_in_the_next_call(kind, change):
    model = compiled(kind())
    for _ in range(3):
        model.test_on_batch(X, LABELS)
        before = model.predict_on_batch(X)
        model.train_on_batch(X, LABELS)
    handle = change(model)
    try:
        model.eval()
        with torch.no_grad():
            expected = model(X)
        model.train()
        assert not np.allclose(before, expected, atol=1e-3)
        np.testing.assert_allclose(model.predict_on_batch(X), expected, rtol=1e-5, atol=1e-6)
        loss = F.cross_entropy(expected, LABELS).item()
        assert model.test_on_batch(X, LABELS)[0] == pytest.approx(loss, rel=1e-5)
    finally:
        if handle is not None:
            handle.remove()


def test_each_call_goes_through_all_layers_of_nested_sequentials():
    first, norm, *rest = net()
    module = nn.Sequential(nn.Sequential(first, nn.Sequential(norm)), nn.Sequential(), *rest)
    model = compiled(module)
    expected = copy.deepcopy(module).eval()(X).detach()
    for _ in range(3):
        np.testing.assert_allclose(model.predict_on_batch(X), expected, rtol=1e-5, atol=1e-6)
        loss, accuracy = model.test_on_batch(X, LABELS)
        assert loss == pytest.approx(F.cross_entropy(expected, LABELS).item(), rel=1e-5)
        assert accuracy == pytest.approx((expected.argmax(1) == LABELS).float().mean().item())
        with pytest.raises(ConfigurationError, match="4"):
            model.predict_on_batch(X[:, :3])


def test_what_a_module_does_in_train_and_eval_is_done_in_each_call():
    model, called = compiled(), []
    for _ in range(3):
        model.predict_on_batch(X)
        model.train_on_batch(X, LABELS)

    def train(mode=True, own=model.net[1]):
        called.append(mode)
        return nn.Module.train(own, False)  # its statistics stay

    model.net[1].train = train
    before = model.net[1].running_mean.clone()
    model.train_on_batch(X, LABELS)
    assert called == [True] and torch.equal(model.net[1].running_mean, before)
    model.predict_on_batch(X)
    model.test_on_batch(X, LABELS)
    assert called == [True, False, False]


def test_a_step_that_its_class_gets_later_is_called():
    class Own(fitkit.Model):
        pass

    model = Own(net())
    model.compile("sgd", "cross_entropy", learning_rate=0.1, accelerator="cpu")
    for _ in range(2):
        model.train_on_batch(X, LABELS)
        model.test_on_batch(X, LABELS)
        model.predict_on_batch(X)
    Own.training_step = lambda self, batch, index: F.cross_entropy(self(batch[0]), batch[1]) * 2
    Own.validation_step = lambda self, batch, index: torch.tensor(7.0)
    Own.predict_step = lambda self, batch, index: torch.full((8, 1), 5.0)
    model.eval()
    assert model.test_on_batch(X, LABELS) == 7.0
    assert (model.predict_on_batch(X) == 5.0).all()
    model.train()
    expected = 2 * F.cross_entropy(copy.deepcopy(model.net)(X), LABELS).item()
    assert model.train_on_batch(X, LABELS) == pytest.approx(expected, rel=1e-5)


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


LIKE = {
    "float64": lambda x, y: (x.astype("float64"), y),
    "int32 labels": lambda x, y: (x, y.astype("int32")),
    "read-only": lambda x, y: (read_only(x), read_only(y)),
    "every other row": lambda x, y: (np.repeat(x, 2, 0)[::2], np.repeat(y, 2)[::2]),
    "backwards": lambda x, y: (x[::-1].copy()[::-1], y[::-1].copy()[::-1]),
    "another byte order": lambda x, y: (x.astype(">f4"), y.astype(">i8")),
    "tensors": lambda x, y: (torch.from_numpy(x), torch.from_numpy(y)),
    "a tensor with a gradient": lambda x, y: (torch.from_numpy(x).requires_grad_(), y),
}


@pytest.mark.parametrize("name", LIKE)
def test_arrays_of_another_form_give_the_same(name):
    model = compiled()
    x, y = X.numpy().copy(), LABELS.numpy().copy()
    for _ in range(2):
        expected = model.test_on_batch(x, y)
        outputs = model.predict_on_batch(x)
    given = LIKE[name](x, y)
    for _ in range(2):
        assert model.test_on_batch(*given) == pytest.approx(expected, rel=1e-6)
        np.testing.assert_allclose(model.predict_on_batch(given[0]), outputs, rtol=1e-6)
        assert model.test_on_batch(x, y) == expected


def test_shapes_that_dont_fit_are_refused_in_later_calls_too():
    model = compiled()
    for _ in range(2):
        model.train_on_batch(X, LABELS)
        model.test_on_batch(X, LABELS)
    for call in (model.train_on_batch, model.test_on_batch):
        with pytest.raises(ConfigurationError):
            call(X, LABELS[:5])
        with pytest.raises(ConfigurationError):
            call(X[:0], LABELS[:0])
        with pytest.raises(ConfigurationError):
            call(X[:, :2], LABELS)
        call(X, LABELS)


@pytest.mark.parametrize("name", ["train_on_batch", "test_on_batch"])
def test_labels_that_dont_count_dont_count_in_later_calls_either(name):
    model = compiled()
    verb = getattr(model, name)
    for _ in range(2):
        verb(X, LABELS)
    labels = LABELS.clone()
    labels[:5] = -100
    module = copy.deepcopy(model.net).train(name == "train_on_batch")
    with torch.no_grad():
        output = module(X)
    loss = F.cross_entropy(output[5:], LABELS[5:]).item()
    right = (output[5:].argmax(1) == LABELS[5:]).float().mean().item()
    assert verb(X, labels) == pytest.approx([loss, right], rel=1e-5)
    with pytest.warns(UserWarning, match="nothing counts for loss, accuracy"):
        found = verb(X, torch.full((8,), -100), return_dict=True)
    assert np.isnan([*found.values()]).all()


def test_outputs_are_the_callers():
    model = fitkit.Model(nn.Identity())
    model.compile("sgd", "mse", accelerator="cpu")
    x = X.numpy().copy()
    for _ in range(3):
        outputs = model.predict_on_batch(x)
        outputs += 1
        assert np.array_equal(x, X.numpy())


def test_values_that_a_net_logs_are_among_a_later_calls():
    class Logs(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.log = nn.Linear(4, 3), None

        def forward(self, x):
            if self.log is not None:
                self.log("size", x.abs().mean())
            return self.layer(x)

    inside = Logs()
    model = compiled(inside)
    for verb in (model.train_on_batch, model.test_on_batch):
        inside.log = None
        for _ in range(2):
            verb(X, LABELS)
        inside.log = lambda *given: model.log(*given)
        for factor in (1, 3):
            found = verb(X * factor, LABELS, return_dict=True)
            assert found["size"] == pytest.approx(X.abs().mean().item() * factor, rel=1e-5)


def test_several_outputs_and_weights_go_the_long_way():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x):
            return {"a": self.a(x), "b": self.b(x)}

    model, y = fitkit.Model(Two()), torch.ones(8, 1)
    model.compile("sgd", {"a": "mse", "b": "mae"}, accelerator="cpu")
    for _ in range(3):
        with torch.no_grad():
            a, b = model.net(X).values()
        expected = ((a - y) ** 2).mean().item() + (b - y).abs().mean().item()
        found = model.train_on_batch(X, {"a": y, "b": y}, return_dict=True)
        assert found["loss"] == pytest.approx(expected, rel=1e-5)
    single, weights = fitkit.Model(nn.Linear(4, 1)), torch.arange(8.0)
    single.compile("sgd", "mse", accelerator="cpu")
    for given in (None, weights, None, weights):
        with torch.no_grad():
            errors = (single.net(X) - y).square().flatten()
        expected = (errors if given is None else errors * given).mean().item()
        assert single.test_on_batch(X, y, given) == pytest.approx(expected, rel=1e-5)
        assert single.train_on_batch(X, y, given) == pytest.approx(expected, rel=1e-5)


class Reads(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.layer, self.read = nn.Linear(2, 1), read

    def forward(self, x):
        return self.layer(self.read(x))


@dataclasses.dataclass
class Points:
    """An object of a library."""

    rows: torch.Tensor
    num_graphs: int = 4

    def to(self, device, non_blocking=False):
        return Points(self.rows.to(device))


SAMPLE_LISTS = {
    "dicts": ([{"a": torch.ones(2)}] * 4, lambda x: torch.stack([one["a"] for one in x])),
    "unlike tensors": (
        [torch.ones(rows, 2) for rows in (3, 1, 2, 2)],
        lambda x: torch.stack([one.sum(0) for one in x]),
    ),
    "pairs": ([(torch.ones(2), "a")] * 4, lambda x: torch.stack([one for one, _ in x])),
    "texts beside": ({"t": ["a", "b", "c", "d"], "x": torch.ones(4, 2)}, lambda x: x["x"]),
    "packed": (
        nn.utils.rnn.pack_sequence([torch.ones(rows, 2) for rows in (3, 2, 2, 1)]),
        lambda x: nn.utils.rnn.pad_packed_sequence(x, batch_first=True)[0][:, 0],
    ),
    "objects": (Points(torch.ones(4, 2)), lambda x: x.rows),
}


@pytest.mark.parametrize("case", SAMPLE_LISTS)
def test_verbs_of_one_batch_take_what_batches_of_fit_have(case):
    x, read = SAMPLE_LISTS[case]
    y, models = torch.arange(4.0)[:, None], []
    for train in (
        lambda model: model.fit([(x, y)], verbose=0),
        lambda model: model.train_on_batch(x, y),
    ):
        torch.manual_seed(0)
        model = fitkit.Model(Reads(read))
        model.compile("sgd", "mse", learning_rate=0.1, accelerator="cpu")
        train(model)
        models.append(model)
    fitted, trained = models
    for one, other in zip(fitted.parameters(), trained.parameters(), strict=True):
        assert torch.equal(one, other)
    assert trained.test_on_batch(x, y) == fitted.evaluate([(x, y)], verbose=0)
    expected = trained.net(x).detach().numpy()
    assert np.array_equal(trained.predict_on_batch(x), expected)


def test_texts_beside_tensors_have_weights_and_lists_of_numbers_are_refused():
    class Lengths(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones(()))

        def forward(self, text, number):
            return self.factor * number * torch.tensor([float(len(one)) for one in text])

    model = fitkit.Model(Lengths())
    model.compile("sgd", "mse", accelerator="cpu")
    x, weight = {"text": ["ab", "abc"], "number": torch.ones(2)}, torch.tensor([1.0, 0.5])
    loss = model.test_on_batch(x, torch.zeros(2), sample_weight=weight)
    assert loss == pytest.approx((4 + 0.5 * 9) / 2)
    with pytest.raises(TypeError, match=r"numpy\.asarray"):
        model.predict_on_batch([[1.0, 2.0], [3.0, 4.0]])


def test_a_loss_that_is_nan_is_said_once_with_its_place(recwarn):
    model = fitkit.Model(nn.Linear(3, 1))
    model.compile("sgd", "mse", accelerator="cpu")
    x, y = torch.ones(4, 3), torch.zeros(4, 1)
    x[2, 1] = torch.nan
    for _ in range(2):
        model.test_on_batch(x, y)
        model.train_on_batch(x, y)
    (words,) = (str(one.message) for one in recwarn)
    assert "loss is nan" in words and "x of sample 2 is nan at column 1" in words
