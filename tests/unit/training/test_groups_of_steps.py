"""`steps_per_execution`: batch hooks are called once for several batches."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fitkit

torch.manual_seed(0)
X, Y = torch.randn(70, 4), torch.randint(0, 3, (70,))


class Calls(fitkit.callbacks.Callback):
    stops_alike = True

    def __init__(self):
        super().__init__()
        self.made = []

    def on_train_batch_begin(self, batch, logs=None):
        self.made.append(("begin", batch))

    def on_train_batch_end(self, batch, logs):
        self.made.append(("end", batch, logs["loss"]))

    def on_test_batch_begin(self, batch, logs=None):
        self.made.append(("test begin", batch))

    def on_test_batch_end(self, batch, logs):
        self.made.append(("test end", batch))

    def on_predict_batch_begin(self, batch, logs=None):
        self.made.append(("predict begin", batch))

    def on_predict_batch_end(self, batch, logs):
        self.made.append(("predict end", batch, logs["outputs"]))


class Own(fitkit.Model):
    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("index", float(batch_idx))
        return loss


def model_of(group, kind=fitkit.Model, **arguments):
    torch.manual_seed(1)
    # Replicas' threads draw random numbers in any order.
    dropout = 0.0 if arguments.get("strategy") == "dp" else 0.3
    model = kind(nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 3)))
    model.compile(
        "adam",
        "cross_entropy",
        metrics=["accuracy"],
        **{"accelerator": "cpu", **arguments},
        steps_per_execution=group,
    )
    return model


def test_hooks_get_the_first_and_the_last_batch_of_a_group_with_the_logs_at_its_end():
    plain, grouped = Calls(), Calls()
    for group, calls in ((1, plain), (3, grouped)):
        model = model_of(group)
        held_out = (X[:40], Y[:40])
        model.fit(X, Y, batch_size=10, verbose=0, callbacks=[calls], validation_data=held_out)
    losses = {batch: loss for what, batch, *rest in plain.made if what == "end" for loss in rest}
    assert [call for call in grouped.made if "test" not in call[0]] == [
        ("begin", 0), ("end", 2, losses[2]), ("begin", 3), ("end", 5, losses[5]),
        ("begin", 6), ("end", 6, losses[6]),
    ]  # fmt: skip
    assert [call for call in grouped.made if "test" in call[0]] == [
        ("test begin", 0),
        ("test end", 2),
        ("test begin", 3),
        ("test end", 3),
    ]


def test_predict_gives_a_group_its_outputs_together():
    model, calls = model_of(2), Calls()
    whole = torch.from_numpy(model.predict(X, batch_size=30, verbose=0, callbacks=[calls]))
    told = [(what, batch) for what, batch, *_ in calls.made]
    assert told == [
        ("predict begin", 0),
        ("predict end", 1),
        ("predict begin", 2),
        ("predict end", 2),
    ]
    assert torch.equal(calls.made[1][2], whole[:60])
    assert torch.equal(calls.made[3][2], whole[60:])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"kind": Own},
        {"strategy": "dp", "devices": 2},
    ],
)
@pytest.mark.parametrize("steps_per_epoch", [None, 5])
def test_groups_change_nothing_of_what_is_learned(options, steps_per_epoch):
    histories = []
    for group in (1, 4, 100):
        model = model_of(group, **options)
        loader = DataLoader(TensorDataset(X, Y), 10, shuffle=True)
        torch.manual_seed(2)
        history = model.fit(loader, epochs=3, steps_per_epoch=steps_per_epoch, verbose=0)
        histories.append((history.history, [p.tolist() for p in model.parameters()]))
    assert histories[0] == histories[1] == histories[2]


@pytest.mark.parametrize("steps_per_epoch", [None, 5])
def test_a_training_that_is_cut_between_groups_goes_on_as_if_it_were_not(tmp_path, steps_per_epoch):
    class Cut(Calls):
        def on_train_batch_end(self, batch, logs):
            super().on_train_batch_end(batch, logs)
            if self.model.current_epoch == 1 and batch == 3:
                self.model.save(tmp_path / "cut.h5")

    def trained(calls, **resume):
        model = model_of(2)
        torch.manual_seed(5)
        history = model.fit(
            X,
            Y,
            batch_size=10,
            epochs=3,
            verbose=0,
            callbacks=[calls],
            steps_per_epoch=steps_per_epoch,
            **resume,
        )
        return history.history, [p.tolist() for p in model.parameters()]

    whole, rest = Cut(), Calls()
    expected = trained(whole)
    assert trained(rest, resume_from=tmp_path / "cut.h5") == expected
    made = [call[:2] for call in whole.made]
    assert [call[:2] for call in rest.made] == made[-len(rest.made) :]


def test_a_training_that_failed_within_a_group_goes_on_with_the_groups_rest(tmp_path):
    class Save(Calls):
        def on_exception(self, error):
            self.model.save(tmp_path / "failed.h5")

    class Failing(Own):
        fails = True

        def training_step(self, batch, batch_idx):
            if self.fails and self.current_epoch == 1 and batch_idx == 4:
                raise RuntimeError("the power is gone")
            return super().training_step(batch, batch_idx)

    def trained(calls, *, fails, **resume):
        model = model_of(3, Failing)
        model.fails = fails
        torch.manual_seed(5)
        model.fit(X, Y, batch_size=10, epochs=2, verbose=0, callbacks=[calls], **resume)
        return [p.tolist() for p in model.parameters()]

    whole, rest = Calls(), Calls()
    expected = trained(whole, fails=False)
    with pytest.raises(RuntimeError, match="power"):
        trained(Save(), fails=True)
    assert trained(rest, fails=False, resume_from=tmp_path / "failed.h5") == expected
    assert [call[:2] for call in rest.made] == [("begin", 4), ("end", 5), ("begin", 6), ("end", 6)]


def test_a_stop_is_kept_at_the_groups_end():
    class Stop(Calls):
        def on_train_batch_end(self, batch, logs):
            super().on_train_batch_end(batch, logs)
            self.model.stop_training = True

    calls = Stop()
    model_of(3).fit(X, Y, batch_size=10, epochs=5, verbose=0, callbacks=[calls])
    assert [call[:2] for call in calls.made] == [("begin", 0), ("end", 2)]


def test_files_are_saved_after_as_many_batches_as_asked(tmp_path):
    files = fitkit.callbacks.ModelCheckpoint(tmp_path / "{batch}.h5", save_freq=4)
    model_of(2).fit(X, Y, batch_size=5, epochs=1, verbose=0, callbacks=[files])
    saved = sorted(int(path.stem) for path in tmp_path.iterdir())
    assert saved[:3] == [4, 8, 12]
