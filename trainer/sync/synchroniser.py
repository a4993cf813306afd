"""What a run whose workers train for themselves needs of whoever brings their models together, and what these share.

What becomes of an average: taken as it is, or stepped towards as an optimizer would (DiLoCo, arXiv 2311.08105).

The averaged update ``u`` of all workers, mean minus the last common parameters ``x``, is taken as a gradient of its
own, downhill. With the rate ``r`` and Nesterov's momentum ``m``::

    v <- m v + u
    x <- x + r (u + m v)

With ``r`` 1 and ``m`` 0 that is the average: local SGD. Every worker does the same to the same numbers, so that nothing
more is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.optim import Optimizer

from hetopt.core.artifact import Record
from hetopt.core.errors import BadInput
from hetopt.core.events.log import Event
from hetopt.core.synchronization import Synchronization
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.policies.sync.policy import SyncDecision, SyncObservation, SyncPolicy
from hetopt.trainer.steps.step import StepTrace
from hetopt.trainer.steps.stopwatch import Stopwatch


class ModelVector:
    """Reads a model into a flat fp32 vector, and writes it back.

    Args:
        model: parameters that are not trained, and counters, stay out of it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._buffers = [b for b in model.buffers() if b.is_floating_point() and b.numel()]
        self._tensors = [*self._parameters, *self._buffers]
        self.parameters = sum(p.numel() for p in self._parameters)
        """Elements that are parameters; the first ones."""
        self._own: Tensor | None = None
        self.elements = sum(tensor.numel() for tensor in self._tensors)

    def read(self, begin: int = 0, end: int | None = None) -> Tensor:
        """A copy of the elements from ``begin`` to ``end``; absent: all, [elements]."""
        with torch.no_grad():
            spans = self._spans(begin, self.elements if end is None else end)
            return torch.cat([tensor.detach().reshape(-1)[span].float() for tensor, span in spans])

    def write(self, flat: Tensor, *, begin: int = 0) -> None:
        """Make the model what ``flat`` is, from its element ``begin`` on.

        Args:
            flat: 1-D, as long as what is to be changed.
            begin: where in the model it begins.
        """
        spans = list(self._spans(begin, begin + flat.numel()))
        with torch.no_grad():
            parts = torch.split(flat, [span.stop - span.start for _, span in spans])
            for (tensor, span), part in zip(spans, parts, strict=True):
                if part.numel() == tensor.numel():
                    tensor.copy_(part.view(tensor.shape))
                elif tensor.is_contiguous():
                    tensor.view(-1)[span].copy_(part)
                else:
                    whole = tensor.reshape(-1)
                    whole[span] = part.to(whole)
                    tensor.copy_(whole.view(tensor.shape))

    @contextmanager
    def replaced_by(self, flat: Tensor) -> Iterator[None]:
        """The model is ``flat`` inside, and what it was again afterwards."""
        self._own = self.read()
        self.write(flat)
        try:
            yield
        finally:
            self.write(self._own)
            self._own = None

    @property
    def is_replaced(self) -> bool:
        """Whether something else is in its place."""
        return self._own is not None

    def own(self) -> Tensor:
        """The model itself, whatever is in its place, [elements]."""
        return self.read() if self._own is None else self._own

    def _spans(self, begin: int, end: int) -> Iterator[tuple[Tensor, slice]]:
        """Tensors that have elements between two places, and which of theirs."""
        start = 0
        for tensor in self._tensors:
            low, high = max(begin - start, 0), min(end - start, tensor.numel())
            if low < high:
                yield tensor, slice(low, high)
            start += tensor.numel()


class OuterStep:
    """Turns averaged updates into outer steps, and remembers its momentum.

    Args:
        parameters: elements that are stepped; running statistics behind them are averaged as they are.
        rate: of the outer step.
        momentum: of the outer step, in [0, 1).
        like: a tensor of the device and type that updates have.
    """

    def __init__(self, parameters: int, *, rate: float, momentum: float, like: Tensor) -> None:
        self._rate, self._momentum = rate, momentum
        self._velocity = like.new_zeros(parameters if momentum else 0)
        self._parameters = parameters

    def take(self, update: Tensor, begin: int = 0) -> None:
        """Make of an averaged update, in place, what is added to the last common parameters.

        Args:
            update: 1-D, of the elements from ``begin`` on.
            begin: where in the model it begins.
        """
        own = update[: max(0, self._parameters - begin)]
        if self._momentum:
            velocity = self._velocity[begin : begin + own.numel()]
            velocity.mul_(self._momentum).add_(own)
            own.add_(velocity, alpha=self._momentum)
        if self._rate != 1:
            own.mul_(self._rate)

    def state(self) -> Tensor:
        """Its momentum, [parameters], or nothing where it has none."""
        return self._velocity

    def load_state(self, velocity: Tensor) -> None:
        """Go on with a momentum that was kept."""
        self._velocity.copy_(velocity)


