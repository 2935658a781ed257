"""Nets as scikit-learn estimators: for pipelines, grid searches and cross-validation."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from torch import nn

from fitkit.arguments import Function, describe, only_known_arguments
from fitkit.errors import ArgumentTypeError, ConfigurationError, missing_package
from fitkit.foreign_names import instead, no_attribute
from fitkit.model import Model
from fitkit.outputs import SINGLE, LossHint
from fitkit.random_states import kept_random_numbers, random_state, set_random_state, set_seed
from fitkit.seams.callbacks import Callbacks
from fitkit.seams.losses import CompiledLoss
from fitkit.typing import LossArgument, MetricsArgument, OptimizerArgument, Verbose

try:
    from scipy.special import expit, softmax
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state, compute_sample_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError:
    raise missing_package("scikit-learn", "sklearn", "fitkit.sklearn") from None


NET_PREFIX = "net__"
"""The prefix of the net's own parameters, as in `set_params(net__hidden=64)`."""
OPTIMIZER_PREFIX = "optimizer__"
"""The prefix of the optimizer's settings, as in `set_params(optimizer__momentum=0.9)`."""


def _among_options(name: str) -> str:
    """Say how an estimator is given an argument of `fit` or `compile`; "" for no such argument."""
    for verb in (Model.fit, Model.compile):
        if name in inspect.signature(verb).parameters:
            return f"Write {verb.__name__}_options={{{name!r}: …}}."
    return ""


def estimator_arguments(function: Function) -> Function:
    """Let an estimator's constructor refuse what it doesn't take."""
    return only_known_arguments(function, _among_options)


