"""Says where a call in one process is that doesn't go on; several ranks ask each other instead."""

from __future__ import annotations

import threading

from fitkit.printing import say
from fitkit.pulse import ABOUT, Stillness, silence_s, threads

LOOKS = 4
"""So often within the seconds of silence the calls are looked at."""

_thread: threading.Thread | None = None
"""What looks at the running calls of this process."""


def watch_calls() -> None:
    """Have the running calls watched, which `pulse.running` notes.

    One thread watches all calls. It ends by itself at its next look after the last one's end.

    Raises:
        ConfigurationError: `FITKIT_SILENCE` isn't a number of seconds.
    """
    global _thread
    quiet_s = silence_s()
    if quiet_s and (_thread is None or not _thread.is_alive()):
        _thread = threading.Thread(
            target=_watch, args=(quiet_s,), name="fitkit-silence", daemon=True
        )
        _thread.start()


def _watch(quiet_s: float) -> None:
    global _thread
    own, wait = threading.current_thread(), threading.Event()
    looks: dict[int, tuple[Stillness, float]] = {}
    while True:
        running = threads()
        if not running and _thread is own:
            _thread = None  # from here on a new call has its own
            running = threads()
        if not running:
            return
        looks = {thread: looks.get(thread) or (Stillness(thread), quiet_s) for thread in running}
        wait.wait(quiet_s / LOOKS)
        for thread in threads() & looks.keys():
            still, due_s = looks[thread]
            seconds = still.look()
            if seconds < quiet_s * ABOUT:
                looks[thread] = still, quiet_s
            elif seconds >= due_s * ABOUT:
                looks[thread] = still, due_s * 2
                _print(still)


def _print(still: Stillness) -> None:
    from fitkit.extras.whereabouts import report, standing

    found = standing(still)
    if found.kind != "reader":
        say(report({0: found}, found.still_s), stream="stderr")
