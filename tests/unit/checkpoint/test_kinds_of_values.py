"""Every kind of value that a state may hold, in every format, exactly as it was."""

import collections
import json
import math

import pytest
import torch
from torch import nn

import fitkit
from fitkit.checkpoint import load_weights, save_weights
from fitkit.checkpoint.codec import DEEPEST, decode_state
from fitkit.errors import CheckpointError, ConfigurationError

VALUES = {
    "None": None,
    "numbers": [True, 0, -1, 1 << 70, 0.1, math.inf, -0.0],
    "texts": ["", "é\ud800", b"\x00\xff"],
    "tuple": (4, (4.5, "a"), ()),
    "size": torch.Size([2, 0, 3]),
    "dtypes": [torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.complex64],
    "set": {1, 2, 3},
    "set of tuples": {(1, 2), (3, None)},
    "dict": {"a": (1,), "b": {"dict": 2, "tuple": [3]}},
    "dict with other keys": {1: "a", (1, 2): torch.Size([1]), None: {2.5}},
    "Counter": collections.Counter({"a": 2}),
    "tags": {"tuple": [1, 2]},
    "all": {"modes": (4, 4), "kinds": [{"size": torch.Size([3]), "of": (torch.int8, {7})}]},
}
FORMATS = ["w.h5", "w.safetensors", "w.pt", "w.dcp"]
CHECKPOINTS = ["c.h5", "c.dcp"]


class Stateful(nn.Module):
    def __init__(self, state):
        super().__init__()
        self.layer, self.state = nn.Linear(3, 2), state

    def forward(self, x):
        return self.layer(x)

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


def same(one, other):
    """Equal, and of equal classes all the way down."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert [*map(type, one)] == [*map(type, other)]
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            same(left, right)
    elif isinstance(one, (set, frozenset)):  # their order is chance: that of addresses
        same(sorted(one, key=str), sorted(other, key=str))
    else:
        assert one == other and str(one) == str(other)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", VALUES)
def test_extra_state_comes_back_as_it_was(tmp_path, kind, name):
    save_weights(tmp_path / name, nn.Sequential(Stateful(VALUES[kind])).state_dict())
    module = nn.Sequential(Stateful("other"))
    load_weights(tmp_path / name, module)
    same(module[0].state, VALUES[kind])


@pytest.mark.parametrize("name", [n for n in FORMATS if n != "w.safetensors"])
def test_tensors_within_extra_state_come_back(tmp_path, name):
    state = {"seen": (torch.arange(3), torch.ones(2, dtype=torch.bfloat16))}
    save_weights(tmp_path / name, Stateful(state).state_dict())
    module = Stateful(None)
    load_weights(tmp_path / name, module)
    same(module.state, state)


def test_tensors_within_extra_state_are_named_for_safetensors(tmp_path):
    with pytest.raises(ConfigurationError, match=r"_extra_state'\]\['a'\].*ends in .h5"):
        save_weights(tmp_path / "w.safetensors", Stateful({"a": torch.ones(1)}).state_dict())


def trainable(state):
    model = fitkit.Model(Stateful(state))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model.compile(optimizer, "mse", accelerator="cpu", devices=1)
    return model, optimizer


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("kind", VALUES)
def test_a_resumed_run_has_extra_state_and_options_as_they_were(tmp_path, kind, name):
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    model, optimizer = trainable(VALUES[kind])
    optimizer.param_groups[0]["note"] = VALUES[kind]
    model.fit(x, y, shuffle=False, verbose=0)
    model.save(tmp_path / name)
    twin, others = trainable("other")
    others.param_groups[0]["note"] = VALUES[kind]
    twin.fit(x, y, epochs=2, shuffle=False, verbose=0, resume_from=tmp_path / name)
    model.fit(x, y, epochs=2, initial_epoch=1, shuffle=False, verbose=0)
    same(twin.net.state, VALUES[kind])
    same(others.param_groups[0]["note"], VALUES[kind])
    assert torch.equal(twin.net.layer.weight, model.net.layer.weight)


class Holder:
    pass


@pytest.mark.parametrize("value", [object(), Holder(), {"a": [Holder]}, torch.qint8], ids=range(4))
def test_what_only_pickle_could_hold_is_refused_with_its_place(tmp_path, value):
    for name in FORMATS:
        with pytest.raises(ConfigurationError, match=r"FK057|_extra_state"):
            save_weights(tmp_path / name, Stateful(value).state_dict())
    assert not list(tmp_path.iterdir())


def nested(kind, depth):
    found = 1
    for _ in range(depth):
        found = {kind: [found]} if kind else [found]
    return found


HOSTILE = [
    {"size": [-1]},
    {"size": [1 << 63]},
    {"size": [1.5]},
    {"size": [True]},
    {"size": {"a": 1}},
    {"dtype": "load"},
    {"dtype": "__class__"},
    {"dtype": "Tensor"},
    {"dtype": "qint8"},
    {"dtype": 3},
    {"set": [[1]]},
    {"frozenset": [1]},
    {"set": [1, 1]},
    {"tuple": "ab"},
    {"device": "cuda"},
    {"tuple": [1], "size": [1]},
    {"tensor": 10**6},
    nested("", DEEPEST + 1),
    nested("tuple", DEEPEST + 1),
]


def no_tensors(number):
    raise ValueError("none")


@pytest.mark.parametrize("encoded", HOSTILE, ids=lambda one: json.dumps(one)[:30])
def test_tags_of_a_wrong_content_are_refused(encoded):
    with pytest.raises(ValueError):
        decode_state(encoded, no_tensors)


@pytest.mark.parametrize(
    "text",
    [*map(json.dumps, HOSTILE), "[" * 100_000, '{"tuple":[' * 100_000, "nonsense"],
    ids=lambda text: text[:30],
)
def test_a_header_with_them_is_refused_and_nothing_is_loaded(tmp_path, monkeypatch, text):
    from fitkit.extras import safetensors_file

    path = tmp_path / "w.safetensors"
    monkeypatch.setattr(safetensors_file, "encode_extra", lambda *_: text)
    monkeypatch.setattr(safetensors_file.json, "dumps", _as_it_is(json.dumps))
    save_weights(path, Stateful(1).state_dict())
    monkeypatch.undo()
    module = Stateful("own")
    with pytest.raises(CheckpointError, match="can't be read"):
        load_weights(path, module)
    assert module.state == "own"


def _as_it_is(dumps):
    """Puts a text into the header's entries as it is."""

    def put(value, **options):
        if isinstance(value, str):
            return '{"_extra_state":' + value + "}"
        return dumps(value, **options)

    return put
