"""`jit_compile` compiles whole steps: the same numbers as without it, nothing compiled twice."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim
from torch.fx.experimental.proxy_tensor import make_fx

import fitkit
from fitkit import outputs
from fitkit.extras.jit.graph_calls import GraphCalls
from fitkit.extras.jit.passes import faster
from fitkit.extras.jit.programs import traces_gradients
from fitkit.extras.jit.tracing import why_uncompiled
from tests.compiling import HAS_COMPILER, TRACED, Branching, compiled_anew, every_second

pytestmark = pytest.mark.skipif(not traces_gradients(), reason="this torch compiles no gradients")
partial = functools.partial

torch.manual_seed(0)
X = torch.randn(53, 6, dtype=torch.float64)
Y, VALUES = torch.randint(0, 3, (53,)), torch.randn(53, 3, dtype=torch.float64)
IGNORED = torch.where(torch.arange(53) % 3 == 0, -100, Y)


def perceptron():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def normalized():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(2, 2)

    def forward(self, x):
        return {"a": self.a(x), "b": self.b(x)}


def squares(prediction, target):
    return ((prediction - target) ** 2).mean(1)


ADAM = {"optimizer": "adam", "loss": "cross_entropy", "metrics": ["accuracy"]}
TWO = {"loss": {"a": "cross_entropy", "b": "mse"}, "loss_weights": {"a": 1.0, "b": 0.5}}
COUNTED = {"net": TwoOutputs, "y": {"a": IGNORED, "b": VALUES}, "metrics": None, **TWO}
NESTEROV = partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
ONE_CYCLE = partial(optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=60)
COSINE = partial(optim.lr_scheduler.CosineAnnealingLR, T_max=60)
SGD = {**ADAM, "optimizer": NESTEROV}  # it has states, and is traced in half of Adam's time

CASES = {
    "Adam, a short last batch": {"metrics": ["accuracy", "f1"], "rows": 53},
    "AdamW": {"optimizer": "adamw", "gradient_clip_val": 0.05},
    "SGD": {"optimizer": "sgd", "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "SGD with momentum": {"optimizer": NESTEROV},
    "RMSprop": {"optimizer": partial(optim.RMSprop, momentum=0.9, centered=True)},
    "batch normalisation": {"net": normalized},
    "a rate for each step": {"lr_scheduler": {"scheduler": COSINE, "interval": "step"}},
    "several batches an update": {"accumulate_grad_batches": 3},
    "several outputs": {"net": TwoOutputs, "y": {"a": Y, "b": VALUES}, "metrics": None, **TWO},
    "labels that don't count": {"y": IGNORED, "metrics": None},
    "functions of one's own": {"y": VALUES, "loss": squares, "metrics": [squares]},
    "sample weights": {"sample_weight": torch.rand(48, dtype=torch.float64)},
}


def model_of(net=perceptron, **more):
    torch.manual_seed(1)
    model = fitkit.Model(net())
    model.compile(accelerator="cpu", **{**SGD, **more})
    torch.manual_seed(2)
    return model


def trained(case, epochs=3, **more):
    """The model, and the histories of a first and a second `fit`."""
    case = {**ADAM, **case, **more}
    net, x, y = case.pop("net", perceptron), X, case.pop("y", Y)
    weights, rows = case.pop("sample_weight", None), case.pop("rows", 48)
    x = x[:rows]
    y = {name: part[:rows] for name, part in y.items()} if isinstance(y, dict) else y[:rows]
    model = model_of(lambda: net().double(), **case)
    options = {"batch_size": 8, "verbose": 0, "sample_weight": weights}
    first = model.fit(x, y, epochs=epochs, **options).history
    compiled_anew()
    second = model.fit(x, y, epochs=epochs + 2, initial_epoch=epochs, **options).history
    return model, [first, second]


def assert_same(one, other, tolerance=1e-10):
    (model, histories), (twin, others) = one, other
    state, expected = model.state_dict(), twin.state_dict()
    for name, value in expected.items():
        assert torch.allclose(state[name], value, rtol=0, atol=tolerance), name
    for history, wanted in zip(histories, others, strict=True):
        assert list(history) == list(wanted)
        for name, values in wanted.items():
            assert history[name] == pytest.approx(values, abs=tolerance), name


@pytest.mark.parametrize("name", every_second(CASES))
def test_a_compiled_step_gives_what_an_eager_one_gives(name, recwarn):
    plain = trained(CASES[name])
    model, histories = trained(CASES[name], jit_compile=TRACED)
    assert compiled_anew() == 0  # in the second fit
    assert not [str(w.message) for w in recwarn if "jit_compile" in str(w.message)]
    assert_same((model, histories), plain)


@pytest.mark.parametrize("name", ["batch normalisation", "several batches an update"])
def test_switched_off_the_same_is_computed_as_written(name, monkeypatch):
    case = {**CASES[name], "optimizer": NESTEROV, "steps_per_execution": 2}
    compiled = trained(case, jit_compile=TRACED)
    monkeypatch.setattr("fitkit.training.compiler.IS_ON", False)
    off = trained(case, jit_compile=TRACED)
    assert off[0]._fitkit.compiler is None and compiled[0]._fitkit.compiler is not None
    assert_same(off, trained(case), tolerance=0)
    assert_same(compiled, off)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("Adam, a short last batch", "adam"),
        pytest.param("a rate for each step", NESTEROV, marks=pytest.mark.slow),
        pytest.param("several outputs", NESTEROV, marks=pytest.mark.slow),
    ],
)
def test_several_steps_in_one_call_give_what_single_ones_give(name, optimizer):
    case = {**CASES[name], "optimizer": optimizer}
    plain = trained(case)
    model, histories = trained(case, jit_compile=TRACED, steps_per_execution=6)
    assert compiled_anew() == 0
    assert_same((model, histories), plain)


class Keeping(nn.Module):
    """A net that keeps its last output, for whoever asks later."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(6, 3).double(), None

    def forward(self, x):
        output = self.layer(x)
        self.last = output.detach() + 1
        return output


