"""Two processes train one net (DDP), and learn what one process learns.

    pip install scikit-learn
    python examples/two_processes.py                        # on the CPU, some 15 seconds
    python examples/two_processes.py --accelerator gpu      # on two GPUs
    python examples/two_processes.py --strategy ddp         # starts this script once more instead
    torchrun --nproc-per-node=2 examples/two_processes.py   # or let torchrun start it

Shows that the hardware is one line of `compile`. Each process computes its half of every batch, and
the gradients are averaged; what is learned is what one process learns from batches of 64, from
the same samples in the same order, and `evaluate` counts each sample once. Expect the losses of two
processes to be those of `--devices 1`, up to the rounding of the last digits.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import fitkit

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--devices", type=int, default=2, help="how many processes")
parser.add_argument("--accelerator", default="cpu", help="cpu, gpu or auto")
parser.add_argument("--strategy", default="auto", choices=["auto", "ddp", "ddp_spawn"])
hardware = vars(parser.parse_args())

fitkit.set_seed(0)  # every process has the same data and the same first weights
images, digits = load_digits(return_X_y=True)
x, x_test, y, y_test = train_test_split(images / 16, digits, test_size=0.2, random_state=0)

model = fitkit.Model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
model.compile("adam", "cross_entropy", metrics=["accuracy"])
model.compile(**hardware)

history = model.fit(x, y, batch_size=64 // hardware["devices"], epochs=5, verbose=0)
result = model.evaluate(x_test, y_test, return_dict=True)
weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])

if model.is_global_zero:  # under torchrun and strategy="ddp" every process comes here
    print("processes       ", model.world_size)
    print("batch           ", model.effective_batch_size)
    print("training losses ", *(f"{loss:.5f}" for loss in history.history["loss"]))
    print(f"test             loss {result['loss']:.5f}, accuracy {result['accuracy']:.2%}")
    print(f"norm of weights  {weights.norm():.5f}")
