"""Time to the same quality over slow links, by every published way to send less, side by side: ``--model NAME``.

The target is the quality that plain DDP has after `TARGET_AT` of its run. Rates are constant, so no side's schedule
ends where another needs more steps, and every side trains with the learning rate that suits it best, found on unlimited
links. There, training is done once by every side whose steps do not depend on links. Then, for each rate of the links,
the steps of every way to exchange are timed, and the sides that depend on links train from begin to end: hetopt's own
choice, averages of parameters, GraVAC. Composed times are up to a tenth shorter than whole runs, which favours the
others. ``--quick`` has fewer sides, fewer rates and shorter runs. At the first rate communication takes a tenth of
computing: there nothing can be gained, and a contest in which somebody gains is void.

Runs that differ in nothing but their seed end a point apart. Plain DDP and the sides that depend on links are means
over the same seeds; of the others the best single run counts, which favours them too. Times are those of training:
evaluations are left out on every side, and so is what comes before the first step: a run of a minute stands for one of
hours. What hetopt measures then is printed beside the table.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks._composed import Trajectory, Way, data_folder, final, mean_curve, qualities, reached_s, trajectory
from benchmarks._contenders import (
    AUTO,
    DIGITS,
    FACTORS,
    MODELS,
    OWN,
    PLAIN,
    SEEDS,
    SMOKE,
    STATIC,
    WORKERS,
    Contender,
    Model,
    Runs,
    hosts,
)
from benchmarks._outcome import Outcome, parser, publish, run_benchmark
from benchmarks._rehearsal import Log, Side, need_namespaces, rehearse, step_time_s

RING = 2 * (WORKERS - 1) / WORKERS
"""Bytes that each link carries for a byte of a dense exchange."""

Curve = Sequence[tuple[float, float]]
"""Seconds trained until each evaluation, and the quality then; larger is better."""


@dataclass(kw_only=True)
class Comparison:
    """The measured trajectories, step times and curves of every side.

    Attributes:
        runs: settings of all runs, with the declared time of a step.
        rates: time of a dense exchange over that of a step's computation, a column each.
        trajectories: of every side that trains on unlimited links, one a seed.
        step_times_s: of every way to exchange, by rate.
        curves: quality over time of every side that trained at a rate from begin to end.
        own_shares: bytes of hetopt's own choice over those of plain DDP, by rate.
        own_measuring_s: seconds in which hetopt measured network and compressors before its first step, by rate.
        own_computation: computation of a step of hetopt's own choice over what is declared, by rate; above 1 the
            miniature is too small for its machine.
    """

    runs: Runs
    rates: Sequence[float]
    trajectories: dict[str, list[Trajectory]]
    step_times_s: dict[float, dict[Way, float]] = field(default_factory=dict)
    curves: dict[tuple[str, float], Curve] = field(default_factory=dict)
    own_shares: dict[float, float] = field(default_factory=dict)
    own_measuring_s: dict[float, float] = field(default_factory=dict)
    own_computation: dict[float, float] = field(default_factory=dict)

    @property
    def target(self) -> float:
        """The quality to reach: that of plain DDP after `TARGET_AT` of its run."""
        return target(mean_curve([trajectory.evaluations for trajectory in self.trajectories[PLAIN]]))

    def final_quality(self, side: str, rate: float | None = None) -> float:
        """Return the quality at the end, at the last rate if none is given; larger is better."""
        return final(self.curve(side, self.rates[-1] if rate is None else rate))

    def curve(self, side: str, rate: float) -> Curve:
        """Return the mean quality over time of a side's seeds: measured at this rate, or composed of what was learned
        on unlimited links and the times of steps at this rate."""
        if (side, rate) in self.curves:
            return self.curves[side, rate]
        return mean_curve([trajectory.over(self.step_times_s[rate]) for trajectory in self.trajectories[side]])

    def seconds(self, side: str, rate: float) -> float | None:
        """Return the seconds until a side reaches the target; None if it never does."""
        return reached_s(self.curve(side, rate), self.target)

    def best(self, rate: float) -> tuple[float, str] | None:
        """Return the least seconds of the others, and the name; None if none of them reaches the target."""
        times = [(self.seconds(name, rate), name) for name in self.runs.others]
        return min(((time_s, name) for time_s, name in times if time_s is not None), default=None)

    def sent_share(self, side: str) -> float:
        """Return the bytes that a side sent over plain DDP's; of hetopt's own choice at the last rate."""
        return self.own_shares[self.rates[-1]] if side == AUTO else self.over_plain(self.trajectories[side][0])

    def over_plain(self, trajectory: Trajectory) -> float:
        """Return the bytes of a run over those of plain DDP's whole run."""
        plain = self.trajectories[PLAIN][0]
        return trajectory.sent_bytes / (plain.steps * plain.dense_bytes)

    def bits_per_s(self, rate: float) -> float:
        """Return the link rate at which a dense exchange takes ``rate`` times a step's computation."""
        assert self.runs.step_s is not None
        return 8 * RING * self.trajectories[PLAIN][0].dense_bytes / (rate * self.runs.step_s)


