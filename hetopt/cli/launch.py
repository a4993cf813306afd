"""`hetopt launch`: run a plan, follow it, and leave nothing behind when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetopt.cli.options import given, one_of, options

if TYPE_CHECKING:
    from collections.abc import Callable

    from hetopt.api.launching import Changes
    from hetopt.backends.backend import Backend, LaunchOptions, Prepared
    from hetopt.core.run_spec import RunSpec
    from hetopt.optimizer.launch_record import Place


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What `hetopt launch` is asked for; fields as of `hetopt.launch`, as they are typed."""

    plan: Annotated[Path | None, typer.Argument(help="Plan made by `hetopt recommend`. Left out with --resume.")] = None
    script: Annotated[
        list[str] | None,
        typer.Argument(
            help="A training script with a session and its arguments, after --. Default: the one that was profiled.",
            show_default=False,
        ),
    ] = None
    on: Annotated[
        str | None,
        typer.Option(
            autocompletion=one_of("hetopt.api.backends:BACKENDS"),
            help="Where to run: 'ec2' rents the plan's machines; 'local' is this machine, with real processes; "
            "'rehearsal' emulates the cluster on this machine, network included; 'ssh' is hosts of your own. Asked for "
            "where it is left out.",
        ),
    ] = None
    slowdowns: Annotated[
        str | None,
        typer.Option(
            "--slowdown", help="local: one factor a worker, such as 1,1,2,4: its compute takes so many times as long."
        ),
    ] = None
    hosts: Annotated[
        str | None,
        typer.Option(
            help="rehearsal: these hosts instead of the plan's machines, such as "
            "'speed=1, rate=100mbit x2; speed=0.25, rate=25mbit'. Also workers=, noise= and cpu=. ssh: those to run "
            "on, such as alice@box1,bob@box2.",
        ),
    ] = None
    inventory: Annotated[
        Path | None,
        typer.Option(help="ssh: the file that describes your hosts, see `hetopt hosts check`."),
    ] = None
    schedule: Annotated[
        Path | None,
        typer.Option(
            help="rehearsal: what happens on the way, a change a line: '30s h2 speed=0.25 rate=10mbit', 'step 40 h3 "
            "dies'; with --max-restarts also '26s h3 notice', '90s h3 returns', '20s h1 cut' and '25s h1 heals'.",
        ),
    ] = None
    stand_in: Annotated[
        bool,
        typer.Option(
            "--stand-in",
            help="rehearsal: do not train the job, only compute as long and exchange as much: for jobs that this "
            "machine cannot train. Estimates are always rehearsed so.",
        ),
    ] = False
    batch_policy: Annotated[
        str | None,
        typer.Option(
            autocompletion=one_of("hetopt.core.run_spec:BATCH_POLICIES"),
            help="How the batch is shared: uniform, static, proportional, dynamic, omnilearn, allocation, "
            "model, or rate with --stream; with settings as in 'allocation(micro=4)'. Default: the plan's.",
        ),
    ] = None
    compression: Annotated[
        str | None,
        typer.Option(
            autocompletion=one_of("auto", "dense", "hetopt.core.comm.composition:METHODS"),
            help="What is sent of gradients: 'auto', which decides while training goes on, bf16, dense, or "
            "'NAME(RATIO, key=value)' such as 'topk(0.01)', 'dgc(1000x, momentum=0.9)' or 'powersgd(rank=2)'; "
            "topk:0.01 needs no quotes. Default: the plan's.",
        ),
    ] = None
    ratio_policy: Annotated[
        str | None,
        typer.Option(
            autocompletion=one_of("hetopt.core.comm.ratio_controllers:CONTROLLERS"),
            help="Who decides how much is sent: fixed, warm_up, accordion, gravac, threshold, scan or auto; with "
            "settings as in 'gravac(window=50, eps=0.7)'. Default: the plan's, or fixed with a named compression.",
        ),
    ] = None
    collective: Annotated[
        str | None,
        typer.Option(
            autocompletion=one_of("auto", "hetopt.core.comm.composition:COLLECTIVES"),
            help="How payloads meet: 'auto', the cheapest on the network as it is, or all_reduce, all_gather, ar_topk, "
            "ar_topk_star, ar_topk_var, majority. Default: the plan's.",
        ),
    ] = None
    sync: Annotated[
        str | None,
        typer.Option(
            autocompletion=one_of("hetopt.core.synchronization:SyncName"),
            help="When workers synchronize: bsp (in every step), 'selsync(0.3)', "
            "'selsync(auto, share=0.2)', 'local-sgd(8)', 'fedavg(1, 0.25)', 'ssp(4)', or 'auto': bsp until averages of "
            "parameters promise to take clearly less time. Default: the plan's.",
        ),
    ] = None
    partition: Annotated[
        str | None,
        typer.Option(
            autocompletion=one_of("hetopt.core.synchronization:PartitionName"),
            help="Which samples a worker sees: global, shards, seldp, 'labels(1)' or 'dirichlet(0.5)'. "
            "Default: the plan's.",
        ),
    ] = None
    inject: Annotated[
        str | None,
        typer.Option(
            "--data-injection",
            help="Data injection: which share of the workers sends which share of its samples, such as 0.25,0.25.",
        ),
    ] = None
    stream: Annotated[
        str | None,
        typer.Option(
            help="local, rehearsal: train on samples as they arrive, with batches that follow the rates: "
            "'replay(uniform=38/24)', 'replay(40/80, buffer=truncation)' or 'redis(redis://HOST:6379/0, key=cam)'.",
        ),
    ] = None
    precision: Annotated[
        str | None,
        typer.Option(
            autocompletion=one_of("hetopt.api.precision_options:PRECISIONS"),
            help="local, rehearsal: compute in fp32, tf32, bf16 or fp16, where the profile has steps in it. "
            "Default: the plan's.",
        ),
    ] = None
    steps: Annotated[int | None, typer.Option(help="Stop after so many steps instead of at the plan's end.")] = None
    data: Annotated[
        str | None,
        typer.Option(
            help="Data folder, when it is not where the profile found it. ec2: s3://BUCKET/PREFIX. A script is told it "
            "where its arguments say {data}.",
        ),
    ] = None
    budget_usd: Annotated[
        str | None, typer.Option("--budget", help="ec2: total USD, a hard cap on the whole bill. Default: the plan's.")
    ] = None
    bucket: Annotated[
        str | None,
        typer.Option(help="ec2: where code, checkpoints and state go. Default: hetopt-ACCOUNT-REGION."),
    ] = None
    zone: Annotated[str | None, typer.Option(help="ec2: only this availability zone, by name or id.")] = None
    substitutes: Annotated[
        list[str],
        typer.Option(
            "--substitute", help="ec2: TYPE=OTHER[,OTHER]: what may stand in for a type that is not to be had."
        ),
    ] = field(default_factory=list)
    instance_profile: Annotated[
        str | None,
        typer.Option(help="ec2: the machines' role. Default: hetopt-node, see `hetopt setup`."),
    ] = None
    images: Annotated[
        list[str],
        typer.Option(
            "--image", help="ec2: KIND=AMI: the image of x86_64-cpu, arm64-cpu, x86_64-gpu or arm64-gpu machines."
        ),
    ] = field(default_factory=list)
    subnets: Annotated[
        list[str],
        typer.Option(
            "--subnet", help="ec2: a subnet that machines may be in. May be repeated. Default: default subnets."
        ),
    ] = field(default_factory=list)
    security_group: Annotated[
        str | None,
        typer.Option(help="ec2: the machines' group, instead of one that is made for the run."),
    ] = None
    public_address: Annotated[
        bool,
        typer.Option(
            "--public-ip/--no-public-ip",
            help="ec2: whether machines have a public address; without, their subnet needs another way out, such as a "
            "NAT gateway.",
        ),
    ] = True
    proxy: Annotated[
        str | None,
        typer.Option(help="ec2: http://HOST:PORT by which machines reach S3 and packages."),
    ] = None
    unprobed: Annotated[
        bool,
        typer.Option("--unprobed", help="ec2: rent types although no step was ever measured on them or a relative."),
    ] = False
    allow_partial: Annotated[
        bool,
        typer.Option(
            "--allow-partial", help="ec2: begin with some of the groups where no zone has all; asks if it gets worse."
        ),
    ] = False
    accept_risk: Annotated[
        bool,
        typer.Option("--accept-risk", help="ec2: rent a plan that is less sure to keep its limits than was asked for."),
    ] = False
    canary: Annotated[
        bool,
        typer.Option(
            "--canary",
            help="ec2: first rent one machine of each type for some minutes, for at most $1, and put what it measures "
            "into the plan.",
        ),
    ] = False
    detach: Annotated[bool, typer.Option("--detach", help="ec2: return when the machines have been told to begin.")] = (
        False
    )
    resume: Annotated[str | None, typer.Option(help="Go on with this run from its last checkpoint.")] = None
    restarts: Annotated[
        int | None,
        typer.Option(
            "--max-restarts",
            help="local, rehearsal: how often a worker that is killed is replaced, while the others go on from memory; "
            "after that, how often all start again from a checkpoint. In a rehearsal hosts may die then, and return. "
            "Default: the plan's.",
        ),
    ] = None
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Of a script that is new or has changed, first say how far shares are from one machine (`hetopt "
            "check`).",
        ),
    ] = True
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run and stop there.")] = False
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the launch (with --dry-run) or the report as JSON.")
    ] = False


