"""Hostile and foreign files: the digests are right, so the structural checks have to refuse."""

import json
import os
import pickle

import h5py
import numpy as np
import pytest
import torch

from fitkit.checkpoint import load_weights, read_container, write_container
from fitkit.checkpoint.container import LARGEST_DOCUMENT
from fitkit.checkpoint.header import HEADER_SIZE, Span, seal
from fitkit.errors import CheckpointError

NUMBERS = np.arange(6, dtype="f4").reshape(2, 3)


def refusal(path):
    with pytest.raises(CheckpointError) as caught, read_container(path):
        pass
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_file_crafted_as_fitkit_writes_it_is_read(craft):
    # What the other tests change a little, so that they refuse for the reason they name.
    with read_container(craft(NUMBERS)) as reader:
        assert reader.read(0).tolist() == NUMBERS.tolist()


# ---------------------------------------------------------------------- HDF5's structures


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


def strings(hdf5):
    hdf5["arrays"].create_dataset("0", (2, 3), h5py.string_dtype())


def references(hdf5):
    hdf5["arrays"].create_dataset("0", (2, 3), h5py.ref_dtype)


def variable_lengths(hdf5):
    hdf5["arrays"].create_dataset("0", (2, 3), h5py.vlen_dtype("f4"))


STRUCTURES = [
    external_link,
    external_link_to_the_group,
    external_link_to_the_document,
    soft_link,
    soft_link_loop,
    soft_link_to_the_group,
    external_storage,
    external_storage_of_the_document,
    virtual_dataset,
    compressed,
    with_checksums,
    chunked,
    strings,
    references,
    variable_lengths,
]


@pytest.mark.parametrize("build", STRUCTURES, ids=lambda build: build.__name__)
@pytest.mark.timeout(10)
def test_no_structure_of_hdf5_leads_a_reader_anywhere(tmp_path, build):
    path = tmp_path / "structure.h5"
    with h5py.File(path, "w", userblock_size=HEADER_SIZE) as hdf5:
        hdf5["document"] = np.zeros(20, "u1")
        hdf5.create_group("arrays")
        build(hdf5)
    array = {"dtype": "float32", "shape": [2, 3], "offset": path.stat().st_size}
    text = json.dumps({"arrays": [array], "content": {}}).encode()
    with open(path, "r+b") as file:
        file.seek(0, os.SEEK_END)
        place = Span(file.tell() + NUMBERS.nbytes, len(text))
        file.write(NUMBERS.tobytes() + text)
        seal(file, place)
    with read_container(path) as reader:
        assert reader.read(0).tolist() == NUMBERS.tolist()


# ---------------------------------------------------------------------- places and sizes


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (Span(HEADER_SIZE, 0), "its document can't be read"),
        (Span(0, 100), "its document can't be read"),
        (Span(HEADER_SIZE + 1, 50), "its document can't be read"),
        (Span(HEADER_SIZE, 10_000), "its document isn't in the file"),
        (Span(10**19, 10), "its document isn't in the file"),
        (Span(HEADER_SIZE, LARGEST_DOCUMENT + 1), "its document takes 16.8 MB"),
        (Span(HEADER_SIZE, 1 << 42), "its document takes 4398046.5 MB"),
    ],
)
def test_a_document_that_is_elsewhere_is_refused(craft, place, reason):
    message = refusal(craft(NUMBERS, place=place))
    assert reason in message
    assert "Nothing was loaded" in message


@pytest.mark.parametrize(
    "offset", [None, True, 512.0, "512", [512], -1, -24, 10_000, 1 << 62, (1 << 64) - 600, 10**30]
)
def test_an_array_outside_the_file_is_refused(craft, offset):
    array = {"dtype": "float32", "shape": [2, 3], "offset": offset}
    assert "array 0 isn't in the file" in refusal(craft(NUMBERS, arrays=[array]))


def test_an_array_without_a_place_is_refused(craft):
    document = {"arrays": [{"dtype": "float32", "shape": [2, 3]}], "content": {}}
    assert "array 0 isn't in the file" in refusal(craft(NUMBERS, document=document))


def test_an_array_may_end_where_the_file_does_and_not_after_it(craft):
    size = craft(NUMBERS).stat().st_size
    array = {"dtype": "float32", "shape": [2, 3], "offset": size - 24}
    size = craft(NUMBERS, arrays=[array]).stat().st_size
    for offset, fits in ((size - 24, True), (size - 23, False)):
        path = craft(NUMBERS, arrays=[{**array, "offset": offset}])
        assert path.stat().st_size == size
        if fits:
            with read_container(path) as reader:
                assert reader.read(0).shape == (2, 3)
        else:
            assert "array 0 isn't in the file" in refusal(path)


def test_an_array_that_declares_terabytes_takes_no_memory(craft):
    path = craft(NUMBERS, arrays=[{"dtype": "float32", "shape": [10**12]}])
    assert path.stat().st_size < 10_000
    assert "declare 4000000000" in refusal(path)


@pytest.mark.parametrize("shape", [[0, 1 << 62], [1 << 62, 1 << 62, 0], [0] + [1 << 40] * 30])
def test_an_empty_array_of_sizes_that_no_machine_can_multiply_is_refused(craft, shape):
    path = craft(NUMBERS, arrays=[{"dtype": "float32", "shape": shape}])
    assert "impossible shape" in refusal(path)


def test_one_part_of_a_file_under_many_numbers_does_not_multiply_it(craft):
    path = craft(np.zeros(1000, "f4"), arrays=[{"dtype": "float32", "shape": [1000]}] * 100)
    assert "declare 40" in refusal(path)


def test_a_body_without_a_document_is_refused(tmp_path):
    path = tmp_path / "noise.h5"
    with open(path, "w+b") as file:
        file.write(bytes(5000))
        seal(file, Span(HEADER_SIZE, 1000))
    assert "its document can't be read" in refusal(path)


def test_booleans_other_than_0_and_1_are_refused(craft):
    path = craft(np.array([0, 1, 2], "u1"), arrays=[{"dtype": "bool", "shape": [3]}])
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
    path = craft(document=document)
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
    path = craft(NUMBERS, content={"kind": "weights", "weights": weights})
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
