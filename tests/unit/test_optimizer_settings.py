"""`compile({"name": "adam", "eps": 1e-5})`: an optimizer's settings beside its name."""

import pytest
import torch

import fitkit
from tests.nets import classification, linear

X, Y = classification(50, 4)
QUIET = {"verbose": 0, "batch_size": 16, "shuffle": False}


def compiled(optimizer, **arguments):
    model = fitkit.Model(linear(4, 3, seed=1))
    model.compile(optimizer, "cross_entropy", **arguments)
    return model


def test_keras_adam_with_another_epsilon_is_torchs_with_these_settings():
    model = compiled({"name": "Adam", "eps": 1e-3, "betas": (0.8, 0.9)}, learning_rate=0.01)
    model.fit(X, Y, epochs=2, **QUIET)
    net = linear(4, 3, seed=1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, eps=1e-3, betas=(0.8, 0.9), fused=True)
    for _ in range(2):
        for x, y in zip(X.split(16), Y.split(16), strict=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    assert torch.equal(model.net.weight, net.weight)


def test_compile_changes_the_rate_and_keeps_state_and_settings():
    model = compiled({"name": "sgd", "momentum": 0.9}, learning_rate=0.1)
    model.fit(X, Y, **QUIET)
    before = model.optimizer
    model.compile(learning_rate=0.02)
    assert model.optimizer is before
    assert [before.param_groups[0][key] for key in ("lr", "momentum")] == [0.02, 0.9]


def test_load_model_makes_it_again(tmp_path):
    model = compiled({"name": "adamw", "betas": (0.8, 0.9), "weight_decay": 0.1})
    model.fit(X, Y, **QUIET)
    model.save(tmp_path / "m.h5")
    again = fitkit.load_model(tmp_path / "m.h5", linear(4, 3))
    assert type(again.optimizer).__name__ == "AdamW"
    assert again.optimizer.defaults["betas"] == (0.8, 0.9)
    again.fit(X, Y, **QUIET)
    model.fit(X, Y, **QUIET)
    assert torch.equal(model.net.weight, again.net.weight)


@pytest.mark.parametrize(("given", "message"), [
    ({"name": "adam", "epsilon": 1}, r"'epsilon', but Adam has none.*mean 'eps'.*amsgrad"),
    ({"name": "adam", "lr": 1e-3}, r"argument of compile.*learning_rate=0.001"),
    ({"name": "adam", "learning_rate": 1e-3}, "argument of compile"),
    ({"name": "adm"}, "Did you mean 'Adam'"),
    ({"eps": 1e-3}, "without the optimizer's name"),
    ({"class_name": "Adam", "config": {}}, "without the optimizer's name"),
    ({"name": "adam", "eps": -1.0}, "could not be made.*epsilon"),
])  # fmt: skip
def test_what_cant_be_is_refused_by_compile(given, message):
    with pytest.raises(fitkit.ConfigurationError, match=f"(?s){message}"):
        compiled(given)
