"""Tracking services, with the real packages in their offline modes. Each is read back.

CI has Comet and trackio. SwanLab and Aim ask for older releases of packages that CI pins, and
ClearML looks for its server for minutes: `pip install swanlab aim clearml` in an environment of
their own, then run this file there.
"""

import io
import json
import math
import zipfile

import pytest
import torch

import fitkit
from fitkit import callbacks, loggers
from fitkit.errors import ArgumentTypeError, ConfigurationError, MissingPackageError

X, Y = torch.randn(16, 2), torch.randn(16, 1)


class Trackio:
    package = "trackio"

    def __init__(self, folder, monkeypatch):
        import trackio.sqlite_storage as storage

        monkeypatch.setattr(storage, "TRACKIO_DIR", folder)
        self.storage = storage.SQLiteStorage

    def logger(self, **options):
        return loggers.Trackio("digits", auto_log_cpu=False, **options)

    def settings(self, logger):
        return self.storage.get_run_config("digits", logger.run_id)

    def values(self, logger, name):
        logs = self.storage.get_logs("digits", logger.run_id)
        return [(entry["step"], entry[name]) for entry in logs if name in entry]


class SwanLab:
    package = "swanlab"
    names = (["batch_loss", "batch_learning_rate", "loss", "not a number"], ["loss"])

    def __init__(self, folder, monkeypatch):
        self.folder = folder

    def logger(self, **options):
        return loggers.SwanLab("digits", mode="local", log_dir=str(self.folder), **options)

    def settings(self, logger):
        yaml = pytest.importorskip("yaml")
        file = sorted(self.folder.glob(f"run-*-{logger.run_id}/files/config.yaml"))[0]
        return {name: entry["value"] for name, entry in yaml.safe_load(file.read_text()).items()}

    def values(self, logger, name):
        # Names are in a binary file; the text files are numbered in the order of first values.
        found = []
        runs = sorted(self.folder.glob(f"run-*-{logger.run_id}"))
        for run, names in zip(runs, self.names, strict=False):
            if name in names:
                for file in run.glob(f"logs/{1 + names.index(name)}/*.log"):
                    found += map(json.loads, filter(None, file.read_text().splitlines()))
        return [(entry["index"], entry["data"]) for entry in found]


class Comet:
    package = "comet_ml"

    def __init__(self, folder, monkeypatch):
        self.folder = folder

    def logger(self, **options):
        return loggers.Comet(
            "digits", online=False, offline_directory=str(self.folder), log_code=False,
            log_env_details=False, log_git_metadata=False, auto_output_logging=False, **options,
        )  # fmt: skip

    def _messages(self, logger, kind):
        archives = sorted(self.folder.glob("*.zip"), key=lambda file: file.stat().st_mtime_ns)
        for archive in archives:
            with zipfile.ZipFile(archive) as files:
                for line in io.TextIOWrapper(files.open("messages.json")):
                    message = json.loads(line)
                    if message["type"] == kind:
                        yield message["payload"]

    def settings(self, logger):
        found = [one["param"] for one in self._messages(logger, "parameter_msg")]
        return {one["paramName"]: one["paramValue"] for one in found}

    def values(self, logger, name):
        found = [one["metric"] for one in self._messages(logger, "metric_msg")]
        return [(one["step"], one["metricValue"]) for one in found if one["metricName"] == name]


class ClearML:
    package = "clearml"

    def __init__(self, folder, monkeypatch):
        monkeypatch.setenv("CLEARML_OFFLINE_MODE", "1")
        monkeypatch.setenv("CLEARML_CACHE_DIR", str(folder))
        import clearml

        clearml.Task.set_offline(True)
        self.folder = folder

    def logger(self, **options):
        return loggers.ClearML("digits", auto_resource_monitoring=False, **options)

    def settings(self, logger):
        (file,) = self.folder.rglob("task.json")
        found = json.loads(file.read_text())["hyperparams"]["fitkit"]
        return {name: entry["value"] for name, entry in found.items()}

    def _events(self):
        (file,) = self.folder.rglob("metrics.jsonl")
        return [
            event for line in file.read_text().splitlines() if line for event in json.loads(line)
        ]

    def values(self, logger, name):
        return [
            (event["iter"], event["value"])
            for event in self._events()
            if event["metric"] == name and event["type"] == "training_stats_scalar"
        ]


