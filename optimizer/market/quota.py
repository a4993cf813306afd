"""Quotas of the provider: how many vCPUs of which family an account may run at once, apart for spot and on-demand.

Families and buckets as in the EC2 user guide (instance type quotas, read 2026-11-20). Quotas count vCPUs, per region.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from hetopt.core.errors import BadInput, setting
from hetopt.core.grammar import arguments
from hetopt.core.names import known
from hetopt.optimizer.market.catalog import Market, Offer

STANDARD = "standard"
FAMILIES = (STANDARD, "g", "p", "p5", "inf", "trn", "dl", "f", "x", "u", "hpc", "mac")
"""What quotas are kept for. ``standard`` is A, C, D, H, I, M, R, T and Z; ``g`` holds VT too; ``p`` is P2 to P4 on the
spot market, where P5 and P6 have ``p5``, and all of P on demand."""

_EXAMPLE = 'for example `quotas="g=8"`, or `quotas="spot:standard=32"`'


@dataclass(frozen=True, kw_only=True, order=True)
class Bucket:
    """One quota of an account: a family of instance types in one market."""

    market: Market
    family: str


Quotas = Mapping[Bucket, int]
"""vCPUs by bucket. A bucket that is not there is not limited."""


def bucket_of(offer: Offer) -> Bucket:
    """The quota that machines of this offer count against."""
    market = offer.price.market
    return Bucket(market=market, family=family_of(offer.instance_type.name, market))


def family_of(instance_type: str, market: Market) -> str:
    """The one of `FAMILIES` that machines of a type count against in a market."""
    letters = re.match(r"[a-z]*", instance_type)
    family = letters.group() if letters else ""
    if instance_type.startswith(("p5", "p6")) and market == "spot":
        return "p5"
    if family in FAMILIES:
        return family
    if family.startswith(("g", "vt")):
        return "g"
    return "x" if family.startswith("x") else STANDARD


MOST_DIGITS = 9
"""Of a quota that is a limit: no account has a billion vCPUs."""
UNBOUNDED = 10**MOST_DIGITS


def read_quotas(texts: Iterable[str]) -> dict[Bucket, int]:
    """Quotas as a person writes them: ``g=8`` for both markets, ``spot:g=8`` for one, several with commas between.

    Raises:
        BadInput: not of that form, an unknown family, or one bucket twice.
    """
    found: dict[Bucket, int] = {}
    for text in texts:
        written = arguments(text.casefold(), "`quotas`")
        if written.values or not written.pairs:
            raise BadInput(f"`quotas` must be FAMILY=VCPUS, got {text!r}.", hint=_EXAMPLE)
        for name, vcpus in written.pairs.items():
            market, colon, family = name.rpartition(":")
            known(family, FAMILIES, "quota for the family")
            if colon:
                known(market, get_args(Market), "market")
            if not vcpus.isdecimal():
                raise BadInput(f"`quotas`: {name} must be a whole number of vCPUs, got {vcpus!r}.", hint=_EXAMPLE)
            for one in (one for one in get_args(Market) if not colon or one == market):
                bucket = Bucket(market=one, family=family)
                if bucket in found:
                    raise BadInput(
                        f"{setting('quotas', text)} gives the {one} quota of {family} twice.", hint="keep one of them"
                    )
                found[bucket] = int(vcpus) if len(vcpus) <= MOST_DIGITS else UNBOUNDED
    return found


def write_quotas(quotas: Quotas) -> str:
    """The quotas as `read_quotas` reads them."""
    return ", ".join(f"{bucket.market}:{bucket.family}={vcpus}" for bucket, vcpus in sorted(quotas.items()))


def most_machines(offer: Offer, quotas: Quotas) -> float:
    """Machines of this offer that its quota allows; infinite where none is known."""
    quota = quotas.get(bucket_of(offer))
    return math.inf if quota is None else quota // offer.instance_type.vcpus


def within(machines: Sequence[tuple[Offer, int]], quotas: Quotas) -> bool:
    """Whether a cluster of these machines keeps every quota."""
    left = dict(quotas)
    for offer, count in machines:
        bucket = bucket_of(offer)
        if bucket in left:
            left[bucket] -= count * offer.instance_type.vcpus
    return all(vcpus >= 0 for vcpus in left.values())
