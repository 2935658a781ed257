"""LightningModules, and runs of them by Lightning's own Trainer, for comparison."""

import copy
import inspect

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

TRAINER = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def loader(samples=24, batch_size=8, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=generator)
    y = x.sum(1, keepdim=True) + torch.randn(samples, 1, generator=generator) / 4
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, **options)


class Net(pl.LightningModule):
    """A small regression, whose parts other modules override."""

    def __init__(self, dropout=0.2):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


HOOKS = """
on_fit_start on_fit_end on_train_start on_train_end on_train_epoch_start on_train_epoch_end
on_train_batch_start on_train_batch_end on_validation_start on_validation_end
on_validation_epoch_start on_validation_epoch_end on_validation_batch_start
on_validation_batch_end on_test_start on_test_end on_test_epoch_start on_test_epoch_end
on_test_batch_start on_test_batch_end on_predict_start on_predict_end on_predict_epoch_start
on_predict_epoch_end on_predict_batch_start on_predict_batch_end on_validation_model_zero_grad
on_validation_model_eval on_test_model_eval on_predict_model_eval on_before_zero_grad
optimizer_zero_grad on_before_backward backward on_after_backward on_before_optimizer_step
configure_gradient_clipping clip_gradients optimizer_step lr_scheduler_step
on_before_batch_transfer transfer_batch_to_device on_after_batch_transfer prepare_data setup
teardown configure_model configure_callbacks configure_optimizers training_step validation_step
test_step predict_step
"""


class WithAll(Net):
    """Has all steps, and schedulers of each kind."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        steps = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        epochs = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [
            {"scheduler": steps, "interval": "step", "frequency": 2},
            epochs,
            {"scheduler": plateau, "monitor": "val_loss"},
        ]


class Recorded(WithAll):
    """Notes each hook that is called, with its numbers."""

    def __init__(self):
        super().__init__()
        self.calls = []


def _recording(name):
    def hook(self, *arguments, **named):
        numbers = [one for one in (*arguments, *named.values()) if type(one) is int]
        self.calls.append((f"{name}(", *numbers))
        try:
            return getattr(super(Recorded, self), name)(*arguments, **named)
        finally:
            self.calls.append((f"){name}",))

    hook.__signature__ = inspect.signature(getattr(WithAll, name))
    return hook


for _name in HOOKS.split():
    setattr(Recorded, _name, _recording(_name))


class RecordedManual(Recorded):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.calls.append(("training_step",))
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        return loss


def made(kind, *arguments, seed=1, **named):
    """Return two equal modules."""
    torch.manual_seed(seed)
    module = kind(*arguments, **named)
    return module, copy.deepcopy(module)


def trained_by_lightning(module, train, *, seed=2, epochs=2, validation=None, **options):
    """Train a module by Lightning's Trainer; return the trainer."""
    trainer = pl.Trainer(max_epochs=epochs, **{**TRAINER, **options})
    torch.manual_seed(seed)
    trainer.fit(module, train, validation)
    return trainer


class Momentum(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        rate = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches + 1
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rate, "interval": "step"}}


