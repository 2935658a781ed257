"""`jit_compile` compiles the shapes of batches that come often; the others run as written."""

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim

import fitkit
from fitkit.extras.jit.programs import traces_gradients
from fitkit.extras.jit.shapes import Shapes
from tests.compiling import TRACED, compiled_anew

pytestmark = pytest.mark.skipif(not traces_gradients(), reason="this torch compiles no gradients")

torch.manual_seed(0)
X, Y = torch.randn(53, 6), torch.randint(3, (53,))


def compiled_shapes(lengths):
    """The lengths of batches that earn a compilation, with the number of the batch that does."""
    shapes, found = Shapes(), {}
    for number, length in enumerate(lengths):
        if shapes.earns(length):
            found.setdefault(length, number)
    return found


def test_a_shape_is_worth_a_compilation_if_it_comes_often():
    long, short = [*[32] * 31, 8] * 100, [32, 32, 8] * 30
    assert compiled_shapes(long) == {32: 0}  # one in 32
    assert compiled_shapes(short) == {32: 0, 8: 3 * 16 - 1}  # at its 16th time
    larger = [*[32] * 999, 8, *[64] * 20]  # later epochs have other batches
    assert compiled_shapes(larger) == {32: 0, 64: 1000 + 16 - 1}
    others = [[length] for length in range(1, 100)]
    assert min(compiled_shapes(map(str, [[0], *others])).values()) == 0
    assert len(compiled_shapes(map(str, [[0], *others]))) == 1 + 99 - 15  # they count together


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steps_per_execution": 4},
        {"accumulate_grad_batches": 2},
        {"lr_scheduler": "step"},
    ],
)
def test_an_epochs_short_last_batch_is_not_compiled_and_learns_as_ever(options):
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))
    if "lr_scheduler" in options:
        halves = partial(optim.lr_scheduler.StepLR, step_size=2, gamma=0.8)
        options = {"lr_scheduler": {"scheduler": halves, "interval": "step"}}

    def train(**more):
        torch.manual_seed(1)
        model = fitkit.Model(copy.deepcopy(net))
        model.compile("adam", "cross_entropy", metrics=["accuracy"], accelerator="cpu", devices=1,
                      **options, **more)  # fmt: skip
        compiled_anew()
        found = model.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0).history
        return found, model.net.state_dict(), compiled_anew()

    wanted, weights, _ = train()
    history, found, _ = train(jit_compile=TRACED)
    for name, values in wanted.items():
        assert history[name] == pytest.approx(values, abs=1e-5), name
    torch.testing.assert_close(found, weights, rtol=0, atol=1e-5)


def test_a_remainder_costs_no_compilation():
    def graphs(rows):
        model = fitkit.Model(nn.Linear(6, 3))
        model.compile("sgd", "cross_entropy", accelerator="cpu", devices=1, jit_compile=TRACED)
        compiled_anew()
        model.fit(X[:rows], Y[:rows], batch_size=8, epochs=2, verbose=0)
        return compiled_anew()

    assert graphs(53) == graphs(48) == 1
