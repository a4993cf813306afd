"""What averages promise a run under sync ``auto``, and what it is once it has settled for them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.core.comm.cost import LinkSpeed
from hetopt.core.comm.options import AVERAGED, make_option
from hetopt.core.run_rules import why_not_local, why_not_settling
from hetopt.core.run_spec import Compression, StopRule
from hetopt.core.synchronization import Synchronization
from hetopt.trainer.policies.ratio.auto import (
    EVERY_STEPS,
    LEAST_SAVED_BY_AVERAGES,
    MORE_STEPS,
    MOST_EVERY_STEPS,
    AutoRatio,
    Outlook,
    StepTimes,
    steps_between,
)
from hetopt.trainer.policies.ratio.policy import Verdict
from hetopt.trainer.sync.sync_assembly import Settled
from tests.thinned import few

from .runs import run_of
from .virtual_exchange import VirtualRun, options, run

WORKERS, NUMEL = 4, 1_000_000


def rounded(name, compress_s=1e-3):
    return make_option(name, "all_reduce", 1.0, numel=NUMEL, workers=WORKERS, compress_s=compress_s)


EVERYTHING = [*options(NUMEL, WORKERS), rounded("bf16"), rounded("int8"), rounded("int4")]


def looked_at(*, compute_s, bytes_per_s, turning=0.5, tries_twins=False, noise=0.0, seed=0):
    """A run that has looked around for a while: what it knows, and the truth."""
    link = LinkSpeed(latency_s=1e-3, bytes_per_s=bytes_per_s)
    virtual = VirtualRun(
        workers=WORKERS, links=[link], compute_s=compute_s, turning=turning, kept=0.25, noise=noise, seed=seed
    )
    policy = AutoRatio(options=tuple(EVERYTHING), coefficient=turning, most_lost=0.05, tries_twins=tries_twins)
    _, state = run(policy, virtual, until_step=100)
    return Outlook(policy, state, virtual.fresh()), virtual


def knowing(outlook, **known):
    """The same, but for what it knows."""
    return replace(outlook, state=outlook.state.model_copy(update=known))


def per_progress_s(average_s, compute_s, every_steps):
    """Time of what a step with every gradient would have been progress for."""
    return (1 + MORE_STEPS * every_steps) * max(compute_s, average_s / every_steps)


def averages_s(virtual):
    """The same, rounded as is quickest and as often as is best."""
    average_s = min(virtual.step_s(one) - virtual.compute_s for one in EVERYTHING if one.compressor in AVERAGED)
    gaps = range(EVERY_STEPS, MOST_EVERY_STEPS + 1)
    return min(per_progress_s(average_s, virtual.compute_s, gap) for gap in gaps)


@pytest.mark.parametrize("seed", few(10, range(30)))
def test_they_are_promised_where_they_are_clearly_quicker_and_nowhere_else(seed):
    rng = random.Random(seed)
    outlook, virtual = looked_at(
        compute_s=10 ** rng.uniform(-2, 0.5),
        bytes_per_s=10 ** rng.uniform(5.5, 8.5),
        turning=rng.uniform(0.1, 2),
        noise=0.03,
        seed=seed,
    )
    # As the policy may see them: what would lose too many steps is no choice.
    choices = [one for one in EVERYTHING if virtual.slowdown(virtual.settled(one)) <= 1.05]
    best_s = min(virtual.per_progress_s(one) for one in choices)
    saving = 1 - averages_s(virtual) / best_s
    promise = outlook.averages()
    if saving > LEAST_SAVED_BY_AVERAGES + 0.1:
        assert promise is not None
        assert promise.saving == pytest.approx(saving, abs=0.1)
        assert promise.rounding.compressor in AVERAGED
        assert EVERY_STEPS <= promise.every_steps <= MOST_EVERY_STEPS
        assert promise.stretch == pytest.approx(1 + MORE_STEPS * promise.every_steps)
    if saving < LEAST_SAVED_BY_AVERAGES - 0.1:
        assert promise is None


@given(average_s=st.floats(0, 1e3), compute_s=st.floats(1e-3, 1e3))
def test_no_other_gap_promises_the_target_sooner(average_s, compute_s):
    chosen = steps_between(average_s, compute_s, most=MOST_EVERY_STEPS)
    best_s = per_progress_s(average_s, compute_s, chosen)
    for gap in range(EVERY_STEPS, MOST_EVERY_STEPS + 1):
        # Of two whole numbers of steps, the one at which nobody waits is at most one step of averages behind.
        assert best_s <= (1 + MORE_STEPS) * per_progress_s(average_s, compute_s, gap)


@given(
    compute_s=st.floats(0, 1e3),
    averages_s=st.lists(st.floats(0, 1e4), min_size=2, max_size=2),
    most=st.integers(EVERY_STEPS, 50),
)
def test_the_longer_an_average_takes_the_rarer_it_is(compute_s, averages_s, most):
    shorter, longer = (steps_between(average_s, compute_s, most=most) for average_s in sorted(averages_s))
    assert EVERY_STEPS <= shorter <= longer <= most


def test_it_is_not_told_before_anything_was_seen_or_while_twins_may_still_tell():
    outlook, _ = looked_at(compute_s=0.02, bytes_per_s=1e6, tries_twins=True)
    undecided = Verdict(ratio=0.001, says="undecided")
    assert knowing(outlook, times=StepTimes()).averages() is None
    assert knowing(outlook, verdict=undecided, trials=1).averages() is None
    assert knowing(outlook, verdict=undecided, trials=2).averages() is not None


def test_a_verdict_of_some_steps_makes_no_thin_gradient_as_good_as_an_average():
    """What is settled for is weighed against what is certain; until then twins may say what is sent."""
    outlook, _ = looked_at(compute_s=0.1, bytes_per_s=1e6, turning=1.0)
    harmless = knowing(outlook, verdict=Verdict(ratio=0.001, says="harmless"))
    thin = min(harmless.usable(), key=lambda judged: judged.per_progress_s)
    assert thin.option.gain is None
    promise = harmless.averages()
    assert promise is not None
    assert promise.instead.per_progress_s > thin.per_progress_s


def spec(**changes):
    return run_of(4, 4, **{"ratio_policy": "auto", "sync": Synchronization(name="auto"), **changes})


@given(
    begun=st.integers(0, 99),
    epoch=st.floats(0, 9),
    later=st.lists(st.floats(0, 30), min_size=2, max_size=5),
    stretch=st.floats(1, 3),
)
def test_the_schedule_goes_on_where_it_stood_and_ends_with_the_run(begun, epoch, later, stretch):
    settled = Settled(every_steps=5, compressor="int8", stretch=stretch, step=begun, epoch=epoch)
    run_ = settled.run(spec(stop=StopRule(max_steps=100, max_epochs=9.0)))
    assert settled.task_epoch(epoch) == epoch
    assert settled.task_epoch(epoch / 2) == epoch / 2
    told = [settled.task_epoch(one) for one in sorted(later)]
    assert told == sorted(told)
    assert settled.task_epoch(run_.stop.max_epochs) == pytest.approx(9.0)
    assert run_.stop.max_steps >= begun + (100 - begun) * stretch - 1e-9
    assert run_.stop.max_steps - 1 < begun + (100 - begun) * stretch + 1e-6


def test_a_run_sums_gradients_until_it_has_settled_and_then_its_workers_average():
    assert (spec().is_local, spec().steers_exchange) == (False, True)
    assert [spec(max_restarts=3, **sync).is_elastic for sync in ({}, {"sync": Synchronization()})] == [False, True]
    run_ = Settled(every_steps=5, compressor="int8", stretch=1.5, step=7, epoch=0.5).run(spec())
    assert (run_.is_local, run_.steers_exchange, why_not_local(run_)) == (True, False, None)
    assert run_.compression == Compression(name="int8")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ratio_policy": "fixed"}, "ratio policy auto looks for and fixed does not"),
        ({"learning_rate_rule": "adascale"}, "adascale"),
        ({"precision": "fp16"}, "use bf16"),
    ],
)
def test_what_does_not_go_with_it_is_said(changes, said):
    assert said in (why_not_settling(spec(**changes)) or "")
    assert why_not_settling(spec()) is None
