"""Go on with a training that was cut, as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.agents.arithmetic import (
    classes,
    mlp,
    near,
    read_json,
    read_weights,
    same_weights,
    train,
    write,
)

PROMPT = """
data.npz has x (96, 8), float32, and y (96,), class numbers from 0 to 2. The net is
Linear(8, 16), ReLU, Linear(16, 3), and gives logits. start.pt is the state dict of its torch
Sequential; begin with these weights. The training is 5 epochs by Adam (torch's defaults, but
a learning rate of 0.01) on the cross entropy, in batches of 16, in the order of the data.

The program has two parts. The first trains for 2 epochs and saves all that a continuation
needs to a file. The second stands for a later start on another machine: it makes a new net,
with other random weights, and a new optimizer, and knows nothing but the data and that file.
It trains the other 3 epochs. The result is that of 5 epochs at a stretch.

Write weights.pt, the state dict (torch.save) of the second part's net after the last epoch,
and result.json with "updates", how many updates of the weights there were in all 5 epochs.
"""
ASKED = "tensorflow/tensorflow#27049, keras-team/keras#13682"
WRONG = ('epochs=5, shuffle=False, resume_from="training.h5")', "epochs=3, shuffle=False)")


def give(folder: Path) -> None:
    x, y = classes(96)
    write(folder, mlp(), x=x, y=y)


def check(folder: Path) -> None:
    net = mlp()
    adam = torch.optim.Adam(net.parameters(), 0.01)
    train(net, *classes(96), batch=16, epochs=5, optimizer=adam)
    same_weights(read_weights(folder), net)
    near(read_json(folder, "result.json")["updates"], 30, "updates", 0)
