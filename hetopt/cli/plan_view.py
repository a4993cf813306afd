"""A plan as a person reads it: the answer on one screen, and behind it machines, bill, alternatives and reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hetopt.cli import render
from hetopt.core import formatting
from hetopt.core.commands import typed
from hetopt.reports.plan_page import EVIDENCE_IN_SHORT, LEFT_OUT_PLANS, MEMORY_RESERVE, asked, next_commands
from hetopt.reports.plan_plots import front_lines

if TYPE_CHECKING:
    from hetopt.optimizer.plan import Candidate, Choice, Goal, Group, Plan, Range
    from hetopt.optimizer.recommendation.ranking import Ranking

MOST_SENTENCES = 3
"""Of the answer, beside what has to be asked for first."""

MOST_LINES = 22
"""Of the answer: what a terminal of 24 lines shows with the command above and the prompt below."""

AS_SURE = 0.02
"""Chances that differ by no more are as high."""


def show(plan: Plan, *, plan_file: Path | None = None, inventory: Path | None = None, explain: bool = False) -> None:
    """Print the answer on stdout: one screen, or all there is to it.

    Args:
        plan: to show.
        plan_file: where it was written.
        inventory: whose machines it is for, where it is.
        explain: also machines, bill, alternatives, what would change it, and why; how much was searched, on stderr.
    """
    _show_answer(plan, plan_file, inventory)
    if explain:
        _show_all(plan)


def _show_answer(plan: Plan, plan_file: Path | None, inventory: Path | None) -> None:
    """At most 22 lines of 80 columns: what was asked, the answer, the ways to go, reasons, and the next command."""
    said = plan.chosen.prediction
    regions = "+".join(dict.fromkeys(group.region for group in plan.chosen.groups))
    own = all(group.is_own for group in plan.chosen.groups)
    where = "on your own machines" if own else f"in {regions}"
    heads = [(f"{plan.run.task}, {asked(plan.goal)}, {where}", "bold")]
    if plan.risk is not None:
        heads.append((f"RISK: {plan.risk}; else it is stopped unfinished", "bold red"))
    if plan.advice is not None:
        heads.append((plan.advice, "bold green"))
    else:
        sure = None if plan.insight is None else plan.insight.chance
        kept = "" if sure is None else f"; {formatting.chance(sure)} of simulated runs keep {_limits(plan.goal)}"
        batch = _batch(plan.chosen, plan.profile.job.batch_size)
        told = (
            f"{plan.chosen.in_words}{', ' if batch else ''}{batch}: {formatting.duration(said.total_s.value)} with "
            f"{formatting.duration(said.startup_s)} of {'start-up' if own else 'provisioning'}, "
            f"{formatting.usd(said.cost_usd.value)}{kept}."
        )
        heads.append((told, ""))
    for text, style in heads:
        render.line(text, style=style or None)
    lines = sum(_lines(text) for text, _ in heads) + show_choices(plan) + 1
    render.line()
    names = [typed(name) for name in (plan_file or "plan.json", inventory or "hosts.toml")]
    commands = [
        f"{word}: {'add -o plan.json, then ' if word == 'next' and not plan_file else ''}{command}"
        for word, command in zip(("next", "then"), next_commands(plan, *names), strict=False)
    ]
    before, after = tuple(region_notes(plan)), tuple(quota_notes(plan))
    lines += sum(_lines(f"  • {text}", hang=4) for text in (*before, *after)) + sum(map(_lines, commands))
    said_first = (*_memory_bound(plan.chosen), *plan.reasons)[:MOST_SENTENCES]
    for reason in said_first:  # as many as the screen holds: the first say most, of each what is before a semicolon
        short = f"{reason.partition('; ')[0].rstrip('.')}."
        told = reason if lines + _lines(f"  • {reason}", hang=4) <= MOST_LINES else short
        lines += _lines(f"  • {told}", hang=4)
        before += (told,) if lines <= MOST_LINES else ()
    for sentence in (*before, *after):
        render.bullet(sentence)
    for command in commands:
        render.line(command, style="bold", is_copied=True)


def _lines(text: str, hang: int = 0) -> int:
    """How many lines a text takes, with so many blanks before all but the first."""
    return len(render.wrapped(text, hang=hang))


def show_choices(plan: Plan) -> int:
    """Two lines each or more: figures in columns, and below them the machines; how many it took."""
    if not plan.choices:
        return 0
    lines = 0
    rows = [("", "time (90 %)", "cost (90 %)", "per hour", "chance")]
    # Where none of them was measured, or all were counted, a sentence says so once.
    rented = [way.candidate for way in plan.choices if way.candidate is not None]
    unlike = {group.evidence for one in rented for group in one.groups} not in ({"extrapolated"}, {"counted"})
    sure = next((way.chance or 0.0 for way in plan.choices if way.candidate == plan.chosen), 0.0)
    rows += [
        _figures(way, is_chosen=way.candidate == plan.chosen and plan.advice is None, sure=sure) for way in plan.choices
    ]
    gap = 0
    for kept in ((0, 1, 2, 3, 4), (0, 1, 2, 4)):  # what an hour costs is the first to go
        widths = [max(len(row[column]) for row in rows) for column in kept]
        gap = next((gap for gap in (2, 1) if sum(widths) + gap * (len(widths) - 1) <= render.width()), 0)
        if gap:
            break
    for way, row in zip((None, *plan.choices), rows, strict=True):
        if gap:
            shown = zip((row[column] for column in kept), widths, strict=True)
            cells = (gap * " ").join(cell.ljust(width) for cell, width in shown).rstrip()
        else:  # a list instead of columns, which wraps
            cells = f"{row[0]}{': ' if way else '  '}{', '.join(filter(None, (*row[1:3], row[4])))}"
        render.line(cells, style="dim" if way is None else "bold" if row[0].startswith("»") else None, hang=4)
        lines += _lines(cells, hang=4)
        if way is not None:
            told = _machines_of(plan, way, evidence=unlike)
            render.line(f"    {told}", style="dim", hang=4)
            lines += _lines(f"    {told}", hang=4)
    return lines


def _figures(way: Choice, *, is_chosen: bool, sure: float) -> tuple[str, str, str, str, str]:
    """Name, time and cost with their 90 % intervals, dollars an hour, and the chance to keep the limits.

    Args:
        way: to go.
        is_chosen: whether it is the plan.
        sure: the plan's own chance.
    """
    # On demand nothing is taken back; at its price that may keep the limits less often than spot does.
    safest = "safest" if (way.chance or 0.0) >= sure - AS_SURE else "on demand"
    said = [safest if name == "safest" else name for name in way.names]
    names = "best" if {"cheapest", "balanced", "fastest"} <= set(said) else "/".join(said)
    mark, rented = "»" if is_chosen else " ", way.candidate is not None
    return (
        f"{mark} {names}",
        _time_span(way.total_s),
        _usd_span(way.cost_usd) if rented else formatting.usd(0),
        formatting.usd(way.usd_per_hour),
        "" if way.chance is None else formatting.chance(way.chance),
    )


def _time_span(took: Range) -> str:
    return f"{formatting.duration(took.value)} ({formatting.duration_span(took.value, took.low, took.high)})"


def _usd_span(cost: Range) -> str:
    return f"{formatting.usd(cost.value)} ({formatting.usd_span(cost.low, cost.high)})"


def _machines_of(plan: Plan, way: Choice, *, evidence: bool) -> str:
    """What a way rents, what one machine has, how it trains where not as usual, quotas, and (asked) what times rest on.

    Args:
        plan: that the way is of.
        way: to go.
        evidence: whether to say what its times rest on.
    """
    if way.candidate is None:
        return "this machine, measured" if way.earlier is None else "this machine, as measured and as runs found it"
    groups = way.candidate.groups
    quotas = "".join(f"{need.vcpus:,} + " for need in way.quotas[:-1])
    quotas += "".join(formatting.vcpus(need.vcpus) for need in way.quotas[-1:])
    rests = {group.evidence for group in groups}
    least = next(known for known in reversed(EVIDENCE_IN_SHORT) if known in rests)
    basis = EVIDENCE_IN_SHORT[least] if len(rests) == 1 else f"in part {EVIDENCE_IN_SHORT[least]}"
    return "; ".join(
        filter(
            None,
            [
                plan.machines(way.candidate),
                way.candidate.hardware_in_words,
                _batch(way.candidate, plan.profile.job.batch_size),
                _method(way.candidate),
                f"quota {quotas}" if quotas else "",
                basis if evidence else "",
            ],
        )
    )


def _batch(candidate: Candidate, usual: int) -> str:
    """The batch size, where it is not the job's own."""
    size = candidate.global_batch_size
    return "" if size == usual else f"batch {formatting.count(size)}, not {formatting.count(usual)}"


