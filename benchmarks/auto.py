"""Time to a target under `--compression auto`, simulated, beside every fixed choice, and without each of its rules.

Three recorded jobs over seven networks (`benchmarks._simulated_exchange`): fast and slow ones, rates that change or
wander, timings that are wrong by a factor of 6.8, workers that share cores. The controller is the one that training
uses; what is simulated are the times of steps, the gains, and the steps that are really needed for a step's worth of
dense progress, by a coefficient that it is not told. Settling, trials and measurements count, and no fixed choice is
left out, whatever it keeps.

Each ablation takes one rule or constant away, halves or doubles it, on the same runs and on `CASES`.

The last part is AR-Topk's: its own schedules of latency and rate (arXiv 2312.02493), its own rule with its own settings
(`scan`, without the floor that hetopt gives it), and `auto` beside it.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import hetopt.trainer.comm.network_tracker as watch
import hetopt.trainer.policies.ratio.auto as auto
import hetopt.trainer.policies.ratio.paired_trial as twins
from benchmarks._outcome import Results, options, publish, run_benchmark
from benchmarks._simulated_exchange import (
    SimulatedJob,
    SimulatedNetwork,
    SimulatedRun,
    candidates_of,
    fixed_s,
    trained,
)
from hetopt.core.comm.cost import LinkSpeed
from hetopt.core.compression_slowdown import MOST_LOST
from hetopt.core.policy_settings import Settings
from hetopt.core.profile import Profile
from hetopt.core.run_spec import RatioPolicyName

RECORDED = Path(__file__).parent.parent / "tests" / "recorded"
GBIT = 1.25e8
TARGET = 400.0
"""Steps of dense training."""

SEEDS, ABLATION_SEEDS = 3, 2


@functools.cache
def jobs() -> tuple[SimulatedJob, ...]:
    """Three kinds of task: one that loses what it holds back (nobody measured digits), one that minds as a small ResNet
    does in a long run, and one that hardly minds (`hetopt.core.compression_slowdown` has both)."""
    return tuple(
        SimulatedJob.recorded(
            Profile.load(RECORDED / f"{name}.json"), name=name, share=share, turning=turning, bent=bent
        )
        for name, share, turning, bent in (
            ("digits", 64, 0.12, 2.0),
            ("resnet20-cifar10", 32, 0.7, 1.0),
            ("lstm-small", 5, 0.03, 1.0),
        )
    )


def steady(latency_s: float, gbit: float) -> Callable[[float, random.Random], LinkSpeed]:
    """A link that stays as it is."""
    return phases(latency_s, (gbit,))


def phases(latency_s: float, gbits: Sequence[float]) -> Callable[[float, random.Random], LinkSpeed]:
    """One rate after the other, each for as much progress."""

    return schedule([(latency_s, gbit) for gbit in gbits])


def schedule(links: Sequence[tuple[float, float]]) -> Callable[[float, random.Random], LinkSpeed]:
    """One latency, s, and rate, Gbit/s, after the other, each for as much progress."""

    def at(part: float, _: random.Random) -> LinkSpeed:
        latency_s, gbit = links[min(len(links) - 1, int(part * len(links)))]
        return LinkSpeed(latency_s=latency_s, bytes_per_s=GBIT * gbit)

    return at


def wandering(latency_s: float, gbit: float) -> Callable[[float, random.Random], LinkSpeed]:
    """Ten rates, each the one before times whatever chance says, from a twelfth to three times the first."""

    def at(part: float, draw: random.Random) -> LinkSpeed:
        log = 0.0
        for _ in range(int(part * 10) + 1):
            log = max(-2.5, min(1.2, log + draw.gauss(0, 0.8)))
        return LinkSpeed(latency_s=latency_s, bytes_per_s=GBIT * gbit * math.exp(log))

    return at


NETWORKS = (
    SimulatedNetwork(name="10_gbit", workers=8, link=steady(1e-4, 10)),
    SimulatedNetwork(name="100_mbit", workers=4, link=steady(5e-4, 0.1)),
    SimulatedNetwork(name="25_mbit_far", workers=4, link=steady(5e-3, 0.025)),
    SimulatedNetwork(name="rates_change", workers=4, link=phases(5e-4, (1, 0.1, 0.025, 1))),
    SimulatedNetwork(name="rates_wander", workers=4, link=wandering(1e-3, 0.2)),
    SimulatedNetwork(name="wrong_timings", workers=2, link=steady(5e-4, 0.3), slower=(("all_reduce", 6.8),)),
    SimulatedNetwork(name="shared_cores", workers=8, link=steady(5e-4, 0.4), wait_s=0.03, compress=3.0),
)


CASES = (
    SimulatedNetwork(name="loss_rises", workers=4, link=steady(5e-4, 0.1), is_unstable=True),
    SimulatedNetwork(name="loss_spikes", workers=4, link=steady(5e-4, 0.1), spikes=0.02),
    SimulatedNetwork(name="gains_change", workers=4, link=steady(5e-4, 0.1), gains=(2.0, 0.6, 1.5, 0.8)),
    SimulatedNetwork(name="minds_at_first", workers=4, link=steady(5e-4, 0.1), minds=(10.0, 1.0, 1.0, 1.0)),
    SimulatedNetwork(name="disturbed", workers=4, link=steady(5e-4, 0.2), disturbed=(0.01, 10, 2.0)),
    SimulatedNetwork(
        name="timed_too_long", workers=4, link=steady(5e-4, 0.3), slower=(("all_gather", 0.4), ("broadcast", 0.4))
    ),
    SimulatedNetwork(name="rates_change_long", workers=4, link=phases(5e-4, (1, 0.04, 1, 0.04, 0.2)), long=3),
)
"""What the networks above do not hold, for which some rules are there: late gradients for which the learning rate is
too high for a while, batches that are hard, gains that change, a task that minds late gradients at first, other work on
the machines, collectives that are quicker beside training than they were timed, and rates that last long."""


FALLING = ((1e-3, 25.0), (2e-3, 20.0), (4e-3, 15.0), (8e-3, 10.0), (16e-3, 5.0), (32e-3, 1.0))
SCHEDULES = (
    SimulatedNetwork(
        name="schedule_c1", workers=8, link=schedule(((1e-3, 25.0), (1e-3, 1.0), (50e-3, 1.0), (50e-3, 25.0)))
    ),
    SimulatedNetwork(name="schedule_c2", workers=8, link=schedule((*FALLING, *FALLING[-2::-1]))),
)
"""Of arXiv 2312.02493: C1 as it is printed; C2, which is printed in words, as the released code has it."""

PUBLISHED_SCAN: Settings = {"least_gain": 0.0}
"""AR-Topk's rule without the floor that hetopt gives it."""


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """What is taken away: an attribute of a module or class, and what stands there instead."""

    name: str
    place: object
    attribute: str
    instead: object

    @contextmanager
    def made(self) -> Iterator[None]:
        """While it is gone."""
        kept = getattr(self.place, self.attribute)
        setattr(self.place, self.attribute, self.instead)
        try:
            yield
        finally:
            setattr(self.place, self.attribute, kept)


