import json

import numpy as np
import torchmetrics
from torch import nn

import fitkit

fitkit.set_seed(0)
data = np.load("data.npz")
model = fitkit.Model(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)))
f1 = torchmetrics.classification.MultilabelF1Score(num_labels=4, average="macro")
model.compile("adam", "bce_with_logits", metrics={"f1": f1}, learning_rate=0.01)
model.fit(data["x"], data["y"].astype("float32"), epochs=20, verbose=0)
result = model.evaluate(data["test_x"], data["test_y"], batch_size=16, return_dict=True)
with open("result.json", "w") as file:
    json.dump({"f1_macro": result["f1"]}, file)
np.save("probabilities.npy", 1 / (1 + np.exp(-model.predict(data["test_x"]))))
