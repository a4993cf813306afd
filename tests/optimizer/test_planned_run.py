"""What the machines of a plan are told about convergence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.optimizer.catalog import Catalog
from hetopt.optimizer.convergence import Convergence
from hetopt.optimizer.plan import Goal
from hetopt.optimizer.planned_run import LEAST_DETERMINISTIC_SHARE, share_beyond_noise
from hetopt.optimizer.recommend import Options, recommend

from .conftest import NOW
from .profiles import make_profile


def pilots_say(steps: float | None, samples: float | None) -> Convergence:
    return Convergence(
        minimum_steps=steps, minimum_samples=samples, noise_scale=None, pilot_batch_sizes=(), log_sd=0.1, basis=""
    )


@given(st.floats(1, 1e5), st.floats(1, 1e8), st.integers(1, 10**6))
def test_the_share_that_compression_stretches_is_what_no_larger_batch_would_save(
    steps: float, samples: float, batch: int
) -> None:
    share = share_beyond_noise(pilots_say(steps, samples), batch)
    assert LEAST_DETERMINISTIC_SHARE <= share <= 1
    expected = steps / (steps + samples / batch)
    assert share == pytest.approx(max(LEAST_DETERMINISTIC_SHARE, expected), abs=1e-4)
    assert share <= share_beyond_noise(pilots_say(steps, samples), 2 * batch)


@pytest.mark.parametrize(
    ("steps", "samples", "share"),
    [(None, None, 1.0), (0.0, 9.0, LEAST_DETERMINISTIC_SHARE), (9.0, 0.0, 1.0)],
)
def test_the_share_where_pilots_say_nothing_or_all(steps: float | None, samples: float | None, share: float) -> None:
    assert share_beyond_noise(pilots_say(steps, samples), 64) == share


def test_a_plan_tells_its_run(catalog: Catalog) -> None:
    options = Options(trials=20, batch_size=256, only_types=("c7a.large",))
    goal = Goal(ends="epochs", amount=1, budget_usd=9.0)
    # The planted pilots: 400 steps and 400,000 samples.
    seen, blind = (
        recommend(make_profile(reached=reached), catalog, goal, options, seed=0, now=NOW) for reached in (True, False)
    )
    assert seen.run.deterministic_share == pytest.approx(256 / (256 + 1000), abs=1e-4)
    assert blind.run.deterministic_share == 1
