"""`compile(batch_transforms=…)`: who is called how, on which batches, and with which draws."""

import numpy as np
import pytest
import torch
import xxhash
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit.transforms import BatchTransform, CutMix, MixUp, OneOf, RandomErasing
from tests.compiling import TRACED

X = torch.rand(26, 3, 6, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 5, (26,), generator=torch.Generator().manual_seed(1))


def net() -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 5))


def made(transforms, *, seed=3, kind=fitkit.Model, **given) -> fitkit.Model:
    torch.manual_seed(seed)
    model = kind(net())
    model.compile(
        "sgd", "cross_entropy", metrics=["accuracy"], learning_rate=0.1,
        batch_transforms=transforms, **given,
    )  # fmt: skip
    return model


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.net.parameters()]).cpu()


class Watch:
    """Keeps what passes through it, as a transform."""

    def __init__(self) -> None:
        self.seen: list[tuple] = []

    def __call__(self, x, y):
        self.seen.append((x.clone().cpu(), y.clone().cpu()))
        return x, y


def by_hand(batches, epochs=1):
    """Train on changed batches in plain PyTorch."""
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for x, y in batches * epochs:
        optimizer.zero_grad()
        functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in plain.parameters()])


def test_the_step_learns_from_what_the_transforms_return_and_evaluate_never_sees_them():
    last = Watch()
    model = made([lambda x: x * 2, lambda x, y: (x + 1, (y + 1) % 5), last])
    model.fit(X, Y, batch_size=8, epochs=1, shuffle=False, verbose=0, validation_data=(X, Y))
    assert [len(x) for x, _ in last.seen] == [8, 8, 8, 2]
    changed = [(x * 2 + 1, (y + 1) % 5) for x, y in zip(X.split(8), Y.split(8), strict=True)]
    torch.testing.assert_close(weights(model), by_hand(changed), atol=1e-7, rtol=0)
    found = model.evaluate(X, Y, verbose=0, return_dict=True)
    expected = functional.cross_entropy(model.net.cpu()(X), Y).item()
    assert found["loss"] == pytest.approx(expected, abs=1e-6)
    assert len(last.seen) == 4


def test_mixup_is_what_its_paper_says_on_the_batch_that_is_rolled_by_one():
    before, after = Watch(), Watch()
    model = made([before, MixUp(0.4), after])
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    ratios = set()
    for (x, y), (mixed, soft) in zip(before.seen, after.seen, strict=True):
        ones = np.eye(5)[y.numpy()]
        rolled = np.roll(ones, 1, 0)
        differs = (ones != rolled).any(1)
        row = int(np.flatnonzero(differs)[0])
        ratio = float(soft[row, y[row]])
        ratios.add(round(ratio, 4))
        expected = ratio * x.numpy() + (1 - ratio) * np.roll(x.numpy(), 1, 0)
        np.testing.assert_allclose(mixed.numpy(), expected, atol=1e-6)
        np.testing.assert_allclose(soft.numpy(), ratio * ones + (1 - ratio) * rolled, atol=1e-6)
    assert len(ratios) == len(after.seen)  # a draw for each batch of each epoch
    torch.testing.assert_close(weights(model), by_hand(after.seen), atol=1e-6, rtol=0)


def test_cutmix_pastes_one_box_and_weighs_the_labels_by_its_area():
    before, after = Watch(), Watch()
    model = made([before, CutMix(1.0), after])
    model.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    areas = set()
    for (x, y), (cut, soft) in zip(before.seen, after.seen, strict=True):
        rolled = torch.roll(x, 1, 0)
        pasted = (cut != x).any(0).any(0)
        assert torch.equal(cut, torch.where(pasted, rolled, x))
        rows, columns = pasted.any(1).sum(), pasted.any(0).sum()
        assert pasted.sum() == rows * columns  # a box
        ratio = 1 - pasted.sum().item() / 36
        areas.add(ratio)
        ones = functional.one_hot(y, 5).float()
        expected = ratio * ones + (1 - ratio) * torch.roll(ones, 1, 0)
        torch.testing.assert_close(soft, expected, atol=1e-6, rtol=0)
    assert len(areas) > 3
    torch.testing.assert_close(weights(model), by_hand(after.seen), atol=1e-6, rtol=0)


