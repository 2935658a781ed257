"""In-memory data: NumPy arrays, tensors and trees of them, as tensors that can be sliced."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from fitkit import trees
from fitkit.arguments import describe, dtype_name
from fitkit.batch_kinds import kind_of
from fitkit.data import permutation
from fitkit.data.batches import Source
from fitkit.data.permutation import IndexBatches, Permutation
from fitkit.errors import ArgumentTypeError, ConfigurationError, with_code
from fitkit.samples import samples_among
from fitkit.shortcuts import Shortcut
from fitkit.tensors import bytes_of, is_dense

META = "{name} is a meta tensor, which has a shape but no numbers. Give it on the CPU or a GPU."


def is_array(value: object) -> bool:
    """Whether `value` is a tensor, a NumPy array, or converts to one (pandas, scipy.sparse, …)."""
    return (
        isinstance(value, (torch.Tensor, np.ndarray))
        or (hasattr(value, "__array__") and not isinstance(value, (type, np.generic)))
        or is_sparse_matrix(value)
    )


def is_sparse_matrix(value: object) -> bool:
    """Whether `value` is a matrix or an array of scipy.sparse."""
    return type(value).__module__.startswith("scipy.sparse") and hasattr(value, "tocsr")


class SparseMatrix:
    """A matrix of scipy.sparse, (N, features), whose batches are dense tensors.

    Args:
        matrix: in any of scipy's formats.
        name: the argument's name, for messages.
        float_dtype: the dtype for floating-point numbers.
    """

    ndim = 2

    def __init__(self, matrix: Any, name: str, float_dtype: torch.dtype) -> None:
        if len(matrix.shape) != 2 or matrix.dtype.kind not in "biufc":
            raise ConfigurationError(
                f"{name} is a sparse array of shape {tuple(matrix.shape)} and dtype "
                f"{matrix.dtype}, but only a sparse matrix of numbers, (N, features), can be read. "
                f"Write {name}.toarray()."
            )
        self.matrix: Any = matrix.tocsr()
        self.shape: tuple[Any, ...] = tuple(matrix.shape)
        self.name: str = name
        self.float_dtype: torch.dtype = float_dtype

    def __len__(self) -> int:
        return int(self.shape[0])

    def rows(self, chosen: Any) -> torch.Tensor:
        """Return the chosen rows, a slice or indices, as a dense tensor."""
        if isinstance(chosen, torch.Tensor):
            chosen = chosen.cpu().numpy()
        dense: torch.Tensor = as_tensors(self.matrix[chosen].toarray(), self.name, self.float_dtype)
        return dense


def made_dense(tree: Any) -> Any:
    """Return a tree with its `SparseMatrix` leaves as dense tensors."""
    return trees.map_leaves(
        lambda leaf: leaf.rows(slice(None)) if isinstance(leaf, SparseMatrix) else leaf, tree
    )


def is_array_tree(value: object, *, gaps: bool = False) -> bool:
    """Whether `value` is an array, or a tuple, list or dict (nested) whose leaves all are.

    Args:
        value: anything.
        gaps: whether a leaf may be None, too.
    """
    if isinstance(value, Mapping):
        return bool(value) and all(is_array_tree(item, gaps=gaps) for item in value.values())
    if isinstance(value, (tuple, list)):
        return bool(value) and all(is_array_tree(item, gaps=gaps) for item in value)
    return is_array(value) or (gaps and value is None)


def wide_dtype(float_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of targets and weights for a net's dtype: half precision would round
    them.
    """
    return float_dtype if float_dtype.itemsize >= 4 else torch.float32


