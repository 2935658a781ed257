"""States come back as they were, types included; what no file can hold is named."""

import io
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from fractions import Fraction

import numpy as np
import pytest
import torch

from fitkit.checkpoint import check_optimizer_state, open_checkpoint, save_checkpoint
from fitkit.errors import ArgumentTypeError, CheckpointError, ConfigurationError
from fitkit.training.check_state import check_scheduler_state, try_scheduler_state


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.h5"


def pickled(value):
    """What torch's own files give back for `value`: the reference."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def assert_same(found, wanted, place="state"):
    assert type(found) is type(wanted), place
    if isinstance(wanted, dict):
        assert list(found) == list(wanted), place
        assert list(map(type, found)) == list(map(type, wanted)), place
        for key in wanted:
            assert_same(found[key], wanted[key], f"{place}[{key!r}]")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), place
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same(one, other, f"{place}[{index}]")
    elif isinstance(wanted, torch.Tensor):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), place
        same = found.flatten().view(torch.uint8), wanted.flatten().view(torch.uint8)
        assert torch.equal(*same), place
    elif isinstance(wanted, (np.ndarray, np.generic)):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), place
        assert found.tobytes() == wanted.tobytes(), place
    else:
        assert found == wanted or (found != found and wanted != wanted), place
        if isinstance(wanted, float):
            assert repr(found) == repr(wanted), place  # -0.0 equals 0.0


def there_and_back(path, content):
    save_checkpoint(path, {}, content)
    return read(path)


def read(path):
    with open_checkpoint(path) as found:
        return found.state


PLAIN = {
    "none": None,
    "booleans": [True, False],
    "integers": [0, -1, 2**63 - 1, -(2**63), 2**64, -(10**5000), 10**5000],
    "floats": [0.1, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308],
    "text": ["", "ä\ud800\0\n", "tuple"],
    "bytes": [b"", bytes(range(256))],
    "lists": [[], [[]], [1, [2, [3]]]],
    "tuples": ((), (1,), ((), [()])),
    "sets": [set(), {1, "a", None, (1, 2)}, {b"x"}],
    "keys": {1: "int", "1": "text", 1.5: 0, None: 0, (1, ("a", 2.0)): 0, b"b": 0, -(2**70): 0},
    "booleans as keys": {True: 1, False: 0},
    "many tuples as keys": Counter((index, index + 1) for index in range(20_000)),
    "one key that names a kind": {"tuple": [1]},
    "dicts": [{}, {"dict": {}}, {"items": [[1, 2]]}, {"": {"a.b/c": 1}}],
    "counters": [Counter("aab"), Counter({3: 1, 5: -2}), Counter()],
    "arrays": [
        np.arange(6, dtype="i2").reshape(2, 3),
        np.array(2.5),
        np.zeros((0, 2), bool),
        np.array([1 + 2j], np.complex64),
        np.arange(4, dtype=np.uint64),
    ],
    "scalars": [np.float32(0.1), np.float64("nan"), np.int8(-3), np.bool_(True), np.complex128(1j)],
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_data_comes_back_with_its_types(path, name):
    assert_same(there_and_back(path, {"a": PLAIN[name]}), {"a": PLAIN[name]})


def test_an_ordered_dict_comes_back_as_a_dict(path):
    found = there_and_back(path, {"a": OrderedDict(b=1, a=2)})
    assert_same(found, {"a": {"b": 1, "a": 2}})


def test_tensors_that_share_their_memory_are_written_once_and_stay_one(path):
    tensor = torch.randn(100_000)
    found = there_and_back(path, {"a": tensor, "b": [tensor, tensor.numpy(), tensor[:0]]})
    assert path.stat().st_size < 1.1 * tensor.nbytes
    assert found["a"] is found["b"][0]
    assert np.shares_memory(found["a"].numpy(), found["b"][1])
    assert torch.equal(found["a"], tensor)


def test_the_same_state_gives_the_same_bytes(tmp_path):
    for name in ("a.h5", "b.h5"):
        save_checkpoint(tmp_path / name, {}, {"a": {"x", "y", "z", 1}, "b": torch.ones(3)})
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
)


def stepped(name, parameters, steps=2):
    """An optimizer of torch's with a state, which `steps` steps have filled."""
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.05}]
    optimizer = getattr(torch.optim, name)(parameters if name == "LBFGS" else groups, lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = sum(((parameter - 1) ** 2).sum() for parameter in parameters)
        loss.backward()
        if name == "SparseAdam":
            for parameter in parameters:
                parameter.grad = parameter.grad.to_sparse()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return optimizer, closure


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_every_optimizer_of_torch_comes_back_and_goes_on_alike(path, name):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(4, 2))]
    copies = [torch.nn.Parameter(item.detach().clone()) for item in parameters]
    optimizer, closure = stepped(name, parameters)
    found = there_and_back(path, optimizer.state_dict())
    assert_same(found, pickled(optimizer.state_dict()))

    other, other_closure = stepped(name, copies, steps=0)
    other.load_state_dict(found)
    for parameter, copy in zip(parameters, copies, strict=True):
        copy.data.copy_(parameter.data)
    optimizer.step(closure)
    other.step(other_closure)
    for parameter, copy in zip(parameters, copies, strict=True):
        assert torch.equal(parameter, copy)


