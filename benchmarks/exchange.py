"""What exchanges cost: the model against published tables and rehearsed networks; then `auto` while rates change."""

from __future__ import annotations

import csv
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._collectives import Cell, Request
from benchmarks._outcome import DATA, Outcome, options, publish, run_benchmark
from benchmarks._published_collectives import gathered, published_ring, published_tree, shared_index, time_s
from benchmarks._rehearsal import Log, Ratio, launch, need_namespaces, time_exchanges
from hetopt.backends.emulation.conductor import CONDITION_CHANGED
from hetopt.core.comm.cost import LinkSpeed
from hetopt.core.events.log import Event
from hetopt.core.run_spec import (
    EVERY_HOST,
    Change,
    Compression,
    DeclaredTime,
    EmulatedHost,
    RunSpec,
    ScaledEmulation,
    StopRule,
    WorkerSpec,
)
from hetopt.core.training_laws import MOST_LOST, distance

TOY = f"{Path(__file__).with_name('_toy.py')}:broad_digits"
WORKERS = 4
COMPUTE_S = 0.06
"""Of a step; the four workers of a small machine compute for real well within it."""

SHARE = 16
PHASES = (1e9, 1e8, 2.5e7, 1e9)
"""Rates in bits a second, one after the other."""

FIXED = (
    Compression(),
    Compression(name="bf16"),
    Compression(name="int4"),
    Compression(name="int8"),
    Compression(name="topk", ratio=0.01, coding="packed_bf16"),
    Compression(name="topk", ratio=0.1, collective="ar_topk_star", coding="packed_bf16"),
    Compression(name="topk", ratio=0.001, coding="packed_bf16"),
    Compression(name="topk", ratio=0.1, coding="packed_bf16"),
    Compression(name="topk", ratio=0.03, coding="packed_bf16"),
    Compression(name="topk", ratio=0.003, coding="packed_bf16"),
    Compression(name="topk", ratio=0.1),
    Compression(name="topk", ratio=0.01),
    Compression(name="topk", ratio=0.001),
    Compression(name="topk", ratio=0.01, collective="ar_topk_star", coding="packed_bf16"),
    Compression(name="topk", ratio=0.001, collective="ar_topk_star", coding="packed_bf16"),
)
AUTO = "auto"
TWINS_TRIED = "twins_tried"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The cost of progress of a run while the links had one rate.

    J is the time that one dense step's progress took: seconds over progress, the sum over steps of 1 / slowdown. The
    seconds are those of steps, and of what is decided and measured between them.

    Attributes:
        whole_j_s: over all control periods that lie within the phase.
        settled_j_s: over the later half of them, trials of twins left out: their price is paid once.
        slowdown: steps for the progress of one dense step, over the later half.
        ways: in which gradients were exchanged, in their order.
    """

    whole_j_s: float
    settled_j_s: float
    slowdown: float
    ways: tuple[str, ...]

    @property
    def loses_much(self) -> bool:
        """Return whether compression loses more than hetopt accepts where the number of steps is fixed, as here."""
        return self.slowdown > 1 + MOST_LOST


def scheduled_runs(*, phase_steps: int, fixed_steps: int, period: int, fixed: int) -> dict[str, RunSpec]:
    """Return the specs of the first ``fixed`` fixed choices, and of `auto`, through the phases.

    What stays the same needs fewer steps of a phase to show what they are like.
    """
    runs = {_name(way): _spec(way, fixed_steps, period) for way in FIXED[:fixed]}
    auto = _spec(Compression(), phase_steps, period)
    runs[AUTO] = auto.model_copy(update={"ratio_policy": "auto", "collective_policy": "cheapest"})
    return runs


def slowdown_coefficients(log: Log) -> list[float]:
    """Return the slowdown coefficient that `auto` estimated, averaged over the later half of each phase.

    All sides are judged by the same: whether it is right is not asked here, but whether what it says is cheapest is
    found when the network changes.

    Raises:
        ValueError: as of `_by_phase`.
    """
    by_phase = [[float(event["exchange"]["slowdown_coefficient"]) for event in periods] for periods in _by_phase(log)]
    return [statistics.fmean(phase[len(phase) // 2 :]) for phase in by_phase]


def phases_of(log: Log, coefficients: Sequence[float]) -> list[Phase]:
    """Return the cost of progress in each phase of a run, with a slowdown coefficient for each.

    Raises:
        ValueError: a phase was over within a period.
    """
    return [
        Phase(
            whole_j_s=_seconds(periods) / _progress(periods, coefficient),
            settled_j_s=(_seconds(later) - sum(period["twins_s"] for period in later)) / _progress(later, coefficient),
            slowdown=sum(period["steps"] for period in later) / _progress(later, coefficient),
            ways=tuple(way for way, _ in itertools.groupby(str(period["exchange"]["way"]) for period in periods)),
        )
        for periods, coefficient in zip(_by_phase(log), coefficients, strict=True)
        for later in (periods[len(periods) // 2 :],)
    ]


def _by_phase(log: Log) -> list[list[Event]]:
    """Return the control periods within each phase, with the seconds of paired trials before them.

    A period during which rates change belongs to no phase.

    Raises:
        ValueError: a phase has no period.
    """
    phases: list[list[Event]] = [[]]
    straddles, twins_s = False, 0.0
    for event in log:
        if event["event"] == TWINS_TRIED:
            twins_s += event["took_s"]
        elif event["event"] == CONDITION_CHANGED:
            if not straddles:  # one event a host
                phases.append([])
            straddles = True
        elif event["event"] == "step":
            if not straddles:
                phases[-1].append({**event, "twins_s": twins_s})
            straddles, twins_s = False, 0.0
    if not all(phases):
        raise ValueError(
            f"of {len(phases)} phases, {sum(not periods for periods in phases)} had no whole control period"
        )
    return phases


def _seconds(periods: Sequence[Event]) -> float:
    """Return the seconds of periods: of their steps, and of all that is done between them."""
    return float(sum(period["steps"] * (period["step_time_s"] + period["control_s"]) for period in periods))


def _progress(periods: Sequence[Event], coefficient: float) -> float:
    """Return the progress of periods in dense steps."""
    return float(
        sum(period["steps"] / (1 + coefficient * distance(min(1.0, period["exchange"]["gain"]))) for period in periods)
    )


def _name(way: Compression) -> str:
    parts = [way.name, f"{way.ratio:g}" if way.ratio < 1 else "", way.coding or ""]
    return " ".join(filter(None, [*parts, "" if way.collective == "auto" else way.collective]))


def _spec(way: Compression, phase_steps: int, period: int) -> RunSpec:
    """Return the spec of a run with one exchange method, through all phases of link rates."""
    hosts = tuple(EmulatedHost(name=f"h{place}", rate_bits_per_s=PHASES[0]) for place in range(WORKERS))
    changes = tuple(
        Change(host=EVERY_HOST, at_step=number * phase_steps, rate_bits_per_s=rate)
        for number, rate in enumerate(PHASES)
        if number
    )
    workers = tuple(
        WorkerSpec(
            host=host.name,
            type="equal",
            local_batch_size=SHARE,
            threads=1,
            declared=DeclaredTime(fixed_s=COMPUTE_S / 2, per_sample_s=COMPUTE_S / 2 / SHARE),
        )
        for host in hosts
    )
    return RunSpec(
        task=TOY,
        workers=workers,
        compression=way,
        batch_policy="static",
        stop=StopRule(max_steps=len(PHASES) * phase_steps, target=True),
        evaluate_every_epochs=1e6,
        control_period_steps=period,
        checkpoint_every_s=1e6,
        miniature=ScaledEmulation(hosts=hosts, changes=changes),
    )


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The sizes and durations of a form of the benchmark."""

    hosts: tuple[int, ...]
    rates: tuple[float, ...]
    gradients: tuple[int, ...]
    repeats: int
    cell_s: float
    phase_steps: int
    fixed_steps: int
    """The same for choices that stay what they are."""
    period: int
    rounds: int
    """Runs of `auto`, and of the fixed choices that come close to the best."""
    fixed: int
    """Fixed choices beside `auto`, of `FIXED` from the start."""


