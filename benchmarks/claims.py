"""Measures again every figure that README and the page of claims quote, and writes the results: ``make claims``.

A claim whose result is of today's code is left as it is, so an interrupted call goes on where it was. The figures of
the others run in their turn, in the form that fits into an hour on two cores together.
"""

from __future__ import annotations

import argparse
import json
import string
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._freshness import why_stale
from benchmarks._outcome import RESULTS, commit, run_benchmark


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Groups of bars side by side, by the names of figures.

    Attributes:
        title: what is shown, with its unit.
        groups: names, one a group.
        series: figures of each contender by its name, one a group; hetopt's come first.
        marks: figures of a line across each group, such as the ideal; empty: none.
        marks_name: what the lines are.
        factor: by which figures are multiplied.
        unit: behind each value.
    """

    title: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[str]]
    marks: Sequence[str] = ()
    marks_name: str = ""
    factor: float = 1.0
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence of a page with figures in it, and the command that measures them.

    Attributes:
        benchmark: name of the command.
        options: of the form that `make claims` runs.
        title: heading on the page.
        sentence: with figures in braces.
        front: the same, shorter, for README; empty: README does not say it.
        plot: what is drawn.
    """

    benchmark: str
    options: Sequence[str] = ()
    title: str
    sentence: str
    front: str = ""
    plot: Plot

    @property
    def file(self) -> Path:
        """The file of the result."""
        return RESULTS / f"{self.benchmark}.json"

    @property
    def command(self) -> str:
        """The command that measures the claim, as it is typed."""
        return " ".join(["python -m", f"benchmarks.{self.benchmark}", *self.options])

    def result(self) -> dict[str, Any] | None:
        """Return the committed result; None if there is none, or it lacks a figure of the sentence or the plot."""
        if not self.file.exists():
            return None
        result: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8"))
        fields = {field for text in (self.sentence, self.front) for _, field, _, _ in string.Formatter().parse(text)}
        drawn = {name for names in (*self.plot.series.values(), self.plot.marks) for name in names}
        return result if (fields | drawn) - {None, ""} <= {*result["figures"], *result["baselines"]} else None


