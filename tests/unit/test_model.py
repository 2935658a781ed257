"""The verbs on every kind of net and data, with Keras's meaning."""

import copy
import dataclasses
import gc
import pickle
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fitkit
from tests.nets import classification, linear
from tests.reference import assert_same_weights, compiled, plain_loop, slices

X, Y = classification(24, 4)


def classifier(**arguments):
    return compiled(linear(4, 3), **arguments)


class Pairs(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index].double().numpy(), int(Y[index])


ALL_DATA = {
    "arrays": lambda: ((X.numpy(), Y.numpy()), {}),
    "float64 arrays": lambda: ((X.double().numpy(), Y.int().numpy()), {}),
    "tensors": lambda: ((X, Y), {}),
    "loader": lambda: ((DataLoader(TensorDataset(X, Y), batch_size=8),), {}),
    "tensor dataset": lambda: ((TensorDataset(X, Y),), {}),
    "dataset": lambda: ((Pairs(),), {}),
    "list of batches": lambda: (([(X[:8], Y[:8]), [X[8:], Y[8:]]],), {}),
    "generator": lambda: ((((X[i : i + 8], Y[i : i + 8]) for i in (0, 8, 16)),), {}),
    "weights": lambda: ((X, Y), {"sample_weight": np.ones(24)}),
    "triples": lambda: (([(X, Y, torch.ones(24))],), {}),
}


@pytest.mark.parametrize("kind", ALL_DATA)
def test_every_kind_of_data_trains_and_evaluates_alike(kind):
    model = classifier(metrics=["accuracy"])
    arguments, named = ALL_DATA[kind]()
    values = model.evaluate(*arguments, **named, batch_size=8, return_dict=True, verbose=0)
    with torch.no_grad():
        logits = model.net(X)
    assert values["loss"] == pytest.approx(F.cross_entropy(logits, Y).item(), abs=1e-6)
    assert values["accuracy"] == pytest.approx((logits.argmax(1) == Y).float().mean().item())
    arguments, named = ALL_DATA[kind]()
    history = model.fit(*arguments, **named, batch_size=8, shuffle=False, verbose=0).history
    assert list(history) == ["loss", "accuracy"]
    reference = classifier()
    reference.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    if kind != "list of batches" and kind != "triples":  # batches of other sizes
        assert torch.allclose(model.net.weight, reference.net.weight, atol=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in ALL_DATA if kind not in ("weights",)])
def test_every_kind_of_data_validates(kind):
    given, _ = ALL_DATA[kind]()
    model = classifier(metrics=["accuracy"])
    history = model.fit(
        X, Y, validation_data=given if len(given) > 1 else given[0], verbose=0
    ).history
    with torch.no_grad():
        logits = model.net(X)
    assert history["val_loss"][0] == pytest.approx(F.cross_entropy(logits, Y).item(), abs=1e-6)


def test_targets_of_one_dimension_meet_predictions_of_two():
    model = fitkit.Model(torch.nn.Linear(4, 1))
    target = torch.randn(24)
    model.compile("sgd", "mse", metrics=["mae"])
    loss, mae = model.evaluate(X, target, verbose=0)
    with torch.no_grad():
        difference = model.net(X)[:, 0] - target
    assert loss == pytest.approx((difference**2).mean().item(), abs=1e-6)
    assert mae == pytest.approx(difference.abs().mean().item(), abs=1e-6)


def test_evaluate_returns_a_float_a_list_or_a_dict():
    plain = classifier()
    assert type(plain.evaluate(X, Y, verbose=0)) is float
    model = classifier(metrics=["accuracy"])
    values = model.evaluate(X, Y, verbose=0)
    assert isinstance(values, list)
    assert dict(zip(model.metrics_names, values, strict=True)) == model.evaluate(
        X, Y, verbose=0, return_dict=True
    )


# ---------------------------------------------------------------------- compile again


def test_what_compile_leaves_out_stays():
    model = classifier(metrics=["accuracy"], learning_rate=0.5)
    optimizer = model.optimizer
    model.compile(devices=1, accelerator="cpu")
    assert model.optimizer is optimizer
    assert list(model.fit(X, Y, verbose=0).history) == ["loss", "accuracy"]
    model.compile(metrics=None)
    assert list(model.fit(X, Y, verbose=0).history) == ["loss"]


def test_a_new_rate_keeps_the_optimizers_state():
    model = classifier(optimizer="adam")
    model.fit(X, Y, verbose=0)
    optimizer = model.optimizer
    model.compile(learning_rate=0.125)
    assert model.optimizer is optimizer
    assert optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.125


class Halving(fitkit.callbacks.Callback):
    """Keras's idiom for a rate of one's own."""

    def __init__(self, name):
        self.name, self.seen = name, []

    def on_epoch_begin(self, epoch, logs=None):
        setattr(self.model.optimizer, self.name, 0.5 ** (epoch + 1))

    def on_epoch_end(self, epoch, logs):
        self.seen.append(getattr(self.model.optimizer, self.name))


