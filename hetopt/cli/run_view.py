"""A run as a person reads it: how it is, alone and among all runs, and how it was predicted and measured."""

from __future__ import annotations

from typing import Any

from hetopt.cli import render, timeline_view
from hetopt.core import formatting
from hetopt.core.comm.way_text import way_in_words
from hetopt.reports.report import BroughtTogether, Report, Sent, rows
from hetopt.reports.run_words import step_of
from hetopt.reports.timeline import ROUTINE, Timeline

UNREADABLE = "unreadable"
"""The state of a run whose folder holds what nobody can read."""

LATEST_HAPPENINGS = 5
SHOWN_WAYS = 3

UNSEEN_END = "estimated, as EC2 forgot machines before anybody saw when they ended: the invoice says it exactly"

HERE = {"local": "local ", "rehearsal": "rehearsed "}
"""Backends that are this machine, and what their workers are called."""


def show_all(facts: list[dict[str, Any]]) -> None:
    """A line for each run, and below them what could not be read."""
    if not facts:
        render.line("no runs yet; start one with `hetopt launch PLAN --on local`")
        return
    render.table(
        ["run", "state", "step", "elapsed", "metrics"],
        [
            [
                fact["run"],
                fact["state"],
                formatting.count(fact["step"]) if "step" in fact else "",
                formatting.duration(fact["elapsed_s"]) if fact.get("elapsed_s") else "",
                formatting.reached(fact.get("metrics", {}), fact.get("loss")),
            ]
            for fact in facts
        ],
        numbers={"step", "elapsed"},
        fixed={"run"},
    )
    for fact in facts:
        if fact["state"] == UNREADABLE:
            render.note(f"{fact['run']}: {fact['reason']}")
        elif fact["unread"]:
            render.note(f"{fact['run']}: {fact['unread']}")


def show_status(fact: dict[str, Any]) -> None:
    """One run: state, progress, money, machines and workers."""
    reason = f" ({fact['reason']})" if fact["reason"] else ""
    render.line(f"{fact['run']}: {fact['state']}{reason}", style="bold")
    if fact["resume"] is not None:
        render.line(f"  go on from its checkpoint: {fact['resume']}")
    render.line(
        f"  {step_of(fact['step'], fact['predicted_steps'])}, epoch {fact['epoch']:.1f}, "
        + (formatting.reached(fact["metrics"], fact["loss"]) or "not evaluated yet")
    )
    if fact["pausing"] is not None:
        render.line(f"  {fact['pausing']}")
    if fact["step_time_s"]:
        said = (
            f", predicted {formatting.duration(fact['predicted_step_time_s'])}" if fact["predicted_step_time_s"] else ""
        )
        render.line(f"  {formatting.duration(fact['step_time_s'])} a step{said}")
    if fact["elapsed_s"]:
        cost = "" if fact["usd"] is None else f"; {cost_words(fact['usd'], fact['usd_per_hour'], fact['on'])}"
        in_all = f" in {fact['sessions']} sessions" if fact["sessions"] > 1 else ""
        again = f", {formatting.counted(fact['lost_steps'], 'step')} of it done again" if fact["lost_steps"] else ""
        since = f"{in_all}{again}" if in_all or again else " since launch"
        render.line(f"  {formatting.duration(fact['elapsed_s'])}{since}{cost}")
    if fact["rental"] is not None:
        _show_rental(fact["rental"])
    if fact["exchange"] and fact["exchange"]["sent_bytes"] != fact["exchange"]["dense_bytes"]:
        way = way_in_words(fact["exchange"]["way"])
        share = formatting.share(fact["exchange"]["sent_bytes"] / fact["exchange"]["dense_bytes"])
        render.line(f"  gradients: {way}; {share} of dense bytes sent so far")
    if fact["audits"]:
        render.line(f"  {fact['audits']['text']}")
    if fact["workers"]:
        render.line()
        worker_table(fact["workers"])
    if fact["conditions"]:
        _show_conditions(fact)
    if fact["unread"]:
        render.note(fact["unread"])
    render.note(fact["folder"])


