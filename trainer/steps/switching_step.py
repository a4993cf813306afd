"""The step of a run that changes how it exchanges: under backward while everything is sent, at once while it is not."""

from __future__ import annotations

from collections.abc import Sequence

from hetopt.core.comm.options import BF16, Candidate
from hetopt.trainer.comm.buckets import BucketExchange, DenseBuckets
from hetopt.trainer.comm.compressor import Resumable
from hetopt.trainer.comm.exchange import Exchange
from hetopt.trainer.comm.hierarchical import HierarchicalExchange
from hetopt.trainer.data.micro_batch import MicroBatch
from hetopt.trainer.steps.fused_step import FusedStep
from hetopt.trainer.steps.step import StepTrace


class SwitchingStep:
    """Sums at once or in buckets as it is told.

    Buckets that are summed as they are remember nothing. So after a thin exchange the first dense step is summed at
    once, which sends all that was held back, and so is every step that looks at gains. Buckets in bf16 go on with what
    was held back, and hand on their own.

    Args:
        fused: exchanges whole gradients by ``exchange``.
        exchange: whose compression changes.
        dense: sums buckets under backward; None: the workers cannot, or gain nothing by it.
        first: candidate to begin with.
        bf16: sums buckets in bf16; None: they are only summed as they are.
    """

    def __init__(
        self,
        *,
        fused: FusedStep,
        exchange: Exchange | HierarchicalExchange,
        dense: DenseBuckets | None,
        first: Candidate,
        bf16: BucketExchange | None = None,
    ) -> None:
        self._fused = fused
        self._exchange = exchange
        self._dense = dense
        self._bf16 = bf16
        self._uses_bf16 = self._bf16_has_residual = False
        self.use(first)

    @property
    def residual(self) -> Resumable:
        """The residual state, of whichever way is in use."""
        self._take_back()
        return self._exchange

    def use(self, candidate: Candidate) -> None:
        """Exchange in this way from the next step on; all workers must decide the same.

        Raises:
            BadInput: it does not go with the residual.
        """
        self._exchange.use(candidate.compression)
        self._candidate = candidate
        self._uses_bf16 = candidate.in_buckets and candidate.compression.name == BF16

    def warm_up(self, part: MicroBatch) -> None:
        """Compute a micro-batch (see `Step`)."""
        self._fused.warm_up(part)

    def run(
        self,
        parts: Sequence[MicroBatch],
        global_batch_size: int,
        loss_scale: float | None,
        look_at: Sequence[float] = (),
    ) -> StepTrace:
        """Compute and exchange (see `Step`)."""
        if not self._uses_bf16 or look_at:
            self._take_back()
        may_bucket = self._uses_bf16 or not self._exchange.has_residual
        in_buckets = self._candidate.in_buckets and may_bucket and not look_at
        if in_buckets and self._uses_bf16:
            self._hand_over()
        self._fused.in_buckets = None if not in_buckets else self._bf16 if self._uses_bf16 else self._dense
        # With buckets, whole gradients are exceptions: nobody should compare their times with those of the others.
        self._fused.way = "" if self._candidate.in_buckets and not in_buckets else self._candidate.option.key
        return self._fused.run(parts, global_batch_size, loss_scale, look_at)

    def _hand_over(self) -> None:
        """Buckets keep from here on what is held back."""
        if self._bf16 is not None and not self._bf16_has_residual and isinstance(self._exchange, Exchange):
            self._bf16.load_state(self._exchange.lend())
            self._bf16_has_residual = True

    def _take_back(self) -> None:
        """The whole gradient's exchange keeps it again."""
        if self._bf16 is not None and self._bf16_has_residual and isinstance(self._exchange, Exchange):
            self._exchange.returned(self._bf16.state())
            self._bf16_has_residual = False
