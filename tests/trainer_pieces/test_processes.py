"""The exchange between real processes: exact sums, the gradient of one big batch, and replicas that never part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.compressor import Turn
from hetopt.trainer.comm.topk import TopK
from tests.forks import all_end_well

from . import exchange_program as program

Results = list[dict[str, torch.Tensor]]


def run_group(world_size: int, folder: Path, devices: list[str]) -> Results:
    """What every rank held at the end."""
    ranks = range(world_size)
    all_end_well(
        *(
            ["-m", "tests.trainer_pieces.exchange_program", str(rank), str(world_size), str(folder), devices[rank]]
            for rank in ranks
        )
    )
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(world_size)]


@pytest.fixture(scope="module", params=[3, pytest.param(2, marks=pytest.mark.slow)])
def group(request, tmp_path_factory):
    size = request.param
    return run_group(size, tmp_path_factory.mktemp(f"group-of-{size}"), ["cpu"] * size)


@pytest.fixture(scope="module")
def mixed_group(tmp_path_factory):
    return run_group(3, tmp_path_factory.mktemp("mixed"), ["cuda", "cpu", "cuda"])


def assert_equal_everywhere(group, key):
    assert all(torch.equal(results[key], group[0][key]) for results in group), key


@pytest.mark.parametrize("length", program.LENGTHS)
def test_dense_sums_are_right_and_identical_on_every_rank(group, length):
    assert_equal_everywhere(group, f"dense sum {length}")
    brought = torch.stack([program.vector(rank, length).double() for rank in range(len(group))])
    error = (group[0][f"dense sum {length}"].double() - brought.sum(0)).abs()
    assert (error <= 1e-6 * brought.abs().sum(0)).all()


@pytest.mark.parametrize("length", program.LENGTHS)
def test_sparse_sums_are_those_of_rank_order_to_the_bit(group, length):
    assert_equal_everywhere(group, f"sparse sum {length}")
    expected = torch.zeros(length)
    for rank in range(len(group)):
        TopK(program.SPARSE.ratio).encode(program.vector(rank, length), Turn(Channel())).add_to(expected)
    assert torch.equal(group[0][f"sparse sum {length}"], expected)


@pytest.mark.parametrize("length", program.LENGTHS)
def test_all_sent_and_all_residuals_are_all_gradients(group, length):
    for rank, results in enumerate(group):
        gradient, residual = program.vector(rank, length), results[f"sparse residual {length}"]
        payload = TopK(program.SPARSE.ratio).encode(gradient, Turn(Channel()))
        assert torch.equal(residual + payload.dense(), gradient)


@pytest.mark.parametrize("name", program.BUCKETED)
def test_buckets_under_backward_lose_nothing_when_they_are_laid_out_anew(group, name):
    """DistributedDataParallel changes its buckets after a step; what is remembered moves with the parameters."""
    key = f"{name} in buckets"
    assert_equal_everywhere(group, f"{key}: parameters")
    assert group[0][f"{key}: layouts"] > 2
    brought = sum(results[f"{key}: brought"] for results in group)
    if name in ("topk", "identity"):
        held_back = sum(results.get(f"{key}: residual", torch.zeros(1)).double() for results in group)
        torch.testing.assert_close(group[0][f"{key}: received"] + held_back, brought, rtol=0, atol=1e-5)
    else:
        assert torch.corrcoef(torch.stack((group[0][f"{key}: received"], brought)))[0, 1] > 0.5


@pytest.mark.gpu
def test_gpu_and_cpu_workers_share_a_gloo_group(mixed_group):
    for name in ("dense", "sparse"):
        for length in program.LENGTHS:
            assert_equal_everywhere(mixed_group, f"{name} sum {length}")
