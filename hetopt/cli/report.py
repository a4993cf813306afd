"""`hetopt report`: predicted against measured, for a run that is over or still going."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

import hetopt
from hetopt.cli import render, terminal
from hetopt.cli.options import NewestRun
from hetopt.cli.parse import ready_to_write
from hetopt.core.profile import Profile

if TYPE_CHECKING:
    from hetopt.core.events.fold import RunHistory
    from hetopt.optimizer.launch_record import Launch


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
    from hetopt.reports.run_document import document

    ready_to_write(output, force=force, replaces="report")
    ready_to_write(html, force=force, replaces="hetopt run")
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
        render.whole(document(made))


def _learn(path: Path, launch: Launch, history: RunHistory) -> None:
    """Bring a profile up to date with what a run measured."""
    from hetopt.reports.learn import learn

    known = Profile.load(path) if path.exists() else launch.plan.profile
    learned = learn(known, launch, history)
    learned.profile.save(path)
    if learned.news:
        render.note(f"{path} has learned {' and '.join(learned.news)}")
