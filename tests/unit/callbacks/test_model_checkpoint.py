"""ModelCheckpoint: which files there are, under which names, and what is in them."""

import copy
import os
import threading
from datetime import timedelta

import numpy as np
import pytest
import torch

import fitkit
from fitkit.callbacks import Callback, ModelCheckpoint, checkpoint_writer
from fitkit.callbacks.model_checkpoint import FileNames
from fitkit.errors import ArgumentTypeError, CheckpointError, ConfigurationError
from tests import reference
from tests.nets import linear, regression

X, Y = regression(32, 3)
NAN = float("nan")


class Plays(Callback):
    """Puts given values into the epochs' logs."""

    def __init__(self, values):
        self.values = values

    def on_epoch_end(self, epoch, logs):
        logs["val_loss"] = self.values[epoch]


def compiled(**arguments):
    return reference.compiled(linear(3, 1), "adam", "mse", **arguments)


def fit(epochs, *callbacks, **options):
    """One step an epoch, and a validation."""
    return compiled().fit(X, Y, epochs=epochs, verbose=0, validation_data=(X, Y),
                          callbacks=list(callbacks), **options)  # fmt: skip


def files_after(tmp_path, values, *arguments, name="{epoch}.h5", **options):
    """The names that are there after epochs with such values; the callback."""
    saves = ModelCheckpoint(tmp_path / name, *arguments, **options)
    fit(len(values), saves, Plays(values))
    return sorted(os.listdir(tmp_path)), saves


def test_each_epoch_has_a_file_with_its_numbers(tmp_path):
    values = [0.5, 0.256, 10.0]
    found, saves = files_after(tmp_path / "new", values, name="{epoch:02d}-{val_loss:.2f}.h5")
    assert found == ["01-0.50.h5", "02-0.26.h5", "03-10.00.h5"]
    assert saves.last_path() == str(tmp_path / "new" / "03-10.00.h5")
    assert saves.best_model_path is None


VALUES = [3.0, 1.0, NAN, 2.0, 1.0, 0.5]
CASES = {
    "best only": ({"save_best_only": True}, [1, 2, 6], 6),
    "best below a threshold": (
        {"save_best_only": True, "initial_value_threshold": 0.9}, [6], 6),
    "highest": ({"save_best_only": True, "mode": "max"}, [1], 1),
    # 3 | 3 1 | 3 1 (NaN is third) | 2 1 | of equals the earlier stays first: 1 1 | 0.5 1
    "top two": ({"save_top_k": 2}, [2, 6], 6),
    "top three": ({"save_top_k": 3}, [2, 5, 6], 6),
    "top one and last": ({"save_top_k": 1, "save_last": True}, [6, "last"], 6),
    "last alone": ({"save_top_k": 0, "save_last": True}, ["last"], None),
}  # fmt: skip


@pytest.mark.parametrize("saves_asynchronously", [False, True], ids=["at once", "by a thread"])
@pytest.mark.parametrize("case", CASES)
def test_the_best_are_kept_and_no_others(tmp_path, case, saves_asynchronously):
    options, expected, best = CASES[case]
    found, saves = files_after(tmp_path, VALUES, asynchronous=saves_asynchronously, **options)
    assert found == [f"{name}.h5" for name in expected]
    assert saves.best_model_path == (best and str(tmp_path / f"{best}.h5"))
    if best:
        assert saves.best == VALUES[best - 1]


def test_only_own_files_are_deleted(tmp_path):
    (tmp_path / "9.h5").write_text("another's")
    (tmp_path / "1.h5.txt").write_text("another's")
    found, _ = files_after(tmp_path, [3.0, 2.0, 1.0], save_top_k=1)
    assert found == ["1.h5.txt", "3.h5", "9.h5"]


