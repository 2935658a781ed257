"""Networks of other libraries: tiny, with random weights and data, and how each is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate

import fitkit
from tests.nets import normal

SAMPLES = 8
RATE = 0.01


@dataclasses.dataclass(frozen=True)
class Network:
    """A network as a user of its library trains it, and the same in plain PyTorch.

    Attributes:
        net: makes the network.
        samples: makes the data set, of `SAMPLES` entries.
        plain_loss: the mean loss of a batch, by `(net, batch)`.
        plain_output: what `predict` returns of a batch, by `(net, batch)`: a tensor, or a list of
            dicts of tensors. None if the network returns its loss alone.
        loss: makes what `compile` gets as the loss.
        target: what `compile` gets as `target`.
        kind: the class of the model.
        collate: makes a batch of samples.
        count: over how much `plain_loss` is a mean, by `(batch)`, up to a factor.
        key: the entry or attribute of `predict`'s result that `plain_output` returns.
    """

    net: Callable[[], nn.Module]
    samples: Callable[[], list[Any]]
    plain_loss: Callable[[nn.Module, Any], torch.Tensor]
    plain_output: Callable[[nn.Module, Any], Any] | None
    loss: Callable[[nn.Module], Any] = lambda net: None
    target: str | None = None
    kind: type[fitkit.Model] = fitkit.Model
    collate: Callable[[list[Any]], Any] = default_collate
    count: Callable[[Any], int] = lambda batch: 1
    key: str | None = None

    def fresh(self) -> nn.Module:
        torch.manual_seed(0)
        return self.net()

    def loader(self, batch_size: int) -> DataLoader[Any]:
        return DataLoader(self.samples(), batch_size, collate_fn=self.collate)

    def model(self, **options: Any) -> fitkit.Model:
        net = self.fresh()
        found = self.kind(net)
        found.compile("sgd", self.loss(net), learning_rate=RATE, target=self.target, **options)
        return found


def integers(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def pairs(x: torch.Tensor, y: torch.Tensor) -> list[Any]:
    return list(zip(x, y, strict=True))


def dicts(**tensors: torch.Tensor) -> list[Any]:
    return [{name: rows[i] for name, rows in tensors.items()} for i in range(SAMPLES)]


# --------------------------------------------------------------- transformers


def own_loss(net: nn.Module, batch: Any) -> torch.Tensor:
    return net(**batch).loss


def logits(net: nn.Module, batch: Any) -> torch.Tensor:
    return net(**batch).logits


def classifier() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(
        vocab_size=50, intermediate_size=16, num_labels=3, hidden_dropout_prob=0,
        attention_probs_dropout_prob=0, **sizes,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def labels_that_count(batch: Any) -> int:
    return int((batch["labels"] != -100).sum())


def translator() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BartConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16,
        decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2, dropout=0,
        max_position_embeddings=16,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def translations() -> list[Any]:
    labels = integers(50, SAMPLES, 6, seed=1)
    for row, length in enumerate([1, 6, 3, 5, 2, 6, 4, 1]):
        labels[row, length:] = -100
    return dicts(input_ids=integers(50, SAMPLES, 5), labels=labels)


def boxes_of_pictures() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("scipy")  # finds the boxes that are nearest
    config = transformers.YolosConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=[16, 16], patch_size=8, num_detection_tokens=4, num_labels=3,
        use_mid_position_embeddings=False,
    )  # fmt: skip
    return transformers.YolosForObjectDetection(config)


def pictures_with_boxes() -> list[Any]:
    # Two boxes in each: the loss divides by the number of boxes in the batch.
    boxes = normal(SAMPLES, 2, 4, seed=1).sigmoid()
    labels = integers(3, SAMPLES, 2)
    return [
        {"pixel_values": picture, "labels": {"class_labels": kind, "boxes": box}}
        for picture, kind, box in zip(normal(SAMPLES, 3, 16, 16), labels, boxes, strict=True)
    ]


def with_lists_of_labels(samples: list[Any]) -> dict[str, Any]:
    pictures = torch.stack([sample["pixel_values"] for sample in samples])
    return {"pixel_values": pictures, "labels": [sample["labels"] for sample in samples]}


# ----------------------------------------------------------------------- peft


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    base = transformers.GPT2LMHeadModel(config)
    lora = peft.LoraConfig(
        r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(base, lora)


def texts() -> list[Any]:
    ids = integers(50, SAMPLES, 8)
    labels = ids.clone()
    labels[1, :5] = -100
    return dicts(input_ids=ids, labels=labels)


# ------------------------------------------------------------ torch-geometric


def graph_network() -> nn.Module:
    pytest.importorskip("torch_geometric")
    from torch_geometric.nn import GCNConv, global_mean_pool

    class Graphs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = GCNConv(4, 8), nn.Linear(8, 3)

        def forward(self, data: Any) -> torch.Tensor:
            nodes = self.first(data.x, data.edge_index).tanh()
            return self.last(global_mean_pool(nodes, data.batch))

    return Graphs()


def graphs() -> list[Any]:
    from torch_geometric.data import Data

    found = []
    for number in range(SAMPLES):
        nodes = 3 + number % 4
        ring = torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes])
        x = normal(nodes, 4, seed=number)
        found.append(Data(x=x, edge_index=ring, y=torch.tensor([number % 3])))
    return found


def joined_graphs(samples: list[Any]) -> Any:
    from torch_geometric.data import Batch

    return Batch.from_data_list(samples)


# ------------------------------------------------------------------ diffusers


def denoiser() -> nn.Module:
    diffusers = pytest.importorskip("diffusers")
    return diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(8, 8), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def noised() -> list[Any]:
    from diffusers import DDPMScheduler

    noise, times = normal(SAMPLES, 1, 8, 8, seed=1), integers(1000, SAMPLES)
    pictures = DDPMScheduler().add_noise(normal(SAMPLES, 1, 8, 8), noise, times)
    return list(zip(pairs(pictures, times), noise, strict=True))


def distance_of_noise(output: Any, noise: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.sample, noise)


# -------------------------------------------------------------------- gpytorch


def gaussian_process() -> nn.Module:
    gpytorch = pytest.importorskip("gpytorch")
    from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy

    class Process(gpytorch.models.ApproximateGP):
        def __init__(self, places: torch.Tensor) -> None:
            distribution = CholeskyVariationalDistribution(len(places), mean_init_std=0)
            super().__init__(VariationalStrategy(self, places, distribution))
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    class Regression(nn.Module):
        """A process and its likelihood: `(mean, variance)`, or with targets the loss."""

        def __init__(self) -> None:
            super().__init__()
            self.process = Process(normal(4, 2, seed=3))
            self.likelihood = gpytorch.likelihoods.GaussianLikelihood()

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
            found = self.process(x)
            if y is None:
                return {"mean": found.mean, "variance": found.variance}
            elbo = gpytorch.mlls.VariationalELBO(self.likelihood, self.process, SAMPLES)
            return {"mean": found.mean, "loss": -elbo(found, y)}

    return Regression()


# --------------------------------------------------- e3nn, MONAI, x-transformers


def equivariant() -> nn.Module:
    pytest.importorskip("e3nn")
    from e3nn.nn import Gate
    from e3nn.o3 import Irreps, Linear

    gate = Gate("4x0e", [torch.tanh], "2x0e", [torch.sigmoid], "2x1o")
    return nn.Sequential(
        Linear(Irreps("2x0e+2x1o"), gate.irreps_in), gate, Linear(gate.irreps_out, "1x1o")
    )


def segmenter() -> nn.Module:
    pytest.importorskip("monai")
    from monai.networks.nets import UNet

    return UNet(
        spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,), dropout=0
    )


def dice(net: nn.Module) -> Any:
    from monai.losses import DiceLoss

    return DiceLoss(to_onehot_y=True, softmax=True)


def decoder() -> nn.Module:
    x_transformers = pytest.importorskip("x_transformers")
    layers = x_transformers.Decoder(dim=16, depth=1, heads=2, attn_dim_head=8)
    return x_transformers.TransformerWrapper(num_tokens=50, max_seq_len=9, attn_layers=layers)


def autoregressive() -> nn.Module:
    wrapped = decoder()
    from x_transformers import AutoregressiveWrapper

    return AutoregressiveWrapper(wrapped)


def next_tokens(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.mT, tokens)


def as_returned(loss: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return loss


# ------------------------------------------------------------ timm, torchvision


def importable(library: str) -> Any:
    """A library, or a skipped test where it can't be loaded beside this torch."""
    try:
        return pytest.importorskip(library)
    except RuntimeError as error:
        # torchvision's operators are built for one build of torch.
        pytest.skip(f"{library} isn't made for this torch: {error}")


