"""A model's own steps on several ranks: the numbers of one process."""

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from tests.nets import classes_in_turn
from tests.reference import assert_same_weights

pytestmark = pytest.mark.timeout(90)

X, Y = classes_in_turn(50, 4, seed=1)


def on(model, ranks):
    """The model on a number of ranks, whose batches are 12 samples together."""
    model.compile(accelerator="cpu", devices=ranks, strategy="ddp_spawn" if ranks > 1 else "auto")
    return {"batch_size": 12 // ranks, "shuffle": False, "verbose": 0}


class Classifier(fitkit.Model):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.f1 = torchmetrics.F1Score("multiclass", num_classes=3, average="macro")

    def forward(self, x):
        return self.layer(x)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self(x)
        loss = F.cross_entropy(scores, y)
        self.f1.update(scores, y)
        self.log_dict({"train_loss": loss, "hits": (scores.argmax(1) == y).float().mean()})
        self.log("f1", self.f1)
        self.log("rows", len(x), reduce_fx="sum")
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))
        return len(batch[0])

    def validation_epoch_end(self, outputs):
        self.log("val_rows", sum(outputs), reduce_fx="sum")


@pytest.mark.parametrize("ranks", [pytest.param(3, marks=pytest.mark.slow), 2])
def test_one_process_and_several_give_the_same(ranks):
    models, logs = [Classifier(), Classifier()], []
    for model, count in zip(models, (1, ranks), strict=True):
        options = on(model, count)
        logs.append(model.fit(X, Y, epochs=2, validation_data=(X[:7], Y[:7]), **options).history)
        logs[-1]["test"] = model.evaluate(X, Y, batch_size=4, return_dict=True, verbose=0)
    assert logs[0].pop("rows") == logs[1].pop("rows") == [50, 50]
    tests = [log.pop("test") for log in logs]
    assert tests[1] == pytest.approx(tests[0], abs=1e-6)
    for name, values in logs[0].items():
        assert logs[1][name] == pytest.approx(values, abs=1e-6), name
    torch.testing.assert_close(models[1].layer.weight, models[0].layer.weight, rtol=0, atol=1e-6)


class Adversaries(fitkit.Model):
    def __init__(self, manual):
        super().__init__()
        torch.manual_seed(0)
        self.maker, self.judge = nn.Linear(4, 4), nn.Linear(4, 1)
        self.automatic_optimization = not manual

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.maker.parameters(), 0.01),
            torch.optim.SGD(self.judge.parameters(), 0.1),
        ]

    def loss(self, x, turn):
        if turn == 0:
            return -self.judge(self.maker(x)).mean()
        return F.softplus(self.judge(self.maker(x).detach()) - self.judge(x)).mean()


class ByTurns(Adversaries):
    def training_step(self, batch, batch_idx, optimizer_idx):
        return self.loss(batch[0], optimizer_idx)


class ByHand(Adversaries):
    def training_step(self, batch, batch_idx):
        for turn, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch[0], turn)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.log(f"loss_{turn}", loss)


@pytest.mark.parametrize("kind", [ByTurns, ByHand])
def test_two_optimizers_average_their_gradients_over_ranks(kind):
    models, logs = [kind(kind is ByHand) for _ in range(2)], []
    for model, ranks in zip(models, (1, 2), strict=True):
        logs.append(model.fit(X, Y, epochs=2, **on(model, ranks)).history)
    for name, values in logs[0].items():
        assert logs[1][name] == pytest.approx(values, abs=1e-6)
    assert_same_weights(*models, atol=1e-6)


def test_a_steps_value_with_sync_dist_is_that_of_all_ranks():
    seen = []

    class Own(Classifier):
        def training_step(self, batch, batch_idx):
            self.log("rank", float(self.global_rank + 1), on_step=True, sync_dist=True)
            self.log("alone", float(self.global_rank + 1), on_step=True, on_epoch=True)
            self.log("first", float(self.global_rank + 1), rank_zero_only=True)
            return super().training_step(batch, batch_idx)

    model = Own()
    note = fitkit.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append((logs["rank"], logs["alone_step"]))
    )
    history = model.fit(X[:48], Y[:48], callbacks=note, **on(model, 2)).history
    assert seen == [(1.5, 1.0)] * 4
    assert history["alone_epoch"] == [1.5] and history["first"] == [1.0]


