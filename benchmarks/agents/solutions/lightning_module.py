import json

import numpy as np
import torch
from classifier import Classifier

import fitkit

data = np.load("data.npz")
module = Classifier()
module.load_state_dict(torch.load("start.pt"))
model = fitkit.Model(module)
model.compile()
history = model.fit(
    data["x"],
    data["y"],
    validation_data=(data["val_x"], data["val_y"]),
    batch_size=20,
    validation_batch_size=20,
    epochs=4,
    shuffle=False,
).history
with open("history.json", "w") as file:
    json.dump({"val_accuracy": history["val_accuracy"]}, file)
torch.save(module.state_dict(), "weights.pt")