SMOKE = Scale(
    hosts=(2,), rates=(1e9,), gradients=(25_000,), repeats=1, cell_s=1.0, phase_steps=20, fixed_steps=20, period=5,
    rounds=2, fixed=1,
)  # fmt: skip
QUICK = Scale(
    hosts=(2, 4), rates=(2.5e7, 1e9), gradients=(2_500, 250_000, 2_500_000), repeats=5, cell_s=3.0,
    phase_steps=150, fixed_steps=20, period=5, rounds=3,
    fixed=4,
)  # fmt: skip
FULL = Scale(
    hosts=(2, 4, 8), rates=(2.5e7, 1e8, 1e9), gradients=(2_500, 25_000, 250_000, 2_500_000, 12_500_000), repeats=11,
    cell_s=20.0, phase_steps=150, fixed_steps=25, period=5, rounds=5,
    fixed=99,
)  # fmt: skip


# The cost model against published tables


def published_part(scale: Scale, results: Outcome) -> None:
    """Compare the cost model with the 27 settings of arXiv 2312.02493, Table VI: cheapest collectives and times.

    Without the published tables it prints so and records nothing.
    """
    file = DATA / "published" / "artopk_table6.csv"
    if not file.is_file():
        print("the published tables are not here; the cost model is not compared with them")
        return
    with file.open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["in_regression"] == "1"]
    errors, same = [], 0
    for row in rows:
        ours_ms = [1e3 * seconds for seconds in _table_row(row)]
        theirs_ms = [float(row[f"{name}_ms"]) for name in ("ag", "art_ring", "art_tree")]
        errors += [abs(our / their - 1) for our, their in zip(ours_ms, theirs_ms, strict=True)]
        same += ours_ms.index(min(ours_ms)) == theirs_ms.index(min(theirs_ms))
    print(
        f"published table: the same cheapest collective in {same} of {len(rows)} settings; times within "
        f"{max(errors):.1%}, {statistics.fmean(errors):.1%} on average"
    )
    results.goal("published_same_best", same, at_least=27)
    results.goal("published_largest_error", max(errors), at_most=0.11)
    results.goal("published_mean_error", statistics.fmean(errors), at_most=0.035)


