"""A script that shards its model by `fully_shard`, unchanged, on unequal machines: the steps of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file
from torch import Tensor

from hetopt.trainer.sharding import replica_devices

from .test_unchanged_scripts import trained

SCRIPT = Path(__file__).with_name("sharded_script.py")
TWO_OF_TWO = "a:12,a:12,b:4,b:4"


InShares = Callable[..., tuple[list[Tensor], Path]]


def batch_of(shares: str) -> str:
    return str(sum(int(share.split(":")[1]) for share in shares.split(",")))


@pytest.fixture(scope="module")
def in_shares(tmp_path_factory: pytest.TempPathFactory) -> InShares:
    """What the script's workers came to, and the folder of their run: each run once."""

    @cache
    def run(kind: str, shares: str, compression: str) -> tuple[list[Tensor], Path]:
        folder, ranks = tmp_path_factory.mktemp(kind) / "shares", shares.count(",") + 1
        more = {"SHARES": shares, "COMPRESSION": compression}
        return trained(folder, "shares", SCRIPT, kind, batch_of(shares), ranks=ranks, **more)[0], folder

    return run


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_a_replica_is_of_one_machine(devices: list[int]) -> None:
    hosts = [f"host {number}" for number, count in enumerate(devices) for _ in range(count)]
    each = replica_devices(hosts)
    assert all(count % each == 0 for count in devices)
    assert all(len(set(hosts[first : first + each])) == 1 for first in range(0, len(hosts), each))


@pytest.mark.parametrize(
    ("kind", "shares"),
    [
        ("transformer", TWO_OF_TWO),
        ("experts", TWO_OF_TWO),
        ("adapters", TWO_OF_TWO),
        ("frozen", "a:20,b:4"),
        pytest.param("mesh", TWO_OF_TWO, marks=pytest.mark.slow),
        ("transformer", "a:20,a:4"),
    ],
    ids=["tied embeddings", "experts", "adapters", "a frozen block", "a mesh of one dimension", "one machine"],
)
def test_devices_of_unequal_machines_take_the_steps_of_one_process(
    kind: str, shares: str, in_shares: InShares, tmp_path: Path
) -> None:
    (alone,), _ = trained(tmp_path / "alone", "plain", SCRIPT, kind, batch_of(shares), ranks=1)
    own, folder = in_shares(kind, shares, "identity")
    assert len(alone) == 6
    assert all(torch.equal(own[0], other) for other in own)
    assert float((own[0] - alone).abs().max()) < 1e-6
    assert load_file(folder / "model.safetensors")["words.weight"].shape == (19, 12)


@pytest.mark.parametrize("shard", ["full", pytest.param("grads", marks=pytest.mark.slow)])
def test_a_session_shards_as_it_says(shard: str, tmp_path: Path) -> None:
    """Stopped after two steps, on two devices of each of two machines, it goes on with those of one."""
    (alone,), _ = trained(tmp_path / "alone", "plain", SCRIPT, "transformer", "32", ranks=1)
    told = {"FOLDER": str(tmp_path / "run"), "SHARD": shard}
    begun, _ = trained(
        tmp_path / "four", "shares", SCRIPT, "session", "32", ranks=4, SHARES=TWO_OF_TWO, STEPS="2", **told
    )
    ended, _ = trained(tmp_path / "two", "shares", SCRIPT, "session", "32", SHARES="a:20,a:12", **told)
    for steps, right in ((begun, alone[:2]), (ended, alone[2:])):
        assert all(float((own - right).abs().max()) < 1e-6 for own in steps)
    assert load_file(tmp_path / "run" / "checkpoint" / "step-6" / "rank-0.safetensors")


def test_counterparts_of_a_shard_exchange_it_compressed(in_shares: InShares) -> None:
    dense, *others = (
        in_shares("transformer", TWO_OF_TWO, compression)[0]
        for compression in ("identity", "int8", "topk:0.25,memory=error_feedback")
    )
    for own in others:
        assert all(torch.equal(own[0], other) for other in own), "replicas stay alike"
        assert 0 < float((own[0] - dense[0]).norm() / dense[0].norm()) < 0.2
