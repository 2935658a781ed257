import errno
import json
import os
import sys
import time

import h5py
import numpy as np
import pytest
import torch
import xxhash

from fitkit.checkpoint import container, read_container, write_container
from fitkit.checkpoint.arrays import STORED_AS, dtype_named
from fitkit.checkpoint.container import LARGEST_DOCUMENT
from fitkit.errors import ArgumentTypeError, CheckpointError, ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor):
    """The tensor's bits as integers: unlike its values they compare for all dtypes, and NaNs."""
    if tensor.dtype.is_complex and tensor.dtype.itemsize > 4:
        tensor = torch.view_as_real(tensor)
    return tensor.view(SAME_SIZE[tensor.dtype.itemsize])


def random_bits(dtype, shape):
    if dtype.is_complex and dtype.itemsize > 4:
        part = torch.float32 if dtype == torch.complex64 else torch.float64
        return torch.view_as_complex(random_bits(part, (*shape, 2)))
    limit = 2 if dtype == torch.bool else 1 << (8 * min(dtype.itemsize, 4) - 1)
    numbers = torch.randint(0, limit, shape, dtype=torch.int64)
    return numbers.to(SAME_SIZE[dtype.itemsize]).view(dtype)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "container.h5"


def write_and_read(path, arrays):
    write_container(path, {}, arrays)
    with read_container(path) as reader:
        assert len(reader) == len(arrays)
        return [reader.read(index) for index in range(len(arrays))]


@pytest.mark.parametrize("name", sorted(STORED_AS))
def test_a_tensor_of_any_dtype_and_shape_comes_back_bit_for_bit(path, name):
    dtype = dtype_named(name)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    transposed = random_bits(dtype, (4, 3, 2)).permute(2, 0, 1)
    every_second = random_bits(dtype, (7, 2))[::2]
    written = [
        *(random_bits(dtype, shape) for shape in ((), (0,), (0, 3), (5,), (1, 1), (2, 3, 4))),
        transposed,
        every_second,
    ]
    read = write_and_read(path, written)
    for given, found in zip(written, read, strict=True):
        assert found.dtype == dtype
        assert found.shape == given.shape
        assert torch.equal(bits(found), bits(given))


def test_every_dtype_of_torch_that_holds_plain_numbers_can_be_stored():
    quantized = {"qint8", "qint32", "quint8", "quint2x4", "quint4x2"}
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    names = {str(dtype).removeprefix("torch.") for dtype in dtypes}
    assert names - quantized <= set(STORED_AS)


def test_arrays_keep_their_order_where_hdf5_would_sort_their_names(path):
    read = write_and_read(path, [torch.tensor(value) for value in range(12)])
    assert [int(tensor) for tensor in read] == list(range(12))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3)[:, ::-1],
        np.arange(3, dtype=">i4"),
        np.array(2.5),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.frombuffer(b"read-only", np.uint8),
        np.zeros((0, 2), bool),
    ],
    ids=["reversed", "big-endian", "0-d", "fortran", "read-only", "empty"],
)
@pytest.mark.filterwarnings("error")
def test_a_numpy_array_comes_back_as_a_tensor(path, array):
    (read,) = write_and_read(path, [array])
    assert np.array_equal(read.numpy(), array)


def test_lazily_conjugated_and_negated_tensors_are_stored_with_their_values(path):
    number = torch.tensor([1 + 2j, 3 - 4j])
    conjugated, negated = number.conj(), number.conj().imag
    assert conjugated.is_conj()
    assert negated.is_neg()
    read = write_and_read(path, [conjugated, negated])
    assert torch.equal(read[0], conjugated.resolve_conj())
    assert torch.equal(read[1], negated.resolve_neg())


def test_the_document_comes_back_as_it_was(path):
    document = {
        "z": [1, -2.5, None, True, "ä\ud800\n", float("inf")],
        "10": {"": []},
        "2": 2**70,
        "a/b": {"../c": "d"},
    }
    write_container(path, document, [])
    with read_container(path) as reader:
        assert reader.document == document
        assert list(reader.document) == list(document)


def test_the_same_content_gives_the_same_bytes(tmp_path):
    for name in ("a.h5", "b.h5"):
        write_container(tmp_path / name, {"x": 1}, [torch.arange(3)])
        time.sleep(1.1)  # HDF5 would write the second in which an array was made
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