TARGET_AT = 0.7
"""Part of plain DDP's run after which it has the quality to reach: those who need more steps have them."""

HEADROOM = 2.0
"""Declared over measured computation. Four workers share two cores; exchanges take up to half as much processor time
again as computing does, which every host of a real cluster has for itself, and the machine is not always as fast."""

LEAST_STEP_S = 0.06
"""Least declared time of a step. What DDP and processes cost a step whatever the links are is about 1.5 ms here: of a
step of 15 ms it was a tenth, which whoever exchanges less often gains also where links cost nothing."""

RATES, QUICK_RATES, SMOKE_RATES = (0.1, 1.0, 5.0, 20.0), (0.1, 1.0, 20.0), (1.0, 5.0)
"""Time of a dense exchange over that of a step's computation; the last is called communication-bound."""

TIMED_S, LEAST_STEPS, MOST_STEPS = 6.0, 5, 16
"""How long steps are timed, about, and how many at least and at most."""


def measure(runs: Runs, rates: Sequence[float]) -> Comparison:
    """Return the comparison: every side trained, every exchange method timed at every rate.

    Args:
        runs: what is trained, and who takes part.
        rates: time of a dense exchange over that of a step's computation, a column each.

    Raises:
        RunFailed: a run failed.
    """
    unlimited = {name: each for name, each in runs.others.items() if not each.depends_on_links}
    factors, logs = tuned(runs)
    comparison = Comparison(
        runs=replace(runs, step_s=max(LEAST_STEP_S, HEADROOM * computation_s(logs[STATIC])), factors=factors),
        rates=rates,
        trajectories={name: [as_trajectory(runs, each, logs[name])] for name, each in unlimited.items()},
    )
    note(f"a step computes for {comparison.runs.step_s:.3f} s from here on")
    more = train(replace(runs, factors=factors), PLAIN, unlimited[PLAIN], None, seeds=runs.seeds[1:])
    comparison.trajectories[PLAIN] += [as_trajectory(runs, unlimited[PLAIN], log) for log in more]
    for rate in comparison.rates:
        note(f"timing steps at {rate:g}x")
        time_ways(comparison, rate)
        train_at(comparison, rate)
    return comparison


