"""`memory_format` and `matmul_precision`: set for a call, and put back."""

from functools import partial

import pytest
import torch
from torch import nn

import fitkit
from fitkit.training.torch_flags import MATMUL_PRECISION

torch.manual_seed(0)
X, Y = torch.randn(40, 3, 8, 8), torch.randint(0, 4, (40,))


class Noting(nn.Conv2d):
    """Notes how its weight and its input are laid out."""

    def forward(self, x):
        self.seen = tuple(
            tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (self.weight, x)
        )
        self.precision = torch.get_float32_matmul_precision()
        return super().forward(x)


def model_of(**arguments):
    torch.manual_seed(1)
    net = nn.Sequential(
        Noting(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    model = fitkit.Model(net)
    model.compile("sgd", "cross_entropy", accelerator="cpu", **arguments)
    return model


def fit(model, **options):
    torch.manual_seed(2)
    return model.fit(X, Y, batch_size=8, epochs=2, verbose=0, **options).history["loss"]


@pytest.mark.parametrize("layout", ["channels_last", torch.channels_last])
@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
def test_images_and_weights_are_laid_out_by_channels_for_the_call_only(verb, layout):
    model = model_of(memory_format=layout)
    data = (X,) if verb == "predict" else (X, Y)
    getattr(model, verb)(*data, batch_size=8, verbose=0)
    assert model.net[0].seen == (True, True)
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    assert X.is_contiguous()


def test_the_layout_changes_numbers_by_rounding_alone():
    plain, other = model_of(), model_of(memory_format="channels_last")
    assert fit(other) == pytest.approx(fit(plain), rel=1e-5)
    found, expected = (model.predict(X, verbose=0, as_numpy=False) for model in (other, plain))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("suffix", [".h5", ".safetensors", ".pt"])
def test_files_hold_the_same_in_either_layout(tmp_path, suffix):
    class Save(fitkit.callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            assert self.model.net[0].weight.stride()[1] == 1  # while it runs
            self.model.save_weights(tmp_path / f"weights{suffix}")

    model, other = model_of(memory_format="channels_last"), model_of()
    fit(model, callbacks=[Save()])
    other.load_weights(tmp_path / f"weights{suffix}")
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs) and theirs.is_contiguous()


@pytest.mark.parametrize(("first", "then"), [(None, "channels_last"), ("channels_last", None)])
def test_an_optimizers_running_values_follow_a_change_of_layout(first, then):
    def trained(*formats):
        model = model_of()
        model.compile(partial(torch.optim.SGD, momentum=0.9), learning_rate=0.01)
        for memory_format in formats:
            model.compile(memory_format=memory_format)
            fit(model)
        return [p.detach() for p in model.parameters()], model

    changed, model = trained(first, then)
    plain, _ = trained(None, None)
    for mine, theirs in zip(changed, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    for parameter, state in model.optimizer.state.items():
        assert state["momentum_buffer"].stride() == parameter.stride()


def state():
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = "contradiction"
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    return older, *(backend.fp32_precision for backend in backends)


@pytest.fixture
def torch_put_back():
    before = state()
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cuda.matmul.fp32_precision = before[1]
    torch.backends.mkldnn.matmul.fp32_precision = before[2]


def test_the_precision_of_products_holds_for_the_call(torch_put_back):
    before = state()
    model = model_of(matmul_precision="high")
    fit(model)
    assert model.net[0].precision == "high"
    assert state() == before


@pytest.mark.parametrize("own", ["none", "older", "newer"])
@pytest.mark.parametrize("word", ["highest", "high", "medium"])
def test_what_the_user_had_set_in_either_way_is_put_back(own, word, torch_put_back):
    if own == "older":
        torch.set_float32_matmul_precision("medium")
    elif own == "newer":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    before = state()
    with MATMUL_PRECISION.held(word):
        assert state()[0] == word
    assert state()[1:] == before[1:]
    if own != "newer":
        assert state() == before
