"""For data: sources of batches, how loaders are read in order, and changes of whole batches.

Example:
    >>> import torch, fitkit
    >>> from fitkit.seams.data import BatchTransform
    >>> class Scaled(BatchTransform):
    ...     "Multiplies a batch's inputs by one random number, the same on all ranks."
    ...     def apply(self, x, y, whole):
    ...         return x * whole.numbers.uniform(0.9, 1.1), y
    >>> model = fitkit.Model(torch.nn.Linear(4, 1))
    >>> model.compile("sgd", "mse", batch_transforms=[Scaled()])
    >>> x = torch.randn(64, 4)
    >>> history = model.fit(x, x.sum(1, keepdim=True), verbose=0)
"""

from typing import TYPE_CHECKING

from fitkit.data.arrays import as_tensors, is_array, made_dense, samples_between
from fitkit.data.batches import Batch, CountedSource, NoRows, Source, marked, unpack_batch
from fitkit.data.drawn import DrawnSource, ReadByItself
from fitkit.data.draws import DataDraws, key_of_state, key_within
from fitkit.data.loaders import (
    ReadInOrder,
    begin_order,
    computed_batches,
    is_mosaic_stream,
    iterate,
    iterates_by_itself,
    parts_of,
    reads_by_index,
    reads_samples,
    seeds_apart,
    tell_epoch,
    with_repeats,
)
from fitkit.data.permutation import IndexBatches
from fitkit.data.seeded import Keys, Seeded
from fitkit.data.sources import (
    LoaderSource,
    check_data_type,
    collate_without_masks,
    length_of,
    make_source,
    without_first,
)
from fitkit.data.to_device import own_data
from fitkit.registry import imported_on_demand
from fitkit.training.batch_changes import ChangesBatches

if TYPE_CHECKING:
    from fitkit.extras.batch_transforms import BatchTransform, WholeBatch
else:
    __getattr__ = imported_on_demand(
        __name__,
        {
            "BatchTransform": "fitkit.extras.batch_transforms:BatchTransform",
            "WholeBatch": "fitkit.extras.batch_transforms:WholeBatch",
        },
    )

__all__ = [
    "Batch",
    "BatchTransform",
    "ChangesBatches",
    "CountedSource",
    "DataDraws",
    "DrawnSource",
    "IndexBatches",
    "Keys",
    "LoaderSource",
    "NoRows",
    "ReadByItself",
    "ReadInOrder",
    "Seeded",
    "Source",
    "WholeBatch",
    "as_tensors",
    "begin_order",
    "check_data_type",
    "collate_without_masks",
    "computed_batches",
    "is_array",
    "is_mosaic_stream",
    "iterate",
    "iterates_by_itself",
    "key_of_state",
    "key_within",
    "length_of",
    "made_dense",
    "make_source",
    "marked",
    "own_data",
    "parts_of",
    "reads_by_index",
    "reads_samples",
    "samples_between",
    "seeds_apart",
    "tell_epoch",
    "unpack_batch",
    "with_repeats",
    "without_first",
]
