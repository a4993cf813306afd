"""Plans side by side, and what one has over another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hetopt.core import formatting
from hetopt.optimizer.plan import Plan
from hetopt.reports.document import Block, Cell, Column, Figure, Line, Remarks, Table
from hetopt.reports.plan_document import asked


def comparison(plans: Mapping[str, Plan]) -> list[Block]:
    """Return plans as columns of one table, rows that are the same in all of them left out.

    Args:
        plans: at least two, by the names to show.
    """
    rows = [list(row) for row in zip(*map(_figures, plans.values()), strict=True)]
    names = (name for name, _ in _figures(next(iter(plans.values()))))
    shown = [
        [name, *(value for _, value in row)]
        for name, row in zip(names, rows, strict=True)
        if name in ("time (90 %)", "cost (90 %)") or len({str(value) for _, value in row}) > 1
    ]
    table = Table(name="plans", columns=[Column("", "word"), *(Column(name, "word") for name in plans)], rows=shown)
    return [table, Line(""), Remarks(list(_differences(plans)))]


def _figures(plan: Plan) -> Iterator[tuple[str, Cell]]:
    """Yield the figures that a plan is compared by, each with its name."""
    chosen, seen = plan.chosen, plan.insight
    prediction = chosen.prediction
    yield "machines", plan.machines(chosen)
    yield "each with", chosen.hardware_in_words
    yield "region", "+".join(dict.fromkeys("your own" if group.is_own else group.region for group in chosen.groups))
    yield "time (90 %)", Figure.of(prediction.total_s, "s", "total_s")
    yield "cost (90 %)", Figure.of(prediction.cost_usd, "USD", "cost_usd")
    yield "chance", "" if seen is None or seen.chance is None else formatting.chance(seen.chance)
    yield "step time", formatting.duration(prediction.step_time_s.value)
    yield "steps", f"{prediction.steps.value:,.0f}"
    yield "batch size", f"{chosen.global_batch_size:,}"
    yield "exchange", formatting.method(chosen.compression, chosen.sync, chosen.precision)
    yield "collective", chosen.collective
    yield "job", plan.run.task
    yield "asked for", asked(plan.goal)


def _differences(plans: Mapping[str, Plan]) -> Iterator[str]:
    """Yield each further plan's time and money against the first, and what makes them no fair comparison."""
    (first_name, first), *others = plans.items()
    for name, plan in others:
        time = plan.chosen.prediction.total_s.value / first.chosen.prediction.total_s.value
        cost = plan.chosen.prediction.cost_usd.value, first.chosen.prediction.cost_usd.value
        money = _against(cost[0] / cost[1], "dearer", "cheaper") if all(cost) else "costs are not compared: one is $0"
        yield f"{name} is {_against(time, 'slower', 'faster')} than {first_name} and {money}."
    if len({(plan.run.task, plan.profile.created) for plan in plans.values()}) > 1:
        yield "They are of different profiles: the jobs, or what was measured of one, are not the same."
    goals = (plan.goal for plan in plans.values())
    if len({(goal.ends, goal.amount, goal.target_metric, goal.target_value) for goal in goals}) > 1:
        yield "They train to different ends."


def _against(ratio: float, more: str, less: str) -> str:
    """Return a ratio in words: '12 % slower', '2.1 times faster', 'as fast' within half a percent."""
    if abs(ratio - 1) < 0.005:
        return f"neither {more} nor {less}"
    word, apart = (more, ratio) if ratio > 1 else (less, 1 / ratio)
    if apart >= 2:
        return f"{float(f'{apart:.2g}'):,g} times {word}"
    return f"{100 * (ratio - 1 if ratio > 1 else 1 - ratio):.0f} % {word}"
