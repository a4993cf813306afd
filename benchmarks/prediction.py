"""How far predicted step times lie from the truth: public step times from real GPU clusters.

Each folder of the data is fitted on a cheap profile (with no, one or three probes of hetopt's choosing, or
on a tenth of its rows), and everything else is predicted. The published models get the same rows. One default
configuration for all folders. The line "cluster held out" repeats hetopt's with priors taken from other clusters alone:
what to expect of a cluster that nobody has measured. The two folders of Azure came later: figures that do not name them
are means over the six others, and those with a cluster held out over all eight.

Parts: *clusters* is hetopt alone, with clusters held out, and what a probe does to the error of all other layouts, as
it was measured and ten times as slow (a minute); *terms* adds what each term of the equations gains with clusters held
out (five minutes, not with ``--quick``): a term that gains nothing should go.
"""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks._held_out_priors import fitted_whole, learned_priors
from benchmarks._outcome import Bound, Outcome, options, publish, run_benchmark
from benchmarks._step_baselines import PEERS
from benchmarks._step_traces import (
    DEFAULT,
    EVERY,
    FOLDERS,
    PROBES,
    PROTOCOLS,
    Beliefs,
    Score,
    Task,
    read,
    score,
    score_hetopt,
    tasks,
    traces,
)
from hetopt.optimizer.step_time.physics import Array
from hetopt.optimizer.step_time.priors import FIXED_SD, LINK_CLASSES, PRIORS, Normal

FIT_ROWS = 2000
PARTS = ("clusters", "terms")
FIRST = slice(len(FOLDERS))

NEAR: Mapping[Bound, float] = {"at_least": -0.05, "at_most": 0.05}

GOALS: dict[str, Mapping[Bound, float]] = {
    "no_probe_median": {"at_most": 0.16},
    "one_probe_median": {"at_most": 0.065},
    "one_probe_p90": {"at_most": 0.17},
    "three_probes_median": {"at_most": 0.055},
    "three_probes_p90": {"at_most": 0.14},
    "ten_percent_of_rows_median": {"at_most": 0.055},
    "ten_percent_of_rows_p90": {"at_most": 0.15},
    "lowest_coverage": {"at_least": 0.80},
    "highest_coverage": {"at_most": 0.97},
    "no_probe_median_azure": {"at_most": 0.20},
    "one_probe_median_azure": {"at_most": 0.12},
    "three_probes_median_azure": {"at_most": 0.09},
    "no_probe_median_cluster_held_out": {"at_most": 0.08},
    "one_probe_median_cluster_held_out": {"at_most": 0.055},
    "three_probes_median_cluster_held_out": {"at_most": 0.05},
    **{f"{protocol.replace(' ', '_')}_worst_cluster_held_out": {"at_most": 0.16} for protocol in PROBES},
    **{f"{protocol.replace(' ', '_')}_bias_cluster_held_out": NEAR for protocol in PROBES},
    "lowest_coverage_cluster_held_out": {"at_least": 0.80},
    "highest_coverage_cluster_held_out": {"at_most": 0.98},
    "lowest_coverage_of_a_protocol_cluster_held_out": {"at_least": 0.75},
    "highest_coverage_of_a_protocol_cluster_held_out": {"at_most": 0.99},
    "error_after_a_probe_over_before": {"at_most": 1.1},
    "congested_probe_median": {"at_most": 0.20},
    "fit_2000_rows_s": {"at_most": 2.0},
}
"""Medians and 90th percentiles are means over the folders, ``every`` of a peer over all eight; coverage is that of a
folder over its protocols, or of each protocol."""

OFF: Mapping[str, float] = {
    **dict.fromkeys(("contention", "straggling", "forward", "network_growth"), -9.0),
    **dict.fromkeys(("host_latency", "network_latency"), -14.0),
    **dict.fromkeys(("relief", "rest", "host_sharing"), 0.0),
}
"""Where a term of the equations says nothing: the log or logit of next to nothing, a share or power of 0."""

Scores = dict[str, list[Score]]
"""By protocol, in the order of the folders."""


def name(protocol: str) -> str:
    """Return a protocol as part of a figure's name."""
    return protocol.replace("10 %", "ten percent").replace(" ", "_")


def cluster(folder: str) -> str:
    return folder.split("-")[1]


