"""Training that was cut and goes on, against the same training in one go: bit for bit."""

import contextlib
import copy

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

import fitkit
from tests.nets import classes_in_turn
from tests.reference import assert_same_weights

X, Y = classes_in_turn(50, 4)


class Rows(Dataset):
    """Rows with noise drawn where they are read."""

    def __init__(self, noisy=False):
        self.noisy = noisy

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index] + (torch.randn(4) if self.noisy else 0), Y[index]


DATA = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 8},
    "arrays in order": lambda: {"x": X, "y": Y, "batch_size": 8, "shuffle": False},
    "loader": lambda: {"x": DataLoader(TensorDataset(X, Y), 8, shuffle=True)},
    "noisy loader": lambda: {"x": DataLoader(Rows(noisy=True), 8, shuffle=True)},
    "loader with workers": lambda: {"x": DataLoader(Rows(), 8, shuffle=True, num_workers=2)},
    "loader with its own generator": lambda: {"x": DataLoader(
        Rows(), 8, shuffle=True, generator=torch.Generator().manual_seed(3))},
    "weighted sampler": lambda: {"x": DataLoader(
        Rows(), 8, sampler=WeightedRandomSampler(torch.arange(50.0), 40))},
    "list of batches": lambda: {"x": list(zip(X.split(8), Y.split(8), strict=True))},
    "cut from a stream": lambda: {
        "x": DataLoader(TensorDataset(X, Y), 8, shuffle=True), "steps_per_epoch": 5},
    "arrays cut from a stream": lambda: {"x": X, "y": Y, "batch_size": 8, "steps_per_epoch": 10},
}  # fmt: skip

OPTIONS = {
    "adam": {"optimizer": "adam", "learning_rate": 0.01},
    "momentum and cosine": {"optimizer": lambda p: torch.optim.SGD(p, 0.1, 0.9),
                            "lr_scheduler": "cosine"},
    "one cycle, clipped": {"optimizer": "adamw", "lr_scheduler": "one_cycle",
                           "gradient_clip_val": 0.1},
    "accumulating": {"optimizer": "adam", "accumulate_grad_batches": 2},
    "warm-up": {"optimizer": "adam", "warmup_epochs": 1.7,
                "lr_scheduler": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)},
    "scaled losses": {"optimizer": "adam", "precision": "16-mixed"},
    "bf16 weights": {"optimizer": "adam", "precision": "bf16-true"},
    "replicas": {"optimizer": "sgd", "strategy": "dp", "accelerator": "cpu", "devices": 1},
    "plateau": {"optimizer": "sgd", "learning_rate": 0.1, "lr_scheduler":
                lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0)},
}  # fmt: skip


class Cut(fitkit.callbacks.Callback):
    """Saves at a moment, and then ends the run."""

    def __init__(self, path, epoch, batch=None, kill=True):
        self.path, self.moment, self.kill = path, (epoch, batch), kill

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs):
        if (self.epoch, batch) == self.moment:
            self.save()

    def on_epoch_end(self, epoch, logs):
        if (epoch, None) == self.moment:
            self.save()

    def save(self):
        self.model.save(self.path)
        if self.kill:
            raise KeyboardInterrupt


def model_for(options, loss="cross_entropy"):
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    )
    model = fitkit.Model(net)
    f1 = torchmetrics.F1Score("multiclass", num_classes=3)
    model.compile(loss=loss, metrics=["accuracy", f1], **options)
    return model


