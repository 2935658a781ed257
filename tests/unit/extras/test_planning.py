"""What `fitkit.plan` says, against counts by hand."""

import pytest
import torch

import fitkit
from fitkit.strategies import BaguaStrategy, DDPStrategy, FSDPStrategy
from tests.reference import assert_same_weights, copied_state

PARAMETERS = 4 * (10 * 20 + 20 + 20 * 5 + 5)
ADAM = 2 * PARAMETERS + 4 * 4  # two moments, and a step counter for each of four tensors
# x, ReLU's output, log_softmax's output, the targets, and the loss's sum of weights.
ACTIVATIONS = 4 * (8 * 10 + 8 * 20 + 8 * 5) + 8 * 8 + 4
BATCH = torch.randn(8, 10), torch.randint(5, (8,))


def made(device="cpu"):
    with torch.device(device):
        net = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.ReLU(), torch.nn.Linear(20, 5))
    model = fitkit.Model(net)
    model.compile("adam", "cross_entropy", metrics=["accuracy"])
    return model


def test_a_device_holds_what_hand_counts_say_and_the_model_is_as_before(capsys):
    model = made()
    before = copied_state(model)
    plan = fitkit.plan(model, 4, ["ddp", "ddp_sharded", "fsdp", "dp"], BATCH, num_nodes=2)
    ddp = plan.costs["ddp"]
    assert (ddp.parameters, ddp.gradients, ddp.optimizer) == (PARAMETERS, PARAMETERS, ADAM)
    assert ddp.activations == ACTIVATIONS and ddp.exchange == PARAMETERS
    assert ddp.backward == 4 * 8 * 20
    assert ddp.memory == 3 * PARAMETERS + ADAM + ACTIVATIONS + ddp.backward
    assert plan.costs["ddp_sharded"].optimizer == ADAM / 8
    fsdp = plan.costs["fsdp"]
    assert (fsdp.parameters, fsdp.gradients) == (PARAMETERS / 8, PARAMETERS / 8)
    assert plan.costs["dp"].activations == ACTIVATIONS / 4
    assert plan.costs["dp"].backward == ddp.backward / 4
    assert_same_weights(model, before)
    assert model.history is None or not model.history.epoch
    shown = capsys.readouterr().out
    assert shown.strip() == str(plan).strip() and "8 devices (2 nodes × 4)" in shown


def test_what_is_sent_follows_the_ring(capsys):
    strategies = [
        "ddp",
        DDPStrategy(comm_hook="fp16"),
        "ddp_sharded",
        "fsdp",
        FSDPStrategy(reshard_after_forward=False),
        FSDPStrategy(shard_size=2),
        BaguaStrategy("bytegrad"),
        "single_device",
    ]
    costs = fitkit.plan(made(), 4, strategies, BATCH).costs
    sent = {name: cost.sent / PARAMETERS for name, cost in costs.items()}
    assert sent["ddp"] == 2 * 3 / 4 and sent["ddp (2)"] == 3 / 4
    assert sent["ddp_sharded"] == 3 * 3 / 4 and sent["fsdp"] == 3 * 3 / 4
    assert sent["fsdp (2)"] == 2 * 3 / 4
    assert sent["fsdp (3)"] == 3 * 1 / 2 + 2 * 1 / 2 / 2
    assert sent["bagua"] == pytest.approx(2 * 3 / 4 / 4, rel=0.01)
    assert costs["single_device"].sent == costs["single_device"].exchange == 0


def test_a_net_without_memory_is_planned_by_its_shapes(capsys):
    plan = fitkit.plan(made("meta"), 2, "ddp", BATCH)
    costs = plan.costs["ddp"]
    assert (costs.parameters, costs.optimizer) == (PARAMETERS, ADAM)
    assert costs.activations == 4 * (8 * 10 + 8 * 20 + 8 * 5)
    assert "meta" in str(plan)


def test_recomputed_activations_are_not_counted_twice(capsys):
    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(8))

        def forward(self, x):
            for part in self.parts:
                block = torch.nn.Sequential(part, torch.nn.Tanh(), torch.nn.Tanh(), torch.nn.Tanh())
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return x

    model = fitkit.Model(Checkpointed())
    model.compile("sgd", "mse")
    batch = torch.randn(16, 64), torch.randn(16, 64)
    each = 16 * 64 * 4
    kept = fitkit.plan(model, 1, "single_device", batch).costs["single_device"].activations
    assert 9 * each <= kept <= 14 * each  # all four of each of the eight would be 32


