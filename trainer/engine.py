"""The engine: the training step, and the control period of some steps after which all workers decide alike.

Two fronts drive it. A task's loop has `train_step` (`hetopt.trainer.training`) do whole steps: the feed gives samples,
and `hetopt.trainer.steps` computes their gradient and sums it. A script drives it by what it does anyway: a session
(`hetopt.trainer.session`) is the script-driven front of the same engine. Its backward passes sum gradients by the same
exchange, and each step that the script has done goes through the same `Engine.after`, `gather`, `tell`, `steer` and
`share` as a task's.

Inside a period the only communication is the gradient's. At its end one row of numbers of each worker is gathered;
every rank reads the same rows, and so concludes the same.

With the first events of a run: what is trained, on whom, and over which network. With the shares in use, and when
things are due in a run: its end, the next evaluation, the next look at the gathered statistics. Progress is counted in
samples, so that it means the same when the global batch differs between attempts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from hetopt.core.artifact import Record
from hetopt.core.batch_partition import first_shares, micro_batch_size, within_memory
from hetopt.core.errors import BadInput
from hetopt.core.events.log import Event
from hetopt.core.run_spec import RunSpec, StopRule
from hetopt.trainer.agreement import Gathering, gather_numbers, gather_texts
from hetopt.trainer.comm.network import Network
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.policies.policy import BatchPolicy
from hetopt.trainer.statistics import Period, PeriodLog
from hetopt.trainer.steps.adaptive_controller import ExchangeConfig
from hetopt.trainer.steps.step import StepTrace
from hetopt.trainer.steps.stopwatch import Stopwatch
from hetopt.trainer.sync.synchroniser import Synchronizer


class Balance:
    """The same on every rank: what changes it is what all ranks read.

    Args:
        spec: of the run.
        policy: decides.
        minimum: least share of a worker, in samples.
    """

    def __init__(self, spec: RunSpec, policy: BatchPolicy[Any], *, minimum: int = 1) -> None:
        self._spec = spec
        self._policy = policy
        self._state: Record = policy.initial()
        self._unjudged_steps = 0
        self._unjudged_s = 0.0
        self.shares = first_shares(spec, minimum=minimum)

    def is_due(self, period: Period) -> bool:
        """Whether shares are to be judged now, after one more period."""
        self._unjudged_steps += period.steps
        self._unjudged_s += period.steps * period.step_time_s
        if not may_judge_shares(self._unjudged_steps, self._unjudged_s, self._spec.control_period_steps):
            return False
        self._unjudged_steps, self._unjudged_s = 0, 0.0
        return True

    def judge(self, period: Period, epoch: int) -> Event | None:
        """Let the policy decide; what changed, if anything did.

        Args:
            period: the last one, whose medians are over all steps since shares were last judged.
            epoch: completed epochs.
        """
        self._state, decision = self._policy.decide(self._state, period.observation(epoch))
        if not decision.changed:
            return None
        before, self.shares = self.shares, within_memory(self._spec, decision.local_batch_sizes)
        if self.shares == before:
            return None
        return {"before": list(before), "after": list(self.shares), "reason": decision.reason}

    def state(self) -> Mapping[str, object]:
        """What the policy remembers, as plain JSON."""
        return self._state.model_dump(mode="json")

    def resume(self, *, policy: str, shares: tuple[int, ...], state: Mapping[str, object]) -> None:
        """Continue with what a checkpoint holds, where it suits the cluster and the policy that the run has now.

        Raises:
            BadInput: the state is damaged.
        """
        spec = self._spec
        if policy != spec.batch_policy or len(shares) != len(spec.workers):
            return
        if policy != "rate" and sum(shares) != spec.global_batch_size:
            return
        if spec.batch_policy == "allocation" and any(share % (micro_batch_size(spec) or 1) for share in shares):
            return
        try:
            self._state = type(self._policy.initial()).model_validate(state)
        except ValidationError:
            raise BadInput(
                f"The checkpoint's state of the batch policy '{policy}' is damaged.", hint="use an older checkpoint"
            ) from None
        self.shares = shares


LONGEST_PERIOD_S = 2.0
"""A control period takes no longer than this (unless a single step does), so that wishes to stop are heard in time."""

_STEPS_TO_JUDGE = 10
"""Shares are judged by this many steps, or by as many as `LONGEST_PERIOD_S` holds."""

# Products of a decimal number of epochs and a dataset size may miss the integer they mean by rounding.
_ROUNDING = 1e-9


def may_judge_shares(steps: int, period_s: float, control_period_steps: int) -> bool:
    """Whether so many steps, which took so long, are enough to judge shares by (a period may be very short)."""
    return steps >= min(_STEPS_TO_JUDGE, control_period_steps) or period_s >= LONGEST_PERIOD_S / 2


@dataclass(frozen=True, kw_only=True)
class Milestones:
    """The fixed points of one run.

    Attributes:
        stop: when it ends.
        dataset_size: samples of an epoch.
        global_batch_size: samples of a step.
        evaluate_every_epochs: epochs between evaluations.
        control_period_steps: most steps between looks at the statistics.
    """

    stop: StopRule
    dataset_size: int
    global_batch_size: int
    evaluate_every_epochs: float
    control_period_steps: int

    def ended_by(self, step: int, samples_seen: int) -> str | None:
        """Which limit has been reached: "steps", "epochs" or none."""
        if self.stop.max_steps is not None and step >= self.stop.max_steps:
            return "steps"
        if self.stop.max_epochs is not None and samples_seen >= self._samples(self.stop.max_epochs):
            return "epochs"
        return None

    def steps_left(self, step: int, samples_seen: int) -> int | None:
        """Steps until a limit is reached, at least 1; None where a target may end the run before."""
        if self.stop.target:
            return None
        limits = []
        if self.stop.max_steps is not None:
            limits.append(self.stop.max_steps - step)
        if self.stop.max_epochs is not None:
            limits.append(self._steps_to(self._samples(self.stop.max_epochs), samples_seen))
        return max(1, min(limits)) if limits else None

    def evaluation_due(self, samples_before: int, samples_seen: int) -> bool:
        """Whether an evaluation point was passed between two positions."""
        return self._evaluations(samples_seen) > self._evaluations(samples_before)

    def all_meet(self, step: int, samples_seen: int, steps: int) -> bool:
        """Whether the run ends or is evaluated after so many more steps: then all workers meet there anyway."""
        seen = samples_seen + steps * self.global_batch_size
        return self.ended_by(step + steps, seen) is not None or self.evaluation_due(samples_seen, seen)

    def period_steps(self, step: int, samples_seen: int, step_time_s: float | None) -> int:
        """Steps until the next look at the statistics: never beyond the end of the run or an evaluation point.

        Args:
            step: steps done.
            samples_seen: samples done.
            step_time_s: time of a recent step; None: unknown, so look after the first.
        """
        steps = 1 if step_time_s is None else self.control_period_steps
        if step_time_s is not None and steps * step_time_s > LONGEST_PERIOD_S:
            steps = int(LONGEST_PERIOD_S / step_time_s)
        next_evaluation = self._samples((self._evaluations(samples_seen) + 1) * self.evaluate_every_epochs)
        steps = min(steps, self._steps_to(next_evaluation, samples_seen))
        if self.stop.max_epochs is not None:
            steps = min(steps, self._steps_to(self._samples(self.stop.max_epochs), samples_seen))
        if self.stop.max_steps is not None:
            steps = min(steps, self.stop.max_steps - step)
        return max(1, steps)

    def _samples(self, epochs: float) -> int:
        return math.ceil(epochs * self.dataset_size * (1 - _ROUNDING))

    def _evaluations(self, samples_seen: int) -> int:
        """Evaluation points up to a position."""
        return int(samples_seen / (self.evaluate_every_epochs * self.dataset_size) * (1 + _ROUNDING))

    def _steps_to(self, samples: int, samples_seen: int) -> int:
        return -(-(samples - samples_seen) // self.global_batch_size)


class Engine:
    """Steps that somebody computes, in control periods: what all workers learn of them, and conclude alike.

    A period goes `begin`, a step and `after` until it `is_over`, `gather`; then, of the rows of all workers, `tell`,
    `steer` and `share`. What a front cannot do it does not call, or is not given: no synchroniser, nothing to steer.

    Args:
        context: this worker.
        exchange: how gradients travel.
        balance: the shares.
        stopwatch: of the device.
        synchroniser: brings models together that workers train for themselves; None: gradients are exchanged.
        step: done before.

    Attributes:
        step: steps done.
        is_over: whether the period's last step is done.
        control_s: spent on control since the last ``step`` event.
        log: of the steps that no row tells about yet.
    """

    def __init__(
        self,
        *,
        context: WorkerContext,
        exchange: ExchangeConfig,
        balance: Balance,
        stopwatch: Stopwatch,
        synchroniser: Synchronizer | None = None,
        step: int = 0,
    ) -> None:
        self.context = context
        self.exchange = exchange
        self.balance = balance
        self.synchroniser = synchroniser
        self.step = step
        self.is_over = False
        self.control_s = 0.0
        self.log = PeriodLog(stopwatch)
        self._steps = self._told = self._done = 0

    def period_steps(self, steps: int) -> int:
        """Steps of the next period, where it would have so many."""
        return steps if self.exchange.steering is None else self.exchange.steering.period_steps(steps)

    def begin(self, steps: int, *, all_meet: bool = True) -> None:
        """A period begins.

        A message of a few numbers takes as long as a small gradient does: where it can, it travels under the last step,
        and tells about the steps before that one.

        Args:
            steps: at least one.
            all_meet: whether the workers wait for each other after the last of them anyway.
        """
        self._steps, self._done = steps, 0
        self._told = steps if all_meet else max(1, steps - 1)
        self.is_over = False
        self.log.resume()

    @property
    def gathers_now(self) -> bool:
        """Whether the row is to be sent before the next step, and travels under it."""
        return self._done == self._told < self._steps

    @property
    def look_at(self) -> Sequence[float]:
        """Ratios to tell the kept energy at in the next step; few steps look."""
        steering = self.exchange.steering
        return steering.look_at if steering is not None and self._done + 1 == self._told else ()

    def after(self, trace: StepTrace, samples: Sequence[int], *, counts: bool = True) -> None:
        """The optimizer has done a step, on every worker.

        Args:
            trace: of the step.
            samples: of the step, of every worker.
            counts: whether it is like others: else nobody is told of it.
        """
        self.step += 1
        if self.synchroniser is not None:
            trace = self.synchroniser.after(self.step, trace, samples)
        if counts:
            self.log.add(trace)
        else:
            self.log.resume()
        self._done += 1
        self.is_over = self._done == self._steps

    def gather(self, **told: Any) -> Gathering:
        """Send this worker's row on its way.

        Args:
            told: of this worker besides its steps (see `PeriodLog.close`).
        """
        begun_s = self.context.clock()
        steering = self.exchange.steering
        traffic = self.log.traffic(
            way=self.exchange.way,
            dense_bytes=self.exchange.dense_bytes,
            looks=0 if steering is None else len(steering.looks),
        )
        row = [*self.log.close(**told).to_list(), *traffic.to_list()]
        gathering = Gathering(row, self.context.world_size)
        self.control_s += self.context.clock() - begun_s
        self.log.resume()
        return gathering

    def read(self, gathering: Gathering) -> Period:
        """What the workers' rows tell of the period; waits for them."""
        return Period.of(gathering.wait(), local_batch_sizes=self.balance.shares)

    def tell(self, period: Period, *, epoch: float, samples_seen: int, **more: Any) -> None:
        """Write the ``step`` event."""
        step = self.step - self.log.unread
        self.context.events.write(
            "step",
            **period.event(step=step, epoch=epoch, samples_seen=samples_seen),
            control_s=round(self.control_s / period.steps, 7),
            **self.exchange.event(period.traffic),
            **({} if self.synchroniser is None else self.synchroniser.event(step)),
            **more,
        )
        self.control_s = 0.0

    def steer(self, period: Period, *, epoch: float, learning_rate: float, steps_left: int | None) -> None:
        """Decide how gradients travel from now on.

        Args:
            period: that was gathered last.
            epoch: passes over the data completed, with fractions.
            learning_rate: of the first parameter group.
            steps_left: until training ends by its own rules; None: that is not known.
        """
        steering = self.exchange.steering
        if steering is None:
            return
        change = steering.judge(
            period.traffic,
            step=self.step,
            epoch=epoch,
            learning_rate=learning_rate,
            steps_left=steps_left,
            loss=period.loss,
        )
        if change is not None:
            self.exchange.follow()
            self.context.events.write("exchange_changed", step=self.step, **change)

    def share(self, period: Period, epoch: int) -> bool:
        """Judge the shares if it is time to; whether they change from the next step on."""
        if not self.balance.is_due(period):
            return False
        change = self.balance.judge(period, epoch)
        self.log.judged(changed=change is not None)
        if change is None:
            return False
        self.context.events.write("shares_changed", step=self.step, **change)
        return True


