"""What was pickled on a GPU is read where there is none, and trains there as it would have here."""

import copy
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import fitkit
from fitkit.sklearn import Classifier
from tests.nets import classification

X, Y = classification(32, 8)

ELSEWHERE = """
import pickle, sys, numpy, torch
assert not torch.cuda.is_available()
model, x, y = pickle.load(open(sys.argv[1], "rb"))
if hasattr(model, "predict_proba"):
    found = model.predict_proba(x)
else:
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    found = model.predict(x, verbose=0)
numpy.save(sys.argv[2], found)
"""


def model_on_gpu(**given):
    torch.manual_seed(0)
    # A bias before a BatchNorm has no gradient but rounding, which Adam divides by its size.
    first = nn.Linear(8, 6, bias=False)
    model = fitkit.Model(nn.Sequential(first, nn.BatchNorm1d(6), nn.Linear(6, 3)))
    model.compile("adam", "cross_entropy", learning_rate=0.01, **given)
    return model


def fit(model):
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model


def read_elsewhere(folder, *pickled):
    (folder / "kept.pkl").write_bytes(pickle.dumps(pickled))
    subprocess.run(
        [sys.executable, "-c", ELSEWHERE, folder / "kept.pkl", folder / "found.npy"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=True, timeout=100,
    )  # fmt: skip
    return np.load(folder / "found.npy")


def test_a_model_goes_on_learning(tmp_path):
    model = fit(model_on_gpu(devices=1))
    found = read_elsewhere(tmp_path, model, X, Y)
    assert next(model.net.parameters()).device.type == "cuda"
    np.testing.assert_allclose(found, fit(model).predict(X, verbose=0), atol=1e-5)


def test_an_estimator_answers(tmp_path):
    net = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3))
    estimator = Classifier(net, epochs=1, compile_options={"devices": 1}).fit(X.numpy(), Y.numpy())
    found = read_elsewhere(tmp_path, estimator, X.numpy(), None)
    np.testing.assert_allclose(found, estimator.predict_proba(X.numpy()), atol=1e-5)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy])
def test_a_copy_stays_on_the_device(way):
    model = fit(model_on_gpu(devices=1))
    assert next(way(model).parameters()).device == next(model.parameters()).device


def test_tied_weights_stay_one_and_the_optimizers_are_the_nets():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    net[1].weight = net[0].weight
    model = fitkit.Model(net)
    model.compile(torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), "mse", devices=1)
    model.fit(X, X, verbose=0)
    made = pickle.loads(pickle.dumps(model))
    assert made.net[0].weight is made.net[1].weight
    (group,) = made.optimizer.param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in made.net.parameters()]
    made.fit(X, X, verbose=0)
    model.fit(X, X, verbose=0)
    torch.testing.assert_close(made.net[0].weight.cpu(), net[0].weight.cpu())
