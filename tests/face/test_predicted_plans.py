"""`hetopt predict` answers with the planner's numbers, for whatever a plan could rent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hetopt
from hetopt.api.step_times import StepTimes, predicted
from hetopt.core.comm.composition import AR_TOPK
from hetopt.core.errors import BadInput
from hetopt.core.profile import Profile
from hetopt.core.step_samples import Compression as Sent
from hetopt.core.step_samples import Configuration, Node, parse_configuration
from hetopt.optimizer.fit import fit
from hetopt.optimizer.market.catalog import load_catalog, offers
from hetopt.optimizer.plan import Candidate
from hetopt.optimizer.search.search_space import machine_options
from hetopt.optimizer.step_time.profiled import learned_shape, sampled_machines
from hetopt.optimizer.step_time.transfer import reference_host

RECORDED = Path(__file__).parent.parent / "recorded" / "digits.json"


def asked(candidate: Candidate) -> Configuration:
    """A plan's cluster as a query."""
    way = candidate.compression
    return Configuration(
        nodes=tuple(
            Node(type=group.instance_type, workers=group.workers_per_machine)
            for group in candidate.groups
            for _ in range(group.machines)
        ),
        local_batch_size=tuple(size for group in candidate.groups for size in group.local_batch_sizes),
        compression=None if way.name == "identity" else Sent(name=way.name, ratio=way.ratio),
    )


@pytest.fixture(scope="module")
def times() -> StepTimes:
    return StepTimes.of(RECORDED)


@pytest.mark.parametrize("wish", [{"types": "c7i.*,c7a.*"}, {"types": "g5.*,g6.*"}, {"types": "c7i.large"}])
def test_the_step_of_a_plan_is_the_plans(times: StepTimes, wish: dict[str, str]) -> None:
    plan = hetopt.recommend(RECORDED, budget_usd=20, epochs=40, max_workers=8, trials=0, **wish)  # type: ignore[arg-type]
    # A query names a method and a ratio, and has its usual collective and coding.
    usual = [one for one in (plan.chosen, *plan.pareto) if one.compression.coding is None and one.collective != AR_TOPK]
    found = [one for one in usual if not one.sync.is_local]
    assert found
    answers = predicted(times.model, [asked(one) for one in found])
    for candidate, answer in zip(found, answers, strict=True):
        assert not isinstance(answer, str)
        told = candidate.prediction.step_time_s
        assert (answer.step_time_s, answer.step_time_low_s, answer.step_time_high_s) == pytest.approx(
            (told.value, told.low, told.high)
        ), candidate.in_words


def test_every_type_that_plans_can_have_is_predicted(times: StepTimes) -> None:
    profile, catalog = Profile.load(RECORDED), load_catalog()
    model = fit(profile)
    options, _ = machine_options(
        model,
        offers(catalog),
        reference_host(model, catalog.instance_types.values()),
        learned_shape(model),
        sampled_machines(profile, catalog.instance_types),
    )
    names = {option.name: option.worker.workers for option in options}
    assert len(names) > 500
    queries = [
        Configuration(nodes=(Node(type=name, workers=workers),), local_batch_size=4) for name, workers in names.items()
    ]
    answers = dict(zip(names, predicted(times.model, queries), strict=True))
    assert {name: answer for name, answer in answers.items() if isinstance(answer, str)} == {}


def test_a_type_that_no_plan_can_have_is_refused_with_the_reason(times: StepTimes) -> None:
    query = Configuration(nodes=(Node(type="t3.large", workers=1),), local_batch_size=4)
    [answer] = predicted(times.model, [query])
    assert answer == "t3.large cannot be planned with: burstable (its speed depends on credits)."


def test_all_that_is_wrong_with_a_line_is_said_at_once() -> None:
    with pytest.raises(BadInput) as refused:
        parse_configuration(json.dumps({"nodes": [{"workers": 0}], "precision": "int3"}))
    for part in (
        "nodes.0.type is missing",
        "nodes.0.workers must be greater than 0, got 0",
        "local_batch_size is missing",
        "precision must be",
    ):
        assert part in refused.value.message
