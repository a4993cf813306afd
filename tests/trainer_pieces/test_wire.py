"""Laws of the wire: what travels, what it costs, and the published tables that the formulas must reproduce."""

from __future__ import annotations

import csv
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.core.comm.composition import METHODS
from hetopt.core.comm.payload_bytes import kept_elements, wire_bytes
from hetopt.core.errors import BadInput
from tests.collective_time import collective_time_s

GBPS = 1.25e8  # bytes a second
ratios = st.floats(0, 1, exclude_min=True)
collectives = st.sampled_from(["all_reduce", "all_gather"])


@given(st.integers(1, 10**9), ratios)
def test_kept_elements_round_down_but_keep_one(numel, ratio):
    kept = kept_elements(numel, ratio)
    assert 1 <= kept <= numel
    assert kept == 1 or abs(kept - numel * ratio) < 1


@given(st.integers(1, 10**6), ratios, ratios)
def test_a_larger_ratio_never_keeps_less(numel, one, other):
    small, large = sorted((one, other))
    assert kept_elements(numel, small) <= kept_elements(numel, large)
    assert kept_elements(numel, 1.0) == numel


@pytest.mark.parametrize(("numel", "ratio", "kept"), [(100, 0.29, 29), (1000, 0.001, 1), (10, 0.01, 1), (300, 0.1, 30)])
def test_decimal_ratios_mean_what_they_say(numel, ratio, kept):
    assert kept_elements(numel, ratio) == kept


def test_bytes_of_each_format():
    assert wire_bytes("identity", 1000, 1.0) == 4000
    assert wire_bytes("topk", 1000, 0.01) == 80


def test_an_unknown_compressor_is_named_with_its_alternatives():
    with pytest.raises(BadInput, match="'gzip'") as caught:
        wire_bytes("gzip", 10, 1.0)
    assert all(name in str(caught.value.hint) for name in METHODS)


@given(collectives, st.floats(0, 1e10), st.integers(1, 64), st.floats(0, 1), st.floats(1e3, 1e12))
def test_time_grows_with_bytes_workers_and_latency_and_falls_with_bandwidth(collective, size, workers, latency, speed):
    time_s = collective_time_s(collective, size, workers, latency, speed)
    assert time_s >= 0
    assert collective_time_s(collective, size * 2, workers, latency, speed) >= time_s
    assert collective_time_s(collective, size, workers + 1, latency, speed) >= time_s
    assert collective_time_s(collective, size, workers, latency * 2, speed) >= time_s
    assert collective_time_s(collective, size, workers, latency, speed * 2) <= time_s
    assert collective_time_s(collective, size, 1, latency, speed) == 0


@given(st.integers(2, 64), st.integers(10**4, 10**8))
def test_sparse_and_dense_cost_the_same_at_a_compression_of_n(workers, numel):
    """Eight bytes a sent element against four: an all-gather breaks even with a ring at CR = N, latency apart."""
    dense = collective_time_s("all_reduce", wire_bytes("identity", numel, 1.0), workers, 0, GBPS)
    sparse = collective_time_s("all_gather", wire_bytes("topk", numel, 1 / workers), workers, 0, GBPS)
    assert sparse == pytest.approx(dense, rel=2 * workers / numel)


def read(path):
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def test_planning_needs_no_torch():
    """The planner imports both of these, and must start at once."""
    code = (
        "import sys, hetopt.core.batch_partition, hetopt.core.comm.payload_bytes;"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
