"""Whoever gets a batch may write into it: the user's memory, other batches and calls never see it.

What writes is told by the batch itself whether to do so, by its last column. So it writes into all
batches, or only into later ones, however often fitkit asks it about the first one.
"""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import fitkit
from tests import nets

ROWS, SIZE = 10, 4
RATE, EPOCHS = 0.1, 2


def memory(first):
    """Inputs, targets and weights. The last column is 1 in batches that are written into.

    Args:
        first: the first batch that is.
    """
    x, y = nets.normal(ROWS, 4), nets.normal(ROWS, 3, seed=1)
    weight = nets.normal(ROWS, seed=2).abs() + 0.5
    for part in (x, y):
        part[:, -1] = (torch.arange(ROWS) >= first * SIZE).float()
    return x, y, weight


def inner(part):
    """The tensor in a tree."""
    while isinstance(part, (dict, list, tuple)):
        (part,) = part.values() if isinstance(part, dict) else part
    return part


def write(part, change):
    """Change a batch's part in place, but not its last column, where that says so."""
    part = inner(part)
    if part[0, -1]:
        getattr(part[:, :-1], change)(0.5)


def changed(part, change):
    part = part.clone()
    write(part, change)
    return part


class Rows(Dataset):
    """Items that are views of tensors."""

    def __init__(self, *parts):
        self.parts = parts

    def __len__(self):
        return len(self.parts[0])

    def __getitem__(self, index):
        return tuple(part[index] for part in self.parts)


def batches(parts):
    return list(zip(*(part.split(SIZE) for part in parts), strict=True))


def frames(parts):
    pandas = pytest.importorskip("pandas")
    x, y, weight = (part.numpy() for part in parts)
    return pandas.DataFrame(x), pandas.DataFrame(y), pandas.Series(weight)


