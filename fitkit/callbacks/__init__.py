"""Callbacks: the base class, and those that ship."""

from fitkit.callbacks.base import Callback
from fitkit.callbacks.collection import CallbackList
from fitkit.callbacks.history import History
from fitkit.callbacks.lambda_callback import LambdaCallback
from fitkit.callbacks.progress import ProgressBar

__all__ = ["Callback", "CallbackList", "History", "LambdaCallback", "ProgressBar"]