def image_classifier() -> nn.Module:
    importable("torchvision")
    timm = importable("timm")
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=8, in_chans=3, embed_dim=16, depth=1,
        num_heads=2, num_classes=3,
    )  # fmt: skip


class StandIn(nn.Module):
    """What torchvision's detectors take and return, by a network of two layers.

    It takes a list of images (3, H, W) of unlike sizes. In training it also takes a dict of boxes
    and labels for each, and returns a dict of losses. Else it returns a dict for each image.
    """

    def __init__(self) -> None:
        super().__init__()
        self.box, self.kind = nn.Linear(3, 4), nn.Linear(3, 3)

    def forward(self, images: list[torch.Tensor], targets: list[Any] | None = None) -> Any:
        features = torch.stack([image.mean((1, 2)) for image in images])
        boxes, kinds = self.box(features), self.kind(features)
        if self.training:
            assert targets is not None
            far = [
                (box - target["boxes"]).abs().mean()
                for box, target in zip(boxes, targets, strict=True)
            ]
            wrong = [
                F.cross_entropy(kind.expand(len(target["labels"]), -1), target["labels"])
                for kind, target in zip(kinds, targets, strict=True)
            ]
            return {"box": torch.stack(far).mean(), "kind": torch.stack(wrong).mean()}
        return [
            {"boxes": box[None].expand(1 + len(image[0]) % 2, -1), "scores": kind.softmax(0)}
            for image, box, kind in zip(images, boxes, kinds, strict=True)
        ]