def as_tensors(value: Any, name: str, float_dtype: torch.dtype, *, target: bool = False) -> Any:
    """Convert a tree of arrays to the same tree of tensors.

    Floating-point numbers get `float_dtype`. Integers of a target become int64, which torch's
    losses require. Other integers and booleans stay. Memory is shared if no conversion is needed.
    An entry of a target's tuple, list or dict may be None.

    Args:
        value: arrays of shape (N, ...), or a tuple, list or dict of them. A matrix of scipy.sparse
            becomes a `SparseMatrix`.
        name: the argument's name, for messages.
        float_dtype: the dtype of the net's parameters.
        target: whether these are targets.

    Raises:
        ArgumentTypeError: a value isn't an array of numbers.
        ConfigurationError: an array has no first dimension.
    """
    if not isinstance(value, torch.Tensor):
        if isinstance(value, Mapping):
            return {
                key: as_tensors(item, f"{name}[{key!r}]", float_dtype, target=target)
                for key, item in value.items()
            }
        if value is None and target and name.endswith("]"):
            return None
        if (kind := kind_of(value)) is not None:
            raise ArgumentTypeError(
                f"{name} is {kind.words}, whose rows aren't samples. Give fit, evaluate or "
                "predict batches: [(x, y)], or a DataLoader that makes them."
            )
        if isinstance(value, (tuple, list)):
            if not value:
                raise ConfigurationError(f"{name} is empty: {value!r}.")
            if all(isinstance(part, str) for part in value):
                raise ArgumentTypeError(_strings(np.asarray(value), name))
            parts = [part for part in value if part is not None or not target]
            if not is_array_tree(parts, gaps=target):
                raise ArgumentTypeError(
                    f"{name}={describe(value)} is a {type(value).__name__} that doesn't hold only "
                    f"arrays or tensors. Write numpy.asarray({name}) if it holds numbers."
                )
            return tuple(
                as_tensors(item, f"{name}[{index}]", float_dtype, target=target)
                for index, item in enumerate(value)
            )
        if is_sparse_matrix(value):
            if target:
                raise ConfigurationError(
                    f"{name} is a sparse matrix, which no loss takes. Write {name}.toarray()."
                )
            return SparseMatrix(value, name, float_dtype)
    tensor = _tensor(value, name)
    if target and (kind := kind_of(tensor)) is not None and not kind.is_target:
        raise ConfigurationError(
            f"{name} is {kind.words}, which no loss takes. Write {name}.to_dense()."
        )
    if tensor.ndim == 0:
        whole = name.partition("[")[0]
        stack = (
            f" If {whole} is a list of samples, write numpy.stack({whole})." if "[" in name else ""
        )
        raise ConfigurationError(
            f"{name} is a single number, but data need a first dimension of samples.{stack}"
        )
    if tensor.is_floating_point():
        return tensor.to(float_dtype)
    if target and tensor.dtype not in (torch.int64, torch.bool) and not tensor.is_complex():
        return tensor.to(torch.int64)
    return tensor


def refuse_masked(tree: Any, name: str) -> None:
    """Refuse a masked array: torch would use the numbers under its mask.

    Raises:
        ArgumentTypeError: with what to write.
    """
    for path, leaf in trees.leaves_with_paths(tree):
        if isinstance(leaf, np.ma.MaskedArray):
            raise ArgumentTypeError(
                f"{name}{path} is a masked array, but torch has no masks and would use the values "
                f"under the mask. Write {name}{path}.filled(value). To leave out samples, give "
                "them a sample_weight of 0, or the label that the loss ignores."
            )


