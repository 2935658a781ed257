import numpy as np
from torch import nn

import fitkit

fitkit.set_seed(0)
data = np.load("data.npz")
x, y = data["x"], data["y"]
model = fitkit.Model(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)))
model.compile("adam", "bce_with_logits", metrics=["recall", "specificity"], learning_rate=0.01)
model.fit(
    x,
    y.astype("float32"),
    epochs=5,
    class_weight={0: 1.0, 1: float((y == 0).sum() / (y == 1).sum())},
    verbose=0,
)
logits = model.predict(data["test_x"])[:, 0]
np.save("predictions.npy", (logits > 0).astype("int64"))
