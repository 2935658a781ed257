import numpy as np
import torch
from augment import noisy
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fitkit
from fitkit.callbacks import Callback

data = np.load("data.npz")
x, y = data["x"], data["y"]


class Noisy(Dataset):
    def __len__(self):
        return len(x)

    def __getitem__(self, index):
        return noisy(x[index]), y[index]


class Cut(Callback):
    """Saves everything after 9 updates, and ends the training."""

    def on_train_batch_end(self, batch, logs=None):
        if self.model.global_step == 9:
            self.model.save("cut.h5")
            self.model.stop_training = True


def made():
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model = fitkit.Model(net)
    model.compile("adam", "cross_entropy", learning_rate=0.01)
    return model


def loader():
    return DataLoader(Noisy(), 16, shuffle=True)


whole = made()
whole.load_weights("start.pt")
fitkit.set_seed(7)
whole.fit(loader(), epochs=4)
torch.save(whole.net.state_dict(), "whole.pt")

cut = made()
cut.load_weights("start.pt")
fitkit.set_seed(7)
cut.fit(loader(), epochs=4, callbacks=Cut())

resumed = made()
resumed.fit(loader(), epochs=4, resume_from="cut.h5")
torch.save(resumed.net.state_dict(), "resumed.pt")
