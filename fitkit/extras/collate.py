"""Batches of sequences of uneven length: padded, packed, or grouped by similar lengths."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from fitkit.arguments import check_choice, check_count, check_flag, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.outputs import IGNORED

TOKENS, LABELS, MASK = "input_ids", "labels", "attention_mask"
FILLED_WITH_ZERO = (MASK, "token_type_ids", "position_ids", "special_tokens_mask")


def pad(
    value: float = 0,
    *,
    labels: float | None = None,
    multiple_of: int = 1,
    side: str = "right",
    lengths: bool = False,
) -> Callable[[Sequence[Any]], Any]:
    """Make a `collate_fn` that pads sequences to the longest of a batch.

    Samples are dicts, as Hugging Face's tokenizers make them, or tuples `(x, y)`. A sample's
    sequence is its `"input_ids"`, or else its first sequence. Entries of the same length (labels
    for each position, masks) are padded with it. Other entries are joined as torch does it, or
    padded to their own longest.

    Args:
        value: the padding of the inputs, such as the tokenizer's `pad_token_id`. Masks, token types
            and position ids are padded with 0.
        labels: the padding of `"labels"` and of tuples' targets. Default None: -100 for integers,
            which `"cross_entropy"` ignores. For other targets you must pass it.
        multiple_of: make the padded length a multiple of this number, which tensor cores compute
            faster.
        side: `"right"` (default) or `"left"`, for models that generate.
        lengths: whether tuples give `((x, lengths), y)`, with each sequence's length (N,).

    Shapes: sequences (T_n, ...) give (N, T, ...). Dicts without an `"attention_mask"` get one,
        (N, T): 1 at tokens, 0 at padding.

    Raises:
        ConfigurationError, ArgumentTypeError: an argument is invalid.

    Example:
        >>> import torch, fitkit
        >>> data = [(torch.tensor([5, 6, 7]), 0), (torch.tensor([8]), 1)]
        >>> loader = torch.utils.data.DataLoader(data, 2, collate_fn=fitkit.data.pad())
        >>> next(iter(loader))
        [tensor([[5, 6, 7],
                [8, 0, 0]]), tensor([0, 1])]
    """
    multiple_of = check_count("multiple_of", multiple_of)
    side = check_choice("side", side, ("right", "left"))
    lengths = check_flag("lengths", lengths)
    return functools.partial(
        padded, value=value, labels=labels, multiple_of=multiple_of, side=side, lengths=lengths
    )


def padded(samples: Sequence[Any], *, lengths: bool, labels: float | None, **options: Any) -> Any:
    rows = [_fields(sample) for sample in samples]
    names = list(rows[0])
    if any(list(row) != names for row in rows):
        raise ConfigurationError(
            f"The samples of a batch have different entries: {names} and others. Give each sample "
            "the same entries."
        )
    sequences = [n for n in names if all(isinstance(r[n], Tensor) and r[n].ndim for r in rows)]
    if not sequences:
        raise ConfigurationError(
            f"fitkit.data.pad got samples without a sequence ({describe(samples[0])}). A sample is "
            "a dict with 'input_ids', or a tuple (x, y) whose x is a tensor, array or list."
        )
    main = TOKENS if TOKENS in sequences else sequences[0]
    sizes = [len(row[main]) for row in rows]
    longest = -(-max(sizes) // options["multiple_of"]) * options["multiple_of"]
    batch: dict[Any, Any] = {}
    for name in names:
        column = [row[name] for row in rows]
        own = [len(entry) for entry in column] if name in sequences else []
        if not own or (own != sizes and len(set(own)) == 1):
            batch[name] = default_collate(column)
            continue
        wanted = longest if own == sizes else max(own)
        fill = _fill_of(name, column, labels, options["value"], {*own, wanted})
        batch[name] = torch.stack([_filled(e, wanted, fill, options["side"]) for e in column])
    if isinstance(samples[0], Mapping):
        if main == TOKENS and MASK not in batch:
            ones = [torch.ones(size, dtype=torch.int64) for size in sizes]
            batch[MASK] = torch.stack([_filled(o, longest, 0, options["side"]) for o in ones])
        return batch
    if lengths:
        batch[0] = (batch[0], torch.tensor(sizes))
    return [batch[name] for name in names] if len(names) > 1 else batch[0]


padded.keeps_rows = True  # type: ignore[attr-defined]  # extras/data_on_ranks/sharding.py asks for it


def _fields(sample: Any) -> dict[Any, Any]:
    """Return a sample's entries by name or index, with lists of numbers as tensors."""
    if isinstance(sample, Mapping):
        entries: Any = sample.items()
    else:
        entries = enumerate(sample if isinstance(sample, (tuple, list)) else (sample,))
    return {name: _as_tensor(entry) for name, entry in entries}


