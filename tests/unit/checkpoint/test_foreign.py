"""Files that other programs read and write: `.safetensors`, `.pt`, `.pth`."""

import json
import os
import pickle
import re
import resource
import signal
import zipfile
from collections import OrderedDict

import pytest
import torch

from fitkit.checkpoint import load_weights, save_weights
from fitkit.errors import CheckpointError, ConfigurationError
from fitkit.extras import safetensors_file
from fitkit.extras.inspection import convert
from tests.nets import normed
from tests.reference import assert_same_weights, copied_state


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(30, 30)
        self.b = torch.nn.Linear(30, 30)
        self.b.weight = self.a.weight


SUFFIXES = [".safetensors", ".pt", ".pth"]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("make", [normed, Tied])
def test_weights_come_back_and_tied_ones_are_written_once(tmp_path, suffix, make):
    path, module, other = tmp_path / f"w{suffix}", make(), make()
    save_weights(path, module.state_dict())
    load_weights(path, other)
    assert_same_weights(module, other)
    if make is Tied:
        assert path.stat().st_size < 1.7 * module.a.weight.nbytes
        assert other.a.weight is other.b.weight


def test_torch_reads_what_is_written_as_its_own(tmp_path):
    module = normed()
    save_weights(tmp_path / "w.pt", module.state_dict())
    state = torch.load(tmp_path / "w.pt", weights_only=True)
    assert state._metadata[""] == module.state_dict()._metadata[""]
    other = normed()
    other.load_state_dict(state)
    assert_same_weights(module, other)


def test_the_safetensors_package_reads_what_is_written_and_is_read(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "w.safetensors"
    tensors = {
        "odd": torch.ones(3, dtype=torch.uint8),
        "single": torch.randn(2, 3),
        "0-d": torch.tensor(2, dtype=torch.int64),
        "empty": torch.zeros(0, 2, dtype=torch.bfloat16),
        "float8": torch.ones(5).to(torch.float8_e4m3fn),
        "pairs": torch.randn(2, dtype=torch.complex64),
        "transposed": torch.randn(4, 5).t(),
    }
    save_weights(path, tensors)
    found = safetensors.load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].tolist() == tensor.tolist()

    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name.replace("0-d", "zero"), torch.zeros_like(tensor))
    state = {name.replace("0-d", "zero"): item.contiguous() for name, item in tensors.items()}
    safetensors.save_file(state, path)
    load_weights(path, module)
    for name, tensor in module.state_dict().items():
        assert tensor.tolist() == state[name].tolist()


def test_tied_weights_pass_to_and_from_the_safetensors_package(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    path, module = tmp_path / "w.safetensors", Tied()
    save_weights(path, module.state_dict())
    other = Tied()
    assert safetensors.load_model(other, path) == (set(), [])
    assert_same_weights(module, other)
    safetensors.save_model(module, path)
    other = Tied()
    load_weights(path, other)
    assert_same_weights(module, other)


def test_a_dtype_that_safetensors_lacks_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"'a'.*complex128.*ends in \.h5"):
        save_weights(tmp_path / "w.safetensors", {"a": torch.ones(1, dtype=torch.complex128)})


@pytest.mark.parametrize("suffix", SUFFIXES[:2])
def test_a_file_that_does_not_fit_gets_the_same_message_as_an_h5_file(tmp_path, suffix):
    messages = []
    for ending in (suffix, ".h5"):
        path, module = tmp_path / f"w{ending}", normed()
        save_weights(path, {"0.weight": torch.ones(2, 2), "more": torch.ones(1)})
        before = copied_state(module)
        with pytest.raises(CheckpointError) as caught:
            load_weights(path, module)
        messages.append(str(caught.value).replace(ending, ""))
        assert_same_weights(module, before)
    assert messages[0] == messages[1]


@pytest.mark.parametrize("prefix", ["module.", "net.", "module.model."])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "as Lightning nests it"])
def test_a_wrappers_prefix_is_left_out_with_a_warning(tmp_path, prefix, nested):
    path, module, other = tmp_path / "w.pt", normed(), normed()
    state = {prefix + name: tensor for name, tensor in module.state_dict().items()}
    content = {"state_dict": state, "epoch": 3, "hyper_parameters": {"a": 1}} if nested else state
    torch.save(content, path)
    with pytest.warns(UserWarning, match=f"all names begin with '{prefix}'"):
        load_weights(path, other)
    assert_same_weights(module, other)


