"""Observer of a training script, which splits it into timed steps and sets the batch size of each next step."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.hooks import RemovableHandle

from hetopt.core.errors import HetoptError
from hetopt.profiler.probe.facts import StepMemoryCount
from hetopt.profiler.probe.gradient import sample_of
from hetopt.profiler.probe.sweep import TimedStep, timed_step
from hetopt.profiler.records import PHASES
from hetopt.trainer.comm.vectors import energy
from hetopt.trainer.data.fetch import samples_in, tensors_in
from hetopt.trainer.ddp.comm_hook import keep_modules
from hetopt.trainer.failure import Lines
from hetopt.trainer.steps.stopwatch import Mark, Stopwatch

BACKWARD_PART = 2 / 3
"""Part of a step's time that is taken to be backward where nobody timed its phases: a layer computes one product
forwards and two backwards."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Wish:
    """Request for a script's next step: its batch size, whether it learns, and what is counted.

    Attributes:
        factor: batch size over the script's own.
        learns: whether the optimizer may move the parameters; False: its learning rate is 0, so that activations and
            gradients stay those of a sane model.
        inside: contexts to enter around the step, such as counters; empty: none.
        wants_gradient: whether the gradient's energy and a sample of it are kept for the `Step`.
        count: counter of the memory that the step takes; None: memory is not counted.
    """

    factor: float = 1.0
    learns: bool = False
    inside: Sequence[Any] = ()
    wants_gradient: bool = False
    count: StepMemoryCount | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """Samples, seconds and gradient energy of one training step of a script.

    Attributes:
        samples: number of samples of the step's batches; 0: not known.
        batches: number of batches that a DataLoader gave the step; 0: there is no DataLoader.
        timed: seconds from the end of the step before to the end of this step; phases are waiting for batches, from a
            batch to its backward pass, backward passes, and the optimizers' updates.
        gradient: energy of the gradient of all parameters as the last backward pass left it, and `sample_of` its
            elements, flat fp32; None: the `Wish` did not want it.
    """

    samples: int
    batches: int
    timed: TimedStep
    gradient: tuple[float, Tensor] | None


Course: TypeAlias = Generator[Wish, Step, None]
"""Generator that yields a `Wish` for each next step, and is sent the `Step` that came of it."""


class Finished(BaseException):
    """Exception that ends a script once all is measured; a BaseException, so that no script catches it.

    Its argument, if any, is the error on why the script cannot be measured.
    """


LOADING, FORWARD, BACKWARD, UPDATE = range(PHASES)


@dataclass
class _Seen:
    """The samples, batches, gradient and the spans of each phase of the step under way."""

    begun: Mark | None = None
    samples: int = 0
    batches: int = 0
    spans: tuple[list[tuple[Mark, Mark]], ...] = field(default_factory=lambda: ([], [], [], []))
    gradient: tuple[float, Tensor] | None = None


def normalises(module: nn.Module) -> bool:
    """Return whether a module normalises by the samples of its batch as it is now: BatchNorm in training mode."""
    return module.training and isinstance(module, nn.modules.batchnorm._BatchNorm)


