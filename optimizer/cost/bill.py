"""The expected bill of a run in USD: machines, volumes, addresses, transfer and checkpoints, and the least budget.

`itemise` gives the lines of one cluster's bill, each with the date and source of its price; `total_usd` gives their sum
for many clusters at a time. Planner and launcher take a budget only if

    budget >= fixed + worst-case USD an hour * 10 min                 (`hetopt.core.budget_law`)

as spot prices can rise to the on-demand price, and a cluster must have booted before its budget may end it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hetopt import catalogs
from hetopt.core.artifact import Record, validated
from hetopt.core.budget_law import HEARTBEAT_S, READ_EVERY_S, READ_OFTEN, SECONDS_PER_HOUR, Usd, worst_usd
from hetopt.core.errors import BadInput
from hetopt.optimizer.market.catalog import BUNDLED, Catalog, Offer
from hetopt.optimizer.market.catalog_rows import HINT, read_object
from hetopt.optimizer.market.instance_type import Confidence
from hetopt.optimizer.plan import AWS, OWN, CostTerm


class Term(Record):
    """Price or rule of a provider's price list, with its unit, date and source."""

    value: Annotated[float, Field(ge=0, strict=True)]
    unit: str
    date: datetime.date
    source: str
    confidence: Confidence
    note: str | None = None


class Billing(Record):
    """Prices and billing rules of a provider in one region, beside the hourly prices of its machines.

    Attributes:
        minimum_billed_s: least seconds that a machine is billed for; more is billed by the second.
        spot_free_if_interrupted_within_s: a spot machine that EC2 takes back sooner costs nothing; no plan counts on
            that.
        hours_per_month: divisor from monthly to hourly prices.
    """

    region: str
    minimum_billed_s: Term
    spot_free_if_interrupted_within_s: Term
    hours_per_month: Term
    ebs_gp3_usd_per_gb_month: Term
    public_ipv4_usd_per_hour: Term
    nat_gateway_usd_per_gb: Term
    s3_usd_per_gb_month: Term
    s3_usd_per_1000_puts: Term
    s3_usd_per_1000_gets: Term


def load_billing(directory: Path | None = None) -> Billing:
    """Read the billing terms, ``billing.json``, of the catalogue in ``directory``; None: the bundled catalogue.

    Raises:
        BadInput: the file is missing, incomplete or cannot be used.
    """
    path = (directory or BUNDLED) / "billing.json"
    data = read_object(path)
    terms = data.pop("terms", None)
    if not isinstance(terms, dict):
        raise BadInput(f"{path}: terms is not a JSON object.", hint=HINT)
    return validated(Billing, {**terms, **data}, origin=str(path), hint=HINT)


def terms_of(catalog: Catalog) -> Billing:
    """Return the prices of disks, addresses, transfer and S3 on a catalogue's cloud; all 0 on other clouds than AWS.

    Of other clouds nothing is known: machines are billed by the second, without a minimum.

    Raises:
        BadInput: the catalogue's file cannot be used.
    """
    billing = load_billing(catalog.directory)
    if catalog.cloud == AWS:
        return billing
    free = {
        name: getattr(billing, name).model_copy(update={"value": 0.0})
        for name in Billing.model_fields
        if name not in ("region", "hours_per_month") and "_free_" not in name
    }
    return billing.model_copy(update=free)


Array = NDArray[np.float64]
Numbers = float | Array
"""One figure, or one for each cluster."""


BYTES_PER_GB = 1e9
"""Of transfer and storage. Where a provider counts 2**30 bytes to the GB, the bill comes out 7 % lower."""

USUAL_DISK_GB = 100.0

S3_PART_BYTES = 8 * 1024 * 1024
"""Larger objects are written and read in parts of this size, a request each (boto3's default)."""

CHECKPOINTS_KEPT = 2
"""In the bucket at a time: the newest complete one and the one being written."""


def disk_usd_per_hour(billing: Billing, disk_gb: Usd) -> Usd:
    """Return the hourly price of a gp3 volume of ``disk_gb``, with the throughput that comes with it, in USD."""
    return billing.ebs_gp3_usd_per_gb_month.value / billing.hours_per_month.value * disk_gb


def beside_usd_per_hour(billing: Billing, disk_gb: Usd) -> Usd:
    """Return the hourly price of one machine's disk and public IPv4 address, in USD; the machine itself is left out."""
    return disk_usd_per_hour(billing, disk_gb) + billing.public_ipv4_usd_per_hour.value


