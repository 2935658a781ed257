"""Large files are read straight into the module; here all are taken for large."""

import pytest
import torch
from torch import nn

from fitkit.checkpoint import load_weights, save_weights
from fitkit.checkpoint.arrays import StoredArrays
from fitkit.checkpoint.weights import plain_targets
from fitkit.errors import CheckpointError
from tests.reference import assert_same_weights, copied_state

SUFFIXES = [".h5", ".safetensors", ".pt", ".dcp"]


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch):
    monkeypatch.setattr("fitkit.checkpoint.weights._HELD_BYTES", -1)


def net():
    layers = nn.Linear(300, 200), nn.BatchNorm1d(200), nn.Embedding(70, 9), nn.LSTM(4, 5)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_fills_a_module_that_stays_the_same_objects(tmp_path, suffix):
    source, target = net(), net()
    source[1].running_mean.uniform_()
    source[1].num_batches_tracked.fill_(7)
    objects = list(target.parameters())
    versions = [parameter._version for parameter in objects]
    save_weights(tmp_path / f"w{suffix}", source.state_dict())
    assert load_weights(tmp_path / f"w{suffix}", target) == ((), (), ())
    assert_same_weights(source, target)
    assert all(a is b for a, b in zip(objects, target.parameters(), strict=True))
    # autograd sees that what it may have saved for a backward was changed
    assert all(p._version > v for p, v in zip(objects, versions, strict=True))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_other_dtypes_and_layouts_are_converted_as_copy_does(tmp_path, suffix):
    source, target = nn.Linear(300, 200), nn.Linear(300, 200).to(torch.bfloat16)
    target.weight = nn.Parameter(torch.zeros(300, 200, dtype=torch.bfloat16).t())
    save_weights(tmp_path / f"w{suffix}", source.state_dict())
    load_weights(tmp_path / f"w{suffix}", target)
    assert torch.equal(target.weight, source.weight.to(torch.bfloat16))


def test_a_module_on_the_meta_device_is_filled(tmp_path):
    source = net()[:3]
    with torch.device("meta"):
        target = net()[:3]
    save_weights(tmp_path / "w.h5", source.state_dict())
    load_weights(tmp_path / "w.h5", target)
    assert_same_weights(source, target)


class Doubling(nn.Linear):
    """Doubles what it loads, and keeps it."""

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        self.kept = state_dict[prefix + "weight"]
        state_dict[prefix + "weight"] = self.kept * 2
        super()._load_from_state_dict(state_dict, prefix, *arguments)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_loading_code_of_a_submodules_own_gets_numbers_that_it_can_keep(tmp_path, suffix):
    source = nn.Sequential(nn.Linear(3, 3), nn.Linear(30, 30))
    target = nn.Sequential(nn.Linear(3, 3), Doubling(30, 30))
    save_weights(tmp_path / f"w{suffix}", source.state_dict())
    load_weights(tmp_path / f"w{suffix}", target)
    assert torch.equal(target[0].weight, source[0].weight)
    assert torch.equal(target[1].weight, source[1].weight * 2)
    assert torch.equal(target[1].kept, source[1].weight)


def test_only_what_torch_itself_would_copy_is_filled():
    module = nn.Sequential(nn.Linear(2, 2), Doubling(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    module[2].register_load_state_dict_pre_hook(lambda *arguments: None)
    module[3].register_buffer("part", module[3].weight.detach()[:1])
    assert set(plain_targets(module)) == {"0.weight", "0.bias", "3.bias"}
    module[0].tied = module[0].weight
    assert plain_targets(module)["0.tied"] is module[0].weight
    module.register_load_state_dict_pre_hook(lambda *arguments: None)
    assert plain_targets(module) == {}


def test_tied_weights_that_a_file_has_apart_are_the_last_ones(tmp_path):
    target = nn.Sequential(nn.Linear(500, 400), nn.Linear(500, 400))
    target[1].weight = target[0].weight
    source = nn.Sequential(nn.Linear(500, 400), nn.Linear(500, 400))
    save_weights(tmp_path / "w.h5", source.state_dict())
    load_weights(tmp_path / "w.h5", target)
    assert torch.equal(target[0].weight, source[1].weight)
    assert target[1].weight is target[0].weight


@pytest.mark.parametrize("suffix", [".h5", ".safetensors", ".dcp"])
def test_a_disk_that_fails_after_the_check_is_said_to_have_left_a_mixture(
    tmp_path, monkeypatch, suffix
):
    path = tmp_path / f"w{suffix}"
    save_weights(path, net().state_dict())
    target = net()
    real = StoredArrays._fill

    def failing(arrays, offset, numbers):
        if numbers.nbytes == 300 * 200 * 4:
            raise OSError(5, "Input/output error")
        real(arrays, offset, numbers)

    monkeypatch.setattr(StoredArrays, "_fill", failing)
    with pytest.raises(CheckpointError, match="(?s)Input/output error.*may have been replaced"):
        load_weights(path, target)


def test_a_small_files_weights_are_held_before_any_is_assigned(tmp_path, monkeypatch):
    monkeypatch.undo()
    path = tmp_path / "w.h5"
    save_weights(path, net().state_dict())
    target = net()
    before = copied_state(target)
    real, reads = StoredArrays._fill, []

    def failing(arrays, offset, numbers):
        reads.append(numbers.nbytes)
        if numbers.nbytes == 4 * 5 * 5 * 4:  # the LSTM's, after many others
            raise OSError(5, "Input/output error")
        real(arrays, offset, numbers)

    monkeypatch.setattr(StoredArrays, "_fill", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        load_weights(path, target)
    assert 300 * 200 * 4 in reads
    assert_same_weights(target, before)
