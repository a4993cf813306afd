"""What a run may choose from: every way is one that the trainer can do, priced to the byte."""

from __future__ import annotations

import pytest
import torch

from hetopt.core.comm.composition import METHODS, combine
from hetopt.core.comm.options import RATIOS, Candidates, CompressTime, way_name
from hetopt.core.comm.payload_bytes import wire_bytes
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.exchange import Exchange

NUMEL = 10_000


def candidates(asked: Compression | None = None, *, chooses: bool = True, **changes) -> Candidates:
    return Candidates(
        asked=asked or Compression(),
        chooses_collective=chooses,
        numel=NUMEL,
        workers=4,
        rounded_s={"bf16": 0.001},
        **changes,
    )


def test_keys_name_ways_without_doubt() -> None:
    ways = candidates().all
    assert len({way.option.key for way in ways}) == len(ways) == 2 + len(RATIOS) * 2 * 2
    for way in ways:
        assert candidates().find(way.option.key) == way


def test_all_ways_share_one_memory_which_holds_back_what_is_not_sent() -> None:
    memories = {combine(w.compression.name, memory=w.compression.memory).memory for w in candidates().all}
    assert memories == {"error_feedback"}
    corrected = candidates(Compression(name="dgc", ratio=0.01))
    assert {way.compression.memory for way in corrected.all} == {"momentum_correction"}


@pytest.mark.parametrize("way", candidates().all, ids=lambda way: way.option.key)
def test_every_way_can_be_done_and_weighs_what_it_says(way) -> None:
    exchange = Exchange(way.compression, NUMEL)
    sent_bytes = exchange.run(torch.randn(NUMEL)).sent_bytes
    alone = wire_bytes(
        way.compression.name,
        NUMEL,
        way.compression.ratio,
        workers=1,
        collective=way.option.collective,
        coding=way.option.coding,
    )
    assert sent_bytes == alone
    assert way.option.compressor == way.compression.name
    assert way.sent_bytes > 0


def test_what_was_asked_for_is_never_departed_from() -> None:
    asked = Compression(name="mstopk", ratio=0.02, collective="ar_topk_var", coding="packed")
    fixed = candidates(asked, chooses=False)
    for way in fixed.all:
        if way.option.gain is None:
            assert (way.compression.name, way.compression.collective, way.compression.coding) == (
                "mstopk",
                "ar_topk_var",
                "packed",
            )
    assert 0.02 in {way.option.ratio for way in fixed.all}
    assert [way.option.key for way in fixed.at(0.02)] == [way_name(asked)]


def test_the_collective_is_chosen_among_those_that_carry_the_compressor() -> None:
    assert [way.option.collective for way in candidates(Compression(name="topk", ratio=0.1)).at(0.1)] == [
        "all_gather",
        "ar_topk",
    ]
    assert [way.option.collective for way in candidates(Compression(name="redsync", ratio=0.1)).at(0.1)] == [
        "all_gather"
    ]
    assert [way.option.collective for way in candidates(Compression(name="randomk", ratio=0.1)).at(0.1)] == [
        "all_reduce"
    ]


def test_dense_travels_in_buckets_where_it_can() -> None:
    in_buckets, at_once = candidates(buckets=5).dense, candidates().dense
    assert in_buckets.in_buckets
    assert not at_once.in_buckets
    assert in_buckets.sent_bytes == at_once.sent_bytes == 4 * NUMEL
    assert candidates().at(1.0) == (at_once,)


def test_compressing_more_elements_takes_longer() -> None:
    times = {("topk", "all_gather", "plain"): CompressTime(fixed_s=0.002, per_element_s=1e-6)}
    ways = candidates(compress=times).at(0.1)
    assert ways[0].option.compress_s == pytest.approx(0.002 + 1e-6 * 1000)
    assert ways[1].option.compress_s == 0


@pytest.mark.parametrize("ratio", [0.5, 0.05, 0.002, 1e-6])
def test_the_nearest_way_is_near(ratio: float) -> None:
    found = candidates().nearest(ratio).option.ratio
    assert all(max(found / ratio, ratio / found) <= max(other / ratio, ratio / other) for other in RATIOS)
    assert candidates().nearest(1.0) == candidates().dense


def test_names_of_settled_exchanges() -> None:
    assert way_name(Compression()) == "identity by all_reduce"
    assert way_name(Compression(name="topk", ratio=0.01, coding="packed")) == "topk 0.01 by all_gather, packed"
    for name in METHODS:
        assert way_name(Compression(name=name)).startswith(name)
