"""What every launcher can do: start a run, say how it is, stop it. Launchers are peers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from hetopt.core.run_spec import RunSpec
from hetopt.core.run_status import RunStatus


@dataclass(frozen=True, kw_only=True)
class RunHandle:
    """Names one run. Everything about it is in its folder, so that another terminal can look and stop it."""

    run_dir: Path


class Launcher(Protocol):
    """Runs a `RunSpec` somewhere."""

    def start(self, spec: RunSpec, run_dir: Path, environment: Mapping[str, str]) -> RunHandle:
        """Start the run and return at once. ``run_dir`` exists and is empty but for what the caller put there."""
        ...

    def poll(self, handle: RunHandle) -> RunStatus:
        """How the run is now. Cheap: callers ask a few times a second."""
        ...

    def stop(self, handle: RunHandle) -> None:
        """End the run: workers save a checkpoint if they can, then nothing of it is left running. Idempotent."""
        ...


@dataclass(frozen=True, kw_only=True)
class Pools:
    """What the machines of a run cost an hour now.

    Attributes:
        zone: where they are.
        usd_per_hour: of each host.
        elsewhere_usd_per_hour: of all of them together on spot, by zone that they could be in; empty: they stay.
    """

    zone: str
    usd_per_hour: Mapping[str, float]
    elsewhere_usd_per_hour: Mapping[str, float]


@runtime_checkable
class Renting(Launcher, Protocol):
    """A launcher that can have other machines in the places of those of a run."""

    def replace(self, handle: RunHandle, host: str) -> None:
        """Give a host's machine back; what follows is what follows from any loss.

        Raises:
            BadInput: no machine of the run is that host now.
        """
        ...

    def move(self, handle: RunHandle, needed_s: float) -> None:
        """Have machines in the place of all that can be taken back, which cannot; those are given back after that.

        Args:
            handle: of the run.
            needed_s: from now to its end.

        Raises:
            BadInput: there are none, or it is being done.
            BudgetStop: the budget does not pay for it.
        """
        ...

    def add(self, handle: RunHandle, host: str, machines: int, needed_s: float) -> None:
        """Rent more machines like that of a host; they join the run.

        Args:
            handle: of the run.
            host: whose machine and workers they are like.
            machines: how many.
            needed_s: from now to the run's end.

        Raises:
            BadInput: the run has no such host, or is over.
            BudgetStop: the budget does not pay for them.
        """
        ...

    def pools(self, handle: RunHandle) -> Pools | None:
        """What the run's machines cost here and elsewhere; None while some come or go."""
        ...

    def switch(self, handle: RunHandle, zone: str, needed_s: float) -> None:
        """Have the same machines in another zone; those that train are given back once the others take over.

        Args:
            handle: of the run.
            zone: where.
            needed_s: from now to the run's end.

        Raises:
            BadInput: it cannot leave for there now.
            BudgetStop: the budget does not pay for both meanwhile.
        """
        ...