def test_a_checkpoints_list_of_files_deletes_nothing_foreign(tmp_path):
    saves = ModelCheckpoint(tmp_path / "{epoch}.h5", save_top_k=1)
    foreign = tmp_path / "thesis.h5"
    foreign.write_text("dear")
    kept = [[9.0, str(foreign)], [8.0, str(tmp_path / "1.h5")]]
    saves.load_state_dict({"best": 9.0, "best_model_path": None, "since": 0, "kept": kept})
    assert [path for _, path in saves._kept] == [str(tmp_path / "1.h5")]


@pytest.mark.parametrize("left", ["as it was", "written again", "kept", "foreign"])
def test_a_resumed_run_removes_what_was_about_to_be_and_nothing_written_since(tmp_path, left):
    """The run before was killed between a new file and the end of the one that it replaces."""
    first, second = tmp_path / "1.h5", tmp_path / "2.h5"
    thesis = tmp_path / "thesis.h5"
    for path in (first, second, thesis):
        path.write_text("dear")
    removing = [[str(thesis if left == "foreign" else first), first.stat().st_mtime_ns]]
    os.utime(thesis, ns=(0, first.stat().st_mtime_ns))
    if left == "written again":
        os.utime(first, ns=(0, first.stat().st_mtime_ns + 1))
    saves = ModelCheckpoint(tmp_path / "{epoch}.h5", save_top_k=1)
    saves.set_model(compiled())
    kept = first if left == "kept" else second
    saves.load_state_dict({"best": 1.0, "best_model_path": str(second), "since": 0,
                           "kept": [[1.0, str(kept)]], "removing": removing})  # fmt: skip
    assert first.exists() == (left != "as it was")
    assert second.exists()
    assert thesis.exists()


def test_nothing_is_removed_before_the_new_file_is_there(tmp_path):
    """Another callback's checkpoint knew of a file that a thread had still to write."""
    first = tmp_path / "1.h5"
    first.write_text("dear")
    saves = ModelCheckpoint(tmp_path / "{epoch}.h5", save_top_k=1)
    saves.set_model(compiled())
    saves.load_state_dict({"best": 1.0, "best_model_path": None, "since": 0,
                           "kept": [[1.0, str(tmp_path / "2.h5")]],
                           "removing": [[str(first), first.stat().st_mtime_ns]]})  # fmt: skip
    assert first.exists()


@pytest.mark.parametrize("name", ["{epoch}.h5", "runs/{epoch}/model.h5"])
def test_what_killed_runs_left_unfinished_is_removed(tmp_path, name):
    folder = (tmp_path / name).parent
    for place in (folder.parent / folder.name.replace("{epoch}", "9"), tmp_path / "another"):
        place.mkdir(parents=True, exist_ok=True)
        (place / ".model.h5.0123456789ab.fitkit-unfinished").touch()
    fit(1, ModelCheckpoint(tmp_path / name))
    left = list(tmp_path.rglob(".*"))
    assert [path.parent.name for path in left] == ["another"]


@pytest.mark.parametrize(
    "options", [{"save_best_only": True}, {"save_top_k": 1}, {"initial_value_threshold": 0.6}]
)
def test_the_best_belongs_to_the_model_that_was_watched(options, tmp_path):
    options = {"save_best_only": "save_top_k" not in options, **options}
    saves = ModelCheckpoint(tmp_path / "{val_loss}.h5", **options)
    first, second = compiled(), compiled()

    def best_after(model, value, callback=saves):
        plays = Plays([value])
        model.fit(X, Y, verbose=0, validation_data=(X, Y), callbacks=[callback, plays])
        return callback.best_model_path

    assert best_after(first, 0.1).endswith("0.1.h5")
    assert best_after(first, 0.2).endswith("0.1.h5")  # as in Keras
    assert best_after(second, 0.5).endswith("0.5.h5")
    assert (tmp_path / "0.1.h5").exists()  # nobody deletes the first one's
    assert best_after(second, 0.55).endswith("0.5.h5")
    assert best_after(compiled(), 0.59, copy.copy(saves)).endswith("0.59.h5")
    if "initial_value_threshold" in options:
        assert best_after(compiled(), 0.7) is None


