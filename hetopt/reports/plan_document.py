"""A plan as a document: the answer on one screen, and behind it machines, bill, alternatives and reasons."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hetopt.core import formatting
from hetopt.core.plain_text import converted_script, typed
from hetopt.optimizer.plan import AWS, Candidate, Choice, Goal, Group, Plan, Prediction, Range, cloud_of
from hetopt.optimizer.search.objective import NEAR
from hetopt.optimizer.step_time.device_memory import ACCELERATOR_CONTEXT_BYTES, HOST_MEMORY_BYTES, MEMORY_FRACTION
from hetopt.reports.document import (
    Block,
    Cell,
    Column,
    Document,
    Facts,
    Figure,
    Heading,
    Html,
    Line,
    Remarks,
    Table,
    Tile,
    Tiles,
    columns,
)
from hetopt.reports.html import cell, parts_bar

AS_SURE = 0.02
"""Largest difference of two chances that count as equally high."""

STOPS_PAYING = "; a tenth less time would cost over a fifth more"
"""Words on why a balanced plan is not the fastest."""

HARDLY_QUICKER = "; what is quicker saves too little for its price"
"""Words on why a plan is chosen as the fastest while another that is shown takes less time."""

EVIDENCE_IN_SHORT = {
    "measured": "measured",
    "interpolated": "same kind measured",
    "counted": "counted",
    "extrapolated": "not measured",
}
"""Few words for the evidence that a step time rests on; from the best known to the least."""

_LEFT_OUT_PLANS = (
    "Plans are compared by time and cost on average, so a wide interval counts against one. Left out: what is slower "
    f"and dearer than another, or quicker by less than {100 * (NEAR - 1):.0f} % for twice the money."
)
"""The rule of `plan_front`, in words."""

_MEMORY_RESERVE = (
    f"{MEMORY_FRACTION:g} of a GPU less {ACCELERATOR_CONTEXT_BYTES // 2**20} MiB of CUDA context, "
    f"{MEMORY_FRACTION:g} of main memory less {HOST_MEMORY_BYTES / 2**30:g} GiB of system"
)
"""What training may use of a machine's memory."""


def page(plan: Plan) -> Document:
    """Return the document of a plan's whole page: the answer, the command to start it, and all details."""
    return Document(
        kind="hetopt plan",
        title=plan.chosen.in_words,
        about=[
            Line(f"{plan.run.task}, {goal_in_words(plan.goal, until='to')}: {plan.chosen.hardware_in_words}", "strong"),
            *warnings(plan),
        ],
        blocks=[
            Tiles(list(_tiles(plan))),
            Heading("The ways to go"),
            *choices(plan),
            Remarks([*filter(None, [plan.not_compared]), *plan.reasons]),
            Heading("Start it"),
            Line("\n".join(next_commands(plan, "plan.json")), is_copied=True),
            *details(plan),
        ],
        below=f"Made by hetopt {plan.hetopt_version}, {plan.created[:10]}. Searched: {plan.searched}.",
    )


def answer(plan: Plan, *, plan_file: Path | None = None, inventory: Path | None = None) -> list[Block]:
    """Return the blocks of a plan's answer: goal, choices, reasons, the most important first, and the next commands.

    Args:
        plan: plan to show.
        plan_file: file that the plan was written to; None: commands say ``plan.json``, and how to save it.
        inventory: file of hosts that the plan is for; None: commands say ``hosts.toml``.
    """
    chosen = plan.chosen
    are_own = all(group.is_own for group in chosen.groups)
    where = (
        "on your own machines" if are_own else f"in {'+'.join(dict.fromkeys(group.region for group in chosen.groups))}"
    )
    head = [
        Line(f"{plan.run.task}, {goal_in_words(plan.goal)}, {where}", "strong"),
        *warnings(plan),
        *in_a_sentence(plan),
    ]
    names = [typed(name) for name in (plan_file or "plan.json", inventory or "hosts.toml")]
    unsaved = "" if plan_file else "add -o plan.json, then "
    first, *others = next_commands(plan, *names)
    commands = [f"next: {unsaved}{first}", *(f"then: {command}" for command in others)]
    return [
        *head,
        *(Line(text, "warning") for text in quota_notes(plan)),
        *choices(plan),
        Line(""),
        Remarks([*_memory_bound(chosen), *plan.reasons, *region_notes(plan)]),
        *(Line(command, "strong", is_copied=True) for command in commands),
    ]


