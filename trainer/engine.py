"""The engine: the training step, and the control period of some steps after which all workers decide alike.

Two fronts drive it. A task's loop has `train_step` (`hetopt.trainer.training`) do whole steps: the feed gives samples,
and `hetopt.trainer.steps` computes their gradient and sums it. A script drives it by what it does anyway: a session
(`hetopt.trainer.session`) is the script-driven front of the same engine. Its backward passes sum gradients by the same
exchange, and each step that the script has done goes through the same `Engine.after`, `gather`, `tell`, `steer` and
`share` as a task's.

Inside a period the only communication is the gradient's. At its end one row of numbers of each worker is gathered;
every rank reads the same rows, and so concludes the same.

With the first events of a run: what is trained, on whom, and over which network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hetopt.core.events.log import Event
from hetopt.core.run_spec import RunSpec
from hetopt.trainer.agreement import Gathering, gather_numbers, gather_texts
from hetopt.trainer.balance import Balance
from hetopt.trainer.comm.network import Network
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.statistics import Period, PeriodLog
from hetopt.trainer.steps.exchange_assembly import ExchangeConfig
from hetopt.trainer.steps.step import StepTrace
from hetopt.trainer.steps.stopwatch import Stopwatch
from hetopt.trainer.sync.synchroniser import Synchronizer


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
        row, begun_s = self.row(**told), self.context.clock()
        gathering = Gathering(row, self.context.world_size)
        self.control_s += self.context.clock() - begun_s
        self.log.resume()
        return gathering

    def row(self, **told: Any) -> list[float]:
        """This worker's row, for whoever sends it with something else.

        Args:
            told: as of `gather`.
        """
        begun_s = self.context.clock()
        steering = self.exchange.steering
        traffic = self.log.traffic(
            way=self.exchange.way,
            dense_bytes=self.exchange.dense_bytes,
            looks=0 if steering is None else len(steering.looks),
        )
        row = [*self.log.close(**told).to_list(), *traffic.to_list()]
        self.control_s += self.context.clock() - begun_s
        self.log.resume()
        return row

    def read(self, gathering: Gathering) -> Period:
        """What the workers' rows tell of the period; waits for them."""
        return self.period_of(gathering.wait())

    def period_of(self, rows: Sequence[Sequence[float]]) -> Period:
        """The same of rows that are there, in rank order."""
        return Period.of(rows, local_batch_sizes=self.balance.shares)

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
