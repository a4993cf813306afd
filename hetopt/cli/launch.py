"""`hetopt launch`: run a plan, follow it, and leave nothing behind when it ends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hetopt.cli.completion import one_of

if TYPE_CHECKING:
    from hetopt.backends.backend import Launcher
    from hetopt.cli.exchange_options import CompressionOverrides
    from hetopt.cli.sync_options import SyncOverrides
    from hetopt.core.run_spec import BatchPolicy
    from hetopt.optimizer.launch_record import Launch, Place
    from hetopt.optimizer.plan import Plan


def launch(
    plan: Path | None = typer.Argument(None, help="Plan made by `hetopt recommend`. Left out with --resume."),
    on: str = typer.Option(
        "ec2",
        "--on",
        autocompletion=one_of("hetopt.optimizer.launch_record:PLACES"),
        help="Where to run: 'ec2' rents the plan's machines; 'local' is this machine, with real processes; 'rehearsal' "
        "is a miniature of the cluster on this machine, with a network of its own.",
    ),
    slowdown: str | None = typer.Option(
        None, "--slowdown", help="local: one factor a worker, such as 1,1,2,4: its compute takes so many times as long."
    ),
    hosts: str | None = typer.Option(
        None,
        "--hosts",
        help="rehearsal: these hosts instead of the plan's machines, such as "
        "'speed=1, rate=100mbit x2; speed=0.25, rate=25mbit'. Also workers=, noise= and cpu=.",
    ),
    schedule: Path | None = typer.Option(
        None,
        "--schedule",
        help="rehearsal: what happens on the way, a change a line: '30s h2 speed=0.25 rate=10mbit', 'step 40 h3 dies'; "
        "with --max-restarts also '26s h3 notice', '90s h3 returns', '20s h1 cut' and '25s h1 heals'.",
    ),
    policy: str | None = typer.Option(
        None,
        "--batch-policy",
        autocompletion=one_of("hetopt.core.run_spec:BatchPolicy"),
        help="How the batch is shared: uniform, static, proportional, dynamic, omnilearn, allocation, "
        "model, or rate with --stream. Default: the plan's.",
    ),
    compression: str | None = typer.Option(
        None,
        "--compression",
        autocompletion=one_of("auto", "dense", "hetopt.core.comm.composition:METHODS"),
        help="What is sent of gradients: 'auto', which decides while training goes on, bf16, dense, or "
        "'NAME(RATIO, key=value)' such as 'topk(0.01)', 'dgc(1000x, momentum=0.9)' or 'powersgd(rank=2)'; topk:0.01 "
        "needs no quotes. Default: the plan's.",
    ),
    ratio_policy: str | None = typer.Option(
        None,
        "--ratio-policy",
        autocompletion=one_of("hetopt.core.comm.ratio_controllers:CONTROLLERS"),
        help="Who decides how much is sent: fixed, warm_up, accordion, gravac, threshold, scan or auto. Default: the "
        "plan's, or fixed with a named compression.",
    ),
    collective: str | None = typer.Option(
        None,
        "--collective",
        autocompletion=one_of("auto", "hetopt.core.comm.composition:COLLECTIVES"),
        help="How payloads meet: 'auto', the cheapest on the network as it is, or all_reduce, all_gather, ar_topk, "
        "ar_topk_star, ar_topk_var, majority. Default: the plan's.",
    ),
    sync: str | None = typer.Option(
        None,
        "--sync",
        autocompletion=one_of("hetopt.core.synchronization:SyncName"),
        help="When workers put together what they learned: bsp (in every step), 'selsync(0.3)', "
        "'selsync(auto, share=0.2)', 'local-sgd(8)', 'fedavg(1, 0.25)', 'ssp(4)', or 'auto': bsp until averages of "
        "parameters promise to take clearly less time. Default: the plan's.",
    ),
    partition: str | None = typer.Option(
        None,
        "--partition",
        autocompletion=one_of("hetopt.core.synchronization:PartitionName"),
        help="Which samples a worker sees: global, shards, seldp, 'labels(1)' or 'dirichlet(0.5)'. "
        "Default: the plan's.",
    ),
    inject: str | None = typer.Option(
        None,
        "--data-injection",
        help="Samples that workers hand on: which part of them gives which part of its samples, such as 0.25,0.25.",
    ),
    stream: str | None = typer.Option(
        None,
        "--stream",
        help="local, rehearsal: train on samples as they arrive, with batches that follow the rates: "
        "'replay(uniform=38/24)', 'replay(40/80, buffer=truncation)' or 'redis(redis://HOST:6379/0, key=cam)'.",
    ),
    steps: int | None = typer.Option(None, "--steps", help="Stop after so many steps instead of at the plan's end."),
    data: str | None = typer.Option(
        None, "--data", help="Data folder, when it is not where the profile found it. ec2: s3://BUCKET/PREFIX."
    ),
    budget: str | None = typer.Option(
        None, "--budget", help="ec2: total USD, a hard cap on the whole bill. Default: the plan's."
    ),
    bucket: str | None = typer.Option(
        None, "--bucket", help="ec2: where code, checkpoints and state go. Default: hetopt-ACCOUNT-REGION."
    ),
    zone: str | None = typer.Option(None, "--zone", help="ec2: only this availability zone, by name or id."),
    substitutes: list[str] = typer.Option(
        [], "--substitute", help="ec2: TYPE=OTHER[,OTHER]: what may stand in for a type that is not to be had."
    ),
    instance_profile: str | None = typer.Option(
        None, "--instance-profile", help="ec2: the machines' role. Default: hetopt-node, see `hetopt setup`."
    ),
    images: list[str] = typer.Option(
        [], "--image", help="ec2: KIND=AMI: the image of x86_64-cpu, arm64-cpu, x86_64-gpu or arm64-gpu machines."
    ),
    unprobed: bool = typer.Option(
        False, "--unprobed", help="ec2: rent types although no step was ever measured on them or a relative."
    ),
    allow_partial: bool = typer.Option(
        False,
        "--allow-partial",
        help="ec2: begin with some of the groups where no zone has all; asks if it gets worse.",
    ),
    accept_risk: bool = typer.Option(
        False, "--accept-risk", help="ec2: rent a plan that is less sure to keep its limits than was asked for."
    ),
    detach: bool = typer.Option(False, "--detach", help="ec2: return when the machines have been told to begin."),
    resume: str | None = typer.Option(None, "--resume", help="Go on with this run from its last checkpoint."),
    restarts: int | None = typer.Option(
        None,
        "--max-restarts",
        min=0,
        help="local, rehearsal: how often a worker that is killed is replaced, while the others go on from memory; "
        "after that, how often all start again from a checkpoint. In a rehearsal hosts may die then, and return. "
        "Default: the plan's.",
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Show what would run and stop there."),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask."),
    json_: bool = typer.Option(False, "--json", help="Print the launch (with --dry-run) or the report as JSON."),
) -> None:
    """Run a plan.

    On 'local' the plan's machines become processes on this machine: as many as --slowdown has factors, or as the plan
    has workers. The global batch stays; the shares are solved again for these workers.

    On 'rehearsal' each machine becomes a host with a network link of its own, as fast as the planner took the machine
    to be. Computation and links are slowed down by one printed factor, so that what would wait for what stays true.
    It needs root. Rates in --schedule are the cluster's; with --hosts they are taken as they are. Change conditions on
    the way with `hetopt inject`.

    In both places the prediction is made again for what runs, so that `hetopt report` compares like with like.
    Nothing is rented.

    On 'ec2' the plan's machines are rented, all in one zone, and given back when the run ends, fails, is stopped or
    comes near its budget. --dry-run prints every call that would be made, with its cost. Interrupting the command ends
    the run; --detach leaves it going.
    """
    import datetime
    import shutil
    import sys
    import time

    from hetopt.backends.runs import RunFolders, runs_home
    from hetopt.cli import (
        exchange_options,
        follow,
        launch_needs,
        launch_view,
        parse,
        render,
        stream_options,
        sync_options,
        terminal,
    )
    from hetopt.cli.run_record import launcher_for
    from hetopt.core.errors import BadInput
    from hetopt.optimizer.launch_record import LAUNCH_FILE

    place = _place(on)
    _belongs(
        place,
        {
            "--slowdown": slowdown,
            "--hosts": hosts,
            "--schedule": schedule,
            "--budget": budget,
            "--bucket": bucket,
            "--zone": zone,
            "--substitute": substitutes or None,
            "--instance-profile": instance_profile,
            "--image": images or None,
            "--unprobed": unprobed or None,
            "--allow-partial": allow_partial or None,
            "--accept-risk": accept_risk or None,
            "--detach": detach or None,
        },
    )
    factors = parse.slowdowns(slowdown)
    chosen_policy = parse.policy(policy)
    wish = exchange_options.parse_wish(compression, ratio_policy, collective)
    sync_wish = sync_options.parse_wish(sync, partition, inject)
    stream_wish = stream_options.parse_stream(stream)
    if stream_wish is not None and place == "ec2":
        raise BadInput("--stream is for --on local and --on rehearsal.", hint="leave it out, or use --on local")
    if chosen_policy == "rate":
        if stream_wish is None and resume is None:
            raise BadInput("--batch-policy rate follows streams, and there is none.", hint="add --stream")
        chosen_policy = None  # what a stream implies
    if steps is not None and steps < 1:
        raise BadInput(f"--steps must be at least 1, not {steps}.", hint="for example --steps 500")
    folders = RunFolders(home=runs_home())
    if place == "ec2":
        if restarts is not None:
            raise BadInput(
                "--max-restarts is for --on local and --on rehearsal.", hint="what is lost on ec2 is replaced"
            )
        from hetopt.cli import ec2_launch
        from hetopt.optimizer.probe_advice import check_probed

        wishes = ec2_launch.wishes(
            budget=budget,
            bucket=bucket,
            zone=zone,
            substitutes=substitutes,
            images=images,
            instance_profile=instance_profile,
        )
        if resume is not None:
            asked_for = (plan, policy, compression, ratio_policy, collective, sync, partition, inject, steps, data)
            if any(option is not None for option in asked_for):
                raise BadInput(
                    "--resume goes on with a run as it was: leave PLAN and all that would change it out.",
                    hint="hetopt launch --resume RUN",
                )
            ec2_launch.resume(
                folders.find(resume),
                wishes,
                dry_run=dry_run,
                yes=yes,
                as_json=json_,
                detach=detach,
                partial=allow_partial,
            )
            return
        made, wanted = _load(plan, steps, chosen_policy, wish, sync_wish)
        if not dry_run:
            check_probed(wanted, unprobed=unprobed)
        ec2_launch.run(
            made,
            wanted,
            wishes,
            data=data,
            dry_run=dry_run,
            yes=yes,
            as_json=json_,
            detach=detach,
            partial=allow_partial,
            accept_risk=accept_risk,
        )
        return
    launcher = launcher_for(place)
    if resume is not None:
        asked_for = (plan, policy, compression, ratio_policy, collective, sync, partition, inject, steps, data)
        if any(option is not None for option in (*asked_for, slowdown, hosts, schedule, stream)):
            raise BadInput(
                "--resume goes on with a run as it was: leave PLAN, --slowdown and all that would change it out.",
                hint=f"hetopt launch --on {place} --resume RUN",
            )
        folder, record = _to_resume(folders.find(resume), place, launcher)
    else:
        from hetopt.cli.launch_here import prepare

        record = prepare(_load(plan, steps, chosen_policy, wish, sync_wish), place, factors, hosts, schedule, data)
        if stream_wish is not None:
            spec = stream_options.on_stream(stream_wish, record.spec, chosen_policy)
            notes = (*record.notes, stream_options.remark(spec))
            record = record.model_copy(update={"spec": spec, "notes": notes})
        folder = None
    if restarts is not None:
        record = record.model_copy(update={"spec": record.spec.model_copy(update={"max_restarts": restarts})})
    if dry_run:
        if json_:
            terminal.write(record.to_json())
        else:
            launch_view.show(record)
        return
    if not json_:
        launch_view.show(record)
    launch_needs.torch()
    launch_needs.task(record.spec.task)
    launch_needs.rights(place)
    if not yes and sys.stdin.isatty() and sys.stderr.isatty() and not typer.confirm("Start?", default=True, err=True):
        raise typer.Exit(0)
    begun = folder is None
    if folder is None:
        now = datetime.datetime.now(datetime.UTC)
        folder = folders.create(record.spec.task, now)
        record = record.model_copy(update={"run_id": folder.name, "created": now.isoformat(timespec="seconds")})
    if resume is None:
        record = record.model_copy(update={"started_s": time.time()})
    else:
        record = record.model_copy(update={"resumed_s": (*record.resumed_s, time.time())})
    try:
        record.save(folder / LAUNCH_FILE)
    except BadInput:
        if begun:
            shutil.rmtree(folder, ignore_errors=True)  # it would look like a run that has failed
        raise
    render.note(f"run {folder.name}; look at it from another terminal with `hetopt status`, end it with `hetopt stop`")
    follow.run(launcher, record, folder)
    follow.finish(launcher, folder, as_json=json_)


def _place(name: str) -> Place:
    from hetopt.core.errors import BadInput
    from hetopt.optimizer.launch_record import PLACES

    for place in PLACES:
        if place == name:
            return place
    raise BadInput(
        f"this version of hetopt cannot launch on {name!r}.",
        hint="try the plan on this machine with --on local, or --on rehearsal for a miniature of its cluster",
    )


def _belongs(place: Place, given: dict[str, object]) -> None:
    """Refuse an option of another place than the one that was chosen."""
    from hetopt.core.errors import BadInput

    owners: dict[str, Place] = {"--slowdown": "local", "--hosts": "rehearsal", "--schedule": "rehearsal"}
    for option, value in given.items():
        owner = owners.get(option, "ec2")
        if value is not None and owner != place:
            instead = "describe slower hosts with --hosts" if option == "--slowdown" else "leave it out"
            raise BadInput(f"{option} is for --on {owner}.", hint=f"{instead}, or use --on {owner}")


def _load(
    path: Path | None,
    steps: int | None,
    policy: BatchPolicy | None,
    wish: CompressionOverrides,
    sync_wish: SyncOverrides,
) -> tuple[Plan, Plan]:
    """The plan as it was made, and as it is to be run now."""
    from hetopt.cli import sync_options
    from hetopt.cli.exchange_options import decide
    from hetopt.core.errors import BadInput
    from hetopt.optimizer.plan import Plan

    if path is None:
        raise BadInput("no plan was named.", hint="make one with `hetopt recommend PROFILE --budget USD -o plan.json`")
    plan = Plan.load(path)
    wanted = plan.adjusted(steps=steps, policy=policy)
    if not wish.is_empty:
        told = decide(wish, plan.run)
        wanted = wanted.adjusted(
            compression=told.compression, ratio_policy=told.ratio_policy, collective_policy=told.collective_policy
        )
    if not sync_wish.is_empty or wanted.run.is_local:
        run = sync_options.decide(sync_wish, wanted.run, exchange_was_asked=not wish.is_empty)
        wanted = wanted.model_copy(update={"run": run})
    return plan, wanted


def _to_resume(folder: Path, place: Place, launcher: Launcher) -> tuple[Path, Launch]:
    from hetopt.backends.backend import RunHandle
    from hetopt.core.errors import BadInput
    from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch

    record = Launch.load(folder / LAUNCH_FILE)
    if record.on != place:
        raise BadInput(
            f"{folder.name} was started on {record.on}, and goes on there.",
            hint=f"hetopt launch --on {record.on} --resume {folder.name}",
        )
    state = launcher.poll(RunHandle(run_dir=folder)).state
    if not state.is_over:
        raise BadInput(f"{folder.name} is still {state.value}.", hint=f"end it first with `hetopt stop {folder.name}`")
    if not (folder / "checkpoint" / "LATEST").exists():
        raise BadInput(f"{folder.name} has no checkpoint to go on from.", hint="start it anew from its plan")
    return folder, record
