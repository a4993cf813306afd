"""What is tried beside a plan is what the benchmark says: twelve configurations, started as plans are."""

from __future__ import annotations

import pytest

from benchmarks.planned import SHAPES, TRIED, WAYS, Shape, configurations
from tests.optimizer.test_exchange_losses import with_trials


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_twelve_are_tried_beside_each_plan(shape: Shape) -> None:
    planned, *tried = configurations(shape, with_trials())
    assert planned.name == "planned"
    assert len(tried) == len(TRIED) >= 12
    for one, (cluster, times, way) in zip(tried, TRIED, strict=True):
        chosen, spec = one.plan.chosen, one.plan.run
        assert {group.instance_type: group.machines for group in chosen.groups} == shape.clusters[cluster]
        assert chosen.compression == spec.compression == WAYS[way]
        assert spec.global_batch_size == chosen.global_batch_size == 64 * (1 + times)
        assert (spec.ratio_policy, spec.collective_policy) == ("fixed", "fixed")
    assert len({one.name for one in tried}) == len(tried)
