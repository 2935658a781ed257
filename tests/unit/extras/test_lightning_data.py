"""Data modules of Lightning are data of `fit`, `evaluate` and `predict`, on ranks too."""

import copy

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit.extras.launchers.workers import end_workers
from fitkit.extras.lightning_data import training_data, validation_data

pl = pytest.importorskip("lightning.pytorch")

ROWS = 64


def points(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def word(stage):
    """A stage's name, of which Lightning has an enum."""
    return getattr(stage, "value", stage)


class Module(pl.LightningDataModule):
    """Serves points, and notes the hooks that are called."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(f"setup {word(stage)}")
        self.train, self.val = points(ROWS, 0), points(20, 1)

    def train_dataloader(self):
        self.calls.append("train_dataloader")
        return DataLoader(self.train, batch_size=8)

    def val_dataloader(self):
        self.calls.append("val_dataloader")
        return DataLoader(self.val, batch_size=8)

    def teardown(self, stage):
        self.calls.append(f"teardown {word(stage)}")

    def on_exception(self, exception):
        self.calls.append(f"exception {type(exception).__name__}")


class Scaling(Module):
    """Doubles the inputs on their way, and moves them by its own hook."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {"x": batch[0], "y": batch[1]}

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return {name: value.to(device) for name, value in batch.items()}

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return 2 * batch["x"], batch["y"]


def model(devices=1, **options):
    torch.manual_seed(0)
    made = fitkit.Model(torch.nn.Linear(4, 1))
    made.compile("sgd", "mse", learning_rate=0.05, accelerator="cpu", devices=devices, **options)
    return made


def loop(net, sets, epochs=2, scale=1.0, size=8):
    """Plain updates over a set's rows in their order; the mean loss of each epoch."""
    net = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    x, y = sets.tensors
    losses = []
    for _ in range(epochs):
        total = 0.0
        for start in range(0, len(x), size):
            part = slice(start, start + size)
            loss = (net(scale * x[part]) - y[part]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x[part])
        losses.append(total / len(x))
    return net, losses


def mean_loss(net, sets, scale=1.0):
    x, y = sets.tensors
    return (net(scale * x) - y).square().mean().item()


@pytest.fixture(scope="module")
def workers():
    yield
    end_workers()


def test_fit_calls_the_hooks_in_lightnings_order_and_trains_on_the_loader():
    ours, data = model(), Module()
    expected, losses = loop(ours.net, points(ROWS, 0))
    history = ours.fit(data, epochs=2, verbose=0)
    assert data.calls == [
        "prepare_data", "setup fit", "train_dataloader", "val_dataloader", "teardown fit"
    ]  # fmt: skip
    torch.testing.assert_close(ours.net.weight, expected.weight, atol=1e-7, rtol=0)
    assert history.history["loss"] == pytest.approx(losses, abs=1e-6)
    assert history.history["val_loss"][-1] == pytest.approx(
        mean_loss(expected, points(20, 1)), abs=1e-6
    )


def test_two_ranks_train_as_one(workers):
    one, two = model(effective_batch_size=16), model(devices=2)
    one.fit(DataLoader(points(ROWS, 0), batch_size=16), epochs=2, verbose=0)
    history = two.fit(Module(), epochs=2, verbose=0)
    torch.testing.assert_close(one.net.weight, two.net.weight, atol=1e-6, rtol=0)
    assert history.history["val_loss"][-1] == pytest.approx(
        mean_loss(one.net, points(20, 1)), abs=1e-6
    )
    assert two.evaluate(Scaling(), verbose=0) == pytest.approx(
        mean_loss(one.net, points(20, 1), scale=2), abs=1e-5
    )


@pytest.mark.parametrize("devices", [1, 2])
def test_batches_go_through_the_data_modules_hooks(devices, workers):
    ours = model(devices)
    expected, _ = loop(ours.net, points(ROWS, 0), scale=2, size=8 * devices)
    history = ours.fit(Scaling(), epochs=2, verbose=0)
    torch.testing.assert_close(ours.net.weight, expected.weight, atol=1e-6, rtol=0)
    assert history.history["val_loss"][-1] == pytest.approx(
        mean_loss(expected, points(20, 1), scale=2), abs=1e-6
    )
    # The model's own batches are as they were.
    assert ours.evaluate(*points(20, 1).tensors, verbose=0) == pytest.approx(
        mean_loss(expected, points(20, 1)), abs=1e-6
    )


def test_own_steps_get_batches_from_the_data_modules_hooks():
    class Own(fitkit.Model):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return (self(x) - y).square().mean()

        validation_step = training_step

    torch.manual_seed(0)
    ours = Own(torch.nn.Linear(4, 1))
    ours.compile("sgd", learning_rate=0.05, accelerator="cpu")
    expected, _ = loop(ours.net, points(ROWS, 0), scale=2)
    ours.fit(Scaling(), epochs=2, verbose=0)
    torch.testing.assert_close(ours.net.weight, expected.weight, atol=1e-7, rtol=0)


def test_evaluate_reads_the_test_loader_and_else_the_validation_loader():
    class Tested(Module):
        def test_dataloader(self):
            return [DataLoader(points(12, 2), batch_size=8)]

    ours, plain, tested = model(), Module(), Tested()
    assert ours.evaluate(plain, verbose=0) == pytest.approx(mean_loss(ours.net, points(20, 1)))
    assert plain.calls == ["prepare_data", "setup validate", "val_dataloader", "teardown validate"]
    assert ours.evaluate(tested, verbose=0) == pytest.approx(mean_loss(ours.net, points(12, 2)))
    assert tested.calls == ["prepare_data", "setup test", "teardown test"]


def test_predict_reads_the_predict_loader():
    class Predicted(Module):
        predict_dataloader = Module.val_dataloader

    ours, data = model(), Predicted()
    x = points(20, 1).tensors[0]
    np.testing.assert_allclose(
        ours.predict(data, verbose=0), ours.net(x).detach().numpy(), atol=1e-6
    )
    assert data.calls == ["prepare_data", "setup predict", "val_dataloader", "teardown predict"]
    batches = list(ours.predict_batches(Predicted(), verbose=0))
    assert [len(batch) for batch in batches] == [8, 8, 4]


def test_loaders_from_data_sets_are_found_on_the_object():
    ours = model()
    data = pl.LightningDataModule.from_datasets(points(ROWS, 0), points(20, 1), batch_size=8)
    history = ours.fit(data, verbose=0)
    assert set(history.history) == {"loss", "val_loss"}


def test_several_loaders_to_validate_on_are_several_sets():
    class Several(Module):
        def val_dataloader(self):
            return [DataLoader(points(20, seed), batch_size=8) for seed in (1, 2)]

    ours = model()
    logs = ours.fit(Several(), verbose=0).history
    for number in (0, 1):
        expected = mean_loss(ours.net, points(20, number + 1))
        assert logs[f"val_dataloader_idx_{number}_loss"] == [pytest.approx(expected, abs=1e-6)]


def test_several_loaders_to_train_on_are_read_together():
    short, long = [torch.zeros(1)], [torch.ones(1), torch.ones(1)]
    pairs = list(training_data([short, long]))
    assert [float(first) + 2 * float(second) for first, second in pairs] == [2.0, 2.0]
    together = pl.utilities.CombinedLoader({"a": short, "b": long}, "min_size")
    assert [sorted(batch) for batch in training_data(together)] == [["a", "b"]]
    assert training_data([long]) is long
    assert validation_data([]) is None and validation_data({"day": long}) == {"day": long}


@pytest.mark.parametrize("verb", ["predict", "evaluate"])
def test_what_a_verb_lacks_or_has_too_much_of_is_named(verb):
    class Two(Module):
        def test_dataloader(self):
            return [[torch.ones(1, 4)], [torch.ones(1, 4)]]

    with pytest.raises(fitkit.errors.ConfigurationError, match="FK090"):
        getattr(model(), verb)(Two(), verbose=0)


def test_a_data_module_without_a_train_loader_is_refused():
    with pytest.raises(fitkit.errors.ConfigurationError, match="FK090"):
        model().fit(pl.LightningDataModule(), verbose=0)


def test_an_error_reaches_the_data_module():
    class Broken(fitkit.Model):
        def training_step(self, batch, batch_idx):
            raise KeyError("broken")

    data = Module()
    ours = Broken(torch.nn.Linear(4, 1))
    ours.compile("sgd", accelerator="cpu", devices=1)
    with pytest.raises(KeyError):
        ours.fit(data, verbose=0)
    assert data.calls[-1] == "exception KeyError"


def test_a_files_state_is_there_before_the_loaders_are_made(tmp_path):
    class Counting(Module):
        served = 0

        def train_dataloader(self):
            self.served += 1
            self.calls.append(f"served {self.served}")
            return super().train_dataloader()

        def state_dict(self):
            return {"served": self.served}

        def load_state_dict(self, state):
            self.served = state["served"]

    path = tmp_path / "last.h5"
    saving = fitkit.callbacks.ModelCheckpoint(path)
    model().fit(Counting(), epochs=1, verbose=0, callbacks=saving)
    data = Counting()
    ours = model()
    ours.fit(data, epochs=2, verbose=0, resume_from=path)
    assert "served 2" in data.calls
    whole = model()
    whole.fit(Counting(), epochs=2, verbose=0)
    assert torch.equal(whole.net.weight, ours.net.weight)


def test_the_data_module_knows_its_trainer():
    seen = []

    class Asking(Module):
        def setup(self, stage):
            super().setup(stage)
            seen.append((self.trainer.global_rank, self.trainer.world_size))

    model().fit(Asking(), verbose=0)
    assert seen == [(0, 1)]


def test_torchs_own_data_sets_in_lightnings_package_stay_data_sets():
    from lightning.pytorch.demos.boring_classes import RandomDataset

    rows = RandomDataset(4, 16)
    made = fitkit.Model(torch.nn.Linear(4, 1))
    made.compile(accelerator="cpu", devices=1)
    assert made.predict(rows, verbose=0).shape == (16, 1)


# ---------------------------------------------------------------------- beside a LightningModule


class Net(pl.LightningModule):
    """A module that notes its hooks in the list of its data module."""

    def __init__(self, calls):
        super().__init__()
        self.net, self.calls = torch.nn.Linear(4, 1), calls
        self.seen = []

    def note(self, name, stage=""):
        self.calls.append(f"module {name} {word(stage)}".rstrip())

    def prepare_data(self):
        self.note("prepare_data")

    def setup(self, stage):
        self.note("setup", stage)

    def configure_callbacks(self):
        self.note("configure_callbacks")
        return []

    def configure_optimizers(self):
        self.note("configure_optimizers")
        return torch.optim.SGD(self.parameters(), 0.05)

    def on_fit_end(self):
        self.note("on_fit_end")

    def teardown(self, stage):
        self.note("teardown", stage)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self.net(x) - y).square().mean()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", (self.net(x) - y).square().mean())

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append(float(batch[0].sum()))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x + 1, y


