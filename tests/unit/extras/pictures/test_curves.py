"""Learning curves: what is drawn, read back from matplotlib."""

import math
import subprocess
import sys

import pytest
import torch

import fitkit
from fitkit.callbacks import History
from fitkit.errors import ArgumentTypeError, ConfigurationError, MissingPackageError
from tests.limits import patience

matplotlib = pytest.importorskip("matplotlib")


def history(**values):
    found = History()
    found.history = values
    found.epoch = list(range(max(map(len, values.values()))))
    return found


def lines(axes):
    """The curves in a panel, by what they show."""
    return {line.get_label(): line for line in axes.get_lines() if line.get_label()[0] != "_"}


def test_training_and_validation_share_a_panel_and_a_colour_but_no_style():
    figure = history(loss=[3.0, 1.0, 2.0], acc=[0.1, 0.2, 0.3], val_loss=[4.0, 2.0, 3.0]).plot()
    first, second = figure.axes
    assert [a.get_title("left") for a in figure.axes] == ["loss", "acc"]
    drawn = lines(first)
    assert list(drawn["training"].get_xdata()) == [1, 2, 3]
    assert list(drawn["validation"].get_ydata()) == [4.0, 2.0, 3.0]
    assert drawn["training"].get_color() == drawn["validation"].get_color()
    assert drawn["training"].get_linestyle() != drawn["validation"].get_linestyle()
    assert [t.get_text() for t in first.get_legend().get_texts()] == ["training", "validation"]
    assert second.get_legend() is None


def test_the_best_epoch_is_the_validations_in_the_right_direction():
    figure = history(
        loss=[3.0, 1.0, 0.5],
        val_loss=[4.0, 2.0, 3.0],
        accuracy=[0.1, 0.4, 0.3],
        odd=[1.0, 2.0, 3.0],
    ).plot()
    assert [a.get_title("right") for a in figure.axes] == [
        "best 2 in epoch 2", "best 0.4 in epoch 2", "",
    ]  # fmt: skip


def test_nothing_in_matplotlib_or_pyplot_is_changed():
    import matplotlib.pyplot as plt

    before, figures = dict(matplotlib.rcParams), plt.get_fignums()
    backend = matplotlib.get_backend()
    history(loss=[1.0, 2.0]).plot()
    assert dict(matplotlib.rcParams) == before and plt.get_fignums() == figures
    assert matplotlib.get_backend() == backend


def test_it_needs_no_display_and_no_pyplot(tmp_path):
    code = f"""import sys, fitkit
history = fitkit.History()
history.history, history.epoch = {{"loss": [1.0, 2.0]}}, [0, 1]
history.plot(path={str(tmp_path / "a.png")!r})
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patience(100))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_epochs_that_are_not_finite_are_gaps_with_a_cross():
    figure = history(loss=[1.0, math.nan, math.inf, 0.5], mae=[math.nan] * 4).plot()
    drawn = lines(figure.axes[0])
    assert [math.isnan(v) for v in drawn["training"].get_ydata()] == [False, True, True, False]
    assert list(drawn["NaN or infinite"].get_xdata()) == [2, 3]
    assert list(lines(figure.axes[1])["NaN or infinite"].get_xdata()) == [1, 2, 3, 4]


def test_losses_over_decades_get_a_log_scale_and_accuracies_not():
    figure = history(loss=[100.0, 0.1], accuracy=[0.001, 0.9], learning_rate=[1.0, 1e-3]).plot()
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "linear", "log"]


@pytest.mark.parametrize("epochs", [1, 2, 31, 1000])
def test_any_number_of_epochs_can_be_drawn(epochs, tmp_path):
    values = [1.0 / (n + 1) for n in range(epochs)]
    figure = history(loss=values, val_loss=values).plot(path=tmp_path / "a.svg")
    left, right = figure.axes[0].get_xlim()
    assert 0 < left < 1 and epochs < right < 1.1 * epochs + 1
    assert (lines(figure.axes[0])["training"].get_marker() == "o") == (epochs <= 30)


def test_validations_stand_at_the_epochs_that_they_were_made_in():
    torch.manual_seed(0)
    x, y = torch.randn(8, 2), torch.randn(8, 1)
    model = fitkit.Model(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse")
    given = {"validation_data": (x, y), "validation_freq": [2, 5], "epochs": 5, "verbose": 0}
    figure = model.fit(x, y, **given).plot("loss")
    assert list(lines(figure.axes[0])["validation"].get_xdata()) == [2, 5]


def test_of_a_history_without_epochs_validations_lie_evenly():
    figure = history(loss=[1.0] * 6, val_loss=[1.0] * 3).plot()
    assert list(lines(figure.axes[0])["validation"].get_xdata()) == [2, 4, 6]


def test_metrics_are_chosen_in_the_order_asked_and_others_named():
    found = history(loss=[1.0], val_loss=[1.0], mae=[2.0], val_only=[3.0], matrix=[[[1]]])
    titles = [a.get_title("left") for a in found.plot(["val_mae", "loss", "val_only"]).axes]
    assert titles == ["mae", "loss", "val_only"]
    assert len(found.plot().axes) == 3
    with pytest.raises(ConfigurationError, match="Did you mean 'mae'"):
        found.plot("mea")
    with pytest.raises(ConfigurationError, match="loss, mae, val_only"):
        found.plot("matrix")
    with pytest.raises(ArgumentTypeError, match="metrics"):
        found.plot(3)
    with pytest.raises(ConfigurationError, match="nothing to draw"):
        History().plot()


def test_it_draws_in_a_given_figure_or_axes():
    from matplotlib.figure import Figure

    found, figure = history(loss=[1.0, 2.0], mae=[1.0, 2.0]), Figure()
    assert found.plot(figure=figure) is figure and len(figure.axes) == 2
    axes = Figure().add_subplot()
    assert found.plot("mae", axes=axes) is axes.figure
    with pytest.raises(ConfigurationError, match="loss, mae"):
        found.plot(axes=axes)
    with pytest.raises(ArgumentTypeError, match="not both"):
        found.plot(axes=axes, figure=figure)
    with pytest.raises(ArgumentTypeError, match="figure=3"):
        found.plot(figure=3)


def test_a_missing_matplotlib_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r"torch-fitkit\[plot\]"):
        history(loss=[1.0]).plot()


def test_a_notebook_can_show_the_figure():
    assert history(loss=[1.0, 2.0]).plot()._repr_png_().startswith(b"\x89PNG")
