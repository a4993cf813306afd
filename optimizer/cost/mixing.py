"""What it is worth to spread a cluster over several pools: how seldom all of it is gone, and what that costs.

Machines of one pool go together (`hazard.CommonShocks`), and whether a pool is scarce is not known beforehand. A run
that goes on with the machines that are left stands still only while no pool has any, so its standstill is the product
over pools. A run that stops for every loss gains nothing by mixing: shocks of several pools arrive more often.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hetopt.optimizer.cost.observed_preemptions import group_belief
from hetopt.optimizer.cost.preemption_rate import PreemptionRatePosterior
from hetopt.optimizer.plan import Group

Array = NDArray[np.float64]

OUTAGE_H = 5.0
"""Mean time until a pool that has run dry has machines again: 4.2 h and 7.7 h in two pools of four V100 machines over
30 days (skypilot-org/spot-traces 221da1a, 2023-08). Half of the outages are over within an hour and a quarter."""

RUNS_DRY = 0.77
"""How often a pool runs dry, over the hazard of one of its machines: 0.81 and 0.73 in the same pools (58 times). Losses
of a pool follow each other, so that it loses all of its machines hardly less often than any single one."""

_DRAWS = 4096


def standstill_share(pools: Sequence[PreemptionRatePosterior]) -> float:
    """Part of the time, in the long run, in which no pool has a machine; pools are independent of each other.

    A pool runs dry at ``RUNS_DRY * lambda`` and waits for `OUTAGE_H` on average, averaged over the belief of lambda.
    """
    share = 1.0
    for belief in pools:
        hazards, weights = _draws(belief)
        gone = hazards * RUNS_DRY * OUTAGE_H
        share *= float(np.sum(weights * gone / (1 + gone)))
    return share


def in_words(groups: Sequence[Group]) -> str | None:
    """What mixing pools is worth to the machines of a plan, in a sentence; none for fewer than two spot machines."""
    spot = [group for group in groups if group.market == "spot"]
    if sum(group.machines for group in spot) < 2:
        return None
    beliefs = [belief for group in spot if (belief := group_belief(group)) is not None]
    basis = "by what was seen" if any(group.watched for group in groups) else "by the prior"
    all_at_once = standstill_share(beliefs)
    if len(beliefs) == 1:
        return (
            f"All spot machines come from one pool, which {basis} has none {100 * all_at_once:.1f} % of the "
            f"time; with a second type to fall back on, neither would have any {100 * (all_at_once**2):.1f} % of the "
            f"time."
        )
    worst = max(standstill_share([belief]) for belief in beliefs)
    return (
        f"The spot machines come from {len(beliefs)} pools: {basis} one may have none {100 * worst:.1f} % of the time, "
        f"all at once {100 * all_at_once:.1f} %."
    )


def _draws(belief: PreemptionRatePosterior) -> tuple[Array, Array]:
    """Hazards of either case of the belief, and the weight of each."""
    generator = np.random.default_rng(0)
    cases = ((belief.calm, 1 - belief.scarce_chance), (belief.scarce, belief.scarce_chance))
    hazards = [generator.gamma(part.shape, 1 / part.rate_h, _DRAWS) for part, _ in cases]
    return np.concatenate(hazards), np.repeat([chance / _DRAWS for _, chance in cases], _DRAWS)
