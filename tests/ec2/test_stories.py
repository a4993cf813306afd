"""Stories on the unkind account, in which several moods hold at once: a few here, 400 in `benchmarks.ec2_in_a_box`."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._spot_nodes import NodeTrace
from benchmarks.box import capacity, stories, unkind
from benchmarks.box.stories import BEGIN_S, CLUSTERS, Account, Groups, Narrator, Story
from hetopt.backends.ec2.renter.bundle import Bundle
from hetopt.backends.ec2.renter.edge import BotoEdge
from hetopt.core.profile import Profile
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Plan
from tests.ec2.conftest import plan_of

SEEDS = (1, 6, 24, 104, 140, 31, 154)
"""A run that finishes, one that is refused for want of machines, runs whose launcher or follower is killed, one on
recorded capacity, and one that is stopped within minutes of a new price."""


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
    assert story.questions > 50, "each call is asked of the policy"


def test_a_fleet_that_is_refused_has_a_name_as_ec2_gives_one() -> None:
    """IAM is asked about things by their tags, and knows them by such names."""
    assert re.search(r"<fleetId>fleet(-[0-9a-f]+){5}</fleetId>", unkind.FLEET_REFUSED)


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
    assert not {"NoCredentialsError", "ConfigParseError", "ValueError"} & codes, "botocore's own come from no service"


@given(
    seed=st.integers(0, 99),
    running=st.lists(st.integers(0, 4), min_size=1, max_size=40).filter(any),
    prices=st.lists(st.floats(0.01, 9.0), min_size=1, max_size=6),
    at=st.floats(0, 7200),
)
def test_a_pool_has_what_was_recorded_at_the_prices_that_were_drawn(
    seed: int, running: list[int], prices: list[float], at: float
) -> None:
    trace = NodeTrace(name="t", nodes=max(running), running=np.array(running), gap_s=300.0)
    steps = [[1000.0 * place, 9, usd] for place, usd in enumerate(prices)]
    first = Random(seed).randrange(len(running))
    found = capacity.replayed(Random(seed), steps, trace, 7200.0)
    assert found == sorted(found)
    _, machines, usd = [one for one in found if one[0] <= at][-1]
    recorded = running[(first + int(at // trace.gap_s)) % len(running)]
    assert machines == recorded * capacity.MOST // trace.nodes
    assert usd == [one for one in steps if one[0] <= at][-1][2]


def test_what_stands_in_for_recordings_has_their_shape_and_says_what_it_is(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    capacity.recordings.cache_clear()
    if not (shared_data / "spot-traces").is_dir():
        pytest.skip("no spot traces")
    assert len(capacity.recordings()) == 9
    monkeypatch.setenv("HETOPT_SHARED_DATA", str(tmp_path))
    capacity.recordings.cache_clear()
    (made,) = capacity.recordings()
    capacity.recordings.cache_clear()
    assert made.name == "synthetic"
    assert made.nodes == 4
    assert set(made.running.tolist()) == {0, 1, 2, 3, 4}
    assert made.gap_s == 300.0


def test_a_part_of_the_stories_has_recorded_capacity_and_all_else_as_it_was(catalog: Catalog) -> None:
    moods = stories.moods_of(Random(3), CLUSTERS[0], catalog)
    replays = stories.with_recorded_capacity(3, moods)
    assert replays.pop("replays") in ("recorded", "synthetic")
    assert set(replays["pools"]) == set(moods["pools"])
    assert replays["pools"] != moods["pools"]
    assert {**replays, "pools": None} == {**moods, "pools": None}


def test_a_story_is_told_as_a_timeline(catalog: Catalog) -> None:
    story = Story(seed=3, told=[(BEGIN_S + 9, "second"), (BEGIN_S, "first")], ends="cleared: it finished", usd=0.5)
    lines = story.timeline().splitlines()
    assert [line.split()[-1] for line in lines[1:3]] == ["first", "second"]
    assert lines[3] == "ends: cleared: it finished, $0.5000 of $0.00"
