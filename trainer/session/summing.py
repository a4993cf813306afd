"""The gradients of a session: summed over all workers before the optimizer steps, whoever calls backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hetopt.core.errors import BadInput
from hetopt.trainer.agreement import sum_numbers
from hetopt.trainer.session.alike import gradients_mark, name_gradient
from hetopt.trainer.session.batches import Part
from hetopt.trainer.session.denominators import Weight
from hetopt.trainer.session.flow import BatchFlow, Side
from hetopt.trainer.session.gradient import named_parameters
from hetopt.trainer.session.inspection import inspect_wrappers
from hetopt.trainer.session.local import gradient_energy
from hetopt.trainer.session.loss import Word, is_heard
from hetopt.trainer.session.registry import REGISTRY, Member
from hetopt.trainer.session.several import Optimizers
from hetopt.trainer.session.terms import multiplied
from hetopt.trainer.session.turns import Deed
from hetopt.trainer.statistics import DRAWN
from hetopt.trainer.steps.slowdown import FORWARD


class GradientFlow(BatchFlow):
    """Where a session meets backward passes and optimizers."""

    def __init__(self, model: nn.Module, optimizer: Optimizers, **options: Any) -> None:
        super().__init__(model, optimizer, **options)
        self._is_inspected = False
        self._stepping: Optimizer | None = None  # of the session
        self._unheard = ExitStack()  # while it does so
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
        gradient: Tensor | None = None,
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
            gradient: likewise; a scalar, by which the loss is multiplied.

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
        if gradient is not None:
            loss = loss * gradient.detach()
        if self.world_size > 1 and not self._is_inspected:
            inspect_wrappers(self._model)
            self._is_inspected = True
        self._part = self._handed.of(loss)
        part = self._present_part()
        if self._sums:
            for side in self._sides:
                self._follow(side)
        options = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
        with self._loss.unheard():
            self._compute(loss, weight, part, options)

    def _compute(
        self, loss: Tensor, weight: Weight | Tensor | None, part: Part | None, options: Mapping[str, Any]
    ) -> None:
        """See `backward`; what torch is called with from here on is not the script's doing."""
        if part is None or self.world_size == 1 or self._trains_alone:
            factor = self._loss.factor(loss, weight, part)
            torch.autograd.backward(loss if factor == 1 else factor * loss, **options)
            self._note_computed()
            own = 1.0 if part is None or self.world_size == 1 else part.weight
            self._complete(loss, own, part)
            return
        word = self._loss.look(loss, weight, part, self._handed.beside)
        if self._rides(part):
            torch.autograd.backward(loss, **options)
            self._note_computed()
            self._loss.tell(part)
            self._ride(loss, word)
            return
        weigh = self._say(word)
        if len(self._sides) == 1 and self._completes(self._sides[0], part):
            self._expect(weigh)
        with self._whole.backward(weigh), multiplied(self._factors(word, weigh)):
            torch.autograd.backward(loss, **options)
        self._note_computed()
        self._loss.tell(part)
        self._complete(loss, weigh(), part)

    def _factors(self, word: Word, weigh: Callable[[], float]) -> Mapping[Any, float]:
        """By what terms of a loss are multiplied, which has to be known before the backward pass begins."""
        if word.terms:
            begun_s = time.perf_counter()
            weigh()
            self._waited_s += time.perf_counter() - begun_s
        return word.factors

    def _say(self, word: Word) -> Callable[[], float]:
        """Tell the others of a loss; how to learn, once, how much it counts, when they are at the same point."""
        pending = self._gate.begin(Deed.SUM, self._handed.newest, [*word.own.numbers(), 0.0])

        @cache
        def weigh() -> float:
            weight = self._loss.weights(word, self._gate.finish(pending).told)[self.rank]
            if len(REGISTRY.open) == 1:  # on all workers, as they are at the same point
                self._gate.make_room(self._room)
            return weight

        return weigh

    def _rides(self, part: Part) -> bool:
        """Whether a gradient that comes can travel with this worker's word, as nobody asks for weights before."""
        side = self._sides[0]
        is_small = side.sum is not None and 0 < side.sum.room == len(self._gate.load) and not side.sum.is_waiting
        comes_later = self._whole.is_open or self._loss.may_weigh_terms
        return is_small and self._completes(side, part) and not comes_later

    def _ride(self, loss: Tensor, word: Word) -> None:
        """A small gradient travels with this worker's word: one message to each of the others is all of the step's."""
        side = self._sides[0]
        assert side.sum is not None
        begun_s = time.perf_counter()
        is_whole = side.sum.pack(self._gate.load)
        told = [*word.own.numbers(), float(is_whole)]
        of_loss = len(told)
        if self._row:
            self._row[DRAWN] = self._drawn
            told += self._row
            self._row = []
        heard = self._gate.finish(self._gate.begin(Deed.SUM, self._handed.newest, told, loaded=True))
        if len(told) > of_loss:
            self._rows = [row[of_loss:] for row in heard.told]
            heard = replace(heard, told=[row[:of_loss] for row in heard.told])
        is_whole = all(row[-1] for row in heard.told)
        weights = self._loss.weights(word, heard.told)
        own = weights[self.rank]
        if heard.loads is None:
            self._complete(loss, own, self._part)
            return
        self._note_loss(loss, own)
        side.backwards += 1
        side.sum.merge(heard.loads, weights, is_whole=is_whole, sync_s=time.perf_counter() - begun_s)
        self._note_sum(side)
        self._end_sum(own)

    def _complete(self, loss: Tensor, own: float, part: Part | None) -> None:
        """A backward pass is over, of a loss that counts so much: sum gradients that are complete, keep the others."""
        self._note_loss(loss, own)
        self._weight = self._own_weight = own
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
        self._loss.note_summed()
        side.is_summed = True
        if side.sum is not None and side.sum.stats is not None:
            self._stats.append(side.sum.stats)

    def _follow(self, side: Side, *, begins: bool = True) -> None:
        """The optimizer's parameters may be others than in the step before."""
        if side.sum is None:
            return
        trained = [one for group in side.optimizer.param_groups for one in group["params"] if one.requires_grad]
        side.is_trained = bool(trained) or len(self._sides) == 1
        if not side.is_trained:  # frozen, as a discriminator while its generator learns
            return
        if not side.sum.is_of(trained) and side.sum.follow(named_parameters(side.optimizer, self._names)):
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
        word: Word | None = None
        if weight is not None and not all(_waits(side) for side in sides):
            self._part = self._handed.of_all()
            part = self._present_part()
            word = None if part is None else self._loss.state(weight, part)
        told: list[list[float]] = []
        if self._sums:
            told = self._gate.take(Deed.SUM, self._handed.newest, () if word is None else word.own.numbers())
        if len(sides) > 1:
            waiting = [side for side in sides if _waits(side)]
            sides = [*waiting, *(side for side in self._reached() if side not in waiting)]
        waits = [_waits(side) for side in sides]
        own = 0.0  # where all of it was weighed as it was put aside
        if not all(waits):
            if word is None:
                self._part = self._handed.of_all()
                self._present_part()
            own = self._loss.own_weight(self._own_weight, word, told)
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
        if self._computed is None:
            self._computed = self._stopwatch.mark()
        with self._gate.watched():
            yield () if self._engine is None else self._engine.look_at
        self._end_sum(weight)

    def _end_sum(self, weight: float) -> None:
        """Gradients are summed, of which this worker's counts so much: with the last of a step that is done."""
        self._own_weight, self._weight = None, weight
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
        if any(side.optimizer is optimizer for side in self._sides):
            return True
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
        self._is_within = True
        if weight and self._part is not None:
            scale = 1.0 if self._scaler is None else self._scaler.get_scale()
            self._loss_sum.add_(loss.detach(), alpha=weight * self._part.batch / scale)

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
        self._compare_gradients(side)
        self._unheard.enter_context(self._loss.unheard())  # what an optimizer does by the gradient of all
        return None

    def _compare_gradients(self, side: Side) -> None:
        """What the script did to ``.grad`` since it was summed is the same on all workers: asked in the first steps.

        Raises:
            BadInput: it is not; on all workers.
            RunFailed: only some of them step.
        """
        number, side.steps = side.steps, side.steps + 1
        if side.sum is None or self.world_size == 1 or not is_heard(number):
            return
        with self._loss.unheard():
            own = [(name, one.grad) for name, one in named_parameters(side.optimizer, self._names)]
            marks = self._gate.take(Deed.STEP, self._handed.newest, [gradients_mark(own)])
            if any(mark != marks[0] for mark in marks):
                raise name_gradient(own, self._loss.changed_at, number + 1, self.world_size)

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
        self._unheard.close()
        self._stepping = None
        self._stepped.add(id(optimizer))
        if self._epoch_over is not None and self._handed.are_computed:
            self._end_epoch()


def _waits(side: Side) -> bool:
    """Whether gradients were put aside that are in no sum yet."""
    return side.sum is not None and side.sum.is_waiting