class NetEstimator(BaseEstimator):
    """An estimator whose `fit` trains a copy of a net, or a net built for the data.

    It follows scikit-learn's rules. The constructor stores its arguments and checks nothing. `fit`
    changes no parameter. The names of learned attributes end in `_`.
    """

    model_: Model
    _random: dict[str, Any]

    @estimator_arguments
    def __init__(
        self,
        net: nn.Module | Callable[..., nn.Module],
        *,
        optimizer: OptimizerArgument = "adam",
        loss: LossArgument = None,
        learning_rate: float | None = None,
        metrics: MetricsArgument = None,
        epochs: int = 20,
        batch_size: int = 32,
        validation_split: float = 0.0,
        callbacks: Callbacks = None,
        verbose: Verbose = 0,
        random_state: Any = None,
        dtype: str | None = "float32",
        net_options: Mapping[str, Any] | None = None,
        compile_options: Mapping[str, Any] | None = None,
        fit_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.net = net
        self.optimizer: Any = optimizer
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
        self.net_options: Mapping[str, Any] | None = net_options
        self.compile_options = compile_options
        self.fit_options = fit_options

    @property
    def net_(self) -> nn.Module:
        """The trained net."""
        return cast(nn.Module, self.model_.net)

    # ------------------------------------------------------------------ parameters

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters. With `deep`, include `net__<name>` and `optimizer__<name>`."""
        params: dict[str, Any] = super().get_params(deep=deep)
        if deep and isinstance(self.net_options, Mapping):
            options = self.net_options.items()
            params.update({f"{NET_PREFIX}{name}": value for name, value in options})
        if deep and isinstance(self.optimizer, Mapping):
            settings = {name: value for name, value in self.optimizer.items() if name != "name"}
            params.update({f"{OPTIMIZER_PREFIX}{name}": settings[name] for name in settings})
        return params

    def set_params(self, **params: Any) -> NetEstimator:
        """Set parameters by name.

        `net__<name>` sets one of the net's own options. `optimizer__<name>` sets a setting of the
        optimizer besides its name or class (`optimizer__weight_decay=0.1`).
        """
        known = self.get_params(deep=False)
        for name in params:
            known_part = name.partition("__")[0] in known
            if not known_part and (sentence := instead(type(self).__name__, name)):
                raise ConfigurationError(f"Invalid parameter {name!r}. {sentence}", code="FK093")
        options = _pop(params, NET_PREFIX)
        settings = _pop(params, OPTIMIZER_PREFIX)
        super().set_params(**params)
        if options:
            self.net_options = {**(self.net_options or {}), **options}
        if settings:
            self.optimizer = _with_settings(self.optimizer, settings)
        return self

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        if not instead(f"fitkit.sklearn.{kind}", name):
            return super().__getattribute__(name)  # raises the original error
        raise no_attribute(repr(kind), f"fitkit.sklearn.{kind}", name)

    # ------------------------------------------------------------------ learning

    def _train(self, x: np.ndarray, y: np.ndarray, weight: Any, epochs: int) -> None:
        """Train `model_` for some epochs, with the estimator's own random numbers only."""
        self._check_options("fit_options", {"x", "y", "sample_weight"})
        with kept_random_numbers():
            set_random_state(self._random)
            try:
                self.history_: dict[str, list[Any]] = self.model_.fit(
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

    def _begin(self, outputs: int) -> None:
        """Build `model_`.

        Args:
            outputs: the number of columns that the net must output.
        """
        self._check_options("compile_options", set())
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with kept_random_numbers():
            set_seed(seed)
            self.model_ = Model(self._made_net(outputs))
            self._random = random_state()
        self.model_.compile(
            self.optimizer,
            self._loss(),
            self.metrics,
            learning_rate=self.learning_rate,
            **(self.compile_options or {}),
        )

    def _check_options(self, name: str, given: set[str]) -> None:
        """Refuse further arguments that are the estimator's own, or those of its `fit`."""
        own = set(self.get_params(deep=False))
        for option in getattr(self, name) or {}:
            if option in own:
                raise ConfigurationError(
                    f"{name} has {option!r}, which the estimator takes itself. Write "
                    f"{type(self).__name__}({option}=…)."
                )
            if option in given:
                raise ConfigurationError(f"{name} has {option!r}. Write fit({option}=…).")

    def _loss(self) -> Any:
        """Return the loss. None becomes the default of the kind of estimator."""
        raise NotImplementedError

    def _made_net(self, outputs: int) -> nn.Module:
        """Return a copy of the net, or the net that its factory builds for the data."""
        options = dict(self.net_options or {})
        if isinstance(self.net, nn.Module):
            if options:
                raise ConfigurationError(
                    f"net_options={describe(options)} are for a class or function that makes the "
                    f"net, but net is already a {type(self.net).__name__}."
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

    def _x_rules(self) -> dict[str, Any]:
        return {"dtype": self.dtype or "numeric", "allow_nd": True, "accept_sparse": "csr"}

    def _checked_weight(self, weight: Any, x: np.ndarray) -> np.ndarray | None:
        if weight is None:
            return None
        checked: np.ndarray = _check_sample_weight(
            weight, x, dtype=np.float32, ensure_non_negative=True
        )
        return checked

    def _outputs(self, x: Any) -> np.ndarray:
        """Return the net's outputs for inputs, (N, columns)."""
        check_is_fitted(self)
        x = validate_data(self, x, reset=False, **self._x_rules())
        found = self.model_.predict(x, batch_size=self.batch_size, verbose=0)
        if not isinstance(found, np.ndarray):
            raise ConfigurationError(
                f"The net returned a {type(found).__name__}, but a scikit-learn estimator needs "
                "one tensor of shape (N, columns)."
            )
        return found.reshape(len(found), -1).astype(np.float64)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.sparse = True
        return tags


def _accepted(make: Callable[..., Any], known: dict[str, Any]) -> dict[str, Any]:
    """Return the known values whose names are in a factory's signature."""
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):
        return {}
    takes_all = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
    return {name: value for name, value in known.items() if takes_all or name in parameters}


def _pop(params: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Take the parameters with a prefix out of `params`, and strip the prefix."""
    names = [name for name in params if name.startswith(prefix)]
    return {name.removeprefix(prefix): params.pop(name) for name in names}


def _with_settings(optimizer: Any, settings: dict[str, Any]) -> Any:
    """Return an optimizer's name, dict, class or partial, with settings added."""
    if isinstance(optimizer, str):
        return {"name": optimizer, **settings}
    if isinstance(optimizer, Mapping):
        return {**optimizer, **settings}
    if callable(optimizer):
        return functools.partial(optimizer, **settings)
    raise ConfigurationError(
        f"optimizer={describe(optimizer)} already has its settings. "
        f"{', '.join(OPTIMIZER_PREFIX + name for name in settings)} can be set if the "
        "optimizer is a name or a class."
    )


class Classifier(ClassifierMixin, NetEstimator):
    """A scikit-learn classifier that trains a net.

    Args:
        net: a `torch.nn.Module`, which each fit copies with its weights, or a class or function
            that makes one. It gets `n_features` and `n_outputs` if its signature names them. The
            net outputs one column per class. With a loss for two classes (`"bce_with_logits"`,
            `"binary_crossentropy"`) it outputs one column.
        loss: as in `Model.compile`. Default None: `"cross_entropy"`, so the net outputs logits.
        optimizer, learning_rate, metrics: as in `Model.compile`. You can set an optimizer's
            settings one by one, with `set_params(optimizer__weight_decay=0.1)` or in a grid.
        epochs, batch_size, validation_split, callbacks, verbose: as in `Model.fit`. Callbacks are
            copied for each fit. Default: 20 epochs, batches of 32, no output.
        class_weight: a dict from label to weight, `"balanced"`, or None (default). It multiplies
            sample weights.
        random_state: an int, a NumPy RandomState or None. An int makes a fit repeatable. torch's
            own random numbers are neither used nor advanced.
        dtype: the dtype for inputs. Default `"float32"`. None keeps theirs (for token ids).
        net_options: further arguments of the class or function. You can set them one by one, too,
            with `set_params(net__hidden=64)` or in a grid.
        compile_options, fit_options: further arguments of `Model.compile` (devices, strategy,
            precision) and of `Model.fit`.

    Attributes:
        classes_: the labels, sorted.
        n_features_in_, feature_names_in_: the inputs' features. The names are for data frames only.
        net_: the trained net.
        model_: the `fitkit.Model` around it.
        history_: a dict from name to values, one per epoch, of the last fit.

    Example:
        >>> import torch
        >>> from sklearn.datasets import load_iris
        >>> from fitkit.sklearn import Classifier
        >>> def make(n_features, n_outputs, hidden=16):
        ...     first = torch.nn.Linear(n_features, hidden)
        ...     last = torch.nn.Linear(hidden, n_outputs)
        ...     return torch.nn.Sequential(first, torch.nn.ReLU(), last)
        >>> x, y = load_iris(return_X_y=True)
        >>> estimator = Classifier(make, learning_rate=0.01, epochs=50, random_state=0)
        >>> estimator.fit(x, y).score(x, y) > 0.9
        True
    """

    @estimator_arguments
    def __init__(
        self,
        net: nn.Module | Callable[..., nn.Module],
        *,
        optimizer: OptimizerArgument = "adam",
        loss: LossArgument = None,
        learning_rate: float | None = None,
        metrics: MetricsArgument = None,
        epochs: int = 20,
        batch_size: int = 32,
        validation_split: float = 0.0,
        callbacks: Callbacks = None,
        class_weight: Any = None,
        verbose: Verbose = 0,
        random_state: Any = None,
        dtype: str | None = "float32",
        net_options: Mapping[str, Any] | None = None,
        compile_options: Mapping[str, Any] | None = None,
        fit_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            net,
            optimizer=optimizer,
            loss=loss,
            learning_rate=learning_rate,
            metrics=metrics,
            epochs=epochs,
            batch_size=batch_size,
            validation_split=validation_split,
            callbacks=callbacks,
            verbose=verbose,
            random_state=random_state,
            dtype=dtype,
            net_options=net_options,
            compile_options=compile_options,
            fit_options=fit_options,
        )
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Classifier:  # noqa: N803
        """Train a new net.

        Args:
            X: (N, features), or (N, ...) for nets that take images or sequences. Or a sparse
                matrix, whose batches are made dense one by one.
            y: (N,) labels: numbers or strings.
            sample_weight: (N,) weights of the samples.
        """
        x, y = self._checked(X, y, reset=True)
        self.classes_: np.ndarray[Any, Any] = np.unique(y)
        self._begin(self._columns())
        self._learn(x, y, sample_weight, self.epochs)
        return self

    def partial_fit(
        self,
        X: Any,  # noqa: N803
        y: Any,
        classes: Any = None,
        sample_weight: Any = None,
    ) -> Classifier:
        """Train for one more epoch on some data.

        Args:
            X, y, sample_weight: as in `fit`.
            classes: all labels that will occur. The first call needs it.

        Raises:
            ValueError: the first call lacks `classes`, or a label isn't among them.
        """
        begins = not hasattr(self, "model_")
        if begins and classes is None:
            raise ValueError("classes must be given in the first call of partial_fit.")
        x, y = self._checked(X, y, reset=begins)
        if begins:
            self.classes_ = np.unique(classes)
            self._begin(self._columns())
        elif classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise ValueError(
                f"classes={classes!r} differ from the first call's: {self.classes_!r}."
            )
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise ValueError(f"y has {unknown!r}, which are not among classes={self.classes_!r}.")
        self._learn(x, y, sample_weight, 1)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:  # noqa: N803
        """Predict the probability of each class, (N, classes), in the order of `classes_`."""
        outputs = self._outputs(X)
        takes = self._hint.takes
        if takes is None:
            raise ConfigurationError(
                f"loss={self.loss!r} doesn't say whether the net outputs logits or probabilities. "
                "Give a loss by name (or torch's own module), or use predict and net_."
            )
        if outputs.shape[1] == 1:
            of_second = expit(outputs) if takes == "logits" else outputs
            return np.hstack([1.0 - of_second, of_second])
        if takes == "logits":
            outputs = softmax(outputs, axis=1)
        elif takes == "log_probabilities":
            outputs = np.exp(outputs)
        probabilities: np.ndarray = outputs / outputs.sum(axis=1, keepdims=True)
        return probabilities

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """Predict the most probable label of each sample, (N,)."""
        outputs = self._outputs(X)
        if outputs.shape[1] == 1:
            border = 0.5 if self._hint.takes == "probabilities" else 0.0
            chosen = (outputs[:, 0] > border).astype(np.intp)
        else:
            chosen = outputs.argmax(axis=1)
        labels: np.ndarray = self.classes_[chosen]
        return labels

    # ------------------------------------------------------------------ inside

    def _loss(self) -> Any:
        return "cross_entropy" if self.loss is None else self.loss

    def _checked(self, x: Any, y: Any, *, reset: bool) -> tuple[np.ndarray, np.ndarray]:
        x, y = validate_data(self, x, y, reset=reset, **self._x_rules())
        check_classification_targets(y)
        return x, y

    @property
    def _hint(self) -> LossHint:
        """What the loss says about the net's outputs."""
        return CompiledLoss(self._loss()).hint(SINGLE)

    def _columns(self) -> int:
        """Return the number of columns that the net must output."""
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class, {self.classes_[0]!r}; a classifier needs two.")
        if self._hint.task != "binary":
            return len(self.classes_)
        if len(self.classes_) != 2:
            raise ConfigurationError(
                f"loss={self.loss!r} is for two classes, but y has {len(self.classes_)}. Write "
                "loss='cross_entropy', with a net that outputs one column per class."
            )
        return 1

    def _learn(self, x: np.ndarray, y: np.ndarray, weight: Any, epochs: int) -> None:
        weight = self._checked_weight(weight, x)
        if self.class_weight is not None:
            by_class = compute_sample_weight(self.class_weight, y).astype(np.float32)
            weight = by_class if weight is None else weight * by_class
        indices = np.searchsorted(self.classes_, y).astype(np.int64)
        self._train(x, self._targets(indices), weight, epochs)

    def _targets(self, indices: np.ndarray) -> np.ndarray:
        """Return the labels' indices in the form that the loss takes."""
        if self._hint.task == "binary":
            return indices.astype(np.float32).reshape(-1, 1)
        return indices


class Regressor(RegressorMixin, NetEstimator):
    """A scikit-learn regressor that trains a net.

    It learns the targets as they are. If they are far from 0 or widely spread, scale them with
    scikit-learn's `TransformedTargetRegressor`.

    Args:
        net: as in `Classifier`. It outputs one column per target, so one column if `y` is (N,).
        loss: as in `Model.compile`. Default None: `"mse"`.
        optimizer: this and all other arguments are as in `Classifier`.

    Attributes:
        n_features_in_, feature_names_in_, net_, model_, history_: as in `Classifier`.

    Example:
        >>> import torch
        >>> from fitkit.sklearn import Regressor
        >>> x = torch.randn(64, 4).numpy()
        >>> estimator = Regressor(torch.nn.Linear(4, 1), epochs=2).fit(x, x.sum(1))
        >>> estimator.predict(x[:3]).shape
        (3,)
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Regressor:  # noqa: N803
        """Train a new net.

        Args:
            X: (N, features), or (N, ...) for nets that take images or sequences. Or a sparse
                matrix, whose batches are made dense one by one.
            y: (N,) or (N, targets) numbers.
            sample_weight: (N,) weights of the samples.
        """
        x, y = self._checked(X, y, reset=True)
        self._begin(self._columns(y))
        self._learn(x, y, sample_weight, self.epochs)
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Regressor:  # noqa: N803
        """Train for one more epoch on some data, given as in `fit`."""
        begins = not hasattr(self, "model_")
        x, y = self._checked(X, y, reset=begins)
        if begins:
            self._begin(self._columns(y))
        self._learn(x, y, sample_weight, 1)
        return self

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """Predict the numbers for each sample, (N,) or (N, targets) like `y`."""
        outputs = self._outputs(X)
        return outputs[:, 0] if self._is_flat else outputs

    # ------------------------------------------------------------------ inside

    def _loss(self) -> Any:
        return "mse" if self.loss is None else self.loss

    def _checked(self, x: Any, y: Any, *, reset: bool) -> tuple[np.ndarray, np.ndarray]:
        rules = {"multi_output": True, "y_numeric": True, **self._x_rules()}
        x, y = validate_data(self, x, y, reset=reset, **rules)
        return x, y.astype(np.float32)

    def _columns(self, y: np.ndarray) -> int:
        """Return the number of columns that the net must output."""
        self._is_flat = y.ndim == 1
        return 1 if self._is_flat else y.shape[1]

    def _learn(self, x: np.ndarray, y: np.ndarray, weight: Any, epochs: int) -> None:
        y = y.reshape(len(y), -1)
        self._train(x, y, self._checked_weight(weight, x), epochs)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = True
        return tags
