"""`hetopt profile`: measure a training job on this machine and write down what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetopt.cli.options import given, one_of, options

if TYPE_CHECKING:
    from hetopt.core.profile import Profile


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What `hetopt profile` is asked for; fields as of `hetopt.profile`, as they are typed."""

    task: Annotated[
        str | None,
        typer.Argument(
            help="Bundled task, module:attribute, file.py:attribute, or a training script: -- file.py ARGUMENTS."
        ),
    ] = None
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.", show_default=False)] = (
        None
    )
    batch_argument: Annotated[
        str | None,
        typer.Option(
            "--batch-arg", help="A script's option for the batch size, if it uses no DataLoader, such as batch-size."
        ),
    ] = None
    epoch_samples: Annotated[
        int | None, typer.Option(help="Samples of a script's epoch, if its loader does not tell.")
    ] = None
    from_samples: Annotated[
        Path | None,
        typer.Option(
            help="Import step times measured elsewhere (JSON Lines, - for standard input): alone, or beside TASK.",
        ),
    ] = None
    data: Annotated[Path | None, typer.Option(help="Folder of the task's data, for tasks that read files.")] = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write the profile to this JSON file. Default: profile.json, or none with --json."
        ),
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Replace the output file if it exists.")] = False
    workers: Annotated[
        int | None,
        typer.Option(help="Worker processes to measure together. Default: the GPUs, else two or one a processor."),
    ] = None
    time_budget_s: Annotated[
        str, typer.Option("--time-budget", help="Time that measuring may take, about; starting up comes on top.")
    ] = "40s"
    seed: Annotated[int, typer.Option(help="Seed of weights and sample order.")] = 0
    machine_type: Annotated[
        str, typer.Option("--type", help="What this machine is: an instance type of the catalogue.")
    ] = "local"
    explore: Annotated[
        bool,
        typer.Option("--explore", help="Then measure whole steps of more workers, as long as that is worth its price."),
    ] = False
    probe_budget_usd: Annotated[
        str | None,
        typer.Option(
            "--probe-budget", help="USD that exploring may cost, at the prices of the machines it stands for."
        ),
    ] = None
    explore_on: Annotated[
        str,
        typer.Option(
            "--on",
            autocompletion=one_of("hetopt.api.backends:BACKENDS"),
            help="Where to explore: local, rehearsal, ssh (hosts of your own) or ec2, which rents.",
        ),
    ] = "local"
    hosts: Annotated[
        str | None,
        typer.Option(help="rehearsal: the cluster to explore, such as 'speed=1,rate=100mbit x8'."),
    ] = None
    inventory: Annotated[
        Path | None, typer.Option(help="ssh: the file of hosts to explore, see `hetopt hosts check`.")
    ] = None
    types: Annotated[str | None, typer.Option(help="ec2: the machine types to explore, with commas between.")] = None
    region: Annotated[str, typer.Option(help="ec2: where to rent.")] = "us-east-1"
    ec2_data: Annotated[
        str | None,
        typer.Option(help="ec2: where the task's data is for rented machines: s3://BUCKET/PREFIX."),
    ] = None
    yes: Annotated[bool, typer.Option("--yes", "-y", help="ec2: rent without asking.")] = False
    sync: Annotated[
        list[str],
        typer.Option(
            autocompletion=one_of("hetopt.core.synchronization:SyncName"),
            help="Also measure how many steps the target takes when workers average parameters now and then: "
            "'local-sgd(8, stretch=1.5)', 'selsync(auto)'. May be repeated.",
        ),
    ] = field(default_factory=list)
    precision: Annotated[
        str | None,
        typer.Option(
            autocompletion=one_of("hetopt.api.profiling:PRECISIONS"),
            help="Of a task, also measure tf32, bf16 or fp16 beside fp32, or 'auto': all that the machine has. "
            "Default: auto on GPUs, fp32 alone on CPUs.",
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False


@options(Measure)
def profile(asked: Measure) -> None:
    """Measure a training job on this machine: step times, memory, network, gradient noise, compressibility, pilot runs.

    The profile is what `hetopt recommend` plans from. Measure while the machine has nothing else to do.

    \b
      hetopt profile digits -o profile.json
      hetopt profile -o profile.json -- train.py --batch-size 64
      hetopt profile mine.py:task -o mine.json
    """
    import hetopt
    from hetopt.cli import parse, profile_view, render
    from hetopt.core.errors import BadInput
    from hetopt.core.quantities import DURATION, quantity

    output = Path("profile.json") if asked.output is None and not asked.as_json else asked.output
    if asked.from_samples is not None and asked.task is None:
        profile_view.import_samples(asked.from_samples, output, force=asked.force, json_=asked.as_json)
        return
    if asked.task is None:
        raise BadInput(
            "name the task to measure, or a file of step times with --from-samples.", hint="hetopt profile digits"
        )
    time_budget_s = quantity(asked.time_budget_s, DURATION, "--time-budget")
    parse.ready_to_write(output, force=asked.force)
    _agree_to_explore(asked)
    elsewhere = profile_view.read_file(asked.from_samples) if asked.from_samples is not None else ()
    with render.progress(f"profiling {asked.task}") as reporter:
        measured = hetopt.profile(
            **given(asked, hetopt.profile, samples=elsewhere, time_budget_s=time_budget_s, reporter=reporter)
        )
    _write(measured, output, asked)


def _write(measured: Profile, output: Path | None, asked: Measure) -> None:
    from hetopt.cli import profile_view, render, terminal
    from hetopt.core.commands import typed

    if output is not None:
        measured.save(output)
        render.note(f"wrote {output}")
    if asked.as_json:
        terminal.write(measured.to_json())
    else:
        profile_view.show(measured)
        if output is not None:
            epochs = epochs_asked(measured.job.script)
            length = f" --epochs {epochs or 'N'}" if measured.job.script else ""
            own = "" if asked.inventory is None else f" --inventory {typed(asked.inventory)}"
            meant = "  # N: as many as it trains" if measured.job.script and epochs is None else ""
            render.line(
                f"next: hetopt recommend {typed(output)} --budget 5{length}{own} -o plan.json{meant}", style="bold"
            )


def epochs_asked(script: Sequence[str]) -> str | None:
    """How many epochs a script's own arguments ask for: of `train.py --epochs 12` 12."""
    for name, value in pairwise([part for word in script[1:] for part in word.split("=", 1)]):
        if name.startswith("-") and name.endswith("epochs") and value.isdecimal() and int(value):
            return value
    return None


def _agree_to_explore(asked: Measure) -> None:
    """Refuse options of exploring without exploring, and have it confirmed where it rents.

    Raises:
        BadInput: the options do not go together, or nobody is there to say yes.
    """
    from hetopt.api.values import names, positive
    from hetopt.cli import confirm
    from hetopt.core.errors import BadInput

    elsewhere = asked.explore_on != "local" or any(
        one is not None for one in (asked.hosts, asked.inventory, asked.types, asked.ec2_data)
    )
    if asked.explore != (asked.probe_budget_usd is not None) or (not asked.explore and elsewhere):
        raise BadInput(
            "--explore, --probe-budget, --on, --hosts, --inventory and --types belong together.",
            hint="hetopt profile TASK --explore --probe-budget 0.10",
        )
    budget_usd = positive(asked.probe_budget_usd, "probe_budget_usd", "USD")
    if budget_usd is None:
        return
    from hetopt.api import exploring, exploring_ec2

    exploring.check_place(asked.explore_on, asked.hosts, names(asked.types or (), "types"), asked.inventory)
    if asked.explore_on == "ec2":
        assert asked.task is not None
        exploring_ec2.check(asked.task, asked.data, asked.ec2_data)
        if not asked.yes:
            most = f"${budget_usd:.2f}"
            confirm.agree_to_spend(f"Rent machines for probes, for at most {most}?", f"probes may cost up to {most}")
