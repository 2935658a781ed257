"""`jit_compile` on two ranks: the numbers of plain PyTorch on the undivided batches."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import fitkit
from fitkit.extras.jit.programs import traces_gradients
from tests.limits import patience

pytestmark = pytest.mark.skipif(not traces_gradients(), reason="this torch compiles no gradients")

SCRIPT = """
import copy
import os
import warnings

import torch
from torch import nn
from torch.nn import functional as F

import fitkit
from fitkit.extras.jit.programs import Programs
from fitkit.extras.jit.tracing import UncompiledError

RANK = int(os.environ.get("RANK", 0))
# Traced and differentiated as for torch's own compiler, but computed operation by operation.
TRACED = {"backend": "aot_eager"}
draw = torch.Generator().manual_seed(3)
X = torch.randn(53, 6, dtype=torch.float64, generator=draw)
Y = torch.randint(0, 3, (53,), generator=draw)
IGNORED = torch.where(torch.arange(53) % 16 < 7, -100, Y)  # more of rank 0's than of rank 1's


def net(norm=False):
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(8) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(6, 8), middle, nn.Linear(8, 3)).double()


def compiled(made, kind=fitkit.Model, **more):
    model = kind(made)
    hardware = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}
    more = {"jit_compile": TRACED, **more}
    model.compile("adam", "cross_entropy", learning_rate=0.01, **hardware, **more)
    return model


def fit(model, x, y, epochs=1, **more):
    options = {"batch_size": 8, "shuffle": False, "verbose": 0, **more}
    return model.fit(x, y, epochs=epochs, **options).history


def reference(made, y, size=16, epochs=2, clip=None, rows=53):
    '''Each update of a whole batch of all ranks.'''
    optimizer = torch.optim.Adam(made.parameters(), lr=0.01)
    for _ in range(epochs):
        for start in range(0, rows, size):
            part = slice(start, min(start + size, rows))
            optimizer.zero_grad()
            F.cross_entropy(made(X[part]), y[part]).backward()
            if clip:
                nn.utils.clip_grad_norm_(made.parameters(), clip)
            optimizer.step()
    return made


def assert_same(model, wanted, atol=1e-10):
    for (name, found), value in zip(model.net.state_dict().items(), wanted.state_dict().values()):
        apart = found.cpu() - value
        assert apart.abs().max() < atol, (name, apart)


def assert_compiled(model):
    made = model._fitkit.compiler.of_updates
    assert made.stopped is None and made.update_stopped is None
    return made


def compiled_anew():
    return torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)


def counts_accumulation_and_clipping():
    '''A last group of one batch, of five rows; a second fit compiles nothing.'''
    model = compiled(net(), accumulate_grad_batches=2, gradient_clip_val=0.05)
    first = fit(model, X, IGNORED)
    assert_compiled(model)
    torch._dynamo.utils.counters.clear()
    second = fit(model, X, IGNORED, epochs=2, initial_epoch=1)
    assert compiled_anew() == 0
    assert_same(model, reference(net(), IGNORED, size=32, clip=0.05))
    eager = compiled(net(), jit_compile=False, accumulate_grad_batches=2, gradient_clip_val=0.05)
    both = fit(eager, X, IGNORED, epochs=2)["loss"]
    found = [*first["loss"], *second["loss"]]
    assert max(abs(a - b) for a, b in zip(found, both)) < 1e-10, (found, both)


def batch_normalisation_and_a_resumed_fit():
    '''Each rank normalises its rows; the statistics are rank 0's.'''
    wanted = net(norm=True)
    optimizer = torch.optim.Adam(wanted.parameters(), lr=0.01)
    for start in [0, 16, 32] * 2:
        gradients = []
        for rank in (0, 1):
            rows = slice(start + 8 * rank, start + 8 * rank + 8)
            replica = copy.deepcopy(wanted)
            loss = F.cross_entropy(replica(X[rows]), Y[rows])
            gradients.append(torch.autograd.grad(loss, list(replica.parameters())))
            statistics = replica[1].state_dict() if rank == 0 else statistics
        for parameter, *both in zip(wanted.parameters(), *gradients):
            parameter.grad = sum(both) / 2
        optimizer.step()
        names = ("running_mean", "running_var", "num_batches_tracked")
        wanted[1].load_state_dict({n: statistics[n] for n in names}, strict=False)
    model = compiled(net(norm=True), jit_compile=False)
    fit(model, X[:48], Y[:48])
    model.save("cut.h5")
    resumed = compiled(net(norm=True))
    fit(resumed, X[:48], Y[:48], epochs=2, resume_from="cut.h5")
    assert_compiled(resumed)
    if RANK == 0:
        # A bias before a BatchNorm has no gradient but rounding, which Adam divides by its size.
        assert_same(resumed, wanted, atol=1e-8)
    torch.save([*resumed.parameters()], f"rank{RANK}.pt")


