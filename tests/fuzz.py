"""Changed and hostile files against fitkit's readers: `python -m tests.fuzz state --seconds 600`.

Each batch of cases runs in a child process with limits of memory and time, so that a crash, a hang
or a greedy read is found and not suffered. A finding is printed with what repeats it, and the exit
status is 1. What counts as one: a signal, the time or the memory running out, an error other than
CheckpointError or FileNotFoundError, and a model that a refused file has changed. A file that is
read may set any numbers, but the next `fit` must end or be refused.

Targets: `checkpoint` (bytes of a .h5 under a digest made anew), `state` (leaves and arrays of a
training's state), `dcp`, `safetensors`, `pt`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from pathlib import Path

COMMAND = [sys.executable, "-m", "tests.fuzz"]
CASES = 40  # in one child
SECONDS = 240  # for one child
MEMORY = 1 << 30  # beyond what the child takes at the start; the files have some 100 KB

LEAVES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    1 << 31,
    1 << 40,
    (1 << 62),
    -(1 << 62),
    1 << 70,
    0.0,
    1.5,
    -1.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "cuda",
    "0",
    [],
    [0],
    [[]],
    [1.0, 2.0],
    {"dict": {}},
    {"dict": {"a": 1}},
    {"tuple": []},
    {"tuple": [0.9, 0.9]},
    {"tuple": [None, 1]},
    {"items": []},
    {"items": [[0, 1]]},
    {"int": "0x" + "f" * 5000},
    {"int": "-0x8000000000000000"},
    {"bytes": "AAAA"},
    {"Counter": [["a", 1]]},
    {"set": [1]},
    {"scalar": 0},
    {"array": 1},
]
OPTIMIZER = ("state", "dict", "training", "dict", "optimizers", 0, "dict", "state", "dict")
SHAPES = [
    (1000,),
    (1, 1000),
    (1000, 1),
    (1000, 3),
    (),
    (1,),
    (0,),
    (2,),
    (1, 3),
    (2, 1),
    (3, 2),
    (5,),
    (624,),
    (16,),
    (5056,),
    (1, 1, 1),
]


# ---------------------------------------------------------------------- what is fuzzed


def models():
    """What makes a compiled model and its callbacks, by name."""
    import torch

    import fitkit

    rates = torch.optim.lr_scheduler

    def make(optimizer, scheduler=None, **options):
        def made():
            torch.manual_seed(0)
            model = fitkit.Model(
                torch.nn.Sequential(
                    torch.nn.Linear(3, 1000), torch.nn.BatchNorm1d(1000), torch.nn.Linear(1000, 2)
                )
            )
            model.compile(
                optimizer,
                "mse",
                metrics=["mae"],
                lr_scheduler=scheduler,
                accelerator="cpu",
                devices=1,
                **options,
            )
            return model

        return made

    optim = torch.optim
    step = functools.partial(rates.StepLR, step_size=2)
    return {
        "adam": make("adam", step, precision="16-mixed"),
        "adamw": make("adamw", "cosine", warmup_epochs=2),
        "amsgrad": make(
            functools.partial(optim.Adam, amsgrad=True, fused=True), "ReduceLROnPlateau"
        ),
        "sgd": make(
            functools.partial(optim.SGD, lr=0.1, momentum=0.9),
            {"scheduler": "OneCycleLR", "interval": "step"},
        ),
        "rmsprop": make(
            functools.partial(optim.RMSprop, momentum=0.9, centered=True),
            functools.partial(rates.MultiStepLR, milestones=[1, 2]),
        ),
        "adagrad": make(
            "adagrad",
            functools.partial(rates.CyclicLR, base_lr=0.1, max_lr=1.0, cycle_momentum=False),
        ),
        "lbfgs": make(functools.partial(optim.LBFGS, history_size=3, max_iter=4)),
        "nadam": make("nadam", functools.partial(rates.CosineAnnealingWarmRestarts, T_0=2)),
        "asgd": make("asgd"),
        "rprop": make("rprop"),
        "radam": make("radam"),
        "adadelta": make("adadelta"),
        "adamax": make("adamax"),
        "adafactor": make("adafactor"),
    }


def callbacks():
    from fitkit.callbacks import EarlyStopping

    return [EarlyStopping("loss", patience=5)]


def data():
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, 3, generator=generator), torch.randn(24, 2, generator=generator)


def fit(model, **options):
    model.fit(*data(), batch_size=8, verbose=0, callbacks=callbacks(), **options)


def write_base(folder: Path, name: str, suffix: str) -> Path:
    """A checkpoint that is cut within its second epoch, or weights."""
    from fitkit.callbacks import Callback

    path = folder / f"base-{name}{suffix}"

    class Cut(Callback):
        def on_train_batch_end(self, batch, logs):
            if (self.model.current_epoch, batch) == (1, 1):
                self.model.save(path)
                raise KeyboardInterrupt

    model = models()[name]()
    if suffix in (".safetensors", ".pt"):
        model.save_weights(path)
    else:
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(*data(), batch_size=8, verbose=0, epochs=3, callbacks=[*callbacks(), Cut()])
    return path


# ---------------------------------------------------------------------- changes


def place_in(draw, part, way=()):
    """The keys to some part; by steps, because most leaves are those of random states."""
    for key in way:
        part = part[key]
    while True:
        key = draw.choice(list(part) if isinstance(part, dict) else range(len(part)))
        way = (*way, key)
        inner = part[key]
        if not isinstance(inner, (dict, list)) or not inner or draw.random() < 0.03:
            return way
        part = inner


def change_document(draw, document, count, only=()):
    """Replace, drop, double or swap some parts; says what was done."""
    done = []
    for _ in range(count):
        place = place_in(draw, document, only)
        *way, last = place
        part = document
        for key in way:
            part = part[key]
        kind = draw.random()
        if kind < 0.75:
            value = draw.choice(
                [
                    *LEAVES,
                    {"tensor": draw.randrange(12)},
                    {"array": [draw.choice(["<f4", ">f4", ">u4"]), draw.randrange(12)]},
                ]
            )
            done.append(f"{place} = {str(value)[:60]}")
            part[last] = copy.deepcopy(value)
        elif kind < 0.85:
            done.append(f"del {place}")
            del part[last]
        elif isinstance(part, list):
            done.append(f"{place} doubled")
            part.insert(last, copy.deepcopy(part[last]))
        else:
            new = draw.choice(["step", "get_lr", "optimizer", "x", "initial_lr", "momentum", "0"])
            done.append(f"{place[:-1]} gets {new!r}")
            part[new] = copy.deepcopy(draw.choice(LEAVES))
    return done


def change_array(draw, tensor):
    import torch

    kind = draw.randrange(4)
    if kind == 0:
        dtype = draw.choice(
            [
                torch.float32,
                torch.float64,
                torch.int64,
                torch.uint8,
                torch.bool,
                torch.complex64,
                torch.float16,
                tensor.dtype,
            ]
        )
        return torch.ones(draw.choice(SHAPES), dtype=dtype)
    if kind == 1 and tensor.is_floating_point():
        return torch.full_like(tensor, draw.choice([0.0, -1.0, float("nan"), float("inf"), 1e38]))
    if kind == 2:
        return torch.zeros_like(tensor)
    raw = bytearray(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    # In front, where a generator's state has its place in the numbers.
    for _ in range(min(len(raw), draw.choice([1, 4, 64]))):
        raw[draw.randrange(min(len(raw), draw.choice([24, 1 << 20])))] = draw.randrange(256)
    if not raw or tensor.dtype == torch.bool:
        return tensor
    return torch.frombuffer(raw, dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape).clone()


def change_bytes(draw, raw, begin, end):
    for _ in range(draw.choice([1, 1, 2, 8])):
        position = draw.randrange(begin, end)
        if draw.random() < 0.3:
            raw[position : position + 8] = draw.choice(
                [0, 1, 1 << 31, (1 << 63) - 1, (1 << 64) - 1]
            ).to_bytes(8, "little")[: len(raw) - position]
        else:
            raw[position] = draw.randrange(256)


def make_checkpoint(draw, base, path):
    """Bytes of a .h5 under a digest that is right."""
    from fitkit.checkpoint.header import HEADER_SIZE
    from tests.files import document_of, reseal

    raw = bytearray(base.read_bytes())
    # Mostly its document, by which all else is found; there its beginning, which has the places.
    begin, length = document_of(raw)
    places = (begin, begin + min(length, 2000)), (begin, begin + length), (HEADER_SIZE, len(raw))
    change_bytes(draw, raw, *draw.choice(places))
    path.write_bytes(raw)
    reseal(path)
    return ["bytes"]


def make_state(draw, base, path):
    """Leaves of a state, and arrays."""
    from fitkit.checkpoint import read_container, write_container

    with read_container(base) as reader:
        document = copy.deepcopy(reader.document)
        arrays = [reader.read(index) for index in range(len(reader))]
    done = []
    if draw.random() < 0.4:
        # Not the weights, which are compared with the module.
        number = draw.randrange(len(document["weights"]["tensors"]), len(arrays))
        arrays[number] = change_array(draw, arrays[number])
        done.append(f"array {number}: {tuple(arrays[number].shape)} {arrays[number].dtype}")
    if not done or draw.random() < 0.5:
        only = draw.choice(
            [
                (),
                ("state",),
                ("state", "dict", "progress"),
                ("state", "dict", "training"),
                (*OPTIMIZER, "param_groups"),
                (*OPTIMIZER, "state"),
                ("state", "dict", "training", "dict", "schedulers"),
                ("state", "dict", "training", "dict", "schedulers", 0, "dict", "state"),
            ]
        )
        with contextlib.suppress(IndexError, KeyError, TypeError):
            done += change_document(draw, document, draw.choice([1, 1, 1, 3]), only)
    write_container(path, document, arrays)
    return done


def make_dcp(draw, base, path):
    """A folder's index or the bytes of a shard, under right digests."""
    import shutil

    from fitkit.checkpoint import read_container, write_container

    shutil.copytree(base, path)
    with read_container(path / "index.h5") as reader:
        document = copy.deepcopy(reader.document)
        arrays = [reader.read(index) for index in range(len(reader))]
    done = []
    if draw.random() < 0.6:
        shard = next(path.glob("shard-*"))
        document["files"][shard.name] = change_safetensors(draw, shard, shard)
        done.append("shard")
    if not done or draw.random() < 0.3:
        only = draw.choice([("shards",), ("numbers",), ("files",), ("weights",), ("state",), ()])
        with contextlib.suppress(IndexError, KeyError, TypeError):
            done += change_document(draw, document, draw.choice([1, 1, 3]), only)
    write_container(path / "index.h5", document, arrays)
    return done


