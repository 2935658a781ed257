"""`steps_per_execution` with `jit_compile`: a loop in one graph gives what single steps give."""

import copy
import uuid
from functools import partial

import pytest
import torch
from torch import nn, optim

import fitkit
from fitkit.extras.jit import loop
from fitkit.extras.jit.loop import looped
from fitkit.extras.jit.programs import Programs, traces_gradients
from tests.compiling import HAS_COMPILER, Branching, compiled_anew
from tests.reference import assert_same_weights, plain_loop, slices

pytestmark = [
    HAS_COMPILER,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not traces_gradients(), reason="this torch compiles no gradients"),
]

torch.manual_seed(0)
X = torch.randn(53, 6, dtype=torch.float64)
IMAGES = torch.randn(53, 1, 12, 12, dtype=torch.float64)
Y, VALUES = torch.randint(0, 3, (53,)), torch.randn(53, 3, dtype=torch.float64)
MOMENTUM = partial(optim.SGD, lr=0.1, momentum=0.9)
COSINE = partial(optim.lr_scheduler.CosineAnnealingLR, T_max=60)


def linear():
    return nn.Linear(6, 3)


def model_of(net, optimizer=MOMENTUM, loss="cross_entropy", group=6, **more):
    torch.manual_seed(1)
    model = fitkit.Model(net().double())
    model.compile(optimizer, loss, accelerator="cpu", steps_per_execution=group, **more)
    return model


def fit(model, x=X, y=Y, epochs=3, **more):
    torch.manual_seed(2)
    return model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, **more).history


@pytest.fixture
def loops(monkeypatch):
    """The number of steps of each call."""
    found, run = [], Programs.run

    def noted(programs, function, batches, *given, most=0, **named):
        found.append(int(batches[0][-1]) if most else 0)
        return run(programs, function, batches, *given, most=most, **named)

    monkeypatch.setattr(Programs, "run", noted)
    return found


@pytest.mark.slow
def test_a_hundred_steps_are_those_of_a_plain_loop_also_in_shorter_groups(loops, recwarn):
    """Convolutions, buffers, Adam, clipping; groups of 4 and 2 batches, and a short last batch."""

    def net():
        layers = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()
        return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 36, 3))

    torch._dynamo.reset()
    compiled_anew()
    more = {"gradient_clip_val": 0.5, "metrics": ["accuracy"], "jit_compile": True}
    model = model_of(net, "adam", group=4, **more)
    twin = copy.deepcopy(model.net)
    history = fit(model, IMAGES, Y, epochs=8, shuffle=False)
    assert loops[:5] == [1, 1, 2, 2, 4]  # compiled, seen to be the same, then as many as wait
    assert compiled_anew() == 1  # of batches of 8; those of 5 are rare
    history["loss"] += fit(model, IMAGES, Y, epochs=15, initial_epoch=8, shuffle=False)["loss"]
    assert compiled_anew() == 0
    assert max(loops[5:]) == 4
    assert not [one for one in recwarn if "jit_compile" in str(one.message)]
    losses = plain_loop(
        twin.train(), optim.Adam(twin.parameters()), slices(IMAGES, Y, 8), epochs=15, clip=0.5
    )
    assert history["loss"] == pytest.approx(losses, abs=1e-10)
    assert_same_weights(model.net, twin, atol=1e-10)


def dropping():
    return nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 3))


