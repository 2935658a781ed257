"""Hostile and foreign files: the digests are right, so the structural checks have to refuse."""

import os
import pickle

import h5py
import numpy as np
import pytest
import torch

from fitkit.checkpoint import load_weights, read_container, write_container
from fitkit.checkpoint.container import LARGEST_DOCUMENT
from fitkit.checkpoint.header import seal
from fitkit.errors import CheckpointError

NUMBERS = np.zeros((2, 3), "f4")


def refusal(path):
    with pytest.raises(CheckpointError) as caught, read_container(path):
        pass
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_file_crafted_as_fitkit_writes_it_is_read(craft):
    # What the other tests change a little, so that they refuse for the reason they name.
    path = craft(lambda hdf5: hdf5["arrays"].create_dataset("0", data=NUMBERS))
    with read_container(path) as reader:
        assert reader.read(0).tolist() == NUMBERS.tolist()


def trap(hdf5, name="trap"):
    """A named pipe: whoever opens it, and so follows a link out of the file, waits for ever."""
    path = f"{hdf5.filename}.{name}"
    os.mkfifo(path)
    return path


def external_link(hdf5):
    hdf5["arrays/0"] = h5py.ExternalLink(trap(hdf5), "/arrays/0")


def external_link_to_the_group(hdf5):
    del hdf5["arrays"]
    hdf5["arrays"] = h5py.ExternalLink(trap(hdf5), "/arrays")


def external_link_to_the_document(hdf5):
    del hdf5["document"]
    hdf5["document"] = h5py.ExternalLink(trap(hdf5), "/document")


def soft_link(hdf5):
    hdf5["arrays/0"] = h5py.SoftLink("/document")


def soft_link_loop(hdf5):
    hdf5["arrays/0"] = h5py.SoftLink("/arrays/0")


def soft_link_to_the_group(hdf5):
    del hdf5["arrays"]
    hdf5["arrays"] = h5py.SoftLink("/")


def external_storage(hdf5):
    hdf5["arrays"].create_dataset("0", (2, 3), "f4", external=[(trap(hdf5), 0, 24)])


def external_storage_of_the_document(hdf5):
    del hdf5["document"]
    hdf5.create_dataset("document", (20,), "u1", external=[(trap(hdf5), 0, 20)])


def virtual_dataset(hdf5):
    layout = h5py.VirtualLayout((2, 3), "f4")
    layout[:] = h5py.VirtualSource(trap(hdf5), "x", (2, 3))
    hdf5["arrays"].create_virtual_dataset("0", layout)


def compressed(hdf5):
    hdf5["arrays"].create_dataset("0", data=NUMBERS, compression="gzip")


def with_checksums(hdf5):
    hdf5["arrays"].create_dataset("0", data=NUMBERS, fletcher32=True)


def chunked(hdf5):
    hdf5["arrays"].create_dataset("0", data=NUMBERS, chunks=(1, 3))


def compact(hdf5):
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.COMPACT)
    hdf5["arrays"].create_dataset("0", data=NUMBERS, dcpl=properties)


def strings(hdf5):
    hdf5["arrays"].create_dataset("0", (2, 3), h5py.string_dtype())


def references(hdf5):
    hdf5["arrays"].create_dataset("0", (2, 3), h5py.ref_dtype)


def variable_lengths(hdf5):
    hdf5["arrays"].create_dataset("0", (2, 3), h5py.vlen_dtype("f4"))


def compounds(hdf5):
    hdf5["arrays"].create_dataset("0", (2, 3), [("a", "f2"), ("b", "f2")])


def enumeration(hdf5):
    hdf5["arrays"].create_dataset("0", (2, 3), bool)


def big_endian(hdf5):
    hdf5["arrays"].create_dataset("0", data=NUMBERS.astype(">f4"))


def integers_of_the_same_size(hdf5):
    hdf5["arrays"].create_dataset("0", data=NUMBERS.astype("u4"))


def without_shape(hdf5):
    hdf5["arrays"]["0"] = h5py.Empty("f4")


