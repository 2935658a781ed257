"""Event files, read back by TensorBoard's own reader."""

import os
import random

import numpy as np
import pytest
import torch

import fitkit
from fitkit import callbacks, loggers
from fitkit.errors import ArgumentTypeError, CheckpointError, ConfigurationError
from tests.nets import regression

pytest.importorskip("tensorboard")
X, Y = regression(20, 2)


def compiled(net=None):
    torch.manual_seed(0)
    model = fitkit.Model(net or torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)))
    model.compile("sgd", "mse", metrics=["mae"], learning_rate=0.1)
    return model


def fit(model, *given, **options):
    arguments = {"epochs": 2, "batch_size": 4, "verbose": 0, "validation_data": (X, Y), **options}
    return model.fit(X, Y, callbacks=list(given), **arguments)


def events_in(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), {"scalars": 0, "histograms": 0, "images": 0})
    return found.Reload()


def scalars(folder, tag):
    return [(event.step, event.value) for event in events_in(folder).Scalars(tag)]


def test_it_writes_kerass_folders_and_names(tmp_path):
    history = fit(compiled(), callbacks.TensorBoard(tmp_path, update_freq=2)).history
    for run, prefix in (("train", ""), ("validation", "val_")):
        for name in ("loss", "mae"):
            steps, values = zip(*scalars(tmp_path / run, f"epoch_{name}"), strict=True)
            assert steps == (0, 1)
            assert values == pytest.approx(history[prefix + name], rel=1e-6)
    assert [step for step, _ in scalars(tmp_path / "train", "batch_loss")] == [2, 4, 6, 8, 10]
    assert "batch_mae" in events_in(tmp_path / "train").Tags()["scalars"]


def test_histograms_hold_all_finite_weights(tmp_path):
    model = compiled()
    fit(model, callbacks.TensorBoard(tmp_path, histogram_freq=2), epochs=3)
    events = events_in(tmp_path / "train")
    assert events.Tags()["histograms"] == [name for name, _ in model.net.named_parameters()]
    first, last = events.Histograms("0.weight")
    assert (first.step, last.step) == (0, 2)
    weights = model.net[0].weight.detach().numpy()
    assert last.histogram_value.num == 6
    assert last.histogram_value.sum == pytest.approx(float(np.float64(weights).sum()), rel=1e-5)

    class Spoils(callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            with torch.no_grad():
                model.net[0].weight.fill_(float("nan"))

    fit(model, Spoils(), callbacks.TensorBoard(tmp_path / "nan", histogram_freq=1), epochs=1)
    assert "0.weight" not in events_in(tmp_path / "nan" / "train").Tags()["histograms"]


class Branches(torch.nn.Module):
    """A forward that can't be followed without numbers."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(2, 1))

    def forward(self, x):
        return self.inner(x) if x.sum() > 0 else -self.inner(x)


def test_the_graph_has_the_modules_and_how_they_follow_one_another(tmp_path):
    from tensorboard.compat.proto.graph_pb2 import GraphDef

    def graph(folder):
        return events_in(folder / "train").Graph()

    fit(compiled(), callbacks.TensorBoard(tmp_path / "a"), epochs=1)
    nodes = {node.name: node for node in graph(tmp_path / "a").node}
    assert isinstance(graph(tmp_path / "a"), GraphDef)
    assert nodes["1"].op == "Linear" and list(nodes["1"].input) == ["0"]
    fit(compiled(Branches()), callbacks.TensorBoard(tmp_path / "b"), epochs=1)
    assert [node.name for node in graph(tmp_path / "b").node] == ["inner/0"]
    fit(compiled(), callbacks.TensorBoard(tmp_path / "c", write_graph=False), epochs=1)
    assert not events_in(tmp_path / "c" / "train").Tags()["graph"]


class Remembers(torch.nn.Module):
    """A forward that leaves traces and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.register_buffer("calls", torch.zeros(()))
        self.seen = []

    def forward(self, x):
        self.calls += 1
        self.seen.append(random.random())
        return self.layer(x)


def test_following_the_net_for_its_graph_leaves_no_trace_in_it(tmp_path):
    found = []
    for given in ([], [callbacks.TensorBoard(tmp_path)]):
        random.seed(0)
        model, hooked = compiled(Remembers()), []
        model.net.register_forward_hook(lambda module, x, y, hooked=hooked: hooked.append(type(y)))
        fit(model, *given, epochs=1)
        found.append((model.net.calls.item(), model.net.seen, hooked))
    assert found[0] == found[1]
    nodes = {node.name: list(node.input) for node in events_in(tmp_path / "train").Graph().node}
    assert nodes["layer"] == ["x"]


def test_settings_are_texts_and_hyperparameters(tmp_path):
    history = fit(compiled(), callbacks.TensorBoard(tmp_path)).history
    events = events_in(tmp_path / "train")
    text = events.Tensors("hyperparameters/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| learning_rate | 0.1 |" in text
    assert "_hparams_/session_start_info" in events.summary_metadata
    ends = scalars(tmp_path / "train", "hparam/val_loss")
    assert ends == [(1, pytest.approx(history["val_loss"][-1]))]


def test_a_resumed_training_draws_each_epoch_once(tmp_path):
    saver = callbacks.ModelCheckpoint(tmp_path / "{epoch}.h5")
    fit(compiled(), saver, callbacks.TensorBoard(tmp_path / "logs"), epochs=3)
    first = tmp_path / "1.h5"
    model = compiled()
    fit(model, callbacks.TensorBoard(tmp_path / "logs"), epochs=4, resume_from=first)
    assert [s for s, _ in scalars(tmp_path / "logs" / "validation", "epoch_loss")] == [0, 1, 2, 3]


def test_figures_are_images_and_stay_as_they_are(tmp_path):
    figure_module = pytest.importorskip("matplotlib.figure")
    figure = figure_module.Figure(figsize=(2, 1), dpi=50)
    figure.add_subplot().plot([1, 2])
    canvas = figure.canvas
    logger = loggers.TensorBoard(tmp_path)

    class Draws(callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            logger.log_figure("curve", figure)

    fit(compiled(), Draws(), logger, epochs=1)
    image = events_in(tmp_path / "train").Images("curve")[0]
    assert (image.width, image.height) == (100, 50)
    assert figure.canvas is canvas


def test_speed_is_written_where_asked(tmp_path):
    fit(compiled(), callbacks.TensorBoard(tmp_path, write_steps_per_second=True), epochs=1)
    assert scalars(tmp_path / "train", "epoch_steps_per_second")[0][1] > 0


def test_arguments_that_are_left_out_or_wrong_are_refused(tmp_path):
    callbacks.TensorBoard(tmp_path, profile_batch=0, write_images=False)  # Keras's "off"
    with pytest.raises(ConfigurationError, match="torch.profiler"):
        callbacks.TensorBoard(tmp_path, profile_batch=2)
    with pytest.raises(ArgumentTypeError, match="histogram_freq"):
        callbacks.TensorBoard(tmp_path, histogram_frequency=2)
    with pytest.raises(ConfigurationError, match="histogram_freq"):
        callbacks.TensorBoard(tmp_path, histogram_freq=-1)
    assert not list(tmp_path.iterdir())


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path, monkeypatch):
    """The URL of a folder; nothing may stay in the local one from where files are uploaded."""
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    (tmp_path / "private").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "private"))
    store.store.clear()
    yield "memory://runs/first" if request.param == "memory" else f"file://{tmp_path}/runs/first"
    assert not list((tmp_path / "private").iterdir())
    assert not [name for name in store.store if "unfinished" in name]
    store.store.clear()


