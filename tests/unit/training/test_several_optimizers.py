"""Several optimizers that step together: lists of them, and Muon beside AdamW by name."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Muon

import fitkit
from fitkit.errors import ArgumentTypeError, ConfigurationError
from tests.nets import classification, dense
from tests.reference import assert_same_weights, compiled, slices

X, LABELS = classification(48, 6, seed=1)
EPOCHS = 3


def net():
    return dense(6, 8, 8, 3)


def split(module):
    """The first two layers' matrices, and all else, as `muon` has it."""
    hidden = [module[0].weight, module[2].weight]
    return hidden, [p for p in module.parameters() if all(p is not h for h in hidden)]


def pair(module, rate=0.02):
    hidden, others = split(module)
    return [Muon(hidden, lr=rate), AdamW(others, lr=rate / 4)]


def plain(module, optimizers, *, clip=None, schedulers=(), epochs=EPOCHS, accumulate=1):
    """The loop as a careful user writes it, with several optimizers after one backward."""
    for _ in range(epochs):
        for x, y in slices(X, LABELS, 16 * accumulate):
            for optimizer in optimizers:
                optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            for optimizer in optimizers:
                optimizer.step()
        for scheduler in schedulers:
            scheduler.step()


def fit(model, **arguments):
    arguments = {"batch_size": 16, "epochs": EPOCHS, "shuffle": False, "verbose": 0, **arguments}
    return model.fit(X, LABELS, **arguments)


def test_muon_by_name_is_torch_s_muon_for_hidden_matrices_and_adamw_for_all_else():
    one, other = net(), net()
    model = compiled(one, "muon", learning_rate=0.01)
    fit(model)
    hidden, others = split(other)
    plain(other, [Muon(hidden, lr=0.01), AdamW(others, lr=0.01)])
    assert_same_weights(one, other, atol=1e-6)
    assert [type(each).__name__ for each in model.optimizers()] == ["Muon", "AdamW"]


def test_muon_leaves_embeddings_shared_heads_and_convolutions_to_adamw():
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(11, 8)
            self.position_embed = nn.Parameter(torch.zeros(5, 8))
            self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
            self.conv = nn.Conv1d(8, 8, 3)
            self.norm = nn.LayerNorm(8)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.wte.weight

    language = Language()
    matrices, others = fitkit.optimizers.muon(language)
    names = {id(parameter): name for name, parameter in language.named_parameters()}
    found = {names[id(p)] for group in matrices.param_groups for p in group["params"]}
    assert found == {"mix.in_proj_weight", "mix.out_proj.weight"}
    held = [p for group in others.param_groups for p in group["params"]]
    assert len(held) + 2 == len(list(language.parameters()))


def test_a_net_of_one_layer_has_nothing_for_muon():
    model = compiled(dense(6, 3), "Muon")
    fit(model, epochs=1)
    assert type(model.optimizer).__name__ == "AdamW"


def test_muon_s_choice_and_both_optimizers_arguments_can_be_given():
    module = net()
    made = fitkit.optimizers.muon(
        fitkit.Model(module),
        0.02,
        hidden=lambda name, parameter: name == "2.weight",
        adamw={"lr": 3e-4, "betas": (0.8, 0.9)},
        momentum=0.9,
        adjust_lr_fn="match_rms_adamw",
    )
    muon, adamw = made
    assert [p is module[2].weight for p in muon.param_groups[0]["params"]] == [True]
    assert muon.param_groups[0]["lr"] == 0.02
    assert muon.param_groups[0]["momentum"] == 0.9
    assert adamw.param_groups[0]["lr"] == 3e-4
    assert adamw.param_groups[0]["betas"] == (0.8, 0.9)


def test_settings_beside_the_name_are_muon_s():
    model = compiled(net(), {"name": "muon", "momentum": 0.9}, learning_rate=0.02)
    muon, adamw = model.optimizers()
    assert muon.param_groups[0]["momentum"] == 0.9
    assert muon.param_groups[0]["lr"] == adamw.param_groups[0]["lr"] == 0.02


