"""How a run's gradients travel, and who decides that: what the engine knows of an exchange, whoever computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from hetopt.core.comm.options import IDENTITY, Candidate, settled_collective, way_name
from hetopt.core.events.log import Event
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.exchange import Exchange
from hetopt.trainer.comm.hierarchical import HierarchicalExchange
from hetopt.trainer.comm.network import Timed
from hetopt.trainer.steps.adaptive_controller import AdaptiveController
from hetopt.trainer.steps.fused_step import FusedStep, SwitchingStep
from hetopt.trainer.steps.traffic import GroupTraffic


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig:
    """How gradients travel; made by `hetopt.trainer.steps.exchange_assembly`.

    Attributes:
        compression: of the run.
        dense_bytes: of the gradient.
        exchange: sums whole gradients; None: nothing does, or only buckets are summed.
        steering: None: what is exchanged stays as it is.
        use: exchanges in another way from the next step on; None: nothing is steered.
        timings: of the network's collectives, where it was measured.
        measured_s: how long that took, and timing compressors.
        by_hosts: whether workers of a host sum first, and only hosts exchange.
    """

    compression: Compression
    dense_bytes: int
    exchange: Exchange | HierarchicalExchange | None = None
    steering: AdaptiveController | None = None
    use: Callable[[Candidate], None] | None = None
    timings: tuple[Timed, ...] = ()
    measured_s: float = 0.0
    by_hosts: bool = False

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
        assert self.use is not None
        self.use(self.steering.candidate)

    def resume(self, state: Mapping[str, object] | None) -> None:
        """Go on with what a checkpoint holds, whose memory the step has already."""
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


@dataclass(frozen=True, kw_only=True)
class StepConfig(ExchangeConfig):
    """The same with the step that computes what is exchanged, warmed up."""

    step: FusedStep | SwitchingStep
