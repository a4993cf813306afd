"""`hetopt estimate`: a first table of clusters, times and dollars from what a model counts to; nothing is measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetopt.api.options import Described
from hetopt.cli.options import Json, with_options

if TYPE_CHECKING:
    from hetopt.api.planning import Estimate, Fit


@with_options(Described)
def estimate(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan to this file: it can be rehearsed.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an output file that is no plan.")] = False,
    as_json: Json = False,
    **typed: Any,
) -> None:
    """Say what training would take and cost before anything is measured.

    \b
      hetopt estimate --params 7B --method lora --samples 50k --tokens 2048
      hetopt estimate --params 110M --samples 3M --tokens 128 --budget 200
      hetopt estimate --config config.json --samples 1e6 --deadline 2d
      hetopt estimate --flops 1e18
    """
    import hetopt
    from hetopt.cli import parse, render
    from hetopt.core.interruption import Reporter

    parse.ready_to_write(output, force=force, replaces="plan")
    told = hetopt.estimate(reporter=Reporter(note=render.note), **typed)
    if output is not None:
        parse.save(output, told.plan.to_json())
    if as_json:
        render.print_json(_facts(told))
    else:
        _show(told, output)


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
    from hetopt.cli import render
    from hetopt.core import formatting
    from hetopt.core.plain_text import typed
    from hetopt.reports.document import Line, Remarks
    from hetopt.reports.plan_document import choices, limits_of

    model = told.model
    counted = f"{model.name}, {formatting.count(told.samples)} x {model.sample}, {told.flops:.2g} FLOPs"
    head = Line(", ".join([counted, *limits_of(told.plan.goal)]), "strong")
    first = [Line(text, "warning") for text in _needed_first(told)]
    render.show([head, *first, *choices(told.plan), Line(""), Remarks(list(_sentences(told)))])
    render.line("next: hetopt profile -- train.py", style="strong")
    if plan_file is not None:
        render.line(f"or:   hetopt launch {typed(plan_file)} --on rehearsal --steps 200", style="strong")


def _needed_first(told: Estimate) -> Iterator[str]:
    """Yield what a new account has to ask for before it can rent what is shown."""
    from hetopt.core import formatting
    from hetopt.reports.plan_document import chosen_way

    way = chosen_way(told.plan)
    for need in () if way is None or not told.presumed else way.quotas:
        if need.vcpus > need.new_account:
            yield (
                f"A new account may not rent this: it has {need.new_account} of {formatting.vcpus(need.vcpus)} "
                f"({need.bucket}). Ask for them first; see `hetopt doctor`."
            )


def _sentences(told: Estimate) -> Iterator[str]:
    from hetopt.core import formatting
    from hetopt.reports.plan_document import chosen_way, quota_notes, region_notes

    way = chosen_way(told.plan)
    took = told.plan.chosen.prediction.total_s if way is None else way.total_s
    yield (
        f"Counted FLOPs, not measured: it may take {took.low / took.value:.2g} to {took.high / took.value:.2g} times "
        "the time shown (90 %); profiling narrows that."
    )
    yield (
        f"Memory: {formatting.bytes_(told.state_bytes)} for weights, gradients and {told.recipe.optimizer}, "
        f"{formatting.bytes_(told.sample_bytes)} a sample; at once fit {', '.join(map(_fit, told.fits))}."
    )
    if any(fit.scheme.shards > 1 for fit in told.fits):
        yield "Sharing a model is FSDP's: torchtitan, Accelerate or `fully_shard`; hetopt's own trainer does not shard."
    if told.assumed:
        yield f"Assumed: {', '.join(told.assumed)}."
    yield from region_notes(told.plan)
    yield from quota_notes(told.plan)


def _fit(fit: Fit) -> str:
    samples = "any number" if fit.samples is None else f"{fit.samples:,}"
    shards = fit.scheme.shards
    shared = "" if shards == 1 else f", {shards} of which share the model"
    recomputed = ", activations recomputed" if fit.scheme.recomputes else ""
    return f"{samples} on {fit.gpu} ({fit.memory_gib:.0f} GiB{shared}{recomputed})"
