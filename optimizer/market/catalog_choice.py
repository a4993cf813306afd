"""Which catalogue to plan with: the one that is named, the newest refreshed one of the region, or the bundled one."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

from hetopt.optimizer.market.catalog import BUNDLED, Catalog, load_catalog
from hetopt.optimizer.market.catalog_folder import refreshed_folders

STALE_DAYS = 14
"""Spot prices move by the week; older ones are worth a word."""


def catalogs_home() -> Path:
    """Where refreshed catalogues are kept: ``$HETOPT_HOME/catalogs`` (``~/.hetopt/catalogs``)."""
    base = os.environ.get("HETOPT_HOME")
    return (Path(base) if base else Path.home() / ".hetopt") / "catalogs" / "aws"


@dataclass(frozen=True, kw_only=True)
class CatalogInUse:
    """A catalogue, and what to know about its age.

    Attributes:
        bundled: whether it is the one that came with hetopt.
        day: of its oldest price in the region; absent without any.
        ages: how old its prices of each kind are, in words; '' without any.
        note: a sentence for the person where prices are old, or none.
    """

    catalog: Catalog
    bundled: bool
    day: datetime.date | None
    ages: str
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
    folders = () if directory is not None else refreshed_folders(home or catalogs_home(), region)
    catalog = load_catalog(region, directory or (folders[0] if folders else None))
    oldest = oldest_prices(catalog)
    day = min(oldest.values(), default=None)
    ages = ", ".join(f"{kind} {(today - when).days} days old ({when})" for kind, when in oldest.items())
    bundled = catalog.directory == BUNDLED
    note = None
    if day is not None and (today - day).days > STALE_DAYS:
        whose = "hetopt's bundled catalogue" if bundled else f"the catalogue in {catalog.directory}"
        note = (
            f"Prices are those of {whose}: {ages}. `hetopt catalog refresh --region {region}` reads today's, "
            "which AWS publishes; it needs no account."
        )
    return CatalogInUse(catalog=catalog, bundled=bundled, day=day, ages=ages, note=note)


def oldest_prices(catalog: Catalog) -> dict[str, datetime.date]:
    """The day of the oldest price of each kind that the catalogue has in its region."""
    kinds: dict[str, list[datetime.date]] = {"on demand": [], "spot": [], "estimates of spot": []}
    for listing in catalog.listings.values():
        if listing.on_demand is not None:
            kinds["on demand"].append(listing.on_demand.date)
        if listing.spot is not None:
            kinds["estimates of spot" if listing.spot.is_estimate else "spot"].append(listing.spot.date)
    return {kind: min(days) for kind, days in kinds.items() if days}