def change_safetensors(draw, base, path):
    """Change a header or its numbers, and give it the digest that it then has."""
    import xxhash

    raw = base.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :])
    if draw.random() < 0.7:
        change_document(draw, header, draw.choice([1, 1, 2]))
        if draw.random() < 0.2 and isinstance(header.get("__metadata__"), dict):
            header["__metadata__"].update({f"alias{i}": next(iter(header)) for i in range(300)})
    if body and draw.random() < 0.4:
        change_bytes(draw, body, 0, len(body))
    text = json.dumps(header).encode()
    if draw.random() < 0.15:
        encoded = bytearray(text)
        change_bytes(draw, encoded, 0, len(encoded))
        text = bytes(encoded)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    stated = header.get("__metadata__", {})
    stated = stated.get("fitkit.xxh3-128") if isinstance(stated, dict) else None
    if not isinstance(stated, str) or len(stated) != 32:
        return "0" * 32
    start = len(text).to_bytes(8, "little")
    blank = text.replace(stated.encode(), b"0" * 32, 1)
    right = xxhash.xxh3_128_hexdigest(start + blank + body)
    path.write_bytes(start + text.replace(stated.encode(), right.encode(), 1) + body)
    return right


def make_safetensors(draw, base, path):
    return [change_safetensors(draw, base, path)]


