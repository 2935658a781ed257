"""What holds for every test."""

import pytest

from tests.limits import patience


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item, settings):
    """Limits of pytest-timeout are for what hangs: a busy machine has more time."""
    import pytest_timeout

    longer = settings._replace(timeout=settings.timeout and patience(settings.timeout))
    return pytest_timeout.pytest_timeout_set_timer(item, longer)
