"""The document of a file: JSON that says what the numbered arrays are.

A file's names, structure and small values are here and not in HDF5, which would sort `1, 10, 2`,
make folders of `/`, and offer a hostile file many more ways to say something unexpected.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch

from fitkit.arguments import describe
from fitkit.checkpoint.dtypes import (
    LARGEST_RANK,
    dtype_name,
    dtype_named,
    file_dtype,
    stored_shape,
)
from fitkit.errors import ConfigurationError

# Parsed JSON takes some 20 times its size in memory: 16 MiB keep that below 500 MB, and hold the
# names of more than 200,000 tensors.
LARGEST_DOCUMENT = 16 << 20


@dataclass(frozen=True)
class ArrayDescription:
    """What the document says of one array."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the dataset, where complex numbers are pairs."""
        return stored_shape(self.dtype, self.shape)

    @property
    def size_bytes(self) -> int:
        """How much of the file it takes."""
        return math.prod(self.stored_shape) * file_dtype(self.dtype).itemsize


def check_plain_data(value: object, place: str) -> None:
    """Refuse what JSON wouldn't give back as it is, naming where it stands.

    None, booleans, ints, floats, strings, lists, and dicts with string keys pass. Tuples don't:
    they would come back as lists.
    """
    try:
        _check_plain_data(value, place)
    except RecursionError:
        raise ConfigurationError(f"{place} is nested too deeply, or contains itself.") from None


def _check_plain_data(value: object, place: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigurationError(
                    f"{place} has the key {describe(key)}, and a file holds only strings as keys. "
                    "Write it as a string."
                )
            _check_plain_data(item, f"{place}[{key!r}]")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_plain_data(item, f"{place}[{index}]")
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise ConfigurationError(
            f"{place}={describe(value)} can't be written to a file: only pickle could store a "
            f"{type(value).__name__}, and pickles can run code when they are read. Use None, "
            "booleans, numbers, strings, and lists and dicts of these."
        )


def encode_document(content: dict[str, Any], tensors: list[torch.Tensor]) -> bytes:
    """The document for `content`, which refers to `tensors` by their numbers.

    Raises:
        ConfigurationError: `content` isn't plain data, or is too large.
    """
    check_plain_data(content, "document")
    arrays = [
        {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)} for tensor in tensors
    ]
    # Escaped to ASCII, so that a lone surrogate in a string can be written too.
    text = json.dumps({"arrays": arrays, "content": content}, separators=(",", ":")).encode("ascii")
    if len(text) > LARGEST_DOCUMENT:
        raise ConfigurationError(
            f"What is to be saved beside the arrays takes {len(text) / 1e6:.1f} MB as JSON, and "
            f"at most {LARGEST_DOCUMENT / 1e6:.1f} MB can be read again. Store long lists of "
            "numbers as tensors."
        )
    return text


def decode_document(text: bytes) -> tuple[dict[str, Any], list[ArrayDescription]]:
    """The content and what the arrays are.

    Raises:
        ValueError: the document isn't one that `encode_document` could have made.
    """
    try:
        # Of bytes, json would take UTF-16 and UTF-32 too.
        document = json.loads(text.decode("ascii"), object_pairs_hook=without_repetition)
    except RecursionError:
        raise ValueError("its document is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"its document can't be read ({error})") from None
    if not isinstance(document, dict) or not isinstance(document.get("content"), dict):
        raise ValueError("its document has no content")
    arrays = document.get("arrays")
    if not isinstance(arrays, list):
        raise ValueError("its document doesn't describe the arrays")
    return document["content"], [_description(index, item) for index, item in enumerate(arrays)]


def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object that JSON gives by `pairs`; ValueError where a name stands in it twice."""
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a name stands in it twice")
    return mapping


def _description(index: int, item: object) -> ArrayDescription:
    if not isinstance(item, dict):
        raise ValueError(f"its document doesn't describe array {index}")
    name, shape = item.get("dtype"), item.get("shape")
    dtype = dtype_named(name) if isinstance(name, str) else None
    if dtype is None:
        # Not damage, perhaps: a newer torch may know more dtypes than this one.
        raise ValueError(f"the dtype {name!r} of array {index} is unknown to this torch or fitkit")
    if (
        not isinstance(shape, list)
        or len(shape) > LARGEST_RANK
        or not all(type(size) is int and 0 <= size < 1 << 63 for size in shape)
    ):
        raise ValueError(f"array {index} has an impossible shape in its document")
    return ArrayDescription(tuple(shape), dtype)
