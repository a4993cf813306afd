"""Links of a miniature: a message takes no less than its bytes or its waking, and no more than both."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.backends.emulation.iproute import BOX_BITS_PER_S, SENDING_LOG_SD, WAKING_LOG_SD, box_link
from hetopt.optimizer.fit import LinkModel

RATES = st.floats(1e6, 1e10)
CROWDS = st.floats(0.1, 16)
PRIMITIVES = st.sampled_from(["all_reduce", "all_gather", "broadcast"])


@given(primitive=PRIMITIVES, rate=RATES, crowd=CROWDS, messages=st.integers(1, 64), traffic_bytes=st.floats(0, 1e9))
def test_messages_take_the_longer_of_both_or_more_but_not_their_sum(primitive, rate, crowd, messages, traffic_bytes):
    link = box_link(primitive, rate, crowd)
    time_s = link.time_s(messages, traffic_bytes)
    sending_s = traffic_bytes / link.bytes_per_s
    assert time_s >= max(messages * link.latency_s, sending_s - messages * link.saved_s) * (1 - 1e-9)
    one_after_the_other = LinkModel(latency_s=link.latency_s, bytes_per_s=link.bytes_per_s)
    assert time_s <= one_after_the_other.time_s(messages, traffic_bytes) * (1 + 1e-9)


@given(primitive=PRIMITIVES, rate=RATES, crowd=CROWDS, messages=st.integers(1, 64), traffic_bytes=st.floats(0, 1e9))
def test_the_spread_lies_between_that_of_bytes_and_that_of_waking(primitive, rate, crowd, messages, traffic_bytes):
    link = box_link(primitive, rate, crowd)
    relative = link.sd_s(messages, traffic_bytes) / link.time_s(messages, traffic_bytes)
    assert SENDING_LOG_SD / math.sqrt(2) <= relative * (1 + 1e-9)
    assert relative <= WAKING_LOG_SD * (1 + 1e-9)


def test_nothing_sent_takes_no_time_and_no_link_is_faster_than_the_box():
    assert box_link("all_gather", 1e8, 2).time_s(0, 0) == box_link("all_gather", 1e8, 2).sd_s(0, 0) == 0
    assert box_link("all_gather", 1e12, 1).bytes_per_s == box_link("all_gather", BOX_BITS_PER_S, 1).bytes_per_s
    assert box_link("all_gather", 1e8, 2).latency_s < box_link("all_gather", 1e8, 4).latency_s


@pytest.mark.parametrize(
    ("workers", "rate", "message_ms"),
    [(4, 25e6, 34.0), (4, 100e6, 8.9), (4, 400e6, 2.7), (8, 25e6, 17.4), (8, 100e6, 5.2), (8, 400e6, 2.6)],
)
def test_messages_of_a_ring_beside_training_take_what_was_measured(workers, rate, message_ms):
    messages = 2 * (workers - 1)
    time_s = box_link("all_reduce", rate, workers / 2).time_s(messages, messages / workers * 393_000)
    assert 1e3 * time_s / messages == pytest.approx(message_ms, rel=0.08)


@pytest.mark.parametrize(
    ("workers", "rate", "gathered_ms"),
    [(3, 400e6, 4.1), (4, 25e6, 8.8), (4, 400e6, 6.8), (8, 25e6, 25.6), (8, 400e6, 24.0)],
)
def test_what_is_gathered_of_a_selection_takes_what_was_measured(workers, rate, gathered_ms):
    time_s = box_link("all_gather", rate, workers / 2).time_s(workers - 1, (workers - 1) * 7856)
    assert 1e3 * time_s == pytest.approx(gathered_ms, rel=0.15)
