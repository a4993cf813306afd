"""Laws of the exchange in two levels, between real processes that are thought to share hosts in several ways."""

from __future__ import annotations

import json

import pytest
import torch

from hetopt.core.comm.payload_bytes import hierarchical_operations, operations
from hetopt.trainer.comm.compressor import Chain, ErrorFeedback
from hetopt.trainer.comm.elements import AllGather
from hetopt.trainer.comm.topk import TopK
from tests.forks import all_end_well

from . import hierarchical_program as program
from .thread_group import Crew

WORKERS = range(program.WORKERS)


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hierarchy")
    all_end_well(*(["-m", "tests.trainer_pieces.hierarchical_program", str(rank), str(folder)] for rank in WORKERS))
    said = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in WORKERS]
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in WORKERS], said


def by_host(layout):
    """Ranks of each host, the leader first."""
    hosts = program.LAYOUTS[layout]
    return [[rank for rank in WORKERS if hosts[rank] == host] for host in dict.fromkeys(hosts)]


def all_brought(steps):
    return sum(program.gradient(rank, step).double() for rank in WORKERS for step in steps)


layouts = pytest.mark.parametrize("layout", program.LAYOUTS)


@layouts
def test_a_dense_sum_is_that_of_all_workers_in_one_level(group, layout):
    held, _ = group
    expected = torch.stack([program.scattered(rank).double() for rank in WORKERS])
    for own in held:
        assert torch.equal(own[f"{layout} dense"]["sum"], held[0][f"{layout} dense"]["sum"])
    error = (held[0][f"{layout} dense"]["sum"].double() - expected.sum(0)).abs()
    assert (error <= 1e-6 * expected.abs().sum(0)).all()


@layouts
def test_hosts_exchange_as_single_workers_with_the_gradients_of_all_theirs_would(group, layout):
    """To the bit: results, what each host still owes, and nothing that anybody else owes."""
    held, _ = group
    places = by_host(layout)
    crew = Crew(
        len(places),
        lambda: (
            ErrorFeedback(program.NUMEL),
            Chain(TopK(program.TOPK.ratio), AllGather()),
        ),
    )
    for step in range(program.STEPS):
        sums = [sum(program.gradient(rank, step) for rank in ranks) for ranks in places]
        expected = crew.exchange(sums)[0]
        for own in held:
            assert torch.equal(own[f"{layout} sparse {step}"]["sum"], expected)
        for ranks, residual in zip(places, crew.residuals, strict=True):
            leader, *others = ranks
            assert torch.equal(held[leader][f"{layout} sparse {step}"]["residual"], residual.state()["residual"])
            for rank in others:
                assert not held[rank][f"{layout} sparse {step}"]["residual"].any()


@layouts
def test_no_change_of_compression_loses_anything(group, layout):
    """What all workers have received and what is held back is what they brought."""
    held, _ = group
    for own in held:
        assert torch.equal(own[f"{layout} switched"]["received"], held[0][f"{layout} switched"]["received"])
    owed = sum(own[f"{layout} switched"]["residual"].double() for own in held)
    brought = all_brought(range(2 * len(program.WAYS)))
    torch.testing.assert_close(held[0][f"{layout} switched"]["received"] + owed, brought, rtol=0, atol=1e-2)


@layouts
@pytest.mark.parametrize("other", [*program.LAYOUTS, "flat"])
def test_what_is_owed_survives_a_move_to_other_hosts(group, layout, other):
    held, _ = group
    for own in held:
        assert torch.equal(own[f"{layout} then {other}"]["received"], all_brought(range(4)))
        assert not own[f"{layout} then {other}"]["residual"].any()


def test_workers_that_exchanged_for_themselves_hand_over_to_their_leaders(group):
    held, _ = group
    assert all(torch.equal(own["flat then 2+2"]["received"], all_brought(range(2))) for own in held)


FIXED_SIZE = [i for i, way in enumerate(program.WAYS) if way.name != "redsync"]


@layouts
@pytest.mark.parametrize("way", FIXED_SIZE)
def test_messages_are_those_that_are_priced(group, layout, way):
    _, said = group
    places, compression = by_host(layout), program.WAYS[way]
    between = operations(
        compression.name,
        program.NUMEL,
        compression.ratio,
        workers=len(places),
        collective=compression.collective,
        rank=compression.rank or 1,
        shapes=program.SHAPES,
    )
    for leader, *others in places:
        priced = hierarchical_operations(between, program.NUMEL, workers_per_host=1 + len(others))
        expected = [[o.primitive, o.payload_bytes, o.scope] for o in priced if o.members > 1 or o.scope == "network"]
        assert said[leader][f"{layout} way {way}"]["messages"] == expected
        assert said[leader][f"{layout} way {way}"]["sent_bytes"] == sum(o.payload_bytes for o in between)
        for rank in others:
            inside = [message for message in expected if message[2] == "host"]
            assert said[rank][f"{layout} way {way}"]["messages"] == inside
            assert said[rank][f"{layout} way {way}"]["sent_bytes"] == 0
