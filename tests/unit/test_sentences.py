"""What is said about data and options that many users give at first, before or instead of torch."""

import functools
import warnings

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
    sklearn = pytest.importorskip("fitkit.extras.sklearn")
    with pytest.raises(ConfigurationError, match=said):
        sklearn.Classifier(nn.Linear(2, 3), **options).fit(X.numpy(), Y.numpy())


class Graphs:
    """A library's batch: an object with tensors, its number of samples, and `to`."""

    num_graphs = 4

    def __init__(self, x, y):
        self.x, self.y = x, y

    def to(self, device, non_blocking=False):
        return Graphs(self.x.to(device), self.y.to(device))


class OfGraphs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, data):
        return self.layer(data.x)


def test_targets_may_be_an_attribute_of_a_batch():
    batches = [Graphs(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(3)]
    model, net = compiled(OfGraphs(), "mse", target="y", learning_rate=0.1), nn.Linear(3, 1)
    net.load_state_dict(model.net.layer.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model.fit(batches, verbose=0)
    for batch in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(batch.x), batch.y).backward()
        optimizer.step()
    assert torch.equal(model.net.layer.weight, net.weight)
    with pytest.raises(ArgumentTypeError, match=r"a graph, goes into a list: \[batch\]"):
        model.fit(batches[0], verbose=0)
    model.fit(batches[:1], verbose=0)


class Losses(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.layer, self.names = nn.Linear(2, 1), names

    def forward(self, x):
        loss = self.layer(x).square().mean()
        return loss if self.names is None else dict.fromkeys(self.names, loss)


def test_a_net_that_returns_its_loss_is_told_what_to_write():
    with pytest.raises(ConfigurationError, match="write loss=lambda output, target: output"):
        compiled(Losses(None), None).fit(X, verbose=0)
    with pytest.raises(ConfigurationError, match=r"self\.log_dict\(losses\)"):
        compiled(Losses(["a", "b"]), None).fit(X, verbose=0)
    compiled(Losses(None), lambda output, target: output).fit(X, Y, verbose=0)


def test_names_of_files_are_no_weights():
    batch = (X, Y, [f"{index}.png" for index in range(8)])
    with pytest.raises(ConfigurationError, match="holds a str.*names of files, in a collate_fn"):
        compiled().fit([batch], verbose=0)


def test_of_several_data_sets_one_is_asked_for():
    data = torch.utils.data.TensorDataset(X, Y)
    with pytest.raises(ArgumentTypeError, match=r"a dict of 2 data sets. Give one: x\['train'\]"):
        compiled().fit({"train": data, "test": data}, verbose=0)


def test_one_target_for_several_outputs_is_asked_for_its_output():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 3)

        def forward(self, x):
            return self.layer(x), x

    with pytest.raises(ConfigurationError, match=r'write loss=\{"output_0": …\}'):
        compiled(Both()).fit(X, Y, verbose=0)
    compiled(Both(), {"output_0": "cross_entropy"}).fit(X, Y, verbose=0)


def test_outputs_with_the_samples_in_the_second_dimension_are_named_once():
    class TimeMajor(nn.Module):
        def __init__(self, batch_first):
            super().__init__()
            self.layer, self.batch_first = nn.GRU(2, 3), batch_first

        def forward(self, x):
            found = self.layer(x.transpose(0, 1))[0]
            return found.transpose(0, 1) if self.batch_first else found

    x = torch.randn(8, 5, 2)
    with pytest.warns(UserWarning, match=r"shape \(5, 4, 3\) the samples are the second"):
        compiled(TimeMajor(False)).predict(x, batch_size=4, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = compiled(TimeMajor(True)).predict(x, batch_size=4, verbose=0)
    assert found.shape == (8, 5, 3)
