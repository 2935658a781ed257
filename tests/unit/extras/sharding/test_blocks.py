"""Which submodules `fsdp` gathers as one."""

import pytest
from torch import nn

from fitkit.extras.sharding.sharded_module import blocks_of


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 9)


def names(module, wrap):
    known = {part: name for name, part in module.named_modules()}
    return [known[part] for part in blocks_of(module, wrap)]


@pytest.mark.parametrize(
    ("wrap", "expected"),
    [
        ("blocks", ["layers.0", "layers.1", "layers.2"]),
        (None, []),
        (Block, ["layers.2", "layers.1", "layers.0"]),
        ((nn.Embedding, Block), ["layers.2", "layers.1", "layers.0", "embed"]),
        (36, ["head", "layers.2", "layers.1", "layers.0", "embed"]),
        (41, ["head"]),
        (100, []),
    ],
)
def test_blocks_are_found_by_repetition_class_and_size(wrap, expected):
    found = names(Net(), wrap)
    assert sorted(found) == sorted(expected)


def test_inner_blocks_come_before_outer_ones():
    found = names(Net(), (Block, nn.Linear))
    for number in range(3):
        assert found.index(f"layers.{number}.inner") < found.index(f"layers.{number}")


def test_layers_of_a_plain_stack_are_no_blocks():
    stack = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert blocks_of(stack, "blocks") == []


def test_a_module_whose_weight_is_also_elsewhere_is_left_to_the_root():
    net = Net()
    net.head.weight = net.embed.weight
    net.layers[1].inner.weight = net.layers[2].inner.weight
    assert names(net, "blocks") == ["layers.0"]
    assert "embed" not in names(net, (nn.Embedding, nn.Linear))