def test_best_and_files_go_on_in_a_resumed_run(tmp_path):
    def callbacks():
        return [ModelCheckpoint(tmp_path / "{epoch}.h5", save_top_k=2, save_last=True),
                Plays([2.0, 3.0, 1.0, 4.0])]  # fmt: skip

    fit(2, *callbacks())
    again = callbacks()
    history = fit(4, *again, resume_from="last")
    assert history.epoch == [0, 1, 2, 3]
    assert sorted(os.listdir(tmp_path)) == ["1.h5", "3.h5", "last.h5"]
    assert again[0].best == 1.0


@pytest.mark.parametrize("how", ["save_freq", "every_n_train_steps"])
def test_batches_are_counted_over_epochs(tmp_path, how):
    saves = ModelCheckpoint(tmp_path / "{epoch}-{batch}-{step}.h5", **{how: 3})
    compiled().fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=saves)
    assert sorted(os.listdir(tmp_path)) == ["1-3-3.h5", "2-2-6.h5"]  # 4 batches an epoch


def test_a_save_waits_for_the_update_of_accumulated_batches(tmp_path):
    saves = ModelCheckpoint(tmp_path / "{epoch}-{batch}.h5", save_freq=3)
    # 6 batches in groups of 4 and 2: due at 3 (saved at 4), 6 (saved at the epoch's end), …
    x, y = torch.cat([X, X[:16]]), torch.cat([Y, Y[:16]])
    model = compiled(accumulate_grad_batches=4)
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=saves)
    assert sorted(os.listdir(tmp_path)) == ["1-4.h5", "1-6.h5", "2-4.h5", "2-6.h5"]
    last = str(tmp_path / "2-4.h5")
    resumed = compiled(accumulate_grad_batches=4)
    resumed.fit(x, y, batch_size=8, epochs=2, verbose=0, resume_from=last)
    assert torch.equal(resumed.net.weight, model.net.weight)


def test_running_values_choose_among_batches(tmp_path):
    saves = ModelCheckpoint(tmp_path / "{batch}.h5", "loss", save_best_only=True, save_freq=1)
    seen = []
    looks = fitkit.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(logs["loss"]))  # fmt: skip
    compiled().fit(X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=[saves, looks])
    lowest = [f"{i + 1}.h5" for i in range(4) if all(seen[i] < earlier for earlier in seen[:i])]
    assert sorted(os.listdir(tmp_path)) == lowest
    with pytest.raises(ConfigurationError, match="known only at the end of an epoch"):
        compiled().fit(
            X, Y, verbose=0, validation_data=(X, Y),
            callbacks=ModelCheckpoint("x.h5", save_best_only=True, save_freq=1),
        )  # fmt: skip


def test_time_tells_when(tmp_path, monkeypatch):
    now = [0.0]

    def passes(batch, logs):
        now[0] += 1

    monkeypatch.setattr("fitkit.callbacks.model_checkpoint.time.monotonic", lambda: now[0])
    saves = ModelCheckpoint(tmp_path / "{batch}.h5", train_time_interval=timedelta(seconds=1.5))
    steps = fitkit.callbacks.LambdaCallback(on_train_batch_end=passes)
    compiled().fit(X, Y, batch_size=4, verbose=0, callbacks=[saves, steps])
    assert sorted(os.listdir(tmp_path)) == ["2.h5", "4.h5", "6.h5", "8.h5"]


@pytest.mark.parametrize("suffix", ["h5", "safetensors", "pt"])
def test_weights_alone_in_any_format(tmp_path, suffix):
    if suffix == "safetensors":
        pytest.importorskip("safetensors")
    model = compiled()
    saves = ModelCheckpoint(tmp_path / f"w.{suffix}", save_weights_only=True, asynchronous=True)
    model.fit(X, Y, epochs=2, verbose=0, callbacks=saves)
    twin = compiled()
    twin.load_weights(tmp_path / f"w.{suffix}")
    assert torch.equal(twin.net.weight, model.net.weight)
    with pytest.raises(ConfigurationError, match="weights_only"):
        twin.fit(X, Y, verbose=0, callbacks=saves, resume_from="last")


