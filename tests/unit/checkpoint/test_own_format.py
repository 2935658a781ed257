"""A file format that a user has added: what it raises, users see with the file's name."""

import contextlib
import json
from types import MappingProxyType

import pytest
import torch
from torch import nn

import fitkit
from fitkit.checkpoint import load_weights, save_weights
from fitkit.checkpoint.formats import FORMATS
from fitkit.errors import CheckpointError
from fitkit.extras.inspection import convert
from fitkit.seams import Frozen
from tests.nets import normed, with_adapter
from tests.reference import assert_same_weights, copied_state


class Lists:
    """The weights in a file, which `breaks_in` makes fail in one of its methods."""

    foreign = True
    versions = MappingProxyType({})

    def __init__(self, found, breaks_in=None):
        self._found = {name: torch.tensor(numbers) for name, numbers in found["tensors"].items()}
        self._breaks_in = breaks_in

    @property
    def extra(self):
        return self._given("extra", {})

    def _given(self, method, value):
        if method == self._breaks_in:
            raise KeyError("a part of the file")
        return value

    def describe(self):
        return self._given(
            "describe", {name: (tuple(t.shape), t.dtype) for name, t in self._found.items()}
        )

    def read(self, name):
        return self._given("read", self._found[name])

    def read_into(self, name, tensor):
        with torch.no_grad():
            tensor.copy_(self._given("read_into", self._found[name]))


class ListsFile:
    breaks_in = None

    def write(self, path, weights):
        tensors = {name: tensor.tolist() for name, tensor in weights.tensors.items()}
        with open(path, "w") as file:
            json.dump({"tensors": tensors}, file)

    @contextlib.contextmanager
    def open(self, path):
        with open(path) as file:
            yield Lists(json.load(file), self.breaks_in)


@pytest.fixture
def lists(monkeypatch):
    form = ListsFile()
    monkeypatch.setattr(FORMATS, "_entries", dict(FORMATS._entries))
    monkeypatch.setattr(FORMATS, "_spelling", dict(FORMATS._spelling))
    FORMATS.add(".lists", form)
    return form


def test_weights_come_back_from_a_format_of_the_users_own(lists, tmp_path):
    source, target = normed(), normed()
    save_weights(tmp_path / "w.lists", source.state_dict())
    load_weights(tmp_path / "w.lists", target)
    assert_same_weights(target, source)
    convert(tmp_path / "w.lists", tmp_path / "w.h5")
    load_weights(tmp_path / "w.h5", target := normed())
    assert_same_weights(target, source)


@pytest.mark.parametrize("method", ["describe", "extra", "read", "read_into"])
def test_what_a_format_raises_is_an_error_with_the_files_name_and_the_format(
    lists, tmp_path, monkeypatch, method
):
    path, target = tmp_path / "w.lists", normed()
    save_weights(path, normed().state_dict())
    before = copied_state(target)
    lists.breaks_in = method
    if method == "read_into":
        monkeypatch.setattr("fitkit.checkpoint.weights._HELD_BYTES", -1)
    with pytest.raises(CheckpointError, match=r"KeyError: 'a part of the file'") as caught:
        load_weights(path, target)
    assert str(path) in str(caught.value) and "its format, .lists, failed" in str(caught.value)
    assert isinstance(caught.value, OSError)
    if method != "read_into":
        assert isinstance(caught.value.__cause__, KeyError)
        assert_same_weights(target, before)


def test_damaged_bytes_of_such_a_format_are_an_error_with_the_files_name(lists, tmp_path):
    path = tmp_path / "w.lists"
    path.write_text("{")
    model = fitkit.Model(normed())
    with pytest.raises(CheckpointError, match=r"w\.lists can't be read.*JSONDecodeError: "):
        model.load_weights(path)


def test_a_missing_file_of_such_a_format_stays_a_missing_file(lists, tmp_path):
    with pytest.raises(FileNotFoundError):
        load_weights(tmp_path / "w.lists", normed())


def test_memory_that_runs_out_while_such_a_file_is_read_is_no_damage(lists, tmp_path, monkeypatch):
    path = tmp_path / "w.lists"
    save_weights(path, normed().state_dict())

    def read(self, name):
        raise MemoryError

    monkeypatch.setattr(Lists, "read", read)
    with pytest.raises(MemoryError):
        load_weights(path, normed())


class Counted(nn.Linear):
    """A layer whose state has a number beside tensors."""

    count = 0

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def test_a_format_of_tensors_alone_refuses_other_state_and_a_note_of_what_is_left_out(
    lists, tmp_path
):
    path = tmp_path / "w.lists"
    with pytest.raises(fitkit.ConfigurationError, match=r"'_extra_state' .* would be lost"):
        fitkit.Model(Counted(2, 1)).save_weights(path)
    with pytest.raises(fitkit.ConfigurationError, match="which parameters trainable_only=True"):
        fitkit.Model(with_adapter()).save_weights(path, trainable_only=True)
    assert list(tmp_path.iterdir()) == []
    fitkit.Model(with_adapter()).save_weights(path)


class Whole(Lists):
    def __init__(self, found):
        super().__init__(found)
        self.frozen = Frozen.from_data(found["frozen"])
        self._extra = found["extra"]

    @property
    def extra(self):
        return self._extra


class WholeFile:
    holds = ("extra", "frozen")

    def write(self, path, weights):
        tensors = {name: tensor.tolist() for name, tensor in weights.tensors.items()}
        content = {"tensors": tensors, "extra": dict(weights.extra)}
        path.write_text(json.dumps({**content, "frozen": weights.frozen.as_data()}))

    @contextlib.contextmanager
    def open(self, path):
        yield Whole(json.loads(path.read_text()))


def test_a_format_that_holds_both_gives_them_back(lists, tmp_path):
    FORMATS.add(".whole", WholeFile())
    path = tmp_path / "w.whole"
    source, target = Counted(2, 1), Counted(2, 1)
    source.count = 5
    fitkit.Model(source).save_weights(path)
    fitkit.Model(target).load_weights(path)
    assert target.count == 5 and torch.equal(target.weight, source.weight)

    fitkit.Model(with_adapter()).save_weights(path, trainable_only=True)
    twin = with_adapter()
    frozen = tuple(n for n, p in twin.named_parameters() if not p.requires_grad)
    assert fitkit.Model(twin).load_weights(path).missing == frozen != ()
