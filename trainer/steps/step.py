"""One training step up to the summed gradient: forward and backward over micro-batches, and the sum over workers.

Every micro-batch contributes its mean gradient times (its samples / B), and workers SUM: whatever the shares, the
result is the mean gradient of one machine with the whole batch of B samples. Where a loss is a mean over something else
(tokens), its counts stand for samples, and are added up over the workers before anything is compressed.

The gradient is computed in one flat buffer, and summed in buckets under backward; hooks on the parameters tell when a
bucket is made. At once is summed what needs the whole gradient (Top-k, residuals in true units under loss scaling),
what is so small that nothing can be sent under backward, and what a single worker computes.

**Memory.** A micro-batch larger than any that this worker has computed may not fit. Before it is tried, what a forward
pass changes besides gradients is kept, and it is put back if memory runs out: the step can then be computed again in
smaller micro-batches as if the larger one had never been tried. No sample is lost and none counts twice.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hetopt.core.comm import cost
from hetopt.core.comm.options import Option
from hetopt.core.comm.payload_bytes import VALUE_BYTES
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.memory import Precision
from hetopt.trainer.comm.channel import group_size
from hetopt.trainer.comm.compressor import Residual
from hetopt.trainer.comm.exchange import BucketSum, Exchange, ExchangeStats
from hetopt.trainer.comm.vectors import GradientNorms, energy
from hetopt.trainer.context import Generators
from hetopt.trainer.data.cursor import MicroBatch
from hetopt.trainer.data.fetch import Batch, rows, samples_in
from hetopt.trainer.failure import is_out_of_memory
from hetopt.trainer.sharding import held, viewed_as
from hetopt.trainer.steps.local_batch import BatchReader, SampleFeed
from hetopt.trainer.steps.stopwatch import FORWARD, Mark, Slowdown, Stopwatch
from hetopt.trainer.task import Loss, cross_entropy_weight, mean_of

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device_type: str, precision: Precision) -> AbstractContextManager[object]:
    """Return a context manager for one forward pass in a precision; parameters and gradients stay fp32.

    For fp32 and tf32 it does nothing.
    """
    dtype = _DTYPES.get(precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(device_type, dtype=dtype)


AMPERE = (8, 0)
"""Compute capability (major, minor) from which NVIDIA's matrix units do TF32 and bf16; before, torch does bf16 in
software."""


def lacks_units(device: torch.device, precision: Precision) -> bool:
    """Return whether a device has no fast units for a precision, so that nothing is gained by it."""
    if device.type != "cuda":
        return precision == "tf32"
    return precision in ("tf32", "bf16") and torch.cuda.get_device_capability(device) < AMPERE


@contextlib.contextmanager
def matrices_in(precision: Precision) -> Iterator[None]:
    """Compute fp32 matrix products and convolutions inside in TF32, backward too, if ``precision`` is tf32.

    Torch's switches, which hold for the process, are put back at the end.

    GPUs before Ampere have no such units, and compute in fp32.
    """
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    if precision == "tf32":
        products.allow_tf32 = convolutions.allow_tf32 = True
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Factor on fp16 losses that keeps small gradients above zero, and the steps since an overflow or a change.

    (Micikevicius et al. 2018, section 3.2.)

    It halves when a gradient overflows and doubles after ``growth_interval`` steps without overflow. PyTorch's
    GradScaler does the same, but decides from this worker's gradient; here it is decided from the sum, which all
    workers hold, so that they skip the same steps and stay identical.

    Attributes:
        value: factor on the loss, at least 1 after an overflow.
        clean_steps: steps without overflow since the factor last changed.
        growth_interval: steps without overflow after which the factor doubles.
    """

    value: float = 2.0**16
    clean_steps: int = 0
    growth_interval: int = 2000

    def after(self, *, finite: bool) -> LossScale:
        """Return the next step's scale: half (at least 1) after an overflow, double after enough finite steps.

        Args:
            finite: whether the summed gradient of the step was finite.
        """
        if not finite:
            return LossScale(value=max(1.0, self.value / 2), growth_interval=self.growth_interval)
        if self.clean_steps + 1 >= self.growth_interval:
            return LossScale(value=self.value * 2, growth_interval=self.growth_interval)
        return LossScale(value=self.value, clean_steps=self.clean_steps + 1, growth_interval=self.growth_interval)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTrace:
    """Record of one step of this worker: loss, marks of its times, and its exchange.

    Attributes:
        loss_sum: sum of this worker's losses over its samples, a double on the device; in a period's log over the
            samples of all workers.
        start: mark of the time before the first sample was fetched.
        backward_end: mark of the time when this worker's last gradient was ready (what its pace waited included).
        reduce_end: mark of the time when the gradient of all workers was ready.
        waited_s: seconds until ``backward_end`` that were spent waiting for other workers.
        finite: whether the summed gradient may be applied; always true without loss scaling.
        way: name of how the gradient was exchanged; steps of the same way can be compared. Empty: it was not exchanged.
        exchange: cost of the exchange; None: there was no exchange, or everything was summed as it is under backward.
        under_backward: whether it was exchanged while backward still computed.
        gradient_energy: squared norm of this worker's weighted gradient; None: not asked for.
        norms: squared norms of gradients that were summed as they are, see `GradientNorms.take`; None: not asked for.
    """

    loss_sum: Tensor
    start: Mark
    backward_end: Mark
    reduce_end: Mark
    waited_s: float = 0.0
    finite: bool = True
    way: str = ""
    exchange: ExchangeStats | None = None
    under_backward: bool = False
    gradient_energy: float | None = None
    norms: tuple[float, ...] | None = None


