"""Which file a training goes on from, and what is said or refused before anything is loaded."""

import functools
import os
import warnings

import pytest
import torch

import fitkit
from fitkit.callbacks import BackupAndRestore, Callback, ModelCheckpoint
from fitkit.errors import CheckpointError, ConfigurationError
from tests import reference
from tests.nets import linear

X, Y = torch.randn(64, 6), torch.randint(3, (64,))


def compiled(optimizer="adam", **arguments):
    return reference.compiled(linear(6, 3), optimizer, accelerator="cpu", **arguments)


def cut(path):
    with open(path, "r+b") as file:
        file.truncate(700)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "saved.h5"
    model = compiled(learning_rate=0.01)
    model.fit(X, Y, epochs=1, verbose=0)
    model.save(path)
    return path


def test_last_passes_over_a_damaged_file_with_a_warning_that_names_it(tmp_path):
    saves = ModelCheckpoint(tmp_path / "{epoch}.h5")
    model = compiled()
    model.fit(X, Y, epochs=2, verbose=0, callbacks=saves)
    os.utime(tmp_path / "1.h5", (1, 1))
    cut(tmp_path / "2.h5")
    again = compiled()
    fresh = ModelCheckpoint(tmp_path / "{epoch}.h5")
    with pytest.warns(UserWarning, match=r"2\.h5 is damaged.* continues from .*1\.h5"):
        history = again.fit(X, Y, epochs=3, verbose=0, callbacks=fresh, resume_from="last")
    assert history.epoch == [0, 1, 2]
    assert again.global_step == 6
    for name in os.listdir(tmp_path):
        cut(tmp_path / name)
    with pytest.raises(CheckpointError, match="None of 3 checkpoints can be used"):
        compiled().fit(X, Y, epochs=3, verbose=0, callbacks=fresh, resume_from="last")


def test_a_callback_whose_files_are_all_damaged_leaves_it_to_another(tmp_path):
    one = ModelCheckpoint(tmp_path / "a.h5")
    two = BackupAndRestore(tmp_path / "b", delete_checkpoint=False)
    compiled().fit(X, Y, epochs=1, verbose=0, callbacks=[one, two])
    cut(tmp_path / "a.h5")
    with pytest.warns(UserWarning, match=r"a\.h5 is damaged.* continues from .*backup-"):
        history = compiled().fit(
            X, Y, epochs=2, verbose=0, callbacks=[one, two], resume_from="last"
        )
    assert history.epoch == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"learning_rate": 0.1}, r"the file's lr=0\.01 \(compile gives 0\.1\)\."),
        ({"accumulate_grad_batches": 2}, r"compile's accumulate_grad_batches=2 \(the file has 1\)"),
        ({"precision": "bf16-mixed"}, r"compile's precision='bf16-mixed' \(the file has '32-true"),
        ({"lr_scheduler": "cosine"}, r"compile's lr_scheduler='cosine' \(the file has None\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_compile_says_otherwise_than_the_file_is_named(saved, arguments, said):
    model = compiled(**{"learning_rate": 0.01, **arguments})
    with pytest.warns(UserWarning, match=said):
        model.load(saved)
    assert model.optimizer.param_groups[0]["lr"] == 0.01


def test_other_words_for_the_same_say_nothing(saved):
    model = compiled(torch.optim.Adam, learning_rate=0.01, precision=32)
    model.compile(loss="Cross Entropy")
    never_compiled = fitkit.Model(torch.nn.Linear(6, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load(saved)
        never_compiled.load(saved)


def test_other_data_or_another_scheduler_leave_the_model_as_it_was(tmp_path):
    class Cut(Callback):
        def on_train_batch_end(self, batch, logs):
            self.model.save(tmp_path / "cut.h5")
            self.model.stop_training = True

    compiled(lr_scheduler="cosine").fit(X, Y, epochs=2, verbose=0, callbacks=Cut())
    model = compiled(lr_scheduler="cosine")
    before = reference.copied_state(model)
    with pytest.raises(ConfigurationError, match="samples=64.* samples=32"):
        model.fit(X[:32], Y[:32], epochs=2, verbose=0, resume_from=tmp_path / "cut.h5")
    step = torch.optim.lr_scheduler.StepLR
    other = compiled(lr_scheduler=functools.partial(step, step_size=1))
    with pytest.raises(CheckpointError, match="scheduler CosineAnnealingLR.* StepLR"):
        other.fit(X, Y, epochs=2, verbose=0, resume_from=tmp_path / "cut.h5")
    for each in (model, other):
        assert each.global_step == 0
        reference.assert_same_weights(each, before)


def test_a_warm_up_that_the_file_lacks_does_not_slow_the_training(saved):
    model = compiled(learning_rate=0.01, warmup_epochs=1)
    with pytest.warns(UserWarning, match="warmup_epochs=1"):
        model.fit(X, Y, epochs=2, verbose=0, resume_from=saved)
    assert model.optimizer.param_groups[0]["lr"] == 0.01


def test_lightnings_files_give_their_weights_and_are_not_written(tmp_path):
    model, path = compiled(), tmp_path / "lightning.ckpt"
    state = {f"model.{name}": tensor + 1 for name, tensor in model.net.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 3, "hyper_parameters": {"lr": 0.1}}, path)
    with pytest.warns(UserWarning, match="all names begin with 'model"):
        model.load_weights(path)
    assert torch.equal(model.net.weight, state["model.weight"])
    with pytest.raises(ConfigurationError, match="one of Lightning's files"):
        model.save_weights(path)
    with pytest.raises(ConfigurationError, match="names of checkpoints end in .h5"):
        model.save(path)