_twins = auto.Outlook.worth_trying


def _late_twins(self: auto.Outlook, best: auto.Judged) -> float | None:
    return None if self.state.steps < 200 else _twins(self, best)


ABLATIONS = (
    Ablation(name="no_optimism_about_the_untried", place=auto, attribute="UNTRIED", instead=0.0),
    Ablation(name="more_optimism", place=auto, attribute="UNTRIED", instead=0.5),
    Ablation(name="trials_of_2_steps", place=auto, attribute="TRIAL_STEPS", instead=2),
    Ablation(name="trials_of_8_steps", place=auto, attribute="TRIAL_STEPS", instead=8),
    Ablation(name="nothing_forgotten", place=auto, attribute="FORGOTTEN", instead=math.inf),
    Ablation(name="any_saving_is_worth_a_change", place=auto, attribute="LEAST_SAVING", instead=0.0),
    Ablation(name="one_look_at_gains", place=auto, attribute="LOOK_EVERY_STEPS", instead=10**6),
    Ablation(name="looks_four_times_as_often", place=auto, attribute="LOOK_EVERY_STEPS", instead=12),
    Ablation(
        name="predictions_not_corrected", place=auto.Outlook, attribute="_longer", instead=lambda self, option: 1.0
    ),
    Ablation(name="no_twins", place=auto.Outlook, attribute="worth_trying", instead=lambda self, best: None),
    Ablation(name="twins_from_step_200_on", place=auto.Outlook, attribute="worth_trying", instead=_late_twins),
    Ablation(name="twins_tried_once", place=auto, attribute="TWINS_LATER", instead=10**6),
    Ablation(name="twins_every_50_steps", place=auto, attribute="TWINS_LATER", instead=1),
    Ablation(name="twins_after_25_steps", place=auto, attribute="TWINS_AFTER", instead=25),
    Ablation(name="twins_after_100_steps", place=auto, attribute="TWINS_AFTER", instead=100),
    Ablation(name="odds_of_twins_stay", place=auto, attribute="ODDS", instead=1.0),
    Ablation(name="twins_compared_every_2_steps", place=twins, attribute="CHUNK_STEPS", instead=2),
    Ablation(name="twins_compared_every_8_steps", place=twins, attribute="CHUNK_STEPS", instead=8),
    Ablation(name="twins_for_20_steps", place=twins, attribute="MOST_STEPS", instead=20),
    Ablation(name="twins_for_80_steps", place=twins, attribute="MOST_STEPS", instead=80),
    Ablation(name="twins_on_whole_batches", place=twins, attribute="PART", instead=1),
    Ablation(name="twins_on_quarter_batches", place=twins, attribute="PART", instead=4),
    Ablation(name="twins_judged_before_they_learned", place=twins, attribute="LEAST_DROP", instead=0.0),
    Ablation(name="twins_judged_at_half_the_drop", place=twins, attribute="LEAST_DROP", instead=0.025),
    Ablation(name="twins_judged_at_twice_the_drop", place=twins, attribute="LEAST_DROP", instead=0.1),
    Ablation(name="twins_harmful_as_soon_as_behind", place=twins, attribute="HARMFUL", instead=MOST_LOST),
    Ablation(name="twins_harmful_at_twice_as_much", place=twins, attribute="HARMFUL", instead=2 * twins.HARMFUL),
    Ablation(name="losses_may_rise", place=auto, attribute="RISEN", instead=math.inf),
    Ablation(name="losses_may_rise_by_a_quarter", place=auto, attribute="RISEN", instead=1.25),
    Ablation(name="losses_may_double", place=auto, attribute="RISEN", instead=2.0),
    Ablation(name="everything_ever_after_a_rise", place=auto, attribute="FULL_FOR", instead=10**6),
    Ablation(name="everything_briefly_after_a_rise", place=auto, attribute="FULL_FOR", instead=1.25),
    Ablation(name="fit_without_graces", place=watch, attribute="_GRACES_S", instead=(0.0,)),
    Ablation(name="fit_graces_cost_nothing", place=watch, attribute="_GRACE_COSTS", instead=0.0),
    Ablation(name="fit_no_time_counts_for_less", place=watch, attribute="CLIP", instead=1e6),
    Ablation(name="fit_half_the_timing_error", place=watch, attribute="TIMING_ERROR", instead=0.025),
    Ablation(name="fit_twice_the_timing_error", place=watch, attribute="TIMING_ERROR", instead=0.1),
    Ablation(name="fit_of_one_step", place=watch, attribute="_PASSES", instead=1),
    Ablation(name="fit_without_least_shares", place=watch, attribute="_LEAST_SHARE", instead=1e-9),
    Ablation(name="fit_surer_before_it_was_measured", place=watch, attribute="ANYWHERE_SD", instead=1.0),
    Ablation(name="measured_again_at_once", place=watch, attribute="MEASURED_AFTER", instead=0.0),
    Ablation(name="measured_again_rarely", place=watch, attribute="MEASURED_AFTER", instead=100.0),
    Ablation(name="no_change_is_seen", place=watch, attribute="ANOTHER", instead=math.inf),
    Ablation(name="one_period_shows_a_change", place=watch, attribute="IN_A_ROW", instead=1),
    Ablation(name="no_alarm", place=watch, attribute="SLOW", instead=math.inf),
    Ablation(name="not_measured_unasked", place=watch, attribute="MEASURED_ANYWAY_AFTER", instead=math.inf),
    Ablation(name="never_measured_again", place=watch.NetworkWatch, attribute="wants_measurement", instead=False),
)


