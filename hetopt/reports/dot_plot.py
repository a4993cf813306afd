"""Equally likely runs as dots over a logarithmic axis, beside a limit: what keeps it can be counted.

Kay et al. (CHI 2016) found that people decide better by such quantile dot plots than by an interval or a probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hetopt.core import formatting
from hetopt.reports.front_plot import LogAxis

WIDTH, RADIUS = 200, 4.2


def dot_plot(
    values: Sequence[float], limit: float, axis: LogAxis, *, what: str, limit_name: str, say: formatting.Say
) -> str:
    """An SVG element; empty where there is no run.

    Args:
        values: of equally likely runs, ascending.
        limit: that they should keep.
        axis: shared by the plots that are compared.
        what: the values are.
        limit_name: as people call it.
        say: how values are told.
    """
    if not values:
        return ""
    columns = int(WIDTH / (2 * RADIUS))
    kept = sum(value <= limit for value in values)
    # The line lies between two columns, so that no dot lies on it or beyond it.
    edge = min(max(round(axis.share(limit) * columns), int(kept > 0)), columns - int(kept < len(values)))
    height = [0] * columns
    places = []
    for value in values:
        is_kept = value <= limit
        column = min(columns - 1, int(axis.share(value) * columns))
        column = min(column, edge - 1) if is_kept else max(column, edge)
        height[column] += 1
        places.append((column, height[column], is_kept))
    tall = 2 * RADIUS * max(height) + 4
    dots = "".join(
        f'<circle class="{"kept" if is_kept else "broken"}" cx="{(2 * column + 1) * RADIUS:.1f}" '
        f'cy="{tall - 2 - (2 * level - 1) * RADIUS:.1f}" r="{RADIUS - 0.7:.1f}"/>'
        for column, level, is_kept in places
    )
    said = (
        f"{what}: of {len(values)} equally likely runs, from {say(values[0])} to {say(values[-1])}, {kept} keep "
        f"the {limit_name} of {say(limit)}"
    )
    return (
        f'<svg class="runs" viewBox="0 0 {WIDTH} {tall:.1f}" role="img" aria-label="{escape(said)}">'
        f"<title>{escape(said)}</title>"
        f'<path class="ground" d="M0 {tall - 1:.1f}H{WIDTH}"/>{dots}'
        f'<path class="limit" d="M{2 * edge * RADIUS:.1f} 0V{tall:.1f}"/></svg>'
        f'<p class="of">{escape(what)}: {kept} of {len(values)} runs within {escape(say(limit))}</p>'
    )
