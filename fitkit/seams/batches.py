"""For kinds of batches: entries whose samples aren't the rows of a plain tensor.

A `BatchKind` says how many samples an entry has. If yours can, it also says how entries move to a
device, how samples are cut apart and how a net's outputs of this kind are joined. Register it by
the full name of the class, in the module that has the class: each rank imports it. Classes of a
script that is run under `ddp_spawn` reach the ranks without it.

Example:
    >>> import torch, fitkit
    >>> from fitkit.seams.batches import KINDS, BatchKind
    >>> class Clouds:
    ...     "Clouds of points: the points of all (P, 2), and how many each cloud has."
    ...     def __init__(self, points, sizes):
    ...         self.points, self.sizes = points, sizes
    >>> class OfClouds(BatchKind):
    ...     words = "a batch of clouds"
    ...     def count(self, entry):
    ...         return len(entry.sizes)
    ...     def move(self, entry, device, dtype):
    ...         return Clouds(entry.points.to(device, dtype), entry.sizes)
    ...     def rows(self, entry, start, stop):
    ...         return Clouds(torch.cat(entry.points.split(entry.sizes)[start:stop]),
    ...                       entry.sizes[start:stop])
    ...     def join(self, entries):
    ...         return Clouds(torch.cat([one.points for one in entries]),
    ...                       [size for one in entries for size in one.sizes])
    >>> _ = KINDS.add(f"{Clouds.__module__}.Clouds", OfClouds())
    >>> class Middles(torch.nn.Linear):
    ...     def forward(self, clouds):
    ...         parts = super().forward(clouds.points).split(clouds.sizes)
    ...         return torch.stack([part.mean(0) for part in parts])
    >>> model = fitkit.Model(Middles(2, 1))
    >>> model.compile("sgd", "mse")
    >>> batches = [(Clouds(torch.rand(6, 2).double(), [1, 3, 2]), torch.rand(3, 1))] * 2
    >>> history = model.fit(batches, verbose=0)
    >>> model.predict((x for x, _ in batches), verbose=0).shape
    (6, 1)
"""

from fitkit.batch_kinds import KINDS, BatchKind, kind_of

__all__ = ["KINDS", "BatchKind", "kind_of"]
