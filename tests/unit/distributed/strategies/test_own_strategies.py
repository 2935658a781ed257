"""Strategies that users add: by a decorator, or by an installed package's entry point."""

import importlib
import sys

import pytest
import torch

import fitkit
from fitkit.strategies import Engine, SingleDeviceStrategy

PACKAGE = """
from fitkit.strategies import Engine, SingleDeviceStrategy

class Careful(SingleDeviceStrategy):
    name = "careful"
"""

ENTRY_POINTS = """[fitkit.strategies]
careful = careful_training:Careful
broken = careful_training:Nothing
text = careful_training:__name__
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package as pip would leave it: a module, and what its metadata say of entry points."""
    (tmp_path / "careful_training.py").write_text(PACKAGE)
    metadata = tmp_path / "careful_training-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: careful\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield
    sys.modules.pop("careful_training", None)


def test_an_installed_packages_strategy_is_known_by_its_name(installed):
    assert "careful_training" not in sys.modules
    model = fitkit.Model(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse", strategy="Careful")
    assert type(model._fitkit.compilation.strategy).__name__ == "Careful"
    model.fit(torch.ones(4, 2), torch.ones(4, 1), verbose=0)


def test_an_entry_point_that_cant_be_imported_names_itself_and_harms_no_other(installed):
    model = fitkit.Model(torch.nn.Linear(2, 1))
    with pytest.raises(fitkit.ConfigurationError, match=r"ning:Nothing.*AttributeError"):
        model.compile(strategy="broken")
    with pytest.raises(TypeError, match="isn't a subclass of"):
        model.compile(strategy="text")
    with pytest.raises(fitkit.ConfigurationError, match="'broken', 'careful'"):
        model.compile(strategy="carefull_and_slow")


def test_a_registered_class_is_known_and_another_can_not_take_its_name():
    def run_the_cell():
        @fitkit.strategies.register("test_only_strategy")
        class Own(SingleDeviceStrategy):
            name = "test_only_strategy"

        return Own

    run_the_cell()
    own = run_the_cell()  # again, as in a notebook: the new class replaces the former
    model = fitkit.Model(torch.nn.Linear(2, 1))
    model.compile(strategy="test-only-strategy")
    assert type(model._fitkit.compilation.strategy) is own
    with pytest.raises(ValueError, match="is there already"):
        fitkit.strategies.register("ddp")(own)


def test_an_engine_makes_gradients_and_updates_of_one_training_and_is_let_go_of(tmp_path):
    calls = []

    class Noting(Engine):
        def backward(self, loss):
            calls.append("backward")
            loss.backward()

        def clip(self, parameters, limit, algorithm):
            calls.append(f"clip {limit} {algorithm}")
            super().clip(parameters, limit, algorithm)

        def update(self, optimizer):
            calls.append("update")
            optimizer.step()

        def after_update(self):
            calls.append("after_update")

        def average_ranks(self):
            calls.append("average_ranks")

        def whole(self, make):
            calls.append("whole")
            return make()

        def end(self, *, wanted):
            calls.append(f"end {wanted}")

        def abandon(self):
            calls.append("abandon")

    class Own(SingleDeviceStrategy):
        name = "noting"
        has_engine = True

        def engine_for(self, module, optimizers):
            return Noting()

    x, y = torch.ones(4, 2), torch.ones(4, 1)
    model, plain = fitkit.Model(torch.nn.Linear(2, 1)), fitkit.Model(torch.nn.Linear(2, 1))
    plain.load_state_dict(model.state_dict())
    model.compile("sgd", "mse", gradient_clip_val=0.5, strategy=Own())
    plain.compile("sgd", "mse", gradient_clip_val=0.5)
    plain.fit(x, y, verbose=0)
    model.fit(x, y, verbose=0)
    update = ["backward", "clip 0.5 norm", "update", "after_update"]
    assert calls == [*update, "average_ranks", "end True"]
    assert torch.equal(model.net.weight, plain.net.weight)
    strategy = model._fitkit.compilation.strategy
    assert strategy.engine is None

    def fail(batch, logs):
        model.save_weights(tmp_path / "cut.h5")
        raise ArithmeticError("on purpose")

    calls.clear()
    failing = fitkit.callbacks.LambdaCallback(on_train_batch_end=fail)
    with pytest.raises(ArithmeticError):
        model.fit(x, y, verbose=0, callbacks=failing)
    assert calls == [*update, "average_ranks", "whole", "abandon"] and strategy.engine is None


def test_an_engine_is_let_go_of_when_fit_cannot_begin():
    abandoned = []

    class Noting(Engine):
        def abandon(self):
            abandoned.append(self)

    class Own(SingleDeviceStrategy):
        name = "noting"
        has_engine = True

        def engine_for(self, module, optimizers):
            return Noting()

    def fail(params):
        raise ArithmeticError("on purpose")

    x, y = torch.ones(4, 2), torch.ones(4, 1)
    model = fitkit.Model(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse", warmup_epochs=1, strategy=Own())
    strategy = model._fitkit.compilation.strategy
    with pytest.raises(fitkit.ConfigurationError, match="warmup_epochs"):
        model.fit(iter([(x, y)]), verbose=0)
    assert len(abandoned) == 1 and strategy.engine is None
    failing = fitkit.callbacks.Callback()
    failing.set_params = fail
    with pytest.raises(ArithmeticError):
        model.fit(x, y, verbose=0, callbacks=failing)
    assert len(abandoned) == 2 and strategy.engine is None
    model.evaluate(x, y, verbose=0)
