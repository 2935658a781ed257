"""`ddp_sharded`: the numbers of one process, with the optimizer's state dealt out to the ranks."""

import copy
import functools

import pytest
import torch
from torch.nn import functional as F

import fitkit
from tests.nets import dense, normal
from tests.reference import assert_same_optimizer_state, assert_same_weights, plain_loop, slices

pytestmark = pytest.mark.timeout(120)

X = normal(48, 6, seed=1).double()
Y = torch.arange(48) % 3


def net():
    return dense(6, 150, 120, 3).double()  # Adam multiplies float32's rounding


def on(ranks):
    return {"accelerator": "cpu", "devices": ranks, "strategy": "ddp_sharded"}


def plainly(module, optimizer, epochs, scheduler=None, group=1, **clip):
    plain_loop(module, optimizer, slices(X, Y, 12 * group), epochs, scheduler=scheduler, **clip)


same = functools.partial(assert_same_weights, atol=1e-9)
same_state = functools.partial(assert_same_optimizer_state, atol=1e-9, settings=True)


def fit(model, ranks, **options):
    model.fit(X, Y, batch_size=12 // ranks, shuffle=False, verbose=0, **options)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_weights_and_the_whole_state_are_those_of_plain_pytorch(ranks):
    module, reference = net(), net()
    given = torch.optim.Adam(module.parameters(), 0.01)
    model = fitkit.Model(module)
    model.compile(
        given,
        "cross_entropy",
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        **on(ranks),
    )
    fit(model, ranks, epochs=2)
    adam = torch.optim.Adam(reference.parameters(), 0.01)
    plainly(reference, adam, 2, torch.optim.lr_scheduler.StepLR(adam, 1, 0.5))
    same(module, reference)
    assert model.optimizer is given and not given._optimizer_step_pre_hooks
    for group in given.param_groups:  # what schedulers note there is the same too
        assert group["lr"] == 0.0025
    same_state(given, adam)


@pytest.mark.slow
def test_a_second_fit_on_one_device_and_a_third_on_two_go_on_exactly(tmp_path):
    model, reference = fitkit.Model(net()), net()
    model.compile(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), "cross_entropy", **on(2))
    fit(model, 2)
    model.compile(devices=1, strategy="auto")
    fit(model, 1)
    model.compile(**on(2))
    fit(model, 2)
    sgd = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
    plainly(reference, sgd, 3)
    same(model.net, reference)
    same_state(model.optimizer, sgd)


def test_clipping_and_accumulation_see_all_gradients():
    model, reference = fitkit.Model(net()), net()
    model.compile(
        "adam", "cross_entropy", gradient_clip_val=0.05, accumulate_grad_batches=2, **on(2)
    )
    fit(model, 2, epochs=2)
    adam = torch.optim.Adam(reference.parameters(), fused=True)  # as one by name
    plainly(reference, adam, 2, clip=0.05, group=2)
    same(model.net, reference)
    same_state(model.optimizer, adam)


def test_each_rank_keeps_its_share_of_the_state_and_a_save_in_between_has_all(tmp_path):
    model, reference = fitkit.Model(net()), net()
    model.compile("adam", "cross_entropy", **on(2))

    def look(epoch, logs):
        state = model.optimizer.state
        held = sum(v.numel() for values in state.values() for v in values.values() if v.ndim)
        logs["held"] = model.all_gather(torch.tensor([held])).tolist()
        model.save(tmp_path / f"{epoch}.h5")

    seen = []
    note = fitkit.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: (look(epoch, logs), seen.append(logs["held"]))
    )
    fit(model, 2, epochs=2, callbacks=note)
    whole = 2 * sum(parameter.numel() for parameter in model.parameters())
    for first, second in seen:
        assert first + second == whole and max(first, second) < 0.96 * whole
    resumed = fitkit.Model(net())
    resumed.compile("adam", "cross_entropy", **on(3))
    fit(resumed, 3, epochs=3, resume_from=tmp_path / "0.h5")
    adam = torch.optim.Adam(reference.parameters(), fused=True)  # as one by name
    plainly(reference, adam, 3)
    same(resumed.net, reference)
    same_state(resumed.optimizer, adam)


class ByHand(fitkit.Model):
    """Two optimizers, one stepped twice as often, and clipped by the step itself."""

    def __init__(self):
        super().__init__(net())
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.net[0].parameters(), 0.01),
            torch.optim.SGD(self.net[2:].parameters(), 0.1, momentum=0.9),
        ]

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        second.step()
        if batch_idx % 2:
            first.step()
        for optimizer in (first, second):
            optimizer.zero_grad()


