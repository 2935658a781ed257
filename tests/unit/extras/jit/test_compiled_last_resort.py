"""`jit_compile`: where torch's compiler itself fails, the net is computed as written."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fitkit
from fitkit.extras.jit.programs import traces_gradients

pytestmark = pytest.mark.skipif(not traces_gradients(), reason="this torch compiles no gradients")

torch.manual_seed(0)
X, Y = torch.randn(32, 4), torch.randint(3, (32,))


class Shuffled(nn.Module):
    """Its trace raises GuardOnDataDependentSymNode, which isn't an error of dynamo's."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        steps = [self.a, self.a]
        for place in torch.zeros(2, dtype=torch.int64):
            x = steps[place](x)
        return self.b(x)


class Broken(nn.Module):
    """Torch makes three graphs of it; the first and the last have statistics and draw numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)) for _ in range(2)
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.first(x)
        if float(x.sum()) > 1e6:
            x = x + 1
        return self.head(self.last(x))


class Wrong(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.layer, self.error = nn.Linear(4, 3), error

    def forward(self, x):
        if self.error is not None:
            raise self.error
        return self.layer(x)


def plain():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def fails(error, first=0):
    """A backend that compiles no graph, from one on."""
    count = 0

    def backend(graph, inputs):
        nonlocal count
        count += 1
        if count > first:
            raise error
        return graph.forward

    return backend


def learned(net):
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for start in range(0, 32, 8):
        optimizer.zero_grad()
        F.cross_entropy(net(X[start : start + 8]), Y[start : start + 8]).backward()
        optimizer.step()
    return net


def compiled(net, jit_compile, **more):
    model = fitkit.Model(net)
    model.compile(
        torch.optim.SGD(net.parameters(), 0.1), "cross_entropy", accelerator="cpu", devices=1,
        jit_compile=jit_compile, **more,
    )  # fmt: skip
    return model


def assert_learns(make, jit_compile, **more):
    """Assert that a net learns what plain PyTorch teaches it; return what fitkit said."""
    torch.manual_seed(1)
    net = make()
    right = copy.deepcopy(net)
    torch.manual_seed(2)
    learned(right)
    drawn = torch.rand(1)
    torch.manual_seed(2)
    model = compiled(net, jit_compile, **more)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
        assert torch.rand(1) == drawn
        found = model.predict(X, batch_size=8, verbose=0)
    for name, value in right.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value)
    torch.testing.assert_close(torch.as_tensor(found), right.eval()(X).detach())
    return [str(one.message) for one in seen if "FK073" in str(one.message)]


ERRORS = [RuntimeError("no C++ compiler"), AssertionError(), KeyError("x"), NotImplementedError()]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_compiler_that_fails_is_named_once_and_nothing_else_changes(error):
    assert len(assert_learns(plain, {"backend": fails(error)})) == 1


@pytest.mark.parametrize("steps", [1, 4])
def test_whole_steps_too(steps):
    name = f"fails_{steps}"
    torch._dynamo.register_backend(fails(KeyError("x")), name=name)
    assert len(assert_learns(plain, {"backend": name}, steps_per_execution=steps)) == 1


@pytest.mark.parametrize("make", [plain, Broken])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_what_ran_before_a_graph_that_fails_does_not_run_again(make, first):
    said = assert_learns(make, {"backend": fails(RuntimeError("no compiler"), first)})
    assert len(said) <= 1


def test_a_graph_that_fails_when_it_runs_is_computed_as_written():
    def backend(graph, inputs):
        def run(*given):
            raise AssertionError("expected size 3")

        return run

    assert len(assert_learns(Broken, {"backend": backend})) == 1


@pytest.mark.parametrize("steps", [1, 4])
def test_a_trace_that_fails_in_another_way_than_dynamos_is_left_out(steps):
    assert_learns(Shuffled, {"backend": "aot_eager"}, steps_per_execution=steps)


def test_a_frame_that_cannot_be_traced_at_all_is_computed_as_written(monkeypatch):
    from torch._dynamo import exc, symbolic_convert

    def failing(self):
        raise exc.InternalTorchDynamoError("mine")

    monkeypatch.setattr(symbolic_convert.InstructionTranslator, "run", failing)
    said = assert_learns(plain, {"backend": "aot_eager"})
    assert len(said) == 1
    assert "mine" in said[0]


@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("compiles", [True, False])
def test_an_error_of_the_nets_own_reaches_the_user(verb, compiles):
    backend = "aot_eager" if compiles else fails(RuntimeError("no compiler"))
    model = compiled(Wrong(LookupError("the net's own error")), {"backend": backend})
    given = (X,) if verb == "predict" else (X, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(LookupError, match="the net's own error"):
            getattr(model, verb)(*given, verbose=0)


def test_an_error_of_the_nets_own_says_nothing_of_the_compiler():
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    model = compiled(plain(), {"backend": backend})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(fitkit.FitkitError, match="FK001"):
            model.predict(torch.randn(8, 5), verbose=0)
        model.predict(X, verbose=0)
    assert made


def test_fullgraph_asks_for_the_compilers_error():
    model = compiled(plain(), {"backend": fails(RuntimeError("no compiler")), "fullgraph": True})
    with pytest.raises(Exception, match="no compiler"):
        model.predict(X, verbose=0)


def test_compile_starts_anew():
    model = compiled(plain(), {"backend": fails(RuntimeError("no compiler"))})
    with pytest.warns(UserWarning, match="FK073"):
        model.predict(X, verbose=0)
    made = []
    model.compile(jit_compile={"backend": lambda graph, inputs: made.append(1) or graph.forward})
    model.predict(X, verbose=0)
    assert made
