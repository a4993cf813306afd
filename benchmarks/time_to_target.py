"""Time to the same quality over slow links, by every published way to send less, side by side: ``--model NAME``.

Training is done once, on unlimited links and as fast as the machine goes, by every side whose steps do not depend on
links. Then, for each rate of the links, the steps of every way to exchange are timed, and hetopt's own choice, which
does depend on links, trains from begin to end; where communication is dearest, so does the best of the others, which
shows how far composed times can be trusted.

Runs that differ in nothing but their seed end a point apart. So plain DDP, and hetopt's own where communication is
dearest, are means over the same seeds. Times are those of training: evaluations, and what models are brought together
for then, are left out on every side.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks._composed import Trajectory, Way, final, mean_curve, reached_s, trajectory
from benchmarks._contenders import (
    AUTO,
    DIGITS,
    MODELS,
    OTHERS,
    OWN,
    PLAIN,
    SMOKE,
    STATIC,
    WORKERS,
    Contender,
    Model,
    Runs,
    hosts,
)
from benchmarks._outcome import Bound, Outcome, parser, publish
from benchmarks._quality import data_folder, qualities
from benchmarks._rehearsal import Log, Side, need_namespaces, rehearse, step_time_s

HEADROOM = 1.3
"""Declared over measured computation: two cores are enough for four workers then, and for what they do besides."""

RATES, QUICK_RATES, SMOKE_RATES = (0.1, 1.0, 5.0, 20.0), (1.0, 20.0), (5.0,)
"""Time of a dense exchange over that of a step's computation; the last is called communication-bound."""

SEARCHED_AT = 5.0
"""Rate at which a side that weighs throughput trains: where compressing pays, and a run does not take an hour."""

SEEDS = (0, 1, 2)
"""Of plain DDP, and of hetopt's own where communication is dearest; the quick form has the first."""

RING = 2 * (WORKERS - 1) / WORKERS
"""Bytes that each link carries for a byte of a dense exchange."""

TIMED_S, LEAST_STEPS, MOST_STEPS = 6.0, 5, 16
"""How long steps are timed, about, and how many at least and at most."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A side at a rate: its quality over time, and whether it trained there from begin to end."""

    measured: Sequence[tuple[float, float]]
    end_to_end: bool


@dataclass(kw_only=True)
class Comparison:
    """What was measured.

    Attributes:
        runs: of what, with the declared time of a step.
        rates: columns.
        trajectories: of all but hetopt's own choice.
        plain: those of plain DDP, one a seed.
        cells: by side and rate.
        own_share: bytes of hetopt's own choice over those of plain DDP, by rate.
        composed_over_run: of the side that was both composed and run where communication is dearest; None: none was.
    """

    runs: Runs
    rates: Sequence[float]
    trajectories: dict[str, Trajectory]
    cells: dict[str, dict[float, Cell]]
    own_share: dict[float, float]
    plain: Sequence[Trajectory] = ()
    composed_over_run: float | None = None

    @property
    def target(self) -> float:
        """The quality to reach: a little less than where plain DDP ends."""
        return self.ends_with(PLAIN) - self.runs.model.margin

    def ends_with(self, side: str, rate: float | None = None) -> float:
        """Quality at the end, where communication is dearest if nothing else is said; larger is better."""
        return final(self.cells[side][self.rates[-1] if rate is None else rate].measured)

    def seconds(self, side: str, rate: float) -> float | None:
        """Until the target; None: never."""
        return reached_s(self.cells[side][rate].measured, self.target)

    def best_s(self, rate: float) -> float | None:
        """The least of the others; None: none of them reaches the target."""
        times = [self.seconds(name, rate) for name in self.runs.others]
        return min((time_s for time_s in times if time_s is not None), default=None)

    def sent_share(self, side: str) -> float:
        """Bytes over plain DDP's, of hetopt's own choice where communication is dearest."""
        return self.own_share[self.rates[-1]] if side == AUTO else self.over_plain(self.trajectories[side])

    def over_plain(self, trajectory: Trajectory) -> float:
        """Its bytes over those of plain DDP's whole run."""
        plain = self.trajectories[PLAIN]
        return trajectory.sent_bytes / (plain.steps * plain.dense_bytes)

    @property
    def common_quality(self) -> float:
        """The target, or where `STATIC` never reaches it what that ends with, as much less."""
        last = self.rates[-1]
        reached = self.seconds(STATIC, last) is not None
        return self.target if reached else self.ends_with(STATIC) - self.runs.model.margin

    def speed_up(self, rate: float) -> float:
        """Over `STATIC`, to the quality that both reach."""
        own, static = (reached_s(self.cells[side][rate].measured, self.common_quality) for side in (AUTO, STATIC))
        return 0.0 if own is None or static is None else static / own

    def bits_per_s(self, rate: float) -> float:
        """Of links over which a dense exchange takes ``rate`` times a step's computation."""
        assert self.runs.step_s is not None
        return 8 * RING * self.trajectories[PLAIN].dense_bytes / (rate * self.runs.step_s)


