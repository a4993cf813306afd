"""How gradients travel in a run, of a task or a script: what sums them, and the ratio policy that changes it.

The policy decides between control periods, alike on every rank.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hetopt.core.comm.composition import GATHER, METHODS, why_not_controlled
from hetopt.core.comm.options import IDENTITY, LOOK_AT, Candidates, Option, settled_collective, way_name
from hetopt.core.comm.payload_bytes import VALUE_BYTES
from hetopt.core.errors import BadInput
from hetopt.core.events.log import Event
from hetopt.core.run_rules import check_ratio_controller
from hetopt.core.run_spec import WEIGHS_WAYS, AccordionSettings, Compression, GravacSettings, RunSpec, Settings
from hetopt.core.training_laws import CAUTIOUS_COEFFICIENT, MOST_LOST
from hetopt.trainer.agreement import gather_numbers
from hetopt.trainer.comm.channel import Message
from hetopt.trainer.comm.exchange import Exchange
from hetopt.trainer.comm.network import (
    Network,
    measure_network,
    timed_candidates,
)
from hetopt.trainer.policies.ratio.auto import AutoRatio, AutoState, Outlook
from hetopt.trainer.policies.ratio.policy import (
    RatioDecision,
    RatioObservation,
    Verdict,
    gain_of,
)
from hetopt.trainer.policies.ratio.published import (
    WARM_UP,
    Accordion,
    Gravac,
    GravacState,
    ScanRatio,
    ScheduledRatio,
    ThresholdRatio,
)
from hetopt.trainer.steps.period import Period

RARER = (1, 4)
"""Multiples of the local steps that the run names, between averages that `auto` chooses among."""

RatioPolicy: TypeAlias = ScheduledRatio | Accordion | ThresholdRatio | Gravac | ScanRatio | AutoRatio
"""Policy that is asked once a control period, with the same input on every rank: ``initial`` returns the state before
the first observation, whose type also reads the state in a checkpoint; ``first`` the first period's ratio or
exchange, given the network as measured between the workers (None: it was not); and ``decide`` the next state and
decision, pure."""

LOOKED_STEPS = 3
"""Fewest steps of a period that looks at gains while gradients travel in buckets."""


class AdaptiveController:
    """Ratio policy of a run with its state, which chooses the gradient exchange of the next steps, alike on all ranks.

    Args:
        spec: spec of the run whose exchange is controlled.
        candidates: exchanges to choose among.
        network: network as measured at the start; None: no policy here asks for it.
        tries_twins: whether the caller makes the paired trial that `try_ratio` asks for.

    Attributes:
        candidates: exchanges to choose among.
        candidate: exchange in use in the next steps.
        network: network as measured at the start; None: no policy here asks for it.
        verdict: outcome of a paired trial, the same on all ranks, for the next `judge`; None: none was made since the
            last.

    Raises:
        BadInput: the ratio policy cannot steer the compressor.
    """

    def __init__(
        self, spec: RunSpec, candidates: Candidates, network: Network | None, *, tries_twins: bool = False
    ) -> None:
        self._name = spec.ratio_policy
        self.candidates = candidates
        self.network = network
        reason = why_not_controlled(candidates.asked.name, self._name, candidates.asked.collective)
        if reason is not None and not spec.weighs_ways:
            raise BadInput(reason, hint="steer topk, or leave the ratio policy at 'fixed'")
        weighed = list(candidates.all) if spec.weighs_ways else []
        if self._name == "scan":
            weighed = [option for option in weighed if option.gain is None]
        self._policy: RatioPolicy = choose_ratio_policy(
            self._name,
            ratio=spec.compression.ratio,
            settings=spec.ratio_settings,
            options=weighed,
            coefficient=spec.slowdown_coefficient,
            most_lost=MOST_LOST,
            # Samples have to be drawn ahead, and gradients must not need scaling.
            tries_twins=tries_twins
            and spec.stream is None
            and spec.injection is None
            and spec.precision != "fp16"
            # Averages save nearly as much, and what they cost is seen while they are made.
            and not spec.may_average,
        )
        self._state: Any = self._policy.initial()
        self.verdict: Verdict | None = None
        self._decision = self._first(spec)
        self.candidate = self._candidate_of(self._decision)

    def _first(self, spec: RunSpec) -> RatioDecision:
        """Return the policy's first decision; under ``auto`` the candidate that the plan was made for."""
        wish = self._policy.first(self.network)
        if self._name == "auto" and spec.compression.ratio < 1:
            start = self.candidates.nearest(spec.compression.ratio)
            return RatioDecision(
                ratio=start.ratio, option=start.key, measure_gain=True, look_after_steps=wish.look_after_steps
            )
        return wish

    @property
    def summing(self) -> Compression:
        """The compression by which gradients are summed in the next step that sums them."""
        return (self.candidates.dense if self.candidate.averages else self.candidate).compression

    @property
    def look_at(self) -> Sequence[float]:
        """The ratios at which the workers measure compression gains now; empty where the policy asks for none."""
        return self.looks if self._decision.measure_gain else ()

    @property
    def looks(self) -> tuple[float, ...]:
        """The ratios, ascending, at which this run measures compression gains whenever it does."""
        asked = self.candidates.asked.ratio
        return tuple(sorted({*LOOK_AT, *((asked,) if asked < 1 else ())}))

    @property
    def try_ratio(self) -> float | None:
        """The ratio of the paired trial to make before the next step; None: none is due."""
        return self._decision.try_ratio if self.verdict is None else None

    def period_steps(self, steps: int) -> int:
        """Return the steps of the next control period: ``steps``, or fewer where the ratio policy asks."""
        wished = self._decision.look_after_steps
        if wished is None:
            return steps
        # Steps that look exchange after backward: no time of one in buckets. The row may travel under one step more.
        least = LOOKED_STEPS if self._decision.measure_gain and self.candidate.in_buckets else 1
        return max(1, min(steps, max(least, wished)))

    @property
    def slowdown_coefficient(self) -> float | None:
        """The coefficient of the cost of late gradients (`hetopt.core.training_laws`); None where no policy uses it."""
        policy, state, network = self._policy, self._state, self.network
        if network is None or not (isinstance(policy, AutoRatio) and isinstance(state, AutoState)):
            return None
        return Outlook(policy, state, network).coefficient

    def judge(
        self,
        period: Period,
        *,
        step: int,
        epoch: float,
        learning_rate: float,
        steps_left: int | None = None,
    ) -> Event | None:
        """Choose the next exchange by a period's measurements; return the change as an event's fields; None: no change.

        A period without finite exchanges in the way in use decides nothing.

        Args:
            period: control period of which the exchanges by the candidate in use count.
            step: number of steps done.
            epoch: passes over the data completed, with fractions.
            learning_rate: learning rate of the first parameter group.
            steps_left: steps until the run ends by its own rules; None: not known.

        Returns:
            Keys ``before`` and ``after``, and the ``reason``; None: the exchange stays.
        """
        if not period.exchanges or not period.is_finite:
            # Nothing but a look, perhaps: not again, or nothing would ever be told of this candidate.
            self._decision = replace(self._decision, measure_gain=False)
            return None
        before, first_row = self.candidate, period.rows[0]  # gains of levels are alike on all workers
        if before.averages and not all(row.sync_s and row.energy for row in period.rows):
            return None  # no average was made, or none is known by now
        compute_s = max(row.way_compute_s for row in period.rows)
        # A step is as long on all workers.
        step_s = max(statistics.median(row.way_step_s for row in period.rows), compute_s)
        if before.averages:
            average_s = max(row.compress_s for row in period.rows) + min(row.sync_s for row in period.rows)
            step_s = max(row.way_step_s for row in period.rows) + average_s / before.every_steps
        observation = RatioObservation(
            step=step,
            steps=min(period.exchanges, step),
            epoch=epoch,
            ratio=before.ratio,
            compute_s=compute_s,
            step_s=step_s,
            kept_energy=tuple(row.kept_energy for row in period.rows),
            energy=tuple(row.energy for row in period.rows),
            gradient_norm=math.sqrt(statistics.fmean(row.gradient_energy for row in period.rows)),
            gain_curve=period.gain_curve(self.looks),
            network=self.network,
            option=before.key,
            learning_rate=learning_rate,
            steps_left=steps_left,
            loss=period.loss,
            verdict=self.verdict,
            level_gains=(first_row.candidate_gain, first_row.floor_gain) if first_row.floor_gain > 0 else None,
        )
        self.verdict = None
        self._state, self._decision = self._policy.decide(self._state, observation)
        self.candidate = self._candidate_of(self._decision)
        if self.candidate.key == before.key and self.candidate.compression == before.compression:
            return None
        return {"before": before.key, "after": self.candidate.key, "reason": self._decision.reason or ""}

    def _candidate_of(self, decision: RatioDecision) -> Option:
        """Return the candidate that a decision means, by its option or else its ratio, with the levels that it names.

        Of several collectives the quickest on the measured network is taken; without a network the first.
        """
        network = self.network
        if decision.option is not None:
            named = self.candidates.find(decision.option)
            assert named is not None, f"{decision.option} is not on the candidates"
            return named
        candidates = self.candidates.at(decision.ratio)
        if decision.least_gain is not None:
            levels = {"floor_ratio": decision.floor_ratio, "least_gain": decision.least_gain}
            plain = next(each for each in candidates if each.collective == GATHER)
            return replace(plain, compression=plain.compression.model_copy(update=levels))
        if network is None:
            return candidates[0]
        return min(candidates, key=lambda each: each.compress_s + network.exchange_s(each))

    def state(self) -> Mapping[str, object]:
        """Return the ratio policy's state and the exchange in use, for a checkpoint, as plain JSON."""
        return {
            "policy": self._name,
            "policy_state": self._state.model_dump(mode="json"),
            "ratio": self.candidate.ratio,
            "key": self.candidate.key,
        }

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Restore a checkpoint's state, unless of another ratio policy; the exchange only if it is still a candidate.

        The network is not part of it: it was measured anew. A state of another policy is passed over silently.
        """
        if saved["policy"] != self._name:
            return
        policy_state, ratio, key = saved["policy_state"], saved["ratio"], saved["key"]
        kind = type(self._policy.initial())
        # What another version of the policy remembered besides means nothing to this one.
        self._state = kind.model_validate({k: value for k, value in policy_state.items() if k in kind.model_fields})
        matching = [each for each in (*self.candidates.at(ratio), *self.candidates.all) if each.key == key]
        if matching:
            self.candidate = matching[0]
            option = key if self._name in WEIGHS_WAYS else None
            self._decision = RatioDecision(ratio=ratio, option=option, measure_gain=True)
        if isinstance(self._state, GravacState):
            assert isinstance(self._policy, Gravac)
            self._decision = self._policy.payload(self._state)
            self.candidate = self._candidate_of(self._decision)


def choose_ratio_policy(
    name: str,
    *,
    ratio: float,
    options: Sequence[Option] = (),
    coefficient: float = CAUTIOUS_COEFFICIENT,
    most_lost: float = math.inf,
    tries_twins: bool = False,
    settings: Settings | None = None,
) -> RatioPolicy:
    """Return a new ratio policy by its name, for a run that was asked to send ``ratio`` of the elements.

    Args:
        name: name of the policy.
        ratio: fraction that the run was asked to send; the strongest that the policy uses. ``auto`` and ``scan`` go by
            the options.
        options: exchanges that ``auto`` and ``scan`` may choose from; ``auto`` needs a dense one among them.
        coefficient: coefficient of the law of slowdown, as ``auto`` has it in mind.
        most_lost: more steps than dense training that ``auto`` may cost.
        tries_twins: whether ``auto`` may ask for trials.
        settings: settings that differ from the published ones (`hetopt.core.run_spec`); None: none do.

    Raises:
        BadInput: there is no such policy, or the ratio leaves it nothing to decide.
    """
    check_ratio_controller(name, ratio)
    given = settings or {}
    match name:
        case "fixed":
            return ScheduledRatio(ratio=ratio)
        case "warm_up":
            return ScheduledRatio(ratio=ratio, schedule=WARM_UP)
        case "accordion":
            gentle = AccordionSettings.model_validate(given).gentle or min(1.0, 10 * ratio)
            return Accordion.model_validate({**given, "gentle": max(ratio, gentle), "strong": ratio})
        case "gravac":
            floor = min(GravacSettings.model_validate(given).floor, 1 / ratio)
            return Gravac.model_validate({**given, "floor": floor, "largest": 1 / ratio})
        case "threshold":
            return ThresholdRatio.model_validate({**given, "ratio": ratio})
        case "scan":
            return ScanRatio.model_validate({**given, "options": tuple(options)})
        case _:
            return AutoRatio(
                options=tuple(options), coefficient=coefficient, most_lost=most_lost, tries_twins=tries_twins
            )


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig:
    """A run's exchange of gradients, and the controller that changes it while training goes on.

    Attributes:
        compression: compression of the run.
        dense_bytes: bytes of the whole gradient, uncompressed.
        exchange: exchange of whole gradients; None: nothing is exchanged, or only buckets are.
        steering: controller that changes the exchange; None: it stays as it is.
        timings: timings of the network's collectives; empty: it was not measured.
        measured_s: seconds that measuring network and compressors took.
    """

    compression: Compression
    dense_bytes: int
    exchange: Exchange | None = None
    steering: AdaptiveController | None = None
    timings: tuple[Message, ...] = ()
    measured_s: float = 0.0

    @property
    def is_dense(self) -> bool:
        """Whether every gradient of the run is summed uncompressed."""
        return self.steering is None and self.compression.name == IDENTITY

    @property
    def in_use(self) -> Compression:
        """The compression in use now: the run's, or the one that the controller chose."""
        return self.compression if self.steering is None else self.steering.candidate.compression

    @property
    def way(self) -> str:
        """The name of the exchange in use now: the run's, or the one that the controller chose."""
        return way_name(self.compression) if self.steering is None else self.steering.candidate.key

    def follow(self) -> None:
        """Switch to the controller's chosen exchange from the next step on; does nothing without a controller."""
        if self.steering is not None and self.exchange is not None:
            self.exchange.use(self.steering.summing)

    def resume(self, state: Mapping[str, object] | None) -> None:
        """Restore the controller's state of a checkpoint (None: it has none), and switch to the exchange it chose.

        The step has the checkpoint's residual already.
        """
        if self.steering is not None and state is not None:
            self.steering.resume(state)
        self.follow()

    def event(self, period: Period) -> Event:
        """Return the field ``exchange`` of a period's ``step`` event: method, energy kept, bytes and seconds.

        Empty: one worker, no finite exchange, or averages of parameters.
        """
        steering, rows = self.steering, period.rows
        if len(period.rows) == 1 or not period.exchanges or not period.is_finite:
            return {}
        if steering is not None and steering.candidate.averages:
            return {}  # the synchronizer tells of them
        looked: Event = {}
        if steering is not None and steering.slowdown_coefficient is not None:
            looked["slowdown_coefficient"] = round(steering.slowdown_coefficient, 4)
        return {
            "exchange": {
                "way": self.way,
                "compressor": self.in_use.name,
                "ratio": self.in_use.ratio,
                "collective": settled_collective(self.in_use),
                "gain": round(gain_of(sum(row.kept_energy for row in rows), sum(row.energy for row in rows)), 6),
                "sent_bytes": round(statistics.fmean(row.sent_bytes for row in period.rows)),
                "dense_bytes": self.dense_bytes,
                "compress_s": round(max(row.compress_s for row in rows), 7),
                "sync_s": round(min(row.sync_s for row in rows), 7),  # of who waits least: the network's alone
                "exchanges": period.exchanges,
                **looked,
            }
        }


