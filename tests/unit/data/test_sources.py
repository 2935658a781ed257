"""Every kind of data, as batches."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fitkit.data.arrays import AT_ONCE, ArraySource
from fitkit.data.batches import Stream, check_readable, limited, unpack_batch
from fitkit.data.sources import make_source, split_tail, validation_parts
from fitkit.data.to_device import Transfer
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.progress import Progress


class Squares(Dataset):
    def __init__(self, length=10):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([float(index)]), index * index


class Countdown(IterableDataset):
    def __iter__(self):
        yield from ((torch.tensor([float(i)]), i) for i in range(5))


def all_inputs(batches):
    return [value for values in first_inputs(batches) for value in values]


def first_inputs(batches):
    return [unpack_batch(batch)[0].flatten().tolist() for batch in batches]


def test_arrays_are_cut_in_order():
    source = make_source(np.arange(5.0)[:, None], np.arange(5), batch_size=2)
    assert first_inputs(source.batches(0)) == [[0, 1], [2, 3], [4]]
    assert (source.samples, source.steps, source.batch_size) == (5, 3, 2)


def test_float64_becomes_the_nets_dtype_and_integer_targets_int64():
    x = np.zeros((4, 2))
    for labels in (np.zeros(4, np.int32), np.zeros(4, np.uint8), torch.zeros(4, dtype=torch.int16)):
        batch = next(iter(make_source(x, labels).batches(0)))
        assert batch[0].dtype is torch.float32
        assert batch[1].dtype is torch.int64
    assert (
        next(iter(make_source(x, float_dtype=torch.float64).batches(0)))[0].dtype is torch.float64
    )


def test_integer_and_boolean_inputs_stay():
    batch = next(iter(make_source((np.zeros(3, np.uint8), np.zeros(3, bool))).batches(0)))
    assert [leaf.dtype for leaf in batch[0]] == [torch.uint8, torch.bool]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0)[::-1],
        np.arange(6).astype(">f4"),
        np.arange(6, dtype=np.uint16),
        np.broadcast_to(np.float32(1), (6,)),
    ],
    ids=["negative stride", "big endian", "uint16", "read-only"],
)
def test_unusual_arrays_keep_their_values(array, recwarn):
    batch = next(iter(make_source(array).batches(0)))
    assert batch[0].tolist() == array.tolist()
    assert not recwarn.list


def test_shuffling_takes_each_sample_once_and_differs_between_passes():
    torch.manual_seed(0)
    source = make_source(torch.arange(100.0), batch_size=32, shuffle=True)
    one, two = (all_inputs(source.batches(number)) for number in (0, 1))
    assert one != two
    assert sorted(one) == sorted(two) == list(range(100))
    again = make_source(torch.arange(100.0), batch_size=32, shuffle=True)
    torch.manual_seed(0)
    assert all_inputs(again.batches(0)) == one


def test_targets_stay_with_their_inputs_under_shuffling():
    source = make_source({"a": np.arange(50), "b": (np.arange(50),)}, np.arange(50), shuffle=True)
    for x, y in source.batches(0):
        assert torch.equal(x["a"], y)
        assert torch.equal(x["b"][0], y)


def test_batch_shuffling_keeps_each_batch_its_samples():
    source = ArraySource((torch.arange(10),), 5, "batch")
    batches = [sorted(batch[0].tolist()) for batch in source.batches(0)]
    assert batches == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_order_needs_no_draw_from_the_global_generator():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    list(make_source(torch.zeros(10, 2), batch_size=3).batches(0))
    assert torch.equal(torch.rand(1), expected)


def test_different_lengths_are_both_in_the_message():
    with pytest.raises(ConfigurationError, match=r"x has 5 samples, but y has 4"):
        make_source(np.zeros((5, 1)), np.zeros(4))
    with pytest.raises(ConfigurationError, match=r"x\['a'\] has 5.*x\['b'\]\[0\] has 3"):
        make_source({"a": np.zeros(5), "b": [np.zeros(3)]})
    with pytest.raises(ConfigurationError, match=r"sample_weight has 3"):
        make_source(np.zeros(5), np.zeros(5), np.zeros(3))


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.zeros((0, 3)), "empty"),
        (Squares(0), "empty"),
        (DataLoader(Squares(1), batch_size=2, drop_last=True), "empty"),
        (torch.tensor(3.0), "first dimension"),
        (np.array(["a", "b"]), "dtype <U1"),
        (np.array([object()]), "dtype object"),
        ([1.0, 2.0], r"numpy\.asarray"),
    ],
)
def test_what_is_no_data_says_so(x, words):
    with pytest.raises(ConfigurationError, match=words):
        make_source(x)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (DataLoader(Squares(), batch_size=4), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
        (Squares(), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
        (Countdown(), [[0, 1, 2, 3], [4]]),
        (TensorDataset(torch.arange(5.0)[:, None]), [[0, 1, 2, 3], [4]]),
        ([(torch.zeros(2), torch.zeros(2))], [[0, 0]]),
        (((torch.ones(2),) for _ in range(2)), [[1, 1], [1, 1]]),
    ],
    ids=["loader", "dataset", "iterable dataset", "tensor dataset", "list", "generator"],
)
def test_everything_that_gives_batches_is_read(data, expected, recwarn):
    assert first_inputs(make_source(data, batch_size=4).batches(0)) == expected
    assert not [
        w for w in recwarn.list if "batch_size=" in str(w.message) and isinstance(data, Dataset)
    ]


def test_a_tuple_is_several_inputs_and_a_list_of_pairs_is_batches():
    pair = (torch.zeros(4), torch.zeros(4))
    assert isinstance(make_source(pair), ArraySource)
    assert isinstance(make_source(list(pair)), ArraySource)
    assert isinstance(make_source((pair, pair)), ArraySource)
    assert make_source([pair, pair]).steps == 2
    record = SimpleNamespace(x=torch.zeros(4, 2))
    for batches in ([record], [(record,)], [[record, record]], [{"graph": record}]):
        assert make_source(batches).steps == 1


def test_targets_beside_a_loader_are_refused():
    with pytest.raises(ConfigurationError, match="second entry of each batch"):
        make_source(DataLoader(Squares()), y=np.zeros(10))
    with pytest.raises(ConfigurationError, match="third entry"):
        make_source(Squares(), sample_weight=np.zeros(10))


def test_a_batch_size_that_a_loader_overrides_warns():
    with pytest.warns(UserWarning, match="batch_size=8 is not used"):
        make_source(DataLoader(Squares(), batch_size=4), batch_size=8)


def test_the_tail_is_cut_off_before_shuffling():
    train, held_out = split_tail(np.arange(10), np.arange(10), None, 0.25)
    assert train[0].tolist() == list(range(7))
    assert held_out[1].tolist() == [7, 8, 9]
    train, held_out = split_tail(Squares(), None, None, 0.2)
    assert len(train[0]) == 8
    assert held_out[0][0][0].item() == 8


def test_a_split_without_samples_on_one_side_is_refused():
    with pytest.raises(ConfigurationError, match="leaves 0 to train and 4 to validate"):
        split_tail(np.arange(4), np.arange(4), None, 0.99)


def test_a_split_loses_no_sample_to_binary_fractions():
    train, held_out = split_tail(np.arange(10), np.arange(10), None, 0.9)
    assert (len(train[0]), len(held_out[0])) == (1, 9)


def test_a_loader_can_not_be_split():
    with pytest.raises(ConfigurationError, match="DataLoader"):
        split_tail(DataLoader(Squares()), None, None, 0.5)


def test_validation_data_is_a_pair_a_triple_or_a_source():
    x, y = np.zeros(3), np.zeros(3)
    assert [
        part is given for part, given in zip(validation_parts((x, y)), (x, y, None), strict=True)
    ] == [True] * 3
    assert validation_parts(((x, x), (y, y), None))[1] == (y, y)
    loader = DataLoader(Squares())
    assert validation_parts(loader) == (loader, None, None)
    with pytest.raises(ConfigurationError, match="4 entries"):
        validation_parts((x, x, x, x))


def test_epochs_of_fixed_length_go_on_where_the_last_one_stopped():
    source = make_source(torch.arange(8), batch_size=2)
    stream = Stream(source, Progress(), steps=3)
    seen = [all_inputs(stream.epoch()) for _ in range(3)]
    assert seen == [[0, 1, 2, 3, 4, 5], [6, 7, 0, 1, 2, 3], [4, 5, 6, 7, 0, 1]]


def test_an_endless_generator_is_read_no_further_than_asked():
    taken = []

    def endless():
        number = 0
        while True:
            taken.append(number)
            yield (torch.tensor([float(number)]),)
            number += 1

    stream = Stream(make_source(endless()), Progress(), steps=2)
    assert [first_inputs(stream.epoch()) for _ in range(2)] == [[[0], [1]], [[2], [3]]]
    assert taken == [0, 1, 2, 3]
    assert len(list(limited(make_source(endless()), 3))) == 3


def test_an_iterator_for_several_epochs_is_refused_before_any_work():
    source = make_source(iter([(torch.zeros(1),)]))
    with pytest.raises(ConfigurationError, match="read once"):
        check_readable(source, epochs=2, steps=None)
    check_readable(source, epochs=2, steps=5)


def test_a_batch_of_four_is_refused():
    with pytest.raises(ConfigurationError, match="4 entries"):
        unpack_batch((1, 2, 3, 4))


def test_a_batch_that_is_in_place_and_nobody_elses_is_not_touched():
    transfer = Transfer(torch.device("cpu"), torch.float32)
    batch = (torch.zeros(2), torch.zeros(2, dtype=torch.int64))
    assert transfer(batch, is_lent=False) is batch
    given = {"a": [torch.zeros(2, dtype=torch.float64), np.zeros(2)], "b": "text"}
    moved = transfer(given, is_lent=False)
    assert [leaf.dtype for leaf in moved["a"]] == [torch.float32] * 2
    assert moved["b"] == "text"


def test_what_is_no_array_is_a_wrong_type():
    with pytest.raises(ArgumentTypeError):
        make_source(3.5)


@pytest.mark.parametrize("skip", [0, 1, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE + 4])
def test_a_pass_of_more_batches_than_are_cut_at_once_gives_each_sample_once(skip):
    rows = torch.arange(2 * (3 * AT_ONCE + 5) - 1)
    batches = list(ArraySource((rows, -rows), 2).batches(0, skip=skip))
    assert torch.equal(torch.cat([x for x, _ in batches]), rows[2 * skip :])
    assert torch.equal(torch.cat([y for _, y in batches]), -rows[2 * skip :])
