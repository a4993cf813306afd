"""The box tells one story, whatever machine it is played on: its cluster is pinned, and not what is recommended."""

from __future__ import annotations

import pytest

from benchmarks.ec2_in_a_box import MIX, on_the_mix
from hetopt.backends.ec2.renter.ordering import roles_of
from hetopt.core.profile import Profile
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Plan
from tests.ec2.conftest import plan_of

ONE_TYPE, ONE_MACHINE = (("c7i.xlarge", 3, "spot"),), (("c6in.large", 1, "on-demand"),)
OTHERS = (("c7i.xlarge", 2, "spot"), ("c7g.xlarge", 2, "spot"))


@pytest.mark.parametrize("recommended", [ONE_TYPE, ONE_MACHINE, OTHERS])
def test_the_cluster_is_that_of_the_story(
    profile: Profile, catalog: Catalog, recommended: tuple[tuple[str, int, str], ...]
) -> None:
    plan = on_the_mix(plan_of(profile, catalog, recommended), catalog)
    again = Plan.from_json(plan.to_json(), origin="here")
    assert [(group.instance_type, group.machines, group.market) for group in again.chosen.groups] == [
        (name, machines, "spot") for name, machines, _ in MIX
    ]
    assert [role.machines for role in roles_of(again, catalog)] == [3, 1], "four machines of two types"
    assert again.run.global_batch_size == again.chosen.global_batch_size == 1024
    assert len({worker.host for worker in again.run.workers}) == 4
