"""Time to the same quality over slow links, by every published way to send less, side by side: ``--model NAME``.

Training is done once, on unlimited links and as fast as the machine goes, by every side whose steps do not depend on
links. Then, for each rate of the links, the steps of every way to exchange are timed, and hetopt's own choice, which
does depend on links, trains from begin to end; so does the best of the others where it is close, since whole runs take
up to a tenth longer than steps that are timed. ``--quick`` has fewer sides, fewer rates and shorter runs; ``--sweep``
has all sides and all rates, in runs as short.

Runs that differ in nothing but their seed end a point apart. So plain DDP, hetopt's own choice, and those of the others
that are the best at some rate, are means over the same seeds. Times are those of training: evaluations, and what models
are brought together for then, are left out on every side, and so is what comes before the first step: a run of a minute
stands for one of hours. What hetopt measures then is told beside the table.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks._composed import Trajectory, Way, final, mean_curve, reached_s, trajectory
from benchmarks._contenders import (
    AUTO,
    DIGITS,
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
from benchmarks._outcome import Bound, Outcome, parser, publish, run_benchmark
from benchmarks._quality import data_folder, qualities
from benchmarks._rehearsal import Log, Side, need_namespaces, rehearse, step_time_s

RING = 2 * (WORKERS - 1) / WORKERS
"""Bytes that each link carries for a byte of a dense exchange."""

CLOSE = 0.8
"""Times the time of the best of the others, beyond which composed times do not do: runs take a tenth longer."""

Curve = Sequence[tuple[float, float]]
"""Seconds trained until each evaluation, and the quality then; larger is better."""


@dataclass(kw_only=True)
class Comparison:
    """What was measured.

    Attributes:
        runs: of what, with the declared time of a step.
        rates: columns.
        trajectories: of all but hetopt's own choice, one a seed; of most only the first.
        step_times_s: of every way to exchange, by rate.
        own: quality over time of hetopt's own choice, by rate.
        own_measuring_s: that hetopt measured network and compressors for before its first step, by rate.
        own_computation: what a step of hetopt's own choice computed for over what is declared, by rate; above 1 the
            miniature is too small for its machine.
        end_to_end: quality over time of others that trained at a rate from begin to end.
        own_share: bytes of hetopt's own choice over those of plain DDP, by rate.
        run_over_composed: how much longer a run from begin to end took than it was composed to take, of the sides
            that were both, by rate; their other seeds are taken to take as much longer.
    """

    runs: Runs
    rates: Sequence[float]
    trajectories: dict[str, list[Trajectory]]
    step_times_s: dict[float, dict[Way, float]] = field(default_factory=dict)
    own: dict[float, Curve] = field(default_factory=dict)
    own_share: dict[float, float] = field(default_factory=dict)
    own_measuring_s: dict[float, float] = field(default_factory=dict)
    own_computation: dict[float, float] = field(default_factory=dict)
    end_to_end: dict[tuple[str, float], Curve] = field(default_factory=dict)
    run_over_composed: dict[tuple[str, float], float] = field(default_factory=dict)

    @property
    def target(self) -> float:
        """The quality to reach: a little less than where plain DDP ends."""
        return self.ends_with(PLAIN) - self.runs.model.margin

    def ends_with(self, side: str, rate: float | None = None) -> float:
        """Quality at the end, where communication is dearest if nothing else is said; larger is better."""
        return final(self.measured(side, self.rates[-1] if rate is None else rate))

    def measured(self, side: str, rate: float) -> Curve:
        """In the mean of its seeds: as it was where the side trained at this rate, or else composed."""
        if side == AUTO:
            return self.own[rate]
        if (side, rate) in self.end_to_end:
            return self.end_to_end[side, rate]
        return self.composed(side, rate)

    def composed(self, side: str, rate: float) -> Curve:
        """What was learned on unlimited links, in steps that take as long as over links of this rate."""
        learned = mean_curve([one.over(self.step_times_s[rate]) for one in self.trajectories[side]])
        longer = self.run_over_composed.get((side, rate), 1.0)
        return [(longer * at_s, quality) for at_s, quality in learned]

    def is_run(self, side: str, rate: float) -> bool:
        """Whether the side trained at this rate from begin to end."""
        return side == AUTO or (side, rate) in self.end_to_end or (side, rate) in self.run_over_composed

    def seconds(self, side: str, rate: float) -> float | None:
        """Until the target; None: never."""
        return reached_s(self.measured(side, rate), self.target)

    def best(self, rate: float) -> tuple[float, str] | None:
        """The least of the others, and whose it is; None: none of them reaches the target."""
        times = [(self.seconds(name, rate), name) for name in self.runs.others]
        return min(((time_s, name) for time_s, name in times if time_s is not None), default=None)

    def is_close(self, rate: float) -> bool:
        """Whether the best of the others is about as fast as hetopt's own choice, or that is never there."""
        own, best = self.seconds(AUTO, rate), self.best(rate)
        return best is not None and (own is None or CLOSE * best[0] < own)

    def sent_share(self, side: str) -> float:
        """Bytes over plain DDP's, of hetopt's own choice where communication is dearest."""
        return self.own_share[self.rates[-1]] if side == AUTO else self.over_plain(self.trajectories[side][0])

    def over_plain(self, trajectory: Trajectory) -> float:
        """Its bytes over those of plain DDP's whole run."""
        plain = self.trajectories[PLAIN][0]
        return trajectory.sent_bytes / (plain.steps * plain.dense_bytes)

    @property
    def common_quality(self) -> float:
        """The target, or where `STATIC` never reaches it what that ends with, as much less."""
        last = self.rates[-1]
        reached = self.seconds(STATIC, last) is not None
        return self.target if reached else self.ends_with(STATIC) - self.runs.model.margin

    def speed_up(self, rate: float) -> float:
        """Over `STATIC`, to the quality that both reach."""
        own, static = (reached_s(self.measured(side, rate), self.common_quality) for side in (AUTO, STATIC))
        return 0.0 if own is None or static is None else static / own

    def bits_per_s(self, rate: float) -> float:
        """Of links over which a dense exchange takes ``rate`` times a step's computation."""
        assert self.runs.step_s is not None
        return 8 * RING * self.trajectories[PLAIN][0].dense_bytes / (rate * self.runs.step_s)


