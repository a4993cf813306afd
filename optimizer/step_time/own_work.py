"""Seconds of a worker's own work in a gradient exchange: to select or round, to pack, and to unpack what arrives.

As `hetopt profile` timed it on the job's own gradient; untimed compressors are predicted from Top-k's time, or from how
fast the machine copies memory:

    seconds = measured seconds of Top-k x ENCODED[topk] / ENCODED[way]
    seconds = 2 gradient bytes / copy_bytes_per_s x ENCODED[copy] / ENCODED[way]

where ``ENCODED`` are gigabytes of gradient a second on one core (measured on 2026-11-24 at commit a8c0839, 25.6 M
elements, a part of 0.01 where a part is sent): all of these stream the gradient through memory some times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from hetopt.core.comm.composition import AUTO, GATHER, METHODS, PLAIN
from hetopt.core.comm.compression_text import USUAL_RATIO
from hetopt.core.comm.options import COMPRESS_SD, IDENTITY, ROUNDED, SELECTOR, settled_collective, timed_as
from hetopt.core.comm.payload_bytes import VALUE_BYTES
from hetopt.core.run_spec import Compression
from hetopt.optimizer.fit import CompressorLine

COPY = "copy"

ENCODED_GB_PER_S: Mapping[str, float] = MappingProxyType(
    {COPY: 11.0, "topk": 1.84, "bf16": 1.80, "fp16": 1.36, "int8": 0.99, "int4": 0.52}
)

RELATED_LOG_SD = 0.13
"""Of the log of (true / foreseen) seconds where a method was timed with another collective or coding: what those change
in that benchmark, 1.84 to 1.62."""

FORETOLD_LOG_SD = 0.5
"""Where the method was not timed: an assumption, as wide as what other machines make of the same passes over memory."""


@dataclass(frozen=True, kw_only=True)
class OwnWork:
    """Seconds of compressing and unpacking in an exchange: ``fixed_s + each_s x payloads``.

    Attributes:
        fixed_s: seconds whatever arrives.
        each_s: seconds for each payload that arrives.
        by_worker: whether a payload arrives from each worker; else one of all.
        log_sd: standard deviation of the log of (true / predicted) seconds.
    """

    fixed_s: float = 0.0
    each_s: float = 0.0
    by_worker: bool = False
    log_sd: float = 0.0

    def time_s(self, workers: int) -> float:
        """Return a worker's seconds of compressing and unpacking in one exchange among ``workers``, two at least."""
        return self.fixed_s + self.each_s * (workers if self.by_worker else 1)

    def times_s(self, most: int) -> NDArray[np.float64]:
        """Return a worker's seconds of compressing in an exchange of 0 to ``most`` workers, [most + 1]; 0 for one."""
        payloads = np.arange(most + 1) if self.by_worker else np.ones(most + 1)
        times_s = self.fixed_s + self.each_s * payloads
        times_s[:2] = 0.0
        return np.asarray(times_s, dtype=np.float64)


def own_work(
    compression: Compression, lines: Mapping[str, CompressorLine], *, numel: int, copy_bytes_per_s: float | None
) -> OwnWork | None:
    """Return a worker's time to compress and unpack in an exchange; None: neither measured nor predictable.

    Args:
        compression: compressor with ratio, collective and coding; dense gradients take no time.
        lines: measured seconds of compressors, by the names of `timed_as`.
        numel: elements of the gradient.
        copy_bytes_per_s: rate at which the worker copies memory, read plus write; None: not measured.
    """
    name = compression.name
    if name == IDENTITY:
        return OwnWork()
    line = lines.get(timed_as(compression))
    # Gathered payloads are unpacked one by one, and slices come from every worker; a sum arrives once.
    by_worker = settled_collective(compression) == GATHER or name in ROUNDED
    if line is not None:
        timed = not METHODS[name].by_ratio or (
            compression.collective in (AUTO, GATHER) and compression.coding in (None, PLAIN)
        )
        fixed_s, each_s = line.parts_s(compression.ratio)
        log_sd = COMPRESS_SD if timed else RELATED_LOG_SD
        return OwnWork(fixed_s=fixed_s, each_s=each_s, by_worker=by_worker, log_sd=log_sd)
    if name not in ENCODED_GB_PER_S:
        return None
    if (selecting := lines.get(SELECTOR)) is not None:
        known_s, known = selecting.parts_s(USUAL_RATIO)[0], SELECTOR
    elif copy_bytes_per_s is not None:
        known_s, known = 2 * VALUE_BYTES * numel / copy_bytes_per_s, COPY
    else:
        return None
    return OwnWork(fixed_s=known_s * ENCODED_GB_PER_S[known] / ENCODED_GB_PER_S[name], log_sd=FORETOLD_LOG_SD)
