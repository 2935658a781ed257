"""Frames of pandas, in its own number types and in Arrow's, are the numbers that NumPy has."""

import numpy as np
import pytest
import torch
from torch import nn

import fitkit
from fitkit.errors import ArgumentTypeError, ConfigurationError
from tests.nets import dense

pandas = pytest.importorskip("pandas")

WHOLE, REAL, FLAGS = np.arange(8), np.arange(8) / 4, np.arange(8) % 2 == 0
COLUMNS = {"a": WHOLE, "b": REAL, "c": FLAGS}
RIGHT = np.column_stack([WHOLE, REAL, FLAGS]).astype("float32")
LABELS = WHOLE % 3


def arrow(frame):
    pytest.importorskip("pyarrow")
    return frame.convert_dtypes(dtype_backend="pyarrow")


KINDS = {
    "NumPy's": lambda frame: frame,
    "pandas' own": lambda frame: frame.astype({"a": "Int64", "b": "Float64", "c": "boolean"}),
    "narrow": lambda frame: frame.astype({"a": "Int8", "b": "Float32"}),
    "convert_dtypes": lambda frame: frame.convert_dtypes(),
    "Arrow's": arrow,
}


def compiled(net, **options):
    model = fitkit.Model(net)
    model.compile(
        "sgd", "cross_entropy", learning_rate=0.1, accelerator="cpu", devices=1, **options
    )
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_gives_the_numbers_of_its_array_in_every_verb(kind):
    frame = KINDS[kind](pandas.DataFrame(COLUMNS))
    labels = KINDS[kind](pandas.DataFrame({**COLUMNS, "a": LABELS}))["a"]
    found = []
    for x, y in ((RIGHT, LABELS), (frame, labels)):
        model = compiled(dense(3, 4, 3))
        history = model.fit(x, y, batch_size=3, epochs=2, shuffle=False, verbose=0).history["loss"]
        loss = model.evaluate(x, y, verbose=0)
        found.append([history, loss, model.predict(x, verbose=0)])
    assert found[0][:2] == found[1][:2]
    assert np.array_equal(found[0][2], found[1][2])


MISSING = {  # a column's dtype: what its missing value becomes; None: refused
    "Float64": float("nan"),
    "float64[pyarrow]": float("nan"),
    "Int64": None,
    "boolean": None,
    "int64[pyarrow]": None,
    "bool[pyarrow]": None,
}


@pytest.mark.parametrize("dtype", MISSING)
def test_missing_numbers_are_nan_and_missing_whole_numbers_are_refused_with_advice(dtype):
    if "pyarrow" in dtype:
        pytest.importorskip("pyarrow")
    frame = pandas.DataFrame({"a": pandas.array([1, 0, None], dtype), "b": [0.5, 1.0, 2.0]})
    model = compiled(nn.Identity())
    if MISSING[dtype] is None:
        zero = False if "bool" in dtype else 0
        advice = rf"x\['a'\]\.fillna\({zero}\).*x\['a'\]\.astype\('Float64'\)"
        with pytest.raises(ArgumentTypeError, match=advice):
            model.predict(frame, verbose=0)
        zeros, gaps = frame.copy(), frame.copy()
        zeros["a"] = zeros["a"].fillna(zero)
        assert model.predict(zeros, verbose=0).tolist() == [[1, 0.5], [0, 1], [0, 2]]
        gaps["a"] = gaps["a"].astype("Float64")
        frame = gaps
    given = model.predict(frame, verbose=0)
    assert given[:2].tolist() == [[1, 0.5], [0, 1]]
    assert np.isnan(given[2, 0]) and given[2, 1] == 2


def test_codes_of_categories_go_into_an_embedding_as_the_message_says():
    net = nn.Sequential(nn.Embedding(3, 2), nn.Flatten(), nn.Linear(4, 3))
    frame = pandas.DataFrame({name: pandas.Categorical(list("abcabcab")) for name in "pq"})
    with pytest.raises(ArgumentTypeError, match=r"x\['p'\] = x\['p'\]\.cat\.codes"):
        compiled(net).fit(frame, LABELS, verbose=0)
    x = frame
    x["p"], x["q"] = x["p"].cat.codes, x["q"].cat.codes
    wide = compiled(net).predict(np.column_stack([LABELS, LABELS]), verbose=0)
    assert np.array_equal(compiled(net).predict(x, verbose=0), wide)
    compiled(net).fit(x, LABELS, verbose=0)


def test_narrow_codes_of_an_array_are_refused_with_what_to_write():
    model = compiled(nn.Sequential(nn.Embedding(3, 2), nn.Flatten(), nn.Linear(4, 3)))
    codes = np.column_stack([LABELS, LABELS]).astype("int8")
    with pytest.raises(ConfigurationError, match=r"codes .*x\.astype\('int64'\)") as caught:
        model.fit(codes, LABELS, verbose=0)
    assert caught.value.code == "FK002"
    model.fit(codes.astype("int64"), LABELS, verbose=0)


def containers():
    sparse = pytest.importorskip("scipy.sparse")
    return {
        "a frame": pandas.DataFrame(COLUMNS).convert_dtypes(),
        "sparse": sparse.csr_matrix(RIGHT),
        "float16": RIGHT.astype("float16"),
        "reversed": RIGHT[::-1].copy()[::-1],
        "float64": RIGHT.astype("float64"),
    }


@pytest.mark.parametrize("kind", ["a frame", "sparse", "float16", "reversed", "float64"])
def test_examples_of_summaries_exports_and_plans_are_read_as_predict_reads_data(kind, tmp_path):
    x = containers()[kind]
    model = compiled(dense(3, 4, 3))
    right = model.predict(RIGHT, verbose=0)
    assert np.array_equal(model.predict(x, verbose=0), right)
    rows = str(model.summary(x)), str(model.summary(RIGHT))
    assert rows[0] == rows[1]
    model.export(tmp_path / "a.pt2", example=x)
    program = torch.export.load(tmp_path / "a.pt2").module()
    np.testing.assert_allclose(program(torch.tensor(RIGHT)).detach(), right, rtol=1e-6)
    plans = [fitkit.plan(model, 2, "ddp", (batch, LABELS)) for batch in (x, RIGHT)]
    assert plans[0].costs == plans[1].costs
