"""Two trained models on the same data: is one better, or was it luck of the samples?"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from fitkit.arguments import check_number, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.text_files import as_json
from fitkit.extras.trials.distributions import even_odds, share_interval, t_beyond, t_reach
from fitkit.model import Model
from fitkit.outputs import IGNORED
from fitkit.seams.data import is_array
from fitkit.typing import Arrays, Data


@dataclasses.dataclass(frozen=True)
class PredictionComparison:
    """What `compare_predictions` found. Its text is the verdict.

    Attributes:
        better: `"a"`, `"b"`, or None if it may be luck.
        difference: the mean value of b minus that of a: of the accuracy, or of the error.
        interval: of the difference: low and high.
        p_value: how often luck alone gives a difference as large, if neither is better.
        test: `"McNemar"` (exact) or `"paired t"`.
        value: what was compared: `"accuracy"`, `"squared error"` or `"values"`.
        samples: how many samples there are.
        only_a, only_b: how many samples one of them alone has right; None of values that aren't
            right or wrong.
        level: how often the interval has the true difference.

    Example:
        >>> from fitkit.tune import PredictionComparison
        >>> found = PredictionComparison("b", 0.02, (0.01, 0.03), 0.001, "McNemar", "accuracy", 900)
        >>> str(found)
        'b is better: accuracy of b minus a is +0.02 [+0.01 .. +0.03] on 900 samples (p = 0.001, ...
    """

    better: str | None
    difference: float
    interval: tuple[float, float]
    p_value: float
    test: str
    value: str
    samples: int
    only_a: int | None = None
    only_b: int | None = None
    level: float = 0.95

    def __str__(self) -> str:
        low, high = self.interval
        head = "it may be luck" if self.better is None else f"{self.better} is better"
        return (
            f"{head}: {self.value} of b minus a is {self.difference:+.3g} [{low:+.2g} .. "
            f"{high:+.2g}] on {self.samples} samples (p = {self.p_value:.2g}, {self.test})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        plain: dict[str, Any] = as_json(dataclasses.asdict(self) | {"text": str(self)})
        return {**plain, "interval": as_json(list(self.interval))}

    def to_json(self) -> str:
        """Return the same as JSON, for a script to print."""
        return json.dumps(self.to_dict())


def compare_predictions(
    model_a: Model,
    model_b: Model,
    x: Data,
    y: Arrays,
    *,
    values: Callable[[torch.Tensor, torch.Tensor], Any] | None = None,
    higher_is_better: bool = True,
    batch_size: int = 32,
    level: float = 0.95,
) -> PredictionComparison:
    """Compare two trained models on the same samples.

    It says whether other samples of the same kind would give the same winner, of these two
    trainings. Whether other trainings would, `fitkit.tune.compare` says.

    Args:
        model_a, model_b: trained models.
        x: arrays, or a Dataset that gives the same samples in the same order each time.
        y: the targets (N, ...). With ints, a prediction is right if its largest entry is at the
            target; of one column (or as many as the target), if its sign is: logits of yes and no.
            With other numbers, the squared errors are compared, each sample's mean.
        values: instead, a function `(prediction, target)` that returns a value for each sample
            (N,), from the predictions and targets of all. Flags or 0 and 1 are taken as right and
            wrong.
        higher_is_better: whether larger `values` are better. Default True.
        batch_size: of `predict`. Default 32.
        level: how often the interval has the true difference. Default 0.95.

    Returns:
        The comparison, with `better`, `difference`, `interval`, `p_value` and `to_json()`. Of right
        and wrong it is McNemar's exact test; its interval is exact, given how many samples
        the two differ on. Of other values, it is the paired t-test.

    Raises:
        ArgumentTypeError, ConfigurationError: an argument is invalid, or lengths differ.

    Example:
        >>> import torch, fitkit
        >>> x = torch.randn(200, 4)
        >>> y = (x.sum(1) > 0).long()
        >>> models = []
        >>> for epochs in (1, 30):
        ...     model = fitkit.Model(torch.nn.Linear(4, 2))
        ...     model.compile("sgd", "cross_entropy", learning_rate=0.01 * epochs)
        ...     history = model.fit(x, y, epochs=epochs, verbose=0)
        ...     models.append(model)
        >>> found = fitkit.tune.compare_predictions(*models, x, y)
        >>> found.test, found.samples
        ('McNemar', 200)

    References:
        McNemar, Note on the sampling error of the difference between correlated proportions or
        percentages, 1947. Clopper and Pearson, 1934, for the interval.
    """
    level = check_number("level", level, minimum=0.5, below=1)
    for name, model in (("model_a", model_a), ("model_b", model_b)):
        if not isinstance(model, Model):
            raise ArgumentTypeError(f"{name}={describe(model)} must be a fitkit.Model.")
    if isinstance(x, DataLoader):
        raise ConfigurationError(
            "x is a DataLoader, which may give another order each time. Give arrays, or its "
            "dataset, and y."
        )
    if not is_array(y):
        raise ArgumentTypeError(f"y={describe(y)} must be an array or a tensor of targets.")
    target = torch.as_tensor(y).detach().cpu()
    both = [
        _values(model.predict(x, batch_size=batch_size, verbose=0, as_numpy=False), target, values)
        for model in (model_a, model_b)
    ]
    a, b = both
    kind = "accuracy" if _are_labels(target) else "squared error"
    kind = kind if values is None else "values"
    sign = 1 if higher_is_better and kind != "squared error" else -1
    if all(np.isin(one, (0.0, 1.0)).all() for one in both):
        return _mcnemar(a, b, kind, sign, level)
    return _paired(a, b, kind, sign, level)


def _are_labels(target: torch.Tensor) -> bool:
    return not (target.is_floating_point() or target.is_complex())


def _values(
    prediction: Any, target: torch.Tensor, function: Callable[[Any, Any], Any] | None
) -> np.ndarray:
    """Return a model's value for each sample (N,), in float64."""
    if function is not None:
        found = torch.as_tensor(function(prediction, target))
    elif not isinstance(prediction, torch.Tensor):
        raise ConfigurationError(
            f"The net returns a {type(prediction).__name__}. Say by values=function what is "
            "compared: (prediction, target) to a value for each sample."
        )
    else:
        prediction = prediction.detach().cpu()
        count = len(target)
        if len(prediction) != count:
            raise ConfigurationError(f"x has {len(prediction)} samples, and y has {count}.")
        if _are_labels(target) and prediction.numel() == target.numel():
            same = (prediction.reshape(count, -1) > 0) == (target.reshape(count, -1) > 0)
            found = same.double().mean(1)
        elif _are_labels(target) and prediction.numel() % target.numel() == 0:
            classes = prediction.movedim(1, -1).argmax(-1).reshape(count, -1)
            same = classes == target.reshape(count, -1)
            counted = target.reshape(count, -1) != IGNORED
            found = (same & counted).double().sum(1) / counted.double().sum(1).clamp(min=1)
        elif prediction.numel() == target.numel():
            apart = prediction.reshape(count, -1).double() - target.reshape(count, -1).double()
            found = apart.square().mean(1)
        else:
            raise ConfigurationError(
                f"Predictions of shape {tuple(prediction.shape)} don't match targets of shape "
                f"{tuple(target.shape)}. Say by values=function what is compared."
            )
    if found.shape != (len(target),):
        raise ConfigurationError(
            f"values gave a result of shape {tuple(found.shape)} for {len(target)} samples. It "
            f"must give a value for each, shape ({len(target)},)."
        )
    known = found.detach().cpu().double().numpy()
    if not np.isfinite(known).all():
        raise ConfigurationError(
            "A sample's value is NaN or infinite, so that nothing can be said of the mean."
        )
    return known


