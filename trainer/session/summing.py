"""The gradients of a session: summed over all workers before the optimizer steps, whoever calls backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hetopt.core.errors import BadInput
from hetopt.trainer.agreement import sum_numbers
from hetopt.trainer.session.batches import Part
from hetopt.trainer.session.denominators import Weight
from hetopt.trainer.session.flow import BatchFlow, Side
from hetopt.trainer.session.gradient import named_parameters
from hetopt.trainer.session.inspection import inspect_wrappers
from hetopt.trainer.session.local import gradient_energy
from hetopt.trainer.session.registry import REGISTRY, Member
from hetopt.trainer.session.several import Optimizers
from hetopt.trainer.session.turns import Deed
from hetopt.trainer.steps.slowdown import FORWARD


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
        """How much this worker's last loss counts: the workers' losses, so weighted, add up to that of the batch."""
        return self._weight

    def backward(
        self,
        loss: Tensor,
        *,
        weight: Weight | Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """``loss.backward()``, and then the gradients of all workers in ``.grad``: clip them or step as in the script.

        With ``accumulate=k`` gradients are exchanged at every k-th call, and at the last batch of an epoch; until then
        ``.grad`` holds what this worker has so far. Workers that train for themselves (``sync``) keep their own.

        What the loss is a mean over (samples, tokens, class weights), or that it is a sum, is read off its operators.

        Args:
            loss: of this worker's part, a scalar; scaled where a GradScaler is used.
            weight: what this worker's loss is a mean over, if the operators do not tell; or ``"sum"``: the losses of
                the workers' parts add up to that of the batch.
            retain_graph: as of ``Tensor.backward``.
            create_graph: likewise.
            inputs: likewise.

        Raises:
            BadInput: the loss is no scalar, the samples did not come from `loader`, or the workers' gradients do not
                make that of the batch, as far as anybody can tell.
            RunFailed: the workers are at different points of the script.
        """
        if loss.dim() != 0:
            raise BadInput(
                f"The loss has shape {tuple(loss.shape)}; it must be a scalar.",
                hint="return the mean over the samples of the batch",
            )
        if self.world_size > 1 and not self._is_inspected:
            inspect_wrappers(self._model)
            self._is_inspected = True
        self._part = self._handed.of(loss)
        part = self._present_part()
        turn = None
        if self._sums:
            for side in self._sides:
                self._follow(side)
            turn = self._gate.begin(Deed.SUM, self._handed.newest)
        only = self._sides[0] if len(self._sides) == 1 else None
        own = self._own_weight = self._loss.backward(
            loss,
            weight,
            part,
            options={"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs},
            met=lambda: self._gate.finish(turn),
            expect=self._expect if only is not None and self._completes(only, part) else lambda weigh: None,
            computed=self._note_computed,
        )
        self._is_within = True
        self._weight = own
        self._note_loss(loss, own)
        reached = self._reached()
        ready = [side for side in reached if self._completes(side, part)]
        for side in self._sides:
            side.backwards += side in reached
            if side.sum is not None and side.is_trained and side not in ready:
                side.sum.put_aside(own) if side in reached else side.sum.put_back()
        if ready:
            with self._summing(own) as look_at:
                for side in ready:
                    if side.sum is not None:
                        side.sum.sum(own, self._scaler, look_at=look_at)
                    self._note_sum(side)
            return
        if self._computed_s is not None:
            self._waited_s += time.perf_counter() - self._computed_s
        self._computed = self._computed_s = None

    @property
    def _sums(self) -> bool:
        """Whether anything is done to gradients."""
        return self._sides[0].sum is not None

    def _completes(self, side: Side, part: Part | None) -> bool:
        """Whether one more backward pass completes a step of an optimizer."""
        return side.backwards + 1 >= self._accumulate or (part is not None and part.is_last)

    def _reached(self) -> list[Side]:
        """The optimizers of whose parameters the backward pass has made gradients, on any worker.

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
        """The gradient of an optimizer is that of all workers now."""
        side.is_summed = True
        if side.sum is not None and side.sum.stats is not None:
            self._stats.append(side.sum.stats)

    def _follow(self, side: Side, *, begins: bool = True) -> None:
        """The optimizer's parameters may be others than in the step before."""
        if side.sum is None:
            return
        named = named_parameters(side.optimizer, self._names)
        side.is_trained = bool(named) or len(self._sides) == 1
        if not side.is_trained:  # frozen, as a discriminator while its generator learns
            return
        if side.sum.follow(named):
            self._exchange = self._exchange_of_all()
            if self._engine is not None:
                self._engine.exchange = self._exchange
        side.sum.begin() if begins else side.sum.drop()

    def _expect(self, weigh: Callable[[], float]) -> None:
        """The backward pass that comes completes the step; what it waits for others is no part of computing."""

        def timed() -> float:
            begun_s = time.perf_counter()
            weight = weigh()
            self._waited_s += time.perf_counter() - begun_s
            return weight

        if self._sides[0].sum is not None:
            self._sides[0].sum.expect(timed, self._reach)

    def _reach(self, made: float) -> None:
        """Where this worker is slowed down, wait until this part of the gradient would have been made."""
        if self._pace.waits:
            self._pace.reach(FORWARD + (1 - FORWARD) * made)

    def _note_computed(self) -> None:
        """This worker has computed: what comes until the sum is the wait for the others."""
        self._pace.reach(1.0)
        self._waited_s += self._whole.take_waited_s()
        self._computed, self._computed_s = self._stopwatch.mark(), time.perf_counter()

    def sync(self, *, weight: Weight | Tensor | None = None) -> None:
        """Sum the gradients of all workers now; for loops that call ``loss.backward()`` themselves, before clipping.

        Args:
            weight: what the loss was a mean over on this worker (samples, tokens), or ``"sum"`` (see `backward`); None:
                what `backward` found.

        Raises:
            BadInput: there is no weight, and `backward` has not seen the loss.
            RunFailed: the workers are at different points of the script.
        """
        if self._sums:
            for side in self._sides:
                self._follow(side, begins=False)
        self._sync(self._sides, weight)

    def _sync(self, sides: Sequence[Side], weight: Weight | Tensor | None = None) -> None:
        if self._sums:
            self._gate.take(Deed.SUM, self._handed.newest)
        if len(sides) > 1:
            waiting = [side for side in sides if side.sum is not None and side.sum.is_waiting]
            sides = [*waiting, *(side for side in self._reached() if side not in waiting)]
        waits = [side.sum is not None and side.sum.is_waiting for side in sides]
        own = 0.0  # where all of it was weighed as it was put aside
        if not all(waits):
            self._part = self._handed.of_all()
            own = self._loss.weight_of(self._own_weight, weight, self._present_part())
        with self._summing(own) as look_at:
            for side, wait in zip(sides, waits, strict=True):
                if side.sum is not None:
                    side.sum.sum(0.0 if wait else own, self._scaler, look_at=look_at)
                self._note_sum(side)

    @contextmanager
    def _summing(self, weight: float) -> Iterator[Sequence[float]]:
        """Gradients are summed inside, and looked at for these ratios; then a step is done.

        Args:
            weight: of this worker's gradient.
        """
        self._own_weight, self._weight = None, weight
        if self._computed is None:
            self._computed = self._stopwatch.mark()
        with self._gate.watched():
            yield () if self._engine is None else self._engine.look_at
        if self._trains_alone:
            self._sides[0].backwards = 0
            if self._plan.spec.sync.name == "selsync":
                scale = 1.0 if self._scaler is None else self._scaler.get_scale()
                self._energy = gradient_energy([parameter for _, parameter in self._trained], scale)
            return
        if not any(self._taken) and len(self._stepped) < len(self._sides):
            return  # one more loss of the same step
        if self._sums:
            self._gate.compare(self._trained)  # once nothing is on its way any more
        self._gate.summed()
        self._tell(self._trace())

    def trains(self, optimizer: Optimizer) -> bool:
        """Whether these are its parameters: the optimizer's own, or those of one that steps in its place."""
        own = {id(one) for group in self._optimizer.param_groups for one in group["params"]}
        return all(id(one) in own for group in optimizer.param_groups for one in group["params"])

    def meet_own(self, optimizer: Optimizer) -> None:
        """An optimizer inside one of the session's (SAM's) may step on its own: that counts as a step of it."""
        if self._stepping is not None or any(side.optimizer is optimizer for side in self._sides):
            return
        own = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for side in self._sides:
            if any(id(one) in own for group in side.optimizer.param_groups for one in group["params"]):
                self._begin_step(side)
                self._stepped.add(id(side.optimizer))

    def meet_stranger(self, optimizer: Optimizer) -> None:
        """An optimizer that is in no session is about to step by the gradient of this worker's samples alone.

        Raises:
            BadInput: always.
        """
        raise BadInput(
            f"An optimizer ({type(optimizer).__name__}) steps that is in no session, by gradients of this worker's "
            "samples alone.",
            hint="give the session all models and optimizers, and call run.backward for each loss: "
            "with session((G, D), (optimizer_g, optimizer_d)) as run: ... run.backward(loss_g)",
        )

    def _present_part(self) -> Part | None:
        """Of the batch that is computed; None: it is alone, and was given none."""
        if self._part is None and self.world_size > 1:
            raise BadInput(
                "A gradient came before any batch of this session's loader.",
                hint="iterate over `run.loader(loader)` instead of the loader",
            )
        return self._part

    def _note_loss(self, loss: Tensor, weight: float) -> None:
        """As a sum over samples: over those of all workers it is the batch's loss times its samples."""
        if weight and self._part is not None:
            scale = 1.0 if self._scaler is None else self._scaler.get_scale()
            self._loss_sum = self._loss_sum + loss.detach().double() * (weight * self._part.batch / scale)

    def _before_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> Any:
        """Whatever the script did not exchange by now would be lost to the others."""
        side = next(one for one in self._sides if one.optimizer is optimizer)
        self._stepping = optimizer
        if side.sum is not None and self.world_size > 1:
            if options.get("closure") is not None:
                return arguments, {**options, "closure": self._together(side, options["closure"])}
            if len(arguments) > 1 and arguments[1] is not None:
                return (arguments[0], self._together(side, arguments[1]), *arguments[2:]), options
        self._begin_step(side)
        return None

    def _begin_step(self, side: Side) -> None:
        """An optimizer steps by the gradient of all workers."""
        side.backwards, self._is_within = 0, False
        if not side.is_summed or (side.sum is not None and side.sum.is_waiting and self.world_size > 1):
            self._follow_and_sync(side)
        side.is_summed = False

    def _follow_and_sync(self, side: Side) -> None:
        self._follow(side, begins=False)
        self._sync([side])

    def _together(self, side: Side, closure: Callable[..., Any]) -> Callable[..., Any]:
        """A closure of an optimizer (LBFGS) that computes the loss and gradient of all workers."""

        def together(*arguments: Any, **options: Any) -> Any:
            before, side.is_summed = side.is_summed, False
            loss = closure(*arguments, **options)
            if not side.is_summed and not (before and loss is None):  # Lightning gives one that does nothing
                self._follow_and_sync(side)
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
        if self._epoch_over is not None and self._handed.are_computed:
            self._end_epoch()
