"""A catalogue of one's own: today's prices as AWS publishes them."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetopt.core.errors import BadInput, HetoptError
from hetopt.core.paths import inside
from hetopt.optimizer.market.catalog import BUNDLED, load_catalog
from hetopt.optimizer.market.catalog_choice import catalog_in_use, catalogs_home
from hetopt.optimizer.market.catalog_folder import write_catalog
from hetopt.optimizer.market.catalog_refresh import refreshed
from hetopt.optimizer.market.public_prices import PublicFeeds
from hetopt.optimizer.market.region_cities import unknown_region

if TYPE_CHECKING:
    from hetopt.core.interruption import Reporter
    from hetopt.optimizer.market.catalog_refresh import PublicPrices, Refreshed

ALL = "all"
"""In place of a region: every region of the bundled catalogue."""


@dataclass(frozen=True, kw_only=True)
class OwnCatalog:
    """What was read, and where it is.

    Attributes:
        region: that it is of.
        folder: of the catalogue.
        day: when reading it began.
        made: the files, and what was left out of them.
    """

    region: str
    folder: Path
    day: datetime.date
    made: Refreshed


def refresh(region: str, *, reporter: Reporter) -> tuple[OwnCatalog, ...]:
    """Read a region's prices.

    Prices on demand and on spot and how often spot is interrupted are what AWS publishes.

    Args:
        region: of AWS, or ``all``: those of the bundled catalogue.
        reporter: told what goes on, and which catalogue stays in use after a failure.

    Returns:
        A catalogue for each region. Each is in use as soon as it is whole.

    Raises:
        BadInput: there is no such region, another refresh is running, or AWS's files are not what they should be.
        CloudRefused: AWS cannot be reached.
    """
    if region != ALL:
        _refuse_slip(region)
    now = datetime.datetime.now(datetime.UTC)
    with _alone(catalogs_home()):
        read = _Read(region, reporter)
        feeds = PublicFeeds(today=now.date(), told=read.bytes, note=reporter.note)
        try:
            versions = feeds.versions()
            everywhere = feeds.everywhere()
            if region != ALL:
                prices = feeds.of(region, versions, everywhere)
                return (_written(region, prices, now),)
            regions = [name for name in load_catalog().regions if name in versions]
            made = []
            for done, name in enumerate(regions):
                read.region, read.done, read.regions = name, done, len(regions)
                made.append(_written(name, feeds.of(name, versions, everywhere), now))
            return tuple(made)
        except HetoptError:
            _say_what_stays(read.region, now.date(), reporter.note)
            raise


def _refuse_slip(region: str) -> None:
    """Refuse a region before AWS is asked, if it has a word that no region's name has. AWS may have new ones of others.

    Raises:
        BadInput: it has; the nearest region is named.
    """
    regions = load_catalog().regions
    words = {word for one in regions for word in one.split("-")[1:-1]}
    if not region.startswith("cn-") and not words.issuperset(region.split("-")[1:-1] or [region]):
        raise unknown_region(region, regions, "AWS region")


@dataclass
class _Read:
    """How far a reading has come."""

    region: str
    reporter: Reporter
    done: int = 0
    regions: int = 1

    def bytes(self, what: str, done: int, total: int | None) -> None:
        """Say how many bytes of which file of which region are there."""
        place = self.region if self.regions == 1 else f"{self.region} ({self.done + 1} of {self.regions})"
        if total is None or what != "price list":
            self.reporter(f"{place}: {what}", None)
            return
        # Where nobody sees a bar each text is a line: a tenth at a time.
        shown = total * (10 * done // max(1, total)) / 10
        self.reporter(
            f"{place}: {what}, {shown / 1e6:,.0f} of {total / 1e6:,.0f} MB",
            (self.done + done / max(1, total)) / self.regions,
        )


def _written(region: str, prices: PublicPrices, now: datetime.datetime) -> OwnCatalog:
    """Hold the prices against those that are in use, and write the catalogue.

    Raises:
        BadInput: most prices that are known are missing: the list was cut off where a line ends.
    """
    day = now.date()
    if inside(BUNDLED, f"regions/{region}.csv", what="region").exists():
        listings = catalog_in_use(region, None, today=day).catalog.listings
        before = {name for name, listing in listings.items() if listing.on_demand is not None}
        missing = before - set(prices.on_demand)
        if 2 * len(missing) > len(before):
            raise BadInput(
                f"AWS's price list of {region} lacks {len(missing):,} of the {len(before):,} types that had a price.",
                hint="it looks cut off: run it again later",
            )
    made = refreshed(prices, region, day, BUNDLED)
    folder = write_catalog(catalogs_home(), region, day.isoformat(), made.files)
    return OwnCatalog(region=region, folder=folder, day=day, made=made)


def _say_what_stays(region: str, today: datetime.date, note: Callable[[str], None]) -> None:
    """After a failure: which catalogue is used on, and how old it is."""
    with contextlib.suppress(BadInput):  # no such region
        kept = catalog_in_use(region, None, today=today)
        whose = "the bundled catalogue" if kept.bundled else str(kept.catalog.directory)
        note(f"In use stays {whose}: {kept.ages or 'it has no prices'}.")


@contextlib.contextmanager
def _alone(home: Path) -> Iterator[None]:
    """One refresh at a time: two would write into one partial file.

    Raises:
        BadInput: there is another, or the folder cannot be written.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BadInput(
            f"{home} cannot be written: {error.strerror}.", hint="set HETOPT_HOME to a folder that can"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise BadInput(f"another refresh writes to {home}.", hint="wait until it is done") from None
    finally:
        os.close(descriptor)
