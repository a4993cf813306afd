"""Which probes are worth it."""

from __future__ import annotations

import numpy as np
import pytest

from hetopt.optimizer.step_time.model import StepTimeModel
from hetopt.optimizer.step_time.observed import observe
from hetopt.optimizer.step_time.probes import OF_SOCKETS
from tests.step_model.planted import LARGE, SMALL, configuration, grid, measured


@pytest.fixture(scope="module")
def small() -> StepTimeModel:
    return StepTimeModel.fit(observe(measured(grid(SMALL), noise=0.02)), {})


def test_a_layout_past_the_change_of_regime_is_worth_more_than_small_ones(small: StepTimeModel) -> None:
    asked = grid(((3,), (1, 2), (2, 1), *LARGE))
    probe = small.suggest(asked, 1, [None] * len(asked))[0]
    assert len(asked[probe.row].nodes) > 2
    assert probe.removed > 0.3


def test_each_further_probe_is_another_layout_and_worth_less(small: StepTimeModel) -> None:
    asked = grid(LARGE)
    probes = small.suggest(asked, 10, [None] * len(asked))
    assert len({asked[probe.row].layout for probe in probes}) == len(probes) == len(LARGE)
    removed = [probe.removed for probe in probes]
    assert removed == sorted(removed, reverse=True)
    assert 0 < sum(removed) <= 1


def test_full_machines_come_first_where_how_they_are_joined_is_the_most_that_is_unknown(small: StepTimeModel) -> None:
    asked = grid((*LARGE, (6,), (8,), (8, 8)))
    first, second = small.suggest(asked, 2, [None] * len(asked))
    assert max(node.workers for node in asked[first.row].nodes) > 4
    assert first.about == OF_SOCKETS
    assert second.about != OF_SOCKETS
    assert first.removed + second.removed <= 1


def test_measuring_a_probe_narrows_the_intervals_by_what_was_promised() -> None:
    samples = measured(grid(SMALL), noise=0.02)
    asked = grid(LARGE)
    before = StepTimeModel.fit(observe(samples), {})
    probe = before.suggest(asked, 1, [None] * len(asked))[0]
    after = StepTimeModel.fit(observe([*samples, *measured([asked[probe.row]])]), {})

    def mean_width(fitted: StepTimeModel) -> float:
        return float(np.mean([np.log(one.step_time_high_s / one.step_time_low_s) for one in fitted.predict(asked)]))

    assert mean_width(after) < mean_width(before) * np.sqrt(1 - 0.5 * probe.removed)


def test_prices_decide_between_probes_that_tell_the_same(small: StepTimeModel) -> None:
    asked = [configuration(layout) for layout in LARGE]
    free = small.suggest(asked, 1, [1.0] * len(asked))[0].row
    usd = [1000.0 if row == free else 1.0 for row in range(len(asked))]
    assert small.suggest(asked, 1, usd)[0].row != free
    assert small.suggest(asked, 1, usd)[0].usd == 1.0