@options(Launch)
def launch(asked: Launch) -> None:
    """Run a plan: on this machine, in a rehearsal, or on machines that are rented. Without --on ec2 nothing is.

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

    On 'ec2' the plan's machines are rented, all in one zone, and given back when the run ends, fails, is stopped or
    comes near its budget. --dry-run prints every call that would be made, with its cost. Interrupting the command ends
    the run; --detach leaves it going.
    """
    from hetopt.api.backends import backend
    from hetopt.api.launching import submit
    from hetopt.api.rental import rental_of, unfollowed
    from hetopt.cli import confirm, follow, launch_view, render
    from hetopt.core.errors import BadInput
    from hetopt.core.reporter import Reporter

    if asked.plan is None and asked.resume is None:
        raise BadInput("no plan was named.", hint="make one with `hetopt recommend PROFILE --budget USD -o plan.json`")
    place = _place(asked.on, asked.resume, asked.plan)
    where = backend(place, Reporter(note=render.note))
    prepared = _prepared(asked, where, place)
    if asked.dry_run:
        launch_view.show_dry(prepared, as_json=asked.as_json)
        return
    where.check_ready(prepared)
    if not asked.as_json:
        launch_view.show(prepared)
    elif asked.detach:
        render.note(unfollowed(rental_of(prepared)))
    if asked.check and asked.resume is None and prepared.launch.spec.script:
        _check_script(prepared)
    agreed = confirm.confirmed(prepared, yes=asked.yes)
    rents = place == "ec2"
    follow.started(
        lambda begun: submit(agreed, where, begun=begun), rents=rents, detach=asked.detach, as_json=asked.as_json
    )


