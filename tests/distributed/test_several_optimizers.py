"""Several optimizers that step together, over ranks: the updates of one process."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW

import fitkit
from tests.nets import dense, normal
from tests.reference import assert_same_weights, slices

pytestmark = pytest.mark.timeout(120)

X = normal(48, 6, seed=1).double()
Y = torch.arange(48) % 3


def pair(module):
    """Both keep a state; the first has the first layer."""
    first, *rest = [list(layer.parameters()) for layer in module if isinstance(layer, nn.Linear)]
    return [SGD(first, lr=0.1, momentum=0.9), AdamW([p for ps in rest for p in ps], lr=0.01)]


def fit(model, strategy, **options):
    model.compile(accelerator="cpu", devices=2, strategy=strategy)
    model.fit(X, Y, batch_size=6, shuffle=False, verbose=0, **options)


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_sharded", "fsdp"])
def test_weights_after_a_resume_are_those_of_plain_pytorch(strategy, tmp_path):
    reference = dense(6, 8, 8, 3).double()
    own = pair(reference)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in own]
    for _ in range(2):
        for x, y in slices(X, Y, 12):
            reference.zero_grad()
            F.cross_entropy(reference(x), y).backward()
            nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
            for each in own:
                each.step()
        for scheduler in schedulers:
            scheduler.step()

    def made():
        module = dense(6, 8, 8, 3).double()
        model = fitkit.Model(module)
        step = {"scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)}
        model.compile(pair(module), "cross_entropy", lr_scheduler=step, gradient_clip_val=0.05)
        return model

    model = made()
    fit(model, strategy, epochs=1)
    model.save(tmp_path / "m.h5")
    again = made()
    fit(again, strategy, epochs=2, resume_from=tmp_path / "m.h5")
    assert_same_weights(again.net, reference, atol=1e-9)


@pytest.mark.parametrize("strategy", ["ddp_spawn", "fsdp"])
def test_muon_learns_on_two_ranks_as_on_one(strategy):
    losses = []
    for chosen in ("single_device", strategy):
        module = dense(6, 8, 8, 3)
        model = fitkit.Model(module)
        model.compile("muon", "cross_entropy", learning_rate=0.02, accelerator="cpu")
        model.compile(devices=1 if chosen == "single_device" else 2, strategy=chosen)
        size = 12 if chosen == "single_device" else 6
        data = {"batch_size": size, "shuffle": False, "verbose": 0}
        history = model.fit(X.float(), Y, epochs=3, **data)
        losses.append(history.history["loss"])
    # Torch's Muon computes in bfloat16, where sums over parts round otherwise.
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