def _table_row(row: dict[str, str]) -> tuple[float, float, float]:
    """Return the seconds of all-gather, and of AR-Topk over a ring and a tree; an index weighs as much as a value."""
    workers = int(row["workers"])
    sent = 4.0 * int(row["params_from_code"]) * float(row["kept_fraction"])
    link = LinkSpeed(latency_s=float(row["latency_ms"]) / 1e3, bytes_per_s=float(row["bandwidth_gbps"]) * 1.25e8)
    return (
        time_s(gathered(2 * sent, workers), link, algorithms=published_ring),
        time_s(shared_index(sent, sent, workers), link, algorithms=published_ring),
        time_s(shared_index(sent, sent, workers), link, algorithms=published_tree),
    )


# The cost model against measured exchanges

WAYS = (
    Compression(),
    Compression(name="topk", ratio=0.1),
    Compression(name="topk", ratio=0.01),
    Compression(name="topk", ratio=0.1, collective="ar_topk_star"),
    Compression(name="qsgd_maxnorm"),
    Compression(name="bf16"),
)


def measured_part(scale: Scale, results: Outcome) -> None:
    """Compare the calibrated cost model with measured exchanges, for every method on every network.

    Exchanges that would take too long are left out and counted.
    """
    print("\nmeasured exchanges (ms) and the error of what was expected of them after calibration")
    print(f"{'hosts':>5} {'Mbit/s':>7} {'gradient':>9}  " + "  ".join(f"{_name(way):>22}" for way in WAYS))
    errors: dict[tuple[int, float, int, str], float] = {}
    left_out = 0
    for hosts, rate in itertools.product(scale.hosts, scale.rates):
        print(f"  {hosts} hosts at {rate / 1e6:g} Mbit/s", file=sys.stderr, flush=True)
        request = Request(gradients=scale.gradients, ways=WAYS, repeats=scale.repeats, cell_s=scale.cell_s)
        network = [EmulatedHost(name=f"h{place}", rate_bits_per_s=rate) for place in range(hosts)]
        answer = time_exchanges(network, request)
        for numel, cells in itertools.groupby(answer.cells, key=lambda cell: cell.numel):
            row = list(cells)
            print(f"{hosts:>5} {rate / 1e6:>7g} {_size(4 * numel):>9}  " + "  ".join(map(_cell, row)), flush=True)
            for cell in row:
                if cell.sync_s is None:
                    left_out += 1
                else:
                    errors[hosts, rate, numel, _name(cell.way)] = abs(cell.expected_s / cell.sync_s - 1)
    print(f"{left_out} cells that would have taken more than {scale.cell_s:g} s were left out")
    results.goal("cost_model_median_error", statistics.median(errors.values()), at_most=0.10)
    results.figures["cost_model_cells"] = len(errors)
    results.figures["cost_model_cells_left_out"] = left_out
    for axis, name in enumerate(("hosts", "rate_bits_per_s", "gradient_elements", "way")):
        medians = []
        for value in dict.fromkeys(key[axis] for key in errors):
            median = statistics.median(error for key, error in errors.items() if key[axis] == value)
            medians.append(f"{value if isinstance(value, str) else f'{value:g}'}: {median:.1%}")
            results.figures[f"cost_model_median_error_{name}_{value}".replace(" ", "_")] = round(median, 4)
        print(f"median error by {name}: {', '.join(medians)}")
    print(
        f"median error {statistics.median(errors.values()):.1%}, "
        f"{sum(error <= 0.1 for error in errors.values())} of {len(errors)} within 10 %, "
        f"{sum(error <= 0.25 for error in errors.values())} within 25 %"
    )


