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


def pytest_collection_finish(session):
    """The garbage collector leaves alone what all tests share: their modules and a dozen libraries.

    Tests that collect garbage, and torch's compiler, looked through all of it each time.
    """
    gc.collect()
    gc.freeze()