def billed_hours(up_s: Numbers, billing: Billing) -> Array:
    """Return the hours that are billed for a machine that ran ``up_s`` seconds: by the second, at least the minimum."""
    return np.maximum(np.asarray(up_s, dtype=np.float64), billing.minimum_billed_s.value) / SECONDS_PER_HOUR


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Billed seconds and checkpoints of a run; scalars for one cluster, arrays of one length for many.

    Attributes:
        start_up_s: seconds from the request to the first step, paid in full.
        work_s: training, evaluations included.
        interruption_s: expected restarts, repeated work and checkpoints.
        checkpoint_bytes: size of one checkpoint in the bucket; 0: none is written there.
        checkpoints: number of checkpoints written to the bucket.
        restores: number of reads of a checkpoint from the bucket, by all machines together.
    """

    start_up_s: Numbers
    work_s: Numbers
    interruption_s: Numbers = 0.0
    checkpoint_bytes: Numbers = 0.0
    checkpoints: Numbers = 0.0
    restores: Numbers = 0.0

    @property
    def total_s(self) -> Array:
        """Seconds from the request for machines to the end of the run."""
        return np.asarray(self.start_up_s, dtype=np.float64) + self.work_s + self.interruption_s


def requests(object_bytes: Numbers) -> Array:
    """Return how many S3 requests write an object of ``object_bytes``, in parts of 8 MiB; 0 for an empty one.

    A single part takes one; several take one each, and two more to begin and complete the upload.
    """
    size = np.asarray(object_bytes, dtype=np.float64)
    parts = np.ceil(size / S3_PART_BYTES)
    return np.where(size <= 0, 0.0, np.where(parts <= 1, 1.0, parts + 2))


def checkpoints_usd(usage: Usage, billing: Billing) -> Array:
    """Return the cost of a run's checkpoints in S3 requests and storage, in USD, for one cluster or many.

    Bytes between S3 and machines of its region, and between machines of one zone, cost nothing.
    """
    size = np.asarray(usage.checkpoint_bytes, dtype=np.float64)
    puts = requests(size) * usage.checkpoints
    gets = np.maximum(1.0, np.ceil(size / S3_PART_BYTES)) * (size > 0) * usage.restores
    months = usage.total_s / SECONDS_PER_HOUR / billing.hours_per_month.value
    kept_gb = size / BYTES_PER_GB * np.minimum(usage.checkpoints, CHECKPOINTS_KEPT)
    requests_usd = (puts * billing.s3_usd_per_1000_puts.value + gets * billing.s3_usd_per_1000_gets.value) / 1000
    return np.asarray(requests_usd + kept_gb * months * billing.s3_usd_per_gb_month.value)


def total_usd(
    usage: Usage,
    billing: Billing,
    *,
    machine_usd_per_hour: Numbers,
    machines: Numbers,
    disk_gb: float = USUAL_DISK_GB,
) -> Array:
    """Return each cluster's expected cost, USD: machines, volumes, addresses and checkpoints, losses included.

    Args:
        usage: billed seconds and checkpoints of the runs.
        billing: the provider's terms.
        machine_usd_per_hour: price of all machines of a cluster together.
        machines: number in the cluster; each has a volume and a public address.
        disk_gb: size of each volume.
    """
    hourly = machine_usd_per_hour + np.asarray(machines, dtype=np.float64) * beside_usd_per_hour(billing, disk_gb)
    return np.asarray(billed_hours(usage.total_s, billing) * hourly + checkpoints_usd(usage, billing))


def itemise(
    rented: Sequence[tuple[Offer, int]],
    usage: Usage,
    billing: Billing,
    *,
    disk_gb: float = USUAL_DISK_GB,
    hazard_basis: str = "expected over the posterior of the preemption rate",
) -> tuple[CostTerm, ...]:
    """Return the expected bill of a run on one cluster, line by line in USD; lines of 0 beside machines are left out.

    Lines of machines, volumes and addresses are for the time without losses; one line more is for the time of losses.

    Args:
        rented: (offer, number of machines) of each kind of machine.
        usage: billed seconds and checkpoints, scalars.
        billing: the provider's terms.
        disk_gb: size of each machine's volume.
        hazard_basis: source of the expected interruptions, in words of the bill.
    """
    start, work, lost = (float(np.asarray(part)) for part in (usage.start_up_s, usage.work_s, usage.interruption_s))
    whole = float(billed_hours(start + work + lost, billing))
    hours = min(whole, float(billed_hours(start + work, billing)))
    # A minute's minimum goes to training: a start-up is no longer than what is billed.
    start_hours = min(start / SECONDS_PER_HOUR, hours)
    training_hours = hours - start_hours
    machines = sum(count for _, count in rented)
    disk, address = billing.ebs_gp3_usd_per_gb_month, billing.public_ipv4_usd_per_hour
    hourly = sum(count * offer.price.usd_per_hour for offer, count in rented)
    terms = [_machines(offer, count, training_hours) for offer, count in rented]
    if start_hours > 0:
        terms.append(
            CostTerm(
                name="start-up of the machines",
                usd=hourly * start_hours,
                basis=f"{start:.0f} s from the request to the first step, at the same prices",
            )
        )
    beside = [
        CostTerm(
            name="volumes",
            usd=machines * disk_usd_per_hour(billing, disk_gb) * hours,
            basis=f"{disk_gb:.0f} GB gp3 a machine at ${disk.value:g} a GB-month ({disk.source}, {disk.date})",
        ),
        CostTerm(
            name="public addresses",
            usd=machines * address.value * hours,
            basis=f"${address.value:g} an hour each ({address.source}, {address.date})",
        ),
    ]
    terms += [term for term in beside if term.usd > 0]
    if whole > hours:
        terms.append(
            CostTerm(
                name="expected interruptions",
                usd=(hourly + machines * beside_usd_per_hour(billing, disk_gb)) * (whole - hours),
                basis=f"{lost:.0f} s of restarts, repeated work and checkpoints, {hazard_basis}",
            )
        )
    if (saving_usd := float(checkpoints_usd(usage, billing))) > 0:
        terms.append(_checkpoints(usage, billing, saving_usd))
    return tuple(terms)


def _checkpoints(usage: Usage, billing: Billing, usd: float) -> CostTerm:
    """Return the line of the bill for a run's checkpoints in a bucket, ``usd`` USD, with its basis in words."""
    size, written = float(np.asarray(usage.checkpoint_bytes)), float(np.asarray(usage.checkpoints))
    put, stored, count = billing.s3_usd_per_1000_puts, billing.s3_usd_per_gb_month, int(requests(size))
    return CostTerm(
        name="checkpoints",
        usd=usd,
        basis=f"{written:.0f} written to a bucket, each with {count} request{'s' * (count != 1)} at ${put.value:g} a "
        f"thousand; {min(written, CHECKPOINTS_KEPT):.0f} of {size / BYTES_PER_GB:.2g} GB kept at ${stored.value:g} a "
        "GB-month "
        f"({stored.source}, {stored.date})",
    )


