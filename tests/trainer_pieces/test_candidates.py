"""What a run may choose from: every way is one that the trainer can do, priced to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks._published_collectives import dense
from hetopt.core.comm.composition import combine
from hetopt.core.comm.options import RATIOS, Candidates, Option, make_option, way_name
from hetopt.core.comm.payload_bytes import wire_bytes
from hetopt.core.errors import BadInput
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
    assert len({way.key for way in ways}) == len(ways) == 2 + len(RATIOS) * 2 * 2
    for way in ways:
        assert candidates().find(way.key) == way


def test_all_ways_share_one_memory_which_holds_back_what_is_not_sent() -> None:
    memories = {combine(w.compression.name, memory=w.compression.memory).memory for w in candidates().all}
    assert memories == {"error_feedback"}
    corrected = candidates(Compression(name="dgc", ratio=0.01))
    assert {way.compression.memory for way in corrected.all} == {"momentum_correction"}


@pytest.mark.parametrize("way", candidates().all, ids=lambda way: way.key)
def test_every_way_can_be_done_and_weighs_what_it_says(way) -> None:
    exchange = Exchange(way.compression, NUMEL)
    sent_bytes = exchange.run(torch.randn(NUMEL)).sent_bytes
    alone = wire_bytes(
        way.compression.name,
        NUMEL,
        way.compression.ratio,
        workers=1,
        collective=way.collective,
        coding=way.compression.coding or "plain",
    )
    assert sent_bytes == alone


def test_what_was_asked_for_is_never_departed_from() -> None:
    asked = Compression(name="mstopk", ratio=0.02, collective="ar_topk_var", coding="packed")
    fixed = candidates(asked, chooses=False)
    for way in fixed.all:
        if way.gain is None:
            assert (way.compression.name, way.compression.collective, way.compression.coding) == (
                "mstopk",
                "ar_topk_var",
                "packed",
            )
    assert 0.02 in {way.ratio for way in fixed.all}
    assert [way.key for way in fixed.at(0.02)] == [way_name(asked)]


@pytest.mark.parametrize(
    ("name", "collectives"),
    [("topk", ["all_gather", "ar_topk"]), ("redsync", ["all_gather"]), ("randomk", ["all_reduce"])],
)
def test_the_collective_is_chosen_among_those_that_carry_the_compressor(name, collectives) -> None:
    assert [way.collective for way in candidates(Compression(name=name, ratio=0.1)).at(0.1)] == collectives


@pytest.mark.parametrize(
    ("name", "collective", "ratio", "refusal"),
    [
        ("topkk", "all_gather", 0.1, BadInput),
        ("dgc", "ar_topk_star", 0.1, BadInput),
    ],
)
def test_options_that_cannot_be_judged_are_refused(name, collective, ratio, refusal):
    with pytest.raises(refusal):
        make_option(Compression(name=name, ratio=ratio, collective=collective), numel=100, workers=2, compress_s=0.0)


def test_buckets_hide_the_exchange_behind_the_backward_pass():
    whole = Option(compression=Compression(), collective="all_reduce", operations=dense(4e6, 4), gain=1.0)
    parts = replace(whole, operations=dense(1e6, 4), buckets=4)
    taken = {"compute_s": 0.3, "backward_s": 0.2, "compress_s": 0.0, "exchange_s": 0.1}
    assert whole.step_s(**taken) == pytest.approx(0.4)
    assert parts.step_s(**taken) == pytest.approx(0.1 + 0.05 + 0.025 + 3 * 0.05)
    assert whole.key != parts.key
