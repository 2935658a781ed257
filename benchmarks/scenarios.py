"""What is measured, by name: each scenario gives rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from benchmarks import checkpoints, ddp, footprint, ranks, samples
from benchmarks.contest import OURS, Side, against, contest, in_one_process, peers_there
from benchmarks.measuring import Row
from benchmarks.tasks import Task
from benchmarks.with_fitkit import RECIPES

MLP = "mlp 784 128 10"


@dataclasses.dataclass(frozen=True)
class Length:
    """How long to measure: some minutes a scenario, or a rough look.

    Attributes:
        pairs: of runs for each contender.
        share: of the full samples.
        peers: whether other libraries take part.
    """

    pairs: int = 11
    share: float = 1.0
    peers: bool = True

    @property
    def everybody(self) -> tuple[str, ...]:
        """The contenders."""
        return (*OURS, *peers_there()) if self.peers else OURS

    @property
    def many(self) -> int:
        """Pairs where a run takes a tenth of a second: no longer than starting the processes."""
        return 5 * self.pairs

    def of(self, samples: int) -> int:
        """So many samples, or fewer for a rough look."""
        return max(1280, int(samples * self.share))


def step(length: Length) -> Iterator[Row]:
    """Yield the cost of a step where the net costs next to nothing."""
    bare = Task("Adam, accuracy, no display", samples=length.of(9600))
    shown = dataclasses.replace(bare, name="Adam, accuracy, as each comes", defaults=True)
    yield from contest("step", bare, length.everybody, "careful", length.pairs)
    yield from contest("step", bare, ("fitkit",), "tuned", length.pairs, with_itself=False)
    yield from contest("step", shown, length.everybody, "careful", length.pairs)
    yield display(bare, shown, length.pairs)
    plain = dataclasses.replace(bare, name="SGD, no metrics", optimizer="sgd", metrics=())
    yield from contest("step", plain, OURS, "careful", length.pairs)


def display(bare: Task, shown: Task, pairs: int) -> Row:
    """Return what fitkit's progress bar costs: fitkit with it beside fitkit without."""
    named = dataclasses.replace(shown, name="progress bar")
    with closing(Side("fitkit", bare)) as base, closing(Side("fitkit", named)) as side:
        return against("step", base, side, pairs)


def arrays(length: Length) -> Iterator[Row]:
    """In-memory arrays of 60,000 x 784."""
    for batch in (32, 128):
        task = Task(
            f"batches of {batch}",
            net=MLP,
            samples=length.of(60_000),
            batch=batch,
            source="arrays",
        )
        everybody = length.everybody if batch == 32 else OURS
        yield from contest("arrays", task, everybody, "careful", length.pairs)


def cnn(length: Length) -> Iterator[Row]:
    """Images of 3 x 32 x 32: the net takes nearly all of the time."""
    task = Task("CNN, batches of 64", net="cnn", samples=length.of(1280), batch=64)
    yield from contest("cnn", task, length.everybody, "tuned", length.pairs)


def inference(length: Length) -> Iterator[Row]:
    """`evaluate` and `predict` on arrays, against slices in inference mode."""
    for verb in ("evaluate", "predict"):
        for batch in (32, 128):
            task = Task(
                f"{verb}, batches of {batch}",
                verb=verb,
                net=MLP,
                samples=length.of(20_000),
                batch=batch,
                source="arrays",
            )
            yield from contest("inference", task, length.everybody, "tuned", length.many)


def onbatch(length: Length) -> Iterator[Row]:
    """One's own loop: a call for each batch, whose values are read."""
    for verb in ("train", "evaluate", "predict"):
        task = Task(
            f"{verb}, a batch of 32 a call", verb=verb, net=MLP, samples=length.of(6400),
            source="batches",
        )  # fmt: skip
        yield from contest("onbatch", task, ("fitkit",), "tuned", length.many)


def metrics(length: Length) -> Iterator[Row]:
    """Yield what metrics cost: none, one, three by name; the loops with torchmetrics; and
    monitors.
    """
    one = Task("accuracy", samples=length.of(9600), optimizer="sgd")
    none = dataclasses.replace(one, name="no metrics", metrics=())
    three = dataclasses.replace(one, name="three metrics", metrics=("accuracy", "f1", "recall"))
    for fewer, more in ((none, one), (one, three)):
        yield in_one_process("metrics", fewer, more, length.many)
    yield from contest("metrics", three, OURS, "careful", length.many)
    tiny = Task("tiny net", samples=length.of(9600))
    blocks = Task("6 blocks of width 64", net="blocks 6", samples=length.of(12_800), batch=256)
    for task, pairs in ((tiny, length.many), (blocks, length.pairs)):
        for names in (("throughput", "rates"), ("norms",)):
            named = f"{task.name}: {', '.join(names)}"
            more = dataclasses.replace(task, name=named, monitors=names)
            yield in_one_process("metrics", task, more, pairs)


def options(length: Length) -> Iterator[Row]:
    """Yield what options of `compile` gain that change last bits: each beside the same without
    it.
    """
    image = Task("CNN", net="cnn", samples=length.of(1280), batch=64)
    linear = Task("20 linear layers of width 32", net="deep 20", samples=length.of(6400))
    blocks = Task("6 blocks of width 64", net="blocks 6", samples=length.of(12_800), batch=256)
    yield beside_itself("options", image, {"memory_format": "channels_last"}, length.pairs)
    for task in (image, linear, blocks):
        yield beside_itself("options", task, {"jit_compile": True}, length.pairs)


