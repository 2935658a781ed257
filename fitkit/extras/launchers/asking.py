"""How ranks ask each other where they are, and what is said when none of them goes on.

A question has a number, and each rank that sees it in the store writes its answer there: a
`Standing`, made by `extras/whereabouts.py`. So nothing is written while all is well. Rank 0 asks
when its own calls haven't moved for a while, and prints the answers if no rank has moved. On one
machine it asks within seconds if it waits for others, to find ranks that wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from fitkit.printing import say
from fitkit.seams.launchers import ABOUT
from fitkit.seams.machines import Stillness

if TYPE_CHECKING:
    from fitkit.extras.whereabouts import Standing

ANSWER_S = 1.5
"""How long a rank may take to say where it is."""
LOOKS = 3
"""So often all ranks are seen waiting for each other before their call is ended."""
SOON_S = 4.0
"""After how many seconds without a batch a rank that waits asks whether all wait for each other."""
AGAIN_S = 1.0
"""How long after an answer ranks that do are asked again."""


class Report(NamedTuple):
    """What the ranks answered when none of them went on.

    Attributes:
        found: their answers, by rank. None for one that didn't answer.
        text: a line for each.
        never_ends: whether they wait for each other, and have been seen so for the last time.
    """

    found: dict[int, Standing | None]
    text: str
    never_ends: bool


class Asking:
    """Asks the other ranks of a call where they are, answers them, and prints what they say.

    Args:
        store: this call's own part of a store.
        rank, size: this process's rank and the number of ranks.
        thread: the id of the thread that makes the call.
        quiet_s: after how many seconds without a batch the places are printed; 0 for never.
        sees_waits: whether a thread that uses no core waits. One that lets a GPU compute doesn't.
        is_near: whether what one rank sends is with the others at once, as on one machine. Then
            ranks that wait for each other are found in seconds.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        thread: int,
        quiet_s: float,
        sees_waits: bool,
        is_near: bool = False,
    ) -> None:
        self.still: Stillness = Stillness(thread)
        self.standing: Standing | None = None  # where an exchange broke here
        self._store = store
        self._rank, self._size = rank, size
        self._quiet_s, self._sees_waits = quiet_s, sees_waits
        is_soon = sees_waits and is_near and rank == 0
        self._soon_s = min(quiet_s, SOON_S) if is_soon else quiet_s
        self._question = 0  # the next one's number
        self._waits_for: tuple[int, float] | None = (
            None  # a question of this rank's, and since when
        )
        self._begin()

    def _begin(self) -> None:
        """Nobody was still before now."""
        self._ask_after_s, self._print_after_s = self._soon_s, self._quiet_s
        self._looks = 0
        self._places: list[str] | None = None  # at the last look, of ranks that wait for each other

    # ------------------------------------------------------------------ questions and answers

    def answer(self) -> None:
        """Answer an open question."""
        if self._store.check([f"where/{self._question}"]):
            self._store.set(f"stands/{self._question}/{self._rank}", self._here().as_text())
            self._question += 1

    def _here(self) -> Standing:
        from fitkit.extras.whereabouts import standing

        return self.standing or standing(self.still)

    def ask(self) -> int:
        """Ask all ranks where they are; return the question's number."""
        number = self._question
        self._store.set(f"where/{number}", "")
        self.answer()
        return number

    def answers(self, number: int, ranks: Iterable[int]) -> dict[int, Standing | None]:
        """Return what some ranks have answered; None for one that hasn't."""
        from fitkit.extras.whereabouts import Standing

        found: dict[int, Standing | None] = {}
        for rank in ranks:
            key = f"stands/{number}/{rank}"
            is_there = self._store.check([key])
            found[rank] = Standing.from_text(self._store.get(key)) if is_there else None
        return found

    # ------------------------------------------------------------------ silence

    def look(self) -> Report | None:
        """Look whether this rank's calls go on; ask all ranks where they are if they don't.

        Returns:
            The answers, if they were printed, or show that the call never ends. Rank 1 does that
            only where rank 0 doesn't answer.
        """
        seconds = self.still.look()
        if not self._quiet_s or self._rank > 1:
            return None
        if seconds < self._soon_s * ABOUT:
            self._begin()
            self._waits_for = None
            return None
        now = time.monotonic()
        if self._waits_for is None:
            if seconds >= self._ask_after_s * (1 + self._rank / 2):
                if seconds < self._print_after_s * ABOUT and not self._here().waits:
                    self._ask_after_s = min(seconds * 2, self._print_after_s)
                else:
                    self._waits_for = self.ask(), now
            return None
        number, asked_at = self._waits_for
        if now - asked_at < ANSWER_S:
            return None
        self._waits_for = None
        if self._rank == 1 and self.answers(number, [0])[0] is not None:
            self._ask_after_s = seconds * 2
            return None
        return self._shown(self.answers(number, range(self._size)), seconds)

    def _shown(self, found: dict[int, Standing | None], seconds: float) -> Report | None:
        """Print the answers, unless a rank has moved, or they were printed before."""
        from fitkit.extras.whereabouts import NONE_GOES_ON, report, wait_for_each_other

        answers = [one for one in found.values() if one is not None]
        least_s = min((one.still_s for one in answers), default=seconds)
        is_due = least_s >= self._print_after_s * ABOUT
        if is_due:
            self._print_after_s *= 2
        own = found[self._rank]
        since_s = seconds if own is None else own.still_s  # when it was asked
        never = least_s >= self._soon_s * ABOUT and self._sees_waits and wait_for_each_other(found)
        places = [one.key for one in answers] if never else None
        self._looks = 0 if places is None else self._looks + 1 if places == self._places else 1
        self._places = places
        is_last = self._looks >= LOOKS
        self._ask_after_s = since_s + self._print_after_s - least_s
        if self._soon_s < self._quiet_s:
            again_s = AGAIN_S if never and not is_last else since_s
            self._ask_after_s = min(self._ask_after_s, since_s + again_s)
        if not (is_due or is_last) or any(one.kind == "reader" for one in answers):
            return None
        text = report(found, least_s)
        if never:
            text += f"\n{NONE_GOES_ON}"
        if is_due:
            say(text, stream="stderr")
        return Report(found, text, is_last)