@pytest.mark.parametrize("name", ["learning_rate", "lr"])
@pytest.mark.parametrize("given", ["name", "class", "instance"])
def test_the_optimizers_rate_is_read_and_set_as_in_keras(name, given):
    model, net = classifier(), torch.nn.Linear(4, 3)
    net.load_state_dict(model.net.state_dict())
    if given == "instance":
        groups = [{"params": model.net.weight}, {"params": model.net.bias, "lr": 9.0}]
        own = torch.optim.Adam(groups, lr=0.1)
        model.compile(own)
    else:
        model.compile("adam" if given == "name" else torch.optim.Adam, learning_rate=0.1)
    assert getattr(model.optimizer, name) == 0.1
    assert given != "instance" or model.optimizer is own
    rates = Halving(name)
    model.fit(X, Y, shuffle=False, epochs=3, callbacks=rates, verbose=0)
    assert rates.seen == [0.5, 0.25, 0.125]
    optimizer = torch.optim.Adam(net.parameters())
    for rate in (0.5, 0.25, 0.125):
        optimizer.param_groups[0]["lr"] = rate
        plain_loop(net, optimizer, [(X, Y)])
    assert_same_weights(model.net, net, rtol=1e-5, atol=1e-6)


def test_an_optimizer_with_a_rate_stays_one_of_torchs(tmp_path):
    model = classifier(optimizer="adam")
    model.fit(X, Y, verbose=0)
    optimizer = model.optimizer
    assert isinstance(optimizer, torch.optim.Adam)
    assert (type(optimizer).__name__, type(optimizer).__module__) == ("Adam", "torch.optim.adam")
    assert all(group["fused"] for group in optimizer.param_groups)
    for protocol in range(6):
        assert type(pickle.loads(pickle.dumps(optimizer, protocol))) is torch.optim.Adam
    twin = copy.deepcopy(optimizer)
    assert type(twin) is torch.optim.Adam
    twin.load_state_dict(optimizer.state_dict())
    model.save(tmp_path / "m.h5")
    assert fitkit.load_model(tmp_path / "m.h5", torch.nn.Linear(4, 3)).optimizer.lr == 0.001
    for wrong in ("fast", True, None, lambda epoch: 0.1, -1.0, float("nan")):
        with pytest.raises(fitkit.ConfigurationError, match="learning_rate="):
            optimizer.learning_rate = wrong
    assert optimizer.learning_rate == 0.001


def test_an_optimizers_own_attribute_keeps_its_meaning():
    class Own(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1)
            self.lr = "mine"

    model = classifier(optimizer=Own)
    model.optimizer.learning_rate = 0.5
    assert (model.optimizer.lr, model.optimizer.param_groups[0]["lr"]) == ("mine", 0.5)


def test_an_optimizer_without_a_rate_stays_as_it_is():
    class Signs(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"pace": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad.sign(), alpha=0.1)

    model = classifier(optimizer=Signs)
    assert type(model.optimizer) is type(model.optimizer) is Signs


def test_trainable_freezes_and_frees_as_in_keras():
    model = classifier()
    before = model.net.weight.detach().clone()
    assert model.trainable is True
    model.trainable = False
    assert model.trainable is False
    with pytest.raises(fitkit.ConfigurationError, match="frozen"):
        model.fit(X, Y, verbose=0)
    assert torch.equal(model.net.weight, before)
    model.trainable = True
    model.fit(X, Y, verbose=0)
    assert not torch.equal(model.net.weight, before)
    with pytest.raises(fitkit.ConfigurationError, match="trainable"):
        model.trainable = "no"


