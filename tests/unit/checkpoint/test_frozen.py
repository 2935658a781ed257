"""Files without the parameters that don't learn, and what becomes of them on a base."""

import os

import pytest
import torch
from torch import nn

import fitkit
from fitkit.callbacks import ModelCheckpoint
from fitkit.errors import CheckpointError, ConfigurationError
from fitkit.extras.inspection import convert
from tests.nets import LoRA, regression, with_adapter

SUFFIXES = [".h5", ".safetensors", ".pt", ".dcp"]
FROZEN = ("0.base.weight", "0.base.bias", "1.weight", "1.bias", "3.weight", "3.bias")
X, Y = regression(64, 40)


def compiled(net=None):
    model = fitkit.Model(with_adapter() if net is None else net)
    model.compile("adam", "mse", learning_rate=0.01)
    return model


def trained(**options):
    model = compiled()
    model.fit(X, Y, epochs=2, batch_size=16, verbose=0, **options)
    return model


def equal(one, other):
    pairs = zip(one.net.state_dict().items(), other.net.state_dict().items(), strict=True)
    return all(n == m and torch.equal(a, b) for (n, a), (m, b) in pairs)


@pytest.fixture(scope="module")
def model():
    return trained()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_adapters_file_goes_back_onto_its_base(tmp_path, model, suffix, recwarn):
    path = tmp_path / f"adapter{suffix}"
    model.save_weights(path, trainable_only=True)
    twin = compiled()
    loaded = twin.load_weights(path)
    assert loaded == (FROZEN, (), ())
    assert equal(twin, model) and not recwarn.list


def test_it_holds_what_learns_and_buffers_alone(tmp_path, model):
    model.save_weights(tmp_path / "all.safetensors")
    model.save_weights(tmp_path / "adapter.pt", trainable_only=True)
    names = list(torch.load(tmp_path / "adapter.pt"))
    running = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert names == ["0.down.weight", "0.up.weight", *running]


def test_kilobytes_beside_a_base_of_megabytes(tmp_path):
    model = compiled(nn.Sequential(LoRA(nn.Linear(1500, 1500))))
    model.save_weights(tmp_path / "adapter.h5", trainable_only=True)
    assert os.path.getsize(tmp_path / "adapter.h5") < 32_000


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_another_base_is_a_warning(tmp_path, model, suffix):
    path = tmp_path / f"adapter{suffix}"
    model.save_weights(path, trainable_only=True)
    other = compiled(with_adapter(seed=1))
    own = other.net[3].weight.clone()
    with pytest.warns(UserWarning, match="another base: its 6 frozen parameters"):
        other.load_weights(path)
    assert torch.equal(other.net[0].up.weight, model.net[0].up.weight)
    assert torch.equal(other.net[3].weight, own)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_lost_is_refused_all_the_same(tmp_path, model, suffix):
    path = tmp_path / f"adapter{suffix}"
    model.save_weights(path, trainable_only=True)
    twice = with_adapter()
    twice[3] = LoRA(twice[3])
    other = compiled(twice)
    with pytest.raises(CheckpointError, match=r"missing in the file \(4\):\s+3\.base\.weight"):
        other.load_weights(path)
    with pytest.warns(UserWarning, match="the module has no '3.weight'"):
        assert "3.down.weight" in other.load_weights(path, strict=False).missing


def test_weights_without_a_note_are_no_adapter(tmp_path, model):
    state = {n: t for n, t in model.net.state_dict().items() if n not in FROZEN}
    torch.save(dict(state), tmp_path / "foreign.pt")
    with pytest.raises(CheckpointError, match=r"missing in the file \(6\)"):
        compiled().load_weights(tmp_path / "foreign.pt")


@pytest.mark.parametrize("note", [{"dtypes": ["0.base.weight"], "digest": ""}, "all", {1: 2}])
def test_a_note_that_fitkit_never_writes_is_refused(tmp_path, model, note):
    model.save_weights(tmp_path / "adapter.pt", trainable_only=True)
    state = torch.load(tmp_path / "adapter.pt")
    state._metadata[""]["fitkit.frozen"] = note
    torch.save(state, tmp_path / "adapter.pt")
    with pytest.raises(CheckpointError, match="its note of what it leaves out"):
        compiled().load_weights(tmp_path / "adapter.pt")


