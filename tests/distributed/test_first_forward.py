"""What a net sets in its first forward is the same on all ranks, or refused."""

import pytest
import torch
from torch import nn

import fitkit
from fitkit.extras.first_forward import share_first_state
from tests.compiling import TRACED
from tests.nets import regression

pytestmark = pytest.mark.timeout(120)

X, Y = regression(40, 3)


class Setting(nn.Module):
    """Sets a scale and a codebook in its first forward: from the batch, or by chance."""

    def __init__(self, how):
        super().__init__()
        self.lin, self.norm, self.how = nn.Linear(3, 1), nn.BatchNorm1d(3), how
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("book", torch.zeros(4))

    def forward(self, x):
        if self.training and not self.ready:
            with torch.no_grad():
                self.ready.fill_(True)
                self.book.copy_(torch.randn(4))
                if self.how == "from the batch":
                    self.scale.copy_(x.std(0))
                elif self.how == "drawn":
                    self.scale.copy_(torch.randn(3))
                elif self.how == "by .data":
                    self.scale.data = torch.randn(3).to(x)
        return self.lin(self.norm(x) * self.scale)


class Watch(fitkit.callbacks.Callback):
    """Compares the ranks after each batch."""

    def on_train_batch_end(self, batch, logs=None):
        net = self.model.net
        for name in ("scale", "book"):
            one, other = self.model.all_gather(getattr(net, name).detach()[None])
            assert torch.equal(one, other), (batch, name)


@pytest.mark.parametrize(
    ("strategy", "how", "parts", "options"),
    [
        ("ddp_spawn", "from the batch", 1, {}),
        ("ddp_spawn", "by .data", 1, {}),
        ("ddp_spawn", "drawn", 1, {"jit_compile": TRACED}),
        ("ddp_sharded", "drawn", 2, {}),
        ("bagua", "drawn", 2, {}),
    ],
)
@pytest.mark.filterwarnings("ignore:jit_compile compiles")
def test_the_ranks_agree_from_the_first_batch_on(strategy, how, parts, options):
    torch.manual_seed(1)
    model = fitkit.Model(Setting(how))
    # Weight decay puts the weights themselves into the momentum.
    optimizer = torch.optim.SGD(model.net.parameters(), 0.05, momentum=0.9, weight_decay=0.3)
    model.compile(optimizer, "mse", accumulate_grad_batches=parts, **options)
    model.compile(accelerator="cpu", devices=2, strategy=strategy)
    model.fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=[Watch()])
    assert model.net.ready


@pytest.mark.parametrize("how", ["from the batch", "drawn"])
@pytest.mark.slow
def test_fsdp_refuses_a_parameter_that_it_would_lose(how):
    model = fitkit.Model(Setting(how))
    model.compile("sgd", "mse", accelerator="cpu", devices=2, strategy="fsdp")
    with pytest.raises(fitkit.ConfigurationError, match=r"first forward sets net\.scale.*fsdp"):
        model.fit(X, Y, batch_size=4, verbose=0)


def test_fsdp_shares_a_buffer_and_trains_what_was_set_before():
    model = fitkit.Model(Setting("a codebook only"))
    model.compile("sgd", "mse", accelerator="cpu", devices=2, strategy="fsdp")

    class Books(fitkit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            one, other = self.model.all_gather(self.model.net.book[None])
            assert torch.equal(one, other)

    model.fit(X, Y, batch_size=4, verbose=0, callbacks=[Books()])


class OtherRank:
    """The collectives of rank 0 beside a rank whose numbers are given."""

    def __init__(self, change):
        self.change, self.sent = change, []

    def gather(self, digests):
        return [digests, self.change(list(digests))]

    def broadcast_tensors(self, tensors):
        self.sent += tensors


def test_only_what_differs_is_sent_and_never_running_statistics():
    net = Setting("drawn")
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    net(X).mean().backward()
    optimizer.step()
    seen = []
    same = OtherRank(lambda digests: seen.append(len(digests)) or digests)
    share_first_state(same, net, [optimizer])
    assert same.sent == []
    assert seen == [len([*net.parameters()]) + 2]  # and two buffers, without the norm's

    def first_differs(digests):
        return [digests[0] + 1, *digests[1:]]

    other = OtherRank(first_differs)
    share_first_state(other, net, [optimizer])
    first = next(net.parameters())
    assert len(other.sent) == 2
    assert other.sent[0] is first
    assert other.sent[1] is optimizer.state[first]["momentum_buffer"]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool]
)
def test_values_that_change_places_differ(dtype):
    class Holding(nn.Module):
        def __init__(self, values):
            super().__init__()
            self.register_buffer("held", values)

    digests = []
    record = OtherRank(lambda own: digests.append(own) or own)
    for values in ([1, 0, 1, 1], [1, 1, 0, 1], [1, 0, 1, 1]):
        share_first_state(record, Holding(torch.tensor(values).to(dtype)), [])
    assert digests[0] == digests[2] != digests[1]
