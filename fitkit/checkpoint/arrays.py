"""How a tensor of each dtype lies in a file: as numbers, or as bits with the dtype's name beside.

HDF5 and NumPy know neither bfloat16 nor the float8 kinds, and HDF5 has no booleans and complex
numbers of its own. So these are stored as unsigned integers, and complex numbers as pairs of floats
in a last dimension of two (bcomplex32, whose parts HDF5 doesn't know, as unsigned integers).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple, TypeGuard

import numpy as np
import torch

from fitkit.arguments import describe, dtype_name
from fitkit.errors import ArgumentTypeError, ConfigurationError

_NUMBERS = (
    *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64"),
)
_BITS = {
    "uint8": (
        *("bool", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
        *("float8_e8m0fnu", "float4_e2m1fn_x2", "bits8", "bits1x8", "bits2x4", "bits4x2"),
        *(f"{sign}int{width}" for sign in ("", "u") for width in range(1, 8)),
    ),
    "uint16": ("bfloat16", "bits16"),
    "uint32": ("bcomplex32",),
}
_PAIRS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}

#: What the numbers of each dtype are in the file, by the dtype's name in torch.
STORED_AS: dict[str, str] = {
    **{name: name for name in _NUMBERS},
    **{name: stored for stored, names in _BITS.items() for name in names},
    **_PAIRS,
}

#: The shape and the dtype of a tensor.
Described = tuple[tuple[int, ...], torch.dtype]

#: HDF5's limit (H5S_MAX_RANK); torch allows 64.
LARGEST_RANK = 32


def dtype_named(name: str) -> torch.dtype | None:
    """Return the dtype of that name; None where fitkit can't store it or this torch lacks it."""
    dtype = getattr(torch, name, None) if name in STORED_AS else None
    return dtype if isinstance(dtype, torch.dtype) else None


def describe_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """Return what a document says of a tensor."""
    return {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}


def read_description(found: object, what: str) -> Described:
    """Return what `describe_tensor` said.

    Args:
        what: which tensor it is, for messages.

    Raises:
        ValueError: no tensor that can be stored is like that.
    """
    if not isinstance(found, dict):
        raise ValueError(f"its document doesn't describe {what}")
    name, shape = found.get("dtype"), found.get("shape")
    dtype = dtype_named(name) if isinstance(name, str) else None
    if dtype is None:
        # Not damage, perhaps: a newer torch may know more dtypes than this one.
        raise ValueError(f"the dtype {name!r} of {what} is unknown to this torch or fitkit")
    # Empty ones too: torch multiplies the sizes in 64 bits.
    if not is_shape(shape) or math.prod(size or 1 for size in shape) >= 1 << 56:
        raise ValueError(f"{what} has an impossible shape in its document")
    return tuple(shape), dtype


def is_shape(found: object) -> TypeGuard[list[int]]:
    """Whether what a document has can be the shape of a tensor, or a place in one."""
    return (
        isinstance(found, list)
        and len(found) <= LARGEST_RANK
        and all(type(size) is int and 0 <= size < 1 << 63 for size in found)
    )


def stored_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in the file of a tensor of `shape`: complex numbers have a last dimension of
    2.
    """
    return (*shape, 2) if dtype_name(dtype) in _PAIRS else shape


def file_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the type in the file of the numbers of a tensor of `dtype`: always little-endian."""
    little_endian: np.dtype[Any] = np.dtype(STORED_AS[dtype_name(dtype)]).newbyteorder("<")
    return little_endian


def storable(value: object) -> torch.Tensor:
    """`value`, a tensor or an array, as a plain tensor that can be written.

    Raises:
        ArgumentTypeError: it is neither.
        ConfigurationError: it has no values (meta, uninitialised), isn't dense (sparse,
            quantized, distributed), or has a dtype or rank that a file can't hold.
    """
    if isinstance(value, np.ndarray):
        value = _tensor_from_array(value)
    if not isinstance(value, torch.Tensor):
        raise ArgumentTypeError(f"{describe(value)} isn't a tensor or a NumPy array.")
    reason = _why_not_storable(value)
    if reason:
        raise ConfigurationError(f"A tensor can't be written to a file: {reason}.")
    return value.detach()


def _why_not_storable(tensor: torch.Tensor) -> str:
    if torch.nn.parameter.is_lazy(tensor):
        return "it isn't initialised; call the model once on a batch first"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        kind = type(tensor).__name__
        return f"a {kind} isn't one plain block of numbers; gather or convert it first"
    if tensor.device.type == "meta":
        return "it is on the meta device and has no values; give it some with to_empty() first"
    if tensor.is_quantized or dtype_name(tensor.dtype) not in STORED_AS:
        return f"its dtype is {tensor.dtype}; dequantize or convert it first"
    if tensor.is_nested:
        return "it is a nested tensor; pad it first"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}; call to_dense() first"
    if len(stored_shape(tensor.dtype, tuple(tensor.shape))) > LARGEST_RANK:
        return f"it has {tensor.ndim} dimensions and HDF5 allows {LARGEST_RANK}; reshape it first"
    return ""


