"""One predicted step as a person reads it: what it is made of, and why its interval is as wide as it is."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hetopt.cli import render
from hetopt.core import formatting
from hetopt.core.step_samples import Configuration

if TYPE_CHECKING:
    from hetopt.optimizer.step_time.model import Explanation

MOST_SOURCES = 6


def show(configuration: Configuration, explanation: Explanation) -> None:
    """Print the predicted step time of one configuration and the terms that it is made of."""
    predicted = explanation.predicted
    nodes = Counter((node.type, node.workers) for node in configuration.nodes)
    described = " + ".join(
        f"{count} × {type_} ({workers} worker{'s' if workers > 1 else ''})" for (type_, workers), count in nodes.items()
    )
    sizes = sorted(set(configuration.batch_sizes))
    batch = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    render.line(f"{described}, local batch {batch}", style="bold")
    render.line(
        f"  {formatting.duration(predicted.step_time_s)} a step, 90 % between "
        f"{formatting.duration(predicted.step_time_low_s)} "
        f"and {formatting.duration(predicted.step_time_high_s)}"
    )
    render.heading("Where the time goes")
    parts = {"computing": formatting.duration(explanation.compute_s) + ", the slowest worker"}
    if explanation.compress_s:
        parts["compressing"] = formatting.duration(explanation.compress_s)
    if configuration.workers > 1:
        parts["exchanging"] = (
            f"{formatting.duration(explanation.exchange_s)}, of which {formatting.duration(explanation.exposed_s)} "
            "are not hidden behind computing"
        )
    render.facts(parts)
    render.heading("Why the interval is so wide")
    for source, share in list(explanation.variances.items())[:MOST_SOURCES]:
        render.bullet(f"{formatting.share(share)}: {source}")
    workers, count = explanation.most_workers, explanation.most_nodes
    if configuration.workers > workers or len(configuration.nodes) > count:
        render.bullet(
            f"this is beyond what was measured: up to {formatting.count(workers)} worker{'s' if workers > 1 else ''} "
            "and "
            f"{formatting.count(count)} node{'s' if count > 1 else ''}"
        )
    for name, basis in explanation.relatives.items():
        render.bullet(f"{name} was not measured: {basis}")
    if explanation.priors:
        render.heading("Not measured, but believed")
        for about in explanation.priors:
            render.bullet(about)