def _as_tensor(entry: Any) -> Any:
    is_array = isinstance(entry, list) or hasattr(entry, "__array__")
    return entry if isinstance(entry, Tensor) or not is_array else torch.as_tensor(entry)


def _fill_of(
    name: Any, column: list[Tensor], labels: float | None, value: float, sizes: set[int]
) -> float:
    """Return the padding of an entry's sequences."""
    if name in FILLED_WITH_ZERO:
        return 0
    if name not in (LABELS, 1):
        return value
    is_whole = not (column[0].is_floating_point() or column[0].is_complex())
    if labels is None and len(sizes) > 1 and not is_whole:
        raise ConfigurationError(
            "The targets are sequences of numbers of uneven length, and their padding would count "
            "in the loss. Write for example fitkit.data.pad(labels=0.0), and give sample_weight "
            "or a loss that ignores the padding."
        )
    return IGNORED if labels is None else labels


def _filled(sequence: Tensor, length: int, value: float, side: str) -> Tensor:
    missing = sequence.new_full((length - len(sequence), *sequence.shape[1:]), value)
    return torch.cat([sequence, missing] if side == "right" else [missing, sequence])


def pack(
    length: int, *, value: int = 0, mask: str | None = None, rows: int | None = None
) -> Callable[[Sequence[Any]], Any]:
    """Make a `collate_fn` that packs documents into rows of one length, kept apart.

    A row holds several whole documents. The longest come first, each into the first row with room.
    A document longer than a row is cut into parts, each of which counts as a document. No label
    asks for a document's first token, which the document before it would have to predict.

    The `"position_ids"` keep documents apart: they start again with each document. Hugging Face's
    causal language models make their mask from them if `use_cache` is False, so dicts get that,
    too. For other nets, ask for a mask.

    Args:
        length: the number of tokens in a row.
        value: the padding at the end of rows. The labels there are -100.
        mask: `"causal"` or `"full"` adds an `"attention_mask"` (R, 1, T, T) for
            `scaled_dot_product_attention`. It is True where a position may attend to another one of
            its document: up to itself, or all. Default None.
        rows: the least number of rows in a batch, so that shapes change less. Default None: as many
            as needed.

    Shapes: documents (T_n,) give rows (R, length). Dicts with `"input_ids"` (and `"labels"`, and
        other entries per token) give a dict with `"labels"`, which such models shift themselves.
        Tuples `(tokens, targets)` give `({"input_ids", "position_ids"}, targets)`. Tokens alone
        give the same, with the next tokens as targets.

    Raises:
        ConfigurationError, ArgumentTypeError: an argument or a sample is invalid.

    Example:
        >>> import torch, fitkit
        >>> documents = [torch.tensor([5, 6, 7, 8]), torch.tensor([1, 2, 3])]
        >>> inputs, targets = fitkit.data.pack(6)(documents)
        >>> inputs["input_ids"], inputs["position_ids"]
        (tensor([[5, 6, 7, 1, 2, 0]]), tensor([[0, 1, 2, 0, 1, 0]]))
        >>> targets.tolist()
        [[6, 7, 8, 2, 3, -100]]
    """
    length = check_count("length", length)
    mask = check_choice("mask", mask, (None, "causal", "full"))
    rows = check_count("rows", rows, optional=True)
    return functools.partial(_packed, length=length, value=value, mask=mask, rows=rows)


