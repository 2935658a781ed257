"""Damaged files never load, and never change the module."""

import random

import pytest
import torch

from fitkit.checkpoint import (
    check_optimizer_state,
    fitting_weights,
    load_weights,
    open_checkpoint,
    save_checkpoint,
    save_weights,
)
from fitkit.errors import CheckpointError
from tests.files import reseal
from tests.nets import normed
from tests.reference import assert_same_weights, copied_state


@pytest.fixture
def check(weights, module):
    """Asserts that these bytes are refused and leave the module as it was."""
    before = copied_state(module)

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

    net = normed()
    save_weights(other, net.state_dict())
    end = other.read_bytes()
    assert len(end) == len(content)
    differ = [place for place, (a, b) in enumerate(zip(content, end, strict=True)) if a != b]
    for place in differ[1::50]:
        check(content[:place] + end[place:], f"the end of another file from {place} on")


def write(path, seed):
    """A file of its suffix's kind, and what loading it does to a module."""
    torch.manual_seed(seed)
    net = normed()
    if path.suffix != ".h5":
        save_weights(path, net.state_dict())
        return net, load_weights
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state = {"optimizer": optimizer.state_dict(), "epoch": seed}
    save_checkpoint(path, net.state_dict(), {**state, "random": random.Random(seed).getstate()})
    return net, load_checkpoint


def load_checkpoint(path, module):
    with open_checkpoint(path) as checkpoint:
        assert set(checkpoint.state) == {"optimizer", "epoch", "random"}
        fitting_weights(checkpoint.weights, checkpoint.path, module).assign()


def damaged(content, other, generator):
    """`content` after one of the things that happen to files."""
    place = generator.randrange(len(content))
    length = generator.randrange(1, 1 + len(content) // 4)
    kind = generator.randrange(6)
    changed = bytearray(content)
    if kind == 0:
        return bytes(changed[:place])
    if kind == 1:
        for _ in range(generator.choice([1, 1, 2, 20])):
            changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
    elif kind == 2:
        changed[place : place + length] = other[place : place + length]
    elif kind == 3:
        changed[place : place + length] = bytes(len(changed[place : place + length]))
    elif kind == 4:
        start = generator.randrange(len(content))
        changed[place:place] = content[start : start + length]
    else:
        del changed[place : place + length]
    return bytes(changed)


@pytest.mark.parametrize("suffix", [".h5", ".safetensors", ".pt"])
@pytest.mark.timeout(100)
def test_a_thousand_damaged_files_change_no_module(tmp_path, suffix):
    path, other = tmp_path / f"w{suffix}", tmp_path / f"other{suffix}"
    net, load = write(path, 1)
    write(other, 2)
    content, splice = path.read_bytes(), other.read_bytes()
    whole = copied_state(net)
    module = normed()
    before = copied_state(module)
    generator = random.Random(3)
    refused = 0
    for attempt in range(1000):
        changed = damaged(content, splice, generator)
        path.write_bytes(changed)
        try:
            load(path, module)
        except CheckpointError:
            refused += 1
            expected = before
        else:
            # A change that changes nothing, or a byte of a zip archive that means nothing.
            expected = whole
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor, expected[name]), attempt
        module.load_state_dict(before)
    assert refused > 850


@pytest.mark.timeout(100)
def test_documents_changed_at_random_with_a_right_digest_are_refused_or_read(tmp_path):
    path = tmp_path / "w.h5"
    write(path, 1)
    content = path.read_bytes()
    start, end = content.index(b'{"arrays"'), content.rindex(b"}}") + 2
    generator = random.Random(4)
    module = normed()
    before = copied_state(module)
    refused = 0
    for _ in range(500):
        changed = bytearray(content)
        for _ in range(generator.choice([1, 2, 5])):
            changed[generator.randrange(start, end)] = generator.choice(b'0123456789[]{}",:-.eNtx ')
        path.write_bytes(changed)
        reseal(path)
        try:
            with open_checkpoint(path) as checkpoint:
                ready = fitting_weights(checkpoint.weights, checkpoint.path, module)
                check_optimizer_state(
                    torch.optim.Adam(module.parameters()), checkpoint.state.get("optimizer")
                )
                ready.assign()
        except CheckpointError:
            refused += 1
            assert_same_weights(module, before)
            continue
        module.load_state_dict(before)
    assert 100 < refused < 500