@pytest.mark.parametrize("kind", [Classifier, fitkit.Model])
def test_a_hooks_value_with_sync_dist_is_that_of_all_ranks_at_the_epochs_end(kind):
    model = Classifier() if kind is Classifier else fitkit.Model(nn.Linear(4, 3))
    model.compile("sgd", "cross_entropy")

    def log(batch, logs):
        value = float(batch + 10 * model.global_rank)
        model.log("mine", value, on_step=True, on_epoch=True, sync_dist=True)

    note = fitkit.callbacks.LambdaCallback(on_train_batch_end=log)
    history = model.fit(X[:48], Y[:48], epochs=2, callbacks=note, **on(model, 2)).history
    assert history["mine_step"] == [8.0] * 2 and history["mine_epoch"] == [6.5] * 2


@pytest.mark.parametrize("on_step", [pytest.param(True, marks=pytest.mark.slow), False])
def test_ranks_that_log_other_names_with_sync_dist_end_the_call(on_step):
    class Own(Classifier):
        def training_step(self, batch, batch_idx):
            self.log(f"from_{self.global_rank}", 1.0, sync_dist=True, on_step=on_step)
            return super().training_step(batch, batch_idx)

    model = Own()
    with pytest.raises((fitkit.ConfigurationError, fitkit.WorkerError), match="from_0.*from_1"):
        model.fit(X, Y, **on(model, 2))


def test_gathered_embeddings_carry_gradients_between_ranks():
    class Contrastive(fitkit.Model):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 3)

        def training_step(self, batch, batch_idx):
            both = self.all_gather({"a": self.layer(batch[0]), "b": self.layer(batch[0].flip(1))})
            scores = F.normalize(both["a"]) @ F.normalize(both["b"]).T
            return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))

    models = [Contrastive(), Contrastive()]
    for model, ranks in zip(models, (1, 2), strict=True):
        options = on(model, ranks)
        model.compile(lambda parameters: torch.optim.SGD(parameters, 0.1))
        model.fit(X[:48], Y[:48], **options)
    torch.testing.assert_close(models[1].layer.weight, models[0].layer.weight, rtol=0, atol=1e-6)


def test_a_plateau_by_step_gets_the_mean_of_all_ranks():
    class Own(fitkit.Model):
        def training_step(self, batch, batch_idx):
            self.log("rank", 1.0 + self.global_rank, on_step=True)
            return torch.nn.functional.mse_loss(self(batch[0]), batch[1])

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            scheduler = {"scheduler": plateau, "interval": "step", "monitor": "rank"}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    model = Own(torch.nn.Linear(2, 1))
    model.compile(accelerator="cpu", devices=2)
    model.fit(torch.ones(16, 2), torch.ones(16, 1), batch_size=4, verbose=0)  # two updates
    assert model.lr_schedulers().best == 1.5
    assert model.optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("by_index", [True, False])
def test_combined_loaders_are_dealt_out_whole_and_once(tmp_path, by_index):
    """Seven combined batches on two ranks: the last rank's filler counts for nothing."""

    class Own(fitkit.Model):
        def training_step(self, batch, batch_idx):
            few, many = batch["few"][0], batch["many"][0]
            self.log("few", few.sum(), reduce_fx="sum")
            self.log("many", many.sum(), reduce_fx="sum")
            return self(few).square().mean() + self(many).square().mean()

    def loader(count, size):
        return DataLoader(TensorDataset(torch.arange(1.0, count + 1)[:, None]), size)

    def combined():
        few, many = loader(6, 2), loader(14, 2)
        return fitkit.data.CombinedLoader(
            {"few": few, "many": many if by_index else list(many)}, "max_size_cycle"
        )

    def trained(devices, data):
        model = Own(torch.nn.Linear(1, 1, bias=False))
        torch.nn.init.ones_(model.net.weight)
        model.compile("sgd", accelerator="cpu", devices=devices, learning_rate=1e-4)
        return model, model.fit(data, verbose=0).history

    model, history = trained(2, combined())
    assert history["many"] == [105.0]  # 1 + … + 14
    assert history["few"] == [21.0 * 2 + 3.0]  # twice through, and its first batch
    assert model.global_step == 4

    batches = list(combined())
    pairs = [
        {key: [torch.cat([b[key][0] for b in batches[at : at + 2]])] for key in ("few", "many")}
        for at in range(0, 7, 2)
    ]
    one, _ = trained(1, pairs)
    assert torch.allclose(model.net.weight, one.net.weight, atol=1e-6)
