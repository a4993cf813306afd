"""How the gradients of one model of a script travel: what a script's run asks of each way."""

from __future__ import annotations

from torch import Tensor

from hetopt.trainer.comm.exchange import ExchangeStats
from hetopt.trainer.script.audit import AuditRecord
from hetopt.trainer.steps.exchange_assembly import ExchangeConfig


class GradientState:
    """What is alike in all ways; of a script on one worker, all there is to it.

    Args:
        exchange: how gradients travel.

    Attributes:
        weight: what this worker's gradient counts; None: its share of the batch.
        record: what audits found; None: there are none.
        is_audit: whether the step at hand is one, on all workers.
        differences: over earlier audits, see `hetopt.trainer.script.audit.Found`.
        waited_s: for other workers in a step, before the last part of the gradient was sent.
    """

    def __init__(self, exchange: ExchangeConfig) -> None:
        self.exchange = exchange
        self.weight: float | str | None = None
        self.record: AuditRecord | None = None
        self.is_audit = False
        self.differences: list[Tensor] = []
        self.waited_s = 0.0

    def take_stats(self) -> ExchangeStats | None:
        """Return what the exchange of a step cost; None: there was none."""
        return None

    def audited(self) -> tuple[Tensor, float] | None:
        """Return what the backward pass found that was an audit; None: it was none."""
        return None

    def ended(self) -> None:
        """End a backward pass."""