def _tensor(value: Any, name: str) -> torch.Tensor:
    """One array as a tensor, sharing memory where torch can."""
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            raise ConfigurationError(META.format(name=name))
        return value.detach()
    if not is_array(value):
        raise ArgumentTypeError(
            f"{name}={describe(value)} must be a NumPy array or a tensor (or a tuple, list or "
            f"dict of them), not a {type(value).__name__}. One batch of another kind, such as a "
            "graph, goes into a list: [batch]."
        )
    if isinstance(value, np.ma.MaskedArray):
        refuse_masked(value, name)
    _refuse_columns(value, name)
    array = np.asarray(value) if isinstance(value, np.ndarray) else _from_columns(value, name)
    if array.dtype in (np.longdouble, np.clongdouble):
        near = "float64" if array.dtype.kind == "f" else "complex128"
        raise ArgumentTypeError(
            f"{name} has the dtype {array.dtype}, which torch doesn't have. Write "
            f"{name}.astype({near!r})."
        )
    if array.dtype.kind in "USO" and array.size and isinstance(array.flat[0], (str, bytes)):
        raise ArgumentTypeError(_strings(array, name))
    if array.dtype.kind not in "biufc":
        raise ArgumentTypeError(
            f"{name} has the dtype {array.dtype}, not numbers. Encode its values as numbers, "
            f"for example with {name}.astype('float32')."
        )
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)  # torch has few operations on wider unsigned numbers
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        # torch warns that it could write to a read-only array; nothing here writes.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        return torch.from_numpy(array)


def _from_columns(value: Any, name: str) -> np.ndarray[Any, Any]:
    """Return the array of a data frame, a column, or what else converts to one.

    Numbers in pandas' own types or in Arrow's are numbers, though NumPy sees objects. Whole numbers
    of a frame become int64: codes of few categories are int8, which no embedding takes.

    Raises:
        ArgumentTypeError: whole numbers or flags are missing.
    """
    found = getattr(value, "dtypes", getattr(value, "dtype", None))
    dtypes: dict[Any, Any] = {None: found}
    if found is not None and hasattr(found, "items"):  # a frame's, by column
        dtypes = dict(found.items())
    plain = [getattr(dtype, "numpy_dtype", dtype) for dtype in dtypes.values()]
    if plain and all(isinstance(dtype, np.dtype) and dtype.kind in "biufc" for dtype in plain):
        common = np.result_type(*plain)
        if plain == list(dtypes.values()):
            array = np.asarray(value, common)
        else:
            _refuse_missing(value, dtypes, name)
            filled = {"na_value": np.nan} if common.kind in "fc" else {}
            array = value.to_numpy(dtype=common, **filled)
    else:
        array = np.asarray(value)
    is_frame = hasattr(value, "dtypes")
    return array.astype(np.int64, copy=False) if is_frame and array.dtype.kind in "iu" else array


def column_names(value: Any) -> tuple[str, ...]:
    """Return the names of a data frame's columns; empty for other data."""
    is_frame = hasattr(value, "dtypes") and hasattr(value, "columns")
    return tuple(map(str, value.columns)) if is_frame else ()


def _refuse_missing(value: Any, dtypes: Mapping[Any, Any], name: str) -> None:
    """Refuse missing whole numbers and flags: only floating-point numbers can be nan."""
    for column, dtype in dtypes.items():
        part = value if column is None else value[column]
        if dtype.kind in "biu" and np.asarray(part.isna()).any():
            place = name if column is None else f"{name}[{column!r}]"
            zero = False if dtype.kind == "b" else 0
            raise ArgumentTypeError(
                f"{place} has the dtype {dtype} and missing values, which whole numbers and flags "
                f"can't have. Write {place} = {place}.fillna({zero}), or with nan in their place "
                f"{place} = {place}.astype('Float64')."
            )


def _refuse_columns(frame: Any, name: str) -> None:
    """Refuse a data frame with a column that isn't numbers.

    Raises:
        ArgumentTypeError: with the first such column and what to write.
    """
    dtypes: Any = getattr(frame, "dtypes", None)
    if getattr(frame, "ndim", 1) != 2 or dtypes is None or not hasattr(dtypes, "items"):
        return
    for column, dtype in dtypes.items():
        if getattr(dtype, "kind", "f") in "biufc":
            continue
        place = f"{name}[{column!r}]"
        if getattr(dtype, "kind", "O") in "mM":
            advice = f"{place} = {place}.astype('int64')"
        elif str(dtype) == "category":
            advice = f"{place} = {place}.cat.codes"
        else:
            advice = f"{place} = {place}.astype('category').cat.codes"
        raise ArgumentTypeError(
            f"{name}'s column {column!r} has the dtype {dtype}, not numbers. Write {advice}, or "
            "leave the column out."
        )