def test_random_erasing_gives_each_image_a_box_within_its_bounds():
    images = torch.rand(400, 2, 20, 20) + 1
    transform = RandomErasing(0.6, scale=(0.1, 0.3), ratio=(0.5, 2.0))
    erased, labels = transform(images, torch.arange(400))
    gone = (erased == 0).all(1)
    assert torch.equal(labels, torch.arange(400))
    assert torch.equal(torch.where(gone.unsqueeze(1), 0.0, images), erased)
    touched = gone.flatten(1).any(1)
    assert 190 < int(touched.sum()) < 290
    boxes = set()
    for mask in gone[touched]:
        height, width = int(mask.any(1).sum()), int(mask.any(0).sum())
        assert mask.sum() == height * width
        assert 0.07 <= height * width / 400 <= 0.34
        assert 0.4 <= height / width <= 2.5
        boxes.add((int(mask.any(1).int().argmax()), int(mask.any(0).int().argmax())))
    assert len(boxes) > 50


def test_one_of_takes_each_as_often_as_its_weight_says():
    counts = [0, 0]

    def first(x, y):
        counts[0] += 1
        return x, y

    def second(x):
        counts[1] += 1
        return x

    torch.manual_seed(0)
    both = OneOf(first, second, weights=[3, 1])
    for _ in range(400):
        both(X[:2], Y[:2])
    assert 265 < counts[0] < 335
    assert sum(counts) == 400


RECIPES = {
    "mixup": [MixUp(0.4)],
    "cutmix": [CutMix(1.0, p=0.7)],
    "erasing": [RandomErasing(0.8)],
    "one of, then erased": [OneOf(MixUp(0.2), CutMix(1.0)), RandomErasing(0.5)],
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_processes_train_as_one(recipe):
    # 26 rows in batches of 8 leave 2; the ranks get one each.
    one = made(RECIPES[recipe])
    one.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    two = made(RECIPES[recipe], devices=2, accelerator="cpu", strategy="ddp_spawn")
    two.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    torch.testing.assert_close(weights(two), weights(one), atol=1e-6, rtol=0)


def test_a_rank_without_rows_of_its_own_takes_no_part():
    one = made([MixUp(0.4)])
    one.fit(X[:17], Y[:17], batch_size=8, epochs=2, shuffle=False, verbose=0)  # leaves one row
    two = made([MixUp(0.4)], devices=2, accelerator="cpu", strategy="ddp_spawn")
    two.fit(X[:17], Y[:17], batch_size=4, epochs=2, shuffle=False, verbose=0)
    torch.testing.assert_close(weights(two), weights(one), atol=1e-6, rtol=0)


@pytest.mark.parametrize("cut", [3, 5])
def test_a_cut_training_draws_the_same_in_a_process_with_another_seed(tmp_path, cut):
    transforms = [*RECIPES["one of, then erased"], lambda x: x + 0.1 * torch.randn_like(x)]
    whole = made(transforms)
    whole.fit(X, Y, batch_size=8, epochs=3, verbose=0)

    class Stop(fitkit.callbacks.Callback):
        left = cut

        def on_train_batch_end(self, batch, logs=None):
            self.left -= 1
            if not self.left:
                self.model.save(tmp_path / "cut.h5")
                raise KeyboardInterrupt

    first = made(transforms)
    with pytest.raises(KeyboardInterrupt):
        first.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[Stop()])
    torch.manual_seed(77)
    again = made(transforms, seed=78)
    again.fit(X, Y, batch_size=8, epochs=3, verbose=0, resume_from=tmp_path / "cut.h5")
    assert torch.equal(weights(again), weights(whole))


def test_a_batch_draws_by_the_key_of_the_fit_and_its_place():
    drawn = []

    class Noted(BatchTransform):
        def apply(self, x, y, whole):
            drawn.append(whole.numbers.random())
            return x, y

    model = made([Noted()])
    for moved in (1, 2):  # the seed is the same, the state isn't
        torch.rand(moved)
        state = torch.get_rng_state().numpy().tobytes()
        key = xxhash.xxh3_64_intdigest(state) % 2**63
        before = model.global_step
        model.fit(X, Y, batch_size=13, epochs=2, shuffle=False, verbose=0)
        places = [
            np.random.Philox(key=[key, before], counter=[0, batch, epoch, 0])
            for epoch in range(2)
            for batch in range(2)
        ]
        assert drawn == [np.random.Generator(place).random() for place in places]
        drawn.clear()