def test_a_prefix_that_does_not_make_the_names_fit_stays(tmp_path):
    path = tmp_path / "w.pt"
    torch.save({"module.a": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match=r"in the file only \(1\):\s+module\.a"):
        load_weights(path, normed())


def test_the_prefix_is_left_out_of_the_versions_too(tmp_path):
    path, module = tmp_path / "w.pt", torch.nn.Sequential(normed())
    save_weights(path, torch.nn.ModuleDict({"module": module}).state_dict())
    seen = []
    other = torch.nn.Sequential(normed())
    other[0][1].register_load_state_dict_pre_hook(
        lambda module, state, prefix, metadata, *rest: seen.append(metadata)
    )
    with pytest.warns(UserWarning, match="all names begin with 'module.'"):
        load_weights(path, other)
    assert seen == [{"version": 2}]


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_pickle_that_would_run_code_runs_nothing(tmp_path, zipped):
    path, trap = tmp_path / "w.pt", tmp_path / "trap"
    torch.save({"0.weight": Trap(trap)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"it holds \w+\.mkdir, and") as refusal:
        load_weights(path, normed())
    assert "\x1b" not in str(refusal.value)
    assert not trap.exists()
    path.write_bytes(pickle.dumps(Trap(trap)))
    with pytest.raises(CheckpointError):
        load_weights(path, normed())
    assert not trap.exists()


def test_files_of_old_torch_and_without_checksums_are_read(tmp_path):
    path, module = tmp_path / "w.pt", normed()
    torch.save(module.state_dict(), path, _use_new_zipfile_serialization=False)
    other = normed()
    load_weights(path, other)
    assert_same_weights(module, other)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(module.state_dict(), path)
    finally:
        torch.serialization.set_crc32_options(True)
    other = normed()
    load_weights(path, other)
    assert_same_weights(module, other)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (torch.ones(2), "holds a Tensor instead of a state dict"),
        ([1], "holds a list"),
        ({1: torch.ones(1)}, "holds a dict instead"),
        ({"a": torch.eye(2).to_sparse()}, "'a' can't be loaded: .*to_dense"),
    ],
    ids=range(4),
)
def test_a_pt_file_of_other_things_says_what_it_holds(tmp_path, content, reason):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=reason):
        load_weights(tmp_path / "w.pt", normed())


def test_an_archive_that_marks_numbers_as_a_folder_is_refused(tmp_path):
    # torch reads nothing of a folder: the tensor would have whatever its memory had before.
    path, module = tmp_path / "w.pt", normed()
    save_weights(path, module.state_dict())
    content = bytearray(path.read_bytes())
    content[content.rindex(b"archive/data/0") - 8] ^= 0x10  # in the list at the file's end
    path.write_bytes(content)
    (part,) = (p for p in zipfile.ZipFile(path).infolist() if p.external_attr)
    assert part.filename.endswith("data/0") and part.external_attr == 0x10
    with pytest.raises(CheckpointError, match="marked as a folder"):
        load_weights(path, normed())


def test_a_compressed_archive_is_refused_before_it_is_unpacked(tmp_path):
    with zipfile.ZipFile(tmp_path / "w.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w/data.pkl", bytes(10**7))
    with pytest.raises(CheckpointError, match="it is compressed"):
        load_weights(tmp_path / "w.pt", normed())


@pytest.mark.parametrize("suffix", SUFFIXES[:2])
@pytest.mark.timeout(10)
def test_what_is_no_such_file_is_a_clear_error(tmp_path, suffix):
    path = tmp_path / f"w{suffix}"
    with pytest.raises(FileNotFoundError, match=path.name):
        load_weights(path, normed())
    for content in (b"", b"x", b"hello, this is text", bytes(100), b"\xff" * 100):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=path.name):
            load_weights(path, normed())
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="isn't a file"):
        load_weights(path, normed())


