"""Which probes are worth it, and the published models as peers."""

from __future__ import annotations

import numpy as np
import pytest

from hetopt.core.step_samples import Node, StepSample
from hetopt.optimizer.step_time.baselines import Goodput, ernest, scavenger
from hetopt.optimizer.step_time.choice import PeerModel, choose, held_out_errors
from hetopt.optimizer.step_time.model import StepTimeModel
from hetopt.optimizer.step_time.observed import observe
from hetopt.optimizer.step_time.posterior import fit
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


def linear(workers: int, batch: int) -> StepSample:
    return StepSample(
        nodes=tuple(Node(type="gpu", workers=1) for _ in range(workers)),
        local_batch_size=batch,
        step_time_s=0.03 + 0.002 * batch + 0.01 * workers,
    )


def test_scavenger_and_ernest_recover_what_they_describe() -> None:
    samples = [linear(workers, batch) for workers in (1, 2, 4, 8) for batch in (8, 32)]
    asked = [linear(16, 64)]
    for peer in (scavenger, ernest):
        assert peer(samples).step_time_s(asked) == pytest.approx([asked[0].step_time_s], rel=1e-6)


def test_goodput_recovers_what_it_describes() -> None:
    def row(nodes: int, workers: int, batch: int) -> StepSample:
        compute = 0.05 + 0.002 * batch
        sync = 0.0 if nodes * workers == 1 else (0.02 if nodes == 1 else 0.06) + 0.002 * max(nodes * workers - 2, 0)
        step = (compute**2 + sync**2) ** 0.5
        return StepSample(
            nodes=tuple(Node(type="gpu", workers=workers) for _ in range(nodes)),
            local_batch_size=batch,
            step_time_s=step,
            sync_time_s=step - compute,
        )

    shown = [row(n, w, b) for n, w in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)) for b in (8, 32, 96)]
    asked = [row(4, 4, 64), row(8, 1, 16)]
    assert Goodput.fit(shown).step_time_s(asked) == pytest.approx([one.step_time_s for one in asked], rel=0.02)


def test_goodput_is_optimistic_until_measured() -> None:
    samples = [linear(1, batch) for batch in (8, 32)]
    fitted = Goodput.fit(samples)
    alone, together = fitted.step_time_s([configuration((1,)), configuration((4, 4))])
    assert together == pytest.approx(alone, rel=0.01)


def test_the_model_is_chosen_by_what_it_was_not_shown() -> None:
    samples = measured(grid(SMALL + LARGE[:2]), noise=0.02)
    errors = held_out_errors(fit(observe(samples)), samples)
    assert set(errors) == {"hetopt", "scavenger", "ernest", "goodput"}
    assert choose(errors) == "hetopt"
    assert choose({}) == "hetopt"
    assert choose({**errors, "ernest": errors["hetopt"] / 2}) == "ernest"
    assert held_out_errors(fit(observe(samples[:5])), samples[:5]) == {}


def test_a_peer_gets_its_interval_from_what_it_was_not_shown() -> None:
    samples = [linear(workers, batch) for workers in range(1, 13) for batch in (8, 32)]
    exact = PeerModel.fit("scavenger", samples)
    wrong = PeerModel.fit("goodput", samples)
    assert exact.half_width < 1e-6 < 0.05 < wrong.half_width
    found = wrong.predict([linear(16, 32), configuration((1,), type_="other")])
    assert found[0].step_time_low_s < linear(16, 32).step_time_s < found[0].step_time_high_s
    assert [one.evidence for one in found] == ["measured", "extrapolated"]
    assert PeerModel.fit("ernest", samples[:2]).half_width > 1, "untested"