def test_the_seed_decides_the_draws():
    found = []
    for seed in (3, 3, 4):
        model = made([MixUp(0.4)], seed=seed)
        model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
        found.append(weights(model))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_yes_or_no_numbers_and_probabilities_are_mixed_as_floats():
    x = torch.rand(16, 4)
    for targets, loss in [
        ((torch.arange(16) % 2).view(-1, 1), "binary_cross_entropy_with_logits"),
        (torch.rand(16, 1), "mse"),
    ]:
        seen = Watch()
        torch.manual_seed(0)
        model = fitkit.Model(nn.Linear(4, 1))
        model.compile("sgd", loss, batch_transforms=[MixUp(1.0), seen])
        model.fit(x, targets, batch_size=16, shuffle=False, verbose=0)
        ((mixed, soft),) = seen.seen
        row = int((x != x.roll(1, 0)).any(1).nonzero()[0])
        ratio = ((mixed - x.roll(1, 0)) / (x - x.roll(1, 0)))[row].median()
        whole = targets.float()
        expected = ratio * whole + (1 - ratio) * whole.roll(1, 0)
        torch.testing.assert_close(soft, expected, atol=1e-4, rtol=0)


def test_labels_of_pixels_are_cut_with_the_images():
    masks = torch.randint(0, 5, (8, 6, 6))
    torch.manual_seed(0)
    x, y = CutMix(1.0)(X[:8], masks)
    moved = (x != X[:8]).any(0).any(0)
    assert y.dtype is masks.dtype
    assert torch.equal(y, torch.where(moved, masks.roll(1, 0), masks))


def test_a_training_step_and_dicts_of_inputs_get_changed_batches():
    class Own(fitkit.Model):
        def training_step(self, batch, batch_idx):
            x, y = batch
            assert y.shape == (len(x), 5)
            return functional.cross_entropy(self(x), y)

    before, after = Watch(), Watch()
    model = made([before, MixUp(0.4), after], kind=Own)
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    torch.testing.assert_close(weights(model), by_hand(after.seen), atol=1e-6, rtol=0)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, a, b):
            return self.layer(torch.cat([a, b], 1))

    rows = [{"a": torch.rand(2), "b": torch.rand(2), "kind": i % 3} for i in range(12)]
    model = fitkit.Model(Two())
    seen = []
    model.compile(
        "sgd", "cross_entropy", target="kind",
        batch_transforms=[MixUp(0.5), lambda x, y: seen.append((x, y)) or (x, y)],
    )  # fmt: skip
    model.fit(DataLoader(rows, batch_size=6), verbose=0)
    (x, y), _ = seen
    assert set(x) == {"a", "b"}
    assert y.shape == (6, 3)


def test_single_batches_and_loaders_are_changed_too():
    seen = Watch()
    model = made([MixUp(0.4), seen])
    model.train_on_batch(X[:8], Y[:8])
    model.train_on_batch(X[:8], Y[:8])
    assert len(seen.seen) == 2
    assert not torch.equal(seen.seen[0][0], seen.seen[1][0])
    model.test_on_batch(X[:8], Y[:8])
    model.fit(DataLoader(TensorDataset(X, Y), 8), verbose=0)
    assert len(seen.seen) == 6


def test_accumulated_batches_are_mixed_each_by_itself():
    seen = Watch()
    model = made([MixUp(0.4), seen], accumulate_grad_batches=2)
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for parts in (seen.seen[:2], seen.seen[2:]):
        x, y = (torch.cat([part[i] for part in parts]) for i in (0, 1))
        optimizer.zero_grad()
        functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in plain.parameters()])
    torch.testing.assert_close(weights(model), expected, atol=1e-6, rtol=0)


class OfOne(BatchTransform):
    def apply(self, x, y, whole):
        return x + float(whole.numbers.random()), y


