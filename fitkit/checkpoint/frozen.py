"""Files without the parameters that don't learn, such as an adapter's file without its base.

Such a file names what it leaves out, each with its dtype, and has one digest of all of it. So
missing on purpose differs from lost, and a changed base is recognized. The note travels in the
state dict's `_metadata`, as torch's own versions do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from fitkit import trees
from fitkit.arguments import dtype_name
from fitkit.checkpoint.arrays import dtype_named
from fitkit.distributed.in_place import is_spread, whole
from fitkit.errors import ConfigurationError
from fitkit.tensors import bytes_of

NOTE = "fitkit.frozen"
"""Where a state dict's `_metadata` has the note, in the entry of the module itself."""


@dataclass(frozen=True)
class Frozen:
    """The parameters that a file leaves out.

    Attributes:
        dtypes: torch's name of each one's dtype, by the parameter's name.
        digest: XXH3-128 of all of them, in hexadecimal digits.
    """

    dtypes: Mapping[str, str]
    digest: str

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], *, wanted: bool = True) -> Frozen:
        """Return the note for these tensors; spread ones come together one at a time.

        Args:
            wanted: whether this rank writes the note; without, it has no digest.

        Ranks:
            Collective, where tensors are spread.
        """
        digest = xxhash.xxh3_128()
        for name in sorted(tensors):
            tensor = whole(tensors[name])
            if wanted:
                _feed(digest, name, tensor)
        dtypes = {name: dtype_name(tensor.dtype) for name, tensor in tensors.items()}
        return cls(dtypes, digest.hexdigest() if wanted else "")

    @classmethod
    def from_data(cls, found: object) -> Frozen:
        """Return the note that `as_data` gave; an empty one for None.

        Raises:
            ValueError: it isn't as fitkit writes it.
        """
        if found is None:
            return NOTHING_FROZEN
        if isinstance(found, dict):
            dtypes, digest = found.get("dtypes"), found.get("digest")
            if isinstance(dtypes, dict) and isinstance(digest, str):
                names = [*dtypes, *dtypes.values()]
                if all(isinstance(name, str) for name in names):
                    return cls(dtypes, digest)
        raise ValueError("its note of what it leaves out isn't as fitkit writes it")

    def as_data(self) -> dict[str, Any]:
        """Plain data for a file."""
        return {"dtypes": dict(self.dtypes), "digest": self.digest}

    def differs(self, state_dict: Mapping[str, Any]) -> str:
        """Why a module's frozen parameters aren't those that were left out; empty where they are.

        A wider floating dtype than theirs is rounded to it first, as a half precision would.
        """
        found: dict[str, torch.Tensor] = {}
        for name, kind in self.dtypes.items():
            tensor, dtype = state_dict.get(name), dtype_named(kind)
            if not isinstance(tensor, torch.Tensor):
                return f"the module has no {name!r}"
            if tensor.is_meta:
                return f"the module's {name!r} has no values yet"
            if dtype is not None and trees.is_inexact(tensor):
                kinds = tensor.dtype.is_floating_point, tensor.dtype.is_complex
                if kinds == (dtype.is_floating_point, dtype.is_complex):
                    tensor = tensor.to(dtype)
            found[name] = tensor
        same = Frozen.of(found).digest == self.digest
        return "" if same else f"its {len(self.dtypes)} frozen parameters have other numbers"


NOTHING_FROZEN = Frozen({}, "")


def _feed(digest: Any, name: str, tensor: torch.Tensor) -> None:
    """Let a digest have a tensor's name, dtype, shape and numbers."""
    tensor = tensor.detach()
    if hasattr(tensor, "__tensor_flatten__") and not is_spread(tensor):  # quantized by torchao
        for part in tensor.__tensor_flatten__()[0]:
            _feed(digest, f"{name}.{part}", getattr(tensor, part))
        return
    digest.update(f"{name} {dtype_name(tensor.dtype)} {tuple(tensor.shape)}\n".encode())
    digest.update(bytes_of(tensor.cpu()).numpy())


def without_frozen(
    module: torch.nn.Module, state_dict: Mapping[str, Any], *, wanted: bool = True
) -> OrderedDict[str, Any]:
    """Return a state dict without the parameters that don't learn, and with the note of them.

    Buffers stay: a training may change them, whichever parameters learn.

    Args:
        module: what the state dict is of.
        state_dict: spread tensors stay spread.
        wanted: whether this rank writes the file.

    Ranks:
        Collective, where tensors are spread.

    Raises:
        ConfigurationError: no parameter learns.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ConfigurationError(
            "trainable_only=True would leave nothing to save: no parameter of the net learns "
            "(requires_grad). Free some, or leave trainable_only out."
        )
    left_out = {
        name: value
        for name, value in state_dict.items()
        if name in named and not named[name].requires_grad and isinstance(value, torch.Tensor)
    }
    kept = OrderedDict((name, v) for name, v in state_dict.items() if name not in left_out)
    metadata = OrderedDict(getattr(state_dict, "_metadata", {}))
    if left_out:
        add_note(metadata, Frozen.of(left_out, wanted=wanted))
    kept._metadata = metadata  # type: ignore[attr-defined]
    return kept


def add_note(metadata: dict[str, Any], frozen: Frozen) -> None:
    """Put the note into a state dict's metadata, where anything is left out."""
    if frozen.dtypes:
        metadata[""] = {**metadata.get("", {}), NOTE: frozen.as_data()}


def noted(metadata: object) -> Frozen:
    """Return what a state dict's metadata say is left out.

    Raises:
        ValueError: they say it in no way that fitkit would.
    """
    own = dict.get(metadata, "") if isinstance(metadata, dict) else None
    return Frozen.from_data(dict.get(own, NOTE) if isinstance(own, dict) else None)
