"""Times of a step's parts on each kind of device; and waits that make a worker as slow as the machine it emulates.

A mark is set now and read later: on a GPU the work is still queued when the mark is set, and waiting for it at every
step would undo the overlap that is being measured.

A slowed worker computes for real, then waits until the emulated machine would be done. That is described by how much
slower it is than this one (`Stretched`), or by the time it takes, whatever this one needs (`Declared`).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from hetopt.core.run_spec import Conditions, DeclaredTime, WorkerSpec


class CpuMark(NamedTuple):
    """Readings of two clocks at once, in seconds: the monotonic clock, and this thread's processor time.

    Attributes:
        wall_s: reading of the monotonic clock.
        processor_s: processor time of this thread.
    """

    wall_s: float
    processor_s: float


Mark: TypeAlias = "CpuMark | torch.cuda.Event"


class Stopwatch:
    """Clock of a device: sets marks in its work, and tells the seconds between them later.

    Marks of a CPU are readings of two clocks: the thread that drives forward and backward computes all the while,
    whatever number of threads help it. Marks of a GPU are events in its current stream, where nobody else computes.

    Args:
        device: device whose work is timed.
        clock: returns seconds; a GPU's events do not use it.
    """

    def __init__(
        self,
        device: torch.device = torch.device("cpu"),  # noqa: B008  # it has no state
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._device, self._clock = device, clock

    def mark(self) -> Mark:
        """Return a mark at this point of the device's work, without waiting for it."""
        if self._device.type != "cuda":
            return CpuMark(self._clock(), time.thread_time())
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's gap
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, first: Mark, last: Mark) -> float:
        """Return the seconds from one mark to a later one, after waiting until the device has reached it."""
        return _between(first, last).wall_s

    def processor_s(self, first: Mark, last: Mark) -> float:
        """Return this thread's processor seconds between two marks; on a GPU all seconds between them."""
        return max(0.0, _between(first, last).processor_s)


def _between(first: Any, last: Any) -> CpuMark:
    """Return the seconds between two marks of one device, by both clocks."""
    if isinstance(first, CpuMark):
        return CpuMark(last.wall_s - first.wall_s, last.processor_s - first.processor_s)
    last.synchronize()
    elapsed_s = float(first.elapsed_time(last)) / 1e3
    return CpuMark(elapsed_s, elapsed_s)


FORWARD = 1 / 3
"""Part of a step's computation that is over when backward begins, which computes two products for each one forwards."""

_FEWEST_USES = 3
"""Of fewer steps the median may be a hiccup, and the whole miniature is slowed down where computation does not fit."""

_YIELDING_S = 0.0002
"""The end of a wait that is not slept through. A sleeper wakes 0.1 to 0.2 ms late on a core that is free (Linux 6.18,
two cores, four and eight waiting processes), which would be half a percent of a step of 30 ms."""


class Slowdown:
    """Waits that make a worker as slow as the machine it emulates; this class never waits."""

    def begin(self, samples: int, *, read_s: float = 0.0) -> None:
        """Begin a step's computation of ``samples`` samples, ``read_s`` seconds ago; does nothing here."""

    def reach(self, done: float) -> None:
        """Wait until the emulated machine would have done the fraction ``done`` (0 to 1) of the step.

        Does nothing here.
        """

    def use(self) -> float:
        """Return real over declared compute time, the median of steps since the last call.

        0: not known, or none is declared.
        """
        return 0.0


class Stretched(Slowdown):
    """Slowdown by a factor: waits ``factor - 1`` times the seconds of computing since the last wait.

    Args:
        factor: how many times longer computing takes, at least 1.
        used_s: returns the seconds used; only differences count.
        sleep: waits for so many seconds: `time.sleep`, or `busy` where the worker has a core to itself.
    """

    def __init__(self, factor: float, used_s: Callable[[], float], sleep: Callable[[float], None] = time.sleep) -> None:
        self._factor = factor
        self._used_s = used_s
        self._sleep = sleep
        self._begun_s = 0.0

    def begin(self, samples: int, *, read_s: float = 0.0) -> None:
        """Begin to count the seconds used by this step; both arguments are ignored."""
        self._begun_s = self._used_s()

    def reach(self, done: float) -> None:
        """Wait ``factor - 1`` times the seconds used since the last wait; ``done`` is ignored."""
        self._sleep((self._factor - 1) * max(0.0, self._used_s() - self._begun_s))
        self._begun_s = self._used_s()  # a busy wait uses time, too


