"""`hetopt profile`: measure a training job on this machine and write down what was measured."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

import hetopt
from hetopt.api.catalogs import in_use
from hetopt.api.options import Measurement
from hetopt.api.planning import type_remarks
from hetopt.cli import parse, render, terminal
from hetopt.cli.options import with_options
from hetopt.cli.show import show_profile
from hetopt.core import formatting
from hetopt.core.errors import BadInput
from hetopt.core.step_samples import StepSample, StepSamples, read_samples


@with_options(Measurement)
def profile(
    task: Annotated[
        str | None,
        typer.Argument(
            help="Bundled task, module:attribute, file.py:attribute, or a training script: -- file.py ARGUMENTS."
        ),
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.", show_default=False)] = (
        None
    ),
    from_samples: Annotated[
        Path | None,
        typer.Option(
            help="Import step times measured elsewhere (JSON Lines, - for standard input): alone, or beside TASK.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write the profile to this JSON file. Default: profile.json, or none with --json."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output file if it exists.")] = False,
    explore: Annotated[
        bool,
        typer.Option("--explore", help="Then measure whole steps of more workers, as long as that is worth its price."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="ec2: rent without asking.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
    **typed: Any,
) -> None:
    """Measure a training job on this machine: step times, memory, network, gradient noise, compressibility, pilot runs.

    The profile is what `hetopt recommend` plans from. Measure while the machine has nothing else to do.

    \b
      hetopt profile digits -o profile.json
      hetopt profile -o profile.json -- train.py --batch-size 64
      hetopt profile mine.py:task -o mine.json
    """
    output = Path("profile.json") if output is None and not as_json else output
    if from_samples is not None and task is None:
        if typed:
            raise BadInput(
                f"{', '.join(f'`{name}`' for name in sorted(typed))}: no effect with --from-samples alone, without "
                "TASK.",
                hint="leave them out",
            )
        import_samples(from_samples, output, force=force, json_=as_json)
        return
    if task is None:
        raise BadInput(
            "name the task to measure, or a file of step times with --from-samples.", hint="hetopt profile digits"
        )
    parse.ready_to_write(output, force=force)
    _agree_to_explore(task, typed, explore=explore, yes=yes)
    samples = read_file(from_samples) if from_samples is not None else ()
    with render.progress(f"profiling {task}") as reporter:
        measured = hetopt.profile(task, arguments=arguments or (), samples=samples, reporter=reporter, **typed)
    if output is not None:
        parse.save(output, measured.to_json())
    show_profile(measured, output, typed.get("inventory"), as_json=as_json)


def _agree_to_explore(task: str, typed: Mapping[str, Any], *, explore: bool, yes: bool) -> None:
    """Refuse probe options without --explore, and ask before machines are rented for probes.

    Raises:
        BadInput: the options do not go together, or nobody is there to say yes.
    """
    from hetopt.cli import follow

    elsewhere = {"explore_on", "inventory", "types", "ec2_data"} & typed.keys()
    if explore != ("probe_budget_usd" in typed) or (not explore and elsewhere):
        raise BadInput(
            "--explore, --probe-budget, --on, --inventory and --types belong together.",
            hint="hetopt profile TASK --explore --probe-budget 0.10",
        )
    if not explore:
        return
    from hetopt.api.exploring import check_place

    asked = Measurement(**typed)
    check_place(task, asked)
    if asked.explore_on == "ec2" and not yes:
        follow.agree_to_spend(asked.probe_budget_usd or 0.0, "machines for probes", hint="or leave --explore out")


def read_file(source: Path) -> tuple[StepSample, ...]:
    """Return the checked step-time samples of a JSON Lines file, or of standard input for ``-``; at least one.

    Empty lines are passed over, and more than 20,000 samples are condensed to as many.

    Raises:
        BadInput: the file cannot be read or is too large, standard input is a terminal, a line is no step-time sample,
            or there is none.
    """
    origin = "standard input" if str(source) == "-" else str(source)
    return read_samples(parse.lines_of(source, "--from-samples"), origin=origin)


def import_samples(source: Path, output: Path | None, *, force: bool, json_: bool) -> None:
    """Check a JSON Lines file's step times; write them as an artifact; print their number.

    Args:
        source: file, or ``-`` for standard input.
        output: file of the artifact; None: none is written.
        force: whether a file that exists is replaced unasked.
        json_: whether to print the artifact, too, in place of the number.

    Raises:
        BadInput: the source cannot be used, or the output cannot be written.
    """
    parse.ready_to_write(output, force=force)
    samples = read_file(source)
    imported = StepSamples(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        hetopt_version=version("hetopt"),
        source=source.name,
        samples=samples,
    )
    if output is not None:
        parse.save(output, imported.to_json())
    for remark in type_remarks(samples, in_use().instance_types):
        render.note(remark)
    if json_:
        terminal.write(imported.to_json())
        return
    layouts = {sample.layout for sample in samples}
    measured = f"{formatting.counted(len(samples), 'step time')} of {formatting.counted(len(layouts), 'layout')}"
    render.line(measured, style="strong")
