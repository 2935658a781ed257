"""Files of nets that `torch.compile` wraps, whole or in parts: the names are the net's own."""

import pytest
import torch
from torch import nn

import fitkit
from fitkit.callbacks import EMA, EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from tests.nets import regression
from tests.reference import assert_same_weights

X, Y = regression(16, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


class WithState(Net):
    """Has a state beside tensors, which only the module itself can restore."""

    factor = 1.0

    def get_extra_state(self):
        return {"factor": self.factor}

    def set_extra_state(self, state):
        self.factor = state["factor"]


def plain(net=Net):
    return net()


def whole(net=Net):
    return torch.compile(net(), backend="eager")


def in_parts(net=Net):
    net = net()
    net.norm = torch.compile(net.norm, backend="eager")
    net.last = torch.compile(net.last, backend="eager")
    return net


def compiled(make):
    model = fitkit.Model(make())
    model.compile("adam", "mse", accelerator="cpu", devices=1)
    return model


def own(net):
    """The net and its values, without wrappers."""
    net = getattr(net, "_orig_mod", net)
    values = net.state_dict()
    return net, {name.replace("_orig_mod.", ""): value for name, value in values.items()}


MAKES = [plain, whole, in_parts]


@pytest.mark.parametrize("suffix", [".h5", ".pt", ".dcp", ".safetensors"])
def test_weights_of_each_load_into_each(suffix, tmp_path):
    for make in MAKES:
        model, path = compiled(make), tmp_path / f"{make.__name__}{suffix}"
        model.fit(X, Y, verbose=0)
        parts = [*model.net.modules()]
        model.save_weights(path)
        for target in MAKES:
            other = compiled(target)
            other.load_weights(path)
            assert_same_weights(own(other.net)[1], own(model.net)[1])
        assert all(a is b for a, b in zip(parts, model.net.modules(), strict=True))
        if suffix == ".pt":  # plain torch reads it, too
            plain().load_state_dict(torch.load(path, weights_only=True))


@pytest.mark.parametrize("target", MAKES)
def test_a_state_beside_tensors_reaches_the_module_itself(target, tmp_path):
    model, other = fitkit.Model(in_parts(WithState)), fitkit.Model(target(WithState))
    model.net.factor = 2.5
    model.save_weights(tmp_path / "a.h5")
    other.load_weights(tmp_path / "a.h5")
    assert own(other.net)[0].factor == 2.5


@pytest.mark.parametrize("trainable_only", [False, True])
@pytest.mark.parametrize("make", MAKES)
def test_a_training_goes_on_in_a_net_that_is_compiled_otherwise(make, trainable_only, tmp_path):
    torch.manual_seed(0)
    base = Net()
    base.first.requires_grad_(not trainable_only)

    def trained(make, epochs, path=None, resume_from=None):
        model = compiled(make)
        net, _ = own(model.net)
        for name, value in own(model.net)[1].items():
            value.copy_(base.state_dict()[name])
        net.first.requires_grad_(not trainable_only)
        saves = [] if path is None else [ModelCheckpoint(path, trainable_only=trainable_only)]
        stop = EarlyStopping("loss", patience=9, restore_best_weights=True)
        model.fit(X, Y, epochs=epochs, verbose=0, callbacks=[stop, *saves], resume_from=resume_from)
        return own(model.net)[1]

    fitkit.set_seed(0)
    right = trained(plain, 3)
    fitkit.set_seed(0)
    trained(make, 2, tmp_path / "a.h5")
    for other in MAKES:
        assert_same_weights(trained(other, 3, resume_from=tmp_path / "a.h5"), right)


AVERAGES = {
    "EMA": lambda: EMA(0.8),
    "EMA in use": lambda: EMA(0.8, swap_on_epoch=True),
    "SWA": lambda: StochasticWeightAveraging(0.05, 1),
}


@pytest.mark.parametrize("average", AVERAGES)
def test_averages_go_on_in_a_net_that_is_compiled_otherwise(average, tmp_path):
    def trained(make, epochs, path=None, resume_from=None):
        torch.manual_seed(0)
        model = compiled(make)
        saves = [] if path is None else [ModelCheckpoint(path)]
        model.fit(
            X, Y, epochs=epochs, batch_size=4, shuffle=False, verbose=0, resume_from=resume_from,
            callbacks=[AVERAGES[average](), *saves],
        )  # fmt: skip
        return own(model.net)[1]

    right = trained(plain, 4)
    for make in MAKES:
        path = tmp_path / f"{make.__name__}.h5"
        trained(make, 2, path)
        for other in MAKES:
            assert_same_weights(trained(other, 4, resume_from=path), right)


@pytest.mark.parametrize("make", [whole, in_parts])
def test_a_file_that_torch_itself_saved_of_one_loads(make, tmp_path):
    net = make()
    torch.save(net.state_dict(), tmp_path / "a.pt")
    other = compiled(plain)
    other.load_weights(tmp_path / "a.pt")
    assert_same_weights(own(other.net)[1], own(net)[1])


def test_a_model_is_made_again_from_a_compiled_ones_file(tmp_path):
    net = whole()
    model = fitkit.Model(net)
    model.compile(
        torch.optim.SGD([{"params": net.parameters(), "lr": 0.5}], 0.1), "mse",
        accelerator="cpu", devices=1,
    )  # fmt: skip
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "a.h5")
    again = fitkit.load_model(tmp_path / "a.h5", plain())
    assert again.optimizer.param_groups[0]["lr"] == 0.5
    assert_same_weights(own(again.net)[1], own(net)[1])