def test_a_transform_of_your_own_draws_alike_on_all_ranks():
    one = made([OfOne()])
    one.fit(X, Y, batch_size=8, verbose=0)
    two = made([OfOne()], devices=2, accelerator="cpu", strategy="ddp_spawn")
    two.fit(X, Y, batch_size=4, verbose=0)
    torch.testing.assert_close(weights(two), weights(one), atol=1e-6, rtol=0)


@pytest.mark.parametrize("more", [{"steps_per_execution": 3}, {"jit_compile": TRACED}], ids=repr)
def test_several_steps_in_one_call_draw_what_single_ones_do(more):
    found = []
    for given in ({}, {"steps_per_execution": 4, **more}):
        model = made(RECIPES["one of, then erased"], **given)
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
        found.append(weights(model))
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=0)


def test_a_second_training_draws_others():
    seen = Watch()
    model = made([MixUp(0.4), seen])
    for _ in range(2):
        model.fit(X, Y, batch_size=26, shuffle=False, verbose=0)
    assert not torch.equal(seen.seen[0][0], seen.seen[1][0])


@pytest.mark.parametrize("transform", [MixUp(), CutMix(), RandomErasing(1.0)], ids=repr)
def test_the_memory_format_stays(transform):
    x, _ = transform(X.to(memory_format=torch.channels_last), torch.rand(26, 5))
    assert x.is_contiguous(memory_format=torch.channels_last)


def test_a_volume_loses_one_box_in_all_its_layers():
    x, _ = RandomErasing(1.0)(torch.ones(3, 3, 4, 6, 6), torch.zeros(3))
    assert torch.equal(x, x[:, :1, :1].expand_as(x))
    assert bool((x == 0).flatten(1).any(1).all())


def test_each_of_several_outputs_has_its_own_classes():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(4, 5), nn.Linear(4, 2)

        def forward(self, x):
            return {"a": self.one(x), "b": self.other(x)}

    seen = []
    model = fitkit.Model(Two())
    model.compile(
        "sgd", "cross_entropy",
        batch_transforms=[MixUp(0.4), lambda x, y: seen.append(y) or (x, y)],
    )  # fmt: skip
    model.fit(torch.rand(26, 4), {"a": Y, "b": Y % 2}, batch_size=26, shuffle=False, verbose=0)
    assert [tuple(seen[0][name].shape) for name in "ab"] == [(26, 5), (26, 2)]
    for y, soft in ((Y, seen[0]["a"]), (Y % 2, seen[0]["b"])):
        assert bool(
            (soft.gather(1, y[:, None]) + soft.gather(1, y.roll(1)[:, None]) >= 0.999).all()
        )


def test_accuracy_knows_mixed_labels_beside_a_loss_of_your_own():
    model = fitkit.Model(net())
    model.compile(
        "sgd", lambda p, t: functional.cross_entropy(p, t), metrics=["accuracy"],
        learning_rate=0.0, batch_transforms=[MixUp(0.4), watch := Watch()],
    )  # fmt: skip
    history = model.fit(X, Y, batch_size=26, shuffle=False, verbose=0)
    ((x, soft),) = watch.seen
    expected = (model.net.cpu()(x).argmax(1) == soft.argmax(1)).float().mean().item()
    assert history.history["accuracy"] == [pytest.approx(expected)]


def test_the_users_arrays_stay_as_they_are():
    x, y = X.clone(), Y.clone()
    made(RECIPES["one of, then erased"]).fit(x, y, batch_size=26, epochs=3, verbose=0)
    assert torch.equal(x, X)
    assert torch.equal(y, Y)


