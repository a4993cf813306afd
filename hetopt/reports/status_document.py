"""The status of one run, and the list of all, as documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hetopt.core import formatting
from hetopt.core.comm.compression_text import way_in_words
from hetopt.optimizer.launch_record import OWN_PLACES
from hetopt.reports.document import Block, Line, Remarks, Table, columns
from hetopt.reports.live_run import UNREADABLE
from hetopt.reports.report import WorkerReport
from hetopt.reports.run_document import worker_table
from hetopt.reports.timeline import NotableEvent, step_of

UNSEEN_END = "estimated, as EC2 forgot machines before anybody saw when they ended: the invoice says it exactly"


def runs(facts: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    """Yield a table of runs from their `facts`: state, step, elapsed time and metrics.

    Without runs the only block says how to start one.

    Args:
        facts: facts of each run, as of `LiveRun.facts`; of one that cannot be read, fewer.
    """
    if not facts:
        yield Line("no runs yet; start one with `hetopt launch PLAN --on local`")
        return
    yield Table(
        name="runs",
        columns=columns("!run, state, #step, #elapsed, metrics"),
        rows=[
            [
                fact["run"],
                Line(fact["state"], "warning" if fact["state"] in ("failed", UNREADABLE) else ""),
                formatting.count(fact["step"]) if "step" in fact else "",
                formatting.duration(fact["elapsed_s"]) if fact.get("elapsed_s") else "",
                formatting.reached(fact.get("metrics", {}), fact.get("loss")),
            ]
            for fact in facts
        ],
    )


def status(fact: Mapping[str, Any]) -> Iterator[Block]:
    """Yield a run's status from its `facts`: state, progress, money, machines and workers.

    Args:
        fact: facts of the run, as of `LiveRun.facts`.
    """
    reason = f" ({fact['reason']})" if fact["reason"] else ""
    yield Line(f"{fact['run']}: {fact['state']}{reason}", "strong")
    evaluated = formatting.reached(fact["metrics"], fact["loss"]) or "not evaluated yet"
    phrases = [
        f"go on: {fact['resume']}" if fact["resume"] is not None else None,
        f"{step_of(fact['step'], fact['predicted_steps'])}, epoch {fact['epoch']:.1f}, {evaluated}",
        fact["pausing"],
        _pace(fact["step_time_s"], fact["predicted_step_time_s"]),
        _elapsed(fact),
        *_rental(fact["rental"]),
        _gradients(fact["exchange"]),
        fact["audits"] and fact["audits"]["text"],
    ]
    yield from (Line(f"  {phrase}", hang=2) for phrase in phrases if phrase)
    if fact["rental"] is not None and fact["rental"]["machines"]:
        yield _machines(fact["rental"]["machines"])
    if fact["workers"]:
        yield Line("")
        yield worker_table([WorkerReport(**worker) for worker in fact["workers"]])
    yield Remarks([*(_conditions(fact) if fact["conditions"] else ()), *_happened(fact)])


def notes(fact: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes beside the status: what could not be read or asked, and where the run's folder is.

    Args:
        fact: facts of the run, as of `LiveRun.facts`.
    """
    rental = fact["rental"]
    if rental is not None and rental["not_asked"] is not None:
        seen_s = rental["seen_s_ago"]
        yield f"{'' if seen_s is None else f'this is {formatting.duration(seen_s)} old: '}{rental['not_asked']}"
    if rental is not None and rental["machines"] and not _alive(rental) and not rental["everything_is_removed"]:
        yield "something of it may be left: look with `hetopt gc --on ec2`"
    if fact["unread"]:
        yield fact["unread"]
    yield fact["folder"]


def _pace(step_time_s: float | None, predicted_s: float | None) -> str:
    """Return the seconds of a step in words, with the prediction if known; empty: not known."""
    if not step_time_s:
        return ""
    return f"{formatting.duration(step_time_s)} a step" + (
        f", predicted {formatting.duration(predicted_s)}" if predicted_s else ""
    )


