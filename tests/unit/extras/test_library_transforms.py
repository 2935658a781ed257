"""torchvision's and Kornia's transforms in `compile(batch_transforms=…)`, as they are."""

import pytest
import torch
from torch import nn

import fitkit
from fitkit.callbacks import Callback

X = torch.rand(26, 3, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 5, (26,), generator=torch.Generator().manual_seed(1))
MAPS = torch.randint(0, 2, (26, 8, 8), generator=torch.Generator().manual_seed(2))


def torchvision():
    # Its operators may be built for another torch, which is no reason to fail here.
    return pytest.importorskip("torchvision.transforms.v2", exc_type=Exception)


def kornia():
    return pytest.importorskip("kornia.augmentation", exc_type=Exception)


def composed():
    v2 = torchvision()
    parts = [v2.RandomHorizontalFlip(), v2.Normalize([0.5] * 3, [0.2] * 3)]
    return [v2.Compose([*parts, v2.MixUp(num_classes=5)]), v2.RandomErasing(1.0)]


def augmented():
    parts = kornia()
    inner = parts.AugmentationSequential(parts.RandomHorizontalFlip(), parts.RandomErasing())
    return [parts.ColorJiggle(0.1, 0.1, 0.1, 0.1), inner]


def fitted(transforms, seed=3, y=Y, last=None, **more):
    torch.manual_seed(seed)
    model = fitkit.Model(last or nn.Sequential(nn.Flatten(), nn.Linear(192, 5)))
    model.compile("sgd", "cross_entropy", metrics=["accuracy"], batch_transforms=transforms)
    model.fit(X, y, batch_size=8, epochs=2, verbose=0, **more)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("made", [composed, augmented])
def test_they_draw_by_the_seed_and_a_cut_training_draws_the_same(made, tmp_path):
    class Saves(Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.global_step == 6:
                self.model.save(tmp_path / "cut.h5")

    whole = fitted(made(), callbacks=Saves())
    assert torch.equal(fitted(made()), whole)
    assert not torch.equal(fitted(made(), seed=4), whole)
    assert torch.equal(fitted(made(), seed=5, resume_from=tmp_path / "cut.h5"), whole)


def test_kornia_changes_masks_with_the_images():
    parts = kornia()
    both = parts.AugmentationSequential(
        parts.RandomHorizontalFlip(p=1.0), data_keys=["input", "mask"]
    )
    seen = []

    def look(x, y):
        seen.append((x, y))
        return x, y.squeeze(1)

    fitted([both, look], y=MAPS[:, None], last=nn.Conv2d(3, 2, 1), shuffle=False)
    x, y = seen[0]
    assert torch.equal(x, X[:8].flip(-1))
    assert torch.equal(y, MAPS[:8, None].flip(-1))


def test_torchvision_changes_masks_with_the_images_where_a_function_says_what_they_are():
    v2 = torchvision()
    from torchvision import tv_tensors

    def both(x, y):
        return v2.RandomHorizontalFlip(1.0)(tv_tensors.Image(x), tv_tensors.Mask(y))

    found = fitted([both], y=MAPS, last=nn.Conv2d(3, 2, 1))
    assert found.isfinite().all()


def test_what_would_change_the_images_alone_is_refused():
    v2, parts = torchvision(), kornia()
    for moves in (v2.Compose([v2.RandomRotation(9)]), parts.RandomHorizontalFlip()):
        with pytest.raises(fitkit.ConfigurationError, match="maps"):
            fitted([moves], y=MAPS, last=nn.Conv2d(3, 2, 1))
    fitted([v2.Normalize([0.5] * 3, [0.2] * 3)], y=MAPS, last=nn.Conv2d(3, 2, 1))
    for mixes in (parts.RandomMixUpV2(), parts.RandomCutMixV2(data_keys=["input", "class"])):
        with pytest.raises(fitkit.ConfigurationError, match="fitkit.transforms"):
            fitted([mixes])