def another_shape(hdf5):
    hdf5["arrays"]["0"] = NUMBERS.T


def another_rank(hdf5):
    hdf5["arrays"]["0"] = NUMBERS.ravel()


def scalar(hdf5):
    hdf5["arrays"]["0"] = np.float32(1)


def without_numbers(hdf5):
    hdf5["arrays"].create_dataset("0", (2, 3), "f4")


def a_group_instead_of_an_array(hdf5):
    hdf5["arrays"].create_group("0")


def a_dtype_instead_of_an_array(hdf5):
    hdf5["arrays/0"] = np.dtype("f4")


def nothing(hdf5):
    pass


def another_name(hdf5):
    hdf5["arrays"]["00"] = NUMBERS


def one_array_too_many(hdf5):
    hdf5["arrays"]["0"] = NUMBERS
    hdf5["arrays"]["1"] = NUMBERS


def one_more_member(hdf5):
    hdf5["arrays"]["0"] = NUMBERS
    hdf5["more"] = NUMBERS


def an_array_instead_of_the_group(hdf5):
    del hdf5["arrays"]
    hdf5["arrays"] = NUMBERS


def the_document_as_text(hdf5):
    del hdf5["document"]
    hdf5["document"] = "{}"


def the_document_as_a_matrix(hdf5):
    del hdf5["document"]
    hdf5["document"] = np.zeros((2, 3), "u1")


def the_document_as_a_group(hdf5):
    del hdf5["document"]
    hdf5.create_group("document")


def an_oversize_document(hdf5):
    del hdf5["document"]
    hdf5["document"] = np.full(LARGEST_DOCUMENT + 1, ord(" "), "u1")


def a_document_that_declares_terabytes(hdf5):
    del hdf5["document"]
    hdf5.create_dataset("document", (1 << 42,), "u1")


STRUCTURES = {
    external_link: "'0' is an external link",
    external_link_to_the_group: "'arrays' is an external link",
    external_link_to_the_document: "'document' is an external link",
    soft_link: "'0' is a soft link",
    soft_link_loop: "'0' is a soft link",
    soft_link_to_the_group: "'arrays' is a soft link",
    external_storage: "'0' has external storage",
    external_storage_of_the_document: "'document' has external storage",
    virtual_dataset: "'0' is a virtual dataset",
    compressed: "'0' is compressed or filtered",
    with_checksums: "'0' is compressed or filtered",
    chunked: "'0' isn't stored in one piece",
    compact: "'0' isn't stored in one piece",
    strings: "'0' isn't of type float32",
    references: "'0' isn't of type float32",
    variable_lengths: "'0' isn't of type float32",
    compounds: "'0' isn't of type float32",
    enumeration: "'0' isn't of type float32",
    big_endian: "'0' isn't of type float32",
    integers_of_the_same_size: "'0' isn't of type float32",
    without_shape: "'0' has no shape",
    another_shape: "'0' has the shape (3, 2), and its document says (2, 3)",
    another_rank: "'0' has the shape (6,), and its document says (2, 3)",
    scalar: "'0' has the shape (), and its document says (2, 3)",
    without_numbers: "'0' declares 24 bytes and the file holds 0",
    a_group_instead_of_an_array: "'0' isn't a dataset",
    a_dtype_instead_of_an_array: "'0' isn't a dataset",
    nothing: "'arrays' has 0 members instead of 1",
    another_name: "'0' is missing",
    one_array_too_many: "'arrays' has 2 members instead of 1",
    one_more_member: "'/' has 3 members instead of 2",
    an_array_instead_of_the_group: "'arrays' isn't a group",
    the_document_as_text: "'document' isn't",
    the_document_as_a_matrix: "'document' has 2 dimensions",
    the_document_as_a_group: "'document' isn't a dataset",
    an_oversize_document: "its document takes 16.8 MB",
    a_document_that_declares_terabytes: "'document' declares 4398046511104 bytes",
}


