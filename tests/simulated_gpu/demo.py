"""The end of `make demo`: two epochs on two simulated GPUs, or how to see them.

Nothing is compiled for it, since that takes a minute or more.
"""

import sys

import run

SECONDS = 30
HOW = "make test-simulated-gpu ARGS=short compiles them (a minute or two) and runs GPU tests"
PROGRAM = """
import sys
import torch, fitkit
from sklearn.datasets import load_digits

x, y = load_digits(return_X_y=True)
losses = []
for kind in ("cpu", "gpu"):
    fitkit.set_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model = fitkit.Model(net)
    model.compile("adam", "cross_entropy", accelerator=kind, devices=2)
    history = model.fit(x / 16, y, batch_size=16, epochs=2, verbose=0)
    losses.append(history["loss"][-1])
cpu, gpu = losses
print(f"two epochs on two of them: loss {gpu:.6f}; on two CPU processes: {cpu:.6f}")
sys.exit(abs(cpu - gpu) > 1e-5)
"""


def main():
    """Say it in one line; the status is 1 where the numbers aren't the CPU's."""
    reason = run.impossible()
    if reason is not None:
        print(f"simulated GPUs   not here: {reason}")
        return 0
    if not run.place("cuda").exists():
        print(f"simulated GPUs   {HOW}")
        return 0
    print("simulated GPUs   ", end="", flush=True)
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    status = run.bounded(command, SECONDS, env=run.environment("cuda", 2))
    if status is None:
        print(f"not done after {SECONDS} s on this busy machine")
    return int(status not in (0, None))


if __name__ == "__main__":
    sys.exit(main())
