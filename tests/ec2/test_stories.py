"""Stories on the unkind account, in which several moods hold at once: a few here, 400 in `benchmarks.ec2_in_a_box`."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from benchmarks.box import stories
from benchmarks.box.gate import actions_of
from benchmarks.box.stories import BEGIN_S, CLUSTERS, Account, Groups, Narrator, Story
from hetopt.backends.ec2.renter.bundle import Bundle
from hetopt.backends.ec2.renter.edge import BotoEdge
from hetopt.core.profile import Profile
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Plan
from tests.ec2.conftest import plan_of

SEEDS = (1, 6, 24, 104, 140)
"""A run that finishes, one that is refused for want of machines, and runs whose launcher or follower is killed."""


@pytest.fixture
def narrator(
    cloud: BotoEdge, moto_url: str, profile: Profile, catalog: Catalog, bundle: Bundle, tmp_path: Path
) -> Narrator:
    def made(groups: Groups, budget_usd: float) -> Plan:
        return plan_of(profile, catalog, groups, budget_usd=budget_usd)

    account = Account(url=moto_url)
    return Narrator(account=account, folder=tmp_path, catalog=catalog, plan_of=made, bundle_sha256=bundle.sha256)


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_comes_together_nothing_stays_and_nobody_is_told_less(narrator: Narrator, seed: int) -> None:
    story = narrator.tell(seed)
    assert not story.faults, story.timeline()
    assert set(story.asked) <= set(actions_of(stories.policy_without(None)))


def test_all_that_can_happen_is_drawn_and_several_at_once(catalog: Catalog) -> None:
    drawn = [stories.moods_of(Random(seed), CLUSTERS[seed % len(CLUSTERS)], catalog) for seed in range(400)]
    kept = {"seed", "policy", "pools", "lives", "ending_s", "end_role"}
    at_once = [len(set(moods) - kept) + len(moods["lives"]["fates"]) for moods in drawn]
    assert sorted(at_once)[100] >= 3, "three of four stories have three of them or more"
    names = set().union(*drawn)
    assert {"lag_s", "tag_lag_s", "throttled", "faulty", "cut", "short", "exhausted", "refuses_at", "expired"} <= names
    assert {"quotas", "forbidden", "subnets"} <= names
    fates = {fate for moods in drawn for fate in moods["lives"]["fates"]}
    assert fates == {"hangs", "fails", "reboots", "killed", "stopped", "taken", "rebalance"}
    codes = {code for moods in drawn for _, code, _, _ in moods.get("refuses_at", ())}
    assert len(codes) > 60
    assert "InvalidFleetConfig" in codes


def test_a_story_is_told_as_a_timeline(catalog: Catalog) -> None:
    story = Story(seed=3, told=[(BEGIN_S + 9, "second"), (BEGIN_S, "first")], ends="cleared: it finished", usd=0.5)
    lines = story.timeline().splitlines()
    assert [line.split()[-1] for line in lines[1:3]] == ["first", "second"]
    assert lines[3] == "ends: cleared: it finished, $0.5000 of $0.00"