class Fails(Callback):
    def __init__(self, epoch, error=RuntimeError):
        self.moment, self.error = epoch, error

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == (self.moment, 2):
            raise self.error("mine")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_loses_no_step(tmp_path, error):
    torch.manual_seed(3)
    whole = compiled()
    whole.fit(X, Y, batch_size=8, epochs=3, verbose=0)
    saves = ModelCheckpoint(tmp_path / "{epoch}.h5", save_freq=100, save_on_exception=True)
    torch.manual_seed(3)
    with pytest.raises(error, match="mine"):
        compiled().fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[saves, Fails(1, error)])
    assert os.listdir(tmp_path) == ["exception.h5"]
    resumed = compiled()
    resumed.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=saves, resume_from="last")
    # Between the last step and the failure nothing was drawn: no number is repeated or lost.
    assert torch.equal(resumed.net.weight, whole.net.weight)


def test_a_mistake_before_the_first_update_saves_nothing(tmp_path):
    saves = ModelCheckpoint(tmp_path / "{epoch}.h5", save_on_exception=True)
    with pytest.raises(RuntimeError, match="mine"):
        compiled().fit(X, Y, verbose=0, batch_size=32, callbacks=[saves, FailsAtOnce()])
    assert not os.listdir(tmp_path)


class FailsAtOnce(Callback):
    def on_train_batch_begin(self, batch, logs=None):
        raise RuntimeError("mine")


# ---------------------------------------------------------------------- by a thread


def test_training_goes_on_while_a_thread_writes_what_was_there(tmp_path, monkeypatch):
    """The writer is held until the next epoch has changed the weights."""
    trained_on, threads = threading.Event(), []
    write = checkpoint_writer.save_checkpoint

    def held(path, weights, state):
        threads.append(threading.current_thread())
        if path.endswith("1.h5"):
            assert trained_on.wait(20)
        write(path, weights, state)

    monkeypatch.setattr(checkpoint_writer, "save_checkpoint", held)
    weights = []

    class Looks(Callback):
        def on_train_batch_end(self, batch, logs):
            if len(weights) == 1:
                assert not torch.equal(self.model.net.weight, weights[0])
                trained_on.set()

        def on_epoch_end(self, epoch, logs):
            weights.append(self.model.net.weight.detach().clone())

    saves = ModelCheckpoint(tmp_path / "{epoch}.h5", asynchronous=True)
    model = compiled()
    model.fit(X, Y, epochs=3, verbose=0, callbacks=[saves, Looks()])
    assert threading.main_thread() not in threads
    assert not any(thread.is_alive() for thread in threads)
    for epoch, expected in enumerate(weights, 1):
        twin = compiled()
        twin.load(tmp_path / f"{epoch}.h5")
        assert torch.equal(twin.net.weight, expected)
        assert twin.optimizer.state_dict()["state"][0]["step"] == epoch


def test_an_error_of_the_thread_comes_at_the_next_save_or_at_the_end(tmp_path):
    folder = tmp_path / "file"
    folder.write_text("no folder")
    for epochs in (1, 2):
        seen = []
        counts = fitkit.callbacks.LambdaCallback(on_epoch_end=lambda e, logs, s=seen: s.append(e))
        saves = ModelCheckpoint(folder / "x.h5", asynchronous=True)
        with pytest.raises(CheckpointError, match="file can't be made"):
            compiled().fit(X, Y, epochs=epochs, verbose=0, callbacks=[saves, counts])
        assert seen == list(range(epochs))


