"""A net inside scikit-learn: scaled in a pipeline, tuned by a grid search, cross-validated.

    python examples/sklearn_pipeline.py             # about 20 seconds

The 569 tumours (30 measurements each, benign or malignant) come with scikit-learn. The grid is over
the net's own width and the learning rate. The exit status is 1 where the net that was found tells
fewer than 94 of 100 held-out tumours, or doesn't come back whole from pickling.
"""

from __future__ import annotations

import pickle
import sys

import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from fitkit.sklearn import Classifier


def perceptron(n_features: int, n_outputs: int, hidden: int = 16) -> nn.Module:
    """Return a net with one hidden layer; scikit-learn's search sets its width."""
    return nn.Sequential(
        nn.Linear(n_features, hidden),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(hidden, n_outputs),
    )


def main() -> int:
    data = load_breast_cancer()
    kinds = data.target_names[data.target]  # labels may be strings
    x, x_test, y, y_test = train_test_split(data.data, kinds, random_state=0, stratify=kinds)
    estimator = Classifier(perceptron, epochs=15, class_weight="balanced", random_state=0)
    chain = make_pipeline(StandardScaler(), estimator)
    grid = {"classifier__net__hidden": [4, 32], "classifier__learning_rate": [0.003, 0.03]}
    search = GridSearchCV(chain, grid, cv=3).fit(x, y)
    for setting, score in zip(
        search.cv_results_["params"], search.cv_results_["mean_test_score"], strict=True
    ):
        names = ", ".join(f"{name.split('__')[-1]}={value}" for name, value in setting.items())
        print(f"{names}: {100 * score:.1f}%")
    accuracy = search.score(x_test, y_test)
    print(f"accuracy on held-out tumours: {100 * accuracy:.1f}%")
    again = pickle.loads(pickle.dumps(search.best_estimator_))
    same = np.array_equal(again.predict_proba(x_test), search.predict_proba(x_test))
    print(f"the same after pickling: {'yes' if same else 'no'}")
    return int(accuracy < 0.94 or not same)


if __name__ == "__main__":
    sys.exit(main())
