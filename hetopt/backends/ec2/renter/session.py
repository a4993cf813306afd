"""How the pieces of one run go together: the edge to its region, behind retries, behind its ledger."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from hetopt.backends.ec2.renter.edge import BotoEdge
from hetopt.backends.ec2.renter.ledger import LEDGER_FILE, Ledger, LedgerEdge, remember_region
from hetopt.backends.ec2.renter.request import Edge
from hetopt.backends.ec2.renter.retry import Retrying


def connect(region: str) -> Edge:
    """An edge for calls that belong to no run, or only read."""
    return Retrying(inner=BotoEdge(region), sleep=time.sleep, random=Random())


def connect_run(
    region: str, run_dir: Path, home: Path, inner: Edge | None = None, clock: Callable[[], float] = time.time
) -> Edge:
    """An edge whose calls are in the ledger of a run.

    Args:
        region: where it rents.
        run_dir: the run's folder, which holds its ledger.
        home: where the regions that were ever used are kept.
        inner: instead of `connect`.
        clock: seconds since the epoch.
    """
    remember_region(home, region)
    ledger = Ledger(path=run_dir / LEDGER_FILE, region=region, clock=clock)
    return LedgerEdge(inner=inner or connect(region), ledger=ledger)
