"""`jit_compile` compiles a `training_step` of the model's own, with what it logs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fitkit
from fitkit.extras.jit.programs import traces_gradients
from tests.compiling import TRACED, compiled_anew

pytestmark = pytest.mark.skipif(not traces_gradients(), reason="this torch compiles no gradients")

torch.manual_seed(0)
X, Y = torch.randn(44, 6, dtype=torch.float64), torch.randint(0, 3, (44,))


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


class Logging(fitkit.Model):
    """A loss by hand, values of the batch and of the epoch, outputs for the epoch's end."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y) + 0.01 * self.net[0].weight.abs().sum()
        accuracy = (logits.argmax(1) == y).double().mean()
        self.log("accuracy", accuracy, on_step=True, on_epoch=True)
        self.log_dict({"largest": logits.abs().max(), "fixed": 3.0}, reduce_fx="max")
        return {"loss": loss, "logits": logits}

    def training_epoch_end(self, outputs):
        self.log("spread", torch.cat([output["logits"] for output in outputs]).std())


class Extending(fitkit.Model):
    """The compiled loss and metrics, and a value more."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("double", 2 * loss)
        return loss


class Counted(fitkit.Model):
    """A mean over something else than samples."""

    def training_step(self, batch):
        x, y = batch
        counts = y > 0
        losses = F.cross_entropy(self(x), y, reduction="none")
        return {"loss": (losses * counts).sum() / counts.sum(), "count": counts.sum()}


class Ending(fitkit.Model):
    def training_step(self, batch, batch_idx):
        return self(batch[0]), batch[1]

    def training_step_end(self, outputs):
        return F.cross_entropy(*outputs)


class EpochEnd(fitkit.Model):
    """The compiled step, of whose losses the epoch's end gets a list."""

    def training_epoch_end(self, outputs):
        self.log("largest", max(float(loss) for loss in outputs))


def trained(kind, **more):
    torch.manual_seed(1)
    model = kind(net())
    more = {"metrics": ["accuracy"], **more} if kind in (Extending, EpochEnd) else more
    model.compile("sgd", "cross_entropy", accelerator="cpu", learning_rate=0.1, **more)
    torch.manual_seed(2)
    first = model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history
    compiled_anew()
    second = model.fit(X, Y, batch_size=8, epochs=4, initial_epoch=2, verbose=0).history
    return model, [first, second]


def assert_same(one, other):
    (model, histories), (twin, others) = one, other
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=1e-10)
    for history, wanted in zip(histories, others, strict=True):
        assert list(history) == list(wanted)
        for name, values in wanted.items():
            assert history[name] == pytest.approx(values, abs=1e-10), name


KINDS = [
    (Logging, {}),
    (Logging, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    (Extending, {}),
    (Counted, {"accumulate_grad_batches": 2}),
    (Ending, {"gradient_clip_val": 0.1, "steps_per_execution": 4}),
    (EpochEnd, {}),
]


@pytest.mark.parametrize(
    ("kind", "options"),
    [*KINDS[:4], *(pytest.param(*case, marks=pytest.mark.slow) for case in KINDS[4:])],
)
def test_a_step_of_ones_own_learns_and_logs_the_same(kind, options, recwarn):
    plain = trained(kind, **options)
    compiled = trained(kind, **options, jit_compile=TRACED)
    assert compiled_anew() == 0  # in the second fit
    assert not [w for w in recwarn if "jit_compile" in str(w.message)]
    assert compiled[0]._fitkit.compiler.of_updates.stopped is None
    assert_same(compiled, plain)


class Reading(fitkit.Model):
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss_of_batch", loss.item())
        if float(loss) > 1e6:
            loss = loss * 0.5
        return loss


def test_what_stops_a_step_is_said_once_with_its_line_and_it_learns_the_same():
    plain = trained(Reading)
    with pytest.warns(UserWarning, match=r"net alone, .*test_compiled_own_step.py") as seen:
        compiled = trained(Reading, jit_compile=TRACED)
    assert len([w for w in seen if "jit_compile" in str(w.message)]) == 1
    assert_same(compiled, plain)


class Printing(fitkit.Model):
    def training_step(self, batch, batch_idx):
        print("a batch")
        return F.cross_entropy(self(batch[0]), batch[1])


def test_what_a_step_does_beside_its_loss_is_done_once_a_batch(capsys):
    with pytest.warns(UserWarning, match="jit_compile"):
        trained(Printing, jit_compile=TRACED)
    assert capsys.readouterr().out.count("a batch") == 4 * 6


def test_outputs_that_the_epochs_end_gets_compile_nothing_anew():
    torch.manual_seed(1)
    model = EpochEnd(net())
    model.compile("sgd", "cross_entropy", accelerator="cpu", learning_rate=0.1, jit_compile=TRACED)
    compiled_anew()
    model.fit(X[:40], Y[:40], batch_size=4, epochs=2, verbose=0)
    assert compiled_anew() == 1
