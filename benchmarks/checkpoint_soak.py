"""A long trial of files: savers killed, bytes damaged, documents forged.

    python benchmarks/checkpoint_soak.py                                # some five minutes
    python benchmarks/checkpoint_soak.py --kills 1000 --files 50000     # for a night
    python benchmarks/checkpoint_soak.py --seed 7

1. Kills: a process that saves without end is killed with SIGKILL at a random moment. The file must
   then hold one of its states, whole and not older than the last one seen, and at most one
   unfinished file may lie beside it.
2. Damage: checkpoints, `.safetensors` and `.pt` files are cut, flipped, spliced, blanked and
   shuffled. Loading must raise CheckpointError and leave the module as it was, or load the right
   content.
3. Forgery: a checkpoint's JSON is changed at random and gets a right digest. Loading must raise
   CheckpointError, or load something without an error of another kind.
4. Resealing: files are damaged as in 2, and then get a right digest. Loading must raise
   CheckpointError and leave the module as it was, or load something.

Ends with status 1 where anything else happened. A crash or a hang of the interpreter is seen too:
2 to 4 run in processes of their own, with ten minutes for each hundred files.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from fitkit.checkpoint import (
    check_optimizer_state,
    fitting_weights,
    load_weights,
    open_checkpoint,
    read_container,
    save_checkpoint,
    save_weights,
    write_container,
)
from fitkit.checkpoint.header import HEADER_SIZE, Span, seal
from fitkit.errors import CheckpointError, ConfigurationError

BATCH = 100
BATCH_TIMEOUT_S = 600


# ------------------------------------------------------------------------------------ kills


def save_without_end(path: str) -> None:
    """Do what the processes that are killed do: save states that are told apart by a number."""
    for line in sys.stdin:
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            print("dead", flush=True)
            continue
        number, end = int(line) + 1, time.monotonic() + 60
        print(os.getpid(), save(path, number), flush=True)
        while time.monotonic() < end:
            number += 1
            save(path, number)
        os._exit(0)


def save(path: str, number: int) -> float:
    """Save a state that `number` tells from others; the seconds that it took."""
    started = time.monotonic()
    weights = {f"w{index}": torch.full((20_000,), float(number)) for index in range(10)}
    save_checkpoint(path, weights, {"number": number, "tensor": torch.tensor(number)})
    return time.monotonic() - started


def kills(count: int, generator: random.Random, folder: Path) -> Counter[str]:
    """Kill savers `count` times; what was found, by a word for it."""
    path = folder / "killed.h5"
    found: Counter[str] = Counter()
    number = 0
    process = subprocess.Popen(
        [sys.executable, __file__, "--saver", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        for _ in range(count):
            print(number, file=process.stdin, flush=True)
            child, seconds = process.stdout.readline().split()
            time.sleep(float(seconds) * generator.uniform(0, 2))
            os.kill(int(child), signal.SIGKILL)
            process.stdout.readline()
            seen = _number(path)
            left = sum(name.endswith("unfinished") for name in os.listdir(folder))
            whole = seen is not None and seen > number and left <= 1
            found["whole" if whole else "WRONG"] += 1
            found["killed while writing"] += left
            number = max(number, seen or 0)
    finally:
        process.stdin.close()
        process.kill()
        process.wait()
    found["saves"] = number
    return found


def _number(path: Path) -> int | None:
    """Return the one number that all of a file has; None where there are several."""
    with open_checkpoint(path) as checkpoint:
        numbers = {checkpoint.state["number"], int(checkpoint.state["tensor"])}
        for name in checkpoint.weights.describe():
            numbers.update(checkpoint.weights.read(name).unique().tolist())
    return int(numbers.pop()) if len(numbers) == 1 else None


# ----------------------------------------------------------------------------------- damage


def net() -> nn.Module:
    """Return a small module with parameters and buffers."""
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def write(path: Path, seed: int) -> nn.Module:
    """Return a checkpoint, or a file of weights where the suffix isn't `.h5`; its module."""
    torch.manual_seed(seed)
    module = net()
    if path.suffix != ".h5":
        save_weights(path, module.state_dict())
        return module
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state = {"optimizer": optimizer.state_dict(), "random": random.Random(seed).getstate()}
    save_checkpoint(path, module.state_dict(), {**state, "keys": {(1, 2): {3.0}, None: b"x"}})
    return module


