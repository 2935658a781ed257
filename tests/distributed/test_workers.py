"""ddp_spawn on real processes: the numbers of one process, and failures that end."""

import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

import fitkit
from fitkit.callbacks import Callback, LambdaCallback
from fitkit.extras.launchers.workers import end_workers
from fitkit.losses.names import LOSSES
from fitkit.metrics.conversions import as_given
from fitkit.metrics.named import NAMES, Named
from fitkit.metrics.sums import Mean
from tests.limits import patience
from tests.nets import classification, dense
from tests.reference import assert_same_weights, plain_loop

pytestmark = pytest.mark.timeout(60)

X, Y = classification(103, 6, seed=1)


def compiled(net=None, devices=2, **arguments):
    model = fitkit.Model(net or dense(6, 8, 3))
    settings = {
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "loss": "cross_entropy",
        "metrics": ["accuracy"],
        "accelerator": "cpu",
        "devices": devices,
        "strategy": "ddp_spawn" if devices > 1 else "auto",
    }
    model.compile(**{**settings, **arguments})
    return model


def plain_training(batches_of_epoch, epochs=2):
    """One process that learns from the given batches of each epoch; its net and epoch losses."""
    net = dense(6, 8, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = [plain_loop(net, optimizer, batches_of_epoch(epoch))[0] for epoch in range(epochs)]
    return net, losses


def cut(indices, size):
    return [(X[part], Y[part]) for part in torch.as_tensor(indices).split(size)]


assert_close = functools.partial(assert_same_weights, rtol=1e-5, atol=1e-5)


def test_layers_in_evaluation_mode_stay_so_on_all_ranks():
    def frozen():
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(6, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(),
            torch.nn.Linear(8, 3),
        )
        for layer in net[1:3]:
            layer.eval()
        return net

    net, plain = frozen(), frozen()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain_loop(plain, optimizer, [(X[:64], Y[:64])], 2)
    model = compiled(net, optimizer="sgd", learning_rate=0.1)
    model.fit(X[:64], Y[:64], batch_size=32, epochs=2, verbose=0, validation_data=(X, Y))
    assert_close(net, plain)
    assert torch.equal(net[1].running_mean, torch.zeros(8))
    assert [layer.training for layer in net] == [True, False, False, True]


def test_models_in_two_threads_take_turns_with_the_workers():
    models = [compiled() for _ in range(2)]
    alone = [model.predict(X, verbose=0) for model in models]
    found = [[], []]

    def predict(index):
        for _ in range(3):
            found[index].append(models[index].predict(X, verbose=0))

    threads = [threading.Thread(target=predict, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    for results, expected in zip(found, alone, strict=True):
        assert len(results) == 3
        assert all(np.array_equal(result, expected) for result in results)


class Rows(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index].numpy(), int(Y[index])


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(X, Y, strict=True)


# ---------------------------------------------------------------------- numbers


KINDS = ["arrays", "loader", "workers", "dataset", "stream", "list", "generator"]


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("arrays", 3),
        pytest.param("loader", 3, marks=pytest.mark.slow),
        *((kind, 2) for kind in KINDS),
    ],
)
def test_n_ranks_learn_as_one_process_with_n_times_the_batch(kind, ranks):
    size = 16 // ranks
    data = {
        "arrays": lambda: (X, Y),
        "loader": lambda: (DataLoader(TensorDataset(X, Y), batch_size=size),),
        "workers": lambda: (DataLoader(Rows(), batch_size=size, num_workers=1),),
        "dataset": lambda: (Rows(),),
        "stream": lambda: (DataLoader(Stream(), batch_size=size),),
        "list": lambda: (cut(range(103), size),),
        "generator": lambda: (iter(cut(range(96), size) * 2),),
    }[kind]()
    samples, steps = (96, {"steps_per_epoch": 6}) if kind == "generator" else (103, {})
    model = compiled(devices=ranks)
    history = model.fit(*data, batch_size=size, epochs=2, shuffle=False, verbose=0, **steps).history
    reference, losses = plain_training(lambda epoch: cut(range(samples), size * ranks))
    assert_close(model.net, reference)
    assert history["loss"] == pytest.approx(losses, abs=1e-6)


def test_a_shuffling_loader_keeps_the_order_of_one_process():
    torch.manual_seed(3)
    model = compiled()
    model.fit(DataLoader(Rows(), batch_size=8, shuffle=True), epochs=2, verbose=0)
    torch.manual_seed(3)
    loader = DataLoader(Rows(), batch_size=16, shuffle=True)
    reference, _ = plain_training(lambda epoch: [(x, y) for x, y in loader])
    assert_close(model.net, reference)


def test_shuffled_arrays_follow_the_seed_and_not_the_number_of_ranks():
    nets = []
    for devices in (1, 2):
        torch.manual_seed(4)
        model = compiled(devices=devices)
        torch.manual_seed(4)
        model.fit(X, Y, batch_size=16 // devices, epochs=2, verbose=0)
        nets.append(model.net)
    assert_close(*nets)


def test_a_weighted_sampler_is_drawn_once_for_all_ranks():
    weights = torch.rand(103, generator=torch.Generator().manual_seed(5))
    made = lambda size: DataLoader(  # noqa: E731
        TensorDataset(X, Y), batch_size=size, sampler=WeightedRandomSampler(weights, 60)
    )
    torch.manual_seed(6)
    model = compiled()
    model.fit(made(8), epochs=2, verbose=0)
    torch.manual_seed(6)
    loader = made(16)
    reference, _ = plain_training(lambda epoch: list(loader))
    assert_close(model.net, reference)


@pytest.mark.parametrize("count", [1, 2, 17, 103])
def test_evaluation_and_prediction_are_exact_and_in_order(count):
    model = compiled(metrics=["accuracy", "f1", "auc"] if count > 17 else ["accuracy"])
    x, y = X[:count], Y[:count]
    values = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    with torch.no_grad():
        logits = model.net.cpu()(x)
    assert values["loss"] == pytest.approx(F.cross_entropy(logits, y).item(), abs=1e-6)
    assert values["accuracy"] == pytest.approx((logits.argmax(1) == y).float().mean().item())
    if count > 17:
        reference = pytest.importorskip("sklearn.metrics")
        expected = reference.f1_score(y, logits.argmax(1), average="macro")
        assert values["f1"] == pytest.approx(expected)
        expected = reference.roc_auc_score(y, logits.softmax(1), multi_class="ovr", average="macro")
        assert values["auc"] == pytest.approx(expected, abs=1e-6)
    predicted = model.predict(DataLoader(TensorDataset(x), batch_size=8), verbose=0)
    assert np.allclose(predicted, logits.numpy(), atol=1e-6)


def test_weights_that_are_computed_from_others_learn_on_all_ranks():
    def net():
        torch.manual_seed(0)
        return nn.Sequential(
            parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh(),
            parametrizations.orthogonal(nn.Linear(8, 8)), nn.Linear(8, 3),
        )  # fmt: skip

    one, two = net(), net()
    for module, ranks in ((one, 1), (two, 2)):
        model = fitkit.Model(module)
        hardware = {"accelerator": "cpu", "devices": ranks}
        model.compile("sgd", "cross_entropy", learning_rate=0.1, **hardware)
        model.fit(X, Y, batch_size=12 // ranks, shuffle=False, verbose=0)
    assert_same_weights(two, one, atol=1e-6)


def test_accumulated_batches_of_all_ranks_are_one_batch():
    model = compiled(accumulate_grad_batches=3)
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    reference, _ = plain_training(lambda epoch: cut(range(103), 48))
    assert_close(model.net, reference)


def test_sample_weights_and_validation_count_on_all_ranks():
    weight = torch.rand(103)
    model = compiled(learning_rate=None)
    history = model.fit(
        X,
        Y,
        sample_weight=weight,
        batch_size=103,
        epochs=1,
        shuffle=False,
        validation_data=(X, Y),
        verbose=0,
    ).history
    losses = F.cross_entropy(dense(6, 8, 3)(X), Y, reduction="none")
    assert history["loss"][0] == pytest.approx((losses * weight).mean().item(), abs=1e-6)
    with torch.no_grad():
        after = F.cross_entropy(model.net.cpu()(X), Y).item()
    assert history["val_loss"][0] == pytest.approx(after, abs=1e-6)


# ---------------------------------------------------------------------- the caller's process


def test_the_callers_model_optimizer_and_callbacks_hold_the_trained_state():
    class Collects(Callback):
        def __init__(self):
            self.losses = []

        def on_epoch_end(self, epoch, logs):
            self.losses.append(logs["loss"])

    collects, seen = Collects(), []
    model = compiled()
    net, before = model.net, model.net[0].weight.detach().clone()
    optimizer = model.optimizer
    history = model.fit(
        X,
        Y,
        epochs=2,
        verbose=0,
        callbacks=[collects, LambdaCallback(on_train_end=lambda logs: seen.append(os.getpid()))],
    )
    assert model.net is net and not torch.equal(net[0].weight, before)
    assert model.optimizer is optimizer and optimizer.state
    assert collects.losses == history.history["loss"] == model.history.history["loss"]
    assert seen == [os.getpid()]
    assert (model.world_size, model.global_rank, model.device_ids) == (2, 0, [0, 1])
    assert model.effective_batch_size == 64
    assert not torch.distributed.is_initialized()


def test_a_second_fit_goes_on_from_the_first():
    model = compiled()
    for _ in range(2):
        model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    reference, _ = plain_training(lambda epoch: cut(range(103), 16))
    assert_close(model.net, reference)


def test_large_data_reach_the_workers_without_being_changed_there():
    class Scribbles(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(64, 3)

        def forward(self, x):
            return self.layer(x)

    x = torch.randn(8192, 64)
    model = compiled(Scribbles())
    expected = model.net(x).detach().numpy()
    assert np.allclose(model.predict(x, batch_size=1024, verbose=0), expected, atol=1e-5)
    assert np.allclose(model.predict(x.numpy(), batch_size=1024, verbose=0), expected, atol=1e-5)


def test_a_callback_stops_all_ranks_at_the_same_step():
    model = compiled()

    def stop(batch, logs):
        if batch == 1 and model.is_global_zero:
            model.stop_training = True

    history = model.fit(
        X, Y, batch_size=8, epochs=3, verbose=0, callbacks=LambdaCallback(on_train_batch_end=stop)
    )
    assert history.epoch == [0]
    model.fit(X, Y, verbose=0)


def test_nan_on_one_rank_stops_all_ranks_at_the_same_step():
    class Breaks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.calls = torch.nn.Linear(6, 3), 0

        def forward(self, x):
            self.calls += 1
            broken = self.calls == 3 and dist.is_initialized() and dist.get_rank() == 1
            return self.layer(x) * (float("nan") if broken else 1.0)

    model, steps = compiled(Breaks()), []

    def stop(batch, logs):
        steps.append(batch)
        if logs["loss"] != logs["loss"]:
            model.stop_training = True

    history = model.fit(
        X, Y, batch_size=8, epochs=3, verbose=0, callbacks=LambdaCallback(on_train_batch_end=stop)
    )
    assert steps == [0, 1, 2] and history.epoch == [0]
    assert history.history["loss"][0] != history.history["loss"][0]  # all ranks' mean, not rank 0's


def test_an_evaluation_inside_a_callback_runs_on_all_ranks():
    class Evaluates(Callback):
        def on_epoch_end(self, epoch, logs):
            logs["again"] = self.model.evaluate(X, Y, verbose=0)[0]

    history = compiled().fit(X, Y, validation_data=(X, Y), verbose=0, callbacks=Evaluates()).history
    assert history["again"] == pytest.approx(history["val_loss"])


# ---------------------------------------------------------------------- failures


def at_second_batch(act, rank=1):
    def hook(batch, logs):
        if dist.get_rank() == rank and batch == 1:
            act()

    return LambdaCallback(on_train_batch_end=hook)


def raise_mine():
    raise KeyError("mine")


def raise_another_kind():
    raise ValueError("another kind of error")


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (raise_another_kind, "Rank 1 failed: ValueError: another kind"),
        pytest.param(  # test_faults.py has one whose data workers live on
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            "Rank 1 was ended by SIGKILL",
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda: os._exit(3), "Rank 1 left with status 3", marks=pytest.mark.slow),
        pytest.param(lambda: sys.exit(0), "Rank 1 failed: SystemExit", marks=pytest.mark.slow),
    ],
    ids=["exception", "kill", "exit", "sys.exit"],
)
def test_a_rank_that_fails_ends_the_call_with_its_traceback(act, words):
    started = time.monotonic()
    with pytest.raises(fitkit.WorkerError, match=words) as caught:
        compiled().fit(X, Y, batch_size=8, epochs=5, verbose=0, callbacks=at_second_batch(act))
    assert time.monotonic() - started < patience(30)  # never a hang; not a measurement
    assert caught.value.rank == 1
    if act is raise_another_kind:
        assert "raise_another_kind" in caught.value.remote_traceback
        assert "strategy='ddp'" not in str(caught.value)  # as for what is missed in a registry
    compiled().fit(X, Y, verbose=0)  # the next call works


def test_a_registry_that_a_constructor_has_filled_is_missed_with_the_way_out(tmp_path, monkeypatch):
    (tmp_path / "filled_registry.py").write_text(
        textwrap.dedent("""
        from torch import nn

        FUNCTIONS = {}

        class Net(nn.Linear):
            def __init__(self):
                super().__init__(6, 3)
                FUNCTIONS["last"] = nn.Identity()

            def forward(self, x):
                return FUNCTIONS["last"](super().forward(x))
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    from filled_registry import Net

    with pytest.raises(fitkit.WorkerError, match="strategy='ddp'") as caught:
        compiled(Net()).fit(X, Y, verbose=0)
    assert "KeyError: 'last'" in caught.value.remote_traceback


def test_an_error_of_rank_0_stays_itself_and_ends_the_others():
    with pytest.raises(KeyError, match="mine"):
        compiled().fit(X, Y, batch_size=8, verbose=0, callbacks=at_second_batch(raise_mine, rank=0))
    compiled().fit(X, Y, verbose=0)


def test_a_rank_that_hangs_is_named_with_the_place_where_it_hangs():
    strategy = fitkit.strategies.DDPSpawnStrategy(timeout=patience(2))
    with pytest.raises(fitkit.WorkerError, match=r"Rank 1 did not take part") as caught:
        compiled(strategy=strategy).fit(
            X, Y, batch_size=8, verbose=0, callbacks=at_second_batch(lambda: time.sleep(600))
        )
    assert "time.sleep(600)" in str(caught.value)


class WithoutRankOne(fitkit.strategies.DDPStrategy):
    """A strategy whose rank 1 fails before it enters the process group, where rank 0 waits."""

    starts = "workers"

    def init_dist_connection(self, store=None):
        if self.world.rank == 1:
            raise OSError("no card")
        return super().init_dist_connection(store)


def test_a_rank_that_fails_before_it_enters_the_group_is_told_and_the_next_call_works():
    began = time.monotonic()
    with pytest.raises(fitkit.WorkerError, match="Rank 1 failed: OSError: no card"):
        compiled(strategy=WithoutRankOne()).fit(X, Y, verbose=0)
    assert time.monotonic() - began < patience(20)
    compiled().fit(X, Y, verbose=0)


@pytest.mark.slow
def test_a_group_that_one_rank_could_not_make_leaves_the_next_call_as_it_would_be(monkeypatch):
    make = dist.distributed_c10d._new_process_group_helper

    def break_off(*arguments, **settings):
        monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", make)
        raise dist.DistNetworkError("Gloo connectFullMesh failed")

    monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", break_off)
    with pytest.raises(fitkit.WorkerError):
        compiled().fit(X, Y, verbose=0)
    compiled().fit(X, Y, verbose=0)


def test_a_call_of_another_model_on_several_devices_inside_a_call_is_refused_at_once():
    other = compiled()

    def inside(epoch, logs):
        other.evaluate(X, Y, verbose=0)

    with pytest.raises(fitkit.ConfigurationError, match=r"within another model.*devices=1"):
        compiled().fit(X, Y, verbose=0, callbacks=LambdaCallback(on_epoch_end=inside))


def test_fewer_samples_than_ranks_are_refused_before_a_process_starts():
    end_workers()
    with pytest.raises(fitkit.ConfigurationError, match="1 samples.*2 ranks"):
        compiled().fit(X[:1], Y[:1], verbose=0)
    from fitkit.extras.launchers import workers

    assert workers._pool is None


@pytest.mark.slow
def test_unused_parameters_are_named_with_the_option():
    class Unused(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = torch.nn.Linear(6, 3), torch.nn.Linear(2, 2)

        def forward(self, x):
            return self.used(x)

    with pytest.raises(
        fitkit.ConfigurationError, match=r"net.idle.weight, net.idle.bias.*find_unused"
    ):
        compiled(Unused()).fit(X, Y, batch_size=8, verbose=0)
    strategy = fitkit.strategies.DDPSpawnStrategy(find_unused_parameters=True)
    compiled(Unused(), strategy=strategy).fit(X, Y, batch_size=8, verbose=0)


def test_an_update_by_a_callback_in_mid_training_is_that_of_one_process():
    def learn(batch, logs):
        callback.model.train_on_batch(X[:9], Y[:9])

    models = []
    for devices in (1, 2):
        callback = LambdaCallback(on_train_batch_end=learn)
        model = compiled(devices=devices, metrics=None)
        model.fit(
            X[:96], Y[:96], batch_size=32 // devices, shuffle=False, verbose=0, callbacks=callback
        )
        models.append(model)
    assert_same_weights(*(model.net for model in models), atol=1e-6)


def test_workers_know_loss_and_metric_names_that_only_this_process_has_registered():
    name = "known_to_one_process"

    def off_by(prediction, target):
        return (prediction.argmax(-1) - target).abs()

    try:
        NAMES.add(name, Named(lambda first: Mean(as_given, off_by), True))
        LOSSES.add(name, LOSSES["cross_entropy"])
        found = []
        for devices in (1, 2):
            model = compiled(devices=devices, loss=name, metrics=[name], weighted_metrics=[name])
            model.fit(X, Y, batch_size=32 // devices, shuffle=False, verbose=0)
            found.append(model.evaluate(X, Y, sample_weight=X[:, 0].abs(), verbose=0))
        assert found[1] == pytest.approx(found[0], rel=1e-6)
        assert len(found[0]) == 3 and found[0][1] == pytest.approx(
            float(off_by(model.net.cpu()(X), Y).double().mean())
        )
    finally:
        for registry in (NAMES, LOSSES):
            registry._entries.pop("knowntooneprocess", None)
            registry._spelling.pop("knowntooneprocess", None)


def test_what_can_not_be_sent_is_named_by_its_path():
    net = dense(6, 8, 3)
    net[0].lock = threading.Lock()
    with pytest.raises(fitkit.ConfigurationError, match=r"model\.net\.0\.lock is a lock"):
        compiled(net).fit(X, Y, verbose=0)


SCRIPT = """
    import os, sys, time
    import torch, fitkit
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(6, 3)
            self.act = lambda x: x.tanh()
        def forward(self, x):
            return self.layer(self.act(x))
    model = fitkit.Model(Net())
    model.compile("sgd", "cross_entropy", accelerator="cpu", devices=2)
    x, y = torch.randn(64, 6), torch.randint(3, (64,))
    print("begin", flush=True)
    model.fit(x, y, epochs={epochs}, verbose=0, callbacks=fitkit.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: ({act})))
    print("end", model.evaluate(x, y, verbose=0), flush=True)
"""


def script(tmp_path, epochs=2, act="None"):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT).format(epochs=epochs, act=act))
    return subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def workers_of(pid):
    found = subprocess.run(
        ["ps", "-ww", "-eo", "pid=,ppid=,args="], capture_output=True, text=True
    ).stdout
    rows = [line.split(maxsplit=2) for line in found.splitlines() if "launchers.worker" in line]
    return [int(row[0]) for row in rows if row[1] == str(pid)]


def gone(pids, seconds=15):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(os.path.exists(f"/proc/{pid}") for pid in pids):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow  # the next but one has no guard either
def test_a_script_needs_no_guard_and_prints_once(tmp_path):
    with script(tmp_path) as process:
        out, err = process.communicate(timeout=patience(50))
    assert process.returncode == 0, err
    assert out.split()[0] == "begin" and out.count("begin") == out.count("end") == 1
    assert err == ""


@pytest.mark.slow  # test_faults.py has one whose ranks have data workers
def test_workers_go_with_a_parent_that_is_killed(tmp_path):
    with script(tmp_path, epochs=10**6) as process:
        assert process.stdout.readline() == "begin\n"
        deadline = time.monotonic() + patience(30)
        while not (pids := workers_of(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1.0)
        process.kill()
        process.communicate(timeout=10)
    assert pids and gone(pids)


def test_ctrl_c_ends_the_call_although_a_worker_hangs_in_it(tmp_path):
    act = "print('epoch', flush=True), time.sleep(600 if model.global_rank else 0)"
    with script(tmp_path, epochs=10**6, act=act) as process:
        assert process.stdout.readline() == "begin\n"
        assert process.stdout.readline() == "epoch\n"
        pids = workers_of(process.pid)
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert "begin" not in out  # a script needs no guard, and prints once
    assert "KeyboardInterrupt" in err
    assert pids and gone(pids)


def test_a_loader_without_batches_of_its_own_and_one_that_makes_two_views():
    batches = cut(range(103), 8)

    class Batches(Dataset):
        def __len__(self):
            return len(batches)

        def __getitem__(self, index):
            return batches[index]

    model = compiled()
    model.fit(DataLoader(Batches(), batch_size=None), epochs=2, verbose=0)
    reference, _ = plain_training(lambda epoch: cut(range(103), 16))
    assert_close(model.net, reference)

    def two_views(rows):
        x = torch.stack([torch.as_tensor(row[0]) for row in rows])
        y = torch.tensor([row[1] for row in rows])
        return torch.cat([x, x]), torch.cat([y, y])

    model = compiled()
    model.fit(DataLoader(Rows(), batch_size=8, collate_fn=two_views), epochs=2, verbose=0)
    assert_close(model.net, reference)


def test_gathered_rows_of_all_ranks_carry_gradients():
    """A loss over the whole batch, though each rank computes a part of it, 52 and 51 rows."""

    class Contrast(fitkit.Model):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(6, 4)

        def forward(self, x):
            rows = self.layer(x)
            everyone = self.all_gather({"rows": rows, "one": rows.sum().detach()})
            assert everyone["one"].shape == (self.world_size,)
            return everyone["rows"]

    def spread(rows, target):
        return (rows - rows.mean(0)).square().mean()

    model = Contrast()
    model.compile("sgd", spread, learning_rate=0.5, accelerator="cpu", devices=2)
    model.fit(X, X, batch_size=52, shuffle=False, verbose=0)
    reference = Contrast()
    rows = reference.layer(X)
    spread(rows, None).backward()
    # Both ranks compute the same loss of all rows, and DDP takes the mean of both gradients.
    for one, two in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(one, two - 0.5 * two.grad, atol=1e-5)


@pytest.mark.parametrize("devices", [1, 2])
def test_empty_batches_on_some_ranks_change_nothing(devices):
    x, y = X[:80], Y[:80]
    full = list(zip(x.split(20), y.split(20), strict=True))
    empty = (X[:0], Y[:0])
    # Dealt to two ranks: (full, empty), (empty, full), (empty, empty), (full, full).
    data = [full[0], empty, empty, full[1], empty, empty, full[2], full[3]]
    rounds = full if devices == 1 else [full[0], full[1], (x[40:], y[40:])]
    model = compiled(devices=devices)
    history = model.fit(data, validation_data=data, epochs=2, verbose=0)
    net, losses = plain_training(lambda epoch: rounds)
    assert model.global_step == 2 * len(rounds)
    assert history.history["loss"] == pytest.approx(losses, abs=1e-5)
    assert_close(model.net, net)
    with torch.no_grad():
        expected = net(x)
    last = F.cross_entropy(expected, y).item()
    assert history.history["val_loss"][-1] == pytest.approx(last, abs=1e-5)
    assert np.allclose(model.predict(data, verbose=0), expected, atol=1e-5)


@pytest.mark.slow
def test_the_environment_shows_what_workers_print(monkeypatch, capsys):
    def talks(epoch, logs):
        print(f"epoch {epoch}", flush=False)
        for _ in range(3000):
            print("much" * 20)

    monkeypatch.setenv("FITKIT_RANK_OUTPUT", "all")
    shown = LambdaCallback(on_epoch_end=talks)
    compiled().fit(X, Y, epochs=2, verbose=0, callbacks=[shown])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "epoch" in line and "rank" in line] == [
        "[rank 1] epoch 0", "[rank 1] epoch 1",
    ]  # fmt: skip
    assert lines.count("[rank 1] " + "much" * 20) == 6000
    monkeypatch.delenv("FITKIT_RANK_OUTPUT")
    compiled().fit(X, Y, verbose=0, callbacks=[shown])
    assert "[rank 1]" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_worker_that_ends_leaves_its_last_words_where_output_is_shown(monkeypatch, capsys):
    def dies(batch, logs):
        if torch.distributed.get_rank() == 1:
            print("last words", file=sys.stderr)
            os._exit(3)

    monkeypatch.setenv("FITKIT_RANK_OUTPUT", "all")
    with pytest.raises(fitkit.WorkerError, match="(?s)Rank 1 left with status 3.*last words"):
        compiled().fit(X, Y, verbose=0, callbacks=[LambdaCallback(on_train_batch_end=dies)])
    assert "[rank 1] last words" in capsys.readouterr().err