class DropsAll(fitkit.callbacks.Callback):
    """Changes between two groups of steps what the net computes."""

    def on_train_batch_end(self, batch, logs):
        self.model.net[1].p = 1.0 if self.model.global_step >= 24 else 0.0


class Toggling(nn.Module):
    """A net that computes something else at every second call."""

    def __init__(self):
        super().__init__()
        self.layer, self.odd = nn.Linear(6, 3).double(), False

    def forward(self, x):
        self.odd = not self.odd
        return self.layer(x) * (2 if self.odd else 1)


def dropping():
    return nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.0)).double()


@pytest.mark.parametrize(
    ("net", "callbacks", "group", "unchecked"),
    [
        pytest.param(perceptron, [], 8, 8, marks=pytest.mark.slow),  # eight steps a call
        (perceptron, [], 12, 5),  # four
        pytest.param(perceptron, [], 1, 32, marks=pytest.mark.slow),
        (dropping, [DropsAll], 12, 3),  # a dropout of 1 draws other numbers: as written
        (dropping, [DropsAll], 1, 0),
        pytest.param(Keeping, [], 12, 0, marks=pytest.mark.slow),
        (Keeping, [], 1, 0),
        (Toggling, [], 1, 0),
    ],
)
def test_torch_checks_a_compiled_step_after_other_code(
    net, callbacks, group, unchecked, monkeypatch
):
    def run(**more):
        model = model_of(net, steps_per_execution=group, **more)
        options = {"batch_size": 4, "epochs": 3, "verbose": 0}
        history = model.fit(X[:48], Y[:48], callbacks=[kind() for kind in callbacks], **options)
        return model, [history.history]

    found, repeat = [], GraphCalls.repeat
    monkeypatch.setattr(
        GraphCalls, "repeat", lambda graph, given: found.append(repeat(graph, given)) or found[-1]
    )
    compiled, plain = run(jit_compile=TRACED), run()
    assert_same(compiled, plain)
    assert len([one for one in found if one is not None]) == unchecked
    if net is Keeping:
        torch.testing.assert_close(compiled[0].net.last, plain[0].net.last)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ({"optimizer": partial(optim.Rprop), **COUNTED}, "can be traced"),
        ({"optimizer": partial(optim.SGD, momentum=0.9, dampening=0.5)}, "second update"),
        ({"optimizer": partial(optim.RAdam)}, "branching"),
        ({"lr_scheduler": {"scheduler": ONE_CYCLE, "interval": "step"}}, "change from step"),
    ],
)
def test_an_optimizer_that_cannot_be_traced_steps_by_itself(case, why):
    plain = trained(case)
    with pytest.warns(UserWarning, match=f"steps by itself: .*{why}"):
        compiled = trained(case, jit_compile=TRACED)
    assert_same(compiled, plain)


