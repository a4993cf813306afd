"""What steps take by each way to exchange: as timed in training, or as predicted and corrected by what was timed.

    predicted = computation + what backward does not hide of (longer x own work, longer x exchange)

``longer`` is by how much others by the same collective took longer than predicted. A way whose steps take another time
than they did, twice in a row, shows that something has changed: what was timed before is forgotten.
"""

from __future__ import annotations

import math

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from hetopt.core.artifact import Record
from hetopt.core.comm.options import Option
from hetopt.trainer.comm.network import Network

BACKWARD = 2 / 3
"""Part of a step's computation that makes gradients: backward computes two products for each one forwards."""

ANOTHER, IN_A_ROW = 1.25, 2
"""Times as long, or as short, and periods in a row that show a change: one may have been disturbed."""


class Timing(Record):
    """Mean seconds of a way's steps, how many say so, and its exchange over what was predicted of it (None: hidden)."""

    collective: str
    step_s: PositiveFloat
    steps: NonNegativeFloat
    longer: PositiveFloat | None


class StepTimes(Record):
    """Timings of ways by key since something last changed, mean seconds of computation, and signs of a change."""

    timings: dict[str, Timing] = Field(default_factory=dict)
    compute_s: NonNegativeFloat = 0.0
    steps: NonNegativeFloat = 0.0
    strikes: NonNegativeInt = 0

    @property
    def is_suspect(self) -> bool:
        """Whether the last period took another time than usual, and only the next will tell whether that stays."""
        return self.strikes > 0

    def after(self, option: Option, network: Network, *, step_s: float, compute_s: float, steps: int) -> StepTimes:
        """Add a period's median step, in seconds, of so many steps."""
        before = self.timings.get(option.key)
        # The first step of a way is slower than those that follow, and tells nothing alone.
        if before is not None and before.steps > 1 and abs(math.log(step_s / before.step_s)) > math.log(ANOTHER):
            if self.strikes + 1 < IN_A_ROW:
                return self.model_copy(update={"strikes": self.strikes + 1})
            return StepTimes().after(option, network, step_s=step_s, compute_s=compute_s, steps=steps)
        known_s, known = (before.step_s, before.steps) if before is not None else (step_s, 0.0)
        step_s = known_s + steps / (known + steps) * (step_s - known_s)
        compute_s = self.compute_s + steps / (self.steps + steps) * (compute_s - self.compute_s)
        longer = _longer(option, network.exchange_s(option), step_s, compute_s)
        timing = Timing(collective=option.collective, step_s=step_s, steps=known + steps, longer=longer)
        timings = {**self.timings, option.key: timing}
        return StepTimes(timings=timings, compute_s=compute_s, steps=self.steps + steps)

    def step_s(self, option: Option, network: Network) -> float:
        """Seconds of a step, as timed or else as predicted."""
        timing = self.timings.get(option.key)
        if timing is not None:
            return timing.step_s
        longer = self._longer(option.collective)
        return option.step_s(
            compute_s=self.compute_s,
            backward_s=BACKWARD * self.compute_s,
            compress_s=longer * option.compress_s,
            exchange_s=longer * network.exchange_s(option),
        )

    def _longer(self, collective: str) -> float:
        """By the same collective, or by any, which says less."""
        known = [(timing.collective, math.log(timing.longer)) for timing in self.timings.values() if timing.longer]
        own = [log for name, log in known if name == collective]
        logs = own or [log for _, log in known]
        return math.exp(sum(logs) / (len(logs) + (not own))) if logs else 1.0


def _longer(option: Option, exchange_s: float, step_s: float, compute_s: float) -> float | None:
    """How many times as long as predicted own work and exchange took; None where backward hides them."""
    predicted_s = option.compress_s + exchange_s
    took_s = max(step_s - compute_s, 0.01 * step_s)
    if option.buckets > 1:  # the inverse of `hetopt.core.comm.cost.pipelined_s`
        backward_s = BACKWARD * compute_s
        produce_s = backward_s + option.compress_s
        took_s += backward_s - produce_s / option.buckets
        if took_s <= produce_s:
            return None
    return took_s / predicted_s if predicted_s > 0 else None
