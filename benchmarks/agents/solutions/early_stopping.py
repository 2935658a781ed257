import json

import numpy as np
import torch
from torch import nn

import fitkit
from fitkit.callbacks import EarlyStopping

data = np.load("data.npz")
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
net.load_state_dict(torch.load("start.pt"))
model = fitkit.Model(net)
model.compile("sgd", "cross_entropy", learning_rate=0.5)
stopping = EarlyStopping("val_loss", patience=3, restore_best_weights=True)
history = model.fit(
    data["x"],
    data["y"],
    validation_data=(data["val_x"], data["val_y"]),
    batch_size=20,
    epochs=200,
    shuffle=False,
    callbacks=[stopping],
).history
with open("result.json", "w") as file:
    json.dump({"epochs": len(history["loss"]), "best": min(history["val_loss"])}, file)
torch.save(net.state_dict(), "weights.pt")
