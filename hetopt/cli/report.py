"""`hetopt report`: predicted against measured, for a run that is over or still going; and `hetopt export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

import hetopt
from hetopt.cli import parse, render, terminal
from hetopt.cli.options import Explain, NewestRun
from hetopt.core.errors import BadInput
from hetopt.core.listening import new_secret
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
    explain: Explain = False,
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

    parse.ready_to_write(output, force=force, replaces="report")
    parse.ready_to_write(html, force=force, replaces="hetopt run")
    followed = hetopt.Run.find(run)
    comparison = hetopt.report(followed)
    record = followed.record()
    assert record.launch is not None, "there would be no report"
    if record.unread.sentence is not None:
        render.note(record.unread.sentence)
    if output is not None:
        parse.save(output, comparison.to_json())
    if learn is not None:
        _learn(learn, record.launch, record.history)
    if html is not None:
        followed.to_html(html)
        render.note(f"wrote {html}")
    if json_:
        terminal.write(comparison.to_json())
    else:
        render.answer(document(comparison).under_title, explain=explain)


def _learn(path: Path, launch: Launch, history: RunHistory) -> None:
    """Update the profile in a file with what a run measured."""
    from hetopt.reports.learn import learn

    known = Profile.load(path) if path.exists() else launch.plan.profile
    learned, news = learn(known, launch, history)
    learned.save(path)
    render.note(f"{path} has learned {' and '.join(news)}")


def export(
    plan: Path | None = typer.Argument(None, help="Plan, a file that `hetopt recommend` wrote."),
    torchrun: Path | None = typer.Option(
        None, help="Folder for a script that starts each machine with torchrun, and the run's spec."
    ),
    skypilot: Path | None = typer.Option(None, help="File for a SkyPilot task, of a plan of one type."),
    schemas: Path | None = typer.Option(None, help="Folder for a JSON Schema of every kind of file."),
    force: bool = typer.Option(False, "--force", help="Replace files that exist."),
) -> None:
    """Write a plan for other launchers: as torchrun commands, or as a SkyPilot task.

    Budget, deadline, interruptions and giving machines back are then in other hands than hetopt's.

    \b
      hetopt export plan.json --torchrun cluster
      hetopt export plan.json --skypilot task.yaml
    """

    if (plan is None) != (torchrun is None and skypilot is None) or (plan is None and schemas is None):
        raise BadInput(
            "name a plan and what to make of it, or a folder for schemas.",
            hint="hetopt export plan.json --torchrun cluster, or hetopt export --schemas schemas",
        )
    _write(_texts(plan, torchrun, skypilot, schemas), force=force)


def _texts(
    plan: Path | None, torchrun: Path | None, skypilot: Path | None, schemas: Path | None
) -> dict[Path, str | bytes]:
    """Return the contents of the files to write, by path; all are made before any is written."""
    from hetopt.reports import exports

    texts: dict[Path, str | bytes] = {}
    if plan is not None:
        loaded = hetopt.Plan.load(plan)
        loaded.refuse_if_estimated()
        name, wheel = exports.own_wheel()
        if torchrun is not None:
            texts[torchrun / name] = wheel
            texts[torchrun / exports.SPEC_FILE] = loaded.run.model_dump_json(indent=2) + "\n"
            texts[torchrun / exports.SCRIPT_FILE] = exports.torchrun_script(loaded, name, new_secret())
        if skypilot is not None:
            texts[skypilot.parent / name] = wheel
            texts[skypilot] = exports.skypilot_task(loaded, name, new_secret())
    if schemas is not None:
        texts |= {schemas / name: text for name, text in exports.schemas().items()}
    return texts


def _write(texts: dict[Path, str | bytes], *, force: bool) -> None:

    for folder in {path.parent for path in texts}:
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise BadInput(f"{folder} cannot be made: {error.strerror}.", hint="name another folder") from None
    for path in texts:
        parse.ready_to_write(path, force=force)
    for path, text in texts.items():
        parse.save(path, text)
