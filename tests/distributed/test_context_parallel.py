"""`FSDPStrategy(context_parallel=…)`: sequences divided among ranks give the numbers of one."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fitkit
from fitkit.strategies import FSDPStrategy
from tests.nets import normal
from tests.reference import assert_same_weights

pytestmark = pytest.mark.timeout(200)

VOCABULARY, WIDTH, LENGTH = 11, 8, 8


class Block(nn.Module):
    def __init__(self, is_causal):
        super().__init__()
        self.norm, self.joined = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.is_causal = is_causal

    def attend(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)

    def forward(self, x):
        parts = self.joined(self.norm(x)).chunk(3, -1)
        heads = [part.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for part in parts]
        return x + self.out(self.attend(*heads).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Gives a score of each token for each place: (N, T) to (N, V, T), as torch's losses take."""

    block = Block

    def __init__(self, is_causal=True):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(self.block(is_causal) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        nn.init.zeros_(self.places.weight)  # in which a wrong place wouldn't show at first

    def positions(self, tokens, position_ids):
        if position_ids is not None:
            return position_ids
        return torch.arange(tokens.shape[1], device=tokens.device)[None]

    def forward(self, tokens, position_ids=None):
        x = self.embed(tokens) + self.places(self.positions(tokens, position_ids))
        for block in self.blocks:
            x = block(x)
        return self.head(x).transpose(1, 2)


def text(rows=8, length=LENGTH, ignored=True):
    tokens = torch.randint(
        VOCABULARY, (rows, length + 1), generator=torch.Generator().manual_seed(3)
    )
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    if ignored:
        y[:, :3] = -100  # rank 0 has fewer labels than rank 1
        y[1] = -100
    return x, y


def on(ranks, **options):
    strategy = FSDPStrategy(**{"context_parallel": 2, **options})
    return {"accelerator": "cpu", "devices": ranks, "strategy": strategy}


def plainly(net, optimizer, x, y, size, epochs=2):
    losses = []
    for _ in range(epochs):
        total = count = 0.0
        for tokens, labels in zip(x.split(size), y.split(size), strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(tokens), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            total += loss.item() * (labels != -100).sum().item()
            count += (labels != -100).sum().item()
        losses.append(total / count)
    return losses


def right(net, x, y):
    found = net(x).argmax(1) == y
    return (found[y != -100].double()).mean().item()


@pytest.mark.parametrize("is_causal", [True, False])
def test_two_ranks_learn_from_parts_what_one_learns_from_the_whole(is_causal):
    x, y = text()
    model, reference = fitkit.Model(Decoder(is_causal).double()), Decoder(is_causal).double()
    model.compile(
        torch.optim.Adam(model.parameters(), 0.01),
        "cross_entropy",
        metrics=["accuracy"],
        gradient_clip_val=0.5,
        **on(2, activation_checkpointing=is_causal),
    )
    history = model.fit(
        x,
        y,
        batch_size=4,
        epochs=2,
        shuffle=False,
        verbose=0,
        validation_data=(x[:5], y[:5]),
        callbacks=[fitkit.callbacks.ThroughputMonitor(tokens=True)],
    ).history
    # Tokens of a batch that two ranks compute together count once.
    rate = history["tokens_per_sec"][0] / history["samples_per_sec"][0]
    assert rate == pytest.approx(LENGTH)
    losses = plainly(reference, torch.optim.Adam(reference.parameters(), 0.01), x, y, 4)
    assert_same_weights(model.net, reference, atol=1e-10)
    assert history["loss"] == pytest.approx(losses, abs=1e-10)
    reference.eval()
    with torch.no_grad():
        loss = F.cross_entropy(reference(x[:5]), y[:5]).item()
        whole = reference(x)
    assert history["val_loss"][1] == pytest.approx(loss, abs=1e-10)
    assert history["val_accuracy"][1] == pytest.approx(right(reference, x[:5], y[:5]), abs=1e-10)
    found = model.evaluate(x[:5], y[:5], batch_size=2, verbose=0, return_dict=True)
    assert found["loss"] == pytest.approx(loss, abs=1e-10)
    assert found["accuracy"] == pytest.approx(right(reference, x[:5], y[:5]), abs=1e-10)
    torch.testing.assert_close(
        torch.tensor(model.predict(x, batch_size=3, verbose=0)), whole, rtol=0, atol=1e-10
    )
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


@pytest.mark.slow
def test_four_ranks_divide_sequences_and_batches(tmp_path):
    x, y = text(length=12)
    reference = Decoder().double()

    def trained(**options):
        model = fitkit.Model(Decoder().double())
        model.compile(
            "adam",
            "cross_entropy",
            learning_rate=0.01,
            metrics=["accuracy"],
            gradient_clip_val=0.5,
            **on(4),
        )
        found = model.fit(x, y, batch_size=2, epochs=2, shuffle=False, verbose=0, **options)
        return model, found.history

    def look(batch, logs):
        if batch == 0:
            model_of_callback.model.save(tmp_path / "cut.h5")

    model_of_callback = fitkit.callbacks.LambdaCallback(on_train_batch_end=look)
    model, history = trained(callbacks=model_of_callback)
    losses = plainly(reference, torch.optim.Adam(reference.parameters(), 0.01), x, y, 4)
    assert_same_weights(model.net, reference, atol=1e-10)
    assert history["loss"] == pytest.approx(losses, abs=1e-10)
    # The first group's batches are more than the second's.
    with torch.no_grad():
        loss = F.cross_entropy(reference(x[:5]), y[:5]).item()
        whole = reference(x[:5])
    found = model.evaluate(x[:5], y[:5], batch_size=1, verbose=0, return_dict=True)
    assert found["loss"] == pytest.approx(loss, abs=1e-10)
    assert found["accuracy"] == pytest.approx(right(reference, x[:5], y[:5]), abs=1e-10)
    torch.testing.assert_close(
        torch.tensor(model.predict(x[:5], batch_size=1, verbose=0)), whole, rtol=0, atol=1e-10
    )
    # It continues within an epoch to the last bit.
    again, resumed = trained(resume_from=tmp_path / "cut.h5")
    assert_same_weights(again.net, model.net)
    assert resumed == history


class Layers(nn.Module):
    """Torch's own layers, whose fast path in evaluation calls no attention that can be seen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x):
        return self.layers(x)


def test_torchs_layers_work_too():
    x, y = normal(4, LENGTH, WIDTH).double(), normal(4, LENGTH, WIDTH, seed=1).double()
    model, reference = fitkit.Model(Layers().double()), Layers().double()
    model.compile(torch.optim.SGD(model.parameters(), 0.1), "mse", **on(2))
    model.fit(x, y, batch_size=4, verbose=0)
    loss = F.mse_loss(reference(x), y)
    loss.backward()
    torch.optim.SGD(reference.parameters(), 0.1).step()
    assert_same_weights(model.net, reference, atol=1e-10)
    reference.eval()
    with torch.no_grad():
        whole = reference(x)
    torch.testing.assert_close(torch.tensor(model.predict(x, verbose=0)), whole, rtol=0, atol=1e-10)


class OwnAttention(Block):
    def attend(self, query, key, value):
        weights = (query @ key.transpose(-1, -2) / 2).softmax(-1)
        return weights @ value


class Unseen(Decoder):
    """Its attention sees the rank's part alone, and at first adds nothing."""

    block = OwnAttention

    def __init__(self):
        super().__init__(is_causal=False)
        for block in self.blocks:
            nn.init.zeros_(block.out.weight)


class CountsItself(Decoder):
    def positions(self, tokens, position_ids):
        return torch.arange(tokens.shape[1], device=tokens.device)[None]


class Masked(Block):
    def attend(self, query, key, value):
        shape = query.shape[-2], key.shape[-2]
        mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class WithMask(Decoder):
    block = Masked


class Pooled(Decoder):
    def forward(self, tokens, position_ids=None):
        scores = super().forward(tokens, position_ids)
        return scores - scores.mean(-1, keepdim=True)


class Normed(Decoder):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(VOCABULARY)

    def forward(self, tokens, position_ids=None):
        return self.norm(super().forward(tokens, position_ids))


def summed(scores, labels):
    return F.cross_entropy(scores, labels, reduction="sum")


def shifted(scores, labels):
    return F.cross_entropy(scores[..., :-1], labels[:, 1:])


class OwnLoss(Decoder):
    def forward(self, tokens, labels=None, position_ids=None):
        scores = super().forward(tokens, position_ids)
        return {"loss": F.cross_entropy(scores, labels), "logits": scores}


class OwnStep(fitkit.Model):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


X, Y = text(4, ignored=False)
REFUSED = {
    "attention of its own": (Unseen, "cross_entropy", (X, Y), "other outputs for a sequence"),
    "positions of its own": (CountsItself, "cross_entropy", (X, Y), "position_ids of forward"),
    "a mask": (WithMask, "cross_entropy", (X, Y), "can't divide an attn_mask"),
    "a mean over tokens": (Pooled, "cross_entropy", (X, Y), "other outputs for a sequence"),
    "batch normalization": (Normed, "cross_entropy", (X, Y), "Take LayerNorm"),
    "a sum": (Decoder, summed, (X, Y), "isn't a mean over tokens"),
    "a loss that shifts": (Decoder, shifted, (X, Y), "Shift labels before"),
    "a net's own loss": (OwnLoss, None, ({"tokens": X, "labels": Y},), "Give compile a loss"),
    "an odd length": (Decoder, "cross_entropy", (X[:, :5], Y[:, :5]), "multiple of 2"),
    "too short": (Decoder, "cross_entropy", (X[:, :2], Y[:, :2]), "two at least"),
    "another length": (Decoder, "cross_entropy", (X, Y[:, :6]), "also has a tensor"),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if number < 1 else pytest.mark.slow)
        for number, case in enumerate(REFUSED)
    ],
)
def test_what_would_see_a_part_alone_is_refused(case):
    kind, loss, data, message = REFUSED[case]
    model = fitkit.Model(kind())
    before = copy.deepcopy(model.state_dict())
    model.compile("sgd", loss, **on(2))
    with pytest.raises(fitkit.ConfigurationError, match=message):
        model.fit(*data, batch_size=4, verbose=0)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