HEADROOM = 2.0
"""Declared over measured computation. Four workers share two cores; exchanges take up to half as much processor time
again as computing does, which every host of a real cluster has for itself, and the machine is not always as fast."""

RATES, QUICK_RATES, SMOKE_RATES = (0.1, 1.0, 5.0, 20.0), (0.1, 1.0, 20.0), (1.0, 5.0)
"""Time of a dense exchange over that of a step's computation; the last is called communication-bound."""

SEARCHED_AT = 5.0
"""Rate at which a side that weighs throughput trains: where compressing pays, and a run does not take an hour."""

MOST_LOOKS = 3
"""How often those that have become the best of the others are looked at more closely."""

TIMED_S, LEAST_STEPS, MOST_STEPS = 6.0, 5, 16
"""How long steps are timed, about, and how many at least and at most."""


def measure(runs: Runs, rates: Sequence[float]) -> Comparison:
    """Train, time steps, and put both together.

    Args:
        runs: of what.
        rates: columns.

    Raises:
        RunFailed: a run failed.
    """
    fast = {
        name: each for name, each in runs.others.items() if not each.weighs_throughput and not each.trains_at_every_rate
    }
    note(f"training {len(fast)} sides on unlimited links")
    sides = [runs.side(name, each) for name, each in fast.items()]
    logs = {name: told[0] for name, told in rehearse(hosts(None), sides, rounds=1).items()}
    comparison = Comparison(
        runs=replace(runs, step_s=HEADROOM * computation_s(logs[STATIC])),
        rates=rates,
        trajectories={name: [as_trajectory(runs, fast[name], log)] for name, log in logs.items()},
    )
    note(f"a step computes for {comparison.runs.step_s:.3f} s from here on")
    learn_more(comparison, PLAIN)
    search(comparison)
    for rate in comparison.rates:
        note(f"timing steps at {rate:g}x")
        time_ways(comparison, rate)
    for rate in comparison.rates:
        note(f"training {AUTO} at {rate:g}x")
        train_own(comparison, rate)
        train_local(comparison, rate)
        confirm(comparison, rate)
    look_closer(comparison)
    for rate in comparison.rates:
        confirm(comparison, rate)
    return comparison


