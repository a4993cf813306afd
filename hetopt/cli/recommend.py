"""`hetopt recommend`: the best plan for the money, its alternatives, and why it won."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hetopt.cli.completion import one_of

if TYPE_CHECKING:
    from hetopt.optimizer.plan import Plan


def recommend(
    profile: Path = typer.Argument(..., help="Profile made by `hetopt profile`."),
    budget: str | None = typer.Option(None, "--budget", help="Total USD, a hard cap on the whole bill."),
    deadline: str | None = typer.Option(
        None, "--deadline", help="Longest total time, such as 6h: the cheapest plan in time wins."
    ),
    target: str | None = typer.Option(
        None, "--target", help="METRIC=VALUE. Default: the task's own target (or its usual epochs)."
    ),
    epochs: float | None = typer.Option(None, "--epochs", help="Train this many epochs instead of to a target."),
    steps: int | None = typer.Option(None, "--steps", help="Train this many steps instead of to a target."),
    objective: str = typer.Option(
        "auto",
        "--objective",
        autocompletion=one_of("hetopt.optimizer.plan:Objective"),
        help="Within the limits: time, cost or knee (of the front). Default: time, or cost with a deadline.",
    ),
    weights: str | None = typer.Option(
        None, "--weights", metavar="time=W,cost=W", help="Weigh time and cost instead: time=2,cost=1."
    ),
    confidence: float | None = typer.Option(
        None, "--confidence", help="Keep the limits with this probability, by simulated runs: 0.9."
    ),
    accept_risk: bool = typer.Option(
        False, "--accept-risk", help="Take a plan that keeps the limits with less than that probability (0.9)."
    ),
    market: str | None = typer.Option(
        None,
        "--market",
        autocompletion=one_of("hetopt.optimizer.market.catalog_filter:AnyMarket"),
        help="spot (default), on-demand or any.",
    ),
    spot: bool = typer.Option(False, "--spot", help="The same as --market spot."),
    on_demand: bool = typer.Option(False, "--on-demand", help="The same as --market on-demand."),
    region: str = typer.Option("us-east-1", "--region", help="AWS region."),
    zone: str | None = typer.Option(None, "--zone", help="Availability zone of all machines, such as us-east-1a."),
    zones: int = typer.Option(
        1, "--zones", help="Spread the machines over so many zones, and pay for what they send each other between them."
    ),
    types: str | None = typer.Option(
        None, "--types", help="Only these instance types, with commas between; patterns in quotes: 'g5.*,c7a.*'."
    ),
    exclude: str | None = typer.Option(None, "--exclude", help="Leave these instance types or patterns out."),
    gpus: str | None = typer.Option(
        None, "--gpus", help="Only machines with these GPUs: A10G, or L4:4 (so many a machine), any, none."
    ),
    arch: str | None = typer.Option(
        None,
        "--arch",
        autocompletion=one_of("hetopt.optimizer.market.instance_type:Architecture"),
        help="x86_64 or arm64.",
    ),
    max_hourly: str | None = typer.Option(None, "--max-hourly", help="Most USD an hour for all machines together."),
    max_workers: int = typer.Option(64, "--max-workers", help="Most workers in a cluster, up to 256."),
    max_machines: int | None = typer.Option(None, "--max-machines", help="Most machines in a cluster."),
    mixed_types: int = typer.Option(3, "--mixed-types", help="Most instance types in a cluster: 1, 2 or 3."),
    quota: list[str] | None = typer.Option(
        None,
        "--quota",
        metavar="FAMILY=VCPUS",
        help="vCPUs that may run at once: g=8, spot:standard=32. May be repeated.",
    ),
    batch_size: int | None = typer.Option(None, "--batch-size", help="Fix the global batch size, samples."),
    lr_rule: str | None = typer.Option(
        None,
        "--lr-rule",
        autocompletion=one_of("hetopt.optimizer.plan:ScalingRule"),
        help="How the learning rate follows the batch size: none, linear, sqrt or adascale (by the measured gradient "
        "noise). Default: the task's.",
    ),
    sync: str | None = typer.Option(
        None,
        "--sync",
        autocompletion=one_of("hetopt.core.synchronization:SyncName"),
        help="When the workers of the plan synchronize, as of `hetopt launch`: 'selsync(auto)', "
        "'local-sgd(8)', bsp, ... Default: the best of bsp and what the profile measured (`hetopt profile --sync`).",
    ),
    catalog_dir: Path | None = typer.Option(None, "--catalog", help="Another catalogue folder than the bundled one."),
    rank: bool = typer.Option(
        False, "--rank", help="Only compare clusters, where no pilot says how many steps the target takes. No budget."
    ),
    trials: int = typer.Option(
        400,
        "--trials",
        help="Trials of the study of mixes of three types, where they are too many to rule out; 0: none.",
    ),
    observed: str | None = typer.Option(
        None,
        "--observed",
        metavar="FILE",
        help="What was seen of spot pools: hours and losses. Default: what your launches have seen; none: nothing.",
    ),
    seed: int = typer.Option(0, "--seed", help="Seed of the search: the same seed gives the same plan."),
    resume: Path | None = typer.Option(
        None, "--resume", metavar="FILE", help="Keep the study's trials in this file, and go on from those in it."
    ),
    report: Path | None = typer.Option(
        None,
        "--report",
        metavar="FILE",
        help="Also write the plan as an HTML page: Pareto front, costs, local batch sizes, sensitivity.",
    ),
    output: Path | None = typer.Option(None, "--output", "-o", help="Write the plan to this JSON file."),
    force: bool = typer.Option(False, "--force", help="Replace the output file if it exists."),
    json_: bool = typer.Option(False, "--json", help="Print the plan as JSON."),
) -> None:
    """Find the best cluster for a profiled job: machines, batch sizes and compression.

    Without --deadline the fastest plan inside the budget wins; with it, the cheapest that is in time.
    A plan that keeps them with less than the probability that is asked for (0.9) is shown and written, and is no
    success: exit code 3, unless --accept-risk is given.
    Works offline, from the bundled catalogue, without credentials.
    """
    import hetopt
    from hetopt.api.planning import rank_clusters, search_options
    from hetopt.api.values import positive
    from hetopt.cli import parse, plan_view, render, terminal
    from hetopt.core.artifact import write_atomically
    from hetopt.core.reporter import Reporter

    parse.ready_to_write(output, force=force)
    parse.ready_to_write(report, force=force)
    narrowed: dict[str, Any] = {
        "market": parse.market(market, spot=spot, on_demand=on_demand),
        "max_machines": max_machines,
        "max_workers": max_workers,
        "mixed_types": mixed_types,
        "batch_size": batch_size,
        "types": types or (),
        "exclude": exclude or (),
        "gpus": gpus or (),
        "architecture": arch,
        "zone": zone,
        "zones": zones,
        "max_hourly_usd": max_hourly,
        "quotas": quota or (),
        "objective": objective,
        "time_weight": parse.time_weight(weights),
        "confidence": confidence,
        "accept_risk": accept_risk,
        "trials": trials,
        "journal": resume,
        "learning_rate_rule": lr_rule,
        "sync": sync,
    }
    if rank:
        from hetopt.cli.ranking_view import show

        notes = Reporter(note=render.note)
        options = search_options(**narrowed)
        show(rank_clusters(profile, options, region=region, catalog=catalog_dir, reporter=notes), as_json=json_)
        return
    with render.progress("searching") as reporter:
        plan = hetopt.recommend(
            profile,
            budget_usd=positive(budget, "budget_usd", "USD"),
            deadline=deadline,
            target=target,
            epochs=epochs,
            steps=steps,
            region=region,
            catalog=catalog_dir,
            observed=observed,
            seed=seed,
            reporter=reporter,
            **narrowed,
        )
    if report is not None:
        from hetopt.reports.plan_page import page

        write_atomically(report, page(plan))
        render.note(f"wrote {report}")
    if output is not None:
        plan.save(output)
        render.note(f"wrote {output}")
    if json_:
        terminal.write(plan.to_json())
    else:
        plan_view.show(plan)
    _refuse_a_risk(plan)


def _refuse_a_risk(plan: Plan) -> None:
    """A plan that is written and shown is no success if it is less sure than was asked for.

    Raises:
        NoFeasiblePlan: it is not, and nobody has accepted that.
    """
    from hetopt.core.errors import NoFeasiblePlan

    seen = plan.insight
    if plan.risk is None or seen is None or seen.risk_accepted:
        return
    raise NoFeasiblePlan(
        f"This is the best of the likeliest plans, but {plan.risk}.",
        hint=", or ".join([*seen.remedies, "take the risk with --accept-risk"]),
    )
