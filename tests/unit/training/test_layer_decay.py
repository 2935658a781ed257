"""`layer_decay` trains as torch does with groups that are written by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fitkit
from fitkit.extras.layer_depths import layers_of
from tests.compiling import TRACED
from tests.nets import classification, dense
from tests.reference import assert_same_weights, plain_loop, slices

X, Y = classification(48, 5)
RATE, DECAY, WEIGHT_DECAY = 0.05, 0.5, 0.1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.second(self.first(self.norm(x)).tanh())


class Net(nn.Module):
    """A stem, three blocks with a norm behind them, and a head: five layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Parameter(torch.zeros(8))
        self.stem = nn.Linear(5, 8)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.stem(x) + self.token)))


def by_hand(net, rate=RATE):
    """The groups of `Net`, written by hand."""
    layers = [
        [net.token, *net.stem.parameters()],
        [*net.blocks[0].parameters()],
        [*net.blocks[1].parameters()],
        [*net.blocks[2].parameters(), *net.norm.parameters()],
        [*net.head.parameters()],
    ]
    groups = []
    for below, layer in enumerate(reversed(layers)):
        own = {"lr": rate * DECAY**below}
        groups.append({"params": [p for p in layer if p.ndim > 1], **own})
        groups.append({"params": [p for p in layer if p.ndim < 2], **own, "weight_decay": 0.0})
    return groups


def compiled(net=None, kind=fitkit.Model, optimizer="adamw", **more):
    model = kind(Net() if net is None else net)
    model.compile(
        {"name": optimizer, "weight_decay": WEIGHT_DECAY},
        "cross_entropy",
        **{"learning_rate": RATE, "layer_decay": DECAY, "devices": 1, "accelerator": "cpu", **more},
    )
    return model


def fitted(model, batch_size=16, **more):
    options = {"epochs": 2, "shuffle": False, "verbose": 0, **more}
    model.fit(X, Y, batch_size=batch_size, **options)
    return model


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_the_weights_are_torchs_to_the_bit(kind):
    net = Net()
    optimizer = kind(by_hand(net), weight_decay=WEIGHT_DECAY, fused=True)
    plain_loop(net, optimizer, slices(X, Y, 16), 2)
    model = fitted(compiled(optimizer=kind.__name__))
    assert_same_weights(model.net, net)
    assert model.optimizer.learning_rate == RATE


@pytest.mark.parametrize(
    "more",
    [
        {"jit_compile": TRACED},
        {"devices": 2, "strategy": "ddp_spawn"},
        {"devices": 2, "strategy": "ddp_sharded"},
        {"devices": 2, "strategy": "fsdp"},
    ],
    ids=str,
)
def test_it_is_the_same_compiled_and_on_ranks(more):
    net = Net()
    optimizer = torch.optim.SGD(by_hand(net), momentum=0.9)
    plain_loop(net, optimizer, slices(X, Y, 16), 2)
    model = compiled(**more)
    model.compile({"name": "sgd", "momentum": 0.9})
    fitted(model, 16 // more.get("devices", 1))
    assert_same_weights(model.net, net, atol=2e-6)


def test_a_schedule_keeps_the_ratios():
    net = Net()
    optimizer = torch.optim.AdamW(by_hand(net), weight_decay=WEIGHT_DECAY, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    plain_loop(net, optimizer, slices(X, Y, 16), 4, scheduler=schedule)
    model = compiled(lr_scheduler={"scheduler": "cosine", "interval": "epoch"})
    assert_same_weights(fitted(model, epochs=4).net, net, atol=1e-6)


def test_a_cut_training_goes_on_exactly(tmp_path):
    whole = fitted(compiled(lr_scheduler="cosine"), epochs=3)
    fitted(compiled(lr_scheduler="cosine"), epochs=3, callbacks=Cut(tmp_path / "cut.h5"))
    again = fitted(compiled(lr_scheduler="cosine"), epochs=3, resume_from=tmp_path / "cut.h5")
    assert_same_weights(again.net, whole.net)


class Cut(fitkit.callbacks.Callback):
    def __init__(self, path):
        self.path = path

    def on_epoch_end(self, epoch, logs):
        if epoch == 0:
            self.model.save(self.path)


def test_a_loaded_model_has_the_layers_again(tmp_path):
    fitted(compiled()).save(tmp_path / "it.h5")
    loaded = fitkit.load_model(tmp_path / "it.h5", Net())
    rates = [group["lr"] for group in loaded.optimizer.param_groups]
    assert rates == [group["lr"] for group in by_hand(Net())]


def test_a_new_rate_is_that_of_the_last_layer():
    model = fitted(compiled())
    model.compile(learning_rate=0.01)
    expected = [group["lr"] for group in by_hand(Net(), 0.01)]
    assert [group["lr"] for group in model.optimizer.param_groups] == expected
    model.optimizer.learning_rate = 0.02
    assert [group["lr"] for group in model.optimizer.param_groups][-1] == 0.02 * DECAY**4


def test_another_factor_makes_the_optimizer_anew():
    model = fitted(compiled())
    model.compile(layer_decay=None)
    assert len(model.optimizer.param_groups) == 1
    assert not model.optimizer.state


def test_muon_and_adamw_share_the_factors():
    model = fitkit.Model(Net())
    model.compile("muon", "cross_entropy", learning_rate=RATE, layer_decay=DECAY, devices=1)
    first, second = model.optimizers()
    expected = [RATE * DECAY**below for below in range(5)]
    assert sorted({g["lr"] for g in first.param_groups}) == sorted(expected[1:])
    assert sorted({g["lr"] for g in second.param_groups}) == sorted(expected)
    fitted(model)


def test_a_class_a_partial_and_a_function_get_the_groups():
    def made(params):
        return torch.optim.SGD(params, lr=0.1)

    for given in (made, torch.optim.SGD):
        model = fitkit.Model(Net())
        rate = {} if given is made else {"learning_rate": 0.1}
        model.compile(given, "cross_entropy", layer_decay=DECAY, devices=1, **rate)
        assert model.optimizer.param_groups[-1]["lr"] == 0.1 * DECAY**4


def test_the_groups_may_be_made_by_themselves():
    net = Net()
    groups = fitkit.optimizers.parameter_groups(
        net, weight_decay=WEIGHT_DECAY, learning_rate=RATE, layer_decay=DECAY
    )
    for group, expected in zip(groups, by_hand(net), strict=True):
        assert group["lr"] == expected["lr"]
        assert group["weight_decay"] == expected.get("weight_decay", WEIGHT_DECAY)
        assert {*map(id, group["params"])} == {*map(id, expected["params"])}
    model = fitkit.Model(net)
    model.compile(torch.optim.AdamW(groups, fused=True), "cross_entropy", devices=1)
    assert_same_weights(fitted(model).net, fitted(compiled()).net)


def names_of_layers(net):
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    return [[names[id(parameter)] for parameter in layer] for layer in layers_of(net)]


def test_the_layers_of_a_plain_stack_are_its_layers_with_weights():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Linear(2, 3))
    assert names_of_layers(net) == [
        ["0.weight", "0.bias", "1.weight", "1.bias"],
        ["3.weight", "3.bias"],
    ]
    assert len(layers_of(dense(2, 3, 4, 5))) == 3


class Residual(nn.Module):
    """As torchvision's basic block."""

    def __init__(self, down=False):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2)
        self.conv2, self.bn2 = nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2)
        self.downsample = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)) if down else None