@pytest.mark.parametrize("count", [1000, 1_060_000], ids=["small", "of many blocks"])
def test_the_header_states_the_size_the_documents_place_and_the_xxh3_of_the_file(path, count):
    write_container(path, {"x": 1}, [torch.randn(count, dtype=torch.float64), torch.ones(7)])
    content = path.read_bytes()
    lines = content[:512].split(b"\n")
    stated = lines[3].removeprefix(b"xxh3-128 ")
    digest = xxhash.xxh3_128_hexdigest(content.replace(stated, b"0" * 32, 1))
    assert lines[0] == b"fitkit file 1"
    assert lines[1] == b"size %020d" % len(content)
    assert stated == digest.encode()
    assert lines[4] == bytes(512 - sum(len(line) + 1 for line in lines[:4]))
    begin, length = map(int, lines[2].removeprefix(b"document ").split())
    document = json.loads(content[begin : begin + length])
    assert document["content"] == {"x": 1}
    assert np.frombuffer(content, "<f4", 7, document["arrays"][1]["offset"]).tolist() == [1.0] * 7
    with read_container(path) as reader:
        assert reader.digest == digest


def test_arrays_of_all_sizes_and_layouts_come_back_from_shared_blocks(path):
    sizes = [5, 300_000, 1, 262_144, 7, 0, 1_200_000, 3, 262_143, 2_000_001, 64]
    arrays = [torch.randn(size) for size in sizes]
    arrays.append(torch.randn(700, 900).t())  # not in one piece
    write_container(path, {}, arrays)
    with read_container(path) as reader:
        assert all(torch.equal(reader.read(i), array) for i, array in enumerate(arrays))
    with h5py.File(path) as hdf5:  # libhdf5 finds each where we have written past it
        for index, array in enumerate(arrays):
            assert np.array_equal(hdf5[f"arrays/{index}"][()], array.numpy())


def test_a_disk_that_fails_amid_an_array_is_one_clear_error(path, monkeypatch):
    path.write_bytes(b"old")

    def full(file, offset, tensor):
        file.seek(offset)
        file.write(bytes(100_000))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(container, "write_array", full)
    with pytest.raises(CheckpointError, match="the disk is full"):
        write_container(path, {}, [torch.zeros(10 << 20)])
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    ("version", "line"),
    [(1, "sha256"), (2, "blocks-sha256"), (3, "blocks-sums"), (None, "xxh3-128")],
)
def test_a_file_of_before_the_first_release_is_refused_by_name(path, version, line):
    write_container(path, {"x": 1}, [torch.arange(4)])
    body = path.read_bytes()[512:]
    magic = f"container {version}" if version else "file 1"
    header = f"fitkit {magic}\nbody {len(body):020d}\n{line} {'0' * 64}\n"
    path.write_bytes(header.encode().ljust(512, b"\0") + body)
    reason = "made by a version of fitkit before 0.1. Save it again"
    with pytest.raises(CheckpointError, match=reason):
        read_container(path).__enter__()


def test_a_header_with_the_digest_of_another_kind_is_refused(path):
    write_container(path, {}, [])
    path.write_bytes(path.read_bytes().replace(b"xxh3-128 ", b"xxh4-128 "))
    with pytest.raises(CheckpointError, match="header is incomplete or was changed"):
        read_container(path).__enter__()


def test_an_array_that_changes_while_it_is_written_gives_a_file_that_agrees_with_itself(
    path, monkeypatch
):
    changing = torch.zeros(3_000_000)
    write = container.write_array

    def changed_meanwhile(file, offset, tensor):
        write(file, offset, tensor)
        changing.add_(1)

    monkeypatch.setattr(container, "write_array", changed_meanwhile)
    write_container(path, {}, [changing, torch.ones(4)])
    with read_container(path) as reader:
        assert not reader.read(0).any()


def test_plain_h5py_can_read_the_arrays(path):
    write_container(
        path, {"x": 1}, [torch.arange(6.0).reshape(2, 3), torch.ones(2, dtype=torch.bfloat16)]
    )
    with h5py.File(path) as hdf5:
        assert set(hdf5) == {"arrays", "document"}
        document = json.loads(hdf5["document"][()].tobytes())
        assert document["content"] == {"x": 1}
        offset = hdf5["arrays/1"].id.get_offset()
        assert document["arrays"][1] == {"dtype": "bfloat16", "shape": [2], "offset": offset}
        assert hdf5["arrays/0"][()].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert hdf5["arrays/1"][()].tolist() == [0x3F80, 0x3F80]
        assert hdf5["arrays/0"].chunks is None
        assert hdf5["arrays/0"].compression is None