@pytest.mark.parametrize("suffix", [".h5", ".dcp"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_training_goes_on_from_it(tmp_path, suffix, asynchronous):
    saves = ModelCheckpoint(
        tmp_path / f"{{epoch}}{suffix}", trainable_only=True, asynchronous=asynchronous
    )
    whole = trained(callbacks=saves)
    again = trained(resume_from=tmp_path / f"1{suffix}")
    assert equal(again, whole)


def test_nor_from_another_base(tmp_path):
    trained(callbacks=ModelCheckpoint(tmp_path / "{epoch}.h5", trainable_only=True))
    other = compiled(with_adapter(seed=1))
    before = {name: value.clone() for name, value in other.net.state_dict().items()}
    with pytest.raises(CheckpointError, match="saved beside another base.*Nothing was loaded"):
        other.load(tmp_path / "1.h5")
    assert all(torch.equal(before[name], value) for name, value in other.net.state_dict().items())
    changed = compiled()
    with torch.no_grad():
        changed.net[3].bias[0] += 1e-6
    with pytest.raises(CheckpointError, match="another base"):
        changed.fit(X, Y, epochs=2, verbose=0, resume_from=tmp_path / "1.h5")


def test_a_base_that_a_half_precision_rounds_is_the_same(tmp_path):
    def half():
        model = fitkit.Model(with_adapter())
        model.compile("adam", "mse", precision="bf16-true")
        return model

    model = half()
    saves = ModelCheckpoint(tmp_path / "{epoch}.h5", trainable_only=True)
    model.fit(X, Y, epochs=2, batch_size=16, verbose=0, callbacks=saves)
    again = half()
    assert again.net[3].weight.dtype is torch.float32
    again.fit(X, Y, epochs=2, batch_size=16, verbose=0, resume_from=tmp_path / "1.h5")
    assert equal(again, model)


def test_weights_alone_by_the_callback(tmp_path):
    path = tmp_path / "{epoch}.safetensors"
    model = trained(callbacks=ModelCheckpoint(path, save_weights_only=True, trainable_only=True))
    twin = compiled()
    twin.load_weights(tmp_path / "2.safetensors")
    assert equal(twin, model)


@pytest.mark.parametrize("source", SUFFIXES)
@pytest.mark.parametrize("target", SUFFIXES)
def test_a_conversion_keeps_the_note(tmp_path, model, source, target):
    model.save_weights(tmp_path / f"one{source}", trainable_only=True)
    convert(tmp_path / f"one{source}", tmp_path / f"two{target}")
    twin = compiled()
    assert twin.load_weights(tmp_path / f"two{target}").missing == FROZEN
    assert equal(twin, model)


def test_where_all_learns_it_is_a_file_of_weights(tmp_path):
    model = compiled(nn.Linear(4, 1))
    model.save_weights(tmp_path / "all.h5")
    model.save_weights(tmp_path / "learning.h5", trainable_only=True)
    assert (tmp_path / "all.h5").read_bytes() == (tmp_path / "learning.h5").read_bytes()


def test_where_nothing_learns_there_is_nothing_to_save(tmp_path):
    model = compiled(nn.Linear(4, 1).requires_grad_(False))
    with pytest.raises(ConfigurationError, match="no parameter of the net learns"):
        model.save_weights(tmp_path / "none.h5", trainable_only=True)


def test_a_wrapped_nets_names(tmp_path, model):
    """As other programs give them to a state dict."""
    model.save_weights(tmp_path / "adapter.pt", trainable_only=True)
    state = torch.load(tmp_path / "adapter.pt")
    wrapped = type(state)((f"module.{name}", value) for name, value in state.items())
    wrapped._metadata = state._metadata
    note = wrapped._metadata[""]["fitkit.frozen"]
    note["dtypes"] = {f"module.{name}": kind for name, kind in note["dtypes"].items()}
    torch.save(wrapped, tmp_path / "wrapped.pt")
    twin = compiled()
    with pytest.warns(UserWarning, match="begin with 'module.'") as warned:
        twin.load_weights(tmp_path / "wrapped.pt")
    assert len(warned) == 1  # the base is the same
    assert equal(twin, model)