def announce(
    context: WorkerContext, model: nn.Module, exchange: ExchangeConfig, *, shares: Sequence[int], step: int
) -> None:
    """Write ``run_started``, and what the network is like where it was measured; called by every rank.

    Args:
        context: this worker.
        model: what is trained.
        exchange: how its gradients travel.
        shares: of the first step, in rank order.
        step: steps done by earlier attempts.
    """
    spec = context.spec
    name = "cpu" if context.device.type == "cpu" else torch.cuda.get_device_name(context.device)
    devices = gather_texts(name, context.world_size)
    threads = gather_numbers([torch.get_num_threads()], context.world_size)
    context.events.write(
        "run_started",
        task=spec.task,
        workers=[
            {
                "host": worker.host,
                "type": worker.type,
                "slowdown": worker.slowdown,
                "local_batch_size": share,
                "device": device,
                "threads": int(row[0]),
            }
            for worker, share, device, row in zip(spec.workers, shares, devices, threads, strict=True)
        ],
        global_batch_size=spec.global_batch_size,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        gradient_bytes=exchange.dense_bytes,
        compression=spec.compression.model_dump(),
        ratio_policy=spec.ratio_policy,
        collective_policy=spec.collective_policy,
        **_apart(spec),
        resumed_step=step,
    )
    if exchange.timings:
        hop = Network.of(exchange.timings).hop
        context.events.write(
            "network_measured",
            step=step,
            latency_s=round(hop.latency_s, 7),
            bytes_per_s=round(hop.bytes_per_s),
            measured_s=round(exchange.measured_s, 3),
            timings=[
                {
                    "collective": timed.operation.primitive,
                    "payload_bytes": int(timed.operation.payload_bytes),
                    "time_s": round(timed.time_s, 7),
                }
                for timed in exchange.timings
            ],
        )


def _apart(spec: RunSpec) -> Event:
    """How workers train for themselves, and on what, where they do."""
    told: Event = {"sync": spec.sync.model_dump()} if spec.is_local else {}
    if spec.partition.name != "global":
        told["partition"] = spec.partition.model_dump()
    return told