@pytest.mark.parametrize("suffix", SUFFIXES[:2])
def test_a_full_disk_at_any_byte_keeps_the_old_file(tmp_path, suffix):
    path = tmp_path / f"w{suffix}"
    save_weights(path, {"a": torch.ones(9000), "b": torch.ones(3)})
    old = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room_bytes in range(0, len(old), 997):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, limits[1]))
        try:
            with pytest.raises(CheckpointError, match="0.0 MB are needed, more than the system"):
                save_weights(path, {"a": torch.zeros(9000), "b": torch.ones(3)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert os.listdir(tmp_path) == [path.name]
        assert path.read_bytes() == old


@pytest.mark.parametrize("suffix", SUFFIXES[:2])
def test_ctrl_c_during_a_save_keeps_the_old_file(tmp_path, suffix, monkeypatch):
    path = tmp_path / f"w{suffix}"
    save_weights(path, {"a": torch.ones(3)})
    old, handler = path.read_bytes(), signal.getsignal(signal.SIGINT)
    owner, name = (torch, "save") if suffix == ".pt" else (safetensors_file, "write_array")
    function = getattr(owner, name)

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        return function(*arguments)

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_weights(path, {"a": torch.zeros(3), "b": torch.zeros(3)})
    assert os.listdir(tmp_path) == [path.name]
    assert path.read_bytes() == old
    assert signal.getsignal(signal.SIGINT) is handler


def crafted(path, header, numbers=bytes(24)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + numbers)
    return path


def entry(dtype="F32", shape=(2, 3), places=(0, 24)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(places)}


def test_a_safetensors_file_crafted_as_the_format_says_is_read(tmp_path):
    module = torch.nn.Module()
    module.register_buffer("a", torch.ones(2, 3))
    load_weights(crafted(tmp_path / "w.safetensors", {"a": entry()}), module)
    assert not module.a.any()


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"", "no .safetensors file"),
        (b"[]", "no .safetensors file"),
        (b"{", "no .safetensors file .*EOF"),
        (b'{"a":' + b"[" * 100_000, "recursion limit"),
        (b'{"a": {}, "a": {}}', "missing field"),
        ({"a": 1}, "invalid type: integer `1`"),
        ({"a": {}}, "missing field"),
        ({"a": entry(shape=(-2, -3))}, "invalid value: integer `-2`"),
        ({"a": entry(shape=(2.0, 3))}, "invalid type: floating point"),
        ({"a": entry(shape=(True, 6))}, "invalid type: boolean"),
        ({"a": entry(shape=(1,) * 40 + (6,))}, "'a' is of F32 .*, unknown here"),
        ({"a": entry(places=(0, 24, 24))}, "expected 2 elements"),
        ({"a": entry(dtype="F128")}, "unknown variant `F128`"),
        ({"a": entry(dtype=["F32"])}, "no .safetensors file"),
        ({"a": entry(shape=(2, 4))}, "invalid shape, data type, or offset"),
        ({"a": entry(shape=(10**6, 10**6), places=(0, 4 * 10**12))}, "not fully covered"),
        ({"a": entry(places=(4, 28))}, "invalid offset for tensor `a`"),
        ({"a": entry(shape=(5,), places=(0, 20))}, "not fully covered"),
        ({"a": entry(), "b": entry()}, "invalid offset for tensor"),
        ({"a": entry(), "__metadata__": {"x": 1}}, "expected a string"),
        ({"a": entry(), "__metadata__": {"fitkit.versions": "{}"}}, "match its digest"),
        ({"a": entry(), "__metadata__": {"fitkit.xxh3-128": "0" * 32}}, "match its digest"),
        ({"a": entry(), "__metadata__": {"fitkit.xxh3-128": "0"}}, "match its digest"),
        ({"a": entry("BOOL", (24,))}, "booleans other than 0 and 1"),
        ({"a": entry("F4", (48,))}, "'a' is of F4 .*, unknown here"),
    ],
    ids=range(25),
)
@pytest.mark.timeout(10)
def test_a_safetensors_file_that_breaks_the_formats_rules_is_refused(tmp_path, header, reason):
    module = torch.nn.Module()
    module.register_buffer(
        "a", torch.ones(24, dtype=torch.bool) if "booleans" in reason else torch.ones(2, 3)
    )
    path = crafted(tmp_path / "w.safetensors", header, b"\2" * 24)
    with pytest.raises(CheckpointError, match=f"(?s)is damaged.*{reason}"):
        load_weights(path, module)
    assert module.a.all()


@pytest.mark.parametrize("key", ["fitkit.sha256", "fitkit.sums"])
def test_a_safetensors_file_of_before_the_first_release_is_refused_by_name(tmp_path, key):
    header = {"a": entry(), "__metadata__": {key: "0" * 64, "fitkit.versions": "{}"}}
    reason = "made by a version of fitkit before 0.1. Save it again"
    with pytest.raises(CheckpointError, match=reason):
        load_weights(crafted(tmp_path / "w.safetensors", header), normed())


def test_a_header_longer_than_the_file_takes_no_memory(tmp_path):
    path = tmp_path / "w.safetensors"
    for length in (10, 10**9, 2**63, 2**64 - 1):
        path.write_bytes(length.to_bytes(8, "little") + b"{}")
        with pytest.raises(CheckpointError, match="its header is incomplete"):
            load_weights(path, normed())