def warnings(plan: Plan) -> Iterator[Line]:
    """Yield a line on the risk that a plan breaks its limits, and one on why nothing should be rented; or none."""
    if plan.risk is not None:
        yield Line(f"RISK: {plan.risk}.", "warning")
    if plan.advice is not None:
        yield Line(plan.advice, "good")


def in_a_sentence(plan: Plan) -> Iterator[Line]:
    """Yield the chosen cluster with its time, cost and chance in one line; nothing where a warning says what counts."""
    way, limits = chosen_way(plan), {"the budget": plan.goal.budget_usd, "the deadline": plan.goal.deadline_s}
    if plan.advice is None and plan.risk is None and way is not None:
        label, kept = _name(way, way.chance or 0.0).replace("/", " and "), [name for name in limits if limits[name]]
        why = STOPS_PAYING if "balanced" in way.names and "fastest" not in way.names else ""
        why = HARDLY_QUICKER if "fast" in way.names else why
        sure = f" {formatting.chance(way.chance or 0.0)} of simulated runs keep {' and '.join(kept)}." if kept else ""
        figures = f"{formatting.duration(way.total_s.value)}, {formatting.usd(way.cost_usd.value)}"
        yield Line(f"{plan.chosen.in_words}: {figures}. It is the {label} plan{why}.{sure}")


def _tiles(plan: Plan) -> Iterator[Tile]:
    """Yield time and cost with their intervals, and how sure both are.

    The chance and the gap only where they are known.
    """
    for name, key, unit, known in (
        ("time", "total_s", "s", plan.chosen.prediction.total_s),
        ("cost", "cost_usd", "USD", plan.chosen.prediction.cost_usd),
    ):
        low, high = (
            cell(Figure(end, unit, f"{key}_{side}")) for side, end in (("low", known.low), ("high", known.high))
        )
        interval = Html(f'<p class="of">{low} to {high}, with 90 % probability</p>')
        yield Tile(name=name, value=Figure(known.value, unit, key), below=[interval])
    if plan.insight is not None and plan.insight.chance is not None:
        chance = Figure(plan.insight.chance, "chance", "chance")
        yield Tile(name="keeps its limits", value=chance, below=["of simulated runs"])
    if plan.insight is not None and plan.insight.gap is not None:
        gap = Figure(plan.insight.gap, "fine share", "gap")
        yield Tile(name="room for improvement", value=gap, below=["at most: all clusters were searched"])


def next_commands(plan: Plan, plan_file: str, inventory: str = "hosts.toml") -> tuple[str, ...]:
    """Return the shell commands to type next: to measure, to export to another cloud, or to convert and launch.

    An estimated job is measured first, on a machine that holds it; a script without a session is converted first. The
    launch is on this machine where nothing should be rented. A comment names what the script's own options must say.

    Args:
        plan: plan that they are for.
        plan_file: file of the plan, as it is typed.
        inventory: file of hosts, as it is typed; used where the machines are one's own.
    """
    if plan.profile.is_counted:
        replica, group = plan.profile.devices[0].memory, plan.chosen.groups[0]
        alone_gib = 0 if group.hardware is None else group.hardware.gpu_memory_gib or 0
        is_shared = replica is not None and replica.kept_bytes > 2**30 * alone_gib
        who = f"{group.instance_type}: its {group.workers_per_machine} GPUs share the model"
        return (f"hetopt profile -- train.py{f'  # on a {who}' * is_shared}",)
    if any(cloud_of(group.region) != AWS for group in plan.chosen.groups):
        return (f"hetopt export {plan_file} --skypilot task.yaml",)
    are_own = all(group.is_own for group in plan.chosen.groups)
    where = "local" if plan.advice is not None else f"ssh --inventory {inventory}" if are_own else "ec2 --dry-run"
    launch = f"hetopt launch {plan_file} --on {where}"
    job = plan.profile.job
    if not job.script:
        return (launch,)
    name, *arguments = job.script
    sets_length = f"{plan.goal.amount:g}" in arguments
    length = "" if sets_length else f"  # with the script's own option for {plan.goal.amount:g} {plan.goal.ends}"
    if plan.run.global_batch_size != job.batch_size:
        length += f"  # with the script's own option for {plan.run.global_batch_size:,} samples a step"
    if job.has_session:
        return (f"{launch} -- {typed(*job.script)}{length}",)
    if not job.converts:
        by_hand = f"# write a session into {typed(name)}: docs/your-own-code.md, without a DataLoader by `run.split`"
        return by_hand, f"{launch} -- {typed(*job.script)}{length}"
    given = f" -- {typed(*arguments)}" if arguments else ""
    converted = typed(converted_script(Path(name)), *arguments)
    return f"hetopt convert {typed(name)}{given}", f"{launch} -- {converted}{length}"