def stored(parts):
    """A loader whose collate returns tensors that it has."""
    kept = [({"x": [x]}, y, weight) for x, y, weight in batches(parts)]
    return DataLoader(range(ROWS), SIZE, collate_fn=lambda rows: kept[rows[0] // SIZE])


DATA = {
    "arrays": lambda parts: tuple(part.numpy() for part in parts),
    "tensors": lambda parts: parts,
    "frames": frames,
    "nested": lambda parts: ({"x": {"a": (parts[0],)}}, *parts[1:]),
    "a list of batches": batches,
    "a list of arrays": lambda parts: [tuple(p.numpy() for p in each) for each in batches(parts)],
    "an iterator's views": lambda parts: Views(parts),
    "a dataset": lambda parts: Rows(*parts),
    "a loader": lambda parts: DataLoader(Rows(*parts), SIZE),
    "a loader of batches": lambda parts: DataLoader(batches(parts), batch_size=None),
    "a collate that keeps": stored,
}
"""What a user gives, made of parts whose memory it shares where that is possible."""


class Views:
    def __init__(self, parts):
        self.parts = parts

    def __iter__(self):
        return iter(batches(self.parts))


class Net(nn.Module):
    """A linear layer, which may write into its inputs first."""

    def __init__(self, writes=False):
        super().__init__()
        self.layer, self.writes = nets.linear(4, 3), writes

    def forward(self, x):
        if self.writes:
            write(x, "mul_")
        return self.layer(inner(x))


def mean_of_rows(p, t):
    return ((p - t) ** 2).mean(1)


def loss_that_writes(p, t):
    write(t, "sub_")
    return mean_of_rows(p, t)


def distance(p, t):
    return (p - t).abs().mean(1)


def distance_that_writes(p, t):
    write(t, "add_")
    return (p - t).abs().mean(1)


def transform_that_writes(x, y):
    write(x, "mul_")
    write(y, "add_")
    return x, y


class OwnSteps(fitkit.Model):
    def training_step(self, batch, batch_idx):
        x, y, weight = batch
        write(x, "mul_")
        write(y, "sub_")
        weight.mul_(2)
        loss = (mean_of_rows(self(x), y) * weight).mean()
        self.log("distance", distance(self(x), y).mean())
        return loss

    validation_step = test_step = training_step

    def predict_step(self, batch, batch_idx=0):
        x = batch[0] if isinstance(batch, (tuple, list)) else batch
        write(x, "mul_")
        return self(x)


def hook_that_writes(net):
    def hook(module, given, named):
        write([*given, *named.values()], "mul_")

    net.register_forward_pre_hook(hook, with_kwargs=True)


def compiled(writer):
    net = Net(writes=writer == "net")
    model = (OwnSteps if writer == "own steps" else fitkit.Model)(net)
    if writer == "hook":
        hook_that_writes(net)
    model.compile(
        "sgd",
        loss_that_writes if writer == "loss" else mean_of_rows,
        learning_rate=RATE,
        metrics={"distance": distance_that_writes if writer == "metric" else distance},
        batch_transforms=[transform_that_writes] if writer == "transform" else None,
        accelerator="cpu",
    )
    return model


class Plain:
    """The same in plain PyTorch, each code with a clone of its own."""

    def __init__(self, writer):
        self.layer, self.writer = nets.linear(4, 3), writer
        self.optimizer = torch.optim.SGD(self.layer.parameters(), RATE)

    def outputs(self, x):
        return self.layer(changed(x, "mul_") if self.writer in ("net", "hook", "own steps") else x)

    def step(self, x, y, weight, *, learns=False):
        """Return the batch's sums of the loss and of the metric."""
        if learns and self.writer == "transform":
            x, y = changed(x, "mul_"), changed(y, "add_")
        target = seen = y
        if self.writer in ("loss", "own steps"):
            target = changed(y, "sub_")
        if self.writer == "metric":
            seen = changed(y, "add_")
        if self.writer == "own steps":
            seen, weight = target, 2 * weight
        outputs = self.outputs(x)
        loss = (mean_of_rows(outputs, target) * weight).mean()
        if learns:
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return len(x) * loss.item(), distance(outputs, seen).sum().item()

    def passed(self, parts, *, learns=False):
        sums = [self.step(*batch, learns=learns) for batch in batches(parts)]
        return [sum(column) / ROWS for column in zip(*sums, strict=True)]

    def predicted(self, parts):
        return torch.cat([self.outputs(x) for x, _, _ in batches(parts)]).detach().numpy()


def given(kind, parts):
    """What the verbs take: x, and arguments by name; and x alone."""
    data = DATA[kind](parts)
    if not isinstance(data, tuple):
        size = {"batch_size": SIZE} if isinstance(data, Rows) else {}
        return {"x": data, **size}, {"x": data, **size}, data
    x, y, weight = data
    named = {"x": x, "y": y, "sample_weight": weight, "batch_size": SIZE}
    return named, {"x": x, "batch_size": SIZE}, data


@pytest.mark.parametrize(("number", "kind"), enumerate(DATA))
@pytest.mark.parametrize(
    ("turn", "writer"), enumerate(["loss", "metric", "net", "hook", "transform", "own steps"])
)
def test_no_write_reaches_the_users_memory_or_another_batch(writer, kind, number, turn):
    parts = memory((number + turn) % 2)
    before = copy.deepcopy(parts)
    whole, inputs, held_out = given(kind, parts)
    model, plain = compiled(writer), Plain(writer)

    def check(found, expected):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(*pair) for pair in zip(parts, before, strict=True))

    history = model.fit(
        **whole, epochs=EPOCHS, shuffle=False, validation_data=held_out, verbose=0
    ).history
    expected = [(*plain.passed(before, learns=True), *plain.passed(before)) for _ in range(EPOCHS)]
    names = ("loss", "distance", "val_loss", "val_distance")
    check([history[name] for name in names], np.transpose(expected))
    for _ in range(2):  # the second call sees what the first one saw
        found = model.evaluate(**whole, verbose=0, return_dict=True)
        check([found["loss"], found["distance"]], plain.passed(before))
        check(model.predict(**inputs, verbose=0), plain.predicted(before))
    check(np.concatenate([*model.predict_batches(**inputs)]), plain.predicted(before))


@pytest.mark.parametrize("writer", ["loss", "metric", "net", "hook", "transform", "own steps"])
@pytest.mark.parametrize(
    "as_given", [torch.Tensor.numpy, lambda part: part], ids=["arrays", "tensors"]
)
def test_single_batches_are_not_written_into(writer, as_given):
    parts = memory(0)
    before = copy.deepcopy(parts)
    x, y, weight = map(as_given, parts)
    model, plain = compiled(writer), Plain(writer)
    for verb, learns in [("train", True), ("test", False), ("train", True), ("test", False)]:
        call = getattr(model, f"{verb}_on_batch")
        found = call(x, y, sample_weight=weight, return_dict=True)
        loss, metric = plain.step(*before, learns=learns)
        assert found["loss"] == pytest.approx(loss / ROWS, rel=1e-5)
        assert found["distance"] == pytest.approx(metric / ROWS, rel=1e-5)
        outputs = model.predict_on_batch(x)
        np.testing.assert_allclose(outputs, plain.outputs(before[0]).detach(), rtol=1e-5, atol=1e-6)
        assert all(torch.equal(*pair) for pair in zip(parts, before, strict=True))


class Halving(nn.Module):
    """A teacher or a student that writes into its inputs."""

    def __init__(self, seed, writes=True):
        super().__init__()
        self.layer, self.writes = nets.linear(4, 3, seed=seed), writes

    def forward(self, x):
        return self.layer(x.mul_(0.5) if self.writes else 0.5 * x)


@pytest.mark.parametrize("data", ["arrays", "batches"])
def test_a_teacher_sees_the_inputs_as_the_batch_has_them(data):
    x, y = nets.normal(ROWS, 4), torch.arange(ROWS) % 3
    before = x.clone()

    def trained(writes):
        model = fitkit.Model(Halving(0, writes))
        loss = fitkit.losses.Distillation(Halving(1, writes), alpha=0.5)
        model.compile("sgd", loss, learning_rate=RATE, accelerator="cpu")
        if data == "arrays":
            found = model.fit(x, y, batch_size=SIZE, epochs=2, shuffle=False, verbose=0)
            return found.history["loss"], model.evaluate(x, y, batch_size=SIZE, verbose=0)
        each = batches((x, y))
        return model.fit(each, epochs=2, verbose=0).history["loss"], model.evaluate(each, verbose=0)

    assert trained(writes=True) == trained(writes=False)
    assert torch.equal(x, before)


@pytest.mark.parametrize("kind", ["arrays", "a list of batches"])
def test_a_loss_that_an_optimizer_evaluates_again_gets_the_batch_as_it_came(kind):
    parts = memory(0)
    before = copy.deepcopy(parts)
    x, y, _ = before
    layer = nets.linear(4, 3)
    plain = torch.optim.LBFGS(layer.parameters(), lr=RATE, max_iter=4)

    def closure():
        plain.zero_grad()
        loss = mean_of_rows(layer(changed(x, "mul_")), changed(y, "sub_")).mean()
        loss.backward()
        return loss

    for _ in range(EPOCHS):
        plain.step(closure)
    model = fitkit.Model(Net(writes=True))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=RATE, max_iter=4)
    model.compile(optimizer, loss_that_writes, accelerator="cpu")
    data = {"x": parts[0], "y": parts[1]} if kind == "arrays" else {"x": [parts[:2]]}
    model.fit(**data, batch_size=32, epochs=EPOCHS, shuffle=False, verbose=0)
    torch.testing.assert_close(model.net.layer.weight, layer.weight)
    assert all(torch.equal(*pair) for pair in zip(parts, before, strict=True))


