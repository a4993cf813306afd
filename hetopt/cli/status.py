"""`hetopt status`: how a run is, from any terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from hetopt.cli.options import NewestRun

if TYPE_CHECKING:
    from hetopt.api.run import Run
    from hetopt.core.events.fold import RunFold
    from hetopt.core.run_status import RunStatus

LATEST_HAPPENINGS = 5

UNREADABLE = "unreadable"
"""The state of a run whose folder holds what nobody can read."""


def status(
    run: NewestRun = None,
    all_: bool = typer.Option(False, "--all", "-a", help="A line for every run."),
    watch: bool = typer.Option(False, "--watch", "-w", help="Go on showing it, until it is over or Ctrl-C."),
    json_: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show how a run is: state, steps, metric, each worker's share and waiting, and what it costs so far.

    \b
      hetopt status
      hetopt status --watch
    """
    from hetopt.api.run import Run
    from hetopt.cli import render

    if watch:
        from hetopt.cli.watch import watch as watch_run
        from hetopt.core.errors import BadInput

        if all_ or json_:
            raise BadInput("--watch shows one run to a person.", hint="leave --all and --json out")
        watch_run(Run.find(run))
        return
    if all_:
        # A list of runs is read from their folders: it needs no login, and answers at once.
        listed = [_facts_or_why(one) for one in Run.all()]
        if json_:
            render.print_json(listed)
        else:
            _show_all(listed)
        return
    facts = _facts(Run.find(run), ask=True)
    if json_:
        render.print_json(facts)
    else:
        _show(facts)


def _facts_or_why(run: Run) -> dict[str, Any]:
    """The facts of a run; of one that cannot be read, why: it must not hide the others."""
    from hetopt.core.errors import HetoptError

    try:
        return _facts(run, ask=False)
    except HetoptError as error:
        return {"run": run.name, "folder": str(run.folder), "state": UNREADABLE, "reason": error.message}
    except OSError as error:
        reason = f"{error.filename or run.folder} cannot be read: {error.strerror}"
        return {"run": run.name, "folder": str(run.folder), "state": UNREADABLE, "reason": reason}


def _facts(run: Run, *, ask: bool) -> dict[str, Any]:
    from hetopt.core.conditions import ConditionsReader

    started = run.launch
    if started is not None and started.on == "ec2":
        from hetopt.api.rental import look

        state, rental = look(run, ask=ask)
    else:
        state, rental = run.status(), None
    record = run.record()
    launch, progress = record.launch, record.progress
    speeds = launch.speeds if launch else {}
    hourly = launch.hourly_usd if launch else None
    predicted_steps = launch.prediction.steps.value if launch else None
    elapsed_s = progress.elapsed_s
    return {
        "run": run.name,
        "folder": str(run.folder),
        "state": state.state.value,
        "reason": state.reason or progress.finish_reason,
        "on": launch.on if launch else None,
        "resume": resume_command(run, state, launch.on if launch else None),
        "task": progress.task or (launch.spec.task if launch else None),
        "step": progress.step,
        "predicted_steps": predicted_steps,
        "epoch": progress.epoch,
        "loss": progress.loss,
        "metrics": dict(progress.metrics),
        "step_time_s": progress.step_time_s,
        "predicted_step_time_s": launch.prediction.step_time_s.value if launch else None,
        "elapsed_s": elapsed_s,
        "plan_usd_per_hour": hourly,
        "usd_at_plan_rate": hourly * elapsed_s / 3600 if hourly is not None and elapsed_s is not None else None,
        "rental": rental,
        "restarts": progress.restarts,
        "sessions": progress.sessions,
        "lost_steps": progress.lost_steps,
        "unread_lines": record.unread.lines,
        "unread": record.unread.sentence,
        "exchange": _exchange(progress),
        "workers": [
            {
                "host": worker.host,
                "type": worker.type,
                "slowdown": worker.slowdown,
                "speed": speeds.get(worker.host),
                "local_batch_size": worker.local_batch_size,
                "compute_s": worker.mean_compute_s if worker.steps else None,
                "wait_s": worker.mean_wait_s if worker.steps else None,
                "is_present": worker.is_present,
            }
            for worker in progress.workers
        ],
        "conditions": ConditionsReader(run.folder).now().model_dump() if speeds else None,
        "happenings": [one.model_dump() for one in record.timeline.happenings],
    }