def linear(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer)


schedulers = torch.optim.lr_scheduler
SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 2, 3]),
    "ConstantLR": schedulers.ConstantLR,
    "LinearLR": linear,
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "PolynomialLR": schedulers.PolynomialLR,
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.2, scale_fn=lambda x: 0.5**x),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.2, total_steps=10),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [linear(o), schedulers.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [linear(o), schedulers.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


def test_every_scheduler_of_torch_is_tried():
    kinds = {
        name
        for name, kind in vars(schedulers).items()
        if isinstance(kind, type)
        and issubclass(kind, schedulers.LRScheduler)
        and kind not in (schedulers.LRScheduler, schedulers._LRScheduler)
    }
    assert kinds <= SCHEDULERS.keys()


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_state_of_every_scheduler_of_torch_comes_back_and_goes_on_alike(path, name):
    def made():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def advance(optimizer, scheduler):
        optimizer.step()
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        return optimizer.param_groups[0]["lr"]

    optimizer, scheduler = made()
    for _ in range(3):
        advance(optimizer, scheduler)
    found = there_and_back(path, {"o": optimizer.state_dict(), "s": scheduler.state_dict()})
    assert_same(found["s"], pickled(scheduler.state_dict()))
    other_optimizer, other = made()
    check_optimizer_state(other_optimizer, found["o"])
    check_scheduler_state(other, found["s"], "run.h5")
    try_scheduler_state(made()[1], found["s"], "run.h5")
    other_optimizer.load_state_dict(found["o"])
    other.load_state_dict(found["s"])
    for _ in range(4):
        assert advance(optimizer, scheduler) == advance(other_optimizer, other)


def test_random_states_come_back_and_go_on_alike(path):
    generators = {"python": random.Random(1), "numpy": np.random.RandomState(2)}
    modern = np.random.default_rng(3)
    generator = torch.Generator().manual_seed(4)
    generators["python"].gauss(0, 1)  # leaves the second number of a pair in its state
    state = {
        "python": generators["python"].getstate(),
        "numpy": generators["numpy"].get_state(),
        "modern": modern.bit_generator.state,
        "torch": generator.get_state(),
    }
    found = there_and_back(path, state)
    assert_same(found, state)
    restored = random.Random()
    restored.setstate(found["python"])
    assert restored.gauss(0, 1) == generators["python"].gauss(0, 1)
    old = np.random.RandomState()
    old.set_state(found["numpy"])
    assert old.rand() == generators["numpy"].rand()
    new = np.random.default_rng()
    new.bit_generator.state = found["modern"]
    assert new.random() == modern.random()
    assert torch.equal(
        torch.rand(3, generator=torch.Generator().set_state(found["torch"])),
        torch.rand(3, generator=generator),
    )


def test_the_state_of_a_gradient_scaler_comes_back(path):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    found = there_and_back(path, scaler.state_dict())
    assert_same(found, scaler.state_dict())
    torch.amp.GradScaler("cpu").load_state_dict(found)


class Number(int):
    pass


def nested(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Fraction(1, 2), r"state\['a'\]\[0\]\['x'\]=.* only pickle could store a Fraction"),
        (lambda: None, "only pickle could store a function"),
        (torch.nn.Linear(1, 1), "only pickle could store a Linear"),
        (Number(3), "only pickle could store a Number"),
        (int, "only pickle could store a type"),
        (np.array(["x"]), "only pickle could store a ndarray"),
        (np.datetime64("2026-01-01"), "only pickle could store a datetime64"),
        (np.longdouble(1), "only pickle could store a longdouble"),
        ({Fraction(1, 2): 1}, r"state\['a'\]\[0\]\['x'\] has the key"),
        (defaultdict(list), "only pickle could store a defaultdict"),
        (deque([1]), "only pickle could store a deque"),
        (torch.qint8, "only pickle could store a dtype"),
        (torch.eye(2).to_sparse(), r"state\['a'\]\[0\]\['x'\]: A tensor can't .*to_dense"),
        (torch.empty(2, device="meta"), "on the meta device"),
        (nested(200), "is nested more than 100 deep"),
    ],
    ids=range(15),
)
def test_what_no_file_can_hold_is_refused_with_its_place(path, value, reason):
    with pytest.raises(ConfigurationError, match=f"(?s){reason}"):
        save_checkpoint(path, {}, {"a": [{"x": value}]})
    assert not path.exists()