def learn_more(comparison: Comparison, side: str) -> None:
    """Train a side with all other seeds on unlimited links."""
    runs = replace(comparison.runs, step_s=None)
    if runs.seeds[1:]:
        note(f"training {side} with {len(runs.seeds) - 1} more seeds")
    logs = train(runs, side, runs.others[side], None, seeds=runs.seeds[1:])
    comparison.trajectories[side] += [as_trajectory(runs, runs.others[side], log) for log in logs]


def search(comparison: Comparison) -> None:
    """Train those that weigh throughput at one rate."""
    runs = comparison.runs
    for name, each in runs.others.items():
        if each.weighs_throughput:
            note(f"training {name} at {SEARCHED_AT:g}x")
            [log] = train(runs, name, each, comparison.bits_per_s(SEARCHED_AT))
            comparison.trajectories[name] = [as_trajectory(runs, each, log)]
            comparison.end_to_end[name, SEARCHED_AT] = qualities(log, runs.model.job)


def time_ways(comparison: Comparison, rate: float) -> None:
    """Steps of every way to exchange that some side has used, and that were not timed at this rate yet."""
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


def train_own(comparison: Comparison, rate: float) -> None:
    """Hetopt's own choice at a rate, with all seeds."""
    runs = comparison.runs
    own = train(runs, AUTO, OWN, comparison.bits_per_s(rate), seeds=runs.seeds)
    comparison.own[rate] = mean_curve([qualities(log, runs.model.job) for log in own])
    sent = [comparison.over_plain(as_trajectory(runs, OWN, log)) for log in own]
    comparison.own_share[rate] = statistics.fmean(sent)
    comparison.own_measuring_s[rate] = statistics.fmean(map(measuring_s, own))
    assert runs.step_s is not None
    comparison.own_computation[rate] = statistics.fmean(map(computation_s, own)) / runs.step_s


def train_local(comparison: Comparison, rate: float) -> None:
    """Those that average parameters, at a rate, with all seeds."""
    runs = comparison.runs
    for name, each in runs.others.items():
        if each.trains_at_every_rate:
            note(f"training {name} at {rate:g}x")
            logs = train(runs, name, each, comparison.bits_per_s(rate), seeds=runs.seeds)
            comparison.trajectories[name] = [as_trajectory(runs, each, log) for log in logs]
            comparison.end_to_end[name, rate] = mean_curve([qualities(log, runs.model.job) for log in logs])


def look_closer(comparison: Comparison) -> None:
    """Train the best of the others at any rate with all seeds, too: the best of single runs is better than it is."""
    for _ in range(MOST_LOOKS):
        best = [found[1] for rate in comparison.rates if (found := comparison.best(rate)) is not None]
        single = [
            name
            for name in dict.fromkeys(best)
            if len(comparison.trajectories[name]) < len(comparison.runs.seeds)
            and not comparison.runs.others[name].weighs_throughput
        ]
        if not single:
            return
        for name in single:
            learn_more(comparison, name)
        for rate in comparison.rates:
            time_ways(comparison, rate)