class ByTurns(fitkit.Model):
    """Two optimizers, whose steps write into the batch."""

    def configure_optimizers(self):
        layer = self.net.layer
        return [torch.optim.SGD([p], RATE) for p in (layer.weight, layer.bias)]

    def training_step(self, batch, batch_idx, optimizer_idx):
        x, y = batch
        write(x, "mul_")
        return mean_of_rows(self(x), y).mean()


@pytest.mark.parametrize("kind", ["arrays", "a list of batches"])
def test_optimizers_that_take_turns_get_the_batch_as_it_came(kind):
    parts = memory(0)[:2]
    before = copy.deepcopy(parts)
    layer = nets.linear(4, 3)
    for x, y in [(changed(x, "mul_"), y) for x, y in batches(before)] * EPOCHS:
        for parameter in (layer.weight, layer.bias):
            (slope,) = torch.autograd.grad(mean_of_rows(layer(x), y).mean(), [parameter])
            parameter.data -= RATE * slope
    model = ByTurns(Net())
    model.compile(accelerator="cpu")
    model.fit(**given_pair(kind, parts), epochs=EPOCHS, shuffle=False, verbose=0)
    torch.testing.assert_close(model.net.layer.weight, layer.weight)
    torch.testing.assert_close(model.net.layer.bias, layer.bias)
    assert all(torch.equal(*pair) for pair in zip(parts, before, strict=True))