def test_a_state_that_contains_itself_is_refused(path):
    state = {}
    state["self"] = [state]
    with pytest.raises(ConfigurationError, match="contains itself"):
        save_checkpoint(path, {}, state)


def test_a_state_that_is_no_dict_or_a_name_of_another_kind_is_refused(path, tmp_path):
    with pytest.raises(ConfigurationError, match=r"checkpoints end in \.h5, \.hdf5 or \.dcp"):
        save_checkpoint(tmp_path / "state.pt", {}, {})
    with pytest.raises(ArgumentTypeError, match="must be a dict"):
        save_checkpoint(path, {}, [])


HOSTILE = [
    {"a": 1, "b": 2},
    {},
    {"object": ["os", "system"]},
    {"__class__": "x"},
    {"tuple": 3},
    {"tuple": {"a": 1}},
    {"set": [[1]]},
    {"set": [1, 1]},
    {"set": [1, True]},
    {"items": [[1, 2], [1.0, 3]]},
    {"items": [[[1], 2]]},
    {"items": [[{"set": []}, 2]]},
    {"items": [[1, 2, 3]]},
    {"items": {"a": 1}},
    {"dict": [["a", 1]]},
    {"int": "12"},
    {"int": 12},
    {"int": "0x"},
    {"complex": [1.0, 2.0]},
    {"bytes": "ä"},
    {"bytes": "A"},
    {"bytes": 3},
    {"dtype": "qint8"},
    {"deque": [None, []]},
    {"Counter": 3},
    {"Counter": [[1]]},
    {"tensor": 1},
    {"tensor": -1},
    {"tensor": True},
    {"tensor": "0"},
    {"tensor": [0]},
    {"tensor": 10**30},
    {"array": ["<f4", 0]},
    {"array": 1},
    {"array": True},
    {"scalar": 0},
    {"scalar": None},
    {"scalar": ["<f4", "AAAAAA=="]},
]


@pytest.mark.parametrize("part", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.timeout(10)
@pytest.mark.filterwarnings("error")
def test_a_state_that_fitkit_never_writes_is_refused(craft, part):
    path = craft(
        np.zeros((2, 3), "f4"),
        content={"kind": "checkpoint", "state": {"dict": {"a": part}}},
    )
    with pytest.raises(CheckpointError, match="is refused"):
        read(path)


@pytest.mark.parametrize("state", [None, 1, [], {"tuple": []}, {"items": [[1, 2]], "x": 1}])
def test_a_state_that_is_no_dict_is_refused(craft, state):
    path = craft(arrays=[], content={"kind": "checkpoint", "state": state})
    with pytest.raises(CheckpointError, match="is refused"):
        read(path)


def test_a_state_nested_too_deeply_is_refused(craft):
    state = {"dict": {"a": nested(150)}}
    path = craft(arrays=[], content={"kind": "checkpoint", "state": state})
    with pytest.raises(CheckpointError, match="nested more than 100 deep"):
        read(path)


def test_an_array_of_foreign_byte_order_comes_back_in_the_machines_own(path):
    numbers = np.arange(6, dtype=">f4").reshape(2, 3)
    found = there_and_back(path, {"a": numbers, "b": [np.float32(0.5)]})
    assert found["a"].dtype == "f4" and found["a"].tolist() == numbers.tolist()


def test_an_array_of_a_dtype_that_numpy_lacks_is_refused(craft):
    path = craft(
        np.zeros((2, 3), "u2"),
        arrays=[{"dtype": "bfloat16", "shape": [2, 3]}],
        content={"kind": "checkpoint", "state": {"dict": {"a": {"array": 0}}}},
    )
    with pytest.raises(CheckpointError, match="has an array of torch.bfloat16"):
        read(path)