def _packed(
    samples: Sequence[Any], *, length: int, value: int, mask: str | None, rows: int | None
) -> Any:
    is_dict = isinstance(samples[0], Mapping)
    parts = [p for s in samples for p in _parts(_document(s), length)]
    # Stable, so that documents of one length stay in their order.
    order = sorted(range(len(parts)), key=lambda number: -len(parts[number][TOKENS]))
    packed: list[list[dict[str, Tensor]]] = []
    room: list[int] = []
    for number in order:
        size = len(parts[number][TOKENS])
        row = next((row for row, left in enumerate(room) if left >= size), len(packed))
        if row == len(packed):
            packed.append([])
            room.append(length)
        packed[row].append(parts[number])
        room[row] -= size
    missing = (rows or 1) - len(packed)
    packed += [[] for _ in range(max(missing, 0))]
    first = parts[0] if parts else _document(samples[0])
    names = list(first)
    batch: dict[str, list[Tensor]] = {name: [] for name in [*names, "position_ids", "document"]}
    for row_parts in packed:
        left = length - sum(len(part[TOKENS]) for part in row_parts)
        sizes = [*(len(part[TOKENS]) for part in row_parts), left]  # the padding is separate, too
        for name in names:
            fill = IGNORED if name == LABELS else 0 if name in FILLED_WITH_ZERO else value
            rest = first[name].new_full((left,), fill)
            batch[name].append(torch.cat([*(part[name] for part in row_parts), rest]))
        batch["position_ids"].append(torch.cat([torch.arange(size) for size in sizes]))
        numbers = torch.arange(len(sizes))
        batch["document"].append(numbers.repeat_interleave(torch.tensor(sizes)))
    joined: dict[str, Any] = {name: torch.stack(column) for name, column in batch.items()}
    document = joined.pop("document")
    joined.pop(MASK, None)  # the samples' own mask doesn't apply here
    if mask is not None:
        same = document[:, None, :, None] == document[:, None, None, :]
        joined[MASK] = same.tril() if mask == "causal" else same
    if is_dict:
        # With a cache, transformers ignores position ids: documents would see each other.
        return {**joined, "use_cache": False} if mask is None else joined
    return [joined, joined.pop(LABELS)]


def _document(sample: Any) -> dict[str, Tensor]:
    """Return a sample's tokens, and its other entries per token, by name."""
    if isinstance(sample, Mapping):
        found = {str(name): torch.as_tensor(entry) for name, entry in sample.items()}
        found.pop("position_ids", None)
        tokens = found.get(TOKENS)
        if tokens is not None:
            # The model shifts its labels: the first would be predicted by the document before.
            found[LABELS] = labels = found.get(LABELS, tokens).clone()
            labels[:1] = IGNORED
    elif isinstance(sample, (tuple, list)) and len(sample) == 2 and hasattr(sample[0], "__len__"):
        found = {TOKENS: torch.as_tensor(sample[0]), LABELS: torch.as_tensor(sample[1])}
    else:
        is_alone = isinstance(sample, (tuple, list)) and len(sample) == 1  # of a TensorDataset
        whole = torch.as_tensor(sample[0] if is_alone else sample)
        found = {TOKENS: whole[:-1], LABELS: whole[1:]}
    sizes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    if TOKENS not in found or found[TOKENS].ndim != 1 or len(set(sizes.values())) > 1:
        raise ConfigurationError(
            f"fitkit.data.pack got a sample with the shapes {sizes}. A document is a sequence of "
            "tokens (T,), a tuple (tokens, targets), or a dict with 'input_ids' and other entries "
            "of its length."
        )
    return found


def _parts(document: dict[str, Tensor], length: int) -> Iterator[dict[str, Tensor]]:
    """Yield a document in parts that fit into a row."""
    for start in range(0, len(document[TOKENS]), length):
        yield {name: entry[start : start + length] for name, entry in document.items()}


