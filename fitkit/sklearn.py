"""Estimators for scikit-learn."""

from fitkit.extras.sklearn import Classifier, Regressor

__all__ = ["Classifier", "Regressor"]


def __dir__() -> list[str]:
    """List the public names only."""
    return __all__
