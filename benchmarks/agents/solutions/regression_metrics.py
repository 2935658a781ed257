import json

import numpy as np
from torch import nn

import fitkit

fitkit.set_seed(0)
data = np.load("data.npz")
model = fitkit.Model(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
model.compile("adam", "mse", metrics=["mae", "rmse", "r2"], learning_rate=0.01)
model.fit(data["x"], data["y"], epochs=40, verbose=0)
result = model.evaluate(data["test_x"], data["test_y"], batch_size=7, return_dict=True)
with open("result.json", "w") as file:
    json.dump({name: result[name] for name in ("mae", "rmse", "r2")}, file)
np.save("predictions.npy", model.predict(data["test_x"]))