class Aim:
    package = "aim"

    def __init__(self, folder, monkeypatch):
        self.folder = folder

    def logger(self, **options):
        return loggers.Aim(
            "digits", repo=str(self.folder), system_tracking_interval=None, **options
        )

    def _run(self, logger):
        import aim

        return aim.Run(logger.run_id, repo=str(self.folder), system_tracking_interval=None)

    def settings(self, logger):
        return self._run(logger)["hparams"]

    def values(self, logger, name):
        (found,) = [one for one in self._run(logger).metrics() if one.name == name]
        table = found.dataframe()
        return list(zip(table["step"], table["value"], strict=True))


@pytest.fixture(params=[Trackio, SwanLab, Comet, ClearML, Aim], ids=lambda kind: kind.package)
def service(request, tmp_path, monkeypatch):
    pytest.importorskip(request.param.package)
    monkeypatch.chdir(tmp_path)
    return request.param(tmp_path, monkeypatch)


def fit(*given, **options):
    model = fitkit.Model(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse", learning_rate=0.1, accumulate_grad_batches=2)
    return model.fit(
        X, Y, batch_size=4, verbose=0, callbacks=list(given), **{"epochs": 2, **options}
    )


def test_a_run_has_settings_values_over_updates_and_figures_and_a_resume_continues_it(
    service, tmp_path
):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    logger, again = service.logger(update_freq=2), service.logger()

    class Adds(callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            logs["not a number"] = float("nan")
            logger.log_figure("curve", figure)

    first = fit(Adds(), logger, callbacks.ModelCheckpoint(tmp_path / "a.h5"))
    assert logger.connection is None
    found = service.settings(logger)
    assert found["loss"] == "mse" and float(found["learning_rate"]) == 0.1
    second = fit(again, epochs=3, resume_from=tmp_path / "a.h5")
    assert again.run_id == logger.run_id
    losses = [*first.history["loss"], second.history["loss"][-1]]
    assert service.values(logger, "loss") == [
        (step, pytest.approx(loss)) for step, loss in zip([2, 4, 6], losses, strict=True)
    ]
    assert [step for step, _ in service.values(logger, "batch_loss")] == [2, 4]
    assert all(math.isnan(float(value)) for _, value in service.values(logger, "not a number"))


def test_a_fit_that_fails_closes_its_run_and_the_next_one_is_another(service):
    class Fails(callbacks.Callback):
        def on_epoch_begin(self, epoch, logs):
            if epoch == 1:
                raise RuntimeError("on purpose")

    logger = service.logger()
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(logger, Fails())
    failed = logger.run_id
    fit(logger, epochs=1)
    assert logger.connection is None and failed and logger.run_id and logger.run_id != failed


def test_an_option_that_the_package_does_not_take_is_named(service):
    with pytest.raises(ArgumentTypeError, match="has no argument 'proyect'"):
        service.logger(proyect="digits")
    with pytest.raises(ConfigurationError, match="'batches' or 'updates'"):
        service.logger(step="epochs")


def test_by_name_it_is_a_callback_and_without_the_package_an_error_says_what_to_install(
    monkeypatch,
):
    from fitkit.callbacks.callback_list import CALLBACKS

    kinds = (loggers.Trackio, loggers.SwanLab, loggers.Comet, loggers.ClearML, loggers.Aim)
    for kind in kinds:
        assert CALLBACKS[kind.__name__.lower()] is kind
        monkeypatch.setitem(__import__("sys").modules, kind.package, None)
        with pytest.raises(MissingPackageError, match=kind.package):
            kind("digits")
