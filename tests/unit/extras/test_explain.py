"""What an error says when memory runs out, and that the next call has it again."""

import gc
import weakref

import pytest
import torch
from torch import nn

import fitkit
from fitkit.extras.explain import size

X, Y = torch.randn(64, 4), torch.randint(0, 3, (64,))


class Greedy(nn.Module):
    """Runs out of memory in one of its forward passes."""

    def __init__(self, failure):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.failure, self.passes, self.fails_at = failure, 0, 3
        self.activation = lambda: None

    def forward(self, x):
        self.passes += 1
        activation = self.layer(x) * 2
        self.activation = weakref.ref(activation)
        if self.passes == self.fails_at:
            self.failure()
        return activation


def cuda_error():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def cpu_error():
    torch.empty(10**15)


def compiled(failure, **arguments):
    net = Greedy(failure)
    model = fitkit.Model(net)
    model.compile("adam", "cross_entropy", accelerator="cpu", **arguments)
    return net, model


@pytest.mark.parametrize("failure", [cuda_error, cpu_error])
def test_fit_says_what_was_in_use_and_what_needs_less_in_numbers(failure):
    _, model = compiled(failure)
    with pytest.raises(fitkit.OutOfMemoryError) as caught:
        model.fit(X, Y, batch_size=16, verbose=0)
    said = str(caught.value)
    # 15 numbers of 4 bytes; Adam has two for each, and a counter for each of two tensors.
    for words in (
        "in fit with batches of 16 samples", "parameters and buffers 60 bytes",
        "optimizer state 128 bytes", "batch_size=8 with accumulate_grad_batches=2",
        "checkpoint", "strategy='fsdp'", "188 bytes",
    ):  # fmt: skip
        assert words in said
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_nothing_of_the_failed_step_stays_though_the_error_is_kept_and_fit_works_again():
    net, model = compiled(cuda_error)
    with pytest.raises(fitkit.OutOfMemoryError) as kept:
        model.fit(X, Y, batch_size=16, verbose=0)
    gc.collect()
    assert kept.value is not None and net.activation() is None
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history["loss"]) == 2


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_other_verbs_suggest_smaller_batches_alone(verb):
    _, model = compiled(cuda_error)
    data = (X, Y) if verb == "evaluate" else (X,)
    words = rf"in {verb} with batches of 5.*batch_size=3"
    with pytest.raises(fitkit.OutOfMemoryError, match=words) as caught:
        getattr(model, verb)(*data, batch_size=5, verbose=0)
    assert "accumulate" not in str(caught.value) and "fsdp" not in str(caught.value)


def test_batches_of_a_loader_may_be_halved_and_those_of_one_sample_not():
    _, model = compiled(cuda_error)
    with pytest.raises(fitkit.OutOfMemoryError, match="batches of half as many samples"):
        model.fit([(X[:8], Y[:8])] * 4, verbose=0)
    _, model = compiled(cuda_error)
    with pytest.raises(fitkit.OutOfMemoryError) as caught:
        model.fit(X, Y, batch_size=1, verbose=0)
    assert "batch_size=" not in str(caught.value)


def test_accumulated_batches_are_doubled_too():
    _, model = compiled(cuda_error, accumulate_grad_batches=3)
    words = "batch_size=8 with accumulate_grad_batches=6"
    with pytest.raises(fitkit.OutOfMemoryError, match=words):
        model.fit(X, Y, batch_size=16, verbose=0)


def test_other_errors_stay_as_they_are():
    def failure():
        raise RuntimeError("out of cheese")

    _, model = compiled(failure)
    with pytest.raises(RuntimeError, match="cheese") as caught:
        model.fit(X, Y, verbose=0, batch_size=8)
    assert not isinstance(caught.value, fitkit.FitkitError)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1500, "1.5 kB"),
        (99_500_000, "100 MB"),
        (1_620_000_000, "1.6 GB"),
        (999_600, "1.0 MB"),
    ],
)
def test_sizes_are_as_people_read_them(count, words):
    assert size(count) == words