def check_resumes(tmp_path, data, options, moment, epochs=4, *, copies=False):
    path = tmp_path / "cut.h5"
    rest = {"epochs": epochs, "verbose": 0, "validation_data": (X, Y)}
    whole = model_for(options)
    torch.manual_seed(2)
    expected = whole.fit(**data(), **rest, callbacks=Cut(path, *moment, kill=False)).history
    cut = model_for(options)
    torch.manual_seed(2)
    with pytest.raises(KeyboardInterrupt):
        cut.fit(**data(), **rest, callbacks=Cut(path, *moment))
    if copies:
        copied = model_for(options)
        copied.load(path)
        copied.save(path)
    torch.manual_seed(99)
    resumed = model_for(options)
    history = resumed.fit(**data(), **rest, resume_from=path).history
    for (name, found), wanted in zip(
        resumed.state_dict().items(), whole.state_dict().values(), strict=True
    ):
        assert torch.equal(found, wanted), name
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        assert history[name] == pytest.approx(values, rel=1e-12), name
    assert resumed.global_step == whole.global_step
    rates = [model.optimizer.param_groups[0]["lr"] for model in (resumed, whole)]
    assert rates[0] == rates[1]


@pytest.mark.parametrize("data", DATA, ids=str)
def test_any_data_go_on_where_they_were(tmp_path, data):
    check_resumes(tmp_path, DATA[data], OPTIONS["adam"], (2, 1))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_anything_compiled_goes_on_as_it_was(tmp_path, options):
    moment = [(0, None), (1, 3)][list(OPTIONS).index(options) % 2]  # an epoch's end, or within
    check_resumes(tmp_path, DATA["loader"], OPTIONS[options], moment)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_file_that_was_loaded_and_saved_goes_on_as_well(tmp_path, options):
    check_resumes(tmp_path, DATA["arrays"], options, (2, 1), copies=True)


def test_a_save_before_the_rest_of_a_cut_epoch_has_what_the_epoch_noted(tmp_path):
    path, data = tmp_path / "cut.h5", {"x": X, "y": Y, "batch_size": 8, "epochs": 3, "verbose": 0}
    with pytest.raises(KeyboardInterrupt):
        model_for(OPTIONS["adam"]).fit(**data, callbacks=Cut(path, 1, 2))
    saves = fitkit.callbacks.LambdaCallback(on_train_begin=lambda logs: one.save(path))
    one, other = model_for(OPTIONS["adam"]), model_for(OPTIONS["adam"])
    one.net[3].p = other.net[3].p = 0.0
    values = one.fit(**data, resume_from=path, callbacks=saves).history["loss"]
    assert other.fit(**data, resume_from=path).history["loss"][-2:] == values[-2:]


def test_an_epoch_may_be_cut_twice(tmp_path):
    path, again = tmp_path / "a.h5", tmp_path / "b.h5"
    data, rest = DATA["loader"](), {"epochs": 2, "verbose": 0}
    whole = model_for(OPTIONS["adam"])
    torch.manual_seed(2)
    expected = whole.fit(**data, **rest).history
    for resume_from, cut in ((None, Cut(path, 1, 1)), (path, Cut(again, 1, 3))):
        model = model_for(OPTIONS["adam"])
        torch.manual_seed(2)
        with pytest.raises(KeyboardInterrupt):
            model.fit(**data, **rest, callbacks=cut, resume_from=resume_from)
    model = model_for(OPTIONS["adam"])
    history = model.fit(**data, **rest, resume_from=again).history
    assert torch.equal(model.net[0].weight, whole.net[0].weight)
    assert history["accuracy"] == pytest.approx(expected["accuracy"])


@pytest.mark.parametrize("data", ["arrays", "loader"])
def test_an_epoch_cut_after_its_last_batch_keeps_its_metrics(tmp_path, data):
    check_resumes(tmp_path, DATA[data], OPTIONS["adam"], (1, 6))


class SaveBefore(fitkit.callbacks.Callback):
    """Saves before a batch, and has no hook that is called after one."""

    def __init__(self, path, batch=3):
        self.path, self.batch = path, batch

    def on_train_batch_begin(self, batch, logs=None):
        if self.model.current_epoch == 1 and batch == self.batch:
            self.model.save(self.path)


class SaveAtError(fitkit.callbacks.Callback):
    """Saves when the training fails, and has no other hook."""

    def __init__(self, path):
        self.path = path

    def on_exception(self, error):
        self.model.save(self.path)