def _strings(array: np.ndarray[Any, Any], name: str) -> str:
    """Return what to write instead of an array of strings."""
    try:
        array.astype("float32")
    except ValueError:
        text = ", ".join(repr(item) for item in dict.fromkeys(array.flat[:3].tolist()))
        return with_code(
            f"{name} has the dtype {array.dtype}, strings ({text}, …), and a net computes with "
            f"numbers. Number the classes: classes, {name} = numpy.unique({name}, "
            "return_inverse=True). Class i is then classes[i]. fitkit.sklearn.Classifier takes "
            "string labels as they are.",
            "FK019",
        )
    return (
        f"{name} has the dtype {array.dtype}, numbers written as strings ({array.flat[0]!r}, …). "
        f"Write {name}.astype('float32')."
    )


def check_cuttable(tree: Any, name: str) -> None:
    """Refuse entries whose samples can't be cut apart, such as compressed sparse tensors."""
    for path, leaf in trees.leaves_with_paths(tree):
        kind = kind_of(leaf)
        if kind is not None and not kind.can_cut:
            raise ConfigurationError(
                f"{name}{path} is {kind.words}, which can't be cut into batches. "
                f"{kind.advice.format(place=name + path)}"
            )


def check_lengths(parts: dict[str, Any]) -> int:
    """Return the first length that all arrays in `parts` (name → tree) share.

    Raises:
        ConfigurationError: lengths differ (both are named), or there are no samples.
    """
    first_name, first_length = "", -1
    for name, tree in parts.items():
        for path, leaf in trees.leaves_with_paths(tree):
            if leaf is None:
                continue
            length = leaf.shape[0]
            if first_length < 0:
                first_name, first_length = name + path, length
            elif length != first_length:
                raise ConfigurationError(
                    f"{first_name} has {first_length} samples, but {name + path} has {length}. "
                    f"Give the same number of samples in each.{_of_samples(parts)}",
                    code="FK005",
                )
    if first_length == 0:
        raise ConfigurationError(f"{first_name} is empty: there are 0 samples.")
    return first_length


def _of_samples(parts: dict[str, Any]) -> str:
    """Say what to write if a list may be one of samples, as it has as many entries as another part
    has rows.
    """
    lengths = {len(leaf) for leaf in trees.leaves(parts) if leaf is not None}
    for name, tree in parts.items():
        shapes = {getattr(leaf, "shape", None) for leaf in tree} if type(tree) is tuple else ()
        others = {len(one) for key, one in parts.items() if key != name}
        if len(shapes) == 1 and len(tree) > 1 and len(tree) in lengths | others:
            return (
                f" If {name} is a list of {len(tree)} samples, and not of inputs or outputs, write "
                f"numpy.stack({name})."
            )
    return ""


def check_alike(train: Any, held_out: Any, name: str = "validation_data") -> None:
    """Refuse in-memory validation data that don't fit the net of the training data.

    Args:
        name: what messages call the validation data.

    Raises:
        ConfigurationError: the inputs' shapes differ from the training's, or targets are missing
            although the training data have them. Other data are checked when they are read.
    """
    if not (isinstance(train, ArraySource) and isinstance(held_out, ArraySource)):
        return
    if len(train.batch) > 1 and len(held_out.batch) == 1:
        raise ConfigurationError(f"{name} has no targets. Write (x, y).")
    shapes = [
        [(path, leaf.shape[1:]) for path, leaf in trees.leaves_with_paths(source.batch[0])]
        for source in (train, held_out)
    ]
    if [path for path, _ in shapes[0]] != [path for path, _ in shapes[1]]:
        raise ConfigurationError(
            f"{name}'s inputs have another structure than x: "
            f"{[path for path, _ in shapes[1]]} and {[path for path, _ in shapes[0]]}."
        )
    fixed = all(len(shape) <= 1 for _, shape in shapes[0])  # images and texts may differ in size
    for (path, expected), (_, given) in zip(*shapes, strict=True):
        if len(expected) != len(given) or (fixed and expected != given):
            raise ConfigurationError(
                f"{name}'s x{path} has samples of shape {tuple(given)}, but x{path} has "
                f"samples of shape {tuple(expected)}."
            )


