"""Follows a script step by step, says what the next step should be like, and keeps what the steps were like."""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hetopt.core.errors import BadInput, HetoptError
from hetopt.core.profile import Reading
from hetopt.profiler.probe.step_memory import Kept, StepCount
from hetopt.profiler.probe.timed_step import TimedStep, timed_step
from hetopt.profiler.script.rebatching import rebatch, samples_given, samples_of
from hetopt.trainer.data.fetch import leaves_of, samples_in
from hetopt.trainer.script_lines import Lines
from hetopt.trainer.session.registry import REGISTRY
from hetopt.trainer.steps.stopwatch import Mark, Stopwatch, make_stopwatch

SESSION = "hetopt.trainer.session"

MOST_BACKWARDS = 1_000
"""Backward passes before the first step of an optimizer: no script accumulates so many."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the next step of a script should be like.

    Attributes:
        factor: on the script's own batch size.
        learns: whether the optimizer may move the parameters: a learning rate of 0 else, so that however many steps are
            timed, activations and gradients stay those of a sane model.
        inside: entered around the step, to count what it does.
        wants_gradient: whether the gradient is looked at.
        count: counts the tensors of the step; None: nobody does.
    """

    factor: float = 1.0
    learns: bool = False
    inside: Sequence[Any] = ()
    wants_gradient: bool = False
    count: StepCount | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step of a script was like.

    Attributes:
        samples: of its batches; 0: no loader gave any.
        timed: from the end of the step before to its own end; its phases are waiting for batches, from a batch to its
            backward pass, backward passes, and the optimizers' updates.
        loss: mean of the losses of its backward passes; None: there was no scalar.
        gradient: of all parameters, flat, before clipping; None: nobody asked, or not all are there.
    """

    samples: int
    timed: TimedStep
    loss: float | None
    gradient: Tensor | None


Course: TypeAlias = Generator[Wish, Step, None]
"""Asks for steps, and is sent what each was like."""


class Finished(BaseException):
    """Nothing more is to be measured; no script catches it by accident.

    Args:
        error: why the script cannot be measured; None: all is.
    """

    def __init__(self, error: HetoptError | None = None) -> None:
        super().__init__()
        self.error = error


@dataclass
class _Seen:
    """Of the step under way."""

    begun: Mark | None = None
    samples: int = 0
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)
    forwards: list[tuple[Mark, Mark]] = field(default_factory=list)
    backwards: list[tuple[Mark, Mark]] = field(default_factory=list)
    updates: list[tuple[Mark, Mark]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    loss: Tensor | None = None
    clipped_from: float | None = None
    gradient: Tensor | None = None


def normalises(module: nn.Module) -> bool:
    """Whether a module that is called now normalises by the samples of its batch."""
    return module.training and isinstance(module, nn.modules.batchnorm._BatchNorm)


class Observer:
    """Listens to a script (see `hetopt.profiler.script.hooks`). A step ends when the optimizer that stepped first does.

    Args:
        course: what is to be measured.
        lines: of the user's files.

    Attributes:
        seen_at: where the script's first deeds were: makes_optimizer, makes_loader, backward, step.
        loader: of the training data; None: no step used one.
        reading: of the loader's processes; None: it has none.
        batch_size: samples of a step as the script has it.
        parameters: that are trained.
        normalises: whether the model normalises over the samples of a batch.
    """

    def __init__(self, course: Course, lines: Lines) -> None:
        self._course = course
        self._lines = lines
        self._backwards = 0
        self._unsummed: str | None = None  # where the last backward pass was that no session made
        self._made: dict[int, str | None] = {}  # loaders that nothing has read yet
        self.seen_at: dict[str, str] = {}
        self._wish = Wish()
        self._stopwatch: Stopwatch = make_stopwatch(torch.device("cpu"))
        self._first: Optimizer | None = None
        self._optimizers: list[Optimizer] = []
        self._rates: list[tuple[dict[str, Any], Any]] = []
        self._training: set[int] = set()
        self._asked: Mark | None = None
        self._got: Mark | None = None
        self._backward: Mark | None = None
        self._update: Mark | None = None
        self._users: set[int] = set()
        self._seen = _Seen()
        self._around = ExitStack()
        self.loader: DataLoader[Any] | None = None
        self.reading: Reading | None = None
        self.batch_size = 0
        self.parameters: list[nn.Parameter] = []
        self.normalises = False
        self._modules: dict[int, nn.Module] = {}
        self._hook = nn.modules.module.register_module_forward_pre_hook(self._notice)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.parameters[0].device if self.parameters else torch.device("cpu")

    @property
    def dataset_size(self) -> int | None:
        """Samples of one pass over the training data; None: nothing says."""
        return None if self.loader is None else samples_of(self.loader)

    @property
    def unread(self) -> str | None:
        """Where a loader is made that nothing reads; None: there is none."""
        return next((one for one in self._made.values() if one is not None), None)

    def makes_loader(self, loader: DataLoader[Any]) -> None:
        self._made[id(loader)] = self._lines.now(not_by=SESSION)

    def makes_optimizer(self) -> None:
        self._see("makes_optimizer")

    def _see(self, deed: str) -> None:
        if deed not in self.seen_at:
            self.seen_at[deed] = self._lines.now() or ""

    @property
    def modules(self) -> Collection[nn.Module]:
        """The modules that were called in the first step."""
        return self._modules.values()

    @property
    def kept(self) -> Kept:
        """What the script keeps from step to step, as far as its modules and optimizers hold it."""
        modules = self._modules.values()
        own = [one for module in modules for one in module.parameters()]
        return Kept(
            parameters=[*own, *self.parameters],
            buffers=[one for module in modules for one in module.buffers()],
            optimizers=self._optimizers,
            gradient_bytes=sum(one.nbytes for one in self.parameters),
        )

    def begins_pass(self, loader: DataLoader[Any]) -> None:
        self._made.pop(id(loader), None)
        rebatch(
            loader,
            lambda: self._wish.factor if id(loader) in self._training else 1.0,
            lambda: id(loader) in self._training,
        )

    def asks_for_batch(self, loader: DataLoader[Any]) -> None:
        self._asked = self._stopwatch.mark()
        if self._wish.count is not None:
            self._wish.count.tensors.pause(True)

    def got_batch(self, loader: DataLoader[Any], batch: Any) -> None:
        if self._wish.count is not None:
            self._wish.count.tensors.pause(False)
            self._wish.count.gets(batch)
        samples = samples_given(loader, batch)
        if not torch.is_grad_enabled():
            return  # an evaluation
        now = self._stopwatch.mark()
        if self._asked is not None:
            self._seen.waits.append((self._asked, now))
        self._got = now
        if self._first is None and loader.num_workers:
            tensors = [leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor)]
            self.reading = Reading(
                processes=loader.num_workers,
                batches_ahead=loader.prefetch_factor or 1,
                sample_bytes=sum(tensor.nbytes for tensor in tensors) / (samples_in(batch) or 1),
                tensors=len(tensors),
            )
        if self._first is None or id(loader) in self._training:
            # Of several loaders that a step reads side by side, the last tells how many samples it has.
            self.loader = loader
            self._users.add(id(loader))
            self._seen.samples += samples

    def begins_backward(self) -> None:
        if self._first is None:
            self._see("backward")
            self._unsummed = self._lines.now(not_by=SESSION)
            self._backwards += 1
            if self._backwards > MOST_BACKWARDS:
                raise Finished(self.no_step(f"{MOST_BACKWARDS:,} times"))
        self._backward = self._stopwatch.mark()
        if self._got is not None:
            self._seen.forwards.append((self._got, self._backward))
        self._got = None

    def ended_backward(self, loss: Tensor | None) -> None:
        now = self._stopwatch.mark()
        if self._backward is not None:
            self._seen.backwards.append((self._backward, now))
        self._got = now  # another forward pass may follow without another batch
        told = self._seen.loss if self._seen.loss is not None else loss
        if told is not None and told.numel() == 1:
            self._seen.losses.append(told.double())
        self._seen.loss = None

    def scales_loss(self, loss: Tensor) -> None:
        self._seen.loss = loss

    def clips(self, norm: float) -> None:
        self._seen.clipped_from = norm

    def schedules(self) -> bool:
        return self._wish.learns or self._first is None  # one that is being made takes its first step at once

    def no_step(self, often: str = "") -> BadInput:
        """What a script that comes to no step of an optimizer is told."""
        made, backward = self.seen_at.get("makes_optimizer"), self.seen_at.get("backward")
        if backward is None:
            at = f" (made in {made})" if made else ""
            return BadInput(
                f"The script calls no backward pass, so that its optimizer{at} never steps."
                if made
                else "The script makes no optimizer and calls no backward pass: nothing is trained in it.",
                hint="give it the arguments with which it trains, after --",
            )
        return BadInput(
            f"{backward}: backward is called here{' ' + often if often else ''}, and no optimizer of torch steps"
            + (f" (one is made in {made})." if made else "."),
            hint="call optimizer.step() after it; parameters that are changed by hand need torch.optim.SGD instead",
        )

    def _why_not_summed(self, optimizer: Optimizer, by_closure: bool) -> BadInput | None:
        """What several workers would refuse, where a session that is alone computes whatever the script does."""
        member = REGISTRY.of(optimizer)
        if member is None:
            return None
        if not member.has_batches:
            return BadInput(
                f"{self.seen_at.get('backward', 'The script')}: a gradient comes before any batch of the session's "
                "loader, which the training loop does not read.",
                hint="iterate over what run.loader(loader) returns, instead of the loader",
            )
        if self._unsummed is not None and not member.has_summed(optimizer) and not by_closure:
            return BadInput(
                f"{self._unsummed}: the script calls backward itself, so that its session cannot weigh the gradient.",
                hint="call run.backward(loss) instead, or run.sync(weight=n) after it, n being what the loss is a "
                "mean over",
            )
        return None

    def begins_step(self, optimizer: Optimizer, *, by_closure: bool) -> None:
        if self._first is None:
            self._see("step")
            refused = self._why_not_summed(optimizer, by_closure)
            if refused is not None:
                raise Finished(refused)
        if optimizer not in self._optimizers:
            self._add(optimizer)
        if self._wish.wants_gradient and optimizer is self._optimizers[-1]:
            self._seen.gradient = self._gradient()
        if not self._wish.learns:
            for group in optimizer.param_groups:
                rate = group["lr"]
                self._rates.append((group, rate))
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        if self._wish.count is not None:
            self._wish.count.updates(one.grad for one in self.parameters)
        self._update = self._stopwatch.mark()

    def ended_step(self, optimizer: Optimizer) -> None:
        now = self._stopwatch.mark()
        if self._wish.count is not None:
            self._wish.count.updated()
        if self._update is not None:
            self._seen.updates.append((self._update, now))
        for group, rate in self._rates:
            group["lr"] = rate
        self._rates = []
        if optimizer is self._first:
            self._end_step(now)

    def _add(self, optimizer: Optimizer) -> None:
        self._optimizers.append(optimizer)
        known = {id(one) for one in self.parameters}
        self.parameters += [
            one
            for group in optimizer.param_groups
            for one in group["params"]
            if one.requires_grad and id(one) not in known
        ]
        if self._first is None:
            self._first = optimizer
            self._stopwatch = make_stopwatch(self.device)
            self._training, self._users = set(self._users), set()
            self._seen = _Seen(samples=self._seen.samples)

    def _notice(self, module: nn.Module, inputs: Any) -> None:
        self._modules[id(module)] = module
        self.normalises |= normalises(module)

    def _end_step(self, now: Mark) -> None:
        self._around.close()
        seen, self._seen = self._seen, _Seen(begun=now)
        if seen.begun is None:  # the first: where it began is not known
            self.batch_size = seen.samples
            self._hook.remove()
        self._follow(None if seen.begun is None else self._told(seen, now))
        self._around = ExitStack()
        for one in self._wish.inside:
            self._around.enter_context(one)
        if self._wish.count is not None:
            self._around.enter_context(self._wish.count.tensors)
            self._wish.count.begins()
        self._seen.begun = self._stopwatch.mark()

    def _follow(self, step: Step | None) -> None:
        try:
            self._wish = next(self._course) if step is None else self._course.send(step)
        except StopIteration:
            raise Finished from None
        except HetoptError as error:
            raise Finished(error) from None

    def _told(self, seen: _Seen, now: Mark) -> Step:
        assert seen.begun is not None
        losses = [float(one) for one in seen.losses]
        gradient = seen.gradient
        if gradient is not None and seen.clipped_from is not None:
            norm = float(gradient.norm())
            if 0 < norm < seen.clipped_from < math.inf:
                gradient.mul_(seen.clipped_from / norm)
        return Step(
            samples=seen.samples,
            timed=timed_step(
                self._stopwatch, (seen.begun, now), seen.waits, seen.forwards, seen.backwards, seen.updates
            ),
            loss=math.fsum(losses) / len(losses) if losses and all(map(math.isfinite, losses)) else None,
            gradient=gradient,
        )

    def _gradient(self) -> Tensor | None:
        """Of all parameters, flat; zeros where a step did not use one."""
        with torch.no_grad():
            return torch.cat(
                [
                    torch.zeros(one.numel(), device=one.device)
                    if one.grad is None
                    else one.grad.to_dense().float().reshape(-1)
                    for one in self.parameters
                ]
            )
