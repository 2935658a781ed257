# pyright: strict
"""scikit-learn's estimators, and a search for the rate."""

import numpy as np
import torch

import fitkit
from fitkit.sklearn import Classifier

x, y = np.ones((64, 4), "float32"), np.arange(64) % 3
classifier = Classifier(
    torch.nn.Linear(4, 3), epochs=3, class_weight="balanced", fit_options={"shuffle": False}
)
classifier.fit(x, y)
print(classifier.history_["loss"][-1])
model = fitkit.Model(torch.nn.Linear(4, 3))
model.compile("adam", "cross_entropy")
found = fitkit.tune.learning_rate(model, x, y)
print(found)
