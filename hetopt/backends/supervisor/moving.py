"""What training would be like on the same machines on demand: what keeps a deadline when spot no longer does."""

from __future__ import annotations

from hetopt.backends.supervisor.decide import Alternative
from hetopt.backends.supervisor.progress import PredictedGain, RunProgress

ON_DEMAND = "the same machines on demand"


def on_demand_for_all(standing: RunProgress, promise: PredictedGain, *, until_there_s: float) -> list[Alternative]:
    """The alternative that nobody takes back; none without a deadline, or before training has begun.

    A step takes what it took when all workers were last there, or what was promised where that was never measured: with
    some of them away it takes longer, and those come back with the move.

    Args:
        standing: of the run.
        promise: of its plan.
        until_there_s: until the new machines train, were all others lost at once.
    """
    if promise.deadline_s is None or standing.began_s is None:
        return []
    return [
        Alternative(
            action="on-demand",
            name=ON_DEMAND,
            step_time_s=standing.whole_step_time_s or promise.step_time_s,
            # Never taken for what it costs: nobody moves to save money.
            usd_per_hour=float("inf"),
            changeover_s=until_there_s,
            holds=True,
        )
    ]