def cost_words(usd: float, usd_per_hour: float, on: str | None, of: str = "") -> str:
    """What a run has cost, and at which rate; ``of`` stands behind the amount."""
    if not usd_per_hour:
        return "$0, as nothing is rented"
    whose = "your hosts'" if on == "ssh" else "the plan's"
    return f"{formatting.usd(usd)}{of} at {whose} {formatting.usd(usd_per_hour)} an hour"


def _show_conditions(fact: dict[str, Any]) -> None:
    """How the rehearsed cluster differs from what was launched."""
    slowdown = fact["conditions"]["slowdown"]
    if slowdown > 1:
        render.bullet(
            f"everything runs {slowdown:g} times slower than was planned, because the computation did not fit"
        )
    for host, factor in sorted(fact["conditions"]["speed_factors"].items()):
        if factor != 1:
            render.bullet(f"{host} computes at {factor:g} of the speed that it was launched with")
    # Of what is routine only the last is news.
    last = {happening["kind"]: happening for happening in fact["happenings"]}
    news = [one for one in fact["happenings"] if one["kind"] not in ROUTINE or one is last[one["kind"]]]
    for happening in news[-LATEST_HAPPENINGS:]:
        where = f"{', '.join(happening['hosts'])}: " if happening["hosts"] else ""
        render.bullet(f"at {formatting.duration(max(0.0, happening['time_s']))} {where}{happening['text']}")


def worker_table(workers: list[dict[str, Any]]) -> None:
    """A line for each worker: its share, and where its time in a step goes."""
    speed, column = (
        ("speed", "speed") if any(worker["speed"] is not None for worker in workers) else ("slowdown", "slowdown")
    )
    render.table(
        ["worker", "planned as", column, "batch", "compute", "waiting"],
        [
            [
                worker["host"],
                worker["type"],
                f"{worker[speed]:g}",
                formatting.count(worker["local_batch_size"]) if worker["is_present"] else "gone",
                formatting.duration(worker["compute_s"]) if worker["compute_s"] is not None else "",
                formatting.duration(worker["wait_s"]) if worker["wait_s"] is not None else "",
            ]
            for worker in workers
        ],
        numbers={column, "batch", "compute", "waiting"},
        caption="batch: local batch size, samples · compute, waiting: mean of a step",
    )


def _more(machine: dict[str, Any]) -> list[str]:
    """What there is to say of a machine beside its state."""
    if machine["ending"]:
        return [machine["ending"]]
    duty = [] if machine["duty"] == "serves" else [machine["duty"]]
    return [*(["on demand"] if machine["market"] == "on-demand" else []), *duty]


def _show_rental(rental: dict[str, Any]) -> None:
    """Print the machines of a run and their states."""
    alive = sum(machine["state"] in ("pending", "running", "unseen") for machine in rental["machines"])
    of = f" of {formatting.usd(rental['budget_usd'])}" if rental["budget_usd"] is not None else ""
    going = f", {formatting.usd(rental['usd_per_hour'])} an hour" if alive else ""
    machines = formatting.counted(len(rental["machines"]), "machine")
    render.line(f"  {alive} of {machines} up; {formatting.usd(rental['spent_usd'])}{of} spent{going}")
    if rental["spent_is_estimate"]:
        render.line(f"  {UNSEEN_END}")
    if rental["ends_in_s"] is not None:
        render.line(f"  the machines end by themselves in {formatting.duration(max(rental['ends_in_s'], 0.0))}")
    if rental["leaves_for_zone"] is not None:
        render.line(f"  leaving {rental['zone']} for {rental['leaves_for_zone']}, where the same machines cost less")
    if rental["machines"]:
        render.table(
            ["machine", "host", "state", "up", "cost", "last word"],
            [
                [
                    machine["id"],
                    machine["host"],
                    ", ".join([machine["state"], *_more(machine)]),
                    formatting.duration(max(machine["up_s"], 0.0)),
                    formatting.usd(machine["usd"]) + (" (estimated)" if machine["usd_is_estimate"] else ""),
                    f"{formatting.duration(max(machine['heartbeat_s_ago'], 0.0))} ago"
                    if machine["heartbeat_s_ago"] is not None
                    else "",
                ]
                for machine in rental["machines"]
            ],
            numbers={"up", "cost", "last word"},
            fixed={"machine"},
        )
    if rental["strange_objects"]:
        names = ", ".join(rental["strange_objects"])
        render.note(f"objects in the bucket whose names no file of a run has were left there: {names}")
    if rental["not_asked"] is not None:
        age = formatting.duration(rental["seen_s_ago"]) if rental["seen_s_ago"] is not None else None
        render.note(f"this is {age} old: {rental['not_asked']}" if age else rental["not_asked"])
    if rental["machines"] and not alive and not rental["everything_is_removed"]:
        render.note("something of it may be left: look with `hetopt gc --on ec2`")


