"""How a session's gradients travel: always the same way, or decided anew between periods, the same on every worker."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hetopt.core.comm.composition import AUTO, METHODS
from hetopt.core.comm.options import Candidates, way_name
from hetopt.core.comm.payload_bytes import VALUE_BYTES
from hetopt.core.errors import BadInput
from hetopt.core.events.log import Event
from hetopt.core.run_spec import Compression, RunSpec
from hetopt.trainer.agreement import Store
from hetopt.trainer.comm.calibration import NetworkProbe, measure_network, timed_candidates
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.exchange import Exchange, ExchangeStats, summed
from hetopt.trainer.steps.adaptive_controller import AdaptiveController
from hetopt.trainer.steps.step_config import exchange_event
from hetopt.trainer.steps.traffic import GroupTraffic

DOUBLE_BYTES = 8


class SessionExchange:
    """Sums whole gradients, after backward. Where anything is left to decide, the network is measured first.

    Args:
        spec: of the session: compression, who decides how much is sent, and how it travels.
        shapes: of the float32 parameters, in the order in which they lie in the gradient.
        doubles: elements of float64 parameters, which are summed as they are.
        device: where they are.
        store: that the workers met through.
        steps: of the whole session; None: nobody knows.

    Raises:
        BadInput: things do not go together.
    """

    def __init__(
        self,
        spec: RunSpec,
        shapes: Sequence[tuple[int, ...]],
        *,
        doubles: int = 0,
        device: torch.device,
        store: Store | None,
        steps: int | None,
    ) -> None:
        self._spec = spec
        self._steps = steps
        self._device = device
        numel = sum(math.prod(shape) for shape in shapes)
        if doubles and (spec.compression.name != "identity" or spec.steers_exchange):
            raise BadInput(
                f"The model has float64 parameters, and {way_name(spec.compression)} compresses float32 gradients.",
                hint="leave out compression, or make the model float32",
            )
        self.dense_bytes = VALUE_BYTES * numel + DOUBLE_BYTES * doubles
        self._steering: AdaptiveController | None = None
        self._probe: NetworkProbe | None = None
        first = spec.compression
        if spec.steers_exchange and (spec.ratio_policy != "fixed" or METHODS[first.name].by_ratio):
            self._steering = self._steered(list(shapes), numel, device)
            first = self._steering.candidate.compression
        self._exchange = Exchange(
            first,
            numel,
            device=device,
            shapes=list(shapes),
            seed=spec.seed,
            store=store,
            forgets=spec.compression.memory == AUTO,
        )

    def _steered(self, shapes: list[tuple[int, ...]], numel: int, device: torch.device) -> AdaptiveController:
        spec = self._spec
        candidates = Candidates(
            asked=spec.compression,
            chooses_collective=spec.collective_policy == "cheapest",
            numel=numel,
            workers=len(spec.workers),
            shapes=shapes,
        )
        weighs = spec.weighs_ways
        if not weighs and spec.collective_policy != "cheapest":
            return AdaptiveController(spec, candidates, None)
        network = measure_network(self.dense_bytes, device=device).network
        self._probe = NetworkProbe(self.dense_bytes, device=device, groups=None)
        if weighs:
            candidates = timed_candidates(candidates, network, device=device, seed=spec.seed)
        return AdaptiveController(spec, candidates, network)

    @property
    def is_dense(self) -> bool:
        """Whether everything is summed as it is, always."""
        return self._steering is None and self._spec.compression.name == "identity"

    @property
    def compression(self) -> Compression:
        """The compression of gradients that is in use now."""
        return self._spec.compression if self._steering is None else self._steering.candidate.compression

    @property
    def way(self) -> str:
        """Name of the present way to exchange."""
        return way_name(self._spec.compression) if self._steering is None else self._steering.candidate.option.key

    @property
    def looks(self) -> int:
        """Ratios at which gains are read when somebody looks."""
        return 0 if self._steering is None else len(self._steering.looks)

    def run(self, flat: Tensor, doubles: Tensor, *, look: bool) -> ExchangeStats:
        """Replace the weighted gradient by the sum over all workers, in place.

        Args:
            flat: [elements] fp32.
            doubles: [elements] fp64, of the parameters that are.
            look: whether this is the step of a period in which gains are read.
        """
        if not doubles.numel():
            return self._exchange.run(flat, self._steering.look_at if look and self._steering is not None else ())
        parts = [self._exchange.run(flat)] if flat.numel() else []
        channel = Channel(on=self._device)
        channel.all_reduce(doubles)
        sync_s = channel.messages[-1].time_s
        own = ExchangeStats(sent_bytes=doubles.nbytes, compress_s=0.0, sync_s=sync_s, messages=tuple(channel.messages))
        return summed([*parts, own])

    def period_steps(self, steps: int) -> int:
        """Steps until the next decision, where there would be one after so many."""
        return steps if self._steering is None else self._steering.period_steps(steps)

    def probe_s(self) -> float:
        """Seconds of a small sum that tells of the network; 0: nobody asks. All workers at the same time."""
        if self._probe is None or self._steering is None or not self._steering.probe_bytes:
            return 0.0
        return self._probe.sum_s(self._steering.probe_bytes)

    def event(self, traffic: GroupTraffic) -> Event:
        """The field of a ``step`` event that tells about a period's exchanges."""
        return exchange_event(
            traffic, compression=self._spec.compression, steering=self._steering, dense_bytes=self.dense_bytes
        )

    def judge(
        self, traffic: GroupTraffic, *, step: int, epoch: float, learning_rate: float, loss: float
    ) -> Event | None:
        """Decide how to exchange from now on; what changed, if anything did.

        Args:
            traffic: of the period, of all workers.
            step: steps done.
            epoch: passes over the data completed, with fractions.
            learning_rate: of the first parameter group.
            loss: mean of the period.
        """
        if self._steering is None:
            return None
        if self._steering.watch(traffic):
            assert self._probe is not None
            self._steering.measured(self._probe.measure())
        changed = self._steering.judge(
            traffic,
            step=step,
            epoch=epoch,
            learning_rate=learning_rate,
            steps_left=None if self._steps is None else max(1, self._steps - step),
            loss=loss,
        )
        if changed is not None:
            self._exchange.use(self._steering.candidate.compression)
        return changed
