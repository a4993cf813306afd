"""A plan as a person reads it: the answer on one screen, and behind it machines, bill, alternatives and reasons."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hetopt.cli import render
from hetopt.core import formatting
from hetopt.reports.front_plot import front_lines
from hetopt.reports.plan_page import launch_command

if TYPE_CHECKING:
    from hetopt.optimizer.plan import Candidate, Choice, Goal, Group, Plan, Range

SHOWN_ALTERNATIVES = 8

EVIDENCE = {"measured": "measured", "interpolated": "alike measured", "extrapolated": "not measured"}
"""What a step time rests on, in few words."""


def show(plan: Plan, *, plan_file: Path | None = None, explain: bool = False) -> None:
    """Print the answer on stdout: one screen, or all there is to it.

    Args:
        plan: to show.
        plan_file: where it was written.
        explain: also machines, bill, alternatives, what would change it, and why; how much was searched, on stderr.
    """
    _show_answer(plan, plan_file)
    if explain:
        _show_all(plan)


def _show_answer(plan: Plan, plan_file: Path | None) -> None:
    """At most 22 lines of 80 columns: what was asked, the answer, the ways to go, reasons, and the next command."""
    said = plan.chosen.prediction
    render.line(f"{plan.run.task}, {asked(plan.goal)}", style="bold")
    if plan.risk is not None:
        render.line(f"RISK: {plan.risk}; else it is stopped unfinished", style="bold red")
    if plan.advice is not None:
        render.line(plan.advice, style="bold green")
    else:
        sure = None if plan.insight is None else plan.insight.chance
        kept = "" if sure is None else f"; {formatting.chance(sure)} of simulated runs keep {_limits(plan.goal)}"
        render.line(
            f"{plan.chosen.in_words}: {formatting.duration(said.total_s.value)} with "
            f"{formatting.duration(said.startup_s)} of provisioning, {formatting.usd(said.cost_usd.value)}{kept}."
        )
    _show_choices(plan)
    render.line()
    for sentence in (*plan.reasons, *_quota(plan)):
        render.bullet(sentence)
    render.line(f"next: {_next(plan, plan_file)}", style="bold")


def _show_choices(plan: Plan) -> None:
    """Two lines each: figures in columns, and below them the machines."""
    if not plan.choices:
        return
    rows = [("", "time (90 %)", "cost (90 %)", "per hour", "chance")]
    rows += [_figures(way, is_chosen=way.candidate == plan.chosen and plan.advice is None) for way in plan.choices]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    gap = next((gap for gap in (2, 1) if sum(widths) + gap * (len(widths) - 1) <= render.width()), 0)
    for way, row in zip((None, *plan.choices), rows, strict=True):
        if gap:
            cells = (gap * " ").join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        elif way is None:
            continue
        else:
            cells = f"{row[0]}: {', '.join(filter(None, row[1:3]))}"
        render.line(cells, style="dim" if way is None else "bold" if row[0].startswith("»") else None)
        if way is not None:
            render.line(f"    {_machines_of(way)}", style="dim")


def _figures(way: Choice, *, is_chosen: bool) -> tuple[str, str, str, str, str]:
    """Name, time and cost with their 90 % intervals, dollars an hour, and the chance to keep the limits."""
    names = "best" if {"cheapest", "balanced", "fastest"} <= set(way.names) else "/".join(way.names)
    mark, rented = "»" if is_chosen else " ", way.candidate is not None
    took = way.total_s
    time = f"{formatting.duration(took.value)} ({formatting.duration_span(took.value, took.low, took.high)})"
    span = f" ({formatting.usd_span(way.cost_usd.low, way.cost_usd.high)})" if rented else ""
    return (
        f"{mark} {names}",
        time,
        f"{formatting.usd(way.cost_usd.value)}{span}",
        formatting.usd(way.usd_per_hour),
        "" if way.chance is None else formatting.chance(way.chance),
    )


def _machines_of(way: Choice) -> str:
    """What a way rents, what one machine has, what it takes of quotas, and what its step time rests on."""
    if way.candidate is None:
        return "this machine, measured"
    groups = way.candidate.groups
    quotas = " ".join(f"{need.bucket}={need.vcpus}" for need in way.quotas)
    rests = {EVIDENCE[group.evidence] for group in groups}
    return "; ".join(
        filter(
            None,
            [
                way.candidate.in_words,
                way.candidate.hardware_in_words,
                _method(way.candidate),
                quotas,
                " and ".join(sorted(rests)),
            ],
        )
    )


def _method(candidate: Candidate) -> str:
    """The exchange, where it is not the plain one."""
    way = formatting.exchange(candidate.compression, candidate.sync)
    return "" if way == "none" else way


def _quota(plan: Plan) -> Iterator[str]:
    """What a new account would have to ask for first."""
    own = next((way for way in plan.choices if way.candidate == plan.chosen), None)
    for need in () if own is None else own.quotas:
        if need.vcpus > need.new_account:
            yield (
                f"Quota {need.bucket}={need.vcpus}; new accounts have {need.new_account}: `hetopt doctor`, or "
                "`quotas=default`."
            )


def _next(plan: Plan, plan_file: Path | None) -> str:
    if plan_file is None:
        return f"add -o plan.json, then {launch_command(plan, 'plan.json')}"
    return launch_command(plan, str(plan_file))


def _show_all(plan: Plan) -> None:
    """Everything behind the answer."""
    chosen, said = plan.chosen, plan.chosen.prediction
    render.heading("The plan")
    render.facts(
        {
            "cluster": chosen.in_words,
            "time": f"{_range(said.total_s, formatting.duration)}, of which start-up "
            f"{formatting.duration(said.startup_s)}",
            "cost": _range(said.cost_usd, formatting.usd),
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