def measure(runs: Runs, rates: Sequence[float]) -> Comparison:
    """Train, time steps, and put both together.

    Args:
        runs: of what.
        rates: columns.

    Raises:
        RunFailed: a run failed.
    """
    fast = {name: each for name, each in runs.others.items() if not each.weighs_throughput}
    note(f"training {len(fast)} sides on unlimited links")
    logs = train(runs, fast, None)
    plain = [logs[PLAIN], *train_seeds(runs, OTHERS[PLAIN], None)]
    comparison = Comparison(
        runs=replace(runs, step_s=HEADROOM * computation_s(logs[STATIC])),
        rates=rates,
        trajectories={name: as_trajectory(runs, fast[name], log) for name, log in logs.items()},
        plain=[as_trajectory(runs, OTHERS[PLAIN], log) for log in plain],
        cells={},
        own_share={},
    )
    note(f"a step computes for {comparison.runs.step_s:.3f} s from here on")
    search(comparison)
    for rate in comparison.rates:
        note(f"timing steps, and training {AUTO}, at {rate:g}x")
        fill(comparison, rate)
    if not runs.quick:
        confirm(comparison)
    return comparison


def search(comparison: Comparison) -> None:
    """Train those that weigh throughput at one rate."""
    runs = comparison.runs
    sides = {name: each for name, each in runs.others.items() if each.weighs_throughput}
    if not sides:
        return
    note(f"training {', '.join(sides)} at {SEARCHED_AT:g}x")
    for name, log in train(runs, sides, comparison.bits_per_s(SEARCHED_AT)).items():
        comparison.trajectories[name] = as_trajectory(runs, sides[name], log)
        comparison.cells[name] = {SEARCHED_AT: Cell(measured=qualities(log, runs.model.job), end_to_end=True)}


def fill(comparison: Comparison, rate: float) -> None:
    """The column of a rate."""
    runs, found = comparison.runs, comparison.trajectories
    assert runs.step_s is not None
    ways: dict[Way, float] = {}
    for each in found.values():
        ways |= each.ways
    timed: dict[Way, Side] = {}
    for way, sent_bytes in ways.items():
        expected_s = runs.step_s * (1 + 2 * rate * sent_bytes / found[PLAIN].dense_bytes)
        steps = min(MOST_STEPS, max(LEAST_STEPS, round(TIMED_S / expected_s)))
        contender = Contender(by=way.by, compression=way.compression)
        timed[way] = runs.side(f"steps {len(timed) + 1} of {len(ways)}", contender, steps=steps)
    logs = rehearse(hosts(comparison.bits_per_s(rate)), [*timed.values(), runs.side(AUTO, OWN)], rounds=1)
    times = {
        way: step_time_s(logs[side.name][0], from_step=side.spec.control_period_steps) for way, side in timed.items()
    }
    for name, each in found.items():
        runs_of_it = comparison.plain if name == PLAIN else [each]
        composed = Cell(measured=mean_curve([one.over(times) for one in runs_of_it]), end_to_end=False)
        comparison.cells.setdefault(name, {}).setdefault(rate, composed)
    own = [logs[AUTO][0]]
    if rate == comparison.rates[-1]:
        own += train_seeds(runs, OWN, comparison.bits_per_s(rate))
    run = Cell(measured=mean_curve([qualities(log, runs.model.job) for log in own]), end_to_end=True)
    comparison.cells.setdefault(AUTO, {})[rate] = run
    comparison.own_share[rate] = comparison.over_plain(as_trajectory(runs, OWN, own[0]))


