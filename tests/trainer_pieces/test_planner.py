"""Laws of the planner: it takes what is cheapest, leaves it only for what clearly saves, and says why."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._published_collectives import shared_index
from hetopt.core.comm.cost import TRAINER, LinkSpeed, Operation, dense, gathered, time_s
from hetopt.core.comm.payload_bytes import operations, wire_bytes
from hetopt.core.comm.planner import Option, Planner, PlanState, make_option
from hetopt.core.errors import BadInput
from hetopt.trainer.comm.network_tracker import Timed, measured

WORKERS = 8


def network(link, noise_of=lambda: 1.0):
    samples = []
    for primitive in ("all_reduce", "all_gather", "broadcast"):
        for size in (4096, 262_144, 16 << 20):
            operation = Operation(primitive=primitive, payload_bytes=size, members=WORKERS)
            samples.append(Timed(operation=operation, time_s=link.time_s(operation.terms(TRAINER)) * noise_of()))
    return measured(samples)


def forms(sent_bytes, compress_s=0.0):
    return (
        Option(compressor="topk", collective="all_gather", ratio=0.01, operations=gathered(2 * sent_bytes, WORKERS)),
        Option(
            compressor="topk",
            collective="ar_topk_star",
            ratio=0.01,
            operations=shared_index(sent_bytes, sent_bytes, WORKERS),
            compress_s=compress_s,
        ),
        Option(compressor="identity", collective="all_reduce", ratio=1.0, operations=dense(4e7, WORKERS), gain=1.0),
    )


links = st.builds(
    LinkSpeed,
    latency_s=st.floats(-5, -1.5).map(lambda exponent: 10**exponent),
    bytes_per_s=st.floats(6, 10).map(lambda exponent: 10**exponent),
)


@given(links, st.floats(2, 7))
@settings(max_examples=60)
def test_the_first_plan_is_the_cheapest_option(link, exponent):
    options = forms(10**exponent)
    state, plan = Planner().decide(PlanState(), options, network(link))
    true_s = {option.key: option.compress_s + time_s(option.operations, link, algorithms=TRAINER) for option in options}
    assert true_s[plan.option.key] <= 1.05 * min(true_s.values())
    assert plan.changed
    assert state.chosen == plan.option.key
    assert plan.exchange_s == pytest.approx(time_s(plan.option.operations, link, algorithms=TRAINER), rel=0.05)


@given(links, links, st.floats(2, 7), st.floats(0, 0.3))
@settings(max_examples=60)
def test_an_option_is_left_only_for_a_saving_that_is_worth_it(before, after, exponent, least_saving):
    options, planner = forms(10**exponent), Planner(least_saving=least_saving)
    state, first = planner.decide(PlanState(), options, network(before))
    now = network(after)
    restored = PlanState.model_validate_json(state.model_dump_json())
    assert planner.decide(restored, options, now) == planner.decide(state, options, now)
    _, plan = planner.decide(state, options, now)
    times_s = {option.key: option.compress_s + option.exchange_s(now) for option in options}
    if plan.changed:
        assert times_s[plan.option.key] == min(times_s.values())
        assert times_s[plan.option.key] <= (1 - least_saving) * times_s[first.option.key]
    else:
        assert plan.option == first.option


def test_the_plan_follows_the_network_and_says_why():
    options, planner = forms(4e5), Planner()
    state, plan = planner.decide(PlanState(), options, network(LinkSpeed(latency_s=1e-5, bytes_per_s=1e8)))
    assert plan.option.collective == "ar_topk_star"
    state, plan = planner.decide(state, options, network(LinkSpeed(latency_s=1e-1, bytes_per_s=1e8)))
    assert plan.option.collective == "all_gather"
    assert plan.reason is not None
    assert plan.reason.startswith("topk 1 % (all-gather) instead of topk 1 % (ar-topk-star): expected ")
    assert plan.reason.endswith("% less of an exchange)")
    assert planner.decide(state, options, network(LinkSpeed(latency_s=1e-1, bytes_per_s=1e8)))[1].reason is None


def test_savings_count_against_the_whole_step_where_it_is_known():
    """Half of an exchange of a hundredth of a step is not worth a change."""
    options, planner = forms(4e5), Planner()
    state, _ = planner.decide(PlanState(), options, network(LinkSpeed(latency_s=1e-5, bytes_per_s=1e8)))
    now = network(LinkSpeed(latency_s=1e-2, bytes_per_s=1e8))
    assert planner.decide(state, options, now)[1].changed
    assert not planner.decide(state, options, now, compute_s=10.0)[1].changed


def test_compressing_counts():
    link = LinkSpeed(latency_s=1e-5, bytes_per_s=1e8)
    assert Planner().decide(PlanState(), forms(4e5), network(link))[1].option.collective == "ar_topk_star"
    slow = forms(4e5, compress_s=1.0)
    assert Planner().decide(PlanState(), slow, network(link))[1].option.collective == "all_gather"


def test_an_option_that_is_gone_is_replaced():
    options = forms(4e5)
    state = network(LinkSpeed(latency_s=1e-5, bytes_per_s=1e8))
    _, plan = Planner().decide(PlanState(chosen="topk 0.01 by pigeon"), options, state)
    assert plan.changed
    with pytest.raises(ValueError, match="needs options"):
        Planner().decide(PlanState(), (), state)


@pytest.mark.parametrize(
    ("name", "collective", "ratio", "gain"),
    [
        ("identity", "all_reduce", 1.0, 1.0),
        ("bf16", "all_reduce", 1.0, 1.0),
        ("randomk", "all_reduce", 0.1, 0.1),
        ("topk", "ar_topk_var", 0.01, None),
    ],
)
def test_options_are_priced_by_what_travels(name, collective, ratio, gain):
    option = make_option(name, collective, ratio, numel=10_000, workers=4, compress_s=1e-3)
    assert option.operations == operations(name, 10_000, ratio, workers=4, collective=collective)
    assert sum(operation.payload_bytes for operation in option.operations) == wire_bytes(
        name, 10_000, ratio, workers=4, collective=collective
    )
    assert option.gain == gain


def test_options_that_cannot_be_judged_are_refused():
    with pytest.raises(ValueError, match="is not known"):
        make_option("qsgd_maxnorm", "all_reduce", 1.0, numel=100, workers=2, compress_s=0.0)
    with pytest.raises(BadInput, match="no compressor called 'topkk'"):
        make_option("topkk", "all_gather", 0.1, numel=100, workers=2, compress_s=0.0)
    with pytest.raises(BadInput):
        make_option("dgc", "ar_topk_star", 0.1, numel=100, workers=2, compress_s=0.0)
    with pytest.raises(ValueError, match="ratio and gain"):
        Option(compressor="topk", collective="all_gather", ratio=0.0, operations=())


def test_buckets_hide_the_exchange_behind_the_backward_pass():
    whole = Option(compressor="identity", collective="all_reduce", ratio=1.0, operations=dense(4e6, 4), gain=1.0)
    parts = Option(
        compressor="identity", collective="all_reduce", ratio=1.0, operations=dense(1e6, 4), gain=1.0, buckets=4
    )
    taken = {"compute_s": 0.3, "backward_s": 0.2, "compress_s": 0.0, "exchange_s": 0.1}
    assert whole.step_s(**taken) == pytest.approx(0.4)
    assert parts.step_s(**taken) == pytest.approx(0.1 + 0.05 + 0.025 + 3 * 0.05)
    assert whole.key != parts.key