def load(path: Path, module: nn.Module) -> None:
    """Load what `write` wrote, as `Model.load` does."""
    if path.suffix != ".h5":
        load_weights(path, module)
        return
    with open_checkpoint(path) as checkpoint:
        ready = fitting_weights(checkpoint.weights, checkpoint.path, module)
        check_optimizer_state(
            torch.optim.Adam(module.parameters()), checkpoint.state.get("optimizer")
        )
        ready.assign()


def damaged(content: bytes, other: bytes, generator: random.Random) -> bytes:
    """`content` after one of the things that happen to files."""
    changed = bytearray(content)
    place = generator.randrange(len(content))
    end = place + generator.randrange(1, 2 + len(content) // generator.choice([4, 50, 1000]))
    kind = generator.choice(["cut", "flip", "flip", "splice", "blank", "insert", "delete", "swap"])
    if kind == "cut":
        del changed[place:]
    elif kind == "flip":
        for _ in range(generator.choice([1, 1, 2, 20])):
            changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
    elif kind == "splice":
        changed[place:end] = other[place:end]
    elif kind == "blank":
        changed[place:end] = bytes(len(changed[place:end]))
    elif kind == "insert":
        changed[place:place] = generator.randbytes(end - place)
    elif kind == "delete":
        del changed[place:end]
    else:
        start = generator.randrange(len(content))
        changed[place:end] = content[start : start + len(changed[place:end])]
    return bytes(changed)


def damage(suffix: str, seed: int) -> Counter[str]:
    """Damage a hundred files of one kind; what happened, by a word for it."""
    generator = random.Random(seed)
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path, other = Path(folder) / f"a{suffix}", Path(folder) / f"b{suffix}"
        whole = write(path, 1).state_dict()
        write(other, 2)
        content, splice = path.read_bytes(), other.read_bytes()
        module = net()
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        for _ in range(BATCH):
            path.write_bytes(damaged(content, splice, generator))
            outcome = _outcome(path, module)
            expected = whole if outcome == "loaded" else before
            if not _equal(module.state_dict(), expected):
                outcome = f"WRONG: {outcome}, and the module has other weights"
            found[outcome] += 1
            module.load_state_dict(before)
    return found


def resealing(suffix: str, seed: int) -> Counter[str]:
    """Damage a hundred files of one kind and make their digests right; what happened."""
    generator = random.Random(seed)
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path, other = Path(folder) / f"a{suffix}", Path(folder) / f"b{suffix}"
        write(path, 1)
        write(other, 2)
        content, splice = path.read_bytes(), other.read_bytes()
        module = net()
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        reseal = _reseal_container if suffix == ".h5" else _reseal_safetensors
        for number in range(BATCH):
            reseal(path, content, splice, generator)
            print(f"{suffix} {seed} {number}", file=sys.stderr, flush=True)
            outcome = _outcome(path, module)
            if outcome != "loaded" and not _equal(module.state_dict(), before):
                outcome = f"WRONG: {outcome}, and the module has other weights"
            found[outcome] += 1
            module.load_state_dict(before)
    return found


def _reseal_container(path: Path, content: bytes, other: bytes, generator: random.Random) -> None:
    """Write a container whose body was damaged before it got its header."""
    body = damaged(content[HEADER_SIZE:], other[HEADER_SIZE:], generator)
    path.write_bytes(content[:HEADER_SIZE] + body)
    place = re.search(rb"\ndocument (\d+) (\d+)\n", content)
    assert place is not None
    with open(path, "r+b") as file:
        seal(file, Span(int(place[1]), int(place[2])))


def _reseal_safetensors(path: Path, content: bytes, other: bytes, generator: random.Random) -> None:
    """Write a damaged `.safetensors` file with a right digest, as far as it has a place for one."""
    start = 8 + int.from_bytes(content[:8], "little")
    if generator.random() < 0.7:  # mostly the header, of which there is less
        text, numbers = damaged(content[8:start], other[8:start], generator), content[start:]
    else:
        text, numbers = content[8:start], damaged(content[start:], other[start:], generator)
    key = b'"fitkit.xxh3-128":"'
    place = text.find(key) + len(key)
    length = len(text).to_bytes(8, "little")
    if key in text and len(text) >= place + 32:
        text = text[:place] + b"0" * 32 + text[place + 32 :]
        digest = xxhash.xxh3_128_hexdigest(length + text + numbers).encode()
        text = text[:place] + digest + text[place + 32 :]
    path.write_bytes(length + text + numbers)


def _outcome(path: Path, module: nn.Module) -> str:
    try:
        load(path, module)
    except CheckpointError:
        return "refused"
    except Exception as error:
        return f"WRONG: {type(error).__name__}: {error}"
    return "loaded"


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


# ---------------------------------------------------------------------------------- forgery

PIECES: list[Any] = [
    *(None, True, 0, -1, 1, 7, 10**30, 0.5, float("nan"), "", "x", "0x10", "<f4", "list", [], {}),
    *({"tuple": []}, {"tensor": 0}, {"set": [[]]}, {"items": [[{"tuple": []}, 0]]}, [[1, 2]]),
    *({"dict": {}}, {"int": "0x1"}, {"dtype": "float32"}, {"array": ["<f4", 0]}, {"bytes": "AA=="}),
]


def forged(value: Any, generator: random.Random) -> Any:
    """`value`, JSON, with one part exchanged, removed, renamed or doubled."""
    if isinstance(value, dict) and value and generator.random() < 0.85:
        key = generator.choice(list(value))
        kind = generator.random()
        if kind < 0.08:
            return {name: item for name, item in value.items() if name != key}
        if kind < 0.16:
            return {("set" if name == key else name): item for name, item in value.items()}
        return {**value, key: forged(value[key], generator)}
    if isinstance(value, list) and value and generator.random() < 0.85:
        index = generator.randrange(len(value))
        if generator.random() < 0.1:
            return value[:index] + value[index:] * 2
        return [*value[:index], forged(value[index], generator), *value[index + 1 :]]
    return generator.choice(PIECES)


def forgery(suffix: str, seed: int) -> Counter[str]:
    """Forge a hundred checkpoints; what happened, by a word for it."""
    generator = random.Random(seed)
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a{suffix}"
        write(path, 1)
        with read_container(path) as reader:
            document = reader.document
            arrays = [reader.read(index) for index in range(len(reader))]
        for _ in range(BATCH):
            content = json.loads(json.dumps(document))
            for _ in range(generator.choice([1, 1, 3])):
                content = forged(content, generator)
            try:
                write_container(path, content, arrays)
            except ConfigurationError:
                continue
            found[_outcome(path, net())] += 1
    return found


# -------------------------------------------------------------------------------------- all


def batches(kind: str, suffix: str, files: int, seed: int) -> Counter[str]:
    """`files` files of one kind, a hundred in each process."""
    found: Counter[str] = Counter()
    for batch in range(files // BATCH):
        command = [sys.executable, __file__, "--batch", kind, suffix, str(seed + batch)]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=BATCH_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            found[f"WRONG: a hang with seed {seed + batch}"] += 1
            continue
        if result.returncode:
            reason = result.stderr.strip().rpartition("\n")[2]
            found[f"WRONG: status {result.returncode} with seed {seed + batch}: {reason}"] += 1
        else:
            found.update(json.loads(result.stdout))
    return found


def main() -> int:
    """Run all trials; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--files", type=int, default=1000, help="damaged files of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--saver", help=argparse.SUPPRESS)
    parser.add_argument("--batch", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.saver:
        save_without_end(given.saver)
        return 0
    if given.batch:
        kind, suffix, seed = given.batch
        function = {"damage": damage, "forgery": forgery, "resealing": resealing}[kind]
        print(json.dumps(function(suffix, int(seed))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        results = {"kills": kills(given.kills, random.Random(given.seed), Path(folder))}
    print("kills:", dict(results["kills"]), flush=True)
    for kind, suffix in [
        *(("damage", suffix) for suffix in (".h5", ".safetensors", ".pt")),
        ("forgery", ".h5"),
        *(("resealing", suffix) for suffix in (".safetensors", ".h5")),
    ]:
        name = f"{kind} of {suffix}"
        results[name] = batches(kind, suffix, given.files, given.seed)
        print(f"{name}:", dict(results[name]), flush=True)
    wrong = any(key.startswith("WRONG") for found in results.values() for key in found)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