class LossModule(nn.Module):
    """Model with the task's loss on top: called with a batch, it returns the mean loss.

    Args:
        model: model that is trained.
        loss: loss of the task, by model and batch.
        precision: number format of the forward pass.

    Attributes:
        is_counted: whether the loss is a mean over something else than samples, as far as it was called or tested.
        targets_per_sample: targets that a cross entropy counts for each sample, where it is a mean over samples as a
            test of the loss has shown; 0: another loss, or not tested.
        count: number of things that the loss of the last batch is a mean over, a double on the device; None: it counts
            samples.
    """

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Batch], Loss], precision: Precision) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self._precision = precision
        self.is_counted = False
        self.count: Tensor | None = None
        self.targets_per_sample = 0.0
        self._calls = 0

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean loss of a batch, a scalar; where the loss counts other things than samples, set ``count``.

        Raises:
            BadInput: the loss is no scalar tensor, does not depend on the model, gives a sum and its count for some
                batches only, or leaves targets out that it did not when the run began.
        """
        with autocast(next(self.model.parameters()).device.type, self._precision):
            result = self._loss(self.model, batch)
        loss = result[0] if isinstance(result, tuple) else result
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            problem = f"has shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"is a {type(loss).__name__}"
            raise BadInput(
                f"The task's loss {problem}; it must be a scalar tensor.",
                hint="return the mean over the samples of the batch, or a sum and its count",
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise BadInput("The task's loss does not depend on its model.", hint="check the loss")
        if isinstance(result, tuple):
            self.is_counted = True
            self.count = torch.as_tensor(result[1], dtype=torch.float64, device=loss.device)
            return mean_of(result)
        if self.targets_per_sample:
            self._watch(loss, samples_in(batch) or 1)
        elif self.is_counted and (weight := cross_entropy_weight(loss)) is not None:
            self.count = weight.double()
        elif self.is_counted:
            raise BadInput(
                "The task's loss gives a sum and its count for some batches, and a mean for others.",
                hint="return (sum, count) for all of them",
            )
        return loss

    def _watch(self, loss: Tensor, samples: int) -> None:
        """Raise BadInput if a cross entropy leaves targets out, which it did not at first.

        On a GPU only look at times.
        """
        self._calls += 1
        # To look makes the host wait for a GPU.
        if loss.grad_fn is None or (loss.is_cuda and self._calls % _LOOK_EVERY):
            return
        weight = cross_entropy_weight(loss)
        if weight is None or abs(float(weight) - self.targets_per_sample * samples) > _SAME * samples:
            raise BadInput(
                "The task's loss leaves targets out of its mean (ignore_index) and did not when the run began, so that "
                "workers would weigh it wrongly.",
                hint="return the tuple (sum, count) from the loss",
            )


_LOOK_EVERY = 20

_SAME = 1e-3
"""Of a sample's targets: less than any that is left out."""


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the model's parameters that require gradients, in order.

    Raises:
        BadInput: no parameter requires gradients, or one of them is not fp32.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise BadInput("The task's model has no parameters to train.", hint="check requires_grad")
    for parameter in parameters:
        if parameter.dtype != torch.float32:
            raise BadInput(
                f"The task's model has {str(parameter.dtype).removeprefix('torch.')} parameters.",
                hint="keep parameters float32; the run's precision chooses bf16 or fp16 for the computation",
            )
    return parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Contiguous elements of the flat gradient that are exchanged together: one bucket.

    Attributes:
        index: number of the part, in the order in which parts travel.
        start: place of its first element in the flat gradient.
        stop: place behind its last element.
        members: indices of the parameters whose gradients these are.
        done: share of the whole gradient that is there with this part and those before it, in (0, 1].
    """

    index: int
    start: int
    stop: int
    members: range
    done: float


def parts_of(parameters: Sequence[Tensor]) -> list[Part]:
    """Return the buckets of a flat gradient in the order in which backward makes them, from its end; a small one first.

    Without parameters there are none.

    Args:
        parameters: float32 or complex64, or this device's parts of them, in the order in which their gradients lie.
    """
    starts = [0, *accumulate(parameter.numel() * (1 + parameter.is_complex()) for parameter in parameters)]
    parts: list[Part] = []
    last = len(parameters)
    for first in reversed(range(len(parameters))):
        full = cost.BUCKET_BYTES if parts else cost.FIRST_BUCKET_BYTES
        start, stop = starts[first], starts[last]
        if VALUE_BYTES * (stop - start) >= full or first == 0:
            done = 1 - start / max(1, starts[-1])
            parts.append(Part(index=len(parts), start=start, stop=stop, members=range(first, last), done=done))
            last = first
    return parts


class Buckets:
    """Hooks that call ``ready`` with each bucket, once backward has made its gradients, in one order on all workers.

    Args:
        parameters: parameters in the order in which their gradients lie.
        ready: method that is called with a part in the thread of the backward pass, or by `finish`.

    Attributes:
        parts: parts of the gradient, in the order in which they are ready.
        ready_parts: number of parts that ``ready`` was called with since `finish`.
        is_armed: whether a backward pass is followed.
        is_repeated: whether a gradient was made more often than once a pass (a layer is computed again in backward).
    """

    def __init__(self, parameters: Sequence[nn.Parameter], ready: Callable[[Part], None]) -> None:
        self.parts = parts_of([held(parameter) for parameter in parameters])
        self.ready_parts, self.is_armed, self.is_repeated = 0, False, False
        self._ready = weakref.WeakMethod(ready)  # whose object has the gradient: a cycle would keep that for a while
        self._part_of = {index: part for part in self.parts for index in part.members}
        self._parameters = parameters
        self._hooks: list[RemovableHandle] = []

    def arm(self, passes: int = 1) -> None:
        """Follow the next ``passes`` backward passes, whose gradients add up; buckets are ready in the last one.

        Raises:
            RunFailed: the backward pass before failed when part of its gradient had been sent, of which the others know
                nothing.
        """
        if self.ready_parts:
            raise RunFailed(
                "a backward pass failed while its gradient was being sent, so that its batch cannot be left out.",
                hint="let the script end with that error: the run goes on from its last checkpoint",
            )
        if not self._hooks:
            note = partial(_note_made, weakref.ref(self))  # weakly: no collector sees what hooks of parameters hold
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(partial(note, index))  # type: ignore[no-untyped-call]  # torch's gap
                for index, parameter in enumerate(self._parameters)
            ]
        self.is_armed, self.is_repeated = True, False
        self._left = [passes] * len(self._part_of)
        self._missing = [passes * len(part.members) for part in self.parts]

    def finish(self) -> None:
        """Stop following backward passes, and call ``ready`` with each bucket that they left out."""
        self.is_armed = False
        while self.ready_parts < len(self.parts):
            self._tell()
        self.ready_parts = 0

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def note_made(self, index: int) -> None:
        """Note a gradient as made, by the parameter's index, and call ``ready`` with full buckets; only while armed."""
        if not self.is_armed:
            return
        if not self._left[index]:
            self.is_repeated = True
            return
        self._left[index] -= 1
        self._missing[self._part_of[index].index] -= 1
        while self.ready_parts < len(self.parts) and not self._missing[self.ready_parts]:
            self._tell()

    def _tell(self) -> None:
        """Call ``ready`` with the next bucket."""
        part = self.parts[self.ready_parts]
        self.ready_parts += 1
        ready = self._ready()
        assert ready is not None  # whoever follows a backward pass is there
        ready(part)