def make_pt(draw, base, path):
    """The pickle in an archive whose checksums are right, or bytes."""
    import torch

    kind = draw.random()
    if kind < 0.2:
        old = path.with_suffix(".old")
        torch.save(torch.load(base, weights_only=True), old, _use_new_zipfile_serialization=False)
        raw = bytearray(old.read_bytes())
        change_bytes(draw, raw, 0, len(raw))
        path.write_bytes(raw)
        return ["old"]
    if kind < 0.35:
        raw = bytearray(base.read_bytes())
        change_bytes(draw, raw, draw.choice([0, max(0, len(raw) - 300)]), len(raw))
        path.write_bytes(raw)
        return ["bytes"]
    with zipfile.ZipFile(base) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in members if name.endswith("data.pkl"))
    raw = bytearray(members[name])
    for _ in range(draw.choice([1, 1, 2, 4])):
        position = draw.randrange(2, len(raw))
        change = draw.random()
        if change < 0.5:
            raw[position] = draw.randrange(256)
        elif change < 0.7:
            raw[position : position + 1] = b"J" + draw.randrange(-(1 << 31), 1 << 31).to_bytes(
                4, "little", signed=True
            )
        elif change < 0.85:
            del raw[position : position + draw.randrange(1, 20)]
        else:
            start = draw.randrange(2, len(raw))
            raw[position:position] = raw[start : start + draw.randrange(1, 60)]
    members[name] = bytes(raw)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return ["pickle"]


