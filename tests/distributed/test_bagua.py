"""Bagua's algorithms and named hooks on real processes: they learn, agree, end and fail cleanly."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fitkit
from fitkit.callbacks import Callback
from fitkit.optimizers import QAdamOptimizer
from fitkit.strategies import BaguaStrategy, DDPSpawnStrategy
from tests.limits import patience
from tests.nets import classification, dense
from tests.reference import assert_same_weights, plain_loop, slices

pytestmark = pytest.mark.timeout(120)

X, Y = classification(103, 6, seed=1)

ALGORITHMS = {
    "gradient_allreduce": {},
    "bytegrad": {},
    "decentralized": {"communication_interval": 2},
    "decentralized-shift_one": {"peer_selection_mode": "shift_one"},
    "low_precision_decentralized": {},
    "async": {"sync_interval_ms": 5, "warmup_steps": 3},
    "qadam": {},
    "post_local_sgd": {"warmup_steps": 5, "period": 3},
}


def strategy(name, **options):
    return BaguaStrategy(name.partition("-")[0], **{**ALGORITHMS[name], **options})


def small_net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    )


def compiled(name, net=None, devices=2, optimizer=None, **arguments):
    model = fitkit.Model(small_net() if net is None else net)
    if optimizer is None:
        optimizer = (
            (lambda parameters: QAdamOptimizer(parameters, lr=0.01, warmup_steps=20))
            if name == "qadam"
            else (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        )
    chosen = strategy(name) if isinstance(name, str) else name
    settings = {"loss": "cross_entropy", "metrics": ["accuracy"], "strategy": chosen}
    model.compile(optimizer, accelerator="cpu", devices=devices, **{**settings, **arguments})
    return model


class Agreement(Callback):
    """Notes at each epoch's end how far the ranks' weights and statistics are apart."""

    def __init__(self):
        self.apart = []

    def on_epoch_end(self, epoch, logs=None):
        numbers = [*self.model.net.parameters(), *self.model.net.buffers()]
        whole = torch.cat([number.detach().double().reshape(-1) for number in numbers]).cpu()
        everyones = self.model._fitkit.compilation.strategy.collectives.gather(whole)
        self.apart.append(max(float((one - whole).abs().max()) for one in everyones))


@pytest.fixture(scope="module")
def digits():
    found = pytest.importorskip("sklearn.datasets").load_digits()
    x = torch.tensor(found.data / 16, dtype=torch.float32)
    y = torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order], y[order]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_digits_are_learned_and_all_ranks_agree(name, digits, tmp_path):
    x, y = digits
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    )
    model, agreement = compiled(name, net), Agreement()
    history = model.fit(
        x[:1400], y[:1400], batch_size=16, epochs=4, verbose=0, shuffle=False,
        validation_data=(x[1400:], y[1400:]), callbacks=[agreement],
    ).history  # fmt: skip
    assert agreement.apart == [0.0] * 4
    net.eval()
    with torch.no_grad():
        scores = net(x[1400:])
    accuracy = float((scores.argmax(1) == y[1400:]).float().mean())
    assert accuracy > 0.92  # DDP's is 0.95
    assert history["val_accuracy"][-1] == pytest.approx(accuracy)
    assert history["val_loss"][-1] == pytest.approx(F.cross_entropy(scores, y[1400:]).item())
    values = model.evaluate(x[1400:], y[1400:], verbose=0, return_dict=True)
    assert values["accuracy"] == pytest.approx(accuracy)
    model.save(tmp_path / "digits.h5")
    again = compiled(name, torch.nn.Sequential(*net[:1], torch.nn.BatchNorm1d(32), *net[2:]))
    again.load(tmp_path / "digits.h5")
    assert_same_weights(again.net, net)
    # And it learns on, from the optimizer's state that the file had.
    history = again.fit(x[:320], y[:320], batch_size=16, epochs=1, verbose=0).history
    assert history["accuracy"][0] > 0.9


@pytest.mark.parametrize(
    ("name", "atol"),
    [("gradient_allreduce", 1e-6), ("decentralized", 1e-6), ("bytegrad", 5e-3)],
)
@pytest.mark.parametrize("accumulate", [1, 3])
# Workers are started where the number changes.
@pytest.mark.parametrize("ranks", [pytest.param(3, marks=pytest.mark.slow), 2])
def test_ranks_learn_as_one_process_with_all_their_batches(name, atol, ranks, accumulate):
    # SGD is linear in the gradient: the mean of weights is that of gradients.
    size = 12 // ranks
    chosen = BaguaStrategy(name)
    model = compiled(
        chosen,
        dense(6, 8, 3),
        ranks,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        accumulate_grad_batches=accumulate,
    )
    model.fit(X, Y, batch_size=size, epochs=2, shuffle=False, verbose=0)
    reference = dense(6, 8, 3)
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
    plain_loop(reference, sgd, slices(X, Y, 12 * accumulate), 2)
    assert_same_weights(model.net, reference, rtol=1e-5, atol=atol)


class ByTurns(fitkit.Model):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)

    def forward(self, x):
        return self.one(x) + self.two(x)

    def configure_optimizers(self):
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.one, self.two)]

    def training_step(self, batch, batch_idx, optimizer_idx):
        return F.cross_entropy(self(batch[0]), batch[1])


class ByHand(ByTurns):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            loss = F.cross_entropy(self(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ByTurns, ByHand])
@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad", "low_precision_decentralized"])
def test_several_optimizers_and_own_updates_keep_the_ranks_together(kind, name):
    models = [kind(), kind()]
    for model, ranks in zip(models, (1, 2), strict=True):
        chosen = BaguaStrategy(name) if ranks > 1 else "auto"
        model.compile(accelerator="cpu", devices=ranks, strategy=chosen)
        model.fit(X[:96], Y[:96], batch_size=12 // ranks, epochs=2, shuffle=False, verbose=0)
    atol = 1e-6 if name == "gradient_allreduce" else 0.03
    assert_same_weights(*models, rtol=1e-5, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decentralized-shift_one", "async", "qadam", "post_local_sgd"])
def test_a_cut_training_goes_on_as_if_it_had_not_been_cut(name, tmp_path):
    # Free of the clock: async's rounds are as far apart as epochs' ends.
    options = {"sync_interval_ms": 1e9} if name == "async" else {}

    def fit(model, epochs, **more):
        model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, **more)
        return [parameter.detach().clone() for parameter in model.net.parameters()]

    class Save(Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                self.model.save(self.path)

    save = Save()
    save.path = str(tmp_path / "middle.h5")
    chosen = strategy(name, **options)
    whole = fit(compiled(chosen, optimizer=_optimizer(name)), 3, callbacks=[save])
    resumed = compiled(strategy(name, **options), optimizer=_optimizer(name))
    rest = fit(resumed, 3, resume_from=save.path)
    for one, two in zip(whole, rest, strict=True):
        assert torch.allclose(one, two, atol=1e-6)


def _optimizer(name):
    if name == "qadam":
        return lambda parameters: QAdamOptimizer(parameters, lr=0.01, warmup_steps=5)
    return lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("name", ["low_precision_decentralized", "async"])
def test_a_look_at_the_model_in_mid_epoch_sees_all_ranks_mean(name):
    class Looks(Callback):
        def __init__(self):
            self.means, self.found = [], []

        def on_train_batch_end(self, batch, logs=None):
            if batch != 3:
                return
            weight = self.model.net[-1].weight
            ranks = self.model._fitkit.compilation.strategy.collectives
            everyones = ranks.gather(weight.detach().cpu())
            assert not torch.equal(everyones[0], everyones[1])
            self.means.append(torch.stack(everyones).mean(0))
            self.model.predict(X[:9], verbose=0)
            self.found.append(weight.detach().clone())

    model, looks, agreement = compiled(name), Looks(), Agreement()
    if name == "async":  # no round on the way, which would add to the mean
        model.compile(strategy=BaguaStrategy("async", sync_interval_ms=1e9))
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[looks, agreement])
    assert len(looks.means) == 2 and agreement.apart == [0.0, 0.0]
    for mean, found in zip(looks.means, looks.found, strict=True):
        assert torch.allclose(mean, found, atol=1e-6)


@pytest.mark.slow
def test_parameters_that_are_set_free_in_mid_training_are_exchanged_too():
    class SetFree(Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.net[0].requires_grad_(epoch > 0)

    for name in ("low_precision_decentralized", "qadam"):
        model, agreement = compiled(name), Agreement()
        before = model.net[0].weight.detach().clone()
        model.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[SetFree(), agreement])
        assert agreement.apart == [0.0] * 3, (name, agreement.apart)
        assert not torch.equal(model.net[0].weight, before)


@pytest.mark.slow
def test_qadam_says_which_optimizer_it_needs():
    model = compiled("qadam", optimizer="adam")
    with pytest.raises(fitkit.ConfigurationError, match="optimizer='qadam'"):
        model.fit(X, Y, epochs=1, verbose=0)
    model.compile(optimizer="qadam")
    model.fit(X, Y, epochs=1, verbose=0)


@pytest.mark.parametrize(
    ("name", "failing"),
    [
        ("async", 1),
        pytest.param("decentralized-shift_one", 0, marks=pytest.mark.slow),
        pytest.param("async", 0, marks=pytest.mark.slow),
        pytest.param("decentralized-shift_one", 1, marks=pytest.mark.slow),
        pytest.param("bytegrad", 0, marks=pytest.mark.slow),
        pytest.param("bytegrad", 1, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_ends_the_call_everywhere_and_the_next_one_works(name, failing):
    class Fails(Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4 and self.model.global_rank == failing:
                raise ValueError("on purpose")

    model = compiled(name)
    with pytest.raises((fitkit.WorkerError, ValueError), match="on purpose"):
        model.fit(X, Y, batch_size=8, epochs=50, verbose=0, callbacks=[Fails()])
    assert not torch.distributed.is_initialized()
    model.fit(X, Y, batch_size=8, epochs=1, verbose=0)


@pytest.mark.parametrize(
    ("hook", "state"),
    [
        ("fp16", None),
        ("bf16", None),
        ("powersgd", {"start_powerSGD_iter": 2, "matrix_approximation_rank": 4}),
    ],
)
def test_named_hooks_average_gradients_of_several_buckets(hook, state):
    torch.manual_seed(0)
    nets = []
    for chosen in (None, hook):
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(6, 600), torch.nn.Tanh(), torch.nn.Linear(600, 600),
            torch.nn.Tanh(), torch.nn.Linear(600, 3),
        )  # fmt: skip
        options = {"comm_hook": chosen, "comm_hook_state": state} if chosen else {}
        model = compiled(
            DDPSpawnStrategy(bucket_cap_mb=1, timeout=30, **options),
            net,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )
        losses = model.fit(X, Y, batch_size=16, epochs=4, shuffle=False, verbose=0).history["loss"]
        nets.append((net, losses))
    (exact, exact_losses), (net, losses) = nets
    assert not torch.equal(net[2].weight, exact[2].weight)
    if hook != "powersgd":
        assert torch.allclose(net[2].weight, exact[2].weight, atol=2e-3)
    assert np.allclose(losses, exact_losses, atol=0.02 if hook != "powersgd" else 0.1)


@pytest.mark.slow
def test_torchrun_s_ranks_agree_after_an_async_training(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import torch, fitkit
        fitkit.set_seed(0)
        from fitkit.strategies import BaguaStrategy
        x, y = torch.randn(96, 6), torch.randint(3, (96,))
        model = fitkit.Model(torch.nn.Linear(6, 3))
        model.compile("sgd", "cross_entropy", accelerator="cpu",
                      strategy=BaguaStrategy("async", sync_interval_ms=1))
        for _ in range(2):
            model.fit(x, y, batch_size=4, epochs=3, verbose=0)
            value = model.evaluate(x, y, verbose=0)
        found = torch.nn.functional.cross_entropy(model.net(x), y).item()
        assert abs(value - found) < 1e-6, (value, found)
        print(f"rank {model.global_rank}: {model.net.weight.sum().item():.9f}", flush=True)
        """)
    )
    folder = os.path.dirname(os.path.dirname(fitkit.__file__))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": folder}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone",
         str(script)],
        capture_output=True, text=True, timeout=patience(100), env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    sums = {line.split()[-1] for line in done.stdout.splitlines() if line.startswith("rank")}
    assert len(sums) == 1, done.stdout
