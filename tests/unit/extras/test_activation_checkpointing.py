"""Blocks whose activations are computed again learn the same, bit for bit, in less memory."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fitkit
from fitkit.errors import ArgumentTypeError
from fitkit.extras.planning import SavedTensors
from tests.reference import assert_same_weights

X, Y = torch.randn(24, 8), torch.randint(3, (24,))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.drop = nn.Linear(8, 64), nn.Dropout(0.3)
        self.norm, self.narrow = nn.BatchNorm1d(64), nn.Linear(64, 8)

    def forward(self, x, *, scale=1.0):
        return x + scale * self.narrow(self.drop(torch.relu(self.norm(self.wide(x)))))


def net(norm=True):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(8, 8), *(Block() for _ in range(4)), nn.Linear(8, 3))
    for block in made[1:5]:
        block.norm = block.norm if norm else nn.Identity()
    return made


def learned(made, strategy="auto", devices=1, **options):
    fitkit.set_seed(3)
    model = fitkit.Model(made)
    model.compile(
        "adam",
        "cross_entropy",
        learning_rate=0.01,
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        **options,
    )
    losses = model.fit(X, Y, batch_size=8 // devices, epochs=2, verbose=0).history["loss"]
    return model.net, losses


def saved_bytes(made):
    with SavedTensors(apart_from=lambda: [*made.parameters(), *made.buffers()]) as saved:
        made(X).sum().backward()
    return saved.peak


@pytest.mark.parametrize(
    "blocks",
    [
        True,
        Block,
        (Block, nn.Conv2d),
        lambda part: type(part).__name__ == "Block",
    ],
    ids=["repeated", "class", "classes", "function"],
)
def test_the_same_is_learned_with_less_kept(blocks):
    plain, losses = learned(net())
    made = fitkit.checkpoint_activations(net(), blocks)
    ours, found = learned(made)
    assert found == losses
    assert_same_weights(ours, plain, rtol=0, atol=0)
    for name, buffer in plain.named_buffers():
        assert torch.equal(ours.get_buffer(name), buffer)
    assert saved_bytes(made) < saved_bytes(plain) / 4


def test_random_numbers_of_dropout_go_on_as_without():
    drawn = []
    for made in (net(), fitkit.checkpoint_activations(net())):
        torch.manual_seed(1)
        made(X).sum().backward()
        drawn.append((torch.rand(3), [p.grad for p in made.parameters()]))
    torch.testing.assert_close(*drawn, rtol=0, atol=0)


def test_it_can_be_taken_back_and_changes_no_names():
    plain, made = net(), net()
    assert fitkit.checkpoint_activations(made, Block) is made
    fitkit.checkpoint_activations(made, lambda part: part is made[1])  # in place of all
    assert (
        saved_bytes(plain) > saved_bytes(made) > saved_bytes(fitkit.checkpoint_activations(net()))
    )
    assert list(made.state_dict()) == list(plain.state_dict())
    fitkit.checkpoint_activations(made, False)
    assert saved_bytes(made) == saved_bytes(plain)
    assert all("forward" not in vars(part) for part in made.modules())


def test_copies_and_pickles_have_it_for_their_own_blocks():
    made = fitkit.checkpoint_activations(net())
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert saved_bytes(other) == saved_bytes(made)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert not other(X).any() and made(X).any()


def test_a_models_blocks_and_a_forward_of_their_own_are_found():
    made = net()
    own = made[1].forward
    made[1].forward = lambda x: own(x, scale=0.5)
    model = fitkit.Model(made)
    before = model.predict(X)
    assert fitkit.checkpoint_activations(model) is model
    assert saved_bytes(made) < saved_bytes(net()) / 4
    fitkit.checkpoint_activations(model, False)
    assert made[1].forward is not own
    assert model.predict(X).shape == before.shape


@pytest.mark.parametrize("blocks", [None, "blocks", (), 3, Block()])
def test_what_names_no_blocks_is_refused(blocks):
    with pytest.raises(ArgumentTypeError, match="(?s)blocks=.*a function of a submodule"):
        fitkit.checkpoint_activations(net(), blocks)


def test_a_net_without_such_blocks_is_refused_as_is_what_is_none():
    with pytest.raises(fitkit.ConfigurationError, match="No submodule of Sequential is meant"):
        fitkit.checkpoint_activations(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(ArgumentTypeError, match="net=3"):
        fitkit.checkpoint_activations(3)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp_spawn", "fsdp"])
def test_two_ranks_learn_the_same(strategy):
    plain, losses = learned(net(norm=False), strategy, 2)
    ours, found = learned(fitkit.checkpoint_activations(net(norm=False)), strategy, 2)
    assert found == losses
    assert_same_weights(ours, plain, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        "auto",
        "fsdp",
        fitkit.strategies.FSDPStrategy(activation_checkpointing=True),
    ],
    ids=["alone", "fsdp", "the strategy's"],
)
def test_compiled_the_same_is_learned(strategy):
    def still():  # torch compiles no whole step that draws again
        made = net(norm=False)
        for block in made[1:5]:
            block.drop = nn.Identity()
        return made

    devices, how = 1 if strategy == "auto" else 2, {"backend": "aot_eager"}
    whole = "auto" if devices == 1 else "fsdp"
    plain, losses = learned(still(), whole, devices, jit_compile=how)
    made = still()
    if strategy in ("auto", "fsdp"):
        fitkit.checkpoint_activations(made)
    ours, found = learned(made, strategy, devices, jit_compile=how)
    assert found == pytest.approx(losses, rel=1e-6)
    assert_same_weights(ours, plain, atol=1e-6)


@pytest.mark.slow
def test_a_net_that_draws_again_is_compiled_without_its_step():
    _, losses = learned(net())
    made = fitkit.checkpoint_activations(net())
    with pytest.warns(UserWarning, match="compiles the net alone, not the whole step"):
        _, found = learned(made, jit_compile={"backend": "aot_eager"})
    assert found == pytest.approx(losses, rel=1e-5)
