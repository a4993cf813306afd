"""Laws of the simulated distribution: seeded, quick, centred on the formulas, and monotone in every limit."""

from __future__ import annotations

import numpy as np
import pytest

from hetopt.optimizer.cost.bill import Usage, total_usd
from hetopt.optimizer.cost.billing import load_billing
from hetopt.optimizer.cost.checkpointing import daly_interval_s, factor_at
from hetopt.optimizer.cost.monte_carlo import Finalist, RentedPool, RunTerms, possible_runs
from hetopt.optimizer.cost.preemption_rate import CommonShocks, HazardComponent, PreemptionRatePosterior
from tests.work import calls_of

BILLING = load_billing()
TERMS = RunTerms(billing=BILLING, start_up_s=180.0, restart_s=210.0, checkpoint_s=10.0, start_up_log_sd=0.5)
SURE = RunTerms(
    billing=BILLING,
    start_up_s=180.0,
    restart_s=210.0,
    checkpoint_s=10.0,
    shocks=CommonShocks(share=0, reach=1),
)


def known(rate: float) -> PreemptionRatePosterior:
    """A hazard that is known exactly."""
    part = HazardComponent(shape=1e8, rate_h=1e8 / rate)
    return PreemptionRatePosterior(calm=part, scarce=part, scarce_chance=0.0)


def finalist(
    machines: int, belief: PreemptionRatePosterior | None, *, work_s: float = 8 * 3600.0, **spread: float
) -> Finalist:
    pool = RentedPool(machines=machines, usd_per_hour=0.4, price_log_sd=0.15 if belief else 0.0, belief=belief)
    return Finalist(pools=(pool,), work_s=work_s, **spread)


def test_a_dozen_finalists_take_little_work() -> None:
    many = [
        finalist(n, PreemptionRatePosterior.prior(None), step_time_log_sd=0.1, steps_log_sd=0.2) for n in range(1, 13)
    ]
    few = calls_of(lambda: possible_runs(many, TERMS, seed=0, draws=10))
    all_of_them = calls_of(lambda: possible_runs(many, TERMS, seed=0))
    assert few < 10_000
    assert all_of_them < 2 * few, "draws are of arrays"


def test_the_same_seed_gives_the_same_draws_and_another_others() -> None:
    many = [finalist(4, PreemptionRatePosterior.prior(None), steps_log_sd=0.2)]
    first, again, other = (possible_runs(many, TERMS, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.total_s, again.total_s)
    assert np.array_equal(first.cost_usd, again.cost_usd)
    assert not np.array_equal(first.total_s, other.total_s)


def test_finalists_do_not_move_each_others_draws() -> None:
    one, two = (
        finalist(2, PreemptionRatePosterior.prior(None), steps_log_sd=0.2),
        finalist(8, PreemptionRatePosterior.prior("<5%")),
    )
    assert np.array_equal(
        possible_runs([one], TERMS, seed=1).total_s[0], possible_runs([one, two], TERMS, seed=1).total_s[0]
    )


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.3])
def test_the_mean_is_the_formula(rate: float) -> None:
    run = finalist(4, known(rate), work_s=40 * 3600.0)
    drawn = possible_runs([run], SURE, seed=0, draws=4000)
    interval = daly_interval_s(3600 / (4 * rate), 10.0)
    expected = 180 + run.work_s * float(factor_at(run.work_s, 4 * rate, interval, 10.0, 210.0))
    assert float(drawn.total_s.mean()) == pytest.approx(expected, rel=0.01)


def test_nothing_unknown_gives_one_figure_and_its_bill() -> None:
    run = finalist(3, None)
    drawn = possible_runs([run], SURE, seed=0, draws=50)
    assert np.ptp(drawn.total_s) == 0
    bill = total_usd(Usage(start_up_s=180.0, work_s=run.work_s), BILLING, machine_usd_per_hour=1.2, machines=3.0)
    assert float(drawn.cost_usd[0, 0]) == pytest.approx(float(bill))


def test_chances_grow_with_the_limits_and_quantiles_with_the_share() -> None:
    drawn = possible_runs([finalist(4, PreemptionRatePosterior.prior(">20%"), steps_log_sd=0.3)], TERMS, seed=0)
    deadlines = [float(drawn.quantile_s(q)[0]) for q in (0.1, 0.5, 0.9, 0.99)]
    assert deadlines == sorted(deadlines)
    chances = [float(drawn.chance(deadline_s=deadline)[0]) for deadline in deadlines]
    assert chances == pytest.approx([0.1, 0.5, 0.9, 0.99], abs=0.002)
    both = float(drawn.chance(budget_usd=float(drawn.quantile_usd(0.9)[0]), deadline_s=deadlines[2])[0])
    assert 0.8 <= both <= 0.9
    assert float(drawn.chance()[0]) == 1.0


def test_a_scarce_pool_widens_and_on_demand_does_not() -> None:
    spot, demand = finalist(8, PreemptionRatePosterior.prior(">20%")), finalist(8, None)
    drawn = possible_runs([spot, demand], SURE, seed=0)
    assert drawn.quantile_s(0.95)[0] > 1.1 * drawn.quantile_s(0.5)[0]
    assert drawn.quantile_s(0.95)[1] == pytest.approx(drawn.quantile_s(0.5)[1])


def test_shocks_stop_a_cluster_less_often() -> None:
    run = finalist(8, known(0.1), work_s=40 * 3600.0)
    single = possible_runs([run], SURE, seed=0).total_s.mean()
    bulk = possible_runs([run], RunTerms(billing=BILLING, start_up_s=180.0, restart_s=210.0, checkpoint_s=10.0), seed=0)
    assert bulk.total_s.mean() < single


def test_losses_are_simulated_up_to_hopeless_hazards() -> None:
    drawn = possible_runs([finalist(256, known(3.0))], SURE, seed=0, draws=100)
    assert np.isfinite(drawn.total_s).all()
    assert float(drawn.chance(deadline_s=1e6)[0]) < 1
