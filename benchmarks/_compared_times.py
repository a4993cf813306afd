"""What `benchmarks.time_to_target` has measured: every side's quality over time, at every rate of the links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks._composed import Trajectory, Way, final, mean_curve, reached_s
from benchmarks._contenders import AUTO, PLAIN, STATIC, WORKERS, Runs

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
