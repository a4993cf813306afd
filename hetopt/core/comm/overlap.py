"""What travels while the backward pass still runs, and how much of it has to wait for its end. Standard library only.

Gradients are summed in buckets, in the order in which backward produces them, as DistributedDataParallel does: a small
one first, so that something travels early, then larger ones. The last bucket is full when backward is over, whatever
came before.
"""

from __future__ import annotations

import math

FIRST_BUCKET_BYTES = 1 << 20
"""What DistributedDataParallel sends as soon as it is ready, before it collects larger buckets (its default). A
gradient of no more has nothing to send while backward still runs."""

BUCKET_BYTES = 25 << 20
"""What a larger bucket holds (its default)."""

BUCKETWISE = ("fp16", "bf16", "qsgd_maxnorm", "qsgd_two_scale", "qsgd_multi_scale")
"""Compressors that do with a part what they do with the whole, and so may work under backward."""

UNDER_BACKWARD = ("identity", *BUCKETWISE)
"""What a step that overlaps can send. Others need the whole gradient before they select."""


def last_bucket_share(gradient_bytes: float) -> float:
    """Share of a gradient that is only ready when backward ends, in (0, 1].

    Where the borders fall depends on the layers; buckets after the first are taken to be equal.
    """
    rest = gradient_bytes - FIRST_BUCKET_BYTES
    return 1.0 if rest <= 0 else rest / math.ceil(rest / BUCKET_BYTES) / gradient_bytes
