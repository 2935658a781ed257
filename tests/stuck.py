"""Processes that are forked and never begin: they stop in the fork, before all that they should do.

Python 3.11.9 does so if another thread holds its lock of thread states at that moment.
"""

import os
import time

after_forks = []
"""What the next processes that are forked here do before they begin, each in turn."""


def _in_child():
    if after_forks:
        after_forks[0]()


def _in_parent():
    del after_forks[:1]


os.register_at_fork(after_in_child=_in_child, after_in_parent=_in_parent)


def never_begins():
    time.sleep(600)
