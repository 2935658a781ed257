import copy
import warnings
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from fitkit.checkpoint import load_weights, read_container, save_weights
from fitkit.checkpoint.formats import FORMATS
from fitkit.errors import ArgumentTypeError, CheckpointError, ConfigurationError
from tests.nets import normed
from tests.reference import assert_same_weights


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights.h5"


class Named(nn.Module):
    """A module whose state has just these entries."""

    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def test_a_modules_weights_come_back(weights, module, path):
    source = copy.deepcopy(module)
    for tensor in source.state_dict().values():
        tensor.add_(1)
    save_weights(path, source.state_dict())
    assert load_weights(path, module) == ((), (), ())
    assert_same_weights(module, source)


@pytest.mark.parametrize("suffix", [name for name in FORMATS if name != ".ckpt"])
@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
        *(torch.float8_e5m2, torch.complex64, torch.complex128, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16),
    ],
    ids=str,
)
def test_every_format_keeps_every_dtype_and_shape(tmp_path, suffix, dtype):
    if (suffix, dtype) == (".safetensors", torch.complex128):
        pytest.skip("the format has no complex128")
    path = tmp_path / f"weights{suffix.upper()}"
    shapes = {"none": (), "empty": (0,), "one": (3,), "within": (2, 0, 3), "three": (2, 3, 4)}
    given = {name: torch.randint(0, 2, shape).to(dtype) for name, shape in shapes.items()}
    save_weights(path, given)
    module = Named(**{name: torch.zeros_like(tensor) for name, tensor in given.items()})
    load_weights(path, module)
    for name, tensor in given.items():
        found = getattr(module, name)
        assert found.dtype == dtype
        assert torch.equal(found.to(torch.complex128), tensor.to(torch.complex128)), name


def test_names_that_hdf5_would_sort_or_split_come_back_in_order(path):
    names = [
        "10",
        "2",
        "1",
        "a.b",
        "a/b",
        "a",
        "/",
        "..",
        ".",
        "",
        "ä",
        "\ud800",
        "a\nb",
        "x" * 999,
    ]
    state = {name: torch.tensor(index) for index, name in enumerate(names)}
    save_weights(path, state)
    with read_container(path) as reader:
        assert list(reader.document["weights"]["tensors"]) == names
    with FORMATS[".h5"].open(path) as source:
        assert {name: int(source.read(name)) for name in names} == {
            name: index for index, name in enumerate(names)
        }


