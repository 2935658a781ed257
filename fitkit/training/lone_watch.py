"""Says where a call in one process is that doesn't go on; several ranks ask each other instead."""

from __future__ import annotations

import threading

from fitkit.printing import say
from fitkit.pulse import ABOUT, Stillness, lone_threads, silence_s

LOOKS = 4
"""So often within the seconds of silence the calls are looked at."""

_watching: tuple[threading.Thread, float] | None = None
"""What looks at the running calls of this process, and its seconds of silence."""


def watch_calls() -> None:
    """Have the running calls watched, which `pulse.running` notes.

    One thread watches all calls, except those in which other ranks take part: these ask each other
    (`extras/launchers/asking.py`). It ends by itself at the next look after the last one's
    end.

    Raises:
        ConfigurationError: `FITKIT_SILENCE` isn't a number of seconds.
    """
    global _watching
    quiet_s = silence_s()
    if _watching is not None and _watching[1] == quiet_s and _watching[0].is_alive():
        return
    _watching = None  # another one ends
    if quiet_s:
        thread = threading.Thread(
            target=_watch, args=(quiet_s,), name="fitkit-silence", daemon=True
        )
        _watching = thread, quiet_s
        thread.start()


def _watch(quiet_s: float) -> None:
    global _watching
    own, pause = (threading.current_thread(), quiet_s), threading.Event()
    looks: dict[int, tuple[Stillness, float]] = {}
    while _watching == own:
        running = lone_threads()
        if not running:
            _watching = None  # from here on a new call has its own
            if not (running := lone_threads()):
                return
            _watching = own  # one began meanwhile
        looks = {thread: looks.get(thread) or (Stillness(thread), quiet_s) for thread in running}
        pause.wait(quiet_s / LOOKS)
        for thread in lone_threads() & looks.keys():
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
