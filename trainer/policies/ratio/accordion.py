"""Sends much while the gradient changes and little while it does not: Accordion (Agarwal et al., MLSys 2021).

Where the relative change of the gradient's norm since the last look reaches a threshold, training is in a critical
regime, and the gentle ratio is used; elsewhere the strong one. Two forms are in use, and both are here:

- `original`: looks every ten epochs, threshold 0.5, and a learning rate that falls begins a critical regime too;
- `released`: the script beside AR-Topk looks in every step at a smoothed norm, threshold 0.2, ratios 1 % and 0.1 %.

Departures: norms are of the whole gradient, not layer by layer, and a look comes at the end of a control period.
"""

from __future__ import annotations

import math

from pydantic import NonNegativeFloat

from hetopt.core.artifact import Record
from hetopt.core.run_spec import AccordionSettings, Share
from hetopt.trainer.comm.network import Network
from hetopt.trainer.policies.ratio.policy import RatioDecision, RatioObservation, percent


class AccordionState(Record):
    """The smoothed norm, what it and the learning rate were at the last look, and when the next look is due."""

    norm: NonNegativeFloat | None = None
    norm_at_look: NonNegativeFloat | None = None
    learning_rate: NonNegativeFloat | None = None
    next_look_epoch: NonNegativeFloat = 0.0
    gentle: bool = True


class Accordion(AccordionSettings):
    """Two ratios by the change of the gradient's norm.

    Attributes:
        gentle: fraction that is sent in critical regimes.
        strong: elsewhere; no more than that.
    """

    gentle: Share = 0.01
    strong: Share = 0.001

    def initial(self) -> AccordionState:
        """Nothing was seen; training begins in a critical regime."""
        return AccordionState()

    def first(self, network: Network | None) -> RatioDecision:
        """Begin with the larger ratio, as gradients change most at first."""
        return RatioDecision(ratio=self.gentle)

    def decide(self, state: AccordionState, observation: RatioObservation) -> tuple[AccordionState, RatioDecision]:
        """The larger ratio where the gradient's norm changes fast (a critical regime), else the smaller one."""
        fresh, before = observation.gradient_norm, state.norm
        norm = fresh if before is None else self.smoothing * fresh + (1 - self.smoothing) * before
        change = 0.0
        gentle, looked_at, next_look = state.gentle, state.norm_at_look, state.next_look_epoch
        rate = observation.learning_rate
        if looked_at is None:
            looked_at, next_look = norm, observation.epoch + self.epochs
        elif observation.epoch >= next_look:
            change = abs(norm - looked_at) / looked_at if looked_at > 0 else math.inf if norm > 0 else 0.0
            gentle = change >= self.threshold
            looked_at, next_look = norm, observation.epoch + self.epochs
        decayed = rate is not None and state.learning_rate is not None and rate < state.learning_rate
        if self.decay and decayed:
            gentle = True
        state = AccordionState(
            norm=norm,
            norm_at_look=looked_at,
            learning_rate=state.learning_rate if rate is None else rate,
            next_look_epoch=next_look,
            gentle=gentle,
        )
        ratio = self.gentle if gentle else self.strong
        if ratio == observation.ratio:
            return state, RatioDecision(ratio=ratio)
        cause = (
            "the learning rate has fallen"
            if gentle and decayed
            else f"the gradient's norm changed by {100 * change:.0f} %"
        )
        return state, RatioDecision(ratio=ratio, reason=f"{cause}: {percent(ratio)}")
