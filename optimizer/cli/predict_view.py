"""One predicted step as a person reads it: what it is made of, and why its interval is as wide as it is."""

from __future__ import annotations

from collections import Counter

from hetopt.optimizer import words
from hetopt.optimizer.cli import render
from hetopt.optimizer.step_model.model import Explanation
from hetopt.profiler.step_samples import Configuration

MOST_SOURCES = 6


def show(configuration: Configuration, explanation: Explanation) -> None:
    """The breakdown."""
    predicted = explanation.predicted
    nodes = Counter((node.type, node.workers) for node in configuration.nodes)
    described = " + ".join(
        f"{count} × {type_} ({workers} worker{'s' if workers > 1 else ''})" for (type_, workers), count in nodes.items()
    )
    sizes = sorted(set(configuration.batch_sizes))
    batch = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    render.line(f"{described}, local batch {batch}", style="bold")
    render.line(
        f"  {words.duration(predicted.step_time_s)} a step, 90 % between {words.duration(predicted.step_time_low_s)} "
        f"and {words.duration(predicted.step_time_high_s)}"
    )
    render.heading("Where the time goes")
    parts = {"computing": words.duration(explanation.compute_s) + ", the slowest worker"}
    if explanation.compress_s:
        parts["compressing"] = words.duration(explanation.compress_s)
    if configuration.workers > 1:
        parts["exchanging"] = (
            f"{words.duration(explanation.exchange_s)}, of which {words.duration(explanation.exposed_s)} "
            "are not hidden behind computing"
        )
    render.facts(parts)
    render.heading("Why the interval is so wide")
    for source, share in list(explanation.variances.items())[:MOST_SOURCES]:
        render.bullet(f"{words.share(share)}: {source}")
    workers, count = explanation.most_workers, explanation.most_nodes
    if configuration.workers > workers or len(configuration.nodes) > count:
        render.bullet(
            f"this is beyond what was measured: up to {words.count(workers)} worker{'s' if workers > 1 else ''} and "
            f"{words.count(count)} node{'s' if count > 1 else ''}"
        )
    for name, basis in explanation.relatives.items():
        render.bullet(f"{name} was not measured: {basis}")
    if explanation.priors:
        render.heading("Not measured, but believed")
        for about in explanation.priors:
            render.bullet(about)
