"""From Accelerate: gradient accumulation, bf16, a schedule, saved in the middle; two processes.

    pip install scikit-learn
    python examples/from_accelerate_script.py   # accelerate launch --num_processes 2 …; some 10 s
    torchrun --nproc-per-node=2 examples/from_accelerate_script.py      # or so

The loop of an Accelerate script is `fit`, its `Accelerator(…)` a call of `compile`; the original
stands beside it, below. The training is saved after 30 batches, in the middle of its first epoch,
and goes on from the file in a second model. Expect the same weights, bit for bit.

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, cpu=True)
    net, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(…)
    for epoch in range(3):
        net.train()
        for step, (x, y) in enumerate(train_loader):
            with accelerator.accumulate(net):
                loss = criterion(net(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if step == 29:
                accelerator.save_state("step_30")
        net.eval()
        for x, y in eval_loader:
            with torch.no_grad():
                guesses = net(x).argmax(-1)
            accuracy.add_batch(*accelerator.gather_for_metrics((guesses, y)))
        accelerator.print(f"epoch {epoch}: {accuracy.compute()}")
"""

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit.callbacks import ModelCheckpoint

WARM, UPDATES = 10, 69  # of three epochs: 45 batches on each of two processes, two an update


def rate(update: int) -> float:
    """Return a linear warm-up, then down to 0, as transformers' get_linear_schedule_with_warmup."""
    return min((update + 1) / WARM, (UPDATES - update) / (UPDATES - WARM))


def made() -> fitkit.Model:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = LambdaLR(optimizer, rate)
    model = fitkit.Model(net)
    model.compile(  # Accelerator(…), accelerator.prepare(…)
        optimizer,
        nn.CrossEntropyLoss(),
        metrics=["accuracy"],  # gather_for_metrics
        lr_scheduler={"scheduler": scheduler, "interval": "step"},  # scheduler.step()
        precision="bf16-mixed",  # mixed_precision="bf16"
        accumulate_grad_batches=2,  # gradient_accumulation_steps=2, accelerator.accumulate(net)
        gradient_clip_val=1.0,  # accelerator.clip_grad_norm_(net.parameters(), 1.0)
        accelerator="cpu",  # cpu=True
        devices=2,  # accelerate launch --num_processes 2
    )
    return model


fitkit.set_seed(0)  # accelerate.utils.set_seed(0)
images, digits = load_digits(return_X_y=True)
parts = train_test_split(images / 16, digits, test_size=0.2, random_state=0)
x, x_test = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
y, y_test = (torch.tensor(part) for part in parts[2:])
train_loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)  # on each process
eval_loader = DataLoader(TensorDataset(x_test, y_test), batch_size=32)

whole, resumed = made(), made()
with tempfile.TemporaryDirectory() as folder:
    saving = ModelCheckpoint(f"{folder}/epoch_{{epoch}}_batch_{{batch}}.h5", save_freq=30)
    history = whole.fit(
        train_loader, validation_data=eval_loader, epochs=3, verbose=0, callbacks=saving
    )
    file = Path(folder) / "epoch_1_batch_30.h5"  # accelerator.save_state("step_30")
    resumed.fit(  # accelerator.load_state(…), accelerator.skip_first_batches(…)
        train_loader, validation_data=eval_loader, epochs=3, verbose=0, resume_from=file
    )
difference = max(
    float((one - other).detach().abs().max())
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True)
)

if whole.is_global_zero:  # accelerator.is_main_process
    print("processes        ", whole.world_size)
    print("updates          ", whole.global_step)
    print("training losses  ", *(f"{loss:.5f}" for loss in history.history["loss"]))
    print("accuracy         ", *(f"{share:.2%}" for share in history.history["val_accuracy"]))
    print("resumed from     ", file.name)
    print(f"difference        {difference:g} of any weight")
