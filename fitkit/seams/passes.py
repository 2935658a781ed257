"""For verbs of your own: what surrounds a call, and outputs in the order of the samples.

Example:
    >>> import torch, fitkit
    >>> from fitkit.seams.passes import surroundings
    >>> model = fitkit.Model(torch.nn.Linear(4, 1))
    >>> model.compile("sgd", "mse", deterministic=True)
    >>> with surroundings(model, "evaluate"):  # as compile was told
    ...     torch.are_deterministic_algorithms_enabled()
    True
"""

from fitkit.training.evaluate import HostCopies, in_input_order, predict_source
from fitkit.training.settings import EvaluateArguments
from fitkit.training.surroundings import let_go, reading_on_ranks, surroundings

__all__ = [
    "EvaluateArguments",
    "HostCopies",
    "in_input_order",
    "let_go",
    "predict_source",
    "reading_on_ranks",
    "surroundings",
]
