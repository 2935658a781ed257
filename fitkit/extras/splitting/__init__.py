"""`compile(out_of_memory="split")`: a batch that doesn't fit is computed in parts, and goes on."""

from fitkit.extras.splitting.report import PartsReport
from fitkit.extras.splitting.steps import OwnStepInParts, StepInParts
from fitkit.extras.splitting.updates import UpdateInParts

__all__ = ["OwnStepInParts", "PartsReport", "StepInParts", "UpdateInParts"]
