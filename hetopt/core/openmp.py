"""How many threads OpenMP starts in a worker, and how they wait: one rule for what is profiled and what is launched."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

THREADS_VARIABLE = "OMP_NUM_THREADS"
SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SPIN = {"GOMP_SPINCOUNT": "20000"}
"""OpenMP threads wait for each other by spinning, for milliseconds by default. Whenever something else wants a
processor, they then spin where the awaited thread should run, and a step takes ten times as long. A short spin (some
0.1 ms) still bridges the gaps between operators: alone a step is as quick, beside another worker six times as quick."""

_GROUPS, _MOUNTED = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def openmp_environment(workers: int, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What each of so many workers of this machine needs beside ``given``, which is kept where it says anything.

    The processors are shared out, because every worker would otherwise start a thread for each of them. It must be
    set before torch is loaded.
    """
    own = {} if THREADS_VARIABLE in given else {THREADS_VARIABLE: str(threads_of_each(workers))}
    return own if any(name in given for name in SPIN_VARIABLES) else own | SPIN


def threads_of_each(workers: int) -> int:
    """Threads of each of so many workers that share this machine."""
    return max(1, usable_processors() // workers)


def usable_processors(groups: Path = _GROUPS, mounted: Path = _MOUNTED) -> int:
    """Processors that this process may keep busy: those of its affinity, at most its control groups' quota.

    A quota is rounded down, as by Rust's ``available_parallelism``: a team of more threads is stopped in every period.

    Args:
        groups: lists the process's control groups.
        mounted: where they are.
    """
    allowed = len(os.sched_getaffinity(0))
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except OSError:
        return allowed
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = mounted / "cpu" if controllers else mounted
        names = [name for name in path.split("/") if name not in ("", "..")]
        for depth in range(len(names) + 1):  # a group has what all groups above it leave it
            quota = _quota_of(root.joinpath(*names[:depth]))
            allowed = allowed if quota is None else min(allowed, max(1, int(quota)))
    return allowed


def _quota_of(group: Path) -> float | None:
    """Processors that a control group may use, of version 2 or 1; None where it has no limit."""
    for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            words = [word for name in files for word in (group / name).read_text(encoding="utf-8").split()]
            quota_us, period_us = map(int, words)
        except (OSError, ValueError):  # no such group here, or "max"
            continue
        if quota_us > 0:
            return quota_us / period_us
    return None
