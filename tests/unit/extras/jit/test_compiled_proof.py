"""`jit_compile`: compiled code that gives other numbers is found at its first call."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fitkit
from fitkit.extras.jit import graph_calls, proof
from fitkit.extras.jit.programs import traces_gradients
from tests.compiling import HAS_COMPILER, TRACED, Branching

pytestmark = pytest.mark.skipif(not traces_gradients(), reason="this torch compiles no gradients")

torch.manual_seed(0)
X, Y = torch.randn(64, 6), torch.randint(3, (64,))


def net(middle):
    torch.manual_seed(1)
    # A bias before a BatchNorm has a gradient of rounding alone, which Adam divides by its size.
    first = nn.Linear(6, 8, bias=middle is not MIDDLES["norm"])
    return nn.Sequential(first, middle(), nn.Linear(8, 3))


MIDDLES = {"plain": nn.Tanh, "norm": lambda: nn.BatchNorm1d(8), "dropout": lambda: nn.Dropout(0.5)}


def spoil_output(given, found):
    return (found[0] * 1.01, *found[1:])


def spoil_last_output(given, found):  # without an update, a gradient
    return (*found[:-1], found[-1] * 1.01)


def spoil_weight(given, found):
    with torch.no_grad():
        next(one for one in given if one.shape == (3, 8)).mul_(1.001)
    return found


def spoil_statistic(given, found):
    with torch.no_grad():
        next(one for one in given if one.shape == (8,) and not one.requires_grad).add_(0.01)
    return found


def spoil_draw(given, found):
    torch.rand(1)
    return found


def spoils(how):
    """A backend that computes a graph as written, but for one thing."""

    def backend(graph, inputs):
        def run(*given):
            return how(given, tuple(graph.forward(*given)))

        return run

    return backend


KINDS = {
    one.__name__: one for one in list(vars().values()) if "spoil_" in getattr(one, "__name__", "")
}
for name, how in KINDS.items():
    torch._dynamo.register_backend(spoils(how), name=name)


def model_of(made, jit_compile, **more):
    model = fitkit.Model(made)
    model.compile(
        torch.optim.Adam(made.parameters(), 0.01), "cross_entropy", accelerator="cpu", devices=1,
        jit_compile=jit_compile, **more,
    )  # fmt: skip
    return model


def trained(middle, jit_compile, **more):
    """A trained model, its losses, and the next random number."""
    model = model_of(net(MIDDLES[middle]), jit_compile, **more)
    torch.manual_seed(2)
    history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return model, history["loss"], torch.rand(1)


def assert_same(found, wanted):
    for one, other in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other))
    for name, value in wanted[0].state_dict().items():
        torch.testing.assert_close(found[0].state_dict()[name], value, rtol=1e-5, atol=1e-6)


def said(seen, code="FK07"):
    return [str(one.message) for one in seen if code in str(one.message)]


CASES = [
    ("plain", "spoil_output", {}),
    ("plain", "spoil_last_output", {"accumulate_grad_batches": 2}),
    ("plain", "spoil_weight", {}),
    ("plain", "spoil_weight", {"accumulate_grad_batches": 2}),
    ("plain", "spoil_weight", {"steps_per_execution": 4}),
    ("norm", "spoil_output", {"steps_per_execution": 4}),
    ("norm", "spoil_statistic", {}),
    ("norm", "spoil_statistic", {"accumulate_grad_batches": 2}),
    ("dropout", "spoil_output", {}),
    ("dropout", "spoil_draw", {}),
    ("dropout", "spoil_weight", {"accumulate_grad_batches": 2}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_that_gives_other_numbers_is_computed_as_written(case):
    middle, backend, more = case
    wanted = trained(middle, False, **more)
    with pytest.warns(UserWarning, match="FK072") as seen:
        found = trained(middle, {"backend": backend}, **more)
    assert_same(found, wanted)
    assert len(said(seen)) == 1
    assert "differs by" in said(seen)[0] or "random numbers" in said(seen)[0]


@pytest.mark.parametrize(
    ("middle", "more"),
    [
        ("plain", {}),
        ("norm", {"accumulate_grad_batches": 2}),
        ("dropout", {"steps_per_execution": 4}),
    ],
)
def test_a_comparison_leaves_nothing_behind(middle, more):
    wanted = trained(middle, False, **more)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "jit_compile")  # torch has warnings of its own
        found = trained(middle, TRACED, **more)
    assert_same(found, wanted)
    assert found[0]._fitkit.compiler.net.given_up is None


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_evaluations_and_predictions_are_compared_too(verb):
    made = nn.Sequential(
        *[net(nn.Tanh)[:1], *[nn.Linear(8, 8) for _ in range(12)], nn.Linear(8, 3)]
    )
    given = (X,) if verb == "predict" else (X, Y)
    wanted = getattr(model_of(copy.deepcopy(made), False), verb)(*given, batch_size=8, verbose=0)
    model = model_of(made, {"backend": "spoil_output"}, steps_per_execution=4)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = [getattr(model, verb)(*given, batch_size=8, verbose=0) for _ in range(2)]
    for one in found:
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(wanted))
    assert len(said(seen)) == 1


class Broken(Branching):
    """Branches on its data between two layers with statistics: torch makes several graphs."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        return super().forward(torch.dropout(self.norm(self.first(x)), 0.5, self.training))


