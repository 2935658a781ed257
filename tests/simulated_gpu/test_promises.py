"""What the pages promise about GPUs, where equal numbers don't show it."""

import copy
import os
import threading
import time

import pytest
import simulation
import torch
import torch.distributed as dist
from torch import nn

import fitkit
from fitkit.extras import free_devices
from fitkit.extras.launchers import group
from tests.limits import patience
from tests.nets import classification

pytestmark = pytest.mark.skipif(simulation.KIND != "cuda", reason="these are CUDA's promises")

X, Y = classification(48, 6)


def compiled(net, devices, **options):
    model = fitkit.Model(net)
    hardware = {"accelerator": "gpu", "devices": devices}
    model.compile("sgd", "cross_entropy", learning_rate=0.1, **hardware, **options)
    return model


class Placed(nn.Module):
    """Refuses to compute where it isn't on the current device."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        assert x.device == self.layer.weight.device
        assert x.device.index == torch.cuda.current_device()
        return self.layer(x)


@pytest.mark.parametrize("strategy", ["auto", "dp"])
def test_the_chosen_device_is_the_current_one_in_each_verb(strategy):
    model = compiled(Placed(), [3] if strategy == "auto" else [1, 3], strategy=strategy)
    model.fit(X, Y, batch_size=8, validation_data=(X, Y), verbose=0)
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    assert torch.cuda.current_device() == 0


class Where(fitkit.callbacks.Callback):
    """Each rank's device, and how it speaks to the others."""

    def on_train_end(self, logs=None):
        device = next(self.model.net.parameters()).device
        assert device.index == torch.cuda.current_device() == [1, 3][self.model.global_rank]
        assert "cuda:nccl" in dist.get_backend_config()
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"  # a notebook's kernel stays


def test_each_rank_has_a_device_of_its_own_and_speaks_by_nccl():
    model = compiled(nn.Linear(6, 3), [1, 3])
    model.fit(X, Y, batch_size=8, callbacks=[Where()], verbose=0)
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ


class Copies(fitkit.callbacks.Callback):
    """Evaluates a copy of the model on each rank, in the middle of its training."""

    def on_epoch_end(self, epoch, logs=None):
        made = copy.copy(self.model)
        found = made.evaluate(X, Y, verbose=0)
        device = next(made.net.parameters()).device  # the model's own evaluation would move it back
        assert device.index == torch.cuda.current_device() == [1, 3][self.model.global_rank]
        assert found == self.model.evaluate(X, Y, verbose=0)


def test_a_copy_within_fit_has_the_free_gpus_that_were_chosen_for_the_original(monkeypatch):
    monkeypatch.setattr(free_devices, "find_usable_cuda_devices", lambda count: [1, 3])
    model = compiled(nn.Linear(6, 3), 2, auto_select_gpus=True)
    model.fit(X, Y, batch_size=8, callbacks=[Copies()], verbose=0)


class Gone(fitkit.callbacks.Callback):
    """Lets rank 0 wait in main memory's exchange for a rank that does something else."""

    def on_train_batch_end(self, batch, logs=None):
        if self.model.global_rank:
            time.sleep(60)
        threading.Timer(1, group.abort).start()
        began = time.monotonic()
        try:
            dist.recv(torch.zeros(1), src=1)
        except RuntimeError as error:
            raise InterruptedError(time.monotonic() - began) from error


def test_a_watch_ends_exchanges_of_main_memory_beside_those_of_nccl():
    with pytest.raises(InterruptedError) as caught:
        compiled(nn.Linear(6, 3), [1, 3]).fit(X, Y, batch_size=8, callbacks=[Gone()], verbose=0)
    assert caught.value.args[0] < 10


class WithoutRankOne(fitkit.strategies.DDPSpawnStrategy):
    """Its rank 1 fails before it enters the process group, where rank 0 waits."""

    def init_dist_connection(self, store=None):
        if self.world.rank == 1:
            raise OSError("no card")
        return super().init_dist_connection(store)


def test_a_rank_that_never_enters_the_group_beside_nccl_is_told_at_once():
    began = time.monotonic()
    with pytest.raises(fitkit.WorkerError, match="Rank 1 failed: OSError: no card"):
        compiled(nn.Linear(6, 3), [1, 3], strategy=WithoutRankOne()).fit(X, Y, verbose=0)
    assert time.monotonic() - began < patience(20)


def test_labels_that_count_are_weighed_in_float64():
    """Torch divides whole numbers, as counts are, in float32."""
    torch.manual_seed(0)
    net, labels = nn.Linear(6, 3).double(), Y.where(torch.arange(48) % 8 > 4, -100)
    plain = copy.deepcopy(net)
    nn.functional.cross_entropy(plain(X.double()), labels).backward()
    model = compiled(net, [1], precision="64-true", accumulate_grad_batches=7)
    model.fit(X.double(), labels, batch_size=7, shuffle=False, verbose=0)
    expected = plain.weight - 0.1 * plain.weight.grad
    torch.testing.assert_close(net.weight.cpu(), expected, rtol=0, atol=1e-14)


