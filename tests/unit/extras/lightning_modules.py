"""LightningModules, and runs of them by Lightning's own Trainer, for comparison."""

import copy
import inspect

import lightning.pytorch as pl
import torch
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