def test_the_layers_of_a_residual_net_are_its_blocks():
    net = nn.Module()
    net.conv1, net.bn1 = nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2)
    net.layer1 = nn.Sequential(Residual(), Residual())
    net.layer2 = nn.Sequential(Residual(True), Residual())
    net.layer3 = nn.Sequential(Residual(True))
    net.fc = nn.Linear(2, 3)
    firsts = [layer[0] for layer in names_of_layers(net)]
    assert firsts == ["conv1.weight", "layer1.0.conv1.weight", "layer1.1.conv1.weight",
                      "layer2.0.conv1.weight", "layer2.1.conv1.weight", "layer3.0.conv1.weight",
                      "fc.weight"]  # fmt: skip
    assert sum(map(len, names_of_layers(net))) == len([*net.parameters()])


def test_the_layers_of_a_hugging_face_net_are_its_blocks():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=8,
        image_size=8, patch_size=4,
    )  # fmt: skip
    net = transformers.ViTForImageClassification(config)
    found = names_of_layers(net)
    assert len(found) == 5
    assert all("embeddings" in name for name in found[0])
    assert "vit.layernorm.weight" in found[3]
    assert found[4] == ["classifier.weight", "classifier.bias"]


class Timms(Net):
    """As timm's vision transformers say which layers they have."""

    def group_matcher(self, coarse=False):
        return {
            "stem": r"^token|stem",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }


def test_a_net_of_timm_says_its_layers():
    expected = names_of_layers(Net())
    assert [{*layer} for layer in names_of_layers(Timms())] == [{*layer} for layer in expected]


@pytest.mark.parametrize(
    "arguments",
    [
        {"layer_decay": 0},
        {"layer_decay": 1.5},
        {"layer_decay": "half"},
        {"layer_decay": 0.5, "optimizer": "instance"},
    ],
    ids=str,
)
def test_impossible_arguments_are_refused(arguments):
    net = Net()
    if "optimizer" in arguments:
        arguments = {**arguments, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}
    with pytest.raises(fitkit.ConfigurationError):
        fitkit.Model(net).compile(**{"optimizer": "sgd", "loss": "mse", **arguments})


def test_own_optimizers_and_lists_without_a_rate_are_refused():
    class Own(fitkit.Model):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = Own(Net())
    model.compile(loss=F.cross_entropy, layer_decay=0.5, devices=1)
    with pytest.raises(fitkit.ConfigurationError):
        fitted(model)
    with pytest.raises(fitkit.ConfigurationError):
        fitkit.optimizers.parameter_groups(Net(), layer_decay=0.5)