def test_optimizers_that_step_together_step_by_themselves():
    def run(**more):
        torch.manual_seed(1)
        net = perceptron()
        parts = [optim.SGD(net[0].parameters(), lr=0.1), optim.AdamW(net[2].parameters(), lr=0.1)]
        model = fitkit.Model(net)
        model.compile(parts, "cross_entropy", accelerator="cpu", **more)
        return model, [model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history]

    with pytest.warns(UserWarning, match="SGD and AdamW step by themselves: only one"):
        compiled = run(jit_compile=TRACED)
    assert_same(compiled, run())


def test_outputs_that_count_differently_are_weighed_in_groups_of_batches():
    case = {**COUNTED, "accumulate_grad_batches": 3}
    with pytest.warns(UserWarning, match="the net and the update.*different counts"):
        compiled = trained(case, jit_compile=TRACED)
    assert_same(compiled, trained(case))


def test_a_callback_changes_the_rate_of_the_next_steps():
    class Halve(fitkit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            self.model.optimizer.param_groups[0]["lr"] *= 0.5

    def run(**more):
        model = model_of(steps_per_execution=4, **more)
        options = {"batch_size": 4, "epochs": 2, "verbose": 0, "callbacks": [Halve()]}
        return model, [model.fit(X[:48], Y[:48], **options).history]

    assert_same(run(jit_compile=TRACED), run())


def test_a_schedule_that_watches_the_loss_gets_that_of_each_step():
    def run(**more):
        plateau = partial(optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.9)
        schedule = {"scheduler": plateau, "interval": "step", "monitor": "loss"}
        return trained({**SGD, "lr_scheduler": schedule, "steps_per_execution": 12, **more})

    assert_same(run(jit_compile=TRACED), run())


def test_a_net_that_cannot_be_traced_whole_is_named_with_its_line_and_learns_the_same():
    plain = trained({"net": Branching})
    with pytest.warns(UserWarning, match=r"compiles the net alone.*compiling.py") as seen:
        compiled = trained({"net": Branching}, jit_compile=TRACED)
    assert len([w for w in seen if "compiles the net" in str(w.message)]) == 1
    assert_same(compiled, plain)


def test_gradients_of_a_layer_that_thaws_are_computed_from_its_epoch_on():
    class Thaw(fitkit.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs):
            self.model.net[0].requires_grad_(epoch >= 2)

    def run(**more):
        model = model_of(**more)
        options = {"batch_size": 8, "epochs": 4, "verbose": 0, "callbacks": [Thaw()]}
        return model, [model.fit(X[:48], Y[:48], **options).history]

    assert_same(run(jit_compile=TRACED), run())


def test_a_training_that_was_cut_goes_on_to_the_same_bits(tmp_path):
    options = {"x": X[:48], "y": Y[:48], "batch_size": 8, "verbose": 0}
    whole, cut, resumed = (model_of(normalized, jit_compile=TRACED) for _ in range(3))
    torch.manual_seed(2)
    whole.fit(epochs=4, **options)
    torch.manual_seed(2)
    cut.fit(epochs=2, **options)
    cut.save(tmp_path / "cut.h5")
    resumed.net[0].weight.data.zero_()
    resumed.fit(epochs=4, resume_from=tmp_path / "cut.h5", **options)
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_batches_that_wait_are_copies_and_callbacks_hear_of_whole_groups():
    def batches():
        x, y = X[:8].clone(), Y[:8].clone()
        for start in range(0, 48, 8):
            x.copy_(X[start : start + 8])
            y.copy_(Y[start : start + 8])
            yield x, y

    class Numbers(fitkit.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs):
            heard.append(("begin", batch))

        def on_train_batch_end(self, batch, logs):
            heard.append(("end", batch, round(logs["loss"], 10), self.model.global_step))

    def run(**more):
        heard.clear()
        model = model_of(steps_per_execution=5, **more)
        model.fit(iter(batches()), verbose=0, callbacks=[Numbers()])
        return model.state_dict(), list(heard)

    heard = []
    (state, moments), (expected, wanted) = run(jit_compile=TRACED), run()
    assert moments == wanted
    for name, value in expected.items():
        assert torch.allclose(state[name], value, rtol=0, atol=1e-12)


def failing_after(batches):
    """So many batches of eight, then an error in reading the next one."""
    for start in range(0, 8 * batches, 8):
        yield X[start : start + 8], Y[start : start + 8]
    raise OSError("the disk is gone")


@pytest.mark.parametrize("batches", [5, pytest.param(6, marks=pytest.mark.slow)])
def test_batches_that_wait_have_been_learned_when_the_next_one_cannot_be_read(batches):
    class Noting(fitkit.callbacks.Callback):
        def on_exception(self, error):
            self.updates = self.model.global_step

    def run(**more):
        model, noting = model_of(steps_per_execution=12, **more), Noting()
        with pytest.raises(OSError, match="the disk is gone"):
            model.fit(failing_after(batches), verbose=0, callbacks=[noting])
        return model.state_dict(), noting.updates

    (state, updates), (expected, wanted) = run(jit_compile=TRACED), run()
    assert updates == wanted == batches
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)