def given_pair(kind, parts):
    if kind == "arrays":
        return {"x": parts[0], "y": parts[1], "batch_size": SIZE}
    return {"x": batches(parts)}


class Forces(nn.Module):
    """Needs gradients, which an evaluation finds out by a first try."""

    def __init__(self):
        super().__init__()
        self.energy = nets.dense(4, 8, 1)

    def forward(self, x):
        x = x.sub_(0.5).requires_grad_()
        return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


def test_an_evaluation_that_tries_again_gets_the_batch_as_it_came():
    x, y = nets.normal(ROWS, 4), nets.normal(ROWS, 4, seed=1)
    before = x.clone()
    expected = Forces()(x.clone()).detach()
    model = fitkit.Model(Forces())
    model.compile("sgd", "mse", accelerator="cpu")
    np.testing.assert_allclose(model.predict(x, batch_size=SIZE, verbose=0), expected, rtol=1e-5)
    loss = F.mse_loss(expected, y).item()
    assert model.evaluate(x, y, batch_size=SIZE, verbose=0) == pytest.approx(loss)
    assert torch.equal(x, before)


class Shifting(nn.Module):
    """Adds a parameter to its inputs in place, and keeps the last graph for the next batch."""

    def __init__(self):
        super().__init__()
        self.shift, self.layer, self.last = nn.Parameter(torch.ones(4)), nets.linear(4, 3), None

    def forward(self, x):
        found = self.layer(x.add_(self.shift))
        earlier, self.last = self.last, found.square().mean()
        return found if earlier is None else found + 0.1 * earlier


@pytest.mark.parametrize("steps", [1, 2])  # with more, rows of several are selected at once
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_of_arrays_is_as_if_it_were_alone(shuffle, steps):
    class Retained(fitkit.Model):
        def training_step(self, batch, batch_idx):
            loss = mean_of_rows(self(batch[0]), batch[1]).mean()
            self.manual_backward(loss, retain_graph=True)
            self.log("loss", loss)

        automatic_optimization = False

    x, y = nets.normal(ROWS, 4), nets.normal(ROWS, 3, seed=1)
    before = x.clone()
    model = Retained(Shifting())
    model.compile("sgd", accelerator="cpu", steps_per_execution=steps)
    model.fit(x, y, batch_size=SIZE, shuffle=shuffle, verbose=0)
    assert torch.equal(x, before)


