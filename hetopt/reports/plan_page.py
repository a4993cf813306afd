"""A plan as one HTML page that needs nothing else: front, costs, shares, what would change it, what was rejected.

No script, no font, no picture from elsewhere: a page that is sent to somebody shows what it showed here. Every figure
stands beside its words as ``data-value``, in SI units or dollars, as the plan's JSON has it.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from html import escape

from hetopt.core import formatting
from hetopt.optimizer.plan import Candidate, Choice, Plan, Range, Sensitivity
from hetopt.reports.front_plot import front_svg

STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --soft: #5b6570; --paper: #ffffff; --line: #d5dae0; --mark: #0b62c4;
  --other: #8a95a1; --warm: #b4540a; --a: #0b62c4; --b: #2a8f6d; --c: #b4540a; --d: #7a4fb5; --e: #8a95a1; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #9aa5b1; --paper: #15191d; --line: #343c45;
  --mark: #6db3ff; --other: #76818d; --warm: #f0a35c; --a: #6db3ff; --b: #5cc7a1; --c: #f0a35c; --d: #b998ee;
  --e: #76818d; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
.soft { color: var(--soft); } .key { display: flex; flex-wrap: wrap; gap: 1rem 2.5rem; margin: 1.2rem 0; }
.key b { display: block; font-size: 1.35rem; font-weight: 600; }
.key div > span { color: var(--soft); font-size: .9rem; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .25rem .8rem .25rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top; } th { color: var(--soft); font-weight: 500; }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.chosen { font-weight: 600; color: var(--mark); } li { margin: .3rem 0; } svg { width: 100%; height: auto; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; } .bar { display: flex; height: 1.4rem; }
.bar i { display: block; min-width: 1px; } .wide { overflow-x: auto; }
.risk { color: var(--warm); font-weight: 600; } .advice { color: var(--mark); font-weight: 600; font-size: 1.1rem; }
.ways { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .8rem; }
.way { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem; }
.way.own { border: 2px solid var(--mark); } .way h3 { font-size: .95rem; margin: 0 0 .3rem; color: var(--soft); }
.way.own h3 { color: var(--mark); } .way p { margin: .15rem 0; } .way b { font-size: 1.1rem; }
.way .dots { width: 10rem; margin: .2rem 0; } .way .soft { font-size: .85rem; }
pre { background: color-mix(in srgb, var(--line) 40%, transparent); padding: .5rem .8rem; overflow-x: auto; }
@media print { body { margin: 0; max-width: none; } .way { break-inside: avoid; } }
@media (max-width: 40rem) { body { padding: 0 .6rem; } .n { white-space: normal; } .key { gap: .7rem 1.6rem; }
  table { font-size: .82rem; } td, th { padding-right: .45rem; overflow-wrap: break-word; }
  .front { overflow-x: auto; } .front svg { min-width: 32rem; } }
"""
_COLOURS = ("a", "b", "c", "d", "e")


def page(plan: Plan) -> str:
    """The plan as one HTML document that needs no other file."""
    told = plan.chosen.prediction
    title = f"{plan.run.task}: {plan.chosen.in_words}"
    body = [
        f"<h1>{escape(plan.chosen.in_words)}</h1>",
        f'<p class="soft">{escape(plan.run.task)}, {escape(_asked(plan))}. '
        f"Made by hetopt {escape(plan.hetopt_version)}, {escape(plan.created[:10])}.</p>",
        *(
            []
            if plan.risk is None
            else [f'<p class="risk">RISK: {escape(plan.risk)}; else it is stopped unfinished.</p>']
        ),
        *([] if plan.advice is None else [f'<p class="advice">{escape(plan.advice)}</p>']),
        '<div class="key">',
        _key("cost", "cost_usd", told.cost_usd, formatting.usd),
        _key("time", "total_s", told.total_s, formatting.duration),
        *_sure(plan.insight),
        "</div>",
        *_choices(plan),
        "<h2>Plans that no other beats in both time and cost</h2>",
        f'<div class="front">{front_svg(plan)}</div>',
        _front_table(plan),
        "<h2>Where the money goes</h2>",
        cost_terms(plan.chosen),
        "<h2>What each worker does</h2>",
        _shares(plan.chosen),
        *_insight(plan.insight),
        "<h2>Why this one</h2>",
        "<ul>",
        *(f"<li>{escape(sentence)}</li>" for sentence in plan.explanation),
        "</ul>",
        f'<p class="soft">Searched: {escape(plan.searched)}.</p>',
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def launch_command(plan: Plan, plan_file: str) -> str:
    """What starts a plan: here, where nothing should be rented."""
    where = "ec2 --dry-run" if plan.advice is None else "local"
    script = f" -- {shlex.join(plan.profile.job.script)}" if plan.profile.job.script else ""
    return f"hetopt launch {plan_file} --on {where}{script}"


def figure(name: str, value: float, say: formatting.Say) -> str:
    """A number in words, with its value beside it."""
    return f'<span data-figure="{name}" data-value="{value!r}">{escape(say(value))}</span>'


def _choices(plan: Plan) -> Iterable[str]:
    """The ways to go side by side, what decided, and the command that starts the plan."""
    if plan.choices:
        yield "<h2>The ways to go</h2>"
        cells = "".join(_choice(way, is_chosen=way.candidate == plan.chosen) for way in plan.choices)
        yield f'<div class="ways">{cells}</div>'
        yield '<p class="soft">Each dot is one of twenty simulated runs; full ones keep the limits.</p>'
    if plan.reasons:
        yield f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in plan.reasons)}</ul>"
    yield f"<pre>{escape(launch_command(plan, 'plan.json'))}</pre>"


