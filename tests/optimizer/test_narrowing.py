"""What a plan says would narrow its interval, against what doing that does."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

import pytest

from hetopt.core.profile import Profile
from hetopt.core.step_samples import Node, StepSample
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from tests.face.described import BERT

SAID = re.compile(r"may be ([\d.]+)x longer or shorter; a probe on (\S+) for about \$([\d.]+) would leave ([\d.]+)x")


def planned(profile: Profile, types: tuple[str, ...]) -> Plan:
    goal = Goal(budget_usd=20.0, ends="epochs", amount=2.0)
    options = Options(only_types=types, max_machines=1, trials=20, precision="fp32")
    return recommend(
        PlanRequest(profile, load_catalog(), goal, options), seed=0, now=datetime(2026, 11, 20, tzinfo=UTC)
    )


@pytest.mark.parametrize("types", [("g5.*",), ("g6.*",), ("p4d.*",)])
def test_a_probe_leaves_as_much_as_the_plan_says_and_costs_what_it_says(types: tuple[str, ...]) -> None:
    """From a profile taken on a T4: the probe is made, finds what was foreseen, and the plan is made again."""
    before = planned(BERT, types)
    said = next(found for one in before.reasons if (found := SAID.search(one)) is not None)
    reach, type_, usd, left = float(said[1]), said[2], float(said[3]), float(said[4])
    told = before.chosen.prediction
    assert reach == pytest.approx(told.step_time_s.high / told.step_time_s.value, abs=0.06)
    assert left < reach
    price = load_catalog().price(type_, "spot")
    assert price is not None
    assert 60 < usd / price.usd_per_hour * 3600 < 900, "a machine for minutes"
    (group,) = before.chosen.groups
    assert group.assumed is not None
    samples = tuple(
        StepSample(
            nodes=(Node(type=type_, workers=1),), local_batch_size=size, step_time_s=group.assumed.time.time_s(size)
        )
        for size in (4, 8, 12)
    )
    after = planned(BERT.model_copy(update={"samples": samples}), (group.instance_type,)).chosen.prediction.step_time_s
    assert math.log(after.high / after.value) == pytest.approx(math.log(left), abs=0.12)