def test_muon_refuses_what_it_cannot_train():
    with pytest.raises(ConfigurationError, match=r"0\.bias \(8,\).*two dimensions"):
        fitkit.optimizers.muon(net(), hidden=lambda name, parameter: True)
    with pytest.raises(ArgumentTypeError, match="whose parameters have names"):
        fitkit.optimizers.muon(net().parameters())
    with pytest.raises(ConfigurationError, match="Muon refuses its arguments"):
        fitkit.optimizers.muon(net(), betas=(0.9, 0.99))
    with pytest.raises(ConfigurationError, match=r'Write "muon", which trains all other'):
        fit(compiled(net(), Muon))


def test_a_list_steps_together_with_clipping_over_all():
    one, other = net(), net()
    model = compiled(one, pair(one), gradient_clip_val=0.05)
    fit(model)
    plain(other, pair(other), clip=0.05)
    assert_same_weights(one, other, atol=1e-6)
    assert model.global_step == 3 * EPOCHS


def test_a_list_accumulates():
    one, other = net(), net()
    model = compiled(one, pair(one), accumulate_grad_batches=2)
    fit(model, batch_size=8)
    plain(other, pair(other))
    assert_same_weights(one, other, atol=1e-6)


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_a_scheduler_by_name_moves_the_rates_of_all(interval):
    one = net()
    own = pair(one)
    steps = EPOCHS * (3 if interval == "step" else 1)
    model = compiled(one, own, lr_scheduler={"scheduler": "cosine", "interval": interval})
    fit(model)
    assert [float(each.param_groups[0]["lr"]) for each in own] == pytest.approx([0, 0], abs=1e-9)
    assert [each.last_epoch for each in model.lr_schedulers()] == [steps, steps]


def test_schedulers_move_as_in_a_plain_loop():
    one, other = net(), net()
    step = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    fit(compiled(one, pair(one), lr_scheduler=step))
    own = pair(other)
    plain(other, own, schedulers=[step(each) for each in own])
    assert_same_weights(one, other, atol=1e-6)


def test_a_scheduler_instance_moves_the_optimizer_that_it_was_made_for():
    one = net()
    first, second = pair(one)
    scheduler = torch.optim.lr_scheduler.StepLR(second, 1, 0.5)
    fit(compiled(one, [first, second], lr_scheduler=scheduler))
    assert first.param_groups[0]["lr"] == 0.02
    assert second.param_groups[0]["lr"] == pytest.approx(0.005 * 0.5**EPOCHS)


def test_warm_up_and_later_rates_reach_all_groups():
    one = net()
    own = pair(one)
    model = compiled(one, own, warmup_epochs=10)
    seen = []

    def rates(batch, logs):
        seen.append([group["lr"] for each in own for group in each.param_groups])

    fit(model, epochs=1, callbacks=[fitkit.callbacks.LambdaCallback(on_train_batch_end=rates)])
    first, second = seen[0]
    assert first == pytest.approx(4 * second)
    assert second < seen[1][1] < 0.005


def test_scaled_losses_leave_an_update_out_for_all(monkeypatch):
    one = net()
    model = compiled(one, pair(one), precision="16-mixed")
    before = copy.deepcopy(one.state_dict())
    with torch.no_grad():
        one[0].weight.register_hook(lambda gradient: gradient * float("inf"))
    fit(model, epochs=1, batch_size=48)
    assert_same_weights(one, before)
    assert model.global_step == 0