def confirm(comparison: Comparison, rate: float) -> None:
    """Run the best of the others from begin to end where it is close, and in the long forms at the last rate, too."""
    runs, found = comparison.runs, comparison.best(rate)
    is_asked = comparison.is_close(rate) or (runs.every_side and rate == comparison.rates[-1])
    if found is None or comparison.is_run(found[1], rate) or not is_asked:
        return
    _, best = found
    note(f"training {best} at {rate:g}x")
    [log] = train(runs, best, runs.others[best], comparison.bits_per_s(rate))
    composed = comparison.trajectories[best][0].over(comparison.step_times_s[rate])
    comparison.run_over_composed[best, rate] = qualities(log, runs.model.job)[-1][0] / composed[-1][0]


def train(
    runs: Runs, name: str, contender: Contender, rate_bits_per_s: float | None, *, seeds: Sequence[int] = SEEDS[:1]
) -> list[Log]:
    """The logs of whole runs, one a seed."""
    sides = [runs.side(f"{name}, seed {seed}", contender, seed=seed) for seed in seeds]
    logs = rehearse(hosts(rate_bits_per_s), sides, rounds=1) if sides else {}
    return [logs[side.name][0] for side in sides]


def as_trajectory(runs: Runs, contender: Contender, log: Log) -> Trajectory:
    """What a contender's log says."""
    compression = runs.spec(contender).compression
    return trajectory(log, by=contender.by, compression=compression, job=runs.model.job)


def computation_s(log: Log) -> float:
    """What a step's computation takes the slowest worker."""
    told = [max(event["compute_s"]) for event in log if event["event"] == "step" and event["step"] > 5]
    return float(statistics.median(told))


def measuring_s(log: Log) -> float:
    """What network and compressors were measured for before the first step."""
    return float(next((event["measured_s"] for event in log if "measured_s" in event), 0.0))


def show(comparison: Comparison) -> None:
    """The table for people."""
    job = comparison.runs.model.job
    sign = 1 if job.higher_is_better else -1
    print(f"\ntime to {job.metric} {sign * comparison.target:.4g}: seconds, and speed-up over {STATIC}")
    print(
        f"columns: dense exchange over computation of a step, which takes {comparison.runs.step_s:.3f} s; "
        "*: run from begin to end"
    )
    columns = "".join(f"{f'{rate:g}x':>16}" for rate in comparison.rates)
    print(f"{'':>20}{columns}{job.metric:>12}{'bytes':>9}")
    for name in (*comparison.runs.others, AUTO):
        cells = "".join(f"{told(comparison, name, rate):>16}" for rate in comparison.rates)
        reached = sign * comparison.ends_with(name)
        print(f"{name:>20}{cells}{reached:>12.4g}{comparison.sent_share(name):>9.2%}")
    last = comparison.rates[-1]
    print(
        f"{comparison.speed_up(last):.2f} times as fast as {STATIC} at {last:g}x to {job.metric} "
        f"{sign * comparison.common_quality:.4g}, which both reach"
    )
    print(f"{AUTO} computes for {max(comparison.own_computation.values()):.3f} times the declared time, at most")
    print(f"{AUTO} measures for {comparison.own_measuring_s[last]:.1f} s before its first step, which is left out")
    for (name, rate), longer in comparison.run_over_composed.items():
        print(f"{name} at {rate:g}x took {longer:.3f} times as long as composed")


def told(comparison: Comparison, name: str, rate: float) -> str:
    """One cell of it."""
    seconds, static = comparison.seconds(name, rate), comparison.seconds(STATIC, rate)
    mark = "*" if comparison.is_run(name, rate) else " "
    if seconds is None:
        return f"never{mark}"
    return f"{seconds:.0f} s{mark}" if static is None else f"{seconds:.0f} s {static / seconds:5.2f}{mark}"