TARGETS = {
    "checkpoint": (make_checkpoint, ".h5"),
    "state": (make_state, ".h5"),
    "dcp": (make_dcp, ".dcp"),
    "safetensors": (make_safetensors, ".safetensors"),
    "pt": (make_pt, ".pt"),
}


# ---------------------------------------------------------------------- a case


def state_of(model, *, fresh):
    import torch

    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kept = None if fresh else copy.deepcopy(model.optimizer.state_dict())
    return weights, kept, model.global_step, torch.get_rng_state()


def same(one, other):
    import torch

    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def refused(work):
    """Whether work raises what a refusal raises; any other error passes on."""
    from fitkit.errors import CheckpointError

    try:
        work()
    except (CheckpointError, FileNotFoundError) as error:
        reason: BaseException | None = error
        while reason is not None:  # the refusal may have come from memory that wasn't there
            if isinstance(reason, MemoryError) or "allocate memory" in str(reason):
                raise MemoryError(f"{type(reason).__name__}: {reason}") from error
            reason = reason.__cause__ or reason.__context__
        return True
    return False


def drawn(target: str, seed: int, folder: Path):
    """A case's numbers, its model's name, and the file to change."""
    draw = random.Random(f"{target} {seed}")
    name, suffix = draw.choice(sorted(models())), TARGETS[target][1]
    base = folder / f"base-{name}{suffix}"
    if not base.exists():
        write_base(folder, name, suffix)
    return draw, name, base