def is_steered(spec: RunSpec, compression: Compression) -> bool:
    """Return whether a policy decides on the gradient exchange while training goes on."""
    return spec.steers_exchange and (spec.ratio_policy != "fixed" or METHODS[compression.name].by_ratio)


def can_overlap(device: torch.device, world_size: int) -> bool:
    """Return whether all workers can sum gradient buckets while backward runs; every worker must call it."""
    if world_size == 1:
        return False
    is_cuda = device.type == "cuda"
    # A GPU's gradients go over gloo only through the host, in one piece.
    rows = gather_numbers([float(not is_cuda or "nccl" in dist.get_backend()), float(is_cuda)], world_size)
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
    group: dist.ProcessGroup | None = None,
) -> ExchangeConfig:
    """Make the exchange of a run's whole gradients; may measure the network, so all workers must call it.

    Args:
        spec: run spec: who decides how much is sent, and how it travels.
        compression: compression of the run, with what it leaves open filled in.
        shapes: shapes of the parameters, in the order in which they lie in the gradient.
        device: device of the gradient.
        store: store that the workers met through; None: nobody is named when one is lost.
        clock: returns seconds.
        buckets: number of buckets in which sums can be made under backward; 1: none are.
        bf16_in_buckets: whether those sums can be rounded to bf16 as well.
        tries_twins: whether the caller makes the paired trial that `AdaptiveController.try_ratio` asks for.
        group: process group that exchanges; None: all workers.

    Raises:
        BadInput: parts of the compression do not go together, or the ratio policy cannot steer it.
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
            every_steps=tuple(times * spec.sync.every_steps for times in RARER) if spec.may_average else (),
        )
        seen = Network.of(timings, len(spec.workers)) if timings else None
        if seen is not None and spec.weighs_ways:
            candidates = timed_candidates(candidates, seen, device=device, seed=spec.seed)
            candidates = replace(candidates, bf16_in_buckets=bf16_in_buckets)
        steering = AdaptiveController(spec, candidates, seen, tries_twins=tries_twins)
    measured_s = time.perf_counter() - begun_s
    first = compression if steering is None else steering.candidate.compression
    exchange = Exchange(
        first, numel, device=device, clock=clock, shapes=shapes, seed=spec.seed, store=store, group=group
    )
    return ExchangeConfig(
        compression=compression,
        dense_bytes=dense_bytes,
        exchange=exchange,
        steering=steering,
        timings=timings,
        measured_s=measured_s,
    )
