import numpy as np
import torch
from torch import nn

import fitkit
from fitkit.callbacks import ModelCheckpoint

data = np.load("data.npz")
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
net.load_state_dict(torch.load("start.pt"))
model = fitkit.Model(net)
model.compile("sgd", "cross_entropy", learning_rate=0.1)
saves = ModelCheckpoint("step-{step}.pt", save_weights_only=True, every_n_train_steps=10)
model.fit(data["x"], data["y"], batch_size=20, epochs=5, shuffle=False, callbacks=[saves])
