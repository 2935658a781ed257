"""How long something lasts: a call, a fit, an epoch, a pass."""

from __future__ import annotations

import contextlib


class Scope(contextlib.ExitStack):
    """Ends what was begun in it, in the opposite order, after an error as without one.

    What is begun is pushed where it begins (`enter_context`, `callback`), and every end is a pop.
    So an end that is forgotten shows in everyday use, and not only in the one call that fails.

    Example:
        >>> from fitkit.scopes import Scope
        >>> with Scope() as scope:
        ...     _ = scope.callback(print, "ends")
        ...     print("begins")
        begins
        ends
    """