def figures(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a result that sentences and plots may quote, with its baselines."""
    return {**result["baselines"], **result["figures"]}


CLUSTERS = ("9_12_18", "12_12_8_16", "9_9_6_24", "6_6_4_32", "2_17_20")
RATES = ("0_1", "1", "5", "20")

CLAIMS = (
    Claim(
        benchmark="decisions",
        title="The chosen cluster is nearly the cheapest",
        sentence="The cheapest cluster that meets a throughput, chosen for eight public jobs by predicted steps with "
        "one and two nodes profiled, costs {no_probe_extra_cost_hetopt:.1%} more worker-seconds than the best by the "
        "measured steps, and misses the throughput in {no_probe_missed_hetopt:.1%} of the choices. Ernest: "
        "{no_probe_extra_cost_ernest:.1%} and {no_probe_missed_ernest:.1%}, with the interval of its own errors "
        "{no_probe_extra_cost_ernest_with_its_interval:.1%} and {no_probe_missed_ernest_with_its_interval:.1%}. "
        "Noise alone costs {extra_cost_seen_all_rows:.1%}.",
        front="Clusters chosen by predicted steps of eight public jobs cost {no_probe_extra_cost_hetopt:.0%} over the "
        "cheapest ({extra_cost_seen_all_rows:.0%} is noise) and miss {no_probe_missed_hetopt:.0%} of the throughputs "
        "(Ernest {no_probe_extra_cost_ernest:.0%} and {no_probe_missed_ernest:.0%}, with an interval "
        "{no_probe_extra_cost_ernest_with_its_interval:.0%} and {no_probe_missed_ernest_with_its_interval:.0%})",
        plot=Plot(
            title="The cheapest cluster for a throughput, chosen by predictions, judged by measurements",
            groups=("costs more than the best", "misses the throughput"),
            series={
                "hetopt": ("no_probe_extra_cost_hetopt", "no_probe_missed_hetopt"),
                "Ernest": ("no_probe_extra_cost_ernest", "no_probe_missed_ernest"),
                "Scavenger": ("no_probe_extra_cost_scavenger", "no_probe_missed_scavenger"),
                "Ernest, with an interval": (
                    "no_probe_extra_cost_ernest_with_its_interval",
                    "no_probe_missed_ernest_with_its_interval",
                ),
            },
            marks=("extra_cost_seen_all_rows", "missed_seen_all_rows"),
            marks_name="noise alone",
            factor=100,
            unit=" %",
        ),
    ),
    Claim(
        benchmark="prediction",
        options=("--quick",),
        title="Step times on a cluster that nobody measured",
        sentence="Steps on up to 64 GPUs of a kind of cluster that the priors know nothing of, where one and two "
        "machines were profiled, are {no_probe_median_cluster_held_out:.1%} off in the median (Ernest "
        "{no_probe_median_ernest_every:.1%}), and {one_probe_median_cluster_held_out:.1%} after one larger layout was "
        "measured (Ernest {one_probe_median_ernest_every:.1%}). The 90 % intervals held "
        "{lowest_coverage_cluster_held_out:.0%} of the steps of the worst cluster.",
        plot=Plot(
            title="Median error of predicted steps on a kind of cluster that was never measured",
            groups=("one and two machines profiled", "and one larger layout"),
            series={
                "hetopt": ("no_probe_median_cluster_held_out", "one_probe_median_cluster_held_out"),
                "Ernest": ("no_probe_median_ernest_every", "one_probe_median_ernest_every"),
                "Scavenger": ("no_probe_median_scavenger_every", "one_probe_median_scavenger_every"),
            },
            factor=100,
            unit=" %",
        ),
    ),
    Claim(
        benchmark="transfer",
        title="Throughput on a GPU where the job never ran",
        sentence="The throughput of a job on a GPU where it was never run, from one other GPU and the operations that "
        "a profile counts, is {one_measured_model_told_median:.0%} off in the median and "
        "{one_measured_model_told_p90:.0%} in one of ten cases, jobs left out; from steps alone "
        "{one_measured_median:.0%} and {one_measured_p90:.0%}, by the median ratio of other jobs "
        "{median_by_median_ratio_of_other_jobs:.0%} and {p90_by_median_ratio_of_other_jobs:.0%}, by memory bandwidth "
        "{median_by_bandwidth:.0%} and {p90_by_bandwidth:.0%}. On AWS's GPUs {one_measured_model_told_aws_median:.1%} "
        "in the median, from steps alone {one_measured_aws_median:.1%}, by the median ratio "
        "{aws_median_by_median_ratio_of_other_jobs:.1%}. 90 % intervals held {one_measured_coverage:.0%}.",
        plot=Plot(
            title="Error of the throughput on a GPU where a job never ran",
            groups=("median", "one of ten is worse"),
            series={
                "hetopt": ("one_measured_model_told_median", "one_measured_model_told_p90"),
                "hetopt, from steps alone": ("one_measured_median", "one_measured_p90"),
                "median ratio of other jobs": (
                    "median_by_median_ratio_of_other_jobs",
                    "p90_by_median_ratio_of_other_jobs",
                ),
                "memory bandwidth": ("median_by_bandwidth", "p90_by_bandwidth"),
            },
            factor=100,
            unit=" %",
        ),
    ),
    Claim(
        benchmark="convergence",
        options=(),
        title="Steps to a target at another batch size",
        sentence="Steps to a target at a batch size that was left out are {bert_levels_median_error:.1%} (BERT), "
        "{cifar10_levels_median_error:.1%} (CIFAR-10) and {ncf_levels_median_error:.1%} (NCF) off in the median; "
        "McCandlish's law alone {bert_levels_median_error_mccandlish:.1%}, "
        "{cifar10_levels_median_error_mccandlish:.1%} and {ncf_levels_median_error_mccandlish:.1%}. From one run and "
        "its gradient noise: {bert_smallest_median_error:.1%}, {cifar10_smallest_median_error:.1%} and "
        "{ncf_smallest_median_error:.1%}. From two runs and the noise of the smaller one: "
        "{bert_pair_median_error:.1%}, {cifar10_pair_median_error:.1%} and {ncf_pair_median_error:.1%}. Three small "
        "tasks, trained to a target with steps priced as a cluster's, take {digits_over_given:.2f}, "
        "{characters_over_given:.2f} and {autoencoder_over_given:.2f} of the given batch's time where the batch "
        "follows the gradient noise: {digits_over_best_in_hindsight:.2f}, {characters_over_best_in_hindsight:.2f} and "
        "{autoencoder_over_best_in_hindsight:.2f} of that of the best batch in hindsight.",
        plot=Plot(
            title="Median error of steps to a target at a batch size that was left out",
            groups=("BERT", "CIFAR-10", "NCF"),
            series={
                "hetopt": tuple(f"{job}_levels_median_error" for job in ("bert", "cifar10", "ncf")),
                "McCandlish": tuple(f"{job}_levels_median_error_mccandlish" for job in ("bert", "cifar10", "ncf")),
            },
            factor=100,
            unit=" %",
        ),
    ),
    Claim(
        benchmark="search",
        options=("--quick",),
        title="The plan is the best by its own model",
        sentence="By hetopt's own model of time and cost, plans of two machine types cost at worst "
        "{mixes_regret_worst:.2%} more than the best, by enumeration. Searches with as much processor time cost on "
        "average {tpe_regret_mean:.1%} (TPE) and {random_regret_mean:.1%} (random) more. What a wrong model costs in "
        "money is not in this figure.",
        plot=Plot(
            title="Mean cost over that of the best plan, searches with as much processor time",
            groups=("random parts of the catalogue",),
            series={
                "hetopt": ("mixes_regret_mean",),
                "TPE": ("tpe_regret_mean",),
                "Gaussian process": ("gaussian_process_regret_mean",),
                "random": ("random_regret_mean",),
            },
            factor=100,
            unit=" %",
        ),
    ),
    Claim(
        benchmark="balance",
        options=("--quick",),
        title="Unequal machines finish each step together",
        sentence="On emulated workers of 2, 17 and 20 cores with unlimited links, local batch sizes in proportion to "
        "speed train {speed_up_2_17_20:.1f} times as fast as equal ones, {share_of_ideal_2_17_20:.0%} of the ideal. "
        "Equal workers need {equal_workers_over_ddp_small_network:.2f}, {equal_workers_over_ddp_resnet20:.2f} and "
        "{equal_workers_over_ddp_4_m_parameters:.2f} of the time of DistributedDataParallel (a small network, "
        "ResNet-20, 4 million parameters).",
        front="Workers of 2, 17 and 20 cores train {speed_up_2_17_20:.1f} times as fast as with equal batches, "
        "{share_of_ideal_2_17_20:.0%} of the ideal; equal ones take {equal_workers_over_ddp_small_network:.2f}, "
        "{equal_workers_over_ddp_resnet20:.2f} and {equal_workers_over_ddp_4_m_parameters:.2f} of "
        "DistributedDataParallel's time on three networks",
        plot=Plot(
            title="Unequal workers: times as fast as DistributedDataParallel, by the workers' cores",
            groups=tuple(cores.replace("_", ", ") for cores in CLUSTERS),
            series={
                "hetopt": tuple(f"speed_up_{cores}" for cores in CLUSTERS),
                "in proportion to speed": tuple(f"speed_up_proportional_{cores}" for cores in CLUSTERS),
                "OmniLearn": tuple(f"speed_up_omnilearn_{cores}" for cores in CLUSTERS),
                "task allocation": tuple(f"speed_up_allocation_{cores}" for cores in CLUSTERS),
            },
            marks=tuple(f"ideal_speed_up_{cores}" for cores in CLUSTERS),
            marks_name="ideal",
        ),
    ),
    Claim(
        benchmark="exchange",
        options=("--quick",),
        title="Communication is predicted, and its choice follows the network",
        sentence="Median error of predicted communication time: {cost_model_median_error:.1%}. While link rates "
        "change, a step of `auto` takes at most {auto_over_least_of_any_loss_worst_phase:.2f} times as long as the "
        "best fixed choice in hindsight, {auto_over_best_fixed_with_settling_worst_phase:.2f} times with the time it "
        "needs to find out.",
        plot=Plot(
            title="While link rates change: time of `auto` over the best fixed choice in hindsight, worst phase",
            groups=("settled", "with the time to find out"),
            series={
                "hetopt": (
                    "auto_over_least_of_any_loss_worst_phase",
                    "auto_over_best_fixed_with_settling_worst_phase",
                )
            },
        ),
    ),
    Claim(
        benchmark="time_to_target",
        options=("--model", "characters", "--quick"),
        title="The same quality over slow links",
        sentence="Four workers train a small LSTM on characters to the perplexity that dense sums have after 70 % of "
        "their run, each side at its best learning rate. Where communication takes 20 times as long as computing, "
        "`auto` needs {seconds_hetopt_auto_at_20x:.0f} s, dense sums {seconds_plain_ddp_at_20x:.0f} s, sums of int8 "
        "{seconds_int8_at_20x:.0f} s, averages of int8 every 8 steps {seconds_local_sgd_8_int8_at_20x:.0f} s, and "
        "DiLoCo of int8 every 30 steps {seconds_diloco_30_int8_at_20x:.0f} s. At the end of its run `auto` has "
        "perplexity {final_perplexity_hetopt_auto:.2f}, dense sums {final_perplexity_plain_ddp:.2f}. "
        "Where communication takes a tenth of computing and nothing can be gained, the most that anybody gains is "
        "{gain_in_the_control_cell:.2f}.",
        plot=Plot(
            title="Seconds to the same perplexity, communication 20 times as long as computing",
            groups=("time",),
            series={
                "hetopt": ("seconds_hetopt_auto_at_20x",),
                "DDP": ("seconds_plain_ddp_at_20x",),
                "int8": ("seconds_int8_at_20x",),
                "averages of int8": ("seconds_local_sgd_8_int8_at_20x",),
                "DiLoCo of int8": ("seconds_diloco_30_int8_at_20x",),
            },
            unit=" s",
        ),
    ),
    Claim(
        benchmark="spot_rehearsal",
        options=("--quick",),
        title="Spot machines that come and go",
        sentence="On a recorded spot cluster, replayed with hosts that die and return, training comes to "
        "{notice_of_oracle_0:.0%} of what someone could train who knew the recording, {sudden_of_oracle_0:.0%} where "
        "hosts die without notice, and under torchrun to {torchrun_of_oracle_0:.0%}, with the better of two intervals "
        "between snapshots.",
        front="On a recorded spot cluster training comes to {notice_of_oracle_0:.0%} of an oracle's, under torchrun "
        "to {torchrun_of_oracle_0:.0%}",
        plot=Plot(
            title="Samples trained on a recorded spot cluster, over those of someone who knew the recording",
            groups=("recording",),
            series={
                "with notice": ("notice_of_oracle_0",),
                "without notice": ("sudden_of_oracle_0",),
                "torchrun": ("torchrun_of_oracle_0",),
            },
            factor=100,
            unit=" %",
        ),
    ),
    Claim(
        benchmark="chaos",
        options=("--quick",),
        title="Faults cost seconds, not runs",
        sentence="After a worker is killed the next step is done within {recovery_s:.1f} s (torchrun, which restarts "
        "all workers: {torchrun_restart_s:.1f} s); {real_failed:.0f} of {real_schedules:.0f} generated schedules of "
        "faults on real runs went wrong.",
        plot=Plot(
            title="Time from the death of a worker to the next step",
            groups=("four workers, one killed",),
            series={"hetopt": ("recovery_s",), "torchrun": ("torchrun_restart_s",)},
            unit=" s",
        ),
    ),
)


def stale(claim: Claim) -> str | None:
    """Return why a claim has to be measured; None if its result is of today's code."""
    result = claim.result()
    return "there is no result with all of its figures" if result is None else why_stale(result)


def main() -> None:
    """Measure the claims whose results are not of today's code, and exit; with 1 where a benchmark failed.

    Exits at once where code differs from its commit, as results name the commit that they measure.
    """
    shared = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    shared.add_argument("names", nargs="*", metavar="NAME", help="only these")
    shared.add_argument("--again", action="store_true", help="those of today's code, too")
    shared.add_argument("--list", action="store_true", help="say what would be measured, and why")
    asked = shared.parse_args()
    if unknown := set(asked.names) - {claim.benchmark for claim in CLAIMS}:
        shared.error(f"no claim is named {', '.join(sorted(unknown))}")
    if not asked.list and commit().endswith("-dirty"):
        sys.exit("code differs from its commit: commit it first, so that results name what they measure")
    failed = False
    for claim in CLAIMS:
        if asked.names and claim.benchmark not in asked.names:
            continue
        reason = "asked for" if asked.again else stale(claim)
        if reason is None or asked.list:
            print(f"{claim.benchmark:16} {f'due: {reason}' if reason else 'of today'}", flush=True)
            continue
        began_s = time.monotonic()
        command = [sys.executable, "-m", f"benchmarks.{claim.benchmark}", *claim.options, "--json", str(claim.file)]
        code = subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode
        failed |= code != 0
        outcome = "measured" if code == 0 else f"failed with exit code {code}"
        print(f"{claim.benchmark:16} {outcome} in {time.monotonic() - began_s:.0f} s", flush=True)
    if not asked.list:
        print("`make docs` writes the figures into README and the page of claims")
    sys.exit(failed)


if __name__ == "__main__":
    run_benchmark(main)
