"""How the parts of a step are timed on each kind of device without slowing it down.

A mark is set now and read later: on a GPU the work is still queued when the mark is set, and waiting for it at every
step would undo the overlap that is being measured.
"""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol, TypeAlias

import torch


class CpuMark(NamedTuple):
    """Readings of two clocks at once, in seconds: the monotonic one, and processor time of this thread."""

    wall_s: float
    processor_s: float


Mark: TypeAlias = "CpuMark | torch.cuda.Event"


class Stopwatch(Protocol):
    """Sets marks and tells the time between them, and how much of it the device computed."""

    def mark(self) -> Mark:
        """A mark at this point of the device's work."""

    def seconds(self, first: Mark, last: Mark) -> float:
        """Time from one mark to a later one; waits for the device to reach it."""

    def processor_s(self, first: Mark, last: Mark) -> float:
        """Return the seconds between two marks in which the device worked for this process, of a GPU all of them."""


class CpuStopwatch:
    """Marks are readings of the monotonic clock and of the thread's processor time.

    The thread that drives forward and backward computes all the while, whatever number of threads help it.
    """

    def mark(self) -> Mark:
        """A reading of both clocks."""
        return CpuMark(time.perf_counter(), time.thread_time())

    def seconds(self, first: Mark, last: Mark) -> float:
        """Seconds between two marks."""
        assert isinstance(first, CpuMark)
        assert isinstance(last, CpuMark)
        return last.wall_s - first.wall_s

    def processor_s(self, first: Mark, last: Mark) -> float:
        """Return the processor time between two marks of one thread, in seconds."""
        assert isinstance(first, CpuMark)
        assert isinstance(last, CpuMark)
        return max(0.0, last.processor_s - first.processor_s)


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

    def processor_s(self, first: Mark, last: Mark) -> float:
        """Return the time between two events: nobody else computes on the device."""
        return self.seconds(first, last)


def make_stopwatch(device: torch.device) -> Stopwatch:
    """The stopwatch for a device."""
    return CudaStopwatch(device) if device.type == "cuda" else CpuStopwatch()
