"""Containers of every kind, through everything that makes one like another."""

import collections
import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import nn

import fitkit
from fitkit import trees
from fitkit.data.to_device import Transfer
from fitkit.distributed.precision.base import widened
from fitkit.extras.rows import gather, split


@dataclasses.dataclass
class Plain:
    score: torch.Tensor
    note: str = "kept"


@dataclasses.dataclass(frozen=True)
class Frozen:
    score: torch.Tensor
    twice: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "twice", 2 * self.score)


@dataclasses.dataclass(slots=True)
class Slots:
    score: torch.Tensor
    note: str = "kept"


@dataclasses.dataclass
class Both(collections.OrderedDict):
    """As diffusers' outputs."""

    score: torch.Tensor = None

    def __post_init__(self):
        self["score"] = self.score


class ModelOutput(collections.OrderedDict):
    """As Hugging Face's: entries are attributes, and the constructor takes no pairs."""

    def __init__(self, *, score):
        super().__init__()
        self["score"] = score

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


class Ordered(collections.OrderedDict):
    pass


class Encoding(collections.UserDict):
    def __init__(self, score, lengths):
        super().__init__({"score": score})
        self.lengths = lengths


class Named(NamedTuple):
    score: torch.Tensor
    note: str = "kept"


class Checked(Named):
    def __new__(cls, one):
        return super().__new__(cls, one)


class Listed(list):
    def __init__(self, one, size):
        super().__init__([one])
        self.size = size


class Tupled(tuple):
    def __new__(cls, one, size):
        made = super().__new__(cls, [one])
        made.size = size
        return made


def defaulting(score):
    made = collections.defaultdict(list)
    made["score"] = score
    return made


KINDS = {
    "dict": lambda t: {"score": t},
    "list": lambda t: [t],
    "tuple": lambda t: (t,),
    "OrderedDict": lambda t: collections.OrderedDict(score=t),
    "defaultdict": defaulting,
    "dataclass": Plain,
    "frozen dataclass": Frozen,
    "dataclass with slots": Slots,
    "dataclass and mapping": Both,
    "output of a transformer": lambda t: ModelOutput(score=t),
    "subclass of OrderedDict": lambda t: Ordered(score=t),
    "UserDict with another constructor": lambda t: Encoding(t, 3),
    "named tuple": Named,
    "named tuple with another constructor": Checked,
    "list with another constructor": lambda t: Listed(t, 3),
    "tuple with another constructor": lambda t: Tupled(t, 3),
    "torch.return_types": lambda t: torch.max(t, 1),
    "nested": lambda t: {"all": [Both(t), (Named(t), Frozen(t))]},
}
USES = {
    "cast": lambda tree: widened(trees.map_leaves(lambda t: _half(t), tree)),
    "move": lambda tree: Transfer(torch.device("cpu"), torch.float32)((tree,), is_lent=True)[0],
    "detach": lambda tree: trees.map_leaves(
        lambda t: t.detach() if isinstance(t, torch.Tensor) else t, tree
    ),
    "to NumPy": trees.to_numpy,
}


def _half(leaf):
    return leaf.bfloat16() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def facts(tree):
    """What a container is, apart from its leaves."""
    if not trees.is_container(tree):
        return None
    plain = {
        name: value
        for name, value in getattr(tree, "__dict__", {}).items()
        if isinstance(value, (int, str))
    }
    return type(tree), plain, [facts(child) for child in trees.children(tree)]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_container_stays_what_it_is(kind, use):
    tree = KINDS[kind](torch.tensor([[0.5, 1.0], [2.0, 4.0]]))
    found = USES[use](tree)
    assert facts(found) == facts(tree)
    pairs = list(zip(trees.leaves(found), trees.leaves(tree), strict=True))
    assert pairs
    for one, other in pairs:
        if isinstance(other, torch.Tensor):
            assert torch.equal(torch.as_tensor(one), other)
            assert (type(one) is not torch.Tensor) == (use == "to NumPy")
        else:
            assert one == other


@pytest.mark.parametrize("kind", KINDS)
def test_parts_for_replicas_are_joined_to_what_they_were(kind):
    tree = KINDS[kind](torch.tensor([[0.5, 1.0], [2.0, 4.0]]))
    parts = split(tree, 2)
    found = gather(parts)
    assert len(parts) == 2 and type(found) is type(parts[0]) is type(tree)
    for one, other in zip(trees.tensors(found), trees.tensors(tree), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["dataclass and mapping", "output of a transformer"])
def test_attributes_that_are_entries_are_replaced_with_them(kind):
    found = widened(KINDS[kind](torch.ones(2, 2, dtype=torch.bfloat16)))
    assert found.score is found["score"] and found.score.dtype is torch.float32


class Unbuildable(collections.abc.Mapping):
    def __init__(self, one, other):
        self.entries = {one: other}

    def __getitem__(self, key):
        return self.entries[key]

    def __iter__(self):
        return iter(self.entries)

    def __len__(self):
        return len(self.entries)


class Hidden(ModelOutput):
    """As Hugging Face's, with a tuple as an entry and an attribute that is no entry."""

    def __init__(self, *, score):
        super().__init__(score=score)
        self["hidden"] = (score, 2 * score)
        self.__slot = 1


class Private(list):
    __slots__ = ("__kept",)

    def __init__(self, kept):
        super().__init__([kept])
        self.__kept = kept

    def of(self):
        return self.__kept


def test_entries_that_are_containers_are_replaced_in_the_attributes_too():
    found = widened(Hidden(score=torch.ones(2, 2, dtype=torch.bfloat16)))
    assert found.hidden is found["hidden"] and found.hidden[1].dtype is torch.float32


def test_private_slots_are_kept():
    assert trees.map_leaves(lambda leaf: leaf + 1, Private(3)).of() == 3


@dataclasses.dataclass
class FailureError(Exception):
    score: int


def test_bases_that_are_written_in_c_make_their_own():
    assert trees.map_leaves(lambda leaf: 2 * leaf, FailureError(1)) == FailureError(2)
    found = trees.map_leaves(lambda leaf: 2 * leaf, torch.Size([2, 3]))
    assert type(found) is torch.Size and found == (4, 6)


def test_what_its_class_refuses_becomes_a_plain_container():
    assert trees.map_leaves(str, torch.Size([2, 3])) == ("2", "3")


def test_a_mapping_that_nothing_can_build_becomes_a_dict():
    found = trees.map_leaves(lambda leaf: 2 * leaf, Unbuildable("a", 1))
    assert found == {"a": 2}


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(3, 2), kind

    def forward(self, x):
        return KINDS[self.kind](self.layer(x))


@pytest.mark.parametrize("kind", KINDS)
def test_a_net_that_returns_one_trains_in_half_precision_and_predicts(kind):
    def loss(prediction, y):
        found = [leaf for leaf in trees.tensors(prediction) if leaf.is_floating_point()]
        return sum((leaf.mean() - y.mean()).square() for leaf in found)

    model = fitkit.Model(Net(kind))
    model.compile("sgd", loss, accelerator="cpu", devices=1, precision="bf16-mixed")
    x = torch.randn(6, 3)
    model.fit(x, torch.randn(6), batch_size=3, verbose=0)
    found = trees.tensors(model.predict(x, batch_size=4, verbose=0, as_numpy=False))
    assert found and all(len(one) == 6 for one in found)
