"""Nets as scikit-learn estimators: for pipelines, grid searches and cross-validation."""

from __future__ import annotations

from fitkit.errors import missing_package

try:
    import sklearn
except ImportError:
    raise missing_package("scikit-learn", "sklearn", "fitkit.sklearn") from None

from fitkit.sklearn.classifier import Classifier
from fitkit.sklearn.regressor import Regressor

__all__ = ["Classifier", "Regressor"]