class Moving(Module):
    """Moves batches by its own hook, and leaves what follows to the module."""

    predict_dataloader = Module.val_dataloader

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        x, y = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return 2 * x, y


QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def nets():
    for data in (Moving(), Moving()):
        torch.manual_seed(0)
        yield Net(data.calls), data


def test_the_hooks_of_both_come_in_lightnings_order_with_its_numbers():
    (theirs, their_data), (ours, our_data) = nets()
    trainer = pl.Trainer(max_epochs=2, **QUIET)
    trainer.fit(theirs, datamodule=their_data)
    model = fitkit.Model(ours)
    model.compile(accelerator="cpu", devices=1)
    history = model.fit(our_data, epochs=2, verbose=0)

    def hooks(calls):
        # fitkit has the loaders before the optimizers, Lightning after them.
        return [call for call in calls if not call.endswith(("loader", "optimizers"))]

    assert hooks(ours.calls) == hooks(theirs.calls)
    assert sorted(ours.calls) == sorted(theirs.calls)
    assert ours.seen == theirs.seen
    assert torch.equal(ours.net.weight, theirs.net.weight)
    expected = float(trainer.callback_metrics["val_loss"])
    assert history.history["val_loss"][-1] == pytest.approx(expected, abs=1e-6)
    assert ours.trainer.datamodule is our_data and our_data.trainer is ours.trainer