def tuned(runs: Runs) -> tuple[dict[str, float], dict[str, Log]]:
    """Return the factor on the learning rate by which each side needs the fewest steps, and the logs of these runs.

    Plain DDP has the one with which it is best at `TARGET_AT` of its run; so have the sides that decide by the links,
    hetopt's own choice among them, which do not run here and have no log. Runs have unlimited links and the first seed.
    """
    factors: dict[str, float] = {}
    chosen: dict[str, Log] = {}
    quality: float | None = None
    for name, each in runs.others.items():
        if each.decides_by_links:
            continue
        note(f"tuning {name}")
        sides = [runs.side(f"{factor:g}", each, factor=factor) for factor in FACTORS]
        logs = {float(factor): log for factor, [log] in rehearse(hosts(None), sides, rounds=1).items()}
        curves = {factor: as_trajectory(runs, each, log).evaluations for factor, log in logs.items()}
        if quality is None:  # plain DDP comes first
            quality = max(target(curve) for curve in curves.values())
        best = min(curves, key=lambda factor: (steps_to(curves[factor], quality), -final(curves[factor])))
        factors[name], chosen[name] = best, logs[best]
    return dict.fromkeys((*runs.others, AUTO), factors[PLAIN]) | factors, chosen


def target(curve: Curve) -> float:
    """Return the smoothed quality at `TARGET_AT` of a curve."""
    return final([point for point in curve if point[0] <= TARGET_AT * curve[-1][0]])


def steps_to(curve: Curve, quality: float) -> float:
    """Return the steps until a smoothed quality was reached; infinite if it never was."""
    steps = reached_s(curve, quality)
    return math.inf if steps is None else steps


def train_at(comparison: Comparison, rate: float) -> None:
    """Train hetopt's own choice, and the others that depend on links, at one rate with all seeds."""
    runs, job = comparison.runs, comparison.runs.model.job
    assert runs.step_s is not None
    for name, each in ((AUTO, OWN), *((name, each) for name, each in runs.others.items() if each.depends_on_links)):
        note(f"training {name} at {rate:g}x")
        logs = train(runs, name, each, comparison.bits_per_s(rate), seeds=runs.seeds)
        comparison.curves[name, rate] = mean_curve([qualities(log, job) for log in logs])
        trajectories = [as_trajectory(runs, each, log) for log in logs]
        if name == AUTO:
            comparison.own_shares[rate] = statistics.fmean(map(comparison.over_plain, trajectories))
            comparison.own_measuring_s[rate] = statistics.fmean(map(measuring_s, logs))
            comparison.own_computation[rate] = statistics.fmean(map(computation_s, logs)) / runs.step_s
        else:
            comparison.trajectories[name] = trajectories


def time_ways(comparison: Comparison, rate: float) -> None:
    """Time steps of every exchange method that a side has used and that was not timed at this rate yet."""
    runs, known = comparison.runs, comparison.step_times_s.setdefault(rate, {})
    assert runs.step_s is not None
    ways: dict[Way, float] = {}
    for seeds in comparison.trajectories.values():
        for each in seeds:
            ways |= {way: sent_bytes for way, sent_bytes in each.ways.items() if way not in known}
    timed: dict[Way, Side] = {}
    for way, sent_bytes in ways.items():
        expected_s = runs.step_s * (1 + 2 * rate * sent_bytes / comparison.trajectories[PLAIN][0].dense_bytes)
        steps = min(MOST_STEPS, max(LEAST_STEPS, round(TIMED_S / expected_s)))
        contender = Contender(by=way.by, compression=way.compression)
        timed[way] = runs.side(f"steps {len(timed) + 1} of {len(ways)}", contender, steps=steps)
    if timed:
        logs = rehearse(hosts(comparison.bits_per_s(rate)), list(timed.values()), rounds=1)
        for way, side in timed.items():
            known[way] = step_time_s(logs[side.name][0], from_step=side.spec.control_period_steps)


def train(
    runs: Runs, name: str, contender: Contender, rate_bits_per_s: float | None, *, seeds: Sequence[int] = SEEDS[:1]
) -> list[Log]:
    """Return the logs of whole runs, one a seed.

    ``rate_bits_per_s`` None: unlimited links. No seeds: no runs.
    """
    factor = runs.factors[name]
    sides = [runs.side(f"{name}, seed {seed}", contender, seed=seed, factor=factor) for seed in seeds]
    logs = rehearse(hosts(rate_bits_per_s), sides, rounds=1) if sides else {}
    return [logs[side.name][0] for side in sides]


