import json

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fitkit

data = np.load("data.npz")


class Signals(Dataset):
    def __init__(self, prefix):
        self.signals = torch.from_numpy(data[prefix + "signal"])
        self.kinds = torch.from_numpy(data[prefix + "kind"])

    def __len__(self):
        return len(self.kinds)

    def __getitem__(self, index):
        return {"signal": self.signals[index], "kind": self.kinds[index]}


net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
net.load_state_dict(torch.load("start.pt"))
model = fitkit.Model(net)
model.compile("sgd", "cross_entropy", metrics=["accuracy"], learning_rate=0.1, target="kind")
model.fit(DataLoader(Signals(""), 16), epochs=3)
result = model.evaluate(DataLoader(Signals("test_"), 16), return_dict=True)
with open("result.json", "w") as file:
    json.dump({"loss": result["loss"], "accuracy": result["accuracy"]}, file)
torch.save(net.state_dict(), "weights.pt")