def held_out(
    root: Path, off: Mapping[str, Normal] | None = None, classes: Sequence[Mapping[str, Normal]] = LINK_CLASSES
) -> dict[str, Beliefs]:
    """Return what other clusters tell of each folder, from fits of whole folders under flat priors.

    The classes of links alone are what they are: two clusters do not tell of classes.

    Args:
        root: of the traces.
        off: priors of parameters that are told nothing, in flat priors and learned ones; None: none.
        classes: of links inside a machine.
    """
    fixed = off or {}
    rows = {folder: read(root, folder, "profile") + read(root, folder, "answers") for folder in EVERY}
    fits = fitted_whole(rows, fixed)
    return {
        folder: Beliefs(
            priors={
                **learned_priors({other: fits[other] for other in EVERY if cluster(other) != cluster(folder)}),
                **fixed,
            },
            classes=[{key: fixed.get(key, prior) for key, prior in links.items()} for links in classes],
        )
        for folder in EVERY
    }


def scored(
    root: Path, believed: Mapping[str, Beliefs], score_task: Callable[[Task, Beliefs], Score] = score_hetopt
) -> Scores:
    """Return scores of all protocols; ``believed``: by folder, what hetopt believes as it chooses its probes."""
    scores: Scores = {protocol: [] for protocol in PROTOCOLS}
    for folder, beliefs in believed.items():
        for task in tasks(root, folder, beliefs):
            scores[task.protocol].append(score_task(task, beliefs))
    return scores


def mean(scores: Sequence[Score], field: str) -> float:
    return statistics.fmean(getattr(entry, field) for entry in scores)


def show(title: str, scores: Scores) -> None:
    """Print a contender's errors, as means over the folders that were there first, and hetopt's by folder."""
    means = (f"{mean(of[FIRST], 'median'):.1%} / {mean(of[FIRST], 'p90'):.1%}" for of in scores.values())
    print(f"\n{title:14}" + "".join(f"{cell.replace('%', ''):>30}" for cell in means))
    for place, folder in enumerate(EVERY if "hetopt" in title else ()):
        cells = (
            f"{s.median:.1%} ({s.bias:+.1%}) / {s.p90:.1%} ({s.coverage or 0:.0%}, {s.width or 0:.0%})"
            for s in (of_folders[place] for of_folders in scores.values())
        )
        print(f"{folder:14}" + "".join(f"{cell.replace('%', ''):>30}" for cell in cells), flush=True)


def cluster_medians(scores: Scores) -> Array:
    """Return the median errors with no, one and three probes, means over a cluster's folders, [clusters, 3]."""
    medians = np.array([[entry.median for entry in scores[protocol]] for protocol in PROBES]).T
    clusters = [cluster(folder) for folder in EVERY]
    return np.array([medians[[other == name for other in clusters]].mean(axis=0) for name in dict.fromkeys(clusters)])


def show_terms(root: Path, whole: Scores) -> None:
    """Print how much larger the median error is without each term, clusters held out, in points.

    The interval is of 90 % of 1000 draws of as many clusters with replacement.
    """
    print("\nGain of a term in points of the median error, clusters held out (90 % of draws of clusters)")
    draws = np.random.default_rng(0).integers(3, size=(1000, 3))
    for term in (*OFF, "link_classes"):
        off = {term: replace(PRIORS[term], mean=OFF[term], sd=FIXED_SD)} if term in OFF else {}
        without = held_out(root, off, LINK_CLASSES if term in OFF else ({},))
        gains = cluster_medians(scored(root, without)) - cluster_medians(whole)
        low, high = np.quantile(gains[draws].mean(axis=1), (0.05, 0.95), axis=0)
        cells = zip(gains.mean(axis=0), low, high, strict=True)
        print(f"{term:18}", *(f"{100 * g:+8.1f} ({100 * a:+.1f} to {100 * b:+.1f})" for g, a, b in cells), flush=True)


CONGESTED = 10.0
"""Times as long as it was: what a probe took on one cluster of a public kind."""


