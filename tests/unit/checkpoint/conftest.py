import json

import numpy as np
import pytest

from fitkit.checkpoint import save_weights
from fitkit.checkpoint.header import HEADER_SIZE, Span, seal
from tests.nets import normed


@pytest.fixture
def module():
    return normed()


@pytest.fixture
def weights(tmp_path, module):
    """A file with the weights of another module like `module`."""
    path = tmp_path / "weights.h5"
    save_weights(path, normed().state_dict())
    return path


@pytest.fixture
def path(tmp_path):
    """Where a file may come, alone in its folder."""
    folder = tmp_path / "folder"
    folder.mkdir()
    return folder / "file.h5"


@pytest.fixture
def old(path):
    """The content of a file that is already there."""
    path.write_bytes(b"old")
    return b"old"


@pytest.fixture
def craft(tmp_path):
    """Makes a file by hand, with a right digest whatever is in it.

    The document describes one float32 array of shape (2, 3) where nothing else is given, and has
    arrays begin after the header where it says nothing else.
    """

    def make(numbers=b"", arrays=None, content=None, document=None, place=None):
        path = tmp_path / "crafted.h5"
        if document is None:
            described = [{"dtype": "float32", "shape": [2, 3]}] if arrays is None else arrays
            described = [{"offset": HEADER_SIZE, **item} for item in described]
            document = {"arrays": described, "content": content or {}}
        text = document if isinstance(document, bytes) else json.dumps(document).encode()
        begin = np.asarray(numbers).tobytes()
        path.write_bytes(bytes(HEADER_SIZE) + begin + text)
        with open(path, "r+b") as file:
            seal(file, place or Span(HEADER_SIZE + len(begin), len(text)))
        return path

    return make