def test_a_batch_that_does_not_fit_within_a_group_finds_those_before_it_learned(recwarn):
    """Of a shape that has a program, which refuses it, and of a new one, which runs as written."""

    def run(**more):
        model = model_of(steps_per_execution=12, **more)
        data = [(X[:8], Y[:8])] * 2 + [(X[:8, :4], Y[:8])]
        with pytest.raises(fitkit.ConfigurationError, match="4"):
            model.fit(iter(data), verbose=0)
        return model.state_dict()

    expected = run()
    for dynamic in (True, None):
        recwarn.clear()
        state = run(jit_compile={**TRACED, "dynamic": dynamic})
        warned = [one for one in recwarn if "jit_compile" in str(one.message)]
        assert bool(warned) == bool(dynamic)
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("backend='inductor' raised:\nCppCompileError: C++ compile error\n\nCommand:\ng++ x",
         "backend='inductor' raised: CppCompileError: C++ compile error"),
        ("Unsupported: a branch.\n\nfrom user code:\n   File \"a.py\", line 3, in forward\n    x",
         'Unsupported: a branch (File "a.py", line 3, in forward)'),
        ("", "RuntimeError"),
    ],
)  # fmt: skip
def test_a_reason_has_what_the_backend_raised_and_the_line(text, reason):
    assert why_uncompiled(RuntimeError(text)) == reason