def _machines(offer: Offer, count: int, hours: float) -> CostTerm:
    """Return the line of the bill for ``count`` machines of one kind over ``hours``, with price, date and source."""
    price, name = offer.price, offer.instance_type.name
    if price.region == OWN:
        return CostTerm(
            name=f"{count} × {name} (your own)",
            usd=count * price.usd_per_hour * hours,
            basis=f"${price.usd_per_hour:.4g} an hour each for {hours:.2f} h: {price.source}",
        )
    kind = "estimated " if price.is_estimate else ""
    return CostTerm(
        name=f"{count} × {name} ({price.market})",
        usd=count * price.usd_per_hour * hours,
        basis=f"{kind}${price.usd_per_hour:.4f} an hour each for {hours:.2f} h "
        f"({price.region}, {price.date}, {price.source})",
    )


LEAST_LIFETIME_S = 600.0
"""A cluster that must end before this has hardly booted."""


def least_budget_usd(worst_usd_per_hour: Usd, fixed_usd: float) -> Usd:
    """Return the least budget to rent a cluster with, USD: ten minutes at its worst hourly cost, and ``fixed_usd``."""
    return fixed_usd + worst_usd(worst_usd_per_hour, LEAST_LIFETIME_S)


def extras_usd_per_hour(billing: Billing, disk_gb: Usd) -> Usd:
    """Return the hourly cost of one machine's disk, public address, heartbeats and polling, in USD."""
    puts = SECONDS_PER_HOUR / HEARTBEAT_S * billing.s3_usd_per_1000_puts.value / 1000
    gets = len(READ_OFTEN) * SECONDS_PER_HOUR / READ_EVERY_S * billing.s3_usd_per_1000_gets.value / 1000
    return beside_usd_per_hour(billing, disk_gb) + (puts + gets)


def fixed_usd(checkpoint_bytes: float, billing: Billing) -> float:
    """Return the price of keeping a run's last two checkpoints in S3 for a month, in USD."""
    return CHECKPOINTS_KEPT * checkpoint_bytes / BYTES_PER_GB * billing.s3_usd_per_gb_month.value


FACTS = catalogs.AWS / "transfer.json"

ELSEWHERE = "elsewhere"


def data_transfer(data_bytes: float, source: str | None, target: str) -> CostTerm | None:
    """Return the cost of copying the data set between two regions once, as a line of the bill; None: nothing to pay.

    AWS charges bytes by the region that they leave, and machines read a copy in their own region.

    Args:
        data_bytes: size of the data set.
        source: region that holds the data set; None: no region does, and nothing is paid.
        target: region of the machines.
    """
    if source is None or source == target or data_bytes <= 0:
        return None
    prices = json.loads(FACTS.read_text(encoding="utf-8"))["terms"]
    price = Term.model_validate(prices.get(source.partition("-")[0], prices[ELSEWHERE]))
    gb = data_bytes / BYTES_PER_GB
    return CostTerm(
        name="data set from another region",
        usd=gb * price.value,
        basis=f"{gb:,.0f} GB from {source} to {target} once, at ${price.value:g} a GB ({price.source}, {price.date})",
    )
