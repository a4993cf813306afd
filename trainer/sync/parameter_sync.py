"""Averages the parameters of workers that train for themselves, whenever the policy of the run says so.

The published order: the local step first, then the vote, then the average. With ``vote_lag`` 1 the votes of a step
travel while the next is computed, and what they ask for is done after that one: no step waits for a message of a few
bytes, nor, by that, for the slowest worker of each single step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hetopt.core.artifact import Record
from hetopt.core.events.log import Event
from hetopt.core.run_spec import Compression
from hetopt.core.synchronization import Synchronization
from hetopt.trainer.agreement import Gathering
from hetopt.trainer.comm.channel import Channel, Message
from hetopt.trainer.comm.exchange import ExchangeStats
from hetopt.trainer.comm.parameter_average import RoundedSum, average_parameters, weights_by_samples
from hetopt.trainer.policies.sync.gradient_change import GradientChange
from hetopt.trainer.policies.sync.policy import SyncDecision, SyncObservation, SyncPolicy
from hetopt.trainer.policies.sync.selsync import SelSync
from hetopt.trainer.steps.step import StepTrace
from hetopt.trainer.steps.stopwatch import Stopwatch
from hetopt.trainer.sync.model_vector import ModelVector
from hetopt.trainer.sync.outer_step import OuterStep
from hetopt.trainer.sync.synchroniser import own_state

VOTE_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Told:
    """One step, for the event log. ``divergence``: None where it did not synchronise."""

    step: int
    sent_bytes: int
    divergence: float | None = None


class ParameterSync:
    """One worker's end of local training (see `Synchronizer`).

    Args:
        sync: what happens at a synchronisation.
        policy: says when.
        model: this worker's; now the same on all of them.
        optimizer: whose momentum is this worker's own.
        compression: how averages are rounded.
        channel: makes one, to the other workers.
        stopwatch: of the device.
    """

    def __init__(
        self,
        *,
        sync: Synchronization,
        policy: SyncPolicy[Any],
        model: nn.Module,
        optimizer: Optimizer,
        compression: Compression,
        channel: Callable[[], Channel],
        stopwatch: Stopwatch,
    ) -> None:
        self._sync = sync
        self._policy = policy
        self._state: Record = policy.initial()
        self._optimizer = optimizer
        self._vector = ModelVector(model)
        self._base = self._vector.read()
        self._rounded = (
            None
            if compression.name == "identity"
            else RoundedSum(compression, self._vector.parameters, device=self._base.device)
        )
        self._outer = OuterStep(
            self._vector.parameters, rate=sync.outer_rate, momentum=sync.outer_momentum, like=self._base
        )
        self._channel = channel
        self._stopwatch = stopwatch
        self._workers, self._rank = (c := channel()).workers, c.rank
        self._samples = (0,) * self._workers
        self._local_steps = 0
        self._change = GradientChange(smoothing=sync.smoothing)
        self._votes: Gathering | None = None
        self._told: deque[Told] = deque()

    def after(self, step: int, trace: StepTrace, samples: Sequence[int]) -> StepTrace:
        """Vote, and average if it is time to (see `Synchronizer`)."""
        self._samples = tuple(before + now for before, now in zip(self._samples, samples, strict=True))
        self._local_steps += 1
        changes = self._voted(trace)
        self._state, decision = self._policy.decide(
            self._state,
            SyncObservation(
                step=step,
                local_steps=self._local_steps,
                changes=changes,
                learning_rate=float(self._optimizer.param_groups[0]["lr"]),
            ),
        )
        sent_bytes = VOTE_BYTES if self._policy.votes else 0
        messages: tuple[Message, ...] = ()
        sync_s, work_s, divergence = 0.0, 0.0, None
        if decision.synchronise:
            channel = self._channel()
            begun_s = channel.now()
            divergence = self._synchronise(channel, decision)
            messages = tuple(channel.messages)
            sync_s = sum(message.time_s for message in messages)
            work_s = channel.now() - begun_s - sync_s
            sent_bytes += sum(message.payload_bytes for message in messages)
        self._told.append(Told(step=step, sent_bytes=sent_bytes, divergence=divergence))
        stats = ExchangeStats(sent_bytes=sent_bytes, compress_s=work_s, sync_s=sync_s, messages=messages)
        return replace(trace, reduce_end=self._stopwatch.mark(), exchange=stats)

    def _voted(self, trace: StepTrace) -> tuple[float, ...] | None:
        """How much the workers' gradients changed, as far as that has arrived; this one's own is sent on its way."""
        if not self._policy.votes:
            return None
        assert trace.gradient_energy is not None
        self._change = self._change.after(trace.gradient_energy)
        arrived, now = self._votes, Gathering([self._change.change], self._workers)
        if self._sync.vote_lag == 0:
            return tuple(row[0] for row in now.wait())
        rows = None if arrived is None else arrived.wait()
        self._votes = now
        return None if rows is None else tuple(row[0] for row in rows)

    def _synchronise(self, channel: Channel, decision: SyncDecision) -> float:
        """Average; how far the workers had come apart."""
        own, keeps = self._vector.read(), self._sync.buffers == "keep"
        weight = weights_by_samples(self._samples, decision.participants)[channel.rank]
        count = self._vector.parameters if keeps else own.numel()
        divergence = average_parameters(
            own[:count], self._base[:count], weight, channel, self._rounded, step=self._outer.take
        )
        self._vector.write(own)
        if self._sync.momentum != "keep":
            self._settle_momentum(weight, channel)
        self._samples, self._local_steps = (0,) * self._workers, 0
        return divergence

    def _settle_momentum(self, weight: float, channel: Channel) -> None:
        """Average what the optimizer keeps of each parameter, or forget it."""
        kept = [
            value
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            for value in self._optimizer.state[parameter].values()
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point()
        ]
        if not kept:
            return
        with torch.no_grad():
            flat = torch.cat([value.reshape(-1).float() for value in kept]).mul_(weight)
            if self._sync.momentum == "average":
                channel.all_reduce(flat)
            else:
                flat.zero_()
            for value, part in zip(kept, torch.split(flat, [value.numel() for value in kept]), strict=True):
                value.copy_(part.view(value.shape))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The average of all workers' models, running statistics included (see `Synchronizer`)."""
        is_settled = self._local_steps == 0 and self._sync.buffers == "average" and self._rounded is None
        if self._vector.is_replaced or is_settled:
            yield
            return
        samples = self._samples if self._local_steps else (1,) * self._workers
        mean, base = self._vector.read(), self._base.clone()
        weight = weights_by_samples(samples)[self._rank]
        average_parameters(mean, base, weight, self._channel(), self._rounded, exactly=True)
        with self._vector.replaced_by(mean):
            yield

    def event(self, step: int) -> Event:
        """How many steps synchronised, what was sent, and how far workers had come apart (see `Synchronizer`)."""
        told: list[Told] = []
        while self._told and self._told[0].step <= step:
            told.append(self._told.popleft())
        if not told:
            return {}
        divergences = [one.divergence for one in told if one.divergence is not None]
        found: Event = {
            "policy": self._sync.name,
            "synchronised": len(divergences),
            "local": len(told) - len(divergences),
            "sent_bytes": sum(one.sent_bytes for one in told),
        }
        if divergences:
            found["divergence"] = round(sum(divergences) / len(divergences), 9)
        if isinstance(self._policy, SelSync) and self._sync.delta == "auto":
            threshold = self._policy.threshold(self._state)  # type: ignore[arg-type]  # its own state
            found["delta"] = None if threshold is None else round(threshold, 9)
        return {"sync": found}

    def state(self) -> dict[str, Any]:
        """This worker's model and optimizer, and what everyone knows (see `Synchronizer`)."""
        rows = None if self._votes is None else self._votes.wait()
        return {
            "policy": self._sync.name,
            "policy_state": self._state.model_dump(mode="json"),
            "own": self._vector.own(),
            "base": self._base,
            "held_back": {} if self._rounded is None else self._rounded.residual.state(),
            "outer": self._outer.state(),
            "optimizer": self._optimizer.state_dict(),
            "samples": list(self._samples),
            "local_steps": self._local_steps,
            "mean": self._change.mean,
            "change": self._change.change,
            "votes": rows,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on as this worker; with another policy, from the average (see `Synchronizer`)."""
        self._base = self._vector.read()
        if state.get("policy") != self._sync.name:
            return
        with own_state():
            self._state = type(self._policy.initial()).model_validate(state["policy_state"])
            self._vector.write(state["own"].to(self._base))
            self._base = state["base"].to(self._base)
            if self._rounded is not None:
                self._rounded.residual.load_state(state["held_back"])
            self._outer.load_state(state["outer"])
            self._optimizer.load_state_dict(state["optimizer"])
            self._samples = tuple(int(count) for count in state["samples"])
            self._local_steps = int(state["local_steps"])
            self._change = replace(self._change, mean=state["mean"], change=float(state["change"]))
            self._votes = None if state["votes"] is None else _Arrived(state["votes"])


class _Arrived(Gathering):
    """Rows that a checkpoint kept."""

    def __init__(self, rows: list[list[float]]) -> None:
        super().__init__(rows[0], 1)
        self._kept = rows

    def wait(self) -> list[list[float]]:
        """The rows that the checkpoint kept; there is nothing to wait for."""
        return self._kept