def test_auto_is_what_fit_would_choose(capsys):
    assert (
        fitkit.plan(made(), 4, "auto", BATCH).costs
        == fitkit.plan(made(), 4, "ddp_spawn", BATCH).costs
    )
    assert list(fitkit.plan(made(), 1, ["auto"], BATCH).costs) == ["single_device"]


def test_wrong_arguments_say_what_is_needed(capsys):
    with pytest.raises(TypeError, match=r"fitkit\.Model"):
        fitkit.plan(torch.nn.Linear(1, 1), 2, "ddp", BATCH)
    with pytest.raises(fitkit.ConfigurationError, match="fsdpp"):
        fitkit.plan(made(), 2, "fsdpp", BATCH)
    with pytest.raises(fitkit.ConfigurationError, match="devices"):
        fitkit.plan(made(), 0, "ddp", BATCH)


def test_a_tensor_is_one_batch_and_no_arrays_to_cut(capsys):
    class Encoder(fitkit.Model):
        def training_step(self, batch, index):
            seen.append(batch.shape)
            return (self.net(batch) - batch).square().mean()

    seen = []
    model = Encoder(torch.nn.Linear(10, 10))
    model.compile("adam", accelerator="cpu", devices=1)
    assert fitkit.plan(model, 2, "ddp", torch.randn(50, 10)).samples == 50
    assert seen == [(50, 10)]


def test_what_cant_be_planned_says_why():
    lazy = fitkit.Model(torch.nn.LazyLinear(5))
    lazy.compile("adam", "cross_entropy")
    with pytest.raises(fitkit.ConfigurationError, match="lazy layers"):
        fitkit.plan(lazy, 2, "ddp", BATCH)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*BATCH))
    for strategy, batch, words in (("ddp", loader, r"next\(iter"), (3, BATCH, "strategy=3")):
        with pytest.raises(fitkit.errors.ArgumentTypeError, match=words):
            fitkit.plan(made(), 2, strategy, batch)


class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 256), torch.nn.Linear(256, 16)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_blocks_that_are_computed_again_count_one_at_a_time(capsys, device):
    with torch.device(device):
        net = torch.nn.Sequential(*(Wide() for _ in range(6)))
    model = fitkit.Model(net)
    model.compile("sgd", lambda prediction, target: prediction.sum())
    batch = torch.randn(32, 16), torch.randn(32, 16)
    narrow, wide = 32 * 16 * 4, 32 * 256 * 4
    strategies = ["ddp", FSDPStrategy(activation_checkpointing=True)]
    costs = fitkit.plan(model, 2, strategies, batch).costs
    plain, strategy = costs["ddp"].activations, costs["fsdp"].activations
    assert "forward" not in vars(net[0])
    fitkit.checkpoint_activations(model)
    ours = fitkit.plan(model, 2, "ddp", batch).costs["ddp"].activations
    # Each block's input and its tanh, against each block's input and one tanh.
    output = narrow if device == "meta" else 0
    assert plain == 6 * (narrow + wide) + output
    assert ours == strategy == 6 * narrow + wide + output


def test_what_is_frozen_has_no_gradient_but_travels_under_fsdp(capsys):
    model = made()
    model.net[0].requires_grad_(False)
    costs = fitkit.plan(model, 4, ["ddp", "fsdp"], BATCH).costs
    learning = 4 * (20 * 5 + 5)
    assert costs["ddp"].gradients == learning and costs["ddp"].parameters == PARAMETERS
    assert costs["ddp"].optimizer == 2 * learning + 2 * 4
    assert costs["fsdp"].sent == (2 * PARAMETERS + learning) * 3 / 4


@pytest.mark.slow
def test_an_optimizer_of_eight_bits_takes_two_bytes_a_parameter(capsys):
    optim = pytest.importorskip("torchao.optim")
    net = torch.nn.Linear(256, 256, bias=False)
    model = fitkit.Model(net)
    model.compile(optim.AdamW8bit(net.parameters()), "mse")
    state = fitkit.plan(model, 1, "ddp", (torch.randn(4, 256), torch.randn(4, 256)))
    assert state.costs["ddp"].optimizer == pytest.approx(2 * 256 * 256, rel=0.05)


def test_a_teacher_is_whole_on_each_device(capsys):
    teacher = torch.nn.Linear(10, 5)
    model = made()
    model.compile(loss=fitkit.losses.Distillation(teacher))
    plan = fitkit.plan(model, 4, ["ddp", "fsdp"], BATCH)
    assert [cost.teacher for cost in plan.costs.values()] == [4 * 55, 4 * 55]
    assert "teacher" in str(plan) and "teacher" not in str(fitkit.plan(made(), 4, "ddp", BATCH))
