"""Damaged files never load, and never change the module."""

import random

import pytest
import torch

from fitkit.checkpoint import load_weights
from fitkit.errors import CheckpointError


@pytest.fixture
def check(weights, module):
    """Asserts that these bytes are refused and leave the module as it was."""
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    def refused(content, what):
        weights.write_bytes(content)
        try:
            load_weights(weights, module)
        except CheckpointError as error:
            message = str(error)
        else:
            pytest.fail(f"loaded with {what}")
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor, before[name]), what
        return message

    return refused


def test_a_file_cut_at_any_length_never_loads(weights, check):
    content = weights.read_bytes()
    lengths = {*range(0, len(content), 37), 511, 512, 513, len(content) - 1}
    assert len(lengths) >= 100
    for length in sorted(lengths):
        check(content[:length], f"{length} of {len(content)} bytes")


def test_a_flipped_bit_anywhere_never_loads(weights, check):
    content = weights.read_bytes()
    chosen = random.Random(0).sample(range(8 * len(content)), 300)
    for position in (*range(0, 8 * 512, 5), *chosen):
        changed = bytearray(content)
        changed[position // 8] ^= 1 << position % 8
        check(changed, f"bit {position} flipped")


def test_zeroed_doubled_and_lengthened_files_never_load(weights, check):
    content = weights.read_bytes()
    assert "1 bytes too many" in check(content + b"\0", "a byte more")
    check(content + content, "the file twice")
    check(content[:512] + bytes(len(content) - 512), "a body of zeros")
    check(bytes(512) + content[512:], "a header of zeros")
    check(content.replace(b"\n", b"\r\n"), "line ends of another system")


def test_the_message_says_what_is_wrong_and_what_to_do(weights, check):
    content = weights.read_bytes()
    size = len(content)
    message = check(content[:2000], "2000 bytes")
    assert f"{weights} is damaged: only 2000 of its {size} bytes are there." in message
    assert "Nothing was loaded; use another copy or an earlier file." in message
    assert "doesn't match its digest" in check(content[:-1] + b"\xa5", "another last byte")
    assert "header is incomplete" in check(content[:100], "a part of the header")


def test_two_files_mixed_never_load(tmp_path, weights, check):
    content = weights.read_bytes()
    other = tmp_path / "other.h5"
    from fitkit.checkpoint import save_weights

    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    save_weights(other, net.state_dict())
    mixed = content[: len(content) // 2] + other.read_bytes()[len(content) // 2 :]
    assert len(mixed) == len(content)
    check(mixed, "the end of another file")
