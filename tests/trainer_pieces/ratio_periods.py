"""One period as a ratio policy observes it, made to order."""

from __future__ import annotations

from hetopt.core.comm.cost import LinkSpeed
from hetopt.trainer.policies.ratio.policy import DENSE, GainCurve, RatioObservation

from .virtual_exchange import RATIOS, VirtualRun, options

WORKERS = 4
NETWORK = VirtualRun(workers=WORKERS, links=[LinkSpeed(latency_s=1e-3, bytes_per_s=1e7)], compute_s=0.1).fresh()
OPTIONS = options(1_000_000, WORKERS)


def curve(gain_of, ratios=RATIOS, energies=(1.0,) * WORKERS):
    kept = tuple(tuple(energy * gain_of(ratio) for ratio in ratios) for energy in energies)
    return GainCurve(ratios=tuple(ratios), kept=kept, energy=tuple(energies))


def observe(
    ratio, *, gain=None, gain_of=None, step=20, steps=20, epoch=0.0, step_time_s=0.1, norm=1.0, rate=None, option=None,
    levels=None,
):  # fmt: skip
    """A period at ``ratio``; ``gain_of`` gives the curve, and the gain unless that is given by itself."""
    if gain is None:
        gain = 1.0 if gain_of is None or ratio == DENSE else gain_of(ratio)
    return RatioObservation(
        step=step,
        steps=steps,
        epoch=epoch,
        ratio=ratio,
        compute_s=step_time_s / 2,
        step_s=step_time_s,
        kept_energy=(gain,) * WORKERS,
        energy=(1.0,) * WORKERS,
        gradient_norm=norm,
        gain_curve=None if gain_of is None else curve(gain_of),
        network=NETWORK,
        option=option,
        learning_rate=rate,
        level_gains=levels,
    )