def test_sparse_gradients_are_refused_by_name_where_devices_cannot_exchange_them():
    net = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 3))
    x = torch.randint(5, (48, 2))
    compiled(net, [1]).fit(x, Y, batch_size=8, verbose=0)
    with pytest.raises(fitkit.ConfigurationError, match="gradients of net.0 are sparse"):
        compiled(net, [1, 3]).fit(x, Y, batch_size=8, verbose=0)


def test_each_replica_has_a_device_of_its_own():
    seen = set()

    class Seen(Placed):
        def forward(self, x):
            seen.add(x.device.index)
            return super().forward(x)

    compiled(Seen(), [1, 3], strategy="dp").fit(X, Y, batch_size=8, verbose=0)
    assert seen == {1, 3}


def test_an_update_with_infinite_gradients_is_left_out_as_a_plain_loop_does_it():
    x = X.clone()
    x[17] = 1e6  # too large for float16
    torch.manual_seed(0)
    net = nn.Linear(6, 3).to("cuda:1")
    optimizer, scaler = torch.optim.SGD(net.parameters(), 0.1), torch.amp.GradScaler("cuda")
    for part, labels in zip(x.split(8), Y.split(8), strict=True):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            prediction = net(part.to("cuda:1"))
        loss = nn.functional.cross_entropy(prediction.float(), labels.to("cuda:1"))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.manual_seed(0)
    model = compiled(
        nn.Linear(6, 3), [1], precision="16-mixed",
        lr_scheduler={"scheduler": Counted, "interval": "step"},
    )  # fmt: skip
    model.fit(x, Y, batch_size=8, shuffle=False, verbose=0)
    torch.testing.assert_close(model.net.weight.cpu(), net.weight.cpu())
    assert Counted.steps == 6 - 1  # a schedule moves with updates


class Counted(torch.optim.lr_scheduler.LRScheduler):
    steps = -1

    def get_lr(self):
        Counted.steps += 1
        return self.base_lrs


def test_a_dropout_goes_on_with_its_numbers_on_another_gpu(tmp_path):
    def made(devices):
        torch.manual_seed(5)
        return compiled(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)), devices)

    whole = made([1])
    whole.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    half = made([1])
    half.fit(X, Y, batch_size=8, epochs=1, verbose=0)
    half.save(tmp_path / "half.h5")
    torch.manual_seed(99)
    rest = made([2])
    rest.fit(X, Y, batch_size=8, epochs=2, verbose=0, resume_from=tmp_path / "half.h5")
    for one, other in zip(rest.net.parameters(), whole.net.parameters(), strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=0, atol=0)


def filled_again(buffers):
    """Batches in pinned buffers of the user's own, which each batch fills again."""
    for rows in zip(X.split(8), Y.split(8), strict=True):
        for buffer, values in zip(buffers, rows, strict=True):
            buffer.copy_(values)
        yield tuple(buffers)


class FilledAgain:
    def __init__(self):
        self.buffers = [torch.empty(8, 6).pin_memory(), torch.empty(8).long().pin_memory()]

    def __iter__(self):
        return filled_again(self.buffers)


def test_a_pinned_buffer_may_be_filled_again_while_its_batch_is_fetched():
    plain, buffered = (compiled(nn.Linear(6, 3), [1]) for _ in range(2))
    buffered.net.load_state_dict(plain.net.state_dict())
    expected = plain.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    with simulation.recorded("race") as races:
        found = buffered.fit(FilledAgain(), epochs=2, verbose=0).history
    assert found["loss"] == pytest.approx(expected["loss"]) and not races
    outputs = buffered.predict(FilledAgain(), verbose=0)
    assert outputs == pytest.approx(buffered.predict(X, batch_size=8, verbose=0))


def test_batches_on_the_device_are_copied_and_data_kept_there_too():
    x, y = X.to("cuda:1"), Y.to("cuda:1")
    before = x.clone()

    def loss(p, t):
        t[t == 2] = -100
        return nn.functional.cross_entropy(p, t)

    model = fitkit.Model(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3)))
    model.compile("sgd", loss, accelerator="gpu", devices=[1])
    each = list(zip(x.split(8), y.split(8), strict=True))
    for data in ({"x": each}, {"x": X, "y": Y, "batch_size": 8}, {"x": x, "y": y}):
        model.fit(**data, epochs=2, shuffle=False, verbose=0)
        assert len({model.evaluate(**data, verbose=0) for _ in range(2)}) == 1
        model.predict(data["x"], verbose=0)
    assert torch.equal(x, before) and (y == 2).any()


def test_batches_leave_main_memory_from_where_the_device_fetches_them(monkeypatch):
    sent, send = [], torch.Tensor.to

    def to(tensor, *given, **named):
        if named.get("non_blocking") and tensor.is_cpu and tensor.ndim:
            sent.append(tensor.is_pinned())
        return send(tensor, *given, **named)

    model = compiled(nn.Linear(6, 3), [1])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 8)
    model.fit(loader, verbose=0)
    monkeypatch.setattr(torch.Tensor, "to", to)
    model.fit(loader, verbose=0)
    assert sent.count(True) == 2 * 6