def test_trainable_on_a_layer_of_torch_is_told():
    class Flagged(torch.nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.trainable = False  # a meaning of its own

    def fit(spoil):
        net = torch.nn.Sequential(Flagged(), torch.nn.Linear(4, 3))
        spoil(net[1])
        model = fitkit.Model(net)
        model.compile("sgd", "cross_entropy")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model.fit(X, Y, verbose=0)
        return [str(w.message) for w in told if "trainable" in str(w.message)]

    assert fit(lambda layer: None) == []
    assert fit(lambda layer: layer.requires_grad_(False)) == []
    (message,) = fit(lambda layer: setattr(layer, "trainable", False))
    assert "net.1.requires_grad_(False)" in message


def test_a_new_optimizer_begins_anew():
    model = classifier(optimizer="adam")
    model.fit(X, Y, verbose=0)
    model.compile("adam")
    assert not model.optimizer.state


def test_compiling_twice_trains_on_with_the_state_of_the_optimizer():
    ours = classifier(optimizer="adam")
    ours.fit(X, Y, shuffle=False, verbose=0)
    ours.compile(accumulate_grad_batches=1)
    ours.fit(X, Y, shuffle=False, verbose=0)
    reference = classifier(optimizer="adam")
    reference.fit(X, Y, shuffle=False, epochs=2, verbose=0)
    assert torch.equal(ours.net.weight, reference.net.weight)


def test_gpus_is_the_older_spelling():
    model = classifier()
    for nothing in (None, 0, [], "0", ""):
        model.compile(gpus=nothing)
        assert model.device.type == "cpu"
    if not torch.cuda.is_available() and not torch.backends.mps.is_available():
        with pytest.raises(fitkit.ConfigurationError, match="none is visible"):
            model.compile(gpus=1)


def test_jit_compile_keeps_the_parameters_names():
    model = classifier(jit_compile={"backend": "eager"})
    assert list(model.net.state_dict()) == ["weight", "bias"]
    reference = classifier()
    for each in (model, reference):
        each.fit(X, Y, shuffle=False, verbose=0)
    assert torch.allclose(model.net.weight, reference.net.weight)
    assert model.net._compiled_call_impl is not None
    model.compile(jit_compile=False)
    assert model.net._compiled_call_impl is None


def test_a_loss_with_weights_stays_out_of_the_state_dict():
    model = classifier(loss=torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])))
    model.fit(X, Y, verbose=0)
    assert list(model.state_dict()) == ["net.weight", "net.bias"]


def test_backend_flags_last_as_long_as_the_call():
    seen = []
    model = classifier(benchmark=True, deterministic=True)
    watch = fitkit.callbacks.LambdaCallback(
        on_train_begin=lambda logs: seen.append(
            (torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled())
        )
    )
    model.fit(X, Y, callbacks=watch, verbose=0)
    assert seen == [(True, True)]
    assert not torch.backends.cudnn.benchmark
    assert not torch.are_deterministic_algorithms_enabled()


# ---------------------------------------------------------------------- kinds of nets


class Sums(torch.nn.Module):
    """Two inputs, by name or by position."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, left, right, scale=1.0):
        return self.layer(left + right) * scale


class Whole(torch.nn.Module):
    """A single input that is a dict."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, inputs):
        return self.layer(inputs["left"] + inputs["right"])


@pytest.mark.parametrize(
    ("net", "x"),
    [
        (Sums, (X, X)),
        (Sums, [X, X]),
        (Sums, {"right": X, "left": X}),
        (Whole, {"left": X, "right": X}),
    ],
)
def test_several_inputs_enter_by_position_by_keyword_or_whole(net, x):
    model = fitkit.Model(net())
    model.compile("sgd", "cross_entropy")
    model.fit(x, Y, verbose=0)
    expected = model.net.layer(X + X).detach().numpy()
    assert np.allclose(model.predict(x, batch_size=10, verbose=0), expected, atol=1e-6)