class FailsAt(Dataset):
    """Rows in which one can't be read in its second pass."""

    def __init__(self, fails):
        self.fails, self.seen = fails, 0

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        self.seen += index == 30
        if self.fails and index == 30 and self.seen == 2:
            raise KeyboardInterrupt
        return X[index], Y[index]


def saved_on_exception(path):
    return fitkit.callbacks.ModelCheckpoint(path.parent / "best.h5", save_on_exception=True)


@pytest.mark.parametrize("kind", [SaveBefore, SaveAtError, saved_on_exception])
def test_a_save_in_a_hook_before_a_batch_or_at_an_error_says_where_it_is(tmp_path, kind):
    path = tmp_path / ("exception.h5" if kind is saved_on_exception else "cut.h5")
    whole = model_for(OPTIONS["adam"])
    torch.manual_seed(2)
    whole.fit(DataLoader(FailsAt(fails=False), 8), epochs=3, verbose=0)
    cut = model_for(OPTIONS["adam"])
    torch.manual_seed(2)
    with contextlib.suppress(KeyboardInterrupt):
        rows = FailsAt(fails=kind is not SaveBefore)
        cut.fit(DataLoader(rows, 8), epochs=3, verbose=0, callbacks=kind(path))
    resumed = model_for(OPTIONS["adam"])
    resumed.fit(DataLoader(FailsAt(fails=False), 8), epochs=3, verbose=0, resume_from=path)
    assert_same_weights(whole, resumed)
    assert resumed.global_step == whole.global_step == 21


def test_saving_in_a_group_of_batches_is_refused(tmp_path):
    model = model_for(OPTIONS["accumulating"])
    with pytest.raises(fitkit.ConfigurationError, match="within an update"):
        model.fit(X, Y, batch_size=8, verbose=0, callbacks=Cut(tmp_path / "a.h5", 0, 2))


@pytest.mark.parametrize(
    "change", [{"batch_size": 16}, {"shuffle": False}, {"x": X[:40], "y": Y[:40]}]
)
def test_other_data_within_an_epoch_are_refused(tmp_path, change):
    path, data = tmp_path / "a.h5", {"x": X, "y": Y, "batch_size": 8, "verbose": 0}
    with pytest.raises(KeyboardInterrupt):
        model_for(OPTIONS["adam"]).fit(**data, callbacks=Cut(path, 0, 2))
    with pytest.raises(fitkit.ConfigurationError, match="FK058"):
        model_for(OPTIONS["adam"]).fit(**{**data, **change}, resume_from=path)


def test_skipped_batches_are_not_loaded(tmp_path):
    loaded = []

    class Watched(Rows):
        def __getitem__(self, index):
            loaded.append(index)
            return super().__getitem__(index)

    model = model_for(OPTIONS["adam"])
    loader = DataLoader(Watched(), 10, shuffle=True)
    with pytest.raises(KeyboardInterrupt):
        model.fit(loader, verbose=0, callbacks=Cut(tmp_path / "cut.h5", 0, 2))
    assert len(loaded) == 30
    model.fit(loader, verbose=0, resume_from=tmp_path / "cut.h5")
    assert sorted(loaded) == list(range(50))


def test_own_steps_with_two_optimizers_go_on(tmp_path):
    class Pair(fitkit.Model):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

        def configure_optimizers(self):
            both = [torch.optim.Adam(layer.parameters()) for layer in (self.a, self.b)]
            return both, [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in both]

        def training_step(self, batch, batch_idx, optimizer_idx):
            loss = self.b(self.a(batch[0])).mean()
            self.log("signed", loss * (1 - 2 * optimizer_idx))
            return loss * (1 - 2 * optimizer_idx)

    runs = {}
    for kind in ("whole", "cut"):
        torch.manual_seed(2)
        runs[kind] = model = Pair()
        cut = Cut(tmp_path / "cut.h5", 1, 2, kill=kind == "cut")
        try:
            model.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=cut)
        except KeyboardInterrupt:
            runs[kind] = model = Pair()
            model.fit(X, Y, batch_size=8, epochs=3, verbose=0, resume_from=tmp_path / "cut.h5")
    assert torch.equal(runs["cut"].a.weight, runs["whole"].a.weight)
    assert runs["cut"].history.history["signed"] == pytest.approx(
        runs["whole"].history.history["signed"], rel=1e-9
    )


