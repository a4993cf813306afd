"""The engine of training: control periods of a few steps, after each of which all workers read the same figures.

Two fronts drive it. A task's loop has `train_step` (`hetopt.trainer.training`) do whole steps: the feed gives samples,
and `hetopt.trainer.steps` computes their gradient and sums it. A script drives it by what it does anyway: a session
(`hetopt.trainer.session`) is the script-driven front of the same engine. Its backward passes sum gradients by the same
exchange, and each step that the script has done goes through the same `Engine.after`, `gather`, `tell`, `steer` and
`share` as a task's.

Inside a period the only communication is the gradient's. At its end one row of numbers of each worker is gathered;
every rank reads the same rows, and so decides the same.

Beside `Engine` stand the shares in use (`Balance`), when things are due (`Milestones`, by samples, which mean the same
whatever the global batch), a checksum of tensors, and a run's first events.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hetopt.core.artifact import Record
from hetopt.core.batch_partition import first_shares, largest_remainder, within_memory
from hetopt.core.events.log import Event
from hetopt.core.run_spec import RunSpec, StopRule
from hetopt.trainer.agreement import Gathering, gather_numbers, gather_texts
from hetopt.trainer.comm.network import Network
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.policies.policy import BatchPolicy, CriticalBatch, CriticalState
from hetopt.trainer.sharding import WHOLE, Shards
from hetopt.trainer.steps.adaptive_controller import ExchangeConfig
from hetopt.trainer.steps.period import Period, PeriodLog
from hetopt.trainer.steps.step import StepTrace
from hetopt.trainer.steps.stopwatch import Stopwatch
from hetopt.trainer.sync.synchroniser import Synchronizer

LARGEST = 2**52
"""Bound below which whole numbers travel as they are."""

CLOSE = 1e-9
"""Relative distance up to which numbers count as equal."""

_WORD = {4: torch.int32, 8: torch.int64}


def tensors_mark(tensors: Iterable[Tensor]) -> int:
    """Return a checksum below 2^52 of tensors in their order; tensors that are equal bit for bit have the same one.

    Without elements it is 0.
    """
    total: Tensor | None = None
    for index, tensor in enumerate(tensors):
        flat = tensor.detach().contiguous().reshape(-1)
        if flat.numel():
            words = flat.view(_WORD.get(flat.element_size(), torch.uint8)).sum(dtype=torch.int64) * (2 * index + 1)
            total = words if total is None else total + words.to(total.device)
    return 0 if total is None else int(total) % LARGEST


def options_of(optimizer: Any) -> list[tuple[str, float]]:
    """Return the numeric options of all an optimizer's groups, such as learning rates and momenta, as (name, value).

    A name says its group, as ``lr of parameter group 0``. Options that are neither numbers nor tensors of one element
    are left out.
    """
    return [
        (f"{key} of parameter group {index}", float(value))
        for index, group in enumerate(optimizer.param_groups)
        for key in sorted(group.keys() - {"params"})
        for value in tree_leaves(group[key])
        if isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    ]


def parameters_of(optimizer: Any) -> list[nn.Parameter]:
    """Return all parameters of a torch optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Balance:
    """The batch policy of a run with its state, and the local batch sizes it last decided on; the same on every rank.

    Args:
        spec: spec of the run.
        policy: rule that decides on local batch sizes.
        minimum: least local batch size of a worker, in samples.

    Attributes:
        shares: samples of each worker in the next batch, in rank order.
        batches_per_step: batches of a script's loader in a step, as its first step shows; 0: none was made yet.
    """

    def __init__(self, spec: RunSpec, policy: BatchPolicy[Any], *, minimum: int = 1) -> None:
        self._spec, self._minimum = spec, minimum
        self._policy = policy
        self._state: Record = policy.initial()
        self._unjudged_steps = 0
        self._unjudged_s = 0.0
        self.shares, self.batches_per_step = first_shares(spec, minimum=minimum), 0

    @property
    def shares_of_step(self) -> tuple[int, ...]:
        """The samples of each worker in a full step, in rank order."""
        return tuple(size * (self.batches_per_step or self._spec.batches_per_step) for size in self.shares)

    def is_due(self, period: Period) -> bool:
        """Count one more control period; return whether local batch sizes are to be judged now, and if so count anew.

        They are after ten steps (or a whole control period, if that is shorter), or after 1 s.
        """
        self._unjudged_steps += period.steps
        self._unjudged_s += period.steps * period.step_time_s
        enough = min(_STEPS_TO_JUDGE, self._spec.control_period_steps)  # a period may be very short
        if self._unjudged_steps < enough and self._unjudged_s < LONGEST_PERIOD_S / 2:
            return False
        self._unjudged_steps, self._unjudged_s = 0, 0.0
        return True

    def judge(self, period: Period, epoch: int, samples_seen: int) -> Event | None:
        """Let the policy set local batch sizes by a control period; return the change as an event's fields.

        Args:
            period: last control period, whose medians are over all steps since shares were last judged.
            epoch: completed epochs.
            samples_seen: samples of all workers so far.

        Returns:
            Samples of each worker in a step ``before`` and ``after``, and the ``reason``; None: shares stay.

        Raises:
            BadInput: the local batch sizes that the policy wants cannot be within the workers' memory.
        """
        self._state, decision = self._policy.decide(self._state, period.observation(epoch, samples_seen))
        before, self.shares = self.shares_of_step, within_memory(self._spec, decision.local_batch_sizes)
        if self.shares_of_step == before:
            return None
        return {"before": list(before), "after": list(self.shares_of_step), "reason": decision.reason}

    @property
    def worth(self) -> float | None:
        """Steps of the planned batch that the next step is worth; None: the batch does not follow the noise."""
        return self._state.worth if isinstance(self._state, CriticalState) else None

    @property
    def gain(self) -> float:
        """The steps of the batch size of the task's learning rate that the next step is worth."""
        return (self.worth or 1.0) * (self._policy.planned_worth if isinstance(self._policy, CriticalBatch) else 1.0)

    def progress(self, samples_seen: int) -> float:
        """Return the samples that the planned batch would have taken for the progress made in ``samples_seen``.

        Where the batch does not follow the noise it is ``samples_seen`` itself.
        """
        state = self._state
        return state.progress(samples_seen, sum(self.shares)) if isinstance(state, CriticalState) else samples_seen

    def state(self) -> Mapping[str, object]:
        """Return the state of the batch policy for a checkpoint, as plain JSON."""
        return self._state.model_dump(mode="json")

    def resume(self, *, policy: str, shares: tuple[int, ...], state: Mapping[str, object]) -> None:
        """Restore shares and policy state of a checkpoint, if they suit this run's policy, workers and batch.

        Otherwise nothing changes, and nothing is said.

        Args:
            policy: name of the batch policy in the checkpoint.
            shares: local batch sizes in the checkpoint, in samples, in rank order.
            state: state of the policy in the checkpoint.

        Raises:
            BadInput: the batch cannot be shared out among the workers of now.
        """
        spec = self._spec
        workers = len(spec.workers)
        if policy != spec.batch_policy or (len(shares) != workers and policy != "critical"):
            return
        if policy != "rate" and (state.get("given") or sum(shares)) != spec.global_batch_size:
            return
        kind = type(self._policy.initial())
        # What another version of the policy remembered besides means nothing to this one.
        self._state = kind.model_validate({key: value for key, value in state.items() if key in kind.model_fields})
        if len(shares) != workers:  # of as large a batch, as those that are left were planned
            shares = largest_remainder(
                self.shares, sum(shares), minimum=[self._minimum] * workers, maximum=[None] * workers
            )
        self.shares = shares


