"""What a user writes about `compile`; each line with a mistake says which rule of pyright sees it.

Only read by pyright, never run: tests/typing/test_pyright.py.
"""

import functools

import torch
import torchmetrics

import fitkit
from fitkit.strategies import DDPStrategy, register
from fitkit.typing import MetricName, Name, OptimizerName

model = fitkit.Model(torch.nn.Linear(4, 3))

# optimizers
model.compile("adam")
model.compile("AdamW", learning_rate=3e-4)
model.compile(torch.optim.SGD)
model.compile(functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9))
model.compile(lambda parameters: torch.optim.Adam(parameters, lr=0.1))
model.compile(torch.optim.Adam(model.parameters()))
model.compile("adma")  # error: reportArgumentType
model.compile(torch.nn.Linear)  # error: reportArgumentType
model.compile(3)  # error: reportArgumentType
model.compile("adam", lr=0.1)  # error: reportCallIssue
model.compile("adam", learning_rate="0.1")  # error: reportArgumentType

# losses
model.compile(loss="cross_entropy")
model.compile(loss=torch.nn.MSELoss())
model.compile(loss=lambda prediction, target: (prediction - target).abs().mean())
model.compile(loss=["mse", None, torch.nn.functional.l1_loss], loss_weights=[1, 0.5])
model.compile(loss={"a": "mse", "b": torch.nn.MSELoss()}, loss_weights={"a": 2})
model.compile(
    loss={"a": "mse", "b": {"c": "mse", "d": ["mae", torch.nn.MSELoss()]}},
    loss_weights={"a": 2, "b": {"d": [1, 0.5]}},
    metrics={"a": "mae", "b": {"d": ["mae", "mse"]}},
)
model.compile(loss="cross_entopy")  # error: reportArgumentType
model.compile(loss={"a": "mze"})  # error: reportArgumentType

# metrics
model.compile(metrics="accuracy")
model.compile(metrics=["accuracy", torchmetrics.MeanSquaredError(), lambda p, t: p.mean()])
model.compile(metrics={"a": ["mae", "mse"], "b": "f1", "c": None})
model.compile(metrics=[["mae"], ["accuracy", "auc"]], weighted_metrics=["mae"])
model.compile(metrics=["acuracy"])  # error: reportArgumentType
model.compile(weighted_metrics=["accuracy", "maee"])  # error: reportArgumentType

# schedulers
model.compile(lr_scheduler="cosine")
model.compile(lr_scheduler="one_cycle")
model.compile(lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR)
model.compile(lr_scheduler={"scheduler": "ReduceLROnPlateau", "monitor": "val_loss"})
model.compile(lr_scheduler="cosinus")  # error: reportArgumentType
model.compile(lr_scheduler={"scheduler": "step", "interval": ""})  # error: reportArgumentType

# hardware
model.compile(devices=2, accelerator="cpu", strategy="ddp_spawn", precision="bf16-mixed")
model.compile(devices=[1, 3], accelerator="gpu", strategy=DDPStrategy(), precision=16)
model.compile(devices="auto", precision=fitkit.precisions.Float8Mixed())
model.compile(precision="bf17")  # error: reportArgumentType
model.compile(precision=8)  # error: reportArgumentType
model.compile(accelerator="gpus")  # error: reportArgumentType
model.compile(strategy="dpp")  # error: reportArgumentType
model.compile(strategy=DDPStrategy)  # error: reportArgumentType
model.compile(devices=0.5)  # error: reportArgumentType
model.compile(gradient_clip_algorithm="max")  # error: reportArgumentType
model.compile(matmul_precision="fast")  # error: reportArgumentType


# names that are only known when the program runs
@register("mine")
class Mine(DDPStrategy):
    pass


model.compile(strategy="mine")  # error: reportArgumentType
model.compile(strategy=Name("mine"))


def trained(optimizer: str, metrics: list[str]) -> None:
    model.compile(optimizer)  # error: reportArgumentType
    model.compile(Name(optimizer), metrics=[Name(metric) for metric in metrics])


def known(optimizer: OptimizerName, metrics: list[MetricName]) -> None:
    model.compile(optimizer, metrics=metrics)
