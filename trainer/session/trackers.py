"""Experiment trackers that a session's figures are given to: any that takes figures in one of the usual ways.

Nothing of them is imported. `wandb.init()` and Trackio have ``log``, the module `mlflow` and Lightning's loggers
``log_metrics``, TensorBoard's writers ``add_scalar``; and any function of figures and step will do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

from hetopt.core.errors import BadInput


class Logs(Protocol):
    """As of a run of Weights & Biases."""

    def log(self, data: dict[str, Any], step: int | None = None) -> Any:
        """Take figures by name."""
        ...


class LogsMetrics(Protocol):
    """As of MLflow, and of Lightning's loggers."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> Any:
        """Take figures by name."""
        ...


class AddsScalar(Protocol):
    """As of TensorBoard's ``SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> Any:
        """Take one figure."""
        ...


Tracker: TypeAlias = Logs | LogsMetrics | AddsScalar | Callable[[dict[str, float], int], Any]


def give(tracker: Tracker | Any, figures: Mapping[str, float], step: int) -> None:
    """Give figures to a tracker.

    Raises:
        BadInput: it takes none in a way that is known.
    """
    if hasattr(tracker, "add_scalar"):
        for name, value in figures.items():
            tracker.add_scalar(name, value, step)
    elif hasattr(tracker, "log_metrics"):
        tracker.log_metrics(dict(figures), step=step)
    elif hasattr(tracker, "log"):
        tracker.log(dict(figures), step=step)
    elif callable(tracker):
        tracker(dict(figures), step)
    else:
        raise BadInput(
            f"`to` is a {type(tracker).__name__}, which has none of log, log_metrics and add_scalar.",
            hint="give the tracker's run or writer, or a function of figures and step",
        )
