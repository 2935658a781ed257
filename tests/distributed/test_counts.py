"""Means over what counts: however an update's batch is cut, it is the update of the whole batch.

The reference is plain PyTorch on the undivided batch, in float64. Rows have 12 labels, of which 1
to 11 count, sorted so that the parts of a batch are as uneven as they can be.
"""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F

import fitkit
from fitkit.strategies import DDPSpawnStrategy, Engine

ROWS, LENGTH, CLASSES, UPDATES = 96, 12, 5, 10
IGNORED = -100
CUTS = {  # devices, accumulated batches, rows of a batch
    "1 x 16": (1, 1, 16),
    "4 x 4": (1, 4, 4),
    "16 x 1": (1, 16, 1),
    "2 ranks x 8": (2, 1, 8),
    "2 ranks x 2 x 4": (2, 2, 4),
}


def tokens():
    """Features (N, T, 6) and labels (N, T)."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, LENGTH, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (ROWS, LENGTH), generator=generator)
    counting = 1 + (torch.arange(ROWS) % 16) * 10 // 15  # 1 to 11, rising within each batch
    y[torch.arange(LENGTH) >= counting[:, None]] = IGNORED
    return x, y


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.body(x)).transpose(1, 2)  # (N, C, T)


class TwoHeads(Tagger):
    def __init__(self):
        super().__init__()
        self.size = nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.body(x)
        return {"tag": self.head(hidden).transpose(1, 2), "size": self.size(hidden.mean(1))}


class LanguageModel(Tagger):
    """Computes its own loss, as Hugging Face's do: each position predicts the next label."""

    def forward(self, x, labels=None):
        logits = self.head(self.body(x))
        scores, wanted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return {"loss": F.cross_entropy(scores, wanted), "logits": logits}


def made(kind):
    torch.manual_seed(0)
    return kind().double()


