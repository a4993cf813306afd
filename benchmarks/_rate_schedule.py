"""A training run whose links change their rates on the way, and what it was like at each rate."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._rehearsal import Log
from hetopt.backends.emulation.schedule import CONDITION_CHANGED
from hetopt.core.compression_slowdown import MOST_LOST, distance
from hetopt.core.events.log import Event
from hetopt.core.run_spec import Compression, RunSpec, StopRule, WorkerSpec
from hetopt.core.scaled_emulation import EVERY_HOST, Change, DeclaredTime, EmulatedHost, ScaledEmulation

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
    """What one run was like while the links had one rate.

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
        """Whether more is lost than hetopt accepts of compression where the number of steps is fixed, as it is here."""
        return self.slowdown > 1 + MOST_LOST


def scheduled_runs(*, phase_steps: int, fixed_steps: int, period: int, fixed: int) -> dict[str, RunSpec]:
    """The first so many fixed choices, and `auto`, through the phases.

    What stays the same needs fewer steps of a phase to show what they are like.
    """
    runs = {_name(way): _spec(way, fixed_steps, period) for way in FIXED[:fixed]}
    auto = _spec(Compression(), phase_steps, period)
    runs[AUTO] = auto.model_copy(update={"ratio_policy": "auto", "collective_policy": "cheapest"})
    return runs


def slowdown_coefficients(log: Log) -> list[float]:
    """The coefficient of the law of slowdown as `auto` thought it to be, the mean over the later half of each phase.

    All sides are judged by the same: whether it is right is not asked here, but whether what it says is cheapest is
    found when the network changes.
    """
    told = [[float(event["exchange"]["slowdown_coefficient"]) for event in periods] for periods in _by_phase(log)]
    return [statistics.fmean(phase[len(phase) // 2 :]) for phase in told]


def phases_of(log: Log, coefficients: Sequence[float]) -> list[Phase]:
    """What each phase was like, progress judged by a coefficient each.

    Raises:
        ValueError: a phase was over within a period.
    """
    return [
        Phase(
            whole_j_s=_seconds(periods) / _progress(periods, coefficient),
            settled_j_s=(_seconds(later) - _twins_s(later)) / _progress(later, coefficient),
            slowdown=sum(period["steps"] for period in later) / _progress(later, coefficient),
            ways=tuple(way for way, _ in itertools.groupby(str(period["exchange"]["way"]) for period in periods)),
        )
        for periods, coefficient in zip(_by_phase(log), coefficients, strict=True)
        for later in (periods[len(periods) // 2 :],)
    ]


def _by_phase(log: Log) -> list[list[Event]]:
    """The control periods of each phase, with what twins took before them; those of changes are nobody's."""
    found: list[list[Event]] = [[]]
    straddles, twins_s = False, 0.0
    for event in log:
        if event["event"] == TWINS_TRIED:
            twins_s += event["took_s"]
        elif event["event"] == CONDITION_CHANGED:
            if not straddles:  # one event a host
                found.append([])
            straddles = True
        elif event["event"] == "step":
            if not straddles:
                found[-1].append({**event, "twins_s": twins_s})
            straddles, twins_s = False, 0.0
    if not all(found):
        raise ValueError(f"of {len(found)} phases, {sum(not one for one in found)} had no whole control period")
    return found


def _seconds(periods: Sequence[Event]) -> float:
    """Of the steps, and of all that is done between them."""
    return float(sum(period["steps"] * (period["step_time_s"] + period["control_s"]) for period in periods))


def _twins_s(periods: Sequence[Event]) -> float:
    """Of that, what trials of twins took."""
    return float(sum(period["twins_s"] for period in periods))


def _progress(periods: Sequence[Event], coefficient: float) -> float:
    """In dense steps."""
    return float(
        sum(period["steps"] / (1 + coefficient * distance(min(1.0, period["exchange"]["gain"]))) for period in periods)
    )


def _name(way: Compression) -> str:
    parts = [way.name, f"{way.ratio:g}" if way.ratio < 1 else "", way.coding or ""]
    return " ".join(filter(None, [*parts, "" if way.collective == "auto" else way.collective]))


def _spec(way: Compression, phase_steps: int, period: int) -> RunSpec:
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
