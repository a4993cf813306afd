"""Puts an exchange of gradients together: what sums them over all workers, and who steers that.

One way from weighted gradients to their sum, for the steps of tasks and for the backward passes of scripts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from hetopt.core.comm.composition import AUTO, METHODS
from hetopt.core.comm.options import SELECTOR, Candidates
from hetopt.core.comm.payload_bytes import VALUE_BYTES
from hetopt.core.run_spec import Compression, RunSpec
from hetopt.trainer.agreement import Store, gather_numbers
from hetopt.trainer.comm.exchange import Exchange
from hetopt.trainer.comm.hierarchical import HierarchicalExchange, HostGroups
from hetopt.trainer.comm.network import (
    Hosts,
    Network,
    Timed,
    exchange_as_one,
    measure_inside,
    measure_network,
    timed_candidates,
)
from hetopt.trainer.steps.adaptive_controller import AdaptiveController
from hetopt.trainer.steps.step_config import ExchangeConfig

USUAL_RATIO = 0.01
"""That hosts are imagined to exchange at by a run which has not decided yet."""


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


@dataclass(frozen=True, kw_only=True)
class ExchangeMaker:
    """Everything that exchanges of whole gradients are made of.

    Attributes:
        spec: of the run: who decides how much is sent, and how it travels.
        compression: of the run, with what it leaves open filled in.
        shapes: of the parameters, in the order in which they lie in the gradient.
        device: where they are.
        store: that the workers met through.
        hosts: of the workers, where those of one might exchange as one.
        clock: seconds.
    """

    spec: RunSpec
    compression: Compression
    shapes: list[tuple[int, ...]]
    device: torch.device
    store: Store | None
    hosts: Hosts = field(default_factory=lambda: Hosts(names=()))
    clock: Callable[[], float] = time.perf_counter

    @property
    def numel(self) -> int:
        """Elements of the gradient."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def dense_bytes(self) -> int:
        """Of the gradient."""
        return VALUE_BYTES * self.numel

    def make(self) -> ExchangeConfig:
        """The exchange of this run; where anything is left to decide, the network is measured first.

        Raises:
            BadInput: things do not go together.
        """
        return self.steered() if is_steered(self.spec, self.compression) else self.settled()

    def settled(self) -> ExchangeConfig:
        """An exchange that stays as it is."""
        begun_s = time.perf_counter()
        timings = self._timings(measured=False)
        groups = self._as_one(self.compression, timings)
        measured_s = time.perf_counter() - begun_s
        return ExchangeConfig(
            compression=self.compression,
            dense_bytes=self.dense_bytes,
            exchange=self._whole(self.compression, groups),
            timings=timings,
            measured_s=measured_s,
            by_hosts=groups is not None,
        )

    def steered(
        self,
        *,
        buckets: int = 1,
        bf16_in_buckets: bool = False,
        tries_twins: bool = False,
    ) -> ExchangeConfig:
        """An exchange that is decided between control periods.

        Args:
            buckets: in which sums can be made under backward, where workers exchange one by one.
            bf16_in_buckets: whether those can be rounded to bf16 as well.
            tries_twins: whether somebody acts on `AdaptiveController.try_ratio`.
        """
        spec, asked = self.spec, self.compression
        begun_s = time.perf_counter()
        policies_ask = spec.weighs_ways or spec.collective_policy == "cheapest"
        timings = self._timings(measured=policies_ask)
        network = Network.of(timings) if timings and policies_ask else None
        typical = asked if METHODS[asked.name].by_ratio else Compression(name=SELECTOR, ratio=USUAL_RATIO)
        groups = self._as_one(typical, timings)
        measured_s = time.perf_counter() - begun_s
        candidates = Candidates(
            asked=asked,
            chooses_collective=spec.collective_policy == "cheapest",
            numel=self.numel,
            workers=len(spec.workers) if groups is None else self.hosts.count,
            shapes=self.shapes,
            buckets=buckets if groups is None else 1,
        )
        begun_s = time.perf_counter()
        if network is not None and spec.weighs_ways:
            candidates = timed_candidates(candidates, network, device=self.device, seed=spec.seed)
            candidates = replace(candidates, bf16_in_buckets=bf16_in_buckets)
        measured_s += time.perf_counter() - begun_s
        steering = AdaptiveController(spec, candidates, network, tries_twins=tries_twins)
        exchange = self._whole(steering.candidate.compression, groups)
        return ExchangeConfig(
            compression=asked,
            dense_bytes=self.dense_bytes,
            exchange=exchange,
            steering=steering,
            use=lambda candidate: exchange.use(candidate.compression),
            timings=timings,
            measured_s=measured_s,
            by_hosts=groups is not None,
        )

    def _timings(self, *, measured: bool) -> tuple[Timed, ...]:
        """The network as it is now, where somebody asks: the policies, or who has several workers on a host."""
        if not measured and not self.hosts.are_levels:
            return ()
        return measure_network(self.dense_bytes, device=self.device)

    def _as_one(self, typical: Compression, timings: tuple[Timed, ...]) -> HostGroups | None:
        """The groups of hosts that exchange as one, where there are such hosts and that is the quicker way."""
        if not timings or not self.hosts.are_levels:
            return None
        groups = HostGroups(self.hosts.names, timeout_s=self.spec.exchange_timeout_s)
        inside = measure_inside(self.hosts, groups, self.dense_bytes, device=self.device)
        network = Network.of((*timings, *inside))
        shorter = exchange_as_one(typical, self.numel, self.hosts, network, shapes=self.shapes)
        return groups if shorter else None

    def _whole(self, first: Compression, groups: HostGroups | None) -> Exchange | HierarchicalExchange:
        """The exchange of whole gradients, of workers or of hosts."""
        if groups is None:
            return Exchange(
                first,
                self.numel,
                device=self.device,
                clock=self.clock,
                shapes=self.shapes,
                seed=self.spec.seed,
                store=self.store,
                forgets=self.compression.memory == AUTO,
            )
        return HierarchicalExchange(
            first,
            self.numel,
            groups=groups,
            device=self.device,
            clock=self.clock,
            shapes=self.shapes,
            seed=self.spec.seed,
            store=self.store,
            forgets=self.compression.memory == AUTO,
        )
