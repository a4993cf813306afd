"""Clusters compared, as a table or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from hetopt.cli import render
from hetopt.core import formatting

if TYPE_CHECKING:
    from hetopt.optimizer.recommendation.ranking import Ranking


def show(ranking: Ranking, *, as_json: bool) -> None:
    """The clusters, quickest first, and what their figures do not say."""
    if as_json:
        render.print_json({"basis": ranking.basis, "clusters": [asdict(one) for one in ranking.clusters]})
        return
    render.line("How clusters compare for the same progress", style="bold")
    render.table(
        ["machines", "batch", "compression", "step", "an hour", "time", "cost"],
        [
            [
                f"{one.machines} × {one.instance_type} ({one.market})",
                formatting.count(one.global_batch_size),
                formatting.compression(one.compressor, one.ratio),
                formatting.duration(one.step_time_s),
                formatting.usd(one.usd_per_hour),
                f"{one.time:.2f} x",
                f"{one.cost:.2f} x",
            ]
            for one in ranking.clusters
        ],
        numbers={"batch", "step", "an hour", "time", "cost"},
        caption="time over the quickest, cost over the cheapest",
    )
    widest = max((one.spread for one in ranking.clusters), default=1.0)
    render.bullet(f"Steps are {ranking.basis}.")
    render.bullet(f"Each time may be off by a factor of {widest:.1f} (90 %), much of it the same for all clusters.")
    render.bullet("For a plan with a budget, give the run's length with --epochs or --steps.")
