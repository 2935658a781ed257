# pyright: strict
"""Predictions as arrays and tensors, at once and by batch."""

import numpy as np
import torch

import fitkit

model = fitkit.Model(torch.nn.Linear(4, 3))
x = np.ones((64, 4), "float32")
classes = model.predict(x).argmax(1)
shares = model.predict(x, as_numpy=False).softmax(1)
print(classes.shape, float(shares.max()))
model.predict(x, out="scores.npy")
for outputs in model.predict_batches(x):
    print(len(outputs))
single = model.predict_on_batch(x[:1])
