"""What a compressed gradient weighs on the wire and how long a collective takes: one function for planner and trainer.

Standard library only, so that planning needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from hetopt.profiler.errors import BadInput

Collective = Literal["all_reduce", "all_gather"]

VALUE_BYTES = 4  # fp32
INDEX_BYTES = 4  # int32, hence fewer than 2**31 elements
MAX_INDEXED_ELEMENTS = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class WireFormat:
    """How one compressor's payloads travel.

    Args:
        collective: how payloads combine. ``all_reduce``: they add up element by element on the way. ``all_gather``:
        every
            worker receives every payload and adds them up itself.
        element_bytes: bytes for one sent element, its index included.
        sparse: whether ``ratio`` decides how many elements are sent; dense formats send all of them.
    """

    collective: Collective
    element_bytes: int
    sparse: bool

    def payload_bytes(self, numel: int, ratio: float) -> int:
        """Bytes that one worker contributes for a gradient of ``numel`` elements."""
        return self.element_bytes * (kept_elements(numel, ratio) if self.sparse else numel)


WIRE_FORMATS: Mapping[str, WireFormat] = MappingProxyType(
    {
        "identity": WireFormat(collective="all_reduce", element_bytes=VALUE_BYTES, sparse=False),
        "topk": WireFormat(collective="all_gather", element_bytes=VALUE_BYTES + INDEX_BYTES, sparse=True),
    }
)


def wire_format(name: str) -> WireFormat:
    """The wire format of the compressor called ``name``.

    Raises:
        BadInput: there is no such compressor.
    """
    try:
        return WIRE_FORMATS[name]
    except KeyError:
        raise BadInput(
            f"There is no compressor called {name!r}.", hint=f"choose one of: {', '.join(WIRE_FORMATS)}"
        ) from None


def kept_elements(numel: int, ratio: float) -> int:
    """How many of ``numel`` elements a sparse compressor keeps: ``max(1, floor(numel * ratio))``.

    The product is nudged up by a millionth of an element, so that 0.29 of 100 is 29 although ``100 * 0.29 < 29`` in
    binary.
    """
    if numel < 1 or not 0 < ratio <= 1:
        raise ValueError(f"a ratio in (0, 1] of at least one element is needed, not {ratio} of {numel}")
    return min(numel, max(1, int(numel * ratio + 1e-6)))


def wire_bytes(name: str, numel: int, ratio: float) -> int:
    """Bytes that one worker contributes to the collective for a gradient of ``numel`` fp32 elements.

    Raises:
        BadInput: there is no compressor called ``name``.
    """
    return wire_format(name).payload_bytes(numel, ratio)


def collective_time_s(
    collective: Collective, payload_bytes: float, workers: int, latency_s: float, bytes_per_s: float
) -> float:
    """Time of one collective in the alpha-beta model, in seconds, when no worker has to wait for another.

    With N workers, p bytes contributed by each, latency alpha a message and bandwidth bw of the slowest link:

        ring all-reduce   2 (N-1) alpha + 2 (N-1)/N p / bw
        ring all-gather     (N-1) alpha +   (N-1)   p / bw

    (arXiv 2312.02493, Table I, whose all-gather pays log2 N latencies; gloo and NCCL gather in a ring of N-1 messages.)

    Args:
        collective: which one.
        payload_bytes: what one worker contributes, see `wire_bytes`.
        workers: participants; a single worker exchanges nothing and takes no time.
        latency_s: time of one empty message between neighbours.
        bytes_per_s: bandwidth of the slowest link between neighbours.
    """
    if payload_bytes < 0 or workers < 1 or latency_s < 0 or not bytes_per_s > 0:
        raise ValueError(
            "a collective needs payload_bytes >= 0, workers >= 1, latency_s >= 0 and bytes_per_s > 0, not "
            f"{payload_bytes}, {workers}, {latency_s}, {bytes_per_s}"
        )
    hops = workers - 1
    if collective == "all_reduce":
        return 2 * hops * latency_s + 2 * hops / workers * payload_bytes / bytes_per_s
    return hops * latency_s + hops * payload_bytes / bytes_per_s
