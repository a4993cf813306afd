"""`hetopt profile`: measure a training job on this machine and write down what was measured."""

from __future__ import annotations

from pathlib import Path

import typer

from hetopt.cli.completion import SYNCHRONIZATIONS, one_of


def profile(
    task: str | None = typer.Argument(None, help="Bundled task, module:attribute or file.py:attribute."),
    from_samples: Path | None = typer.Option(
        None,
        "--from-samples",
        help="Import step times measured elsewhere (JSON Lines, - for standard input): alone, or beside TASK.",
    ),
    data: Path | None = typer.Option(None, "--data", help="Folder of the task's data, for tasks that read files."),
    output: Path | None = typer.Option(
        None, "--output", "-o", help="Write the profile to this JSON file. Default: profile.json, or none with --json."
    ),
    force: bool = typer.Option(False, "--force", help="Replace the output file if it exists."),
    workers: int | None = typer.Option(
        None, "--workers", help="Worker processes to measure together. Default: the GPUs, else two or one a processor."
    ),
    time_budget: float = typer.Option(
        40.0, "--time-budget", help="Seconds that measuring may take, about; starting up comes on top."
    ),
    seed: int = typer.Option(0, "--seed", help="Seed of weights and sample order."),
    type_: str = typer.Option("local", "--type", help="What this machine is: an instance type of the catalogue."),
    explore: bool = typer.Option(
        False, "--explore", help="Then measure whole steps of more workers, as long as that is worth its price."
    ),
    probe_budget: str | None = typer.Option(
        None, "--probe-budget", help="USD that exploring may cost, at the prices of the machines it stands for."
    ),
    on: str = typer.Option(
        "local",
        "--on",
        autocompletion=one_of("hetopt.optimizer.launch_record:PLACES"),
        help="Where to explore: local, rehearsal or ec2, which rents.",
    ),
    hosts: str | None = typer.Option(
        None, "--hosts", help="rehearsal: the cluster to explore, such as 'speed=1,rate=100mbit x8'."
    ),
    types: str | None = typer.Option(None, "--types", help="ec2: the machine types to explore, with commas between."),
    region: str = typer.Option("us-east-1", "--region", help="ec2: where to rent."),
    ec2_data: str | None = typer.Option(
        None, "--ec2-data", help="ec2: where the task's data is for rented machines: s3://BUCKET/PREFIX."
    ),
    yes: bool = typer.Option(False, "--yes", "-y", help="ec2: rent without asking."),
    sync: list[str] = typer.Option(
        [],
        "--sync",
        autocompletion=SYNCHRONIZATIONS,
        help="Also measure how many steps the target takes when workers average parameters now and then: "
        "'selsync(auto)', 'local-sgd(8)'. May be repeated.",
    ),
    check: bool = typer.Option(
        False, "--check", help="Only look whether the task can be trained on many workers, with a few samples."
    ),
    json_: bool = typer.Option(False, "--json", help="Print the profile as JSON."),
) -> None:
    """Measure a training job on this machine: step times, memory, network, gradient noise, compressibility, pilot runs.

    The profile is what `hetopt recommend` plans from. Measure while the machine has nothing else to do.
    """
    import hetopt
    from hetopt.api.values import names, positive
    from hetopt.cli import parse, profile_view, render, terminal
    from hetopt.cli.import_samples import import_samples, read_file
    from hetopt.core.errors import BadInput

    if check:
        from hetopt.cli.task_check import check_task

        check_task(task, data, json_=json_)
        return
    if output is None and not json_:
        output = Path("profile.json")
    if from_samples is not None and task is None:
        import_samples(from_samples, output, force=force, json_=json_)
        return
    if task is None:
        raise BadInput(
            "name the task to measure, or a file of step times with --from-samples.", hint="hetopt profile digits"
        )
    parse.ready_to_write(output, force=force)
    elsewhere_asked = on != "local" or hosts is not None or types is not None or ec2_data is not None
    if explore != (probe_budget is not None) or (not explore and elsewhere_asked):
        raise BadInput(
            "--explore, --probe-budget, --on, --hosts and --types belong together.",
            hint="hetopt profile TASK --explore --probe-budget 0.10",
        )
    budget_usd = positive(probe_budget, "probe_budget_usd", "USD")
    if budget_usd is not None:
        from hetopt.api import exploring, exploring_ec2

        exploring.check_place(on, hosts, names(types or ()))
        if on == "ec2":
            exploring_ec2.check(task, data, ec2_data)
            _ask(budget_usd, yes=yes)
    elsewhere = read_file(from_samples) if from_samples is not None else ()
    with render.progress(f"profiling {task}") as reporter:
        measured = hetopt.profile(
            task,
            data=data,
            workers=workers,
            time_budget_s=time_budget,
            seed=seed,
            machine_type=type_,
            sync=sync,
            samples=elsewhere,
            probe_budget_usd=budget_usd,
            explore_on=on,
            hosts=hosts,
            types=types or (),
            region=region,
            ec2_data=ec2_data,
            reporter=reporter,
        )
    if output is not None:
        measured.save(output)
        render.note(f"wrote {output}")
    if json_:
        terminal.write(measured.to_json())
    else:
        profile_view.show(measured)


def _ask(budget_usd: float, *, yes: bool) -> None:
    """Spending is confirmed before anything is measured: at a terminal by a person, elsewhere by --yes.

    Raises:
        BadInput: nobody is there to say yes.
    """
    import sys

    from hetopt.core.errors import BadInput

    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise BadInput(
            f"probes may cost up to ${budget_usd:.2f}, and nobody is there to say yes.", hint="say so with --yes"
        )
    if not typer.confirm(f"Rent machines for probes, for at most ${budget_usd:.2f}?", default=False, err=True):
        raise typer.Exit(0)