def test_a_state_that_is_loaded_within_a_training_is_the_one_that_learns():
    class Load(fitkit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            optimizer = self.model.optimizer
            if batch == 2:
                self.state = copy.deepcopy(optimizer.state_dict())
            if batch == 4:
                optimizer.load_state_dict(self.state)

    def run(**more):
        model = model_of(optimizer="adam", **more)
        options = {"batch_size": 8, "epochs": 2, "verbose": 0, "callbacks": [Load()]}
        return model, [model.fit(X[:48], Y[:48], **options).history]

    assert_same(run(jit_compile=TRACED), run())


def test_norms_of_gradients_are_those_of_eager_steps():
    def run(**more):
        model, monitor = model_of(**more), fitkit.callbacks.NormMonitor()
        options = {"batch_size": 8, "verbose": 0, "callbacks": [monitor]}
        return model, [model.fit(X[:48], Y[:48], **options).history]

    assert_same(run(jit_compile=TRACED), run())


def test_a_fit_within_a_fit_leaves_the_outer_one_its_steps():
    class FitsOnce(fitkit.callbacks.Callback):
        done = False

        def on_train_batch_end(self, batch, logs=None):
            if not self.done:
                self.done = True
                self.model.fit(X[:16], Y[:16], batch_size=8, verbose=0, shuffle=False)

    def run(**more):
        model = model_of(optimizer="adam", **more)
        options = {"batch_size": 8, "epochs": 2, "verbose": 0, "callbacks": [FitsOnce()]}
        return model, [model.fit(X[:48], Y[:48], **options).history]

    assert_same(run(jit_compile=TRACED), run())


def test_other_settings_are_compiled_anew_and_a_copy_compiles_for_itself(capsys):
    """What is compiled is said, with its seconds."""
    options = {"x": X[:48], "y": Y[:48], "batch_size": 8, "verbose": 2}
    model = model_of(jit_compile=TRACED)
    model.fit(**options)
    assert capsys.readouterr().out.count("compiling the step …") == 1
    twin = copy.deepcopy(model)
    assert not twin._fitkit.compiler.of_updates.steps._compiled
    model.compile(loss="nll_loss")
    assert not model._fitkit.compiler.of_updates.steps._compiled
    twin.fit(**options)
    assert capsys.readouterr().out.count("compiling the step …") == 1


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16-mixed"},
        {"precision": "bf16-mixed", "steps_per_execution": 4, "gradient_clip_val": 0.05},
        {"precision": "bf16-true"},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "steps_per_execution": 4},
    ],
)
def test_half_precision_accumulation_and_clipping_go_together(options):
    def run(**more):
        model = model_of(lambda: perceptron().float(), **options, **more)
        history = model.fit(X.float()[:48], Y[:48], batch_size=8, epochs=3, verbose=0).history
        return model, [history]

    compiled = run(jit_compile=TRACED)
    assert compiled[0]._fitkit.compiler.of_updates.stopped is None
    assert_same(compiled, run(), 2e-2 if options.get("precision") == "bf16-true" else 1e-5)


def test_with_dynamic_shapes_a_last_batch_of_another_length_shares_the_program():
    case = {"net": lambda: nn.Linear(6, 3), "optimizer": "sgd", "rows": 53}
    compiled = trained(case, jit_compile={**TRACED, "dynamic": True})
    assert len(compiled[0]._fitkit.compiler.of_updates.steps._compiled) == 1
    assert_same(compiled, trained(case))


@HAS_COMPILER
@pytest.mark.timeout(240)
def test_a_mode_of_torchs_compiler_computes_the_same():
    case = {"net": lambda: nn.Linear(6, 3), "optimizer": "sgd"}
    compiled = trained(case, jit_compile={"mode": "max-autotune"})
    assert compiled[0]._fitkit.compiler.of_updates.stopped is None
    assert_same(compiled, trained(case))


@HAS_COMPILER
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_torchs_own_compiler_computes_the_whole_step():
    """Several steps in one call, a short last batch, dropout: the same bits from run to run."""

    def net():
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 3))

    options = {"net": net, "jit_compile": True, "steps_per_execution": 4, "rows": 53}
    one, other = trained(options), trained(options)
    assert compiled_anew() == 0
    assert_same(one, other, tolerance=0)
    assert one[0]._fitkit.compiler.of_updates.stopped is None


@HAS_COMPILER
@pytest.mark.timeout(240)
def test_torchs_own_compiler_gives_the_same_after_a_hundred_steps():
    """By a net that inductor computes wrongly, without a word, where it realizes more than it does
    unasked (`realize_opcount_threshold=4`, torch 2.13)."""

    def run(**more):
        torch.manual_seed(1)
        layers = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()
        net = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 36, 3))
        model = fitkit.Model(net.double())
        model.compile("adamw", "cross_entropy", accelerator="cpu", **more)
        torch.manual_seed(2)
        return model, [model.fit(images, labels, batch_size=8, epochs=20, verbose=0).history]

    images, labels = torch.randn(40, 1, 12, 12, dtype=torch.float64), Y[:40]
    assert_same(run(jit_compile=True), run())


def test_a_power_that_all_weights_share_is_computed_once():
    def update(weights, rate, steps):
        return weights * (rate / (1 - 0.9**steps)) + 2 * rate + weights.pow(2)

    given = torch.ones(6), torch.tensor(0.1), torch.tensor(3.0)
    graph = make_fx(update, tracing_mode="fake")(*given).graph
    faster()(graph)
    once = [node.name for node in graph.nodes if "inductor_realize_to_strides" in node.meta]
    assert once == ["pow_1", "rsub", "div"]