class Plateau(Net):
    def validation_step(self, batch, batch_idx):
        self.log("seen", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        rate = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": rate, "monitor": "seen"}


class ByFrequency(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": rate, "interval": "step", "frequency": 2}]


class Newton(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class WarmedUp(Net):
    """Sets its rate in `optimizer_step`, and leaves out an update."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min(1.0, (self.trainer.global_step + 1) / 4)
        if batch_idx == 1:
            optimizer_closure()
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class OwnBackward(Net):
    def backward(self, loss):
        (2 * loss).backward()

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="value")


class KeptGradients(Net):
    """Sums the gradients of two batches itself."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 2 == 0:
            optimizer.zero_grad()

    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)


class Skipping(Net):
    """Leaves out batches in both ways."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else {"loss": self.loss(batch), "count": 5}

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 3 and self.current_epoch == 0 else None


class Frozen(Net):
    """A part stays in evaluation mode, and doesn't learn."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
        self.backbone.eval()

    def forward(self, x):
        return self.net(self.backbone(x))

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=0.01)


class EvaluatedLater(Net):
    """A hook leaves a part in evaluation mode, once."""

    def on_train_epoch_end(self):
        if self.current_epoch == 0:
            self.net[2].eval()


class EvaluatedWhole(Net):
    """A hook leaves all in evaluation mode."""

    def on_train_start(self):
        self.eval()


class ByStepsWatched(Net):
    """Moves its rate by a step's value, which ranks have each their own of."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("seen", loss, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        """Have the hook, so that the schedule is moved beside hooks."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        rate = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        scheduler = {"scheduler": rate, "monitor": "seen", "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Moved(Net):
    """Its batches are dicts, which its hooks make and change."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {"x": batch[0], "y": batch[1]}

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "x": 2 * batch["x"]}

    def loss(self, batch):
        return nn.functional.mse_loss(self(batch["x"]), batch["y"])


class WithoutIndex(Net):
    def training_step(self, batch):
        return self.loss(batch)


class WithoutOptimizer(Net):
    def configure_optimizers(self):
        return None


class Adversarial(Net):
    """Two optimizers take turns, each with its own part."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        made = -self.critic(self(batch[0])).mean() + self.loss(batch)
        first.zero_grad()
        self.manual_backward(made)
        self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        judged = (self.critic(self(batch[0]).detach()) - self.critic(batch[1])).mean()
        second.zero_grad()
        self.manual_backward(judged)
        second.step()
        self.untoggle_optimizer(second)
        self.log_dict({"made": made, "judged": judged}, prog_bar=True)
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()

    def configure_optimizers(self):
        first = torch.optim.Adam(self.net.parameters(), lr=0.01)
        second = torch.optim.SGD(self.critic.parameters(), lr=0.01)
        return [first, second], [torch.optim.lr_scheduler.StepLR(first, 1, 0.5)]


class Parts(Net):
    """A module in the module, which learns too."""

    def __init__(self):
        super().__init__()
        self.inner = Net()

    def forward(self, x):
        return self.net(x) + self.inner(x)

    def training_step(self, batch, batch_idx):
        assert self.inner.trainer is self.trainer
        return self.loss(batch)


class Logged(Net):
    """Logs in all ways."""

    def __init__(self):
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()
        self.others = torchmetrics.MetricCollection(
            {"train/mae": torchmetrics.MeanAbsoluteError(), "mse": torchmetrics.MeanSquaredError()}
        )

    def log(self, name, value, **options):
        super().log(f"m_{name}", value, **options)

    def on_train_start(self):
        self.log("at_start", 7.0)

    def on_train_epoch_start(self):
        self.log("begun", float(self.current_epoch))

    def training_step(self, batch, batch_idx):
        loss, predicted = self.loss(batch), self(batch[0])
        self.log("train_loss", loss)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("ptl/epoch", loss, on_step=False, on_epoch=True)
        self.log("weighted", loss, on_step=False, on_epoch=True, batch_size=batch_idx + 1)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx=torch.max)
        self.others.update(predicted, batch[1])
        self.log_dict(self.others, on_step=False, on_epoch=True)
        return loss

    def on_before_zero_grad(self, optimizer):
        self.log("updates", float(self.global_step))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("ended", outputs["loss"] * 2)

    def on_train_epoch_end(self):
        self.log("epoch_ended", 1.5)

    def validation_step(self, batch, batch_idx):
        predicted = self(batch[0])
        self.error(predicted, batch[1])
        self.log("valid_error", self.error)
        self.log("mean", predicted.mean())
        self.log("step", predicted.mean(), on_step=True, on_epoch=True)
        return {"predicted": predicted}

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.log("outputs", outputs["predicted"].std())

    def on_validation_epoch_end(self):
        self.log("validated", 2.5)

    def test_step(self, batch, batch_idx):
        self.log_dict({"test_loss": self.loss(batch), "acc": 1.0})


class OnlyValidated(Net):
    """Has no test step."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.calls = []

    def setup(self, stage):
        self.calls.append(stage)

    def on_validation_start(self):
        self.calls.append("on_validation_start")

    def on_validation_end(self):
        self.calls.append("on_validation_end")

    def validation_step(self, batch, batch_idx):
        self.log("seen", self.loss(batch))
