import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
from keras import layers

import fitkit

names = ("kernel_1", "bias_1", "kernel_2", "bias_2")
data = np.load("data.npz")


def dense(units, activation=None):
    return layers.Dense(
        units, activation=activation, kernel_regularizer=keras.regularizers.L2(0.01)
    )


net = keras.Sequential([keras.Input((8,)), dense(16, "relu"), dense(1)])
net.set_weights([data[name] for name in names])
model = fitkit.Model(net)
model.compile("sgd", "mse", learning_rate=0.05)
model.fit(data["x"], data["y"], batch_size=20, epochs=4, shuffle=False)
np.savez("weights.npz", **dict(zip(names, net.get_weights(), strict=True)))
