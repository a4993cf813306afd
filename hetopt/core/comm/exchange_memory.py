"""What a worker's exchange takes of its device's memory: residuals that it keeps, and what it works in for a moment.

    kept  = 2 gradients with error feedback, 4 with momentum correction (the residual, and what it swaps places with)
    taken = 0 to 2 gradients for a method to work in + 16 bytes for each element that a worker sends

A selection works in the magnitudes and a mask: 5/4 of a gradient.

An average of parameters keeps the parameters of the last one beside the residual of its rounding, and takes two more
copies of them.
"""

from __future__ import annotations

from hetopt.core.comm.composition import CORRECTION, FEEDBACK, combine
from hetopt.core.comm.payload_bytes import VALUE_BYTES
from hetopt.core.memory import ALONE, ExchangeMemory
from hetopt.core.run_spec import Compression
from hetopt.core.synchronization import Synchronization

RESIDUAL_VECTORS = {FEEDBACK: 2, CORRECTION: 4}

WORKING_VECTORS = {"identity": 0, "int8": 2, "int4": 2, "dgc": 2}
"""Of the size of the gradient; `SELECTION` where nothing is said."""

SELECTION = 1.25
"""A copy of the gradient in four bytes an element, and a mask in one."""

SENT_ELEMENT_BYTES = 16
"""Of an element that is sent: its value and its index, once as they are selected and once as they arrive."""


def exchange_memory(
    compression: Compression, *, gradient_bytes: int, workers: int, sync: Synchronization | None = None
) -> ExchangeMemory:
    """Bytes beside the gradient itself.

    Args:
        compression: of the gradient; ``auto`` may come to any that sends a part of it, and is taken for topk.
        gradient_bytes: in fp32.
        workers: that exchange.
        sync: when they do; None: in every step.

    Raises:
        BadInput: the compression is none.
    """
    if workers == 1:
        return ALONE
    averages = sync is not None and sync.is_local
    chosen = combine(compression.name, memory=compression.memory, collective=compression.collective)
    sent = 0.0
    if chosen.method.by_ratio:
        sent = compression.ratio * gradient_bytes / VALUE_BYTES * SENT_ELEMENT_BYTES * workers
    return ExchangeMemory(
        kept_bytes=(RESIDUAL_VECTORS.get(chosen.memory, 0) + averages) * gradient_bytes,
        taken_bytes=int((WORKING_VECTORS.get(chosen.name, SELECTION) + 2 * averages) * gradient_bytes + sent),
    )
