"""`strategy="deepspeed"` with the real package: the numbers of plain PyTorch, on gloo."""

import functools
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.nn import functional as F

import fitkit
from fitkit.extras.launchers.workers import end_workers
from fitkit.strategies import DeepSpeedStrategy
from tests.limits import patience
from tests.nets import classes_in_turn, dense
from tests.reference import assert_same_optimizer_state, assert_same_weights, plain_loop, slices

pytest.importorskip("deepspeed", reason="deepspeed isn't installed here: make test-engines")
pytestmark = pytest.mark.timeout(200)

X, Y = classes_in_turn(52, 6, seed=1)


@pytest.fixture(autouse=True, scope="module")
def no_workers_left():
    yield
    end_workers()


def net():
    return dense(6, 33, 31, 3)


def on(stage, ranks=2):
    return {"accelerator": "cpu", "devices": ranks, "strategy": DeepSpeedStrategy(stage)}


def plainly(module, optimizer, epochs, group=1, size=12, **options):
    """The last batch or group is as short as the data make it."""
    plain_loop(module, optimizer, slices(X, Y, size * group), epochs, **options)


def fit(model, ranks=2, **options):
    return model.fit(X, Y, batch_size=12 // ranks, shuffle=False, verbose=0, **options)


same = functools.partial(assert_same_weights, atol=1e-5)
same_state = functools.partial(assert_same_optimizer_state, atol=1e-5, settings=True)


def attributes(module):
    return {
        name: {
            key: set(value) if isinstance(value, dict) else None
            for key, value in vars(part).items()
        }
        for name, part in module.named_modules()
    }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_and_the_whole_state_are_those_of_plain_pytorch(stage):
    module, reference = net(), net()
    given = torch.optim.AdamW(
        [{"params": module[:2].parameters()}, {"params": module[2:].parameters(), "lr": 0.003}],
        0.01,
    )
    before, parameters = attributes(module), list(module.parameters())
    model = fitkit.Model(module)
    model.compile(
        given,
        "cross_entropy",
        metrics="accuracy",
        gradient_clip_val=0.5,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
        **on(stage),
    )
    history = fit(model, epochs=2, validation_data=(X[:37], Y[:37])).history
    adam = torch.optim.AdamW(
        [
            {"params": reference[:2].parameters()},
            {"params": reference[2:].parameters(), "lr": 0.003},
        ],
        0.01,
    )
    plainly(reference, adam, 2, clip=0.5, scheduler=torch.optim.lr_scheduler.StepLR(adam, 1, 0.5))
    same(module, reference)
    assert model.optimizer is given
    same_state(given, adam)
    with torch.no_grad():
        expected = F.cross_entropy(reference(X[:37]), Y[:37]).item()
        outputs = reference(X)
    assert history["val_loss"][-1] == pytest.approx(expected, abs=1e-5)
    loss = model.evaluate(X[:37], Y[:37], verbose=0)[0]
    assert loss == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(
        torch.tensor(model.predict(X, verbose=0)), outputs, rtol=0, atol=1e-5
    )
    # Nothing of the engine is left on the model.
    assert [id(p) for p in module.parameters()] == [id(p) for p in parameters]
    assert attributes(module) == before and not any(vars(p) for p in parameters)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accumulated_groups_count_each_sample_once_also_the_short_last_one(stage):
    model, reference = fitkit.Model(net()), net()
    model.compile(
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        "cross_entropy",
        accumulate_grad_batches=3,
        gradient_clip_val=0.05,
        **on(stage),
    )
    fit(model, epochs=2)
    sgd = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
    plainly(reference, sgd, 2, clip=0.05, group=3)
    same(model.net, reference)
    same_state(model.optimizer, sgd)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_save_in_the_middle_is_whole_and_goes_on_anywhere(stage, tmp_path):
    model, reference = fitkit.Model(net()), net()
    model.compile("adam", "cross_entropy", learning_rate=0.01, **on(stage))
    save = fitkit.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: model.save(tmp_path / f"{epoch}.h5")
    )
    fit(model, epochs=2, callbacks=save)
    adam = torch.optim.Adam(reference.parameters(), 0.01, fused=True)  # as one by name
    plainly(reference, adam, 1)
    for name, ranks, options in (
        ("plain", 1, {"devices": 1, "accelerator": "cpu"}),
        ("spread", 3, on(stage, 3)),
    ):
        resumed = fitkit.Model(net())
        resumed.compile("adam", "cross_entropy", learning_rate=0.01, **options)
        resumed.load(tmp_path / "0.h5")
        same(resumed.net, reference)
        same_state(resumed.optimizer, adam)
        fit(resumed, ranks, epochs=2, resume_from=tmp_path / "0.h5")
        same(resumed.net, model.net)
        same_state(resumed.optimizer, model.optimizer)
        assert name and resumed.history.epoch == [0, 1]


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_that_a_callback_loads_are_gone_on_from(stage):
    class Back(fitkit.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.weights = {k: v.clone() for k, v in self.model.state_dict().items()}

        def on_epoch_end(self, epoch, logs):
            if epoch == 0:
                self.model.load_state_dict(self.weights)

    model, reference = fitkit.Model(net()), net()
    model.compile(torch.optim.SGD(model.parameters(), 0.1), "cross_entropy", **on(stage))
    fit(model, epochs=2, callbacks=Back())
    plainly(reference, torch.optim.SGD(reference.parameters(), 0.1), 1)
    same(model.net, reference)


@pytest.mark.parametrize("stage", [1, 2])
def test_numbers_that_a_callback_changes_in_place_are_gone_on_from(stage):
    def limit(module):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.clamp_(-0.05, 0.05)

    model, reference = fitkit.Model(net()), net()
    model.compile(torch.optim.SGD(model.parameters(), 0.1), "cross_entropy", **on(stage))
    fit(
        model,
        callbacks=fitkit.callbacks.LambdaCallback(on_batch_end=lambda batch, logs: limit(model)),
    )
    sgd = torch.optim.SGD(reference.parameters(), 0.1)
    for batch in slices(X, Y, 12):
        plain_loop(reference, sgd, [batch])
        limit(reference)
    same(model.net, reference)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_training_that_fails_leaves_weights_and_state_from_before(stage):
    model = fitkit.Model(net())
    model.compile("adam", "cross_entropy", **on(stage))
    fit(model)
    before = [p.detach().clone() for p in model.parameters()]
    moments = model.optimizer.state[next(model.parameters())]["exp_avg"].clone()

    def fail(batch, logs):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), pytest.warns(UserWarning, match="from before fit"):
        fit(model, callbacks=fitkit.callbacks.LambdaCallback(on_batch_end=fail))
    for parameter, kept in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, kept)
    assert torch.equal(model.optimizer.state[next(model.parameters())]["exp_avg"], moments)
    fit(model)  # and it can be trained again