def _choice(way: Choice, *, is_chosen: bool) -> str:
    """One way as a card: name, figures with their intervals, machines, quotas."""
    groups = () if way.candidate is None else way.candidate.groups
    machines = "this machine" if way.candidate is None else way.candidate.in_words
    have = "" if way.candidate is None else way.candidate.hardware_in_words
    quotas = "; ".join(f"{need.vcpus} vCPUs of {need.name} (a new account: {need.new_account})" for need in way.quotas)
    rests = "measured" if way.candidate is None else " and ".join(sorted({group.evidence for group in groups}))
    took, paid = way.total_s, way.cost_usd
    span = (
        "" if way.candidate is None else f'<span class="soft">{escape(formatting.usd_span(paid.low, paid.high))}</span>'
    )
    return (
        f'<section class="way{" own" if is_chosen else ""}"><h3>{escape(" / ".join(way.names))}</h3>'
        f"<p><b>{figure('way_total_s', took.value, formatting.duration)}</b> "
        f'<span class="soft">{escape(formatting.duration_span(took.value, took.low, took.high))}</span></p>'
        f"<p><b>{figure('way_cost_usd', paid.value, formatting.usd)}</b> {span}</p>"
        f"{_dots(way.chance)}<p>{escape(machines)}</p>"
        f'<p class="soft">{escape(", ".join(filter(None, [have, f"step time {rests}"])))}</p>'
        f'<p class="soft">{escape(quotas)}</p></section>'
    )


DOTS = 20


def _dots(chance: float | None) -> str:
    """A probability as so many dots of twenty, rounded down."""
    if chance is None:
        return ""
    kept = int(chance * DOTS + 1e-9)
    dots = "".join(
        f'<circle cx="{8 * place + 4}" cy="4" r="3" fill="{"var(--mark)" if place < kept else "none"}" '
        'stroke="var(--mark)"/>'
        for place in range(DOTS)
    )
    said = f"{formatting.chance(chance)} of simulated runs keep the limits"
    return (
        f'<svg class="dots" viewBox="0 0 {8 * DOTS} 8" role="img" aria-label="{said}"><title>{said}</title>{dots}</svg>'
    )


def _asked(plan: Plan) -> str:
    goal = plan.goal
    limits = [f"budget {formatting.usd(goal.budget_usd)}"] if goal.budget_usd is not None else []
    limits += [f"deadline {formatting.duration(goal.deadline_s)}"] if goal.deadline_s is not None else []
    ends = f"to {goal.target_metric} {goal.target_value:g}" if goal.ends == "target" else f"{goal.amount:g} {goal.ends}"
    return ", ".join([ends, *limits])


def _key(name: str, key: str, value: Range, say: formatting.Say) -> str:
    return (
        f"<div><span>{name}</span><b>{figure(key, value.value, say)}</b>"
        f"<span>{figure(f'{key}_low', value.low, say)} to {figure(f'{key}_high', value.high, say)} "
        "with 90 % probability</span></div>"
    )