def reference(net, loss_of, data, clip=None):
    """Ten updates of the undivided batches of 16 rows; the weights and each epoch's mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    for start in range(0, UPDATES * 16, 16):
        rows = torch.arange(start, start + 16) % ROWS
        optimizer.zero_grad()
        loss_of(net, *(part[rows] for part in data)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return net


class Rows(torch.utils.data.Dataset):
    """Samples (x, y) or dicts, from parts (N, ...)."""

    def __init__(self, make, *parts):
        self.make, self.parts = make, parts

    def __len__(self):
        return len(self.parts[0])

    def __getitem__(self, index):
        return self.make(*(part[index] for part in self.parts))


def fitted(model, data, cut, make=None, **compiled):
    """The model after ten updates, cut as `cut` says; `make` asks for a loader."""
    devices, accumulate, size = CUTS[cut]
    model.compile(
        sgd, **compiled, learning_rate=0.5, precision="64-true", accelerator="cpu",
        devices=devices, accumulate_grad_batches=accumulate,
    )  # fmt: skip
    steps = UPDATES * 16 // size // devices
    source = data if make is None else (torch.utils.data.DataLoader(Rows(make, *data), size),)
    options = {"batch_size": size, "shuffle": False} if make is None else {}
    model.fit(*source, steps_per_epoch=steps, verbose=0, **options)
    return model


def sgd(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def apart(found, wanted):
    pairs = zip(found.parameters(), wanted.parameters(), strict=True)
    return max(float((a.cpu() - b.cpu()).detach().abs().max()) for a, b in pairs)


LOSSES = {
    "a name": lambda: "cross_entropy",
    "torch's, with weights of classes": lambda: nn.CrossEntropyLoss(
        torch.tensor([0.1, 1.0, 1.0, 5.0, 0.0], dtype=torch.float64)
    ),
    "torch's, with another label ignored": lambda: nn.CrossEntropyLoss(ignore_index=2),
    "values of the labels that count": lambda: (
        lambda p, t: F.cross_entropy(
            p.movedim(1, -1)[t != IGNORED], t[t != IGNORED], reduction="none"
        )
    ),
}


UNEVEN = [(name, cut) for name in LOSSES for cut in ("4 x 4", "2 ranks x 2 x 4")]


@pytest.mark.parametrize(
    ("name", "cut"), [*(("a name", cut) for cut in CUTS if ("a name", cut) not in UNEVEN), *UNEVEN]
)
def test_an_update_is_that_of_the_whole_batch(name, cut):
    x, y = tokens()
    if "another" in name:
        y = y.where(y != IGNORED, 2)
    loss = LOSSES[name]()
    plain = F.cross_entropy if isinstance(loss, str) else loss
    wanted = reference(made(Tagger), lambda net, x, y: plain(net(x), y).mean(), (x, y))
    loads = [None, lambda x, y: (x, y)]  # arrays, and a loader
    for make in loads if name == "a name" else loads[1:]:
        model = fitted(fitkit.Model(made(Tagger)), (x, y), cut, make, loss=loss)
        assert apart(model.net, wanted) < 1e-12


@pytest.mark.parametrize("cut", CUTS)
def test_outputs_that_count_differently_weigh_each_by_its_own(cut):
    x, y = tokens()
    size = x.mean((1, 2)).unsqueeze(1)
    weights = {"tag": 0.7, "size": 2.0}

    def loss_of(net, x, y, size):
        found = net(x)
        return 0.7 * F.cross_entropy(found["tag"], y) + 2.0 * F.mse_loss(found["size"], size)

    wanted = reference(made(TwoHeads), loss_of, (x, y, size))
    model = fitted(
        fitkit.Model(made(TwoHeads)), (x, y, size), cut,
        lambda x, y, size: (x, {"tag": y, "size": size}),
        loss={"tag": "cross_entropy", "size": "mse"}, loss_weights=weights,
    )  # fmt: skip
    assert apart(model.net, wanted) < 1e-12


class NestedHeads(TwoHeads):
    def forward(self, x):
        found = super().forward(x)
        return {"tag": found["tag"], "more": (found["size"], {"tag": 2 * found["tag"]})}


@pytest.mark.parametrize("cut", CUTS)
def test_several_losses_of_a_nested_output_weigh_each_by_its_own(cut):
    x, y = tokens()
    size, other = x.mean((1, 2)).unsqueeze(1), y.where(y != IGNORED, 2).roll(1, 0)
    table = torch.tensor([0.1, 1.0, 1.0, 5.0, 0.5], dtype=torch.float64)

    def of_tags(found, other):
        plain, weighed = F.cross_entropy(found, other), F.cross_entropy(found, other, table)
        return plain, weighed, F.cross_entropy(found, other, ignore_index=2)

    def loss_of(net, x, y, size, other):
        found = net(x)
        plain, weighed, ignoring = of_tags(found["more"][1]["tag"], other)
        of_size = F.mse_loss(found["more"][0], size)
        return F.cross_entropy(found["tag"], y) + of_size + 0.5 * plain + 2 * weighed + ignoring

    wanted = reference(made(NestedHeads), loss_of, (x, y, size, other))
    tags = ["cross_entropy", nn.CrossEntropyLoss(table), nn.CrossEntropyLoss(ignore_index=2)]
    model = fitted(
        fitkit.Model(made(NestedHeads)), (x, y, size, other), cut,
        lambda x, y, size, other: (x, {"tag": y, "more": (size, {"tag": other})}),
        loss={"tag": "cross_entropy", "more": ["mse", {"tag": tags}]},
        loss_weights={"more": {"output_1": {"tag": [0.5, 2, 1]}}},
    )  # fmt: skip
    assert apart(model.net, wanted) < 1e-12
    whole = {"tag": y, "more": (size, {"tag": other})}
    found = model.evaluate(x, whole, batch_size=7, verbose=0, return_dict=True)
    with torch.no_grad():
        given = model.net.cpu()(x)
        expected = sum(of_tags(given["more"][1]["tag"], other)).item()
        total = loss_of(model.net, x, y, size, other).item()
    assert found["more/output_1/tag_loss"] == pytest.approx(expected, 1e-9)
    assert found["loss"] == pytest.approx(total, 1e-9)


@pytest.mark.parametrize("cut", CUTS)
def test_a_net_with_its_own_loss(cut):
    x, y = tokens()
    y[:, 1] = y[:, 0]  # a label to predict in every row
    wanted = reference(made(LanguageModel), lambda net, x, y: net(x, y)["loss"], (x, y))
    model = fitted(
        fitkit.Model(made(LanguageModel)), (x, y), cut, lambda x, y: {"x": x, "labels": y}
    )
    assert apart(model.net, wanted) < 1e-12


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_labels_learns_from_the_others_what_a_nets_own_loss_counts(rank):
    x, y = tokens()
    y[:, 1] = y[:, 0]
    y[8 * rank : 8 * rank + 8] = IGNORED  # all of this rank's first batch
    wanted = reference(made(LanguageModel), lambda net, x, y: net(x, y)["loss"], (x, y))
    model = fitted(
        fitkit.Model(made(LanguageModel)), (x, y), "2 ranks x 8",
        lambda x, y: {"x": x, "labels": y},
    )  # fmt: skip
    assert apart(model.net, wanted) < 1e-12


class ByTurns(fitkit.Model):
    """Two optimizers. A step says what counts only where some labels don't."""

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.5) for part in (self.net.body, self.net.head)]

    def training_step(self, batch, batch_idx, optimizer_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x)[..., 0], y)
        counting = (y != IGNORED).sum()
        return loss if counting == len(y) else {"loss": loss, "count": counting}