def _cell(cell: Cell) -> str:
    """Return a cell of the table: ms, and the error of what was expected."""
    if cell.sync_s is None:
        return f"{'left out':>22}"
    return f"{1e3 * cell.sync_s:>13.4g} {cell.expected_s / cell.sync_s - 1:>+8.1%}"


def _size(count: int) -> str:
    return f"{count / 1e6:g} MB" if count >= 1e6 else f"{count / 1e3:g} kB"


# A schedule of link rates while training


def schedule_part(scale: Scale, results: Outcome) -> None:
    """Run every fixed choice and `auto` through a schedule of link rates, then `auto` and the closest ones in turn.

    The median run over the best fixed choice that loses little gives the goal, in the phase where it is worst.

    Raises:
        ValueError: as of `_by_phase`.
    """
    rates = ", ".join(f"{rate / 1e6:g}" for rate in PHASES)
    print(
        f"\nlink rates change while training ({rates} Mbit/s; {scale.phase_steps} steps each, {scale.fixed_steps} of "
        "fixed choices)"
    )
    runs = scheduled_runs(
        phase_steps=scale.phase_steps, fixed_steps=scale.fixed_steps, period=scale.period, fixed=scale.fixed
    )
    auto = _scheduled(AUTO, runs[AUTO])
    coefficients = slowdown_coefficients(auto)
    phases = {AUTO: [phases_of(auto, coefficients)]}
    for name in [name for name in runs if name != AUTO]:
        phases[name] = [phases_of(_scheduled(name, runs[name]), coefficients)]
    in_turn = [name for name in runs if _is_close(name, phases)]
    for turn in range(1, scale.rounds):
        for name in in_turn[::-1] if turn % 2 else in_turn:
            phases[name].append(phases_of(_scheduled(name, runs[name]), coefficients))
    spelled = ", ".join(f"{coefficient:.3f}" for coefficient in coefficients)
    print(f"J: ms for the progress of a dense step, 1 + a sqrt(1 / gain - 1) steps, a = {spelled} as auto measured;")
    print(f"in the later half of each phase (in all of it); medians of {scale.rounds} runs of what was close, in turn;")
    print(
        f"*: loses more than {MOST_LOST:.0%} of the steps by that, which auto does not accept in a run of so many steps"
    )
    for name in runs:
        print(f"{name:>34}  " + "  ".join(_timed(phases[name], number) for number in range(len(PHASES))))
    worst = worst_whole = worst_of_any_loss = 0.0
    for number, rate in enumerate(PHASES):
        kept = [name for name in in_turn if name == AUTO or not phases[name][0][number].loses_much]
        settled = {name: [run[number].settled_j_s for run in phases[name]] for name in kept}
        whole = {name: [run[number].whole_j_s for run in phases[name]] for name in kept}
        best, over = _against_best(settled)
        _, over_whole = _against_best(whole)
        worst, worst_whole = max(worst, over.median), max(worst_whole, over_whole.median)
        key = f"phase_{number + 1}_{rate / 1e6:g}_mbit"
        results.figures[f"auto_over_best_fixed_{key}"] = round(over.median, 4)
        results.figures[f"auto_over_best_fixed_with_settling_{key}"] = round(over_whole.median, 4)
        least_s = min(
            statistics.median(run[number].settled_j_s for run in phases[name]) for name in runs if name != AUTO
        )
        over_least = statistics.median(settled[AUTO]) / least_s
        worst_of_any_loss = max(worst_of_any_loss, over_least)
        results.figures[f"auto_over_least_of_any_loss_{key}"] = round(over_least, 4)
        results.baselines[f"best_fixed_j_s_{key}"] = round(statistics.median(settled[best]), 6)
        print(f"{rate / 1e6:>6g} Mbit/s: best fixed choice {best}; auto {over} of it when settled, {over_whole} in all")
        for run in phases[AUTO]:
            print(f"    used {', then '.join(run[number].ways)}")
    results.figures["slowdown_coefficient"] = round(coefficients[-1], 4)
    results.goal("auto_over_best_fixed_worst_phase", worst, at_most=1.05)
    results.figures["auto_over_best_fixed_with_settling_worst_phase"] = round(worst_whole, 4)
    results.figures["auto_over_least_of_any_loss_worst_phase"] = round(worst_of_any_loss, 4)