def _method(candidate: Candidate) -> str:
    """The exchange and what workers compute in, where they are not the plain ones."""
    way = formatting.method(candidate.compression, candidate.sync, candidate.precision)
    if way == "none" or way.startswith("none, "):
        return way[len("none") :].removeprefix(", ")
    return way if candidate.sync.is_local else f"gradients by {way}"


def region_notes(plan: Plan) -> Iterator[str]:
    """The region that won, and the next two; and how many types have no price."""
    if plan.not_compared is not None:
        yield plan.not_compared
    if not plan.regions:
        return
    best, *others = plan.regions
    moved = f", {formatting.usd(best.data_transfer_usd)} of it for the data" if best.data_transfer_usd else ""
    next_ = "; ".join(
        f"{one.region} {formatting.duration(one.total_s)}, {formatting.usd(one.cost_usd)}" for one in others
    )
    yield f"{best.region} is the best region{moved}{f'; next {next_}' if others else ''}."


def _memory_bound(candidate: Candidate) -> Iterator[str]:
    """At which micro-batch each machine fits whose memory does not hold its local batch at once."""
    bound = [
        f"{group.instance_type} {words}"
        for group in candidate.groups
        for words in [group.micro_batch_in_words]
        if words
    ]
    if bound:
        yield f"{'; '.join(dict.fromkeys(bound))}."


