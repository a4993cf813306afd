"""What published systems claim, beside what their methods and hetopt's defaults came to here.

Without options the committed results answer; with ``--quick`` those benchmarks run again in their quick form first.
"""

from __future__ import annotations

import string
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks._claims import CLAIMS, Claim
from benchmarks._outcome import RESULTS, Results, figures_of, options, publish, run_benchmark

Figures = Mapping[str, Mapping[str, float]]
"""Of each benchmark by its name: figures and baselines."""


def figures_in(folder: Path) -> Figures:
    """What is written there of the benchmarks that claims name."""
    named = sorted({claim.benchmark for claim in CLAIMS if claim.benchmark is not None})
    return {name: found for name in named if (found := figures_of(name, folder))}


def filled(words: str, figures: Mapping[str, float]) -> str:
    """A claim's words with its figures; a form that lacks one of them says so."""
    wanted = {name for _, name, _, _ in string.Formatter().parse(words) if name}
    return (
        words.format(**figures).replace("%", " %").replace("  %", " %")
        if wanted <= set(figures)
        else "not in this form"
    )


def measured(claim: Claim, figures: Figures) -> tuple[str, str, str]:
    """Of the published method, of hetopt's default and of the best rival, in words."""
    own = figures.get(claim.benchmark or "", {})
    return filled(claim.theirs, own), filled(claim.ours, own), filled(claim.baseline, own)


def main() -> None:
    """Print a paragraph a claim."""
    asked = options(__doc__)
    with tempfile.TemporaryDirectory(prefix="hetopt-benchmark-") as folder:
        source = RESULTS
        if asked.quick:
            source = Path(folder)
            for name in figures_in(RESULTS):
                form = "--smoke" if asked.smoke else "--quick"
                command = [sys.executable, "-m", f"benchmarks.{name}", form, "--json", str(source / f"{name}.json")]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        figures = figures_in(source)
    results = Results()
    for claim in CLAIMS:
        theirs, ours, baseline = measured(claim, figures)
        print(f"{claim.system}: {claim.claim}")
        for name, words in (
            ("published", claim.published),
            ("measured", theirs),
            ("hetopt", ours),
            ("beside", baseline),
            (claim.how, claim.note),
        ):
            if words:
                print(f"  {name}: {words}")
    results.figures["claims"] = len(CLAIMS)
    results.goal("claims_answered", sum(claim.is_answered for claim in CLAIMS), at_least=len(CLAIMS))
    results.goal("systems", len({claim.system for claim in CLAIMS}), at_least=9)
    publish(results.outcome("reproduction", quick=asked.quick), asked.json_file)


if __name__ == "__main__":
    run_benchmark(main)