def surprises(root: Path) -> dict[str, float]:
    """Return what probes do to the error of all other layouts: at worst as they were, and where one was congested."""
    print("\nMedian error of layouts never probed: no, one, three probes; the first ten times as slow")
    ratios, congested = [], []
    for folder in EVERY:
        no_probe, one_probe, three_probes, _ = tasks(root, folder)
        medians = [
            score_hetopt(replace(task, asked=three_probes.asked), DEFAULT).median
            for task in (no_probe, one_probe, three_probes)
        ]
        slow = tuple(
            sample.model_copy(update={"step_time_s": CONGESTED * sample.step_time_s, "sync_time_s": None})
            for sample in one_probe.shown[len(no_probe.shown) :]
        )
        congested.append(score_hetopt(replace(three_probes, shown=no_probe.shown + slow), DEFAULT).median)
        ratios += [after / before for before, after in pairwise(medians)]
        print(f"{folder:14}" + "".join(f"{100 * median:10.1f}" for median in (*medians, congested[-1])), flush=True)
    return {
        "error_after_a_probe_over_before": round(max(ratios), 4),
        "congested_probe_median": round(statistics.fmean(congested), 4),
    }


def contest(root: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Return figures of hetopt's default on the step traces, and of the published models as baselines.

    Prints a line of the table for each contender.
    """
    default = dict.fromkeys(EVERY, DEFAULT)
    scores = scored(root, default)
    show("hetopt", scores)
    rows = (read(root, "ncf-aws", "answers") + read(root, "ncf-aws", "profile"))[:FIT_ROWS]
    seconds = timeit.repeat(lambda: DEFAULT.fitted(rows), timer=time.process_time, number=1, repeat=3)
    figures = {
        **errors_and_coverages({protocol: of[FIRST] for protocol, of in scores.items()}, ""),
        **errors_and_coverages({protocol: of[len(FOLDERS) :] for protocol, of in scores.items()}, "_azure"),
        "fit_2000_rows_s": round(statistics.median(seconds), 3),
    }
    baselines: dict[str, float] = {}
    for peer, fit_peer in PEERS.items():
        scores = scored(root, default, lambda task, _: score(fit_peer(task.shown).step_time_s(task.asked), task.asked))  # noqa: B023
        show(peer, scores)
        suffix = f"_{peer.lower().replace(', ', '_')}"
        baselines |= errors({protocol: of[FIRST] for protocol, of in scores.items()}, suffix)
        baselines |= errors(scores, f"{suffix}_every")
    return figures, baselines


def errors(scores: Scores, suffix: str) -> dict[str, float]:
    """Return mean errors over the folders, as figures."""
    return {
        f"{name(protocol)}_{field}{suffix}": round(mean(scores[protocol], field), 4)
        for protocol in PROTOCOLS
        for field in ("median", "p90", "bias")
    }


def errors_and_coverages(scores: Scores, suffix: str) -> dict[str, float]:
    """Return errors and the fractions of measured times inside intervals, by folder and by protocol, as figures."""
    table = [[entry.coverage for entry in scores[protocol] if entry.coverage is not None] for protocol in PROTOCOLS]
    folders = [statistics.fmean(column) for column in zip(*table, strict=True)]
    single = [coverage for row in table for coverage in row]
    return {
        **errors(scores, suffix),
        f"lowest_coverage{suffix}": round(min(folders), 4),
        f"highest_coverage{suffix}": round(max(folders), 4),
        f"lowest_coverage_of_a_protocol{suffix}": round(min(single), 4),
        f"highest_coverage_of_a_protocol{suffix}": round(max(single), 4),
    }


def main() -> None:
    """Measure the predictions, and publish; without the step traces say so and publish nothing."""
    asked = options(__doc__, PARTS)
    root = traces()
    if root is None:
        print("The step traces are not there (HETOPT_SHARED_DATA names the data folder).")
        return
    print("Errors in %: median (signed) / 90th percentile (coverage of the 90 % interval, its width), by protocol:")
    print(f"{'':14}" + "".join(f"{protocol:>30}" for protocol in PROTOCOLS))
    figures, baselines = ({}, {}) if asked.part else contest(root)
    foreign = scored(root, held_out(root))
    show("hetopt, cluster held out", foreign)
    figures |= {**errors_and_coverages(foreign, "_cluster_held_out"), **surprises(root)}
    figures |= {
        f"{name(protocol)}_worst_cluster_held_out": round(median, 4)
        for protocol, median in zip(PROBES, cluster_medians(foreign).max(axis=0).tolist(), strict=True)
    }
    if asked.part == "terms" or not (asked.part or asked.quick):
        show_terms(root, foreign)
    outcome = Outcome(
        benchmark="prediction",
        quick=asked.quick,
        figures=figures,
        goals={key: goal for key, goal in GOALS.items() if key in figures},
        baselines=baselines,
    )
    publish(outcome, asked.json_file, part=asked.part)


if __name__ == "__main__":
    run_benchmark(main)
