"""Fits against planted truths: recovered without noise, bent by no outlier, and as sure as the samples allow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hetopt.core.errors import BadInput
from hetopt.core.step_samples import Configuration, Node, StepSample
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.step_time.model import StepTimeModel
from hetopt.optimizer.step_time.observed import observe
from hetopt.optimizer.step_time.posterior import SLOWEST_MESSAGE_S, fit
from tests.step_model.planted import LARGE, SMALL, configuration, grid, measured, true_log_step


def model(samples: list[StepSample]) -> StepTimeModel:
    return StepTimeModel.fit(observe(samples), {})


def errors(fitted: StepTimeModel, asked: list[Configuration], **changes: float) -> np.ndarray:
    predicted = np.log([one.step_time_s for one in fitted.predict(asked)])
    return np.abs(np.expm1(predicted - true_log_step(asked, **changes)))


def test_what_was_measured_without_noise_is_predicted_within_a_percent() -> None:
    fitted = model(measured(grid(SMALL + LARGE)))
    assert errors(fitted, grid(SMALL + LARGE)).max() < 0.015
    between = [configuration(layout, 48) for layout in (*SMALL, (3, 3, 3), (2,) * 6)]
    assert errors(fitted, between).max() < 0.04


def test_larger_layouts_follow_from_small_ones_and_are_inside_the_interval() -> None:
    fitted = model(measured(grid(SMALL)))
    asked = grid(LARGE)
    assert np.median(errors(fitted, asked)) < 0.12
    found = fitted.predict(asked)
    true = np.exp(true_log_step(asked))
    assert np.mean([one.step_time_low_s <= t <= one.step_time_high_s for one, t in zip(found, true, strict=True)]) > 0.9


def test_a_disturbed_run_is_discounted() -> None:
    samples = measured(grid(SMALL), noise=0.02)
    disturbed = [
        s.model_copy(update={"step_time_s": s.step_time_s * (8 if i == 7 else 1)}) for i, s in enumerate(samples)
    ]
    asked = grid(((1,), (2, 2), (1, 1)))
    assert np.median(errors(model(disturbed), asked)) < np.median(errors(model(samples), asked)) + 0.03


@pytest.mark.parametrize("probe", LARGE[1:])
def test_a_congested_launch_bends_no_other_layout(probe: tuple[int, ...]) -> None:
    """Ten times as slow in every row; a second layout that was not contradicts it."""
    samples = measured(grid(SMALL), noise=0.02)
    others = [layout for layout in LARGE if layout != probe]
    launch = [s.model_copy(update={"step_time_s": 10 * s.step_time_s}) for s in measured(grid((probe,)), noise=0.02)]
    before, after = (np.median(errors(model([*samples, *more]), grid(tuple(others)))) for more in ([], launch))
    assert after < 1.1 * before + 0.05
    second = measured(grid((others[0],)), noise=0.02)
    asked = grid(tuple(others[1:]))
    alone, both = (np.median(errors(model([*samples, *second, *more]), asked)) for more in ([], launch))
    assert both < 1.1 * alone + 0.03


def test_a_regime_that_two_layouts_show_is_followed() -> None:
    """Full machines share what is between their GPUs, which the small ones did not tell."""
    samples = measured(grid(SMALL), noise=0.02, host_sharing=1.0, host_ratio=0.5)
    probes = measured(grid(((8,), (8, 8))), noise=0.02, host_sharing=1.0, host_ratio=0.5)
    asked = grid(((8, 8, 8), (8,) * 4))
    assert np.median(errors(model([*samples, *probes]), asked, host_sharing=1.0, host_ratio=0.5)) < 0.15


def test_intervals_cover_layouts_that_were_not_measured() -> None:
    """Half of the layouts are measured; of the others, about nine of ten single runs must lie inside."""
    inside = []
    for seed in range(12):
        generator = np.random.default_rng(seed)
        order = generator.permutation(len(SMALL + LARGE))
        layouts = [(SMALL + LARGE)[index] for index in order]
        shown, asked = grid(tuple(layouts[:7])), grid(tuple(layouts[7:]))
        fitted = model(measured(shown, noise=0.06, seed=seed))
        for one, run in zip(fitted.predict(asked), measured(asked, noise=0.06, seed=100 + seed), strict=True):
            inside.append(one.step_time_low_s <= run.step_time_s <= one.step_time_high_s)
    assert 0.82 <= np.mean(inside) <= 0.995


def test_an_interval_is_wide_where_the_samples_are_silent() -> None:
    def width(samples: list[StepSample], asked: Configuration) -> float:
        found = model(samples).predict([asked])[0]
        return found.step_time_high_s / found.step_time_low_s

    two_nodes = configuration((1, 1), 32)
    alone = measured(grid(((1,),)))
    host = measured(grid(((1,), (2,), (4,))))
    both = measured(grid(SMALL))
    assert width(alone, two_nodes) > 3 * width(both, two_nodes)
    assert width(alone, two_nodes) > width(host, two_nodes) > width(both, two_nodes)
    assert width(both, configuration((4,) * 16)) > width(both, configuration((2, 2)))
    one_size = measured([configuration((1,), 32)])
    assert width(one_size, configuration((1,), 256)) > 2 > 1.4 > width(one_size, configuration((1,), 32))


@given(
    most=st.sampled_from([1, 2, 4]),
    nodes=st.integers(1, 3),
    batch=st.sampled_from([8, 64, 512]),
    network=st.floats(-6, 1),
    host_ratio=st.floats(-2, 1),
    host_sharing=st.floats(0, 1),
    host_latency=st.floats(-11, -5),
)
def test_an_interval_never_narrows_with_more_workers_on_a_machine_than_were_measured(
    most: int, nodes: int, batch: int, network: float, host_ratio: float, host_sharing: float, host_latency: float
) -> None:
    """Above the median never; as a whole by no more than 2 %, as what makes steps shorter may be hidden."""
    layouts = tuple(layout for layout in SMALL if max(layout) <= most)
    truth = {
        "network": network,
        "host_ratio": host_ratio,
        "host_sharing": host_sharing,
        "host_latency": host_latency,
    }
    fitted = model(measured(grid(layouts), noise=0.02, seed=0, **truth))
    found = fitted.predict([configuration((crowd,) * nodes, batch) for crowd in range(most, 9)])
    above = [np.log(one.step_time_high_s / one.step_time_s) for one in found]
    whole = [np.log(one.step_time_high_s / one.step_time_low_s) for one in found]
    assert np.diff(above).min() > -1e-9
    assert (np.maximum.accumulate(whole) - whole).max() < 0.02


def test_more_gpus_than_a_processor_joins_are_unknown_until_one_such_machine_was_measured_or_a_switch_joins_them() -> (
    None
):
    def width(type_: str, *crowds: int) -> float:
        shown = [configuration((crowd,), 32, type_=type_) for crowd in crowds]
        fitted = StepTimeModel.fit(observe(measured(shown, noise=0.01)), load_catalog().instance_types)
        found = fitted.predict([configuration((8,), 32, type_=type_)])[0]
        return float(np.log(found.step_time_high_s / found.step_time_low_s))

    assert width("my-server", 1, 2, 4) > 1.5 * width("my-server", 1, 2, 6)
    assert width("g4dn.metal", 1, 2, 4) > 1.5 * width("p4d.24xlarge", 1, 2, 4)


@given(
    latency_s=st.floats(1e-5, 8e-3),
    network=st.floats(-6, 1),
    host_ratio=st.floats(-2, 1),
    most=st.integers(1, 4),
    compute=st.sampled_from([SMALL, ((1,), (2,), (4,))]),
)
def test_the_longest_message_that_samples_allow_is_no_shorter_than_the_true_one(
    latency_s: float, network: float, host_ratio: float, most: int, compute: tuple[tuple[int, ...], ...]
) -> None:
    layouts = tuple(layout for layout in compute if max(layout) <= most)
    truth = {"host_latency": np.log(latency_s), "network": network, "host_ratio": host_ratio}
    found = fit(observe(measured(grid(layouts), **truth))).slowest_message_s
    assert min(latency_s, 0.95 * SLOWEST_MESSAGE_S) * 0.95 <= found <= SLOWEST_MESSAGE_S


def test_messages_that_show_are_known_and_those_that_are_hidden_are_not() -> None:
    """In a step of 60 ms, six messages of 5 ms show; beside bytes that take 400 ms, what longer ones add is noise.

    A single worker sends none.
    """
    showing = measured(grid(SMALL), network=-6, host_latency=np.log(5e-3))
    assert fit(observe(showing)).slowest_message_s < 1.3 * 5e-3
    alone = measured(grid(((1,),)))
    assert fit(observe(alone)).slowest_message_s == SLOWEST_MESSAGE_S
    beside_bytes = measured(grid(SMALL), network=-1, host_latency=np.log(1e-5))
    assert fit(observe(beside_bytes)).slowest_message_s == SLOWEST_MESSAGE_S
    quick = measured(grid(SMALL), network=-6, host_latency=np.log(1e-5))
    assert fit(observe(quick)).slowest_message_s < 0.5 * SLOWEST_MESSAGE_S


def test_prediction_does_not_depend_on_the_order_of_samples_or_on_company() -> None:
    samples = measured(grid(SMALL), noise=0.03)
    asked = [*grid(LARGE)[:7], *grid(SMALL)[:3]]
    first = model(samples).predict(asked)
    turned = model(samples[::-1])
    assert [one.step_time_s for one in turned.predict(asked)] == pytest.approx(
        [one.step_time_s for one in first], rel=0.01
    )
    alone = [model(samples).predict([one])[0].step_time_s for one in asked]
    assert alone == pytest.approx([one.step_time_s for one in first])


def test_synchronization_tells_computing_from_exchanging() -> None:
    """Without a single worker among the samples, only the reported synchronization shows what computing takes."""
    asked = [configuration((1,), size) for size in (8, 32, 128)]
    plain = measured(grid(((2, 2), (1, 1), (1, 1, 1))))
    told = [
        s.model_copy(update={"sync_time_s": max(0.0, s.step_time_s - 0.02 - 0.0011 * s.batch_sizes[0])}) for s in plain
    ]
    assert np.median(errors(model(told), asked)) < max(0.08, np.median(errors(model(plain), asked)))


def test_two_types_are_told_apart() -> None:
    def nodes(*types: str) -> tuple[Node, ...]:
        return tuple(Node(type=type_, workers=1) for type_ in types)

    slow = {"fast": 1.0, "slow": 2.5}
    samples = [
        StepSample(nodes=nodes(type_), local_batch_size=size, step_time_s=factor * (0.02 + 0.001 * size))
        for type_, factor in slow.items()
        for size in (8, 32, 128)
    ]
    samples += [
        StepSample(nodes=nodes("fast", "slow"), local_batch_size=(96, 32), step_time_s=0.16),
        StepSample(nodes=nodes("fast", "fast"), local_batch_size=64, step_time_s=0.11),
    ]
    found = model(samples).predict(
        [
            Configuration(nodes=nodes("fast"), local_batch_size=64),
            Configuration(nodes=nodes("slow"), local_batch_size=64),
            Configuration(nodes=nodes("slow", "fast"), local_batch_size=64),
        ]
    )
    assert [one.step_time_s for one in found[:2]] == pytest.approx([0.084, 0.21], rel=0.05)
    assert found[2].step_time_s > 0.2


def test_types_of_the_catalogue_follow_from_a_measured_one() -> None:
    instances = load_catalog().instance_types
    samples = [
        StepSample(nodes=(Node(type="g4dn.xlarge", workers=1),), local_batch_size=size, step_time_s=0.02 + 0.001 * size)
        for size in (8, 32, 128)
    ]
    fitted = StepTimeModel.fit(observe(samples), instances)
    asked = [configuration((1,), 64, type_=type_) for type_ in ("g4dn.xlarge", "g4dn.2xlarge", "g5.xlarge")]
    own, sibling, other = fitted.predict(asked)
    assert [one.evidence for one in (own, sibling, other)] == ["measured", "interpolated", "extrapolated"]
    assert sibling.step_time_s == pytest.approx(own.step_time_s)
    assert other.step_time_s < own.step_time_s
    widths = [one.step_time_high_s / one.step_time_low_s for one in (own, sibling, other)]
    assert widths == sorted(widths)
    for type_ in ("my-server", "c7i.large"):
        with pytest.raises(BadInput, match=type_):
            fitted.predict([configuration((1,), type_=type_)])


def test_a_compressor_that_was_measured_is_known_better() -> None:
    dense = measured(grid(SMALL))
    asked = configuration((2, 2), 32, topk=0.01)
    sparse = StepSample(**asked.model_dump(), step_time_s=0.07)

    def width(fitted: StepTimeModel) -> float:
        found = fitted.predict([asked])[0]
        return found.step_time_high_s / found.step_time_low_s

    known = model([*dense, sparse])
    assert known.predict([asked])[0].step_time_s == pytest.approx(0.07, rel=0.1)
    assert width(known) < width(model(dense))


LAYOUTS = st.lists(st.integers(1, 16), min_size=1, max_size=5).map(tuple)


@given(
    rows=st.lists(
        st.tuples(LAYOUTS, st.integers(1, 4096), st.floats(1e-3, 10.0), st.sampled_from([None, 0.0, 0.5, 1.0])),
        min_size=1,
        max_size=12,
    ),
    asked=LAYOUTS,
    batch=st.integers(1, 10**6),
)
def test_whatever_is_measured_predictions_are_finite_and_inside_their_intervals(
    rows: list[tuple[tuple[int, ...], int, float, float | None]], asked: tuple[int, ...], batch: int
) -> None:
    samples = [
        StepSample(
            nodes=tuple(Node(type="gpu", workers=workers) for workers in layout),
            local_batch_size=size,
            step_time_s=time_s,
            sync_time_s=None if waiting is None else waiting * time_s,
        )
        for layout, size, time_s, waiting in rows
    ]
    found = model(samples).predict([configuration(asked, batch)])[0]
    assert 0 < found.step_time_low_s < found.step_time_s < found.step_time_high_s < np.inf


# --- Which probes are worth it


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
