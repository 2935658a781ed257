"""Files with a right digest, whatever is in them."""

import re

from fitkit.checkpoint.header import HEADER_SIZE, Span, seal


def document_of(content):
    """Where the document of a container of fitkit's is, by its header."""
    place = re.search(rb"\ndocument (\d+) (\d+)\n", content[:HEADER_SIZE])
    return Span(int(place[1]), int(place[2]))


def reseal(path):
    """Give a container of fitkit's the digest of what it has now; its document stays in place."""
    with open(path, "r+b") as file:
        seal(file, document_of(file.read(HEADER_SIZE)))
