"""The bundled catalogue, and a small one in a folder of its own that tests may spoil."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hetopt.optimizer.market.catalog import BUNDLED, Catalog, load_catalog

FEW = ("c7i.xlarge", "g5.xlarge", "g6f.large", "p4d.24xlarge", "p4de.24xlarge", "g7.2xlarge", "trn1.32xlarge")


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    return load_catalog()


@pytest.fixture(scope="session")
def everywhere(catalog: Catalog) -> dict[str, Catalog]:
    return {region: catalog.in_region(region) for region in catalog.regions}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A complete catalogue of a few instance types in two regions."""
    folder = tmp_path / "small"
    (folder / "regions").mkdir(parents=True)
    shutil.copy(BUNDLED.parent / "accelerators.csv", folder)
    for name in ("caveats.csv", "sources.json", "billing.json"):
        shutil.copy(BUNDLED / name, folder / name)
    for name in ("instance_types.csv", "regions/us-east-1.csv", "regions/eu-west-2.csv"):
        header, *rows = (BUNDLED / name).read_text(encoding="utf-8").splitlines(keepends=True)
        few = [row for row in rows if row.split(",")[0] in FEW]
        (folder / name).write_text(header + "".join(few), encoding="utf-8")
    return folder


@pytest.fixture
def edited(small: Path) -> Callable[[str, str, str], Path]:
    """``edited(file, old, new)`` is the small catalogue after one replacement by hand."""

    def edit(name: str, old: str, new: str) -> Path:
        path = small / name
        text = path.read_text(encoding="utf-8")
        assert old in text, f"{name} does not hold {old!r}"
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        return small

    return edit
