"""Writes the pages of the documentation that are made from the code: ``python docs/generated.py``.

Commands from their own help, measurements (here and in the README) from the committed results, and the difference
between the two forms of the example script. A test compares them with what is committed.
"""

from __future__ import annotations

import difflib
import json
import os
import string
import subprocess
import textwrap
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
README = DOCS.parent / "README.md"
BENCHMARKS = DOCS.parent / "benchmarks"
RESULTS = BENCHMARKS / "results"
AGES = BENCHMARKS / "ages.json"
"""How many commits there were since each result was measured, as counted when the pages were last made."""
SCRIPT = DOCS.parent / "examples" / "script"
WIDTH = 100

HEADLINES = {
    "newcomer": "From a copy of the repository to the first report, by [ten minutes](docs/quickstart.md): "
    "{total_s:.0f} s. hetopt's own part is {own_s:.0f} s, the rest installs packages",
    "command_line": "A plan over the whole catalogue, as a whole process: {recommend_s:.1f} s; `hetopt --help`: "
    "{help_s:.2f} s; an interpreter that does nothing: {python_start_s:.3f} s",
    "search": "By hetopt's own model of time and cost, plans of two machine types cost at worst "
    "{mixes_regret_worst:.2%} more than the best, by enumeration; what a wrong model costs in money is not in this "
    "figure",
    "prediction": "Steps on a GPU cluster that took no part in the fit are {no_probe_median_cluster_held_out:.0%} off "
    "in the median without a measurement there (the 90% intervals held {lowest_coverage_cluster_held_out:.0%} of the "
    "steps of the worst cluster), and {one_probe_median_cluster_held_out:.1%} after one (Ernest "
    "{one_probe_median_ernest:.1%}, AdaptDL {one_probe_median_adaptdl:.1%}). On the six public clusters from which "
    "the priors' shapes were read off: {no_probe_median:.1%} without one (Ernest {no_probe_median_ernest:.1%}, "
    "AdaptDL {no_probe_median_adaptdl:.0%}). Run times of the demo are {demo_median_absolute_error:.1%} off, "
    "{demo_worst_absolute_error:.0%} at worst (by steps times the profiled step time "
    "{demo_median_absolute_error_by_hand:.0%})",
    "convergence": "Steps to a target at a batch size that was left out are {bert_levels_median_error:.1%} (BERT), "
    "{cifar10_levels_median_error:.1%} (CIFAR-10) and {ncf_levels_median_error:.1%} (NCF) off in the median "
    "(McCandlish's law alone {bert_levels_median_error_mccandlish:.1%}, {cifar10_levels_median_error_mccandlish:.1%} "
    "and {ncf_levels_median_error_mccandlish:.1%}); from one run and its gradient noise, "
    "{bert_smallest_median_error:.1%}, "
    "{cifar10_smallest_median_error:.1%} and {ncf_smallest_median_error:.1%} (Pollux's gain formula "
    "{bert_smallest_median_error_gain:.1%}, {cifar10_smallest_median_error_gain:.1%} and "
    "{ncf_smallest_median_error_gain:.1%})",
    "topk_selection": "Exact Top-k of 25 million gradients takes, in CPU time, 1 / "
    "{cpu_speedup_over_numpy_partition_0_01:.1f} of one line of NumPy (`np.partition`) and 1 / "
    "{cpu_speedup_over_torch_topk_0_01:.1f} of `torch.topk` where 1% is kept, 1 / "
    "{cpu_speedup_over_numpy_partition_0_1:.1f} and 1 / {cpu_speedup_over_torch_topk_0_1:.1f} where 10% is",
    "balance": "On emulated workers of 2, 17 and 20 cores with unlimited links, local batch sizes in proportion to "
    "speed train {speed_up_2_17_20:.1f} times as fast as equal ones, {share_of_ideal_2_17_20:.0%} of the ideal (with "
    "speeds known beforehand {speed_up_static_2_17_20:.1f}, by the rule of proportion "
    "{speed_up_proportional_2_17_20:.1f}). Equal workers need {equal_workers_over_ddp_small_network:.2f}, "
    "{equal_workers_over_ddp_resnet20:.2f} and {equal_workers_over_ddp_4_m_parameters:.2f} of the time of "
    "DistributedDataParallel (a small network, ResNet-20, 4 million parameters)",
    "transfer": "The throughput of a job on a GPU where it was never run, from one other GPU, is "
    "{one_measured_median:.0%} off in the median and {one_measured_p90:.0%} in one of ten cases, jobs left out (by the "
    "median ratio of other jobs {median_by_median_ratio_of_other_jobs:.0%} and "
    "{p90_by_median_ratio_of_other_jobs:.0%}, by memory bandwidth "
    "{median_by_bandwidth:.0%} and {p90_by_bandwidth:.0%}); whole kinds of job left out "
    "{kind_held_out_median:.0%} and {kind_held_out_p90:.0%}; 90 % intervals held {one_measured_coverage:.0%}",
    "exchange": "Median error of predicted communication time: {cost_model_median_error:.1%}. While link rates change,"
    " a step of `auto` takes at most {auto_over_least_of_any_loss_worst_phase:.2f} times as long as the best fixed "
    "choice in hindsight, {auto_over_best_fixed_with_settling_worst_phase:.2f} times with the time it needs to find "
    "out ({auto_over_best_fixed_worst_phase:.2f} where choices that by its own estimate cost over a tenth more steps "
    "are left out)",
    "sync": "SelSync with a threshold that hetopt chooses (`auto`, a share of 0.2), averages in 8 bits and half as "
    "many steps more reaches the quality of BSP (32 bits, no more steps) {resnet_speed_up_at_5x:.1f} times as fast "
    "where communication takes five times as long as computing, {resnet_speed_up_at_20x:.1f} times where it takes "
    "twenty, {resnet_speed_up_at_1x:.2f} where both take as long, and {resnet_speed_up_at_0_1x:.2f} to "
    "{lstm_speed_up_at_0_1x:.2f}, so slower, where computing dominates (small siblings of ResNet, VGG and an LSTM; "
    "times composed of measured steps). SelSync with the published threshold of 0.3 did not reach that quality on any",
    "streams": "Training on samples as they arrive, with the published rates of ScaDLES, is "
    "{uniform_38_24_speedup:.1f}, {normal_64_24_speedup:.2f}, {uniform_300_112_speedup:.2f} and "
    "{normal_256_28_speedup:.2f} times as fast as synchronous training with equal batches (rates of 38 ± 24, 64 ± 24,"
    " 300 ± 112 and 256 ± 28 a second; published: 1.89, 3.29, 1.15 and 1.42)",
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
    "names say. Results stay as they are until they are measured again: each says how many commits of the repository "
    "came after the one that was measured.",
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

    from hetopt.cli.main import app

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
    ages = _ages()
    if unmeasured := sorted({path.stem for path in BENCHMARKS.glob("[!_]*.py")} - {path.stem for path in _results()}):
        parts += [f"**Without a committed result:** {', '.join(unmeasured)}.", ""]
    for path in _results():
        told = json.loads(path.read_text(encoding="utf-8"))
        goals, baselines = told.get("goals", {}), told.get("baselines", {})
        verdict = "all goals met" if told["met"] else "not all goals met"
        figures = told["figures"].items()
        parts += [
            f"## {told['benchmark']}",
            "",
            f"`{_command(told)}`, {_when(told, ages)}: {verdict}.",
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
    ages = _ages()
    for name, template in HEADLINES.items():
        path = RESULTS / f"{name}.json"
        told = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"figures": {}, "baselines": {}}
        figures = {**told["figures"], **told["baselines"]}
        wanted = {field for _, field, _, _ in string.Formatter().parse(template) if field}
        if wanted <= set(figures):
            missed = "" if told["met"] else "; not all of its goals are met"
            claim = template.format(**figures).replace("%", " %")
            words = f"{claim} (`{_command(told)}`, {_when(told, ages)}{missed})."
            lines.append(textwrap.fill(words, 119, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines)


def conversion(prefix: str = "") -> str:
    """The difference between a script and its converted form, changed indentation aside."""
    names = (f"{prefix}train.py", f"{prefix}train_hetopt.py")
    before, after = ((SCRIPT / name).read_text(encoding="utf-8").splitlines()[1:] for name in names)
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
            f"A whole script, `examples/script/{names[0]}`, and the {count} lines that `{names[1]}` adds or changes",
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
        DOCS / "from-ddp.md": _filled(DOCS / "from-ddp.md", "ddp", conversion("ddp_")),
        README: _filled(README, "measured", headlines()),
    }


def _filled(page: Path, name: str, words: str) -> str:
    """The page with other words between the marks of this name."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    return before + begin + words + "\n" + end + rest.partition(end)[2]


def _results() -> list[Path]:
    return sorted(RESULTS.glob("*.json"))


def _when(told: dict[str, Any], ages: dict[str, int]) -> str:
    """Day and commit of a result, and how many commits came after it."""
    since = ages.get(told["benchmark"], 0)
    behind = f", {since} commit{'s' * (since != 1)} ago" if since else ""
    return f"{told['date']}, commit {told['commit']}{behind}"


def _ages() -> dict[str, int]:
    return dict(json.loads(AGES.read_text(encoding="utf-8"))["commits_since"])


def count_ages() -> None:
    """Write how many commits came after the one that each result measured; nothing outside a repository."""
    since = {}
    for path in _results():
        told = json.loads(path.read_text(encoding="utf-8"))
        counted = subprocess.run(
            ["git", "rev-list", "--count", f"{told['commit'].removesuffix('-dirty')}..HEAD"],
            cwd=DOCS,
            capture_output=True,
            text=True,
            check=False,
        )
        if counted.returncode != 0:
            return
        since[told["benchmark"]] = int(counted.stdout)
    AGES.write_text(json.dumps({"commits_since": since}, indent=2) + "\n", encoding="utf-8")


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
    count_ages()
    for page, words in pages().items():
        page.write_text(words, encoding="utf-8")
