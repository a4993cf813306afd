"""Whatever is asked: more budget never hurts, leaving a type out never helps, nothing better was passed over."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetopt.cli import render
from hetopt.core import formatting
from hetopt.core.errors import NoFeasiblePlan
from hetopt.core.profile import Profile
from hetopt.optimizer.market.catalog import Catalog, load_catalog
from hetopt.optimizer.plan import Candidate, Goal, Plan
from hetopt.optimizer.recommendation.options import TIME_WEIGHTS, Options, PlanRequest
from hetopt.optimizer.recommendation.recommend import recommend
from hetopt.optimizer.search.objective import NEAR
from hetopt.reports import plan_document

from .conftest import NOW
from .profiles import make_profile

FAMILIES = ("c7i.large", "c7i.4xlarge", "c7a.xlarge", "c7a.8xlarge", "m7i.2xlarge", "g5.xlarge", "g4dn.xlarge")
MORE = st.floats(1.05, 4)

queries = st.tuples(
    st.sampled_from(["budget_usd", "deadline_s", "both"]),
    st.floats(0.5, 60),
    st.floats(3600, 400_000),
    st.builds(
        Options,
        market=st.sampled_from(["any", "spot", "on-demand"]),
        only_types=st.sets(st.sampled_from(FAMILIES), min_size=2, max_size=5).map(lambda one: tuple(sorted(one))),
        max_workers=st.sampled_from([1, 4, 16]),
        mixed_types=st.sampled_from([1, 2]),
        objective=st.sampled_from(sorted(TIME_WEIGHTS)),
        confidence=st.sampled_from([None, None, 0.5, 0.95]),
        batch_size=st.sampled_from([None, 64, 256]),
        trials=st.just(0),
    ),
    st.sampled_from([20.0, 200.0]),
)
"""Limits, filters, objective and confidence, and how long the training is."""


@cache
def job() -> Profile:
    return make_profile(per_sample_s=0.02)


@cache
def known() -> Catalog:
    return load_catalog()


def answer(goal: Goal, options: Options) -> Plan | None:
    """The plan; None: nothing fits."""
    try:
        return recommend(PlanRequest(job(), known(), goal, options), seed=0, now=NOW)
    except NoFeasiblePlan:
        return None


def figures(candidate: Candidate) -> tuple[float, float]:
    """Expected time and cost, which are shown, and by which plans are ranked."""
    told = candidate.prediction
    return told.total_s.value, told.cost_usd.value


def score(plan: Plan, options: Options) -> float:
    """What the search minimises."""
    return score_of(plan.chosen, TIME_WEIGHTS[options.objective])


def score_of(candidate: Candidate, weight: float) -> float:
    time_s, cost_usd = figures(candidate)
    return float(time_s**weight * cost_usd ** (1 - weight))


def gap_of(plan: Plan) -> float:
    """What a plan says that another may be better by."""
    assert plan.insight is not None
    return (1 + (plan.insight.gap or 0.0)) * (1 + 1e-9)


def is_sure(plan: Plan) -> bool:
    """Whether it keeps its limits even at the upper end of its interval, and was not chosen by its chance."""
    assert plan.insight is not None
    return plan.insight.confidence is None and plan.risk is None


def keeps(candidate: Candidate, goal: Goal) -> bool:
    told = candidate.prediction
    return told.cost_usd.high <= (goal.budget_usd or 1e18) and told.total_s.high <= (goal.deadline_s or 1e18)


def assert_named_by_what_is_shown(plan: Plan) -> None:
    """Of the ways to go, fastest, balanced and cheapest are so by the figures beside them."""
    named = {name: way for way in plan.choices if way.candidate is not None for name in way.names}
    ways = [named[name] for name in ("fastest", "balanced", "cheapest") if name in named]
    for quicker, cheaper in pairwise(ways):
        assert quicker.total_s.value <= cheaper.total_s.value * (1 + 1e-9)
        assert quicker.cost_usd.value >= cheaper.cost_usd.value * (1 - 1e-9)


def printed(plan: Plan) -> str:
    told = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(told):
        patch.setenv("COLUMNS", "250")
        patch.setenv("NO_COLOR", "1")
        render.show((*plan_document.answer(plan, height=render.height), *plan_document.details(plan)))
    return told.getvalue()


@settings(deadline=None)
@given(queries, MORE, st.data())
def test_answers_do_not_contradict_each_other(
    query: tuple[str, float, float, Options, float], more: float, data: st.DataObject
) -> None:
    kind, budget_usd, deadline_s, options, epochs = query
    goal = Goal(
        ends="epochs",
        amount=epochs,
        budget_usd=None if kind == "deadline_s" else budget_usd,
        deadline_s=None if kind == "budget_usd" else deadline_s,
    )
    plan = answer(goal, options)
    wider = goal.model_copy(
        update={
            name: more * limit
            for name, limit in (("budget_usd", goal.budget_usd), ("deadline_s", goal.deadline_s))
            if limit is not None
        }
    )
    larger = answer(wider, options)
    if plan is None:
        return
    assert larger is not None, "a larger limit allows nothing"
    if is_sure(plan):
        assert larger.risk is None
        assert score(larger, options) <= gap_of(larger) * score(plan, options)
        if goal.deadline_s is None and options.objective == "fastest":
            slower = gap_of(larger) * NEAR  # where the smaller budget would not have kept what is cheaper on average
            assert figures(larger.chosen)[0] <= slower * figures(plan.chosen)[0], "more budget is slower"

    excluded = data.draw(st.sampled_from(options.only_types))
    narrower = replace(options, only_types=tuple(one for one in options.only_types if one != excluded))
    without = answer(goal, narrower)
    if without is not None and is_sure(without):
        assert plan.risk is None
        assert score(plan, options) <= gap_of(plan) * score(without, options), f"without {excluded} it is better"

    if is_sure(plan):
        time_s, cost_usd = figures(plan.chosen)
        assert_named_by_what_is_shown(plan)
        for other in (*plan.pareto, *(way.candidate for way in plan.choices if way.candidate is not None)):
            quicker, cheaper = (
                value * gap_of(plan) < own for value, own in zip(figures(other), (time_s, cost_usd), strict=True)
            )
            assert not (quicker and cheaper and keeps(other, goal)), "a better plan was passed over"

    text, told = printed(plan), json.loads(plan.to_json())
    said = told["chosen"]["prediction"]
    for value, say in ((said["total_s"], formatting.duration), (said["cost_usd"], formatting.usd)):
        assert all(say(value[part]) in text for part in ("value", "low", "high"))
    assert all(formatting.chance(way["chance"]) in text for way in told["choices"] if way["chance"] is not None)
    assert Plan.from_json(plan.to_json(), origin="memory") == plan
