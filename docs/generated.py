"""Writes the pages of the documentation that are made from the code: ``python docs/generated.py``.

Commands from their own help, measurements (here and in the README) from the committed results, methods from their
registries, what is believed of AWS from where it stands in the code, and the difference between the two forms of the
example script. A test compares them with what is committed.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import os
import re
import string
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import _freshness
from benchmarks._claims import CLAIMS, Claim
from benchmarks._outcome import RESULTS, figures_of
from benchmarks.reproduction import figures_in
from benchmarks.reproduction import measured as measured_claim

DOCS = Path(__file__).resolve().parent
README = DOCS.parent / "README.md"
BENCHMARKS = DOCS.parent / "benchmarks"
AGES = BENCHMARKS / "ages.json"
"""How many commits there were since each result was measured, and lines changed of what it runs, as counted when the
pages were last made."""
REWRITTEN = 0.5
"""Lines added or taken away of what a benchmark runs, over those that it has, beyond which its figures are quoted as of
other code."""

SCRIPT = DOCS.parent / "examples" / "script"
WIDTH = 100

HEADLINES = {
    "decisions": "The cheapest cluster that meets a throughput, chosen for eight public jobs by predicted steps with "
    "one and two nodes profiled, costs {no_probe_extra_cost_hetopt:.1%} more worker-seconds than the best by the "
    "measured steps, and misses the throughput in {no_probe_missed_hetopt:.1%} of the choices (Ernest "
    "{no_probe_extra_cost_ernest:.1%} and {no_probe_missed_ernest:.1%}, as careful as hetopt, by the interval of its "
    "own errors, {no_probe_extra_cost_ernest_with_its_interval:.1%} and "
    "{no_probe_missed_ernest_with_its_interval:.1%}, Scavenger "
    "{no_probe_extra_cost_scavenger:.1%} and {no_probe_missed_scavenger:.1%}, AdaptDL "
    "{no_probe_extra_cost_pollux_adaptdl_own_code:.1%} and {no_probe_missed_pollux_adaptdl_own_code:.1%}; noise alone "
    "costs {extra_cost_seen_all_rows:.1%}); with one larger cluster measured {one_probe_extra_cost_hetopt:.1%} and "
    "{one_probe_missed_hetopt:.1%} (Ernest {one_probe_extra_cost_ernest:.1%} and {one_probe_missed_ernest:.1%}, "
    "AdaptDL {one_probe_extra_cost_pollux_adaptdl_own_code:.1%} and {one_probe_missed_pollux_adaptdl_own_code:.1%})",
    "newcomer": "From a copy of the repository to the first report, by the page *Ten minutes*: "
    "{total_s:.0f} s. hetopt's own part is {own_s:.0f} s, the rest installs packages",
    "command_line": "A plan over the whole catalogue, as a whole process: {recommend_s:.1f} s; `hetopt --help`: "
    "{help_s:.2f} s; an interpreter that does nothing: {python_start_s:.3f} s",
    "search": "By hetopt's own model of time and cost, plans of two machine types cost at worst "
    "{mixes_regret_worst:.2%} more than the best, by enumeration; what a wrong model costs in money is not in this "
    "figure",
    "chance": "The chance in a plan's headline: over {plans:.0f} random plans simulated event by event, limits are "
    "kept within {error_median:.1%} (median) as often as said, and {shortfall_worst_plan:.1%} less often at worst",
    "prediction": "Steps on up to 64 GPUs of a kind of cluster that the priors know nothing of, where one and two "
    "machines were profiled, are {no_probe_median_cluster_held_out:.1%} off in the median (Ernest "
    "{no_probe_median_ernest_every:.1%}, AdaptDL {no_probe_median_adaptdl_every:.0%}; the 90% intervals held "
    "{lowest_coverage_cluster_held_out:.0%} of the steps of the worst cluster), and "
    "{one_probe_median_cluster_held_out:.1%} after one larger layout was measured (AdaptDL "
    "{one_probe_median_adaptdl_every:.1%}, Ernest {one_probe_median_ernest_every:.1%}). On the six public "
    "folders from which the priors' shapes were read off: {no_probe_median:.1%} without that (Ernest "
    "{no_probe_median_ernest:.1%}, AdaptDL {no_probe_median_adaptdl:.0%}). Run times of the demo "
    "are {demo_median_absolute_error:.1%} off, "
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
    "{median_by_bandwidth:.0%} and {p90_by_bandwidth:.0%}); on AWS's GPUs {one_measured_aws_median:.1%} and "
    "{one_measured_aws_p90:.0%} (by the median ratio, which is better there, "
    "{aws_median_by_median_ratio_of_other_jobs:.1%} and {aws_p90_by_median_ratio_of_other_jobs:.0%}); whole kinds of "
    "job left out {kind_held_out_median:.0%} and {kind_held_out_p90:.0%}; 90 % intervals "
    "held {one_measured_coverage:.0%}",
    "exchange": "Median error of predicted communication time: {cost_model_median_error:.1%}. While link rates change,"
    " a step of `auto` takes at most {auto_over_least_of_any_loss_worst_phase:.2f} times as long as the best fixed "
    "choice in hindsight, {auto_over_best_fixed_with_settling_worst_phase:.2f} times with the time it needs to find "
    "out ({auto_over_best_fixed_worst_phase:.2f} where choices that by its own estimate cost over a tenth more steps "
    "are left out)",
    "auto": "On seven simulated networks, jobs under `--compression auto` take {over_best_mean:.2f} times as long "
    "to a target as with the best fixed choice in hindsight (geometric mean; median {over_best_median:.2f}, worst "
    "{over_best_worst:.2f}, where the best choice loses more steps than `auto` risks), and at worst "
    "{over_dense_worst:.3f} times as long as dense training. On the schedules of AR-Topk's paper it takes "
    "{schedule_c1_auto_over_best:.2f} and {schedule_c2_auto_over_best:.2f} times as long as that choice, AR-Topk's own "
    "rule {schedule_c1_scan_over_best:.2f} and {schedule_c2_scan_over_best:.2f}",
    "planned": "On three rehearsed clusters (equal machines, unequal ones, slow links) the planned workers, batch and "
    "exchange take {equal_planned_over_best:.2f}, {unequal_planned_over_best:.2f} and "
    "{slow_links_planned_over_best:.2f} times as long to the target as the best of {equal_configurations:.0f} other "
    "configurations, by measured steps and predicted numbers of them (all machines with whole gradients "
    "{equal_all_machines_dense_over_best:.2f}, {unequal_all_machines_dense_over_best:.2f} and "
    "{slow_links_all_machines_dense_over_best:.2f}); neither precision nor averages of parameters are among what was "
    "tried",
    "sync": "To the accuracy of BSP, within what its seeds differ by, on a small ConvNet with three seeds each: "
    "SelSync with a threshold that hetopt chooses (a share of 0.2), averages in 8 bits and half as many steps more "
    "is {convnet_speed_up_at_1x:.2f}, {convnet_speed_up_at_5x:.1f} and {convnet_speed_up_at_20x:.1f} times as fast "
    "as BSP in 32 bits where communication takes 1, 5 and 20 times as long as computing, "
    "{convnet_selsync_auto___int8_over_bsp_in_8_bits_at_5x:.1f} and "
    "{convnet_selsync_auto___int8_over_bsp_in_8_bits_at_20x:.1f} times as fast as BSP in 8 bits at 5 and 20, and "
    "{convnet_speed_up_at_0_1x:.2f}, so slower, where computing dominates. Local SGD every 8 steps, rounded and "
    "prolonged alike, is {convnet_local_sgd_8___int8_over_bsp_at_5x:.1f} and "
    "{convnet_local_sgd_8___int8_over_bsp_at_20x:.1f} times as fast as BSP in 32 bits at 5 and 20. SelSync with the "
    "published threshold of 0.3 and DiLoCo every 8 steps did not reach that accuracy",
    "time_to_target": "To the perplexity that dense sums end with at their best learning rate "
    "({final_perplexity_plain_ddp:.2f}; 0.05 more is enough), four workers with `auto` train a small LSTM "
    "on characters in {over_the_best_at_0_1x:.2f}, {over_the_best_at_1x:.2f}, {over_the_best_at_5x:.2f} and "
    "{over_the_best_at_20x:.2f} of the time of the best of twelve other ways, where communication takes 0.1, 1, 5 and "
    "20 times as long as computing, and end at {final_perplexity_hetopt_auto:.2f}. The best at each is local SGD "
    "every 8 steps with averages in 8 bits. Runs are short: the {measuring_before_the_first_step_s:.0f} s that "
    "`auto` measures for before its first step, as long as it then trains at 0.1 times "
    "({seconds_hetopt_auto_at_0_1x:.0f} s), are left out",
    "compression": "A small LSTM on characters (counts of three in a row come to "
    "{characters_perplexity_of_counts_of_3:.2f}, of four to {characters_perplexity_of_counts_of_4:.2f}, which none of "
    "these runs reaches), three seeds each: GraVAC on Top-k, deciding in every step, ends at "
    "a perplexity of {characters_final_perplexity_gravac_topk:.2f} with {characters_sent_over_dense_gravac_topk:.0%} "
    "of the bytes of dense training, which ends at {characters_final_perplexity_dense:.2f}; Top-k at 10x at "
    "{characters_final_perplexity_topk_10x:.2f} with {characters_sent_over_dense_topk_10x:.0%}, Accordion at "
    "{characters_final_perplexity_accordion:.2f} with {characters_sent_over_dense_accordion:.1%}. On a small ConvNet "
    "it has {convnet_gravac_topk_over_topk_10x_at_20x:.2f} of the speed of Top-k at 10x where communication takes 20 "
    "times as long as computing, and ends at an accuracy of {convnet_final_accuracy_gravac_topk:.3f} (Top-k "
    "{convnet_final_accuracy_topk_10x:.3f}, dense {convnet_final_accuracy_dense:.3f}). Of all that send "
    "less only quantising in two scales reaches, with every seed, what dense training ends with, less what its seeds "
    "differ by",
    "streams": "Training on samples as they arrive, with the published rates of ScaDLES, is "
    "{uniform_38_24_speedup:.1f}, {normal_64_24_speedup:.2f}, {uniform_300_112_speedup:.2f} and "
    "{normal_256_28_speedup:.2f} times as fast as synchronous training with batches of 64 (rates of 38 ± 24, 64 ± 24,"
    " 300 ± 112 and 256 ± 28 a second; published: 1.89, 3.29, 1.15 and 1.42)",
    "chaos": "After a worker is killed the next step is done within {recovery_s:.1f} s; {real_failed:.0f} of "
    "{real_schedules:.0f} generated schedules of faults on real runs went wrong",
    "spot_rehearsal": "On a recorded spot cluster, replayed with hosts that die and return, training comes to "
    "{notice_of_oracle_0:.0%} of what one could who knew the recording, {sudden_of_oracle_0:.0%} where hosts die "
    "without notice (the least of three draws {notice_of_oracle_least_0:.0%} and {sudden_of_oracle_least_0:.0%}), and "
    "under torchrun, in one draw, to {torchrun_of_oracle_0:.0%} (untuned: snapshots as rare as hetopt's checkpoints, "
    "every ten minutes of the recording, of which each change undoes what came since)",
    "ec2_in_a_box": "Renting, losing machines and ending on a simulated EC2 leaves {instances_left:.0f} machines "
    "behind; the ledger differs from the bill by {ledger_error:.2%}",
    "boot": "A machine without a GPU boots with the real pip and packages in {index_memory_gib:.1f} GiB of memory and "
    "{index_disk_gib:.1f} GiB of disk: {index_first_step_cpu_s:.0f} s of CPU time to its first steps from the index, "
    "and {bucket_first_step_cpu_s:.0f} s from the {wheels_mb:.0f} MB that the machine before it left in the bucket, "
    "then without any network but S3 (in a Debian root with the image's limits; with the download as it is planned "
    "{index_alone_s:.0f} s from the index, where {planned_first_step_s:.0f} s are planned; by the clock, on two busy "
    "cores, {index_first_step_s:.0f} s and {bucket_first_step_s:.0f} s)",
    "report_page": "The page of a run of 100,000 steps on 16 workers is made in {dense_page_s:.1f} s, or "
    "{usual_page_s:.1f} s with the usual log; watching a run takes {watch_core_share:.2%} of a core",
}
"""A sentence of each benchmark, in this order; without committed figures, nothing."""

FRONT = {
    "decisions": "Clusters chosen by predicted steps of eight public jobs cost "
    "{no_probe_extra_cost_hetopt:.0%} over the cheapest ({extra_cost_seen_all_rows:.0%} is noise) and miss "
    "{no_probe_missed_hetopt:.0%} of the throughputs (Ernest {no_probe_extra_cost_ernest:.0%} and "
    "{no_probe_missed_ernest:.0%}, with an interval {no_probe_extra_cost_ernest_with_its_interval:.0%} and "
    "{no_probe_missed_ernest_with_its_interval:.0%})",
    "prediction": "Step times on a new kind of cluster, profiled on one and two machines, are "
    "{no_probe_median_cluster_held_out:.0%} off in the median (Ernest {no_probe_median_ernest_every:.0%}), "
    "{one_probe_median_cluster_held_out:.1%} after one larger measurement (AdaptDL "
    "{one_probe_median_adaptdl_every:.1%})",
    "transfer": "Throughput on a GPU where a job never ran is {one_measured_median:.0%} off in the median and "
    "{one_measured_p90:.0%} in one of ten cases (by the median ratio of other jobs "
    "{median_by_median_ratio_of_other_jobs:.0%} and {p90_by_median_ratio_of_other_jobs:.0%})",
    "balance": "Workers of 2, 17 and 20 cores train {speed_up_2_17_20:.1f} times as fast as with equal batches, "
    "{share_of_ideal_2_17_20:.0%} of the ideal; equal ones take {equal_workers_over_ddp_small_network:.2f}, "
    "{equal_workers_over_ddp_resnet20:.2f} and {equal_workers_over_ddp_4_m_parameters:.2f} of "
    "DistributedDataParallel's time on three networks",
    "spot_rehearsal": "On a recorded spot cluster training comes to {notice_of_oracle_0:.0%} of an oracle's, under "
    "torchrun with untuned snapshots to {torchrun_of_oracle_0:.0%}",
}
"""What the README tells: of each promise (the number is right, the plan is the best, the run keeps it), shortly."""


ABOUT_MEASURED = (
    "Made from `benchmarks/results/`, which holds the last run of each benchmark, in the form that is named. A goal is "
    "what it is to reach; a baseline ran in the same call. Figures are seconds, bytes, dollars or ratios, as their "
    "names say. Results stay as they are until they are measured again: each says how many commits of the repository "
    "came after the one that was measured; *since rewritten* are those of which more than half of the lines that run "
    "have changed.",
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

    from hetopt.cli.help_screen import show_all
    from hetopt.cli.main import app

    parts = [
        "# Commands",
        "",
        "Made from `hetopt COMMAND --help-all`. Options may stand before or behind arguments.",
        "",
    ]

    def add(command: click.Command, path: list[str], parent: click.Context | None) -> None:
        context = click.Context(
            command, info_name=path[-1], parent=parent, terminal_width=WIDTH, max_content_width=WIDTH
        )
        if len(path) > 1:
            parts.extend([f"{'#' * len(path)} {' '.join(path)}", ""])
        show_all(context)
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
    parts += ["## In a sentence each", "", headlines(), ""]
    for path in _results():
        told = json.loads(path.read_text(encoding="utf-8"))
        goals, baselines = told.get("goals", {}), told.get("baselines", {})
        verdict = "all goals met" if told["met"] else "not all goals met"
        figures = told["figures"]
        others = {name: value for name, value in figures.items() if name not in goals}
        others |= {f"baseline: {name}": value for name, value in baselines.items()}
        parts += [
            f"## {told['benchmark']}",
            "",
            f"`{_command(told)}`, {_when(told, ages)}{_changed(told)}: {verdict}.",
            *_other_parts(told),
            "",
        ]
        if goals:
            rows = (f"| {name} | {_number(figures[name])} | {_goal(goal)} |" for name, goal in goals.items())
            parts += ["| figure | value | goal |", "|---|---:|---|", *rows, ""]
        if others:
            summary = f"{len(others)} more figure{'s' * (len(others) > 1)}, without a goal"
            parts += [
                f"<details markdown><summary>{summary}</summary>",
                *("", "| figure | value |", "|---|---:|"),
                *(f"| {name} | {_number(value)} |" for name, value in others.items()),
                *("", "</details>", ""),
            ]
    return "\n".join(parts)


def headlines(templates: Mapping[str, str] = HEADLINES, *, shortly: bool = False) -> str:
    """A sentence of each of these benchmarks that has a committed result; ``shortly``, with the day alone."""
    lines = []
    ages = _ages()
    for name, template in templates.items():
        figures = figures_of(name)
        wanted = {field for _, field, _, _ in string.Formatter().parse(template) if field}
        if wanted <= set(figures):
            told = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
            missed = "" if told["met"] else "; not all of its goals are met"
            claim = template.format(**figures).replace("%", " %")
            source = _when(told, ages, shortly=True) if shortly else f"`{_command(told)}`, {_when(told, ages)}{missed}"
            words = f"{claim} ({source})."
            lines.append(textwrap.fill(words, 119, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines)


ABOUT_REPRODUCTION = (
    "Made from `benchmarks/_claims.py` and the committed results. Of each published figure: what the published method "
    "came to here, by its own rule, what hetopt's default came to in the same run, and the best rival there. "
    "*Emulated*: real processes train and wait until the machine they stand for would be done. *Composed*: steps are "
    "counted in real training and their times added up. `python -m benchmarks.reproduction` prints the same, and with "
    "`--quick` measures it again."
)


def reproduction() -> str:
    """The page of what others have published, beside what was measured here."""
    answered = sum(claim.is_answered for claim in CLAIMS)
    parts = ["# Reproduction", "", textwrap.fill(ABOUT_REPRODUCTION, 119), ""]
    parts += [f"Of {len(CLAIMS)} published figures {answered} have a committed result of their method.", ""]
    for system in dict.fromkeys(claim.system for claim in CLAIMS):
        parts += [f"## {system[0].upper()}{system[1:]}", ""]
        parts += _answers([claim for claim in CLAIMS if claim.system == system], _ages())
    return "\n".join(parts)


def _answers(claims: Iterable[Claim], ages: dict[str, str]) -> list[str]:
    """A paragraph and a list for each published figure."""
    figures, parts = figures_in(RESULTS), []
    for claim in claims:
        source = f"not measured: {claim.note}"
        if claim.benchmark is not None:
            result = json.loads((RESULTS / f"{claim.benchmark}.json").read_text(encoding="utf-8"))
            source = f"{claim.how}, `{_command(result)}`, {_when(result, ages, shortly=True)}"
            source += f"; {claim.note}" if claim.note else ""
        theirs, ours, beside = measured_claim(claim, figures)
        named = (("published", claim.published), ("its method here", theirs), ("hetopt", ours), ("beside", beside))
        parts += [f"**{claim.claim[0].upper()}{claim.claim[1:]}**", ""]
        parts += [f"- {name}: {words}" for name, words in named if words]
        parts += [f"- {source}", ""]
    return parts


METHOD_PAGES = DOCS / "methods"
MARK = re.compile(r"^<!-- (registry|index): (\w+)(.*?) -->\n(?:.*?)^<!-- end -->", re.MULTILINE | re.DOTALL)
"""What is made from a registry: the methods of a page, or links to all pages."""

PUBLISHED = re.compile(r"^(<!-- published -->\n).*?(?=^<!-- end -->)", re.MULTILINE | re.DOTALL)


def registries() -> dict[str, Mapping[str, str]]:
    """What there is of each kind of method, in half a sentence each, by name."""
    from hetopt.core.comm.composition import COLLECTIVES, METHODS
    from hetopt.core.comm.ratio_controllers import CONTROLLERS
    from hetopt.core.run_spec import BATCH_POLICIES
    from hetopt.core.synchronization_rules import POLICIES

    return {
        "batch": BATCH_POLICIES,
        "compressor": {name: method.about for name, method in METHODS.items()},
        "collective": COLLECTIVES,
        "ratio": CONTROLLERS,
        "sync": POLICIES,
    }


def method_pages() -> dict[str, list[tuple[str, str]]]:
    """The methods of each page in `METHOD_PAGES`, as kind and name."""
    return {
        page.name: [
            (kind, name)
            for what, kind, names in MARK.findall(page.read_text(encoding="utf-8"))
            if what == "registry"
            for name in names.split()
        ]
        for page in sorted(METHOD_PAGES.glob("*.md"))
    }


def methods(page: Path) -> str:
    """A page with its methods as the registries have them, and the published figures that are told on it."""
    pages = {method: name for name, own in method_pages().items() for method in own}

    def of_registry(mark: re.Match[str]) -> str:
        what, kind, names = mark.groups()
        if what == "registry":
            rows = _facts(kind, names.split())
        else:
            rows = ["| name | what it does |", "|---|---|"]
            for name, about in registries()[kind].items():
                rows.append(f"| [`{name}`](methods/{pages[kind, name]}) | {about} |")
        return "\n".join([mark[0].partition("\n")[0], *rows, "<!-- end -->"])

    own = [claim for claim in CLAIMS if claim.page == page.relative_to(DOCS).as_posix()]
    text = MARK.sub(of_registry, page.read_text(encoding="utf-8"))
    return PUBLISHED.sub(lambda mark: mark[1] + "\n".join(_answers(own, {})), text)


def _facts(kind: str, names: Sequence[str]) -> list[str]:
    """What the registry says of these: what compressors go with and weigh, what policies can be told."""
    from hetopt.core.comm.composition import METHODS
    from hetopt.core.policy_settings import BATCH_SETTINGS, RATIO_SETTINGS

    about = registries()[kind]
    if kind == "compressor":
        return [f"- `{name}`: {about[name]}. {_company(METHODS[name])}{_weight(name)}" for name in names]
    rows = [f"- `--{OPTIONS[kind]} {name}`: {about[name]}." for name in names]
    for name in names:
        if settings := {"batch": BATCH_SETTINGS, "ratio": RATIO_SETTINGS}.get(kind, {}).get(name):
            rows += ["", f"| setting of `{name}` | default | meaning |", "|---|---|---|"]
            told = _attributes(settings)
            for key, field in settings.model_fields.items():
                usual = "" if field.default is None else f"`{json.dumps(field.default).strip(chr(34))}`"
                rows.append(f"| `{key}` | {usual} | {told[key]} |")
    return rows


def _company(method: Any) -> str:
    """What goes with a compressor; the first of each is the default."""
    by, kept, told = (
        ", ".join(f"`{one}`" for one in every) for every in (method.collectives, method.memories, method.options)
    )
    return f"Combined by {by}; residual {kept}{f'; settings {told}' if told else ''}. "


def _weight(name: str) -> str:
    """What a worker of two sends of a million values."""
    from hetopt.core.comm.composition import METHODS
    from hetopt.core.comm.payload_bytes import wire_bytes

    size = wire_bytes(name, 1_000_000, 0.01, shapes=((1000, 1000),)) / 1e6
    return f"A million values: {size:.3g} MB{' at 1 %' * METHODS[name].by_ratio}."


OPTIONS = {"batch": "batch-policy", "collective": "collective", "ratio": "ratio-policy", "sync": "sync"}


def _attributes(record: type) -> dict[str, str]:
    """What a record's docstring says of each field."""
    told = inspect.getdoc(record).partition("Attributes:\n")[2]
    told = re.sub(r"\n {8,}", " ", told)
    lines = [line.strip().partition(": ") for line in told.splitlines()]
    return {name.strip(): about.rstrip(".") for names, _, about in lines for name in names.split(",")}


