"""What is said about data and options that many users give at first, before or instead of torch."""

import functools

import numpy as np
import pytest
import torch
from torch import nn

import fitkit
from fitkit.errors import ArgumentTypeError, ConfigurationError

X, Y = torch.randn(8, 2), torch.randint(3, (8,))


def compiled(net=None, loss="cross_entropy", **arguments):
    model = fitkit.Model(net or nn.Linear(2, 3))
    model.compile("sgd", loss, accelerator="cpu", **arguments)
    return model


@pytest.mark.parametrize(
    ("column", "advice"),
    [
        (list("abababab"), r"x\['c'\]\.astype\('category'\)\.cat\.codes"),
        ("category", r"x\['c'\]\.cat\.codes"),
        (np.arange(8).astype("datetime64[D]"), r"x\['c'\]\.astype\('int64'\)"),
    ],
    ids=["texts", "categories", "dates"],
)
def test_a_frames_column_is_named_with_what_to_write(column, advice):
    pandas = pytest.importorskip("pandas")
    if isinstance(column, str):
        column = pandas.Categorical(list("abababab"))
    frame = pandas.DataFrame({"a": np.ones(8, "float32"), "c": column})
    with pytest.raises(ArgumentTypeError, match=rf"x's column 'c' has the dtype .*{advice}, or"):
        compiled().fit(frame, Y, verbose=0)
    x = frame
    if "codes" in advice:
        x["c"] = x["c"].astype("category").cat.codes
    else:
        x["c"] = x["c"].astype("int64")
    compiled().fit(x.astype("float32"), Y, verbose=0)


@pytest.mark.parametrize(
    "loss", ["cross_entropy", nn.CrossEntropyLoss(), nn.functional.cross_entropy]
)
def test_a_label_that_marks_gaps_is_asked_for_as_ignore_index(loss):
    marked = Y.clone()
    marked[3] = 255
    with pytest.raises(ConfigurationError, match=r"CrossEntropyLoss\(ignore_index=255\)"):
        compiled(loss=loss).fit(X, marked, verbose=0)
    compiled(loss=nn.CrossEntropyLoss(ignore_index=255)).fit(X, marked, verbose=0)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("watch", [False, True])
def test_sparse_gradients_cant_be_clipped_or_measured(algorithm, watch):
    net = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Flatten(), nn.Linear(4, 3))
    model = compiled(net, gradient_clip_val=1.0, gradient_clip_algorithm=algorithm)
    callbacks = [fitkit.callbacks.NormMonitor()] if watch else []
    with pytest.raises(ConfigurationError, match="sparse=True.*Write sparse=False"):
        model.fit(torch.randint(5, (8, 2)), Y, verbose=0, callbacks=callbacks)


def test_arguments_beside_a_schedules_name_belong_into_a_partial():
    with pytest.raises(ConfigurationError, match=r"partial\(CosineAnnealingLR, eta_min=…\)"):
        compiled(lr_scheduler={"scheduler": "cosine", "eta_min": 1e-3})
    cosine = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, eta_min=1e-3)
    model = compiled(lr_scheduler=cosine)
    model.fit(X, Y, epochs=2, verbose=0)
    assert model.optimizer.learning_rate == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fit_options": {"callbacks": []}}, r"fit_options has 'callbacks'.*Classifier\(callbacks"),
        ({"fit_options": {"sample_weight": X}}, r"'sample_weight'. Write fit\(sample_weight"),
        ({"compile_options": {"loss": "mse"}}, r"compile_options has 'loss'.*Classifier\(loss"),
    ],
    ids=["callbacks", "sample_weight", "loss"],
)
def test_options_that_an_estimator_takes_itself_are_refused(options, said):
    sklearn = pytest.importorskip("fitkit.sklearn")
    with pytest.raises(ConfigurationError, match=said):
        sklearn.Classifier(nn.Linear(2, 3), **options).fit(X.numpy(), Y.numpy())