REFUSED = {
    "not a list": (MixUp(0.2), {}, "list"),
    "not callable": ([3], {}, "list"),
    "three arguments": ([lambda x, y, z: (x, y)], {}, "x, y, z"),
    "one result": ([lambda x, y: x], {}, "must return"),
    "fewer rows": ([lambda x, y: (x[:-1], y[:-1])], {}, "rows"),
    "sample weights": ([MixUp(0.2)], {"sample_weight": torch.ones(26)}, "weights"),
    "ignored labels": ([MixUp(0.2)], {"y": Y.masked_fill(Y == 2, -100)}, "ignored"),
    "no images": ([CutMix(1.0)], {"x": torch.rand(26, 7)}, "images"),
    "unlike the outputs": ([MixUp(0.2)], {"y": torch.zeros(26, 4, 2).long()}, "Labels of shape"),
    "whole numbers": ([MixUp(1.0)], {"x": torch.randint(0, 9, (26, 3))}, "floating-point"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused_in_a_sentence(case):
    transforms, data, words = REFUSED[case]
    with pytest.raises((fitkit.ConfigurationError, TypeError), match=words):
        made(transforms).fit(**{"x": X, "y": Y, "batch_size": 8, "verbose": 0, **data})


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (nn.CrossEntropyLoss(ignore_index=2), "ignore_index"),
        ("sparse_categorical_crossentropy", "categorical_crossentropy"),
        ("nll", "cross_entropy"),
        ("hinge", "0 and 1"),
        ("multilabel_margin", "fractions"),
    ],
    ids=["ignore_index", "sparse", "nll", "hinge", "lists"],
)
def test_losses_that_take_no_mixed_labels_say_so(loss, words):
    model = fitkit.Model(nn.Sequential(nn.Flatten(), nn.Linear(108, 5), nn.LogSoftmax(1)))
    model.compile("sgd", loss, batch_transforms=[MixUp(1.0)])
    with pytest.raises(fitkit.ConfigurationError, match=words):
        model.fit(X, Y, batch_size=26, verbose=0)


def test_a_module_without_a_forward_is_asked_for_the_number_of_classes():
    class Steps(fitkit.Model):
        def __init__(self):
            super().__init__()
            self.inner = net()

        def training_step(self, batch):
            x, y = batch
            return functional.cross_entropy(self.inner(x), y)

    for classes in (None, 5):
        model = Steps()
        model.compile("sgd", batch_transforms=[MixUp(0.4, classes=classes)])
        if classes is None:
            with pytest.raises(fitkit.ConfigurationError, match="classes=10"):
                model.fit(X, Y, verbose=0)
        else:
            model.fit(X, Y, verbose=0)


def test_boxes_are_not_mixed():
    boxes = [{"boxes": torch.rand(2, 4)}, {"boxes": torch.rand(1, 4)}]
    for x in (torch.rand(2, 3, 5, 5), [torch.rand(3, 5, 5), torch.rand(3, 6, 6)]):
        with pytest.raises(fitkit.ConfigurationError, match="dicts"):
            MixUp(0.4)(x, boxes)


def test_a_hook_that_moves_batches_is_told_to_change_them():
    class Own(fitkit.Model):
        def transfer_batch_to_device(self, batch, device):
            return batch

    with pytest.raises(fitkit.ConfigurationError, match="transfer_batch_to_device"):
        made([MixUp(0.2)], kind=Own).fit(X, Y, verbose=0)


def test_class_weights_go_by_the_larger_part():
    seen = Watch()
    model = made([MixUp(0.4), seen])
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, class_weight={0: 2.0, 3: 0.5})
    plain, table = net(), torch.tensor([2.0, 1.0, 1.0, 0.5, 1.0])
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for x, y in seen.seen:
        optimizer.zero_grad()
        weight = table[y.argmax(1)]
        values = functional.cross_entropy(plain(x), y, reduction="none")
        (values * weight).mean().backward()
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in plain.parameters()])
    torch.testing.assert_close(weights(model), expected, atol=1e-6, rtol=0)


def test_a_column_of_class_numbers_is_mixed_as_a_row_of_them():
    column = made([MixUp(0.4)])
    column.fit([(X, Y[:, None])], epochs=2, verbose=0)
    row = made([MixUp(0.4)])
    row.fit([(X, Y)], epochs=2, verbose=0)
    assert torch.equal(weights(column), weights(row))


def test_outside_of_a_training_the_number_of_classes_is_given():
    with pytest.raises(fitkit.ConfigurationError, match="classes=10"):
        MixUp(0.2)(X, Y)
    whole = fitkit.transforms.WholeBatch(np.random.default_rng(0), len(Y), len(Y))
    assert torch.equal(whole.soft(Y, 5), functional.one_hot(Y, 5).float())
