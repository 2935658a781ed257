"""Updates from scaled losses: what float16 gradients need so as not to vanish.

Gradients below 6e-8 are 0 in float16. So the loss is multiplied by a large number before
`backward`, and the gradients are divided by it before they are clipped and used. Where they
aren't finite, the number was too large: the optimizer's step is left out and the number halved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from fitkit.accelerators import has_streams
from fitkit.errors import ConfigurationError


class Scaling:
    """Scales losses and makes those updates whose gradients are finite.

    One serves all of a training, over several optimizers and calls of `fit`. For each update:

    ```
    scaling.backward(loss)          # once for each batch of an accumulated group
    scaling.unscale(optimizer)      # only where gradients are clipped or looked at
    scaling.step(optimizer)         # for each optimizer
    scaling.update()                # once, after the last of them
    ```

    Args:
        scaler: torch's, which keeps the scale on the device.

    Attributes:
        scaler: as given.

    Ranks:
        Local. Gradients that were exchanged before are the same everywhere, and so are the
        scale and the steps left out.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler
        # Optimizers, by id, whose gradients were unscaled since the last update; that have stepped.
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()
        self._late: dict[int, _LateVerdict] = {}  # by an optimizer's id
        self._overcounted = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs, where there are other optimizers."""
        self._settle()
        return {**self.__dict__, "_unscaled": set(), "_stepped": set()}

    def backward(
        self, loss: torch.Tensor, through: Callable[[torch.Tensor], None] = torch.Tensor.backward
    ) -> None:
        """Compute the gradients of the scaled loss.

        Args:
            loss: (), of any floating dtype: a half one is float32 once it is scaled.
            through: what computes gradients (a strategy's `backward`).
        """
        through(self.scaler.scale(loss))

    def unscale(self, optimizer: Optimizer) -> None:
        """Give the gradients the size that the unscaled loss would have given them.

        To be called after a group's last backward; again before `update` it does nothing.

        Args:
            optimizer: whose parameters' gradients are divided.
        """
        if id(optimizer) in self._unscaled or not _has_gradients(optimizer):
            return
        self._unscaled.add(id(optimizer))
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Make the optimizer's step, unless gradients aren't finite.

        Returns:
            Whether it counts as an update. Fused optimizers on CUDA decide on the device. To avoid
            waiting for it, a skipped step is found at the next one, which then doesn't count.
        """
        if id(optimizer) in self._stepped:
            self.update()
        if not _has_gradients(optimizer):
            optimizer.step()  # nothing to look at; a scaler would take that for a mistake
            return True
        self._stepped.add(id(optimizer))
        verdicts: list[torch.Tensor | None] = []
        note = optimizer.register_step_post_hook(
            lambda stepped, args, kwargs: verdicts.append(getattr(stepped, "found_inf", None))
        )
        try:
            self.scaler.step(optimizer)
        finally:
            note.remove()
        if not verdicts:
            return False  # the scaler left it out
        found_inf = verdicts[0]
        return found_inf is None or self._counts(optimizer, found_inf)

    def update(self) -> None:
        """Let the scale adapt to the steps since the last call; without any it does nothing."""
        if self._stepped or self._unscaled:
            self.scaler.update()
        self._stepped.clear()
        self._unscaled.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, its growth, and how many counted updates turned out to be left out."""
        self._settle()
        return {"scaler": self.scaler.state_dict(), "overcounted": self._overcounted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as `state_dict` says."""
        self.scaler.load_state_dict(dict(state["scaler"]))
        self._overcounted = int(state["overcounted"])
        self._late.clear()
        self._stepped.clear()
        self._unscaled.clear()

    def _counts(self, optimizer: Optimizer, found_inf: torch.Tensor) -> bool:
        """Whether to count a step that the optimizer itself may have left out on the device."""
        if not has_streams(found_inf.device):
            return found_inf.item() == 0
        self._settle([id(optimizer)])
        self._late[id(optimizer)] = _LateVerdict(found_inf)
        if self._overcounted:
            self._overcounted -= 1
            return False
        return True

    def _settle(self, optimizers: Iterable[int] | None = None) -> None:
        """Look at the verdicts on the last steps (of optimizers by id; None for all)."""
        for one in list(self._late) if optimizers is None else optimizers:
            verdict = self._late.pop(one, None)
            self._overcounted += verdict is not None and verdict.left_out()


class _LateVerdict:
    """A number on the device, on its way to the host.

    Args:
        found_inf: (): not 0 where gradients weren't finite.
    """

    def __init__(self, found_inf: torch.Tensor) -> None:
        self._number = torch.empty((), dtype=found_inf.dtype, pin_memory=True)
        self._number.copy_(found_inf, non_blocking=True)
        self._copied = torch.accelerator.current_stream(found_inf.device).record_event()

    def left_out(self) -> bool:
        """Whether the step was left out; waits until the device has got there."""
        self._copied.synchronize()
        return self._number.item() != 0


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


CLOSURE = (
    "{kind} computes the loss itself, several times per step, which precision='16-mixed' can't "
    "scale for it. Write precision='bf16-mixed', or use another optimizer."
)


@contextmanager
def scaled_steps(
    scaling: Scaling, optimizers: Iterable[Optimizer], count: Callable[[], Any] = lambda: None
) -> Iterator[None]:
    """Let the optimizers' own `step` go through a scaling meanwhile.

    The caller gives the scaling one `update` after each of the user's steps.

    Args:
        count: called after each step that counts as an update.
    """
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(_scaled(scaling, optimizer, count))
        yield


@contextmanager
def _scaled(scaling: Scaling, optimizer: Optimizer, count: Callable[[], Any]) -> Iterator[None]:
    own = vars(optimizer).get("step")  # a scheduler's, which counts steps
    original: Callable[..., Any] = optimizer.step
    is_inside = False

    @functools.wraps(original)
    def step(closure: Callable[[], Any] | None = None) -> Any:
        nonlocal is_inside
        if closure is not None:
            raise ConfigurationError(CLOSURE.format(kind=type(optimizer).__name__))
        if is_inside:  # the scaling's own call
            return original()
        is_inside = True
        try:
            counts = scaling.step(optimizer)
        finally:
            is_inside = False
        if counts:
            count()
        return None

    optimizer.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own  # type: ignore[method-assign]