def detector() -> nn.Module:
    importable("torchvision")
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    backbone = nn.Sequential(nn.Conv2d(3, 8, 4, stride=8), nn.ReLU())
    backbone.out_channels = 8
    anchors = AnchorGenerator(((16, 32),), ((1.0,),))
    sizes = {"min_size": 32, "max_size": 64, "fixed_size": (32, 32)}
    return RetinaNet(backbone, 3, anchor_generator=anchors, score_thresh=0.0, **sizes)


class Detection(fitkit.Model):
    """A detector that returns its losses in training, and its boxes otherwise."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, targets = batch
        return sum(self.net(images, targets).values())

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        # Losses come in the training mode alone.
        self.net.train()
        loss = self.training_step(batch, batch_idx)
        self.net.eval()
        return {"loss": loss}

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> list[Any]:
        images, _ = batch
        return self.net(images)


def photographs() -> list[Any]:
    found = []
    for number in range(SAMPLES):
        count = 1 + number % 3
        corners = normal(count, 2, seed=number).sigmoid() * 10
        boxes = torch.cat([corners, corners + 12], dim=1)
        target = {"boxes": boxes, "labels": integers(3, count, seed=number)}
        found.append((normal(3, 24 + number, 32, seed=number).sigmoid(), target))
    return found


def in_lists(samples: list[Any]) -> Any:
    return tuple(map(list, zip(*samples, strict=True)))


def losses_of_detector(net: nn.Module, batch: Any) -> torch.Tensor:
    net.train()
    return sum(net(*batch).values())


def detections(net: nn.Module, batch: Any) -> list[Any]:
    return net(batch[0])


# ------------------------------------------------------------------------- all


def plain(loss: Callable[[Any, Any], torch.Tensor]) -> Callable[[nn.Module, Any], torch.Tensor]:
    return lambda net, batch: loss(net(batch[0]), batch[1])


def of_first(net: nn.Module, batch: Any) -> torch.Tensor:
    return net(batch[0])


def tokens() -> list[Any]:
    ids = integers(50, SAMPLES, 9)
    return pairs(ids[:, :-1], ids[:, 1:])


NETWORKS = {
    "transformers: classifier": Network(
        classifier,
        lambda: dicts(input_ids=integers(50, SAMPLES, 6), labels=integers(3, SAMPLES)),
        own_loss, logits, key="logits",
    ),
    "transformers: seq2seq": Network(
        translator, translations, own_loss, logits, count=labels_that_count, key="logits"
    ),
    "transformers: detector": Network(
        boxes_of_pictures, pictures_with_boxes, own_loss,
        lambda net, batch: net(**batch).pred_boxes,
        collate=with_lists_of_labels, key="pred_boxes",
    ),
    "peft": Network(
        adapted, texts, own_loss, logits, key="logits",
        # The first token has nothing before it that could predict it.
        count=lambda batch: int((batch["labels"][:, 1:] != -100).sum()),
    ),
    "torch-geometric": Network(
        graph_network, graphs,
        lambda net, batch: F.cross_entropy(net(batch), batch.y),
        lambda net, batch: net(batch),
        loss=lambda net: "cross_entropy", target="y", collate=joined_graphs,
    ),
    "diffusers": Network(
        denoiser, noised,
        lambda net, batch: distance_of_noise(net(*batch[0]), batch[1]),
        lambda net, batch: net(*batch[0]).sample,
        loss=lambda net: distance_of_noise, key="sample",
    ),
    "gpytorch": Network(
        gaussian_process,
        lambda: dicts(x=normal(SAMPLES, 2), y=normal(SAMPLES, seed=1)),
        lambda net, batch: net(**batch)["loss"],
        lambda net, batch: net(**batch)["mean"], key="mean",
    ),
    "e3nn": Network(
        equivariant, lambda: pairs(normal(SAMPLES, 8), normal(SAMPLES, 3, seed=1)),
        plain(F.mse_loss), of_first, loss=lambda net: "mse",
    ),
    "monai": Network(
        segmenter,
        lambda: pairs(normal(SAMPLES, 1, 8, 8), integers(2, SAMPLES, 1, 8, 8)),
        lambda net, batch: dice(net)(net(batch[0]), batch[1]), of_first, loss=dice,
    ),
    "x-transformers": Network(
        decoder, tokens, plain(next_tokens), of_first, loss=lambda net: next_tokens
    ),
    "x-transformers: its own loss": Network(
        autoregressive, lambda: pairs(integers(50, SAMPLES, 9), integers(50, SAMPLES)),
        of_first, None, loss=lambda net: as_returned,
    ),
    "timm": Network(
        image_classifier, lambda: pairs(normal(SAMPLES, 3, 16, 16), integers(3, SAMPLES)),
        plain(F.cross_entropy), of_first, loss=lambda net: "cross_entropy",
    ),
    "torchvision: detector": Network(
        detector, photographs, losses_of_detector, detections, kind=Detection, collate=in_lists
    ),
    "a stand-in for torchvision's detectors": Network(
        StandIn, photographs, losses_of_detector, detections, kind=Detection, collate=in_lists
    ),
}  # fmt: skip