@dataclass(frozen=True, kw_only=True)
class Told:
    """One step, for the event log. ``divergence``: None where nothing was averaged in it."""

    step: int
    sent_bytes: int = 0
    divergence: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Own:
    """What is averaged of one worker, and by what means.

    Attributes:
        model: this worker's; now the same on all of them.
        optimizer: whose momentum is this worker's own.
        channel: makes one, to the other workers.
        stopwatch: of the device.
    """

    model: nn.Module
    optimizer: Optimizer
    channel: Callable[[], Channel]
    stopwatch: Stopwatch


class Synchronizer:
    """Brings the models together of workers that train for themselves: one worker's end of averages of parameters.

    Asked after every step, on every rank, in the same order as everything else that workers do together.

    Args:
        own: of this worker.
        name: in checkpoints, which are gone on from under the same one.
        sync: what happens at an average.
        policy: says when.
    """

    def __init__(self, own: Own, name: str, *, sync: Synchronization, policy: SyncPolicy[Any]) -> None:
        self._name = name
        self._sync = sync
        self._policy = policy
        self._state: Record = policy.initial()
        self._optimizer = own.optimizer
        self._vector = ModelVector(own.model)
        self._base = self._vector.read()
        self._outer = OuterStep(
            self._vector.parameters, rate=sync.outer_rate, momentum=sync.outer_momentum, like=self._base
        )
        self._channel = own.channel
        self._stopwatch = own.stopwatch
        self._workers, self._rank = (c := own.channel()).workers, c.rank
        self._samples: tuple[int, ...] = (0,) * self._workers
        self._told: deque[Told] = deque()

    def after(self, step: int, trace: StepTrace, samples: Sequence[int]) -> StepTrace:
        """Bring the models together if it is time to, after this worker's optimizer has done a step.

        Args:
            step: its number, from 1.
            trace: of the step.
            samples: of the step, of each worker, in rank order.

        Returns:
            The trace, with what was sent and how long that took.
        """
        raise NotImplementedError

    def averaged(self) -> AbstractContextManager[None]:
        """Make the model the average of all workers' inside, and this worker's again afterwards. May be nested."""
        raise NotImplementedError

    def _count(self, samples: Sequence[int]) -> None:
        self._samples = tuple(before + now for before, now in zip(self._samples, samples, strict=True))

    def _decide(self, step: int, local_steps: int, changes: tuple[float, ...] | None = None) -> SyncDecision:
        """Ask the policy, after so many steps without an average."""
        rate = float(self._optimizer.param_groups[0]["lr"])
        seen = SyncObservation(step=step, local_steps=local_steps, changes=changes, learning_rate=rate)
        self._state, decision = self._policy.decide(self._state, seen)
        return decision

    def event(self, step: int) -> Event:
        """Return how many steps averaged, what was sent, and how far workers had come apart, since the last call."""
        told: list[Told] = []
        while self._told and self._told[0].step <= step:
            told.append(self._told.popleft())
        if not told:
            return {}
        divergences = [one.divergence for one in told if one.divergence is not None]
        synchronised = self._averages(len(divergences))
        found: Event = {
            "policy": self._sync.name,
            "synchronised": synchronised,
            "local": len(told) - synchronised,
            "sent_bytes": sum(one.sent_bytes for one in told),
        }
        if divergences:
            found["divergence"] = round(sum(divergences) / len(divergences), 9)
        return {"sync": found}

    def _averages(self, steps: int) -> int:
        """How many averages so many steps are that took one in."""
        return steps

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: this worker's model and optimizer, and what everyone knows."""
        return {
            "policy": self._name,
            "policy_state": self._state.model_dump(mode="json"),
            "own": self._vector.own(),
            "base": self._base,
            "outer": self._outer.state(),
            "optimizer": self._optimizer.state_dict(),
            "samples": list(self._samples),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state` gave; with another policy, from the average.

        Raises:
            BadInput: it is damaged, or of another model.
        """
        self._base = self._vector.read()
        if state.get("policy") != self._name:
            return
        try:
            self._state = type(self._policy.initial()).model_validate(state["policy_state"])
            self._vector.write(state["own"].to(self._base))
            self._base = state["base"].to(self._base)
            self._outer.load_state(state["outer"])
            self._optimizer.load_state_dict(state["optimizer"])
            self._samples = tuple(int(count) for count in state["samples"])
            self._go_on(state)
        except (ValidationError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):
            raise BadInput(
                "the checkpoint's state of a local SGD worker is damaged.", hint="use an older checkpoint"
            ) from None

    def _go_on(self, state: Mapping[str, Any]) -> None:
        """Take over the rest of what `state` gave."""
        raise NotImplementedError
