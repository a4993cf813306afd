"""Plans side by side, and what one has over another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hetopt.core import formatting
from hetopt.optimizer.plan import Plan
from hetopt.reports.document import Block, Cell, Column, Figure, Line, Remarks, Table
from hetopt.reports.plan_document import goal_in_words


def comparison(plans: Mapping[str, Plan]) -> list[Block]:
    """Return two or more plans side by side: a table of time and cost, what differs, and gains over the first.

    Args:
        plans: two or more, by the names to show; the first is what the others are held against.
    """
    facts = [tuple(_facts(plan)) for plan in plans.values()]
    differ = [len(set(values)) > 1 for values in zip(*facts, strict=True)]
    table = Table(
        name="plans",
        columns=[Column(name, "word") for name in ("", "time (90 %)", "cost (90 %)", "chance")],
        rows=[[name, *_figures(plan)] for name, plan in plans.items()],
        notes=["; ".join(fact for fact, is_shown in zip(row, differ, strict=True) if is_shown) for row in facts],
    )
    return [table, Line(""), Remarks(list(_differences(plans)))]


def _figures(plan: Plan) -> Iterator[Cell]:
    """Yield time, cost and the chance to keep the limits."""
    prediction, seen = plan.chosen.prediction, plan.insight
    yield Figure.of(prediction.total_s, "s", "total_s")
    yield Figure.of(prediction.cost_usd, "USD", "cost_usd")
    yield "" if seen is None or seen.chance is None else formatting.chance(seen.chance)


def _facts(plan: Plan) -> Iterator[str]:
    """Yield what else a plan is compared by, in words: cluster, place, steps, batch, rate, exchange and goal."""
    chosen, run = plan.chosen, plan.run
    yield f"{plan.machines(chosen)}; {chosen.hardware_in_words}"
    yield "+".join(dict.fromkeys("at home" if group.is_own else f"in {group.region}" for group in chosen.groups))
    yield f"{chosen.prediction.steps.value:,.0f} steps of {formatting.duration(chosen.prediction.step_time_s.value)}"
    yield f"batch size {chosen.global_batch_size:,}"
    yield f"learning rate x {run.learning_rate_scale:.3g}"
    yield f"exchange {formatting.method(chosen.compression, chosen.sync, chosen.precision)}"
    yield f"by {chosen.collective}"
    yield f"{run.task}, {goal_in_words(plan.goal)}"


def _differences(plans: Mapping[str, Plan]) -> Iterator[str]:
    """Yield each further plan's time and money against the first's, then what makes the plans no fair comparison."""
    (first_name, first), *others = plans.items()
    for name, plan in others:
        time = plan.chosen.prediction.total_s.value / first.chosen.prediction.total_s.value
        cost = plan.chosen.prediction.cost_usd.value, first.chosen.prediction.cost_usd.value
        money = _against(cost[0] / cost[1], "dearer", "cheaper") if all(cost) else "costs are not compared: one is $0"
        yield f"{name} is {_against(time, 'slower', 'faster')} than {first_name} and {money}."
    if len({(plan.run.task, plan.profile.created) for plan in plans.values()}) > 1:
        yield "They are of different profiles: the jobs, or what was measured of one, are not the same."
    elif len({plan.chosen.global_batch_size for plan in plans.values()}) > 1:
        yield (
            "Another batch size learns otherwise: to a target the steps count that, in a run of given length the "
            "result may differ."
        )
    goals = (plan.goal for plan in plans.values())
    if len({(goal.ends, goal.amount, goal.target_metric, goal.target_value) for goal in goals}) > 1:
        yield "They train to different ends."


def _against(ratio: float, more: str, less: str) -> str:
    """Return a ratio in words: '12 % slower', '2.1 times faster', within half a percent 'neither slower nor faster'."""
    if abs(ratio - 1) < 0.005:
        return f"neither {more} nor {less}"
    word, apart = (more, ratio) if ratio > 1 else (less, 1 / ratio)
    if apart >= 2:
        return f"{float(f'{apart:.2g}'):,g} times {word}"
    return f"{100 * (ratio - 1 if ratio > 1 else 1 - ratio):.0f} % {word}"
