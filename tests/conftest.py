"""What holds for every test."""

import gc
import signal

import pytest

from tests.limits import patience

# A background job of a script has it ignored, and so would have all processes that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item, settings):
    """Limits of pytest-timeout are for what hangs: a busy machine has more time."""
    import pytest_timeout

    longer = settings._replace(timeout=settings.timeout and patience(settings.timeout))
    return pytest_timeout.pytest_timeout_set_timer(item, longer)


def leave_what_there_is():
    """The garbage collector leaves alone what there is: a million objects of a dozen libraries.

    Tests that collect garbage, fitkit that does, and ranks that are forked looked through all of
    them each time, for a second.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_finish(session):
    leave_what_there_is()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """After each file: it may have imported some more."""
    if nextitem is not None and nextitem.path != item.path:
        leave_what_there_is()
