"""Quotas of AWS: how many vCPUs of which family an account may run at once, apart for spot and on-demand.

Families and buckets as in the EC2 user guide (instance type quotas, read 2026-11-20). Quotas count vCPUs, per region.
A quota is named by its own code: codes and defaults by the user guide ('Spot Instance quotas', 'On-Demand Instance
quotas') and answers of list-service-quotas in public repositories, read 2026-11-26.

`hetopt doctor` keeps the quotas of one's own account in a file, which every plan uses however old it is, as quotas are
hardly ever lowered.
"""

import contextlib
import datetime
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, get_args

from pydantic import Field, NonNegativeInt

from hetopt import catalogs
from hetopt.core.artifact import Artifact, Record
from hetopt.core.errors import BadInput, setting
from hetopt.core.grammar import arguments
from hetopt.core.paths import home
from hetopt.core.plain_text import known
from hetopt.optimizer.market.catalog import Market, Offer
from hetopt.optimizer.market.instance_type import InstanceType

STANDARD = "standard"
FAMILIES = (STANDARD, "g", "p", "p5", "inf", "trn", "dl", "f", "x", "u", "hpc", "mac")
"""Families of instance types that AWS keeps quotas for. ``standard`` is A, C, D, H, I, M, R, T and Z; ``g`` holds VT
too; ``p`` is P2 to P4 on the spot market, where P5 and P6 have ``p5``, and all of P on demand."""

_EXAMPLE = 'for example `quotas="g=8"`, or `quotas="spot:standard=32"`'


@dataclass(frozen=True, kw_only=True, order=True)
class Bucket:
    """Key of one quota: a family of instance types, such as 'g', in one market, "spot" or "on-demand"."""

    market: Market
    family: str

    def __str__(self) -> str:
        """Return the bucket as `read_quotas` reads it: 'spot:g'."""
        return f"{self.market}:{self.family}"


Quotas = Mapping[Bucket, int]
"""vCPUs that may run at once, by bucket; a bucket that is missing has no limit."""


@dataclass(frozen=True, kw_only=True)
class Quota:
    """Code, console name and a new account's default, vCPUs, of one AWS quota; not an account's own value.

    Attributes:
        code: code in AWS's service of quotas.
        name: name in the console.
        default: what a new account has.
    """

    code: str
    name: str
    default: int = 0


_P_ON_DEMAND = Quota(code="L-417A185B", name="Running On-Demand P instances")
_HIGH_MEMORY = Quota(code="L-43DA4232", name="Running On-Demand High Memory instances")
_HPC = Quota(code="L-F7808C92", name="Running On-Demand HPC instances")
"""The last two are not sold as spot."""

_STANDARD = (
    Quota(code="L-34B43A08", name="All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests", default=5),
    Quota(code="L-1216C47A", name="Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances", default=5),
)

_NAMED: Mapping[str, tuple[Quota, Quota]] = MappingProxyType(
    {
        STANDARD: _STANDARD,
        "g": (
            Quota(code="L-3819A6DF", name="All G and VT Spot Instance Requests"),
            Quota(code="L-DB2E81BA", name="Running On-Demand G and VT instances"),
        ),
        "p5": (Quota(code="L-C4BD4855", name="All P5 Spot Instance Requests"), _P_ON_DEMAND),
        "p": (Quota(code="L-7212CCBC", name="All P4, P3 and P2 Spot Instance Requests"), _P_ON_DEMAND),
        "inf": (
            Quota(code="L-B5D1601B", name="All Inf Spot Instance Requests"),
            Quota(code="L-1945791B", name="Running On-Demand Inf instances"),
        ),
        "trn": (
            Quota(code="L-6B0D517C", name="All Trn Spot Instance Requests"),
            Quota(code="L-2C3B7624", name="Running On-Demand Trn instances"),
        ),
        "dl": (
            Quota(code="L-85EED4F7", name="All DL Spot Instance Requests"),
            Quota(code="L-6E869C2A", name="Running On-Demand DL instances"),
        ),
        "f": (
            Quota(code="L-88CF9481", name="All F Spot Instance Requests"),
            Quota(code="L-74FC7D96", name="Running On-Demand F instances"),
        ),
        "x": (
            Quota(code="L-E3A00192", name="All X Spot Instance Requests"),
            Quota(code="L-7295265B", name="Running On-Demand X instances"),
        ),
        "u": (_HIGH_MEMORY, _HIGH_MEMORY),
        "hpc": (_HPC, _HPC),
    }
)
"""By family, on the spot market and on demand. Families without a published quota count as standard."""


