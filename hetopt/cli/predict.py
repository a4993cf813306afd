"""`hetopt predict`: step times of configurations that were never run, JSON Lines in and out."""

from __future__ import annotations

from pathlib import Path

import typer

from hetopt.cli.options import one_of

CHUNK = 1000
"""Queries of a file that are predicted together; from a pipe each is answered at once."""


def predict(
    profile: Path = typer.Argument(..., help="Profile made by `hetopt profile`, with or without --from-samples."),
    queries: Path = typer.Argument(Path("-"), help="Configurations, JSON Lines. Default: standard input."),
    suggest_probes: int = typer.Option(
        0, min=0, help="Mark the N configurations whose measurement would help most, and say why."
    ),
    explain: str | None = typer.Option(
        None, help='Only the breakdown of one query: its "id", or the number of its line.'
    ),
    market: str = typer.Option(
        "spot",
        autocompletion=one_of("spot", "on-demand"),
        help="Prices for --suggest-probes: spot or on-demand.",
    ),
    region: str = typer.Option("us-east-1", help="AWS region of the prices."),
    catalog_dir: Path | None = typer.Option(None, "--catalog", help="Another catalogue folder than the bundled one."),
    json_: bool = typer.Option(False, "--json", help="Breakdown as JSON. Predictions always are."),
) -> None:
    """Predict step times, with 90 % intervals, for clusters that were never run.

    QUERIES are JSON Lines. Each comes back with step_time_s, step_time_low_s, step_time_high_s and evidence, the
    numbers that `hetopt recommend` plans with:

    \b
      {"nodes": [{"type": "g5.xlarge", "workers": 1}], "local_batch_size": 64}

    \b
      hetopt predict profile.json queries.jsonl
      hetopt predict profile.json queries.jsonl --suggest-probes 2

    A worker is a GPU, or a machine without one. local_batch_size is a number, or a list with one for each worker.
    Also read: "compression": {"name": "topk", "ratio": 0.01}, "precision": "bf16", "sync": "local-sgd(8)", "id".
    """
    from hetopt.api.step_times import StepTimes
    from hetopt.cli import lines, predictions

    times = StepTimes.of(profile, market=market, region=region, catalog=catalog_dir)
    with lines.opened(queries, "QUERIES") as (rows, is_whole):
        if explain is not None:
            predictions.explain(times, lines.queries(rows), explain, as_json=json_)
        elif suggest_probes:
            predictions.suggest(times, list(lines.queries(rows)), suggest_probes)
        else:
            at_once = CHUNK if is_whole else 1
            predictions.answer(times.model, lines.chunks(lines.queries(rows), at_once))
