"""Averages the parameters of workers that train for themselves, whenever the policy of the run says so.

The published order: the local step first, then the vote, then the average. With ``vote_lag`` 1 the votes of a step
travel while the next is computed, and what they ask for is done after that one: no step waits for a message of a few
bytes, nor, by that, for the slowest worker of each single step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hetopt.core.events.log import Event
from hetopt.core.run_spec import Compression
from hetopt.core.synchronization import Synchronization
from hetopt.trainer.agreement import Gathering
from hetopt.trainer.comm.channel import Channel, Message
from hetopt.trainer.comm.exchange import ExchangeStats, RoundedSum, average_parameters, weights_by_samples
from hetopt.trainer.policies.sync.policy import SyncDecision, SyncPolicy
from hetopt.trainer.policies.sync.selsync import GradientChange, SelSync
from hetopt.trainer.steps.step import StepTrace
from hetopt.trainer.sync.synchroniser import Own, Synchronizer, Told

VOTE_BYTES = 8


class ParameterSync(Synchronizer):
    """One worker's end of local training (see `Synchronizer`)."""

    def __init__(self, own: Own, *, sync: Synchronization, policy: SyncPolicy[Any], compression: Compression) -> None:
        super().__init__(own, sync.name, sync=sync, policy=policy)
        self._rounded = RoundedSum.of(compression, self._vector.parameters, device=self._base.device)
        self._local_steps = 0
        self._change = GradientChange(smoothing=sync.smoothing)
        self._votes: Gathering | None = None

    def after(self, step: int, trace: StepTrace, samples: Sequence[int]) -> StepTrace:
        """Vote, and average if it is time to (see `Synchronizer`)."""
        self._count(samples)
        self._local_steps += 1
        decision = self._decide(step, self._local_steps, self._voted(trace))
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
        """As of `Synchronizer`, and the threshold of votes where it is steered."""
        told = super().event(step)
        if told and isinstance(self._policy, SelSync) and self._sync.delta == "auto":
            threshold = self._policy.threshold(self._state)  # type: ignore[arg-type]  # its own state
            told["sync"]["delta"] = None if threshold is None else round(threshold, 9)
        return told

    def state(self) -> dict[str, Any]:
        """As of `Synchronizer`, with what this worker holds back, and its votes."""
        return {
            **super().state(),
            "held_back": {} if self._rounded is None else self._rounded.residual.state(),
            "local_steps": self._local_steps,
            "mean": self._change.mean,
            "change": self._change.change,
            "votes": None if self._votes is None else self._votes.wait(),
        }

    def _go_on(self, state: Mapping[str, Any]) -> None:
        if self._rounded is not None:
            self._rounded.residual.load_state(state["held_back"])
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