def quota_of(instance_type: str, market: Market) -> Quota:
    """Return the AWS quota (code, name, default) that machines of a type count against in a market.

    Types of families that AWS does not name count as standard.
    """
    return named_quota(Bucket(market=market, family=family_of(instance_type, market)))


def named_quota(bucket: Bucket) -> Quota:
    """Return the AWS quota (code, name, default) of a bucket; families that AWS does not name count as standard."""
    spot, on_demand = _NAMED.get(bucket.family, _STANDARD)
    return spot if bucket.market == "spot" else on_demand


NEW_ACCOUNT: Quotas = MappingProxyType(
    {
        Bucket(market=market, family=family): named_quota(Bucket(market=market, family=family)).default
        for market in get_args(Market)
        for family in _NAMED
    }
)
"""What a new account may run: some small machines without a GPU. AWS raises it on request, and with use."""


OBTAINABLE = catalogs.AWS / "obtainable.json"


@cache
def obtainable() -> tuple[Quotas, tuple[str, ...]]:
    """Return vCPU quotas to assume for GPU machines of an unknown account, and instance types to leave out.

    The quotas hold one machine of eight GPUs of a family in each market; the types are those sold ahead in blocks. Both
    are read once, from catalogs/aws/obtainable.json.
    """
    stored = json.loads(OBTAINABLE.read_text(encoding="utf-8"))
    first = stored["first_vcpus"]
    quotas = {
        Bucket(market=market, family=family): first["vcpus"]
        for market in get_args(Market)
        for family in first["families"]
    }
    return MappingProxyType(quotas), tuple(stored["reserved"]["types"])


def needed(machines: Iterable[tuple[InstanceType, Market, int]]) -> dict[Bucket, int]:
    """Return the vCPUs that (type, market, count) machines take of each quota, by bucket; for AWS's types only."""
    taken: dict[Bucket, int] = {}
    for instance, market, count in machines:
        bucket = Bucket(market=market, family=family_of(instance.name, market))
        taken[bucket] = taken.get(bucket, 0) + count * instance.vcpus
    return taken


def bucket_of(offer: Offer) -> Bucket:
    """Return the bucket of the quota that an offer's machines count against; off AWS, each type has its own bucket.

    Parts of one machine of the user's share the bucket of the whole.
    """
    market = offer.price.market
    if not offer.is_of_aws:
        return own_bucket(offer.instance_type.part_of or offer.instance_type.name)
    return Bucket(market=market, family=family_of(offer.instance_type.name, market))


def own_bucket(host: str) -> Bucket:
    """Return the bucket of a user's host, or of another cloud's type, by its name: on demand, family 'own NAME'."""
    return Bucket(market="on-demand", family=f"own {host}")


def family_of(instance_type: str, market: Market) -> str:
    """Return the quota family, one of `FAMILIES`, that a type such as 'g5.xlarge' counts against in a market.

    Unknown families are "standard".
    """
    letters = re.match(r"[a-z]*", instance_type)
    family = letters.group() if letters else ""
    if instance_type.startswith(("p5", "p6")) and market == "spot":
        return "p5"
    if family in FAMILIES:
        return family
    if family.startswith(("g", "vt")):
        return "g"
    return "x" if family.startswith("x") else STANDARD


UNLIMITED = "none"
"""Word by which a person says that no quota counts."""

MOST_DIGITS = 9
"""Digits of the largest quota that is a limit; a number with more counts as 10^9 vCPUs, which no account has."""
UNBOUNDED = 10**MOST_DIGITS


