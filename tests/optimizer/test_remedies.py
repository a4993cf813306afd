"""Hints are followed: what they name is kept by the rule that refused the question, and a little less is not.

Whatever is asked: more budget never hurts, leaving a type out never helps, nothing better was passed over.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import re
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hetopt.cli import render
from hetopt.core import formatting
from hetopt.core.errors import NoFeasiblePlan
from hetopt.core.formatting import duration, round_up_s, round_up_usd, usd
from hetopt.core.profile import Profile
from hetopt.optimizer.market.catalog import Catalog, load_catalog
from hetopt.optimizer.plan import Candidate, Goal, Plan
from hetopt.optimizer.recommendation import confidence as remedies_module, recommend as recommend_module
from hetopt.optimizer.recommendation.options import TIME_WEIGHTS
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from hetopt.optimizer.search.objective import NEAR, expected
from hetopt.optimizer.search.search import SearchResult, search
from hetopt.optimizer.search.search_space import SearchSpace
from hetopt.reports import plan_document

from .conftest import NOW
from .profiles import make_profile

TYPES = (
    "c7a.large", "c7a.2xlarge", "c7a.8xlarge", "m7i.xlarge", "m7i.4xlarge", "g5.xlarge", "g5.12xlarge", "g4dn.xlarge"
)  # fmt: skip
FEW = Options(trials=0, max_workers=8, mixed_types=2, types=TYPES)
A_LITTLE = 0.04
QUESTIONS = 9


def _asked(profile: Profile, catalog: Catalog, goal: Goal, options: Options) -> Plan | NoFeasiblePlan:
    try:
        return recommend(PlanRequest(profile, catalog, goal, options), seed=0, now=NOW)
    except NoFeasiblePlan as error:
        return error


def _hints(answer: Plan | NoFeasiblePlan) -> list[str]:
    if isinstance(answer, Plan):
        assert answer.insight is not None
        return list(answer.insight.remedies)
    return (answer.hint or "").split(", or ")


def _is_kept(answer: Plan | NoFeasiblePlan) -> bool:
    if not isinstance(answer, Plan) or answer.insight is None or answer.insight.chance is None:
        return False
    assert (answer.risk is None) == (answer.insight.chance >= answer.insight.asked)
    assert answer.chosen.prediction.cost_usd.value <= (answer.goal.budget_usd or 1e9)
    return answer.risk is None


def _dollars(text: str) -> float:
    return float(re.findall(r"\$([\d.,]+)", text)[0].replace(",", ""))


def _less(value: float) -> float:
    """By a little, or by one in the second digit, to which small sums are written."""
    return value - max(A_LITTLE * value, 1.001 * 10 ** (math.floor(math.log10(value)) - 1) if value < 0.1 else 0.0)


def _seconds(text: str) -> float:
    units = {"s": 1, "min": 60, "h": 3600, "d": 86400}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+) (s|min|h|d)\b", text))


@dataclass(frozen=True)
class Question:
    """A job of minutes to days, limits about what it needs, how sure its owner wants to be, and the answer."""

    profile: Profile
    goal: Goal
    options: Options
    answer: Plan | NoFeasiblePlan


@pytest.fixture(scope="module")
def questions(catalog: Catalog) -> list[Question]:
    return [_question(seed, catalog) for seed in range(QUESTIONS)]


def _question(seed: int, catalog: Catalog) -> Question:
    """With limits between what nobody can keep and what hardly anybody can."""
    draw = random.Random(seed)
    profile = make_profile(
        parameters=draw.choice([50_000, 5_000_000, 60_000_000]),
        per_sample_s=10 ** draw.uniform(-3.5, -1.5),
        minimum_steps=draw.uniform(500, 20_000),
        minimum_samples=10 ** draw.uniform(5, 7),
    )
    options = replace(
        FEW,
        confidence=draw.choice([None, None, 0.6, 0.95]),
        market=draw.choice(["spot", "spot", "any"]),
        objective=draw.choice(["fastest", "balanced", "cheapest", "balanced"]),
    )
    free = _asked(profile, catalog, Goal(ends="target", budget_usd=1e6), replace(options, objective="cheapest"))
    assert isinstance(free, Plan)
    told = free.chosen.prediction
    budget = told.cost_usd.value * draw.choice([0.5, 1.02, 1.3])
    deadline = told.total_s.value * draw.choice([0.3, 1.01, 1.4])
    kinds = [{"budget_usd": budget}, {"deadline_s": deadline}, {"budget_usd": budget, "deadline_s": deadline}]
    goal = Goal(ends="target", **draw.choice(kinds))
    return Question(profile, goal, options, _asked(profile, catalog, goal, options))


@pytest.mark.parametrize("seed", range(QUESTIONS))
def test_a_hint_is_the_least_that_is_kept(seed: int, questions: list[Question], catalog: Catalog) -> None:
    one = questions[seed]

    def kept(options: Options = one.options, **limits: float) -> bool:
        return _is_kept(_asked(one.profile, catalog, one.goal.model_copy(update=limits), options))

    if _is_kept(one.answer):
        assert not _hints(one.answer)
        return
    for hint in _hints(one.answer):
        if "confidence" in hint:
            told = float(hint.strip("`").rpartition("=")[2])
            assert kept(replace(one.options, confidence=told)), hint
            assert not kept(replace(one.options, confidence=min(0.999, told + 0.002))), f"more than {hint} will do"
        elif "budget" in hint and "allow" in hint:
            assert kept(budget_usd=_dollars(hint), deadline_s=_seconds(hint.split("allow")[1])), hint
        elif "budget" in hint:
            assert kept(budget_usd=_dollars(hint)), hint
            assert not kept(budget_usd=_less(_dollars(hint))), f"less than {hint} will do"
        else:
            assert kept(deadline_s=_seconds(hint)), hint
            assert not kept(deadline_s=_less(_seconds(hint))), f"less than {hint} will do"


def test_the_questions_are_of_every_kind(questions: list[Question]) -> None:
    """Or else the law above says little."""
    answers = [one.answer for one in questions]
    assert any(isinstance(answer, NoFeasiblePlan) for answer in answers)
    assert any(isinstance(answer, Plan) and answer.risk is not None for answer in answers)
    hints = " ".join(hint for answer in answers for hint in _hints(answer))
    for kind in ("raise the budget", "allow", "`confidence="):
        assert kind in hints


def test_where_a_loss_begins_the_run_again_its_remedies_are_priced_and_found_in_bounded_work(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A month on spot without checkpoints: no budget helps, and to look for one must not take for ever."""
    work: list[int] = []

    def counted(space: SearchSpace, *args: Any, **kwargs: Any) -> SearchResult:
        found = search(space, *args, **kwargs)
        boxes = 0 if found.proof is None else found.proof.boxes
        work.append(found.uniform * len(space.exchanges) + boxes)
        return found

    for module in (recommend_module, remedies_module):
        monkeypatch.setattr(module, "search", counted)
    saving = make_profile(parameters=5_000_000, per_sample_s=0.03)
    profile = saving.model_copy(update={"job": saving.job.model_copy(update={"resumes": False})})
    goal = Goal(ends="steps", amount=10_000_000, budget_usd=5000.0)
    spot = replace(FEW, market="spot", mixed_types=3, types=(*TYPES, "r7i.*large"))

    answer = _asked(profile, catalog, goal, spot)
    assert isinstance(answer, NoFeasiblePlan)
    assert "begins the run again" in answer.message
    assert sum(work) <= 11 * work[0]
    saves, on_demand = _hints(answer)
    assert saves.startswith("save checkpoints")
    assert on_demand.startswith("rent on demand")
    followed = (
        (saves, _asked(saving, catalog, goal, spot)),
        (on_demand, _asked(profile, catalog, goal, replace(spot, market="any"))),
    )
    for hint, plan in followed:
        assert isinstance(plan, Plan)
        assert _is_kept(plan)
        assert _dollars(hint.split("take")[1]) == pytest.approx(plan.chosen.prediction.cost_usd.value, rel=0.25)


