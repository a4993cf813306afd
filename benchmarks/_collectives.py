"""The worker of `benchmarks.exchange`: calibrates the network as the trainer does, and times real exchanges.

Here workers share a processor, and one could begin a collective while others still compress: so all begin each
collective together, after the pause of calibration.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from hetopt.core.artifact import Record
from hetopt.core.comm.cost import Primitive
from hetopt.core.comm.options import operations_of
from hetopt.core.run_spec import Compression
from hetopt.trainer.agreement import gather_numbers
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.methods import make_chain
from hetopt.trainer.comm.network import PAUSE_S, Network, measure_network

REQUEST_FILE = "request.json"
ANSWER_FILE = "answer.json"

QUICK_S = 1.0
"""Exchanges that are over sooner are warmed up by one that does not count."""


class Request(Record):
    """The gradients and exchange methods to time on one network.

    Attributes:
        gradients: numbers of elements; the network is calibrated anew for each, as for a job of that size.
        ways: of exchanging each of them.
        repeats: exchanges of which the median counts, where there is time for so many.
        cell_s: that one gradient in one way may take, repeats and all.
    """

    gradients: tuple[int, ...]
    ways: tuple[Compression, ...]
    repeats: int
    cell_s: float


class Cell(Record):
    """The time of exchanging a gradient by a method; ``sync_s`` is that of the workers that waited least, if any."""

    numel: int
    way: Compression
    expected_s: float
    sync_s: float | None


class Answer(Record):
    """The timed exchanges of a request."""

    cells: tuple[Cell, ...]


def time_exchanges(run_dir: Path, rank: int, world_size: int) -> None:
    """Time the exchanges of the request in ``run_dir``; the first worker writes the answer.

    Every worker must call it.
    """
    request = Request.model_validate_json((run_dir / REQUEST_FILE).read_text(encoding="utf-8"))
    cells: list[Cell] = []
    device = torch.device("cpu")
    for numel in request.gradients:
        network = Network.of(measure_network(4 * numel, device=device), dist.get_world_size())
        gradient = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        for way in request.ways:
            cells.append(_timed(way, gradient, network, request, world_size))
    if rank == 0:
        answer = Answer(cells=tuple(cells))
        (run_dir / ANSWER_FILE).write_text(answer.model_dump_json(), encoding="utf-8")


class _TogetherChannel(Channel):
    """A channel whose collectives begin on all workers at once, and that agrees on their time, as calibration does."""

    @contextmanager
    def operation(self, primitive: Primitive, payload_bytes: int) -> Iterator[list[float]]:
        """Count and time the collective inside as one operation, once every worker is there."""
        dist.barrier(self._group)
        with super().operation(primitive, payload_bytes) as own_work_s:
            yield own_work_s
        time_s = torch.tensor([self.messages[-1].time_s], dtype=torch.float64)
        # The source of a broadcast is done at once: it is over when the last has it.
        dist.all_reduce(time_s, dist.ReduceOp.MAX if primitive == "broadcast" else dist.ReduceOp.MIN, self._group)
        self.messages[-1] = replace(self.messages[-1], time_s=float(time_s))


def _timed(way: Compression, gradient: torch.Tensor, network: Network, request: Request, workers: int) -> Cell:
    """Return the median time of exchanging a gradient by a method, of the worker that waited least; all must call it.

    Its ``sync_s`` is None where a single exchange would take longer than the request allows.
    """
    numel = gradient.numel()
    # The same on all workers, as the calibration is.
    expected_s = network.expected_s(operations_of(way, numel, workers=workers))
    cell = Cell(numel=numel, way=way, expected_s=expected_s, sync_s=None)
    warm_up = expected_s < QUICK_S
    repeats = min(request.repeats, int(request.cell_s / expected_s) - warm_up)
    if repeats < 1:
        return cell
    chain = make_chain(way, numel)
    own_s = []
    for step in range(warm_up + repeats):
        time.sleep(PAUSE_S)
        channel = _TogetherChannel(None)
        chain.run(gradient.clone(), torch.empty_like(gradient), channel, step)
        own_s.append(sum(message.time_s for message in channel.messages))
    everyones_s = gather_numbers(own_s[warm_up:], workers)
    least_s = [min(times_s) for times_s in zip(*everyones_s, strict=True)]
    return cell.model_copy(update={"sync_s": statistics.median(least_s)})
