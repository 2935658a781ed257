"""Files: weights and whole checkpoints, written whole or not at all, and never unpickled."""

from fitkit.checkpoint.atomic import remove_abandoned
from fitkit.checkpoint.checkpoint_file import (
    Checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from fitkit.checkpoint.container import Reader, read_container, write_container
from fitkit.checkpoint.disk import is_there, link_checkpoint, remove_checkpoint
from fitkit.checkpoint.formats import folder_format, is_folder_name, open_weights
from fitkit.checkpoint.frozen import without_frozen
from fitkit.checkpoint.optimizer_state import check_fused_state, check_optimizer_state
from fitkit.checkpoint.uncompiled import plain_name, uncompiled
from fitkit.checkpoint.weights import (
    FittingWeights,
    LoadedWeights,
    fitting_weights,
    load_weights,
    save_weights,
)

__all__ = [
    "Checkpoint",
    "FittingWeights",
    "LoadedWeights",
    "Reader",
    "check_fused_state",
    "check_optimizer_state",
    "fitting_weights",
    "folder_format",
    "is_folder_name",
    "is_there",
    "link_checkpoint",
    "load_weights",
    "open_checkpoint",
    "open_weights",
    "plain_name",
    "read_container",
    "remove_abandoned",
    "remove_checkpoint",
    "save_checkpoint",
    "save_weights",
    "uncompiled",
    "without_frozen",
    "write_container",
]
