"""The record of a training."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fitkit.callbacks.base import Callback, Logs, WeakModel
from fitkit.callbacks.monitor import direction_of
from fitkit.errors import ConfigurationError
from fitkit.registry import did_you_mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fitkit.extras.pictures.curves import Curve


class History(Callback):
    """The values of each epoch. `fit` returns it, and `model.history` keeps it.

    Attributes:
        history: a dict from name to a list of floats, one per epoch. Values that only some epochs
            have (`val_…` with `validation_freq`) have shorter lists, without padding.
        epoch: the epochs' numbers, from 0.
        validations: if `fit` validates within epochs (`validation_freq=0.2`), all validations in
            order, including those at the ends of epochs. Each is a dict of `epoch` (from 0),
            `batches` (made in the epoch before it) and the `val_…` values. `history` has only the
            last one of each epoch. Otherwise empty.
        skipped: the updates that `SkipBadUpdates` left out, as it describes them. Otherwise empty.
        params: the parameters of the run.
        model: the Model, as long as something else keeps it alive; else None.

    `history["loss"]` is short for `history.history["loss"]`.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> history = model.fit(x, x.sum(1), epochs=3, verbose=0)
        >>> history.epoch, list(history.history)
        ([0, 1, 2], ['loss'])
    """

    model: Any = WeakModel()  # the model refers to its history

    def __init__(self) -> None:
        self.history: dict[str, list[float]] = {}
        self.epoch: list[int] = []
        self.validations: list[dict[str, Any]] = []
        self.skipped: list[dict[str, Any]] = []
        self.params: dict[str, Any] = {}
        self._epochs_with: dict[str, list[int]] = {}

    def __getitem__(self, name: str) -> list[float]:
        """Return the values of one name, one per epoch.

        Raises:
            KeyError: the history doesn't have the name.
        """
        if name in self.history:
            return self.history[name]
        suggestion = did_you_mean(name, self.history) if isinstance(name, str) else ""
        names = ", ".join(self.history) or "nothing yet"
        raise KeyError(f"the history has no {name!r}.{suggestion} It has: {names}.")

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self.history)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.history = {}
        self.epoch = []
        self.validations = []
        self._epochs_with = {}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)
            self._epochs_with.setdefault(name, []).append(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": list(self.epoch),
            "history": {name: list(values) for name, values in self.history.items()},
            "validations": list(self.validations),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = list(state["epoch"])
        self.history = {name: list(values) for name, values in state["history"].items()}
        self.validations = list(state.get("validations", []))

    def plot(
        self,
        metrics: str | Sequence[str] | None = None,
        *,
        figure: Any = None,
        axes: Any = None,
        size: tuple[float, float] | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> Figure:
        """Draw the learning curves: one panel per log, with training and validation together.

        The best epoch is marked if the name says which direction is better. A notebook shows the
        figure when the cell ends with it. In a script, pass `path`, or `figure=plt.figure()` for a
        window that `plt.show()` opens.

        Args:
            metrics: a name or a list of names, without `val_`. Default None: all that are numbers.
            figure: a matplotlib Figure to draw in. Default None: a new one that pyplot doesn't
                manage.
            axes: instead of a figure, one Axes per metric.
            size: width and height of the new figure in inches. Default None: fits the panels.
            path: a file to write as well: `.png`, `.svg`, `.pdf`, ….

        Returns:
            The figure. Its numbers are in `history`.

        Raises:
            MissingPackageError: matplotlib isn't installed (`pip install 'torch-fitkit[plot]'`).
            ConfigurationError, ArgumentTypeError: nothing to draw, or an unknown name.
        """
        from fitkit.extras.pictures.curves import learning_curves

        return learning_curves(
            self._curves(),
            metrics,
            sets=self.params.get("validation_sets", ()),
            directions=self._directions(),
            figure=figure,
            axes=axes,
            size=size,
            path=path,
        )

    def _curves(self) -> dict[str, Curve]:
        """Return the logs that are numbers, with the epochs (from 1) that have them."""
        from fitkit.extras.pictures.curves import Curve, curve_values

        found = {}
        for name, values in self.history.items():
            numbers = curve_values(values)
            if numbers:
                found[name] = Curve([epoch + 1 for epoch in self._epochs_of(name)], numbers)
        return found

    def _epochs_of(self, name: str) -> list[int]:
        """Return the epochs that have a log.

        A checkpoint doesn't keep them. After a resume, the earlier ones are assumed to be evenly
        spaced.
        """
        noted = self._epochs_with.get(name, [])
        wanted = len(self.history[name]) - len(noted)
        if wanted <= 0:
            return noted[len(noted) - len(self.history[name]) :]
        before = [epoch for epoch in self.epoch if not noted or epoch < noted[0]]
        if not 0 < wanted <= len(before):
            return list(range(wanted + len(noted)))
        every = len(before) // wanted
        return before[every - 1 :: every][:wanted] + noted

    def _directions(self) -> dict[str, str]:
        """`"min"` or `"max"` for each log whose name says which is better."""
        found = {}
        for name in self.history:
            with contextlib.suppress(ConfigurationError):
                found[name] = direction_of(name)
        return found

    def _repr_html_(self) -> str:
        """Return the view in a notebook: small curves, and each log's first, best and last
        value.
        """
        from fitkit.extras.pictures.html import history_html

        return history_html(self._curves(), self._directions(), len(self.epoch))

    def __repr__(self) -> str:
        last = ", ".join(
            f"{name}={values[-1]:.4g}" if isinstance(values[-1], float) else name
            for name, values in self.history.items()
        )
        return f"History({len(self.epoch)} epochs{'; last: ' + last if last else ''})"


class Results(dict[str, Any]):
    """Values by name, `loss` first: a dict in all but how a notebook shows it.

    It is copied and pickled as a plain dict, which can be read where there is no fitkit.
    """

    def _repr_html_(self) -> str:
        from fitkit.extras.pictures.html import results_html

        return results_html(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