class Own(fitkit.Model):
    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("double", 2 * loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


def an_own_step_and_a_batch_for_one_rank_alone():
    model = compiled(net(), Own)
    history = fit(model, X[:33], Y[:33], epochs=2)
    assert_compiled(model)
    assert_same(model, reference(net(), Y, rows=33))
    eager = fit(compiled(net(), Own, jit_compile=False), X[:33], Y[:33], epochs=2)
    assert history.keys() == eager.keys()
    for name, values in eager.items():
        assert max(abs(a - b) for a, b in zip(history[name], values)) < 1e-10, name


def a_rank_that_cannot_compile(what, warns):
    run = Programs.run

    def failing(self, *arguments, **named):
        if RANK == 1 and self.what == what:
            raise UncompiledError("no compiler here")
        return run(self, *arguments, **named)

    Programs.run = failing
    model = compiled(net())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(model, X[:48], Y[:48], epochs=2)
    Programs.run = run
    assert_same(model, reference(net(), Y, rows=48))
    texts = [str(w.message) for w in seen if "no compiler here" in str(w.message)]
    assert len(texts) == warns[RANK], texts


def a_rank_whose_compiler_is_wrong(what, warns):
    '''Its first graph makes the update, its second one computes gradients.'''
    made = 0

    def backend(graph, inputs):
        nonlocal made
        made += 1
        is_wrong = RANK == 1 and made == what

        def run(*given):
            found = graph.forward(*given)
            if is_wrong:
                with torch.no_grad():
                    (given if what == 1 else found)[-1].mul_(1.01)
            return found

        return run

    torch._dynamo.register_backend(backend, name=f"wrong_{what}")
    model = compiled(net(), jit_compile={"backend": f"wrong_{what}"})
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(model, X[:48], Y[:48], epochs=2)
    assert_same(model, reference(net(), Y, rows=48))
    texts = [str(w.message) for w in seen if "FK072" in str(w.message)]
    assert len(texts) == warns[RANK] and all("differs by" in text for text in texts), texts
    jit = model._fitkit.compiler.of_updates
    assert (jit.stopped is not None) == bool(warns[RANK])
    assert (jit.update_stopped is not None) == (what == 1)  # alike on all ranks
    torch.save([*model.parameters()], f"wrong{what}_{RANK}.pt")


if __name__ == "__main__":
    counts_accumulation_and_clipping()
    batch_normalisation_and_a_resumed_fit()
    an_own_step_and_a_batch_for_one_rank_alone()
    a_rank_that_cannot_compile("the step", (0, 1))
    a_rank_that_cannot_compile("the update", (1, 1))
    a_rank_whose_compiler_is_wrong(1, (1, 1))
    a_rank_whose_compiler_is_wrong(2, (0, 1))
    print("all the same")
"""


@pytest.mark.timeout(240)
def test_two_compiled_functions_and_an_exchange_give_what_undivided_batches_give(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    ran = subprocess.run(
        [sys.executable, "train.py"], capture_output=True, text=True, cwd=tmp_path,
        timeout=patience(230), env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, "all the same\n"), ran.stderr
    for name in ("rank", "wrong1_", "wrong2_"):
        ranks = [torch.load(tmp_path / f"{name}{rank}.pt") for rank in (0, 1)]
        assert all(map(torch.equal, *ranks))  # to the last bit


class FailsOnRankOne(fitkit.callbacks.Callback):
    def on_train_batch_end(self, batch, logs):
        if batch == 4 and self.model.global_rank == 1:
            raise KeyError("mine")


@pytest.mark.timeout(90)
def test_an_error_of_one_rank_reaches_the_caller_past_compiled_functions():
    model = fitkit.Model(nn.Linear(4, 3))
    model.compile(
        "sgd", "cross_entropy", accelerator="cpu", devices=2, jit_compile={"backend": "aot_eager"}
    )
    x, y = torch.randn(64, 4), torch.randint(3, (64,))
    with pytest.raises(fitkit.WorkerError, match="mine"):
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[FailsOnRankOne()])
