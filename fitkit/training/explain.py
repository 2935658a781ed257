"""torch's errors about a batch, said in terms of what the user passed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch

from fitkit import trees
from fitkit.errors import ConfigurationError, FitkitError
from fitkit.torch_errors import DTYPE_ERRORS, SHAPE_ERRORS, raised_in_torch

ONE_SAMPLE = re.compile(r"Expected more than 1 value per channel")
DEVICE_ERRORS = re.compile(r"same device|is on cpu, different from other tensors")
HALF_LSTM = re.compile(r"could not create a primitive descriptor")
INDEX_ERRORS = re.compile(r"index out of range in self")
LENGTH_ERRORS = re.compile(r"Expected input batch_size|batch or spatial sizes don't match")
LABEL_ERRORS = re.compile(r"Target (-?\d+) is out of bounds")
CALL_ERRORS = re.compile(
    r"(forward|_forward_unimplemented)\(\) (got|missing|takes)|multiple values for argument"
)
CONTAINER_ERRORS = re.compile(
    r"'(dict|tuple|list)' object has no attribute|must be Tensor, not (dict|tuple|list)"
)


def raise_explained(
    error: Exception, net: Callable[..., Any], x: Any, y: Any, name: str = "x"
) -> None:
    """Raise a clearer error in place of one that a batch caused; see `explained`."""
    explanation = None if isinstance(error, FitkitError) else explained(error, net, x, y, name)
    if explanation is not None:
        raise explanation from error


def explained(
    error: Exception, net: Callable[..., Any], x: Any, y: Any, name: str = "x"
) -> FitkitError | None:
    """A clearer error for one that a batch caused; None for what is not ours to explain.

    Errors that the user's own code raises, out-of-memory errors and everything unknown stay
    as they are.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return None
    text = str(error)
    given = shapes_of(x, name)
    if not isinstance(error, RuntimeError) and not _raised_by_torch(error):
        return None
    if isinstance(error, ValueError) and ONE_SAMPLE.search(text):
        return ConfigurationError(
            f"Batch normalisation can't train on one sample: {given}. Choose a batch_size that "
            "leaves no last batch of 1, or give a DataLoader with drop_last=True."
        )
    if (
        isinstance(error, (RuntimeError, ValueError))
        and y is not None
        and LENGTH_ERRORS.search(text)
    ):
        return ConfigurationError(
            f"The loss needs a target for each prediction, but {given}, {shapes_of(y, 'y')}. "
            f"{_first_line(text)} Give a batch's x and y the same number of samples."
        )
    if isinstance(error, (RuntimeError, ValueError)) and SHAPE_ERRORS.search(text):
        return ConfigurationError(
            f"The net can't take this batch{_layer(error, net)}: {given}. {_first_line(text)} The "
            "first dimension is the batch; check the others (features or channels) against what "
            "the layer expects."
        )
    if isinstance(error, (RuntimeError, ValueError)) and DTYPE_ERRORS.search(text):
        return ConfigurationError(
            f"The numbers of this batch are of a type that the net or loss can't take: {given}"
            f"{'' if y is None else ', ' + shapes_of(y, 'y')}. {_first_line(text)} Convert the "
            "data: images and features to floats (x.astype('float32')), tokens and classes to "
            "integers (x.astype('int64'))."
        )
    if isinstance(error, RuntimeError) and DEVICE_ERRORS.search(text):
        return ConfigurationError(
            f"Inside the net tensors of several devices meet. {_first_line(text)} Make tensors in "
            "forward on the input's device (torch.zeros(…, device=x.device)), and keep constants "
            "with register_buffer."
        )
    if isinstance(error, RuntimeError) and HALF_LSTM.search(text):
        return ConfigurationError(
            f"This CPU can't compute a layer of the net in this number type. {_first_line(text)} "
            "Write precision='bf16-mixed' (torch has no float16 LSTM on some CPUs)."
        )
    if isinstance(error, IndexError) and INDEX_ERRORS.search(text):
        return ConfigurationError(
            f"An Embedding layer got an index that it doesn't have: {given}. Every index must be "
            "from 0 to num_embeddings - 1."
        )
    label = LABEL_ERRORS.search(text)
    if isinstance(error, IndexError) and label:
        return ConfigurationError(
            f"y has the label {label.group(1)}, but the net gives fewer classes. Labels are class "
            "numbers from 0 to the number of outputs - 1."
        )
    whole = not isinstance(x, torch.Tensor) and CONTAINER_ERRORS.search(text)
    if isinstance(error, (TypeError, AttributeError)) and whole:
        return ConfigurationError(
            f"The net's forward{_signature(net)} takes a single input, so it got the "
            f"{type(x).__name__} whole: {given}. {_first_line(text)} Give the net one argument for "
            "each input, or one tensor as x."
        )
    if isinstance(error, TypeError) and CALL_ERRORS.search(text):
        return ConfigurationError(
            f"The net's forward{_signature(net)} can't be called with this batch: {given}. "
            f"{_first_line(text)} A tuple goes to the net by position, a dict by keyword."
        )
    return None


def _raised_by_torch(error: Exception) -> bool:
    """Whether torch raised it, or Python at a call of the net's; not a `raise` of the user's."""
    return raised_in_torch(error) or isinstance(error, (TypeError, AttributeError, IndexError))


def _layer(error: Exception, net: Callable[..., Any]) -> str:
    """Which of the net's layers an error comes from: ` in its layer '2', Linear(…)`."""
    names = {id(module): name for name, module in getattr(net, "named_modules", dict)()}
    found = ""
    frame = error.__traceback__
    while frame is not None:
        module = frame.tb_frame.f_locals.get("self")
        name = names.get(id(module), "").removeprefix("net.")
        if name and isinstance(module, torch.nn.Module) and not list(module.children()):
            found = f" in its layer {name!r}, {type(module).__name__}({module.extra_repr()})"
        frame = frame.tb_next
    return found


def _first_line(text: str) -> str:
    line = text.strip().splitlines()[0].strip()
    return f"torch says: {line}{'' if line.endswith('.') else '.'}"


def _signature(net: Callable[..., Any]) -> str:
    inner = getattr(net, "net", None)
    target = inner if isinstance(inner, torch.nn.Module) else net
    try:
        return str(inspect.signature(getattr(target, "forward", target)))
    except (TypeError, ValueError):
        return "(…)"


def shapes_of(tree: Any, name: str) -> str:
    """The shapes and dtypes in a tree, for a message: `x has shape (32, 64), float32`."""
    parts = []
    for path, leaf in trees.leaves_with_paths(tree):
        if isinstance(leaf, torch.Tensor):
            dtype = str(leaf.dtype).removeprefix("torch.")
            parts.append(f"{name}{path} has shape {tuple(leaf.shape)}, {dtype}")
        else:
            parts.append(f"{name}{path} is a {type(leaf).__name__}")
    return "; ".join(parts[:6]) + ("; …" if len(parts) > 6 else "")
