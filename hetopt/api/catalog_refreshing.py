"""A catalogue of one's own: today's prices as AWS publishes them."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetopt.core.errors import BadInput
from hetopt.core.paths import inside
from hetopt.optimizer.market.catalog import BUNDLED, load_catalog
from hetopt.optimizer.market.catalog_folder import ANY_REGION, catalogs_home, in_use, write_catalog
from hetopt.optimizer.market.catalog_refresh import PublicFeeds, refreshed

if TYPE_CHECKING:
    from hetopt.core.interruption import Reporter
    from hetopt.optimizer.market.catalog_refresh import PublicPrices, Refreshed

ALL = "all"
"""Name that stands for every region of the bundled catalogue."""


@dataclass(frozen=True, kw_only=True)
class OwnCatalog:
    """A catalogue of one region that was read from AWS's public prices, and the folder that it was written to.

    Attributes:
        region: name of the AWS region.
        folder: folder of the catalogue's files, in the user's home folder of hetopt.
        day: date (UTC) on which reading the prices began.
        contents: the files written, and the types and prices left out of them.
    """

    region: str
    folder: Path
    day: datetime.date
    contents: Refreshed


def refresh(region: str, *, reporter: Reporter) -> tuple[OwnCatalog, ...]:
    """Download a region's prices (``all``: every region's) from AWS; write each as the catalogue in use from then on.

    The prices, on demand and spot, and spot interruption rates are what AWS publishes without credentials. Each
    region's catalogue is in use as soon as it is whole, also if a later region fails.

    Args:
        region: name of an AWS region; ``all`` or ``any``: each region of the bundled catalogue that AWS publishes.
        reporter: receives what is read, and the part done.

    Returns:
        One written catalogue for each region, in order.

    Raises:
        BadInput: there is no such region, another refresh is running, or AWS's price list is damaged or cut off.
        CloudRefused: AWS cannot be reached.
    """
    now = datetime.datetime.now(datetime.UTC)
    with _alone(catalogs_home()):
        regions, written = [region], list[OwnCatalog]()

        def read(feed: str, read_bytes: int, total_bytes: int | None) -> None:
            """Report the feed that is read for the present region; of a sized price list, the part done as well."""
            done, total = len(written), total_bytes if feed == "price list" else None
            place = regions[done] if len(regions) == 1 else f"{regions[done]} ({done + 1} of {len(regions)})"
            # Where nobody sees a bar each text is a line: a tenth at a time.
            shown = (total or 0) * (10 * read_bytes // max(1, total or 0)) / 10
            part = f", {shown / 1e6:,.0f} of {total / 1e6:,.0f} MB" if total else ""
            reporter(f"{place}: {feed}{part}", (done + read_bytes / total) / len(regions) if total else None)

        feeds = PublicFeeds(today=now.date(), progress=read, note=reporter.note)
        versions, everywhere = feeds.versions(), feeds.everywhere()
        if region in (ALL, ANY_REGION):
            regions = [name for name in load_catalog().regions if name in versions]
        for name in regions:
            written.append(_written(name, feeds.of(name, versions, everywhere), now))
        return tuple(written)


def _written(region: str, prices: PublicPrices, now: datetime.datetime) -> OwnCatalog:
    """Write the catalogue of a region from its prices, after comparing them with those in use.

    Raises:
        BadInput: over half of the types with a price on demand in use have none in ``prices``, which look cut off.
    """
    day = now.date()
    if inside(BUNDLED, f"regions/{region}.csv", what="region").exists():
        listings = in_use(region).listings
        before = {name for name, listing in listings.items() if listing.on_demand is not None}
        missing = before - set(prices.on_demand)
        if 2 * len(missing) > len(before):
            raise BadInput(
                f"AWS's price list of {region} lacks {len(missing):,} of the {len(before):,} types that had a price.",
                hint="it looks cut off: run it again later",
            )
    contents = refreshed(prices, region, day, BUNDLED)
    folder = write_catalog(catalogs_home(), region, day.isoformat(), contents.files)
    return OwnCatalog(region=region, folder=folder, day=day, contents=contents)


@contextlib.contextmanager
def _alone(home: Path) -> Iterator[None]:
    """Hold the lock of a folder of catalogues, which is made; two refreshes would write into one partial file.

    Raises:
        BadInput: another refresh holds the lock, which is not waited for.
    """
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"another refresh writes to {home}.", hint="wait until it is done") from None
        yield
