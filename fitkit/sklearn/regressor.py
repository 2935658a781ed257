"""A net as a scikit-learn regressor."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.validation import validate_data

from fitkit.sklearn.estimator import NetEstimator


class Regressor(RegressorMixin, NetEstimator):
    """A net that tells numbers, by scikit-learn's rules.

    Targets are learned as they are: scale them (scikit-learn's `TransformedTargetRegressor`)
    where they are far from 0 or wide.

    Args:
        net: as in `Classifier`; it gives a column a target, so one where `y` is (N,).
        loss: as in `Model.compile`. Default None: `"mse"`.
        optimizer, learning_rate, metrics, epochs, batch_size: as in `Classifier`.
        validation_split, callbacks, verbose, random_state, dtype: likewise.
        net_options, compile_options, fit_options: likewise.

    Attributes:
        n_features_in_, feature_names_in_, net_, model_, history_: as in `Classifier`.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Regressor:  # noqa: N803
        """Train a net from its beginning.

        Args:
            X: (N, features), or (N, ...) for nets that take images or sequences.
            y: (N,) or (N, targets) numbers.
            sample_weight: (N,) weights of the samples.
        """
        x, y = self._checked(X, y, reset=True)
        self._is_flat = y.ndim == 1
        self._begin(1 if self._is_flat else y.shape[1])
        self._learn(x, y, sample_weight, self.epochs)
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Regressor:  # noqa: N803
        """Train for one more epoch on some data, given as in `fit`."""
        begins = not hasattr(self, "model_")
        x, y = self._checked(X, y, reset=begins)
        if begins:
            self._is_flat = y.ndim == 1
            self._begin(1 if self._is_flat else y.shape[1])
        self._learn(x, y, sample_weight, 1)
        return self

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """The numbers for each sample, (N,) or (N, targets) as `y` was."""
        outputs = self._outputs(X)
        return outputs[:, 0] if self._is_flat else outputs

    # ------------------------------------------------------------------ inside

    def _loss(self) -> Any:
        return "mse" if self.loss is None else self.loss

    def _checked(self, x: Any, y: Any, *, reset: bool) -> tuple[np.ndarray, np.ndarray]:
        rules = {"multi_output": True, "y_numeric": True, **self._x_rules()}
        x, y = validate_data(self, x, y, reset=reset, **rules)
        return x, y.astype(np.float32)

    def _learn(self, x: np.ndarray, y: np.ndarray, weight: Any, epochs: int) -> None:
        y = y.reshape(len(y), -1)
        self._train(x, y, self._checked_weight(weight, x), epochs)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = True
        return tags
