"""Laws of exploring: it spends no more than it may, begins with a model's least, and stops when it is not worth it."""

from __future__ import annotations

import pytest

from hetopt.core.errors import BadInput
from hetopt.core.step_samples import Configuration, Node, StepSample
from hetopt.optimizer.exploring import Exploration, Measured, Probed, Stopped
from tests.step_model.planted import LARGE, SIZES, SMALL, configuration, grid, measured

CANDIDATES = grid((*SMALL, *LARGE))


def _price(asked: Configuration, step_time_s: float | None) -> float:
    return 0.1 * len(asked.nodes)


def _measure(asked: Configuration) -> Measured:
    layout = tuple(node.workers for node in asked.nodes)
    return Measured(samples=tuple(measured(grid((layout,)), noise=0.02)), usd=_price(asked, None))


def _explore(budget_usd: float, candidates: list[Configuration] = CANDIDATES) -> tuple[list[Probed], Stopped]:
    search = Exploration(candidates=candidates, price_usd=_price, budget_usd=budget_usd, catalog={})
    *probes, end = search.run([], _measure)
    assert isinstance(end, Stopped)
    return [probe for probe in probes if isinstance(probe, Probed)], end


@pytest.mark.parametrize("budget_usd", [0.1, 0.35, 1.0, 5.0])
def test_no_more_is_spent_than_may_be(budget_usd: float) -> None:
    probes, end = _explore(budget_usd)
    assert end.spent_usd == pytest.approx(sum(probe.measured.usd for probe in probes))
    assert end.spent_usd <= budget_usd + 1e-9
    layouts = [probe.configuration.layout for probe in probes]
    assert len(set(layouts)) == len(layouts), "one launch serves all batch sizes of a layout"


def test_it_begins_with_the_least_and_then_looks_far() -> None:
    probes, _ = _explore(5.0)
    assert probes[0].configuration.workers == 1
    assert probes[0].worth_usd is None
    assert max(len(probe.configuration.nodes) for probe in probes[2:4]) > 2


def test_it_stops_when_the_next_probe_is_worth_less_than_it_costs() -> None:
    probes, end = _explore(5.0)
    assert "be worth" in end.reason or "every layout" in end.reason
    for probe in probes:
        assert probe.worth_usd is None or probe.worth_usd >= _price(probe.configuration, None)


def test_everything_measured_is_the_end() -> None:
    few = [configuration(layout, size) for layout in ((1,), (2,)) for size in SIZES]
    probes, end = _explore(100.0, few)
    assert len(probes) == 2
    assert end.reason == "every layout was measured"


def test_a_type_that_nothing_tells_about_is_measured_before_it_is_predicted() -> None:
    mixed = [
        *(configuration(layout, 32) for layout in ((1,), (1, 1), (1, 1, 1))),
        Configuration(nodes=(Node(type="gpu", workers=1), Node(type="other", workers=1)), local_batch_size=32),
    ]
    search = Exploration(candidates=mixed, price_usd=_price, budget_usd=10.0, catalog={})
    asked: list[Configuration] = []

    def measure(one: Configuration) -> Measured:
        asked.append(one)
        sample = StepSample(nodes=one.nodes, local_batch_size=32, step_time_s=0.1 * len(one.nodes))
        return Measured(samples=(sample,), usd=0.1)

    assert isinstance(list(search.run([], measure))[-1], Stopped)
    assert mixed[-1] in asked


def test_nothing_to_do_is_refused() -> None:
    with pytest.raises(BadInput, match="no configuration to explore"):
        Exploration(candidates=[], price_usd=_price, budget_usd=1.0, catalog={})
    with pytest.raises(BadInput, match="budget"):
        Exploration(candidates=CANDIDATES, price_usd=_price, budget_usd=0.0, catalog={})