def _check_script(prepared: Prepared) -> None:
    """Say how far a script's shares are from one machine, where that was not said of these files before."""
    from hetopt.api.exactness import first_check
    from hetopt.cli import render

    script, *arguments = prepared.launch.spec.script_command
    with render.progress("three steps alone and in shares (--no-check leaves it out)") as reporter:
        sentence = first_check(Path(script), arguments, reporter=reporter)
    if sentence is not None:
        render.note(sentence)


def _prepared(asked: Launch, where: Backend, place: Place) -> Prepared:
    """The plan, or the run that goes on, on this backend."""
    from hetopt.api.launching import Changes, prepare, prepare_resumed
    from hetopt.api.run import Run
    from hetopt.cli import confirm, launch_view
    from hetopt.core.errors import BadInput

    def accept_fewer(spec: RunSpec) -> bool:
        return confirm.accept_fewer(launch_view.wanted(prepared), spec, yes=asked.yes)

    told = _launch_options(asked, place, accept_fewer if asked.allow_partial else None)
    if asked.detach and place != "ec2":
        raise BadInput("--detach is for --on ec2.", hint="leave it out, or use --on ec2")
    prepared: Prepared
    if asked.resume is None:
        assert asked.plan is not None
        prepared = prepare(asked.plan, where, place, told, _changes(asked))
        return prepared
    kept = (asked.plan, asked.data, asked.slowdowns, asked.hosts, asked.inventory, asked.schedule)
    if _changes(asked) != Changes() or any(one is not None for one in kept):
        raise BadInput(
            "--resume goes on with a run as it was: leave PLAN and all that would change it out.",
            hint=f"hetopt launch --on {place} --resume RUN",
        )
    prepared = prepare_resumed(Run.find(asked.resume), where, place, told)
    return prepared


