"""Where a training that went on was not the one that was cut: each found by trying combinations."""

import contextlib
import itertools

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fitkit
from fitkit.callbacks import Callback
from fitkit.data.sources import without_first
from tests.nets import classes_in_turn
from tests.reference import assert_same_weights

X, Y = classes_in_turn(44, 4)


class Rows(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], Y[index]


class Cut(Callback):
    """Saves after a batch (None: after the epoch), and ends the run."""

    comes_last = True

    def __init__(self, path, epoch, batch):
        self.path, self.moment = path, (epoch, batch)

    def on_train_batch_end(self, batch, logs):
        self.cut((self.model.current_epoch, batch))

    def on_epoch_end(self, epoch, logs):
        self.cut((epoch, None))

    def cut(self, moment):
        if moment == self.moment:
            self.model.save(self.path)
            raise KeyboardInterrupt


def compiled(**options):
    torch.manual_seed(1)
    layers = nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)
    model = fitkit.Model(nn.Sequential(*layers))
    model.compile(
        **{
            "optimizer": "adam",
            "loss": "cross_entropy",
            "metrics": ["accuracy"],
            "accelerator": "cpu",
            **options,
        }
    )
    return model


def check_goes_on(tmp_path, data, moment, callbacks=list, **options):
    """A cut training's weights, rates and history are those of one that wasn't cut."""
    rest = {"epochs": 4, "verbose": 0}
    whole, cut, again = (compiled(**options) for _ in range(3))
    torch.manual_seed(2)
    expected = whole.fit(**data(), **rest, callbacks=callbacks()).history
    torch.manual_seed(2)
    with pytest.raises(KeyboardInterrupt):
        cut.fit(**data(), **rest, callbacks=[*callbacks(), Cut(tmp_path / "cut.h5", *moment)])
    torch.manual_seed(3)
    found = again.fit(
        **data(), **rest, callbacks=callbacks(), resume_from=tmp_path / "cut.h5"
    ).history
    assert_same_weights(again, whole)
    assert found == {name: pytest.approx(values, rel=1e-12) for name, values in expected.items()}
    rates = [model.optimizer.param_groups[0]["lr"] for model in (again, whole)]
    assert rates[0] == rates[1]


class CutInValidation(Callback):
    """Saves at the end of an epoch's validation, and ends the run."""

    def __init__(self, path, epoch):
        self.path, self.epoch = path, epoch

    def on_test_end(self, logs):
        if self.model.current_epoch == self.epoch:
            self.model.save(self.path)
            raise KeyboardInterrupt


def arrays():
    return {"x": X, "y": Y, "batch_size": 8}


@pytest.mark.parametrize("moment", [(1, None), (2, 1)], ids=["epoch's end", "mid-epoch"])
def test_float64_weights_keep_all_their_digits(tmp_path, moment):
    check_goes_on(tmp_path, arrays, moment, precision="64-true")


@pytest.mark.parametrize("moment", [(1, None), (2, 1)], ids=["epoch's end", "mid-epoch"])
def test_a_warm_up_that_is_over_leaves_the_scheduler_its_rates(tmp_path, moment):
    check_goes_on(tmp_path, arrays, moment, warmup_epochs=1.4, lr_scheduler="cosine")


class Halving(Callback):
    def on_epoch_begin(self, epoch, logs=None):
        for group in self.model.optimizer.param_groups:
            group["lr"] /= 2


def test_what_a_callback_does_to_the_rates_at_an_epochs_beginning_is_not_done_twice(tmp_path):
    check_goes_on(tmp_path, arrays, (1, 2), callbacks=lambda: [Halving()])


@pytest.mark.parametrize("moment", [(1, None), (2, 1)], ids=["epoch's end", "mid-epoch"])
def test_workers_that_live_on_change_no_order(tmp_path, moment):
    def data():
        own = torch.Generator().manual_seed(3)
        options = {"num_workers": 1, "persistent_workers": True}
        return {
            "x": DataLoader(Rows(), 8, shuffle=True, generator=own, **options),
            "validation_data": DataLoader(Rows(), 16, **options),
        }

    check_goes_on(tmp_path, data, moment)


def test_workers_that_live_on_give_the_order_of_those_that_begin_anew():
    def weights(**options):
        model = compiled()
        torch.manual_seed(2)
        loader = DataLoader(Rows(), 8, shuffle=True, num_workers=1, **options)
        model.fit(loader, epochs=3, verbose=0)
        return model.net[0].weight

    assert torch.equal(weights(persistent_workers=True), weights())


def test_workers_begun_before_the_training_do_not_decide_on_a_ranks_batches():
    from fitkit.data.loaders import GivenOrder, with_sampler

    loader = DataLoader(TensorDataset(X, Y), 8, num_workers=1, persistent_workers=True)
    next(iter(loader))
    (batch,) = with_sampler(loader, GivenOrder(iter([[3, 5]])))
    assert torch.equal(batch[0], X[[3, 5]])


class Stepwise:
    """Batches that are read on by their own state."""

    def __init__(self):
        self.done = 0

    def __iter__(self):
        while self.done < 6:
            self.done += 1
            yield X[self.done * 7 - 7 : self.done * 7], Y[self.done * 7 - 7 : self.done * 7]
        self.done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


