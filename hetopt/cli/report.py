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
from hetopt.core.run_folder import SPEC_FILE

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
        parse.save(html, followed.html())
    if json_:
        terminal.write(comparison.to_json())
    else:
        render.answer(document(comparison).under_title, explain=explain)


def _learn(path: Path, launch: Launch, history: RunHistory) -> None:
    """Update the profile in a file with what a run measured, and print what changed; a new file begins with the plan's.

    Raises:
        BadInput: the file cannot be read or written.
    """
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
    skypilot: Path | None = typer.Option(None, help="File for a SkyPilot task; of several types, for a job group."),
    dstack: Path | None = typer.Option(None, help="File for a dstack task, of one type of machine."),
    jobset: Path | None = typer.Option(None, help="File for a JobSet, which Kubernetes runs."),
    schemas: Path | None = typer.Option(None, help="Folder for a JSON Schema of every kind of file."),
    force: bool = typer.Option(False, "--force", help="Replace files that exist."),
) -> None:
    """Write a plan for other launchers: as torchrun commands, a task of SkyPilot or dstack, or a JobSet of Kubernetes.

    Budget, deadline, interruptions and giving machines back are then in other hands than hetopt's.

    \b
      hetopt export plan.json --torchrun cluster
      hetopt export plan.json --jobset jobset.yaml
    """
    is_planned = any((torchrun, skypilot, dstack, jobset))
    if (plan is not None) != is_planned or not (is_planned or schemas):
        raise BadInput(
            "name a plan and what to make of it, or a folder for schemas.",
            hint="hetopt export plan.json --torchrun cluster, or hetopt export --schemas schemas",
        )
    from hetopt.reports import exports

    texts: dict[Path, str | bytes] = {}
    if plan is not None:
        loaded = hetopt.Plan.load(plan)
        loaded.refuse_if_estimated()
        name, wheel = exports.own_wheel()
        if torchrun is not None:
            texts[torchrun / name] = wheel
            texts[torchrun / SPEC_FILE] = loaded.run.model_dump_json(indent=2) + "\n"
            texts[torchrun / exports.SCRIPT_FILE] = exports.torchrun_script(loaded, name, new_secret())
        for path, task_of in ((skypilot, exports.skypilot_task), (dstack, exports.dstack_task)):
            if path is not None:
                texts[path.parent / name] = wheel
                texts[path] = task_of(loaded, name, new_secret())
        if jobset is not None:
            texts[jobset] = exports.jobset(loaded, (name, wheel), new_secret())
    if schemas is not None:
        texts |= {schemas / name: text for name, text in exports.schemas().items()}
    # All are made before any is written.
    for folder in {path.parent for path in texts}:
        folder.mkdir(exist_ok=True)
    for path in texts:
        parse.ready_to_write(path, force=force)
    for path, text in texts.items():
        parse.save(path, text)
