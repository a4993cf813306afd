"""How the parts of a step are timed on each kind of device without slowing it down.

A mark is set now and read later: on a GPU the work is still queued when the mark is set, and waiting for it at every
step would undo the overlap that is being measured.
"""

from __future__ import annotations

import time
from typing import NamedTuple, TypeAlias

import torch


class CpuMark(NamedTuple):
    """Readings of two clocks at once, in seconds: the monotonic one, and processor time of this thread."""

    wall_s: float
    processor_s: float


Mark: TypeAlias = "CpuMark | torch.cuda.Event"


class Stopwatch:
    """Sets marks on a device, and tells the time between them and how much of it the device computed.

    Marks of a CPU are readings of two clocks: the thread that drives forward and backward computes all the while,
    whatever number of threads help it. Marks of a GPU are events in its current stream, where nobody else computes.
    """

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008  # it has no state
        self._device = device

    def mark(self) -> Mark:
        """Set a mark at this point of the device's work."""
        if self._device.type != "cuda":
            return CpuMark(time.perf_counter(), time.thread_time())
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's gap
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, first: Mark, last: Mark) -> float:
        """Return the seconds from one mark to a later one; waits for the device to reach it."""
        return _between(first, last).wall_s

    def processor_s(self, first: Mark, last: Mark) -> float:
        """Return the seconds between two marks in which the device worked for this process, of a GPU all of them."""
        return max(0.0, _between(first, last).processor_s)


def _between(first: Mark, last: Mark) -> CpuMark:
    if isinstance(first, CpuMark) and isinstance(last, CpuMark):
        return CpuMark(last.wall_s - first.wall_s, last.processor_s - first.processor_s)
    assert isinstance(first, torch.cuda.Event)
    assert isinstance(last, torch.cuda.Event)
    last.synchronize()
    elapsed_s = float(first.elapsed_time(last)) / 1e3
    return CpuMark(elapsed_s, elapsed_s)