def resume_command(run: Run, state: RunStatus, on: str | None) -> str | None:
    """The command that goes on with a run which ended before its end, where it has a checkpoint here."""
    from hetopt.core.run_folder import CHECKPOINT_FOLDER
    from hetopt.core.run_status import RunState

    ended = state.state in (RunState.FAILED, RunState.STOPPED)
    there = ended and on is not None and (run.folder / CHECKPOINT_FOLDER).is_dir()
    return f"hetopt launch --on {on} --resume {run.name}" if there else None


def _exchange(progress: RunFold) -> dict[str, Any] | None:
    """How gradients travel now, and how much of them did so far; nothing for a single worker."""
    traffic = progress.traffic
    if traffic is None:
        return None
    return {
        "way": traffic.way,
        "sent_bytes": traffic.sent_bytes,
        "dense_bytes": traffic.dense_bytes,
        "changes": progress.exchange_changes,
    }


def _show_all(facts: list[dict[str, Any]]) -> None:
    from hetopt.cli import render
    from hetopt.core import formatting

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


def _show(fact: dict[str, Any]) -> None:
    from hetopt.cli import render
    from hetopt.core import formatting

    reason = f" ({fact['reason']})" if fact["reason"] else ""
    render.line(f"{fact['run']}: {fact['state']}{reason}", style="bold")
    if fact["resume"] is not None:
        render.line(f"  go on from its checkpoint: {fact['resume']}")
    of = f" of about {formatting.count(fact['predicted_steps'])}" if fact["predicted_steps"] else ""
    render.line(
        f"  step {formatting.count(fact['step'])}{of}, epoch {fact['epoch']:.1f}, "
        + (formatting.reached(fact["metrics"], fact["loss"]) or "not evaluated yet")
    )
    if fact["step_time_s"]:
        said = (
            f", predicted {formatting.duration(fact['predicted_step_time_s'])}" if fact["predicted_step_time_s"] else ""
        )
        render.line(f"  {formatting.duration(fact['step_time_s'])} a step{said}")
    if fact["elapsed_s"]:
        cost = (
            f"; {formatting.usd(fact['usd_at_plan_rate'])} at the plan's {formatting.usd(fact['plan_usd_per_hour'])}/h"
            if fact["usd_at_plan_rate"] is not None
            else ""
        )
        in_all = f" in {fact['sessions']} sessions" if fact["sessions"] > 1 else ""
        again = f", {formatting.count(fact['lost_steps'])} steps of it done again" if fact["lost_steps"] else ""
        since = f"{in_all}{again}" if in_all or again else " since launch"
        render.line(f"  {formatting.duration(fact['elapsed_s'])}{since}{cost}")
    if fact["rental"] is not None:
        from hetopt.cli import ec2_status

        ec2_status.show(fact["rental"])
    if fact["exchange"] and fact["exchange"]["sent_bytes"] != fact["exchange"]["dense_bytes"]:
        share = fact["exchange"]["sent_bytes"] / fact["exchange"]["dense_bytes"]
        render.line(
            f"  gradients go as {fact['exchange']['way']}; {formatting.share(share)} of dense bytes sent so far"
        )
    if fact["workers"]:
        render.line()
        worker_table(fact["workers"])
    if fact["conditions"]:
        _show_conditions(fact)
    if fact["unread"]:
        render.note(fact["unread"])
    render.note(fact["folder"])


def _show_conditions(fact: dict[str, Any]) -> None:
    """How the rehearsed cluster differs from what was launched."""
    from hetopt.cli import render
    from hetopt.core import formatting
    from hetopt.reports.timeline import ROUTINE

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
    from hetopt.cli import render
    from hetopt.core import formatting

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
