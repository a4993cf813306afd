"""What an Optuna study finds that the exact parts of the search had not, and what it finds without them.

The same trials (types, counts, batch size; all else is solved inside) once from what exact search found, and once from
nothing. Jobs are the recorded profiles and four on GPUs, described by public measurements; all links have one rate, and
the budget is ten times what the cheapest plan may cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks._search_spaces import EPOCHS, RECORDED, Question
from hetopt.core.profile import Profile
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.plan import Goal
from hetopt.optimizer.recommendation.options import TIME_WEIGHTS
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, search_problem
from hetopt.optimizer.search.cluster_rows import ClusterRows, Columns, tabulate_rows
from hetopt.optimizer.search.forecast import forecast
from hetopt.optimizer.search.objective import Limits
from hetopt.optimizer.search.search import STUDY_TRIALS, Effort, search
from hetopt.optimizer.search.search_space import SearchSpace
from hetopt.optimizer.search.study import study_mixes
from hetopt.optimizer.step_time.links import Network
from tests.face import described

LINKS_GBIT = (1, 10, 100)
BUDGET = 10.0
"""Over what the cheapest plan may cost."""

DESCRIBED = ((described.BERT, 3.0), (described.NCF, 20.0), (described.RESNET101, 90.0), (described.GPT2, 10.0))
"""Jobs, and epochs of each."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """To one question.

    Attributes:
        types: of a mix that exact search proved nothing better of, at most.
        gain: of the study over exact search, as a part of the score.
        front: points that it adds to the front of time and cost.
        alone: score of the study from nothing over that of exact search, less 1; infinite where it finds no plan.
    """

    job: str
    link_gbit: int
    objective: str
    types: int
    gain: float
    front: int
    alone: float


def answers(*, jobs: int | None = None, links: Sequence[int] = LINKS_GBIT, trials: int = STUDY_TRIALS) -> list[Answer]:
    """All of them, or those of the first so many jobs."""
    found = []
    for job, link, objective, question in _questions(jobs, links):
        exact = search(question.space, question.job, question.limits, seed=0, effort=Effort(trials=0))
        told = search(question.space, question.job, question.limits, seed=0, effort=Effort(trials=trials)).studied
        assert told is not None
        assert told.gain is not None
        score = question.limits.expected_score(exact.forecast)[question.limits.risk(exact.forecast) <= 1].min()
        found.append(
            Answer(
                job=job,
                link_gbit=link,
                objective=objective,
                types=0 if exact.proof is None or not exact.proof.complete else exact.proof.types,
                gain=told.gain,
                front=told.front,
                alone=_alone(question, trials) / float(score) - 1,
            )
        )
    return found


def _alone(question: Question, trials: int) -> float:
    """The best score of a study that is told nothing."""
    columns, limits = Columns(question.space), question.limits
    options = range(len(question.space.options))
    asked = study_mixes(columns, question.job, limits, [], options, seed=0, trials=trials)
    rows, table = tabulate_rows(columns, ClusterRows.of(asked), question.job)
    if not len(rows):
        return math.inf
    found = forecast(table, question.job)
    return float(limits.expected_score(found)[limits.risk(found) <= 1].min(initial=math.inf))


def _questions(jobs: int | None, links: Sequence[int]) -> Iterator[tuple[str, int, str, Question]]:
    catalog = load_catalog()
    recorded = [(Profile.load(RECORDED / f"{name}.json"), epochs) for name, epochs in EPOCHS.items()]
    for profile, epochs in (*recorded, *DESCRIBED)[:jobs]:
        goal = Goal(ends="epochs", amount=epochs, budget_usd=1.0)
        problem = search_problem(PlanRequest(profile, catalog, goal, Options()))
        for link in links:
            space = _linked(problem.space, link)
            cheapest = search(space, problem.job, Limits(time_weight=0.0), seed=0, effort=Effort(types=1))
            budget = BUDGET * float(cheapest.forecast.cost_high_usd.min())
            for objective, weight in TIME_WEIGHTS.items():
                limits = Limits(budget_usd=budget, time_weight=weight)
                name = f"{profile.job.task} {link} {objective}"
                question = Question(name=name, space=space, job=problem.job, limits=limits)
                yield profile.job.task, link, objective, question


def _linked(space: SearchSpace, gbit: int) -> SearchSpace:
    """The same machines, all with links of one rate."""

    def linked(network: Network) -> Network:
        rate = gbit * 1e9 / 8
        return replace(network, links={name: replace(link, bytes_per_s=rate) for name, link in network.links.items()})

    return replace(space, options=tuple(replace(one, network=linked(one.network)) for one in space.options))


def show(found: Sequence[Answer]) -> None:
    """The table."""
    print(f"\n{len(found)} questions of jobs and links: what exact search proved, and what a study adds to it (%)")
    print(f"{'':20}{'Gbit/s':>7}{'':>11}{'proved for':>12}{'gain':>9}{'front':>7}{'study alone':>13}")
    for one in found:
        proved = f"{one.types} types" if one.types else "none"
        print(
            f"{one.job:20}{one.link_gbit:7}{one.objective:>11}{proved:>12}{100 * one.gain:9.3f}{one.front:7}"
            f"{100 * one.alone:13.1f}"
        )
    print("gain: of the best plan's score · front: points that the study adds · study alone: its best is worse by")


def figures(found: Sequence[Answer]) -> dict[str, float]:
    """What is kept of them."""
    alone = sorted(one.alone for one in found)
    return {
        "study_questions": len(found),
        "study_proved_for_three_types": sum(one.types == 3 for one in found),
        "study_found_better": sum(one.gain > 0 for one in found),
        "study_gain_most": round(max(one.gain for one in found), 6),
        "study_added_to_the_front": sum(one.front > 0 for one in found),
        "study_alone_found_the_best": sum(one < 1e-9 for one in alone),
        "study_alone_regret_median": round(alone[len(alone) // 2], 4),
    }
