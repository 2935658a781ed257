"""For what computes steps otherwise than as written, and for steps that other modules bring.

Example:
    >>> import torch, fitkit
    >>> from fitkit.seams.steps import CompiledStep, Outcome
    >>> class Noted(CompiledStep):
    ...     "Computes a batch as written, and prints its loss."
    ...     def __call__(self, batch, index=0, *, is_part=False):
    ...         outcome: Outcome = super().__call__(batch, index, is_part=is_part)
    ...         print(f"batch {index}: {outcome.loss.item():.1f}")
    ...         return outcome
"""

from fitkit.module import is_metric, joined_values
from fitkit.training.applier import Applier, ScaledApplier
from fitkit.training.compiler import Compiler, NetAlone, Take, Updates
from fitkit.training.empty_parts import stop_gradients_of_nothing
from fitkit.training.log import Logbook
from fitkit.training.net_call import forward_of, is_plain_wrapper
from fitkit.training.own_step import OwnStep, loss_in, said_count, without_gradients
from fitkit.training.parts_of_batches import counter_of, labels_inside, unpacker_of
from fitkit.training.settings import parts_of_update
from fitkit.training.step import CompiledStep, Outcome
from fitkit.training.step_for import Step
from fitkit.training.tally import CarriedTally
from fitkit.training.update import Update
from fitkit.training.weighing import count_in

__all__ = [
    "Applier",
    "CarriedTally",
    "CompiledStep",
    "Compiler",
    "Logbook",
    "NetAlone",
    "Outcome",
    "OwnStep",
    "ScaledApplier",
    "Step",
    "Take",
    "Update",
    "Updates",
    "count_in",
    "counter_of",
    "forward_of",
    "is_metric",
    "is_plain_wrapper",
    "joined_values",
    "labels_inside",
    "loss_in",
    "parts_of_update",
    "said_count",
    "stop_gradients_of_nothing",
    "unpacker_of",
    "without_gradients",
]
