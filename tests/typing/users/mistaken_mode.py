# pyright: strict
"""A direction that there isn't."""

from fitkit.callbacks import EarlyStopping

stopping = EarlyStopping("val_accuracy", mode="maximum")  # error: reportArgumentType