def choices(plan: Plan) -> Iterator[Block]:
    """Yield a table of the plan's choices: figures in columns, and below them the machines.

    Nothing is yielded where the plan compares none.
    """
    if not plan.choices:
        return
    rented = [way.candidate for way in plan.choices if way.candidate is not None]
    # Where none of them was measured, or all were counted, a sentence says so once.
    unlike = {group.evidence for candidate in rented for group in candidate.groups} not in (
        {"extrapolated"},
        {"counted"},
    )
    chosen = chosen_way(plan)
    sure = 0.0 if chosen is None else chosen.chance or 0.0
    yield Table(
        name="the ways to go",
        columns=[
            Column("", "word"),
            Column("time (90 %)", "word"),
            Column("cost (90 %)", "word"),
            Column("per hour", "word", may_go=0),
            Column("chance", "word"),
        ],
        rows=[
            [
                _name(way, sure),
                Figure.of(way.total_s, "s", "way_total_s"),
                Figure.of(way.cost_usd, "USD", "way_cost_usd")
                if way.candidate is not None
                else Figure(0.0, "USD", "way_cost_usd"),
                formatting.usd(way.usd_per_hour),
                "" if way.chance is None else formatting.chance(way.chance),
            ]
            for way in plan.choices
        ],
        notes=[
            # So a batch size that all of them have.
            _machines_of(plan, way, same_batch=len({way.global_batch_size for way in rented}) == 1, evidence=unlike)
            for way in plan.choices
        ],
        chosen=None if chosen is None or plan.advice is not None else plan.choices.index(chosen),
        are_cards=True,
    )


def _name(way: Choice, sure: float) -> str:
    """Return the name of a choice, such as 'cheapest/safest', or 'on demand' where the plan itself is safer.

    ``sure``: the plan's own chance to keep its limits.
    """
    # On demand nothing is taken back; at its price that may keep the limits less often than spot does.
    safest = "safest" if (way.chance or 0.0) >= sure - AS_SURE else "on demand"
    # A label is of one or two words: what says least is left out.
    names = [name for name in way.names if name not in ("balanced", "cheap", "fast")] or way.names
    return "best" if {"cheapest", "fastest"} <= set(names) else "/".join(names).replace("safest", safest)


def _machines_of(plan: Plan, way: Choice, *, same_batch: bool, evidence: bool) -> str:
    """Return a choice in a line: its machines and hardware, how it trains where not as usual, quotas and evidence.

    Args:
        plan: plan with the choice.
        way: choice.
        same_batch: whether all choices have one batch size, which is then left out.
        evidence: whether to say what the step time is from.
    """
    if way.candidate is None:
        return "this machine, measured"
    groups, closed_s = way.candidate.groups, way.candidate.prediction.closed_s
    quotas = "".join(f"{need.vcpus:,} + " for need in way.quotas[:-1])
    quotas += "".join(formatting.counted(need.vcpus, "vCPU") for need in way.quotas[-1:])
    rests = {group.evidence for group in groups}
    least = next(known for known in reversed(EVIDENCE_IN_SHORT) if known in rests)
    basis = EVIDENCE_IN_SHORT[least] if len(rests) == 1 else f"in part {EVIDENCE_IN_SHORT[least]}"
    parts = [
        plan.machines(way.candidate),
        way.candidate.hardware_in_words,
        "" if same_batch else _batch(way.candidate, plan.profile.job.batch_size),
        _method(way.candidate),
        f"quota {quotas}" if quotas else "",
        f"closed for {formatting.duration(closed_s)} of that" if closed_s else "",
        basis if evidence else "",
    ]
    return "; ".join(filter(None, parts))


def _batch(candidate: Candidate, usual: int) -> str:
    """Return the batch size, where it is not the job's own."""
    size = candidate.global_batch_size
    return "" if size == usual else f"batch {formatting.count(size)}, not {formatting.count(usual)}"


def _method(candidate: Candidate) -> str:
    """Return the exchange and what workers compute in, where they are not the plain ones."""
    way = formatting.method(candidate.compression, candidate.sync, candidate.precision)
    if way == "none" or way.startswith("none, "):
        return way[len("none") :].removeprefix(", ")
    return way if candidate.sync.is_local else f"gradients by {way}"