def _sure(seen: Sensitivity | None) -> Iterable[str]:
    if seen is None:
        return
    if seen.chance is not None:
        yield (
            f"<div><span>limits kept</span><b>{figure('chance', seen.chance, _percent)}</b>"
            "<span>of simulated runs</span></div>"
        )
    if seen.gap is not None:
        yield (
            f"<div><span>a better mix</span><b>{figure('gap', seen.gap, _fine_percent)} at most</b>"
            "<span>proved by search of all</span></div>"
        )


def _percent(share: float) -> str:
    return f"{share:.0%}"


def _fine_percent(share: float) -> str:
    return f"{share:.1%}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: frozenset[int] = frozenset()) -> str:
    """An HTML table; its cells are HTML already. ``numbers`` are the columns that are aligned right."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}{' class=n' if i in numbers else ''}>{cell}</{tag}>" for i, cell in enumerate(row))

    body = "".join(f"<tr>{cells('td', row)}</tr>\n" for row in rows)
    return f'<div class="wide"><table>\n<tr>{cells("th", columns)}</tr>\n{body}</table></div>'


def _front_table(plan: Plan) -> str:
    rows = []
    for other in plan.pareto:
        name = escape(other.in_words)
        rows.append(
            [
                figure("front_total_s", other.prediction.total_s.value, formatting.duration),
                figure("front_cost_usd", other.prediction.cost_usd.value, formatting.usd),
                f'<span class="chosen">{name} (this plan)</span>' if other == plan.chosen else name,
                formatting.count(other.global_batch_size),
                escape(formatting.exchange(other.compression, other.sync)),
            ]
        )
    return table(["time", "cost", "machines", "batch", "compression"], rows, numbers=frozenset({0, 1, 3}))


def cost_terms(chosen: Candidate) -> str:
    """The bill of a plan as a bar and a table."""
    terms = chosen.prediction.cost_terms
    total = math.fsum(term.usd for term in terms) or 1.0
    parts = "".join(
        f'<i style="width:{100 * term.usd / total:.2f}%;background:var(--{_COLOURS[min(k, 4)]})" '
        f'title="{escape(term.name)}"></i>'
        for k, term in enumerate(terms)
    )
    rows = [
        [
            f"{swatch(_COLOURS[min(k, 4)])} {escape(term.name)}",
            figure("term_usd", term.usd, formatting.usd),
            escape(term.basis),
        ]
        for k, term in enumerate(terms)
    ]
    return f'<div class="bar">{parts}</div>' + table(["for", "USD", "how"], rows, numbers=frozenset({1}))


def swatch(colour: str) -> str:
    """A small square of one of the page's colours, for legends."""
    return f'<svg viewBox="0 0 9 9" style="width:.7rem"><rect width="9" height="9" fill="var(--{colour})"/></svg>'


def _shares(chosen: Candidate) -> str:
    most = max(max(group.local_batch_sizes) for group in chosen.groups)
    rows = []
    for group in chosen.groups:
        low, high = min(group.local_batch_sizes), max(group.local_batch_sizes)
        share = f"{low}" if low == high else f"{low} to {high}"
        rows.append(
            [
                f"{len(group.local_batch_sizes)} on {group.machines} × {escape(group.instance_type)}",
                f'<span data-figure="largest_share" data-value="{high}">{share}</span>',
                f'<div class="bar" style="min-width:10rem"><i style="width:{100 * high / most:.1f}%;'
                'background:var(--a)"></i></div>',
                escape(group.evidence),
                formatting.usd(group.price_usd_per_hour) + (" (estimate)" if group.price_is_estimate else ""),
            ]
        )
    columns = ["workers", "samples of a step, each", "", "step time is", "price an hour, each"]
    return table(columns, rows, numbers=frozenset({1}))


def _insight(seen: Sensitivity | None) -> Iterable[str]:
    if seen is None:
        return
    yield "<h2>What would change it</h2>"
    yield table(
        ["if", "then"],
        [
            [escape(world.change), escape(world.verdict) if world.same else f"<b>{escape(world.verdict)}</b>"]
            for world in seen.scenarios
        ],
    )
    if seen.rejected:
        yield "<h2>Better plans that a limit rejects</h2>"
        yield table(
            ["machines", "time", "cost", "rejected by"],
            [
                [
                    escape(one.plan.machines),
                    figure("rejected_total_s", one.plan.total_s, formatting.duration),
                    figure("rejected_cost_usd", one.plan.cost_usd, formatting.usd),
                    escape(one.reason),
                ]
                for one in seen.rejected
            ],
            numbers=frozenset({1, 2}),
        )