class TwoHeads(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.a, self.b, self.kind = torch.nn.Linear(4, 3), torch.nn.Linear(4, 1), kind

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        return {"kind": a, "size": b} if self.kind == "dict" else (a, b)


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_several_outputs_have_losses_metrics_and_logs_of_their_own(kind):
    sizes = torch.randn(24)
    names = ("kind", "size") if kind == "dict" else ("output_0", "output_1")
    model = fitkit.Model(TwoHeads(kind))
    losses, metrics = ["cross_entropy", "mse"], [["accuracy"], ["mae"]]
    targets = (Y, sizes)
    if kind == "dict":
        losses, metrics, targets = (
            dict(zip(names, each, strict=True)) for each in (losses, metrics, targets)
        )
    model.compile("sgd", losses, metrics=metrics, loss_weights=[2.0, 0.5])
    values = model.evaluate(X, targets, batch_size=7, return_dict=True, verbose=0)
    with torch.no_grad():
        a, b = model.net.a(X), model.net.b(X)[:, 0]
    first, second = F.cross_entropy(a, Y).item(), F.mse_loss(b, sizes).item()
    assert values == pytest.approx(
        {
            "loss": 2 * first + 0.5 * second,
            f"{names[0]}_loss": first,
            f"{names[1]}_loss": second,
            f"{names[0]}_accuracy": (a.argmax(1) == Y).float().mean().item(),
            f"{names[1]}_mae": (b - sizes).abs().mean().item(),
        },
        abs=1e-5,
    )
    assert model.metrics_names == list(values)
    history = model.fit(X, targets, validation_split=0.25, verbose=0).history
    assert set(history) == {*values, *(f"val_{name}" for name in values)}
    predicted = model.predict(X, verbose=0)
    assert type(predicted) is (dict if kind == "dict" else tuple)


@dataclasses.dataclass
class Output:
    """As Hugging Face's models give it: attributes, items, and Nones left in."""

    loss: torch.Tensor | None
    logits: torch.Tensor
    hidden: None = None

    def items(self):
        return [("loss", self.loss), ("logits", self.logits), ("hidden", None)]


class HuggingFaceLike(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        logits = self.layer(input_ids * attention_mask)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return Output(loss, logits)


def test_a_net_with_its_own_loss_trains_from_dict_batches():
    torch.manual_seed(0)
    model = fitkit.Model(HuggingFaceLike())
    model.compile("sgd", metrics=["accuracy"], learning_rate=0.5)
    batch = {"input_ids": X, "attention_mask": torch.ones(24, 1), "labels": Y}
    with torch.no_grad():
        logits = model.net.layer(X)
    values = model.evaluate(batch, batch_size=10, return_dict=True, verbose=0)
    assert values["loss"] == pytest.approx(F.cross_entropy(logits, Y).item(), abs=1e-6)
    assert values["accuracy"] == pytest.approx((logits.argmax(1) == Y).float().mean().item())
    losses = model.fit([batch], epochs=5, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    del batch["labels"]
    predicted = model.predict(batch, verbose=0)
    assert list(predicted) == ["logits"]
    assert predicted["logits"].shape == (24, 3)


def test_a_subclass_may_define_its_own_layers_and_forward():
    class Own(fitkit.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)

        def forward(self, x):
            return self.second(torch.relu(self.first(x)))

    model = Own()
    model.compile("adam", "cross_entropy", metrics=["accuracy"])
    model.fit(X, Y, verbose=0)
    assert model.predict(X, verbose=0).shape == (24, 3)
    assert set(model.state_dict()) == {"first.weight", "first.bias", "second.weight", "second.bias"}


def test_calling_the_model_calls_the_net():
    model = classifier()
    assert torch.equal(model(X), model.net(X))


# ---------------------------------------------------------------------- modes


def test_modes_are_training_in_fit_evaluation_elsewhere_and_restored():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(), torch.nn.Linear(4, 3))
    net[1].eval()  # as the user left it
    seen = []
    net.register_forward_pre_hook(
        lambda module, inputs: seen.append((net.training, net[1].training))
    )
    model = fitkit.Model(net)
    model.compile("sgd", "cross_entropy")
    model.fit(X, Y, validation_data=(X, Y), batch_size=24, epochs=2, verbose=0)
    assert seen == [(True, False), (False, False)] * 2
    assert net.training and not net[1].training
    seen.clear()
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    assert seen == [(False, False)] * 2
    assert net.training and not net[1].training


def test_a_callback_may_freeze_a_layer_for_an_epoch():
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    model = fitkit.Model(net)
    model.compile("sgd", "cross_entropy")
    freeze = fitkit.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: net[0].eval())
    model.fit(X, Y, callbacks=[freeze], epochs=2, verbose=0)
    assert torch.equal(net[0].running_mean, torch.zeros(4))


# ---------------------------------------------------------------------- Keras's arguments


def test_validation_split_takes_the_tail_before_shuffling():
    model = classifier()
    history = model.fit(X, Y, validation_split=0.25, epochs=1, verbose=0).history
    with torch.no_grad():
        expected = F.cross_entropy(model.net(X[18:]), Y[18:]).item()
    assert history["val_loss"][0] == pytest.approx(expected, abs=1e-6)


def test_validation_happens_as_often_as_asked():
    model = classifier()
    by_number = model.fit(X, Y, epochs=4, validation_data=(X, Y), validation_freq=2, verbose=0)
    assert len(by_number.history["val_loss"]) == 2
    by_list = model.fit(
        X, Y, epochs=4, validation_data=(X, Y), validation_freq=[1, 2, 4], verbose=0
    )
    assert len(by_list.history["val_loss"]) == 3


def test_epochs_is_the_final_epochs_number():
    history = classifier().fit(X, Y, initial_epoch=3, epochs=5, verbose=0)
    assert history.epoch == [3, 4]


def test_steps_cut_an_endless_generator_into_epochs():
    seen = []

    def endless():
        number = 0
        while True:
            seen.append(number)
            yield X[:4], Y[:4]
            number += 1

    model = classifier()
    history = model.fit(
        endless(),
        steps_per_epoch=3,
        epochs=2,
        validation_data=endless(),
        validation_steps=2,
        verbose=0,
    )
    assert len(history.history["loss"]) == len(history.history["val_loss"]) == 2
    assert seen == [0, 1, 2, 0, 1, 3, 4, 5, 2, 3]


def test_the_effective_batch_size_is_known_after_fit():
    model = classifier()
    assert model.effective_batch_size is None
    model.fit(X, Y, batch_size=6, verbose=0)
    assert model.effective_batch_size == 6
    assert (model.world_size, model.global_rank, model.local_rank) == (1, 0, 0)
    assert model.is_global_zero and model.device_ids == [0]


# ---------------------------------------------------------------------- callbacks


def recording():
    calls = []
    hooks = {
        hook: (lambda *arguments, hook=hook: calls.append((hook, *arguments[:-1])))
        for hook in fitkit.callbacks.base.HOOKS
        if hook not in ("on_batch_begin", "on_batch_end")
    }
    return fitkit.callbacks.LambdaCallback(**hooks), calls


def test_hooks_come_in_kerass_order():
    callback, calls = recording()
    classifier().fit(
        X,
        Y,
        batch_size=12,
        epochs=1,
        validation_data=(X, Y),
        validation_batch_size=24,
        callbacks=callback,
        verbose=0,
    )
    assert calls == [
        ("on_train_begin",),
        ("on_epoch_begin", 0),
        ("on_train_batch_begin", 0),
        ("on_train_batch_end", 0),
        ("on_train_batch_begin", 1),
        ("on_train_batch_end", 1),
        ("on_test_begin",),
        ("on_test_batch_begin", 0),
        ("on_test_batch_end", 0),
        ("on_test_end",),
        ("on_epoch_end", 0),
        ("on_train_end",),
    ]


def test_evaluate_and_predict_call_their_hooks():
    callback, calls = recording()
    model = classifier()
    model.evaluate(X, Y, callbacks=callback, verbose=0)
    assert [call[0] for call in calls] == [
        "on_test_begin",
        "on_test_batch_begin",
        "on_test_batch_end",
        "on_test_end",
    ]
    calls.clear()
    model.predict(X, callbacks=callback, verbose=0)
    assert [call[0] for call in calls] == [
        "on_predict_begin",
        "on_predict_batch_begin",
        "on_predict_batch_end",
        "on_predict_end",
    ]


def test_batch_logs_are_running_means():
    seen = []
    watch = fitkit.callbacks.LambdaCallback(
        on_batch_end=lambda batch, logs: seen.append(dict(logs))
    )
    model = classifier(metrics=["accuracy"], learning_rate=0.0)
    model.fit(X, Y, batch_size=10, shuffle=False, callbacks=watch, verbose=0)
    with torch.no_grad():
        logits = model.net(X)
    for logs, end in zip(seen, (10, 20, 24), strict=True):
        assert logs["loss"] == pytest.approx(
            F.cross_entropy(logits[:end], Y[:end]).item(), abs=1e-6
        )
        assert logs["accuracy"] == pytest.approx(
            (logits[:end].argmax(1) == Y[:end]).float().mean().item()
        )


def test_what_a_callback_adds_to_the_logs_later_ones_and_the_history_see():
    seen = []

    def add(epoch, logs):
        logs["rate"] = 0.5

    callbacks = [
        fitkit.callbacks.LambdaCallback(on_epoch_end=add),
        fitkit.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["rate"])),
    ]
    history = classifier().fit(X, Y, epochs=2, callbacks=callbacks, verbose=0)
    assert seen == history.history["rate"] == [0.5, 0.5]


