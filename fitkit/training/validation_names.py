"""The names of a validation's values in an epoch's logs."""

from __future__ import annotations

from fitkit.schedulers import VALIDATION_NAME
from fitkit.typing import Values


def named_values(found: Values, set_name: str) -> Values:
    """Return a validation's values by their names in an epoch's logs."""
    named = {validation_name(name, set_name): value for name, value in found.items()}
    # If a step logs both "x" and "val_x", use "val_x".
    own = {name: value for name, value in found.items() if VALIDATION_NAME.match(name)}
    named.update({validation_name(name, set_name): value for name, value in own.items()})
    return named


def validation_name(name: str, set_name: str = "") -> str:
    """Name a validation's value in an epoch's logs; names like `val_loss` or `valid/f1` stay.

    Args:
        name: the name that it has in the validation.
        set_name: the name of the set, if there are several: `val_day_loss`.
    """
    found = VALIDATION_NAME.match(name)
    if not set_name:
        return name if found else f"val_{name}"
    return f"val_{set_name}_{(found and name[found.end() :]) or name}"
