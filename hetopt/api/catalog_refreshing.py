"""A catalogue of one's own: today's types and prices of a region, read with the person's AWS account."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetopt.core.errors import BadInput, CloudRefused
from hetopt.core.extras import install_command
from hetopt.core.paths import inside
from hetopt.optimizer.market.answer_store import AnswerStore
from hetopt.optimizer.market.catalog import BUNDLED
from hetopt.optimizer.market.catalog_choice import catalog_in_use, catalogs_home
from hetopt.optimizer.market.catalog_folder import write_catalog
from hetopt.optimizer.market.catalog_refresh import refreshed

if TYPE_CHECKING:
    from hetopt.core.reporter import Reporter
    from hetopt.optimizer.market.catalog_refresh import Refreshed


@dataclass(frozen=True, kw_only=True)
class OwnCatalog:
    """What was read, and where it is.

    Attributes:
        folder: of the catalogue.
        day: when reading it began.
        made: the files, and what was left out of them.
    """

    folder: Path
    day: datetime.date
    made: Refreshed


def refresh(region: str, *, aws_profile: str | None = None, reporter: Reporter) -> OwnCatalog:
    """Read a region's types, zones and prices; what was read before an interruption is not read again.

    Args:
        region: of AWS.
        aws_profile: absent: as AWS tools choose it.
        reporter: told what goes on, and which catalogue stays in use where AWS refuses.

    Raises:
        BadInput: there is no such region, or boto3 is not installed.
        CloudRefused: AWS refuses.
    """
    try:
        from hetopt.optimizer.market import pricing
    except ModuleNotFoundError as error:
        if error.name not in ("boto3", "botocore"):
            raise
        raise BadInput("Asking AWS needs boto3, which is not installed.", hint=install_command("aws")) from None

    now = datetime.datetime.now(datetime.UTC)
    pricing.check_region(region)
    home = inside(catalogs_home(), region, what="region")
    store = AnswerStore.open(home / "reading", now)
    try:
        answers = pricing.read_region(
            region,
            store,
            pricing.session(aws_profile),
            told=lambda part, items: reporter(f"{part}, {items:,}", None),
        )
    except CloudRefused:
        if inside(BUNDLED, f"regions/{region}.csv", what="region").exists():
            kept = catalog_in_use(region, None, today=now.date())
            age = f", {(now.date() - kept.day).days} days old ({kept.day})" if kept.day else ", which has no prices"
            reporter.note(f"In use stays {'the bundled catalogue' if kept.bundled else kept.catalog.directory}{age}.")
        raise
    day = store.begun.date()
    made = refreshed(answers, region, day, BUNDLED)
    folder = write_catalog(home / day.isoformat(), made.files, region)
    store.remove()
    return OwnCatalog(folder=folder, day=day, made=made)