def outcome(comparison: Comparison, asked: str) -> Outcome:
    """Figures and goals; a time that is not there was never."""
    model, last = comparison.runs.model, comparison.rates[-1]
    job, sign = model.job, 1 if model.job.higher_is_better else -1
    figures: dict[str, float] = {"declared_step_s": round(comparison.runs.step_s or 0.0, 4)}
    goals: dict[str, dict[Bound, float]] = {}
    baselines: dict[str, float] = {}
    for name in (*comparison.runs.others, AUTO):
        place = figures if name == AUTO else baselines
        for rate in comparison.rates:
            seconds = comparison.seconds(name, rate)
            if seconds is not None:
                place[f"seconds_{key(name)}_at_{key(f'{rate:g}')}x"] = round(seconds, 2)
        place[f"final_{job.metric}_{key(name)}"] = round(sign * comparison.ends_with(name), 4)
        place[f"sent_over_dense_{key(name)}"] = round(comparison.sent_share(name), 5)
    for rate in comparison.rates:
        own, best = comparison.seconds(AUTO, rate), comparison.best(rate)
        if best is not None:
            figure = f"over_the_best_at_{key(f'{rate:g}')}x"
            figures[figure] = round(own / best[0], 4) if own is not None else NEVER
            goals[figure] = {"at_most": 1.05}
    if model.speed_up is not None:
        figures["speed_up_over_topk_10x"] = round(comparison.speed_up(last), 3)
        goals["speed_up_over_topk_10x"] = {"at_least": model.speed_up}
    figures["measuring_before_the_first_step_s"] = round(comparison.own_measuring_s[last], 2)
    figures["computation_over_declared_at_worst"] = round(max(comparison.own_computation.values()), 4)
    figures["common_quality"] = round(sign * comparison.common_quality, 4)
    worst = min(comparison.ends_with(AUTO, rate) for rate in comparison.rates)
    figures["final_points_below_dense_at_worst"] = round((comparison.ends_with(PLAIN) - worst) / job.points, 3)
    figures["final_points_below_dense"] = round(
        (comparison.ends_with(PLAIN) - comparison.ends_with(AUTO)) / job.points, 3
    )
    goals["final_points_below_dense"] = {"at_most": 0.5}
    for (name, rate), longer in comparison.run_over_composed.items():
        baselines[f"run_over_composed_{key(name)}_at_{key(f'{rate:g}')}x"] = round(longer, 4)
    return Outcome(
        benchmark="time_to_target",
        asked=asked,
        quick=comparison.runs.quick,
        figures=figures,
        goals=goals,
        baselines=baselines,
    )


NEVER = 1e3
"""Stands for a ratio to a time that never comes."""


def key(name: str) -> str:
    """A name as a part of a figure's."""
    return "".join(letter if letter.isalnum() else "_" for letter in name.lower().replace(",", "").replace("-", ""))


def note(text: str) -> None:
    """Progress."""
    print(f"time_to_target: {text}", file=sys.stderr, flush=True)


def chosen(name: str, *, quick: bool) -> Model:
    """The model, or what stands for it where its data is not here."""
    model = MODELS[name]
    if data_folder(model.job) is not None:
        return model
    where = f"the data of {name} is not here (HETOPT_SHARED_DATA says where it is)"
    if not quick:
        sys.exit(f"time_to_target measures nothing: {where}")
    print(f"{where}: the bundled digits stand for it")
    return DIGITS


def main() -> None:
    """Measure and publish."""
    shared = parser(__doc__)
    shared.add_argument("--model", choices=sorted(MODELS), default="convnet", help="what is trained")
    shared.add_argument("--sweep", action="store_true", help="every side at every rate, for no longer than in --quick")
    asked = shared.parse_args()
    need_namespaces(or_skip=asked.smoke)
    if asked.smoke:
        runs = Runs(model=SMOKE, quick=True, only=(PLAIN, STATIC), seeds=SEEDS[:1])
        comparison = measure(runs, SMOKE_RATES)
    else:
        every_side = asked.sweep or not asked.quick
        model = chosen(asked.model, quick=asked.quick)
        runs = Runs(model=model, quick=asked.quick or asked.sweep, every_side=every_side)
        comparison = measure(runs, RATES if every_side else QUICK_RATES)
    show(comparison)
    publish(outcome(comparison, f"--model {asked.model}{' --sweep' if asked.sweep else ''}"), asked.json)


if __name__ == "__main__":
    run_benchmark(main)
