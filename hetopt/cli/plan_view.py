"""A plan as a person reads it: the answer first, then machines, bill, alternatives and reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetopt.cli import render
from hetopt.core import formatting
from hetopt.reports.front_plot import front_lines

if TYPE_CHECKING:
    from hetopt.optimizer.plan import Candidate, Goal, Group, Plan, Range

SHOWN_ALTERNATIVES = 8


def show(plan: Plan) -> None:
    """Print the plan on stdout; how much was searched is a remark on stderr."""
    chosen, said = plan.chosen, plan.chosen.prediction
    render.line(f"{plan.run.task}, {asked(plan.goal)}", style="bold")
    if plan.risk is not None:
        render.line(f"RISK: {plan.risk}; else it is stopped unfinished", style="bold red")
    sure = None if plan.insight is None else plan.insight.chance
    render.facts(
        {
            "cluster": formatting.cluster((group.machines, group.instance_type) for group in chosen.groups),
            "time": f"{_range(said.total_s, formatting.duration)}, of which start-up "
            f"{formatting.duration(said.startup_s)}",
            "cost": _range(said.cost_usd, formatting.usd),
            **(
                {}
                if sure is None
                else {"chance": f"{formatting.chance(sure)} of simulated runs keep {_limits(plan.goal)}"}
            ),
            "batch": f"{formatting.count(chosen.global_batch_size)} samples a step, "
            f"{'sync' if chosen.sync.is_local else 'compression'} "
            f"{formatting.exchange(chosen.compression, chosen.sync)}, "
            f"{chosen.collective.replace('_', '-')}",
            "step": f"{formatting.duration(said.step_time_s.value)}: computing {formatting.duration(said.compute_s)}, "
            f"communicating {formatting.duration(said.communication_s)}; workers wait "
            f"{formatting.duration(said.waiting_s)}",
            "steps": f"{formatting.count(said.steps.value)}, from {said.steps_source}",
        }
    )
    render.heading("Machines")
    render.table(
        [
            render.Column(name="machines"),
            render.Column(name="market"),
            render.Column(name="USD/h", justify="right"),
            render.Column(name="batch", justify="right"),
            render.Column(name="step time is"),
            render.Column(name="price of"),
        ],
        [_machine_row(group) for group in chosen.groups],
        caption="USD/h: one machine · batch: local batch size, samples · "
        + "; ".join(dict.fromkeys(f"{group.market} price: {group.price_source}" for group in chosen.groups)),
    )
    render.heading("Cost")
    render.table(
        [render.Column(name="for"), render.Column(name="USD", justify="right"), render.Column(name="how")],
        [[term.name, formatting.usd(term.usd), term.basis] for term in said.cost_terms],
    )
    if len(plan.pareto) > 1:
        _show_alternatives(plan)
        for text in front_lines(plan, columns=min(80, render.width())):
            render.line(text)
    _show_insight(plan)
    render.heading("Why")
    for sentence in plan.explanation:
        render.bullet(sentence)
    render.note(f"searched {plan.searched}")


def _show_insight(plan: Plan) -> None:
    seen = plan.insight
    if seen is None:
        return
    render.heading("What would change it")
    render.table(
        [render.Column(name="if"), render.Column(name="then")],
        [[world.change, world.verdict] for world in seen.scenarios],
    )
    if seen.rejected:
        render.heading("Better plans that a limit rejects")
        render.table(
            [
                render.Column(name="machines"),
                render.Column(name="time", justify="right"),
                render.Column(name="cost", justify="right"),
                render.Column(name="rejected by"),
            ],
            [
                [
                    one.plan.machines,
                    formatting.duration(one.plan.total_s),
                    formatting.usd(one.plan.cost_usd),
                    one.reason,
                ]
                for one in seen.rejected
            ],
        )


def asked(goal: Goal) -> str:
    """What was asked for, in a few words."""
    ends = (
        f"until {goal.target_metric} {goal.target_value:g}" if goal.ends == "target" else f"{goal.amount:g} {goal.ends}"
    )
    limits = [f"budget {formatting.usd(goal.budget_usd)}"] if goal.budget_usd is not None else []
    limits += [f"deadline {formatting.duration(goal.deadline_s)}"] if goal.deadline_s is not None else []
    return ", ".join([ends, *limits])


def _limits(goal: Goal) -> str:
    """Such as 'budget and deadline'."""
    given = {"budget": goal.budget_usd, "deadline": goal.deadline_s}
    return " and ".join(f"the {name}" for name, limit in given.items() if limit is not None)


def _range(figure: Range, say: formatting.Say) -> str:
    return f"{say(figure.value)} ({say(figure.low)} – {say(figure.high)} with 90 % probability)"


def _machine_row(group: Group) -> list[str]:
    band = f", {group.interruption_band} a month" if group.interruption_band else ""
    seen = f", {group.watched.in_words}" if group.watched else ""
    low, high = min(group.local_batch_sizes), max(group.local_batch_sizes)
    return [
        f"{group.machines} × {group.instance_type}",
        group.market + band + seen,
        f"{group.price_usd_per_hour:.4f}",
        str(low) if low == high else f"{low}–{high}",
        group.evidence,
        group.price_date + (" (estimate)" if group.price_is_estimate else ""),
    ]


def _show_alternatives(plan: Plan) -> None:
    render.heading("Alternatives (none is both faster and cheaper than another)")
    render.table(
        [
            render.Column(name="time", justify="right"),
            render.Column(name="cost", justify="right"),
            render.Column(name="machines"),
            render.Column(name="batch", justify="right"),
            render.Column(name="compression"),
        ],
        [
            [
                formatting.duration(other.prediction.total_s.value),
                formatting.usd(other.prediction.cost_usd.value),
                formatting.cluster((group.machines, group.instance_type) for group in other.groups)
                + ("  ← chosen" if other == plan.chosen else ""),
                formatting.count(other.global_batch_size),
                formatting.exchange(other.compression, other.sync),
            ]
            for other in _some(plan.pareto, plan.chosen)
        ],
    )


def _some(front: tuple[Candidate, ...], chosen: Candidate) -> list[Candidate]:
    """At most about `SHOWN_ALTERNATIVES` of the front, evenly spread, its ends and the chosen plan among them."""
    if len(front) <= SHOWN_ALTERNATIVES:
        return list(front)
    last = len(front) - 1
    wanted = {round(place * last / (SHOWN_ALTERNATIVES - 1)) for place in range(SHOWN_ALTERNATIVES)}
    return [other for place, other in enumerate(front) if place in wanted or other == chosen]