def test_half_precision_learns():
    model = fitkit.Model(net())
    for precision in ("bf16-mixed", "bf16-true"):
        for stage in (1, 2, 3):
            model = fitkit.Model(net())
            model.compile(
                "adam", "cross_entropy", learning_rate=0.01, precision=precision, **on(stage)
            )
            history = fit(model, epochs=8).history["loss"]
            assert history[-1] < history[0] - 0.02, (precision, stage)
            kind = torch.bfloat16 if precision == "bf16-true" else torch.float32
            assert {p.dtype for p in model.parameters()} == {kind}


SCRIPT = """
    import torch, fitkit
    torch.manual_seed(0)
    x, y = torch.randn(53, 6), torch.randint(3, (53,))
    model = fitkit.Model(torch.nn.Linear(6, 3))
    model.compile("adam", "cross_entropy", accelerator="cpu", strategy="deepspeed")
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    loss = model.evaluate(x, y, verbose=0)
    total = sum(p.double().sum().item() for p in model.parameters())
    state = model.optimizer.state_dict()["state"][0]["exp_avg"].double().sum().item()
    open(f"rank{model.global_rank}.txt", "w").write(f"{model.world_size} {loss} {total} {state}")
"""


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_ranks_of_torchrun_and_of_deepspeeds_own_launcher_train_alike(launcher, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    start = {
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        "deepspeed": [
            "-m",
            "deepspeed.launcher.runner",
            "--num_gpus",
            "2",
            "--master_port",
            "29611",
        ],
    }[launcher]
    result = subprocess.run(
        [sys.executable, *start, str(path)], cwd=tmp_path,
        timeout=patience(150), capture_output=True,
        text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path),
                        "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"})  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    first, second = ((tmp_path / f"rank{rank}.txt").read_text() for rank in (0, 1))
    assert first == second and first.startswith("2 ")
