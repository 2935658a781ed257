"""`compile(target="mask")`: dict batches that carry the targets, as segmentation loaders give."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fitkit
from tests.nets import classification, linear

X, Y = classification(50, 4)
QUIET = {"verbose": 0, "shuffle": False, "batch_size": 16}


def loader(*, batch_size=16, **more):
    rows = [
        {"image": x, "mask": y, **{name: v[i] for name, v in more.items()}}
        for i, (x, y) in enumerate(zip(X, Y, strict=True))
    ]
    return DataLoader(rows, batch_size=batch_size)


def compiled(net=None, **arguments):
    model = fitkit.Model(linear(4, 3, seed=1) if net is None else net)
    model.compile("sgd", "cross_entropy", metrics=["accuracy"], **arguments)
    return model


def as_pairs():
    model = compiled()
    model.fit(X, Y, epochs=2, validation_data=(X, Y), **QUIET)
    return model


@pytest.mark.parametrize("batch_size", [16, 1])
def test_a_loss_and_a_metric_by_name_suffice_for_image_and_mask(batch_size):
    model, pairs = compiled(target="mask"), as_pairs()
    model.fit(loader(), epochs=2, validation_data=loader(), verbose=0)
    for name, values in pairs.history.history.items():
        assert model.history.history[name] == pytest.approx(values), name
    assert torch.equal(model.net.weight, pairs.net.weight)
    data = loader(batch_size=batch_size)
    assert model.evaluate(data, verbose=0) == pytest.approx(pairs.evaluate(X, Y, verbose=0))
    # Products of other batches may differ in the last bit, depending on the processor.
    expected = pairs.net(X).detach().numpy()
    np.testing.assert_allclose(model.predict(data, verbose=0), expected, rtol=1e-5, atol=1e-6)
    without = DataLoader([{"image": x} for x in X], batch_size=16)
    np.testing.assert_allclose(model.predict(without, verbose=0), expected, rtol=1e-5, atol=1e-6)


def test_arrays_and_single_batches_in_a_dict_too():
    model, pairs = compiled(target="mask"), as_pairs()
    both = {"image": X, "mask": Y}
    model.fit(both, epochs=2, validation_data=both, **QUIET)
    assert torch.equal(model.net.weight, pairs.net.weight)
    assert model.train_on_batch(both) == pairs.train_on_batch(X, Y)
    assert model.test_on_batch(both) == pairs.test_on_batch(X, Y)
    assert (model.predict_on_batch(both) == pairs.predict_on_batch(X)).all()


def test_several_inputs_go_to_the_net_by_keyword():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear(4, 3, seed=1)

        def forward(self, image, scale):
            return self.layer(image * scale)

    model = compiled(Two(), target="mask")
    model.fit(loader(scale=torch.ones(50, 1)), epochs=2, verbose=0)
    assert torch.equal(model.net.layer.weight, as_pairs().net.weight)


@pytest.mark.parametrize("kind", [list, dict])
def test_several_targets_are_named_in_the_outputs_structure(kind):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear(4, 3, seed=1)

        def forward(self, image):
            made = self.layer(image)
            return {"a": made, "b": made} if kind is dict else (made, made)

    names = {"a": "mask", "b": "other"} if kind is dict else ["mask", "other"]
    model = fitkit.Model(Two())
    model.compile("sgd", "cross_entropy", target=names)
    model.fit(loader(other=Y), verbose=0)
    one, two = list(model.history.history)[1:]
    assert model.history.history[one] == model.history.history[two]


def test_two_ranks_learn_the_same():
    model = compiled(target="mask", accelerator="cpu", devices=2)
    model.fit(loader(batch_size=8), epochs=2, verbose=0)
    assert torch.allclose(model.net.weight, as_pairs().net.weight, atol=1e-6)


def test_the_file_keeps_it(tmp_path):
    model = compiled(target="mask")
    model.fit(loader(), verbose=0)
    model.save(tmp_path / "m.h5")
    again = fitkit.load_model(tmp_path / "m.h5", linear(4, 3))
    assert again.evaluate(loader(), verbose=0) == model.evaluate(loader(), verbose=0)


def test_targets_stay_wide_beside_a_narrow_net():
    big = torch.rand(16, 1) + 1000.0
    model = fitkit.Model(linear(4, 1, seed=1))
    model.compile("sgd", "mse", target="mask", precision="bf16-true")
    rows = [{"image": x, "mask": y} for x, y in zip(X[:16], big, strict=True)]
    found = model.evaluate(DataLoader(rows, batch_size=16), verbose=0)
    pairs = fitkit.Model(linear(4, 1, seed=1))
    pairs.compile("sgd", "mse", precision="bf16-true")
    assert found == pairs.evaluate(X[:16], big, verbose=0)


def test_what_cant_be_is_answered():
    with pytest.raises(fitkit.ConfigurationError, match="target='masc'.*'image', 'mask'"):
        compiled(target="masc").fit(loader(), verbose=0)
    with pytest.raises(fitkit.ConfigurationError, match=r"compile\(target='mask'\)"):
        compiled().fit(loader(), verbose=0)
    for wrong in (3, [], ["mask", None], ""):
        with pytest.raises(TypeError, match="name of the entry"):
            compiled(target=wrong)


def test_an_own_step_gets_the_batch_as_it_is_and_super_takes_it_apart():
    seen = []

    class Own(fitkit.Model):
        def training_step(self, batch, batch_idx):
            seen.append(sorted(batch))
            return super().training_step(batch, batch_idx)

    model = Own(linear(4, 3, seed=1))
    model.compile("sgd", "cross_entropy", target="mask")
    model.fit(loader(), epochs=2, verbose=0)
    assert seen[0] == ["image", "mask"]
    assert torch.equal(model.net.weight, as_pairs().net.weight)
