"""What holds for the programs in README, docs and docstrings."""

import importlib

import pytest


@pytest.fixture(autouse=True)
def _names_as_before():
    """What a program adds to the names of losses, metrics, … goes with it."""
    from fitkit import seams
    from fitkit.extras.bagua import ALGORITHMS
    from fitkit.registry import Registry

    pages = [importlib.import_module(f"fitkit.seams.{page}") for page in seams.PAGES]
    registries = (
        ALGORITHMS,
        *(one for page in pages for one in vars(page).values() if isinstance(one, Registry)),
    )
    before = [(dict(registry._entries), dict(registry._spelling)) for registry in registries]
    yield
    for registry, (entries, spelling) in zip(registries, before, strict=True):
        registry._entries, registry._spelling = entries, spelling
