"""`hetopt recommend`: the best plan for the money, its alternatives, and why it won."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetopt.cli.options import FIRST_REGION, Budget, CatalogFolder, Deadline, given, one_of, options

if TYPE_CHECKING:
    from hetopt.optimizer.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Recommend:
    """What `hetopt recommend` is asked for; fields as of `hetopt.recommend`, as they are typed."""

    profile: Annotated[Path, typer.Argument(help="Profile made by `hetopt profile`.")]
    budget_usd: Budget = None
    deadline: Deadline = None
    target: Annotated[
        str | None, typer.Option(help="METRIC=VALUE. Default: the task's own target (or its usual epochs).")
    ] = None
    epochs: Annotated[float | None, typer.Option(help="Train this many epochs instead of to a target.")] = None
    steps: Annotated[int | None, typer.Option(help="Train this many steps instead of to a target.")] = None
    objective: Annotated[
        str,
        typer.Option(
            autocompletion=one_of("hetopt.optimizer.plan:Objective"),
            help="fastest, cheapest or balanced. Within the limits; balanced stops paying where 10 % less time costs "
            "over 20 % more.",
        ),
    ] = "balanced"
    time_weight: Annotated[
        str | None,
        typer.Option("--weights", metavar="time=W,cost=W", help="Weigh time and cost instead: time=2,cost=1."),
    ] = None
    confidence: Annotated[
        float | None,
        typer.Option(help="Keep the limits with this probability, by simulated runs: 0.9."),
    ] = None
    accept_risk: Annotated[
        bool,
        typer.Option("--accept-risk", help="Take a plan that keeps the limits with less than that probability (0.9)."),
    ] = False
    market: Annotated[
        str | None,
        typer.Option(
            autocompletion=one_of("hetopt.optimizer.market.catalog_filter:AnyMarket", "own"),
            help="spot, on-demand or any (default); own: only machines of --inventory.",
        ),
    ] = None
    spot: Annotated[bool, typer.Option("--spot", help="The same as --market spot.")] = False
    on_demand: Annotated[bool, typer.Option("--on-demand", help="The same as --market on-demand.")] = False
    region: Annotated[
        str,
        typer.Option("--region", "-r", help="AWS region; any: the best of all, with the data set's transfer."),
    ] = FIRST_REGION
    zone: Annotated[str | None, typer.Option(help="Availability zone of all machines, such as us-east-1a.")] = None
    types: Annotated[
        str | None,
        typer.Option(help="Only these instance types, with commas between; patterns in quotes: 'g5.*,c7a.*'."),
    ] = None
    exclude: Annotated[str | None, typer.Option(help="Leave these instance types or patterns out.")] = None
    gpus: Annotated[
        str | None,
        typer.Option(
            help="Only machines with these GPUs: A10G, L4:4 (so many each), L4:4+ (or more), any, none.",
        ),
    ] = None
    architecture: Annotated[
        str | None,
        typer.Option(
            "--arch",
            autocompletion=one_of("hetopt.optimizer.market.instance_type:Architecture"),
            help="x86_64 or arm64.",
        ),
    ] = None
    network_min_gbps: Annotated[
        float | None,
        typer.Option("--network-min", metavar="GBPS", help="Sustained network rate of a machine in Gbit/s, at least."),
    ] = None
    network_max_gbps: Annotated[
        float | None, typer.Option("--network-max", metavar="GBPS", help="The same, at most.")
    ] = None
    max_hourly_usd: Annotated[
        str | None, typer.Option("--max-hourly", help="Most USD an hour for all machines together.")
    ] = None
    max_workers: Annotated[int, typer.Option(help="Most workers in a cluster, up to 4,096.")] = 64
    max_machines: Annotated[int | None, typer.Option(help="Most machines in a cluster.")] = None
    mixed_types: Annotated[int, typer.Option(help="Most instance types in a cluster: 1, 2 or 3.")] = 3
    quotas: Annotated[
        list[str] | None,
        typer.Option(
            "--quota",
            metavar="FAMILY=VCPUS",
            help="vCPUs that may run at once: g=8, spot:standard=32. The word default: what a new account has; none: "
            "no limit. May be repeated. Left out: what `hetopt doctor` read of your account, or no limit.",
        ),
    ] = None
    data: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of the data set, which each machine reads first: 150GB."),
    ] = None
    data_region: Annotated[str | None, typer.Option(help="Where the data set is. Default: where the machines are.")] = (
        None
    )
    disk_gb: Annotated[
        int | None, typer.Option("--disk", metavar="GB", help="Of each machine. Default: what it needs.")
    ] = None
    provisioning: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="From the request to the first step. Default: by machine."),
    ] = None
    batch_size: Annotated[int | None, typer.Option(help="Fix the global batch size, samples.")] = None
    learning_rate_rule: Annotated[
        str | None,
        typer.Option(
            "--lr-rule",
            autocompletion=one_of("hetopt.optimizer.plan:ScalingRule"),
            help="How the learning rate follows the batch size: none, linear, sqrt or adascale (by the measured "
            "gradient noise). Default: the task's.",
        ),
    ] = None
    sync: Annotated[
        str | None,
        typer.Option(
            autocompletion=one_of("hetopt.core.synchronization:SyncName"),
            help="When the workers of the plan synchronize, as of `hetopt launch`: 'selsync(auto)', 'local-sgd(8)', "
            "bsp, ... Default: the best of bsp and what the profile measured (`hetopt profile --sync`).",
        ),
    ] = None
    precision: Annotated[
        str,
        typer.Option(
            autocompletion=one_of("hetopt.api.planning:PRECISIONS"),
            help="What workers compute in: fp32, tf32, bf16, fp16, or auto: the best that the profile has steps of.",
        ),
    ] = "auto"
    compression: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Only these ways to send gradients: topk, powersgd, none, ... May be repeated. Default: all.",
        ),
    ] = None
    ratio: Annotated[
        list[str] | None,
        typer.Option(
            metavar="R",
            help="Part of the gradient that those send which send a part: 0.01, 1% or 100x. May be repeated.",
        ),
    ] = None
    catalog: CatalogFolder = None
    rank: Annotated[
        bool,
        typer.Option(
            "--rank", help="Only compare clusters, where no pilot says how many steps the target takes. No budget."
        ),
    ] = False
    trials: Annotated[
        int | None,
        typer.Option(
            help="Also look through the whole space with so many trials of an Optuna study, from what exact search "
            "found. Default: 400 with --resume, else none.",
        ),
    ] = None
    observed: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="What was seen of spot pools: hours and losses. Default: what your launches have seen; none: nothing.",
        ),
    ] = None
    inventory: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Machines of your own, see `hetopt hosts check`: the better of a plan for them and one that rents.",
        ),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of the search: the same seed gives the same plan.")] = 0
    journal: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="FILE",
            help="Keep the study's trials in this file, and go on from those in it; optuna-dashboard FILE shows them.",
        ),
    ] = None
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write the plan as an HTML page: Pareto front, costs, local batch sizes, sensitivity.",
        ),
    ] = None
    explain: Annotated[
        bool, typer.Option("--explain", help="Also show machines, bill, alternatives, what would change it, and why.")
    ] = False
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan to this JSON file.")] = None
    force: Annotated[bool, typer.Option("--force", help="Replace an output file that is no plan.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False


@options(Recommend)
def recommend(asked: Recommend) -> None:
    """Find the best cluster for a profiled job: machines, batch sizes and compression.

    Works offline, from the bundled catalogue, without credentials.

    \b
      hetopt recommend profile.json --budget 2 -o plan.json
      hetopt recommend profile.json --deadline 6h --epochs 100 --json
      hetopt recommend profile.json --budget 20 --gpus L4,A10G --quota g=32
    \f
    Shows the cheapest, the balanced and the fastest plan that keep the limits, the safest (on demand), and this
    machine; the balanced one is written unless --objective names another. --explain shows all there is to it.
    A plan that keeps them with less than the probability that is asked for (0.9) is shown and written, and is no
    success: exit code 3, unless --accept-risk is given.
    """
    import hetopt
    from hetopt.cli import parse, render

    parse.ready_to_write(asked.output, force=asked.force, replaces="plan")
    parse.ready_to_write(asked.report, force=asked.force, replaces="hetopt plan")
    market = parse.market(asked.market, spot=asked.spot, on_demand=asked.on_demand)
    weight = parse.time_weight(asked.time_weight)
    if asked.rank:
        _rank(asked, market, weight)
        return
    with render.progress("searching") as reporter:
        plan = hetopt.recommend(**given(asked, hetopt.recommend, market=market, time_weight=weight, reporter=reporter))
    _write(plan, asked)
    _refuse_a_risk(plan)


def _rank(asked: Recommend, market: str, weight: float | None) -> None:
    """Only compare clusters."""
    from hetopt.api.planning import rank_clusters, search_options
    from hetopt.cli import render
    from hetopt.cli.plan_view import show_ranking
    from hetopt.core.reporter import Reporter

    search = search_options(**given(asked, search_options, market=market, time_weight=weight, observed=None))
    notes = Reporter(note=render.note)
    show_ranking(rank_clusters(**given(asked, rank_clusters, options=search, reporter=notes)), as_json=asked.as_json)


def _write(plan: Plan, asked: Recommend) -> None:
    """The plan in each form that was asked for."""
    from hetopt.cli import plan_view, render, terminal
    from hetopt.core.artifact import write_atomically

    if asked.report is not None:
        from hetopt.reports.plan_page import page

        write_atomically(asked.report, page(plan))
        render.note(f"wrote {asked.report}")
    if asked.output is not None:
        plan.save(asked.output)
        render.note(f"wrote {asked.output}")
    if asked.as_json:
        terminal.write(plan.to_json())
    else:
        plan_view.show(plan, plan_file=asked.output, inventory=asked.inventory, explain=asked.explain)


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
