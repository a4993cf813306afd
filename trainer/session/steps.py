"""Backward passes and optimizer steps of a session: gradients are those of all workers before an optimizer steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hetopt.core.errors import BadInput
from hetopt.trainer.agreement import sum_numbers
from hetopt.trainer.comm.vectors import energy
from hetopt.trainer.script.batches import Part
from hetopt.trainer.session.flow import BatchFlow, Side
from hetopt.trainer.session.gradients import GradientSum, named_parameters
from hetopt.trainer.session.guards import check_replicas, replica_marks
from hetopt.trainer.session.weights import Counts, Weight
from hetopt.trainer.statistics import parameters_of
from hetopt.trainer.steps.slowdown import FORWARD

CHECKED_STEPS = 20
"""Steps of an optimizer between comparisons of the replicas; of the first it compares 1, 2, 4, 8 and 16."""

_RIDES = 1
"""Marks the word of a worker whose gradient travels with it."""


class GradientFlow(BatchFlow):
    """Where a session meets backward passes and optimizers."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], **options: Any) -> None:
        super().__init__(model, optimizers, **options)
        self._stepping: Optimizer | None = None  # of the session
        # Of the loss that was computed last: what it is of, what those of all workers are, and how much it counts.
        self._own, self._totals, self._weight = Counts(), Counts(), 1.0
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def backward(
        self, loss: Tensor, *, weight: Weight | None = None, gradient: Tensor | None = None, **options: Any
    ) -> None:
        """Call ``loss.backward()``, and leave the gradient of all workers in ``.grad``: clip it or step as before.

        With ``accumulate=k`` gradients are exchanged at every k-th call, and at the last batch of an epoch; until then
        ``.grad`` holds what this worker has so far. Workers that train for themselves (``sync``) keep their own.

        A worker's loss counts by its samples of the batch; that of one cross entropy by its targets.

        Args:
            loss: of this worker's part, a scalar; scaled where a GradScaler is used.
            weight: what this worker's loss is a mean over, if not its samples (tokens, boxes); or ``"sum"``: the losses
                of the workers' parts add up to that of the batch.
            gradient: as of ``Tensor.backward``; a scalar, by which the loss is multiplied.
            options: ``retain_graph``, ``create_graph`` and ``inputs``, as of ``Tensor.backward``.

        Raises:
            BadInput: the loss is no scalar, or the samples did not come from `loader` or `split`.
            RunFailed: the workers are at different points of the script.
        """
        if loss.dim() != 0:
            raise BadInput(
                f"The loss has shape {tuple(loss.shape)}; it must be a scalar.",
                hint="return the mean over the samples of the batch",
            )
        loss = loss if gradient is None else loss * gradient.detach()
        part = self._take_part()
        for side in self._sides:
            self._follow(side)
        if part is not None and self._is_joint:
            self._backward_jointly(loss, part, weight, options)
            return
        is_shared = part is not None and self.world_size > 1
        if is_shared and part is not None and isinstance(weight, str) and part.samples:
            loss = loss * (part.batch / part.samples)
        torch.autograd.backward(loss, **options)
        self._note_computed()
        self._complete(loss, part.weight if is_shared and part is not None else 1.0, part, self._sides)

    def _backward_jointly(self, loss: Tensor, part: Part, weight: Weight | None, options: dict[str, Any]) -> None:
        """Call backward, and sum gradients that are complete: in this worker's word, under backward, or after it.

        The word is sent before backward where gradients, or rows of the whole batch, travel meanwhile; after it where
        it carries the gradient, or tells which of several optimizers' parameters got one.
        """
        gate, whole, sides = self._gate, self._whole, self._sides
        self._own = self._counts(part, loss, weight)
        is_complete = len(sides) == 1 and self._completes(sides[0], part) and not part.is_audit
        only = sides[0].sum if is_complete else None
        rides = only is not None and sides[0].backwards == 0 and only.is_clear and not whole.groups
        rides = rides and only is not None and 0 < only.room <= gate.room
        if whole.groups or (len(sides) == 1 and not rides):
            gate.begin("summed gradients", self._newest, self._own)
        if whole.groups:
            whole.weight = self._weigh()
        if only is not None and not rides:
            only.expect(self._weigh, self._reach)
        try:
            torch.autograd.backward(loss, **options)
        finally:
            whole.weight = None
        self._note_computed()
        begun_s = time.perf_counter()
        if rides and only is not None:
            only.pack(gate.load[: only.room], self._own.own)
            gate.begin("summed gradients", self._newest, self._own, mark=_RIDES)
        elif len(sides) > 1:
            made = [float(side.is_trained and side.sum is not None and side.sum.is_made) for side in sides]
            gate.begin("summed gradients", self._newest, [*self._own, *made])
        own, totals, reached = self._weigh(), self._totals, sides
        if rides and only is not None and not totals.is_mixed:  # else weighed by what all have: their samples
            only.unpack(gate.loaded[: only.room], totals.total, time.perf_counter() - begun_s)
        if len(sides) > 1:
            workers = gate.finish()[len(self._own) :]
            reached = [side for side, number in zip(sides, workers, strict=False) if number]
        self._complete(loss, own, part, reached)

    def _counts(self, part: Part, loss: Tensor | None, weight: Weight | None) -> Counts:
        """Return what this worker's loss is of; in an audit those of the shares add up to the batch's."""
        return Counts() if part.is_audit and self.rank == 0 else Counts.of(part.samples, loss, weight)

    def _weigh(self) -> float:
        """Return how much this worker's loss counts, once all workers have said what theirs are of."""
        self._totals, part = Counts(*self._gate.finish()[: len(self._own)]), self._part
        is_whole = part is not None and part.is_audit and self.rank == 0
        self._weight = 1.0 if is_whole else self._own.weight(self._totals)
        return self._weight

    def _complete(self, loss: Tensor, own: float, part: Part | None, reached: Sequence[Side]) -> None:
        """Sum the gradients that a backward pass completed, and hold the others, of a loss with such a weight.

        Each loss costs the exchange of what its step needs: of a generator's loss also the discriminator's part, unless
        its parameters are frozen meanwhile or left out (``inputs``), as it is what ``.grad`` has then.

        Args:
            loss: of this worker's part.
            own: its weight.
            part: of the batch.
            reached: optimizers of whose parameters gradients were made, on any worker.
        """
        self._note_loss(loss, own)
        ready = [side for side in reached if self._completes(side, part)]
        for side in self._sides:
            side.backwards += side in reached
            if side.sum is not None and side.is_trained and side not in ready:
                side.sum.hold(own) if side in reached else side.sum.put_back()
        if ready:
            self._sum_sides(ready, own, part)

    def _sum_sides(self, sides: Sequence[Side], own: float, part: Part | None, held: Sequence[Side] = ()) -> None:
        """Sum gradients, of which those that were held are weighed already; then a step is done."""
        engine = self._periods.engine
        if self._periods.computed is None and engine is not None:
            self._periods.computed = self._periods.stopwatch.mark()
        look_at = () if engine is None else engine.look_at
        for side in sides:
            side.is_summed = True
            if side.sum is None:
                continue
            if side in held:
                side.sum.begin()
            if part is not None and part.is_audit:
                self._audit_step(side.sum, own)
            else:
                side.sum.sum(0.0 if side in held else own, self._scaler, look_at=look_at)
            self._stats += [] if side.sum.stats is None else [side.sum.stats]
        self._end_sum()

    def _audit_step(self, gradient: GradientSum, own: float) -> None:
        """Take the leader's gradient of the whole batch, and note how far that of the shares is from it."""
        step, events = self._gate.step + 1, self._periods.events
        with self._gate.watch():
            found = gradient.audit(own, is_leader=self.rank == 0, draws=self._draws())
        said = self._audit.add(found, step)
        if math.isfinite(found.distance):  # a step whose gradient overflows is no measurement
            events.write("audited", step=step, distance=found.distance, tolerance=self._audit.tolerance)
        if said is not None and self.rank == 0:
            events.write("audit_differs", step=step, reason=said)

    def _completes(self, side: Side, part: Part | None) -> bool:
        """Return whether one more backward pass completes a step of an optimizer."""
        return side.backwards + 1 >= self.accumulate or (part is not None and part.is_last)

    def _follow(self, side: Side) -> None:
        """Make way for a backward pass; the optimizer's parameters may be others than in the step before."""
        if side.sum is None:
            return
        named = named_parameters(side.optimizer, self._names)
        side.is_trained = bool(named) or len(self._sides) == 1
        if not side.is_trained:  # frozen, as a discriminator while its generator learns
            return
        if side.sum.follow(named):
            self._exchange = self._exchange_of_all()
            self._gate.trained = sum(one.numel() for _, one in self._trained)
            if self._periods.engine is not None:
                self._periods.engine.exchange = self._exchange
        is_audit = self._part is not None and self._part.is_audit
        side.sum.begin((self.world_size - 1 if self.rank else 1) if is_audit else None)

    def _reach(self, done: float) -> None:
        """Where this worker is slowed down, wait until this part of the gradient would have been made."""
        if self._periods.pace.waits:
            self._periods.pace.reach(FORWARD + (1 - FORWARD) * done)

    def _note_computed(self) -> None:
        """This worker has computed: what comes until the sum is the wait for the others."""
        self._periods.pace.reach(1.0)
        self._waited_s = self._gate.waited_s + self._whole.waited_s
        if self._periods.engine is not None:
            self._periods.computed = self._periods.stopwatch.mark()

    def sync(self, *, weight: Weight | None = None) -> None:
        """Sum the gradients of all workers now; for loops that call ``loss.backward()`` themselves, before clipping.

        Args:
            weight: what the loss was a mean over on this worker, or ``"sum"`` (see `backward`); None: its samples.

        Raises:
            RunFailed: the workers are at different points of the script.
        """
        self._sync(self._sides, weight)

    def _sync(self, sides: Sequence[Side], weight: Weight | None = None) -> None:
        held = [side for side in sides if side.sum is not None and side.sum.is_pending]
        part, own = self._part if len(held) == len(sides) else self._take_part(), 0.0
        if part is not None and self._is_joint:
            self._own = self._counts(part, None, weight)
            self._gate.begin("summed gradients", self._newest, self._own)
            own = self._weigh()
        self._sum_sides(sides, own, part, held)

    def _end_sum(self) -> None:
        """Count a step whose gradients are summed."""
        if self._trains_alone:
            self._sides[0].backwards = 0
            if self._plan.spec.sync.name == "selsync":
                scale = 1.0 if self._scaler is None else self._scaler.get_scale()
                gradients = [one.grad.detach().reshape(-1).float() for _, one in self._trained if one.grad is not None]
                self._energy = sum(map(energy, gradients)) / scale**2
        elif any(self._taken) or len(self._stepped) == len(self._sides):  # else one more loss of the same step
            self._gate.step += 1
            self._end_step()

    def _take_part(self) -> Part | None:
        """Return the part of the batch that is computed; None: this worker is alone, and was given none."""
        self._part = self._waiting.popleft() if self._waiting else self._newest
        if self._part is None and self.world_size > 1:
            raise BadInput(
                "A gradient came before any batch of this session's loader.",
                hint="iterate over `run.loader(loader)` instead of the loader",
            )
        return self._part

    def _note_loss(self, loss: Tensor, weight: float) -> None:
        """Add a loss as a sum over samples: over those of all workers it is the batch's loss times its samples."""
        self._is_within = True
        part = self._part
        if part is not None and part.is_audit:
            weight = float(self.rank == 0)
        if weight and part is not None:
            scale = 1.0 if self._scaler is None else self._scaler.get_scale()
            self._loss_sum.add_(loss.detach(), alpha=weight * part.batch / scale)

    def _before_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> Any:
        """Sum whatever the script did not exchange by now: it would be lost to the others.

        Raises:
            BadInput: the optimizer is in no session: it would step by the gradient of this worker's samples alone.
        """
        side = next((one for one in self._sides if one.optimizer is optimizer), None)
        if side is None:
            self._before_inner_step(optimizer)
            return None
        self._stepping = optimizer
        closure = options.get("closure") or next(iter(arguments[1:]), None)
        if self._is_joint and closure is not None:
            return arguments[:1], {**options, "closure": self._together(side, closure)}
        self._begin_step(side)
        side.steps += 1
        is_early = side.steps < CHECKED_STEPS and side.steps & (side.steps - 1) == 0
        if self._is_joint and (is_early or side.steps % CHECKED_STEPS == 0):
            marks = replica_marks(named_parameters(side.optimizer, self._names), side.optimizer)
            self._gate.take("called optimizer.step()", self._newest, mark=len(marks))
            check_replicas(marks, self._gate.step, self.world_size)
        return None

    def _before_inner_step(self, optimizer: Optimizer) -> None:
        """Sum before an optimizer inside one of the session's (SAM's) steps on its own: a step of that one, too."""
        if self._stepping is not None:
            return
        stepped = set(map(id, parameters_of(optimizer)))
        for side in self._sides:
            own = set(map(id, parameters_of(side.optimizer)))
            if own & stepped:
                self._begin_step(side)
                self._stepped.add(id(side.optimizer))
            stepped -= own
        if self.world_size > 1 and stepped:
            raise BadInput(
                f"An optimizer ({type(optimizer).__name__}) steps that is in no session, by gradients of this worker's "
                "samples alone.",
                hint="give the session all models and optimizers, and call run.backward for each loss: "
                "with session((G, D), (optimizer_g, optimizer_d)) as run: ... run.backward(loss_g)",
            )

    def _begin_step(self, side: Side) -> None:
        """Let an optimizer step by the gradient of all workers."""
        side.backwards, self._is_within = 0, False
        is_held = side.sum is not None and side.sum.is_pending
        if not side.is_summed or is_held:
            self._sync([side])
        side.is_summed = False

    def _together(self, side: Side, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return a closure of an optimizer (LBFGS) that computes the loss and gradient of all workers."""

        def together(*arguments: Any, **options: Any) -> Any:
            before, side.is_summed = side.is_summed, False
            loss = closure(*arguments, **options)
            if not side.is_summed and not (before and loss is None):
                self._sync([side])
            side.backwards, side.is_summed, self._is_within = 0, False, False
            if loss is None:
                return None
            value = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
            (total,) = sum_numbers([value * self._weight], self.world_size)
            return loss.detach().new_tensor(total) if isinstance(loss, Tensor) else total

        return together

    def _after_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        if optimizer is self._stepping:
            self._stepping = None
            self._stepped.add(id(optimizer))
            if not self._waiting:
                self._end_epoch()