@pytest.mark.parametrize("moment", [(1, 3), (2, 3)], ids=["in a pass", "at a pass's end"])
def test_a_cut_after_an_epochs_last_batch_loses_none_of_a_loader_with_a_state(tmp_path, moment):
    check_goes_on(tmp_path, lambda: {"x": Stepwise(), "steps_per_epoch": 4}, moment)


def test_a_cut_after_an_epochs_last_batch_loses_none_of_an_iterator(tmp_path):
    batches = list(zip(X.split(2), Y.split(2), strict=True))
    check_goes_on(tmp_path, lambda: {"x": iter(batches), "steps_per_epoch": 4}, (1, 3))


def test_more_batches_to_leave_out_than_there_are_take_no_time():
    assert list(without_first(iter([1, 2]), 1 << 60)) == []
    assert next(without_first(itertools.count(), 3)) == 3


class Refusing(nn.Module):
    """Takes its own extra state back at most once."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.refuses = False

    def forward(self, x):
        return self.layer(x)

    def get_extra_state(self):
        return {"some": 1}

    def set_extra_state(self, state):
        if self.refuses:
            raise OSError("not again")


def test_a_module_that_refuses_its_state_leaves_the_training_as_it_was(tmp_path):
    x, y = torch.randn(16, 4), torch.arange(16) % 3
    model = fitkit.Model(Refusing())
    model.compile("adam", "cross_entropy", accelerator="cpu", lr_scheduler="cosine")
    model.fit(x, y, batch_size=8, epochs=3, verbose=0)
    model.save(tmp_path / "a.h5")
    model.fit(x, y, batch_size=8, epochs=1, verbose=0)
    model.net.refuses = True
    optimizer = model._fitkit.fit_state.optimizers[0]
    before = (
        model._fitkit.fit_state.updates,
        optimizer.state_dict()["state"][0]["step"].item(),
        [plan.scheduler.last_epoch for plan in model._fitkit.fit_state.schedulers],
        optimizer.param_groups[0]["lr"],
    )
    with pytest.raises(OSError, match="not again"):
        model.load(tmp_path / "a.h5")
    assert before == (
        model._fitkit.fit_state.updates,
        optimizer.state_dict()["state"][0]["step"].item(),
        [plan.scheduler.last_epoch for plan in model._fitkit.fit_state.schedulers],
        optimizer.param_groups[0]["lr"],
    )


def test_weights_of_a_file_keep_their_digits_in_a_net_that_was_narrower(tmp_path):
    wide = nn.Linear(4, 3)
    fitkit.Model(wide).save_weights(tmp_path / "w.h5")
    model = fitkit.Model(nn.Linear(4, 3))
    model.compile("sgd", "cross_entropy", precision="bf16-true", accelerator="cpu")
    model.predict(torch.randn(2, 4), verbose=0)
    model.compile(precision="32-true")
    model.load_weights(tmp_path / "w.h5")
    assert torch.equal(model.net.weight, wide.weight)


class Eager:
    """A batch sampler that draws its order as soon as it is asked for an iterator."""

    def __init__(self, samples, size):
        self.samples, self.size = samples, size

    def __iter__(self):
        return iter(torch.randperm(self.samples).split(self.size))

    def __len__(self):
        return -(-self.samples // self.size)


@pytest.mark.timeout(60)
def test_an_order_that_is_drawn_at_once_goes_on_with_workers_too():
    from fitkit.data.sources import make_source

    def source():
        data = TensorDataset(torch.arange(12))
        return make_source(DataLoader(data, batch_sampler=Eager(12, 3), num_workers=1))

    torch.manual_seed(3)
    whole = [batch[0].tolist() for batch in source().batches(0)]
    torch.manual_seed(3)
    rest = [batch[0].tolist() for batch in source().batches(0, skip=2)]
    assert rest == whole[2:]


class Own(fitkit.Model):
    """Logs the mean of its outputs by a torchmetrics object."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3)))
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        output = self(batch[0])
        self.mean(output.detach())
        self.log("mean", self.mean, on_epoch=True, on_step=False)
        return nn.functional.cross_entropy(output, batch[1])


@pytest.mark.parametrize("own", [False, True], ids=["compiled", "its own step"])
@pytest.mark.parametrize("first", [[], [(1, 2)]], ids=["cut once", "cut twice"])
def test_a_save_in_the_validation_of_an_epoch_keeps_the_epochs_values(tmp_path, own, first):
    def made():
        torch.manual_seed(1)
        if not own:
            return compiled()
        model = Own()
        model.compile("adam", "cross_entropy", accelerator="cpu")
        return model

    rest = {**arrays(), "validation_data": (X, Y), "epochs": 3, "verbose": 0}
    whole = made()
    torch.manual_seed(2)
    expected = whole.fit(**rest).history
    last = None
    for number, moment in enumerate([*first, None]):
        path, model = tmp_path / f"{number}.h5", made()
        cut = CutInValidation(path, 1) if moment is None else Cut(path, *moment)
        torch.manual_seed(2)
        with pytest.raises(KeyboardInterrupt):
            model.fit(**rest, resume_from=last, callbacks=[cut])
        last = path
    again = made()
    # No batch of that epoch is left, which would log the object again.
    with pytest.warns(match="logs lack mean") if own else contextlib.nullcontext():
        found = again.fit(**rest, resume_from=last).history
    if own:
        del expected["mean"][1]
    assert_same_weights(again, whole)
    assert found == {name: pytest.approx(values, rel=1e-12) for name, values in expected.items()}