def test_stop_training_ends_the_epoch_properly():
    model = classifier()
    callback, calls = recording()

    def stop(batch, logs):
        model.stop_training = batch == 1

    stopper = fitkit.callbacks.LambdaCallback(on_train_batch_end=stop)
    history = model.fit(
        X,
        Y,
        batch_size=4,
        epochs=5,
        validation_data=(X, Y),
        verbose=0,
        callbacks=[stopper, callback],
    )
    assert [call[0] for call in calls].count("on_train_batch_end") == 2
    assert [call[0] for call in calls][-2:] == ["on_epoch_end", "on_train_end"]
    assert list(history.history) == ["loss", "val_loss"]
    assert model.fit(X, Y, epochs=2, verbose=0).epoch == [0, 1]  # the next fit starts afresh


def test_an_evaluation_inside_a_callback_leaves_the_epochs_numbers_alone():
    model = classifier(metrics=["accuracy"])
    inside = []

    def look(batch, logs):
        inside.append(model.evaluate(X, Y, verbose=0, return_dict=True))

    watched = model.fit(
        X,
        Y,
        batch_size=6,
        shuffle=False,
        verbose=0,
        callbacks=fitkit.callbacks.LambdaCallback(on_train_batch_end=look),
    ).history
    alone = (
        classifier(metrics=["accuracy"]).fit(X, Y, batch_size=6, shuffle=False, verbose=0).history
    )
    assert watched == alone
    assert len(inside) == 4


def test_an_interrupt_keeps_the_history_and_the_modes():
    model = classifier()

    def interrupt(epoch, logs):
        if epoch == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.fit(
            X,
            Y,
            epochs=5,
            verbose=0,
            callbacks=fitkit.callbacks.LambdaCallback(on_epoch_begin=interrupt),
        )
    assert len(model.history.history["loss"]) == 1
    assert model.training