def test_what_is_rounded_up_is_written_as_it_is_and_is_no_less() -> None:
    draw = random.Random(3)
    for _ in range(2000):
        amount, seconds = 10 ** draw.uniform(-4, 5), 10 ** draw.uniform(0.5, 6)
        dollars, later = round_up_usd(amount), round_up_s(seconds)
        assert amount * (1 - 1e-6) <= dollars <= 1.1 * amount
        assert seconds * (1 - 1e-6) <= later
        assert float(usd(dollars)[1:].replace(",", "")) == pytest.approx(dollars, rel=1e-6)
        assert _seconds(duration(later)) == pytest.approx(later, rel=1e-3)


FAMILIES = ("c7i.large", "c7i.4xlarge", "c7a.xlarge", "c7a.8xlarge", "m7i.2xlarge", "g5.xlarge", "g4dn.xlarge")
MORE = st.floats(1.05, 4)

queries = st.tuples(
    st.sampled_from(["budget_usd", "deadline_s", "both"]),
    st.floats(0.5, 60),
    st.floats(3600, 400_000),
    st.builds(
        Options,
        market=st.sampled_from(["any", "spot", "on-demand"]),
        types=st.sets(st.sampled_from(FAMILIES), min_size=2, max_size=5).map(lambda one: tuple(sorted(one))),
        max_workers=st.sampled_from([1, 4, 8]),
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
    """Expected time and cost, by which plans are ranked: of two medians the one with the longer tail is worth less."""
    return tuple(
        float(expected(np.array(figure.value), np.array(figure.high)))
        for figure in (candidate.prediction.total_s, candidate.prediction.cost_usd)
    )


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
        render.show((*plan_document.answer(plan), *plan_document.details(plan)))
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

    excluded = data.draw(st.sampled_from(options.types))
    narrower = replace(options, types=tuple(one for one in options.types if one != excluded))
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