class BucketBatchSampler:
    """A `batch_sampler` for a `DataLoader`: batches of similar lengths, in random order.

    It keeps the padding in a batch small. An epoch's order follows from `seed` and the epoch's
    number, so a resumed training continues with the same batches, on any number of ranks.

    Args:
        lengths: each sample's length.
        batch_size: samples per batch. Give either this or `max_tokens`.
        max_tokens: the most tokens in a padded batch: its samples times its longest length.
        shuffle: whether samples and batches get a new order each epoch. Default True.
        window: samples of this many randomly drawn batches are sorted by length together. A larger
            window means less padding and less randomness. Default 100. With `max_tokens`, all
            samples are sorted.
        drop_last: whether to drop batches that aren't full. Default False.
        seed: the seed of the order. Default 0.

    Raises:
        ConfigurationError, ArgumentTypeError: an argument is invalid, or a sample is longer than
            `max_tokens`.

    Example:
        >>> import torch, fitkit
        >>> data = [torch.ones(length) for length in (3, 9, 2, 8)]
        >>> batches = fitkit.data.BucketBatchSampler([len(sample) for sample in data], 2)
        >>> sorted(sorted(batch) for batch in batches)
        [[0, 2], [1, 3]]
        >>> loader = torch.utils.data.DataLoader(
        ...     data, batch_sampler=batches, collate_fn=fitkit.data.pad())
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int | None = None,
        *,
        max_tokens: int | None = None,
        shuffle: bool = True,
        window: int = 100,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        batch_size = check_count("batch_size", batch_size, optional=True)
        max_tokens = check_count("max_tokens", max_tokens, optional=True)
        window = check_count("window", window)
        seed = check_count("seed", seed, minimum=0)
        shuffle = check_flag("shuffle", shuffle)
        drop_last = check_flag("drop_last", drop_last)
        if (batch_size is None) == (max_tokens is None):
            raise ConfigurationError(
                f"BucketBatchSampler got batch_size={batch_size} and max_tokens={max_tokens}. Give "
                "one of them."
            )
        try:
            self.lengths: Tensor = torch.as_tensor(lengths, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError):
            self.lengths = torch.empty(())
        if self.lengths.ndim != 1 or not len(self.lengths):
            raise ArgumentTypeError(
                f"lengths={describe(lengths)} must be each sample's length: [len(s) for s in data]."
            )
        longest = int(self.lengths.max())
        if max_tokens is not None and longest > max_tokens:
            raise ConfigurationError(
                f"A sample has {longest} tokens, more than max_tokens={max_tokens}. Cut it, or "
                "allow more."
            )
        self.batch_size: int | None = batch_size
        self.max_tokens: int | None = max_tokens
        self.shuffle: bool = shuffle
        self.window: int = window
        self.drop_last: bool = drop_last
        self.seed: int = seed
        self.epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch. `fit` calls it."""
        self.epoch = epoch

    def __len__(self) -> int:
        if self.batch_size is None:
            return len(self._cut_by_tokens(torch.argsort(self.lengths, stable=True)))
        full, rest = divmod(len(self.lengths), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        chance = torch.Generator()
        chance.manual_seed(self.seed + self.epoch)
        count = len(self.lengths)
        order = torch.randperm(count, generator=chance) if self.shuffle else torch.arange(count)
        if self.batch_size is None:
            # Over all samples, so that each epoch has the same number of batches.
            batches = self._cut_by_tokens(order[torch.argsort(self.lengths[order], stable=True)])
        else:
            parts = order.split(self.window * self.batch_size)
            ordered = [part[torch.argsort(self.lengths[part], stable=True)] for part in parts]
            batches = [b for part in ordered for b in part.split(self.batch_size)]
            if self.drop_last:
                batches = [batch for batch in batches if len(batch) == self.batch_size]
        if self.shuffle:
            chosen = torch.randperm(len(batches), generator=chance).tolist()
            batches = [batches[number] for number in chosen]
        yield from (batch.tolist() for batch in batches)

    def _cut_by_tokens(self, ordered: Tensor) -> list[Tensor]:
        """Return samples from the shortest to the longest, in batches of at most `max_tokens`."""
        sizes, most = [0], self.max_tokens or 0
        for length in self.lengths[ordered].tolist():
            if (sizes[-1] + 1) * length > most:
                sizes.append(0)
            sizes[-1] += 1
        found = list(ordered.split(sizes))
        return found[:-1] if self.drop_last else found