@pytest.mark.parametrize(("kind", "steps"), [("arrays", 4), ("a list of batches", 1)])
def test_compiled_steps_write_into_their_own(kind, steps):
    x, y = nets.normal(4 * ROWS, 4), nets.normal(4 * ROWS, 3, seed=1)
    parts, before = (x, y), (x.clone(), y.clone())

    def loss(p, t):
        t.sub_(0.5)
        return (p - t).square().mean()

    def trained(**options):
        model = fitkit.Model(Halving(0))
        model.compile(
            "sgd", loss, metrics=["mae"], learning_rate=RATE, accelerator="cpu",
            steps_per_execution=steps, **options,
        )  # fmt: skip
        data = given_pair(kind, parts)
        history = model.fit(**data, epochs=2, shuffle=False, verbose=0).history
        return [*history.values(), model.evaluate(**data, verbose=0)]

    plain = trained()
    found = trained(jit_compile={"backend": "aot_eager"})
    for one, other in zip(found, plain, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert all(torch.equal(*pair) for pair in zip(parts, before, strict=True))


class Graph:
    """Moves in place, as objects of graph libraries do, and holds slices of a large tensor."""

    def __init__(self, nodes, target):
        self.nodes, self.target, self.batch_size = nodes, target, len(nodes)

    def to(self, device):
        self.nodes, self.device = self.nodes.to(device), device
        return self


class OfGraphs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nets.linear(4, 3)

    def forward(self, graph):
        graph.seen = True
        return self.layer(graph.nodes.mul_(0.5))


def test_an_object_is_copied_with_its_tensors_and_without_what_they_are_parts_of():
    x, y = nets.normal(ROWS, 4), nets.normal(ROWS, 3, seed=1)
    before = x.clone()
    graphs = [(Graph(*pair), pair[1]) for pair in batches((x, y))]
    sizes = []
    net = OfGraphs()
    net.register_forward_pre_hook(
        lambda module, given: sizes.append(given[0].nodes.untyped_storage().nbytes())
    )
    model = fitkit.Model(net)
    model.compile("sgd", mean_of_rows, learning_rate=RATE, accelerator="cpu")
    first = model.evaluate(graphs, verbose=0)
    expected = mean_of_rows(net.layer(0.5 * x), y).mean().item()
    assert first == model.evaluate(graphs, verbose=0) == pytest.approx(expected)
    model.fit(graphs, epochs=2, verbose=0)
    assert torch.equal(x, before) and max(sizes) == SIZE * 4 * 4
    assert not any(vars(graph).keys() & {"seen", "device"} for graph, _ in graphs)


@pytest.mark.parametrize("data", [lambda x: x, lambda x: [(part,) for part in x.split(SIZE)]])
def test_predictions_share_no_memory_with_the_inputs(data):
    x = nets.normal(ROWS, 4)
    model = fitkit.Model(nn.Identity())
    model.compile(accelerator="cpu")
    seen = []
    model.predict(data(x), batch_size=SIZE, verbose=0, out=lambda found, rows: seen.append(found))
    found = [
        *seen, *model.predict_batches(data(x), batch_size=SIZE), model.predict_on_batch(x),
        model.predict(data(x), batch_size=SIZE, verbose=0),
        model.predict(data(x), batch_size=SIZE, verbose=0, as_numpy=False).numpy(),
    ]  # fmt: skip
    assert not any(np.shares_memory(np.asarray(one), x.numpy()) for one in found)


@pytest.mark.parametrize("strategy", ["ddp_spawn", "dp"])
def test_two_ranks_or_replicas_see_what_one_process_sees(strategy):
    parts = memory(0)[:2]
    before = copy.deepcopy(parts)

    def trained(devices):
        model = fitkit.Model(Net(writes=True))
        model.compile(
            "sgd", loss_that_writes, batch_transforms=[transform_that_writes],
            learning_rate=RATE, accelerator="cpu", devices=devices, strategy=strategy,
        )  # fmt: skip
        size = SIZE // devices if strategy == "ddp_spawn" else SIZE
        options = {"epochs": 3, "shuffle": False, "verbose": 0, "batch_size": size}
        losses = model.fit(*parts, **options).history["loss"]
        return [*losses, model.evaluate(*parts, batch_size=SIZE, verbose=0)]

    assert trained(2) == pytest.approx(trained(1), rel=1e-5)
    assert all(torch.equal(*pair) for pair in zip(parts, before, strict=True))
