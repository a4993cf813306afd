"""Audit steps: how far shares are from one machine, measured in the run itself whatever the script computes.

In an audit step the leader computes the whole batch and the other workers compute it in shares. All of them step by the
leader's gradient, so that the step is exact whatever is found; the distance of the shares' sum from it is the figure.
It knows no loss, layer or operator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from hetopt.core import formatting
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.events.log import EventLog
from hetopt.core.run_rules import why_shares_differ

Audit: TypeAlias = Literal["warn", "stop", "off"]
"""What happens where an audit finds that shares differ from one machine by more than the tolerance."""

LEAST_WORKERS = 3
"""One computes the whole batch, and at least two share it."""

ROUNDING = 1e-4
"""Relative distance of two float32 gradients of the same samples, summed in another order."""

LEAST_NOISY_AUDITS = 4
"""Of fewer differences nobody can tell noise from a difference that is always the same."""


@dataclass(frozen=True, kw_only=True)
class Audits:
    """Which batches of a loader are audited: of the steps 1, 2, 4, 8, ..., and the first after shares have changed.

    Attributes:
        every_step: whether all are, so that a run of several workers trains as one machine does.
        accumulate: batches of a step.
        largest: samples that the leader's memory has room for; None: not known.
    """

    every_step: bool = False
    accumulate: int = 1
    largest: int | None = None

    def is_due(self, step: int, samples: int, *, changed: bool) -> bool:
        """Return whether a batch is audited.

        Args:
            step: that it is of, from 1.
            samples: of the batch.
            changed: whether the workers have other shares than in the batch before.
        """
        if self.every_step:
            return True
        fits = self.largest is None or samples <= self.largest
        return fits and (step & (step - 1) == 0 or (changed and self.accumulate == 1))


@dataclass(frozen=True, kw_only=True)
class Found:
    """What an audit found, the same on all workers.

    Attributes:
        distance: norm of the difference between the shares' gradient and the leader's, over the norm of the leader's.
        draws: whether random numbers were drawn while a worker computed (dropout, noise).
        audits: so far in which they were.
        coherence: of the differences so far, k |mean|^2 / mean |difference|^2 of k: about 1 where they are noise, and
            k where they are always the same.
    """

    distance: float
    draws: bool = False
    audits: int = 1
    coherence: float = 1.0

    @classmethod
    def of(cls, apart: Tensor, norm: float, *, draws: bool, before: list[Tensor]) -> Found:
        """Return what an audit found.

        Args:
            apart: [elements] the difference.
            norm: of the leader's gradient.
            draws: whether random numbers were drawn.
            before: the sums over earlier audits of the differences, their squared norms and one; added to.
        """
        square = float(apart.square().sum())
        distance = math.sqrt(square) / norm if norm else float(square > 0)
        if not draws or not norm:
            return cls(distance=distance)
        now = [apart / norm, torch.tensor(square / norm**2), torch.tensor(1.0)]
        before[:] = [old + new for old, new in zip(before, now, strict=True)] if before else now
        total, squares, audits = before
        coherence = float(total.square().sum() / squares) if squares else 0.0
        return cls(distance=distance, draws=True, audits=int(audits), coherence=coherence)

    def differs(self, tolerance: float) -> bool:
        """Return whether shares compute something else than one machine: beyond a tolerance, and not by noise alone.

        Of k differences that are independent the coherence is about 1, of the same difference k times it is k: the
        square root of k lies between.
        """
        if not self.distance > tolerance:
            return False
        return not self.draws or (self.audits >= LEAST_NOISY_AUDITS and self.coherence > math.sqrt(self.audits))


@dataclass(kw_only=True)
class AuditRecord:
    """What the audits of a run found.

    Attributes:
        mode: what happens beyond the tolerance.
        tolerance: relative distance that is accepted.
        hint: why shares may differ, and what may mend it.
        differed: whether a sentence was said.
    """

    mode: Audit
    tolerance: float
    hint: str = why_shares_differ(is_ddp=False, normalises=False)
    differed: bool = False

    def __post_init__(self) -> None:
        if self.mode not in get_args(Audit):
            raise BadInput(f"`audit` must be 'warn', 'stop' or 'off', got {self.mode!r}.", hint="see hetopt.session")
        if not self.tolerance > 0:
            raise BadInput(
                f"`audit_tolerance` must be above 0, got {self.tolerance:g}.",
                hint=f"leave it out for {ROUNDING:g}, the rounding of float32 sums",
            )

    def add(self, found: Found, step: int) -> str | None:
        """Return a sentence the first time that shares differ from one machine beyond the tolerance.

        Raises:
            RunFailed: they do, and the run is to stop then; all workers raise it.
        """
        if self.differed or not found.differs(self.tolerance):
            return None
        self.differed = True
        said = f"shares differ from one machine by {formatting.distance(found.distance)} at step {step}"
        if self.mode == "stop":
            raise RunFailed(f"{said}, and audit_tolerance is {self.tolerance:g}.", hint=self.hint)
        return f"{said}: {self.hint}"

    def tell(self, found: Found, step: int, events: EventLog) -> None:
        """Write what an audit found into the log, and what that shows of the script.

        Raises:
            RunFailed: see `add`.
        """
        if math.isfinite(found.distance):  # a step whose gradient overflows is no measurement
            events.write("audited", step=step, distance=found.distance, tolerance=self.tolerance)
        said = self.add(found, step)
        if said is not None:
            events.write("audit_differs", step=step, reason=said)