class Owned(fitkit.Model):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("own", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def own_model():
    model = Owned()
    model.compile(loss="cross_entropy", metrics=["accuracy"])
    return model


def failing_fit(model):
    with pytest.raises(fitkit.ConfigurationError):
        model.fit(X, Y + 7, verbose=0)


def callbacks_in(folder):
    return [
        fitkit.callbacks.EarlyStopping("val_loss", restore_best_weights=True),
        fitkit.callbacks.ModelCheckpoint(folder / "{epoch}.h5"),
        fitkit.callbacks.BackupAndRestore(folder / "backup"),
        fitkit.callbacks.CSVLogger(folder / "log.csv"),
        fitkit.callbacks.EvaluateEvery(X, Y),
        fitkit.callbacks.ProgressBar(),
    ]


@pytest.mark.parametrize(
    ("make", "run"),
    [
        (classifier, lambda model, folder: model.fit(X, Y, verbose=0)),
        (classifier, lambda model, folder: model.fit(X, Y, verbose=0, validation_split=0.25)),
        (classifier, lambda model, folder: [
            model.fit(X, Y, verbose=0), model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0)
        ]),
        (lambda: classifier(metrics=["accuracy"], lr_scheduler="one_cycle", warmup_epochs=1),
         lambda model, folder: model.fit(X, Y, epochs=3, verbose=0)),
        (lambda: classifier(accumulate_grad_batches=2, gradient_clip_val=1.0),
         lambda model, folder: model.fit(X, Y, epochs=2, verbose=0)),
        (classifier, lambda model, folder: model.fit(
            X, Y, epochs=2, verbose=0, validation_split=0.25, callbacks=callbacks_in(folder))),
        (own_model, lambda model, folder: model.fit(X, Y, epochs=2, verbose=0)),
        (classifier, lambda model, folder: failing_fit(model)),
        (classifier, lambda model, folder: model.train_on_batch(X, Y)),
    ],
    ids=["fit", "validation", "all", "schedule", "groups", "callbacks", "own", "failed", "batch"],
)  # fmt: skip
def test_a_deleted_model_is_gone_without_the_garbage_collector(make, run, tmp_path):
    classifier().fit(X, Y, verbose=0)  # torch imports its compiler with the first optimizer
    model = make()
    gone, weights = weakref.ref(model), weakref.ref(next(model.parameters()))
    gc.collect()
    gc.disable()
    try:
        run(model, tmp_path)
        del model
        assert gone() is None and weights() is None
    finally:
        gc.enable()


def test_a_history_that_is_kept_keeps_no_model():
    model = classifier()
    history = model.fit(X, Y, verbose=0)
    assert history.model is model
    assert copy.deepcopy(history).history == history.history
    del model
    assert history.model is None and len(history.history["loss"]) == 1


def test_every_shipped_callback_survives_two_fits():
    model = classifier()
    for callback in (
        fitkit.callbacks.History(),
        fitkit.callbacks.LambdaCallback(),
        fitkit.callbacks.ProgressBar(verbose=0),
    ):
        for _ in range(2):
            model.fit(X, Y, callbacks=[callback], verbose=0)


# ---------------------------------------------------------------------- files


def test_weights_carry_the_nets_own_names(tmp_path):
    import h5py

    model = classifier()
    path = tmp_path / "weights.h5"
    model.save_weights(path)
    with h5py.File(path) as file:
        text = b"".join(
            bytes(d[()].tobytes()) for d in file.values() if isinstance(d, h5py.Dataset)
        )
    assert b"net.weight" not in text
    other = fitkit.Model(torch.nn.Linear(4, 3))
    other.load_weights(path)
    assert torch.equal(other.net.weight, model.net.weight)


def test_weights_of_another_net_are_refused_and_nothing_changes(tmp_path):
    classifier().save_weights(tmp_path / "w.h5")
    other = fitkit.Model(torch.nn.Linear(4, 5))
    before = other.net.weight.detach().clone()
    with pytest.raises(fitkit.CheckpointError, match=r"weight"):
        other.load_weights(tmp_path / "w.h5")
    assert torch.equal(other.net.weight, before)
    with pytest.raises(FileNotFoundError):
        other.load_weights(tmp_path / "absent.h5")


def test_summary_prints_layers_and_parameters(capsys):
    classifier().summary(X[:2])
    printed = capsys.readouterr().out
    assert "Linear" in printed and "15" in printed and "(2, 3)" in printed


# ---------------------------------------------------------------------- the user's own things


@pytest.mark.parametrize("kind", ["tensor", "numpy"])
def test_a_net_that_writes_into_its_input_leaves_the_users_data_alone(kind):
    x = X.clone() if kind == "tensor" else X.numpy().copy()
    before = X.clone()
    net = torch.nn.Sequential(torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 3))
    model = fitkit.Model(net)
    model.compile("sgd", "cross_entropy", learning_rate=0.0)
    first = model.predict(x, batch_size=5, verbose=0)
    assert np.array_equal(first, model.predict(x, batch_size=5, verbose=0))
    history = model.fit(
        x, Y, batch_size=5, epochs=2, shuffle=False, validation_data=(x, Y), verbose=0
    ).history
    assert history["val_loss"][0] == history["val_loss"][1]
    assert torch.equal(torch.as_tensor(x), before)


