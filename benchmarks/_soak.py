"""Continuous faults on one run: whether what lives through all of them keeps its memory, files and threads.

Three workers under the local launcher; one that is drawn is killed or frozen as soon as the others train again. The
first worker is spared, so that it goes through every generation, as its host and all wardens do. Each of these is
looked at after every fault, and what it has in the last third of the time is compared with the first third.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from hetopt.backends.backend import RunHandle
from hetopt.backends.emulation.iproute import namespaces
from hetopt.backends.processes import LocalLauncher
from hetopt.core.errors import RunFailed
from hetopt.core.events.log import EVENTS_FILE, parse_events
from hetopt.core.run_spec import RunSpec
from hetopt.core.worker_logs import read_from

_FROZEN_S = 1.0
_TRAINS_AGAIN_S = 60.0
_CALM_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What the processes that live through everything have, at one moment."""

    memory_bytes: int
    files: int
    threads: int
    namespaces: int

    @classmethod
    def by(cls, processes: list[psutil.Process]) -> Kept:
        """Of these together; of memory that several share, each has a part.

        What a worker alone would give back grows without any of it being new: of what it shares with its warden it gets
        pages of its own as soon as it writes to them.
        """
        return cls(
            memory_bytes=sum(process.memory_full_info().pss for process in processes),
            files=sum(process.num_fds() for process in processes),
            threads=sum(process.num_threads() for process in processes),
            namespaces=len(namespaces()),
        )


@dataclass(frozen=True, kw_only=True)
class Soaked:
    """What came of it: faults, steps of the run, and growth from the first third of the time to the last."""

    faults: int
    steps: int
    growth: Mapping[str, float]


def soak(spec: RunSpec, folder: Path, environment: Mapping[str, str], seconds: float, seed: int = 0) -> Soaked:
    """Disturb a run for so long.

    Raises:
        RunFailed: it did not train again after a fault.
    """
    launcher, draw = LocalLauncher(grace_s=5.0), random.Random(seed)
    handle = launcher.start(spec, folder, environment)
    kept: list[tuple[float, Kept]] = []
    try:
        log = _Log(folder / EVENTS_FILE)
        log.wait_for_steps(lambda: launcher.poll(handle).state.is_over)
        wardens = _wardens(folder)
        lasting = [psutil.Process(wardens[0].ppid()), *wardens.values(), *wardens[0].children()]
        began_s = time.monotonic()
        while (now_s := time.monotonic() - began_s) < seconds:
            victim = wardens[draw.randrange(1, len(wardens))]
            with suppress(psutil.NoSuchProcess, IndexError):
                _disturb(victim.children()[0].pid, draw)
            log.wait_for_steps(lambda: launcher.poll(handle).state.is_over)
            time.sleep(_CALM_S)
            kept.append((now_s, Kept.by(lasting)))
    finally:
        launcher.stop(RunHandle(run_dir=folder))
    return Soaked(faults=len(kept), steps=log.step, growth=_growth(kept, seconds))


def _growth(kept: list[tuple[float, Kept]], seconds: float) -> dict[str, float]:
    """From the median of the first third to that of the last: memory as a part of itself, the rest in numbers."""
    first = [one for at_s, one in kept if at_s < seconds / 3]
    last = [one for at_s, one in kept if at_s >= 2 * seconds / 3]

    def grown(name: str) -> float:
        then, now = (statistics.median(float(getattr(one, name)) for one in part) for part in (first, last))
        return now - then

    memory_bytes = statistics.median(one.memory_bytes for one in first)
    return {
        "memory": grown("memory_bytes") / memory_bytes,
        **{name: grown(name) for name in ("files", "threads", "namespaces")},
    }


def _disturb(worker: int, draw: random.Random) -> None:
    if draw.random() < 0.75:
        os.kill(worker, signal.SIGKILL)
        return
    os.kill(worker, signal.SIGSTOP)
    time.sleep(_FROZEN_S)
    os.kill(worker, signal.SIGCONT)


class _Log:
    """Follows the steps of a run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self.step = 0

    def wait_for_steps(self, is_over: Callable[[], bool]) -> None:
        """Until a control period that began from now on has been told."""
        now_s, deadline_s = time.time(), time.monotonic() + _TRAINS_AGAIN_S
        while time.monotonic() < deadline_s and not is_over():
            text, self._read = read_from(self._path, self._read)
            for event in parse_events(text.splitlines(keepends=True)):
                if event["event"] == "step":
                    self.step = event["step"]
                    if event["time_s"] - event["steps"] * event["step_time_s"] > now_s:
                        return
            time.sleep(0.05)
        raise RunFailed(f"the run did not train again within {_TRAINS_AGAIN_S:g} s of a fault, at step {self.step}.")


def _wardens(folder: Path) -> dict[int, psutil.Process]:
    """By place."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "hetopt.trainer.worker" in command and str(folder) in command:
            parent = process.parent()
            if parent is not None and "hetopt.trainer.worker" not in parent.cmdline():
                found[int(process.environ()["RANK"])] = process
    return dict(sorted(found.items()))