def as_trajectory(runs: Runs, contender: Contender, log: Log) -> Trajectory:
    """Return the trajectory of a contender's log."""
    compression = runs.spec(contender).compression
    return trajectory(log, by=contender.by, compression=compression, job=runs.model.job)


def computation_s(log: Log) -> float:
    """Return the median seconds of a step's computation on the slowest worker."""
    slowest_s = [max(event["compute_s"]) for event in log if event["event"] == "step" and event["step"] > 5]
    return float(statistics.median(slowest_s))


def measuring_s(log: Log) -> float:
    """Return the seconds for which network and compressors were measured before the first step.

    0 where nothing was.
    """
    return float(next((event["measured_s"] for event in log if "measured_s" in event), 0.0))


def show(comparison: Comparison) -> None:
    """Print the table of seconds and speed-ups to the target by rate, with final quality and bytes."""
    job = comparison.runs.model.job
    sign = 1 if job.higher_is_better else -1
    print(f"\ntime to {job.metric} {sign * comparison.target:.4g}: seconds, and speed-up over {PLAIN}")
    print(
        f"columns: dense exchange over computation of a step, which takes {comparison.runs.step_s:.3f} s; "
        "*: trained at this rate from begin to end"
    )
    columns = "".join(f"{f'{rate:g}x':>16}" for rate in comparison.rates)
    print(f"{'':>20}{columns}{job.metric:>12}{'bytes':>9}")
    for name in (*comparison.runs.others, AUTO):
        cells = "".join(f"{cell(comparison, name, rate):>16}" for rate in comparison.rates)
        final_quality = sign * comparison.final_quality(name)
        print(f"{name:>20}{cells}{final_quality:>12.4g}{comparison.sent_share(name):>9.2%}")
    last = comparison.rates[-1]
    for rate in comparison.rates:
        print(f"{AUTO} at {rate:g}x: {worst(comparison, rate)}")
    print(f"{AUTO} computes for {max(comparison.own_computation.values()):.3f} times the declared time, at most")
    print(f"{AUTO} measures for {comparison.own_measuring_s[last]:.1f} s before its first step, which is left out")


def worst(comparison: Comparison, rate: float) -> str:
    """Return hetopt's own choice over plain DDP and over the best of the others in hindsight, and its name, as text.

    Says ``never`` where hetopt or all others never reach the target.
    """
    auto_s, plain_s, best = (comparison.seconds(AUTO, rate), comparison.seconds(PLAIN, rate), comparison.best(rate))
    if auto_s is None or best is None:
        return "never, or nobody else does"
    over_plain = "" if plain_s is None else f"{auto_s / plain_s:.2f} times {PLAIN}, "
    return f"{over_plain}{auto_s / best[0]:.2f} times the best in hindsight, {best[1]}"


def cell(comparison: Comparison, name: str, rate: float) -> str:
    """Return a side's seconds to the target at one rate as text, with its speed-up over plain DDP.

    A star marks a side that was trained at this rate.
    """
    seconds, plain = comparison.seconds(name, rate), comparison.seconds(PLAIN, rate)
    mark = "*" if (name, rate) in comparison.curves else " "
    if seconds is None:
        return f"never{mark}"
    return f"{seconds:.0f} s{mark}" if plain is None else f"{seconds:.0f} s {plain / seconds:5.2f}{mark}"


