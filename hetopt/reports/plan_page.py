"""A plan as one HTML page that needs nothing else: front, costs, shares, what would change it, what was rejected."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from hetopt.core import formatting
from hetopt.core.commands import typed
from hetopt.core.names import converted_script
from hetopt.optimizer.plan import Candidate, Choice, Goal, Plan, Range, Sensitivity
from hetopt.optimizer.search.objective import NEAR
from hetopt.optimizer.step_time.device_memory import ACCELERATOR_CONTEXT_BYTES, HOST_MEMORY_BYTES, MEMORY_FRACTION
from hetopt.reports.document import COLOURS, document, figure, parts_bar, section, sentences, swatch, table, tile, tiles
from hetopt.reports.plan_plots import LogAxis, dot_plot, front_svg


def page(plan: Plan) -> str:
    """The plan as one HTML document that needs no other file."""
    told, seen = plan.chosen.prediction, plan.insight
    risk = "" if plan.risk is None else f'<p class="risk">RISK: {escape(plan.risk)}; else it is stopped unfinished.</p>'
    advice = "" if plan.advice is None else f'<p class="advice">{escape(plan.advice)}</p>'
    return document(
        kind="hetopt plan",
        title=plan.chosen.in_words,
        about=[
            f'<p class="lead">{escape(plan.run.task)}, {escape(asked(plan.goal, until="to"))}: '
            f"{escape(plan.chosen.hardware_in_words)}</p>",
            risk,
            advice,
        ],
        main=[
            tiles(
                [
                    _key("time", "total_s", told.total_s, formatting.duration),
                    _key("cost", "cost_usd", told.cost_usd, formatting.usd),
                    *_sure(seen),
                ]
            ),
            section("The ways to go", *_choices(plan)),
            section("Start it", "<pre>" + escape("\n".join(next_commands(plan, "plan.json"))) + "</pre>"),
            section(
                "All plans, quickest first",
                f'<div class="front">{front_svg(plan)}</div>',
                _front_table(plan),
                f'<p class="of">{LEFT_OUT_PLANS}</p>',
            ),
            section("Where the money goes", cost_terms(plan.chosen)),
            section("What each worker does", _shares(plan.chosen)),
            *_memory(plan),
            *_insight(seen),
            section("Why this one", sentences(plan.explanation)),
        ],
        below=f"Made by hetopt {escape(plan.hetopt_version)}, {escape(plan.created[:10])}. "
        f"Searched: {escape(plan.searched)}.",
    )


def next_commands(plan: Plan, plan_file: str, inventory: str = "hosts.toml") -> tuple[str, ...]:
    """What starts a plan: here, where nothing should be rented. A session is written into a script that has none.

    How long a script trains, and by how many samples, is said by its own arguments, which only its author knows.
    """
    own = all(group.is_own for group in plan.chosen.groups)
    where = "local" if plan.advice is not None else f"ssh --inventory {inventory}" if own else "ec2 --dry-run"
    launch = f"hetopt launch {plan_file} --on {where}"
    job = plan.profile.job
    if not job.script:
        return (launch,)
    name, *arguments = job.script
    told = f"{plan.goal.amount:g}" in arguments
    length = "" if told else f"  # and its own argument to train {plan.goal.amount:g} {plan.goal.ends}"
    if plan.run.global_batch_size != job.batch_size:
        length += f"  # and its own argument for {plan.run.global_batch_size:,} samples a step"
    if job.has_session:
        return (f"{launch} -- {typed(*job.script)}{length}",)
    if not job.converts:
        by_hand = f"# write a session into {typed(name)}: docs/your-own-code.md, without a DataLoader by `run.split`"
        return by_hand, f"{launch} -- {typed(*job.script)}{length}"
    given = f" -- {typed(*arguments)}" if arguments else ""
    converted = typed(converted_script(Path(name)), *arguments)
    return f"hetopt convert {typed(name)}{given}", f"{launch} -- {converted}{length}"


def _choices(plan: Plan) -> Iterable[str]:
    """The ways to go side by side, and what decided."""
    if plan.choices:
        axes = _Axes(plan)
        cells = "".join(_choice(plan, way, axes, is_chosen=way.candidate == plan.chosen) for way in plan.choices)
        yield f'<div class="ways">{cells}</div>'
        if axes.limits:
            yield '<p class="of">Each dot is one of twenty equally likely runs; the line is the limit.</p>'
    yield sentences((*filter(None, [plan.not_compared]), *plan.reasons))


class _Axes:
    """The axes of time and cost that all ways share, and the limits on them."""

    def __init__(self, plan: Plan) -> None:
        times = [value for way in plan.choices for value in way.times_s]
        costs = [value for way in plan.choices for value in way.costs_usd]
        self.limits: list[tuple[str, str, float, LogAxis]] = []
        for name, limit, values in (("deadline", plan.goal.deadline_s, times), ("budget", plan.goal.budget_usd, costs)):
            if limit is not None and values:
                what = "time" if name == "deadline" else "cost"
                self.limits.append((what, name, limit, LogAxis.around([*values, limit])))

    def drawn(self, way: Choice) -> str:
        """A dot plot beside each limit."""
        return "".join(
            dot_plot(
                way.times_s if what == "time" else way.costs_usd,
                limit,
                axis,
                what=what,
                limit_name=name,
                say=formatting.duration if what == "time" else formatting.usd,
            )
            for what, name, limit, axis in self.limits
        )


def _choice(plan: Plan, way: Choice, axes: _Axes, *, is_chosen: bool) -> str:
    """One way as a card: name, figures with their intervals, chance, machines, quotas."""
    groups = () if way.candidate is None else way.candidate.groups
    machines = "this machine" if way.candidate is None else plan.machines(way.candidate)
    have = "" if way.candidate is None else way.candidate.hardware_in_words
    quotas = "; ".join(
        f"quota of {formatting.vcpus(need.vcpus)}: {need.name} (a new account has {need.new_account})"
        for need in way.quotas
    )
    rests = (
        "measured"
        if way.candidate is None
        else " and ".join(sorted({EVIDENCE_IN_SHORT[group.evidence] for group in groups}))
    )
    took, paid = way.total_s, way.cost_usd
    span = "" if way.candidate is None else formatting.usd_span(paid.low, paid.high)
    lines = [", ".join(filter(None, [have, f"step time {rests}"])), quotas]
    chance = "" if way.chance is None else f"<p>{escape(formatting.chance(way.chance))} within the limits</p>"
    return (
        f'<section class="way{" own" if is_chosen else ""}"><h3>{escape(" / ".join(way.names))}'
        f"{' (this plan)' if is_chosen else ''}</h3>"
        f"<p><b>{figure('way_total_s', took.value, formatting.duration)}</b> "
        f'<span class="soft">{escape(formatting.duration_span(took.value, took.low, took.high))}</span></p>'
        f"<p><b>{figure('way_cost_usd', paid.value, formatting.usd)}</b> "
        f'<span class="soft">{escape(span)}</span></p>'
        f"<p>{escape(machines)}</p>{chance}{axes.drawn(way)}"
        + "".join(f'<p class="soft">{escape(line)}</p>' for line in lines if line)
        + "</section>"
    )


def asked(goal: Goal, *, until: str = "until") -> str:
    """What was asked for, in a few words; ``until`` is said before a target."""
    if goal.ends == "target":
        return ", ".join([f"{until} {goal.target_metric} {goal.target_value:g}", *limits_of(goal)])
    length = formatting.counted(goal.amount or 0, goal.ends.removesuffix("s"))
    return ", ".join([length, *limits_of(goal)])


def limits_of(goal: Goal) -> list[str]:
    """Such as 'budget $20.00'."""
    limits = [f"budget {formatting.usd(goal.budget_usd)}"] if goal.budget_usd is not None else []
    return limits + ([f"deadline {formatting.duration(goal.deadline_s)}"] if goal.deadline_s is not None else [])


def _key(name: str, key: str, value: Range, say: formatting.Say) -> str:
    low, high = figure(f"{key}_low", value.low, say), figure(f"{key}_high", value.high, say)
    return tile(name, figure(key, value.value, say), f"{low} to {high}, with 90 % probability")


def _sure(seen: Sensitivity | None) -> Iterable[str]:
    if seen is None:
        return
    if seen.chance is not None:
        yield tile("keeps its limits", figure("chance", seen.chance, formatting.chance), "of simulated runs")
    if seen.gap is not None:
        yield tile(
            "room for improvement",
            f"{figure('gap', seen.gap, _fine_percent)} at most",
            "all clusters were searched",
        )


def _fine_percent(share: float) -> str:
    return f"{100 * share:.1f} %"


LEFT_OUT_PLANS = (
    "Plans are compared by time and cost on average, so a wide interval counts against one. Left out: what is slower "
    f"and dearer than another, or quicker by less than {100 * (NEAR - 1):.0f} % for twice the money."
)
"""The rule of `plan_front`, in words."""


def _front_table(plan: Plan) -> str:
    rows = []
    for other in plan.plans:
        name, took, paid = escape(plan.machines(other)), other.prediction.total_s, other.prediction.cost_usd
        rows.append(
            [
                f'<span class="chosen">{name} (this plan)</span>' if other == plan.chosen else name,
                f"{figure('front_total_s', took.value, formatting.duration)} "
                f'<span class="soft">{escape(formatting.duration_span(took.value, took.low, took.high))}</span>',
                f"{figure('front_cost_usd', paid.value, formatting.usd)} "
                f'<span class="soft">{escape(formatting.usd_span(paid.low, paid.high))}</span>',
                formatting.count(other.global_batch_size),
                escape(formatting.method(other.compression, other.sync, other.precision)),
            ]
        )
    columns = ["machines", "time", "cost", "batch", "compression"]
    return table("all plans", columns, rows, numbers=frozenset({1, 2, 3}))


def cost_terms(chosen: Candidate) -> str:
    """The bill of a plan as a bar and a table."""
    terms = chosen.prediction.bill
    rows = [
        [
            f"{swatch(COLOURS[min(place, len(COLOURS) - 1)])} {escape(term.name)}",
            figure("term_usd", term.usd, formatting.usd),
            escape(term.basis),
        ]
        for place, term in enumerate(terms)
    ]
    bar = parts_bar("parts of the bill", [(term.name, term.usd) for term in terms])
    return bar + table("the bill", ["for", "USD", "how"], rows, numbers=frozenset({1}))


def _shares(chosen: Candidate) -> str:
    rows = []
    for group in chosen.groups:
        low, high = min(group.local_batch_sizes), max(group.local_batch_sizes)
        share = f"{low}" if low == high else f"{low} to {high}"
        have = "" if group.hardware is None else escape(group.hardware.in_words)
        rows.append(
            [
                f"{len(group.local_batch_sizes)} on {group.machines} × {escape(group.instance_type)}",
                have,
                f'<span data-figure="largest_share" data-value="{high}">{share}</span>',
                EVIDENCE_IN_SHORT[group.evidence],
                formatting.usd(group.price_usd_per_hour) + (" (estimate)" if group.price_is_estimate else ""),
            ]
        )
    columns = ["workers", "each machine", "samples of a step, each", "step time is", "price an hour, each"]
    return table("what each worker does", columns, rows, numbers=frozenset({2, 4}))


EVIDENCE_IN_SHORT = {
    "measured": "measured",
    "interpolated": "same kind measured",
    "counted": "counted",
    "extrapolated": "not measured",
}
"""What a step time rests on, in few words; from the best known to the least."""

MEMORY_RESERVE = (
    f"{MEMORY_FRACTION:g} of a GPU less {ACCELERATOR_CONTEXT_BYTES // 2**20} MiB of CUDA context, "
    f"{MEMORY_FRACTION:g} of main memory less {HOST_MEMORY_BYTES / 2**30:g} GiB of system"
)
"""What training may use of a machine's memory."""


