"""What `fitkit.plan` says of nets that pairs of ranks divide, against counts by hand."""

import pytest
import torch

import fitkit
from fitkit.strategies import FSDPStrategy

BATCH = torch.randn(8, 10), torch.randint(6, (8,))


def made():
    net = torch.nn.Sequential(
        torch.nn.Linear(10, 20),  # outputs divided: 220 numbers
        torch.nn.ReLU(),
        torch.nn.Linear(20, 5),  # inputs divided: 100 numbers; its 5 biases aren't
        torch.nn.Linear(5, 6),  # 36 numbers, not in the plan
    )
    model = fitkit.Model(net)
    model.compile("adam", "cross_entropy")
    return model


def parallel(**options):
    plan = {"0": "colwise", "2": "rowwise"}
    return FSDPStrategy(tensor_parallel=2, tensor_parallel_plan=plan, **options)


def test_named_layers_go_over_all_ranks_and_the_others_over_half_as_many(capsys):
    strategies = [parallel(), parallel(reshard_after_forward=False), "fsdp"]
    costs = fitkit.plan(made(), 4, strategies, BATCH, num_nodes=2).costs
    divided, not_divided = 4 * (220 + 100), 4 * (5 + 36)  # bytes
    each = divided / 8 + not_divided / 4
    assert costs["fsdp"].parameters == pytest.approx(each)
    assert costs["fsdp"].gradients == pytest.approx(each)
    steps = 4 * 6  # one counter for each tensor
    assert costs["fsdp"].optimizer == pytest.approx(2 * each, abs=steps)
    of_pair = divided / 2 + not_divided  # what travels among the four that share a half
    assert costs["fsdp"].sent == pytest.approx(3 * of_pair * 3 / 4)
    assert costs["fsdp (2)"].sent == pytest.approx(2 * of_pair * 3 / 4)
    assert costs["fsdp"].exchange == pytest.approx(of_pair)
    assert costs["fsdp (3)"].parameters == (divided + not_divided) / 8


def test_groups_that_the_ranks_cannot_make_are_refused_before_any_is_there(capsys):
    for strategy in (parallel(), FSDPStrategy(shard_size=2)):
        with pytest.raises(fitkit.ConfigurationError, match="doesn't divide the 3 ranks"):
            fitkit.plan(made(), 3, strategy, BATCH)


def test_ranks_that_share_sequences_share_their_activations(capsys):
    model = fitkit.Model(torch.nn.Linear(8, 8))
    model.compile("adam", "mse")
    batch = torch.randn(2, 6, 8), torch.randn(2, 6, 8)
    costs = fitkit.plan(model, 4, ["fsdp", FSDPStrategy(context_parallel=2)], batch).costs
    whole, part = costs["fsdp"], costs["fsdp (2)"]
    assert part.activations == whole.activations / 2 > 0
    assert part.backward == whole.backward / 2 > 0
    assert (part.parameters, part.sent) == (whole.parameters, whole.sent)
