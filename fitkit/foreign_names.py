"""Names of other libraries that fitkit doesn't have, and what to write.

The names stand in `foreign_names.json`, which is read when a name fails. Names that fitkit has,
too, aren't listed. The error for an unknown argument or attribute ends with a name's sentence, and
so does the warning about a method that is never called. The page docs/foreign-names.md shows the
names.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from fitkit.errors import with_code


@functools.cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
    return data


@functools.cache
def rows() -> dict[str, dict[tuple[str, str], str]]:
    """Return the place (a verb, a class or a module) → (the peer, its name) → what to write
    here.
    """
    found: dict[str, dict[tuple[str, str], str]] = {}
    verbs = ", ".join(_data()["verbs"])
    for places, by_peer in _data()["names"].items():
        for place in places.replace("any verb", verbs).split(", "):
            for peer, names in by_peer.items():
                found.setdefault(place, {}).update({(peer, name): names[name] for name in names})
    return found


def instead(place: str, name: str) -> str:
    """Return what to write for a peer's name; empty where nobody has it.

    Args:
        place: a verb's name, `"fitkit.Model"`, a module's name, or an argument that takes names.
        name: an argument or attribute that isn't there; of skorch's `module__hidden` what stands
            before the underscores counts.
    """
    names = {theirs: sentence for (_, theirs), sentence in rows().get(place, {}).items()}
    return names.get(name, "") or names.get(name.partition("__")[0], "")


def no_attribute(owner: str, place: str, name: str) -> AttributeError:
    """Return the error for a name that an object, a class or a module doesn't have.

    Args:
        owner: how the message calls it: `"module 'fitkit'"`.
        place: as in `instead`.
        name: the attribute.
    """
    missing, sentence = f"{owner} has no attribute {name!r}", instead(place, name)
    return AttributeError(with_code(f"{missing}. {sentence}", "FK093") if sentence else missing)


def model_hook(name: str) -> str | None:
    """Our hook of a model that people call by this name, beyond slips of the pen."""
    return _data()["model hooks"]["ours"].get(name)


def instead_of_model_hook(name: str) -> str | None:
    """Return what to write for a hook of a `LightningModule` that fitkit doesn't call."""
    sentence: str | None = _data()["model hooks"]["instead"].get(name)
    ours = callback_hook(name)
    if sentence is None and ours is not None:
        return f"Write a callback with {ours} and give it to fit."
    return sentence


def callback_hook(name: str) -> str | None:
    """Our hook of a callback for one of Lightning's."""
    return _data()["callback hooks"]["ours"].get(name)


def instead_of_callback_hook(name: str) -> str | None:
    """Return what to write for a method of Lightning's callbacks that fitkit's don't have."""
    return _data()["callback hooks"]["instead"].get(name)


def callback_arguments() -> dict[str, str]:
    """Return what Lightning gives to each hook of a callback, and where it is here."""
    arguments: dict[str, str] = _data()["callback hooks"]["arguments"]
    return arguments