def test_a_pt_file_is_opened_once_and_never_mapped(tmp_path, monkeypatch):
    # A mapped file that another process cuts ends this one with SIGBUS.
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.arange(4.0)}, path)
    seen, load = [], torch.load

    def watched(file, **options):
        seen.append((file, options))
        path.write_bytes(b"")  # cut in place, as another process might
        return load(file, **options)

    monkeypatch.setattr(torch, "load", watched)
    module = torch.nn.Linear(4, 1, bias=False)
    before = module.weight.clone()
    with pytest.raises(CheckpointError):
        load_weights(path, module)
    assert torch.equal(module.weight, before)
    ((file, options),) = seen
    assert not isinstance(file, (str, os.PathLike)) and not options.get("mmap")


def test_a_pt_file_that_takes_the_path_meanwhile_is_of_no_consequence(tmp_path, monkeypatch):
    path, other = tmp_path / "weights.pt", tmp_path / "other.pt"
    torch.save({"weight": torch.ones(1, 4)}, path)
    torch.save({"weight": torch.zeros(1, 4)}, other)
    load = torch.load

    def replaced(file, **options):
        os.replace(other, path)
        return load(file, **options)

    monkeypatch.setattr(torch, "load", replaced)
    module = torch.nn.Linear(4, 1, bias=False)
    load_weights(path, module)
    assert module.weight.tolist() == [[1.0] * 4]


def with_attributes(**attributes):
    made = OrderedDict(weight=torch.ones(1, 4))
    vars(made).update(attributes)
    return made


def tensor_with_attributes():
    made = torch.ones(1, 4)
    made.detach = made.numel = 3
    return {"weight": made}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda: {"weight": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])},
        lambda: {"weight": torch.zeros(1).expand(1 << 38)},
        lambda: {str(number): torch.zeros(1).expand(1 << 10) for number in range(1000)},
    ],
)
@pytest.mark.parametrize("convert_it", [False, True])
def test_tensors_that_no_file_needs_are_refused_in_a_pt_file(tmp_path, make, convert_it):
    path = tmp_path / "weights.pt"
    torch.save(make(), path)
    use = convert if convert_it else load_weights
    target = tmp_path / "weights.h5" if convert_it else torch.nn.Linear(4, 1, bias=False)
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        use(path, target)
    assert not (tmp_path / "weights.h5").exists()


@pytest.mark.parametrize(
    "make",
    [
        lambda: with_attributes(get=3, keys=4, values=5, _metadata=6),
        tensor_with_attributes,
    ],
)
def test_attributes_that_hide_methods_are_passed_over_in_a_pt_file(tmp_path, make):
    torch.save(make(), tmp_path / "weights.pt")
    module = torch.nn.Linear(4, 1, bias=False)
    load_weights(tmp_path / "weights.pt", module)
    assert module.weight.tolist() == [[1.0] * 4]


def test_a_small_expanded_tensor_in_a_pt_file_is_read(tmp_path):
    torch.save({"weight": torch.full((1,), 2.0).expand(1, 4)}, tmp_path / "weights.pt")
    module = torch.nn.Linear(4, 1, bias=False)
    load_weights(tmp_path / "weights.pt", module)
    assert module.weight.tolist() == [[2.0] * 4]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_a_safetensors_header_in_another_encoding_is_refused(tmp_path, encoding):
    text = "{}".encode(encoding)
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError):
        load_weights(tmp_path / "a.safetensors", torch.nn.Identity())


def test_a_safetensors_file_that_takes_the_path_meanwhile_is_read_whole(tmp_path, monkeypatch):
    import safetensors

    path, other, module = tmp_path / "w.safetensors", tmp_path / "other", torch.nn.Linear(3, 3)
    save_weights(path, {"bias": torch.zeros(3), "weight": torch.zeros(3, 3)})
    save_weights(tmp_path / "o.safetensors", {"weight": torch.ones(3, 3), "bias": torch.ones(3)})
    os.replace(tmp_path / "o.safetensors", other)
    real = safetensors.safe_open

    def replaced(*given, **options):
        if other.exists():
            os.replace(other, path)
        return real(*given, **options)

    monkeypatch.setattr(safetensors, "safe_open", replaced)
    load_weights(path, module)
    assert module.weight.eq(1).all() and module.bias.eq(1).all()
    link = tmp_path / "link.safetensors"
    link.symlink_to(path)
    load_weights(link, torch.nn.Linear(3, 3))