def _mcnemar(
    a: np.ndarray, b: np.ndarray, kind: str, sign: int, level: float
) -> PredictionComparison:
    only_a, only_b = int((a > b).sum()), int((b > a).sum())
    differing, samples = only_a + only_b, len(a)
    p_value = even_odds(only_b, differing) if differing else 1.0
    low, high = share_interval(only_b, differing, level) if differing else (0.5, 0.5)
    scale = differing / samples
    return PredictionComparison(
        _better(only_b - only_a, p_value, sign, level),
        (only_b - only_a) / samples,
        ((2 * low - 1) * scale, (2 * high - 1) * scale),
        p_value, "McNemar", kind, samples, only_a, only_b, level,
    )  # fmt: skip


def _paired(
    a: np.ndarray, b: np.ndarray, kind: str, sign: int, level: float
) -> PredictionComparison:
    samples = len(a)
    if samples < 2:
        raise ConfigurationError("One sample can't tell whether a difference is luck. Give more.")
    apart = b - a
    mean, error = float(apart.mean()), float(apart.std(ddof=1)) / math.sqrt(samples)
    reach = t_reach(level, samples - 1) * error
    if error:
        p_value = t_beyond(mean / error, samples - 1)
    else:
        p_value = 0.0 if mean else 1.0
    return PredictionComparison(
        _better(mean, p_value, sign, level), mean, (mean - reach, mean + reach),
        p_value, "paired t", kind, samples, level=level,
    )  # fmt: skip


def _better(difference: float, p_value: float, sign: int, level: float) -> str | None:
    if p_value > 1 - level or not difference:
        return None
    return "b" if sign * difference > 0 else "a"
