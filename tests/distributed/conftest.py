"""Worker processes are started once for all modules here, and have gone at the end."""

import os
import subprocess
import threading

import pytest

from fitkit.extras.launchers.workers import end_workers


@pytest.fixture(autouse=True, scope="session")
def workers_end_with_the_tests():
    """A worker costs some four seconds of imports; a test that breaks its own calls end_workers."""
    yield
    end_workers()
    children = subprocess.run(
        ["ps", "-ww", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True
    ).stdout
    assert "launchers.worker" not in children
    # A group that was left may wait for a broken exchange up to its limit (RankGroup.leave). What
    # watches calls of this process alone ends some seconds after the last one.
    others = ("fitkit-left-group", "fitkit-silence")
    threads = [
        thread
        for thread in threading.enumerate()
        if "fitkit" in thread.name and thread.name not in others
    ]
    for thread in threads:  # one that waited for ranks that never came ends with its own wait
        thread.join(20)
    assert [thread.name for thread in threads if thread.is_alive()] == []