def test_copies_share_memory_as_the_originals_do_and_memory_is_used_again():
    shared = torch.arange(6.0)
    value = {"a": shared[:4], "b": [shared.view(2, 3).t(), (1, "x", None)], "c": torch.ones(())}
    copies = checkpoint_writer.StateCopies()
    first = copies.of(value)
    assert first["a"].data_ptr() != shared.data_ptr()
    before = first["a"].data_ptr()
    shared += 1
    assert first["a"].tolist() == [0, 1, 2, 3]
    assert first["b"][0].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert first["b"][0].untyped_storage().data_ptr() == first["a"].untyped_storage().data_ptr()
    second = copies.of(value)
    assert second["a"].data_ptr() == before
    assert second["b"][1] == (1, "x", None) and second["c"].item() == 1


# ---------------------------------------------------------------------- names and mistakes


def test_an_unknown_name_is_told_with_the_known_ones(tmp_path):
    saves = ModelCheckpoint(tmp_path / "{epoch}-{los:.2f}.h5")
    with pytest.raises(ConfigurationError, match=r"field 'los'.*epoch, step, loss.*mean 'loss'\?"):
        compiled().fit(X, Y, verbose=0, callbacks=saves)
    assert not os.listdir(tmp_path)


def test_names_are_found_again_and_no_others(tmp_path):
    names = FileNames(tmp_path / "m-{epoch}-{loss:.1e}.h5", (".h5",), "checkpoints")
    written = [names.name({"epoch": e}, {"loss": np.float32(v)}) for e, v in ((1, 0.5), (12, NAN))]
    for path in [*written, tmp_path / "m-last-x.h5", tmp_path / "m-1-x.h5.h5"]:
        open(path, "w").close()
    assert sorted(names.found()) == sorted(written)
    assert [os.path.basename(path) for path in written] == ["m-1-5.0e-01.h5", "m-12-nan.h5"]


MISTAKES = {
    "keras suffix": (("x.keras",), {}, ConfigurationError, "end in .h5 or .hdf5"),
    "no path": ((3,), {}, ArgumentTypeError, "must be a path"),
    "no name in braces": (("{}.h5",), {}, ConfigurationError, "braces without a name"),
    "frequency": (("x.h5",), {"save_freq": "epochs"}, ConfigurationError, "Did you mean 'epoch'"),
    "two frequencies": (("x.h5",), {"save_freq": 3, "train_time_interval": 2},
                        ConfigurationError, "Give one"),
    "one name for several": (("x.h5",), {"save_top_k": 2}, ConfigurationError, "{epoch}"),
    "direction": (("x.h5", "val_zeta"), {"save_best_only": True}, ConfigurationError, "mode="),
    "flag": (("x.h5",), {"save_last": 1}, ArgumentTypeError, "True or False"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_at_once(mistake):
    arguments, options, kind, message = MISTAKES[mistake]
    with pytest.raises(kind, match=message):
        ModelCheckpoint(*arguments, **options)


@pytest.mark.parametrize("saves_asynchronously", [False, True])
def test_a_full_disk_leaves_the_old_file(tmp_path, saves_asynchronously):
    resource = pytest.importorskip("resource")
    import signal

    saves = ModelCheckpoint(tmp_path / "x.h5", asynchronous=saves_asynchronously)
    model = compiled()
    model.fit(X, Y, verbose=0, callbacks=saves)
    before = (tmp_path / "x.h5").read_bytes()
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="ulimit -f"):
            model.fit(X, Y, verbose=0, callbacks=saves)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "x.h5").read_bytes() == before
    assert os.listdir(tmp_path) == ["x.h5"]


# ------------------------------------------------------------------ as Lightning's users write it


def test_dirpath_and_filename_make_lightnings_path(tmp_path):
    saves = ModelCheckpoint(dirpath=tmp_path / "run", filename="{epoch:02d}-{val_loss:.2f}",
                            monitor="val_loss")  # fmt: skip
    fit(3, saves, Plays([0.5, 0.25, 1.0]))
    assert os.listdir(tmp_path / "run") == ["02-0.25.h5"]  # a monitor keeps one, as there
    assert saves.best_model_path == str(tmp_path / "run" / "02-0.25.h5")
    compiled().load(saves.best_model_path)


