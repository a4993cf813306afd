"""`hetopt recommend`: the best plan for the money, its alternatives, and why it won."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from hetopt.optimizer.plan import Goal
    from hetopt.profiler.profile import Profile


def recommend(
    profile: Path = typer.Argument(..., help="Profile made by `hetopt profile`."),
    budget: float | None = typer.Option(None, "--budget", help="Total USD, a hard cap on the whole bill."),
    deadline: str | None = typer.Option(
        None, "--deadline", help="Longest total time, such as 6h: the cheapest plan in time wins."
    ),
    target: str | None = typer.Option(
        None, "--target", help="METRIC=VALUE. Default: the task's own target (or its usual epochs)."
    ),
    epochs: float | None = typer.Option(None, "--epochs", help="Train this many epochs instead of to a target."),
    steps: int | None = typer.Option(None, "--steps", help="Train this many steps instead of to a target."),
    market: str = typer.Option("spot", "--market", help="spot, on-demand or any."),
    region: str = typer.Option("us-east-1", "--region", help="AWS region."),
    max_machines: int = typer.Option(16, "--max-machines", help="Most machines in a cluster."),
    batch_size: int | None = typer.Option(None, "--batch-size", help="Fix the global batch size, samples."),
    types: str | None = typer.Option(None, "--types", help="Only these instance types, with commas between."),
    lr_rule: str | None = typer.Option(
        None,
        "--lr-rule",
        help="How the learning rate follows the batch size: none, linear, sqrt or adascale (by the measured gradient "
        "noise). Default: the task's.",
    ),
    exclude: str | None = typer.Option(None, "--exclude", help="Leave these instance types out."),
    catalog_dir: Path | None = typer.Option(None, "--catalog", help="Another catalogue folder than the bundled one."),
    seed: int = typer.Option(0, "--seed", help="Seed of the search: the same seed gives the same plan."),
    output: Path | None = typer.Option(None, "--output", "-o", help="Write the plan to this JSON file."),
    force: bool = typer.Option(False, "--force", help="Replace the output file if it exists."),
    json_: bool = typer.Option(False, "--json", help="Print the plan as JSON."),
) -> None:
    """Find the best cluster for a profiled job: machines, shares, batch size and compression.

    Without --deadline the fastest plan inside the budget wins; with it, the cheapest that is in time.
    Works offline, from the bundled catalogue, without credentials.
    """
    import datetime
    import sys

    from hetopt.optimizer.catalog import load_catalog
    from hetopt.optimizer.cli import parse, plan_view, render
    from hetopt.optimizer.recommend import Options
    from hetopt.optimizer.recommend import recommend as find_plan
    from hetopt.profiler.errors import BadInput
    from hetopt.profiler.profile import Profile

    parse.ready_to_write(output, force=force)
    if market not in ("spot", "on-demand", "any"):
        raise BadInput(f"--market must be spot, on-demand or any, not {market!r}.", hint="for example --market any")
    budget_usd = parse.positive(budget, "--budget", "USD")
    deadline_s = parse.duration_s(deadline, "--deadline")
    if budget_usd is None and deadline_s is None:
        raise BadInput("give --budget, --deadline or both.", hint="hetopt recommend PROFILE --budget 5")
    measured = Profile.load(profile)
    goal = _goal(measured, budget_usd, deadline_s, target, parse.positive(epochs, "--epochs", "epochs"), steps)
    if max_machines < 1:
        raise BadInput(f"--max-machines must be at least 1, not {max_machines}.", hint="for example --max-machines 16")
    if batch_size is not None and batch_size < 1:
        raise BadInput(f"--batch-size must be at least 1, not {batch_size}.", hint="leave it out to let hetopt choose")
    options = Options(
        market=market,
        max_machines=max_machines,
        batch_size=batch_size,
        only_types=parse.names(types),
        exclude_types=parse.names(exclude),
        learning_rate_rule=parse.scaling_rule(lr_rule),
    )
    with render.progress("searching") as tell:
        tell("the catalogue", None)
        plan = find_plan(
            measured,
            load_catalog(region, catalog_dir),
            goal,
            options,
            seed=seed,
            now=datetime.datetime.now(datetime.UTC),
        )
    if output is not None:
        plan.save(output)
        render.note(f"wrote {output}")
    if json_:
        sys.stdout.write(plan.to_json())
    else:
        plan_view.show(plan)


def _goal(
    profile: Profile,
    budget_usd: float | None,
    deadline_s: float | None,
    target: str | None,
    epochs: float | None,
    steps: int | None,
) -> Goal:
    from hetopt.optimizer.cli import parse, render
    from hetopt.optimizer.plan import Goal
    from hetopt.profiler.errors import BadInput

    if sum(option is not None for option in (target, epochs, steps)) > 1:
        raise BadInput(
            "--target, --epochs and --steps exclude each other.", hint="keep the one that ends your training"
        )
    if steps is not None and steps < 1:
        raise BadInput(f"--steps must be at least 1, not {steps}.", hint="for example --steps 10000")
    named = parse.metric_target(target)
    job = profile.job
    if epochs is not None or steps is not None:
        return Goal(
            budget_usd=budget_usd,
            deadline_s=deadline_s,
            ends="epochs" if epochs is not None else "steps",
            amount=epochs if epochs is not None else steps,
        )
    if named is None and job.usual_epochs is not None and not any(pilot.steps_to_target for pilot in profile.pilots):
        render.note(
            f"No pilot run reached {job.target_metric} {job.target_value:g}, so nothing says how many steps it takes: "
            f"this plan is for the {job.usual_epochs:g} epochs that {job.task} is usually trained. "
            "Choose otherwise with --epochs or --steps."
        )
        return Goal(budget_usd=budget_usd, deadline_s=deadline_s, ends="epochs", amount=job.usual_epochs)
    if named is not None and named[0] != job.target_metric:
        raise BadInput(
            f"{profile.job.task} was profiled for {job.target_metric}, not {named[0]}.",
            hint=f"for example --target {job.target_metric}={job.target_value:g}",
        )
    return Goal(
        budget_usd=budget_usd,
        deadline_s=deadline_s,
        ends="target",
        target_metric=job.target_metric,
        target_value=named[1] if named is not None else job.target_value,
    )
