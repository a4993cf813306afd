"""Which catalogue to plan with: the one that is named, the newest refreshed one of the region, or the bundled one."""

from __future__ import annotations

import datetime
import os
import re
from dataclasses import dataclass
from pathlib import Path

from hetopt.core.paths import inside
from hetopt.optimizer.market.catalog import BUNDLED, Catalog, load_catalog

STALE_DAYS = 7
"""Spot prices move by the week; older ones are worth a word."""

_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


def catalogs_home() -> Path:
    """Where refreshed catalogues are kept: ``$HETOPT_HOME/catalogs`` (``~/.hetopt/catalogs``)."""
    base = os.environ.get("HETOPT_HOME")
    return (Path(base) if base else Path.home() / ".hetopt") / "catalogs" / "aws"


def refreshed_folders(region: str, home: Path | None = None) -> tuple[Path, ...]:
    """Refreshed catalogues of the region, newest first. A folder is complete when it has its day as name.

    Raises:
        BadInput: no region can be called so.
    """
    folder = inside(home or catalogs_home(), region, what="region")
    if not folder.is_dir():
        return ()
    return tuple(sorted((path for path in folder.iterdir() if _DAY.fullmatch(path.name)), reverse=True))


@dataclass(frozen=True, kw_only=True)
class CatalogInUse:
    """A catalogue, and what to know about its age.

    Attributes:
        bundled: whether it is the one that came with hetopt.
        day: of its oldest price in the region; absent without any.
        note: a sentence for the person, or none.
    """

    catalog: Catalog
    bundled: bool
    day: datetime.date | None
    note: str | None


def catalog_in_use(
    region: str, directory: Path | None, *, today: datetime.date, home: Path | None = None
) -> CatalogInUse:
    """Load the catalogue to plan with.

    Args:
        region: of AWS.
        directory: that was named; absent: the newest refreshed one, or the bundled one where there is none.
        today: to tell ages.
        home: of refreshed catalogues.

    Raises:
        BadInput: an unknown region, or a file that cannot be used.
    """
    folders = () if directory is not None else refreshed_folders(region, home)
    catalog = load_catalog(region, directory or (folders[0] if folders else None))
    days = [price.date for listing in catalog.listings.values() for price in (listing.on_demand, listing.spot) if price]
    day = min(days, default=None)
    bundled = catalog.directory == BUNDLED
    note = None
    if day is not None and (age := (today - day).days) > STALE_DAYS:
        whose = "hetopt's bundled catalogue" if bundled else f"the catalogue in {catalog.directory}"
        note = (
            f"Prices are those of {whose}, up to {age} days old ({day}): "
            f"`hetopt catalog refresh --region {region}` reads today's with your AWS account."
        )
    return CatalogInUse(catalog=catalog, bundled=bundled, day=day, note=note)
