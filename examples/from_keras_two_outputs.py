"""From Keras: a functional model with two outputs. A car's thirst, and where it was built.

    pip install mlxtend
    python examples/from_keras_two_outputs.py   # some 8 seconds

Keras's lines stand in comments where they differ: the net is a `torch.nn.Module`, the optimizer
PyTorch's, files end in .h5. All else is as it was: dicts of losses, metrics, loss weights and
sample weights, three callbacks, `history`, `evaluate`, and `predict`, which gives a dict. The 392
cars are the Auto MPG table of Keras's tutorial on regression; 245 of them are from the USA, so the
others weigh more. Expect an error of some 2 miles a gallon (guessing the mean: 7), and 7 of 10
origins right.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from mlxtend.data import autompg_data
from torch import nn

import fitkit
from fitkit.callbacks import EarlyStopping, ModelCheckpoint, ReduceLROnPlateau

fitkit.set_seed(0)  # keras.utils.set_random_seed(0)
table, mpg = autompg_data()
table, mpg = table[(order := np.random.permutation(len(table)))], mpg[order]
x, origin = table[:, :6].astype("float32"), table[:, 6].astype(int) - 1  # USA, Europe, Japan
x = (x - x[:312].mean(0)) / x[:312].std(0)
y = {"mpg": mpg, "origin": origin}
y_train, y_test = ({name: part[rows] for name, part in y.items()}
                   for rows in (slice(312), slice(312, None)))  # fmt: skip
frequent = np.bincount(y_train["origin"]) / 312
weights = {"mpg": np.ones(312), "origin": 1 / (3 * frequent[y_train["origin"]])}


class Cars(nn.Module):  # car = keras.Input(shape=(6,))
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(  # layers.Dense(64, activation="relu"), twice
            nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()
        )
        self.mpg = nn.Linear(64, 1)  # layers.Dense(1, name="mpg")
        self.origin = nn.Linear(64, 3)  # layers.Dense(3, activation="softmax", name="origin")

    def forward(self, car: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.body(car)  # (B, 64)
        return {"mpg": self.mpg(hidden), "origin": self.origin(hidden).softmax(-1)}


model = fitkit.Model(Cars())  # keras.Model(car, {"mpg": mpg, "origin": origin})
model.compile(
    optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),  # keras.optimizers.Adam(3e-3)
    loss={"mpg": "mse", "origin": "sparse_categorical_crossentropy"},
    loss_weights={"mpg": 0.1, "origin": 1.0},
    metrics={"mpg": ["mae"], "origin": ["accuracy"]},
    devices=1,
)
with tempfile.TemporaryDirectory() as folder:
    best = Path(folder) / "best.h5"  # "best.keras"
    stopping = EarlyStopping(monitor="val_loss", patience=12, restore_best_weights=True)
    history = model.fit(
        x[:312],
        y_train,
        sample_weight=weights,
        validation_split=0.2,
        epochs=100,
        verbose=0,
        callbacks=[
            stopping,
            ModelCheckpoint(best, monitor="val_origin_accuracy", mode="max", save_best_only=True),
            ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=4, min_lr=1e-5),
        ],
    )
    saved = fitkit.load_model(best, Cars())  # keras.models.load_model(best)

result = model.evaluate(x[312:], y_test, return_dict=True, verbose=0)
answers = model.predict(x[312:], verbose=0)  # a dict of arrays
of_best = saved.evaluate(x[312:], y_test, return_dict=True, verbose=0)
print("history          ", *history.history)
print(f"epochs            {len(history.epoch)}, the best was {stopping.best_epoch + 1}")
print("learning rates   ", *sorted(set(history.history["learning_rate"]), reverse=True))
print("predictions      ", {name: array.shape for name, array in answers.items()})
print(f"miles a gallon    wrong by {result['mpg_mae']:.2f} on average")
print(f"guessing          wrong by {np.abs(y_test['mpg'] - y_train['mpg'].mean()).mean():.2f}")
print(f"origin            {result['origin_accuracy']:.1%} right")
print(f"the saved model   {of_best['origin_accuracy']:.1%} right")
