"""Mixed precision where weights change within a step, against loops with an autocast a forward."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fitkit
from tests.nets import dense
from tests.reference import assert_same_weights, slices

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(3))
Y = X.sum(1, keepdim=True)
HALF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def two_nets():
    torch.manual_seed(0)
    return nn.ModuleList([dense(4, 8, 4), dense(4, 8, 1)])


def twice(first, second, optimizers, forward, backward, step, x, y):
    for _ in range(3):
        backward(F.mse_loss(forward(second, x), y))
        step(optimizers[1])


def gan(generator, critic, optimizers, forward, backward, step, x, y):
    fake = forward(generator, x)
    backward(forward(critic, fake.detach()).mean() - forward(critic, x).mean())
    step(optimizers[1])
    backward(-forward(critic, fake).mean())
    step(optimizers[0])


def actor_critic(actor, critic, optimizers, forward, backward, step, x, y):
    backward(F.mse_loss(forward(critic, x), y))
    step(optimizers[1])
    advantage = y - forward(critic, x).detach()
    backward((forward(actor, x) * advantage).mean())
    step(optimizers[0])


def sharpness_aware(first, second, optimizers, forward, backward, step, x, y):
    backward(F.mse_loss(forward(second, x), y))
    moves = [0.05 * p.grad.sign() for p in second.parameters()]
    with torch.no_grad():
        for p, move in zip(second.parameters(), moves, strict=True):
            p.add_(move)
            p.grad = None
    backward(F.mse_loss(forward(second, x), y))
    with torch.no_grad():
        for p, move in zip(second.parameters(), moves, strict=True):
            p.sub_(move)
    step(optimizers[1])


def closure(first, second, optimizers, forward, backward, step, x, y):
    def losses():
        optimizers[2].zero_grad()
        loss = F.mse_loss(forward(second, x), y)
        backward(loss)
        return loss

    step(optimizers[2], losses)


def by_turns(first, second, optimizers, forward, backward, step, x, y):
    for other, optimizer in ((first, optimizers[1]), (second, optimizers[0])):
        other.requires_grad_(False)
        backward(F.mse_loss(forward(second, forward(first, x)), y))
        step(optimizer)
        other.requires_grad_(True)


def by_hand(first, second, optimizers, forward, backward, step, x, y):
    for scale in (0.9, 1.1):
        with torch.no_grad():
            second[0].weight.mul_(scale)
        backward(F.mse_loss(forward(second, x), y))
        second[0].weight.data.mul_(scale)
    step(optimizers[1])


def average_swapped_in(first, second, optimizers, forward, backward, step, x, y):
    before = [p.detach().clone() for p in second.parameters()]
    backward(F.mse_loss(forward(second, x), y))
    step(optimizers[1])
    with torch.no_grad():
        for p, old in zip(second.parameters(), before, strict=True):
            p.lerp_(old, 0.5)
    backward(F.mse_loss(forward(second, x), y))
    step(optimizers[1])


def nested(first, second, optimizers, forward, backward, step, x, y):
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            prediction = forward(second, x)
        backward(F.mse_loss(prediction, y))
        step(optimizers[1])


def optimizers_of(nets):
    first, second = nets
    return [
        torch.optim.SGD(first.parameters(), 0.1),
        torch.optim.SGD(second.parameters(), 0.1),
        torch.optim.LBFGS(second.parameters(), 0.1, max_iter=3),
    ]


class Manual(fitkit.Model):
    """Does one of the above in a `training_step`."""

    automatic_optimization = False

    def __init__(self, change):
        super().__init__(two_nets())
        self.change = change

    def configure_optimizers(self):
        return optimizers_of(self.net)

    def training_step(self, batch, batch_idx):
        def step(optimizer, *how):
            optimizer.step(*how)
            self.net.zero_grad()

        def forward(net, x):
            return net(x).float()

        self.change(*self.net, self.optimizers(), forward, self.manual_backward, step, *batch)


def by_plain_torch(change):
    nets = two_nets()
    optimizers = optimizers_of(nets)

    def forward(net, x):
        with torch.autocast("cpu", torch.bfloat16):
            return net(x).float()

    def step(optimizer, *how):
        optimizer.step(*how)
        nets.zero_grad()

    for x, y in slices(X, Y, 8):
        change(*nets, optimizers, forward, torch.Tensor.backward, step, x, y)
    return nets


CHANGES = [
    twice, gan, actor_critic, sharpness_aware, closure, by_turns, by_hand, average_swapped_in,
    nested,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_each_forward_of_a_manual_step_uses_the_weights_as_they_are(change):
    model = Manual(change)
    model.compile(accelerator="cpu", devices=1, precision="bf16-mixed")
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    assert_same_weights(model.net, by_plain_torch(change))


@pytest.mark.parametrize("precision", HALF)
def test_a_forward_after_an_update_sees_it(precision):
    class Twice(Manual):
        def training_step(self, batch, batch_idx):
            x = batch[0]
            loss = 0.1 * self.net[1](x).float().mean()  # no overflow in float16
            self.manual_backward(loss)
            self.optimizers()[1].step()
            with torch.autocast("cpu", HALF[precision], cache_enabled=False):
                fresh = 0.1 * self.net[1](x).float().mean()
            assert 0.1 * self.net[1](x).float().mean() == fresh < loss

    model = Twice(None)
    model.compile(accelerator="cpu", devices=1, precision=precision)
    model.fit(X, Y, batch_size=8, verbose=0)


def doubled(net):
    with torch.no_grad():
        net[0].weight.mul_(2)


def average_for_one_forward(net):
    with torch.no_grad():
        for p in net.parameters():
            p.lerp_(torch.ones_like(p), 0.5)


def new_storage(net):
    net[0].weight.data = net[0].weight.data + 1


def replaced(net):
    net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})


@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("change", [doubled, average_for_one_forward, new_storage, replaced])
@pytest.mark.parametrize("precision", HALF)
def test_a_step_of_ones_own_computes_with_weights_that_it_has_just_changed(precision, change, verb):
    seen = []

    def fresh(net, x):
        with torch.no_grad(), torch.autocast("cpu", HALF[precision], cache_enabled=False):
            return net(x).float()

    class Changes(fitkit.Model):
        def step(self, batch, batch_idx=0):
            x = batch[0] if isinstance(batch, (tuple, list)) else batch
            for _ in range(3):
                with torch.enable_grad():  # autocast keeps copies for gradients only
                    output = self(x).float()
                seen.append((output.detach(), fresh(copy.deepcopy(self.net), x)))
                change(self.net)
            return output.mean()

        training_step = validation_step = test_step = predict_step = step

    model = Changes(two_nets()[1])
    model.compile("sgd", learning_rate=1e-3, accelerator="cpu", devices=1, precision=precision)
    getattr(model, verb)(*([X, Y] if verb != "predict" else [X]), batch_size=24, verbose=0)
    assert len(seen) == 3 and not torch.equal(seen[0][0], seen[1][0])
    for output, right in seen:
        assert torch.equal(output, right)


class Halves(fitkit.Model):
    """Two automatic optimizers, one after the other on each batch."""

    def __init__(self):
        super().__init__(two_nets())

    def configure_optimizers(self):
        return optimizers_of(self.net)[:2]

    def training_step(self, batch, batch_idx, optimizer_idx):
        x, y = batch
        return F.mse_loss(self.net[1](self.net[0](x)).float(), y)


def test_automatic_optimizers_by_turns_see_each_others_updates():
    model = Halves()
    model.compile(accelerator="cpu", devices=1, precision="bf16-mixed")
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    nets = two_nets()
    optimizers = optimizers_of(nets)[:2]
    for x, y in slices(X, Y, 8):
        for optimizer in optimizers:
            nets.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(nets[1](nets[0](x)).float(), y)
            loss.backward()
            optimizer.step()
    assert_same_weights(model.net, nets)


@pytest.mark.parametrize("verb", ["fit", "train_on_batch", "evaluate"])
@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
def test_a_call_within_an_autocast_of_the_callers_keeps_no_copies(verb, precision):
    torch.manual_seed(0)
    net = dense(4, 8, 1)
    plain = copy.deepcopy(net)
    model = fitkit.Model(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model.compile(optimizer, "mse", accelerator="cpu", devices=1, precision=precision)
    slow = torch.optim.SGD(plain.parameters(), 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        if verb == "fit":
            model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
        for x, y in slices(X, Y, 8):
            if verb == "train_on_batch":
                model.train_on_batch(x, y)
            elif verb == "evaluate":
                model.evaluate(x, y, verbose=0)
                for p in net.parameters():
                    p.data.mul_(1.1)
        after = model.net(X).float()
    for x, y in slices(X, Y, 8):
        if verb == "evaluate":
            for p in plain.parameters():
                p.data.mul_(1.1)
            continue
        slow.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            prediction = plain(x)
            F.mse_loss(prediction.float(), y).backward()
        slow.step()
    with torch.autocast("cpu", torch.bfloat16):
        right = plain(X).float()
    torch.testing.assert_close(after, right, rtol=0.02, atol=0.02)
