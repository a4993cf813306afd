"""Backward passes and optimizer steps of a session: gradients are those of all workers before an optimizer steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hetopt.core.errors import BadInput
from hetopt.trainer.agreement import sum_numbers
from hetopt.trainer.session.alike import check_replicas
from hetopt.trainer.session.batches import Part
from hetopt.trainer.session.flow import BatchFlow, Side
from hetopt.trainer.session.gradients import named_parameters
from hetopt.trainer.session.inspection import inspect_wrappers
from hetopt.trainer.session.local import gradient_energy
from hetopt.trainer.session.registry import REGISTRY, Member
from hetopt.trainer.session.several import Optimizers
from hetopt.trainer.session.turns import Deed
from hetopt.trainer.session.weights import Weight, denominator_of, loss_factor, weights_of
from hetopt.trainer.steps.slowdown import FORWARD

CHECKED_STEPS = 20
"""Steps of an optimizer between comparisons of the replicas; of the first it compares 1, 2, 4, 8 and 16."""


class GradientFlow(BatchFlow):
    """Where a session meets backward passes and optimizers."""

    def __init__(self, model: nn.Module, optimizer: Optimizers, **options: Any) -> None:
        super().__init__(model, optimizer, **options)
        self._is_inspected = False
        self._stepping: Optimizer | None = None  # of the session
        self._weight = 1.0  # of the gradient that was summed last
        self._hooks = [
            hook
            for one in optimizer.each
            for hook in (
                one.register_step_pre_hook(self._before_step),
                one.register_step_post_hook(self._after_step),
            )
        ]
        REGISTRY.enter(self, sums=self.world_size > 1)

    def _listeners(self) -> Sequence[Member]:
        return REGISTRY.listeners(self)

    @property
    def weight(self) -> float:
        """Return how much this worker's last loss counts: the losses so weighted add up to that of the batch."""
        return self._weight

    def backward(
        self,
        loss: Tensor,
        *,
        weight: Weight | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
        gradient: Tensor | None = None,
    ) -> None:
        """Call ``loss.backward()``, and leave the gradient of all workers in ``.grad``: clip it or step as before.

        With ``accumulate=k`` gradients are exchanged at every k-th call, and at the last batch of an epoch; until then
        ``.grad`` holds what this worker has so far. Workers that train for themselves (``sync``) keep their own.

        A worker's loss counts by its samples of the batch; that of one cross entropy by its targets.

        Args:
            loss: of this worker's part, a scalar; scaled where a GradScaler is used.
            weight: what this worker's loss is a mean over, if not its samples (tokens, boxes); or ``"sum"``: the losses
                of the workers' parts add up to that of the batch.
            retain_graph: as of ``Tensor.backward``, like the others.
            create_graph: see there.
            inputs: see there.
            gradient: see there; a scalar, by which the loss is multiplied.

        Raises:
            BadInput: the loss is no scalar, or the samples did not come from `loader` or `split`.
            RunFailed: the workers are at different points of the script.
        """
        if loss.dim() != 0:
            raise BadInput(
                f"The loss has shape {tuple(loss.shape)}; it must be a scalar.",
                hint="return the mean over the samples of the batch",
            )
        if gradient is not None:
            loss = loss * gradient.detach()
        if self.world_size > 1 and not self._is_inspected:
            inspect_wrappers(self._model)
            self._is_inspected = True
        part = self._take_part()
        if self._sums:
            for side in self._sides:
                self._follow(side)
        options = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
        if part is None or self.world_size == 1 or self._trains_alone:
            factor = 1.0 if part is None or self.world_size == 1 else loss_factor(weight, part)
            torch.autograd.backward(loss if factor == 1 else factor * loss, **options)
            self._note_computed()
            self._complete(loss, 1.0 if part is None or self.world_size == 1 else part.weight, part)
            return
        own = [float(part.samples), denominator_of(loss, weight)]
        if self._rides(part):
            torch.autograd.backward(loss, **options)
            self._note_computed()
            self._ride(loss, own, part)
            return
        weigh = self._say(own, part)
        if len(self._sides) == 1 and self._completes(self._sides[0], part) and not part.is_audit:
            self._expect(weigh)
        with self._whole.backward(weigh):
            torch.autograd.backward(loss, **options)
        self._note_computed()
        self._complete(loss, weigh(), part)

    def _say(self, own: Sequence[float], part: Part) -> Callable[[], float]:
        """Tell the others of a loss; return how to learn its weight once, when they are at the same point."""
        pending = self._gate.begin(Deed.SUM, self._newest, [*own, 0.0])

        @cache
        def weigh() -> float:
            rows, _ = self._gate.finish(pending)
            if len(REGISTRY.open) == 1:  # on all workers, as they are at the same point
                self._gate.make_room(self._room)
            return self._weights(rows, part)[self.rank]

        return weigh

    @staticmethod
    def _weights(rows: Sequence[Sequence[float]], part: Part) -> list[float]:
        """Return the weights of the workers' losses; in an audit that of the leader is of the whole batch."""
        shared = rows[1:] if part.is_audit else rows
        weights = weights_of([row[0] for row in shared], [row[1] for row in shared])
        return [1.0, *weights] if part.is_audit else weights

    def _rides(self, part: Part) -> bool:
        """Return whether a gradient that comes can travel with this worker's word: nobody asks for weights before."""
        side = self._sides[0]
        is_small = side.sum is not None and 0 < side.sum.room == len(self._gate.load) and not side.sum.is_pending
        return is_small and self._completes(side, part) and not (self._whole.is_open or part.is_audit)

    def _ride(self, loss: Tensor, own: Sequence[float], part: Part) -> None:
        """Send a small gradient with this worker's word: one message to each of the others is all of the step's."""
        side = self._sides[0]
        assert side.sum is not None
        begun_s = time.perf_counter()
        told = [*own, float(side.sum.pack(self._gate.load))]
        rows, loads = self._gate.finish(self._gate.begin(Deed.SUM, self._newest, told, loaded=True))
        weights = self._weights(rows, part)
        if loads is None:
            self._complete(loss, weights[self.rank], part)
            return
        self._note_loss(loss, weights[self.rank])
        side.backwards += 1
        is_whole = all(row[2] for row in rows)
        side.sum.merge(loads, weights, is_whole=is_whole, sync_s=time.perf_counter() - begun_s)
        self._note_sum(side)
        self._end_sum(weights[self.rank])

    def _complete(self, loss: Tensor, own: float, part: Part | None) -> None:
        """Sum the gradients that a backward pass completed, and hold the others, of a loss with such a weight."""
        self._note_loss(loss, own)
        self._weight = own
        reached = self._reached()
        ready = [side for side in reached if self._completes(side, part)]
        for side in self._sides:
            side.backwards += side in reached
            if side.sum is not None and side.is_trained and side not in ready:
                side.sum.hold(own) if side in reached else side.sum.put_back()
        if not ready:
            if self._computed_s is not None:
                self._waited_s += time.perf_counter() - self._computed_s
            self._computed = self._computed_s = None
            return
        with self._summing(own) as look_at:
            for side in ready:
                if side.sum is not None and part is not None and part.is_audit:
                    self._audit_step(side, own)
                elif side.sum is not None:
                    side.sum.sum(own, self._scaler, look_at=look_at)
                self._note_sum(side)

    def _audit_step(self, side: Side, own: float) -> None:
        """Take the leader's gradient of the whole batch, and note how far that of the shares is from it."""
        assert side.sum is not None
        step = self._gate.step + 1
        found = side.sum.audit(own, is_leader=self.rank == 0, draws=self._draws())
        said = self._audit.add(found, step)
        if math.isfinite(found.distance):  # a step whose gradient overflows is no measurement
            self._events.write("audited", step=step, distance=found.distance, tolerance=self._audit.tolerance)
        if said is not None and self.rank == 0:
            self._events.write("audit_differs", step=step, reason=said)

    @property
    def _sums(self) -> bool:
        """Return whether anything is done to gradients."""
        return self._sides[0].sum is not None

    def _completes(self, side: Side, part: Part | None) -> bool:
        """Return whether one more backward pass completes a step of an optimizer."""
        return side.backwards + 1 >= self._accumulate or (part is not None and part.is_last)

    def _reached(self) -> list[Side]:
        """Return the optimizers of whose parameters the backward pass has made gradients, on any worker.

        So each loss costs the exchange of what its step needs: of a generator's loss also the discriminator's part,
        unless its parameters are frozen meanwhile or left out (``inputs``), as it is what ``.grad`` has then.
        """
        if len(self._sides) == 1 or not self._sums:
            return list(self._sides)
        made = [float(side.is_trained and side.sum is not None and side.sum.is_made) for side in self._sides]
        with self._gate.watched():
            on_any = sum_numbers(made, self.world_size)
        return [side for side, workers in zip(self._sides, on_any, strict=True) if workers]

    def _note_sum(self, side: Side) -> None:
        side.is_summed = True
        if side.sum is not None and side.sum.stats is not None:
            self._stats.append(side.sum.stats)

    def _follow(self, side: Side) -> None:
        """Make way for a backward pass; the optimizer's parameters may be others than in the step before."""
        if side.sum is None:
            return
        trained = [one for group in side.optimizer.param_groups for one in group["params"] if one.requires_grad]
        side.is_trained = bool(trained) or len(self._sides) == 1
        if not side.is_trained:  # frozen, as a discriminator while its generator learns
            return
        if not side.sum.is_of(trained) and side.sum.follow(named_parameters(side.optimizer, self._names)):
            self._exchange = self._exchange_of_all()
            self._gate.trained = sum(one.numel() for _, one in self._trained)
            if self._engine is not None:
                self._engine.exchange = self._exchange
        side.sum.begin()

    def _expect(self, weigh: Callable[[], float]) -> None:
        """Send what the backward pass that comes makes; what it waits for others is no part of computing."""

        def timed() -> float:
            begun_s = time.perf_counter()
            weight = weigh()
            self._waited_s += time.perf_counter() - begun_s
            return weight

        if self._sides[0].sum is not None:
            self._sides[0].sum.expect(timed, self._reach)

    def _reach(self, done: float) -> None:
        """Where this worker is slowed down, wait until this part of the gradient would have been made."""
        if self._pace.waits:
            self._pace.reach(FORWARD + (1 - FORWARD) * done)

    def _note_computed(self) -> None:
        """This worker has computed: what comes until the sum is the wait for the others."""
        self._pace.reach(1.0)
        self._waited_s += self._whole.take_waited_s()
        self._computed, self._computed_s = self._stopwatch.mark(), time.perf_counter()

    def sync(self, *, weight: Weight | None = None) -> None:
        """Sum the gradients of all workers now; for loops that call ``loss.backward()`` themselves, before clipping.

        Args:
            weight: what the loss was a mean over on this worker, or ``"sum"`` (see `backward`); None: its samples.

        Raises:
            RunFailed: the workers are at different points of the script.
        """
        self._sync(self._sides, weight)

    def _sync(self, sides: Sequence[Side], weight: Weight | None = None) -> None:
        waits = [side.sum is not None and side.sum.is_pending for side in sides]
        own = 0.0  # where all of it was weighed as it was held
        part = self._part if all(waits) else self._take_part()
        if self._sums and part is not None:
            denominator = denominator_of(torch.zeros(()), weight)
            rows = self._gate.take(Deed.SUM, self._newest, [float(part.samples), denominator])
            own = self._weights(rows, part)[self.rank]
        with self._summing(own) as look_at:
            for side, is_held in zip(sides, waits, strict=True):
                if side.sum is not None and is_held:
                    side.sum.begin()
                if side.sum is not None and part is not None and part.is_audit:
                    self._audit_step(side, own)
                elif side.sum is not None:
                    side.sum.sum(0.0 if is_held else own, self._scaler, look_at=look_at)
                self._note_sum(side)

    @contextmanager
    def _summing(self, weight: float) -> Iterator[Sequence[float]]:
        """Sum gradients inside, looked at for the ratios that are given; then a step is done.

        Args:
            weight: of this worker's gradient.
        """
        if self._computed is None:
            self._computed = self._stopwatch.mark()
        with self._gate.watched():
            yield () if self._engine is None else self._engine.look_at
        self._end_sum(weight)

    def _end_sum(self, weight: float) -> None:
        """Count a step whose gradients are summed, of which this worker's counts so much."""
        self._weight = weight
        if self._trains_alone:
            self._sides[0].backwards = 0
            if self._plan.spec.sync.name == "selsync":
                scale = 1.0 if self._scaler is None else self._scaler.get_scale()
                self._energy = gradient_energy([parameter for _, parameter in self._trained], scale)
            return
        if not any(self._taken) and len(self._stepped) < len(self._sides):
            return  # one more loss of the same step
        self._gate.step += 1
        self._tell(self._trace())

    def trains(self, optimizer: Optimizer) -> bool:
        """Return whether these are its parameters: the optimizer's own, or those of one that steps in its place."""
        if any(side.optimizer is optimizer for side in self._sides):
            return True
        own = {id(one) for group in self._optimizer.param_groups for one in group["params"]}
        return all(id(one) in own for group in optimizer.param_groups for one in group["params"])

    def meet_own(self, optimizer: Optimizer) -> None:
        """Sum before an optimizer inside one of the session's (SAM's) steps on its own: a step of that one, too."""
        if self._stepping is not None or any(side.optimizer is optimizer for side in self._sides):
            return
        own = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for side in self._sides:
            if any(id(one) in own for group in side.optimizer.param_groups for one in group["params"]):
                self._begin_step(side)
                self._stepped.add(id(side.optimizer))

    def meet_stranger(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that is in no session: it would step by the gradient of this worker's samples alone.

        Raises:
            BadInput: always.
        """
        raise BadInput(
            f"An optimizer ({type(optimizer).__name__}) steps that is in no session, by gradients of this worker's "
            "samples alone.",
            hint="give the session all models and optimizers, and call run.backward for each loss: "
            "with session((G, D), (optimizer_g, optimizer_d)) as run: ... run.backward(loss_g)",
        )

    def _take_part(self) -> Part | None:
        """Return the part of the batch that is computed; None: this worker is alone, and was given none."""
        self._part = self._waiting.popleft() if self._waiting else self._newest
        self._is_computed = not self._waiting
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
        """Sum whatever the script did not exchange by now: it would be lost to the others."""
        side = next(one for one in self._sides if one.optimizer is optimizer)
        self._stepping = optimizer
        if side.sum is not None and self.world_size > 1:
            if options.get("closure") is not None:
                return arguments, {**options, "closure": self._together(side, options["closure"])}
            if len(arguments) > 1 and arguments[1] is not None:
                return (arguments[0], self._together(side, arguments[1]), *arguments[2:]), options
        self._begin_step(side)
        self._compare(side)
        return None

    def _compare(self, side: Side) -> None:
        """Compare the replicas, and what they are about to step by, at some steps of an optimizer.

        Raises:
            RunFailed: they are not the same; all workers raise it.
        """
        side.steps += 1
        is_early = side.steps < CHECKED_STEPS and side.steps & (side.steps - 1) == 0
        if side.sum is not None and self.world_size > 1 and (is_early or side.steps % CHECKED_STEPS == 0):
            named = named_parameters(side.optimizer, self._names)
            self._gate.take(Deed.STEP, self._newest)
            check_replicas(named, self._optimizer, self._gate.step, self.world_size)

    def _begin_step(self, side: Side) -> None:
        """Let an optimizer step by the gradient of all workers."""
        side.backwards, self._is_within = 0, False
        is_held = side.sum is not None and side.sum.is_pending and self.world_size > 1
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
            side.backwards, side.is_summed = 0, False
            self._is_within = False
            if loss is None:
                return None
            value = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
            (total,) = sum_numbers([value * self._weight], self.world_size)
            return loss.detach().new_tensor(total) if isinstance(loss, Tensor) else total

        return together

    def _after_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        self._stepping = None
        self._stepped.add(id(optimizer))
        if self._epoch_over is not None and self._is_computed:
            self._end_epoch()