@pytest.mark.parametrize("given", ["muon", "list"])
def test_a_cut_training_goes_on_bit_for_bit(tmp_path, given):
    def made():
        module = net()
        return compiled(
            module,
            "muon" if given == "muon" else pair(module),
            lr_scheduler={"scheduler": "cosine", "interval": "step"},
        )

    class Cut(fitkit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            if self.model.global_step == 4:
                self.model.save(tmp_path / "cut.h5")

    whole = made()
    fit(whole, shuffle=True, callbacks=[Cut()])
    resumed = made()
    fit(resumed, shuffle=True, resume_from=tmp_path / "cut.h5")
    assert_same_weights(whole, resumed)
    assert (
        whole.optimizers()[0].param_groups[0]["lr"] == resumed.optimizers()[0].param_groups[0]["lr"]
    )


@pytest.mark.parametrize("given", ["muon", "list"])
def test_load_model_makes_both_again(tmp_path, given):
    module = net()
    model = compiled(module, "muon" if given == "muon" else pair(module))
    fit(model, epochs=1)
    model.save(tmp_path / "m.h5")
    again = fitkit.load_model(tmp_path / "m.h5", net())
    fit(model, epochs=1)
    fit(again, epochs=1)
    assert_same_weights(model, again)
    assert [type(each).__name__ for each in again.optimizers()] == ["Muon", "AdamW"]


def test_a_checkpoint_of_one_optimizer_is_refused_by_two(tmp_path):
    model = compiled(net(), "adamw")
    fit(model, epochs=1)
    model.save(tmp_path / "m.h5")
    with pytest.raises(fitkit.CheckpointError, match="was made with AdamW, but .* Muon, AdamW"):
        compiled(net(), "muon").load(tmp_path / "m.h5")


def test_an_own_training_step_is_called_once_a_batch():
    class Own(fitkit.Model):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.cross_entropy(self(x), y)

    one, other = net(), net()
    model = compiled(one, pair(one), kind=Own)
    fit(model)
    plain(other, pair(other))
    assert_same_weights(one, other, atol=1e-6)


def test_a_schedule_free_one_in_a_list_evaluates_at_its_own_weights():
    schedulefree = pytest.importorskip("schedulefree")

    def mixed(module):
        hidden, others = split(module)
        return [Muon(hidden, lr=0.02), schedulefree.AdamWScheduleFree(others, lr=0.01)]

    one, other = net(), net()
    model = compiled(one, mixed(one))
    history = fit(model, validation_data=(X, LABELS)).history
    own = mixed(other)
    expected = []
    for _ in range(EPOCHS):
        own[1].train()
        plain(other, own, epochs=1)
        own[1].eval()
        expected.append(F.cross_entropy(other(X), LABELS).item())
    assert history["val_loss"] == pytest.approx(expected, rel=1e-4)
    assert_same_weights(one, other, atol=1e-5)


def test_lists_that_cannot_step_together_are_refused():
    module = net()
    with pytest.raises(ConfigurationError, match="8 parameters|6 parameters"):
        compiled(module, [SGD(module.parameters(), 0.1), SGD(module.parameters(), 0.1)])
    with pytest.raises(ArgumentTypeError, match="a list holds optimizer instances"):
        compiled(module, ["adam", "sgd"])
    with pytest.raises(ArgumentTypeError, match="a list holds optimizer instances"):
        compiled(module, [])
    hidden, others = split(module)
    with pytest.raises(ConfigurationError, match="LBFGS computes the loss itself"):
        compiled(module, [torch.optim.LBFGS(hidden), SGD(others, 0.1)])
    with pytest.raises(ConfigurationError, match="FK024"):
        compiled(net(), pair(module))
    with pytest.raises(ConfigurationError, match="learning_rate=0.1"):
        compiled(module, pair(module), learning_rate=0.1)


def test_groups_leave_norms_and_biases_out_of_decay():
    module = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    twin = copy.deepcopy(module)
    groups = fitkit.optimizers.parameter_groups(module, weight_decay=0.5)
    fit(compiled(module, AdamW(groups, lr=0.01)))
    own = [p for n, p in twin.named_parameters() if n in ("0.weight", "2.weight")]
    rest = [p for n, p in twin.named_parameters() if n not in ("0.weight", "2.weight")]
    plain(twin, [AdamW(own, lr=0.01, weight_decay=0.5), AdamW(rest, lr=0.01, weight_decay=0.0)])
    assert_same_weights(module, twin, atol=1e-6)


def test_groups_have_rates_by_the_parameters_names():
    module = net()

    def rate(name):
        return None if name.startswith("4") else 0.1 * 0.5 ** (4 - int(name[0]))

    groups = fitkit.optimizers.parameter_groups(
        fitkit.Model(module), learning_rate=rate, decays=lambda name, parameter: True
    )
    optimizer = SGD(groups, lr=0.7)
    assert [group["lr"] for group in optimizer.param_groups] == [0.00625, 0.025, 0.7]
    with pytest.raises(ConfigurationError, match=r"learning_rate\('0.weight'\)=-1"):
        fitkit.optimizers.parameter_groups(module, learning_rate=lambda name: -1)
    with pytest.raises(ArgumentTypeError, match="decays=0.1"):
        fitkit.optimizers.parameter_groups(module, decays=0.1)
