"""What a user writes about the verbs; only read by pyright, as compiling.py is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import assert_type

import fitkit
from fitkit.callbacks import EarlyStopping, ModelCheckpoint
from fitkit.typing import NumpyOutput, TensorOutput

model = fitkit.Model(torch.nn.Linear(4, 3))
x, y = np.ones((8, 4)), torch.ones(8, dtype=torch.int64)
data = TensorDataset(torch.ones(8, 4), y)


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield torch.ones(8, 4), torch.ones(8)


# data
history = model.fit(x, y, epochs=2, validation_split=0.25, verbose=0)
assert_type(history, fitkit.History)
model.fit((x, x), [y, y])
model.fit({"a": x}, {"b": y}, sample_weight=np.ones(8), class_weight={0: 1, 1: 2.5})
model.fit(data, batch_size=4, validation_data=DataLoader(data), verbose="auto")
model.fit(batches(), validation_data=(x, y), shuffle="batch", resume_from="last")
model.fit(x, y, callbacks=EarlyStopping())
model.fit(x, y, callbacks=[EarlyStopping(), [ModelCheckpoint("best.h5")]])
model.fit(3)  # error: reportArgumentType
model.fit(None)  # error: reportArgumentType
model.fit(batches)  # error: reportArgumentType
model.fit(x, y, callbacks=EarlyStopping)  # error: reportArgumentType
model.fit(x, y, 32)  # error: reportCallIssue
model.fit(x, y, epochs="3")  # error: reportArgumentType
model.fit(x, y, verbose="yes")  # error: reportArgumentType
model.fit(x, y, shuffle="batches")  # error: reportArgumentType
model.fit(x, y, validation_data=0.2)  # error: reportArgumentType
model.fit(x, y, workers=4)  # error: reportCallIssue

# evaluate gives a dict where one is asked for, else the loss or a list
assert_type(model.evaluate(x, y, return_dict=True), dict[str, Any])
assert_type(model.test_on_batch(x, y, return_dict=True), dict[str, Any])
assert_type(model.train_on_batch(x, y, return_dict=True), dict[str, Any])
loss, accuracy = model.evaluate(x, y)
is_small = model.evaluate(x, y, return_dict=True) < 0.5  # error: reportOperatorIssue

# predict gives NumPy arrays, or tensors
assert_type(model.predict(x), NumpyOutput)
assert_type(model.predict(x, as_numpy=False), TensorOutput)
assert_type(model.predict_on_batch(x), NumpyOutput)
assert_type(model.predict(x, as_numpy=False).softmax(1), torch.Tensor)
as_array: np.ndarray = model.predict(x)
as_dict: dict[str, np.ndarray] = model.predict(x)
first, second = model.predict(x, as_numpy=False)
logits = model.predict(x, as_numpy=False)["logits"]
model.predict(x, y)  # error: reportCallIssue
model.predict(x, out="scores.npy")
model.predict(x, out=lambda outputs, indices: None)
lengths = [len(outputs) for outputs in model.predict_batches(x)]

# files
model.save(Path("model.h5"))
model.export("model.onnx", "onnx", x)
assert_type(fitkit.load_model("model.h5", torch.nn.Linear(4, 3)), fitkit.Model)
model.export("model.onnx", "tflite")  # error: reportArgumentType
model.save(3)  # error: reportArgumentType