def test_dropout_draws_anew_in_each_step_and_the_same_from_run_to_run(loops):
    def run():
        model = model_of(dropping, partial(optim.SGD, lr=0.0), jit_compile=True)
        return fit(model, X[:1].repeat(96, 1), Y[:1].repeat(96), epochs=1, callbacks=[Losses()])

    class Losses(fitkit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            seen.append(float(logs["loss"]))

    seen = []
    assert run() == run()
    assert max(loops) == 6
    assert seen[0] != seen[1]  # the mean of six masks, and of twelve


def test_two_dropouts_draw_in_a_loop_what_they_draw_in_single_steps(loops):
    def net():
        layers = nn.Linear(6, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.3)
        return nn.Sequential(*layers, nn.ReLU(), nn.Linear(8, 3))

    def trained(**more):
        model = model_of(net, **more)
        fit(model, X[:48], Y[:48], epochs=2, shuffle=False)
        return model.net

    assert_same_weights(trained(jit_compile=True), trained(), atol=1e-10)
    assert max(loops) == 6


def squares(prediction, target):
    return ((prediction - target) ** 2).mean(1)


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return {"a": self.a(x), "b": self.b(x)}


TWO = {"loss": {"a": "cross_entropy", "b": "mse"}, "loss_weights": {"a": 1.0, "b": 0.5}}


@pytest.mark.parametrize(
    ("options", "data"),
    [
        (
            {"net": TwoOutputs, **TWO, "lr_scheduler": {"scheduler": COSINE, "interval": "step"}},
            {"y": {"a": Y, "b": VALUES}},
        ),
        pytest.param(
            {}, {"sample_weight": torch.rand(53, dtype=torch.float64)}, marks=pytest.mark.slow
        ),
        pytest.param({"metrics": ["f1"]}, {}, marks=pytest.mark.slow),
        pytest.param(
            {"loss": squares, "metrics": [squares]}, {"y": VALUES}, marks=pytest.mark.slow
        ),
    ],
    ids=["several outputs and a rate for each step", "weights", "metrics", "own functions"],
)
def test_a_loop_gives_what_single_steps_give(options, data, loops):
    options = {"net": linear, **options}
    plain, model = model_of(**options), model_of(**options, jit_compile=True)
    compiled_anew()
    for graphs in (1, 0):  # of batches of 8; those of 5 are rare
        history, expected = fit(model, **data), fit(plain, **data)
        assert compiled_anew() == graphs
        assert list(history) == list(expected)
        for name, values in expected.items():
            assert history[name] == pytest.approx(values, abs=1e-12), name
    assert max(loops) > 2
    assert_same_weights(model, plain, atol=1e-12)


class Keeping(nn.Module):
    """Keeps its last output, and uses it at the next call."""

    def __init__(self):
        super().__init__()
        self.layer, self._last = nn.Linear(6, 3), torch.zeros(3, dtype=torch.float64)

    def forward(self, x):
        output = self.layer(x) + 0.1 * self._last
        self._last = output.detach().mean(0)
        return output


class Toggling(nn.Module):
    """Computes something else at every second call."""

    def __init__(self):
        super().__init__()
        self.layer, self.odd = nn.Linear(6, 3), False

    def forward(self, x):
        self.odd = not self.odd
        return self.layer(x) * (2 if self.odd else 1)


class Counting(Toggling):
    """Computes something else at every call."""

    def forward(self, x):
        self.odd += 1
        return self.layer(x) * (1 + 0.1 * self.odd)


@pytest.mark.parametrize(
    "net",
    [
        Keeping,
        pytest.param(Toggling, marks=pytest.mark.slow),
        pytest.param(Counting, marks=pytest.mark.slow),
        Branching,
    ],
)
@pytest.mark.filterwarnings("ignore:jit_compile")
def test_a_net_that_changes_from_step_to_step_is_never_in_a_loop(net, loops):
    """Also with a schedule, whose rates of a whole group are known before its first step."""
    more = {"lr_scheduler": {"scheduler": COSINE, "interval": "step"}}
    plain, model = model_of(net, **more), model_of(net, jit_compile=True, **more)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=2):  # each takes seconds
        expected, history = fit(plain, X[:48], Y[:48]), fit(model, X[:48], Y[:48])
    assert history["loss"] == pytest.approx(expected["loss"], abs=1e-12)
    assert_same_weights(model, plain, atol=1e-12)
    assert max(loops) <= 1
    assert model.global_step == plain.global_step == 18


@pytest.mark.slow  # operation by operation: test_compiled_step.py
def test_what_a_callback_changes_between_groups_holds_for_the_next_steps(loops):
    class Scale(fitkit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            self.model.net.factor = 1.0 + (self.model.global_step >= 12)

    class Scaled(nn.Linear):
        factor = 1.0

        def forward(self, x):
            return super().forward(x) * self.factor

    def run(**more):
        model = model_of(lambda: Scaled(6, 3), **more)
        fit(model, X[:48], Y[:48], callbacks=[Scale()])
        return model

    assert_same_weights(run(jit_compile=True), run(), atol=1e-12)
    assert max(loops) == 6


@pytest.mark.slow  # without a loop: test_compiled_step.py
def test_a_layer_that_thaws_is_compiled_once_more(loops):
    def run(**more):
        model = model_of(lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)), **more)
        model.net[0].requires_grad_(False)
        fit(model, X[:48], Y[:48])
        compiled_anew()
        model.net[0].requires_grad_(True)
        fit(model, X[:48], Y[:48])
        return model, compiled_anew()

    torch._dynamo.reset()
    model, graphs = run(jit_compile=True)
    assert_same_weights(model, run()[0], atol=1e-12)
    assert graphs == 1
    assert loops[-1] == 6


