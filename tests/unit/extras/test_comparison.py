"""`python -m fitkit diff`: in what two runs' files differ, and what `save` writes for it."""

import io

import pytest
import torch
from rich.console import Console
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit.__main__ import main
from fitkit.checkpoint import open_checkpoint, save_checkpoint, save_weights
from fitkit.extras.comparison import compare, print_comparison
from tests import nets
from tests.reference import compiled

X, Y = nets.classification(64, 8)


def run(path, *, seed=0, epochs=2, x=X, loader=None, net_seed=0, batch_size=32, **arguments):
    """A training that is saved; all of its random numbers follow from the seed."""
    net = nets.dense(8, 16, 3, seed=net_seed)
    model = compiled(net, "adam", **arguments)
    fitkit.set_seed(seed)
    data = {"x": x, "y": Y, "batch_size": batch_size} if loader is None else {"x": loader}
    model.fit(**data, epochs=epochs, verbose=0)
    model.save(path)
    return str(path)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return run(tmp_path_factory.mktemp("runs") / "a.h5")


def found(one, other):
    result = compare(one, other)
    return {(row.part, row.name): (row.one, row.other) for row in result.differences}, result


def shown(one, other):
    console = Console(file=io.StringIO(), width=120)
    print_comparison(one, other, console)
    return console.file.getvalue()


def test_the_same_run_twice_differs_in_nothing(first, tmp_path):
    differences, result = found(first, run(tmp_path / "b.h5"))
    assert differences == {}
    assert result.same and result.weights.differing == 0
    assert "Nothing differs." in shown(first, tmp_path / "b.h5")


def test_another_rate_and_setting_are_named_with_the_epoch_in_which_it_shows(first, tmp_path):
    other = run(tmp_path / "b.h5", learning_rate=2e-3, gradient_clip_val=0.5)
    differences, result = found(first, other)
    assert differences["settings", "gradient_clip_val"] == ("–", "0.5")
    assert differences["rates", "lr"] == ("0.001", "0.002")
    assert [name for part, name in differences if part == "history"] == ["epoch 1 loss"]
    assert "settings, rates" in result.summary
    assert not any(part in ("seeds", "data", "versions") for part, _ in differences)


def test_another_seed_is_named_by_its_number(first, tmp_path):
    differences, _ = found(first, run(tmp_path / "b.h5", seed=41))
    assert differences["seeds", "torch's"] == ("0", "41")
    assert ("seeds", "order of arrays") in differences
    assert not any(part in ("settings", "rates", "data") for part, _ in differences)


def test_other_data_of_the_same_size_are_named_by_their_digest(first, tmp_path):
    changed = X.clone()
    changed[17, 3] += 1e-3
    differences, _ = found(first, run(tmp_path / "b.h5", x=changed))
    assert [name for part, name in differences if part == "data"] == ["x"]
    assert differences["data", "x"][0].startswith("float32 (64, 8) ")


def test_a_loaders_order_and_sampler_are_named(tmp_path):
    data = TensorDataset(X, Y)
    one, other = (
        run(tmp_path / f"{shuffle}.h5", loader=DataLoader(data, 32, shuffle=shuffle))
        for shuffle in (True, False)
    )
    differences, _ = found(one, other)
    assert differences["data", "sampler"] == ("RandomSampler", "SequentialSampler")
    again = run(tmp_path / "seed.h5", loader=DataLoader(data, 32, shuffle=True), seed=5)
    differences, _ = found(one, again)
    assert ("seeds", "torch's numbers as the pass began") in differences
    assert ("data", "x") not in differences


def test_another_place_in_the_same_training_is_no_cause(first, tmp_path):
    other = run(tmp_path / "b.h5", epochs=3)
    differences, result = found(first, other)
    assert differences["progress", "updates"] == ("4", "6")
    assert not any(part in ("rates", "seeds", "data") for part, _ in differences)
    assert "different places" in result.summary


def test_the_first_layer_that_parts_is_in_the_nets_order_with_the_size(tmp_path):
    net = nets.dense(8, 16, 3)
    save_weights(tmp_path / "a.safetensors", net.state_dict())
    weight = net[2].weight.detach().clone()
    with torch.no_grad():
        net[2].weight[1, 4] += 0.25
        net[2].bias.add_(1)
    save_weights(tmp_path / "b.h5", net.state_dict())
    result = compare(tmp_path / "a.safetensors", tmp_path / "b.h5")
    assert not result.has_states and not result.differences
    weights = result.weights
    assert (weights.compared, weights.differing, weights.first) == (4, 2, "2.weight")
    assert weights.largest == pytest.approx(0.25)
    assert weights.relative == pytest.approx(0.25 / float(weight.norm()))


