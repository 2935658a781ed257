"""Matrices of scipy.sparse as inputs: the numbers are those of the dense matrices."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import fitkit

sparse = pytest.importorskip("scipy.sparse")

rng = np.random.default_rng(0)
X = (rng.normal(size=(30, 6)) * (rng.random((30, 6)) < 0.3)).astype("float64")
Y = np.arange(30) % 3
FORMATS = ("csr_matrix", "csc_matrix", "coo_matrix", "lil_matrix", "csr_array", "coo_array")


def trained(x, y=Y, seed=0, net=None, **arguments):
    fitkit.set_seed(seed)
    model = fitkit.Model(net or torch.nn.Linear(6, 3))
    model.compile("sgd", "cross_entropy", metrics=["accuracy"], learning_rate=0.1)
    history = model.fit(x, y, batch_size=8, verbose=0, **{"epochs": 2, **arguments})
    return model, history.history


@pytest.mark.parametrize("kind", FORMATS)
def test_keras_and_skorch_train_on_csr(kind):
    x = getattr(sparse, kind)(X)
    dense, expected = trained(X, validation_split=0.2)
    model, found = trained(x, validation_split=0.2)
    assert found == expected
    assert model.evaluate(x, Y, verbose=0) == dense.evaluate(X, Y, verbose=0)
    assert np.array_equal(model.predict(x, verbose=0), dense.predict(X, verbose=0))
    assert model.train_on_batch(x, Y) == dense.train_on_batch(X, Y)
    assert np.array_equal(model.predict_on_batch(x), dense.predict_on_batch(X))


def test_sparse_validation_data_and_a_sparse_input_beside_a_dense_one():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(12, 3)

        def forward(self, a, b):
            return self.layer(torch.cat([a, b], dim=1))

    _, expected = trained((X, X), net=Two(), validation_data=((X, X), Y))
    csr = sparse.csr_matrix(X)
    _, found = trained((csr, X), net=Two(), validation_data=((X, csr), Y))
    assert set(found) == set(expected) and len(found["val_loss"]) == 2


def test_a_generator_may_give_sparse_batches():
    def batches(make):
        return [(make(X[i : i + 10]), Y[i : i + 10]) for i in (0, 10, 20)]

    _, expected = trained(batches(np.asarray), None)
    _, found = trained(batches(sparse.csr_matrix), None)
    assert found == expected


def test_samples_of_a_dataset_that_are_sparse_matrices_are_to_be_made_dense():
    data = [(sparse.csr_matrix(X[i : i + 1]), Y[i]) for i in range(30)]
    with pytest.raises(fitkit.ConfigurationError, match=r"sparse matrices of scipy.*toarray"):
        trained(DataLoader(data, batch_size=8), None)


def test_sparse_targets_and_sparse_arrays_of_strange_kinds_are_refused():
    with pytest.raises(fitkit.ConfigurationError, match=r"y is a sparse matrix.*y\.toarray\(\)"):
        trained(X, sparse.csr_matrix(X))
    with pytest.raises(fitkit.ConfigurationError, match=r"x\.toarray\(\)"):
        trained(sparse.coo_array(Y), Y)


@pytest.mark.slow
def test_two_processes_train_on_csr_as_one():
    fitkit.set_seed(0)
    model = fitkit.Model(torch.nn.Linear(6, 3))
    model.compile("sgd", "cross_entropy", devices=2, accelerator="cpu", strategy="ddp_spawn")
    history = model.fit(sparse.csr_matrix(X), Y, batch_size=8, shuffle=False, verbose=0)
    fitkit.set_seed(0)
    dense = fitkit.Model(torch.nn.Linear(6, 3))
    dense.compile("sgd", "cross_entropy")
    expected = dense.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    assert history.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-5)
