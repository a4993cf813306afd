"""`hetopt estimate`: a first table of clusters, times and dollars from what a model counts to; nothing is measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetopt.cli.options import (
    FIRST_REGION,
    Budget,
    CatalogFolder,
    Deadline,
    Json,
    Market,
    RegionOrAny,
    given,
    one_of,
    options,
)

if TYPE_CHECKING:
    from hetopt.api.estimating import Estimate, Fit


@dataclass(frozen=True, kw_only=True)
class Described:
    """What `hetopt estimate` is told; fields as of `hetopt.estimate`, as they are typed."""

    params: Annotated[str | None, typer.Option(metavar="N", help="Parameters of a transformer, such as 110M.")] = None
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="A Hugging Face config.json instead.")] = None
    flops: Annotated[
        str | None, typer.Option(metavar="N", help="FLOPs of the whole training, instead of --samples.")
    ] = None
    samples: Annotated[str | None, typer.Option(metavar="N", help="Samples trained on, epochs included.")] = None
    tokens: Annotated[int | None, typer.Option(metavar="N", help="Tokens of a sample.")] = None
    batch_size: Annotated[int | None, typer.Option(metavar="N", help="Samples of a step. Default: 256.")] = None
    precision: Annotated[
        str,
        typer.Option(autocompletion=one_of("hetopt.api.estimating:Computing"), help="bf16, fp16, tf32 or fp32."),
    ] = "bf16"
    budget_usd: Budget = None
    deadline: Deadline = None
    objective: Annotated[
        str,
        typer.Option(
            autocompletion=one_of("hetopt.optimizer.plan:Objective"),
            help="balanced, fastest or cheapest.",
        ),
    ] = "balanced"
    market: Market = "any"
    region: RegionOrAny = FIRST_REGION
    types: Annotated[str | None, typer.Option(help="Only these instance types or patterns.")] = None
    exclude: Annotated[str | None, typer.Option(help="Leave these out.")] = None
    gpus: Annotated[str | None, typer.Option(help="Only machines with these: A10G, L4:4, L4:4+.")] = None
    quotas: Annotated[
        list[str] | None,
        typer.Option(
            "--quota",
            metavar="FAMILY=VCPUS",
            help="vCPUs that may run at once: g=8; the word default: those of a new account.",
        ),
    ] = None
    max_workers: Annotated[int, typer.Option(help="Most GPUs in a cluster.")] = 64
    catalog: CatalogFolder = None
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan to this file: it can be rehearsed.")
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Replace an output file that is no plan.")] = False
    as_json: Json = False


@options(Described)
def estimate(asked: Described) -> None:
    """Say what training would take and cost before anything is measured.

    \b
      hetopt estimate --params 110M --samples 3M --tokens 128 --budget 200
      hetopt estimate --config config.json --samples 1e6 --deadline 2d
      hetopt estimate --flops 1e18
    """
    import hetopt
    from hetopt.cli import parse, render
    from hetopt.core.reporter import Reporter

    parse.ready_to_write(asked.output, force=asked.force, replaces="plan")
    told = hetopt.estimate(**given(asked, hetopt.estimate, reporter=Reporter(note=render.note)))
    if asked.output is not None:
        told.plan.save(asked.output)
        render.note(f"wrote {asked.output}")
    if asked.as_json:
        render.print_json(_facts(told))
    else:
        _show(told, asked.output)


def _facts(told: Estimate) -> dict[str, Any]:
    return {
        "model": {
            "name": told.model.name,
            "parameters": told.model.parameters,
            "forward_flops_per_sample": told.model.forward_flops,
            "sample": told.model.sample,
        },
        "samples": told.samples,
        "batch_size": told.batch_size,
        "flops": told.flops,
        "state_bytes": told.state_bytes,
        "sample_bytes": told.sample_bytes,
        "fits": [asdict(fit) for fit in told.fits],
        "assumed": list(told.assumed),
        "evidence": "counted FLOPs, not measured",
        "plan": told.plan.model_dump(mode="json"),
    }


def _show(told: Estimate, plan_file: Path | None) -> None:
    """At most 22 lines of 80 columns: what was counted, the ways to go, what it rests on, and the next command."""
    from hetopt.cli import plan_view, render
    from hetopt.core import formatting
    from hetopt.core.commands import typed
    from hetopt.reports.plan_page import limits_of

    model = told.model
    counted = f"{model.name}, {formatting.count(told.samples)} x {model.sample}, {told.flops:.2g} FLOPs"
    render.line(", ".join([counted, *limits_of(told.plan.goal)]), style="bold")
    plan_view.show_choices(told.plan)
    render.line()
    for sentence in _sentences(told):
        render.bullet(sentence)
    render.line("next: hetopt profile -- train.py", style="bold")
    if plan_file is not None:
        render.line(f"or:   hetopt launch {typed(plan_file)} --on rehearsal --steps 200", style="bold")


def _sentences(told: Estimate) -> Iterator[str]:
    from hetopt.cli import plan_view
    from hetopt.core import formatting

    way = plan_view.chosen_way(told.plan)
    took = told.plan.chosen.prediction.total_s if way is None else way.total_s
    yield (
        f"Counted FLOPs, not measured: it may take {took.low / took.value:.2g} to {took.high / took.value:.2g} times "
        "the time shown (90 %); profiling narrows that."
    )
    yield (
        f"Memory: {formatting.bytes_(told.state_bytes)} for weights, gradients and Adam, "
        f"{formatting.bytes_(told.sample_bytes)} a sample; at once fit {', '.join(map(_fit, told.fits))}."
    )
    if told.assumed:
        yield f"Assumed: {', '.join(told.assumed)}."
    yield from plan_view.region_notes(told.plan)
    yield from plan_view.quota_notes(told.plan)


def _fit(fit: Fit) -> str:
    samples = "any number" if fit.samples is None else f"{fit.samples:,}"
    return f"{samples} on {fit.gpu} ({fit.memory_gib:.0f} GiB)"