def samples_between(tree: Any, start: int, stop: int) -> Any:
    """Return the samples from `start` to `stop` of every array in a tree."""
    return trees.map_leaves(lambda leaf: None if leaf is None else _cut(leaf, start, stop), tree)


def _cut(leaf: Any, start: int, stop: int) -> Any:
    if isinstance(leaf, SparseMatrix):
        return leaf.rows(slice(start, stop))
    if is_sparse_matrix(leaf):
        return leaf.tocsr()[start:stop]
    kind = kind_of(leaf)
    return leaf[start:stop] if kind is None else kind.rows(leaf, start, stop)


MOST_COPIED = 2**18
"""How many bytes of batches are copied in their order at once, at most, unless one batch has more.

Copies of small batches then cost no more than views of the data. More bytes would leave the cache
before their step.
"""

AT_ONCE = 256
"""How many batches are copied in their order at once, or their indices sent to a device."""


MOST_BYTES = 1 << 22
"""The most numbers of a tensor in its fingerprint, which takes half a millisecond."""


def fingerprints(tree: Any) -> dict[str, str]:
    """Return a fingerprint of each tensor by its place in the tree: type, shape, and a digest of
    rows.
    """
    found: dict[str, str] = {}
    for path, leaf in trees.leaves_with_paths(tree):
        if isinstance(leaf, torch.Tensor) and is_dense(leaf) and leaf.numel():
            rows = leaf.detach()
            if leaf.nbytes > MOST_BYTES and leaf.ndim:
                rows = rows[:: -(-leaf.nbytes // MOST_BYTES)]
            raw: Any = bytes_of(rows.cpu()).numpy()
            found[path] = (
                f"{dtype_name(leaf.dtype)} {tuple(leaf.shape)} {xxhash.xxh3_64_hexdigest(raw)}"
            )
    return found


COPIED_AHEAD = Shortcut("several batches copied at once, in their order")


class ArraySource(Source):
    """Batches copied from in-memory tensors, without collating single samples.

    Args:
        batch: `(x,)`, `(x, y)` or `(x, y, weight)`: trees of tensors of shape (N, ...).
        batch_size: samples per batch. The last batch may be shorter.
        shuffle: True for a new order each pass, `"batch"` to permute within each batch only.

    Attributes:
        columns: the names of x's columns and of y's, where those were data frames.

    The order of pass `p` follows from `p` and a seed, which is drawn from torch's global generator
    at the first shuffled pass. Nothing else draws from that generator. For `permutation.MANY` or
    more samples the order is computed, otherwise kept in memory.
    """

    lends = False

    def __init__(
        self, batch: tuple[Any, ...], batch_size: int, shuffle: bool | str = False
    ) -> None:
        self.batch = batch
        self.batch_size: int = batch_size
        self.shuffle = shuffle
        self.samples: int = samples_among(batch[0])
        self.steps: int = -(-self.samples // batch_size)
        self.seed: int | None = None
        self.columns: tuple[tuple[str, ...], ...] = ()
        self._flat = all(isinstance(part, torch.Tensor) and is_dense(part) for part in batch)

    @property
    def target(self) -> Any:
        return self.batch[1] if len(self.batch) > 1 else None

    def cut_into(self, batch_size: int) -> None:
        self.batch_size, self.steps = batch_size, -(-self.samples // batch_size)

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        """Return the batches of pass `number` (from 0), without the first `skip`."""
        if self.shuffle:
            return self.read(self.index_batches(number)[skip:])
        return self._in_order(skip)

    def sizes(self, skip: int) -> Iterator[int]:
        size = self.batch_size
        full, rest = divmod(max(self.samples - skip * size, 0), size)
        return itertools.chain(itertools.repeat(size, full), [rest] if rest else [])

    def read(self, chosen: Iterable[torch.Tensor]) -> Iterator[Any]:
        """Return the batches of these samples."""
        return (self.take(indices) for indices in self._near(chosen))

    def _in_order(self, skip: int) -> Iterator[Any]:
        size, samples = self.batch_size or 1, self.samples or 0
        if self._flat and COPIED_AHEAD.is_on:
            batch_bytes = trees.tensor_bytes(self.batch) * size // max(samples, 1) + 1
            rows = max(min(AT_ONCE, MOST_COPIED // batch_bytes), 1) * size
            parts = (
                [_apart(tensor[start : start + rows].clone(), size) for tensor in self.batch]
                for start in range(skip * size, samples, rows)
            )
            return itertools.chain.from_iterable(zip(*batches, strict=True) for batches in parts)
        starts = range(skip * size, samples, size)
        return (trees.copied(samples_between(self.batch, start, start + size)) for start in starts)

    def _near(self, chosen: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the batches' indices on the data's device, sent at once, or in parts if very
        many.
        """
        first, rest = self.batch[0], iter(chosen)
        if not isinstance(first, torch.Tensor) or first.device.type == "cpu":
            yield from rest
            return
        at_once = None if self.samples < permutation.MANY else AT_ONCE
        while block := list(itertools.islice(rest, at_once)):
            whole = torch.cat(block).to(first.device, non_blocking=True)
            yield from whole.split([len(part) for part in block])

    def take(self, chosen: torch.Tensor) -> Any:
        """Return the batch of the chosen samples, (B,) int64."""
        if self._flat:
            return tuple([select_rows(tensor, chosen) for tensor in self.batch])
        return trees.map_leaves(
            lambda leaf: None if leaf is None else select_rows(leaf, chosen), self.batch
        )

    def index_batches(self, number: int) -> Sequence[torch.Tensor]:
        """Return the indices of each batch of pass `number`."""
        samples, size = self.samples or 0, self.batch_size or 1
        is_large = samples >= permutation.MANY
        if not self.shuffle:
            return IndexBatches(samples, size) if is_large else torch.arange(samples).split(size)
        seed = self.draw_seed() if self.seed is None else self.seed
        if is_large and self.shuffle != "batch":
            return IndexBatches(samples, size, Permutation(samples, (seed + number) % 2**63))
        generator = torch.Generator().manual_seed((seed + number) % 2**63)
        if self.shuffle != "batch":
            return torch.randperm(samples, generator=generator).split(size)
        return tuple(
            part[torch.randperm(len(part), generator=generator)]
            for part in torch.arange(samples).split(size)
        )

    def draw_seed(self) -> int:
        """Return the seed of all passes, drawn once from torch's global generator."""
        self.seed = int(torch.empty((), dtype=torch.int64).random_().item())
        return self.seed


def _apart(tensor: torch.Tensor, rows: int) -> Sequence[torch.Tensor]:
    """Cut a new tensor into batches, which may be written into as if each were alone.

    Torch's `split` gives views. It refuses some writes into them, and counts others as writes into
    all of them, so that a graph of an earlier batch could no longer be differentiated.

    Args:
        rows: those of each batch but the last.
    """
    return torch.unsafe_split(tensor, rows)


def select_rows(tensor: Any, chosen: torch.Tensor) -> torch.Tensor:
    """Return the chosen rows. Indexing with an index tensor takes twice as long
    (PERFORMANCE.md).
    """
    if isinstance(tensor, SparseMatrix):
        return tensor.rows(chosen)
    if tensor.device.type != "cpu":
        chosen = chosen.to(tensor.device, non_blocking=True)
    picked: torch.Tensor = tensor.index_select(0, chosen)
    return picked