def test_a_reader_needs_no_libhdf5(path, monkeypatch):
    write_container(path, {"x": 1}, [torch.arange(3)])
    monkeypatch.setitem(sys.modules, "h5py", None)
    with read_container(path) as reader:
        assert reader.document == {"x": 1}
        assert reader.read(0).tolist() == [0, 1, 2]


def test_an_array_is_described_without_being_read(path):
    write_container(path, {}, [torch.zeros(2, 3, dtype=torch.complex64)])
    with read_container(path) as reader:
        assert reader.describe(0) == ((2, 3), torch.complex64)


def test_an_array_is_read_into_a_tensor_that_is_there(path):
    given = torch.arange(6.0).reshape(2, 3)
    write_container(path, {}, [given])
    target = torch.nn.Parameter(torch.zeros(3, 2)).t()
    with read_container(path) as reader:
        reader.read_into(0, target)
        with pytest.raises(ValueError, match=r"\(2, 3\)"):
            reader.read_into(0, torch.zeros(3, 2))
        with pytest.raises(ValueError, match="float64"):
            reader.read_into(0, torch.zeros(2, 3, dtype=torch.float64))
    assert torch.equal(target, given)


def test_reading_needs_no_right_to_write(path, tmp_path):
    write_container(path, {}, [torch.ones(2)])
    path.chmod(0o444)
    with read_container(path) as reader:
        assert reader.read(0).tolist() == [1, 1]


def test_a_file_replaced_after_its_check_is_read_as_it_was_checked(path):
    write_container(path, {}, [torch.ones(2), torch.ones(1000)])
    with read_container(path) as reader:
        write_container(path, {}, [torch.zeros(2), torch.zeros(1000)])
        assert reader.read(0).tolist() == [1, 1]
        assert reader.read(1).sum() == 1000


def test_a_file_cut_after_its_check_is_refused(path):
    write_container(path, {}, [torch.ones(1000)])
    with read_container(path) as reader:
        os.truncate(path, 1000)
        with pytest.raises(CheckpointError, match="became shorter"):
            reader.read(0)


def test_a_file_written_to_after_its_check_is_refused(path):
    write_container(path, {}, [torch.ones(1000)])
    with read_container(path) as reader:
        with open(path, "r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"1234")
        os.utime(path, (1, 1))  # whatever the system's clock is worth
        for read in (reader.read, lambda index: reader.read_into(index, torch.ones(1000))):
            with pytest.raises(CheckpointError, match="was written to while it was read"):
                read(0)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.eye(2).to_sparse(), "to_dense"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.nn.UninitializedParameter(), "call the model once"),
        (torch.zeros((1,) * 33), "33 dimensions"),
        (torch.zeros((1,) * 32, dtype=torch.complex64), "32 dimensions"),
        (np.array(["text"]), "dtype"),
        (np.array([object()]), "dtype object"),
        (np.zeros(2, [("a", "f4")]), "dtype"),
    ],
)
def test_what_is_no_plain_block_of_numbers_is_refused_before_the_file_is_begun(path, value, reason):
    with pytest.raises(ConfigurationError, match=f"Array 1: .*{reason}"):
        write_container(path, {}, [torch.ones(1), value])
    assert not list(path.parent.iterdir())


def test_a_list_of_numbers_is_not_taken_for_an_array(path):
    with pytest.raises(ArgumentTypeError, match="isn't a tensor"):
        write_container(path, {}, [[1.0, 2.0]])


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ({"a": (1, 2)}, r"document\['a'\]=\(1, 2\)"),
        ({"a": [1, {2, 3}]}, r"document\['a'\]\[1\]"),
        ({"a": {1: 2}}, r"document\['a'\] has the key 1"),
        ({"a": b"bytes"}, "bytes"),
        ({"a": torch.ones(1)}, "Tensor of shape"),
        ({"a": np.float32(1)}, "float32"),
        ({"a": len}, "builtin"),
    ],
)
def test_what_json_would_change_is_refused_with_its_place(path, document, place):
    with pytest.raises(ConfigurationError, match=place):
        write_container(path, document, [])
    assert not path.exists()


def test_a_document_that_contains_itself_is_refused(path):
    document = {}
    document["self"] = document
    with pytest.raises(ConfigurationError, match="contains itself"):
        write_container(path, document, [])


def test_a_document_that_could_not_be_read_again_is_refused(path):
    with pytest.raises(ConfigurationError, match="16.8 MB can be read again"):
        write_container(path, {"a": "x" * LARGEST_DOCUMENT}, [])