def chosen_way(plan: Plan) -> Choice | None:
    """The plan's own row, where rows are shown."""
    return next((way for way in plan.choices if way.candidate == plan.chosen), None)


def quota_notes(plan: Plan) -> Iterator[str]:
    """What a new account would have to ask for first, where nobody knows what this one has."""
    own = chosen_way(plan)
    for need in () if own is None else own.quotas:
        if need.granted is None and need.vcpus > need.new_account:
            yield (
                f"Needs a quota of {formatting.vcpus(need.vcpus)} ({need.bucket}); a new account has "
                f"{need.new_account} (`hetopt doctor`)."
            )


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
            "batch": f"{formatting.counted(chosen.global_batch_size, 'sample')} a step, "
            f"{'sync' if chosen.sync.is_local else 'compression'} "
            f"{formatting.method(chosen.compression, chosen.sync, chosen.precision)}, "
            f"{chosen.collective.replace('_', '-')}",
            "step": f"{formatting.duration(said.step_time_s.value)}: computing {formatting.duration(said.compute_s)}, "
            f"communicating {formatting.duration(said.communication_s)}; workers wait "
            f"{formatting.duration(said.waiting_s)}",
            "steps": f"{formatting.count(said.steps.value)}, from {said.steps_source}",
        }
    )
    render.heading("Machines")
    render.table(
        ["machines", "market", "USD/h", "batch", "step time is"],
        [_machine_row(group) for group in chosen.groups],
        numbers={"USD/h", "batch"},
        caption="USD/h: one machine · batch: local batch size, samples · "
        + "; ".join(dict.fromkeys(map(_price_of, chosen.groups))),
    )
    _show_memory(plan)
    render.heading("Cost")
    render.table(
        ["for", "USD", "how"],
        [[term.name, formatting.usd(term.usd), term.basis] for term in said.bill],
        numbers={"USD"},
    )
    if len(plan.plans) > 1:
        _show_alternatives(plan)
        for text in front_lines(plan, columns=min(80, render.width())):
            render.line(text)
    _show_insight(plan)
    render.heading("Why")
    for sentence in plan.explanation:
        render.bullet(sentence)
    render.note(f"searched {plan.searched}")


