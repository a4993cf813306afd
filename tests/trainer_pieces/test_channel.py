"""Operations of a channel do the same in whatever form they travel: directly, around the ring, or dealt out."""

from __future__ import annotations

import pytest
import torch

from hetopt.core.comm.cost import DEALT_BYTES, DIRECT_BYTES, DIRECTLY_GATHERED_BYTES
from tests.forks import all_end_well

from . import channel_program as program


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("channel")
    all_end_well(
        *(["-m", "tests.trainer_pieces.channel_program", str(rank), str(folder)] for rank in range(program.WORKERS))
    )
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(program.WORKERS)]


CASES = [
    pytest.param(group, kind, numel, id=f"{group}-{kind}-{numel}")
    for group in program.GROUPS
    for kind, dtype in program.DTYPES.items()
    for numel in program.numels(dtype)
]


def test_the_sizes_are_of_every_form():
    for workers in map(len, program.GROUPS.values()):
        for bound, members in ((DIRECT_BYTES, workers - 1), (DIRECTLY_GATHERED_BYTES, workers - 1), (DEALT_BYTES, 1)):
            assert {members * size > bound for size in program.BYTES} == {False, True}


@pytest.mark.parametrize(("group", "kind", "numel"), CASES)
def test_everyone_has_what_the_operation_promises(results, group, kind, numel):
    ranks, dtype, key = program.GROUPS[group], program.DTYPES[kind], f"{group} {kind} {numel}"
    brought = torch.stack([program.vector(rank, numel, dtype) for rank in ranks])
    for place, rank in enumerate(ranks):
        own = results[rank]
        for source in range(len(ranks)):
            assert torch.equal(own[f"{key} broadcast {source}"], brought[source])
        for form in ("gather", "gather in place", "slices"):
            assert torch.equal(own[f"{key} {form}"], brought)
        assert torch.equal(own[f"{key} swapped"], brought + place)
        if dtype == torch.float32:
            assert torch.equal(own[f"{key} sum"], brought.sum(0))
            assert torch.equal(own[f"{key} max"], brought.amax(0))
