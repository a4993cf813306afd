"""How quick each collective is between the workers: a line through what it took with few and with many bytes.

    t = m alpha + x beta            m, x: messages in a row and bytes over the slowest link (`hetopt.core.comm.cost`)

Nobody measures again: once training goes on, what whole steps take is what counts
(`hetopt.trainer.policies.ratio.step_times`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetopt.core.comm.cost import TRAINER, LinkSpeed, Operation, Primitive, Scope, fit_alpha_beta
from hetopt.core.comm.options import Option


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One collective operation that was timed by itself, in seconds on the slowest member."""

    operation: Operation
    time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Latency of a message and rate of the slowest link, of each collective between machines and inside them."""

    lines: Mapping[tuple[Scope, Primitive], LinkSpeed]

    @classmethod
    def of(cls, timings: Sequence[Timed]) -> Network:
        """Fit the lines to timings at two payloads and more.

        Raises:
            ValueError: nothing was timed between two members or more, or a time is not positive.
        """
        timings = [timed for timed in timings if timed.operation.members > 1]
        if not timings:
            raise ValueError("a network is measured between at least two members")
        kinds = dict.fromkeys((timed.operation.scope, timed.operation.primitive) for timed in timings)
        return cls(lines={kind: _line([t for t in timings if _kind(t.operation) == kind]) for kind in kinds})

    def expected_s(self, operations: Sequence[Operation]) -> float:
        """Seconds of an exchange, its operations one after the other."""
        return sum(self._of(operation).time_s(operation.terms(TRAINER)) for operation in operations)

    def exchange_s(self, option: Option) -> float:
        """Seconds of all buckets of an option, without what backward hides of them."""
        return option.buckets * self.expected_s(option.operations)

    @property
    def hop(self) -> LinkSpeed:
        """Latency and rate of a sum, for people."""
        return next(iter(self.lines.values()))

    def _of(self, operation: Operation) -> LinkSpeed:
        """The line of an operation; of what was never timed that of the same collective elsewhere, or of any."""
        scope, primitive = _kind(operation)
        near = [line for (where, what), line in self.lines.items() if primitive == what or scope == where]
        return self.lines.get((scope, primitive)) or [*near, self.hop][0]


def _kind(operation: Operation) -> tuple[Scope, Primitive]:
    return operation.scope, operation.primitive


def _line(timings: Sequence[Timed]) -> LinkSpeed:
    """Fit ``t / m = alpha + (x / m) beta``: relative errors are what they were."""
    terms = [timed.operation.terms(TRAINER) for timed in timings]
    sizes = [round(own.traffic_bytes / own.messages) for own in terms]
    return fit_alpha_beta(sizes, [timed.time_s / own.messages for timed, own in zip(timings, terms, strict=True)])