def chosen_way(plan: Plan) -> Choice | None:
    """Return the choice that the plan took; None: choices are not shown, or none is the plan's."""
    return next((way for way in plan.choices if way.candidate == plan.chosen), None)


def region_notes(plan: Plan) -> Iterator[str]:
    """Yield sentences on types without a price, and on the best region and the next two, if regions were compared."""
    if plan.not_compared is not None:
        yield plan.not_compared
    if plan.regions:
        best, *others = plan.regions
        moved = f", {formatting.usd(best.data_transfer_usd)} of it for the data" if best.data_transfer_usd else ""
        next_ = "; ".join(
            f"{offer.region} {formatting.duration(offer.total_s)}, {formatting.usd(offer.cost_usd)}" for offer in others
        )
        yield f"{best.region} is the best region{moved}{f'; next {next_}' if others else ''}."


def quota_notes(plan: Plan, *, presumed: bool = False) -> Iterator[str]:
    """Yield a sentence for each vCPU quota that the chosen plan needs above a new account's, if this one's is unknown.

    Args:
        plan: plan with its choices.
        presumed: whether the quotas that it was planned with are assumptions, and no account's.
    """
    chosen = chosen_way(plan)
    for need in () if chosen is None else chosen.quotas:
        if (presumed or need.granted is None) and need.vcpus > need.new_account:
            yield (
                f"Needs a quota of {formatting.counted(need.vcpus, 'vCPU')} ({need.bucket}); a new account has "
                f"{need.new_account} (`hetopt doctor`)."
            )


def _memory_bound(candidate: Candidate) -> Iterator[str]:
    """Yield how each machine type trains whose memory does not hold the model or its local batch at once."""
    words = [(group.instance_type, group.memory_in_words) for group in candidate.groups]
    bound = dict.fromkeys(f"{name} {how}" for name, how in words if how)
    if bound:
        yield f"{'; '.join(bound)}."


def goal_in_words(goal: Goal, *, until: str = "until") -> str:
    """Return a goal and its limits in a few words, such as 'until accuracy 0.9, budget $20.00'.

    Args:
        goal: goal of the plan.
        until: word before a target.
    """
    length = formatting.counted(goal.amount or 0, goal.ends.removesuffix("s"))
    end = f"{until} {goal.target_metric} {goal.target_value:g}" if goal.ends == "target" else length
    return ", ".join([end, *limits_of(goal)])


def limits_of(goal: Goal) -> list[str]:
    """Return the limits of a goal in words, such as 'budget $20.00'; empty: it has none."""
    limits = [f"budget {formatting.usd(goal.budget_usd)}"] if goal.budget_usd is not None else []
    return limits + ([f"deadline {formatting.duration(goal.deadline_s)}"] if goal.deadline_s is not None else [])


def _unavailable(prediction: Prediction) -> str:
    """Return the expected wait for spot machines as a phrase, where it is more than a hundredth of the total."""
    if prediction.unavailable_s < 0.01 * prediction.total_s.value:
        return ""
    return f" and, on average, {formatting.duration(prediction.unavailable_s)} for spot machines that are not to be had"


def details(plan: Plan) -> Iterator[Block]:
    """Yield the details behind the answer: the plan, its machines, memory and bill, all other plans, and reasons."""
    chosen, prediction = plan.chosen, plan.chosen.prediction
    kind = "sync" if chosen.sync.is_local else "compression"
    yield Heading("The plan")
    yield Facts(
        {
            "cluster": chosen.in_words,
            "time": f"{_interval(prediction.total_s, formatting.duration)}, of which start-up "
            f"{formatting.duration(prediction.startup_s)}{_unavailable(prediction)}",
            "cost": _interval(prediction.cost_usd, formatting.usd),
            "batch": f"{formatting.counted(chosen.global_batch_size, 'sample')} a step, {kind} "
            f"{formatting.method(chosen.compression, chosen.sync, chosen.precision)}, "
            f"{chosen.collective.replace('_', '-')}",
            "step": f"{formatting.duration(prediction.step_time_s.value)}: "
            f"computing {formatting.duration(prediction.compute_s)}, "
            f"communicating {formatting.duration(prediction.communication_s)}; workers wait "
            f"{formatting.duration(prediction.waiting_s)}",
            "steps": f"{formatting.count(prediction.steps.value)}, from {prediction.steps_source}",
        }
    )
    yield Heading("Machines")
    yield Table(
        name="machines",
        columns=columns("machines, market, each has, #USD/h, #batch, step time is"),
        rows=[_machine(group) for group in chosen.groups],
        caption="USD/h: one machine · batch: local batch size, samples · "
        + "; ".join(dict.fromkeys(map(_price_of, chosen.groups))),
    )
    yield Remarks(stand_ins(plan))
    yield from _memory(plan)
    yield Heading("Cost")
    yield from bill(chosen)
    if len(plan.plans) > 1:
        yield from _alternatives(plan)
    yield Heading("Why")
    yield Remarks(plan.explanation)