def test_names_and_shapes_of_one_file_alone_are_listed(tmp_path):
    save_weights(tmp_path / "a.h5", {"x": torch.ones(2), "y": torch.ones(3), "n": torch.ones(1)})
    save_weights(tmp_path / "b.h5", {"x": torch.ones(2), "y": torch.ones(4), "z": torch.ones(1)})
    weights = compare(tmp_path / "a.h5", tmp_path / "b.h5").weights
    assert weights.elsewhere == ("y", "n", "z")
    assert weights.differing == 0 and not compare(tmp_path / "a.h5", tmp_path / "b.h5").same


def test_nan_is_the_same_as_nan_and_another_dtype_as_its_numbers(tmp_path):
    tensor = torch.tensor([1.0, float("nan"), float("inf")])
    save_weights(tmp_path / "a.h5", {"w": tensor, "i": torch.arange(3)})
    save_weights(tmp_path / "b.h5", {"w": tensor.double(), "i": torch.arange(3)})
    assert compare(tmp_path / "a.h5", tmp_path / "b.h5").same


def test_save_writes_settings_versions_and_digests_as_numbers_and_text(first):
    with open_checkpoint(first) as checkpoint:
        settings, data = checkpoint.state["settings"], checkpoint.state["progress"]["data"]
        assert {"torch", "fitkit", "numpy", "python"} == checkpoint.software.keys()
    assert settings["optimizer"] == "adam" and settings["devices"] == "auto"
    assert all(isinstance(value, (str, int, float)) for value in settings.values())
    assert data["kind"] == "arrays" and len(data["digests"]) == 2


def test_objects_are_settings_by_their_names(tmp_path):
    model = fitkit.Model(nets.dense(8, 3))
    strategy = fitkit.strategies.DDPStrategy()
    model.compile(torch.optim.SGD, torch.nn.CrossEntropyLoss(), devices=1, strategy=strategy)
    model.save(tmp_path / "a.h5")
    with open_checkpoint(tmp_path / "a.h5") as checkpoint:
        settings = checkpoint.state["settings"]
    assert settings["optimizer"] == "SGD"
    assert settings["loss"] == "CrossEntropyLoss"
    assert settings["strategy"] == type(strategy).__name__


def without(path, changed):
    """A copy of a checkpoint with another state."""
    with open_checkpoint(path) as checkpoint:
        weights = {name: checkpoint.weights.read(name) for name in checkpoint.weights.describe()}
        state = checkpoint.state
    changed(state)
    save_checkpoint(path.replace("a.h5", "changed.h5"), weights, state)
    return path.replace("a.h5", "changed.h5")


def drop(state):
    state.pop("settings")
    for name in ("kind", "digests"):
        state["progress"]["data"].pop(name)


def test_a_file_without_all_this_loads_resumes_and_is_compared_by_what_it_has(first, capsys):
    older = without(first, drop)
    twin = compiled(nets.dense(8, 16, 3), "adam")
    twin.load(older)
    twin.fit(X, Y, epochs=3, verbose=0, resume_from=older)
    differences, _ = found(first, older)
    assert ("data", "x") in differences  # said by this version, which wrote both
    assert main(["diff", first, older]) == 0


@pytest.mark.parametrize("settings", [
    7, ["x"], {"\x1b[31m": "\x1b]0;title\x07"}, {"a": {"b": [None, {"c": b"d"}]}},
])  # fmt: skip
def test_foreign_settings_change_nothing_and_command_no_terminal(first, settings):
    def change(state):
        state["settings"] = settings
        state["progress"]["data"]["digests"] = settings if isinstance(settings, dict) else {}

    if isinstance(settings, dict) and "a" in settings:
        settings = {"a": {"b": [None, {"c": "d"}]}}
    hostile = without(first, change)
    twin = compiled(nets.dense(8, 16, 3), "adam")
    given = twin._fitkit.compilation.given.as_dict()
    twin.load(hostile)
    assert twin._fitkit.compilation.given.as_dict() == given
    assert "\x1b" not in shown(first, hostile)


@pytest.mark.parametrize("part", ["training", "progress", "compiled", "settings"])
@pytest.mark.parametrize("value", [None, 3, [], [[]], {"optimizers": 3, "random": {}, "data": 1}])
def test_whatever_a_state_holds_can_be_compared(first, part, value):
    other = without(first, lambda state: state.update({part: value}))
    assert "Weights: all 4 tensors" in shown(first, other)


def test_a_damaged_or_missing_file_is_one_line_and_status_1(first, tmp_path, capsys):
    damaged = tmp_path / "d.h5"
    with open(first, "rb") as file:
        damaged.write_bytes(file.read()[:-9])
    assert main(["diff", first, str(damaged)]) == 1
    assert capsys.readouterr().err.startswith(f"{damaged} is damaged")
    assert main(["diff", str(tmp_path / "none.h5"), first]) == 1
    assert capsys.readouterr().err == f"There is no file {tmp_path / 'none.h5'}.\n"
    assert main(["diff", first, str(tmp_path / "none.h5")]) == 1
    assert capsys.readouterr().err == f"There is no file {tmp_path / 'none.h5'}.\n"
