"""compile(out_of_memory="split") with a LightningModule: its hooks see batches, not parts."""

import pytest
import torch
from torch.nn import functional as F

import fitkit
from fitkit.errors import ConfigurationError
from tests.nets import classification
from tests.unit.extras.splitting.test_splitting import Narrow, assert_same

pl = pytest.importorskip("lightning.pytorch")

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore")]

X, LABELS = classification(90, 6, seed=1)


class Hooked(pl.LightningModule):
    """Notes what each hook sees."""

    def __init__(self, rows, fails):
        super().__init__()
        self.net, self.seen = Narrow(rows, fails), []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("own", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        made = torch.optim.Adam(self.parameters(), 0.01)
        schedule = torch.optim.lr_scheduler.StepLR(made, 2)
        return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append(len(batch[0]))

    def on_before_zero_grad(self, optimizer):
        self.seen.append(-1.0)

    def on_after_backward(self):
        self.seen.append(self.net.body.weight.grad.norm())

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(self.net.body.weight.grad.norm())

    def configure_gradient_clipping(self, optimizer, **given):
        self.seen.append(self.net.body.weight.grad.norm())
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        self.seen.append(optimizer_closure())
        optimizer.step()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(outputs["loss"])


def trained(rows, fails="forward", every=1, kind=Hooked, **option):
    fitkit.set_seed(1)
    model = fitkit.Model(kind(rows, fails))
    model.compile(accelerator="cpu", devices=1, accumulate_grad_batches=every, **option)
    history = model.fit(X, LABELS, batch_size=20, epochs=2, verbose=0).history
    return model, {**history, "seen": list(map(float, model.net.seen))}


@pytest.mark.parametrize("every", [1, 2])
def test_hooks_see_what_they_see_in_the_uncut_run(every):
    uncut = trained(1000, every=every)
    for fails in ("forward", "backward"):
        cut = trained(3, fails, every, out_of_memory="split")
        assert_same(cut, uncut)


def test_hooks_that_decide_about_gradients_are_refused():
    class Kept(Hooked):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            optimizer.zero_grad()

    with pytest.raises(ConfigurationError, match="optimizer_zero_grad.*FK083"):
        trained(3, kind=Kept, out_of_memory="split")
