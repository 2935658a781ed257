"""What classifiers and regressors share: their parameters, and a model made anew for each fit."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import nn

from fitkit.arguments import describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.model import Model
from fitkit.random_states import random_state, set_random_state, set_seed

NET_PREFIX = "net__"
"""How names of the net's own parameters begin, as in `set_params(net__hidden=64)`."""


class NetEstimator(BaseEstimator):
    """An estimator whose `fit` trains a copy of a net, or a net made for the data.

    scikit-learn's rules hold: the constructor stores what it is given and checks nothing, `fit`
    changes no parameter, and what it learns ends in `_`.
    """

    net_: nn.Module
    model_: Model
    _random: dict[str, Any]

    def __init__(
        self,
        net: nn.Module | Callable[..., nn.Module],
        *,
        optimizer: Any = "adam",
        loss: Any = None,
        learning_rate: float | None = None,
        metrics: Any = None,
        epochs: int = 20,
        batch_size: int = 32,
        validation_split: float = 0.0,
        callbacks: Any = None,
        verbose: int | str = 0,
        random_state: Any = None,
        dtype: str | None = "float32",
        net_options: Mapping[str, Any] | None = None,
        compile_options: Mapping[str, Any] | None = None,
        fit_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.net = net
        self.optimizer = optimizer
        self.loss = loss
        self.learning_rate = learning_rate
        self.metrics = metrics
        self.epochs = epochs
        self.batch_size = batch_size
        self.validation_split = validation_split
        self.callbacks = callbacks
        self.verbose = verbose
        self.random_state = random_state
        self.dtype = dtype
        self.net_options = net_options
        self.compile_options = compile_options
        self.fit_options = fit_options

    # ------------------------------------------------------------------ parameters

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The parameters; with `deep` also the net's own options, as `net__<name>`."""
        params: dict[str, Any] = super().get_params(deep=deep)
        if deep and isinstance(self.net_options, Mapping):
            options = self.net_options.items()
            params.update({f"{NET_PREFIX}{name}": value for name, value in options})
        return params

    def set_params(self, **params: Any) -> NetEstimator:
        """Set parameters by name; `net__<name>` sets one of the net's own options."""
        inner = {name: params.pop(name) for name in list(params) if name.startswith(NET_PREFIX)}
        super().set_params(**params)
        if inner:
            options = {name.removeprefix(NET_PREFIX): value for name, value in inner.items()}
            self.net_options = {**(self.net_options or {}), **options}
        return self

    # ------------------------------------------------------------------ learning

    def _train(self, x: np.ndarray, y: np.ndarray, weight: Any, epochs: int) -> None:
        """Train `model_` for some epochs, with the estimator's random numbers and none else's."""
        before = random_state()
        set_random_state(self._random)
        try:
            self.history_ = self.model_.fit(
                x,
                y,
                sample_weight=weight,
                epochs=epochs,
                batch_size=self.batch_size,
                validation_split=self.validation_split,
                callbacks=copy.deepcopy(self.callbacks),
                verbose=self.verbose,
                **(self.fit_options or {}),
            ).history
        finally:
            self._random = random_state()
            set_random_state(before)

    def _begin(self, outputs: int) -> None:
        """Make `model_` anew.

        Args:
            outputs: the columns that the net has to give.
        """
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        before = random_state()
        try:
            set_seed(seed)
            self.net_ = self._made_net(outputs)
            self._random = random_state()
        finally:
            set_random_state(before)
        self.model_ = Model(self.net_)
        self.model_.compile(
            self.optimizer,
            self._loss(),
            self.metrics,
            learning_rate=self.learning_rate,
            **(self.compile_options or {}),
        )

    def _loss(self) -> Any:
        """The loss, with the kind's default for None."""
        raise NotImplementedError

    def _made_net(self, outputs: int) -> nn.Module:
        """A copy of the net, or what its factory makes for the data."""
        options = dict(self.net_options or {})
        if isinstance(self.net, nn.Module):
            if options:
                raise ConfigurationError(
                    f"net_options={describe(options)} are for a class or function that makes the "
                    f"net, but net is a {type(self.net).__name__} already."
                )
            return copy.deepcopy(self.net)
        if not callable(self.net):
            raise ArgumentTypeError(
                f"net={describe(self.net)} must be a torch.nn.Module, or a class or function that "
                "makes one."
            )
        known = {"n_features": self.n_features_in_, "n_outputs": outputs}
        made = self.net(**{**_accepted(self.net, known), **options})
        if not isinstance(made, nn.Module):
            raise ArgumentTypeError(
                f"net={describe(self.net)} made a {type(made).__name__}, not a torch.nn.Module."
            )
        return made

    # ------------------------------------------------------------------ data

    def _checked_x(self, x: Any, *, reset: bool) -> np.ndarray:
        """The inputs as an array of the net's type, their number of features checked or set."""
        checked: np.ndarray = validate_data(self, x, reset=reset, **self._x_rules())
        return checked

    def _x_rules(self) -> dict[str, Any]:
        return {"dtype": self.dtype or "numeric", "allow_nd": True}

    def _checked_weight(self, weight: Any, x: np.ndarray) -> np.ndarray | None:
        if weight is None:
            return None
        checked: np.ndarray = _check_sample_weight(
            weight, x, dtype=np.float32, ensure_non_negative=True
        )
        return checked

    def _outputs(self, x: Any) -> np.ndarray:
        """What the net gives for inputs, (N, columns)."""
        check_is_fitted(self)
        x = self._checked_x(x, reset=False)
        found = self.model_.predict(x, batch_size=self.batch_size, verbose=0)
        if not isinstance(found, np.ndarray):
            raise ConfigurationError(
                f"The net gives a {type(found).__name__}; a scikit-learn estimator needs one "
                "tensor of shape (N, columns)."
            )
        return found.reshape(len(found), -1).astype(np.float64)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags


def _accepted(make: Callable[..., Any], known: dict[str, Any]) -> dict[str, Any]:
    """Those of the known values whose names a factory's signature has."""
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):
        return {}
    takes_all = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
    return {name: value for name, value in known.items() if takes_all or name in parameters}
