"""Writes the pages of the documentation that are made from the code: ``python docs/generated.py``.

Commands from their own help, measurements (here and in the README) from the committed results, and the difference
between the two forms of the example script. A test compares them with what is committed.
"""

from __future__ import annotations

import difflib
import json
import os
import string
import textwrap
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
README = DOCS.parent / "README.md"
RESULTS = DOCS.parent / "benchmarks" / "results"
SCRIPT = DOCS.parent / "examples" / "script"
WIDTH = 100

HEADLINES = {
    "newcomer": "From a copy of the repository to the first report, by [ten minutes](docs/quickstart.md): "
    "{total_s:.0f} s. hetopt's own part is {own_s:.0f} s, the rest installs packages",
    "command_line": "A plan over the whole catalogue, as a whole process: {recommend_s:.1f} s; `hetopt --help`: "
    "{help_s:.2f} s; an interpreter that does nothing: {python_start_s:.3f} s",
    "search": "Plans of two machine types are at worst {mixes_regret_worst:.2%} from the best, by enumeration",
    "prediction": "Steps on larger clusters of GPUs than the two nodes that were profiled are {no_probe_median:.1%} "
    "off in the median (the published goodput model, by its authors' code: {no_probe_median_adaptdl:.0%}), "
    "{one_probe_median:.1%} after one probe of hetopt's choice ({one_probe_median_adaptdl:.1%}); run times of "
    "the demo are {demo_median_absolute_error:.1%} off, {demo_worst_absolute_error:.0%} at worst (by steps times "
    "the profiled step time {demo_median_absolute_error_by_hand:.0%})",
    "compressors": "Exact Top-k of 25 million gradients at 1% takes 1 / {topk_speedup:.0f} of `torch.topk`'s time",
    "balance": "Workers as unequal as 2, 17 and 20 cores train {speed_up_2_17_20:.1f} times as fast as with equal "
    "shares, {share_of_ideal_2_17_20:.0%} of what is possible; equal ones need {equal_workers_over_ddp_resnet20:.2f} "
    "of the time of DistributedDataParallel (ResNet-20)",
    "exchange": "Exchanges take {cost_model_median_error:.1%} more or less than their price in the median; what `auto` "
    "chooses takes at most {auto_over_best_fixed_worst_phase:.2f} times as long as the best choice in hindsight, while "
    "rates change (choices that cost over a tenth more steps are not counted; with them "
    "{auto_over_least_of_any_loss_worst_phase:.2f})",
    "sync": "SelSync with averages in 8 bits is {resnet_speed_up_at_5x:.1f} times as fast to BSP's quality where an "
    "exchange takes five times as long as computing, and {resnet_speed_up_at_20x:.1f} times where it takes twenty "
    "(ResNet sibling)",
    "streams": "On the most unequal of the published rates of streams, training is "
    "{speedup_on_the_most_unequal_rates:.1f} times as fast as synchronous training with equal batches",
    "chaos": "After a worker is killed the next step is done within {recovery_s:.1f} s; {real_failed:.0f} of "
    "{real_schedules:.0f} generated schedules of faults on real runs went wrong",
    "spot_rehearsal": "On a recorded spot cluster, replayed with hosts that die and return, training comes to "
    "{notice_of_oracle_0:.0%} of what one could who knew the recording, {sudden_of_oracle_0:.0%} where hosts die "
    "without notice, and under torchrun with snapshots to {torchrun_of_oracle_0:.0%}",
    "spot_replay": "Simulated on recorded spot pools, used by no command yet: a policy of least expected cost keeps "
    "deadlines for {cold_over_uniform_progress:.2f} times what the uniform-progress rule pays, and "
    "{cold_over_knowing:.2f} times what it would if the pool's rates were known",
    "ec2_in_a_box": "Renting, losing machines and ending on a simulated EC2 leaves {instances_left:.0f} machines "
    "behind; the ledger differs from the bill by {ledger_error:.2%}",
    "report_page": "The page of a run of 100,000 steps on 16 workers is made in {dense_page_s:.1f} s, or "
    "{usual_page_s:.1f} s with the usual log; watching a run takes {watch_core_share:.2%} of a core",
}
"""What the README tells of each benchmark, in this order; without committed figures, nothing."""


ABOUT_MEASURED = (
    "Made from `benchmarks/results/`, which holds the last run of each benchmark, in the form that is named. A goal is "
    "what it is to reach; a baseline ran in the same call. Figures are seconds, bytes, dollars or ratios, as their "
    "names say.",
    "**Where:** on a virtual machine with two cores. Links are those of network namespaces on it; workers that are "
    "faster or slower than it are real processes that wait until the machine they stand for would be done. No GPU was "
    "used unless the name of a benchmark or figure says so.",
    "**What never ran on real AWS:** everything that rents. Fleets, spot notices, interruptions, boot by user data, "
    "buckets, ledger and bill are tested against a local process that answers as AWS does (moto), and on network "
    "namespaces that boot by the real user data. Never seen are therefore how long a real machine takes to boot and "
    "install, the capacity of real pools, the throttling of a real account, links between real machines, the GPUs of "
    "rented machines, and an invoice. Prices and interruption bands are published figures with their dates.",
)