def test_a_saved_model_continues_after_a_finished_fit(tmp_path):
    straight, first = (model_for(OPTIONS["momentum and cosine"]) for _ in range(2))
    for model in (straight, first):
        torch.manual_seed(2)
        model.fit(X, Y, epochs=2, verbose=0)
    first.save(tmp_path / "a.h5")
    history = straight.fit(X, Y, epochs=2, verbose=0, resume_from=tmp_path / "a.h5")
    assert history.epoch == [0, 1]  # nothing is left to do
    loaded = model_for(OPTIONS["momentum and cosine"])
    loaded.load(tmp_path / "a.h5")
    for model in (straight, loaded):
        torch.manual_seed(3)
        model.fit(X, Y, epochs=1, verbose=0)
    assert torch.equal(loaded.net[0].weight, straight.net[0].weight)


def test_load_model_compiles_by_names_and_says_what_has_none(tmp_path):
    net = nn.Linear(4, 3)
    model = fitkit.Model(net)
    model.compile("sgd", "cross_entropy", ["accuracy"], learning_rate=0.3)
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "named.h5")
    twin = fitkit.load_model(tmp_path / "named.h5", nn.Linear(4, 3))
    assert twin.evaluate(X, Y, verbose=0) == model.evaluate(X, Y, verbose=0)
    assert twin.optimizer.param_groups[0]["lr"] == 0.3 and twin.global_step == 2
    model.compile(loss=nn.CrossEntropyLoss())
    model.save(tmp_path / "object.h5")
    with pytest.raises(fitkit.CheckpointError, match=r"loss.*model\.compile\(loss=…\)"):
        fitkit.load_model(tmp_path / "object.h5", nn.Linear(4, 3))


@pytest.mark.parametrize("change", ["optimizer", "net", "damage", "weights"])
def test_what_doesnt_fit_leaves_the_model_as_it_was(tmp_path, change):
    path = tmp_path / "a.h5"
    model = model_for({"optimizer": "adam"})
    model.fit(X, Y, verbose=0)
    model.save(path)
    other = model_for({"optimizer": "sgd" if change == "optimizer" else "adam"})
    if change == "net":
        other = fitkit.Model(nn.Linear(4, 3))
    elif change == "damage":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif change == "weights":
        other.save_weights(path)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(fitkit.CheckpointError):
        other.load(path)
    with pytest.raises(fitkit.CheckpointError):
        other.fit(X, Y, verbose=0, resume_from=path)
    assert_same_weights(other, before)
    assert other.global_step == 0 and not other._fitkit.fit_state.optimizers


def test_last_needs_somebody_who_saves():
    with pytest.raises(fitkit.ConfigurationError, match="ModelCheckpoint"):
        model_for({}).fit(X, Y, verbose=0, resume_from="last")
    with pytest.raises(FileNotFoundError):
        model_for({}).fit(X, Y, verbose=0, resume_from="nowhere.h5")


