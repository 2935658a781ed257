"""A pass is made where it begins and ends for success and error alike: nothing of it is left."""

import pytest
import torch
import torchmetrics
from torch import nn

import fitkit

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(2, (48,), generator=torch.Generator().manual_seed(0))


class Measured(fitkit.Model):
    """Logs a metric object of its own in every stage."""

    def __init__(self, net):
        super().__init__(net)
        self.share = torchmetrics.Accuracy("binary")

    def training_step(self, batch, batch_idx):
        self.share.update(self(batch[0]).argmax(1), batch[1])
        self.log("share", self.share)
        return super().training_step(batch, batch_idx)

    test_step = training_step


def measured():
    torch.manual_seed(0)
    model = Measured(nn.Linear(4, 2))
    model.compile("sgd", "cross_entropy", metrics=["accuracy"], accelerator="cpu")
    return model


class FailsAt(fitkit.callbacks.Callback):
    def __init__(self, hook, save_to=None):
        self.hook, self.save_to = hook, save_to

    def _fail(self, hook, batch):
        if hook == self.hook and batch == 2:
            raise ValueError(hook)

    def on_train_batch_end(self, batch, logs=None):
        self._fail("fit", batch)

    def on_test_batch_end(self, batch, logs=None):
        self._fail("evaluate", batch)

    def on_exception(self, error):
        if self.save_to is not None:
            self.model.save(self.save_to)


@pytest.mark.parametrize("verb", ["fit", "evaluate"])
def test_after_an_error_a_users_metric_holds_nothing_of_the_pass(verb):
    model = measured()
    options = {"batch_size": 8, "verbose": 0}
    expected = model.evaluate(X, Y, return_dict=True, **options)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=verb):
        getattr(model, verb)(X, Y, callbacks=FailsAt(verb), **options)
    model.load_state_dict(weights)
    assert model.evaluate(X, Y, return_dict=True, **options) == expected


def test_what_on_exception_saves_within_an_epoch_has_the_epochs_values(tmp_path):
    whole = measured().fit(X, Y, batch_size=8, epochs=2, verbose=0).history
    path = str(tmp_path / "cut.h5")
    with pytest.raises(ValueError, match="fit"):
        measured().fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=FailsAt("fit", path))
    resumed = measured().fit(X, Y, batch_size=8, epochs=2, verbose=0, resume_from=path)
    assert resumed.history == whole