@pytest.mark.parametrize("build", STRUCTURES, ids=lambda build: build.__name__)
@pytest.mark.timeout(10)
def test_a_structure_that_fitkit_never_writes_is_refused(craft, build):
    message = refusal(craft(build))
    assert STRUCTURES[build] in message
    assert "Nothing was loaded" in message


def test_an_array_that_declares_terabytes_takes_no_memory(craft):
    size = 10**12
    path = craft(
        lambda hdf5: hdf5["arrays"].create_dataset("0", (size,), "f4"),
        arrays=[{"dtype": "float32", "shape": [size]}],
    )
    assert path.stat().st_size < 10_000
    assert "declare 4000000000" in refusal(path)


def test_one_dataset_under_many_numbers_does_not_multiply_the_file(craft):
    def build(hdf5):
        hdf5["arrays"]["0"] = np.zeros(1000, "f4")
        for index in range(1, 100):
            hdf5["arrays"][str(index)] = hdf5["arrays"]["0"]

    path = craft(build, arrays=[{"dtype": "float32", "shape": [1000]}] * 100)
    assert "declare 40" in refusal(path)


@pytest.mark.parametrize("address", [1 << 20, 1 << 62, (1 << 64) - 600])
def test_an_array_outside_the_file_is_refused(craft, address):
    real = []

    def build(hdf5):
        hdf5["arrays"]["0"] = NUMBERS
        hdf5.flush()
        real.append(hdf5["arrays/0"].id.get_offset() - 512)

    path = craft(build, libver="earliest")  # whose headers have no checksums
    content = path.read_bytes()
    pointer = real[0].to_bytes(8, "little") + (24).to_bytes(8, "little")
    assert content.count(pointer) == 1
    path.write_bytes(content.replace(pointer, address.to_bytes(8, "little") + pointer[8:]))
    with open(path, "r+b") as file:
        seal(file)
    assert "refused" in refusal(path)


def test_a_user_block_of_another_size_is_refused(craft):
    path = craft(lambda hdf5: hdf5["arrays"].create_dataset("0", data=NUMBERS), userblock_size=1024)
    assert "doesn't begin after the header" in refusal(path)


def test_a_body_that_is_not_hdf5_is_refused(tmp_path):
    path = tmp_path / "noise.h5"
    with open(path, "w+b") as file:
        file.write(bytes(5000))
        seal(file)
    assert "libhdf5 can't read it" in refusal(path)


def test_booleans_other_than_0_and_1_are_refused(craft):
    path = craft(
        lambda hdf5: hdf5["arrays"].create_dataset("0", data=np.array([0, 1, 2], "u1")),
        arrays=[{"dtype": "bool", "shape": [3]}],
    )
    with (
        read_container(path) as reader,
        pytest.raises(CheckpointError, match="booleans other than 0 and 1"),
    ):
        reader.read(0)


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (b"", "can't be read"),
        (b"\xff\xfe\xfd", "can't be read"),
        (b"{", "can't be read"),
        ('{"arrays": [], "content": {}}'.encode("utf-16"), "can't be read"),
        ('{"arrays": [], "content": {}}'.encode("utf-8-sig"), "can't be read"),
        (b"[" * 1_000_000, "nested too deeply|can't be read"),
        (b'{"arrays": [], "content": {"a": ' + b"9" * 5000 + b"}}", "can't be read"),
        (b'{"arrays": [], "content": {}, "content": {"a": 1}}', "twice"),
        (b"[]", "no content"),
        (b'{"arrays": []}', "no content"),
        (b'{"content": {}}', "doesn't describe"),
        (b'{"content": {}, "arrays": {"0": 1}}', "doesn't describe"),
        (b'{"content": {}, "arrays": [7]}', "doesn't describe array 0"),
        (b'{"content": {}, "arrays": [{"dtype": "float128", "shape": []}]}', "'float128'"),
        (b'{"content": {}, "arrays": [{"dtype": "nn", "shape": []}]}', "dtype 'nn'"),
        (b'{"content": {}, "arrays": [{"dtype": ["float32"], "shape": []}]}', "unknown"),
        (b'{"content": {}, "arrays": [{"dtype": "float32"}]}', "impossible shape"),
        (b'{"content": {}, "arrays": [{"dtype": "float32", "shape": [-1]}]}', "impossible"),
        (b'{"content": {}, "arrays": [{"dtype": "float32", "shape": [true]}]}', "impossible"),
        (b'{"content": {}, "arrays": [{"dtype": "float32", "shape": [2.0]}]}', "impossible"),
        (b'{"content": {}, "arrays": [{"dtype": "float32", "shape": [NaN]}]}', "impossible"),
    ],
    ids=range(21),
)
def test_a_document_that_fitkit_never_writes_is_refused(craft, document, reason):
    path = craft(nothing, document=document)
    with pytest.raises(CheckpointError, match=reason), read_container(path):
        pass