ABOUT_LIBRARY = (
    "Made from the docstrings of `hetopt`. [The library](library.md) shows how its parts go together; "
    "[Errors](errors.md) has what may be raised."
)

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):$")


def library() -> str:
    """The page of every public name, by its own docstring."""
    import hetopt

    parts = ["# Library reference", "", textwrap.fill(ABOUT_LIBRARY, 119), ""]
    for name in sorted(set(hetopt.__all__) - {"__version__"}, key=lambda one: (one.lower(), one)):
        parts += _described(f"hetopt.{name}", getattr(hetopt, name), level=2)
    return "\n".join(parts)


def _described(name: str, thing: Any, level: int) -> list[str]:
    """A class with its public methods, or a function. Records are read from files, and made by nobody's hand."""
    is_record = hasattr(thing, "model_fields")
    shown = [] if is_record or inspect.isabstract(thing) else ["```python", *_signature(name, thing), "```", ""]
    parts = [f"{'#' * level} {name}", "", *shown, *_paragraphs(thing), ""]
    if is_record:
        fields = ", ".join(f"`{field}`" for field in thing.model_fields)
        parts += [textwrap.fill(f"Fields ([schemas](files.md)): {fields}.", 119, break_on_hyphens=False), ""]
    if inspect.isclass(thing) and not issubclass(thing, Exception):
        for own, method in inspect.getmembers(thing, inspect.isroutine):
            called = getattr(method, "__func__", method)
            if (
                not own.startswith(("_", "model_"))
                and own not in inspect.signature(thing).parameters
                and called.__module__.startswith("hetopt")
                and called.__doc__
            ):
                parts += _described(f"{name}.{own}", method, level + 1)
    return parts


