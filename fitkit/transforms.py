"""Change whole training batches on the device: `compile(batch_transforms=[MixUp(0.2)])`.

A transform is a function `(x, y) -> (x, y)` or `x -> x` of a batch's tensors. Those of this module
draw alike on all ranks, so two processes train as one does. `BatchTransform` is their base class.
"""

from fitkit.extras.batch_transforms import BatchTransform, WholeBatch
from fitkit.extras.transforms import CutMix, MixUp, OneOf, RandomErasing

__all__ = ["BatchTransform", "CutMix", "MixUp", "OneOf", "RandomErasing", "WholeBatch"]


def __dir__() -> list[str]:
    """List the public names only."""
    return __all__
