"""Recorded steps, with a double that records on the CPU: what is repeated, and when anew."""

import contextlib
import itertools
import types
import warnings

import pytest
import torch
from torch import nn

import fitkit
from fitkit.training import graphs, learning
from fitkit.training.graphs import forget_others


class Recorder:
    """Stands for CUDA graphs: recording makes the step, and the first repetition finds it made."""

    def __init__(self, device):
        self.recorded = self.repeated = self.warmed = 0
        Recorder.last = self

    def warm_up(self, work):
        self.warmed += 1
        work()

    def record(self, work):
        self.recorded += 1
        results = work()
        is_made = True

        def replay():
            nonlocal is_made
            self.repeated += 1
            if not is_made:
                for old, new in zip(_tensors(results), _tensors(work()), strict=True):
                    old.copy_(new)
            is_made = False

        return replay, results


def _tensors(results):
    prediction, loss, parts = results
    return [prediction, loss, *parts.values()]


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(learning, "why_not", lambda *facts: None)
    monkeypatch.setattr(graphs.graphed, "__defaults__", (Recorder,))
    Recorder.last = None
    return Recorder


torch.manual_seed(0)
X, Y = torch.randn(96, 5), torch.randint(0, 3, (96,))


def trained(*, cuda_graphs, samples=96, callbacks=(), epochs=3, **arguments):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    model = fitkit.Model(net)
    arguments = {"optimizer": "adam", "learning_rate": 0.01, **arguments}
    model.compile(loss="cross_entropy", metrics=["accuracy"], accelerator="cpu",
                  cuda_graphs=cuda_graphs, **arguments)
    history = model.fit(X[:samples], Y[:samples], batch_size=8, epochs=epochs, verbose=0,
                        callbacks=list(callbacks), validation_data=(X, Y))
    return history.history, [parameter.detach().clone() for parameter in model.parameters()]


def assert_same(one, other):
    assert one[0] == other[0]
    for mine, theirs in zip(one[1], other[1], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("arguments", [
    {}, {"optimizer": "sgd"}, {"gradient_clip_val": 0.1}, {"optimizer": "rmsprop"},
    {"lr_scheduler": {"scheduler": "cosine", "interval": "step"}}, {"warmup_epochs": 2},
])
def test_repeated_steps_train_and_note_what_plain_ones_do(recorder, arguments):
    plain = trained(cuda_graphs=False, **arguments)
    assert_same(trained(cuda_graphs=True, **arguments), plain)
    assert (recorder.last.recorded, recorder.last.repeated) == (1, 3 * 12 - graphs.WARM_UP)


def test_a_short_last_batch_is_computed_without_the_graph(recorder):
    assert_same(trained(cuda_graphs=True, samples=92), trained(cuda_graphs=False, samples=92))
    assert (recorder.last.recorded, recorder.last.repeated) == (1, 3 * 11 - graphs.WARM_UP)


def test_a_rate_that_changes_between_epochs_is_recorded_anew_and_at_last_left_outside(recorder):
    def rates():
        return fitkit.callbacks.LearningRateScheduler(lambda epoch, rate: 0.01 / (epoch + 1))

    plain = trained(cuda_graphs=False, epochs=9, callbacks=[rates()])
    assert_same(trained(cuda_graphs=True, epochs=9, callbacks=[rates()]), plain)
    assert recorder.last.recorded == 1 + graphs.MOST_RECORDINGS


def test_a_layer_frozen_between_epochs_stays_as_it_is(recorder):
    class Freeze(fitkit.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                self.model.net[0].requires_grad_(False)

    plain = trained(cuda_graphs=False, callbacks=[Freeze()])
    assert_same(trained(cuda_graphs=True, callbacks=[Freeze()]), plain)
    assert recorder.last.recorded == 2


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_a_layer_that_learns_later_on_makes_a_step_as_usual_before_it_is_recorded(
    recorder, optimizer, monkeypatch
):
    class Thaw(fitkit.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.net[0].requires_grad_(epoch > 0)

    made = []
    monkeypatch.setattr(
        graphs, "forget_others", lambda *given: made.append(forget_others(*given)) or made[-1]
    )
    plain = trained(cuda_graphs=False, optimizer=optimizer, callbacks=[Thaw()])
    assert_same(trained(cuda_graphs=True, optimizer=optimizer, callbacks=[Thaw()]), plain)
    assert made == [False, False]  # recorded twice, and no running values were made in it
    assert (recorder.last.recorded, recorder.last.warmed) == (2, graphs.WARM_UP + 1)


def test_running_values_that_a_recording_made_are_dropped_with_it():
    old, new = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.Adam([old, new])
    old.grad = torch.ones(2)
    optimizer.step()
    optimizer.state[new]  # somebody looked: an empty entry is none
    known = {parameter for parameter, state in optimizer.state.items() if state}
    assert not forget_others(optimizer, known)
    new.grad = torch.ones(2)
    optimizer.step()
    assert forget_others(optimizer, known)
    assert set(optimizer.state) == {old} and optimizer.state[old]["step"] == 2


def test_a_rate_kept_in_a_tensor_in_main_memory_is_seen_to_change():
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=rate, fused=True)
    before = graphs.settings(optimizer)
    assert graphs.settings(optimizer) == before
    rate.fill_(0.2)  # as torch's schedulers do
    assert graphs.settings(optimizer) != before


class FakeCuda:
    """What torch does with streams and recordings, as far as `CudaGraphs` relies on it."""

    def __init__(self):
        self.main = self.now = "main"
        self.ended, self.recordings, self.streams = [], [], 0

    def make_stream(self, device):
        self.streams += 1
        return types.SimpleNamespace(name=f"{device} {self.streams}", device_index=device.index)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    @contextlib.contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        self.now = stream
        try:
            yield
        except RuntimeError:  # torch's end of a recording fails then, too, before its stream goes
            raise RuntimeError("operation failed due to a previous error") from None
        self.recordings.append(pool)

    def patched(self, monkeypatch):
        handles = itertools.count()
        for name, value in {
            "Stream": self.make_stream, "stream": self.stream, "graph": self.graph,
            "CUDAGraph": lambda: types.SimpleNamespace(replay=list),
            "graph_pool_handle": lambda: next(handles), "current_stream": lambda device: self.now,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool",
                            lambda *given: self.ended.append(given), raising=False)
        monkeypatch.setattr(torch, "zeros", lambda *shape, device: None)
        return self


def test_work_is_recorded_on_a_stream_of_the_devices_own(monkeypatch):
    cuda = FakeCuda().patched(monkeypatch)
    recorder = graphs.CudaGraphs(torch.device("cuda", 1))
    replay, results = recorder.record(lambda: cuda.now.name)
    assert results == "cuda:1 2" and cuda.now == cuda.main
    assert replay() == [] and cuda.recordings == [0] and not cuda.ended


def test_after_a_recording_that_failed_torch_is_as_it_was(monkeypatch):
    cuda = FakeCuda().patched(monkeypatch)

    def reads():
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError) as caught:
        graphs.CudaGraphs(torch.device("cuda", 1)).record(reads)
    assert cuda.now == cuda.main  # not the stream that recorded
    assert cuda.ended == [(1, 0)]  # the allocator waits for it no more
    assert cuda.recordings == [1]  # one that ended well: random numbers can be drawn again
    assert "not permitted" in graphs._first_line(caught.value)


def test_gradients_that_are_accumulated_later_on_are(recorder):
    def more():
        return fitkit.callbacks.GradientAccumulationScheduler({1: 2})

    plain = trained(cuda_graphs=False, callbacks=[more()])
    assert_same(trained(cuda_graphs=True, callbacks=[more()]), plain)


def test_a_recording_that_fails_is_said_once_and_training_goes_on(recorder, monkeypatch):
    def record(self, work):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Recorder, "record", record)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = trained(cuda_graphs=True)
    assert_same(found, trained(cuda_graphs=False))
    assert sum("not permitted" in str(warning.message) for warning in said) == 1


