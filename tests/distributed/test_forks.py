"""On each of two ranks, a loader's worker that never begins is replaced, in every verb."""

import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fitkit
from tests.stuck import after_forks, never_begins
from tests.unit.training.test_forks import Rows

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.* was forked and never began"),
]


class OnRanks(Rows):
    """As each pass begins, the process that a rank forks next is made to stop."""

    def __init__(self, is_faulty):
        self.is_faulty = is_faulty

    def set_epoch(self, number):
        if self.is_faulty and torch.utils.data.get_worker_info() is None:
            os.environ["FITKIT_FORK_PATIENCE"] = "0.25"
            after_forks[:] = [never_begins]


class Forked(fitkit.callbacks.Callback):
    """Tells whether every rank has forked."""

    def on_train_end(self, logs=None):
        os.environ.pop("FITKIT_FORK_PATIENCE", None)
        assert after_forks == []

    on_test_end = on_predict_end = on_train_end


VERBS = {
    "fit": lambda model, x, **more: model.fit(x, epochs=2, validation_data=x, **more).history,
    "evaluate": fitkit.Model.evaluate,
    "predict_batches": lambda model, x, **more: [*model.predict_batches(x, **more)],
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_gives_the_numbers_that_it_gives_where_all_workers_begin(verb):
    def numbers(is_faulty):
        torch.manual_seed(0)
        model = fitkit.Model(nn.Linear(4, 3))
        model.compile("sgd", "cross_entropy", accelerator="cpu", devices=2, learning_rate=0.01)
        x = DataLoader(OnRanks(is_faulty), batch_size=4, num_workers=2)
        return VERBS[verb](model, x, verbose=0, callbacks=[Forked()]), torch.rand(3)

    torch.testing.assert_close(numbers(True), numbers(False), rtol=0, atol=0)
