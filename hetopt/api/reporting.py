"""`hetopt.report`: predicted against measured, for a run that is over or still going."""

from __future__ import annotations

from hetopt.api.run import Run
from hetopt.reports.report import Report


def report(run: Run | str | None = None) -> Report:
    """Hold a run against its prediction: time, steps, cost, balance of the workers, and communication.

    Args:
        run: or its name, or an unambiguous part of it; absent: the newest.

    Raises:
        BadInput: there is no such run, or nothing was predicted for it.
    """
    return (run if isinstance(run, Run) else Run.find(run)).report()