def _memory(plan: Plan) -> Iterable[str]:
    """What a worker of each machine type holds, part by part."""
    if not plan.memory:
        return
    columns: tuple[str, ...] = (
        "machine",
        "device",
        "parameters",
        "gradients",
        "optimizer state",
        "residuals",
        "activations",
    )
    names = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "residual_bytes", "activation_bytes")
    rows = [
        (
            escape(one.instance_type),
            f"{escape(one.device)} {figure('device_bytes', one.device_bytes, formatting.bytes_)}",
            *(figure(name, size, formatting.bytes_) for name, size in zip(names, one.parts, strict=True)),
            f"{one.micro_batch:,} of {one.local_batch_size:,}",
            "any" if one.largest_micro_batch is None else f"{one.largest_micro_batch:,}",
        )
        for one in plan.memory
    ]
    columns = (*columns, "micro-batch of local batch", "largest")
    yield section(
        "What a worker's memory holds",
        table("what a worker's memory holds", columns, rows, numbers=frozenset(range(2, 9))),
        f'<p class="soft">Largest: the largest micro-batch that fits into {escape(MEMORY_RESERVE)}.</p>',
    )


def _insight(seen: Sensitivity | None) -> Iterable[str]:
    """What would change the choice, and what would not; better plans that break a limit."""
    if seen is None:
        return
    changing = [[escape(world.change), escape(world.verdict)] for world in seen.scenarios if not world.same]
    same = [world.change for world in seen.scenarios if world.same]
    yield section(
        "What would change it",
        table("what would change the choice", ["if", "then"], changing) if changing else "",
        f'<p class="soft">The same machines win with {escape("; ".join(same))}.</p>' if same else "",
    )
    rejected = [
        [
            escape(one.plan.machines),
            figure("rejected_total_s", one.plan.total_s, formatting.duration),
            figure("rejected_cost_usd", one.plan.cost_usd, formatting.usd),
            escape(one.reason),
        ]
        for one in seen.rejected
    ]
    columns = ["machines", "time", "cost", "rejected by"]
    if rejected:
        yield section(
            "Better plans that a limit rejects",
            table("better plans that a limit rejects", columns, rejected, numbers=frozenset({1, 2})),
        )
