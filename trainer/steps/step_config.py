"""The step of a run, with what the loop has to know about how it exchanges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetopt.core.comm.options import settled_collective, way_name
from hetopt.core.events.log import Event
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.calibration import Calibration, NetworkProbe
from hetopt.trainer.steps.adaptive_controller import AdaptiveController
from hetopt.trainer.steps.step import Step
from hetopt.trainer.steps.switching_step import SwitchingStep
from hetopt.trainer.steps.traffic import GroupTraffic


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """The step, and what the loop has to know about how it exchanges.

    Attributes:
        step: warmed up.
        compression: of the run.
        steering: None: what is exchanged stays as it is.
        switching: the step, where it is steered.
        probe: of the network, where somebody asks what it is like.
        calibration: of the network, where it was measured.
        measured_s: how long that took, and timing compressors.
        dense_bytes: of the gradient.
        by_hosts: whether workers of a host sum first, and only hosts exchange.
    """

    step: Step
    compression: Compression
    dense_bytes: int
    steering: AdaptiveController | None = None
    switching: SwitchingStep | None = None
    probe: NetworkProbe | None = None
    calibration: Calibration | None = None
    measured_s: float = 0.0
    by_hosts: bool = False

    @property
    def way(self) -> str:
        """Name of the present way to exchange."""
        return way_name(self.compression) if self.steering is None else self.steering.candidate.option.key

    def follow(self) -> None:
        """Exchange as the steering says from the next step on."""
        assert self.steering is not None
        assert self.switching is not None
        self.switching.use(self.steering.candidate)

    def resume(self, state: Mapping[str, object] | None) -> None:
        """Go on with what a checkpoint holds, whose memory the step has already."""
        if self.steering is None or self.switching is None:
            return
        if state is not None:
            self.steering.resume(state)
        self.switching.use(self.steering.candidate)

    def event(self, traffic: GroupTraffic) -> Event:
        """The field of a ``step`` event that tells about its exchanges; none where there were none."""
        return exchange_event(
            traffic, compression=self.compression, steering=self.steering, dense_bytes=self.dense_bytes
        )


def exchange_event(
    traffic: GroupTraffic, *, compression: Compression, steering: AdaptiveController | None, dense_bytes: int
) -> Event:
    """What the exchanges of a period were like; nothing where there were none.

    Args:
        traffic: of all workers.
        compression: of the run.
        steering: None: what is exchanged stays as it is.
        dense_bytes: of the gradient.
    """
    if len(traffic.rows) == 1 or not traffic.exchanges or not traffic.is_finite:
        return {}
    if steering is None:
        way, name, ratio = way_name(compression), compression.name, compression.ratio
        collective = settled_collective(compression)
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
            "dense_bytes": dense_bytes,
            "compress_s": round(traffic.compress_s, 7),
            "sync_s": round(traffic.sync_s, 7),
            "exchanges": traffic.exchanges,
            **looked,
        }
    }