def _signature(name: str, thing: Any) -> list[str]:
    """As it is called, a parameter a line where they do not fit into one."""
    taken = inspect.signature(thing)
    parameters = [one for one in taken.parameters.values() if one.name != "self"]
    shown = [str(one.replace(annotation=_Plain(one.annotation), default=_named(one.default))) for one in parameters]
    if keywords := [place for place, one in enumerate(parameters) if one.kind is one.KEYWORD_ONLY]:
        shown.insert(keywords[0], "*")
    back = "" if inspect.isclass(thing) or taken.return_annotation is taken.empty else f" -> {taken.return_annotation}"
    whole = f"{name}({', '.join(shown)}){back}"
    return [whole] if len(whole) <= WIDTH else [f"{name}(", *(f"    {one}," for one in shown), f"){back}"]


def _named(default: Any) -> Any:
    """A function by its name alone."""
    return _Plain(default.__name__) if inspect.isfunction(default) else default


class _Plain(str):
    """Words of the code, which are shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _paragraphs(thing: Any) -> list[str]:
    """A docstring as Markdown: its sections become lists."""
    lines: list[str] = []
    inside = False
    for line in inspect.getdoc(thing).splitlines():
        if SECTION.match(line):
            lines += [f"**{line.removesuffix(':')}**", ""]
            inside = True
        elif inside and line.startswith("    ") and not line.startswith("     "):
            words, colon, rest = line.strip().partition(": ")
            lines.append(f"- `{words}`: {rest}" if colon and "``" not in words else f"- {line.strip()}")
        else:
            lines.append(f"  {line.strip()}" if inside and line.strip() else line)
            inside = inside and bool(line.strip())
    return [line.replace("``", "`") for line in lines]


def conversion() -> str:
    """The difference between a script and its converted form, changed indentation aside."""
    names = ("train.py", "train_hetopt.py")
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


ABOUT_EVIDENCE = (
    "Made from `hetopt/backends/ec2/facts.py`, the codes in `renter/errors.py`, the quotas in "
    "`optimizer/market/quota.py`, the prices in `catalogs/aws/billing.json` and `tests/ec2/reviewed_members.py`. No "
    "account was at hand when hetopt was written: what it believes of AWS stands on documents, on answers that other "
    "people recorded, and on their code. Each belief says on which, and when that was read; a test fails on a constant "
    "of AWS's that stands anywhere else. **Doctor** is the check of `hetopt doctor PLAN` that asks AWS itself before "
    "anything is rented; where there is none, only a run can show it."
)

ABOUT_PARTS = {
    "images": "Images",
    "boot": "A machine that boots",
    "machines": "Machines, as EC2 tells of them",
    "calls": "Calls",
    "storage": "Storage",
    "money": "Money",
    "rights": "Rights",
}


def evidence() -> str:
    """The page of everything that is believed of AWS, with its sources."""
    import runpy

    from hetopt.backends.ec2 import facts
    from hetopt.backends.ec2.renter.errors import TABLE
    from hetopt.optimizer.market.quota import QUOTAS_SEEN, named_quotas

    parts = ["# Evidence", "", textwrap.fill(ABOUT_EVIDENCE, 119, break_on_hyphens=False), ""]
    for about, title in ABOUT_PARTS.items():
        parts += [f"## {title}", ""]
        for found in facts.all_facts().values():
            if found.about == about:
                value = "" if found.value is True else f": {_code(found.value)}"
                doctor = f" Doctor: {found.doctor}." if found.doctor else ""
                said = f"{found.means.removesuffix('.')}{value}. Read {found.read}: {found.source}.{doctor}"
                parts.append(
                    textwrap.fill(said, 119, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
                )
        parts.append("")
    parts += ["## Codes of refusals", "", "| codes | what is done | where |", "|---|---|---|"]
    done = {
        "again": "the same call, later",
        "elsewhere": "another pool, at once",
        "passing": "waited for, where it passes",
        "stop": "told",
    }
    parts += [f"| {_cell(_code(row.codes))} | {done[row.reaction]} | {_cell(row.source)} |" for row in TABLE]
    parts += ["", "## Quotas", "", textwrap.fill(f"{QUOTAS_SEEN[0].upper()}{QUOTAS_SEEN[1:]}.", 119), ""]
    parts += ["| code | name | a new account has |", "|---|---|---:|"]
    parts += [f"| `{one.code}` | {_cell(one.name)} | {one.default} |" for one in named_quotas()]
    parts += ["", "## Prices of what comes with a machine", "", "| term | value | read | where |", "|---|---|---|---|"]
    for name, term in _terms():
        parts.append(f"| {name.replace('_', ' ')} | {term.value:g} {term.unit} | {term.date} | {_cell(term.source)} |")
    read = runpy.run_path(str(DOCS.parent / "tests" / "ec2" / "reviewed_members.py"))
    parts += [
        "",
        "## Members of calls",
        "",
        textwrap.fill(
            f"Every member that is sent was read in the API's documentation ({read['READ']}); a test fails on one that "
            "was not. These name a condition:",
            119,
        ),
        "",
        *(f"- {call}, {member}: {why}" for (call, member), why in read["ON_CONDITION"].items()),
        "",
    ]
    return "\n".join(parts)


def _terms() -> list[tuple[str, Any]]:
    """The figures of the bill, by their names."""
    from hetopt.optimizer.cost.billing import Term, load_billing

    found = ((one.name, getattr(load_billing(), one.name)) for one in dataclasses.fields(load_billing()))
    return [(name, term) for name, term in found if isinstance(term, Term)]


def _code(value: object) -> str:
    """A value of AWS's as it is written there."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_code(one)}" for name, one in value.items())
    if isinstance(value, tuple | frozenset):
        return ", ".join(_code(one) for one in (value if isinstance(value, tuple) else sorted(value)))
    return f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def pages() -> dict[Path, str]:
    """The text of every page that is made, or partly made, by its file."""
    own = DOCS / "your-own-code.md"
    return {
        DOCS / "commands.md": commands(),
        DOCS / "evidence.md": evidence(),
        DOCS / "reference.md": library(),
        DOCS / "reproduction.md": reproduction(),
        DOCS / "measured.md": measured(),
        **{page: methods(page) for page in (DOCS / "methods.md", DOCS / "models.md", *METHOD_PAGES.glob("*.md"))},
        own: _filled(own, "conversion", conversion()),
        README: _filled(README, "measured", headlines(FRONT, shortly=True)),
    }


