"""How gradients travel in a run, and who decides that: what sums them over all workers, made once.

One way from weighted gradients to their sum, for the steps of tasks and for the backward passes of scripts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist

from hetopt.core.comm.composition import METHODS
from hetopt.core.comm.options import IDENTITY, Candidates, settled_collective, way_name
from hetopt.core.comm.payload_bytes import VALUE_BYTES
from hetopt.core.events.log import Event
from hetopt.core.run_spec import Compression, RunSpec
from hetopt.trainer.agreement import Store, gather_numbers
from hetopt.trainer.comm.exchange import Exchange
from hetopt.trainer.comm.network import (
    Network,
    Timed,
    measure_network,
    timed_candidates,
)
from hetopt.trainer.steps.adaptive_controller import AdaptiveController, GroupTraffic


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig:
    """How gradients travel, and who decides that.

    Attributes:
        compression: of the run.
        dense_bytes: of the gradient.
        exchange: sums whole gradients; None: nothing does, or only buckets are summed.
        steering: None: what is exchanged stays as it is.
        timings: of the network's collectives, where it was measured.
        measured_s: how long that took, and timing compressors.
    """

    compression: Compression
    dense_bytes: int
    exchange: Exchange | None = None
    steering: AdaptiveController | None = None
    timings: tuple[Timed, ...] = ()
    measured_s: float = 0.0

    @property
    def is_dense(self) -> bool:
        """Whether everything is summed as it is, always."""
        return self.steering is None and self.compression.name == IDENTITY

    @property
    def in_use(self) -> Compression:
        """The present compression."""
        return self.compression if self.steering is None else self.steering.candidate.compression

    @property
    def way(self) -> str:
        """Name of the present way to exchange."""
        return self._settled_way if self.steering is None else self.steering.candidate.option.key

    @cached_property
    def _settled_way(self) -> str:
        return way_name(self.compression)

    def follow(self) -> None:
        """Exchange as the steering says from the next step on."""
        assert self.steering is not None
        assert self.exchange is not None
        self.exchange.use(self.steering.candidate.compression)

    def resume(self, state: Mapping[str, object] | None) -> None:
        """Go on with what a checkpoint holds, whose residual the step has already."""
        if self.steering is None:
            return
        if state is not None:
            self.steering.resume(state)
        self.follow()

    def event(self, traffic: GroupTraffic) -> Event:
        """The field of a ``step`` event that tells about its exchanges; none where there were none."""
        steering = self.steering
        if len(traffic.rows) == 1 or not traffic.exchanges or not traffic.is_finite:
            return {}
        if steering is None:
            way, name, ratio = way_name(self.compression), self.compression.name, self.compression.ratio
            collective = settled_collective(self.compression)
        else:
            option = steering.candidate.option
            way, name, ratio, collective = option.key, option.compressor, option.ratio, option.collective
        looked: Event = {}
        if steering is not None and steering.slowdown_coefficient is not None:
            looked["slowdown_coefficient"] = round(steering.slowdown_coefficient, 4)
        return {
            "exchange": {
                "way": way,
                "compressor": name,
                "ratio": ratio,
                "collective": collective,
                "gain": round(traffic.gain, 6),
                "sent_bytes": traffic.sent_bytes,
                "dense_bytes": self.dense_bytes,
                "compress_s": round(traffic.compress_s, 7),
                "sync_s": round(traffic.sync_s, 7),
                "exchanges": traffic.exchanges,
                **looked,
            }
        }


def is_steered(spec: RunSpec, compression: Compression) -> bool:
    """Whether anything about the exchange is left to decide while training goes on."""
    return spec.steers_exchange and (spec.ratio_policy != "fixed" or METHODS[compression.name].by_ratio)


def can_overlap(device: torch.device, world_size: int) -> bool:
    """Whether the whole cluster can sum buckets under backward; called by all workers, which answer alike."""
    if world_size == 1:
        return False
    is_cuda = device.type == "cuda"
    # A GPU's gradients go over gloo only through the host, in one piece.
    own_terms = not is_cuda or "nccl" in dist.get_backend()
    rows = gather_numbers([float(own_terms), float(is_cuda)], world_size)
    return all(row == [1.0, rows[0][1]] for row in rows)


def make_exchange(
    spec: RunSpec,
    compression: Compression,
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    *,
    store: Store | None = None,
    clock: Callable[[], float] = time.perf_counter,
    buckets: int = 1,
    bf16_in_buckets: bool = False,
    tries_twins: bool = False,
) -> ExchangeConfig:
    """Return the exchange of a run's whole gradients; where anything is left to decide, the network is measured first.

    Args:
        spec: who decides how much is sent, and how it travels.
        compression: of the run, with what it leaves open filled in.
        shapes: of the parameters, in the order in which they lie in the gradient.
        device: where they are.
        store: that the workers met through.
        clock: seconds.
        buckets: in which sums can be made under backward.
        bf16_in_buckets: whether those can be rounded to bf16 as well.
        tries_twins: whether somebody acts on `AdaptiveController.try_ratio`.

    Raises:
        BadInput: things do not go together.
    """
    steered, shapes = is_steered(spec, compression), list(shapes)
    numel = sum(map(math.prod, shapes))
    dense_bytes = VALUE_BYTES * numel
    policies_ask = steered and (spec.weighs_ways or spec.collective_policy == "cheapest")
    begun_s = time.perf_counter()
    timings = measure_network(dense_bytes, device=device) if policies_ask else ()
    steering: AdaptiveController | None = None
    if steered:
        candidates = Candidates(
            asked=compression,
            chooses_collective=spec.collective_policy == "cheapest",
            numel=numel,
            workers=len(spec.workers),
            shapes=shapes,
            buckets=buckets,
        )
        seen = Network.of(timings) if timings else None
        if seen is not None and spec.weighs_ways:
            candidates = timed_candidates(candidates, seen, device=device, seed=spec.seed)
            candidates = replace(candidates, bf16_in_buckets=bf16_in_buckets)
        steering = AdaptiveController(spec, candidates, seen, tries_twins=tries_twins)
    measured_s = time.perf_counter() - begun_s
    first = compression if steering is None else steering.candidate.compression
    exchange = Exchange(first, numel, device=device, clock=clock, shapes=shapes, seed=spec.seed, store=store)
    return ExchangeConfig(
        compression=compression,
        dense_bytes=dense_bytes,
        exchange=exchange,
        steering=steering,
        timings=timings,
        measured_s=measured_s,
    )