@pytest.mark.parametrize(("verb", "theirs"), [("evaluate", "validate"), ("predict", "predict")])
def test_other_verbs_read_the_loader_of_their_stage(verb, theirs):
    (one, first), (two, second) = nets()
    expected = getattr(pl.Trainer(**QUIET), theirs)(one, datamodule=first)
    model = fitkit.Model(two)
    model.compile(accelerator="cpu", devices=1)
    if verb == "evaluate":
        found = model.evaluate(second, verbose=0, return_dict=True)
        assert found["val_loss"] == pytest.approx(expected[0]["val_loss"], abs=1e-6)
    else:
        np.testing.assert_array_equal(model.predict(second, verbose=0), torch.cat(expected))
    assert two.calls == one.calls


def test_two_processes_train_a_module_on_a_data_module_as_one(workers):
    class Wide(Moving):
        def train_dataloader(self):
            return DataLoader(self.train, batch_size=16)

    torch.manual_seed(0)
    one = Net([])
    model = fitkit.Model(one)
    model.compile(accelerator="cpu", devices=1)
    expected = model.fit(Wide(), epochs=2, verbose=0).history
    torch.manual_seed(0)
    two = Net([])
    model = fitkit.Model(two)
    model.compile(accelerator="cpu", devices=2)
    found = model.fit(Moving(), epochs=2, verbose=0).history
    torch.testing.assert_close(two.net.weight, one.net.weight, atol=1e-6, rtol=0)
    assert found["val_loss"] == pytest.approx(expected["val_loss"], abs=1e-6)


def test_a_module_that_validates_nothing_leaves_the_validation_loader_alone():
    class Training(Net):
        validation_step = pl.LightningModule.validation_step

    data = Moving()
    model = fitkit.Model(Training([]))
    model.compile(accelerator="cpu", devices=1)
    assert set(model.fit(data, verbose=0).history) == {"loss"}
    assert "val_dataloader" not in data.calls


def test_the_data_modules_validation_loader_goes_before_the_modules():
    class Both(Net):
        def val_dataloader(self):
            raise AssertionError("not this one")

    model = fitkit.Model(Both([]))
    model.compile(accelerator="cpu", devices=1)
    assert "val_loss" in model.fit(Moving(), verbose=0).history