CLOSE = 1.1
"""Times the least J of any choice, in some phase, within which one run of each cannot say which is better."""


def _scheduled(name: str, run: RunSpec) -> Log:
    print(f"  {name}", file=sys.stderr, flush=True)
    return launch(run)


def _is_close(name: str, phases: Mapping[str, Sequence[Sequence[Phase]]]) -> bool:
    """Return whether a choice is `auto`, or close to the best fixed one in some phase, and loses little.

    A fixed choice that loses much is never close.
    """
    if name == AUTO:
        return True
    fixed = {other: runs[0] for other, runs in phases.items() if other != AUTO}
    for phase, *others in zip(fixed[name], *fixed.values(), strict=True):
        kept = [other for other in others if not other.loses_much]
        if not phase.loses_much and (
            phase.settled_j_s <= CLOSE * min(other.settled_j_s for other in kept)
            or phase.whole_j_s <= CLOSE * min(other.whole_j_s for other in kept)
        ):
            return True
    return False


def _against_best(times_s: Mapping[str, Sequence[float]]) -> tuple[str, Ratio]:
    """Return the fixed choice of least median, and the ratios of `auto` over it, round by round."""
    best = min(times_s.keys() - {AUTO}, key=lambda name: (statistics.median(times_s[name]), name))
    ratios = [ours / theirs for ours, theirs in zip(times_s[AUTO], times_s[best], strict=True)]
    return best, Ratio(low=min(ratios), median=statistics.median(ratios), high=max(ratios))


def _timed(runs: Sequence[Sequence[Phase]], number: int) -> str:
    settled, whole = (
        1e3 * statistics.median(getattr(run[number], field) for run in runs) for field in ("settled_j_s", "whole_j_s")
    )
    return f"{settled:>8.1f}{'*' if runs[0][number].loses_much else ' '} ({whole:>7.1f})"


PARTS = {
    "published": published_part,
    "measured": measured_part,
    "schedule": schedule_part,
}


def main() -> None:
    """Run every part, or the one that is asked for, and publish."""
    asked = options(__doc__, parts=list(PARTS))
    need_namespaces(or_skip=asked.smoke)
    scale = SMOKE if asked.smoke else QUICK if asked.quick else FULL
    results = Outcome(benchmark="exchange", quick=asked.quick)
    for name in PARTS if asked.part is None else (asked.part,):
        print(f"exchange: {name}", file=sys.stderr, flush=True)
        PARTS[name](scale, results)
    publish(results, asked.json_file, part=asked.part)


if __name__ == "__main__":
    run_benchmark(main)
