"""Each batch's own loss, from logs that have running means."""

from __future__ import annotations

import torch

from fitkit.callbacks.base import Logs


class BatchLosses:
    """Collects the losses of batches without asking the device for each.

    A batch's logs carry the step's own loss as a tensor (`logs.batch_loss`). Where they don't,
    it follows from two running means, which takes batches to be equally long.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[int, torch.Tensor]] = []
        self._sum = 0.0

    def reset(self) -> None:
        """An epoch begins."""
        self._kept = []
        self._sum = 0.0

    def add(self, batch: int, logs: Logs) -> None:
        """Take a batch's loss."""
        loss = getattr(logs, "batch_loss", None)
        if isinstance(loss, torch.Tensor):
            self._kept.append((batch, loss.detach()))
            return
        if "loss" not in logs:
            return
        total = float(logs["loss"]) * (batch + 1)
        self._kept.append((batch, torch.tensor(total - self._sum)))
        self._sum = total

    def take(self) -> list[tuple[int, float]]:
        """Batches and their losses since the last time, with one look at the device."""
        kept, self._kept = self._kept, []
        if not kept:
            return []
        losses = torch.stack([loss.float() for _, loss in kept]).tolist()
        return [(batch, loss) for (batch, _), loss in zip(kept, losses, strict=True)]