@pytest.mark.slow
def test_batches_too_large_for_one_place_make_shorter_calls(loops, monkeypatch):
    monkeypatch.setattr("fitkit.extras.jit.update.MOST_BYTES", 3 * 8 * 8 * (6 + 1))
    model, plain = model_of(linear, jit_compile=True), model_of(linear)
    fit(model), fit(plain)
    assert_same_weights(model, plain, atol=1e-12)
    assert max(loops) == 3


def test_a_step_that_returns_more_than_it_marks_is_refused():
    weight, place = torch.ones(3), torch.tensor(1)

    def graph_of(keeps):
        graph = torch.fx.Graph()
        weights, number = graph.placeholder("weights"), graph.placeholder("number")
        loss = graph.call_method("sum", (weights,))
        loss.meta["example_value"] = torch.tensor(3.0)
        mark = graph.call_function(torch.add, (number, 1))
        graph.output((loss, *([weights] if keeps else []), mark))
        return torch.fx.GraphModule(torch.nn.Module(), graph)

    with pytest.raises(RuntimeError, match="keeps tensors"):
        looped(graph_of(True), (weight, place), place, 4, lambda graph, inputs: graph)
    with pytest.raises(RuntimeError, match="numbers that change"):
        looped(graph_of(False), (weight, 3, place), place, 4, lambda graph, inputs: graph)
    run = looped(graph_of(False), (weight, place), place, 4, lambda graph, inputs: graph)
    losses, steps = run(weight, torch.tensor(2))
    assert losses[:2].tolist() == [3.0, 3.0]
    assert int(steps) == 2


def test_a_loop_is_kept_under_its_code_and_its_inputs_but_not_with_tensors_of_its_own():
    def key(factor, size=3, constant=False):
        graph = torch.fx.Graph()
        weights, number = graph.placeholder("weights"), graph.placeholder("number")
        if constant:
            factor = graph.call_function(torch.tensor, (factor,))
        loss = graph.call_method("sum", (graph.call_function(torch.mul, (weights, factor)),))
        loss.meta["example_value"] = torch.tensor(1.0)
        graph.output((loss, graph.call_function(torch.add, (number, 1))))
        step, place = torch.fx.GraphModule(nn.Module(), graph), torch.tensor(1)
        given = (torch.ones(size), place)
        known = looped(
            step, given, 1, 4, lambda *_: getattr(torch._inductor.config, loop.CACHEABLE)
        )
        return known.get("torch.ops.higher_order.while_loop")

    keys = [key(2.0), key(2.0), key(2.5), key(2.0, size=4)]
    assert len(set(keys)) == 3 and keys[0] == keys[1]
    assert None not in keys
    assert key(2.0, constant=True) is None


@pytest.mark.slow
def test_a_loops_trace_is_kept_on_the_disk_for_the_very_same_loop_alone(monkeypatch):
    """Whatever has another trace isn't given this one, and its numbers are its own."""

    def hits(net=linear, optimizer=MOMENTUM, loss="cross_entropy", x=X[:48]):
        def trained(**more):
            model = model_of(net, optimizer, loss, **more)
            model.fit(x, Y[:48], batch_size=8, shuffle=False, verbose=0)
            return model.net

        torch._dynamo.reset()
        counts = torch._dynamo.utils.counters["aot_autograd"]
        counts.clear()
        found = trained(jit_compile=True)
        assert_same_weights(found, trained(), atol=1e-12)
        assert counts["ok"] == 1
        return counts["autograd_cache_hit"], list(found.parameters())

    with torch.compiler.config.patch(cache_key_tag=uuid.uuid4().hex):
        first, weights = hits()
        second, again = hits()
        assert (first, second) == (0, 1)
        monkeypatch.setattr(loop, "CACHEABLE", "what no torch has")
        _, without = hits()
        monkeypatch.undo()
        for one, other, third in zip(weights, again, without, strict=True):
            assert torch.equal(one, other) and torch.equal(one, third)
        others = [
            {"net": lambda: nn.Sequential(linear(), nn.Tanh())},
            {"optimizer": partial(MOMENTUM, weight_decay=0.1)},
            {"optimizer": partial(MOMENTUM, weight_decay=0.2)},
            {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
            {"net": lambda: nn.Linear(5, 3), "x": X[:48, :5]},
        ]
        assert [hits(**one)[0] for one in others] == [0] * 5
        assert hits()[0] == 1
