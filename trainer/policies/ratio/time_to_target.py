"""What each way to exchange promises: J, the predicted time of one dense step's progress, and how sure its savings are.

    J = step_time / (1 / slowdown(gain) - what is held back more at the end / steps left)

Until a gain has settled, less is delivered than is new. So a thin exchange pays only where the run is long enough to
outlive that, and near its end what was held back is worth sending. Errors of the network that two options share cancel
in the difference of their J; errors of gains do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hetopt.core.comm.network_state import NetworkState
from hetopt.core.comm.planner import COMPRESS_SD, Option
from hetopt.core.compression_slowdown import backlog_after, distance
from hetopt.trainer.policies.ratio.gain_estimate import GainEstimate

NETWORK_HOPE = 2.0
"""Standard errors of the network that an option may be hoped to be better by than it looks; of all else, one."""


UNTRIED_SD = 0.2
"""Of what a step takes beyond its computation, by an option that was never in use: what its parts say was a fifth to a
quarter too much of dense, bf16 and int8 exchanges of 1.5 MB over links of 1 Gbit/s, each by another amount."""

LEAST_DELIVERY = 0.02
"""Progress of a step, in dense steps, below which nothing is told apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """An option as it looks now. ``per_progress_s`` is J."""

    option: Option
    gain: float
    step_s: float
    per_progress_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighed:
    """An option against the present one: what J would fall by, and how sure that is.

    Beside all that a prediction is uncertain by, what nobody has seen yet may be better than it looks
    (``untried_sd_s``), and so may what was seen for a few periods, each as noisy as they are (``seen_sd_s``).
    """

    judged: Judged
    saving_s: float
    network_sd_s: float
    other_sd_s: float
    untried_sd_s: float
    seen_sd_s: float

    @property
    def sd_s(self) -> float:
        """Standard deviation of the saving."""
        return math.hypot(self.network_sd_s, self.other_sd_s)

    @property
    def hope_s(self) -> float:
        """By how much it may be better than it looks."""
        return math.hypot(NETWORK_HOPE * self.network_sd_s, self.other_sd_s, self.untried_sd_s, self.seen_sd_s)

    @property
    def risk_s(self) -> float:
        """What a step of it might cost over a step of the present one, two standard deviations considered."""
        return max(0.0, 2 * self.sd_s - self.saving_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeToTarget:
    """Everything that options are judged by.

    Attributes:
        network: as tracked.
        belief: about gains.
        coefficient: of the law of slowdown (`hetopt.core.compression_slowdown`).
        compute_s, backward_s: of a step on the slowest worker, and the part of it that makes gradients.
        beside_s: that an exchange takes longer beside training than alone, whatever it sends.
        rest_s: that a step takes longer than its parts together, whatever it sends.
        compress_factors: measured over expected time to compress, by compressor.
        excess_s: how much longer than predicted a step took of options that were in use, what is forgotten left out.
        kept: what they kept of what was expected.
        noise: relative standard deviation of the time of their step, as far as that was seen.
        backlog: steps' worth of gradient that is held back now.
        steps_left: of the run; infinite: what is held back at its end does not matter.
    """

    network: NetworkState
    belief: GainEstimate
    coefficient: float
    compute_s: float
    backward_s: float
    compress_factors: Mapping[str, float]
    excess_s: Mapping[str, float]
    kept: Mapping[str, float]
    noise: Mapping[str, float] = field(default_factory=dict)
    backlog: float = 0.0
    steps_left: float = math.inf
    beside_s: float = 0.0
    rest_s: float = 0.0
    # What was asked already, by option.
    _parts_s: dict[str, float] = field(init=False, repr=False, compare=False, default_factory=dict)

    def predicted_s(self, option: Option) -> float:
        """Time of a step, as far as it is predicted the same way for all options."""
        return self.parts_s(option) + self.beside_s + self.rest_s

    def parts_s(self, option: Option) -> float:
        """Time of the parts of a step that have timings of their own."""
        known_s = self._parts_s.get(option.key)
        if known_s is None:
            known_s = self._parts_s[option.key] = option.step_s(
                compute_s=self.compute_s,
                backward_s=self.backward_s,
                compress_s=self._compress_s(option),
                exchange_s=option.exchange_s(self.network),
            )
        return known_s

    def judge(self, option: Option, *, step_s: float | None = None, late_is_harmless: bool = False) -> Judged | None:
        """The option as it looks now; None where nothing is known of its gain.

        Args:
            option: to judge.
            step_s: time of its step where that was measured just now; absent: predicted.
            late_is_harmless: as if late gradients cost nothing but their lateness.
        """
        gain = self.gain(option, measured=step_s is not None)
        if gain is None:
            return None
        if step_s is None:
            # Nothing is quicker than its computation, whatever is remembered.
            step_s = max(self.compute_s, self.predicted_s(option) + self.excess_s.get(option.key, 0.0))
        per_progress_s = step_s * self.steps_per_progress(gain, late_is_harmless=late_is_harmless)
        return Judged(option=option, gain=gain, step_s=step_s, per_progress_s=per_progress_s)

    def gain(self, option: Option, *, measured: bool = False) -> float | None:
        """That the option settles to; None where nothing is known of it.

        Args:
            option: to judge.
            measured: whether it is in use, so that its gain is known and not expected.
        """
        gain = self.belief.gain(option)
        if gain is None or measured or option.gain is not None:
            return gain
        return min(1.0, gain * self.kept.get(option.key, 1.0))

    def slowdown(self, gain: float) -> float:
        """Steps at this gain over dense steps, once it has settled."""
        return 1 + self.coefficient * distance(gain)

    def steps_per_progress(self, gain: float, *, late_is_harmless: bool = False) -> float:
        """The same over the steps that are left: what is held back at the end was no progress."""
        delivered = 1.0 if late_is_harmless else 1 / self.slowdown(gain)
        if self.steps_left < math.inf:
            more = backlog_after(self.backlog, gain, self.steps_left) - self.backlog
            delivered -= more / self.steps_left
        return 1 / max(LEAST_DELIVERY, delivered)

    def weigh(self, now: Judged, other: Judged) -> Weighed:
        """The other option against the present one."""
        sides = ((1, now), (-1, other))
        slower = {side: self.steps_per_progress(judged.gain) for side, judged in sides}
        network = self.network.estimate(
            *((side * slower[side] * judged.option.buckets, judged.option.operations) for side, judged in sides)
        )
        rest_s = [slower[side] * COMPRESS_SD * self._compress_s(judged.option) for side, judged in sides]
        rest_s += [judged.step_s * self._steps_sd(judged) for judged in (now, other)]
        untried_s = 0.0
        if other.option.key not in self.excess_s:
            untried_s = slower[-1] * UNTRIED_SD * max(0.0, other.step_s - self.compute_s)
        return Weighed(
            judged=other,
            saving_s=now.per_progress_s - other.per_progress_s,
            network_sd_s=network.sd_s,
            other_sd_s=math.hypot(*rest_s),
            untried_sd_s=untried_s,
            seen_sd_s=math.hypot(*(slower[side] * self._noise_s(judged) for side, judged in sides)),
        )

    def _noise_s(self, judged: Judged) -> float:
        return judged.step_s * self.noise.get(judged.option.key, 0.0)

    def _steps_sd(self, judged: Judged) -> float:
        """What an error of the gain makes of the steps, which is most where all is kept."""
        if judged.option.gain is not None:
            return 0.0
        less = judged.gain / (1 + self.belief.relative_sd(judged.option))
        return self.steps_per_progress(less) - self.steps_per_progress(judged.gain)

    def _compress_s(self, option: Option) -> float:
        factor = self.compress_factors.get(option.compressor)
        return option.compress_s * (self._common_factor if factor is None else factor)

    @property
    def _common_factor(self) -> float:
        """Of a compressor that was never in use: workers that share cores wait for them in all, so what others showed
        counts, and one more that would take as long as expected."""
        logs = list(map(math.log, self.compress_factors.values()))
        return math.exp(sum(logs) / (len(logs) + 1))