@pytest.mark.slow
def test_own_steps_with_two_optimizers():
    models = [ByHand(), ByHand()]
    for model, ranks in zip(models, (1, 2), strict=True):
        model.compile(**(on(2) if ranks == 2 else {"accelerator": "cpu", "devices": 1}))
        fit(model, ranks, epochs=2)
    same(*models)
    for one, two in zip(*(model.optimizers() for model in models), strict=True):
        same_state(one, two)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
def test_loss_scaling_leaves_out_the_same_updates_everywhere():
    models = []
    for ranks in (1, 2):
        model = fitkit.Model(net().float())
        hardware = on(2) if ranks == 2 else {"accelerator": "cpu", "devices": 1}
        model.compile("adam", "cross_entropy", precision="16-mixed", **hardware)
        fit(model, ranks, epochs=2)
        models.append(model)
    same(*models, atol=1e-3)
    assert models[0].global_step == models[1].global_step


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_call_and_the_optimizer_begins_anew():
    model = fitkit.Model(net())
    model.compile("adam", "cross_entropy", **on(2))
    fit(model, 2)
    before = copy.deepcopy(model.optimizer.state_dict())

    def fails(batch, logs):
        if model.global_rank == 1 and batch == 2:
            raise ArithmeticError("no more")

    note = fitkit.callbacks.LambdaCallback(on_train_batch_begin=fails)
    with (
        pytest.warns(UserWarning, match="starts over"),
        pytest.raises(fitkit.WorkerError, match="no more"),
    ):
        fit(model, 2, callbacks=note)
    assert before["state"] and not model.optimizer.state_dict()["state"]
    fit(model, 2)
    assert len(model.optimizer.state_dict()["state"]) == 6


@pytest.mark.slow
def test_a_training_that_fails_before_its_first_update_keeps_the_state():
    model = fitkit.Model(net())
    model.compile("adam", "cross_entropy", **on(2))
    fit(model, 2)
    before = copy.deepcopy(model.optimizer.state_dict())
    with pytest.raises((fitkit.ConfigurationError, fitkit.WorkerError)):
        model.fit(X[:, :5], Y, batch_size=6, verbose=0)
    after = model.optimizer.state_dict()
    assert after["state"].keys() == before["state"].keys()
    torch.testing.assert_close(after["state"][0], before["state"][0])


def test_an_optimizer_that_computes_the_loss_itself_is_refused():
    model = fitkit.Model(net())
    model.compile("lbfgs", "cross_entropy", **on(2))
    with pytest.raises(fitkit.ConfigurationError, match="LBFGS.*can't be spread"):
        fit(model, 2)


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Schedule-free SGD: `train` shows y, `eval` shows x; tests/unit has all of it."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "k": 0, "train_mode": False})

    def train(self):
        self._switch(True)

    def eval(self):
        self._switch(False)

    @torch.no_grad()
    def _switch(self, trains):
        for group in self.param_groups:
            held = group["params"] if group["train_mode"] != trains else ()
            for p in held:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], 0.1 if trains else 1 - 1 / 0.9)
            group["train_mode"] = trains

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            part, lr = 1 / (group["k"] + 1), group["lr"]
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, part)
                    p.add_(p.grad, alpha=lr * (0.9 * (1 - part) - 1))
                    z.sub_(p.grad, alpha=lr)


@pytest.mark.parametrize("strategy", ["ddp_sharded", "ddp_spawn"])
@pytest.mark.slow
def test_a_schedule_free_optimizer_switches_all_ranks_weights(strategy, tmp_path):
    plain = net()
    optimizer = ScheduleFreeSGD(plain.parameters())
    for _ in range(3):
        optimizer.train()
        plainly(plain, optimizer, 1)
        optimizer.eval()
    expected = F.cross_entropy(plain(X), Y).item()

    def trained(**options):
        model = fitkit.Model(net())
        model.compile(ScheduleFreeSGD, "cross_entropy", **{**on(2), "strategy": strategy})
        saves = fitkit.callbacks.ModelCheckpoint(str(tmp_path / "{step}.h5"), every_n_train_steps=2)
        history = model.fit(
            X,
            Y,
            batch_size=6,
            epochs=3,
            shuffle=False,
            verbose=0,
            validation_data=(X, Y),
            callbacks=saves,
            **options,
        ).history
        same(model.net, plain)
        assert history["val_loss"][-1] == pytest.approx(expected, abs=1e-9)
        return model

    whole = trained()
    same(trained(resume_from=tmp_path / "6.h5").net, whole.net, atol=0)