def run_case(target: str, seed: int, folder: Path, *, speak=False) -> str:
    """Make a file and read it; a finding, or ""."""
    from fitkit.errors import ConfigurationError
    from fitkit.extras.inspection import convert

    make, suffix = TARGETS[target]
    draw, name, base = drawn(target, seed, folder)
    path = folder / f"case-{seed}{suffix}"
    done = f"{name}: "
    try:
        done += "; ".join(make(draw, base, path))
        if speak:
            print(done, flush=True)
        fresh = draw.random() < 0.5
        model = models()[name]()
        if not fresh:
            fit(model)
        before = state_of(model, fresh=fresh)
        whole = suffix in (".h5", ".dcp")
        use = draw.random()
        if whole and use < 0.35:
            work = functools.partial(fit, model, epochs=3, resume_from=path)
            with contextlib.suppress(ConfigurationError):  # of other data, by its own word
                refused(work)
            return ""
        if use < 0.5:
            with contextlib.suppress(ConfigurationError):  # something that the other format lacks
                refused(lambda: convert(path, folder / f"made-{seed}.h5"))
            return ""
        if refused(lambda: (model.load if whole and use < 0.9 else model.load_weights)(path)):
            if not same(before, state_of(model, fresh=fresh)):
                return f"{done}: refused, but the model has changed"
        elif whole:
            refused(lambda: fit(model, epochs=2))
        return ""
    except Exception as error:
        import traceback

        where = "".join(traceback.format_exception(error)[-4:]) if speak else ""
        return f"{done}: {type(error).__name__}: {str(error)[:300]}\n{where}"
    finally:
        for made in folder.glob(f"*-{seed}.*"):
            import shutil

            shutil.rmtree(made) if made.is_dir() else made.unlink()


def child(target: str, seeds: list[int], folder: Path, *, speak=False) -> None:
    """Run cases, each with a line before it and one with what was found."""
    import torch

    import fitkit  # noqa: F401

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for seed in seeds:
        drawn(target, seed, folder)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for seed in seeds:
        print(json.dumps({"begins": seed}), flush=True)
        found = run_case(target, seed, folder, speak=speak)
        if found:
            print(json.dumps({"seed": seed, "found": found}), flush=True)


# ---------------------------------------------------------------------- the search


def search(target: str, seeds: list[int], folder: Path) -> tuple[int, list[tuple[int, str]]]:
    """How many cases a child has run, and what it has found; it may end at any of them."""
    command = [*COMMAND, target, "--child", str(folder)]
    command += ["--seeds", ",".join(map(str, seeds))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=SECONDS)
        ended = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        ended = None
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    found = [(line["seed"], line["found"]) for line in lines if "found" in line]
    begun = [line["begins"] for line in lines if "begins" in line]
    if ended != 0:
        last = begun[-1] if begun else -1
        if ended is None:
            found.append((last, f"no end within {SECONDS} seconds for {len(seeds)} cases"))
        elif ended < 0:
            found.append((last, f"signal {signal.Signals(-ended).name}"))
        else:
            found.append((last, f"ended with status {ended}: {errors[-500:]}"))
    return len(begun), found


def main(arguments: list[str] | None = None) -> int:
    """Search until the time is over, or repeat one case; 1 where something was found."""
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, help="the one case to repeat, with where it failed")
    parser.add_argument("--start", type=int, help="the first of the cases; by default by the clock")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seeds", default="", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        child(given.target, [int(seed) for seed in given.seeds.split(",")], given.child)
        return 0
    with tempfile.TemporaryDirectory(prefix="fitkit-fuzz-") as name:
        if given.seed is not None:
            found = run_case(given.target, given.seed, Path(name), speak=True)
            print(found or "nothing was found")
            return int(bool(found))
        number = int(time.time()) * 1000 if given.start is None else given.start
        until, cases, all_found = time.monotonic() + given.seconds, 0, []
        while time.monotonic() < until:
            ran, found = search(given.target, list(range(number, number + CASES)), Path(name))
            for seed, what in found:
                print(f"{given.target} --seed {seed}: {what}", flush=True)
            cases, number = cases + ran, number + max(ran, 1)
            all_found += found
        print(f"{given.target}: {cases} cases, {len(all_found)} findings")
        return int(bool(all_found))


if __name__ == "__main__":
    sys.exit(main())
