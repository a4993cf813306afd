"""What it is worth to spread a cluster over several pools: how seldom all of it is gone, and what that costs.

Machines of one pool go together (`hazard.CommonShocks`), and whether a pool is scarce is not known beforehand. A run
that goes on with the machines that are left stands still only while no pool has any, so its standstill is the product
over pools. A run that stops for every loss gains nothing by mixing: shocks of several pools arrive more often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetopt.optimizer.cost.observed_preemptions import group_belief
from hetopt.optimizer.cost.preemption_rate import SHOCKS, CommonShocks, PreemptionRatePosterior
from hetopt.optimizer.plan import Group

Array = NDArray[np.float64]

OUTAGE_H = 5.0
"""Mean time until a pool that has run dry has machines again: 4.2 h and 7.7 h in two pools of four V100 machines over
30 days (skypilot-org/spot-traces 221da1a, 2023-08). Half of the outages are over within an hour and a quarter."""

RUNS_DRY = 0.77
"""How often a pool runs dry, over the hazard of one of its machines: 0.81 and 0.73 in the same pools (58 times). Losses
of a pool follow each other, so that it loses all of its machines hardly less often than any single one."""

_DRAWS = 4096


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A cluster over pools, in the long run.

    Attributes:
        standstill_share: of the time without any machine, over the belief of the hazards.
        missing_share: of the machines that are gone at a time.
        stops_per_hour: losses of any machine; a run that cannot go on with the others stops so often.
    """

    standstill_share: float
    missing_share: float
    stops_per_hour: float


def spread_over(
    pools: Sequence[tuple[int, PreemptionRatePosterior]], *, outage_h: float = OUTAGE_H, shocks: CommonShocks = SHOCKS
) -> Spread:
    """Machines and belief of each pool; pools are independent of each other.

    A pool runs dry at ``RUNS_DRY * lambda`` and a machine is lost at lambda; either waits for ``outage_h`` on average.
    Both are averaged over the belief of lambda.
    """
    if not pools or any(machines < 1 for machines, _ in pools):
        raise ValueError("every pool needs a machine")
    standstill, missing, stops, total = 1.0, 0.0, 0.0, sum(machines for machines, _ in pools)
    for machines, belief in pools:
        hazards, weights = _draws(belief)
        gone = hazards * RUNS_DRY * outage_h
        standstill *= float(np.sum(weights * gone / (1 + gone)))
        alone = hazards * outage_h
        missing += machines / total * float(np.sum(weights * alone / (1 + alone)))
        stops += belief.mean_per_hour * float(shocks.effective_machines(machines))
    return Spread(standstill_share=standstill, missing_share=missing, stops_per_hour=stops)


def in_words(groups: Sequence[Group]) -> str | None:
    """What mixing pools is worth to the machines of a plan, in a sentence; none for fewer than two spot machines."""
    pools = [(group.machines, belief) for group in groups if (belief := group_belief(group)) is not None]
    machines = sum(count for count, _ in pools)
    if machines < 2:
        return None
    basis = "by what was seen" if any(group.watched for group in groups) else "by the prior"
    if len(pools) == 1:
        alone, half = spread_over(pools), machines // 2
        both = spread_over([(half, pools[0][1]), (machines - half, pools[0][1])])
        return (
            f"All spot machines come from one pool, which {basis} has none {alone.standstill_share:.1%} of the "
            f"time; with a second type to fall back on, neither would have any {both.standstill_share:.1%} of the time."
        )
    worst = max(spread_over([pool]).standstill_share for pool in pools)
    return (
        f"The spot machines come from {len(pools)} pools: {basis} one may have none {worst:.1%} of the time, "
        f"all at once {spread_over(pools).standstill_share:.1%}."
    )


def _draws(belief: PreemptionRatePosterior) -> tuple[Array, Array]:
    """Hazards of either case of the belief, and the weight of each."""
    generator = np.random.default_rng(0)
    cases = ((belief.calm, 1 - belief.scarce_chance), (belief.scarce, belief.scarce_chance))
    hazards = [generator.gamma(part.shape, 1 / part.rate_h, _DRAWS) for part, _ in cases]
    return np.concatenate(hazards), np.repeat([chance / _DRAWS for _, chance in cases], _DRAWS)