def _note_made(buckets: weakref.ref[Buckets], index: int, parameter: Tensor) -> None:
    """Report the gradient of parameter number ``index`` to the buckets, if these still live (a hook of torch)."""
    followed = buckets()
    if followed is not None:
        followed.note_made(index)


_RUNS_WITH_LESS = 1
"""Runs that prove nothing: the optimizer takes its memory at the end of the first."""


class DoesNotFit(RunFailed):
    """Error that a micro-batch of ``samples`` samples does not fit into this worker's memory.

    Its attribute ``samples`` is the size of the micro-batch.

    Args:
        part: micro-batch that does not fit.
    """

    def __init__(self, part: MicroBatch) -> None:
        super().__init__(
            f"a micro-batch of {len(part)} samples does not fit into the memory of this worker.",
            hint="set max_local_batch_size of the worker",
        )
        self.samples = len(part)


def remembered(model: nn.Module, device: torch.device) -> Callable[[], None]:
    """Copy a model's buffers and torch's random states; return a function that puts them back.

    The random states of the CPU and of ``device``.
    """
    buffers, generators = [(buffer, buffer.clone()) for buffer in model.buffers()], Generators.at(device)

    def restore() -> None:
        """Put the copied buffers and random states back, in place."""
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)
        generators.restore_generators(device)

    return restore


