"""What the policy ``auto`` remembers from one control period to the next; part of checkpoints."""

from __future__ import annotations

import math

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from hetopt.core.artifact import Record
from hetopt.trainer.policies.ratio.gain_estimate import GainEstimate
from hetopt.trainer.policies.ratio.paired_trial import Verdict

LOOK_AGAIN_AFTER = 20
"""Steps between gain curves: looking may take as long as a step."""

FORGOTTEN_BY_HALF, SEEN_OFTEN = 30, 2
"""Periods after which half is left of what an option was like beyond what its parts say, if so many had shown it. What
fewer did is forgotten sooner: something else may have disturbed them."""


class Tried(Record):
    """How often an option was changed to since the network last jumped, and in which period last."""

    times: NonNegativeInt = 0
    period: NonNegativeInt = 0


class Excess(Record):
    """What an option was like beyond what its parts say, and in which period it was last in use.

    Attributes:
        step_s: how much longer its step took than its parts together; what any option's would is part of that, so it
            stays right when another option shows that to be more or less.
        whole_s: what its step took.
        kept: what it kept of the energy that it was expected to keep.
        seen: periods that say so, those that are as good as forgotten left out.
    """

    step_s: float
    whole_s: PositiveFloat
    kept: PositiveFloat = 1.0
    period: NonNegativeInt
    seen: PositiveFloat = 1.0


class TooThin(Record):
    """A ratio that kept too little when it was in use."""

    ratio: PositiveFloat
    times: NonNegativeInt = 1
    until: NonNegativeInt = Field(description="the period from which on it may be used again")


class AutoState(Record):
    """What was learned, and the account of trials.

    Attributes:
        belief: about gains.
        option, step_s: what is in use, and the time of its step, smoothed.
        is_warm: whether more was seen of that than its first step, which is slower than all that follow.
        step_variance: relative, of a period's time of a step around what it was before; absent until there were two.
        compute_s, backward_s: smoothed.
        beside_s: that an exchange takes longer beside training than alone, whatever it sends.
        rest_s: that a step takes longer than its parts together, smoothed.
        compress_factors: measured over expected time to compress, by compressor.
        tried: options that were in use since the network last jumped.
        excess: of options that were in use since then.
        dense_tried: whether dense training ever was.
        trial_after: the option before the present one, as long as that is on trial.
        spent_s, elapsed_s: booked for trials, and in all.
        jumps: of the network, when it was last looked at.
        periods: since the start.
        last_curve: the last of them in which a gain curve was seen, or was to be.
        since_curve: steps since one was seen.
        too_thin: ratios that proved to keep too little.
        first_loss, least_loss: of a period, the first and the least so far; absent before the first.
        backlog: steps' worth of gradient that is held back (`hetopt.core.compression_slowdown.backlog_after`).
        steps, steps_left: of the run, done and to do, as far as that is known.
        verdict: of the last trial of twins; absent before it.
        trials: of twins so far.
    """

    belief: GainEstimate = GainEstimate()
    option: str | None = None
    step_s: NonNegativeFloat = 0.0
    is_warm: bool = True
    step_variance: NonNegativeFloat | None = None
    compute_s: NonNegativeFloat | None = None
    backward_s: NonNegativeFloat = 0.0
    beside_s: NonNegativeFloat = 0.0
    rest_s: NonNegativeFloat = 0.0
    compress_factors: dict[str, PositiveFloat] = Field(default_factory=dict)
    tried: dict[str, Tried] = Field(default_factory=dict)
    excess: dict[str, Excess] = Field(default_factory=dict)
    dense_tried: bool = False
    trial_after: str | None = None
    spent_s: NonNegativeFloat = 0.0
    elapsed_s: NonNegativeFloat = 0.0
    jumps: NonNegativeInt = 0
    periods: NonNegativeInt = 0
    last_curve: NonNegativeInt = 0
    since_curve: NonNegativeInt = LOOK_AGAIN_AFTER
    too_thin: tuple[TooThin, ...] = ()
    first_loss: float | None = None
    least_loss: float | None = None
    backlog: NonNegativeFloat = 0.0
    steps: NonNegativeInt = 0
    steps_left: PositiveFloat | None = None
    verdict: Verdict | None = None
    trials: NonNegativeInt = 0

    @property
    def harmless_from(self) -> float:
        """The ratio that may be sent, and all above, however little of the gradient that keeps; infinite: no trial has
        shown so."""
        return self.verdict.ratio if self.verdict is not None and self.verdict.says == "harmless" else math.inf

    def left(self, seen: Excess) -> float:
        """Part of it that is not forgotten."""
        half = FORGOTTEN_BY_HALF * min(1.0, seen.seen / SEEN_OFTEN)
        return float(0.5 ** ((self.periods - seen.period) / half))

    def seen(self, key: str) -> float:
        """Periods of an option that are remembered."""
        before = self.excess.get(key)
        return 0.0 if before is None else before.seen * self.left(before)
