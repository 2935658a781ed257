"""The confusion matrix: counts against scikit-learn's, and the cells' texts."""

import itertools

import numpy as np
import pytest
import torch

from fitkit import pictures
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.pictures import confusion_counts

RANDOM = np.random.default_rng(0)
TRUE, SCORES = RANDOM.integers(0, 4, 200), RANDOM.normal(size=(200, 4))


def confusion_matrix(*data, **options):
    """The picture, where matplotlib can draw it."""
    pytest.importorskip("matplotlib")
    return pictures.confusion_matrix(*data, **options)


def cells(axes):
    """The texts of cells by (row, column)."""
    places = {text.get_position()[::-1]: text.get_text() for text in axes.texts}
    return {(int(row), int(column)): text for (row, column), text in places.items()}


def test_counts_are_scikit_learns_whatever_the_kind_of_input():
    expected = pytest.importorskip("sklearn.metrics").confusion_matrix(TRUE, SCORES.argmax(1))
    for true in (TRUE, TRUE[:, None], TRUE.tolist(), torch.tensor(TRUE), np.eye(4)[TRUE]):
        for predicted in (SCORES, torch.tensor(SCORES, requires_grad=True), SCORES.argmax(1) * 1.0):
            counts, names = confusion_counts(true, predicted)
            assert (counts == expected).all() and names == ["0", "1", "2", "3"]


@pytest.mark.parametrize("normalize", ["true", "pred", "all"])
def test_normalized_cells_are_scikit_learns_in_percent(normalize):
    metrics = pytest.importorskip("sklearn.metrics")
    expected = metrics.confusion_matrix(TRUE, SCORES.argmax(1), normalize=normalize)
    axes = confusion_matrix(TRUE, SCORES, normalize=normalize).axes[0]
    found = cells(axes)
    assert found == {(r, c): f"{100 * expected[r, c]:.0f}%" for r in range(4) for c in range(4)}
    assert np.allclose(axes.images[0].get_array(), expected)


def test_rows_are_true_classes_and_columns_predicted_ones():
    figure = confusion_matrix(["b", "b", "a"], ["a", "b", "a"], labels=["b", "a"])
    axes = figure.axes[0]
    assert cells(axes) == {(0, 0): "1", (0, 1): "1", (1, 1): "1"}
    assert [label.get_text() for label in axes.get_yticklabels()] == ["b", "a"]
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("true", "predicted")


def test_classes_that_do_not_occur_have_a_row_where_labels_name_them():
    counts, names = confusion_counts([0, 2], [0, 0], ["cat", "dog", "bird"])
    assert counts.tolist() == [[1, 0, 0], [0, 0, 0], [1, 0, 0]] and names == ["cat", "dog", "bird"]
    assert not np.isnan(confusion_matrix([0, 2], [0, 0], names).axes[0].images[0].get_array()).any()


@pytest.mark.parametrize("classes", [2, 30, pytest.param(300, marks=pytest.mark.slow)])
def test_long_names_stay_inside_the_picture_and_do_not_overlap(classes):
    names = [f"a class with a rather long name, number {n}" for n in range(classes)]
    figure = confusion_matrix(np.arange(classes), np.arange(classes), names)
    figure.canvas.draw()
    axes = figure.axes[0]
    whole = figure.bbox
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        boxes = [label.get_window_extent() for label in labels]
        assert all(whole.x0 <= b.x0 and whole.y0 <= b.y0 and b.x1 <= whole.x1 for b in boxes)
        assert not any(one.overlaps(two) for one, two in itertools.pairwise(boxes))
    assert all(size >= 4.5 for size in [text.get_fontsize() for text in axes.texts])


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ConfigurationError, match="2 samples and y_pred 1"):
        confusion_counts([0, 1], [0])
    with pytest.raises(ConfigurationError, match="empty"):
        confusion_counts([], [])
    with pytest.raises(ConfigurationError, match=r"y_pred > 0.5"):
        confusion_counts([0, 1], np.array([[0.2], [0.9]]))
    with pytest.raises(ConfigurationError, match="without 2"):
        confusion_counts([0, 2], [0, 0], ["a", "b"])
    with pytest.raises(ConfigurationError, match="numbers or both have names"):
        confusion_counts([0, 1], ["a", "b"])
    with pytest.raises(ArgumentTypeError, match="labels"):
        confusion_counts([0, 1], [0, 1], "ab")
    with pytest.raises(ArgumentTypeError, match="y_true"):
        confusion_counts(np.zeros((2, 2, 2)), [0, 1])
    with pytest.raises(ConfigurationError, match="normalize"):
        pictures.confusion_matrix([0, 1], [0, 1], normalize="rows")
