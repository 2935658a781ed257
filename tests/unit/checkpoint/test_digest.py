"""What the digest's checksum of a block finds, and old digests."""

import hashlib
import json
import random

import pytest
import torch

from fitkit.checkpoint import load_weights, save_weights
from fitkit.checkpoint.digest import blocks_digest, sums
from fitkit.errors import CheckpointError

SIZE = 1 << 20


@pytest.fixture(scope="module")
def block():
    return random.Random(0).randbytes(SIZE)


def changed(block, *places):
    """The block with other bytes at these places."""
    found = bytearray(block)
    for start, content in places:
        found[start : start + len(content)] = content
    return bytes(found)


def test_the_largest_change_that_is_found_for_certain_is_found_anywhere(block):
    draw = random.Random(1)
    expected = sums(block)
    for _ in range(200):
        start = draw.randrange(0, SIZE - 4089)
        size = draw.choice([1, 2, 4, 512, 4089])
        kind = draw.choice(["other", "zeros", "from elsewhere", "shifted"])
        if kind == "other":
            content = draw.randbytes(size)
        elif kind == "zeros":
            content = bytes(size)
        else:
            place = draw.randrange(SIZE - size) if kind == "from elsewhere" else start + 1
            content = block[place : place + size]
        damaged = changed(block, (start, content))
        assert damaged == block or sums(damaged) != expected, (start, size, kind)


def test_three_words_can_be_changed_in_no_way_that_cancels_out(block):
    draw = random.Random(2)
    expected = sums(block)
    for _ in range(200):
        first = draw.randrange(SIZE // 8)
        # In the first's sums: one set's, the other's. A fourth word could cancel them out.
        words = {first, (first + 512) % (SIZE // 8), (first + 509) % (SIZE // 8)}
        places = []
        for sign, word in zip((1, -1, -1), words, strict=True):
            value = int.from_bytes(block[8 * word : 8 * word + 8], "little")
            places.append((8 * word, ((value + sign * 12345) % 2**64).to_bytes(8, "little")))
        assert sums(changed(block, *places)) != expected


@pytest.mark.parametrize("page", [512, 4096, 65536])
def test_pages_that_changed_places_or_took_anothers_are_found(block, page):
    draw = random.Random(3)
    expected = sums(block)
    # Also where all pages have the same numbers in another order.
    orders = (bytes(draw.sample(range(256), 256)) for _ in range(SIZE // page))
    alike = b"".join(order * (page // 256) for order in orders)
    for content, right in ((block, expected), (alike, sums(alike))):
        for _ in range(50):
            one, other = (page * place for place in draw.sample(range(SIZE // page), 2))
            pages = content[one : one + page], content[other : other + page]
            assert pages[0] != pages[1]
            assert sums(changed(content, (one, pages[1]), (other, pages[0]))) != right
            assert sums(changed(content, (one, pages[1]))) != right


def test_blocks_that_changed_places_are_missing_or_doubled_are_found(tmp_path, block):
    path = tmp_path / "body"
    parts = [block, bytes(SIZE), block[::-1], block[:1000]]
    found = set()
    for order in ([0, 1, 2, 3], [1, 0, 2, 3], [0, 2, 3], [0, 0, 2, 3], [0, 1, 2], [0, 1, 1, 2, 3]):
        path.write_bytes(b"".join(parts[index] for index in order))
        with open(path, "rb", buffering=0) as file:
            found.add(blocks_digest(file, 0, path.stat().st_size))
    assert len(found) == 6


def test_a_safetensors_file_with_the_digest_of_earlier_versions_is_still_checked(tmp_path):
    path = tmp_path / "w.safetensors"
    state = {"a": torch.randn(700, 900)}
    save_weights(path, state)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, numbers = json.loads(content[8 : 8 + length]), content[8 + length :]
    metadata = header["__metadata__"]
    del metadata["fitkit.sums"]
    metadata["fitkit.sha256"] = "0" * 64
    blocks = [numbers[start : start + SIZE] for start in range(0, len(numbers), SIZE)]
    of_numbers = hashlib.sha256(
        "".join(hashlib.sha256(part).hexdigest() for part in blocks).encode()
    ).hexdigest()
    whole = hashlib.sha256(json.dumps(header).encode() + of_numbers.encode()).hexdigest()
    metadata["fitkit.sha256"] = whole
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + numbers)
    module = torch.nn.Module()
    module.register_buffer("a", torch.zeros(700, 900))
    load_weights(path, module)
    assert torch.equal(module.a, state["a"])
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="match its digest"):
        load_weights(path, module)
