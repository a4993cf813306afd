"""A long series drawn honestly in few points: the least, the median and the largest of every stretch of time.

A plain thinning of points hides spikes, and means flatten them. Here the band between least and largest holds every
value that was logged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hetopt.reports.page.series import Column

MOST_POINTS = 300
"""Stretches of time; about two pixels each on a wide screen."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Stretches:
    """Which rows of a run belong together: equal stretches of time, those without a row left out.

    Attributes:
        first: row of each stretch.
        end_s: of each stretch, that of its last row.
    """

    first: npt.NDArray[np.intp]
    end_s: Column

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True, kw_only=True, eq=False)
class Envelope:
    """[stretches] each, or [stretches, workers]; NaN where nothing is known."""

    low: Column
    middle: Column
    high: Column


def stretches(end_s: Column, *, most: int = MOST_POINTS) -> Stretches:
    """No more than ``most`` stretches of rows that ended at ``end_s`` [rows], ascending."""
    if len(end_s) <= most:
        return Stretches(first=np.arange(len(end_s)), end_s=end_s)
    edges = np.linspace(0.0, float(end_s[-1]), most + 1)[:-1]
    first = np.unique(np.searchsorted(end_s, edges, side="right"))
    first = np.unique(np.concatenate([[0], first[first < len(end_s)]]))
    last = np.append(first[1:], len(end_s)) - 1
    return Stretches(first=first, end_s=end_s[last])


def envelope(values: Column, over: Stretches) -> Envelope:
    """The envelope of ``values`` [rows, ...] over stretches of rows."""
    if len(over) == len(values):
        return Envelope(low=values, middle=values, high=values)
    parts = np.split(values, over.first[1:])
    if not np.isnan(values).any():
        return Envelope(
            low=np.minimum.reduceat(values, over.first, axis=0),
            middle=np.array([np.median(part, axis=0) for part in parts]),
            high=np.maximum.reduceat(values, over.first, axis=0),
        )
    return Envelope(
        low=np.array([_known(np.nanmin, part) for part in parts]),
        middle=np.array([_known(np.nanmedian, part) for part in parts]),
        high=np.array([_known(np.nanmax, part) for part in parts]),
    )


def _known(reduce: Callable[..., Any], part: Column) -> Column:
    """Of the values that are known, over rows; NaN where none is."""
    none = np.isnan(part).all(axis=0)
    result: Column = reduce(np.where(none, 0.0, part), axis=0)
    return np.where(none, np.nan, result)
