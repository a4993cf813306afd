"""A tenth of the catalogue, for tests of what is done with a plan, not of the choice among all that can be rented."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hetopt.optimizer.market import catalog_folder
from hetopt.optimizer.market.catalog import Catalog, load_catalog

FAMILIES = ("c5.", "c6i.", "c7a.", "c7g.", "c7gd.", "c7i.", "g4dn.", "g5.", "g6.", "m6g.", "m7i.", "p4d.", "p5.", "t3.")
"""Of every kind something, the best of all for the small jobs of tests, and what documents name."""


def few(catalog: Catalog) -> Catalog:
    """These families of what a catalogue offers; it knows all types."""
    return replace(catalog, listings={name: one for name, one in catalog.listings.items() if name.startswith(FAMILIES)})


def all_types(patch: pytest.MonkeyPatch) -> None:
    """Plans choose among all that can be rented again, for as long as the patch lasts."""
    patch.setattr(catalog_folder, "load_catalog", load_catalog)


@contextmanager
def few_types() -> Iterator[None]:
    """Plans that this process makes from the bundled catalogue choose among few types meanwhile."""

    def load(region: str, directory: Path | None = None) -> Catalog:
        whole = load_catalog(region, directory)
        return whole if directory is not None else few(whole)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog_folder, "load_catalog", load)
        yield
