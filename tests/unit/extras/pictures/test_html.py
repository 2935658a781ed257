"""What notebooks show: whole, escaped, and with nothing from elsewhere."""

import copy
import json
import math
import pickle
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

import fitkit
from fitkit.callbacks import History
from fitkit.callbacks.history import Results

VOID = {"path"}


class Reads(HTMLParser):
    """Collects texts and checks that tags are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.tags = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data.strip())


def history():
    found = History()
    found.epoch = [0, 1, 2]
    found.history = {
        "loss": [3.0, 1.0, 2.0],
        "<script>alert('x')</script>": [1.0, math.nan, math.inf],
        "matrix": [[[1]], [[2]], [[3]]],
    }
    return found


class Named(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("<b>&", torch.nn.Linear(2, 3))
        self.last = torch.nn.Linear(3, 1)
        self.last.weight.requires_grad_(False)


def compiled():
    model = fitkit.Model(Named())
    model.compile("adam", "mse", metrics=["mae"], learning_rate=0.5)
    return model


@pytest.mark.parametrize("made", [history, History, compiled])
def test_it_is_whole_escaped_and_takes_nothing_from_elsewhere(made):
    text = made()._repr_html_()
    read = Reads(text)
    assert not {"script", "b>&", "img", "link", "iframe"} & {tag for tag, _ in read.tags}
    for word in ("http", "url(", "src=", "onload", "@import"):
        assert word not in text


def test_a_history_has_a_row_a_log_with_its_best_epoch():
    texts = Reads(history()._repr_html_()).texts
    assert "of 3 epochs" in texts and "<script>alert('x')</script>" in texts
    at = texts.index("loss")
    assert [t for t in texts[at:] if t][:5] == ["loss", "3", "1", "epoch 2", "2"]
    assert "matrix" not in texts


def test_a_model_shows_its_settings_and_layers():
    texts = [text for text in Reads(compiled()._repr_html_()).texts if text]
    joined = " ".join(texts)
    assert "13 parameters, 3 of them frozen" in joined
    assert "<b>&" in texts and "Linear" in texts
    assert "optimizer" in texts and "adam" in joined and "0.5" in joined
    assert texts[texts.index("<b>&") + 2] == "9"


def test_a_model_that_is_not_compiled_or_has_no_net_can_be_shown():
    class Own(fitkit.Model):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

    assert "layer" in Own()._repr_html_()
    assert "Linear" in fitkit.Model(torch.nn.Linear(1, 1))._repr_html_()
    assert "Linear" in fitkit.Model(torch.nn.LazyLinear(1))._repr_html_()


def test_a_page_in_any_colours_can_show_it():
    """No colour of its own for text or background."""
    for text in (history()._repr_html_(), compiled()._repr_html_()):
        styles = ";".join(style for _, a in Reads(text).tags if (style := a.get("style"))).split(
            ";"
        )
        colours = {s for s in styles if s.startswith(("color", "background"))}
        assert colours <= {"color:inherit", "background:none"}


def test_an_evaluation_is_a_dict_that_a_notebook_shows_as_a_table():
    values = {"loss": 0.25, "<b>": 1.0, "matrix": [[1, 2]]}
    found = Results(values)
    assert found == values and isinstance(found, dict) and repr(found) == repr(values)
    assert json.loads(json.dumps(found)) == values
    for other in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):
        assert type(other) is dict and other == values
    texts = Reads(found._repr_html_()).texts
    assert [text for text in texts if text] == [
        "Evaluation", "log", "value", "loss", "0.25", "<b>", "1", "matrix", "[[1, 2]]",
    ]  # fmt: skip
    model = fitkit.Model(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse", metrics=["mae"])
    x, y = torch.zeros(4, 2), torch.zeros(4, 1)
    found = model.evaluate(x, y, verbose=0, return_dict=True)
    assert list(found) == ["loss", "mae"] and "mae" in Reads(found._repr_html_()).texts


def test_a_confusion_matrix_is_a_table_with_the_share_of_the_row_as_colour():
    counts = np.array([[3, 1], [0, 2]])
    found = Reads(Results({"loss": 0.5, "confusion_matrix": counts})._repr_html_())
    texts = [text for text in found.texts if text]
    assert texts[:5] == ["Evaluation", "log", "value", "loss", "0.5"]
    assert texts[5:] == [
        "confusion_matrix", "rows: true, columns: predicted", "0", "1", "0", "3", "1", "1", "2",
    ]  # fmt: skip
    cells = [a["style"] for tag, a in found.tags if tag == "td" and "rgba(63" in a["style"]]
    # 0.85 of 3/4, 1/4, 0 and 1.
    shades = [style.rpartition(",")[2].rstrip(")") for style in cells]
    assert shades == ["0.64", "0.21", "0.00", "0.85"]


@pytest.mark.parametrize("value", [[[1.0, 2.0, 3.0]], [[1.0, -1.0], [0.0, 1.0]], [[1j, 0], [0, 1]]])
def test_other_arrays_show_as_text(value):
    found = Reads(Results({"a": np.array(value)})._repr_html_())
    assert str(np.array(value)) in found.texts and not any("rgba(63" in str(a) for a in found.tags)
