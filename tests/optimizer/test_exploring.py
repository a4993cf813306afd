"""Laws of exploring: it spends no more than it may, begins with a model's least, and stops when it is not worth it.

Probes are runs of layouts that grow, and their steps are read after the warm-up.
"""

from __future__ import annotations

import itertools
from functools import partial

import pytest
from hypothesis import given, strategies as st

from hetopt.api.probes import WARM_UP_STEPS, counts, local_probes, read_sample
from hetopt.core.errors import RunFailed
from hetopt.core.step_samples import Configuration, StepSample
from hetopt.optimizer.exploring import Suggested, suggest
from tests.logs import an_event
from tests.step_model.planted import LARGE, SMALL, grid, measured

from .profiles import make_profile

CANDIDATES = grid((*SMALL, *LARGE))


def _price(asked: Configuration, step_time_s: float | None) -> float:
    return 0.1 * len(asked.nodes)


def _explore(budget_usd: float, candidates: list[Configuration] = CANDIDATES) -> tuple[list[Suggested], str]:
    search = partial(suggest, candidates=candidates, price_usd=_price, budget_usd=budget_usd, catalog={})
    probes: list[Suggested] = []
    known: list[StepSample] = []
    while not isinstance(suggested := search(known, _spent(probes)), str):
        probes.append(suggested)
        layout = tuple(node.workers for node in suggested.configuration.nodes)
        known += measured(grid((layout,)), noise=0.02)
    return probes, suggested


def _spent(probes: list[Suggested]) -> float:
    return sum(_price(probe.configuration, None) for probe in probes)


@pytest.mark.parametrize("budget_usd", [0.1, 0.35, 1.0, 5.0])
def test_no_more_is_spent_than_may_be(budget_usd: float) -> None:
    probes, _ = _explore(budget_usd)
    assert _spent(probes) <= budget_usd + 1e-9
    layouts = [probe.configuration.layout for probe in probes]
    assert len(set(layouts)) == len(layouts), "one launch serves all batch sizes of a layout"


def test_it_stops_when_the_next_probe_is_worth_less_than_it_costs() -> None:
    probes, end = _explore(5.0)
    assert "be worth" in end or "every layout" in end
    for probe in probes:
        assert probe.worth_usd is None or probe.worth_usd >= _price(probe.configuration, None)


PROFILE = make_profile()


@given(st.integers(1, 100))
def test_layouts_grow_from_one_to_all(most: int) -> None:
    found = counts(most)
    assert (found[0], found[-1]) == (1, most)
    assert list(found) == sorted(set(found))
    assert all(after <= 2 * before for before, after in itertools.pairwise(found))


def test_local_workers_share_the_threads() -> None:
    probes = local_probes(PROFILE, 4)
    assert {len(probe.spec.workers) for probe in probes} == {1, 2, 3, 4}
    assert all(probe.configuration.workers == len(probe.spec.workers) for probe in probes)
    assert all(
        worker.threads == 1 for probe in probes for worker in probe.spec.workers if probe.configuration.workers > 1
    )


def test_a_sample_is_the_median_after_the_warm_up() -> None:
    probe = local_probes(PROFILE, 2)[-1]
    events = [
        an_event("step", step=step, step_time_s=time_s, compute_s=[0.1, 0.2])
        for step, time_s in ((WARM_UP_STEPS, 9.0), (15, 0.3), (20, 0.31), (25, 0.9))
    ]
    sample = read_sample(probe, [an_event("training_started"), *events])
    assert sample.step_time_s == 0.31
    assert sample.sync_time_s == pytest.approx(0.11)
    with pytest.raises(RunFailed, match="before it had measured"):
        read_sample(probe, events[:1])
