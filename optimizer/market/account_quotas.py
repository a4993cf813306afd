"""The quotas of one's own account, as AWS last told them: kept in a file by `hetopt doctor`, read by every plan.

A plan uses them however old they are, and says how old once they are older than a day. Quotas are raised on request
and hardly ever lowered: old ones leave out what could be rented by now, and let through nothing that cannot.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import Field, NonNegativeInt

from hetopt.core.artifact import Artifact, Record
from hetopt.core.errors import BadInput
from hetopt.core.paths import home
from hetopt.optimizer.market.quota import Bucket, Quotas, read_quotas, write_quotas


class RegionQuotas(Record):
    """The quotas of an account in one region."""

    read: datetime.datetime = Field(description="when AWS was asked")
    quotas: str = Field(description="as the option for quotas takes them: 'spot:g=64, on-demand:g=8'")


class AccountQuotas(Artifact):
    """Quotas of one account, by region."""

    KIND: ClassVar[str] = "account-quotas"
    VERSION: ClassVar[int] = 1
    MADE_BY: ClassVar[str] = "hetopt doctor"

    account_id: str = Field(pattern=r"^\d{12}$")
    regions: dict[str, RegionQuotas] = Field(default_factory=dict)

    def of(self, region: str) -> Quotas | None:
        """Return the quotas of a region; absent: they were never asked for.

        Raises:
            BadInput: the file holds no quotas there.
        """
        record = self.regions.get(region)
        return None if record is None else read_quotas([record.quotas])


def account_quotas_file() -> Path:
    """Return the path of the account quotas: ``$HETOPT_HOME/account-quotas.json`` (``~/.hetopt``)."""
    return home() / "account-quotas.json"


def keep_quotas(
    path: Path, account_id: str, region: str, quotas: Mapping[Bucket, NonNegativeInt], now: datetime.datetime
) -> AccountQuotas:
    """Write the quotas of an account in a region. Another account's are forgotten: one is planned for at a time.

    A file that is damaged is written anew.

    Raises:
        BadInput: the file cannot be written.
    """
    kept = None
    with contextlib.suppress(BadInput):
        kept = AccountQuotas.load(path) if path.exists() else None
    known = kept.regions if kept is not None and kept.account_id == account_id else {}
    latest = RegionQuotas(read=now.replace(microsecond=0), quotas=write_quotas(quotas))
    updated = AccountQuotas(account_id=account_id, regions={**known, region: latest})
    path.parent.mkdir(parents=True, exist_ok=True)
    updated.save(path)
    return updated
