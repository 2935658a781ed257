"""`load_model`: a compiled model from a file, also where the optimizer was an instance."""

import numpy as np
import pytest
import torch

import fitkit

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(24, 4)).astype("float32"), np.arange(24) % 3


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))


def fit(model, **arguments):
    fitkit.set_seed(1)
    return model.fit(X, Y, batch_size=8, verbose=0, **arguments).history["loss"]


MAKERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99)),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("trained", [True, False])
def test_load_model_of_a_model_compiled_with_a_torch_optimizer(name, trained, tmp_path):
    model = fitkit.Model(net())
    model.compile(MAKERS[name](model.parameters()), "cross_entropy", metrics=["accuracy"])
    if trained:
        fit(model, epochs=2)
    model.save(tmp_path / "m.h5")
    other = fitkit.load_model(tmp_path / "m.h5", net())
    assert type(other.optimizer).__name__ == name
    assert model.optimizer.defaults.items() <= other.optimizer.defaults.items()
    assert fit(other) == fit(model)
    other.save(tmp_path / "again.h5")
    fitkit.load_model(tmp_path / "again.h5", net())


def test_groups_with_rates_of_their_own_come_back(tmp_path):
    model = fitkit.Model(net())
    groups = [
        {"params": model.net[2].parameters(), "lr": 0.5},
        {"params": model.net[0].parameters(), "weight_decay": 0.1},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.25, momentum=0.5)
    model.compile(optimizer, "cross_entropy", lr_scheduler="cosine")
    fit(model, epochs=2)
    model.save(tmp_path / "m.h5")
    other = fitkit.load_model(tmp_path / "m.h5", net())
    own, found = model.optimizer.param_groups, other.optimizer.param_groups
    assert [group["params"][0].shape for group in found] == [(3, 5), (5, 4)]
    for name in ("lr", "initial_lr", "weight_decay", "momentum"):
        assert [g[name] for g in found] == [g[name] for g in own], name
    assert fit(other, epochs=2) == fit(model, epochs=2)


def test_an_optimizer_of_a_class_of_the_users_own_is_still_to_be_compiled(tmp_path):
    class Adam(torch.optim.Adam):
        pass

    model = fitkit.Model(net())
    model.compile(Adam(model.parameters()), "cross_entropy")
    model.save(tmp_path / "m.h5")
    with pytest.raises(fitkit.CheckpointError, match=r"optimizer weren't given by name"):
        fitkit.load_model(tmp_path / "m.h5", net())


def test_another_net_is_told_as_before(tmp_path):
    model = fitkit.Model(net())
    model.compile(torch.optim.Adam(model.parameters()), "cross_entropy")
    model.save(tmp_path / "m.h5")
    with pytest.raises(fitkit.CheckpointError):
        fitkit.load_model(tmp_path / "m.h5", torch.nn.Linear(4, 3))