def spoil_gradient(given, found):
    return tuple(one + 0.01 * (one - one.detach()) for one in found)


GRAPHS = {
    "an output": (spoil_output, 0),
    "a gradient": (spoil_gradient, 0),
    "a statistic": (spoil_statistic, 0),
    "a later output": (spoil_output, 1),
    "a later gradient": (spoil_gradient, 1),
}


@pytest.mark.parametrize("kind", GRAPHS)
def test_a_net_alone_is_compared_graph_by_graph(kind):
    how, number = GRAPHS[kind]
    torch._dynamo.reset()  # its limit counts what other tests have compiled of the same code

    def backend(graph, inputs):
        made.append(graph)
        return spoils(how)(graph, inputs) if len(made) == number + 1 else graph.forward

    found, made = [], []
    for options in (False, {"backend": backend}):
        torch.manual_seed(1)
        model = model_of(Broken(), options)
        torch.manual_seed(2)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            history = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history
        found.append((model, history["loss"], torch.rand(1)))
    assert_same(*reversed(found))
    assert len(said(seen)) == 1


@HAS_COMPILER
def test_a_loop_of_several_steps_is_compared_too(monkeypatch):
    looped = graph_calls.looped

    def spoiled(*given):
        loop, number = looped(*given), given[2]

        def call(*inputs):
            count = int(inputs[number])
            return spoil_weight(inputs, loop(*inputs)) if count > 1 else loop(*inputs)

        return call

    monkeypatch.setattr(graph_calls, "looped", spoiled)
    wanted = trained("plain", False)
    with pytest.warns(UserWarning, match="FK072") as seen:
        found = trained("plain", True, steps_per_execution=4)
    assert_same(found, wanted)
    assert len(said(seen)) == 1


def test_a_chaotic_function_is_not_blamed():
    def chaotic(x, factor):
        for _ in range(40):
            x = 3.9 * x * (1 - x)
        return (x,)

    x = torch.rand(16, 16)
    facts = proof.Facts(lambda x: chaotic(x, 1), 1.2e-7, ["x"], True)
    proof.check(facts, lambda x: chaotic(x * (1 + 1.2e-7), 1), [x])
    with pytest.raises(proof.MisfitError, match="output 0 differs by"):
        proof.check(facts, lambda x: (chaotic(x, 1)[0] * 1e3,), [x])


def test_a_gradient_of_rounding_alone_is_not_blamed():
    """A bias before a BatchNorm: Adam divides its gradient, which is rounding, by its size."""

    def update(factor):
        def step(bias):
            rounding = torch.tensor(1.0) * (bias * factor).sum().sin() * 0
            noise = (bias * 1e7).sin() * factor + rounding
            bias.sub_(0.01 * noise.sign())

        return step

    facts = proof.Facts(update(1.0), 1.2e-7, ["bias"], True)
    proof.check(facts, update(-1.0), [torch.randn(1)])


def test_a_bias_before_a_batch_norm_is_not_blamed():
    """What is left of its gradient are the roundings of all operations, in any order of these."""

    def second_moment(normalize, bias):
        bias = bias.clone().requires_grad_()
        with torch.enable_grad():
            loss = F.cross_entropy(normalize(images + bias).flatten(1), labels)
        return (torch.autograd.grad(loss, bias)[0] ** 2,)

    def by_hand(x):
        centred = x - x.sum((0, 2, 3), keepdim=True) / x[:, 0].numel()
        return centred * (centred.square().mean((0, 2, 3), keepdim=True) + 1e-5).rsqrt()

    def by_torch(x):
        return F.batch_norm(x, None, None, training=True)

    torch.manual_seed(0)
    images, labels = torch.randn(64, 16, 14, 14), torch.randint(10, (64,))
    facts = proof.Facts(lambda bias: second_moment(by_torch, bias), 1.2e-7, ["bias"], True)
    for seed in range(5):
        torch.manual_seed(seed)
        bias = torch.randn(16, 1, 1)
        proof.check(facts, lambda bias: second_moment(by_hand, bias), [bias])
        with pytest.raises(proof.MisfitError):
            proof.check(
                facts, lambda bias: second_moment(lambda x: by_hand(x) + x / 10_000, bias), [bias]
            )


def test_copies_share_memory_as_their_originals_do():
    whole = torch.arange(12.0).reshape(3, 4) + 0.5
    row, column = proof._copied([whole[1], whole[:, 2]], 0.0, torch.Generator())
    row.zero_()
    assert column.tolist() == [2.5, 0.0, 10.5] and whole.min() == 0.5


def test_nothing_is_compared_when_that_is_off(monkeypatch):
    monkeypatch.setattr(proof, "IS_ON", False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "jit_compile")  # torch has warnings of its own
        trained("plain", {"backend": "spoil_weight"})


def reference():
    made = net(nn.Tanh)
    optimizer = torch.optim.Adam(made.parameters(), 0.01)
    for start in [*range(0, 64, 8)] * 2:
        optimizer.zero_grad()
        F.cross_entropy(made(X[start : start + 8]), Y[start : start + 8]).backward()
        optimizer.step()
    return made


def test_the_numbers_are_those_of_plain_pytorch():
    with pytest.warns(UserWarning, match="FK072"):
        model, _, _ = trained("plain", {"backend": "spoil_weight"})
    for found, wanted in zip(model.parameters(), reference().parameters(), strict=True):
        torch.testing.assert_close(found, wanted)
