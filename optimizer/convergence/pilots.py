"""Pilots as evidence: each beside what dense training needs at its batch size."""

from __future__ import annotations

from hetopt.core.profile import Pilot
from hetopt.core.synchronization_text import parse_sync
from hetopt.optimizer.convergence.compression_penalty import CompressedPilot
from hetopt.optimizer.convergence.local_penalty import LocalPilot
from hetopt.optimizer.convergence.steps_law import StepsCurve


def is_dense(pilot: Pilot) -> bool:
    """Whether it summed whole gradients in every step."""
    return pilot.compression is None and pilot.sync is None


def compressed_pilot(pilot: Pilot, curve: StepsCurve) -> CompressedPilot:
    """A pilot that was compressed, beside what dense training needs at its batch size."""
    assert pilot.compression is not None
    return CompressedPilot(
        scheme=pilot.compression.name,
        ratio=pilot.compression.ratio,
        gain=pilot.compression.gain,
        dense_steps=float(curve.steps(pilot.global_batch_size)),
        steps_trained=_steps_trained(pilot),
        steps_to_target=pilot.steps_to_target,
    )


def local_pilot(pilot: Pilot, curve: StepsCurve) -> LocalPilot:
    """A pilot whose workers trained for themselves, beside what dense training needs at its batch size.

    The share is what its policy aims at, where it aims at one: how it begins is no part of that.
    """
    assert pilot.sync is not None
    sync = parse_sync(pilot.sync.policy)
    share = pilot.sync.share
    if sync.name == "local-sgd":
        share = 1 / sync.every_steps
    elif sync.name == "selsync" and sync.delta == "auto":
        share = sync.synchronised_share
    return LocalPilot(
        sync=sync,
        share=share,
        workers=pilot.sync.workers,
        dense_steps=float(curve.steps(pilot.global_batch_size)),
        steps_trained=_steps_trained(pilot),
        steps_to_target=pilot.steps_to_target,
    )


def _steps_trained(pilot: Pilot) -> float:
    trained = max((float(evaluation.step) for evaluation in pilot.evaluations), default=1.0)
    return max(1.0, trained, pilot.steps_to_target or 0.0)
