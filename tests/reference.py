"""What trainings are compared with: a plain PyTorch loop; and how they are compared."""

import torch
from torch import nn
from torch.nn import functional as F

import fitkit


def compiled(net, optimizer="sgd", loss="cross_entropy", kind=fitkit.Model, **arguments):
    model = kind(net)
    model.compile(optimizer, loss, **arguments)
    return model


def slices(x, y, size):
    """The batches in order; the last may be short."""
    return list(zip(x.split(size), y.split(size), strict=True))


def plain_loop(
    net,
    optimizer,
    batches,
    epochs=1,
    *,
    loss=F.cross_entropy,
    scheduler=None,
    clip=None,
    clip_value=None,
):
    """Train as a careful user writes it, in the modes that the net has; each epoch's mean loss."""
    losses = []
    for _ in range(epochs):
        total = count = 0
        for x, y in batches:
            optimizer.zero_grad()
            value = loss(net(x), y)
            value.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            if clip_value is not None:
                nn.utils.clip_grad_value_(net.parameters(), clip_value)
            optimizer.step()
            total += value.item() * len(x)
            count += len(x)
        if scheduler is not None:
            scheduler.step()
        losses.append(total / count)
    return losses


def copied_state(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same_weights(one, other, *, rtol=0.0, atol=0.0):
    """Two modules, or state dicts, have the same names and tensors: exactly, if nothing is said."""
    mine, others = (x if isinstance(x, dict) else x.state_dict() for x in (one, other))
    assert list(mine) == list(others)
    for name, tensor in mine.items():
        message = f"{name}: {{}}".format
        torch.testing.assert_close(tensor, others[name], rtol=rtol, atol=atol, msg=message)


def assert_same_optimizer_state(one, other, *, atol, settings=False):
    """Two optimizers hold the same numbers; with `settings`, they have the same groups too."""
    if settings:
        assert one.state_dict()["param_groups"] == other.state_dict()["param_groups"]
    mine, others = one.state_dict()["state"], other.state_dict()["state"]
    assert mine.keys() == others.keys()
    for number, state in mine.items():
        assert state.keys() == others[number].keys()
        for name, value in state.items():
            torch.testing.assert_close(value, others[number][name], rtol=0, atol=atol)


def is_same(one, other):
    """Whether two states of dicts, lists, tensors and plain values are the same, bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return one == other
