"""`ReduceLROnPlateau` with the interval "step", and the last of Lightning's shapes."""

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import fitkit
from tests.nets import classification, linear

X, Y = classification(50, 4)
QUIET = {"verbose": 0, "batch_size": 16, "shuffle": False}
VALUES = [5.0, 4.0, 4.5, 4.5, 3.0, 3.5, 3.5, 3.5]


class Recording(ReduceLROnPlateau):
    """Notes what it is given."""

    def __init__(self, optimizer, **options):
        super().__init__(optimizer, **options)
        self.given = []

    def step(self, metrics, epoch=None):
        self.given.append(float(metrics))
        super().step(metrics)

    def state_dict(self):
        return {k: v for k, v in super().state_dict().items() if k != "given"}


class Own(fitkit.Model):
    def __init__(self, **options):
        super().__init__(linear(4, 3, seed=1))
        self.own_options = options

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.log("mine", VALUES[self.global_step], on_step=True)
        self.log("both", VALUES[self.global_step], on_step=True, on_epoch=True)
        return torch.nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.plateau = Recording(optimizer, factor=0.5, patience=0)
        scheduler = {"scheduler": self.plateau, "interval": "step", **self.own_options}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def by_hand(values):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for value in values:
        plateau.step(value)
    return optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("name", ["mine", "both", "both_step"])
@pytest.mark.parametrize("every", [1, 3])
def test_a_plateau_by_step_gets_what_the_step_logged_every_frequency_updates(name, every):
    model = Own(monitor=name, frequency=every)
    model.fit(X, Y, epochs=2, **QUIET)
    assert model.plateau.given == VALUES[every - 1 :: every]
    assert model.optimizer.param_groups[0]["lr"] == by_hand(VALUES[every - 1 :: every])


def test_without_a_monitor_it_watches_each_batchs_loss():
    model = Own()
    losses = []
    watch = fitkit.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(float(logs.batch_loss))
    )
    model.fit(X, Y, epochs=2, callbacks=watch, **QUIET)
    assert model.plateau.given == losses and len(losses) == 8


@pytest.mark.parametrize("monitor", ["loss", "accuracy"])
def test_a_compiled_model_takes_it_too(monitor):
    made = []

    def make(optimizer):
        made.append(Recording(optimizer, factor=0.5, patience=0))
        return made[0]

    model = fitkit.Model(linear(4, 3, seed=1))
    model.compile(
        "sgd", "cross_entropy", metrics=["accuracy"],
        lr_scheduler={"scheduler": make, "interval": "step", "frequency": 2, "monitor": monitor},
    )  # fmt: skip
    so_far = []
    watch = fitkit.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: so_far.append(
            float(logs.batch_loss) if monitor == "loss" else logs["accuracy"]
        )
    )
    model.fit(X, Y, epochs=2, callbacks=watch, **QUIET)
    assert made[0].given == so_far[1::2]


def test_a_plateau_by_step_goes_on_after_a_cut_as_if_nothing_had_happened(tmp_path):
    def saves(batch, logs):
        if batch == 1:
            model.save(tmp_path / "cut.h5")

    model = Own(monitor="mine", frequency=3)
    cut = fitkit.callbacks.LambdaCallback(on_train_batch_end=saves)
    model.fit(X, Y, epochs=1, callbacks=cut, **QUIET)
    whole = Own(monitor="mine", frequency=3)
    whole.fit(X, Y, epochs=2, **QUIET)
    resumed = Own(monitor="mine", frequency=3)
    resumed.fit(X, Y, epochs=2, resume_from=tmp_path / "cut.h5", **QUIET)
    assert resumed.plateau.given == VALUES[2::3]
    rates = [m.optimizer.param_groups[0]["lr"] for m in (whole, resumed)]
    assert rates[0] == rates[1]
    assert torch.equal(whole.net.weight, resumed.net.weight)


def test_what_updates_dont_have_is_answered():
    with pytest.raises(fitkit.ConfigurationError, match="'val_loss' is a value of the validation"):
        Own(monitor="val_loss").fit(X, Y, **QUIET)
    with pytest.raises(fitkit.ConfigurationError, match="monitors 'giraffe', but the logs have"):
        Own(monitor="giraffe").fit(X, Y, **QUIET)
    with pytest.warns(UserWarning, match="waits until the logs have it"):
        Own(monitor="giraffe", strict=False).fit(X, Y, **QUIET)
    model = fitkit.Model(linear(4, 3, seed=1))
    scheduler = {"scheduler": ReduceLROnPlateau, "interval": "step", "monitor": "val_loss"}
    with pytest.raises(fitkit.ConfigurationError, match="interval='epoch'"):
        model.compile("sgd", "cross_entropy", lr_scheduler=scheduler)


def test_compiles_frequency_moves_a_named_scheduler_every_so_many_epochs():
    model = fitkit.Model(linear(4, 3, seed=1))
    halves = {"scheduler": lambda o: StepLR(o, 1, gamma=0.5), "interval": "step", "frequency": 4}
    model.compile("sgd", "cross_entropy", learning_rate=0.1, lr_scheduler=halves)
    model.fit(X, Y, epochs=2, **QUIET)  # eight updates
    assert model.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**2)
    model.compile(
        "sgd", learning_rate=0.1,
        lr_scheduler={"scheduler": "cosine", "interval": "step", "frequency": 2},
    )  # fmt: skip
    model.fit(X, Y, epochs=2, **QUIET)
    assert model.lr_schedulers().T_max == model.lr_schedulers().last_epoch == 4
    with pytest.raises(fitkit.ConfigurationError, match="frequency"):
        model.compile(lr_scheduler={"scheduler": "cosine", "frequency": 0})


@pytest.mark.parametrize("wrapped", [lambda s: s, lambda s: {"scheduler": s, "interval": "step"}])
def test_lightnings_return_of_a_list_and_one_scheduler(wrapped):
    class Bare(Own):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], wrapped(StepLR(optimizer, 2, gamma=0.5))

    model = Bare()
    model.fit(X, Y, epochs=2, **QUIET)
    moves = 2 if isinstance(wrapped(None), dict) else 1
    by_step = moves == 2
    assert model.optimizer.param_groups[0]["lr"] == 0.1 * 0.5 ** (4 if by_step else 1)


def test_lightnings_configure_optimizers_that_returns_none_is_answered_by_name():
    class Bare(Own):
        def configure_optimizers(self):
            torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(fitkit.ConfigurationError, match="configure_optimizers returned None"):
        Bare().fit(X, Y, **QUIET)