def test_at_a_url_tensorboard_reads_what_it_reads_in_a_folder(url, tmp_path):
    here = tmp_path / "here"
    for place in (url, here):
        board = callbacks.TensorBoard(place, histogram_freq=1, update_freq=2)
        fit(compiled(), board, validation_data=(X, Y))
    for run in ("train", "validation"):
        there, local = events_in(f"{url}/{run}"), events_in(here / run)
        assert there.Tags() == local.Tags()
        for tag in local.Tags()["scalars"]:
            assert scalars(f"{url}/{run}", tag) == scalars(here / run, tag)


def test_a_resumed_training_at_a_url_draws_each_epoch_once(url, tmp_path):
    saver = callbacks.ModelCheckpoint(tmp_path / "{epoch}.h5")
    fit(compiled(), saver, callbacks.TensorBoard(url), epochs=3)
    again = callbacks.TensorBoard(url)
    fit(compiled(), again, epochs=4, resume_from=tmp_path / "1.h5")
    assert [step for step, _ in scalars(f"{url}/validation", "epoch_loss")] == [0, 1, 2, 3]


class Reads(callbacks.Callback):
    """Reads at each batch's begin what the store has."""

    def __init__(self, url):
        self.url, self.found = url, []

    def on_train_batch_begin(self, batch, logs=None):
        try:
            events = scalars(f"{self.url}/train", "batch_loss")
        except Exception:  # nothing there yet
            events = []
        self.found.append(len(events))


def test_within_an_epoch_files_come_to_a_url_now_and_then(url, monkeypatch):
    for seconds, wanted in ((0, [0, 1, 2, 3, 4]), (120, [0, 0, 0, 0, 0])):
        monkeypatch.setattr("fitkit.extras.loggers.tensorboard.UPLOAD_EVERY_S", seconds)
        reads = Reads(f"{url}/{seconds}")
        fit(compiled(), callbacks.TensorBoard(reads.url, update_freq=1), reads, epochs=1)
        assert reads.found == wanted
        assert len(scalars(f"{reads.url}/train", "batch_loss")) == 5


def test_a_url_that_cannot_be_written_to_ends_fit_at_its_begin(tmp_path):
    pytest.importorskip("fsspec")
    (tmp_path / "closed").write_text("no folder")
    model = compiled()
    with pytest.raises(CheckpointError, match="can't be written"):
        fit(model, callbacks.TensorBoard(f"file://{tmp_path}/closed/logs"))
    assert model.global_step == 0


def test_failed_trainings_leave_their_curves_at_a_url(url):
    class Fails(callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(compiled(), callbacks.TensorBoard(url), Fails())
    assert [step for step, _ in scalars(f"{url}/train", "epoch_loss")] == [0]
    assert "_hparams_/session_start_info" in events_in(f"{url}/train").summary_metadata


def test_lightnings_names_count_their_versions_at_a_url(url):
    for number in range(2):
        for kind in (loggers.TensorBoardLogger, loggers.CSVLogger):
            logger = kind(url, name=kind.__name__)
            assert str(logger.log_dir) == f"{url}/{kind.__name__}/version_{number}"
            fit(compiled(), logger, epochs=1)
    assert scalars(f"{url}/TensorBoardLogger/version_1", "loss")
    assert os.path.basename(str(loggers.CSVLogger(url, "CSVLogger").path)) == "metrics.csv"
