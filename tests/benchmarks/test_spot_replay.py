"""The replay of recorded pools: what it reads, what it may know at a start, and that every run ends in time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks._spot_pools import Pool, dispersion_elsewhere, read_pools
from benchmarks.spot_replay import Setting, replay

GAP_S = 300.0


def pool(pattern: list[bool], *, series: str = "made") -> Pool:
    available = np.array(pattern)
    return Pool(name="made up", series=series, available=available, gap_s=GAP_S, spot_share=np.full(len(pattern), 0.3))


def test_rates_are_events_over_the_hours_in_which_they_could_happen() -> None:
    made = pool([True] * 12 + [False] * 6 + [True] * 12 + [False] * 6)
    assert made.loss_per_hour == pytest.approx(2 / 2)
    assert made.back_per_hour == pytest.approx(1 / 1)


def test_nothing_after_its_start_is_known_to_a_run() -> None:
    early = pool([True, False] * 50 + [True] * 400)
    late = pool([True, False] * 50 + [False] * 400)
    starts = np.array([60, 99])
    for column in ("up_h", "losses", "down_h", "returns"):
        known = [getattr(one.watched(starts, 4.0), column) for one in (early, late)]
        assert known[0].tolist() == known[1].tolist()
    assert early.watched(starts, 1e9).up_h[1] + early.watched(starts, 1e9).down_h[1] == pytest.approx(99 * GAP_S / 3600)


def test_burstiness_is_that_of_other_series() -> None:
    regular = pool([True] * 10 + [False] * 10 + [True] * 10 + [False] * 10 + [True], series="a")
    bursty = pool([True, False, True] * 20 + [False] * 200 + [True] * 300 + [False, True] * 20, series="b")
    assert dispersion_elsewhere([regular, bursty], "b") == 1.0
    assert dispersion_elsewhere([regular, bursty], "a") > 5


def test_made_up_pools_are_replayed_in_time() -> None:
    setting = Setting.of(1.0, 1.5, {"made": 3.0}, runs=5)
    found = replay(setting, pool([True] * 30 + [False] * 20 + [True] * 5 + [False] * 200), 6)
    assert found["in_time_cold"].all()
    assert found["in_time_watched"].all()
    assert (found["cost_knowing"].mean() <= found["cost_greedy"].mean() + 1e-9).all()
    assert replay(setting, pool([True] * 10), 6) == {}


def test_recorded_pools_are_read(shared_data: Path) -> None:
    pools = read_pools(shared_data / "spot-traces")
    if not pools:
        pytest.skip("no spot traces")
    assert len(pools) == 9
    assert {one.series for one in pools} == {"aws-02-15-2023", "aws-04-19-2023", "aws-04-22-2023", "aws-08-03-2023"}
    assert all(0.25 < one.spot_share.mean() < 0.5 for one in pools)
    assert {round(float(one.available.mean()), 2) for one in pools} >= {0.17, 0.47, 0.88, 0.3, 0.71}


def test_without_recordings_there_is_nothing_to_read(tmp_path: Path) -> None:
    assert read_pools(tmp_path) == []
