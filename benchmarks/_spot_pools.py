"""Recorded spot pools to replay: when each had all its machines, and what spot cost, from the public spot traces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks._pool_capacity import Seen

ON_DEMAND_USD_PER_HOUR = {"v100_1": 3.06, "intel_64": 4.032}
"""p3.2xlarge and r5.16xlarge, Linux, us-east-1, in 2023."""

V100_SPOT_SHARE = 0.3
"""Of the on-demand price, where a recording has none: the constant price that the others of this type have."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """One recording.

    Attributes:
        series: of recordings that were made together.
        available: at each sample, whether every machine of the pool was there.
        gap_s: between two samples.
        spot_share: price of spot over on demand at each sample.
    """

    name: str
    series: str
    available: NDArray[np.bool_]
    gap_s: float
    spot_share: NDArray[np.float64]

    @property
    def loss_per_hour(self) -> float:
        """How often capacity went, for each hour with it: known only when the recording is over."""
        return self._events(-1) / (float(self.available.sum()) * self.gap_s / 3600)

    @property
    def back_per_hour(self) -> float:
        """How often capacity came, for each hour without it."""
        return self._events(1) / (float((~self.available).sum()) * self.gap_s / 3600)

    def _events(self, sign: int) -> float:
        return max(1.0, float((np.diff(self.available.astype(int)) == sign).sum()))

    def dispersions(self) -> list[float]:
        """Square of the coefficient of variation of stretches with and without capacity."""
        edges = np.flatnonzero(np.diff(self.available.astype(int))) + 1
        lengths, up = np.diff(edges), self.available[edges[:-1]]
        return [float((part.std() / part.mean()) ** 2) for part in (lengths[up], lengths[~up])]

    def starts(self, runs: int, longest_s: float) -> NDArray[np.intp]:
        """Samples at which that many runs start, evenly over the recording; empty where it is too short for one."""
        last = len(self.available) - self.looks(longest_s)
        return np.linspace(0, last, runs).astype(np.intp) if last > runs else np.empty(0, dtype=np.intp)

    def looks(self, longest_s: float) -> int:
        """Samples that a run may need."""
        return int(np.ceil(longest_s / self.gap_s)) + 2

    def windows(self, series: NDArray[np.generic], starts: NDArray[np.intp], longest_s: float) -> NDArray[np.generic]:
        """A column of the series for each start, shape (looks, runs)."""
        return np.asarray(series[starts[None, :] + np.arange(self.looks(longest_s))[:, None]])

    def watched(self, starts: NDArray[np.intp], hours: float) -> Seen:
        """What somebody knows at each start who has watched the pool for that long before."""
        hour = self.gap_s / 3600
        up, losses, down, returns = np.empty((4, len(starts)))
        for row, start in enumerate(starts.tolist()):
            past = self.available[max(0, start - round(hours / hour)) : start + 1]
            steps = np.diff(past.astype(int))
            up[row], down[row] = past[:-1].sum() * hour, (~past[:-1]).sum() * hour
            losses[row], returns[row] = (steps < 0).sum(), (steps > 0).sum()
        return Seen(up_h=up, losses=losses, down_h=down, returns=returns)


def dispersion_elsewhere(pools: Sequence[Pool], series: str) -> float:
    """Burstiness of the pools that were not recorded in the series: what could be known of it without looking."""
    return max(1.0, float(np.median([each for pool in pools if pool.series != series for each in pool.dispersions()])))


def read_pools(folder: Path) -> list[Pool]:
    """All recordings under the folder; none where it does not exist."""
    pools = []
    for path in sorted(folder.glob("*/*/*/*.json")):
        recorded = json.loads(path.read_text(encoding="utf-8"))
        machines = np.array(recorded["data"])
        demand = next(usd for kind, usd in ON_DEMAND_USD_PER_HOUR.items() if kind in path.stem)
        prices = recorded.get("prices")
        pools.append(
            Pool(
                name=f"{path.parts[-3]} {path.stem}",
                series=path.parts[-2],
                available=machines == machines.max(),
                gap_s=float(recorded["metadata"]["gap_seconds"]),
                spot_share=np.array(prices) / demand if prices else np.full(len(machines), V100_SPOT_SHARE),
            )
        )
    return pools
