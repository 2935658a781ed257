"""Modules that say themselves how they are loaded: files give what torch itself gives."""

import copy

import pytest
import torch
from torch import nn

import fitkit
from fitkit.errors import CheckpointError


class Memory(nn.Module):
    """Remembers rows in a buffer that grows, and makes room for what it loads."""

    def __init__(self, rows=0):
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.register_buffer("bank", torch.arange(3.0 * rows).reshape(rows, 3))

    def forward(self, x):
        return self.net(x)

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.bank = self.bank.new_empty(state_dict[prefix + "bank"].shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Renamed(nn.Module):
    """Takes the name that its weight had before."""

    def __init__(self, name="weight"):
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.randn(3)))
        if name == "weight":
            self._register_load_state_dict_pre_hook(self._rename)

    def _rename(self, state_dict, prefix, *rest):
        if f"{prefix}old" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}old")

    def forward(self, x):
        return (x * self.weight).sum(1, keepdim=True)


class Forgiving(nn.Module):
    """Doesn't mind that a part of it is missing."""

    def __init__(self, parts=2):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(3, 1) for _ in range(parts)])
        self.register_load_state_dict_post_hook(_forgive)

    def forward(self, x):
        return self.parts[0](x)


def _forgive(module, incompatible):
    incompatible.missing_keys.clear()


class Widening(nn.Linear):
    """Has its own `load_state_dict`."""

    def load_state_dict(self, state_dict, strict=True, assign=False):
        rows = {name: value[:1] for name, value in state_dict.items()}
        return super().load_state_dict(rows, strict=strict, assign=assign)


class Counting(Memory):
    """Needs its own numbers to load, so that nothing can be rehearsed."""

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.seen = float(self.net.weight.sum())
        super()._load_from_state_dict(state_dict, prefix, *rest)


def without_counters():
    """Return a norm's state as torch wrote it before it counted batches."""
    state = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).state_dict()
    return {name: value for name, value in state.items() if "num_batches" not in name}


def old_norm():
    conv = nn.Sequential(nn.Linear(3, 1))
    state = {"0.weight_g": torch.rand(1, 1), "0.weight_v": torch.rand(1, 3)}
    return {**state, "0.bias": conv[0].bias.detach()}


FAMILY = {
    "a buffer that grows": (Memory(5).state_dict(), Memory),
    "inside others": (nn.Sequential(nn.Linear(3, 3), Memory(4)).state_dict(), lambda: nn.Sequential(
        nn.Linear(3, 3), Memory(1)
    )),
    "a name of before": (Renamed("old").state_dict(), Renamed),
    "a part that may be missing": (Forgiving(1).state_dict(), Forgiving),
    "a load_state_dict of its own": (nn.Linear(3, 4).state_dict(), lambda: Widening(3, 1)),
    "numbers that it needs": (Counting(5).state_dict(), Counting),
    "a norm without counters": (without_counters(), lambda: nn.Sequential(
        nn.Linear(3, 3), nn.BatchNorm1d(3)
    )),
    "a weight norm of before": (old_norm(), lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 1))
    )),
}  # fmt: skip


def saved(state, path):
    from fitkit.checkpoint import save_weights

    save_weights(path, state)
    return path


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("suffix", [".h5", ".pt", ".dcp"])
def test_a_file_gives_what_torchs_loading_gives(name, suffix, tmp_path):
    state, make = FAMILY[name]
    torch.manual_seed(0)
    expected = make()
    found = copy.deepcopy(expected)
    expected.load_state_dict(copy.copy(state))
    path = saved(state, tmp_path / f"w{suffix}")
    assert fitkit.Model(found).load_weights(path) == ((), (), ())
    assert_same(found.state_dict(), expected.state_dict())


class RefusesAfterwards(Counting):
    """Looks at what it has loaded."""

    def _load_from_state_dict(self, *arguments):
        super()._load_from_state_dict(*arguments)
        raise ValueError("mine")


class RefusesBeside(Memory):
    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state):
        if state["version"] == 2:
            raise ValueError("mine")


class Beside2(Memory):
    def get_extra_state(self):
        return {"version": 2}

    def set_extra_state(self, state):
        pass


def tensors_of(net):
    return [(name, one) for name, one in net.state_dict().items() if "extra" not in name]


@pytest.mark.parametrize(
    ("written", "refuses"), [(Memory, RefusesAfterwards), (Beside2, RefusesBeside)]
)
def test_own_code_that_refuses_leaves_the_whole_net_as_it_was(written, refuses, tmp_path):
    saved(nn.Sequential(nn.Linear(3, 3), written(4)).state_dict(), tmp_path / "w.h5")
    net = nn.Sequential(nn.Linear(3, 3), refuses(2))
    held = list(net.parameters())
    before = {
        name: value.clone() for name, value in net.state_dict().items() if "extra" not in name
    }
    attributes = set(vars(net[1]))
    with pytest.raises(CheckpointError, match=r"mine\). Nothing was loaded"):
        fitkit.Model(net).load_weights(tmp_path / "w.h5")
    assert_same(dict(tensors_of(net)), before)
    assert all(one is other for one, other in zip(net.parameters(), held, strict=True))
    assert set(vars(net[1])) == attributes


class Misfit(Memory):
    def __init__(self, rows=0, width=2):
        super().__init__(rows)
        self.net = nn.Linear(3, width)


def test_what_doesnt_fit_after_all_changes_nothing(tmp_path):
    path = saved(Memory(5).state_dict(), tmp_path / "w.h5")
    module = Misfit(2)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(CheckpointError, match=r"\(2\):\s+net.weight.*\n\s+net.bias") as refusal:
        fitkit.Model(module).load_weights(path)
    assert refusal.value.code == "FK053" and "bank" not in str(refusal.value)
    assert_same(module.state_dict(), before)
    with pytest.warns(UserWarning, match="keeps its own values"):
        left = fitkit.Model(module).load_weights(path, skip_mismatch=True)
    assert set(left.skipped) == {"net.weight", "net.bias"}
    assert torch.equal(module.bank, Memory(5).bank)


@pytest.mark.parametrize("kind", [Memory, Counting])
def test_names_that_own_code_doesnt_take_are_refused(kind, tmp_path):
    path = saved({**Memory(5).state_dict(), "other": torch.ones(1)}, tmp_path / "w.h5")
    with pytest.raises(CheckpointError, match="other"):
        fitkit.Model(kind()).load_weights(path)


class Remembering(fitkit.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        net = self.model.net
        net.bank = torch.cat([net.bank, torch.full((1, 3), float(epoch))])


def test_a_training_that_grows_resumes_and_loads(tmp_path):
    x, y = torch.randn(12, 3), torch.randn(12, 1)

    def model():
        torch.manual_seed(1)
        made = fitkit.Model(Memory())
        made.compile("adam", "mse", devices=1, accelerator="cpu")
        return made

    uncut, cut, resumed, loaded = model(), model(), model(), model()
    grows = {"callbacks": Remembering(), "verbose": 0, "batch_size": 4}
    torch.manual_seed(2)
    uncut.fit(x, y, epochs=3, **grows)
    torch.manual_seed(2)
    cut.fit(x, y, epochs=2, **grows)
    cut.save(tmp_path / "cut.h5")
    resumed.fit(x, y, epochs=3, resume_from=tmp_path / "cut.h5", **grows)
    assert_same(resumed.net.state_dict(), uncut.net.state_dict())
    loaded.load(tmp_path / "cut.h5")
    assert_same(loaded.net.state_dict(), cut.net.state_dict())