def outcome(comparison: Comparison, asked: str) -> Outcome:
    """Return the figures and goals; a side that never reaches the target has no seconds."""
    job, last = comparison.runs.model.job, comparison.rates[-1]
    sign = 1 if job.higher_is_better else -1
    results = Outcome(
        benchmark="time_to_target",
        quick=comparison.runs.quick,
        asked=asked,
        seeds=", ".join(map(str, comparison.runs.seeds)),
        figures={"declared_step_s": round(comparison.runs.step_s or 0.0, 4)},
    )
    for name in (*comparison.runs.others, AUTO):
        place = results.figures if name == AUTO else results.baselines
        for rate in comparison.rates:
            if (seconds := comparison.seconds(name, rate)) is not None:
                place[f"seconds_{key(name)}_at_{key(f'{rate:g}')}x"] = round(seconds, 2)
        place[f"final_{job.metric}_{key(name)}"] = round(sign * comparison.final_quality(name), 4)
        place[f"sent_over_dense_{key(name)}"] = round(comparison.sent_share(name), 5)
        place[f"rate_factor_{key(name)}"] = comparison.runs.factors[name]
    for rate in comparison.rates:
        auto_s, best = comparison.seconds(AUTO, rate), comparison.best(rate)
        if best is not None:
            results.goal(
                f"over_the_best_at_{key(f'{rate:g}')}x", NEVER if auto_s is None else auto_s / best[0], at_most=1.05
            )
        if (plain_s := comparison.seconds(PLAIN, rate)) is not None:
            results.goal(
                f"over_dense_at_{key(f'{rate:g}')}x", NEVER if auto_s is None else auto_s / plain_s, at_most=1.03
            )
    control, plain = comparison.rates[0], comparison.seconds(PLAIN, comparison.rates[0])
    if control <= CONTROL_RATE and plain is not None:
        times = [comparison.seconds(name, control) for name in (*comparison.runs.others, AUTO)]
        gain = max(plain / time_s for time_s in times if time_s is not None)
        results.goal("gain_in_the_control_cell", gain, at_most=1 + CONTROL_RATE)
    results.figures["measuring_before_the_first_step_s"] = round(comparison.own_measuring_s[last], 2)
    results.figures["computation_over_declared_at_worst"] = round(max(comparison.own_computation.values()), 4)
    below = (comparison.final_quality(PLAIN) - comparison.final_quality(AUTO)) / job.points
    results.goal("final_points_below_dense", below, at_most=0.5)
    return results


CONTROL_RATE = 0.1
"""Rate at which communication is so small that nobody can gain more than it: a contest whose control gains more is
void."""

NEVER = 1e3
"""Stands for a ratio to a time that never comes."""


def key(name: str) -> str:
    """Return a name as a part of a figure's name."""
    return "".join(letter if letter.isalnum() else "_" for letter in name.lower().replace(",", "").replace("-", ""))


def note(text: str) -> None:
    """Print progress on stderr."""
    print(f"time_to_target: {text}", file=sys.stderr, flush=True)


def chosen(name: str, *, quick: bool) -> Model:
    """Return the model of a name, or the one that stands for it where its data is not here.

    Only a quick run has such a model: a full one exits.
    """
    model = MODELS[name]
    if data_folder(model.job) is not None:
        return model
    where = f"the data of {name} is not here (HETOPT_SHARED_DATA says where it is)"
    if not quick:
        sys.exit(f"time_to_target measures nothing: {where}")
    print(f"{where}: the bundled digits stand for it")
    return DIGITS


def main() -> None:
    """Measure the comparison, and publish."""
    shared = parser(__doc__)
    shared.add_argument("--model", choices=sorted(MODELS), default="convnet", help="what is trained")
    asked = shared.parse_args()
    need_namespaces(or_skip=asked.smoke)
    if asked.smoke:
        comparison = measure(Runs(model=SMOKE, quick=True, only=(PLAIN, STATIC), seeds=SEEDS[:1]), SMOKE_RATES)
    else:
        model = chosen(asked.model, quick=asked.quick)
        comparison = measure(Runs(model=model, quick=asked.quick), QUICK_RATES if asked.quick else RATES)
    show(comparison)
    publish(outcome(comparison, f"--model {asked.model}"), asked.json)


if __name__ == "__main__":
    run_benchmark(main)
