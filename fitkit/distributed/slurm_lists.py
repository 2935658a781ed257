"""SLURM's short ways to write lists of hosts and of task counts."""

from __future__ import annotations

import re

from fitkit.distributed.launch_variables import MOST_RANKS


def expand_counts(text: str) -> list[int]:
    """The tasks of each node: `"2(x3),1"` is 2, 2, 2, 1.

    Raises:
        ValueError: it is no such list; the message goes on after the list.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", item.strip())
        nodes = int(match[2] or 1) if match else 0
        if match is None or int(match[1]) == 0 or len(counts) + nodes > MOST_RANKS:
            raise ValueError("is no list of task counts like '2(x3),1'")
        counts += [int(match[1])] * nodes
    return counts


def expand_hosts(text: str) -> list[str]:
    """The hosts of a SLURM node list: `"n[03-05,9],other"` is n03, n04, n05, n9, other.

    Raises:
        ValueError: it is no such list; the message goes on after the list.
    """
    # Commas inside brackets part ranges, the others part hosts.
    items = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if ",".join(items) != text.strip() or not items:
        raise ValueError("is no list of hosts like 'n[03-05,9],other'")
    hosts: list[str] = []
    for item in items:
        hosts += _expand_item(item.strip())
        if len(hosts) > MOST_RANKS:
            raise ValueError(f"names more than {MOST_RANKS} hosts")
    return hosts


def _expand_item(item: str) -> list[str]:
    """The hosts of one item: every bracket's numbers with every other's."""
    hosts = [""]
    for plain, ranges in re.findall(r"([^\[]*)(?:\[([^\]]*)\])?", item):
        middles = _expand_ranges(ranges) if ranges or f"{plain}[]" in item else [""]
        if len(hosts) * len(middles) > MOST_RANKS:
            raise ValueError(f"names more than {MOST_RANKS} hosts")
        hosts = [f"{host}{plain}{middle}" for host in hosts for middle in middles]
    return hosts


def _expand_ranges(text: str) -> list[str]:
    """The numbers of `"03-05,9"`, with their leading zeros."""
    numbers: list[str] = []
    for item in text.split(","):
        match = re.fullmatch("([0-9]{1,9})(?:-([0-9]{1,9}))?", item.strip())
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(first) > int(last) or int(last) - int(first) + len(numbers) >= 100_000:
            raise ValueError(f"has [{text}], which is no list of numbers like [03-05,9]")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers
