"""What a choice by predicted times costs is judged by the measured ones, by the rule that plans are chosen with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from benchmarks._decided import (
    TARGETS,
    Belief,
    Menu,
    as_believed,
    by_chance,
    decide,
    judged,
    mean_extra,
    missed,
    throughputs,
)
from hetopt.optimizer.search.objective import Limits

# Hundredths, so that two values, or two products of them, are the same or differ by more than rounding does.
positive = st.integers(1, 10_000).map(lambda hundredths: hundredths / 100)
menus = st.lists(st.tuples(positive, positive), min_size=2, max_size=12).map(
    lambda rows: Menu(seconds=np.array([row[0] for row in rows]), usd_per_s=np.array([row[1] for row in rows]))
)


@given(menus)
@example(Menu(seconds=np.array([0.01, 0.01]), usd_per_s=np.array([1.0, 2.0])))
def test_who_knows_all_times_pays_nothing_extra_and_misses_nothing(menu: Menu) -> None:
    oracle = Belief(seconds=menu.seconds, log_sd=np.zeros(len(menu.seconds)))
    decisions = decide(menu, throughputs(menu), as_believed(menu, oracle))
    assert len(decisions) == TARGETS
    assert mean_extra(decisions) == pytest.approx(0.0, abs=1e-9)
    assert missed(decisions) == 0


@given(menus, st.floats(0.0, 1.0), st.integers(0, 2**32 - 1))
def test_a_higher_confidence_never_chooses_what_is_less_likely_to_keep_the_limit(
    menu: Menu, spread: float, seed: int
) -> None:
    size = len(menu.seconds)
    error = np.random.default_rng(seed).normal(size=size)
    belief = Belief(seconds=menu.seconds * np.exp(spread * error), log_sd=np.full(size, spread))
    for limits in throughputs(menu)[::5]:
        chances = belief.chances(menu, limits)
        taken = [chances[by_chance(menu, belief, asked)(limits)] for asked in (0.5, 0.8, 0.95)]
        fits = chances.max() >= 0.95
        assert not fits or (taken[0] >= 0.5 and taken[1] >= 0.8 and taken[2] >= 0.95)


def test_a_choice_is_judged_by_what_was_measured() -> None:
    menu = Menu(seconds=np.array([4.0, 2.0, 1.0]), usd_per_s=np.array([1.0, 2.5, 6.0]))
    limits = Limits(deadline_s=2.0, time_weight=0.0)
    for row, extra, kept in ((1, 0.0, True), (2, 6 / 5 - 1, True), (0, 0.0, False)):
        decision = judged(menu, limits, row)
        assert (decision.extra, decision.kept) == (pytest.approx(extra), kept)
