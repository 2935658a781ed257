"""Search rates, batch sizes and other settings; compare models over many runs."""

from fitkit.extras.trials.compared import Comparison, compare
from fitkit.extras.trials.predicted import PredictionComparison, compare_predictions
from fitkit.extras.trials.searched import Search, SearchRun, search
from fitkit.extras.trials.space import Between
from fitkit.extras.tune import RateRange, batch_size, learning_rate

__all__ = [
    "Between",
    "Comparison",
    "PredictionComparison",
    "RateRange",
    "Search",
    "SearchRun",
    "batch_size",
    "compare",
    "compare_predictions",
    "learning_rate",
    "search",
]


def __dir__() -> list[str]:
    """List the public names only."""
    return __all__
