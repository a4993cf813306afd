"""`hetopt predict`: step times of configurations that were never run, JSON Lines in and out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hetopt.api.step_times import StepTimes
from hetopt.cli import parse
from hetopt.cli.options import one_of
from hetopt.core import formatting
from hetopt.core.errors import BadInput
from hetopt.core.step_samples import HINT

if TYPE_CHECKING:
    from hetopt.optimizer.step_time.model import StepTime


def predict(
    profile: Path = typer.Argument(..., help="Profile made by `hetopt profile`, with or without --from-samples."),
    queries: Path = typer.Argument(Path("-"), help="Configurations, JSON Lines. Default: standard input."),
    suggest_probes: int = typer.Option(
        0, min=0, help="Mark the N configurations whose measurement would help most, and say why."
    ),
    market: str = typer.Option(
        "spot",
        autocompletion=one_of("spot", "on-demand"),
        help="Prices for --suggest-probes: spot or on-demand.",
    ),
    region: str = typer.Option("us-east-1", help="AWS region of the prices."),
    catalog_dir: Path | None = typer.Option(None, "--catalog", help="Another catalogue folder than the bundled one."),
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

    times = StepTimes.of(profile, market=market, region=region, catalog=catalog_dir)
    show_answers(times, list(parse.queries(parse.lines_of(queries, "QUERIES"))), probes=suggest_probes)


def show_answers(times: StepTimes, asked: list[parse.Query], *, probes: int) -> None:
    """Write each query with its step time, or why there is none, as a JSON line on standard output.

    Args:
        times: model that answers.
        asked: queries, in the order of their lines.
        probes: number of queries most worth measuring, whose lines say their rank and why; 0: none.

    Raises:
        BadInput: there are no queries, or some could not be predicted; raised once all lines are written.
    """
    predicted = iter(times.predict([query.configuration for query in asked if query.configuration is not None]))
    answers = [(query, next(predicted) if query.configuration is not None else query.reason) for query in asked]
    marks = _suggested(times, answers, probes) if probes else {}
    refused = []
    for query, answer in answers:
        if isinstance(answer, str):
            query.write(error=answer)
            refused.append(f"line {query.number}: {answer}")
        else:
            query.write(**asdict(answer), **marks.get(query.number, {}))
    if not asked:
        raise BadInput("there are no queries.", hint=HINT)
    if refused:
        what = "The only query" if len(asked) == 1 else f"{len(refused)} of {len(asked)} queries"
        raise BadInput(f"{what} could not be predicted; {refused[0]}", hint="each such line of the output says why")


def _suggested(
    times: StepTimes, answers: Sequence[tuple[parse.Query, StepTime | str]], count: int
) -> dict[int, dict[str, object]]:
    """Return by line number the rank, reason and cost of the configurations most worth measuring.

    Lines without a prediction are passed over; empty where there is none.
    """
    good = [
        (query.number, query.configuration, answer.step_time_s)
        for query, answer in answers
        if query.configuration is not None and not isinstance(answer, str)
    ]
    usd = [times.probe_usd(configuration, step_s) for _, configuration, step_s in good]
    marks: dict[int, dict[str, object]] = {}
    suggested = times.model.suggest([configuration for _, configuration, _ in good], count, usd) if good else ()
    for number, probe in enumerate(suggested, start=1):
        line, configuration, _ = good[probe.row]
        reason = (
            f"{configuration.workers} workers on {len(configuration.nodes)} nodes: expected to remove "
            f"{formatting.share(probe.removed)} of the remaining uncertainty, mostly about {probe.about}; measure "
            "further batch sizes in the same launch"
        )
        cost = {} if probe.usd is None else {"probe_cost_usd": probe.usd}
        marks[line] = {"suggested_probe": number, "reason": reason, **cost}
    return marks
