"""Which model to believe: the one that best predicts layouts that it was not shown, larger ones among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hetopt.core.step_samples import Configuration, StepSample
from hetopt.optimizer.step_time.baselines import Goodput, StepTimePeer, ernest, scavenger
from hetopt.optimizer.step_time.calibration import HeldOut, held_out, quantile
from hetopt.optimizer.step_time.design_matrix import Array
from hetopt.optimizer.step_time.model import StepTime
from hetopt.optimizer.step_time.observed import observe
from hetopt.optimizer.step_time.posterior import Posterior, fit
from hetopt.optimizer.step_time.prediction import predict
from hetopt.optimizer.step_time.tiers import Kinship

PeerName = Literal["scavenger", "ernest", "goodput"]
ModelName = Literal["hetopt", "scavenger", "ernest", "goodput"]
PEERS: Mapping[PeerName, Callable[[Sequence[StepSample]], StepTimePeer]] = MappingProxyType(
    {"scavenger": scavenger, "ernest": ernest, "goodput": Goodput.fit}
)

FOLDS = 5
MARGIN = 0.8
"""A peer must be clearly better: none of them knows types, compression or links, and all were seen to fail far out."""

UNTESTED = math.log(4.0)
"""Half-width of a peer's interval where nothing could be left out to see how far off it is: a factor of four."""


@dataclass(frozen=True, kw_only=True)
class PeerModel:
    """A published model with an interval that its own held-out errors give it.

    Attributes:
        half_width: of a 90 % interval of the log step.
        types: that were measured; a peer takes every type for the same.
    """

    peer: StepTimePeer
    half_width: float
    types: frozenset[str]

    @classmethod
    def fit(cls, name: PeerName, samples: Sequence[StepSample]) -> PeerModel:
        """Fit, and leave layouts out in turn to see how far off it is (grouped conformal prediction)."""
        found = quantile(_left_out(PEERS[name], samples), 0.9) if len({s.layout for s in samples}) > 2 else None
        return cls(
            peer=PEERS[name](samples),
            half_width=UNTESTED if found is None else found,
            types=frozenset(sample.kind(node) for sample in samples for node in sample.nodes),
        )

    def predict(self, configurations: Sequence[Configuration]) -> list[StepTime]:
        """Predicted step time, in seconds with its interval, of each configuration."""
        reach = math.exp(self.half_width)
        return [
            StepTime(
                step_time_s=step_s,
                step_time_low_s=step_s / reach,
                step_time_high_s=step_s * reach,
                evidence="measured" if all(asked.kind(node) in self.types for node in asked.nodes) else "extrapolated",
            )
            for asked, step_s in zip(configurations, self.peer.step_time_s(configurations).tolist(), strict=True)
        ]


def held_out_errors(model: Posterior, samples: Sequence[StepSample]) -> dict[ModelName, float]:
    """Mean absolute log error of hetopt's own model and of every peer, on what each was not fitted to.

    The mean of two: layouts left out in turn, and the third with most workers predicted from the rest, which is what a
    search over clusters asks for. Empty where there are too few layouts to leave any out.
    """
    layouts = sorted({sample.layout for sample in samples}, key=lambda layout: (sum(n for _, n in layout), layout))
    if len(layouts) < 3:
        return {}
    smaller = set(layouts[: len(layouts) - max(1, len(layouts) // 3)])
    larger = np.array([sample.layout not in smaller for sample in samples])
    found: dict[ModelName, float] = {"hetopt": (_mean(held_out(model).residual) + _mean(_beyond(samples, larger))) / 2}
    for name, fit_peer in PEERS.items():
        beyond = _residuals(fit_peer(_some(samples, ~larger)), _some(samples, larger))
        found[name] = (_mean(_left_out(fit_peer, samples).residual) + _mean(beyond)) / 2
    return found


def choose(errors: Mapping[ModelName, float]) -> ModelName:
    """The model with the smallest error; hetopt's own where no peer is clearly better, or nothing is known."""
    best: ModelName = "hetopt"
    for name, error in errors.items():
        if error < min(errors[best], MARGIN * errors["hetopt"]):
            best = name
    return best


def _left_out(fit_peer: Callable[[Sequence[StepSample]], StepTimePeer], samples: Sequence[StepSample]) -> HeldOut:
    """Errors of a peer on each layout, fitted to four fifths of the others."""
    place = {layout: index for index, layout in enumerate(sorted({sample.layout for sample in samples}))}
    layout = np.array([place[sample.layout] for sample in samples], dtype=np.intp)
    residual = np.zeros(len(samples))
    for fold in range(min(FOLDS, len(place))):
        out = layout % FOLDS == fold
        residual[out] = _residuals(fit_peer(_some(samples, ~out)), _some(samples, out))
    return HeldOut(residual=residual, log_sd=np.ones(len(samples)), layout=layout)


def _beyond(samples: Sequence[StepSample], larger: NDArray[np.bool_]) -> Array:
    """Errors of hetopt's model on the larger layouts; types that only those have count as the first of the others.

    Peers know no types, so they are given no advantage by it.
    """
    shown, hidden = _some(samples, ~larger), _some(samples, larger)
    observed = observe(shown)
    others = dict.fromkeys(
        kind for sample in hidden for node in sample.nodes if (kind := sample.kind(node)) not in observed.rows.types
    )
    stand_in = Kinship(reference=0, evidence="extrapolated", basis="nothing")
    return _logs(hidden) - predict(fit(observed), hidden, [stand_in] * len(others)).log_step


def _residuals(peer: StepTimePeer, shown: Sequence[StepSample]) -> Array:
    return _logs(shown) - np.log(np.maximum(peer.step_time_s(shown), 1e-12))


def _some(samples: Sequence[StepSample], which: NDArray[np.bool_]) -> list[StepSample]:
    return [sample for sample, wanted in zip(samples, which.tolist(), strict=True) if wanted]


def _logs(samples: Sequence[StepSample]) -> Array:
    logs: Array = np.log(np.array([sample.step_time_s for sample in samples], dtype=np.float64))
    return logs


def _mean(residual: Array) -> float:
    return float(np.abs(residual).mean())