def test_predictions_have_memory_of_their_own():
    x = X.clone()
    predicted = fitkit.Model(torch.nn.Identity()).predict(x, batch_size=100, verbose=0)
    predicted[:] = 0
    assert torch.equal(x, X)


def test_a_data_set_that_changes_its_rows_is_asked_for_each():
    class Doubled(TensorDataset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return 2 * x, y

    model = classifier()
    expected = model.net(2 * X).detach().numpy()
    assert np.allclose(model.predict(Doubled(X, Y), verbose=0), expected, atol=1e-6)


def test_samples_are_counted_by_their_targets():
    class Looks(torch.nn.Module):
        def forward(self, table, x):
            return x * table.sum()

    table = torch.full((7, 1), 1 / 7)
    batches = [({"table": table, "x": X[:20]}, Y[:20]), ({"table": table, "x": X[20:]}, Y[20:])]
    model = fitkit.Model(Looks())
    model.compile(loss="cross_entropy")
    expected = F.cross_entropy(X, Y).item()
    assert model.evaluate(batches, verbose=0) == pytest.approx(expected, abs=1e-6)


def test_targets_of_a_half_precision_net_are_not_rounded():
    net = torch.nn.Linear(4, 1).to(torch.bfloat16)
    torch.nn.init.zeros_(net.weight)
    torch.nn.init.zeros_(net.bias)
    model = fitkit.Model(net)
    model.compile(loss="mse")
    assert model.evaluate(X, torch.full((24, 1), 257.0), verbose=0) == pytest.approx(257.0**2)


def test_class_weights_reach_weighted_metrics():
    model = classifier(weighted_metrics=["accuracy"], learning_rate=0.0)
    history = model.fit(X, Y, batch_size=24, class_weight={0: 3.0}, verbose=0).history
    right = (model.net(X).argmax(1) == Y).float()
    weight = torch.where(Y == 0, 3.0, 1.0)
    assert history["accuracy"][0] == pytest.approx(((right * weight).sum() / weight.sum()).item())


def test_labels_inside_a_dict_batch_reach_a_compiled_loss():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)

        def forward(self, x, labels=None):
            return self.layer(x)

    model = fitkit.Model(Net())
    model.compile("sgd", "cross_entropy", metrics=["accuracy"])
    batch = {"x": X, "labels": Y.int()}
    expected = F.cross_entropy(model.net(X), Y).item()
    assert model.evaluate(batch, verbose=0)[0] == pytest.approx(expected, abs=1e-6)


# ---------------------------------------------------------------------- optimizer and schedulers