def _tensor_from_array(array: np.ndarray[Any, Any]) -> torch.Tensor:
    # torch takes neither foreign byte orders nor negative strides, and warns about read-only
    # arrays; ascontiguousarray would turn a 0-d array into a vector.
    dtype = array.dtype.newbyteorder("=")
    native = array.astype(dtype, order="C", copy=not array.flags.writeable)
    try:
        return torch.from_numpy(native)
    except TypeError:
        raise ConfigurationError(
            f"An array of dtype {array.dtype} can't be written to a file; convert it to numbers."
        ) from None


def to_stored(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the numbers to write for a tensor that `storable` has passed; shares memory where it
    can.
    """
    plain, name = tensor.detach().resolve_conj().resolve_neg(), dtype_name(tensor.dtype)
    bits = (
        torch.view_as_real(plain) if name in _PAIRS else plain.view(getattr(torch, STORED_AS[name]))
    )
    return bits.cpu().contiguous().numpy()


def from_stored(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor of `dtype` that `stored` was written for; shares its memory.

    Raises:
        ValueError: booleans other than 0 and 1, with which torch's kernels misbehave.
    """
    if dtype_name(dtype) in _PAIRS:
        return torch.view_as_complex(stored)
    if dtype == torch.bool and stored.numel() and int(stored.max()) > 1:
        raise ValueError("has booleans other than 0 and 1")
    return stored.view(dtype)


# What is written at once: Linux now and then stalls for long over writes of many megabytes.
_WRITTEN_BYTES = 1 << 20


def write_array(file: BinaryIO, offset: int, tensor: torch.Tensor) -> None:
    """Write a tensor's numbers at a place in a file that is open to write."""
    file.seek(offset)
    content = _bytes_of(to_stored(tensor))
    for start in range(0, len(content), _WRITTEN_BYTES):
        file.write(content[start : start + _WRITTEN_BYTES])


class FileState(NamedTuple):
    """What differs after somebody has written to a file: its size, and when it was written to."""

    size_bytes: int
    written_ns: int


def state_of(file: BinaryIO) -> FileState:
    """Return the state of an open file."""
    found = os.fstat(file.fileno())
    return FileState(found.st_size, found.st_mtime_ns)


class StoredArrays:
    """Arrays in an open file, each said by its place, shape and dtype, which were checked.

    Every method raises ValueError where the bytes aren't what they have to be, and OSError where
    they can't be read.

    Args:
        file: open to read, unbuffered.
        state: its `state_of` before it was checked; what was written to it since is refused.
    """

    def __init__(self, file: BinaryIO, state: FileState) -> None:
        self._file = file
        self._state = state

    def read(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor on the CPU."""
        kind = getattr(torch, STORED_AS[dtype_name(dtype)])
        stored = torch.empty(stored_shape(dtype, shape), dtype=kind)
        self._fill(offset, stored.numpy())
        return from_stored(stored, dtype)

    def read_into(self, offset: int, tensor: torch.Tensor) -> None:
        """Copy the array of a tensor's shape and dtype into it; straight where that can be.

        After an error it may have some of the file's numbers.
        """
        if takes_bytes(tensor):
            self._fill(offset, to_stored(tensor))
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
            return
        numbers = self.read(offset, tuple(tensor.shape), tensor.dtype)
        with torch.no_grad():
            tensor.copy_(numbers)

    def _fill(self, offset: int, numbers: np.ndarray[Any, Any]) -> None:
        target = _bytes_of(numbers)
        self._file.seek(offset)
        while target:  # the system reads at most 2 GiB at once
            count = self._file.readinto(target)  # type: ignore[attr-defined]
            if not count:
                raise ValueError("became shorter while it was read")
            target = target[count:]
        if state_of(self._file) != self._state:
            raise ValueError("was written to while it was read")


def _bytes_of(numbers: np.ndarray[Any, Any]) -> memoryview:
    return memoryview(numbers.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def takes_bytes(tensor: torch.Tensor) -> bool:
    """Whether a file's bytes can be read straight into a tensor's memory.

    Not those of booleans, of which only two are allowed.
    """
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.dtype != torch.bool
        and not (tensor.is_conj() or tensor.is_neg())
    )


class Numbering:
    """Collects the arrays of a file and gives each its number.

    Tensors that share all of their memory, such as tied weights, get one number, so they are
    stored once and are equal when they are read. Tensors that overlap in part are stored apart.
    """

    def __init__(self) -> None:
        self.arrays: list[torch.Tensor] = []
        self._numbers: dict[tuple[Any, ...], int] = {}

    def add(self, value: object) -> int:
        """Return the number of `value`, a tensor or an array.

        Raises:
            ArgumentTypeError, ConfigurationError: it can't be written to a file.
        """
        tensor = storable(value)
        memory = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.stride()
        kind = tensor.dtype, tuple(tensor.shape), tensor.is_conj(), tensor.is_neg()
        identity = (str(tensor.device), *memory, *kind)
        number = self._numbers.get(identity, len(self.arrays))
        if number == len(self.arrays):
            # Kept in the list, so that its memory isn't given to another tensor meanwhile.
            self.arrays.append(tensor)
            self._numbers[identity] = number
        return number

    def add_all(self, tensors: Mapping[str, object]) -> dict[str, int]:
        """Return the number of each of these, by name."""
        return {name: self.add(tensor) for name, tensor in tensors.items()}
