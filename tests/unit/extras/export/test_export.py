"""Exported files, run by what a user runs them with, against the net itself."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import fitkit
from tests.reference import assert_same_weights

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class TwoHeads(nn.Module):
    """Two inputs, a dict of two outputs."""

    def __init__(self):
        super().__init__()
        self.wide, self.deep = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, wide, deep, scale=1.0):
        both = self.wide(wide) + self.deep(deep) * scale
        return {"kind": both, "size": both.sum(1, keepdim=True)}


class Branching(nn.Module):
    """Python code that depends on a value."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else self.layer(-x)


def trained():
    """A model whose running statistics and dropout make its modes differ."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
    )
    model = fitkit.Model(net)
    model.compile("sgd", "cross_entropy")
    model.fit(X, torch.arange(6) % 3, epochs=2, verbose=0)
    return model


def in_evaluation(net, *args, **kwargs):
    """What a copy of a net gives in evaluation mode."""
    with torch.no_grad():
        return copy.deepcopy(net).eval()(*args, **kwargs)


def onnx_session(path):
    runtime = pytest.importorskip("onnxruntime")
    return runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def test_a_torch_export_file_takes_batches_of_any_size(tmp_path):
    model = trained()
    model.train()
    before = copy.deepcopy(model.state_dict())
    model.net[3].eval()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(5)
    expected_draw = torch.rand(1)
    torch.manual_seed(5)
    model.export(tmp_path / "net.pt2", example=X)
    assert torch.equal(torch.rand(1), expected_draw)
    assert [module.training for module in model.modules()] == modes
    assert_same_weights(model, before)
    run = torch.export.load(tmp_path / "net.pt2").module()
    for size in (1, 2, 5):
        torch.testing.assert_close(run(X[:size]), in_evaluation(model.net, X[:size]))
    assert [path.name for path in tmp_path.iterdir()] == ["net.pt2"]


def test_an_onnx_file_takes_batches_of_any_size(tmp_path):
    model = trained()
    pytest.importorskip("onnxscript")
    model.export(tmp_path / "net.onnx", input_shape=(4,), opset_version=20)
    session = onnx_session(tmp_path / "net.onnx")
    (given,) = session.get_inputs()
    assert (given.name, given.shape) == ("input", ["batch", 4])
    for size in (1, 2, 5):
        (found,) = session.run(None, {"input": X[:size].numpy()})
        np.testing.assert_allclose(found, in_evaluation(model.net, X[:size]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("as_arguments", [tuple, dict], ids=["by position", "by keyword"])
def test_several_inputs_and_outputs(tmp_path, as_arguments):
    net = TwoHeads()
    wide, deep = X, X[:, :2].clone()
    named = {"wide": wide, "deep": deep}
    example = named if as_arguments is dict else (wide, deep)
    model = fitkit.Model(net)
    model.export(tmp_path / "net.pt2", example=example)
    pytest.importorskip("onnxscript")
    model.export(tmp_path / "net.onnx", example=example)
    wanted = in_evaluation(net, wide[:3], deep[:3])
    run = torch.export.load(tmp_path / "net.pt2").module()
    found = run(wide=wide[:3], deep=deep[:3]) if as_arguments is dict else run(wide[:3], deep[:3])
    torch.testing.assert_close(found, wanted)
    session = onnx_session(tmp_path / "net.onnx")
    assert [item.name for item in session.get_inputs()] == ["wide", "deep"]
    results = session.run(None, {name: value[:3].numpy() for name, value in named.items()})
    for result, value in zip(results, wanted.values(), strict=True):
        np.testing.assert_allclose(result, value, rtol=1e-4, atol=1e-6)


def test_a_subclass_exports_its_own_forward_and_a_fixed_batch(tmp_path):
    class Doubled(fitkit.Model):
        def forward(self, x):
            return 2 * self.net(x)

    model = Doubled(nn.Linear(4, 3))
    model.export(tmp_path / "net.pt2", example=X[:1], dynamic_batch=False)
    run = torch.export.load(tmp_path / "net.pt2").module()
    torch.testing.assert_close(run(X[:1]), 2 * in_evaluation(model.net, X[:1]))
    with pytest.raises(Exception, match="size"):
        run(X)


def test_other_dimensions_can_be_free(tmp_path):
    model = fitkit.Model(nn.Linear(4, 3))
    free = torch.export.Dim.DYNAMIC
    model.export(
        tmp_path / "net.pt2", example=torch.randn(2, 5, 4), dynamic_shapes=({0: free, 1: free},)
    )
    run = torch.export.load(tmp_path / "net.pt2").module()
    assert run(torch.randn(3, 7, 4)).shape == (3, 7, 3)


def test_a_jit_compiled_net_exports_and_stays_compiled(tmp_path):
    model = trained()
    called = []
    model.compile(jit_compile={"backend": lambda graph, inputs: called.append(1) or graph.forward})
    model.export(tmp_path / "net.pt2", example=X)
    assert not called and model.net._compiled_call_impl is not None
    run = torch.export.load(tmp_path / "net.pt2").module()
    torch.testing.assert_close(run(X), in_evaluation(trained().net, X))


def test_a_net_that_torch_cannot_trace_says_why_and_leaves_no_file(tmp_path):
    (tmp_path / "net.pt2").write_bytes(b"before")
    model = fitkit.Model(Branching())
    with pytest.raises(fitkit.ConfigurationError, match="torch.export can't trace.*torch.where"):
        model.export(tmp_path / "net.pt2", example=X)
    assert model.training
    assert (tmp_path / "net.pt2").read_bytes() == b"before"
    with pytest.raises(fitkit.ConfigurationError, match="fails with this example"):
        fitkit.Model(nn.Linear(5, 3)).export(tmp_path / "net.pt2", example=X)


class Full(nn.Linear):
    def forward(self, x):
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_an_index_that_is_not_there_and_memory_that_runs_out_are_said_as_fit_says_them(tmp_path):
    table, tokens = nn.Sequential(nn.Embedding(5, 4), nn.Flatten()), torch.tensor([[1, 9]])
    with pytest.raises(fitkit.ConfigurationError, match=r"Embedding\(5, 4\).*got 9") as caught:
        fitkit.Model(table).export(tmp_path / "net.pt2", example=tokens)
    assert caught.value.code == "FK012"
    full = fitkit.Model(Full(4, 3))
    for call in (full.summary, lambda x: full.export(tmp_path / "net.pt2", example=x)):
        with pytest.raises(fitkit.OutOfMemoryError, match=r"\(6, 4\)") as short:
            call(X)
        assert short.value.code == "FK040"
    assert not list(tmp_path.iterdir())


def test_a_file_that_computes_something_else_is_not_kept(tmp_path):
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    model = fitkit.Model(Noisy())
    with pytest.raises(fitkit.ConfigurationError, match=r"batch of 1 output 0 is up to .* away"):
        model.export(tmp_path / "net.pt2", example=X)
    assert not list(tmp_path.iterdir())
    model.export(tmp_path / "net.pt2", example=X, check=False)
    assert torch.export.load(tmp_path / "net.pt2").module()(X).shape == X.shape


def test_half_precision_nets_export(tmp_path):
    model = fitkit.Model(nn.Linear(4, 3).to(torch.bfloat16))
    model.export(tmp_path / "net.pt2", example=X.to(torch.bfloat16))
    pytest.importorskip("onnxscript")
    model.export(tmp_path / "net.onnx", example=X.to(torch.bfloat16), check=False)
    run = torch.export.load(tmp_path / "net.pt2").module()
    assert run(X[:1].to(torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "net.h5"}, "end it in .pt2"),
        ({"path": "net.onnx", "format": "torch_export"}, "writes .pt2 files"),
        ({"path": "net.onnx", "format": "onx"}, "Did you mean 'onnx'"),
        ({"path": 3}, "string or a Path"),
        ({"path": "net.pt2", "opset_version": 18}, "opset_version is for format='onnx'"),
        ({"path": "net.pt2", "example": None}, "neither an example nor"),
        ({"path": "net.pt2", "input_shape": (4,)}, "not both"),
        ({"path": "net.pt2", "exmple": X}, "Did you mean example"),
        ({"path": "net.pt2", "example": X[:0]}, "has no samples"),
    ],
)  # fmt: skip
def test_mistakes_are_said_before_anything_is_written(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(fitkit.ConfigurationError, match=message):
        fitkit.Model(nn.Linear(4, 3)).export(**{"example": X, **arguments})
    assert not list(tmp_path.iterdir())


def test_lazy_nets_and_missing_folders_are_named(tmp_path):
    with pytest.raises(fitkit.ConfigurationError, match="lazy"):
        fitkit.Model(nn.LazyLinear(3)).export(tmp_path / "net.pt2", example=X)
    with pytest.raises(fitkit.CheckpointError, match="no folder"):
        fitkit.Model(nn.Linear(4, 3)).export(tmp_path / "none" / "net.pt2", example=X)


def test_onnx_without_its_packages_names_the_extra(tmp_path, monkeypatch):
    from fitkit.extras.export import formats

    monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'torch-fitkit\[onnx\]'"):
        fitkit.Model(nn.Linear(4, 3)).export(tmp_path / "net.onnx", example=X)