def _filled(page: Path, name: str, words: str) -> str:
    """The page with other words between the marks of this name."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    return before + begin + words + "\n" + end + rest.partition(end)[2]


def _results() -> list[Path]:
    return sorted(RESULTS.glob("*.json"))


def _when(told: dict[str, Any], ages: dict[str, str], *, shortly: bool = False) -> str:
    """Day and commit of a result, and how many commits came after it."""
    behind = ages.get(told["benchmark"], "")
    return f"{told['date']}{behind}" if shortly else f"{told['date']}, commit {told['commit']}{behind}"


def _changed(told: dict[str, Any]) -> str:
    """How much of what it runs has changed since then."""
    counted = json.loads(AGES.read_text(encoding="utf-8")).get("lines_changed", {}).get(told["benchmark"])
    return (
        "" if counted is None or not counted[0] else f" (of {counted[1]:,} lines that it runs {counted[0]:,} changed)"
    )


def _ages() -> dict[str, str]:
    """How long ago each result was measured, in words; those of the last commit are left out."""
    counted = json.loads(AGES.read_text(encoding="utf-8"))
    changed = {name: lines / of_lines for name, (lines, of_lines) in counted["lines_changed"].items()}
    return {
        name: f", {'at least ' * (name in counted['at_least'])}{since} commit{'s' * (since != 1)} ago"
        f"{', since rewritten' * (changed[name] > REWRITTEN)}"
        for name, since in counted["commits_since"].items()
        if since
    }


def count_ages() -> None:
    """Write how many commits came after the one that each result measured, and how many lines of what it runs they
    changed; nothing outside a repository."""
    found = _freshness.ages()
    if len(found) < len(_results()):
        return
    since = {age.benchmark: age.commits for age in found}
    at_least = [age.benchmark for age in found if age.at_least]
    lines = {age.benchmark: [age.lines, age.of_lines] for age in found}
    counted = {"commits_since": since, "lines_changed": lines, "at_least": at_least}
    AGES.write_text(json.dumps(counted, indent=2) + "\n", encoding="utf-8")


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