@pytest.mark.parametrize(
    ("dtype", "calls"),
    [
        (torch.float32, ["mm", "add", "relu"]),
        (torch.float64, ["mm", "add", "relu"]),
        (torch.bfloat16, ["addmm", "relu"]),  # two roundings instead of one
    ],
)
def test_a_bias_is_added_by_the_loop_after_the_product(dtype, calls):
    given = torch.randn(5, dtype=dtype), torch.randn(4, 3, dtype=dtype), torch.randn(3, 5).to(dtype)
    traced = make_fx(lambda *args: torch.addmm(*args).relu(), tracing_mode="fake")(*given)
    faster()(traced.graph)
    traced.recompile()
    targets = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert [target.overloadpacket.__name__ for target in targets] == calls
    torch.testing.assert_close(traced(*given), (given[0] + given[1] @ given[2]).relu())


def test_a_matrix_that_is_added_to_a_product_stays_in_it():
    given = torch.randn(4, 5), torch.randn(4, 3), torch.randn(3, 5)
    graph = make_fx(torch.addmm, tracing_mode="fake")(*given).graph
    faster()(graph)
    assert graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)


def test_no_step_is_traced_through_the_modules_that_are_there(monkeypatch, recwarn):
    """Torch would go through all of them, while other code imports some more."""

    class Modules(dict):
        def get(self, name):
            assert not torch.compiler.is_dynamo_compiling()
            return None

    monkeypatch.setattr(outputs, "sys", SimpleNamespace(modules=Modules()))
    trained(CASES["several outputs"], epochs=1, jit_compile=TRACED)
    assert not [str(one.message) for one in recwarn if "jit_compile" in str(one.message)]


class Counting(nn.Module):
    """A net whose numbers follow from how often it was called."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x) * (1 + 0.1 * self.calls)


class Growing(nn.Module):
    """A net with a float that changes, which torch compiles anew for each value."""

    def __init__(self):
        super().__init__()
        self.layer, self.factor = nn.Linear(6, 3), 1.0

    def forward(self, x):
        self.factor *= 1.1
        return self.layer(x) * self.factor


class Alternating(nn.Module):
    """A net of which a part learns in every second batch only."""

    def __init__(self):
        super().__init__()
        self.often, self.seldom, self.odd = nn.Linear(6, 3), nn.Linear(6, 3), False

    def forward(self, x):
        self.odd = not self.odd
        return self.often(x) if self.odd else self.often(x) + self.seldom(x)


def hooked(register):
    net = perceptron()
    getattr(net[0].weight, register)(
        (lambda gradient: gradient * 0) if register == "register_hook" else drop_gradient
    )
    return net


def drop_gradient(parameter):
    parameter.grad.zero_()


@pytest.mark.parametrize(
    ("net", "words"),
    [
        pytest.param(
            partial(hooked, "register_hook"), "a parameter has hooks", marks=pytest.mark.slow
        ),
        (partial(hooked, "register_post_accumulate_grad_hook"), "has hooks on its gradient"),
        (Alternating, "which parameters have a gradient changes from batch to batch"),
        (Growing, "it reads a number that changes"),
    ],
)
def test_what_a_trace_would_miss_is_computed_as_without_compiling(net, words):
    case = {"net": net, "optimizer": NESTEROV}
    plain, plain_logs = trained(case)
    torch._dynamo.reset()
    fewer = torch._dynamo.config.patch(recompile_limit=3)  # each of eight takes a second
    with fewer, pytest.warns(UserWarning, match=words):
        compiled, logs = trained({**case, "jit_compile": TRACED})
    for ours, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert logs[1]["loss"] == pytest.approx(plain_logs[1]["loss"], abs=1e-12)


def test_a_counter_of_the_nets_own_is_traced_as_a_number_that_changes(recwarn):
    case = {"net": Counting, "optimizer": NESTEROV}
    plain, plain_logs = trained(case)
    compiled, logs = trained({**case, "jit_compile": TRACED})
    assert not [w for w in recwarn if "jit_compile" in str(w.message)]
    assert compiled.net.calls == plain.net.calls
    for ours, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert logs[1]["loss"] == pytest.approx(plain_logs[1]["loss"], abs=1e-12)
