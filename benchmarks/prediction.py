"""How far predicted step times lie from the truth: public step times from real GPU clusters.

Each folder of the data is fitted on a cheap profile (with no, one or three probes of hetopt's choosing, or
on a tenth of its rows), and everything else is predicted. The published models get the same rows. One default
configuration for all folders. The line "cluster held out" repeats hetopt's with priors taken from other clusters alone:
what to expect of a cluster that nobody has measured. The two folders of Azure came later: figures that do not name them
are means over the six others, and those with a cluster held out over all eight.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks._held_out_priors import FLAT, learned_priors
from benchmarks._outcome import Bound, Outcome, options, publish, run_benchmark
from benchmarks._step_baselines import PEERS, StepTimePeer
from benchmarks._step_traces import (
    AZURE,
    EVERY,
    FOLDERS,
    PROTOCOLS,
    Samples,
    Score,
    Task,
    read,
    score,
    score_hetopt,
    tasks,
    traces,
)
from hetopt.optimizer.step_time.model import StepTimeModel
from hetopt.optimizer.step_time.observed import observe
from hetopt.optimizer.step_time.posterior import Posterior, fit

Fit = Callable[[Samples], StepTimePeer]
FIT_ROWS = 2000

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
    "no_probe_median_cluster_held_out": {"at_most": 0.20},
    "one_probe_median_cluster_held_out": {"at_most": 0.07},
    "lowest_coverage_of_a_protocol_cluster_held_out": {"at_least": 0.75},
    "highest_coverage_of_a_protocol_cluster_held_out": {"at_most": 0.99},
    "fit_2000_rows_s": {"at_most": 2.0},
}
"""Medians and 90th percentiles are means over the folders, ``every`` of a peer over all eight; coverage is that of a
folder over its protocols, or of each protocol."""

Scores = dict[str, list[Score]]
"""By protocol, in the order of the folders."""


def name(protocol: str) -> str:
    """Return a protocol as part of a figure's name."""
    return protocol.replace("10 %", "ten percent").replace(" ", "_")


def score_all(asked: Sequence[Task], score_task: Callable[[Task], Score]) -> Scores:
    return {protocol: [score_task(task) for task in asked if task.protocol == protocol] for protocol in PROTOCOLS}


def score_peer(fit_peer: Fit, task: Task) -> Score:
    return score(fit_peer(task.shown).step_time_s(task.asked), task.asked)


def fitted_whole(root: Path) -> dict[str, Posterior]:
    """Return the posterior of all rows of each folder under flat priors."""
    return {
        folder: fit(observe(read(root, folder, "profile") + read(root, folder, "answers")), priors=FLAT, classes=())
        for folder in EVERY
    }


def held_out_scores(
    root: Path, folders: Sequence[str], fits: Mapping[str, Posterior], same: Callable[[str, str], bool]
) -> Scores:
    """Return hetopt's scores with priors from the folders that ``same`` does not count as the one that is scored."""
    scores: Scores = {protocol: [] for protocol in PROTOCOLS}
    for folder in folders:
        priors = learned_priors({other: posterior for other, posterior in fits.items() if not same(folder, other)})
        for task in tasks(root, folder, priors):
            scores[task.protocol].append(score_hetopt(task, priors))
    return scores


def mean(scores: Sequence[Score], field: str) -> float:
    return statistics.fmean(getattr(entry, field) for entry in scores)


def show(contenders: dict[str, Scores], azure: Scores, foreign: Scores) -> None:
    """Print medians and 90th percentiles of every contender, then hetopt's by folder, and with its cluster held out."""
    print(f"Step time, error in %: median / 90th percentile, means over {len(FOLDERS)} folders")
    print(f"{'':28}" + "".join(f"{protocol:>16}" for protocol in PROTOCOLS))
    for contender, scores in contenders.items():
        means = (f"{mean(scores[p], 'median'):.1%} / {mean(scores[p], 'p90'):.1%}" for p in PROTOCOLS)
        print(f"{contender:28}" + "".join(f"{cell.replace('%', ''):>16}" for cell in means))
    by_folder = {protocol: contenders["hetopt"][protocol] + azure[protocol] for protocol in PROTOCOLS}
    for title, scores in (("hetopt", by_folder), ("hetopt, cluster held out", foreign)):
        print(f"\n{title}, by folder: median / 90th percentile (coverage of the 90 % interval, its width)")
        for place, folder in enumerate(EVERY):
            by_protocol = (scores[protocol][place] for protocol in PROTOCOLS)
            cells = (f"{s.median:.1%} / {s.p90:.1%} ({s.coverage or 0:.0%}, {s.width or 0:.0%})" for s in by_protocol)
            print(f"{folder:14}" + "".join(f"{cell.replace('%', ''):>26}" for cell in cells))


def step_times(root: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Return the figures and baselines of all contenders on the step traces."""
    every = [task for folder in FOLDERS for task in tasks(root, folder)]
    contenders: dict[str, Scores] = {"hetopt": score_all(every, score_hetopt)}
    print("hetopt is scored", file=sys.stderr)
    later = [task for folder in AZURE for task in tasks(root, folder)]
    azure = score_all(later, score_hetopt)
    fits = fitted_whole(root)
    foreign = held_out_scores(root, EVERY, fits, lambda folder, other: folder.split("-")[1] == other.split("-")[1])
    contenders["hetopt, cluster held out"] = {protocol: scores[: len(FOLDERS)] for protocol, scores in foreign.items()}
    print("priors from other folders are scored", file=sys.stderr)
    peers_later: dict[str, Scores] = {}
    for peer, fit_peer in PEERS.items():
        contenders[peer] = score_all(every, partial(score_peer, fit_peer))
        peers_later[peer] = score_all(later, partial(score_peer, fit_peer))
    show(contenders, azure, foreign)

    rows = (read(root, "ncf-aws", "answers") + read(root, "ncf-aws", "profile"))[:FIT_ROWS]
    seconds = []
    for _ in range(3):
        started = time.process_time()
        StepTimeModel.fit(observe(rows), {})
        seconds.append(time.process_time() - started)
    print(f"\nA fit to {FIT_ROWS} rows takes {statistics.median(seconds):.2f} s of a processor")

    figures = {
        **errors_and_coverages(contenders["hetopt"], ""),
        **errors_and_coverages(azure, "_azure"),
        **errors_and_coverages(foreign, "_cluster_held_out"),
        "fit_2000_rows_s": round(statistics.median(seconds), 3),
    }
    baselines = {
        key: value
        for peer, suffix in ((peer, f"_{peer.lower().replace(', ', '_')}") for peer in PEERS)
        for key, value in (
            *errors(contenders[peer], suffix).items(),
            *errors({p: contenders[peer][p] + peers_later[peer][p] for p in PROTOCOLS}, f"{suffix}_every").items(),
        )
    }
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
    asked = options(__doc__)
    root = traces()
    if root is None:
        print("The step traces are not there (HETOPT_SHARED_DATA names the data folder).")
        return
    figures, baselines = step_times(root)
    outcome = Outcome(benchmark="prediction", quick=asked.quick, figures=figures, goals=GOALS, baselines=baselines)
    publish(outcome, asked.json_file)


if __name__ == "__main__":
    run_benchmark(main)