def half_of(samples: int, rank: int) -> int:
    """Return the samples to try when a micro-batch of ``samples`` did not fit: half, rounded down.

    Args:
        samples: size of the micro-batch, at least 1.
        rank: rank of this worker, for the error.

    Raises:
        RunFailed: the micro-batch was a single sample.
    """
    if samples == 1:
        raise RunFailed(
            f"worker {rank} has too little memory for a single sample.",
            hint="leave this worker out, or give it a device with more memory",
        )
    return samples // 2


Switch: TypeAlias = Callable[[bool], tuple[BucketSum | None, str, bool]]
"""Function that is told whether the next step looks at gains, and returns what sums buckets in it (None: nothing does),
the name of the way whose times the step has, and whether each worker trains for itself."""


def switch_between(exchange: Exchange, buckets: Mapping[str, BucketSum], present: Callable[[], Option]) -> Switch:
    """Return a function that decides at each step whether gradients are summed whole or in buckets, and by what.

    Buckets keep no residual. So the first step after a sparsified exchange is summed whole, which sends the residual,
    and so is every step that looks at gains. Nor do workers train for themselves before their residuals are sent.

    Args:
        exchange: exchange of whole gradients, whose compression changes.
        buckets: sums of buckets under backward, by compressor.
        present: returns the candidate in use, the same on all workers.
    """

    def now(looks: bool) -> tuple[BucketSum | None, str, bool]:
        """Return the sum of buckets to use (None: whole gradients), the way's name, and whether the worker is alone."""
        candidate = present()
        if not (candidate.in_buckets or candidate.averages):
            return None, candidate.key, False
        if exchange.has_residual or (looks and candidate.in_buckets):
            # Whole gradients are exceptions: nobody should compare their times with those of the others.
            return None, "", False
        return None if candidate.averages else buckets[candidate.compression.name], candidate.key, candidate.averages

    return now


