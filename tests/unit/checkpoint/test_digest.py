"""The digest of a file: what it is by the definition of XXH3, and what it finds."""

import io
import random

import pytest
import torch
import xxhash

from fitkit.checkpoint import load_weights, save_weights
from fitkit.checkpoint.header import digest_of
from fitkit.errors import CheckpointError

MIB = 1 << 20


def test_the_digest_is_xxh3_of_128_bits_as_its_specification_gives_it():
    # https://github.com/Cyan4973/xxHash: of nothing, with the seed 0.
    assert digest_of(io.BytesIO(b""), 0) == "99aa06d3014798d86001c324468d497f"
    content = random.Random(0).randbytes(3 * MIB + 5)
    assert digest_of(io.BytesIO(content), 7) == xxhash.xxh3_128_hexdigest(content[7:])
    both = digest_of(io.BytesIO(content), 7, b"before")
    assert both == xxhash.xxh3_128_hexdigest(b"before" + content[7:])


def test_blocks_that_changed_places_are_missing_or_doubled_are_found():
    block = random.Random(0).randbytes(MIB)
    parts = [block, bytes(MIB), block[::-1], block[:1000]]
    orders = ([0, 1, 2, 3], [1, 0, 2, 3], [0, 2, 3], [0, 0, 2, 3], [0, 1, 2], [0, 1, 1, 2, 3])
    found = {
        digest_of(io.BytesIO(b"".join(parts[index] for index in order)), 0) for order in orders
    }
    assert len(found) == len(orders)


def test_a_safetensors_file_states_the_digest_of_itself_with_zeros_in_its_place(tmp_path):
    path = tmp_path / "w.safetensors"
    state = {"a": torch.randn(700, 900), "b": torch.ones(3)}
    save_weights(path, state)
    content = path.read_bytes()
    place = content.index(b'"fitkit.xxh3-128":"') + len(b'"fitkit.xxh3-128":"')
    stated, blank = content[place : place + 32], content[:place] + b"0" * 32 + content[place + 32 :]
    assert stated.decode() == xxhash.xxh3_128_hexdigest(blank)
    module = torch.nn.Module()
    for name, tensor in state.items():
        module.register_buffer(name, torch.zeros_like(tensor))
    load_weights(path, module)
    assert torch.equal(module.a, state["a"])
    draw = random.Random(1)
    for offset in [0, 8, place, len(content) - 1, *draw.choices(range(len(content)), k=30)]:
        damaged = bytearray(content)
        damaged[offset] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            load_weights(path, module)
    assert torch.equal(module.a, state["a"])
