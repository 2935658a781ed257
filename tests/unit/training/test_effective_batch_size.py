"""compile(effective_batch_size=…): each update sees so many samples, however they are cut."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit.callbacks import GradientAccumulationScheduler, LambdaCallback
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.training.settings import parts_of_update
from tests.nets import classification, dense
from tests.reference import assert_same_weights, compiled, plain_loop, slices

X, LABELS = classification(100, 6, seed=1)


def model(**arguments):
    own = {"learning_rate": 0.5, "accelerator": "cpu", "devices": 1, **arguments}
    return compiled(dense(6, 8, 3), "sgd", **own)


def fit(model, *data, **arguments):
    arguments = {"epochs": 2, "shuffle": False, "verbose": 0, **arguments}
    return model.fit(*(data or (X, LABELS)), **arguments)


@pytest.mark.parametrize("batch_size", [4, 10, 24, 32, 1000])
def test_updates_are_those_of_batches_of_that_size(batch_size):
    one, other = model(effective_batch_size=24), dense(6, 8, 3)
    assert one.effective_batch_size == 24
    fit(one, batch_size=batch_size)
    plain_loop(other, torch.optim.SGD(other.parameters(), 0.5), slices(X, LABELS, 24), epochs=2)
    assert_same_weights(one.net, other, atol=1e-6)
    assert one.global_step == 2 * 5


@pytest.mark.parametrize(
    ("ranks", "size", "batch", "parts"),
    [(1, 32, 32, 16), (2, 32, 32, 8), (8, 32, 32, 2), (8, 100, 64, 1), (1, 300, 256, 2),
     (1, 33, 32, 16), (512, 32, 1, 1), (4, 24, 16, 8)],
)  # fmt: skip
def test_the_batch_is_the_largest_that_divides_and_may_be_held(ranks, size, batch, parts):
    assert parts_of_update(512, ranks, size, is_fixed=False) == parts
    assert 512 // ranks // parts == batch


def test_what_cannot_be_divided_is_said():
    with pytest.raises(ConfigurationError, match=r"among 3 ranks\. Write 510 or 513"):
        parts_of_update(512, 3, 32, is_fixed=False)
    with pytest.raises(ConfigurationError, match="divides them is 1.*batch_size=512"):
        parts_of_update(509, 1, 32, is_fixed=False)
    with pytest.raises(ConfigurationError, match="2 ranks with batches of 3. Write 510 or 516"):
        parts_of_update(512, 2, 3, is_fixed=True)
    with pytest.raises(ConfigurationError, match="Write 128, .*in the loader"):
        parts_of_update(64, 2, 64, is_fixed=True)
    one = model(effective_batch_size=24)
    with pytest.raises(ConfigurationError, match="x makes its own batches"):
        fit(one, slices(X, LABELS, 8))
    with pytest.raises(ConfigurationError, match="GradientAccumulationScheduler sets"):
        fit(one, callbacks=GradientAccumulationScheduler({0: 2}))
    with pytest.raises(ConfigurationError, match="and so does accumulate_grad_batches=2"):
        one.compile(accumulate_grad_batches=2)
    for wrong in (0, 1.5, "512"):
        with pytest.raises((ConfigurationError, ArgumentTypeError), match="effective_batch_size"):
            one.compile(effective_batch_size=wrong)


def test_a_loader_keeps_its_batches():
    one, other = model(effective_batch_size=40), dense(6, 8, 3)
    data = TensorDataset(X, LABELS)
    batches = []
    count = LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch))
    fit(one, DataLoader(data, 10), callbacks=count)
    assert len(batches) == 20
    plain_loop(other, torch.optim.SGD(other.parameters(), 0.5), slices(X, LABELS, 40), epochs=2)
    assert_same_weights(one.net, other, atol=1e-6)
    fit(one, data, batch_size=20)
    with pytest.raises(ConfigurationError, match="batches of 7"):
        fit(one, DataLoader(data, 7))


def test_single_batches_and_what_tries_out_are_free_of_it():
    one = model(effective_batch_size=24)
    one.train_on_batch(X[:5], LABELS[:5])
    assert one.global_step == 1
    assert fitkit.tune.batch_size(one, X, LABELS, max_val=16) == 16
    found = fitkit.tune.learning_rate(one, X, LABELS, num_training=20)
    assert len(found.losses) > 3
    fitkit.plan(one, 2, "ddp", (X[:8], LABELS[:8]))


def test_a_cut_training_goes_on_bit_for_bit(tmp_path):
    def save(batch, logs):
        if whole.global_step == 3 and not (tmp_path / "cut.h5").exists():
            whole.save(tmp_path / "cut.h5")

    whole = model(effective_batch_size=24)
    fit(whole, shuffle=True, batch_size=8, callbacks=LambdaCallback(on_train_batch_end=save))
    again = model(effective_batch_size=24)
    fit(again, shuffle=True, batch_size=8, resume_from=tmp_path / "cut.h5")
    assert_same_weights(again, whole)
