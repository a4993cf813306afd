"""What goes together is one table, and everything else is refused with a sentence that says why.

What a run may choose from: every way is one that the trainer can do, priced to the byte.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from benchmarks._published_collectives import dense
from hetopt.core.comm.composition import (
    COLLECTIVES,
    CORRECTION,
    DENSE,
    LOW_PRECISION,
    MEMORIES,
    METHODS,
    combinations,
    combine,
    why_not,
)
from hetopt.core.comm.options import RATIOS, Candidates, Option, make_option, way_name
from hetopt.core.comm.payload_bytes import (
    LARGEST_GATHERED,
    LARGEST_SUM,
    operations,
    summed_bits,
    summed_code_bytes,
    wire_bytes,
)
from hetopt.core.errors import BadInput
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.exchange import Exchange

SHAPES = ((6, 5), (4,))
EVERYTHING = list(itertools.product(METHODS, MEMORIES, COLLECTIVES))


@pytest.mark.parametrize(("name", "memory", "collective"), EVERYTHING, ids="-".join)
def test_every_cell_works_or_is_refused_with_a_sentence(name, memory, collective):
    compression = Compression(
        name=name, ratio=0.3 if METHODS[name].by_ratio else 1.0, memory=memory, collective=collective
    )
    reason = why_not(name, memory, collective)
    if reason is None:
        exchange = Exchange(compression, 34, shapes=SHAPES)
        flat = torch.randn(34, generator=torch.Generator().manual_seed(0))
        stats = exchange.run(flat, look_at=(0.1, 1.0))
        assert flat.isfinite().all()
        assert flat.any()
        assert 0 < stats.kept_energy / stats.energy <= 1 + 1e-6
        assert stats.look_energies[0] <= stats.look_energies[1] == pytest.approx(stats.energy)
        assert stats.compress_s >= 0
    else:
        assert reason.endswith(".")
        assert reason[0].isupper() or name in reason
        with pytest.raises(BadInput) as caught:
            Exchange(compression, 34, shapes=SHAPES)
        assert caught.value.hint


def test_defaults_fit_and_follow_what_is_chosen():
    for name, method in METHODS.items():
        chosen = combine(name)
        assert (chosen.memory, chosen.collective) == (method.memories[0], method.collectives[0])
    assert combine("dgc").memory == CORRECTION


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"name": "qsgd_maxnorm", "ratio": 0.1}, "must be 1, as it sends"),
        ({"name": "topk", "ratio": 0.1, "bits": 8}, "has no option bits"),
        ({"name": "topk", "ratio": 0.1, "momentum": 0.9}, "topk with error_feedback has no option momentum"),
        ({"name": "qsgd_maxnorm", "levels": 200, "bits": 8}, "overflow"),
        ({"name": "qsgd_maxnorm", "bits": 3}, "codes must have 4, 8, 16 or 32 bits"),
        ({"name": "qsgd_maxnorm", "levels": 10**9}, "overflow"),
        ({"name": "qsgd_maxnorm", "bits": 16, "collective": "all_gather"}, "codes must have 2, 4 or 8 bits"),
    ],
)
def test_options_that_mean_nothing_or_cannot_be_are_refused(wish, message):
    with pytest.raises(BadInput, match=message) as caught:
        Exchange(Compression(**wish), 10)
    assert caught.value.hint


def test_what_parameters_may_be_rounded_by_is_summed_whole():
    assert {METHODS[name].collectives for name in LOW_PRECISION} == {(DENSE,)}


def test_widths_and_levels_fit_each_other():
    for workers in range(1, 300):
        bits, levels = summed_bits(workers)
        assert bits == (8 if workers <= 127 else 16)
        assert 1 <= workers * levels <= LARGEST_SUM[bits]
        for wanted in (1, 3, 15, 255, 65535):
            bits, levels = summed_bits(workers, levels=wanted)
            assert levels == wanted
            assert workers * wanted <= LARGEST_SUM[bits]
            narrower = [b for b in LARGEST_SUM if b < bits]
            assert all(workers * wanted > LARGEST_SUM[b] for b in narrower)
    assert summed_bits(1, levels=7, largest=LARGEST_GATHERED) == (4, 7)
    assert summed_bits(1, bits=2, largest=LARGEST_GATHERED) == (2, 1)
    assert [summed_code_bytes(7, bits) for bits in (4, 8, 16, 32)] == [4, 7, 16, 28]


def test_planned_bytes_are_the_operations_bytes():
    for combination in combinations():
        shapes = ((300, 40), (40,), (7, 3, 3, 3))
        numel = sum(math.prod(shape) for shape in shapes)
        wish = {"workers": 6, "collective": combination.collective, "shapes": shapes}
        parts = operations(combination.name, numel, 0.1, **wish)
        assert wire_bytes(combination.name, numel, 0.1, **wish) == sum(part.payload_bytes for part in parts)
        assert all(part.members == 6 for part in parts)


def test_a_spec_of_before_is_still_one_and_files_say_only_what_is_not_usual():
    old = '{"name":"topk","ratio":0.01}'
    assert Compression.model_validate_json(old).model_dump_json() == old
    new = Compression(name="powersgd", rank=2)
    assert new.model_dump() == {"name": "powersgd", "ratio": 1.0, "rank": 2}
    assert Compression.model_validate(new.model_dump()) == new


# --- One registry: what combines with what, the price list and the chains speak of the same methods


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