def test_children_with_numbers_for_names_are_not_confused(path):
    source = nn.Sequential(*(nn.Linear(1, 1) for _ in range(12)))
    target = nn.Sequential(*(nn.Linear(1, 1) for _ in range(12)))
    save_weights(path, source.state_dict())
    load_weights(path, target)
    assert_same_weights(target, source)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 20)
        self.head = nn.Linear(20, 50, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_are_stored_once_and_stay_tied(path):
    source, target = Tied(), Tied()
    save_weights(path, source.state_dict())
    with read_container(path) as reader:
        assert len(reader) == 1
    load_weights(path, target)
    assert target.head.weight is target.embedding.weight
    assert torch.equal(target.head.weight, source.head.weight)


def test_tied_weights_load_into_a_module_that_does_not_tie_them(path):
    source, target = Tied(), Tied()
    target.head.weight = nn.Parameter(torch.zeros(50, 20))
    save_weights(path, source.state_dict())
    load_weights(path, target)
    assert torch.equal(target.head.weight, source.head.weight)
    assert torch.equal(target.embedding.weight, source.head.weight)
    assert target.head.weight.data_ptr() != target.embedding.weight.data_ptr()


def test_tensors_that_share_a_part_of_their_memory_are_stored_apart(path):
    flat = torch.arange(12.0)
    state = {
        "all": flat,
        "matrix": flat.view(3, 4),
        "transposed": flat.view(4, 3).t(),
        "start": flat[:4],
        "end": flat[8:],
        "bits": flat.view(torch.int32),
        "empty": flat[:0],
        "none": flat[:0].view(0, 3),
    }
    save_weights(path, state)
    module = Named(**{name: torch.zeros_like(tensor) for name, tensor in state.items()})
    load_weights(path, module)
    assert_same_weights(module, state)
    with read_container(path) as reader:
        assert len(reader) == len(state)


def test_the_module_keeps_its_dtype_its_parameters_and_their_flags(path, module):
    save_weights(path, normed().double().state_dict())
    module.to(torch.bfloat16)[0].weight.requires_grad_(False)
    before = list(module.parameters())
    load_weights(path, module)
    after = list(module.parameters())
    assert all(new is old for new, old in zip(after, before, strict=True))
    assert all(tensor.dtype == torch.bfloat16 for tensor in after)
    assert [tensor.requires_grad for tensor in after] == [False, True, True, True]
    assert all(tensor.grad_fn is None for tensor in after)


def test_buffers_that_are_not_persistent_are_left_out(path):
    module = nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("scratch", torch.ones(1), persistent=False)
    save_weights(path, module.state_dict())
    module.scratch.zero_()
    assert load_weights(path, module) == ((), (), ())
    assert module.scratch.item() == 0


def test_parametrized_weights_come_back(path):
    source = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    target = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    save_weights(path, source.state_dict())
    load_weights(path, target)
    assert torch.equal(target.weight, source.weight)


def test_nothing_is_loaded_and_all_names_are_listed_where_a_file_does_not_fit(path):
    save_weights(
        path,
        {
            "same": torch.ones(2),
            "shape": torch.ones(3),
            "kind": torch.ones(2),
            "old": torch.ones(1),
        },
    )
    module = Named(
        same=torch.zeros(2), shape=torch.zeros(4), kind=torch.zeros(2).long(), new=torch.zeros(1)
    )
    with pytest.raises(CheckpointError) as caught:
        load_weights(path, module)
    message = str(caught.value)
    assert str(path) in message
    assert "missing in the file (1):\n    new" in message
    assert "in the file only (1):\n    old" in message
    assert "shape: the file has float32 (3,), the module float32 (4,)" in message
    assert "kind: the file has float32 (2,), the module int64 (2,)" in message
    assert "strict=False" in message
    assert "skip_mismatch=True" in message
    assert module.same.tolist() == [0, 0]


def test_a_long_list_of_names_is_cut_with_its_length(path):
    save_weights(path, {})
    module = Named(**{f"a{index}": torch.zeros(1) for index in range(50)})
    with pytest.raises(CheckpointError, match=r"(?s)\(50\):.*a19\n    … and 30 more") as caught:
        load_weights(path, module)
    assert "a20" not in str(caught.value)


@pytest.mark.parametrize("wrapped_file", [True, False])
def test_a_prefix_on_all_names_is_recognised(path, module, wrapped_file):
    wrapped = nn.ModuleDict({"net": module})
    source, target = (wrapped, module) if wrapped_file else (module, wrapped)
    save_weights(path, source.state_dict())
    where = "file" if wrapped_file else "module"
    with pytest.raises(CheckpointError, match=f"All names in the {where} begin with 'net.'"):
        load_weights(path, target)


def test_strict_false_loads_what_both_have(path):
    save_weights(path, {"same": torch.ones(2), "old": torch.ones(1)})
    module = Named(same=torch.zeros(2), new=torch.zeros(1))
    result = load_weights(path, module, strict=False)
    assert result.missing == ("new",)
    assert result.unexpected == ("old",)
    assert result.skipped == ()
    assert module.same.tolist() == [1, 1]


@pytest.mark.parametrize("tolerates", [{"strict": False}, {"skip_mismatch": True}])
@pytest.mark.parametrize("stored", [{}, {"b": torch.ones(2)}, {"a": torch.ones(3)}])
def test_a_load_that_would_load_nothing_is_refused(path, stored, tolerates):
    save_weights(path, stored)
    with pytest.raises(CheckpointError) as caught:
        load_weights(path, Named(a=torch.zeros(2)), **tolerates)
    assert "strict=False" not in str(caught.value)  # which would load nothing, too
    both = {**stored, "more": torch.ones(1)}
    save_weights(path, both)
    module = Named(a=torch.zeros(2), more=torch.zeros(1))
    load_weights(path, module, strict=False, skip_mismatch=True)
    assert module.more.tolist() == [1]


def test_strict_false_still_refuses_another_shape(path):
    save_weights(path, {"a": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"a: the file has float32 \(2,\)"):
        load_weights(path, Named(a=torch.zeros(3)), strict=False)


def test_skip_mismatch_leaves_out_what_differs_with_one_warning(path):
    save_weights(path, {"same": torch.ones(2), "shape": torch.ones(3), "kind": torch.ones(2)})
    module = Named(same=torch.zeros(2), shape=torch.zeros(4), kind=torch.zeros(2).long())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = load_weights(path, module, skip_mismatch=True)
    assert result.skipped == ("shape", "kind")
    assert module.same.tolist() == [1, 1]
    assert module.shape.tolist() == [0, 0, 0, 0]
    (warning,) = caught
    assert warning.filename == __file__
    assert "shape: the file has" in str(warning.message)
    assert "kind: the file has" in str(warning.message)


def test_skip_mismatch_still_refuses_missing_names(path):
    save_weights(path, {})
    with pytest.raises(CheckpointError, match="missing in the file"):
        load_weights(path, Named(a=torch.zeros(3)), skip_mismatch=True)


@pytest.mark.parametrize(
    ("stored", "wanted", "fits"),
    [
        (torch.float32, torch.float16, True),
        (torch.bfloat16, torch.float64, True),
        (torch.float8_e4m3fn, torch.float32, True),
        (torch.complex128, torch.complex64, True),
        (torch.int64, torch.int32, False),
        (torch.int64, torch.float32, False),
        (torch.float32, torch.int64, False),
        (torch.bool, torch.uint8, False),
        (torch.float32, torch.complex64, False),
        (torch.complex64, torch.float32, False),
    ],
    ids=str,
)
def test_numbers_are_converted_within_floats_and_within_complex_ones_only(
    path, stored, wanted, fits
):
    save_weights(path, {"a": torch.ones(2).to(stored)})
    module = Named(a=torch.zeros(2, dtype=wanted))
    if fits:
        load_weights(path, module)
        assert module.a.dtype == wanted
        assert torch.equal(module.a, torch.ones(2, dtype=wanted))
    else:
        with pytest.raises(CheckpointError, match="of another shape or kind"):
            load_weights(path, module)


class Extra(nn.Module):
    """A module whose state isn't all tensors."""

    def __init__(self, state):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


@pytest.mark.parametrize(
    "state", [None, {"a": [1, 2.5, "x", None, True]}, "text", torch.arange(3)], ids=str
)
def test_extra_state_comes_back(path, state):
    save_weights(path, nn.ModuleDict({"part": Extra(state)}).state_dict())
    target = nn.ModuleDict({"part": Extra(7)})
    load_weights(path, target)
    found = target["part"].state
    assert torch.equal(found, state) if isinstance(state, torch.Tensor) else found == state


@pytest.mark.parametrize(
    "state",
    [object(), {"a": [object()]}, np.ones(2), 1j],
    ids=lambda state: type(state).__name__,  # the same in every process: no address in it
)
def test_extra_state_that_only_pickle_could_store_is_refused(path, state):
    with pytest.raises(ConfigurationError, match=r"state_dict\['part._extra_state'\]"):
        save_weights(path, nn.ModuleDict({"part": Extra(state)}).state_dict())
    assert not path.exists()


def test_missing_extra_state_is_a_missing_name(path):
    save_weights(path, {"weight": torch.ones(2)})
    module = Extra(7)
    with pytest.raises(CheckpointError, match="_extra_state"):
        load_weights(path, module)
    assert load_weights(path, module, strict=False).missing == ("_extra_state",)
    assert module.state == 7


def test_other_data_where_a_tensor_belongs_is_refused(path):
    save_weights(path, {"a": 1})
    with pytest.raises(CheckpointError, match=r"a: the file has no tensor, the module float32"):
        load_weights(path, Named(a=torch.zeros(2)))


def test_a_module_that_fails_to_load_is_reported_with_its_own_error(path):
    class Failing(Extra):
        def set_extra_state(self, state):
            raise KeyError("no such thing")

    save_weights(path, Extra(1).state_dict())
    with pytest.raises(CheckpointError, match="(?s)Failing.*KeyError.*no such thing"):
        load_weights(path, Failing(1))


def test_a_module_is_told_the_version_of_its_state(path):
    class Halved(nn.Module):
        """In version 1 the state was half of what it is now."""

        _version = 2

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
            if local_metadata.get("version", 1) < 2:
                state_dict[prefix + "weight"] = 2 * state_dict[prefix + "weight"]
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    source = nn.Sequential(Halved())
    save_weights(path, source.state_dict())
    target = nn.Sequential(Halved())
    load_weights(path, target)
    assert target[0].weight.tolist() == [1, 1]


def test_a_module_without_values_is_refused_in_both_directions(path):
    module = nn.LazyLinear(3)
    with pytest.raises(ConfigurationError, match=r"state_dict\['weight'\]"):
        save_weights(path, module.state_dict())
    save_weights(path, nn.Linear(2, 2).state_dict())
    with pytest.raises(ConfigurationError, match="'weight' isn't initialised"):
        load_weights(path, module)


def test_a_module_on_the_meta_device_is_filled_and_not_saved(path):
    module, source = nn.Linear(2, 2, device="meta"), nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match=r"state_dict\['weight'\]"):
        save_weights(path, module.state_dict())
    save_weights(path, source.state_dict())
    weight = module.weight
    load_weights(path, module)
    assert module.weight is weight and torch.equal(weight, source.weight)


@pytest.mark.parametrize("name", ["weights.npz", "weights", "weights.h5.bak", ".h5"])
def test_an_unknown_suffix_names_those_that_are_known(tmp_path, name):
    with pytest.raises(ConfigurationError, match=r"'\.h5'.*here '.*'"):
        save_weights(tmp_path / name, {})
    with pytest.raises(ConfigurationError, match=r"'\.h5'.*here '.*'"):
        load_weights(tmp_path / name, nn.Linear(1, 1))


def test_swapped_or_wrong_arguments_are_named(path):
    with pytest.raises(ArgumentTypeError, match=r"module.state_dict\(\)"):
        save_weights(path, nn.Linear(1, 1))
    with pytest.raises(ArgumentTypeError, match="names are strings"):
        save_weights(path, OrderedDict([(1, torch.ones(1))]))
    with pytest.raises(ArgumentTypeError, match="Module"):
        load_weights(path, {})
    with pytest.raises(ArgumentTypeError, match="strict"):
        load_weights(path, nn.Linear(1, 1), strict=1)


def test_weights_in_a_larger_document_load_too(path):
    # A checkpoint is the same file with more trees in it.
    from fitkit.checkpoint import write_container

    write_container(
        path,
        {
            "kind": "checkpoint",
            "weights": {"tensors": {"a": 1}, "extra": {}, "versions": {}},
            "optimizer": {"state": 0},
        },
        [torch.zeros(7), torch.ones(2)],
    )
    module = Named(a=torch.zeros(2))
    load_weights(path, module)
    assert module.a.tolist() == [1, 1]
