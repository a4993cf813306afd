"""One exchange, alone: what is composed for which compression, what it costs, and what happens when it fails."""

from __future__ import annotations

import pytest
import torch

from hetopt.core.errors import BadInput
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.exchange import Exchange


def test_what_never_arrived_is_not_committed(monkeypatch):
    def lost(*_):
        raise ConnectionError

    exchange = Exchange(Compression(name="topk", ratio=0.1), 100)
    monkeypatch.setattr(Channel, "all_gather", lost)
    with pytest.raises(ConnectionError):
        exchange.run(torch.ones(100))
    assert not exchange.state()["residual"].any()


# --- A run may change its compression: nothing that was held back is lost by it, nor by a checkpoint in between


SHAPES = ((30, 20), (40,))
NUMEL = 640
WAYS = [
    Compression(name="topk", ratio=0.05),
    Compression(),
    Compression(name="mstopk", ratio=0.01),
    Compression(name="topk", ratio=0.2, collective="ar_topk"),
    Compression(name="powersgd", rank=2),
    Compression(name="randomk", ratio=0.1),
    Compression(name="redsync", ratio=0.02),
    Compression(name="bf16"),
    Compression(name="qsgd_maxnorm"),
]


def gradient(step: int) -> torch.Tensor:
    """In eighths, so that sums are exact."""
    return torch.randint(-40, 41, (NUMEL,), generator=torch.Generator().manual_seed(step)) / 8


def fresh() -> Exchange:
    return Exchange(WAYS[0], NUMEL, shapes=SHAPES, seed=4)


def test_all_that_was_sent_in_all_ways_plus_the_residual_is_all_there_was():
    exchange, received, brought = fresh(), torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
    for step in range(36):
        exchange.use(WAYS[step // 2 % len(WAYS)])
        flat = gradient(step)
        brought += flat
        exchange.run(flat)
        received += flat
        held_back = exchange.state()["residual"].double()
        torch.testing.assert_close(received + held_back, brought, rtol=0, atol=1e-4)
        if exchange.compression.name == "identity":
            assert not held_back.any()


@pytest.mark.parametrize("pause", [3, 6, 9, 13, 15])
def test_a_checkpoint_resumes_the_compression_that_was_in_use(pause):
    def live(exchange: Exchange, steps: range) -> list[torch.Tensor]:
        results = []
        for step in steps:
            if step % 2 == 0:
                exchange.use(WAYS[step // 2 % len(WAYS)])
            flat = gradient(step)
            exchange.run(flat)
            results.append(flat)
        return results

    whole, first, second = fresh(), fresh(), fresh()
    expected = live(whole, range(18))
    live(first, range(pause))
    second.load_state(first.state())
    assert second.compression == first.compression
    for result, wanted in zip(live(second, range(pause, 18)), expected[pause:], strict=True):
        assert torch.equal(result, wanted)


def test_a_way_that_does_not_go_with_the_memory_is_refused():
    exchange = fresh()
    with pytest.raises(BadInput, match="does not go with the gradient memory none"):
        exchange.use(Compression(name="sign", memory="none"))
    exchange.use(Compression(name="sign"))
    with pytest.raises(BadInput, match="no compressor"):
        exchange.use(Compression(name="gzip"))
    assert exchange.compression.name == "sign"
