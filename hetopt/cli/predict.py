"""`hetopt predict`: step times of configurations that were never run, JSON Lines in and out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hetopt.api.step_times import Planned, StepTimes, predicted
from hetopt.cli import render, terminal
from hetopt.cli.options import one_of
from hetopt.cli.parse import Query
from hetopt.core import formatting
from hetopt.core.errors import BadInput
from hetopt.core.step_samples import HINT, Configuration
from hetopt.reports.document import Block, Facts, Heading, Line, Remarks

if TYPE_CHECKING:
    from hetopt.optimizer.step_time.model import Explanation, StepTime

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
    from hetopt.cli import parse

    times = StepTimes.of(profile, market=market, region=region, catalog=catalog_dir)
    with parse.opened(queries, "QUERIES") as (rows, is_whole):
        if explain is not None:
            show_explained(times, parse.queries(rows), explain, as_json=json_)
        elif suggest_probes:
            show_suggested(times, list(parse.queries(rows)), suggest_probes)
        else:
            at_once = CHUNK if is_whole else 1
            show_answers(times.model, parse.chunks(parse.queries(rows), at_once))


MOST_SOURCES = 6


def _document(configuration: Configuration, explanation: Explanation) -> Iterator[Block]:
    """Yield the predicted step time of one configuration and the terms that it is made of."""
    predicted = explanation.predicted
    nodes = Counter((node.type, node.workers) for node in configuration.nodes)
    described = " + ".join(
        f"{count} × {type_} ({formatting.counted(workers, 'worker')})" for (type_, workers), count in nodes.items()
    )
    sizes = sorted(set(configuration.batch_sizes))
    batch = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    yield Line(f"{described}, local batch {batch}", "strong")
    yield Line(
        f"  {formatting.duration(predicted.step_time_s)} a step, 90 % between "
        f"{formatting.duration(predicted.step_time_low_s)} "
        f"and {formatting.duration(predicted.step_time_high_s)}"
    )
    parts = {"computing": f"{formatting.duration(explanation.compute_s)}, the slowest worker"}
    if explanation.compress_s:
        parts["compressing"] = formatting.duration(explanation.compress_s)
    if configuration.workers > 1:
        parts["exchanging"] = (
            f"{formatting.duration(explanation.exchange_s)}, of which {formatting.duration(explanation.exposed_s)} "
            "are not hidden behind computing"
        )
    yield Heading("Where the time goes")
    yield Facts(parts)
    workers, count = explanation.most_workers, explanation.most_nodes
    why = [f"{formatting.share(share)}: {source}" for source, share in explanation.variances.items()][:MOST_SOURCES]
    if configuration.workers > workers or len(configuration.nodes) > count:
        measured = f"{formatting.counted(workers, 'worker')} and {formatting.counted(count, 'node')}"
        why.append(f"this is beyond what was measured: up to {measured}")
    why += [f"{name} was not measured: {basis}" for name, basis in explanation.relatives.items()]
    yield Heading("Why the interval is so wide")
    yield Remarks(why)
    yield Heading("Not measured, but believed")
    yield Remarks(explanation.priors)


def show_answers(model: Planned, chunks: Iterable[list[Query]]) -> None:
    """One line out for each line in. Lines that cannot be predicted carry the reason, and are counted at the end."""
    total, refused = 0, list[str]()
    for chunk in chunks:
        total += len(chunk)
        for query, answer in _answered(model, chunk):
            refused += _written(query, answer)
        if len(chunk) == 1:
            terminal.flush()
    _report(total, refused)


def _answered(model: Planned, asked: list[Query]) -> list[tuple[Query, StepTime | str]]:
    """Every query with its prediction, or with why there is none."""
    good = [query.configuration for query in asked if query.configuration is not None]
    found = iter(predicted(model, good))
    return [(query, next(found) if query.configuration is not None else query.reason) for query in asked]


def _written(query: Query, answer: StepTime | str, mark: Mapping[str, object] | None = None) -> list[str]:
    """Write one line, and say why where there is no prediction."""
    if isinstance(answer, str):
        query.write(error=answer)
        return [f"line {query.number}: {answer}"]
    query.write(**asdict(answer), **(mark or {}))
    return []


def _report(total: int, refused: list[str]) -> None:
    """Refuse at the end what could not be predicted, or an input without queries."""
    if not total:
        raise BadInput("there are no queries.", hint=HINT)
    if refused:
        what = "The only query" if total == 1 else f"{len(refused)} of {total} queries"
        raise BadInput(f"{what} could not be predicted; {refused[0]}", hint="each such line of the output says why")


def show_suggested(times: StepTimes, asked: list[Query], count: int) -> None:
    """All predictions; the lines that are worth measuring say in which order, and why."""
    answers = _answered(times.model, asked)
    good = [
        (place, query.configuration, answer.step_time_s)
        for place, (query, answer) in enumerate(answers)
        if query.configuration is not None and not isinstance(answer, str)
    ]
    configurations = [configuration for _, configuration, _ in good]
    usd = [times.probe_usd(configuration, step_s) for _, configuration, step_s in good]
    probes = times.own.suggest(configurations, count, usd) if good else ()
    marks: dict[int, dict[str, object]] = {}
    for number, probe in enumerate(probes, start=1):
        place, configuration, _ = good[probe.row]
        layout = f"{configuration.workers} workers on {len(configuration.nodes)} nodes"
        reason = (
            f"{layout}: expected to remove {formatting.share(probe.removed)} of the remaining uncertainty, "
            f"mostly about {probe.about}; measure further batch sizes in the same launch"
        )
        marks[place] = {"suggested_probe": number, "reason": reason}
        if probe.usd is not None:
            marks[place]["probe_cost_usd"] = probe.usd
    refused = list[str]()
    for place, (query, answer) in enumerate(answers):
        refused += _written(query, answer, marks.get(place))
    _report(len(asked), refused)


def show_explained(times: StepTimes, asked: Iterable[Query], wanted: str, *, as_json: bool) -> None:
    """The breakdown of one query."""
    for query in asked:
        if str(query.fields.get("id", query.number)) == wanted:
            if query.configuration is None:
                raise BadInput(f"line {query.number}: {query.reason}", hint="correct that line")
            explanation = times.explain(query.configuration)
            if as_json:
                render.print_json({**query.fields, "explanation": asdict(explanation)})
            else:
                render.show(_document(query.configuration, explanation))
            return
    raise BadInput(f"no query has the id {wanted!r}.", hint="without ids, name the number of a line, from 1")
