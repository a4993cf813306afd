"""Folders of refreshed catalogues, each named by its day and never changed, and which catalogue to plan with.

A second catalogue of a day is DAY.1, and so on. A new folder takes its name in one step, so that a reader finds whole
catalogues whenever the writer is killed. A plan takes the catalogue that is named, else the newest refreshed one of the
region, else the bundled one.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from hetopt.core.errors import BadInput
from hetopt.core.paths import home, inside
from hetopt.optimizer.market.catalog import BUNDLED, Catalog, load_catalog
from hetopt.optimizer.plan import AWS

KEPT = 2
"""Number of refreshed catalogues kept of a region: the newest, and the one that somebody may be reading meanwhile."""

_NAME = re.compile(r"(\d{4}-\d{2}-\d{2})(?:\.(\d{1,6}))?")
_UNFINISHED = re.compile(r"\.\d{4}-\d{2}-\d{2}[^/]*")


def refreshed_folders(home: Path, region: str) -> tuple[Path, ...]:
    """Return the folders of a region's refreshed catalogues below folder ``home``, newest first; empty: none.

    Raises:
        BadInput: the text cannot be the name of a folder, so that no region can be called so.
    """
    folder = inside(home, region, what="region")
    return _folders(folder) if folder.is_dir() else ()


def write_catalog(home: Path, region: str, day: str, files: Mapping[str, str]) -> Path:
    """Write a catalogue to a new folder named by ``day``, check that it loads, and delete all but the newest two.

    Unfinished folders of other writers are deleted: one may write at a time.

    Args:
        home: folder of the catalogues of all regions.
        region: region that the catalogue is of.
        day: ISO 8601, as 2026-07-20.
        files: text by path inside the folder.

    Returns:
        The new folder.

    Raises:
        BadInput: the folder cannot be written, region or day cannot be names of folders, or the files are no catalogue
            that `load_catalog` reads; no folder is left behind then, and older ones stay.
    """
    folder = inside(home, region, what="region")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{day}-", dir=folder) as unfinished:
            target = inside(Path(unfinished), day)
            for name, text in files.items():
                path = target / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("w", encoding="utf-8", newline="") as stream:
                    stream.write(text)
                    stream.flush()
                    os.fsync(stream.fileno())
            load_catalog(region, target)
            taken = [_order(path)[1] for path in _folders(folder) if _order(path)[0] == day]
            named = inside(folder, f"{day}.{max(taken) + 1}" if taken else day, what="day")
            target.rename(named)
    except OSError as error:
        raise BadInput(
            f"{folder} cannot be written: {error.strerror}.",
            hint="make room on the disk, or set HETOPT_HOME to a folder that can",
        ) from None
    unfinished_ones = (path for path in folder.iterdir() if _UNFINISHED.fullmatch(path.name))
    for path in (*_folders(folder)[KEPT:], *unfinished_ones):
        shutil.rmtree(path, ignore_errors=True)
    return named


def _folders(folder: Path) -> tuple[Path, ...]:
    folders = (path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())
    return tuple(sorted(folders, key=_order, reverse=True))


def _order(path: Path) -> tuple[str, int]:
    match = _NAME.fullmatch(path.name)
    return (match.group(1), int(match.group(2) or 0)) if match else ("", 0)


ANY_REGION = "any"
"""Word that stands for a region where somebody has no preference."""

NOT_RENTED = "; hetopt plans for its machines, and does not rent them"
"""End of sentences about the prices of other clouds than AWS."""

STALE_DAYS = 14
"""Days after which prices are called old, as spot prices move by the week."""


def catalogs_home() -> Path:
    """Return the folder of refreshed AWS catalogues: ``$HETOPT_HOME/catalogs/aws`` (``~/.hetopt/catalogs/aws``).

    The folder need not exist, and is not made.

    Raises:
        BadInput: neither HETOPT_HOME nor HOME says where it is.
    """
    return home() / "catalogs" / "aws"


def in_use(region: str = "us-east-1", directory: Path | None = None) -> Catalog:
    """Return the catalogue to plan with: in ``directory``, or (None) the region's newest refreshed, or the bundled one.

    Raises:
        BadInput: the catalogue has no such region, a file cannot be used, or ``directory`` is None and neither
            HETOPT_HOME nor HOME is set.
    """
    folders = () if directory is not None else refreshed_folders(catalogs_home(), region)
    return load_catalog(region, directory or (folders[0] if folders else None))


def age_note(catalog: Catalog, dates: Iterable[datetime.date], *, today: datetime.date) -> str | None:
    """Return a sentence on prices over `STALE_DAYS` old, or on the day of other clouds' prices; None: none is due.

    Args:
        catalog: catalog of the prices; for other clouds than AWS there is always a sentence if there is a date.
        dates: dates of the prices; empty: None is returned.
        today: the present day.
    """
    days = sorted({(today - when).days for when in dates})
    is_old = bool(days) and days[-1] > STALE_DAYS
    if days and catalog.cloud != AWS:
        newer = f": `hetopt catalog import FILE --cloud {catalog.cloud}` takes newer ones" * is_old
        return f"Prices of {catalog.cloud} are of {today - datetime.timedelta(days[-1])}{newer}{NOT_RENTED}."
    if not is_old:
        return None
    whose = "" if catalog.directory == BUNDLED else f" in {catalog.directory}"
    span = " to ".join(str(age) for age in (days[0], days[-1])[: len(days)])
    return f"Prices{whose} are {span} days old; today's: `hetopt catalog refresh -r {catalog.region}`."


def regional_catalogs(directory: Path | None) -> tuple[Catalog, ...]:
    """Return a catalogue for each region with prices, picked as by `in_use`.

    Args:
        directory: folder of the catalogue; None: of each region the newest refreshed catalogue, else the bundled one.

    Returns:
        Catalogues in the order of the regions' names. Regions without any price are left out.

    Raises:
        BadInput: a file cannot be used.
    """
    base = load_catalog(directory=directory)
    refreshed = [directory is None and refreshed_folders(catalogs_home(), region) for region in base.regions]
    catalogs = (
        load_catalog(region, folders[0]) if folders else base.in_region(region)
        for region, folders in zip(base.regions, refreshed, strict=True)
    )
    return tuple(catalog for catalog in catalogs if catalog.has_prices)


def clouds_home() -> Path:
    """Return the folder of price files that users imported of other clouds: ``$HETOPT_HOME/catalogs/clouds``.

    Without HETOPT_HOME it is below ``~/.hetopt``. The folder need not exist, and is not made.

    Raises:
        BadInput: neither HETOPT_HOME nor HOME says where it is.
    """
    return home() / "catalogs" / "clouds"


def price_days(catalogs: Iterable[Catalog]) -> str:
    """Return the day of some catalogues' prices as a phrase: 'of 2026-07-20', of several 'the oldest of 2026-07-20'.

    At least one price must be known in the catalogues.
    """
    listings = (listing for catalog in catalogs for listing in catalog.listings.values())
    days = {price.date for listing in listings for price in (listing.on_demand, listing.spot) if price is not None}
    return f"{'the oldest ' * (len(days) > 1)}of {min(days)}"