def _changes(asked: Launch) -> Changes:
    from hetopt.api.launching import Changes

    return Changes(**given(asked, Changes, script=tuple(asked.script or ())))


def _launch_options(asked: Launch, place: Place, accept_fewer: Callable[[RunSpec], bool] | None) -> LaunchOptions:
    """What the backend is told, from texts that were typed."""
    from hetopt.api.launching import LaunchOptions
    from hetopt.api.values import positive
    from hetopt.cli import parse

    typed = given(
        asked,
        LaunchOptions,
        slowdowns=parse.slowdowns(asked.slowdowns),
        schedule=_schedule(asked.schedule, place),
        inventory=None if asked.inventory is None else str(asked.inventory),
        budget_usd=positive(asked.budget_usd, "budget_usd", "USD"),
        substitutes=parse.substitutes(asked.substitutes),
        images=parse.images(asked.images),
        subnets=tuple(asked.subnets),
        unprobed=asked.unprobed or (asked.dry_run and place == "ec2"),
        accept_fewer=accept_fewer,
    )
    return LaunchOptions(**typed)


def _place(name: str | None, resume: str | None, plan: Path | None) -> Place:
    """Where to launch: as it was said, where the run that goes on was, or asked for. Nothing that rents is a default.

    Raises:
        BadInput: nobody is there to say where, or the plan is an estimate, which only a rehearsal can run.
    """
    import hetopt
    from hetopt.api.run import Run
    from hetopt.cli import parse
    from hetopt.core.errors import BadInput

    if name is not None:
        return name
    if resume is None and plan is not None:
        hetopt.Plan.load(plan).refuse_if_estimated()
    begun = None if resume is None else Run.find(resume).launch
    if begun is not None and begun.on != "ec2":
        return begun.on
    if not parse.is_attended():
        raise BadInput(
            "say where to launch: nothing is rented unless it is ordered.",
            hint="--on local and --on rehearsal stay on this machine and cost nothing, --on ec2 rents"
            if begun is None
            else f"the run was on rented machines: `hetopt launch --on ec2 --resume {resume}` rents again",
        )
    asked: str = typer.prompt("Where? local and rehearsal cost nothing, ec2 rents", default="local", err=True)
    return asked


def _schedule(path: Path | None, place: Place) -> str | None:
    """The text of the schedule; unread where no schedule is taken, which is said then."""
    from hetopt.api.backends import TAKES
    from hetopt.cli import parse

    return None if path is None else parse.text_of(path, "--schedule") if "schedule" in TAKES[place] else str(path)
