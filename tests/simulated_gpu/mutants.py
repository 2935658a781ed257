"""Break each promise about GPUs: python tests/simulated_gpu/mutants.py [word …]

Each mutant is one change in a copy of fitkit. The tests named beside it must fail on it. Words
choose the mutants whose promise has one of them. It ends with status 1 if a mutant lives.
"""

import dataclasses
import os
import pathlib
import shutil
import sys
import tempfile

import run

ROOT = run.HERE.parents[1]
MATRIX = "tests/simulated_gpu/test_matrix.py"
WAITS = "tests/simulated_gpu/test_waits.py"
FEEDING = "tests/gpu/test_feeding.py"
PROMISES = "tests/simulated_gpu/test_promises.py"
ORDER = "tests/unit/data/test_to_device.py"  # of events, with streams that are lists
REPLICAS = "tests/gpu/test_replicas.py"
LIMIT_S = 600


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A promise, the change that breaks it, and the tests that must notice."""

    promise: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = [
    Mutant(
        "no step waits: batches are sent without waiting",
        "data/to_device.py",
        "return tensor.to(self.device, dtype, non_blocking=self._may_be_behind)",
        "return tensor.to(self.device, dtype)",
        (WAITS, "-k", "pinned"),
    ),
    Mutant(
        "no step waits: batches come from pinned memory",
        "data/to_device.py",
        "return tensor.pin_memory()",
        "return tensor",
        (PROMISES,),
    ),
    Mutant(
        "the device fetches from memory that nobody fills again",
        "data/to_device.py",
        "is_kept = converted is tensor and is_lent and not self.pins",
        "is_kept = False",
        (PROMISES, "-k", "filled_again"),
    ),
    Mutant(
        "no step waits: indices are sent without waiting",
        "data/arrays.py",
        "whole = torch.cat(block).to(first.device, non_blocking=True)",
        "whole = torch.cat([part.to(first.device) for part in block])",
        (WAITS, "-k", "arrays"),
    ),
    Mutant(
        "no step waits: logged values stay on the device",
        "training/log.py",
        "        self._values.clear()\n",
        "        float(total)\n        self._values.clear()\n",
        ("tests/gpu/test_no_waiting.py", WAITS),
    ),
    Mutant(
        "the next batch is copied during computation",
        "data/to_device.py",
        "            with streams.aside():\n                moved",
        "            if True:\n                moved",
        (ORDER,),
    ),
    Mutant(
        "a step waits for its own batch",
        "data/to_device.py",
        "        self._current().wait_event(mark)",
        "        pass",
        (FEEDING, MATRIX, "-k", "loader or copies"),
    ),
    Mutant(
        "a batch's memory is kept until its step is done",
        "data/to_device.py",
        "        tensor.record_stream(self._current())",
        "        pass",
        (FEEDING, MATRIX, "-k", "loader or copies"),
    ),
    Mutant(
        "the host is at most a few batches ahead",
        "data/to_device.py",
        "            if len(computed) >= LEAD:\n",
        "            if False:\n",
        (ORDER,),
    ),
    Mutant(
        "a prediction is copied after it was computed",
        "data/to_device.py",
        "            self._side.wait_stream(self._current())",
        "            pass",
        (FEEDING, MATRIX, "-k", "plain or predictions"),
    ),
    Mutant(
        "a prediction is read after it was copied",
        "data/to_device.py",
        "        mark.synchronize()",
        "        pass",
        (FEEDING, MATRIX, "-k", "plain or predictions"),
    ),
    Mutant(
        "predictions don't pile up on the device",
        "training/evaluate.py",
        "            copies = _mapped(output, streams.start_copy)",
        "            copies = _mapped(output, lambda tensor: tensor)",
        (FEEDING, MATRIX, "-k", "plain or predictions"),
    ),
    Mutant(
        "devices=[1, 3] are these two: ranks have a device each",
        "distributed/strategies/base.py",
        "return self.devices[min(self.world.local_rank, len(self.devices) - 1)]",
        "return self.devices[0]",
        (PROMISES,),
    ),
    Mutant(
        "devices=[1, 3] are these two: the chosen one is the current one",
        "accelerators.py",
        "    module.set_device(device.index or 0)\n    try:",
        "    try:",
        (PROMISES,),
    ),
    Mutant(
        "the caller's current device is put back",
        "accelerators.py",
        "        module.set_device(before)",
        "        pass",
        (MATRIX, "-k", "one_device"),
    ),
    Mutant(
        "ranks speak by the accelerator's own backend",
        "accelerators.py",
        "def backends_for(device: torch.device) -> str:\n",
        "def backends_for(device: torch.device) -> str:\n"
        '    return "gloo"\n\n\ndef _old(device):\n',
        (PROMISES,),
    ),
    Mutant(
        "labels that count are weighed in float64",
        "accelerators.py",
        "count.to(widest_dtype(count.device))",
        "count",
        (PROMISES, "-k", "float64"),
    ),
    Mutant(
        "a copy has the free GPUs that were chosen for its original",
        "compilation.py",
        'state["free_gpus"] = [*self.strategy.device_ids]',
        "pass",
        (PROMISES, "-k", "free_gpus"),
    ),
    Mutant(
        "a watch ends the exchanges of main memory, too",
        "extras/launchers/group.py",
        "    hang_up()  # Before torch forgets the group: of gloo it ends nothing.\n",
        "",
        (PROMISES, "-k", "watch"),
    ),
    Mutant(
        "dp: a replica on each device",
        "extras/dp.py",
        "replicas = replicate(self.module, list(self._devices[: len(parts)]))",
        "replicas = replicate(self.module, [self._devices[0]] * len(parts))",
        (PROMISES,),
    ),
    Mutant(
        "dp: parts are computed in threads",
        "extras/dp.py",
        "results = nn.parallel.parallel_apply(calls, [()] * len(calls), devices=devices)",
        "results = [call() for call in calls]",
        (REPLICAS,),
    ),
    Mutant(
        "16-mixed: a step with infinite gradients is left out, and known in time",
        "extras/loss_scaling.py",
        "        self._copied.synchronize()",
        "        pass",
        (PROMISES,),
    ),
    Mutant(
        "a loss's tensors are where the batch is",
        "losses/loss.py",
        "            move(self._function, device)",
        "            pass",
        (MATRIX, "-k", "parameter"),
    ),
    Mutant(
        "class weights are where the batch is",
        "training/step.py",
        "        compilation.loss.to(strategy.device)",
        "        pass",
        (MATRIX, "-k", "weights or parameter"),
    ),
    Mutant(
        "a metric's sums are where the batch is",
        "metrics/sums.py",
        "self.totals = self.totals.to(device=device, dtype=widest_dtype(device))",
        'self.totals = self.totals.to(device="cpu", dtype=widest_dtype(device))',
        (MATRIX, WAITS, "-k", "one_device or metrics"),
    ),
    Mutant(
        "reduce-overhead: what a step changes stays where it is",
        "extras/jit/optimizer.py",
        "            torch._dynamo.mark_static_address(state)",
        "            pass",
        ("tests/simulated_gpu/test_graphs.py",),
    ),
    Mutant(
        "memory that ran out is explained",
        "training/surroundings.py",
        "    raise OutOfMemoryError(message) from error",
        "    raise error",
        ("tests/gpu/test_memory_and_precision.py", "-k", "ran_out"),
    ),
    Mutant(
        "log_gpu_memory logs the use",
        "accelerators.py",
        "def peak_bytes(device: torch.device) -> int:\n",
        "def peak_bytes(device: torch.device) -> int:\n    return 0\n\n\ndef _old(device):\n",
        ("tests/gpu/test_memory_and_precision.py", "-k", "logs"),
    ),
    Mutant(
        "random numbers of a resumed run go on on another GPU",
        "random_states.py",
        '"devices": generator_states([current_device()] if devices is None else devices),',
        '"devices": [],',
        (PROMISES,),
    ),
    Mutant(
        "a net's parameters stay the same objects when it moves",
        "accelerators.py",
        "        module.to(device)",
        "        module.to(device)\n        for one in module.modules():\n"
        "            for name, value in [*one._parameters.items()]:\n"
        "                if value is not None:\n"
        "                    one._parameters[name] = torch.nn.Parameter(value.detach())",
        (MATRIX, "-k", "one_device and resumed"),
    ),
    Mutant(
        "bfloat16 that a GPU only emulates isn't taken for its own",
        "accelerators.py",
        "including_emulation=False",
        "including_emulation=True",
        ("tests/gpu/test_memory_and_precision.py", "-k", "bfloat16"),
    ),
    Mutant(
        "a pickled model comes from main memory",
        "pickling.py",
        "    moved = tensor.detach().cpu()",
        "    moved = tensor.detach()",
        ("tests/gpu/test_pickles.py",),
    ),
]


def lives(mutant: Mutant) -> bool:
    """Whether the tests of a mutant pass, though its promise is broken."""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        for name in ("fitkit", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / "fitkit" / mutant.file
        text = path.read_text()
        if mutant.old not in text:
            raise SystemExit(f"{mutant.file} has no {mutant.old!r} any more")
        path.write_text(text.replace(mutant.old, mutant.new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "plugin", "-n", "2"]
        environment = run.environment()
        environment["PYTHONPATH"] = os.pathsep.join([folder, environment["PYTHONPATH"]])
        with (copy / "output").open("w+") as output:
            status = run.bounded(
                [*command, *mutant.tests], LIMIT_S, cwd=copy, env=environment,
                stdout=output, stderr=output,
            )  # fmt: skip
            output.seek(0)
            said = output.read()
    if status and " failed" not in said:
        raise SystemExit(said)
    return status == 0  # tests that hang have noticed it


def main() -> None:
    reason = run.impossible()
    if reason is not None:
        print(f"[simulated-gpu] not run: {reason}")
        return
    chosen = [
        mutant
        for mutant in MUTANTS
        if not sys.argv[1:] or any(word in mutant.promise for word in sys.argv[1:])
    ]
    alive = 0
    for mutant in chosen:
        found = lives(mutant)
        alive += found
        print("LIVES " if found else "caught", mutant.promise, flush=True)
    raise SystemExit(1 if alive else 0)


if __name__ == "__main__":
    main()