class Scaled(torch.nn.Module):
    """A loss that learns its scale."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(()))

    def forward(self, prediction, target):
        loss = torch.nn.functional.mse_loss(prediction, target)
        return loss * torch.exp(-self.a) + self.a


def test_a_losss_own_parameters_are_saved_and_go_on(tmp_path):
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))

    def made():
        torch.manual_seed(0)
        loss = Scaled()
        model = fitkit.Model(torch.nn.Linear(4, 4))
        model.compile("adam", loss, learning_rate=0.05)
        return model, loss

    def trained(model, epochs, **options):
        model.fit(x, x, batch_size=6, epochs=epochs, shuffle=False, verbose=0, **options)

    whole, its_loss = made()
    trained(whole, 4)
    half, half_loss = made()
    trained(half, 2)
    half.save(tmp_path / "half.h5")
    rest, rest_loss = made()
    rest.load(tmp_path / "half.h5")
    assert torch.equal(rest_loss.a, half_loss.a)
    resumed, resumed_loss = made()
    trained(resumed, 4, resume_from=tmp_path / "half.h5")
    assert torch.equal(resumed_loss.a, its_loss.a) and resumed_loss.a.item() != 0.0
    assert torch.equal(resumed.net.weight, whole.net.weight)
    other = fitkit.Model(torch.nn.Linear(4, 4))
    loss = Scaled()
    loss.b = torch.nn.Parameter(torch.ones(2))
    other.compile("adam", loss)
    with pytest.raises(fitkit.CheckpointError):
        other.load(tmp_path / "half.h5")
    assert loss.a.item() == 0.0


class Measures(fitkit.Model):
    """Logs a torchmetrics object, at each step and for the epoch."""

    def __init__(self):
        super().__init__()
        self.net, self.mae = nn.Linear(4, 1), torchmetrics.MeanAbsoluteError()

    def training_step(self, batch, batch_idx):
        predicted = self.net(batch[0])
        self.mae(predicted, batch[0][:, :1])
        self.log("mae", self.mae, on_step=True, on_epoch=True)
        return predicted.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_metric_objects_last_step_is_that_after_the_interruption(tmp_path):
    def fitted(**options):
        torch.manual_seed(0)
        model = Measures()
        model.compile(devices=1, accelerator="cpu")
        return model.fit(X, batch_size=16, epochs=1, verbose=0, **options).history

    saves = fitkit.callbacks.ModelCheckpoint(tmp_path / "{batch}.h5", save_freq=1)
    expected = fitted(callbacks=saves)
    found = fitted(resume_from=tmp_path / "2.h5")
    assert found["mae_step"] == expected["mae_step"]
    assert found["mae_epoch"] == pytest.approx(expected["mae_epoch"])


class Keeps(fitkit.callbacks.Callback):
    """Has a state, and refuses it if it is told so."""

    refuses = False

    def state_dict(self):
        return {"kept": 1}

    def load_state_dict(self, state):
        if self.refuses:
            raise KeyError("mine")


@pytest.mark.parametrize("compiled", [{}, {"devices": 2, "strategy": "ddp_spawn"}])
def test_a_callback_that_refuses_its_state_leaves_the_model_as_it_was(compiled, tmp_path):
    x, y = torch.randn(16, 3), torch.randn(16, 1)

    def model():
        torch.manual_seed(0)
        made = fitkit.Model(torch.nn.Linear(3, 1))
        made.compile("adam", "mse", accelerator="cpu", **compiled)
        made.fit(x, y, verbose=0)
        return made

    saves = fitkit.callbacks.ModelCheckpoint(tmp_path / "{epoch}.h5")
    model().fit(x, y, epochs=2, verbose=0, callbacks=[Keeps(), saves])
    found, expected = model(), model()
    history = found.history
    refusing = Keeps()
    refusing.refuses = True
    with pytest.raises(fitkit.errors.CheckpointError, match="mine"):
        found.fit(x, y, epochs=3, verbose=0, callbacks=refusing, resume_from=tmp_path / "2.h5")
    assert torch.equal(found.net.weight, expected.net.weight)
    assert (found.global_step, found.history) == (expected.global_step, history)
    for one in (found, expected):
        one.fit(x, y, epochs=2, shuffle=False, verbose=0)
    assert torch.equal(found.net.weight, expected.net.weight)