def test_dirpath_alone_names_files_by_epoch_and_step(tmp_path):
    saves = ModelCheckpoint(dirpath=tmp_path / "{run}")
    fit(2, saves)
    assert sorted(os.listdir(tmp_path / "{run}")) == ["1-1.h5", "2-2.h5"]
    assert saves.last_model_path == str(tmp_path / "{run}" / "2-2.h5")


def test_save_top_k_of_minus_one_keeps_and_ranks_all(tmp_path):
    names = [str(tmp_path / f"{epoch}.h5") for epoch in (1, 2, 3)]
    found, saves = files_after(tmp_path, [3.0, 1.0, 2.0], "val_loss", save_top_k=-1)
    assert found == ["1.h5", "2.h5", "3.h5"]
    assert saves.best_k_models == {names[1]: 1.0, names[2]: 2.0, names[0]: 3.0}
    assert list(saves.best_k_models) == [names[1], names[2], names[0]]
    assert (saves.best_model_path, saves.best_model_score) == (names[1], 1.0)
    assert (saves.kth_best_model_path, saves.last_model_path) == (names[0], names[2])


def test_save_top_k_of_minus_one_without_a_monitor_needs_no_value(tmp_path):
    saves = ModelCheckpoint(tmp_path / "{epoch}.h5", save_top_k=-1)
    compiled().fit(X, Y, epochs=2, verbose=0, callbacks=saves)
    assert sorted(os.listdir(tmp_path)) == ["1.h5", "2.h5"]
    assert saves.best_model_score is None
    assert saves.best_k_models == {}
    assert saves.kth_best_model_path is None


def test_best_model_score_and_the_kth_of_the_best_two(tmp_path):
    saves = ModelCheckpoint(tmp_path / "{epoch}.h5", save_top_k=2)
    assert saves.best_model_score is saves.last_model_path is None
    fit(3, saves, Plays([3.0, 1.0, 2.0]))
    assert saves.best_model_score == 1.0
    assert list(saves.best_k_models.values()) == [1.0, 2.0]
    assert saves.kth_best_model_path == str(tmp_path / "3.h5")


def test_every_n_epochs_saves_each_second_one(tmp_path):
    found, _ = files_after(tmp_path, [1.0] * 5, every_n_epochs=2)
    assert found == ["2.h5", "4.h5"]


class LogsBoth(fitkit.Model):
    def training_step(self, batch):
        self.log("x", float(self.current_epoch), on_step=True, on_epoch=True)
        return super().training_step(batch)


def test_monitor_x_and_filename_x_find_what_is_logged_by_step_and_by_epoch(tmp_path):
    model = LogsBoth(torch.nn.Linear(3, 1))
    model.compile("sgd", "mse")
    saves = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}-{x:.0f}", monitor="x", mode="max")
    model.fit(X, Y, epochs=3, verbose=0, callbacks=saves)
    assert os.listdir(tmp_path) == ["3-2.h5"]


@pytest.mark.parametrize(("options", "error", "text"), [
    ({}, ConfigurationError, "needs a name"),
    ({"filepath": "a.h5", "dirpath": "b"}, ConfigurationError, "Use filepath, or the other two"),
    ({"dirpath": 3}, ArgumentTypeError, "dirpath=3"),
    ({"filename": 3}, ArgumentTypeError, "filename=3"),
    ({"dirpath": "a", "filename": "b.ckpt"}, ConfigurationError, "end in .h5"),
    ({"dirpath": "a", "every_n_epochs": 0}, ConfigurationError, "every_n_epochs=0"),
    ({"dirpath": "a", "every_n_epochs": 2, "every_n_train_steps": 3}, ConfigurationError, "one"),
    ({"filepath": "a.h5", "save_top_k": -1}, ConfigurationError, "keeps several files"),
    ({"filepath": "{epoch}.h5", "save_top_k": -2}, ConfigurationError, "save_top_k=-2"),
])  # fmt: skip
def test_what_lightnings_arguments_can_not_be_together(options, error, text):
    with pytest.raises(error, match=text):
        ModelCheckpoint(**options)