class FusedStep:
    """Computation of a step's gradient in one flat fp32 buffer, and its sum over workers, whole or in buckets.

    Gradients of all parameters are views into the buffer; a parameter that a step does not use keeps a zero there.

    A worker that trains alone (no exchange) applies the mean gradient of its own samples, whatever the others have.
    Averaged over the workers, weighted by their samples, updates by such gradients are those by the gradient of the
    whole batch, for optimizers that are linear in it.

    A bucket is sent as soon as the backward pass of the last micro-batch has made it, and then there is no way back. So
    a micro-batch larger than any before, which may not fit into memory, is computed as a whole and only then sent,
    bucket by bucket in the usual order: the other workers, who may send theirs under backward, see no difference.

    Args:
        module: model with its loss.
        reader: source of the samples.
        stopwatch: clock of the device.
        pace: waits that make this worker as slow as its spec says.
        exchange: sum of the whole buffer over all workers; None: the gradient stays this worker's own.
        way: name of what the exchange does, for the traces.
        norms: whether traces tell the squared norm of this worker's gradient, where the whole buffer is exchanged.
        counts: where a loss is a mean over something else than samples: whether the counts of ``all`` workers are added
            up, or of this worker ``alone``, whose samples then are the whole batch; ``unused``: samples are counted.
        in_buckets: sum of buckets under backward, in the place of ``exchange``; None: there is none.
        switch: rule that changes how gradients travel while training goes on; None: that stays as it is.
        devices: number of devices that share the model, over whose gradients torch takes the mean.

    Attributes:
        way, in_buckets: as the arguments; they may change between steps, on all workers alike.
        is_alone: whether a step's gradient stays this worker's own; it may change, too.
        flat: gradient, 1-D fp32: of this worker while a step computes it, then of all; of a sharded model the part that
            this device holds.
        proven: samples of the largest micro-batch that is known to fit.

    Raises:
        BadInput: the model has no trainable parameters, or one that is not fp32.
    """

    def __init__(
        self,
        *,
        module: LossModule,
        reader: BatchReader | SampleFeed,
        stopwatch: Stopwatch,
        pace: Slowdown,
        exchange: Exchange | None = None,
        way: str = "",
        norms: bool = False,
        counts: Literal["all", "alone", "unused"] = "all",
        in_buckets: BucketSum | None = None,
        switch: Switch | None = None,
        devices: int = 1,
    ) -> None:
        self._module = module
        self._parameters = parameters = trainable_parameters(module.model)
        self._device = device = parameters[0].device
        self._devices = devices
        self.way = way
        self.in_buckets = in_buckets
        self._wants_energy, self._norms = norms, GradientNorms()
        self._switch = switch
        self._reader = reader
        self._is_counted, self.is_alone = counts != "unused", counts == "alone"
        self._exchange = exchange
        self._stopwatch = stopwatch
        self._pace = pace
        sizes = [held(parameter).numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes), device=device)
        self._views = [
            viewed_as(parameter, view)
            for parameter, view in zip(parameters, torch.split(self.flat, sizes), strict=True)
        ]
        self._buckets = Buckets(parameters, self._send)
        self._computed: Mark | None = None
        self._counted: Tensor | None = None
        self._part: MicroBatch | None = None
        self._runs = self.proven = 0

    @property
    def residual(self) -> Exchange | BucketSum | Residual:
        """Residual state of the exchange; one that keeps nothing where nothing is exchanged."""
        in_use = self._exchange if self.in_buckets is None or self._switch is not None else self.in_buckets
        return in_use or Residual()

    def warm_up(self, part: MicroBatch) -> None:
        """Compute a micro-batch once, to see if it fits; buffers and random states are put back, no gradient is used.

        Raises:
            DoesNotFit: memory ran out.
            RunFailed: memory ran out, where devices share the model.
            BadInput: the loss cannot be used, see `LossModule.forward`.
        """
        self._take_gradients()
        restore = remembered(self._module.model, self._device)
        self._accumulated([part], 1.0, restore)
        restore()

    def run(
        self,
        parts: Sequence[MicroBatch],
        global_batch_size: int,
        loss_scale: float | None,
        look_at: Sequence[float] = (),
        wants_norms: bool = False,
    ) -> StepTrace:
        """Compute the gradient of micro-batches into `flat`, sum it over workers, return a trace; all must call it.

        Args:
            parts: micro-batches to compute.
            global_batch_size: B, samples of all workers.
            loss_scale: factor on the loss, of fp16; None: there is none.
            look_at: ratios (fractions of the elements) at which to measure the energy kept.
            wants_norms: whether to measure the squared norms of this worker's gradient and of the sum.

        Raises:
            DoesNotFit: memory ran out. Gradients are spoilt; everything else is as before if ``parts`` held a
                micro-batch larger than ``proven``.
            RunFailed: memory ran out while the gradient was being sent, or where devices share the model; or a layer's
                gradient was made twice in one backward pass.
            BadInput: the loss cannot be used, see `LossModule.forward`, or workers are about to exchange in different
                ways.
            HungPeer: another worker did not come in time.
            LostPeer: another worker left in the middle.
        """
        if self._switch is not None:
            self.in_buckets, self.way, self.is_alone = self._switch(bool(look_at))
        self._norms.ask(wants_norms)
        begun = self._stopwatch.mark()
        samples = sum(map(len, parts))
        global_batch_size = max(1, samples) if self.is_alone else global_batch_size
        self._pace.begin(samples)
        self.flat.zero_()
        self._take_gradients()
        self._computed = None
        factor = self._devices * (loss_scale or 1.0) / global_batch_size
        loss_sum = self._compute(parts, factor)
        if self._computed is None:
            self._pace.reach(1.0)
            self._computed = self._stopwatch.mark()
        if self._counted is not None:  # and so nothing is on its way yet
            total = self._counted.to("cpu")  # of all workers, that the step's losses are means over
            if not self.is_alone and dist.is_initialized():
                dist.all_reduce(total)
            by_samples = global_batch_size / (float(total) or 1.0)
            self.flat.mul_(by_samples)
            self._norms.divide(1 / by_samples)
            loss_sum = loss_sum * by_samples
        finite, square = True, None
        stats: ExchangeStats | None = None
        if self.in_buckets is not None:
            self._buckets.finish()
            if self._buckets.is_repeated:
                raise RunFailed(
                    "a layer's gradient was made twice in one backward pass, the second time when it was sent already.",
                    hint="pass use_reentrant=False to torch.utils.checkpoint",
                )
            stats = self.in_buckets.wait()
        if loss_scale is not None:
            # Residuals are kept in true units, and an overflow on one worker must not enter any residual: the workers
            # agree before they exchange. Where they have, it is in the sum, the same everywhere but in other shards.
            self.flat.mul_(1 / loss_scale)
            self._norms.divide(loss_scale)
            is_alike = self.in_buckets is not None and self._devices == 1
            finite = bool(torch.isfinite(self.flat).all()) if is_alike else all_finite(self.flat)
        if self.in_buckets is None:
            square = energy(self.flat) if self._wants_energy and finite else None
            if finite:
                self._norms.add_own([self.flat], first=True)
                alone = ExchangeStats(sent_bytes=0)
                stats = alone if self._exchange is None or self.is_alone else self._exchange.run(self.flat, look_at)
        if finite:
            self._norms.add_summed([self.flat])
        return StepTrace(
            loss_sum=loss_sum,
            start=begun,
            backward_end=self._computed,
            reduce_end=self._stopwatch.mark(),
            finite=finite,
            way=self.way if finite else "",
            exchange=stats,
            under_backward=self.in_buckets is not None,
            gradient_energy=square,
            norms=self._norms.take(samples),
        )

    def gradient(self, parts: Sequence[MicroBatch]) -> Tensor:
        """Return this worker's mean gradient of some samples, 1-D fp32; it overwrites `flat`, and changes nothing else.

        Raises:
            DoesNotFit: memory ran out.
            RunFailed: memory ran out, where devices share the model.
            BadInput: the loss cannot be used, see `LossModule.forward`.
        """
        samples = max(1, sum(map(len, parts)))
        self._take_gradients()
        self.flat.zero_()
        restore = remembered(self._module.model, self._device)
        self._accumulated(parts, 1 / samples, restore)
        restore()
        return self.flat * (samples / (float(self._counted) or 1.0) if self._counted is not None else 1.0)

    def _compute(self, parts: Sequence[MicroBatch], factor: float) -> Tensor:
        """Accumulate the gradient, and send its buckets as they are made, unless a micro-batch may be too large.

        Returns:
            The sum of the losses over samples, a double on the device.

        Raises:
            DoesNotFit: memory ran out; nothing was sent.
            RunFailed: memory ran out while the gradient was being sent, or where devices share the model.
        """
        largest = max(map(len, parts), default=0)
        fits = largest <= self.proven
        if self.in_buckets is not None and fits and not self._module.is_counted:
            self._buckets.arm(len(parts))
        try:
            loss_sum = self._accumulated(parts, factor, None if fits else remembered(self._module.model, self._device))
        except DoesNotFit as error:
            if self._buckets.ready_parts:
                raise RunFailed(
                    f"worker {dist.get_rank()} ran out of memory over {error.samples} samples that fitted before, "
                    "while their gradient was being sent.",
                    hint="set a smaller max_local_batch_size for this worker",
                ) from None
            self._buckets.is_armed = False
            raise
        self._runs += 1
        if self._runs > _RUNS_WITH_LESS:
            self.proven = max(self.proven, largest)
        return loss_sum

    def _accumulated(self, parts: Sequence[MicroBatch], factor: float, restore: Callable[[], None] | None) -> Tensor:
        """Add ``factor * samples * mean gradient`` of every micro-batch; return the sum of their losses over samples.

        Where the loss counts something else, that stands for samples.

        Args:
            parts: micro-batches.
            factor: factor on each gradient.
            restore: called where memory runs out, to put buffers and random states back; None: they stay.

        Raises:
            DoesNotFit: memory ran out; the gradient is spoilt.
            RunFailed: memory ran out, where devices share the model.
        """
        try:
            loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
            counts = self._is_counted and self._module.is_counted
            self._counted = torch.zeros_like(loss_sum) if counts else None
            samples = sum(map(len, parts))
            for part in parts:
                self._part = part
                batch = self._reader.read(part)
                for group, size in self._groups(batch, len(part), of=len(parts)):
                    loss_sum = loss_sum + self._added(group, size, factor, counts=part.counts)
                    if size < samples and self._norms.is_asked and group_size(None) == 1:
                        self._norms.add_group(self.flat, size / samples)
            return loss_sum
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or self._part is None:
                raise
        # Out here, where the error is gone: its traceback holds on to what filled the memory.
        if restore is not None:
            restore()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if self._devices > 1:
            raise RunFailed(
                f"worker {dist.get_rank()} has too little memory for its part of the model and "
                f"{len(self._part)} samples.",
                hint="set a smaller max_local_batch_size, or let more devices share the model",
            )
        raise DoesNotFit(self._part)

    def _groups(self, batch: Batch, samples: int, *, of: int) -> list[tuple[Batch, int]]:
        """Return a micro-batch cut into groups, each with its number of samples, to measure the noise of the gradient.

        One group, unless a worker trains alone and norms are asked for.

        Args:
            batch: data of the micro-batch.
            samples: number of samples of the micro-batch.
            of: number of micro-batches of the step.
        """
        count = min(NOISE_GROUPS // of, samples // 2) if self._norms.is_asked and group_size(None) == 1 else 1
        edges = [place * samples // max(1, count) for place in range(max(1, count) + 1)]
        return [(rows(batch, first, last) if count > 1 else batch, last - first) for first, last in pairwise(edges)]

    def _added(self, batch: Batch, samples: int, factor: float, *, counts: bool) -> Tensor:
        """Add the gradient of a batch of samples; return the sum of its loss, a double on the device."""
        loss: Tensor = self._module(batch)
        summed = loss.detach().double() * samples
        # The weight enters as the gradient of the loss, which spares an operator forwards and one backwards.
        weight = torch.tensor(samples * factor, device=self._device)
        if self._counted is not None:
            assert self._module.count is not None
            count = self._module.count * counts
            weight = (count * factor).to(loss.dtype)
            self._counted = self._counted + count
            # A mean over nothing is no number.
            summed = torch.where(count > 0, loss.detach().double() * count, 0.0)
        torch.autograd.backward(loss, weight)
        return summed

    def _send(self, part: Part) -> None:
        """Begin to sum a bucket of the gradient; with the last one of a backward pass, mark the end of computing."""
        if self._computed is None:  # backward goes on
            is_last = part.start == 0
            self._pace.reach(1.0 if is_last else FORWARD + (1 - FORWARD) * part.done)
            if is_last:
                self._computed = self._stopwatch.mark()
        buffer = self.flat[part.start : part.stop]
        assert self.in_buckets is not None
        self._norms.add_own([buffer], first=part.stop == len(self.flat))
        members = self._parameters[part.members.start : part.members.stop]
        self.in_buckets.begin(members, buffer, last=part.start == 0)

    def _take_gradients(self) -> None:
        """Point the gradients to the buffer from here on; another step may have led them elsewhere."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is not view:
                parameter.grad = view


NOISE_GROUPS = 8
"""Most groups of samples by whose gradients a worker alone tells the noise. By 4 or 16 runs under `critical` take as
long, within the spread of seeds (three jobs, six seeds)."""


def all_finite(flat: Tensor, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether all workers' parts of a gradient are free of NaN and infinity; all of ``group`` must call it.

    Args:
        flat: part of a gradient that this worker has.
        group: process group of the workers; None: all.
    """
    finite = torch.isfinite(flat).all().to("cpu", torch.float32)
    if dist.is_initialized():
        dist.all_reduce(finite, op=dist.ReduceOp.MIN, group=group)
    return bool(finite)
