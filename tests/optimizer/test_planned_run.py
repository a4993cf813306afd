"""What the machines of a plan are told about convergence."""

from __future__ import annotations

import pytest

from hetopt.core.errors import BadInput
from hetopt.core.training_laws import CAUTIOUS_COEFFICIENT
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Goal
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend

from .conftest import NOW
from .profiles import make_profile


def test_a_plan_tells_its_run(catalog: Catalog) -> None:
    options = Options(trials=20, batch_size=256, only_types=("c7a.large",))
    goal = Goal(ends="epochs", amount=1, budget_usd=9.0)
    plan = recommend(PlanRequest(make_profile(), catalog, goal, options), seed=0, now=NOW)
    assert plan.run.slowdown_coefficient == CAUTIOUS_COEFFICIENT


def test_a_script_whose_epoch_nothing_tells_is_planned_by_steps_alone(catalog: Catalog) -> None:
    options = Options(trials=20, batch_size=256, only_types=("c7a.large",))
    profile = make_profile()
    stream = profile.model_copy(update={"job": profile.job.model_copy(update={"counts_epochs": False})})
    plan = recommend(
        PlanRequest(stream, catalog, Goal(ends="steps", amount=50, budget_usd=9.0), options), seed=0, now=NOW
    )
    assert plan.chosen.prediction.steps.value == 50
    with pytest.raises(BadInput, match="how many samples an epoch of"):
        recommend(PlanRequest(stream, catalog, Goal(ends="epochs", amount=1, budget_usd=9.0), options), seed=0, now=NOW)


def test_a_script_that_saves_nothing_is_priced_so(catalog: Catalog) -> None:
    """On machines that are taken back it takes longer than one that goes on; the plan says so, and its run knows."""
    options = Options(trials=20, batch_size=256, only_types=("c7a.large",), market="spot")
    goal = Goal(ends="epochs", amount=400, budget_usd=90.0)
    profile = make_profile()
    begins_again = profile.model_copy(update={"job": profile.job.model_copy(update={"resumes": False})})
    usual, lost = (
        recommend(PlanRequest(one, catalog, goal, options), seed=0, now=NOW) for one in (profile, begins_again)
    )
    assert (usual.run.resumes, lost.run.resumes) == (True, False)
    total_s = [plan.chosen.prediction.total_s.value for plan in (usual, lost)]
    assert 1.01 * total_s[0] < total_s[1]
    assert not any("begin" in text or "saves no checkpoint" in text for text in usual.explanation)
    assert any("saves no checkpoint" in text for text in lost.explanation)
    assert not any(term.name == "checkpoints" for term in lost.chosen.prediction.cost_terms)
