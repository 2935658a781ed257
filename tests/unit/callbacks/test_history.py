"""History: the record of a training, as a user of Keras reads it."""

import pytest
import torch

import fitkit


def test_history_of_loss_is_short_for_its_dicts_entry():
    model = fitkit.Model(torch.nn.Linear(1, 1))
    model.compile("sgd", "mse", metrics=["mae"])
    history = model.fit(torch.ones(4, 1), torch.ones(4, 1), epochs=2, verbose=0)
    assert history["loss"] is history.history["loss"]
    assert "mae" in history
    assert "val_loss" not in history
    assert list(history) == ["loss", "mae"]
    with pytest.raises(KeyError, match=r"no 'los'. Did you mean 'loss'\? It has: loss, mae"):
        history["los"]


def test_an_empty_history_says_so():
    with pytest.raises(KeyError, match="nothing yet"):
        fitkit.History()["loss"]
