"""Estimators for scikit-learn, which is imported with the first of them."""

from typing import TYPE_CHECKING

from fitkit.registry import imported_on_demand

if TYPE_CHECKING:
    from fitkit.extras.sklearn import Classifier, Regressor
else:
    __getattr__ = imported_on_demand(
        __name__,
        {
            "Classifier": "fitkit.extras.sklearn:Classifier",
            "Regressor": "fitkit.extras.sklearn:Regressor",
        },
    )

__all__ = ["Classifier", "Regressor"]


def __dir__() -> list[str]:
    """List the public names only."""
    return __all__
