"""Bills add up, obey the provider's rules, and equal to the cent what a short script makes of the catalogue's rows."""

from __future__ import annotations

import csv
import json
import math
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.optimizer.cost.bill import (
    Rental,
    Usage,
    itemise,
    requests,
    total_usd,
)
from hetopt.optimizer.cost.billing import load_billing
from hetopt.optimizer.market.catalog import BUNDLED, load_catalog

BILLING = load_billing()
CATALOG = load_catalog()


def rental(name: str, machines: int, market: str) -> Rental:
    listing = CATALOG.listing(name)
    price = listing.spot if market == "spot" else listing.on_demand
    assert price is not None
    return Rental(instance_type=name, machines=machines, price=price)


# ---- the independent script: rows and terms of the files, Decimal, and the provider's rules written down once more


def from_the_rows(
    machines: list[tuple[str, int, str]],
    *,
    start_s: float,
    work_s: float,
    lost_s: float,
    checkpoint_gb: float,
    checkpoints: int,
    restores: int,
    disk_gb: int,
) -> Decimal:
    with (BUNDLED / "regions" / "us-east-1.csv").open(encoding="utf-8", newline="") as stream:
        rows = {row["instance_type"]: row for row in csv.DictReader(stream)}
    terms = {
        name: Decimal(str(term["value"]))
        for name, term in json.loads((BUNDLED / "billing.json").read_text(encoding="utf-8"))["terms"].items()
    }
    seconds = max(Decimal(str(start_s)) + Decimal(str(work_s)) + Decimal(str(lost_s)), terms["minimum_billed_s"])
    hours = seconds / 3600
    volume_hourly = disk_gb * terms["ebs_gp3_usd_per_gb_month"] / terms["hours_per_month"]
    usd = Decimal(0)
    for name, count, market in machines:
        hourly = Decimal(rows[name]["on_demand_usd_per_hour"])
        if market == "spot":
            saving = rows[name]["spot_saving_percent"]
            estimate = round(hourly * (100 - Decimal(saving)) / 100, 6) if saving else Decimal("nan")
            hourly = Decimal(rows[name]["spot_usd_per_hour"] or estimate)
        usd += count * hours * (hourly + volume_hourly + terms["public_ipv4_usd_per_hour"])
    size = Decimal(str(checkpoint_gb)) * 10**9
    parts = math.ceil(size / (8 * 1024 * 1024))
    puts = checkpoints * (parts if parts <= 1 else parts + 2)
    usd += puts * terms["s3_usd_per_1000_puts"] / 1000 + restores * parts * terms["s3_usd_per_1000_gets"] / 1000
    real = (Decimal(str(start_s)) + Decimal(str(work_s)) + Decimal(str(lost_s))) / 3600
    usd += Decimal(str(checkpoint_gb)) * min(checkpoints, 2) * real / 730 * terms["s3_usd_per_gb_month"]
    return usd


CASES = [
    ([("g5.xlarge", 4, "spot")], 180, 7200, 300, 0, 0, 0, 100),
    ([("g5.xlarge", 4, "spot"), ("g4dn.xlarge", 2, "on-demand")], 180, 86400, 4000, 1.2, 40, 12, 200),
    ([("c7i.4xlarge", 16, "spot"), ("c7g.4xlarge", 3, "spot")], 240, 36000, 900, 0.4, 9, 19, 100),
    ([("p5.48xlarge", 1, "on-demand")], 0, 10, 0, 0.001, 1, 0, 100),
]


@pytest.mark.parametrize(("machines", "start", "work", "lost", "checkpoint", "written", "restores", "disk_gb"), CASES)
def test_every_bill_equals_an_independent_script_to_the_cent(
    machines: list[tuple[str, int, str]],
    start: float,
    work: float,
    lost: float,
    checkpoint: float,
    written: int,
    restores: int,
    disk_gb: int,
) -> None:
    rentals = [rental(*machine) for machine in machines]
    usage = Usage(
        start_up_s=start,
        work_s=work,
        interruption_s=lost,
        checkpoint_bytes=checkpoint * 1e9,
        checkpoints=written,
        restores=restores,
    )
    lines = itemise(rentals, usage, BILLING, disk_gb=disk_gb)
    expected = from_the_rows(
        machines,
        start_s=start,
        work_s=work,
        lost_s=lost,
        checkpoint_gb=checkpoint,
        checkpoints=written,
        restores=restores,
        disk_gb=disk_gb,
    )
    assert f"{sum(line.usd for line in lines):.2f}" == f"{expected:.2f}"
    assert sum(line.usd for line in lines) == pytest.approx(float(expected), rel=1e-9)
    total = total_usd(
        usage,
        BILLING,
        machine_usd_per_hour=sum(r.machines * r.price.usd_per_hour for r in rentals),
        machines=float(sum(r.machines for r in rentals)),
        disk_gb=disk_gb,
    )
    assert float(total) == pytest.approx(float(expected), rel=1e-9)


@given(
    st.integers(1, 64),
    st.floats(0, 1000),
    st.floats(0, 1e6),
    st.floats(0, 1e5),
    st.floats(0, 1e11),
    st.integers(0, 1000),
)
def test_the_lines_sum_to_the_total(
    machines: int, start: float, work: float, lost: float, checkpoint: float, written: int
) -> None:
    usage = Usage(
        start_up_s=start,
        work_s=work,
        interruption_s=lost,
        checkpoint_bytes=checkpoint,
        checkpoints=float(written),
        restores=3.0,
    )
    kind = rental("g5.xlarge", machines, "spot")
    lines = itemise([kind], usage, BILLING)
    total = total_usd(usage, BILLING, machine_usd_per_hour=machines * kind.price.usd_per_hour, machines=float(machines))
    assert sum(line.usd for line in lines) == pytest.approx(float(total), rel=1e-9)


def test_many_clusters_are_priced_as_one_by_one() -> None:
    work = np.array([10.0, 5000.0, 1e6])
    machines = np.array([1.0, 4.0, 64.0])
    usage = Usage(start_up_s=180.0, work_s=work, interruption_s=0.1 * work)
    together = total_usd(usage, BILLING, machine_usd_per_hour=0.4 * machines, machines=machines)
    alone = [
        float(
            total_usd(
                Usage(start_up_s=180.0, work_s=w, interruption_s=0.1 * w),
                BILLING,
                machine_usd_per_hour=0.4 * n,
                machines=n,
            )
        )
        for w, n in zip(work.tolist(), machines.tolist(), strict=True)
    ]
    assert together.tolist() == pytest.approx(alone)


@given(st.floats(0, 1e12))
def test_larger_objects_never_need_fewer_requests(size: float) -> None:
    assert float(requests(size)) <= float(requests(2 * size))
    assert float(requests(size)) == 0 if size == 0 else float(requests(size)) >= 1