@functools.cache
def references_s(job: SimulatedJob, network: SimulatedNetwork, seed: int) -> tuple[float, float]:
    """Seconds to the target with dense exchanges, and with the best fixed choice of all in hindsight, without noise."""
    candidates = candidates_of(job, network)

    def alone() -> SimulatedRun:
        return SimulatedRun(job=job, network=network, target=TARGET * network.long, seed=seed, noise=0.0)

    best_s = dense_s = fixed_s(alone(), candidates.dense)
    for candidate in candidates.all:
        best_s = min(best_s, fixed_s(alone(), candidate, patience=best_s))
    return dense_s, best_s


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One run beside the others: its time over that of the best fixed choice, and over that of dense training."""

    job: str
    network: str
    over_best: float
    over_dense: float


def compared(
    networks: Sequence[SimulatedNetwork],
    seeds: range,
    policy: RatioPolicyName = "auto",
    settings: Settings | None = None,
) -> list[Compared]:
    """A policy on every job, network and seed."""
    found = []
    for job in jobs():
        for network in networks:
            for seed in seeds:
                dense_s, best_s = references_s(job, network, seed)
                run = SimulatedRun(job=job, network=network, target=TARGET * network.long, seed=seed)
                elapsed_s = trained(run, policy, settings).elapsed_s
                if run.has_diverged:  # and begins anew, with everything sent
                    elapsed_s += dense_s
                found.append(
                    Compared(
                        job=job.name,
                        network=network.name,
                        over_best=elapsed_s / best_s,
                        over_dense=elapsed_s / dense_s,
                    )
                )
    return found


def mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(map(math.log, values)))


def networks_part(results: Results, *, quick: bool, smoke: bool) -> None:
    """`auto` on all networks, and on the cases."""
    seeds = range(1 if quick else SEEDS)
    networks = NETWORKS[1:4:2] if smoke else NETWORKS
    cases = CASES[:1] if smoke else CASES
    whole, others = compared(networks, seeds), compared(cases, seeds)
    print(f"{'job':18s} {'network':14s} over the best fixed choice (each seed), over dense")
    for job in jobs():
        for network in (*networks, *cases):
            own = [one for one in (*whole, *others) if (one.job, one.network) == (job.name, network.name)]
            told = " ".join(f"{one.over_best:.3f}" for one in own), " ".join(f"{one.over_dense:.3f}" for one in own)
            print(f"{job.name:18s} {network.name:14s} {told[0]:20s} {told[1]}")
            results.figures[f"{job.name.replace('-', '_')}_{network.name}_over_best"] = round(
                mean([one.over_best for one in own]), 4
            )
    results.figures["cases_over_best_mean"] = round(mean([one.over_best for one in others]), 4)
    results.figures["cases_over_best_worst"] = round(max(one.over_best for one in others), 4)
    results.figures["cases_over_dense_worst"] = round(max(one.over_dense for one in others), 4)
    results.figures["over_best_mean"] = round(mean([one.over_best for one in whole]), 4)
    results.figures["over_best_median"] = round(statistics.median(one.over_best for one in whole), 4)
    results.figures["over_best_worst"] = round(max(one.over_best for one in whole), 4)
    results.goal("over_dense_worst", max(one.over_dense for one in whole), at_most=1.03)


def ablations_part(results: Results, *, quick: bool, smoke: bool) -> None:
    """`auto` without each of its rules but those of twins and of the fit."""
    ablate(results, quick=quick, smoke=smoke, of_twins_and_fit=False)


def twins_and_fit_part(results: Results, *, quick: bool, smoke: bool) -> None:
    """`auto` without each rule of twins and of the fit."""
    ablate(results, quick=quick, smoke=smoke, of_twins_and_fit=True)


def ablate(results: Results, *, quick: bool, smoke: bool, of_twins_and_fit: bool) -> None:
    """`auto` without each of its rules, beside itself, on the networks and the cases."""
    names = ("twins", "odds", "fit")
    asked = [one for one in ABLATIONS if one.name.startswith(names) is of_twins_and_fit]
    everything = CASES[:1] if quick else (*NETWORKS, *CASES)
    some = range(1 if quick else ABLATION_SEEDS)
    once = compared(everything, some)
    for ablation in asked[:1] if smoke else asked:
        with ablation.made():
            rows = compared(everything, some)
        over = [after.over_best / before.over_best for before, after in zip(once, rows, strict=True)]
        results.figures[f"ablation_{ablation.name}"] = round(mean(over), 4)
        results.figures[f"ablation_{ablation.name}_worst"] = round(max(over), 4)
        print(f"{ablation.name:36s} {mean(over):.3f} of the time in the mean, {max(over):.3f} at worst", flush=True)


def schedules_part(results: Results, *, quick: bool, smoke: bool) -> None:
    """AR-Topk's rule and `auto` on AR-Topk's schedules."""
    seeds = range(1 if quick else SEEDS)
    print("\nover the best fixed choice and over dense, geometric means; at worst")
    rules: dict[RatioPolicyName, Settings] = {"scan": PUBLISHED_SCAN, "auto": {}}
    for policy, settings in rules.items():
        place = results.figures if policy == "auto" else results.baselines
        for network in SCHEDULES[:1] if smoke else SCHEDULES:
            rows = compared([network], seeds, policy, settings)
            told: dict[str, float] = {}
            for over in ("over_best", "over_dense"):
                each = [getattr(one, over) for one in rows]
                told |= {over: mean(each), f"{over}_worst": max(each)}
            place.update({f"{network.name}_{policy}_{name}": round(value, 4) for name, value in told.items()})
            print(f"{network.name:12s} {policy:6s} {' '.join(f'{value:.3f}' for value in told.values())}")


PARTS = {
    "networks": networks_part,
    "ablations": ablations_part,
    "ablations_of_twins_and_fit": twins_and_fit_part,
    "schedules": schedules_part,
}


def main() -> None:
    """Print the tables; the last line is JSON."""
    asked = options(__doc__, parts=list(PARTS))
    results = Results()
    for name in PARTS if asked.part is None else (asked.part,):
        PARTS[name](results, quick=asked.quick, smoke=asked.smoke)
    publish(results.outcome("auto", quick=asked.quick), asked.json_file, part=asked.part)


if __name__ == "__main__":
    run_benchmark(main)
