# pyright: strict
"""What fit returns is numbers by name."""

import torch
from typing_extensions import assert_type

import fitkit

model = fitkit.Model(torch.nn.Linear(4, 1))
model.compile("adam", "mse", metrics=["mae"])
history = model.fit(torch.rand(64, 4), torch.rand(64, 1), epochs=3, validation_split=0.25)
assert_type(history, fitkit.History)
assert_type(history.history, dict[str, list[float]])
best = min(history.history["val_loss"])
first, *_, last = history["loss"]
print(f"{best:.3f} {last / first:.1%}", history.epoch[-1] + 1)
for name, values in history.history.items():
    print(name.upper(), [round(value, 3) for value in values])
