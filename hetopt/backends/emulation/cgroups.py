"""Limits the CPU time of a rehearsed host by a control group, where this machine's groups allow it (v1 and v2)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hetopt.core.errors import BadInput

_PERIOD_US = 20_000
"""Short, so that a throttled worker is slow all the time and not fast and then frozen."""
_LEAST_QUOTA_US = 1_000
"""The kernel takes no smaller one."""
_LONGEST_PERIOD_US = 1_000_000


def bandwidth_us(cores: float) -> tuple[int, int]:
    """Quota and period in microseconds for ``cores`` cores; very small shares need a longer period.

    Raises:
        BadInput: the kernel has no quota so small.
    """
    period_us = max(_PERIOD_US, round(_LEAST_QUOTA_US / cores))
    if period_us > _LONGEST_PERIOD_US:
        raise BadInput(f"a CPU quota must be at least 0.001 cores, got {cores:g}.", hint="for example cpu=0.5")
    return max(_LEAST_QUOTA_US, round(cores * period_us)), period_us


@dataclass(frozen=True, kw_only=True)
class Hierarchy:
    """Where this machine's CPU controller is mounted."""

    root: Path
    version: Literal[1, 2]

    @classmethod
    def find(cls, mounts: Path = Path("/proc/self/mounts")) -> Hierarchy | None:
        """The mounted controller. Version 1 first: a controller that it has is missing from version 2."""
        found: Hierarchy | None = None
        for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
            _, folder, kind, options = line.split(" ")[:4]
            if kind == "cgroup" and "cpu" in options.split(","):
                return cls(root=Path(folder), version=1)
            if kind == "cgroup2" and found is None and "cpu" in _words(Path(folder) / "cgroup.controllers"):
                found = cls(root=Path(folder), version=2)
        return found


@dataclass(frozen=True, kw_only=True)
class CpuQuota:
    """One group with a quota. Processes enter it by writing their number into ``members``."""

    folder: Path
    version: Literal[1, 2]

    @classmethod
    def create(cls, name: str, cores: float) -> CpuQuota:
        """Make the group.

        Raises:
            BadInput: this machine's groups do not allow it.
        """
        hierarchy = Hierarchy.find()
        if hierarchy is None:
            raise _refused("it has no CPU controller")
        quota = cls(folder=hierarchy.root / name, version=hierarchy.version)
        try:
            if quota.version == 2 and "cpu" not in _words(hierarchy.root / "cgroup.subtree_control"):
                (hierarchy.root / "cgroup.subtree_control").write_text("+cpu")
            quota.folder.mkdir()
            quota.set(cores)
        except OSError as error:
            quota.remove()
            raise _refused(f"{error.filename}: {error.strerror}") from None
        return quota

    @property
    def members(self) -> Path:
        """The file that lists the group's processes."""
        return self.folder / "cgroup.procs"

    def set(self, cores: float) -> None:
        """Change the quota; takes effect within one period."""
        quota_us, period_us = bandwidth_us(cores)
        if self.version == 2:
            (self.folder / "cpu.max").write_text(f"{quota_us} {period_us}")
            return
        (self.folder / "cpu.cfs_quota_us").write_text("-1")  # quota and period are checked together, whatever changes
        (self.folder / "cpu.cfs_period_us").write_text(str(period_us))
        (self.folder / "cpu.cfs_quota_us").write_text(str(quota_us))

    def remove(self) -> None:
        """Remove the group, which must have no process left. One that is gone already is no error."""
        try:
            self.folder.rmdir()
        except FileNotFoundError:
            return


def check_quotas(asked: Sequence[float], cores: int) -> None:
    """Refuse quotas that this machine, with so many cores, cannot keep.

    Raises:
        BadInput: one is too small, together they are too much, or the control groups allow none.
    """
    if not asked:
        return
    for quota in asked:
        bandwidth_us(quota)
    if sum(asked) > cores:
        raise BadInput(
            f"the hosts ask for {sum(asked):g} cores of CPU, and this machine has {cores}.",
            hint="lower cpu=, or give the hosts a speed= instead",
        )
    CpuQuota.create(f"hetopt-check-{os.getpid()}", min(asked)).remove()


def find_quotas(prefix: str) -> list[CpuQuota]:
    """The groups whose names begin so."""
    hierarchy = Hierarchy.find()
    if hierarchy is None:
        return []
    return [
        CpuQuota(folder=folder, version=hierarchy.version)
        for folder in sorted(hierarchy.root.glob(f"{prefix}*"))
        if folder.is_dir()
    ]


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []


def _refused(reason: str) -> BadInput:
    return BadInput(
        f"this machine's control groups allow no CPU quota ({reason}).", hint="give the host a speed= instead of cpu="
    )
