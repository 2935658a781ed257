"""What every strategy must do, whichever it is: one that is registered is tested here unasked.

Each trains the digits on two ranks in a script of its own, evaluates, predicts, saves, goes on
from the file on one rank, and fails well.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from fitkit.distributed.strategies import STRATEGIES
from fitkit.extras.bagua import ALGORITHMS
from tests.limits import patience
from tests.nets import dense
from tests.reference import plain_loop, slices

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

load_digits = pytest.importorskip("sklearn.datasets").load_digits

ENGINES = {"deepspeed", "horovod", "xla", "tpu"}
"""Those of other packages, which have environments of their own: tests/engines."""
EXACT_ALGORITHMS = {"gradient_allreduce"}
SAMPLES, EPOCHS = 1408, 8

SCRIPT = """
    import json, sys
    import torch, fitkit
    from fitkit.strategies import BaguaStrategy
    from sklearn.datasets import load_digits

    name, folder = sys.argv[1:]
    kind, _, algorithm = name.partition(":")
    strategy = BaguaStrategy(algorithm) if algorithm else kind
    ranks = 1 if kind == "single_device" else 2
    whole = kind in ("dp", "ddp2")  # one batch for all devices of a node
    optimizer = "qadam" if algorithm == "qadam" else "sgd"
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32")
    known, new = (x[:1408], y[:1408]), (x[1408:], y[1408:])

    def made(**hardware):
        torch.manual_seed(0)
        layers = torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
        model = fitkit.Model(torch.nn.Sequential(*layers))
        rate = 0.01 if algorithm == "qadam" else 0.3
        model.compile(optimizer, "cross_entropy", metrics=["accuracy"], learning_rate=rate)
        model.compile(accelerator="cpu", **hardware)
        return model

    def fit(model, epochs, **options):
        size = 64 if whole else 64 // ranks
        model.fit(*known, batch_size=size, epochs=epochs, shuffle=False, verbose=0, **options)

    result = {}
    model = made(devices=ranks, strategy=strategy)
    fit(model, 8)
    scores = model.evaluate(*new, verbose=0, return_dict=True)
    guesses = model.predict(new[0], verbose=0).argmax(1)
    result["accuracy"] = scores["accuracy"]
    result["of predictions"] = float((guesses == new[1]).mean())
    if model.is_global_zero:
        torch.save(model.net.state_dict(), f"{folder}/trained.pt")

    half = made(devices=ranks, strategy=strategy)
    fit(half, 4)
    half.save(f"{folder}/half.h5")
    if half.is_global_zero:  # which has written the file
        rest = made(devices=1, strategy="single_device")
        rest.fit(*known, batch_size=64, epochs=8, shuffle=False, verbose=0,
                 resume_from=f"{folder}/half.h5")
        result["epochs"] = rest.history.epoch
        result["resumed"] = rest.evaluate(*new, verbose=0, return_dict=True)["accuracy"]
        torch.save(rest.net.state_dict(), f"{folder}/resumed.pt")
        print(json.dumps(result), flush=True)

    class Failing(fitkit.callbacks.Callback):
        stops_alike = True
        def on_train_batch_end(self, batch, logs):
            if batch == 2 and self.model.global_rank == ranks - 1 - whole:
                raise ArithmeticError("on purpose")
    fit(made(devices=ranks, strategy=strategy), 1, callbacks=[Failing()])
"""


def cases():
    classes = []
    for name in STRATEGIES:
        if name in ENGINES or STRATEGIES[name] in classes or name == "bagua":
            continue
        classes.append(STRATEGIES[name])
        yield name
    yield from (f"bagua:{algorithm}" for algorithm in ALGORITHMS)


@pytest.fixture(scope="module")
def reference():
    """Weights and held-out accuracy after plain PyTorch's training of the whole batches."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    net = dense(64, 32, 10, activation=torch.nn.ReLU)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    plain_loop(net, optimizer, slices(x[:SAMPLES], y[:SAMPLES], 64), EPOCHS)
    guesses = net(x[SAMPLES:]).argmax(1)
    return net.state_dict(), (guesses == y[SAMPLES:]).float().mean().item()


@pytest.mark.parametrize("name", list(cases()))
def test_a_strategy_trains_evaluates_predicts_saves_resumes_and_fails_well(
    name, tmp_path, reference
):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    root = str(Path(__file__).parents[2])
    ended = subprocess.run(
        [sys.executable, str(script), name, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=patience(200),
    )
    assert ended.returncode != 0 and "on purpose" in ended.stderr, ended.stderr
    result = json.loads(ended.stdout.strip().splitlines()[-1])
    weights, accuracy = reference
    assert result["accuracy"] == pytest.approx(result["of predictions"], abs=1e-7)
    # The file's four epochs are in the history, and those after it.
    assert result["epochs"] == list(range(EPOCHS))
    _kind, _, algorithm = name.partition(":")
    if algorithm and algorithm not in EXACT_ALGORITHMS:
        assert result["accuracy"] >= accuracy - 0.01 and result["resumed"] >= accuracy - 0.01
        return
    for file in ("trained.pt", "resumed.pt"):
        for key, value in torch.load(tmp_path / file).items():
            torch.testing.assert_close(value, weights[key], atol=1e-5, rtol=0)
