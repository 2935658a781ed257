"""How long something lasts: a call, a fit, an epoch, a pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


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


@contextlib.contextmanager
def undone_on_error() -> Iterator[Scope]:
    """Yield a scope, whose callbacks are called after an error only.

    Each undoes what comes after it, so that after the last one all is as it was.
    """
    with Scope() as undo:
        yield undo
        undo.pop_all()