class Scaled(torch.nn.Module):
    """A loss that learns its scale, and notes in which mode it was called."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(()))
        self.modes = []

    def forward(self, prediction, target):
        self.modes.append(self.training)
        return F.mse_loss(prediction, target) * torch.exp(-self.a) + self.a


@pytest.mark.parametrize("by_name", [False, True])
def test_a_losss_own_parameters_learn(by_name):
    def pair():
        torch.manual_seed(0)
        return torch.nn.Linear(4, 4), Scaled()

    net, loss = pair()
    model = fitkit.Model(net)
    both = torch.optim.SGD([*net.parameters(), *loss.parameters()], lr=0.1)
    model.compile("sgd" if by_name else both, loss)
    if by_name:
        model.compile(learning_rate=0.1)
    model.fit(X, X, batch_size=6, shuffle=False, verbose=0)
    twin, twin_loss = pair()
    optimizer = torch.optim.SGD([*twin.parameters(), *twin_loss.parameters()], lr=0.1)
    plain_loop(twin, optimizer, slices(X, X, 6), loss=twin_loss)
    assert loss.a.item() == pytest.approx(twin_loss.a.item(), abs=1e-6)
    assert loss.a.grad is None
    net, loss = pair()
    model = fitkit.Model(net)
    model.compile(torch.optim.SGD(net.parameters(), lr=0.1), loss)
    with pytest.warns(UserWarning, match="1 parameters that no optimizer holds"):
        model.fit(X, X, verbose=0)


def test_a_loss_is_in_evaluation_mode_where_its_net_is():
    loss = Scaled()
    model = fitkit.Model(torch.nn.Linear(4, 4))
    model.compile("sgd", loss)
    model.fit(X, X, batch_size=24, epochs=2, validation_data=(X, X), validation_batch_size=24,
              verbose=0)  # fmt: skip
    model.evaluate(X, X, batch_size=24, verbose=0)
    assert loss.modes == [True, False, True, False, False]
    assert loss.training


def test_a_replaced_layer_gets_an_optimizer_that_trains_it():
    model = fitkit.Model(torch.nn.Sequential(torch.nn.Linear(4, 3)))
    model.compile("sgd", "cross_entropy", learning_rate=0.5)
    model.fit(X, Y, verbose=0)
    model.net[0] = torch.nn.Linear(4, 3)
    before = model.net[0].weight.detach().clone()
    with pytest.warns(UserWarning, match="replaced"):
        model.fit(X, Y, verbose=0)
    assert not torch.equal(model.net[0].weight, before)


def rates_of(model, **arguments):
    rates = []
    watch = fitkit.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: rates.append(model.optimizer.param_groups[0]["lr"])
    )
    model.fit(X, Y, callbacks=watch, verbose=0, **arguments)
    return rates


def test_a_scheduler_by_name_spans_each_fit_and_goes_on_with_initial_epoch():
    def cosine(epoch, total):
        return 0.1 * (1 + np.cos(np.pi * epoch / total)) / 2

    model = classifier(learning_rate=0.1, lr_scheduler="cosine")
    assert rates_of(model, epochs=3) == pytest.approx([cosine(e, 3) for e in range(3)])
    assert rates_of(model, epochs=2) == pytest.approx([cosine(e, 2) for e in range(2)])
    assert rates_of(model, epochs=4, initial_epoch=2) == pytest.approx([cosine(2, 4), cosine(3, 4)])


def test_a_failed_fit_leaves_scheduler_rates_and_history_as_they_were():
    model = classifier(learning_rate=0.1, lr_scheduler="one_cycle")
    with pytest.raises(fitkit.ConfigurationError):
        model.fit(X[:, :3], Y, epochs=1, verbose=0)
    assert model.optimizer.param_groups[0] == {
        **torch.optim.SGD(model.parameters(), lr=0.1, fused=True).param_groups[0],
        "params": list(model.parameters()),
    }
    good = model.fit(X, Y, epochs=2, verbose=0)
    with pytest.raises(fitkit.ConfigurationError):
        model.fit(X[:, :3], Y, epochs=1, verbose=0)
    assert model.history is good


def test_fit_trains_although_its_caller_switched_gradients_off():
    model = classifier()
    before = model.net.weight.detach().clone()
    with torch.no_grad():
        model.fit(X, Y, verbose=0)
    assert not torch.equal(model.net.weight, before)


def test_a_traced_net_trains():
    model = fitkit.Model(torch.jit.trace(torch.nn.Linear(4, 3), X))
    model.compile("sgd", "cross_entropy")
    model.fit(X, Y, verbose=0)


def test_a_traced_net_is_as_it_was_after_a_fit_that_failed():
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    model = fitkit.Model(torch.jit.trace(net, X))
    model.compile("sgd", "cross_entropy")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(fitkit.ConfigurationError):
        model.fit(X, torch.full((len(X),), 7), verbose=0)  # there are 3 classes
    assert_same_weights(model, before)


def test_loader_workers_end_with_the_fit():
    import multiprocessing

    loader = DataLoader(Pairs(), batch_size=4, num_workers=1)
    classifier().fit(loader, steps_per_epoch=2, verbose=0)
    assert not multiprocessing.active_children()


def test_the_optimizers_learning_rate_is_there_as_in_keras():
    model = classifier(learning_rate=0.25)
    assert model.optimizer.learning_rate == model.optimizer.lr == 0.25
    model.optimizer.learning_rate = 0.125
    assert model.optimizer.param_groups[0]["lr"] == 0.125


class Three(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 1) for _ in range(3))

    def forward(self, x):
        return tuple(layer(x) for layer in self.layers)


@pytest.mark.parametrize("weight", [None, np.linspace(0.5, 2, 24).astype("float32")])
def test_keras_targets_of_the_trained_outputs_alone_are_matched_in_order(weight):
    a, b = X[:, :1], X[:, 1:2]
    given = {"loss": [None, "mse", "mae"], "metrics": ["mae"]}
    found = []
    for y in ((a, b), {"output_1": a, "output_2": b}):
        fitkit.set_seed(0)
        model = fitkit.Model(Three())
        model.compile("sgd", **given)
        weights = None if weight is None else weight[: len(X)]
        history = model.fit(X, y, sample_weight=weights, epochs=2, verbose=0).history
        found.append((history, model.evaluate(X, y, return_dict=True, verbose=0)))
    assert found[0] == found[1]
    assert "output_1_mae" in found[0][0] and "output_0_mae" not in found[0][0]
    model = fitkit.Model(Three())
    model.compile("sgd", [None, "mse", None], metrics=["mae"])
    assert "output_1_mae" in model.fit(X, a, verbose=0).history
    with pytest.raises(fitkit.ConfigurationError, match=r"target has 4 entries.*3 outputs"):
        model.fit(X, (a, a, a, a), verbose=0)
