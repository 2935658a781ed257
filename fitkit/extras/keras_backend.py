"""Choose Keras's torch backend where Keras isn't imported yet. Import this before Keras.

In the script's process, Keras is there before any of its networks. A worker may have begun before
the script chose the backend; whatever reaches it runs on torch.
"""

import os
import sys

from fitkit.errors import ConfigurationError

if "keras" not in sys.modules:
    os.environ["KERAS_BACKEND"] = "torch"


def refusal(message: str) -> ConfigurationError:
    """Return the error for what a Keras network can't be trained with."""
    return ConfigurationError(message, code="FK081")
