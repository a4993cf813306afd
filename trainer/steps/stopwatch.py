"""How the parts of a step are timed on each kind of device without slowing it down.

A mark is set now and read later: on a GPU the work is still queued when the mark is set, and waiting for it at every
step would undo the overlap that is being measured.
"""

from __future__ import annotations

import time
from typing import Protocol, TypeAlias

import torch

Mark: TypeAlias = "float | torch.cuda.Event"


class Stopwatch(Protocol):
    """Sets marks and tells the time between them."""

    def mark(self) -> Mark:
        """A mark at this point of the device's work."""
        ...

    def seconds(self, first: Mark, last: Mark) -> float:
        """Time from one mark to a later one; waits for the device to reach it."""
        ...


class CpuStopwatch:
    """Marks are readings of the monotonic clock."""

    def mark(self) -> Mark:
        """A reading of the monotonic clock."""
        return time.perf_counter()

    def seconds(self, first: Mark, last: Mark) -> float:
        """Seconds between two marks."""
        assert isinstance(first, float)
        assert isinstance(last, float)
        return last - first


class CudaStopwatch:
    """Marks are events in the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Mark:
        """Record a CUDA event on the current stream."""
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's gap
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, first: Mark, last: Mark) -> float:
        """The time between two events."""
        assert isinstance(first, torch.cuda.Event)
        assert isinstance(last, torch.cuda.Event)
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


def make_stopwatch(device: torch.device) -> Stopwatch:
    """The stopwatch for a device."""
    return CudaStopwatch(device) if device.type == "cuda" else CpuStopwatch()
