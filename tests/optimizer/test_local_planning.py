"""Planning with workers that average parameters now and then: what it costs in steps, and when it may be chosen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.backends.prediction.local_plan import predict_on_local
from hetopt.core.comm.options import AVERAGED, ROUNDED
from hetopt.core.errors import BadInput
from hetopt.core.profile import Evaluation, Pilot, PilotSync, Profile
from hetopt.core.run_rules import why_not_local
from hetopt.core.step_samples import Compression
from hetopt.core.synchronization import Synchronization, parse_sync, spell_sync
from hetopt.optimizer.convergence.local_penalty import (
    COEFFICIENT_SD,
    MOST_TIMES_WORKERS,
    LocalGate,
    LocalPenalty,
    LocalPilot,
    distance,
    fit_local_penalty,
)
from hetopt.optimizer.fit import fit
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from hetopt.optimizer.search.exchange_menu import exchange_menu
from hetopt.optimizer.step_time.design_matrix import exchange_of
from hetopt.optimizer.step_time.local_options import measured_options

from .conftest import NOW
from .profiles import make_profile

SIXTEENTH = Synchronization(name="local-sgd", every_steps=16)
DENSE_STEPS = 1000.0

shares = st.floats(0.01, 1.0)
counts = st.integers(1, 64)


def local_pilot(
    sync: Synchronization = SIXTEENTH,
    *,
    share: float = 1 / 16,
    workers: int = 2,
    reached: float | None = 1050,
    trained: float | None = None,
) -> LocalPilot:
    return LocalPilot(
        sync=sync,
        share=share,
        workers=workers,
        dense_steps=DENSE_STEPS,
        steps_trained=trained or reached or 4000,
        steps_to_target=reached,
    )


@given(shares, shares, counts, counts, st.floats(0, 3))
def test_rarer_averages_of_more_workers_never_cost_less(one: float, other: float, n: int, m: int, c: float) -> None:
    penalty, (rare, often), (few, many) = LocalPenalty(coefficient=c), sorted((one, other)), sorted((n, m))
    assert float(penalty.inflation(often, few)) >= 1
    assert penalty.inflation(often, few) <= penalty.inflation(rare, many) * (1 + 1e-12)
    assert penalty.log_sd(often, few) <= penalty.log_sd(rare, many) + 1e-12
    assert float(penalty.inflation(1.0, many)) == float(penalty.inflation(rare, 1)) == 1
    assert float(penalty.log_sd(1.0, many)) == float(penalty.log_sd(rare, 1)) == 0


def test_pilots_teach_what_it_costs() -> None:
    planted = [
        local_pilot(share=share, workers=workers, reached=DENSE_STEPS * (1 + 0.1 * float(distance(share, workers))))
        for share, workers in ((0.05, 2), (0.02, 4), (0.1, 8))
    ]
    penalty = fit_local_penalty(planted)
    assert penalty.coefficient == pytest.approx(0.1, abs=0.03)
    assert penalty.coefficient_sd < COEFFICIENT_SD / 3
    assert penalty.pilots == 3
    assert fit_local_penalty([local_pilot(reached=None)]) == LocalPenalty()


def test_nothing_is_planned_that_no_pilot_speaks_for() -> None:
    gate = LocalGate(pilots=(local_pilot(),))
    assert gate.objection(SIXTEENTH, 1 / 16) is None
    assert gate.objection(SIXTEENTH.model_copy(update={"every_steps": 4}), 1 / 4) is None, "oftener than measured"
    for sync, share in (
        (SIXTEENTH.model_copy(update={"every_steps": 32}), 1 / 32),
        (SIXTEENTH.model_copy(update={"momentum": "average"}), 1 / 16),
        (Synchronization(name="selsync", delta="auto"), 0.5),
    ):
        said = gate.objection(sync, share)
        assert said is not None
        assert f'profile with `sync="{spell_sync(sync)}"`' in said
    assert gate.most_workers(SIXTEENTH, 1 / 16) == 2 * MOST_TIMES_WORKERS


def test_a_pilot_that_fell_short_closes_the_gate() -> None:
    failed = LocalGate(pilots=(local_pilot(share=1 / 16, reached=None, trained=9000),))
    said = failed.objection(SIXTEENTH, 1 / 16)
    assert said is not None
    assert "did not reach the target in 9000 steps" in said
    rarer = LocalGate(pilots=(local_pilot(), *failed.pilots))
    assert rarer.objection(SIXTEENTH, 1 / 16) is not None
    too_short = LocalGate(pilots=(local_pilot(), local_pilot(reached=None, trained=1200)))
    assert too_short.objection(SIXTEENTH, 1 / 16) is None, "that one proves nothing"


def test_what_was_measured_is_offered_and_oftener_averages_too() -> None:
    def offered(pilot: LocalPilot, *, to_target: bool = True) -> dict[str, int]:
        gate = LocalGate(pilots=(pilot,))
        options = measured_options(gate, to_target=to_target, dataset_size=1000, batch=10)
        return {spell_sync(option.sync): option.most_workers for option in options}

    assert offered(local_pilot()) == {"local-sgd(16)": 8, "local-sgd(8)": 8, "local-sgd(4)": 8}
    assert list(offered(local_pilot(parse_sync("local-sgd(4)"), share=1 / 4))) == ["local-sgd(4)", "local-sgd(2)"]
    steered = parse_sync("selsync(auto,share=0.2)")
    assert [parse_sync(text).synchronised_share for text in offered(local_pilot(steered, share=0.2))] == [0.2, 0.4]
    fixed = parse_sync("selsync(0.3)")
    assert offered(local_pilot(fixed, share=0.1)) == {"selsync(0.3)": 8}
    assert not offered(local_pilot(parse_sync("fedavg(1,0.1)"), share=0.1))
    assert not offered(local_pilot(reached=None))
    assert not offered(local_pilot(reached=1700), to_target=False), "a run of fixed length may not lose so much"


SLOW_LINKS = make_profile(
    parameters=25_000_000, per_sample_s=0.02, minimum_steps=2000, minimum_samples=3e6, pilots=(64, 256), gain=False
)


def piloted(profile: Profile, *, stretch: float = 1.05, policy: str = "local-sgd(8)", workers: int = 4) -> Profile:
    """With pilots that averaged parameters, and needed so many times as many steps."""
    dense = profile.pilots[0]
    assert dense.steps_to_target is not None
    steps = stretch * dense.steps_to_target
    pilots = tuple(
        Pilot(
            global_batch_size=dense.global_batch_size,
            learning_rate_scale=dense.learning_rate_scale,
            seed=seed,
            evaluations=(Evaluation(step=round(steps) + 1, metric=0.9),),
            steps_to_target=steps,
            sync=PilotSync(policy=policy, workers=workers, share=1 / 8),
        )
        for seed in (1, 2)
    )
    return profile.model_copy(update={"pilots": (*profile.pilots, *pilots)})


def planned(catalog: Catalog, profile: Profile, **options: object) -> Plan:
    few = Options(
        trials=0,
        mixed_types=1,
        max_workers=16,
        only_types=("c7a.large", "c7a.xlarge"),
        **{"market": "spot", "objective": "fastest", **options},
    )  # type: ignore[arg-type]
    return recommend(PlanRequest(profile, catalog, Goal(ends="target", budget_usd=20.0), few), seed=0, now=NOW)


@pytest.fixture(scope="module")
def measured(catalog: Catalog) -> Plan:
    return planned(catalog, piloted(SLOW_LINKS))


@pytest.fixture(scope="module")
def unmeasured(catalog: Catalog) -> Plan:
    return planned(catalog, SLOW_LINKS)


def test_local_pilots_are_no_evidence_about_dense_training() -> None:
    with_pilots, without = fit(piloted(SLOW_LINKS, stretch=3.0)).convergence, fit(SLOW_LINKS).convergence
    assert with_pilots.log_sd == without.log_sd
    assert len(with_pilots.local.pilots) == 2
    assert with_pilots.local.pilots[0].share == 1 / 8


def test_a_measured_policy_is_chosen_where_links_are_slow(measured: Plan, unmeasured: Plan) -> None:
    assert measured.chosen.sync.name == "local-sgd"
    assert measured.run.sync == measured.chosen.sync
    assert measured.run.is_local
    assert (measured.run.compression.name, measured.run.ratio_policy) == ("int8", "fixed"), "averages, rounded"
    assert why_not_local(measured.run) is None
    assert len(measured.run.workers) <= 4 * MOST_TIMES_WORKERS
    # Fewer bits save most of what averaging does, and cost no steps to speak of.
    assert unmeasured.chosen.compression.name in ROUNDED
    assert measured.chosen.prediction.total_s.value < 0.95 * unmeasured.chosen.prediction.total_s.value
    assert Plan.from_json(measured.to_json(), origin="here") == measured
    said = " ".join(measured.explanation)
    assert "as 2 pilots measured" in said
    assert "asked for" not in said


@pytest.mark.parametrize("to_target", [True, False])
def test_averages_are_priced_as_sums_sent_alike_and_as_rarely(to_target: bool) -> None:
    """Bytes, messages and own work of a share of the steps; the steps of the rounding times those of the averaging."""
    model = fit(piloted(SLOW_LINKS))
    [local, *_] = measured_options(model.convergence.local, to_target=to_target, dataset_size=1000, batch=10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetopt.optimizer.search.exchange_menu.drop_beaten", tuple)
        offered = exchange_menu(model, minimum_gain=0.05, max_workers=8, local=[local], to_target=to_target).options
    averages = [option for option in offered if option.sync.is_local]
    assert [option.compression.name for option in averages] == list(AVERAGED)
    for average in averages:
        assert not average.under_backward
        [summed] = [one for one in offered if one.compression == average.compression and not one.sync.is_local]
        for name in ("messages", "traffic_bytes", "compress_s"):
            price, of_a_sum = (getattr(one, name)[: local.most_workers + 1] for one in (average, summed))
            assert price == pytest.approx(local.told.share * of_a_sum), name
        assert average.stretch == pytest.approx(local.stretch(np.maximum(np.arange(9), 1)) * summed.stretch)
        assert (average.stretch_log_sd >= summed.stretch_log_sd).all()
        assert (average.gain, average.late.tolist()) == (summed.gain, summed.late.tolist())


def test_a_policy_that_costs_too_many_steps_is_not_chosen(catalog: Catalog) -> None:
    assert not planned(catalog, piloted(SLOW_LINKS, stretch=4.0)).chosen.sync.is_local


def test_what_is_asked_for_is_planned_with_and_its_doubt_is_wide(catalog: Catalog, unmeasured: Plan) -> None:
    asked = planned(catalog, SLOW_LINKS, sync=parse_sync("selsync(auto,share=0.05)"))
    assert spell_sync(asked.run.sync) == "selsync(auto, share=0.05)"
    assert asked.run.compression.name == "int8", "when workers average was asked for, not how"
    steps, dense = asked.chosen.prediction.steps, unmeasured.chosen.prediction.steps
    assert steps.high / steps.value > 1.2 * dense.high / dense.value
    assert any(sentence.startswith("It was asked for: ") for sentence in asked.explanation)
    assert planned(catalog, piloted(SLOW_LINKS), sync=Synchronization()).chosen == unmeasured.chosen


def test_a_launch_here_expects_the_steps_that_the_plan_does(measured: Plan) -> None:
    told = predict_on_local(measured, (1.0, 1.0))
    summing = measured.run.model_copy(update={"sync": Synchronization()})
    dense = predict_on_local(measured.model_copy(update={"run": summing}), (1.0, 1.0))
    assert told.prediction.steps.value > dense.prediction.steps.value
    assert told.prediction.communication_s < dense.prediction.communication_s
    assert any("as 2 pilots measured" in note for note in told.notes)


def test_predictions_of_steps_know_what_is_sent_now_and_then() -> None:
    whole, eighth = exchange_of(4, None), exchange_of(4, None, "local-sgd(8)")
    assert (8 * eighth.messages, 8 * eighth.traffic) == (whole.messages, whole.traffic)
    assert whole.overlapped
    assert not eighth.overlapped, "an average is made after the step"
    assert exchange_of(4, None, "bsp") == whole
    assert exchange_of(1, None, "local-sgd(8)").messages == 0
    for compression, sync, said in (
        (Compression(name="topk", ratio=0.1), "local-sgd(8)", "leave most"),
        (Compression(name="int8"), "local-sgd(8)", "when a run is launched"),
        (None, "fedavg(1,0.1)", "depends on more than the configuration"),
        (None, "locale-sgd(8)", "no synchronisation called"),
    ):
        with pytest.raises(BadInput, match=said):
            exchange_of(4, compression, sync)