def splitting(length: Length) -> Iterator[Row]:
    """Yield what `out_of_memory="split"` costs where nothing runs out."""
    tiny = Task("tiny net", samples=length.of(9600), source="arrays")
    wide = dataclasses.replace(tiny, name="784-128-10", net=MLP)
    blocks = Task("6 blocks of width 64", net="blocks 6", samples=length.of(12_800), batch=256)
    for task, pairs in ((tiny, length.many), (wide, length.many), (blocks, length.pairs)):
        for word in ("raise", "split"):  # the first is the same with itself: noise
            yield beside_itself("splitting", task, {"out_of_memory": word}, pairs)


def recipes(length: Length) -> Iterator[Row]:
    """Yield what transforms of whole batches cost: each beside fitkit without it."""
    image = Task("CNN, batches of 32", net="cnn", samples=length.of(1280))
    for name in RECIPES:
        changed = dataclasses.replace(image, name=f"{image.name}, {name}", recipe=name)
        with closing(Side("fitkit", image)) as base, closing(Side("fitkit", changed)) as side:
            yield against("recipes", base, side, length.pairs)


def compiled(length: Length) -> Iterator[Row]:
    """Whole steps by `jit_compile`: beside the tuned loop, Keras on JAX, and fitkit without it."""
    whole: dict[str, Any] = {"jit_compile": True}
    together: dict[str, Any] = {**whole, "steps_per_execution": 32}
    on_jax = tuple(name for name in length.everybody if name == "Keras on JAX")
    tiny = Task("32-64-10", samples=length.of(12_800), source="arrays")
    wide = dataclasses.replace(tiny, name="784-128-10", net=MLP, samples=length.of(60_000))
    wider = dataclasses.replace(wide, name="784-128-10, batches of 128", batch=128)
    for task, pairs in ((tiny, length.many), (wide, length.pairs), (wider, length.pairs)):
        yield from contest("compiled", task, ("fitkit",), "tuned", pairs, with_itself=False)
        for given in (whole, together):
            changed = with_options(task, given)
            for reference in ("tuned", *on_jax):
                others = ("fitkit", *on_jax) if reference == "tuned" else ("fitkit",)
                yield from contest("compiled", changed, others, reference, pairs, with_itself=False)
    image = Task("CNN", net="cnn", samples=length.of(1280), batch=64)
    tokens = Task("transformer, 4 layers", net="transformer 4 128", samples=length.of(1280))
    written = dataclasses.replace(
        tokens, name="transformer of blocks written out", net="transformer 4 128 written"
    )
    blocks = Task("6 blocks of width 64", net="blocks 6", samples=length.of(12_800), batch=256)
    for task in (image, tokens, written):
        yield beside_itself("compiled", task, whole, length.pairs)
    for task in (tiny, blocks, image, tokens, written):
        passes = dataclasses.replace(
            task, name=f"evaluate, {task.name}", verb="evaluate", source="arrays"
        )
        for given in (whole, together):
            yield beside_itself("compiled", passes, given, length.pairs)


def with_options(task: Task, given: dict[str, Any]) -> Task:
    """Return a task with options of `compile`, which its name says."""
    words = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return dataclasses.replace(task, name=f"{task.name}, {words}", options=given)


def beside_itself(scenario: str, task: Task, given: dict[str, Any], pairs: int) -> Row:
    """fitkit's figures with options of `compile` beside those without."""
    changed = with_options(task, given)
    with closing(Side("fitkit", task)) as base, closing(Side("fitkit", changed)) as side:
        return against(scenario, base, side, pairs)


def scaling(length: Length) -> Iterator[Row]:
    """Yield a step's cost against layers, batch size, metrics, callbacks, epochs; costs against
    ranks.
    """
    base = Task("", samples=length.of(3200), optimizer="sgd", metrics=())
    tasks = [
        *(dataclasses.replace(base, name=f"{n} layers", net=f"deep {n}") for n in (2, 10, 50, 200)),
        *(
            dataclasses.replace(base, name=f"batches of {size}", batch=size, samples=size * 50)
            for size in (8, 64, 512, 4096)
        ),
        *(
            dataclasses.replace(base, name=f"{len(names)} metrics", metrics=names)
            for names in ((), ("accuracy",), ("accuracy", "f1"), ("accuracy", "f1", "recall"))
        ),
        *(dataclasses.replace(base, name=f"{n} callbacks", callbacks=n) for n in (0, 5, 20)),
        *(
            dataclasses.replace(base, name=f"{n} epochs", epochs=n, samples=640)
            for n in (1, 10, 100)
        ),
    ]
    for task in tasks:
        yield from contest("scaling", task, ("fitkit",), "tuned", length.many, with_itself=False)
    yield from ranks.rows()


SCENARIOS: dict[str, Callable[[Length], Iterator[Row]]] = {
    "step": step,
    "arrays": arrays,
    "cnn": cnn,
    "inference": inference,
    "onbatch": onbatch,
    "metrics": metrics,
    "options": options,
    "recipes": recipes,
    "splitting": splitting,
    "compiled": compiled,
    "footprint": lambda length: footprint.rows(length.pairs),
    "checkpoint": lambda length: checkpoints.rows(length.pairs, 14 if length.share == 1 else 2),
    "ddp": lambda length: ddp.rows(2 * -(-length.pairs // 2)),
    "scaling": scaling,
    "samples": lambda length: samples.rows(length.pairs, length.share),
}