def commands() -> str:
    """The page of all commands, by their own help."""
    os.environ["COLUMNS"] = str(WIDTH)
    import click
    import typer.main

    from hetopt.optimizer.cli.main import app

    parts = ["# Commands", "", "Made from `hetopt COMMAND --help`. Options may stand before or behind arguments.", ""]

    def add(command: click.Command, path: list[str], parent: click.Context | None) -> None:
        context = click.Context(
            command, info_name=path[-1], parent=parent, terminal_width=WIDTH, max_content_width=WIDTH
        )
        if len(path) > 1:
            parts.extend([f"{'#' * len(path)} {' '.join(path)}", ""])
        text = command.get_help(context)
        parts.extend(["```text", "\n".join(line.rstrip() for line in text.splitlines()), "```", ""])
        for name, below in getattr(command, "commands", {}).items():
            if not below.hidden:
                add(below, [*path, name], context)

    add(typer.main.get_command(app), ["hetopt"], None)
    return "\n".join(parts)


def measured() -> str:
    """The page of all committed results."""
    parts = [
        "# Measured",
        "",
        *(line for paragraph in ABOUT_MEASURED for line in (textwrap.fill(paragraph, 119), "")),
    ]
    for path in sorted(RESULTS.glob("*.json")):
        told = json.loads(path.read_text(encoding="utf-8"))
        goals, baselines = told.get("goals", {}), told.get("baselines", {})
        verdict = "all goals met" if told["met"] else "not all goals met"
        figures = told["figures"].items()
        parts += [
            f"## {told['benchmark']}",
            "",
            f"`{_command(told)}`, {told['date']}, commit {told['commit']}: {verdict}.",
            *_other_parts(told),
            "",
            "| figure | value | goal |",
            "|---|---:|---|",
            *(f"| {name} | {_number(value)} | {_goal(goals.get(name, {}))} |" for name, value in figures),
            *(f"| baseline: {name} | {_number(value)} | |" for name, value in baselines.items()),
            "",
        ]
    return "\n".join(parts)


def headlines() -> str:
    """What the README tells of the committed results, a line each."""
    lines = []
    for name, template in HEADLINES.items():
        path = RESULTS / f"{name}.json"
        told = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"figures": {}, "baselines": {}}
        figures = {**told["figures"], **told["baselines"]}
        wanted = {field for _, field, _, _ in string.Formatter().parse(template) if field}
        if wanted <= set(figures):
            missed = "" if told["met"] else "; not all of its goals are met"
            claim = template.format(**figures).replace("%", " %")
            words = f"{claim} (`{_command(told)}`, {told['date']}{missed})."
            lines.append(textwrap.fill(words, 119, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines)


def conversion() -> str:
    """The difference between the script and its converted form, changed indentation aside."""
    before, after = ((SCRIPT / name).read_text(encoding="utf-8").splitlines()[1:] for name in ("before.py", "after.py"))
    matcher = difflib.SequenceMatcher(None, [line.strip() for line in before], [line.strip() for line in after], False)
    lines = []
    for group in matcher.get_grouped_opcodes(2):
        if lines:
            lines.append(" ...")
        for kind, first, last, start, end in group:
            if kind == "equal":
                lines += [f" {line}" for line in after[start:end]]
            else:
                lines += [f"-{line}" for line in before[first:last]] + [f"+{line}" for line in after[start:end]]
    count = sum(line[0] == "+" and bool(line[1:].strip()) for line in lines)
    return "\n".join(
        [
            f"A whole script, `examples/script/before.py`, and the {count} lines that `after.py` adds or changes",
            "(those that only move to the right aside):",
            "",
            "```diff",
            *(line.rstrip() for line in lines),
            "```",
        ]
    )


def pages() -> dict[Path, str]:
    """The text of every page that is made, or partly made, by its file."""
    own = DOCS / "your-own-code.md"
    return {
        DOCS / "commands.md": commands(),
        DOCS / "measured.md": measured(),
        own: _filled(own, "conversion", conversion()),
        README: _filled(README, "measured", headlines()),
    }


def _filled(page: Path, name: str, words: str) -> str:
    """The page with other words between the marks of this name."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    return before + begin + words + "\n" + end + rest.partition(end)[2]


def _command(told: dict[str, Any]) -> str:
    """What measured a result."""
    form = "--quick" if told["quick"] else None
    return " ".join(filter(None, ("python -m", f"benchmarks.{told['benchmark']}", told.get("asked"), form)))


def _other_parts(told: dict[str, Any]) -> list[str]:
    """Which parts of a result another commit measured, one line; none where all are of one."""
    measured_at = {
        part: one["commit"] for part, one in told.get("parts", {}).items() if one["commit"] != told["commit"]
    }
    named = ", ".join(f"{part} at {commit}" for part, commit in measured_at.items())
    return [f"Measured at another commit: {named}."] if named else []


def _number(value: float) -> str:
    return f"{value:,.4g}" if abs(value) < 1e6 else f"{value:.3e}"


def _goal(goal: dict[str, float]) -> str:
    return ", ".join(f"{kind.replace('_', ' ')} {_number(bound)}" for kind, bound in goal.items())


if __name__ == "__main__":
    for page, words in pages().items():
        page.write_text(words, encoding="utf-8")