LONGEST_PERIOD_S = 2.0
"""Most seconds of a control period (unless a single step takes longer), so that wishes to stop are heard in time."""

_STEPS_TO_JUDGE = 10
"""Shares are judged by this many steps, or by as many as `LONGEST_PERIOD_S` holds."""

_NOISE_EVERY = 4
"""Steps between measurements of the noise that the batch follows."""

# Products of a decimal number of epochs and a dataset size may miss the integer they mean by rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Milestones:
    """The rules for when a run ends, is evaluated and gathers its workers' figures, by steps and samples done.

    Attributes:
        stop: rule for when the run ends.
        dataset_size: number of samples of an epoch.
        global_batch_size: number of samples of a step.
        evaluate_every_epochs: epochs between evaluations.
        control_period_steps: most steps between looks at the statistics.
        behind: samples by which the progress of a batch that has grown stays behind the samples seen.
    """

    stop: StopRule
    dataset_size: int
    global_batch_size: int
    evaluate_every_epochs: float
    control_period_steps: int
    behind: float = 0.0

    def ended_by(self, step: int, samples_seen: float) -> str | None:
        """Return the limit that is reached, "steps" or "epochs", by steps done and progress in samples; None: none."""
        if self.stop.max_steps is not None and step >= self.stop.max_steps:
            return "steps"
        if self.stop.max_epochs is not None and samples_seen >= self._samples(self.stop.max_epochs):
            return "epochs"
        return None

    def steps_left(self, step: int, samples_seen: int) -> int | None:
        """Return the steps to the nearest limit, at least 1.

        None: there is no limit, or a target may end the run before.
        """
        limits = self._limits(step, samples_seen)
        return None if self.stop.target or not limits else max(1, min(limits))

    def evaluation_due(self, samples_before: int, samples_seen: int) -> bool:
        """Return whether an evaluation became due between two numbers of samples done, the second included."""
        return self._evaluations(samples_seen) > self._evaluations(samples_before)

    def all_meet(self, step: int, samples_seen: int, steps: int) -> bool:
        """Return whether the run ends or is evaluated after ``steps`` more steps, so that all workers meet anyway."""
        seen = samples_seen + steps * self.global_batch_size
        is_last = self.ended_by(step + steps, seen - self.behind) is not None
        return is_last or self.evaluation_due(samples_seen, seen)

    def period_steps(self, step: int, samples_seen: int, step_time_s: float | None) -> int:
        """Return the steps of the next control period, at least 1: 2 s at most, up to an evaluation or the end.

        Args:
            step: steps done.
            samples_seen: samples done.
            step_time_s: seconds of a recent step; None: not known, and the period has one step.
        """
        steps = 1 if step_time_s is None else self.control_period_steps
        if step_time_s is not None and steps * step_time_s > LONGEST_PERIOD_S:
            steps = int(LONGEST_PERIOD_S / step_time_s)
        next_evaluation = self._samples((self._evaluations(samples_seen) + 1) * self.evaluate_every_epochs)
        to_evaluation = self._steps_to(next_evaluation, samples_seen)
        return max(1, min(steps, to_evaluation, *self._limits(step, samples_seen)))

    def _limits(self, step: int, samples_seen: int) -> list[int]:
        """Return the steps to each limit that the run has."""
        limits = [] if self.stop.max_steps is None else [self.stop.max_steps - step]
        if self.stop.max_epochs is not None:
            limits.append(self._steps_to(self._samples(self.stop.max_epochs), samples_seen - math.floor(self.behind)))
        return limits

    def _samples(self, epochs: float) -> int:
        return math.ceil(epochs * self.dataset_size * (1 - _ROUNDING))

    def _evaluations(self, samples_seen: int) -> int:
        """Return the number of evaluation points up to a position."""
        return int(samples_seen / (self.evaluate_every_epochs * self.dataset_size) * (1 + _ROUNDING))

    def _steps_to(self, samples: int, samples_seen: int) -> int:
        return -(-(samples - samples_seen) // self.global_batch_size)


class Engine:
    """One worker's control periods: it logs its steps, then all workers gather their figures and decide alike.

    A period goes `begin`, a step and `after` until it `is_over`, `gather`; then, of the rows of all workers, `tell`,
    `steer` and `share`. What a front cannot do it does not call, or is not given: no synchroniser, nothing to steer.

    Args:
        context: context of this worker.
        exchange: settings of how gradients travel.
        balance: local batch sizes and the policy that changes them.
        stopwatch: clock of the device.
        synchroniser: brings models together that workers train for themselves; None: gradients are exchanged.
        step: number of steps done before.

    Attributes:
        step: number of steps done.
        is_over: whether the period's last step is done.
        control_s: seconds spent on control since the last ``step`` event.
        shards: layout of the model's shards; by default every worker has all of it.
        log: traces of the steps that no row tells about yet.
    """

    shards: Shards = WHOLE

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
        self._steps = self._reported_steps = self._done = 0

    def period_steps(self, steps: int) -> int:
        """Return the steps of the next control period: ``steps``, or fewer if the ratio is to be judged sooner.

        Args:
            steps: steps that the period would have otherwise.
        """
        return steps if self.exchange.steering is None else self.exchange.steering.period_steps(steps)

    def begin(self, steps: int, *, all_meet: bool = True) -> None:
        """Begin a control period of ``steps`` steps; its figures are sent before the last one unless ``all_meet``.

        A message of a few numbers takes as long as a small gradient does: where it can, it travels under the last step,
        and tells about the steps before that one.

        Args:
            steps: steps of the period, at least one.
            all_meet: whether the workers wait for each other after the last of them anyway.
        """
        self._steps, self._done = steps, 0
        self._reported_steps = steps if all_meet else max(1, steps - 1)
        self.is_over = False
        self.log.resume()

    @property
    def look_at(self) -> Sequence[float]:
        """The compression ratios at which the next step measures the gradient energy kept; empty on most steps."""
        steering = self.exchange.steering
        return steering.look_at if steering is not None and self._done + 1 == self._reported_steps else ()

    @property
    def wants_norms(self) -> bool:
        """Whether the next step is to measure its gradient's norms, in a few steps of a control period.

        Only gradients that are summed uncompressed, of a model that is not sharded, have norms; those of a worker alone
        are measured where the batch follows the noise.
        """
        is_dense = self.exchange.is_dense and self.shards.devices == 1
        is_known = self.context.world_size > 1 or self.balance.worth is not None
        summed_whole = is_dense and self.synchroniser is None and is_known
        left = self._reported_steps - self._done - 1
        every = self._reported_steps if self.balance.worth is None else _NOISE_EVERY
        return summed_whole and left >= 0 and left % every == 0

    def after(self, trace: StepTrace, samples: Sequence[int], *, counts: bool = True) -> None:
        """Log a step that every worker has made, and average parameters where local SGD is due; every worker calls it.

        Args:
            trace: measurements of the step.
            samples: samples of the step of every worker, in rank order.
            counts: whether the step is like others; if not, its times are left out.
        """
        self.step += 1
        self.balance.batches_per_step = self.balance.batches_per_step or max(
            self.context.spec.batches_per_step, round(sum(samples) / sum(self.balance.shares))
        )
        if self.synchroniser is not None and self.synchroniser.is_begun:
            trace = self.synchroniser.after(self.step, trace, samples)
        if counts:
            self.log.add(replace(trace, loss_sum=trace.loss_sum / max(1, sum(samples))))
        else:
            self.log.resume()
        self._done += 1
        self.is_over = self._done == self._steps

    def gather(self, **reported: float) -> Gathering:
        """Start the all-gather of figures on this worker's steps since the last call, at least one.

        Every worker must call it.

        Args:
            **reported: further fields of this worker's row (see `PeriodLog.close`).
        """
        begun_s = self.context.clock()
        steering = self.exchange.steering
        row = self.log.close(
            way=self.exchange.way,
            averages=steering is not None and steering.candidate.averages,
            dense_bytes=self.exchange.dense_bytes,
            looks=0 if steering is None else len(steering.looks),
            **reported,
        )
        *numbers, looked = vars(row).values()
        gathering = Gathering([*numbers, *looked], self.context.world_size)
        self.control_s += self.context.clock() - begun_s
        self.log.resume()
        return gathering

    def read(self, gathering: Gathering) -> Period:
        """Wait for all workers' rows, and return the control period that they describe."""
        return Period.of(
            gathering.wait(),
            local_batch_sizes=self.balance.shares,
            samples=self.balance.shares_of_step,
            devices=self.shards.devices,
        )

    def tell(self, period: Period, *, epoch: float, samples_seen: int, **more: Any) -> None:
        """Write the ``step`` event of a period to the run's log, with the fields ``more``.

        Args:
            period: control period that was read last.
            epoch: passes over the data completed, with fractions.
            samples_seen: samples of all workers in all steps.
            **more: further fields of the event.
        """
        step, noise = self.step - self.log.unread, period.noise
        self.context.events.write(
            "step",
            **period.event(step=step, epoch=epoch, samples_seen=samples_seen),
            control_s=round(self.control_s / period.steps, 7),
            **self.exchange.event(period),
            **({} if noise is None else {"noise": vars(noise)}),
            **({} if self.synchroniser is None else self.synchroniser.event(step)),
            **more,
        )
        self.control_s = 0.0

    def steer(self, period: Period, *, epoch: float, learning_rate: float, steps_left: int | None) -> None:
        """Decide by a control period how gradients are exchanged, and log a change; without a policy do nothing.

        Args:
            period: control period that was read last.
            epoch: passes over the data completed, with fractions.
            learning_rate: learning rate of the first parameter group.
            steps_left: steps until training ends by its own rules; None: not known.
        """
        steering = self.exchange.steering
        if steering is None:
            return
        change = steering.judge(period, step=self.step, epoch=epoch, learning_rate=learning_rate, steps_left=steps_left)
        if change is not None:
            self.exchange.follow()
            if self.synchroniser is not None and not steering.candidate.averages:
                self.synchroniser.end()
            self.context.events.write("exchange_changed", step=self.step, **change)

    def share(self, period: Period, epoch: int, samples_seen: int = 0) -> bool:
        """Judge local batch sizes by a period if it is time to; log a change; return whether the next step has others.

        Args:
            period: control period that was read last.
            epoch: number of completed epochs.
            samples_seen: samples of all workers in all steps.

        Raises:
            BadInput: the local batch sizes that the policy wants cannot be within the workers' memory.
        """
        if not self.balance.is_due(period):
            return False
        change = self.balance.judge(period, epoch, samples_seen)
        self.log.judged(changed=change is not None)
        if change is None:
            return False
        self.context.events.write("shares_changed", step=self.step, **change)
        return True


def announce(
    context: WorkerContext, model: nn.Module, exchange: ExchangeConfig, *, shares: Sequence[int], step: int
) -> None:
    """Log ``run_started`` with the names of all workers' devices, then ``network_measured`` if it was; collective.

    Args:
        context: context of this worker.
        model: model that is trained.
        exchange: settings of how its gradients travel.
        shares: samples of each worker in the first step, in rank order.
        step: number of steps done by earlier attempts.
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
        global_batch_size=sum(shares),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        gradient_bytes=exchange.dense_bytes,
        compression=spec.compression.model_dump(),
        ratio_policy=spec.ratio_policy,
        collective_policy=spec.collective_policy,
        **({"sync": spec.sync.model_dump()} if spec.is_local else {}),
        **({} if spec.partition.name == "global" else {"partition": spec.partition.model_dump()}),
        resumed_step=step,
    )
    if exchange.timings:
        hop = Network.of(exchange.timings, context.world_size).hop
        context.events.write(
            "network_measured",
            step=step,
            latency_s=round(hop.latency_s, 7),
            bytes_per_s=round(hop.bytes_per_s),
            measured_s=round(exchange.measured_s, 3),
            timings=[
                {
                    "collective": timed.primitive,
                    "payload_bytes": timed.payload_bytes,
                    "time_s": round(timed.time_s, 7),
                }
                for timed in exchange.timings
            ],
        )
