"""All runs on one page: what goes on, what it costs and when it will be over, beside what was planned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hetopt.core import formatting
from hetopt.reports import html, status_document
from hetopt.reports.document import Block, Document, Drawing, Heading, Html, Line, Tile, Tiles

START = "hetopt launch plan.json --on local"
"""What makes the first run."""

REFRESH_S = 15
"""Between two looks of a browser without scripts."""

SCRIPT = """
(() => {
  const renew = async () => {
    if (document.hidden) return;
    const said = document.getElementById("live");
    try {
      const answer = await fetch(location.href, { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      const next = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
      const links = main => [...main.querySelectorAll("a")];
      const main = document.querySelector("main"), at = links(main).indexOf(document.activeElement);
      main.replaceWith(next);
      if (at >= 0 && links(next)[at]) links(next)[at].focus({ preventScroll: true });
      said.textContent = "live";
    } catch (problem) { said.textContent = "no longer live: the server does not answer"; }
  };
  setInterval(renew, 5000);
})();
"""
"""Puts what the server says every few seconds in place of what is shown; focus stays."""


def overview(facts: Sequence[Mapping[str, Any]], *, now_s: float) -> str:
    """Return the page of all runs, newest first; those that go on stand above the others."""
    if not facts:
        return page(
            "Runs", [Line("There are no runs yet. Start one, and it is shown here:"), Line(START, is_copied=True)]
        )
    going = [fact for fact in facts if fact["state"] in ("starting", "running")]
    rest = [fact for fact in facts if fact not in going]
    spent = math.fsum(fact["rental"]["spent_usd"] for fact in facts if fact.get("rental"))
    ends = [fact["left_s"] for fact in going if fact["left_s"] is not None]
    tiles = [
        Tile(name="running", value=str(len(going)), below=[f"of {len(facts)} runs"]),
        Tile(name="next one finishes", value=f"in {formatting.duration(min(ends))}" if ends else "-"),
        Tile(name="spent on rented machines", value=formatting.usd(spent), below=["all runs together"]),
    ]
    return page("Runs", [Tiles(tiles), Heading("Runs"), *status_document.runs([*going, *rest], now_s=now_s)])


def page(title: str, blocks: Sequence[Block]) -> str:
    """Return a page of the dashboard."""
    navigation = (
        '<nav aria-label="pages"><ul><li><a href="/">all runs</a></li>'
        '<li><a href="/metrics">metrics for Prometheus</a></li></ul></nav>'
    )
    return html.page(
        Document(
            kind="hetopt",
            title=title,
            about=[Drawing(navigation)],
            blocks=blocks,
            below=Html('<span id="live" role="status">live</span>; nothing can be changed from here.'),
            head=f'<noscript><meta http-equiv="refresh" content="{REFRESH_S}"></noscript>\n',
            script=f"\n<script>{SCRIPT}</script>",
        )
    )