@pytest.mark.parametrize("strategy", ["ddp_spawn", "fsdp"])
def test_a_count_that_only_one_rank_s_step_gives(strategy):
    x, y = tokens()
    x, y = x[:16], y[:16, 0]
    y[9:14] = IGNORED  # of rank 1
    wanted, kind = made(Tagger), ByTurns if strategy == "ddp_spawn" else WithoutTurns
    for part in (wanted.body, wanted.head) if kind is ByTurns else (wanted,):
        optimizer = torch.optim.SGD(part.parameters(), 0.5)
        wanted.zero_grad()
        F.cross_entropy(wanted(x)[..., 0], y).backward()
        optimizer.step()
    model = kind(made(Tagger))
    model.compile(precision="64-true", accelerator="cpu", devices=2, strategy=strategy)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert apart(model.net, wanted) < 1e-12


class WithoutTurns(ByTurns):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.5)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx, 0)


def test_class_numbers_on_one_rank_and_probabilities_on_the_other():
    x, y = tokens()
    x, y, size = x[:16], y[:16].clamp(min=0), torch.ones(16, 1, dtype=torch.float64)
    y[:8, 3:] = IGNORED
    soft = F.one_hot(y[8:], CLASSES).transpose(1, 2).double()
    wanted = made(TwoHeads)
    optimizer, found = torch.optim.SGD(wanted.parameters(), 0.5), wanted(x)
    (F.cross_entropy(found["tag"], y) + F.mse_loss(found["size"], size)).backward()
    optimizer.step()
    model = fitkit.Model(made(TwoHeads))
    model.compile(
        torch.optim.SGD, {"tag": "cross_entropy", "size": "mse"}, learning_rate=0.5,
        precision="64-true", accelerator="cpu", devices=2,
    )  # fmt: skip
    batches = [(x[:8], {"tag": y[:8], "size": size[:8]}), (x[8:], {"tag": soft, "size": size[8:]})]
    model.fit(iter(batches), steps_per_epoch=1, verbose=0)
    assert apart(model.net, wanted) < 1e-12


class OwnStep(fitkit.Model):
    def training_step(self, batch, batch_idx):
        x, y = batch
        counts = y != IGNORED
        loss = F.cross_entropy(self(x), y, reduction="sum") / counts.sum()
        return {"loss": loss, "count": counts.sum()}


class HandsOn(fitkit.Model):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


class ByHand(fitkit.Model):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.optimizers().zero_grad()
        loss = F.cross_entropy(self(x), y)
        self.manual_backward(loss, count=int((y != IGNORED).sum()))
        self.optimizers().step()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", [OwnStep, HandsOn])