@pytest.mark.slow
def test_steps_of_the_models_own_are_refused():
    model = OwnStep(Decoder())
    model.compile("sgd", "cross_entropy", **on(2))
    with pytest.raises(fitkit.ConfigurationError, match="only a rank's part of each sequence"):
        model.fit(X, Y, verbose=0)


def test_groups_that_cannot_be_are_refused_before_anything_starts():
    model = fitkit.Model(Decoder())
    with pytest.raises(fitkit.ConfigurationError, match="context_parallel=2 doesn't divide the 3"):
        model.compile("sgd", "cross_entropy", **on(3))
    with pytest.raises(fitkit.ConfigurationError, match="Give one"):
        FSDPStrategy(context_parallel=2, tensor_parallel=2, tensor_parallel_plan={"0": "colwise"})


@pytest.mark.slow
def test_a_model_of_hugging_face():
    transformers = pytest.importorskip("transformers", reason="transformers isn't installed")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=32, use_cache=False,
    )  # fmt: skip

    def made():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).double()

    def of_tokens(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    x, y = text(8, ignored=False)
    model, reference = fitkit.Model(made()), made()
    model.compile(torch.optim.SGD(model.parameters(), 0.1), of_tokens, **on(2))
    data = {"input_ids": x, "attention_mask": torch.ones_like(x)}
    model.fit(data, y, batch_size=4, shuffle=False, verbose=0)
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    for tokens, labels in zip(x.split(4), y.split(4), strict=True):
        optimizer.zero_grad()
        of_tokens(reference(input_ids=tokens).logits, labels).backward()
        optimizer.step()
    assert_same_weights(model.net, reference, atol=1e-10)
    with torch.no_grad():
        whole = reference(input_ids=x).logits
    found = model.predict({"input_ids": x}, verbose=0)["logits"]
    torch.testing.assert_close(torch.tensor(found), whole, rtol=0, atol=1e-10)
    data["attention_mask"][0, -1] = 0
    with pytest.raises(fitkit.FitkitError, match="can't divide an attn_mask"):  # the last rank's
        model.fit(data, y, verbose=0)