def confirm(comparison: Comparison) -> None:
    """Run the best of the others from begin to end where communication is dearest."""
    runs, rate = comparison.runs, comparison.rates[-1]
    times = {name: comparison.seconds(name, rate) for name in runs.others}
    reached = {name: time_s for name, time_s in times.items() if time_s is not None}
    best = min(reached, key=reached.__getitem__)
    note(f"training {best} at {rate:g}x")
    log = train(runs, {best: runs.others[best]}, comparison.bits_per_s(rate))[best]
    measured = qualities(log, runs.model.job)
    comparison.composed_over_run = comparison.cells[best][rate].measured[-1][0] / measured[-1][0]
    comparison.cells[best][rate] = Cell(measured=measured, end_to_end=True)


def train(runs: Runs, contenders: Mapping[str, Contender], rate_bits_per_s: float | None) -> dict[str, Log]:
    """The logs of whole runs."""
    sides = [runs.side(name, each) for name, each in contenders.items()]
    return {name: logs[0] for name, logs in rehearse(hosts(rate_bits_per_s), sides, rounds=1).items()}


def train_seeds(runs: Runs, contender: Contender, rate_bits_per_s: float | None) -> list[Log]:
    """The logs of whole runs with all seeds but the first."""
    if runs.quick:
        return []
    sides = [runs.side(f"seed {seed}", contender, seed=seed) for seed in SEEDS[1:]]
    logs = rehearse(hosts(rate_bits_per_s), sides, rounds=1)
    return [logs[side.name][0] for side in sides]


def as_trajectory(runs: Runs, contender: Contender, log: Log) -> Trajectory:
    """What a contender's log says."""
    compression = runs.spec(contender).compression
    return trajectory(log, by=contender.by, compression=compression, job=runs.model.job)


def computation_s(log: Log) -> float:
    """What a step's computation takes the slowest worker."""
    told = [max(event["compute_s"]) for event in log if event["event"] == "step" and event["step"] > 5]
    return float(statistics.median(told))


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
    if comparison.composed_over_run is not None:
        print(f"composed over measured time of the run that is both: {comparison.composed_over_run:.3f}")


def told(comparison: Comparison, name: str, rate: float) -> str:
    """One cell of it."""
    seconds, static = comparison.seconds(name, rate), comparison.seconds(STATIC, rate)
    mark = "*" if comparison.cells[name][rate].end_to_end else " "
    if seconds is None:
        return f"never{mark}"
    return f"{seconds:.0f} s{mark}" if static is None else f"{seconds:.0f} s {static / seconds:5.2f}{mark}"


def outcome(comparison: Comparison) -> Outcome:
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
        own, best = comparison.seconds(AUTO, rate), comparison.best_s(rate)
        if best is not None:
            figure = f"over_the_best_at_{key(f'{rate:g}')}x"
            figures[figure] = round(own / best, 4) if own is not None else NEVER
            goals[figure] = {"at_most": 1.05}
    if model.speed_up is not None:
        figures["speed_up_over_topk_10x"] = round(comparison.speed_up(last), 3)
        goals["speed_up_over_topk_10x"] = {"at_least": model.speed_up}
    figures["common_quality"] = round(sign * comparison.common_quality, 4)
    worst = min(comparison.ends_with(AUTO, rate) for rate in comparison.rates)
    figures["final_points_below_dense_at_worst"] = round((comparison.ends_with(PLAIN) - worst) / job.points, 3)
    figures["final_points_below_dense"] = round(
        (comparison.ends_with(PLAIN) - comparison.ends_with(AUTO)) / job.points, 3
    )
    goals["final_points_below_dense"] = {"at_most": 0.5}
    if comparison.composed_over_run is not None:
        figures["composed_over_run"] = round(comparison.composed_over_run, 4)
    return Outcome(
        benchmark="time_to_target", quick=comparison.runs.quick, figures=figures, goals=goals, baselines=baselines
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
    shared.add_argument("--model", choices=sorted(MODELS), default="resnet", help="whose sibling is trained")
    asked = shared.parse_args()
    need_namespaces(or_skip=asked.smoke)
    if asked.smoke:
        comparison = measure(Runs(model=SMOKE, quick=True, only=(PLAIN, STATIC)), SMOKE_RATES)
    else:
        runs = Runs(model=chosen(asked.model, quick=asked.quick), quick=asked.quick)
        comparison = measure(runs, QUICK_RATES if asked.quick else RATES)
    show(comparison)
    publish(outcome(comparison), asked.json)


if __name__ == "__main__":
    main()
