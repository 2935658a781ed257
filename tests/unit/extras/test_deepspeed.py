"""What `strategy="deepspeed"` decides before the engine is there; tests/engines runs that."""

import importlib.util
import json

import pytest
import torch
from torch import nn

import fitkit
from fitkit.extras.deepspeed import _check_optimizer, full_config
from fitkit.extras.deepspeed_engine import StandIns, ZeroOptimizer
from fitkit.strategies import DeepSpeedStrategy

is_absent = importlib.util.find_spec("deepspeed") is None


@pytest.mark.skipif(not is_absent, reason="deepspeed is installed")
def test_without_the_package_an_error_names_the_extra():
    model = fitkit.Model(nn.Linear(2, 2))
    with pytest.raises(ImportError, match=r"pip install 'torch-fitkit\[deepspeed\]'"):
        model.compile("adam", "mse", accelerator="cpu", devices=2, strategy="deepspeed")


@pytest.mark.parametrize("stage", [0, 4, True, "2", 2.5])
def test_other_stages_are_refused(stage):
    with pytest.raises(fitkit.ConfigurationError, match="stage"):
        DeepSpeedStrategy(stage)


def test_the_stage_of_the_settings_counts_where_none_is_given(tmp_path):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}, "train_batch_size": "auto"}))
    assert DeepSpeedStrategy(config=path).stage == 3
    assert DeepSpeedStrategy().stage == 2
    with pytest.raises(fitkit.ConfigurationError, match=r"stage=1, but .* stage 3"):
        DeepSpeedStrategy(1, config=str(path))


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("train_batch_size", 8, "batch_size"),
        ("gradient_accumulation_steps", 2, "accumulate_grad_batches"),
        ("gradient_clipping", 1.0, "gradient_clip_val"),
        ("optimizer", {"type": "Adam"}, "optimizer"),
        ("bf16", {"enabled": True}, "precision"),
    ],
)
def test_settings_that_fit_and_compile_have_arguments_for_are_refused(name, value, place):
    with pytest.raises(fitkit.ConfigurationError, match=place):
        DeepSpeedStrategy(config={name: value})


def test_settings_that_are_left_open_or_switched_off_are_taken():
    config = {
        "bf16": {"enabled": False},
        "fp16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": 1000},
    }
    strategy = DeepSpeedStrategy(config=config)
    made = full_config(strategy.config, strategy.stage, torch.float32, 10)
    assert made["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 1000}
    assert made["bf16"] == {"enabled": False} and "fp16" not in made
    assert config["gradient_clipping"] == "auto"  # the user's own is left as it was
    made = full_config({}, 1, torch.bfloat16, 10)  # and no buffer larger than the net is made
    assert made["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 10}
    assert made["bf16"] == {"enabled": True}


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (torch.optim.Muon([nn.Parameter(torch.ones(2, 2))]), "as a whole"),
        (torch.optim.SGD([nn.Parameter(torch.ones(2).double())], 0.1), "float64"),
        (torch.optim.Adagrad([{"params": nn.Parameter(torch.ones(1))} for _ in "ab"]), "groups"),
    ],
)
def test_optimizers_that_flat_parts_would_train_otherwise_are_refused(optimizer, reason):
    with pytest.raises(fitkit.ConfigurationError, match=reason):
        _check_optimizer(optimizer)


@pytest.mark.parametrize("config", [5, ["a"], True, {"zero_optimization": True}])
def test_settings_of_another_type_are_refused(config):
    with pytest.raises(TypeError, match="config"):
        DeepSpeedStrategy(config=config)


def test_a_file_of_settings_that_is_not_there_or_no_json_is_named(tmp_path):
    with pytest.raises(fitkit.ConfigurationError, match="none.json"):
        DeepSpeedStrategy(config=tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(fitkit.ConfigurationError, match="isn't JSON"):
        DeepSpeedStrategy(config=tmp_path / "bad.json")


def test_stand_ins_take_parameters_places_and_the_very_same_ones_come_back():
    net = nn.LSTM(3, 4)
    own = dict(net.named_parameters())
    numbers = {name: parameter.detach().clone() for name, parameter in own.items()}
    before = set(vars(net))
    stand_ins = StandIns(net)
    assert not any(p is own[name] for name, p in net.named_parameters())
    net.ds_id = 7
    stand_ins.empty(keeps=False)
    assert all(p.numel() == 0 for p in own.values())
    stand_ins.give_back({own[name]: numbers[name] + 1 for name in own})
    assert set(vars(net)) == before
    for name, parameter in net.named_parameters():
        assert parameter is own[name] and torch.equal(parameter, numbers[name] + 1)
    assert net(torch.zeros(2, 1, 3))[0].shape == (2, 1, 4)


def test_a_failed_training_gives_back_numbers_from_before_or_nan_where_nobody_kept_them():
    for keeps in (True, False):
        net = nn.Linear(2, 2)
        numbers = net.weight.detach().clone()
        stand_ins = StandIns(net)
        for twin in stand_ins.twins.values():
            twin.data = twin.data.clone().fill_(5.0)  # an engine's own memory
        stand_ins.empty(keeps=keeps)
        stand_ins.abandon()
        assert torch.equal(net.weight, numbers) if keeps else net.weight.isnan().all()


def test_the_working_copy_has_the_learning_parameters_and_neither_state_nor_schedulers_step():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].requires_grad_(False)
    adam = torch.optim.Adam(
        [{"params": net[0].parameters()}, {"params": net[1].parameters(), "lr": 0.5}]
    )
    torch.optim.lr_scheduler.StepLR(adam, 1)
    net(torch.ones(1, 2)).sum().backward()
    adam.step()
    state = dict(adam.state)
    twins = {p: nn.Parameter(p.data, p.requires_grad) for p in net.parameters()}
    spread = ZeroOptimizer(adam, twins, keeps=True)
    (group,) = spread.working.param_groups
    assert group["lr"] == 0.5 and group["params"] == [twins[p] for p in net[1].parameters()]
    assert not spread.working.state and not adam.state
    assert "step" not in vars(spread.working) and "step" in vars(adam)
    spread.abandon()
    assert [p for g in adam.param_groups for p in g["params"]] == list(net.parameters())
    assert dict(adam.state) == state