def flat_gradient(parameters: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the gradients of parameters, at least one, as one dense vector of ``dtype``; zeros for missing gradients.

    Collective if they are sharded.
    """
    with torch.no_grad():
        gradients = (
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters
        )
        plain = (
            gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.to_dense() for gradient in gradients
        )
        return torch.cat([gradient.to(dtype).reshape(-1) for gradient in plain])


def alive(kind: type[T]) -> list[T]:
    """Return the living objects of a class or its subclasses, as far as Python's garbage collector tracks them."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]


class Observer:
    """Observer of a script's training through torch's hooks (see `listen`), which splits it into timed steps.

    A step ends when the optimizer that stepped first ends its step.

    Args:
        course: yields a `Wish` for each step, and is sent the `Step`.
        lines: finds the line of the user's files that runs now.

    Attributes:
        optimizers: the script's optimizers, in the order of their first steps.
        parameters: the parameters that are trained.
        modules: the modules that the process held when the first step ended.
        loader: DataLoader of the training data, the one read last; None: no DataLoader is known.
        batch_size: samples of a step as the script has it; 0: not known.
        batches: batches of ``loader`` in a step.
        backward_at, step_at: line of the user's files with the script's first backward pass, and first step; empty:
            none yet.
        hook: hook on modules' calls, removed once a DataLoader is known; None: `listen` was not called.
    """

    def __init__(self, course: Course, lines: Lines) -> None:
        """Make an observer that has seen nothing; `listen` connects it to torch."""
        self.optimizers: list[Optimizer] = []
        self.parameters: list[nn.Parameter] = []
        self.modules: list[nn.Module] = []
        self.loader: DataLoader[Any] | None = None
        self.batch_size, self.batches = 0, 1
        self.hook: RemovableHandle | None = None
        self._stopwatch: Stopwatch = Stopwatch(torch.device("cpu"))
        self._course = course
        self._lines = lines
        self.backward_at = self.step_at = ""
        self._wish = Wish()
        self._rates: list[tuple[dict[str, Any], Any]] = []
        self._training: WeakSet[DataLoader[Any]] = WeakSet()
        self._newest: tuple[DataLoader[Any], int] | None = None
        self._opened: dict[int, Mark] = {}
        self._rows = 0
        self._samples = 0  # of the step before
        self._seen = _Seen()
        self._around = ExitStack()

    @property
    def device(self) -> torch.device:
        """Device of the trained parameters; the CPU while none are known."""
        return self.parameters[0].device if self.parameters else torch.device("cpu")

    @property
    def dataset_size(self) -> int | None:
        """Samples of one pass over the training data; None: there is no DataLoader, or it reads a stream."""
        return None if self.loader is None else samples_of(self.loader)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of all trained parameters."""
        return sum(parameter.nbytes for parameter in self.parameters)

    def count(self) -> StepMemoryCount:
        """Return a new counter of a step's memory, given the tensors that the script keeps from step to step."""
        parameters = [parameter for module in self.modules for parameter in module.parameters(recurse=False)]
        return StepMemoryCount(
            self.device,
            parameters=[*parameters, *self.parameters],
            buffers=[buffer for module in self.modules for buffer in module.buffers(recurse=False)],
            optimizers=self.optimizers,
            gradient_bytes=self.gradient_bytes,
        )

    def _meet(self, optimizer: Optimizer) -> None:
        """Add an optimizer that steps for the first time, and its parameters; the first optimizer resets the clocks."""
        if optimizer in self.optimizers:
            return
        self.optimizers.append(optimizer)
        known = {id(parameter) for parameter in self.parameters}
        self.parameters += [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and id(parameter) not in known
        ]
        if len(self.optimizers) == 1:
            self._stopwatch, self._opened = Stopwatch(self.device), {}
            self._seen = _Seen(samples=self._seen.samples)

    def _opens(self, phase: int) -> None:
        self._opened[phase] = self._stopwatch.mark()

    def _closes(self, phase: int) -> None:
        """Stop the clock of a phase and keep its span; does nothing if the clock was not started."""
        begun = self._opened.pop(phase, None)
        if begun is not None:
            self._seen.spans[phase].append((begun, self._stopwatch.mark()))

    def find_loader(self) -> None:
        """Set `loader` to the DataLoader in memory with the most samples, and `batch_size` to its own (0: unknown).

        For scripts on whose loaders there are no hooks.
        """
        self.loader = max(alive(DataLoader), key=lambda loader: samples_of(loader) or 0, default=None)
        if self.loader is not None:
            drawn = getattr(self.loader.batch_sampler, "batch_size", None)
            sizes = (size for size in (drawn, self.loader.batch_size) if isinstance(size, int))
            self.batch_size = self._samples = next(sizes, 0)

    def begins_pass(self, loader: DataLoader[Any]) -> None:
        """Set the batch sizes of a DataLoader from now on (see `rebatch`), as the script begins a pass over it."""
        rebatch(
            loader,
            lambda: self._wish.factor if loader in self._training else 1.0,
            lambda: loader in self._training and bool(self.optimizers),
        )

    def asks_for_batch(self) -> None:
        """Start the clock of waiting for a batch, and pause the count of memory."""
        self._opens(LOADING)
        if self._wish.count is not None:
            self._wish.count.tensors.is_paused = True

    def got_batch(self, loader: DataLoader[Any], batch: Any) -> None:
        """Note a batch that a DataLoader gave the script, and stop the clock of waiting; ignores an evaluation's batch.

        The batch counts as a training batch at once if its loader trained before, or no optimizer has stepped yet; else
        when a backward pass follows.
        """
        tensors = list(tensors_in(batch))
        if self._wish.count is not None:
            self._wish.count.tensors.is_paused = False
            self._wish.count.gets(tensors)
        samples = samples_given(loader, batch)
        if not torch.is_grad_enabled():
            return  # an evaluation
        self._closes(LOADING)
        self._opens(FORWARD)
        self._newest = (loader, samples)
        if not self.optimizers or loader in self._training:
            self._train_on_newest()

    def _train_on_newest(self) -> None:
        """Count the newest batch as one of training, if not yet counted, and its loader as the training data's."""
        if self._newest is not None:
            # Of several loaders that a step reads side by side, the last tells how many samples it has.
            self.loader, samples = self._newest
            self._training.add(self.loader)
            self._seen.samples += samples
            self._seen.batches += 1
            self._newest = None

    def calls(self, inputs: Any) -> None:
        """Note the rows of a module's ``inputs`` as the step's samples, as long as no DataLoader is known."""
        if self.loader is None and not self._rows and torch.is_grad_enabled():
            self._rows = samples_in(inputs)

    def begins_backward(self) -> None:
        """Note that backward begins: start its clock, and count the newest batch, or the noted rows, as training."""
        self._train_on_newest()
        if not self.optimizers:
            self.backward_at = self.backward_at or self._lines.now() or ""
        if self.loader is None:
            self._seen.samples += self._rows
            self._rows = 0
        self._closes(FORWARD)
        self._opens(BACKWARD)

    def ended_backward(self) -> None:
        """Note that backward is over: stop its clock, and keep the gradient if it is asked for."""
        self._closes(BACKWARD)
        self._opens(FORWARD)  # another may follow without another batch
        if self._wish.wants_gradient:
            flat = flat_gradient(self.parameters, torch.float32)  # before the script clips it
            self._seen.gradient = (energy(flat), flat[sample_of(flat.numel(), flat.device)])

    def may_schedule(self) -> bool:
        """Return whether a learning-rate schedule may step now: parameters may move, or no step was taken yet."""
        return self._wish.learns or not self.optimizers  # one that is being made takes its first step at once

    def begins_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer begins its step, and set its learning rates to 0 unless the step learns."""
        self.step_at = self.step_at or self._lines.now() or ""
        self._meet(optimizer)
        if not self._wish.learns:
            for group in optimizer.param_groups:
                rate = group["lr"]
                self._rates.append((group, rate))
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        if self._wish.count is not None:
            self._wish.count.updates(parameter.grad for parameter in self.parameters)
        self._opens(UPDATE)

    def ended_step(self, optimizer: Optimizer) -> None:
        """Note an optimizer's step as over, and restore its learning rates; the first optimizer's ends the whole step.

        Raises:
            Finished: all is measured, or (with the error) the script cannot be measured.
        """
        self._meet(optimizer)
        self._closes(UPDATE)
        now = self._stopwatch.mark()
        if self._wish.count is not None:
            self._wish.count.updated()
        for group, rate in self._rates:
            group["lr"] = rate
        self._rates = []
        if optimizer is self.optimizers[0]:
            self._end_step(now)

    def _end_step(self, now: Mark) -> None:
        """End the script's step at mark ``now``: send it to the course, and begin the next as the course wishes.

        The script's first step is not sent, as its beginning is not known.

        Raises:
            Finished: all is measured, or (with the error) the script cannot be measured.
        """
        self._around.close()
        if not self._seen.samples:  # a loop over a batch that was read before
            self._seen.samples = self._samples
        self._samples = self._seen.samples
        seen, self._seen = self._seen, _Seen(begun=now)
        if seen.begun is None:  # the first: where it began is not known
            self.batch_size, self.modules = seen.samples, alive(nn.Module)
            if self.loader is not None and self.hook is not None:
                self.hook.remove()
            self._follow(None)
        else:
            timed = timed_step(self._stopwatch, (seen.begun, now), *seen.spans)
            if not seen.spans[UPDATE]:  # nobody heard its parts: whether it waited or computed cannot be told
                parts_s = ((1 - BACKWARD_PART) * timed.wall_s, BACKWARD_PART * timed.wall_s)
                timed = timed._replace(phases_s=(0.0, *parts_s, 0.0))
            self._follow(Step(samples=seen.samples, batches=seen.batches, timed=timed, gradient=seen.gradient))
        self._around = ExitStack()
        for counter in self._wish.inside:
            self._around.enter_context(counter)
        if self._wish.count is not None:
            self._around.enter_context(self._wish.count.tensors)
            self._wish.count.begins()
        self._seen.begun = self._stopwatch.mark()

    def _follow(self, step: Step | None) -> None:
        """Send a step to the course (None: begin the course), and keep the wish that it yields.

        Raises:
            Finished: the course is over, with its error if it has one.
        """
        try:
            self._wish = self._course.send(step)  # type: ignore[arg-type]  # None begins it
        except StopIteration:
            raise Finished from None
        except HetoptError as error:
            raise Finished(error) from None


class Rebatched:
    """Batch sampler in place of a DataLoader's own: the same stream of indices in batches ``factor`` times as large.

    Args:
        inner: the batch sampler that is replaced.
        factor: returns the size of the next batch over that of ``inner``'s.
        is_endless: called after the last batch; returns whether to begin anew.

    Attributes:
        sizes: samples of each batch that was drawn and not given to the script yet.
    """

    def __init__(self, inner: Any, factor: Callable[[], float], is_endless: Callable[[], bool]) -> None:
        """Put the sampler around another; nothing is drawn yet."""
        self._inner = inner
        self._factor = factor
        self._is_endless = is_endless
        self.sizes: deque[int] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield batches of sample indices, the script's size times the present factor; the last may be smaller."""
        self.sizes.clear()
        kept: list[Any] = []
        for batch in self._batches():
            kept += batch
            while len(kept) >= (size := max(1, round(len(batch) * self._factor()))):
                self.sizes.append(size)
                yield kept[:size]
                kept = kept[size:]
        if kept:
            self.sizes.append(len(kept))
            yield kept

    def _batches(self) -> Iterator[list[Any]]:
        """Yield the batches of the script's own sampler, again and again while the loader is endless."""
        while True:
            count = 0
            for batch in self._inner:
                count += 1
                yield list(batch)
            if count == 0 or not self._is_endless():
                return

    def __len__(self) -> int:
        """Return the number of batches of the script's own size, as many as the script expects."""
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def samples_of(loader: DataLoader[Any]) -> int | None:
    """Return the samples of one pass over a DataLoader's dataset; None: the dataset is a stream, or does not say."""
    data: object = loader.dataset
    return len(data) if isinstance(data, Sized) and not isinstance(data, IterableDataset) else None


def samples_given(loader: DataLoader[Any], batch: Any) -> int:
    """Return the samples of the batch that a DataLoader just gave; call it once per batch.

    By the indices that `Rebatched` drew, else the rows of ``batch``, else the loader's batch size; 0: not known.
    """
    drawn = loader.batch_sampler
    if isinstance(drawn, Rebatched) and drawn.sizes and not isinstance(loader.dataset, IterableDataset):
        return drawn.sizes.popleft()
    return samples_in(batch) or loader.batch_size or 0


def rebatch(loader: DataLoader[Any], factor: Callable[[], float], is_endless: Callable[[], bool]) -> None:
    """Replace a DataLoader's batch sampler by `Rebatched`, in place; does nothing without one or a second time."""
    if loader.batch_sampler is not None and not isinstance(loader.batch_sampler, Rebatched):
        # A loader guards the attribute; what it iterates over is this entry.
        loader.__dict__["batch_sampler"] = Rebatched(loader.batch_sampler, factor, is_endless)


PAST_THE_END = "Tried to step "
"""Beginning of OneCycleLR's error after its last step. Measuring may take more steps than the script would: the
schedule then stays at its end."""


def listen(observer: Observer) -> None:
    """Report loaders, backward passes, schedules and optimizers to ``observer`` for the rest of the process.

    Optimizers are hooked by torch's global hooks; functions of the others are wrapped in place. Also calls `be_alone`.
    """
    register_optimizer_step_pre_hook(lambda optimizer, *_: observer.begins_step(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, *_: observer.ended_step(optimizer))
    observer.hook = nn.modules.module.register_module_forward_pre_hook(lambda module, inputs: observer.calls(inputs))
    _replace(DataLoader, "__iter__", lambda iterate: lambda loader: _passes(loader, iterate, observer))
    _replace(torch.autograd, "backward", lambda backward: _backward(backward, observer))
    _replace(LRScheduler, "step", lambda step: _step_of_schedule(step, observer))
    be_alone()


def be_alone() -> None:
    """Patch torch, for the rest of the process, so that a script is the only worker.

    A process group that it makes has one rank, and a function that it would start in other processes runs in this one.
    """
    keep_modules()
    _replace(
        dist,
        "init_process_group",
        lambda init: lambda backend=None, *_, **__: init(backend, store=HashStore(), rank=0, world_size=1),
    )  # and nothing listens
    for name in ("spawn", "start_processes"):
        _replace(torch.multiprocessing, name, lambda _: lambda fn, args=(), *_, **__: fn(0, *args))


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def _passes(loader: DataLoader[Any], iterate: Callable[[DataLoader[Any]], Iterator[Any]], observer: Observer) -> Any:
    """Yield a loader's batches, and report the pass and each batch to an observer."""
    observer.begins_pass(loader)
    batches = iterate(loader)
    observer.asks_for_batch()
    for batch in batches:
        observer.got_batch(loader, batch)
        yield batch
        observer.asks_for_batch()


def _backward(backward: Callable[..., None], observer: Observer) -> Callable[..., None]:
    """Return a backward function that reports its beginning and end to an observer."""

    def passed(*arguments: Any, **options: Any) -> None:
        """Run backward, reporting its beginning, and its end unless it raises."""
        observer.begins_backward()
        backward(*arguments, **options)
        observer.ended_backward()

    return passed


def _step_of_schedule(step: Callable[..., None], observer: Observer) -> Callable[..., None]:
    """Return a schedule's step function that does nothing where the observer says so, or past its last step."""

    def stepped(schedule: LRScheduler, *arguments: Any, **options: Any) -> None:
        """Step a schedule if the observer lets it; a step past its end does nothing."""
        if not observer.may_schedule():
            return
        try:
            step(schedule, *arguments, **options)
        except ValueError as error:
            if not str(error).startswith(PAST_THE_END):
                raise

    return stepped
