"""Stories on the unkind account, in which several moods hold at once: a few here, 400 in `benchmarks.ec2_in_a_box`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.box.stories import Account, Groups, Narrator
from hetopt.backends.ec2.renter.bundle import Bundle
from hetopt.backends.ec2.renter.edge import BotoEdge
from hetopt.core.profile import Profile
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Plan
from tests.ec2.conftest import plan_of

SEEDS = (1, 6, 24, 140)


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