@pytest.mark.parametrize(
    "weights",
    [
        None,
        [],
        {"tensors": {"a": 1}, "extra": {}, "versions": {}},
        {"tensors": {"a": -1}, "extra": {}, "versions": {}},
        {"tensors": {"a": False}, "extra": {}, "versions": {}},
        {"tensors": {"a": "0"}, "extra": {}, "versions": {}},
        {"tensors": {"a": 0}, "extra": {"a": 1}, "versions": {}},
        {"tensors": {"a": 0}, "extra": [], "versions": {}},
        {"tensors": {"a": 0}, "extra": {}, "versions": {"": "1"}},
        {"tensors": {"a": 0}},
    ],
    ids=range(10),
)
def test_weights_that_the_document_describes_wrongly_are_refused(craft, weights):
    path = craft(
        lambda hdf5: hdf5["arrays"].create_dataset("0", data=NUMBERS),
        content={"kind": "weights", "weights": weights},
    )
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(torch.ones(2, 3))
    with pytest.raises(CheckpointError, match="is refused|has no weights in it"):
        load_weights(path, module)
    assert module.a.tolist() == torch.ones(2, 3).tolist()


def test_a_missing_file_is_a_file_not_found_error_with_its_path(tmp_path, module):
    with pytest.raises(FileNotFoundError, match="no-such-file"):
        load_weights(tmp_path / "no-such-file.h5", module)


def plain_hdf5(path):
    with h5py.File(path, "w") as hdf5:
        hdf5["weights"] = NUMBERS


def hdf5_with_a_user_block(path):
    with h5py.File(path, "w", userblock_size=512) as hdf5:
        hdf5["weights"] = NUMBERS


def pickled(path):
    path.write_bytes(pickle.dumps({"a": 1}))


def saved_by_torch(path):
    torch.save({"a": torch.ones(2)}, path)


def saved_by_old_torch(path):
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)


def text(path):
    path.write_text("hello")


def empty(path):
    path.touch()


def pipe(path):
    os.mkfifo(path)


FOREIGN = {
    plain_hdf5: "an HDF5 file that fitkit didn't write. Read it with h5py",
    hdf5_with_a_user_block: "without fitkit's header",
    pickled: "a zip archive or a pickle",
    saved_by_torch: "a zip archive or a pickle",
    saved_by_old_torch: "a zip archive or a pickle",
    text: "isn't a file that fitkit wrote",
    empty: "is empty",
    pipe: "isn't a file. Give the path of one",
    lambda path: path.mkdir(): "isn't a file. Give the path of one",
}


@pytest.mark.parametrize("make", FOREIGN, ids=lambda make: make.__name__)
@pytest.mark.timeout(10)
def test_a_file_of_another_kind_is_named_for_what_it_is(tmp_path, make):
    path = tmp_path / "foreign.h5"
    make(path)
    assert FOREIGN[make] in refusal(path)


def test_a_newer_format_version_asks_for_an_upgrade(tmp_path):
    path = tmp_path / "newer.h5"
    write_container(path, {}, [])
    path.write_bytes(path.read_bytes().replace(b"fitkit file 1", b"fitkit file 2"))
    assert "version 2, and this fitkit reads versions up to 1. Upgrade" in refusal(path)
