import json

import numpy as np
import torch
from net import make

import fitkit
from fitkit.callbacks import SkipBadUpdates

data = np.load("data.npz")
x, y = data["x"], data["y"]
net = make()
net.load_state_dict(torch.load("start.pt"))
model = fitkit.Model(net)
model.compile("sgd", "cross_entropy", learning_rate=0.5)
skip = SkipBadUpdates(in_a_row=1)
try:
    model.fit(x, y, batch_size=10, epochs=20, shuffle=False, callbacks=skip)
except FloatingPointError as error:
    print(error)

# The weights are those before the bad update, so its batch can be computed again.
first = skip.skipped[0]
indices = np.array(first["indices"])
outputs = model.predict(x[indices])
bad = indices[(~np.isfinite(outputs).all(1)).nonzero()[0]]

hidden, layers = torch.from_numpy(x[indices]), []
for name, module in net.named_children():
    hidden = module(hidden)
    if not hidden.isfinite().all():
        layers.append(name)
result = {
    "epoch": first["epoch"],
    "batch": first["batch"],
    "samples": sorted(bad.tolist()),
    "layer": layers[0],
}
with open("result.json", "w") as file:
    json.dump(result, file)