def read_quotas(texts: Iterable[str]) -> dict[Bucket, int]:
    """Parse vCPU quotas: ``g=8`` for both markets, ``spot:g=8`` for one, ``default``: a new account's; commas between.

    ``default`` fills families that are not given; ``none`` alone sets no limit. Letters' case does not matter. On the
    spot market ``p`` holds P5 and P6 too, unless ``p5`` is given: AWS counts them apart there alone.

    Returns:
        vCPUs by bucket; a bucket that is missing has no limit. Without texts it is empty.

    Raises:
        BadInput: a text is not of that form, names an unknown family or market, has no whole number, or gives one
            bucket twice.
    """
    quotas: dict[Bucket, int] = {}
    usual: Quotas = {}
    for text in texts:
        written = arguments(text.casefold(), "`quotas`")
        if list(written.values) == ["default"]:
            usual = NEW_ACCOUNT
        elif list(written.values) == [UNLIMITED] and not written.pairs:
            continue
        elif written.values or not written.pairs:
            raise BadInput(f"`quotas` must be FAMILY=VCPUS, got {text!r}.", hint=_EXAMPLE)
        for name, vcpus in written.pairs.items():
            market, colon, family = name.rpartition(":")
            known(family, FAMILIES, "quota for the family")
            if colon:
                known(market, get_args(Market), "market")
            if not vcpus.isdecimal():
                raise BadInput(f"`quotas`: {name} must be a whole number of vCPUs, got {vcpus!r}.", hint=_EXAMPLE)
            for limited in (limited for limited in get_args(Market) if not colon or limited == market):
                bucket = Bucket(market=limited, family=family)
                if bucket in quotas:
                    raise BadInput(
                        f"{setting('quotas', text)} gives the {limited} quota of {family} twice.",
                        hint="keep one of them",
                    )
                quotas[bucket] = int(vcpus) if len(vcpus) <= MOST_DIGITS else UNBOUNDED
    all_of_p = quotas.get(Bucket(market="spot", family="p"))
    if all_of_p is not None:
        quotas.setdefault(Bucket(market="spot", family="p5"), all_of_p)
    return {**usual, **quotas}


def write_quotas(quotas: Quotas) -> str:
    """Return quotas, vCPUs by bucket, as text that `read_quotas` parses: 'on-demand:g=8, spot:g=64'.

    Empty without any.
    """
    return ", ".join(f"{bucket}={vcpus}" for bucket, vcpus in sorted(quotas.items()))


def raised(bucket: Bucket, vcpus: int) -> str:
    """Return a quota to raise and its new value: "'Running On-Demand P instances' (L-417A185B) to 8 vCPUs"."""
    quota = named_quota(bucket)
    return f"'{quota.name}' ({quota.code}) to {vcpus:,} vCPU{'s' * (vcpus != 1)}"


class RegionQuotas(Record):
    """An account's vCPU quotas in one region, as text, and when AWS was asked for them."""

    read: datetime.datetime = Field(description="when AWS was asked")
    quotas: str = Field(description="as the option for quotas takes them: 'spot:g=64, on-demand:g=8'")


class AccountQuotas(Artifact):
    """File of one AWS account's vCPU quotas by region, as AWS last told them.

    ``account_id`` is AWS's number of the account, 12 digits.
    """

    KIND: ClassVar[str] = "account-quotas"
    VERSION: ClassVar[int] = 1
    MADE_BY: ClassVar[str] = "hetopt doctor"

    account_id: str = Field(pattern=r"^\d{12}$")
    regions: dict[str, RegionQuotas] = Field(default_factory=dict)

    def of(self, region: str) -> Quotas | None:
        """Return the account's quotas in a region, vCPUs by bucket; None: AWS was never asked for them.

        Raises:
            BadInput: the file's text for that region is not in the form of `read_quotas`.
        """
        record = self.regions.get(region)
        return None if record is None else read_quotas([record.quotas])


def account_quotas_file() -> Path:
    """Return the path of the file of account quotas: ``$HETOPT_HOME/account-quotas.json`` (``~/.hetopt``).

    The file need not exist.

    Raises:
        BadInput: neither HETOPT_HOME nor HOME says where it is.
    """
    return home() / "account-quotas.json"


def keep_quotas(
    path: Path, account_id: str, region: str, quotas: Mapping[Bucket, NonNegativeInt], now: datetime.datetime
) -> AccountQuotas:
    """Write an account's quotas in a region to ``path``, and return the new content; drops quotas of other accounts.

    Other regions of the same account stay. A damaged file is written anew; a missing folder is made.

    Args:
        path: path of the file, see `account_quotas_file`.
        account_id: AWS's number of the account, 12 digits.
        region: region that the quotas are of.
        quotas: vCPUs by bucket.
        now: when AWS was asked.

    Raises:
        BadInput: the file cannot be written.
        OSError: its folder cannot be made.
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