class Declared(Slowdown):
    """Slowdown to a declared time: waits until a step has taken as long as on the machine that is emulated.

    One step takes

        (fixed_s + per_sample_s * samples) * slowdown / speed_factor

    with slowdown and speed factor as the conditions of the miniature are when the step begins.

    Args:
        declared: time that the machine takes which the worker stands for.
        host: name of the worker's host, as the conditions know it.
        conditions: returns the conditions of the miniature now.
        clock: returns the seconds by which the real computation is over, too (a GPU's clock waits for the GPU).
        sleep: waits for so many seconds; None: `precisely`.
    """

    def __init__(
        self,
        declared: DeclaredTime,
        host: str,
        conditions: Callable[[], Conditions],
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self._declared = declared
        self._host = host
        self._conditions = conditions
        self._clock = clock
        self._sleep = precisely if sleep is None else sleep
        self._begun_s = 0.0
        self._declared_s = 0.0
        self._waited_s = 0.0
        self._uses: list[float] = []

    def begin(self, samples: int, *, read_s: float = 0.0) -> None:
        """Set the declared seconds of a step of ``samples``, begun ``read_s`` seconds ago, by the conditions now."""
        now = self._conditions()
        plain_s = self._declared.fixed_s + self._declared.per_sample_s * samples
        self._declared_s = plain_s * now.slowdown / now.speed_factors.get(self._host, 1.0)
        self._waited_s = 0.0
        self._begun_s = self._clock() - read_s

    def reach(self, done: float) -> None:
        """Wait until the fraction ``done`` of the step's declared seconds is over, if it is not; 1 ends the step."""
        arrived_s = self._clock()
        if done >= 1:
            self._uses.append((arrived_s - self._begun_s - self._waited_s) / self._declared_s)
        left_s = self._begun_s + done * self._declared_s - arrived_s
        if left_s > 0:
            self._sleep(left_s)
            self._waited_s += self._clock() - arrived_s

    def use(self) -> float:
        """Return real over declared compute time, the median of the steps since the last figure.

        Above 1 it does not fit.

        0 while there are fewer than three such steps, which then count for the next time.
        """
        if len(self._uses) < _FEWEST_USES:
            return 0.0
        uses, self._uses = self._uses, []
        return statistics.median(uses)


def busy(seconds: float) -> None:
    """Wait for ``seconds`` seconds in a loop that keeps the core busy.

    A weaker machine computes all the while. Where a paced worker sleeps instead, its core falls idle and its caches
    cool, and waking up for the exchange costs milliseconds that no weaker machine would have paid.
    """
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def precisely(seconds: float) -> None:
    """Sleep for ``seconds`` seconds, to a small part of a millisecond, by yielding the core at the end."""
    until = time.perf_counter() + seconds
    if seconds > _YIELDING_S:
        time.sleep(seconds - _YIELDING_S)
    while time.perf_counter() < until:
        os.sched_yield()


def make_pace(
    worker: WorkerSpec, device: torch.device, *, conditions: Callable[[], Conditions], own_core: bool
) -> Slowdown:
    """Make the slowdown of a worker on a device: to its declared time, else by its factor, else none.

    On a CPU the time that a factor stretches is that of this thread on a core (it drives forward and backward, whatever
    number of threads help it). Elapsed time would not do: paced workers often share the cores of one machine, and a
    stretch would multiply the time that a worker merely waited for a core. Where they do share (``own_core`` is false),
    a worker sleeps through its stretch, so that it takes nothing from the others.

    Args:
        worker: worker of the run spec.
        device: device that it computes on.
        conditions: returns the conditions of the miniature now.
        own_core: whether the worker has a core to itself.
    """

    def elapsed_s() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    is_cpu = device.type == "cpu"
    if worker.declared is not None:
        clock = time.perf_counter if is_cpu else elapsed_s
        return Declared(worker.declared, worker.host, conditions, clock=clock)
    if worker.slowdown == 1:
        return Slowdown()
    if is_cpu:
        return Stretched(worker.slowdown, time.thread_time, busy if own_core else time.sleep)
    return Stretched(worker.slowdown, elapsed_s)
