"""A plan's Pareto front, drawn on logarithmic axes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hetopt.core import formatting
from hetopt.optimizer.plan import Plan
from hetopt.reports.chart import Scale

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 26, 50

Place = tuple[float, float]


def front_svg(plan: Plan) -> str:
    """Return all plans as SVG: a dot a plan, the front a line, the chosen one marked, its 90 % interval a cross.

    Budget and deadline are drawn where they lie within the axes.
    """
    points = [candidate.prediction.medians for candidate in plan.plans]
    prediction = plan.chosen.prediction
    times = log_scale([*(t for t, _ in points), prediction.total_s.low, prediction.total_s.high])
    costs = log_scale([*(c for _, c in points), prediction.cost_usd.low, prediction.cost_usd.high])

    def at(place: Place) -> Place:
        return (
            LEFT + times.share(place[0]) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - costs.share(place[1]) * (HEIGHT - TOP - BOTTOM),
        )

    label = (
        f"Time and cost of {len(points)} plans, this one among them: {formatting.duration(prediction.total_s.value)}, "
        f"{formatting.usd(prediction.cost_usd.value)}. The table below has the figures."
    )
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">',
        f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="var(--line)"/>',
    ]
    for time_s, cost_usd, anchor in ((times.low, costs.low, "start"), (times.high, costs.high, "end")):
        x, y = at((time_s, cost_usd))
        parts += [
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="{anchor}">',
            f"{formatting.duration(time_s)}</text>",
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{formatting.usd(cost_usd)}</text>',
        ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(other.prediction.medians) for other in plan.pareto))
    parts.append(f'<polyline points="{path}" fill="none" stroke="var(--c)" stroke-dasharray="3 3"/>')
    for candidate, place in zip(plan.plans, points, strict=True):
        x, y = at(place)
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="var(--c)"><title>{escape(str(candidate))}</title></circle>'
        )
    x, y = at(prediction.medians)
    (left, low), (right, high) = (
        at((prediction.total_s.low, prediction.cost_usd.low)),
        at((prediction.total_s.high, prediction.cost_usd.high)),
    )
    parts += [
        f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--accent)"/>',
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="var(--accent)"/>',
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="var(--accent)">',
        f"<title>{escape(str(plan.chosen))}</title></circle>",
    ]
    for limit, across in ((plan.goal.budget_usd, True), (plan.goal.deadline_s, False)):
        parts += _limit(limit, costs if across else times, across=across, name="budget" if across else "deadline")
    parts += [
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">total time, log scale →</text>',
        '<text x="4" y="16">cost, log scale ↑</text></svg>',
    ]
    return "\n".join(parts)


def log_scale(values: Sequence[float]) -> Scale:
    """Return a logarithmic scale with a little room at both ends.

    Values up to 0 are left out; without others the scale is around 1.
    """
    known = [value for value in values if value > 0] or [1.0]
    return Scale(low=min(known) / 1.15, high=max(known) * 1.15, logarithmic=True)


def _limit(limit: float | None, axis: Scale, *, across: bool, name: str) -> list[str]:
    """Return a dashed line with its name where a limit lies inside the picture; else, and of no limit, nothing.

    ``across``: the line is horizontal, of a limit on the axis that goes up.
    """
    if limit is None or not axis.low < limit < axis.high:
        return []
    x = LEFT + axis.share(limit) * (WIDTH - LEFT - RIGHT)
    y = HEIGHT - BOTTOM - axis.share(limit) * (HEIGHT - TOP - BOTTOM)
    line, at = (f"M{LEFT} {y:.1f}H{WIDTH - RIGHT}", (float(WIDTH - RIGHT), y - 4))
    if not across:
        line, at = f"M{x:.1f} {TOP}V{HEIGHT - BOTTOM}", (x - 4, float(TOP + 10))
    return [
        f'<path d="{line}" fill="none" stroke="var(--warn)" stroke-dasharray="6 4"/>',
        f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" text-anchor="end">{name}</text>',
    ]
