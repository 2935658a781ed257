"""fit gives the weights of a loop written by hand, bit for bit."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from tests.nets import classification, normal
from tests.reference import assert_same_weights, plain_loop, slices

X, LABELS = classification(50, 6, seed=1)
VALUES = normal(50, seed=3)


def small_net(seed=0, *, outputs=3, dropout=0.0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        torch.nn.Dropout(dropout),
        torch.nn.Linear(8, outputs),
    )


@pytest.mark.parametrize(
    "name",
    [
        "SGD",
        "adam",
        "ADAMW",
        "rmsprop",
        "adagrad",
        "nadam",
        "radam",
        "adamax",
        "adadelta",
        "asgd",
        "rprop",
        "adafactor",
    ],
)
def test_every_first_order_optimizer_by_name_is_torchs_own_with_its_defaults(name):
    from fitkit.optimizers import FUSED, OPTIMIZERS

    ours, theirs = small_net(), small_net()
    model = fitkit.Model(ours)
    model.compile(name, "cross_entropy")
    history = model.fit(X, LABELS, batch_size=16, epochs=3, shuffle=False, verbose=0)
    how = {"fused": True} if OPTIMIZERS[name] in FUSED else {}
    reference = OPTIMIZERS[name](theirs.parameters(), **how)
    losses = plain_loop(theirs, reference, slices(X, LABELS, 16), 3)
    assert_same_weights(ours, theirs)
    assert history.history["loss"] == pytest.approx(losses, abs=1e-7)


def test_a_shuffling_loader_is_read_in_the_order_of_a_plain_loop():
    ours, theirs = small_net(dropout=0.5), small_net(dropout=0.5)
    data = TensorDataset(X, LABELS)
    torch.manual_seed(5)
    model = fitkit.Model(ours)
    model.compile("sgd", "cross_entropy", learning_rate=0.1, metrics=["accuracy"])
    model.fit(DataLoader(data, batch_size=8, shuffle=True), epochs=3, verbose=0)
    torch.manual_seed(5)
    loader = DataLoader(data, batch_size=8, shuffle=True)
    # The orders follow one another as if the net drew nothing.
    passes = [list(loader)]
    after_the_first = torch.get_rng_state()
    passes += [list(loader) for _ in range(2)]
    torch.set_rng_state(after_the_first)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for number, batches in enumerate(passes):
        if number:
            list(loader)  # the net's numbers move on as a pass's do
        plain_loop(theirs, optimizer, batches, 1)
    assert_same_weights(ours, theirs)


def test_a_shuffling_loader_and_a_net_that_draws_nothing_are_a_plain_loop():
    ours, theirs = small_net(), small_net()
    data = TensorDataset(X, LABELS)
    torch.manual_seed(5)
    model = fitkit.Model(ours)
    model.compile("sgd", "cross_entropy", learning_rate=0.1)
    model.fit(DataLoader(data, batch_size=8, shuffle=True), epochs=3, verbose=0)
    drawn = torch.rand(())
    torch.manual_seed(5)
    loader = DataLoader(data, batch_size=8, shuffle=True)
    plain_loop(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), loader, 3)
    assert_same_weights(ours, theirs)
    assert torch.equal(torch.rand(()), drawn)


def test_lbfgs_trains_with_its_closure():
    ours, theirs = torch.nn.Linear(6, 1), torch.nn.Linear(6, 1)
    theirs.load_state_dict(ours.state_dict())
    model = fitkit.Model(ours)
    model.compile(functools.partial(torch.optim.LBFGS, max_iter=4), "mse")
    model.fit(X, VALUES[:, None], batch_size=50, epochs=3, shuffle=False, verbose=0)
    optimizer = torch.optim.LBFGS(theirs.parameters(), max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(theirs(X), VALUES[:, None])
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert_same_weights(ours, theirs)


def test_muon_trains_matrices():
    net = torch.nn.Linear(6, 3, bias=False)
    model = fitkit.Model(net)
    model.compile("muon", "cross_entropy", learning_rate=0.05)
    losses = model.fit(X, LABELS, epochs=20, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def test_sparse_adam_trains_sparse_embeddings():
    torch.manual_seed(0)
    net = torch.nn.EmbeddingBag(10, 3, sparse=True)
    model = fitkit.Model(net)
    model.compile("sparseadam", "cross_entropy", learning_rate=0.1)
    losses = model.fit(torch.randint(10, (50, 4)), LABELS, epochs=10, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.Adam,
        functools.partial(torch.optim.SGD, momentum=0.9, lr=0.05),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        "instance",
    ],
    ids=["class", "partial", "factory", "instance"],
)
def test_an_optimizer_can_be_given_in_any_form(optimizer):
    ours, theirs = small_net(), small_net()
    model = fitkit.Model(ours)
    if optimizer == "instance":
        model.compile(torch.optim.SGD(ours.parameters(), lr=0.05), "cross_entropy")
        reference = torch.optim.SGD(theirs.parameters(), lr=0.05)
    else:
        model.compile(optimizer, "cross_entropy")
        reference = optimizer(theirs.parameters())
    model.fit(X, LABELS, batch_size=16, epochs=2, shuffle=False, verbose=0)
    plain_loop(theirs, reference, slices(X, LABELS, 16), 2)
    assert_same_weights(ours, theirs)


def test_accumulated_batches_learn_as_one_larger_batch():
    """Sizes 16, 16, 16, 2 in groups of three: two updates, on 48 and on 2 samples."""
    ours, theirs = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)
    theirs.load_state_dict(ours.state_dict())
    model = fitkit.Model(ours)
    model.compile("sgd", "cross_entropy", learning_rate=0.5, accumulate_grad_batches=3)
    model.fit(X, LABELS, batch_size=16, epochs=2, shuffle=False, verbose=0)
    plain_loop(theirs, torch.optim.SGD(theirs.parameters(), lr=0.5), slices(X, LABELS, 48), 2)
    assert_same_weights(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_short_batch_inside_a_group_weighs_by_its_samples():
    sizes = [20, 7, 23]
    batches, start = [], 0
    for size in sizes:
        batches.append((X[start : start + size], LABELS[start : start + size]))
        start += size
    ours, theirs = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)
    theirs.load_state_dict(ours.state_dict())
    model = fitkit.Model(ours)
    model.compile("sgd", "cross_entropy", learning_rate=0.5, accumulate_grad_batches=3)
    model.fit(batches, verbose=0)
    plain_loop(theirs, torch.optim.SGD(theirs.parameters(), lr=0.5), [(X, LABELS)])
    assert_same_weights(ours, theirs, rtol=1e-5, atol=1e-6)


def test_gradients_are_clipped_by_norm_and_by_value():
    ours, theirs = small_net(), small_net()
    model = fitkit.Model(ours)
    model.compile("sgd", "cross_entropy", learning_rate=1.0, gradient_clip_val=0.1)
    model.fit(X, LABELS, batch_size=16, epochs=2, shuffle=False, verbose=0)
    plain_loop(
        theirs, torch.optim.SGD(theirs.parameters(), lr=1.0), slices(X, LABELS, 16), 2, clip=0.1
    )
    assert_same_weights(ours, theirs)

    net = torch.nn.Linear(6, 1, bias=False)
    before = net.weight.detach().clone()
    model = fitkit.Model(net)
    model.compile(
        "sgd", "mse", learning_rate=1.0, gradient_clip_val=1e-3, gradient_clip_algorithm="value"
    )
    model.fit(X, 100 * VALUES[:, None], batch_size=50, verbose=0)
    assert (net.weight - before).abs().max() <= 1e-3 + 1e-7


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_a_scheduler_steps_each_epoch_or_each_update(interval):
    ours, theirs = small_net(), small_net()
    maker = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    model = fitkit.Model(ours)
    model.compile(
        "sgd",
        "cross_entropy",
        learning_rate=0.2,
        lr_scheduler={"scheduler": maker, "interval": interval},
    )
    model.fit(X, LABELS, batch_size=25, epochs=4, shuffle=False, verbose=0)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.2)
    scheduler = maker(optimizer)
    for _ in range(4):
        for batch in slices(X, LABELS, 25):
            plain_loop(theirs, optimizer, [batch])
            if interval == "step":
                scheduler.step()
        if interval == "epoch":
            scheduler.step()
    assert_same_weights(ours, theirs)
    assert model.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_a_plateau_scheduler_watches_the_validation_loss():
    model = fitkit.Model(torch.nn.Linear(6, 3))
    plateau = functools.partial(
        torch.optim.lr_scheduler.ReduceLROnPlateau,
        patience=0,
        factor=0.5,
        threshold=10.0,
        threshold_mode="abs",
    )
    model.compile("sgd", "cross_entropy", learning_rate=0.4, lr_scheduler=plateau)
    model.fit(X, LABELS, epochs=3, validation_data=(X, LABELS), verbose=0)
    # No loss can beat the first by 10; two reductions follow.
    assert model.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_schedulers_by_name_get_the_trainings_length():
    model = fitkit.Model(torch.nn.Linear(6, 3))
    model.compile("sgd", "cross_entropy", learning_rate=0.4, lr_scheduler="cosine")
    model.fit(X, LABELS, epochs=5, verbose=0)
    assert model.optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)
    model.compile(optimizer="sgd", lr_scheduler="OneCycleLR")
    model.fit(X, LABELS, epochs=5, verbose=0)
    assert model.optimizer.param_groups[0]["lr"] < 0.4 / 1000


def test_sample_weights_multiply_each_loss_and_divide_by_the_number_of_samples():
    net = torch.nn.Linear(6, 3)
    weight = np.random.default_rng(0).uniform(0, 3, 50)
    model = fitkit.Model(net)
    model.compile("sgd", "cross_entropy")
    value = model.evaluate(X, LABELS, sample_weight=weight, batch_size=50, verbose=0)
    losses = F.cross_entropy(net(X), LABELS, reduction="none").detach().numpy()
    assert value == pytest.approx((losses * weight).sum() / 50, abs=1e-6)


def test_class_weights_multiply_with_sample_weights_and_leave_validation_alone():
    ours, theirs = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)
    theirs.load_state_dict(ours.state_dict())
    weight = torch.rand(50) + 0.5
    model = fitkit.Model(ours)
    model.compile("sgd", "cross_entropy", learning_rate=0.5)
    loader = DataLoader(TensorDataset(X, LABELS, weight), batch_size=25)
    history = model.fit(
        loader, class_weight={0: 3.0, 2: 0.5}, validation_data=(X, LABELS), verbose=0
    ).history
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5)
    table = torch.tensor([3.0, 1.0, 0.5])
    for start in (0, 25):
        part = slice(start, start + 25)
        optimizer.zero_grad()
        losses = F.cross_entropy(theirs(X[part]), LABELS[part], reduction="none")
        (losses * weight[part] * table[LABELS[part]]).mean().backward()
        optimizer.step()
    assert_same_weights(ours, theirs, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert history["val_loss"][0] == pytest.approx(
            F.cross_entropy(theirs(X), LABELS).item(), abs=1e-6
        )


def test_evaluation_is_the_mean_over_samples_with_a_short_last_batch():
    net = torch.nn.Linear(6, 3)
    model = fitkit.Model(net)
    model.compile(loss="cross_entropy", metrics=["accuracy"])
    values = model.evaluate(X, LABELS, batch_size=16, return_dict=True, verbose=0)
    with torch.no_grad():
        logits = net(X)
    assert values["loss"] == pytest.approx(F.cross_entropy(logits, LABELS).item(), abs=1e-6)
    assert values["accuracy"] == pytest.approx((logits.argmax(1) == LABELS).float().mean().item())
    assert all(type(value) is float for value in values.values())


def test_predictions_are_the_nets_in_input_order():
    net = small_net()
    model = fitkit.Model(net)
    net.eval()
    with torch.no_grad():
        expected = torch.cat([net(x) for x, _ in slices(X, LABELS, 16)])
    for data in (
        X,
        X.numpy().astype("float64"),
        DataLoader(TensorDataset(X, LABELS), batch_size=16),
    ):
        given = model.predict(data, batch_size=16, verbose=0)
        assert isinstance(given, np.ndarray)
        assert np.array_equal(given, expected.numpy())
    assert isinstance(model.predict(X, as_numpy=False, verbose=0), torch.Tensor)
    assert model.predict(X, batch_size=16, steps=2, verbose=0).shape == (32, 3)


def test_the_same_seed_gives_the_same_bits_and_another_seed_another_order():
    def train(seed):
        fitkit.set_seed(seed)
        net = small_net(dropout=0.3)
        fitkit.set_seed(seed)
        model = fitkit.Model(net)
        model.compile("adam", "cross_entropy")
        model.fit(X, LABELS, batch_size=8, epochs=2, verbose=0)
        return net

    one = train(1)
    assert_same_weights(one, train(1))
    assert not torch.equal(one[0].weight, train(2)[0].weight)


def test_on_batch_verbs_give_the_values_before_the_update():
    ours, theirs = small_net(), small_net()
    model = fitkit.Model(ours)
    model.compile("sgd", "cross_entropy", learning_rate=0.1, metrics=["accuracy"])
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for x, y in slices(X, LABELS, 25):
        loss, accuracy = model.train_on_batch(x.numpy(), y.numpy())
        optimizer.zero_grad()
        logits = theirs.train()(x.clone())  # last bits depend on where the rows lie
        expected = F.cross_entropy(logits, y)
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(expected.item(), abs=1e-7)
        assert accuracy == pytest.approx((logits.argmax(1) == y).float().mean().item())
    assert_same_weights(ours, theirs)
    tested = model.test_on_batch(X, LABELS, return_dict=True)
    theirs.eval()
    with torch.no_grad():
        assert tested["loss"] == pytest.approx(F.cross_entropy(theirs(X), LABELS).item(), abs=1e-6)
        assert np.array_equal(model.predict_on_batch(X), theirs(X).numpy())