def show_report(made: Report) -> None:
    """The report as a person reads it."""
    kind, where = HERE.get(made.on, ""), "" if made.on in HERE else f" on {made.on}"
    workers = f"{formatting.counted(len(made.workers), f'{kind}worker')}{where}"
    state = f"{made.state}{formatting.ending(made.finish_reason)}"
    render.line(f"{made.run_id}: {made.task} on {workers}, {state}", style="bold")
    if made.metrics:
        render.line(f"  {formatting.reached(made.metrics, None)}")
    render.heading("Predicted and measured" + (", here" if made.on in HERE else ""))
    render.table(
        ["", "predicted", "90 % interval", "measured", "difference"],
        rows(made, between=" – "),
        numbers={"predicted", "90 % interval", "measured", "difference"},
    )
    render.heading("Workers")
    worker_table([worker.model_dump() for worker in made.workers])
    _show_timeline(made)
    render.heading("Verdict")
    for sentence in made.verdict:
        render.bullet(sentence)
    if made.on in HERE:
        render.bullet(
            f"The cluster of the plan is predicted to take {formatting.duration(made.rented_total_s)} and "
            f"{formatting.usd(made.rented_cost_usd)}; this run did not train on it."
        )


def _show_timeline(made: Report) -> None:
    """How shares, computing, waiting and the exchange went over the run."""
    told = Timeline(moments=made.timeline, happenings=made.happenings)
    lines = timeline_view.draw(told, [worker.host for worker in made.workers], render.width())
    if lines:
        render.heading("Over the run")
    for line in lines:
        render.line(line)
    for mark, sentence in timeline_view.explain(told):
        render.bullet(sentence, mark=mark)
    if made.together is not None:
        render.bullet(_together(made.together))
    elif made.sent is not None:
        render.bullet(_sent(made.sent))


def _together(told: BroughtTogether) -> str:
    """How often workers were brought together, and how far apart they had come."""
    steps = told.synchronised + told.local
    apart = ""
    if told.divergence is not None:
        apart = f"; they had come apart by {formatting.share(told.divergence)} of the parameters' norm"
    return (
        f"{told.policy}: workers came together in {formatting.count(told.synchronised)} of "
        f"{formatting.counted(steps, 'step')} ({formatting.share(told.share)}), and sent "
        f"{formatting.bytes_(told.sent_bytes)} each{apart}"
    )


def _sent(sent: Sent) -> str:
    """How much of the gradients went over the network, and how."""
    if sent.sent_bytes == sent.dense_bytes:
        return f"sent {formatting.bytes_(sent.sent_bytes)} per worker, uncompressed"
    ways = sorted(sent.ways, key=lambda way: -way.steps)
    told = [f"{way_in_words(way.way)} in {formatting.counted(way.steps, 'step')}" for way in ways[:SHOWN_WAYS]]
    others = ways[SHOWN_WAYS:]
    if others:
        told.append(f"others in {formatting.counted(sum(way.steps for way in others), 'step')}")
    return (
        f"sent {formatting.share(sent.share)} of dense bytes ({formatting.bytes_(sent.sent_bytes)} of "
        f"{formatting.bytes_(sent.dense_bytes)} per worker): {'; '.join(told)}"
    )
