"""`hetopt report`: predicted against measured, for a run that is over or still going."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hetopt.cli.options import NewestRun

if TYPE_CHECKING:
    from hetopt.core.events.fold import RunHistory
    from hetopt.optimizer.launch_record import Launch
    from hetopt.reports.report import BroughtTogether, Report, Sent

SHOWN_WAYS = 3


def report(
    run: NewestRun = None,
    output: Path | None = typer.Option(None, "--output", "-o", help="Also write the report to this JSON file."),
    html: Path | None = typer.Option(None, help="Also write the run as a page that needs nothing else."),
    learn: Path | None = typer.Option(
        None, help="Fold what the run measured into this profile; a new file begins with the plan's."
    ),
    force: bool = typer.Option(False, "--force", help="Replace the files that are written."),
    json_: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Hold a run against its prediction: time, steps, cost, how the workers were balanced, and what they exchanged.

    \b
      hetopt report
      hetopt report --html run.html
      hetopt report -o report.json
    """

    import hetopt
    from hetopt.cli import render, terminal
    from hetopt.cli.parse import ready_to_write

    for path in (output, html):
        ready_to_write(path, force=force)
    followed = hetopt.Run.find(run)
    made = hetopt.report(followed)
    record = followed.record()
    assert record.launch is not None, "there would be no report"
    if record.unread.sentence is not None:
        render.note(record.unread.sentence)
    if output is not None:
        made.save(output)
        render.note(f"wrote {output}")
    if learn is not None:
        _learn(learn, record.launch, record.history)
    if html is not None:
        followed.to_html(html)
        render.note(f"wrote {html}")
    if json_:
        terminal.write(made.to_json())
    else:
        show(made)


def _learn(path: Path, launch: Launch, history: RunHistory) -> None:
    """Bring a profile up to date with what a run measured."""
    from hetopt.cli import render
    from hetopt.core.profile import Profile
    from hetopt.reports.learn import keep_for_other_jobs, learn

    known = Profile.load(path) if path.exists() else launch.plan.profile
    learned = learn(known, launch, history)
    learned.profile.save(path)
    if learned.news:
        render.note(f"{path} has learned {' and '.join(learned.news)}")
    if (told := keep_for_other_jobs(learned)) is not None:
        render.note(told)


HERE = {"local": "local ", "rehearsal": "rehearsed "}
"""Backends that are this machine, and what their workers are called."""


def show(made: Report) -> None:
    """The report as a person reads it."""
    from hetopt.cli import render
    from hetopt.cli.status import worker_table
    from hetopt.core import formatting
    from hetopt.reports.report import rows

    kind, where = HERE.get(made.on, ""), "" if made.on in HERE else f" on {made.on}"
    workers = f"{len(made.workers)} {kind}worker{'s' * (len(made.workers) != 1)}{where}"
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
    from hetopt.cli import render, timeline_view
    from hetopt.reports.timeline import Timeline

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
    from hetopt.core import formatting

    steps = told.synchronised + told.local
    apart = ""
    if told.divergence is not None:
        apart = f"; they had come apart by {formatting.share(told.divergence)} of the parameters' norm"
    return (
        f"{told.policy}: workers came together in {formatting.count(told.synchronised)} of {formatting.count(steps)} "
        "steps "
        f"({formatting.share(told.share)}), and sent {formatting.bytes_(told.sent_bytes)} each{apart}"
    )


def _sent(sent: Sent) -> str:
    """How much of the gradients went over the network, and how."""
    from hetopt.core import formatting

    if sent.sent_bytes == sent.dense_bytes:
        return f"sent {formatting.bytes_(sent.sent_bytes)} per worker, uncompressed"
    ways = sorted(sent.ways, key=lambda way: -way.steps)
    told = [f"{way.way} ({formatting.count(way.steps)} steps)" for way in ways[:SHOWN_WAYS]]
    others = ways[SHOWN_WAYS:]
    if others:
        told.append(f"otherwise ({formatting.count(sum(way.steps for way in others))} steps)")
    return (
        f"sent {formatting.share(sent.share)} of dense bytes ({formatting.bytes_(sent.sent_bytes)} of "
        f"{formatting.bytes_(sent.dense_bytes)} per worker): {'; '.join(told)}"
    )