def _elapsed(fact: Mapping[str, Any]) -> str:
    """Return the time since launch, what of it was lost, and the cost, in words; empty: the run has not begun."""
    if not fact["elapsed_s"]:
        return ""
    of = f" of a budget of {formatting.usd(fact['budget_usd'])}" if fact["budget_usd"] is not None else ""
    cost = "" if fact["usd"] is None else f"; {cost_words(fact['usd'], fact['usd_per_hour'], fact['on'], of)}"
    in_all = f" in {fact['sessions']} sessions" if fact["sessions"] > 1 else ""
    again = f", {formatting.counted(fact['lost_steps'], 'step')} of it done again" if fact["lost_steps"] else ""
    return f"{formatting.duration(fact['elapsed_s'])}{f'{in_all}{again}' or ' since launch'}{cost}"


def cost_words(usd: float, usd_per_hour: float, on: str | None, of: str) -> str:
    """Return a run's cost in USD and hourly rate in words; ``on``: its backend, ``of``: a phrase behind the cost.

    Args:
        usd: cost so far.
        usd_per_hour: rate; 0: nothing is rented.
        on: backend of the run; None: not known.
        of: phrase behind the cost, such as ' of a budget of $20.00'; empty: none.
    """
    if not usd_per_hour:
        return "$0, as nothing is rented"
    whose = "your hosts'" if on in OWN_PLACES else "the plan's"
    return f"{formatting.usd(usd)}{of} at {whose} {formatting.usd(usd_per_hour)} an hour"


def _gradients(exchange: Mapping[str, Any] | None) -> str:
    """Return how gradients travel and what share was sent, in words; empty: everything was, or nothing is known."""
    if not exchange or exchange["sent_bytes"] == exchange["dense_bytes"]:
        return ""
    share = formatting.share(exchange["sent_bytes"] / exchange["dense_bytes"])
    return f"gradients: {way_in_words(exchange['way'])}; {share} of dense bytes sent so far"


def _conditions(fact: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences on the slowdown of the whole rehearsal, and on hosts that compute at another speed now."""
    slowdown = fact["conditions"]["slowdown"]
    if slowdown > 1:
        yield f"everything runs {slowdown:g} times slower than was planned, because the computation did not fit"
    for host, factor in sorted(fact["conditions"]["speed_factors"].items()):
        if factor != 1:
            yield f"{host} computes at {factor:g} of the speed that it was launched with"


def _happened(fact: Mapping[str, Any]) -> Iterator[str]:
    for happened in (NotableEvent(**happening) for happening in fact["happenings"]):
        yield f"at {formatting.duration(max(0.0, happened.time_s))} {happened.sentence}"


def _alive(rental: Mapping[str, Any]) -> int:
    return sum(machine["state"] in ("pending", "running", "unseen") for machine in rental["machines"])


def _rental(rental: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield how many machines are up, what they cost, and when they end; None: nothing is rented."""
    if rental is None:
        return
    alive = _alive(rental)
    of = f" of {formatting.usd(rental['budget_usd'])}" if rental["budget_usd"] is not None else ""
    going = f", {formatting.usd(rental['usd_per_hour'])} an hour" if alive else ""
    machines = formatting.counted(len(rental["machines"]), "machine")
    yield f"{alive} of {machines} up; {formatting.usd(rental['spent_usd'])}{of} spent{going}"
    if rental["spent_is_estimate"]:
        yield UNSEEN_END
    if rental["ends_in_s"] is not None:
        yield f"the machines end by themselves in {formatting.duration(max(rental['ends_in_s'], 0.0))}"


def _machines(machines: Sequence[Mapping[str, Any]]) -> Table:
    """Return a row for each rented machine."""
    rows = []
    for machine in machines:
        market = "on demand" if machine["market"] == "on-demand" else ""
        duty = "" if machine["duty"] == "serves" else machine["duty"]
        state = [machine["state"], *([machine["ending"]] if machine["ending"] else [market, duty])]
        heard_s = machine["heartbeat_s_ago"]
        rows.append(
            [
                machine["id"],
                machine["host"],
                ", ".join(filter(None, state)),
                formatting.duration(max(machine["up_s"], 0.0)),
                formatting.usd(machine["usd"]) + (" (estimated)" if machine["usd_is_estimate"] else ""),
                "" if heard_s is None else f"{formatting.duration(max(heard_s, 0.0))} ago",
            ]
        )
    return Table(name="rented machines", columns=columns("!machine, host, state, #up, #cost, #last word"), rows=rows)
