"""Reports to Ray Train: the values of epochs, and checkpoints for the next attempt."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

from fitkit.arguments import check_count
from fitkit.errors import missing_package
from fitkit.seams.callbacks import Callback, run_of
from fitkit.seams.networks import verb_of

FILE = "model.h5"
"""The name of the file in a reported checkpoint."""


class RayTrainReport(Callback):
    """Reports each epoch's values to Ray Train, with a checkpoint.

    Use it in a function that `ray.train.torch.TorchTrainer` runs. Ray stores the checkpoints where
    its `RunConfig` says, and its `Result` has the values. After a failure, Ray calls the function
    again. `resume_from=report.last_checkpoint()` then continues from the last one, as if nothing
    had happened.

    Args:
        save_freq: the number of epochs between two checkpoints. The last epoch has one, too. None
            reports values only. Default 1.

    Raises:
        ArgumentTypeError, ConfigurationError: `save_freq` isn't a number of epochs.
        MissingPackageError: Ray isn't installed (`pip install 'torch-fitkit[ray]'`).

    Ranks:
        Collective, as `ray.train.report` is. Rank 0's checkpoint is reported.

    Example:
        >>> import torch, fitkit
        >>> def train():
        ...     model = fitkit.Model(torch.nn.Linear(4, 1))
        ...     model.compile("adam", "mse")
        ...     x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        ...     report = fitkit.callbacks.RayTrainReport()
        ...     resume_from = report.last_checkpoint()
        ...     model.fit(x, x.sum(1), epochs=10, callbacks=[report], resume_from=resume_from)

        `TorchTrainer(train, scaling_config=ScalingConfig(num_workers=4)).fit()` runs it.
    """

    stops_alike = True
    comes_last = True

    def __init__(self, save_freq: int | None = 1) -> None:
        save_freq = check_count("save_freq", save_freq, optional=True)
        self.save_freq = save_freq
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Send other processes everything but the folder of this one."""
        return {**super().__getstate__(), "_folder": None}

    def last_checkpoint(self) -> str | None:
        """Return the file that an earlier attempt reported last; None if there is none.

        The file exists as long as this callback does.
        """
        checkpoint = _ray_train().get_checkpoint()
        if checkpoint is None:
            return None
        self._folder = tempfile.TemporaryDirectory(prefix="fitkit-ray-")
        checkpoint.to_directory(self._folder.name)
        return str(Path(self._folder.name, FILE))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        values = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
        values = {"epoch": epoch + 1, **values}
        train, epochs = _ray_train(), self.params["epochs"]
        if self.save_freq is None or ((epoch + 1) % self.save_freq and epoch + 1 < epochs):
            train.report(values)
            return
        with tempfile.TemporaryDirectory(prefix="fitkit-ray-") as folder:
            run = run_of(self.model)
            # Ray ranks checkpoints by values, among them those of the validation.
            with contextlib.nullcontext() if run is None else run.as_validated():
                verb_of(self.model, "save")(Path(folder, FILE))
            is_written = self.model.is_global_zero
            found = train.Checkpoint.from_directory(folder) if is_written else None
            train.report(values, checkpoint=found)


def _ray_train() -> Any:
    """Ray's `ray.train` module."""
    try:
        import ray.train
    except ImportError:
        raise missing_package("ray", "ray", "RayTrainReport") from None
    return ray.train