def _show_memory(plan: Plan) -> None:
    """What a worker of each machine type of the alternatives holds."""
    if not plan.memory:
        return
    render.heading("Memory of a worker")
    columns = ("device", "params", "grads", "optim.", "resid.", "activ.", "at once", "most")
    render.table(
        ("machine", *columns),
        [
            [
                one.instance_type,
                formatting.bytes_(one.device_bytes),
                *map(formatting.bytes_, one.parts),
                f"{one.micro_batch}/{one.local_batch_size}",
                "any" if one.largest_micro_batch is None else f"{one.largest_micro_batch}",
            ]
            for one in plan.memory
        ],
        caption="device: all of its memory · then parameters, gradients, optimizer state, residuals of the exchange, "
        "activations and what else a step takes · at once: the micro-batch, of a worker's local batch · most: the "
        f"largest micro-batch that fits into {MEMORY_RESERVE}",
        numbers=columns,
        gap=1,
    )


def _show_insight(plan: Plan) -> None:
    seen = plan.insight
    if seen is None:
        return
    render.heading("What would change it")
    render.table(
        ["if", "then"],
        [[world.change, world.verdict] for world in seen.scenarios],
    )
    if seen.rejected:
        render.heading("Better plans that a limit rejects")
        render.table(
            ["machines", "time", "cost", "rejected by"],
            [
                [
                    one.plan.machines,
                    formatting.duration(one.plan.total_s),
                    formatting.usd(one.plan.cost_usd),
                    one.reason,
                ]
                for one in seen.rejected
            ],
            numbers={"time", "cost"},
        )


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
        group.terms + band + seen,
        formatting.usd(group.price_usd_per_hour),
        str(low) if low == high else f"{low}–{high}",
        EVIDENCE_IN_SHORT[group.evidence],
    ]


def _price_of(group: Group) -> str:
    """Whose price it is, and of when."""
    day = "" if group.price_date in group.price_source else f", {group.price_date}"
    if group.is_own:
        return group.price_source
    return f"{group.market} price{' (estimate)' if group.price_is_estimate else ''}: {group.price_source}{day}"


def _show_alternatives(plan: Plan) -> None:
    render.heading("All plans, quickest first")
    usual = plan.profile.job.batch_size
    render.table(
        ["time (90 %)", "cost (90 %)", "machines"],
        [
            [
                _time_span(other.prediction.total_s),
                _usd_span(other.prediction.cost_usd),
                "; ".join(filter(None, [plan.machines(other), _batch(other, usual), _method(other)]))
                + ("  ← chosen" if other == plan.chosen else ""),
            ]
            for other in plan.plans
        ],
        caption=LEFT_OUT_PLANS,
    )


def show_ranking(ranking: Ranking, *, as_json: bool) -> None:
    """The clusters, quickest first, and what their figures do not say."""
    if as_json:
        render.print_json({"basis": ranking.basis, "clusters": [asdict(one) for one in ranking.clusters]})
        return
    render.line("How clusters compare for the same progress", style="bold")
    render.table(
        ["machines", "batch", "compression", "step", "an hour", "time", "cost"],
        [
            [
                f"{one.machines} × {one.instance_type} ({one.market})",
                formatting.count(one.global_batch_size),
                formatting.compression(one.compressor, one.ratio),
                formatting.duration(one.step_time_s),
                formatting.usd(one.usd_per_hour),
                f"{one.time:.2f} x",
                f"{one.cost:.2f} x",
            ]
            for one in ranking.clusters
        ],
        numbers={"batch", "step", "an hour", "time", "cost"},
        caption="time over the quickest, cost over the cheapest",
    )
    widest = max((one.spread for one in ranking.clusters), default=1.0)
    render.bullet(f"Steps are {ranking.basis}.")
    render.bullet(f"Each time may be off by a factor of {widest:.1f} (90 %), much of it the same for all clusters.")
    render.bullet("For a plan with a budget, give the run's length with --epochs or --steps.")