def stand_ins(plan: Plan) -> list[str]:
    """Return a sentence for each group of the plan on the types that may be rented in place of its own."""
    return [
        f"In place of {group.instance_type}, where it is not to be had: {', '.join(others)}."
        for group, others in plan.with_stand_ins
        if others
    ]


def _interval(known: Range, say: formatting.Say) -> str:
    return f"{say(known.value)} ({say(known.low)} – {say(known.high)} with 90 % probability)"


def _machine(group: Group) -> list[Cell]:
    """Return a group's row: machines, terms, hardware, price, local batch sizes and what its step time is from."""
    band = f", {group.interruption_band} a month" if group.interruption_band else ""
    seen = f", {group.watched.in_words}" if group.watched else ""
    low, high = min(group.local_batch_sizes), max(group.local_batch_sizes)
    return [
        f"{group.machines} × {group.instance_type}",
        group.terms + band + seen,
        "" if group.hardware is None else group.hardware.in_words,
        Figure(group.price_usd_per_hour, "USD", "price"),
        str(low) if low == high else f"{low}–{high}",
        EVIDENCE_IN_SHORT[group.evidence],
    ]


def _price_of(group: Group) -> str:
    """Return the source and the date of a group's price, in words."""
    day = "" if group.price_date in group.price_source else f", {group.price_date}"
    if group.is_own:
        return group.price_source
    return f"{group.market} price{' (estimate)' if group.price_is_estimate else ''}: {group.price_source}{day}"


def _memory(plan: Plan) -> Iterator[Block]:
    """Yield the memory of a worker of each machine type, part by part."""
    names = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "residual_bytes", "activation_bytes")
    yield Heading("Memory of a worker")
    if plan.memory:
        yield Table(
            name="memory of a worker",
            columns=columns("machine, #device, #params, #grads, #optim., #resid., #activ., #at once, #most"),
            rows=[
                [
                    memory.instance_type,
                    Figure(memory.device_bytes, "bytes", "device_bytes"),
                    *(Figure(getattr(memory, name), "bytes", name) for name in names),
                    f"{memory.micro_batch}/{memory.local_batch_size}",
                    "any" if memory.largest_micro_batch is None else f"{memory.largest_micro_batch}",
                ]
                for memory in plan.memory
            ],
            caption="device: all of its memory · then parameters, gradients, optimizer state, residuals of the "
            "exchange, activations and what else a step takes · at once: the micro-batch, of a worker's local batch · "
            f"most: the largest micro-batch that fits into {_MEMORY_RESERVE}",
        )


def bill(chosen: Candidate) -> Iterator[Block]:
    """Yield the bill of a plan as a bar and a table.

    Args:
        chosen: candidate whose predicted cost is shown, part by part.
    """
    terms = chosen.prediction.bill
    yield Html(parts_bar("parts of the bill", [(term.name, term.usd) for term in terms]))
    yield Table(
        name="the bill",
        columns=columns("for, #USD, how"),
        rows=[[term.name, Figure(term.usd, "USD", "term_usd"), term.basis] for term in terms],
    )


def _alternatives(plan: Plan) -> Iterator[Block]:
    """Yield all plans as a picture (on a page alone) and as a table, with the chosen one marked."""
    # A picture needs what runs are drawn with, which takes as long to import as the rest of an answer.
    from hetopt.reports.plan_plots import front_svg

    usual = plan.profile.job.batch_size
    yield Heading("All plans, quickest first")
    yield Html(f'<div class="front">{front_svg(plan)}</div>')
    yield Table(
        name="all plans",
        columns=columns("machines, time (90 %), cost (90 %)"),
        rows=[
            [
                "; ".join(filter(None, [plan.machines(other), _batch(other, usual), _method(other)])),
                Figure.of(other.prediction.total_s, "s", "front_total_s"),
                Figure.of(other.prediction.cost_usd, "USD", "front_cost_usd"),
            ]
            for other in plan.plans
        ],
        chosen=plan.plans.index(plan.chosen),
        caption=_LEFT_OUT_PLANS,
    )
