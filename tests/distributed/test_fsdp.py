"""`fsdp`: the numbers of one process, with parameters, gradients and states spread over ranks."""

import copy
import functools
import types

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, load
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.nn import functional as F

import fitkit
from fitkit.distributed.collectives import Solo
from fitkit.extras.parallel.tensor import TensorParallel
from fitkit.extras.sharding.sharded_module import check_trains
from fitkit.strategies import FSDPStrategy
from tests.nets import normal
from tests.reference import assert_same_optimizer_state, assert_same_weights, plain_loop, slices

pytestmark = pytest.mark.timeout(150)

X = normal(48, 6, seed=1).double()
Y = torch.arange(48) % 3


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.inner, self.outer = nn.Linear(size, 9), nn.Linear(9, size)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(x)))


def net():
    """Sizes that 2 and 3 ranks don't divide, two blocks, a frozen layer, running statistics."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(6, 7), Block(7), nn.BatchNorm1d(7), Block(7), nn.Linear(7, 3))
    made[0].bias.requires_grad_(False)
    made[2].eval()
    return made.double()  # Adam multiplies float32's rounding


def on(ranks, **options):
    return {"accelerator": "cpu", "devices": ranks, "strategy": FSDPStrategy(**options)}


class Evaluating(nn.BatchNorm1d):
    """Normalises by its running statistics, so that any split of a batch gives the same."""

    def train(self, mode=True):
        return super().train(False)


def still(module):
    module[2].__class__ = Evaluating
    return module


def plainly(module, optimizer, epochs, scheduler=None, group=1, **clip):
    module.train()
    plain_loop(module, optimizer, slices(X, Y, 12 * group), epochs, scheduler=scheduler, **clip)


same = functools.partial(assert_same_weights, atol=1e-9)
same_state = functools.partial(assert_same_optimizer_state, atol=1e-9)


def fit(model, ranks, **options):
    return model.fit(X, Y, batch_size=12 // ranks, shuffle=False, verbose=0, **options)


@pytest.mark.parametrize(
    ("ranks", "wrap"),
    [pytest.param(3, 50, marks=pytest.mark.slow), (2, "blocks"), (2, nn.Linear)],
)
def test_weights_state_and_values_are_those_of_plain_pytorch(ranks, wrap):
    module, reference = still(net()), still(net())
    given = torch.optim.Adam(module.parameters(), 0.01)
    parameters, kinds = list(module.parameters()), [type(part) for part in module.modules()]
    attributes = [set(vars(part)) for part in module.modules()]
    model = fitkit.Model(module)
    model.compile(
        given,
        "cross_entropy",
        metrics=["accuracy"],
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        **on(ranks, wrap=wrap),
    )
    history = fit(model, ranks, epochs=2, validation_data=(X[:25], Y[:25])).history
    adam = torch.optim.Adam(reference.parameters(), 0.01)
    plainly(reference, adam, 2, torch.optim.lr_scheduler.StepLR(adam, 1, 0.5))
    same(module, reference)
    same_state(given, adam)
    reference.eval()
    with torch.no_grad():
        scores = reference(X)
    expected = F.cross_entropy(scores[:25], Y[:25]).item()
    assert history["val_loss"][1] == pytest.approx(expected, abs=1e-9)
    loss, accuracy = model.evaluate(X, Y, batch_size=5, verbose=0)
    assert loss == pytest.approx(F.cross_entropy(scores, Y).item(), abs=1e-9)
    assert accuracy == pytest.approx((scores.argmax(1) == Y).double().mean().item(), abs=1e-6)
    torch.testing.assert_close(torch.tensor(model.predict(X, batch_size=5, verbose=0)), scores)
    # The very same objects, with nothing left on them.
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    assert [type(part) for part in module.modules()] == kinds
    assert [set(vars(part)) for part in module.modules()] == attributes
    assert not any(
        held
        for part in module.modules()
        for name, held in vars(part).items()
        if name.endswith("_hooks")
    )
    assert not parameters[1].requires_grad and model.optimizer is given
    copy.deepcopy(model)
    # A process that another thread forks would destroy groups that torch's caches of this thread
    # hold, and gloo's destructor can hang there.
    assert torch._C._get_DTensor_sharding_propagator_cache_stats() == (0, 0)


@pytest.mark.slow
def test_a_second_fit_and_one_on_one_device_go_on_exactly():
    model, reference = fitkit.Model(still(net())), still(net())
    model.compile(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), "cross_entropy", **on(2))
    fit(model, 2)
    fit(model, 2)
    model.compile(devices=1, strategy="auto")
    fit(model, 1)
    model.compile(**on(2))
    fit(model, 2)
    sgd = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
    plainly(reference, sgd, 4)
    same(model.net, reference)
    same_state(model.optimizer, sgd)


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["norm", "value"])
def test_clipping_and_accumulation_see_all_gradients(limit):
    model, reference = fitkit.Model(still(net())), still(net())
    model.compile(
        "adam",
        "cross_entropy",
        gradient_clip_val=0.05,
        gradient_clip_algorithm=limit,
        accumulate_grad_batches=3,
        **on(2, activation_checkpointing=limit == "norm" or (Block, nn.Linear)),
    )
    fit(model, 2, epochs=2)
    adam = torch.optim.Adam(reference.parameters())
    clip = {"clip": 0.05} if limit == "norm" else {"clip_value": 0.05}
    plainly(reference, adam, 2, group=3, **clip)
    same(model.net, reference)
    same_state(model.optimizer, adam)


def test_saves_in_between_are_whole_and_resume_on_other_ranks(tmp_path):
    model, reference = fitkit.Model(still(net())), still(net())
    model.compile("adam", "cross_entropy", **on(2))

    def look(epoch, logs):
        model.save(tmp_path / f"{epoch}.h5")
        model.save_weights(tmp_path / f"{epoch}.safetensors")
        held = [p.to_local().numel() for p in model.parameters()]
        held += [
            v.to_local().numel()
            for s in model.optimizer.state.values()
            for v in s.values()
            if v.ndim
        ]
        logs["held"] = float(sum(held))
        logs["inside"] = model.evaluate(X[:7], Y[:7], batch_size=4, verbose=0)

    note = fitkit.callbacks.LambdaCallback(on_epoch_end=look)
    history = fit(model, 2, epochs=2, callbacks=note, validation_data=(X[:3], Y[:3])).history
    learning = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert history["held"][0] < 0.6 * (3 * learning + 7)
    adam = torch.optim.Adam(reference.parameters())
    plainly(reference, adam, 1)
    weights = fitkit.Model(still(net()))
    weights.load_weights(tmp_path / "0.safetensors")
    same(weights.net, reference)
    assert history["inside"][0] == pytest.approx(
        F.cross_entropy(reference.eval()(X[:7]), Y[:7]).item(), abs=1e-9
    )
    plainly(reference, adam, 2)
    for hardware in (on(3), {"devices": 1, "accelerator": "cpu"}):
        resumed, ranks = fitkit.Model(still(net())), hardware["devices"]
        resumed.compile("adam", "cross_entropy", **hardware)
        with pytest.warns(UserWarning, match="continues with"):
            fit(resumed, ranks, epochs=3, resume_from=tmp_path / "0.h5")
        same(resumed.net, reference)
        same_state(resumed.optimizer, adam)


def test_each_rank_writes_its_part_of_a_folder_that_any_number_of_ranks_goes_on_from(tmp_path):
    model, reference = fitkit.Model(still(net())), still(net())
    model.compile("adam", "cross_entropy", **on(2))

    def look(batch, logs):
        if batch == 1:
            model.save(tmp_path / "cut.dcp")
            model.save_weights(tmp_path / "weights.dcp")

    def end(epoch, logs):
        if epoch == 0:
            model.save(tmp_path / "end.dcp")

    note = fitkit.callbacks.LambdaCallback(on_train_batch_end=look, on_epoch_end=end)
    fit(model, 2, epochs=2, callbacks=note)  # the second epoch's replaces the first's
    there = sorted(path.name for path in tmp_path.iterdir())
    assert there == ["cut.dcp", "end.dcp", "weights.dcp"]
    sizes = [path.stat().st_size for path in sorted((tmp_path / "cut.dcp").glob("shard*"))]
    assert len(sizes) == 2 and max(sizes) < 0.6 * sum(sizes)
    # Torch reads the same weights by itself.
    found = {name: torch.zeros_like(value) for name, value in model.net.state_dict().items()}
    load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path / "cut.dcp")))
    other = fitkit.Model(net())
    other.load_weights(tmp_path / "weights.dcp")
    torch.testing.assert_close(dict(other.net.state_dict()), found, rtol=0, atol=0)
    # On as many ranks, to the last bit; on others as the arithmetic has it.
    again = fitkit.Model(still(net()))
    again.compile("adam", "cross_entropy", **on(2))
    history = fit(again, 2, epochs=2, resume_from=tmp_path / "cut.dcp").history
    same(again.net, model.net, atol=0)
    assert history == model.history.history
    adam = torch.optim.Adam(reference.parameters())
    plainly(reference, adam, 2)
    single = fitkit.Model(still(net()))
    single.compile("adam", "cross_entropy", accelerator="cpu", devices=1)
    with pytest.warns(UserWarning, match="continues with"):
        fit(single, 1, epochs=2, resume_from=tmp_path / "end.dcp")
    same(single.net, reference)
    same_state(single.optimizer, adam)


@pytest.mark.slow
@pytest.mark.parametrize("hardware", [{"ranks": 3}, {"ranks": 4, "shard_size": 2}, {"ddp": 2}])
def test_a_folder_is_read_by_other_meshes_and_strategies(tmp_path, hardware):
    model, reference = fitkit.Model(still(net())), still(net())
    model.compile(
        "adam",
        "cross_entropy",
        **on(
            2 if "shard_size" not in hardware else 4,
            **({} if "shard_size" not in hardware else {"shard_size": 2}),
        ),
    )
    saves = fitkit.callbacks.ModelCheckpoint(tmp_path / "{epoch}.dcp")
    fit(model, model.world_size, callbacks=saves)
    adam = torch.optim.Adam(reference.parameters())
    plainly(reference, adam, 2)
    ranks = hardware.get("ddp") or 3
    other = fitkit.Model(still(net()))
    other.compile(
        "adam",
        "cross_entropy",
        **(
            on(ranks)
            if "ddp" not in hardware
            else {"accelerator": "cpu", "devices": 2, "strategy": "ddp_sharded"}
        ),
    )
    fit(other, ranks, epochs=2, resume_from=tmp_path / "1.dcp")
    same(other.net, reference)
    same_state(other.optimizer, adam)


def test_a_rank_that_cannot_write_fails_the_save_everywhere_and_leaves_nothing(tmp_path):
    model = fitkit.Model(still(net()))
    model.compile("adam", "cross_entropy", **on(2))

    def look(epoch, logs):
        import fitkit.extras.dcp.sharded_folder as writer

        def full(*given):
            raise OSError(28, "No space left")

        with pytest.MonkeyPatch.context() as patch:
            if model.global_rank == 1:
                patch.setattr(writer, "write_tensors", full)
            with pytest.raises(fitkit.CheckpointError, match=r"rank 1 failed .*No space left"):
                model.save(tmp_path / "a.dcp")
        logs["survived"] = 1.0

    note = fitkit.callbacks.LambdaCallback(on_epoch_end=look)
    assert fit(model, 2, callbacks=note).history["survived"] == [1.0]
    assert not list(tmp_path.iterdir())


class Own(fitkit.Model):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.table = nn.Linear(6, 5, bias=False), nn.Linear(5, 6, bias=False)
        self.table.weight = nn.Parameter(self.table.weight.detach().clone())
        self.blocks = nn.ModuleList(Block(5) for _ in range(3))
        self.memory = nn.LSTM(5, 4, batch_first=True)
        self.head = nn.Linear(4, 3)
        self.decoder = nn.Linear(6, 5, bias=False)
        self.decoder.weight = self.embed.weight  # tied
        self.double()

    def forward(self, x):
        x = self.embed(x) + self.decoder(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.memory(x[:, None])[0][:, 0])

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("again", loss.detach(), sync_dist=True)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))
        return len(batch[0])

    def validation_epoch_end(self, outputs):
        self.log("val_rows", sum(outputs), reduce_fx="sum")

    def predict_step(self, batch, batch_idx):
        return {"scores": self(batch[0] if isinstance(batch, (list, tuple)) else batch)}


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["blocks", None])
def test_own_steps_with_tied_weights_and_a_recurrent_layer(wrap):
    models, logs, predicted = [Own(), Own()], [], []
    for model, ranks in zip(models, (1, 2), strict=True):
        hardware = on(2, wrap=wrap, reshard_after_forward=wrap is None)
        model.compile(
            torch.optim.AdamW(model.parameters(), 0.01),
            **(hardware if ranks == 2 else {"accelerator": "cpu", "devices": 1}),
        )
        inside = fitkit.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs, m=model: predicted.append(
                m.predict(X[:9], batch_size=4, verbose=0)["scores"]
            )
        )
        options = {"validation_data": (X[:9], Y[:9]), "validation_batch_size": 4}
        logs.append(fit(model, ranks, epochs=2, callbacks=inside, **options).history)
    assert logs[0].keys() == logs[1].keys()
    for name, values in logs[0].items():
        assert logs[1][name] == pytest.approx(values, abs=1e-9), name
    assert predicted[0].shape == (9, 3)
    for one, two in zip(predicted[:2], predicted[2:], strict=True):
        torch.testing.assert_close(torch.tensor(two), torch.tensor(one))
    same(*models)
    assert models[1].decoder.weight is models[1].embed.weight


@pytest.mark.slow
def test_a_layer_that_a_callback_thaws_learns_from_then_on():
    model, reference = fitkit.Model(still(net())), still(net())
    model.compile("sgd", "cross_entropy", learning_rate=0.1, **on(2))

    def thaw(epoch, logs):
        model.net[0].bias.requires_grad_(epoch == 1)
        model.net[1].inner.weight.requires_grad_(epoch != 1)

    fit(model, 2, epochs=3, callbacks=fitkit.callbacks.LambdaCallback(on_epoch_begin=thaw))
    sgd = torch.optim.SGD(reference.parameters(), 0.1)
    for epoch in range(3):
        reference[0].bias.requires_grad_(epoch == 1)
        reference[1].inner.weight.requires_grad_(epoch != 1)
        plainly(reference, sgd, 1)
    same(model.net, reference)


@pytest.mark.slow
def test_the_best_weights_and_a_moving_average_come_back():
    model, reference = fitkit.Model(still(net())), fitkit.Model(still(net()))
    for one, ranks in ((model, 2), (reference, 1)):
        one.compile(
            "adam",
            "cross_entropy",
            learning_rate=0.3,
            **(on(2) if ranks == 2 else {"accelerator": "cpu", "devices": 1}),
        )
        best = fitkit.callbacks.EarlyStopping(
            "loss", patience=9, restore_best_weights=True, min_delta=0.3
        )
        fit(one, ranks, epochs=4, callbacks=best)
        average = fitkit.callbacks.EMA(0.9, use_buffers=False)
        fit(one, ranks, epochs=2, callbacks=average)
    same(model.net, reference.net)


@pytest.mark.slow
def test_a_group_of_ranks_has_a_copy_each():
    model, reference = fitkit.Model(still(net())), still(net())
    model.compile("adam", "cross_entropy", gradient_clip_val=0.1, **on(4, shard_size=2))
    fit(model, 4, epochs=2)
    fit(model, 4)
    adam = torch.optim.Adam(reference.parameters())
    plainly(reference, adam, 3, clip=0.1)
    same(model.net, reference)
    same_state(model.optimizer, adam)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_half_precision_trains(precision):
    def made():
        module = still(net()).float()
        if precision == "bf16-mixed":
            module[2] = nn.LayerNorm(7)  # without running statistics weights travel as bfloat16
        return fitkit.Model(module)

    model = made()
    model.compile(
        "adam",
        "cross_entropy",
        learning_rate=0.01,
        precision=precision,
        gradient_clip_val=1.0,
        **on(2),
    )
    losses = fit(model, 2, epochs=4).history["loss"]
    alone = made()
    alone.compile(
        "adam",
        "cross_entropy",
        learning_rate=0.01,
        precision=precision,
        gradient_clip_val=1.0,
        accelerator="cpu",
        devices=1,
    )
    assert losses == pytest.approx(fit(alone, 1, epochs=4).history["loss"], abs=0.02)
    assert losses[-1] < losses[0] and model.global_step == alone.global_step


@pytest.mark.slow
def test_a_rank_that_fails_leaves_the_model_as_it_was_before_fit():
    model = fitkit.Model(still(net()))
    model.compile("adam", "cross_entropy", **on(2))
    fit(model, 2)
    weights, state = copy.deepcopy((model.net.state_dict(), model.optimizer.state_dict()))

    def fails(batch, logs):
        if model.global_rank == 1 and batch == 2:
            raise ArithmeticError("no more")

    note = fitkit.callbacks.LambdaCallback(on_train_batch_begin=fails)
    with (
        pytest.warns(UserWarning, match="those from before fit"),
        pytest.raises(fitkit.WorkerError, match="no more"),
    ):
        fit(model, 2, callbacks=note)
    with pytest.raises((fitkit.ConfigurationError, fitkit.WorkerError)):  # before any update
        model.fit(X[:, :5], Y, batch_size=6, verbose=0)
    torch.testing.assert_close(model.net.state_dict(), weights, rtol=0, atol=0)
    torch.testing.assert_close(model.optimizer.state_dict()["state"], state["state"])
    fit(model, 2)
    reference = still(net())
    plainly(reference, torch.optim.Adam(reference.parameters()), 2)
    same(model.net, reference)


def even():
    """Blocks whose inner size two ranks divide."""
    module = still(net())
    for block in (module[1], module[3]):
        block.inner, block.outer = nn.Linear(7, 10).double(), nn.Linear(10, 7).double()
    return module


PLAN = {"*.inner": "colwise", "1.outer": "rowwise", "3.outer": RowwiseParallel()}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_compute_a_batch_together_make_what_one_process_makes(tmp_path, ranks):
    torch.manual_seed(1)
    module = even()
    reference = copy.deepcopy(module)
    parameters, attributes = list(module.parameters()), [set(vars(p)) for p in module.modules()]
    model = fitkit.Model(module)
    together = on(ranks, tensor_parallel=2, tensor_parallel_plan=PLAN)
    model.compile("adam", "cross_entropy", gradient_clip_val=0.1, metrics=["accuracy"], **together)

    def look(batch, logs):
        if batch == 1:
            model.save(tmp_path / "cut.dcp")

    def end(epoch, logs):
        logs["held"] = float(sum(p.to_local().numel() for p in model.parameters()))

    def trained(some, epochs, **options):
        return some.fit(
            X,
            Y,
            batch_size=24 // ranks,
            shuffle=False,
            verbose=0,
            epochs=epochs,
            validation_data=(X[:25], Y[:25]),
            **options,
        ).history

    history = trained(
        model,
        2,
        callbacks=fitkit.callbacks.LambdaCallback(on_train_batch_end=look, on_epoch_end=end),
    )
    inside = sum(p.numel() for block in (module[1], module[3]) for p in block.parameters())
    whole = sum(p.numel() for p in parameters)
    copies = ranks // 2
    assert history["held"][0] <= (inside / 2 + whole - inside) / copies + 60  # uneven ones
    adam = torch.optim.Adam(reference.parameters())
    plainly(reference, adam, 2, clip=0.1)
    same(module, reference)
    same_state(model.optimizer, adam)
    reference.eval()
    loss = F.cross_entropy(reference(X[:25]), Y[:25]).item()
    assert history["val_loss"][1] == pytest.approx(loss, abs=1e-9)
    assert model.evaluate(X[:25], Y[:25], verbose=0)[0] == pytest.approx(loss, abs=1e-9)
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    assert [set(vars(part)) for part in module.modules()] == attributes
    assert not any(
        held
        for part in module.modules()
        for name, held in vars(part).items()
        if name.endswith("_hooks")
    )
    assert model.optimizer.param_groups[0]["foreach"] == adam.param_groups[0]["foreach"]
    # It goes on within an epoch to the last bit, and after one in a second fit.
    again = fitkit.Model(even())
    again.compile("adam", "cross_entropy", gradient_clip_val=0.1, metrics=["accuracy"], **together)
    resumed = trained(again, 2, resume_from=tmp_path / "cut.dcp")
    same(again.net, module, atol=0)
    del history["held"], resumed["held"]
    assert resumed == history
    trained(model, 1)
    plainly(reference, adam, 1, clip=0.1)
    same(module, reference)


UNKEEPABLE = {
    "uneven": ({"0": "colwise"}, "its 7 outputs can't be divided equally among 2"),
    "absent": ({"7": "colwise"}, "names '7', which the net doesn't have"),
    "other kind": ({"2": "rowwise"}, "only Linear and Embedding"),
}


@pytest.mark.parametrize("case", UNKEEPABLE)
def test_the_reason_why_a_plan_cannot_be_kept_is_told(case):
    """What the refusals below come from, without their processes."""
    plan, message = UNKEEPABLE[case]
    with pytest.raises(fitkit.ConfigurationError, match=message):
        TensorParallel(net(), plan, types.SimpleNamespace(size=lambda: 2), Solo())


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case == "uneven" else pytest.mark.slow) for case in UNKEEPABLE],
)
def test_plans_that_cannot_be_kept_are_refused(case):
    plan, message = UNKEEPABLE[case]
    model = fitkit.Model(net())
    before = copy.deepcopy(model.state_dict())
    model.compile("adam", "cross_entropy", **on(2, tensor_parallel=2, tensor_parallel_plan=plan))
    with pytest.raises(fitkit.ConfigurationError, match=message):
        fit(model, 2)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    with pytest.raises(fitkit.ConfigurationError, match="doesn't divide the 3 ranks"):
        model.compile(**on(3, tensor_parallel=2, tensor_parallel_plan=plan))
    with pytest.raises(fitkit.ConfigurationError, match="shard_size=3 doesn't divide the 2 ranks"):
        model.compile(**on(2, shard_size=3))


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.embed = nn.Linear(6, 8)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = Evaluating(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.norm(self.layers(self.embed(x)[:, None])[:, 0]))


def on_meta():
    with torch.device("meta"):
        return Attends().double()


@pytest.mark.parametrize(
    "hardware",
    [
        {"strategy": FSDPStrategy()},
        pytest.param(
            {"strategy": FSDPStrategy(wrap=nn.Linear), "devices": 3}, marks=pytest.mark.slow
        ),
        pytest.param({"strategy": "ddp_spawn"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_net_on_the_meta_device_gets_the_same_numbers_on_any_ranks(hardware):
    found = []
    for where in ({}, {"devices": 2, **hardware}):
        module = on_meta()
        parameters = list(module.parameters())
        model = fitkit.Model(module)
        given = torch.optim.SGD(parameters, 0.1)
        model.compile(given, "cross_entropy", **{"accelerator": "cpu", "devices": 1, **where})
        torch.manual_seed(3)
        fit(model, where.get("devices", 1))
        assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
        found.append(module)
    same(*found)
    assert found[0].layers.layers[0].self_attn.out_proj.bias.abs().max() < 0.2  # began at zero
    assert found[0].layers.layers[0].linear1.weight.std() > 0.1


def test_a_net_on_the_meta_device_takes_weights_from_a_file(tmp_path):
    torch.manual_seed(5)
    module = Attends().double()
    fitkit.Model(module).save_weights(tmp_path / "weights.dcp")
    model = fitkit.Model(on_meta())
    model.load_weights(tmp_path / "weights.dcp")
    same(model.net, module)


def test_a_net_on_the_meta_device_has_its_numbers_after_a_refused_training_too():
    module = on_meta()
    module.layers.layers[0].linear1.weight.requires_grad_(False)
    model = fitkit.Model(module)
    model.compile("lbfgs", "cross_entropy", **on(2))
    with pytest.raises(fitkit.ConfigurationError, match="LBFGS"):
        fit(model, 2)
    spread = module.layers.layers[0].linear1.weight.std().item()
    assert spread == pytest.approx((1 / 8) ** 0.5 / 3**0.5, rel=0.2)  # uniform


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.scale


def test_a_part_on_the_meta_device_that_cannot_draw_numbers_is_named():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(6, 3), Bare())
    model = fitkit.Model(module)
    model.compile("sgd", "cross_entropy", accelerator="cpu", devices=1)
    with pytest.raises(fitkit.ConfigurationError, match=r"net\.1 \(Bare\).*\(scale\)"):
        model.fit(X.float(), Y, verbose=0)
    assert module[0].weight.is_meta


class ByHand(fitkit.Model):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(self(batch[0]).sum())


class Several(fitkit.Model):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[n].parameters(), 0.1) for n in (1, 3)]


def with_a_compiled_part():
    model = fitkit.Model(net())
    model.net[2].compile()
    return model


UNTRAINABLE = {
    "own updates": (lambda: ByHand(net()), {}, "automatic_optimization = False"),
    "two optimizers": (lambda: Several(net()), {}, "one optimizer, or several that step together"),
    "lbfgs": (lambda: fitkit.Model(net()), {"optimizer": "lbfgs"}, "LBFGS"),
    "dtypes": (
        lambda: fitkit.Model(net().append(nn.PReLU().half())),
        {"optimizer": "sgd"},
        "several dtypes",
    ),
    "adafactor": (
        lambda: fitkit.Model(net()),
        {"optimizer": "adafactor"},
        "Adafactor can't update parts",
    ),
    "compiled part": (with_a_compiled_part, {}, "2 is compiled by torch.compile"),
}


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in UNTRAINABLE
        if case != "compiled part"  # workers would get it as it was before
    ],
)
@pytest.mark.slow
def test_what_cannot_be_trained_so_is_refused(case):
    make, options, message = UNTRAINABLE[case]
    model = make()
    before = copy.deepcopy(model.state_dict())
    model.compile(**{"loss": "cross_entropy", **on(2), **options})
    with pytest.raises(fitkit.ConfigurationError, match=message):
        fit(model, 2)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


@pytest.mark.parametrize("case", UNTRAINABLE)
def test_the_reason_why_something_cannot_be_trained_so_is_told(case):
    """What the refusals above come from, without their processes."""
    make, options, message = UNTRAINABLE[case]
    model = make()
    model.compile(**{"loss": "cross_entropy", "accelerator": "cpu", "devices": 1, **options})
    optimizers = model._made_optimizers()
    with pytest.raises(fitkit.ConfigurationError, match=message):
        check_trains(model, optimizers, "fsdp")


@pytest.mark.parametrize(
    "options",
    [
        {"wrap": "layers"},
        {"wrap": True},
        {"wrap": (nn.Linear, 3)},
        {"wrap": 0},
        {"shard_size": 1},
        {"shard_size": 2.0},
        {"backup": 1},
        {"reshard_after_forward": None},
        {"activation_checkpointing": "blocks"},
        {"timeout": -1},
        {"tensor_parallel": 2},
        {"tensor_parallel_plan": {"0": "colwise"}},
        {"tensor_parallel": 0},
        {"tensor_parallel": 2, "tensor_parallel_plan": {"0": "rowwsie"}},
        {"tensor_parallel": 2, "tensor_parallel_plan": {"0": nn.Linear}},
        {"tensor_parallel": 2, "tensor_parallel_plan": {"0": "colwise"}, "shard_size": 2},
    ],
)
def test_arguments_are_checked_where_they_are_given(options):
    with pytest.raises(fitkit.FitkitError):
        FSDPStrategy(**options)


def test_ranks_in_step_take_part_where_their_own_batch_is_empty():
    model = fitkit.Model(still(net()))
    model.compile("sgd", "cross_entropy", **on(2))
    full = list(zip(X.split(16), Y.split(16), strict=True))
    empty = (X[:0], Y[:0])
    data = [empty, full[0], empty, empty, full[1], empty, full[2]]
    reference = still(net()).eval()
    with torch.no_grad():
        scores = reference(X)
    loss = F.cross_entropy(scores, Y).item()
    assert model.evaluate(data, verbose=0) == pytest.approx(loss, abs=1e-9)
    torch.testing.assert_close(torch.tensor(model.predict(data, verbose=0)), scores)