def test_a_step_says_what_its_mean_is_taken_over(kind, cut):
    x, y = tokens()
    wanted = reference(made(Tagger), lambda net, x, y: F.cross_entropy(net(x), y), (x, y))
    compiled = {"loss": "cross_entropy"} if kind is HandsOn else {}
    model = fitted(kind(made(Tagger)), (x, y), cut, lambda x, y: (x, y), **compiled)
    assert apart(model.net, wanted) < 1e-12


def test_manual_backward_takes_what_a_mean_is_taken_over():
    x, y = tokens()
    wanted = reference(made(Tagger), lambda net, x, y: F.cross_entropy(net(x), y), (x, y))
    model = fitted(ByHand(made(Tagger)), (x, y), "2 ranks x 8")
    assert apart(model.net, wanted) < 1e-12


STRATEGIES = {  # and the rows of a batch
    "ddp_sharded": 8,
    "fsdp": 8,
    "dp": 16,
    "ddp2": 16,
    "unused parameters looked for": 8,
    "a hook of its own": 8,
}


class OwnHook(DDPSpawnStrategy):
    """A count that travels with the gradients would go through the hook, too."""

    def configure_ddp(self, module):
        wrapped = super().configure_ddp(module)
        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
        return wrapped


OBJECTS = {
    "unused parameters looked for": DDPSpawnStrategy(find_unused_parameters=True),
    "a hook of its own": OwnHook(),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("own", [False, True])
def test_every_strategy_weighs_alike(strategy, own):
    x, y = tokens()
    y[:, 1] = y[:, 0]
    kind = LanguageModel if own else Tagger
    plain = (lambda n, x, y: n(x, y)["loss"]) if own else (lambda n, x, y: F.cross_entropy(n(x), y))
    wanted = reference(made(kind), plain, (x, y), clip=0.05)
    make = (lambda x, y: {"x": x, "labels": y}) if own else (lambda x, y: (x, y))
    model = fitkit.Model(made(kind))
    size = STRATEGIES[strategy]
    model.compile(
        sgd, **({} if own else {"loss": "cross_entropy"}), learning_rate=0.5,
        precision="64-true", accelerator="cpu", devices=2, gradient_clip_val=0.05,
        strategy=OBJECTS.get(strategy, strategy),
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(Rows(make, x, y), size)
    model.fit(loader, steps_per_epoch=UPDATES, verbose=0)
    assert apart(model.net, wanted) < 1e-12


class Threefold(Engine):
    def backward(self, loss):
        (3 * loss).backward()


class WithEngine(DDPSpawnStrategy):
    has_engine = True

    def engine_for(self, module, optimizers):
        return Threefold()


def test_an_engine_computes_the_gradients_of_losses_that_count():
    x, y = tokens()
    wanted = reference(made(Tagger), lambda n, x, y: 3 * F.cross_entropy(n(x), y), (x, y))
    cut, strategy = "2 ranks x 8", WithEngine()
    model = fitted(fitkit.Model(made(Tagger)), (x, y), cut, loss="cross_entropy", strategy=strategy)
    assert apart(model.net, wanted) < 1e-12


@pytest.mark.slow
def test_three_ranks_with_uneven_rows():
    x, y = tokens()
    x, y = x[:37], y[:37]  # 12, 12, 12 and 1
    net = made(Tagger)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    for start in (0, 36):
        optimizer.zero_grad()
        F.cross_entropy(net(x[start : start + 36]), y[start : start + 36]).backward()
        optimizer.step()
    model = fitkit.Model(made(Tagger))
    model.compile(
        sgd, "cross_entropy", learning_rate=0.5, precision="64-true", accelerator="cpu",
        devices=3,
    )  # fmt: skip
    history = model.fit(x, y, batch_size=12, shuffle=False, verbose=0)
    assert apart(model.net, net) < 1e-12
    assert history.history["loss"][0] > 0


def test_a_part_in_which_nothing_counts_changes_nothing():
    x, y = tokens()
    y[:8] = IGNORED
    wanted = copy.deepcopy(made(Tagger))
    F.cross_entropy(wanted(x[:16]), y[:16]).backward()
    for devices, accumulate in ((2, 1), (1, 2)):
        model = fitkit.Model(made(Tagger))
        model.compile(
            sgd, "cross_entropy", learning_rate=1.0, precision="64-true",
            accelerator="cpu", devices=devices, accumulate_grad_batches=accumulate,
        )  # fmt: skip
        history = model.fit(x[:16], y[:16], batch_size=8, shuffle=False, verbose=0)
        for found, plain, before in zip(
            model.net.cpu().parameters(),
            wanted.parameters(),
            made(Tagger).parameters(),
            strict=True,
        ):
            assert float((found - (before - plain.grad)).detach().abs().max()) < 1e-12
        loss = float(F.cross_entropy(made(Tagger)(x[8:16]), y[8:16]))
        assert history.history["loss"] == [pytest.approx(loss, rel=1e-12)]


@pytest.mark.parametrize("strategy", ["ddp_spawn", *STRATEGIES])
def test_a_step_that_divides_by_0_on_one_rank(strategy):
    x, y = (part[:16] for part in tokens())
    y[:8] = IGNORED
    wanted = made(Tagger)
    F.cross_entropy(wanted(x), y).backward()
    torch.optim.SGD(wanted.parameters(), lr=1.0).step()
    model = OwnStep(made(Tagger))
    model.compile(
        torch.optim.SGD, learning_rate=1.0, precision="64-true", accelerator="cpu", devices=2,
        strategy=OBJECTS.get(strategy, strategy),
    )  # fmt: skip
    size = STRATEGIES.get(strategy, 8)
    history = model.fit(x, y, batch_size=size, shuffle=False, verbose=0).history
    assert apart(model.net, wanted) < 1e-12
    assert history["loss"] == [pytest.approx(float(F.cross_entropy(made(Tagger)(x), y)))]


@pytest.mark.parametrize("size", [1, 4, 8, 16, 96])
@pytest.mark.parametrize("devices", [1, 2])
def test_evaluate_gives_one_number_for_every_batch_size(size, devices):
    x, y = tokens()
    size_of = x.mean((1, 2)).unsqueeze(1)
    net, heads = made(Tagger), made(TwoHeads)
    with torch.no_grad():
        found = heads(x)
        both = F.cross_entropy(found["tag"], y) + 3 * F.mse_loss(found["size"], size_of)
        wanted = float(F.cross_entropy(net(x), y)), float(both)
    model, two = fitkit.Model(net), fitkit.Model(heads)
    hardware = {"precision": "64-true", "accelerator": "cpu", "devices": devices}
    model.compile("sgd", "cross_entropy", **hardware)
    two.compile(
        "sgd", {"tag": "cross_entropy", "size": "mse"}, loss_weights={"tag": 1.0, "size": 3.0},
        **hardware,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(Rows(lambda *row: row, x, y), size)
    for source in ((x, y), (loader,)):
        options = {"batch_size": size} if len(source) == 2 else {}
        assert model.evaluate(*source, **options, verbose=0) == pytest.approx(wanted[0], rel=1e-12)
    targets = {"tag": y, "size": size_of}
    scores = two.evaluate(x, targets, batch_size=size, verbose=0, return_dict=True)
    assert scores["loss"] == pytest.approx(wanted[1], rel=1e-12)


class SaysItsSum(LanguageModel):
    """Gives its loss alone, and its sum where it is asked for."""

    def forward(self, x, labels=None, num_items_in_batch=None):
        logits = self.head(self.body(x))
        scores, wanted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = F.cross_entropy(scores, wanted, reduction="sum")
        return {"loss": loss / (num_items_in_batch or (wanted != IGNORED).sum())}


@pytest.mark.parametrize("cut", ["4 x 4", "2 ranks x 8"])
def test_a_net_that_takes_the_number_of_items(cut):
    x, y = tokens()
    y[:, 1] = y[:, 0]
    wanted = reference(made(SaysItsSum), lambda net, x, y: net(x, y)["loss"], (x, y))
    model = fitted(fitkit.Model(made(SaysItsSum)), (x, y), cut, lambda x, y: {"x": x, "labels": y})
    assert apart(model.net, wanted) < 1e-12


def test_a_divisor_that_nobody_can_know_is_warned_of_once():
    x, y = tokens()
    model = fitkit.Model(made(Tagger))
    model.compile("sgd", lambda p, t: F.cross_entropy(p, t), precision="64-true")
    with pytest.warns(UserWarning, match=r"one number for a batch that has labels of -100"):
        model.fit(x, y, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(x, y, verbose=0)
        model.evaluate(x, y, verbose=0)


class Uncertain(nn.Module):
    """Weighs two losses by what it has learned of their noise (Kendall et al., 2018)."""

    def __init__(self):
        super().__init__()
        self.noise = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, found, target):
        tag = F.cross_entropy(found["tag"][..., 0], target["tag"][..., 0])
        size = F.mse_loss(found["size"], target["size"])
        return (torch.stack([tag, size]) * torch.exp(-self.noise) + self.noise).sum()


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_sharded", "dp"])
def test_a_losss_own_parameters_are_averaged_over_the_ranks(strategy):
    x, y = tokens()
    size = x.mean((1, 2)).unsqueeze(1)
    y[:, 0] = y[:, 0].abs() % CLASSES
    wanted, loss = made(TwoHeads), Uncertain()
    optimizer = torch.optim.SGD([*wanted.parameters(), *loss.parameters()], lr=0.2)
    for start in range(0, 96, 16):
        rows = slice(start, start + 16)
        optimizer.zero_grad()
        loss(wanted(x[rows]), {"tag": y[rows], "size": size[rows]}).backward()
        optimizer.step()
    found = Uncertain()
    model = fitkit.Model(made(TwoHeads))
    model.compile(
        torch.optim.SGD, found, learning_rate=0.2, precision="64-true", accelerator="cpu",
        devices=2, strategy=strategy,
    )  # fmt: skip
    rows = 16 if strategy == "dp" else 8
    model.fit(x, {"tag": y, "size": size}, batch_size=rows, shuffle=False, verbose=0)
    assert apart(model.net, wanted) < 1e-12
    assert apart(found, loss) < 1e-12


@pytest.mark.parametrize("cut", ["1 x 16", "4 x 4", "2 ranks x 8", "2 ranks x 2 x 4"])
def test_half_precision_weighs_alike(cut):
    x, y = (part.float() if part.is_floating_point() else part for part in tokens())
    wanted = reference(made(Tagger).float(), lambda n, x, y: F.cross_entropy(n(x), y), (x, y), 0.5)
    devices, accumulate, size = CUTS[cut]
    model = fitkit.Model(made(Tagger).float())
    model.compile(
        sgd, "cross_entropy", learning_rate=0.5, precision="16-mixed", accelerator="cpu",
        devices=devices, accumulate_grad_batches=accumulate, gradient_clip_val=0.5,
    )  # fmt: skip
    steps = UPDATES * 16 // size // devices
    model.fit(x, y, batch_size=size, shuffle=False, steps_per_epoch=steps, verbose=0)
    assert apart(model.net, wanted) < 2e-3  # float16 has three digits; by samples it is 0.1


def test_a_validation_step_says_what_its_mean_is_taken_over():
    class Validated(OwnStep):
        def validation_step(self, batch, batch_idx):
            return OwnStep.training_step(self, batch, batch_idx)

    x, y = tokens()
    model = Validated(made(Tagger))
    model.compile("sgd", learning_rate=0.0, precision="64-true", accelerator="cpu")
    history = model.fit(x, y, batch_size=7, validation_data=(x, y), shuffle=False, verbose=0)
    whole = float(F.cross_entropy(model.net.cpu()(x), y))
    assert history.history["val_loss"] == [pytest.approx(whole, rel=1e-12)]
    assert history.history["loss"] == [pytest.approx(whole, rel=1e-12)]


@pytest.mark.parametrize("count", [-1, float("nan"), "3", True, torch.ones(2)])
def test_a_count_that_is_none_is_refused(count):
    class Miscounting(fitkit.Model):
        def training_step(self, batch, batch_idx):
            return {"loss": self(batch[0]).mean(), "count": count}

    model = Miscounting(made(Tagger))
    model.compile("sgd", precision="64-true", accelerator="cpu")
    with pytest.raises(fitkit.ConfigurationError, match="training_step returned 'count'="):
        model.fit(*tokens(), verbose=0)