def test_batches_of_many_shapes_give_the_graph_up(recorder):
    lengths = [3 + i % 7 for i in range(40)]
    batches = [(torch.randn(n, 5), torch.randint(0, 3, (n,))) for n in lengths]
    model = fitkit.Model(nn.Linear(5, 3))
    model.compile("sgd", "cross_entropy", accelerator="cpu", cuda_graphs=True)
    with pytest.warns(UserWarning, match="differ in shape"):
        model.fit(batches[:4] + [b for b in batches if len(b[0]) != lengths[3]], verbose=0)


def test_on_the_cpu_it_says_once_why_there_is_no_graph():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = trained(cuda_graphs=True)
    assert sum("without a CUDA device" in str(warning.message) for warning in said) == 1
    assert_same(found, trained(cuda_graphs=False))


@pytest.mark.parametrize("metrics", [None, ["accuracy"], ["f1", "auroc"]])
def test_no_steps_graph_of_gradients_outlives_it(metrics):
    """Its nodes would pull the stream that they were made on into a later recording."""

    class Look(fitkit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            bias = self.model.net.bias
            (node, _), *_ = bias.view_as(bias).grad_fn.next_functions  # where its gradient goes
            marks.append(node.metadata.get("batch"))
            node.metadata["batch"] = batch

    marks = []
    model = fitkit.Model(nn.Linear(5, 3))
    model.compile("adam", "cross_entropy", metrics=metrics, accelerator="cpu")
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[Look()])
    assert marks == [None] * 12


def test_a_layer_with_hooks_is_not_recorded(recorder):
    model = fitkit.Model(nn.Linear(5, 3))
    seen = []
    model.net.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    model.compile("sgd", "cross_entropy", accelerator="cpu", cuda_graphs=True)
    with pytest.warns(UserWarning, match="hooks"):
        model.fit(X, Y, batch_size=8, verbose=0)
    assert seen == [8] * 12 and recorder.last.recorded == 0
