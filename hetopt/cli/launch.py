"""`hetopt launch`: run a plan, follow it, and leave nothing behind when it ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import hetopt
from hetopt.api.options import Changes, Ec2, Local, Rehearsal, Sky, Slurm, Ssh
from hetopt.cli import parse, render
from hetopt.cli.options import one_of, with_options
from hetopt.core.errors import BadInput
from hetopt.core.interruption import Reporter
from hetopt.core.option import changed, options_of
from hetopt.core.run_status import RunState

if TYPE_CHECKING:
    from hetopt.backends.backend import Backend, Prepared
    from hetopt.core.run_spec import RunSpec
    from hetopt.optimizer.launch_record import Place


@with_options(Changes, Local, Rehearsal, Ssh, Slurm, Sky, Ec2, leave_out=("script", "accept_fewer"))
def launch(
    plan: Annotated[
        Path | None, typer.Argument(help="Plan made by `hetopt recommend`. Left out with --resume.")
    ] = None,
    script: Annotated[
        list[str] | None,
        typer.Argument(
            help="A training script with a session and its arguments, after --. Default: the one that was profiled.",
            show_default=False,
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            autocompletion=one_of("hetopt.api.backends:BACKENDS"),
            help="Where to run: 'ec2' rents the plan's machines; 'local' is this machine, with real processes; "
            "'rehearsal' emulates the cluster on this machine, network included; 'ssh' is hosts of your own; 'slurm' "
            "is nodes of a Slurm cluster; 'sky' rents by SkyPilot. Asked for where it is left out.",
        ),
    ] = None,
    allow_partial: Annotated[
        bool,
        typer.Option(
            "--allow-partial", help="ec2: begin with some of the groups where no zone has all; asks if it gets worse."
        ),
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when the run has begun; it goes on without this command.")
    ] = False,
    resume: Annotated[str | None, typer.Option(help="Go on with this run from its last checkpoint.")] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Of a script that is new or has changed, first say how far shares are from one machine (`hetopt "
            "check`).",
        ),
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run and stop there.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the launch (with --dry-run) or the report as JSON.")
    ] = False,
    **typed: Any,
) -> None:
    """Run a plan: on this machine, in a rehearsal, or on machines that are rented. Without --on ec2 or sky nothing is.

    \b
      hetopt launch plan.json --on local --slowdown 1,2
      hetopt launch plan.json --on rehearsal --steps 500
      hetopt launch plan.json --on ec2 --dry-run
    \f
    On 'local' the plan's machines become processes on this machine: as many as --slowdown has factors, or as the plan
    has workers. The global batch stays; local batch sizes are solved again for these workers.

    On 'rehearsal' each machine becomes a host with a network link of its own, as fast as the planner took the machine
    to be. Computation and links are slowed down by one printed factor, so that what would wait for what stays true.
    It needs root. Rates in --schedule are the cluster's; with --hosts they are taken as they are. Change conditions on
    the way with `hetopt inject`.

    In both places the prediction is made again for what runs, so that `hetopt report` compares like with like.
    Nothing is rented.

    On 'ssh' each machine of the plan is a host of --inventory or --hosts. Code and results travel over the connection,
    which is all that the run has there: when it ends, nothing of it is left on the host.

    On 'slurm' each machine of the plan is a node of --inventory, reached inside a job of its own. The jobs end with the
    run.

    On 'sky' SkyPilot rents the plan's machines, a cluster each, on the plan's cloud. They are taken down with the run.

    On 'ec2' the plan's machines are rented, all in one zone, and given back when the run ends, fails, is stopped or
    comes near its budget. --dry-run prints every call that would be made, with its cost.

    Interrupting the command, or closing its terminal, ends the run. With --detach it goes on; all but ec2 need this
    machine for that.
    """
    from hetopt.api.account import rental_of, unfollowed
    from hetopt.api.backends import backend
    from hetopt.api.launching import submit
    from hetopt.cli import follow, launch_document, render

    if plan is None and resume is None:
        raise BadInput("no plan was named.", hint="make one with `hetopt recommend PROFILE --budget USD -o plan.json`")
    place = _place(on, resume, plan)
    where, rents = backend(place, Reporter(note=render.note)), place == Ec2.PLACE

    def accept_fewer(spec: RunSpec) -> bool:
        return follow.accept_fewer(rental_of(prepared).wanted, spec, yes=yes)

    if script:
        typed["script"] = script
    if allow_partial:
        typed["accept_fewer"] = accept_fewer
    if dry_run and rents:
        typed["unprobed"] = True
    prepared: Prepared = _prepared(where, place, plan, resume, typed)
    if dry_run:
        launch_document.show_dry(prepared, as_json=as_json)
        return
    where.check_ready(prepared)
    if not as_json:
        launch_document.show(prepared)
    elif detach and rents:
        render.note(unfollowed(rental_of(prepared)))
    is_checked = check and resume is None and bool(prepared.launch.spec.script)
    if is_checked and _needs_equal_shares(prepared) and "batch_policy" not in typed:
        typed["batch_policy"] = ("uniform", {})
        prepared = _prepared(where, place, plan, resume, typed)
        where.check_ready(prepared)
        render.note("The script runs in equal shares alone: this run keeps them, unless --batch-policy names another.")
        if not as_json:
            launch_document.show(prepared)
    agreed = replace(follow.confirmed(prepared, yes=yes), detached=detach)
    follow.started(lambda begun: submit(agreed, where, begun=begun), rents=rents, detach=detach, as_json=as_json)


def _needs_equal_shares(prepared: Prepared) -> bool:
    """Return whether a script runs only with equal local batch sizes; print the result of a new check."""
    from hetopt.api.exactness import first_check

    script, *arguments = prepared.launch.spec.script_command
    with render.progress("three steps alone and in shares (--no-check leaves it out)") as reporter:
        checked, is_new = first_check(Path(script), arguments, reporter=reporter)
    if is_new:
        render.note(checked.sentence)
    return checked.needs_equal_shares


def _prepared(where: Backend, place: Place, plan: Path | None, resume: str | None, typed: dict[str, Any]) -> Prepared:
    """Return the launch of a plan, or of a run to resume, prepared on a backend.

    Raises:
        HetoptError: as of `prepare`; or both a plan, or changes, and a run to resume are given.
        Exit: the run is finished, which is printed.
    """
    from hetopt.api.backends import options_at
    from hetopt.api.launching import prepare, prepare_resumed
    from hetopt.api.run import Run

    changes = Changes(**{name: value for name, value in typed.items() if name in options_of(Changes)})
    options = options_at(place, {name: value for name, value in typed.items() if name not in options_of(Changes)})
    if resume is None:
        assert plan is not None
        return prepare(plan, where, options, changes)
    if plan is not None or changed(changes):
        raise BadInput(
            "--resume goes on with a run as it was: leave PLAN and all that would change it out.",
            hint=f"hetopt launch --on {place} --resume RUN",
        )
    ended = Run.find(resume)
    if ended.status().state is RunState.FINISHED:
        render.line(f"{ended.name} is already finished: plan it with `--epochs 20`, for example, to train for longer.")
        raise typer.Exit
    return prepare_resumed(ended, where, options)


def _place(name: str | None, resume: str | None, plan: Path | None) -> Place:
    """Return the name of the backend to launch on: the given one, that of the resumed run, or a person's answer.

    Nothing that rents is a default.

    Args:
        name: given backend; None: none.
        resume: run to resume; None: none.
        plan: file of the plan; None: a run is resumed.

    Raises:
        BadInput: nobody is there to say where, or the plan is an estimate, which only a rehearsal can run.
    """
    from hetopt.api.run import Run

    if name is not None:
        return name
    if resume is None and plan is not None:
        hetopt.Plan.load(plan).refuse_if_estimated()
    begun = None if resume is None else Run.find(resume).launch
    if begun is not None and begun.on not in (Ec2.PLACE, Sky.PLACE):
        return begun.on
    if not parse.is_attended():
        raise BadInput(
            "say where to launch: nothing is rented unless it is ordered.",
            hint="--on local and --on rehearsal stay on this machine and cost nothing, --on ec2 rents"
            if begun is None
            else f"the run was on rented machines: `hetopt launch --on {begun.on} --resume {resume}` rents again",
        )
    return str(typer.prompt("Where? local and rehearsal cost nothing, ec2 and sky rent", default="local", err=True))
