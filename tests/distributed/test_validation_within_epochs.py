"""Validations within epochs on two ranks: after the same batches, with one process's values."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import fitkit
from fitkit.callbacks import Callback, EarlyStopping
from tests.nets import classification
from tests.reference import assert_same_weights

pytestmark = pytest.mark.timeout(60)

X, Y = classification(48, 4, seed=1)
V = classification(11, 4, seed=2)


def compiled(devices):
    torch.manual_seed(0)
    model = fitkit.Model(torch.nn.Linear(4, 3))
    strategy = "ddp_spawn" if devices > 1 else "auto"
    model.compile(
        "sgd", "cross_entropy", metrics=["accuracy"], learning_rate=0.3, accelerator="cpu",
        devices=devices, strategy=strategy,
    )  # fmt: skip
    return model


class StopsOneRank(Callback):
    def on_validation_within_epoch(self, batch, logs):
        if batch == 3 and not self.model.is_global_zero:
            self.model.stop_training = True


@pytest.mark.parametrize(
    "callbacks",
    [[], [EarlyStopping("val_accuracy", patience=2)]],
    ids=["alone", "EarlyStopping"],
)
@pytest.mark.slow
def test_two_ranks_validate_where_one_process_does(callbacks):
    options = {"validation_data": V, "validation_freq": 0.3, "epochs": 2, "shuffle": False,
               "verbose": 0, "callbacks": callbacks}  # fmt: skip
    one, two = compiled(1), compiled(2)
    expected = one.fit(X, Y, batch_size=8, **options)
    found = two.fit(X, Y, batch_size=4, **options)
    assert [list(e) for e in found.validations] == [list(e) for e in expected.validations]
    for entry, other in zip(found.validations, expected.validations, strict=True):
        assert entry == pytest.approx(other, rel=1e-5)
    torch.testing.assert_close(two.net.weight, one.net.weight)


def test_one_ranks_wish_to_stop_at_a_validation_stops_all():
    model = compiled(2)
    history = model.fit(
        X, Y, batch_size=4, epochs=3, validation_data=V, validation_freq=1 / 3, verbose=0,
        callbacks=StopsOneRank(),
    )  # fmt: skip
    assert [entry["batches"] for entry in history.validations] == [2, 4]
    assert len(history.epoch) == 1


class Part(IterableDataset):
    """A rank's own part: 5 batches of rank 0's, 2 of rank 1's."""

    shards_itself = True

    def __iter__(self):
        rank = torch.distributed.get_rank()
        rows = slice(0, 20) if rank == 0 else slice(20, 28)
        return zip(X[rows], Y[rows], strict=True)


class PartOfLength(Part):
    def __len__(self):
        alone = not torch.distributed.is_initialized()
        return 20 if alone or torch.distributed.get_rank() == 0 else 8


@pytest.mark.parametrize(("data", "frequency"), [(Part, {"batches": 2}), (PartOfLength, 0.4)])
def test_ranks_with_unequal_parts_validate_after_the_same_batches(data, frequency):
    model = compiled(2)
    history = model.fit(
        DataLoader(data(), 4), validation_data=V, validation_freq=frequency, verbose=0
    )
    assert [entry["batches"] for entry in history.validations] == [2, 4, 5]
    assert history.validations[-1]["val_loss"] == pytest.approx(
        model.evaluate(*V, verbose=0, return_dict=True)["loss"], rel=1e-5
    )


def test_two_ranks_go_on_where_they_were_cut(tmp_path):
    class Cut(Callback):
        comes_last = True

        def on_train_batch_end(self, batch, logs):
            if (self.model.current_epoch, batch) == (1, 1):
                self.model.save(tmp_path / "cut.h5")
                raise RuntimeError("cut")

    def fitted(callbacks=(), **more):
        model = compiled(2)
        torch.manual_seed(2)
        held = DataLoader(torch.utils.data.TensorDataset(*V), 3, shuffle=True)
        return model, model.fit(
            X, Y, batch_size=4, epochs=2, validation_data=held, validation_freq=0.3, verbose=0,
            callbacks=list(callbacks), **more,
        )  # fmt: skip

    whole, expected = fitted()
    with pytest.raises(Exception, match="cut"):
        fitted([Cut()])
    again, found = fitted(resume_from=tmp_path / "cut.h5")
    assert_same_weights(again, whole)
    assert found.validations == expected.validations
