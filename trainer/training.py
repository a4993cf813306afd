"""The training of a task on one worker: its model, data feed, gradient exchange and steps, and the state to resume.

`Training` is the engine as a task's loop drives it: it computes the steps, and the paired trials of
`hetopt.trainer.policies.ratio.auto`, too.

**Test of the loss** (`probe_loss`), once before a run trains: do gradients of parts add up to that of a batch? One
worker computes its first batch whole, and then in two unequal parts, in evaluation mode but for BatchNorm. What differs
by more than rounding would differ between the workers of a run, too. Where random numbers are drawn even so, nothing is
compared.
"""

from __future__ import annotations

import copy
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from hetopt.core.batch_partition import first_shares, micro_batch_size
from hetopt.core.comm.composition import AUTO, combine
from hetopt.core.comm.cost import BUCKETWISE
from hetopt.core.comm.options import BF16, IDENTITY, way_name
from hetopt.core.comm.payload_bytes import VALUE_BYTES
from hetopt.core.errors import BadInput
from hetopt.core.run_folder import conditions_in
from hetopt.core.run_rules import check_follows_noise
from hetopt.core.run_spec import Compression
from hetopt.trainer.agreement import Gathering, gather_numbers, gather_texts, take_parameters
from hetopt.trainer.checkpoints.folder import CheckpointSaver, RankState, SharedState, run_digest
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.compressor import ErrorFeedback, Turn, take_momentum
from hetopt.trainer.comm.exchange import BucketExchange, BucketSum, DenseBuckets
from hetopt.trainer.comm.peers import Guard, meet
from hetopt.trainer.comm.topk import TopK
from hetopt.trainer.context import Generators, States, WorkerContext
from hetopt.trainer.data.cursor import (
    NEED_LABELS,
    AnyCursor,
    MicroBatch,
    PartitionedCursor,
    SampleCursor,
    StreamCursor,
    every_nth_of_all,
    make_parts,
)
from hetopt.trainer.data.fetch import Batch, MapDataset, labels_of, samples_in
from hetopt.trainer.engine import Balance, Engine, Milestones, parameters_of, tensors_mark
from hetopt.trainer.failure import is_out_of_memory
from hetopt.trainer.policies.policy import CriticalBatch, choose_policy, stream_learning_rate_scale
from hetopt.trainer.policies.ratio.auto import CHUNK_STEPS, PART, PairedTrial
from hetopt.trainer.policies.ratio.policy import Verdict
from hetopt.trainer.sharding import (
    WHOLE,
    Shards,
    cut_states,
    gathered,
    held,
    is_sharded,
    refuse_whole_states,
    share,
    wish_of,
)
from hetopt.trainer.steps.adaptive_controller import ExchangeConfig, can_overlap, is_steered, make_exchange
from hetopt.trainer.steps.local_batch import BatchReader, Injector, SampleFeed, samples_of_step
from hetopt.trainer.steps.step import (
    DoesNotFit,
    FusedStep,
    LossModule,
    LossScale,
    StepTrace,
    Switch,
    half_of,
    parts_of,
    remembered,
    switch_between,
    trainable_parameters,
)
from hetopt.trainer.steps.stopwatch import Slowdown, Stopwatch, make_pace
from hetopt.trainer.sync.synchroniser import make_synchroniser
from hetopt.trainer.task import (
    LEAST_SAMPLES,
    LearningRate,
    Loss,
    Task,
    TaskData,
    average_buffers,
    batch_norms,
    cross_entropy_weight,
    least_samples,
    least_share,
    make_model,
    make_optimizer,
    mean_of,
)

Kind: TypeAlias = Literal["untested", "mean", "counted", "sum", "coupled"]


TOLERANCE = 1e-3
"""Largest relative difference of gradients in fp32 that counts as rounding; tokens in the place of samples make
differences of some percent."""

MOST_SAMPLES = 16
"""Most samples that a loss is tested with; enough for sequences to have unequal lengths."""

_WHY_PARTS_DIFFER = {
    True: (
        "the loss couples samples or is a mean over something else than samples",
        "return the tuple (sum, count) if it is a mean over tokens or weights; else keep shares large",
    ),
    False: (
        "layers normalise each worker's samples by themselves, as under DistributedDataParallel",
        "use GroupNorm or LayerNorm where that matters; else keep shares large",
    ),
}
"""Why parts of a batch differ from the whole, and what helps, by whether it is the loss that couples samples."""


@dataclass(frozen=True, kw_only=True)
class LossTest:
    """The result of `probe_loss`: what a task's loss is a mean over, and how far parts differ from the whole batch.

    Attributes:
        kind: what the loss is: ``mean`` over samples; ``counted``: a mean over what the loss returns, or over the
            targets of its cross entropy; ``sum`` over samples; ``coupled``: none of these; ``untested``: there was a
            single sample, or the batch's rows are not its samples.
        first: number of samples of the first part.
        second: number of samples of the second part.
        off: relative difference of the parts' gradient, weighted as workers weigh it; 0 where it is not known.
        targets_per_sample: weight of a cross entropy's targets for each sample; 0: the loss is no cross entropy that is
            a mean over samples.
    """

    kind: Kind = "untested"
    first: int = 0
    second: int = 0
    off: float = 0.0
    targets_per_sample: float = 0.0

    @property
    def problem(self) -> BadInput | None:
        """Error of a loss that several workers cannot train (a sum over samples), not raised; None: they can."""
        if self.kind != "sum":
            return None
        return BadInput(
            f"The loss is a sum over samples: the gradient of {self.first + self.second} samples is the sum of those "
            f"of {self.first} and of {self.second} of them.",
            hint='use reduction="mean", or return the tuple (loss, number of samples)',
        )

    @property
    def note(self) -> str:
        """Sentence on how far shares are from one machine, and why; empty: not farther than rounding."""
        if self.off <= TOLERANCE:
            return ""
        why, _ = _WHY_PARTS_DIFFER[self.kind == "coupled"]
        return (
            f"shares differ from one machine by {100 * self.off:.1f} % (parts of {self.first} and {self.second} "
            f"samples): {why}"
        )

    @property
    def hint(self) -> str:
        """Advice by which parts of a batch come closer to the whole; there even where they do not differ."""
        return _WHY_PARTS_DIFFER[self.kind == "coupled"][1]


def probe_loss(
    model: nn.Module, loss: Callable[[nn.Module, Batch], Loss], read: Callable[[Sequence[int]], Batch], samples: int
) -> LossTest:
    """Return what a loss is a mean over, and how far parts are from the whole, by gradients of the first samples.

    Buffers, modes and torch's random state are restored, and gradients removed; random numbers that ``read`` draws stay
    drawn. Errors of ``loss`` and ``read`` are raised.

    Args:
        model: model on its device.
        loss: loss of the task, by model and batch.
        read: returns the batch of some samples, by their places in the first batch.
        samples: number of samples of the first batch, or as many as fit; at most 16 are tried, and fewer than 2 are not
            tested.
    """
    samples = min(samples, MOST_SAMPLES)
    if samples < 2:
        return LossTest()
    first = max(1, samples // 3)
    drawn = States.now()
    whole = read(range(samples))
    drawn.use()  # samples that are changed at random are changed alike in the parts
    batches, sizes = (whole, read(range(first)), read(range(first, samples))), (samples, first, samples - first)
    if samples_in(whole) != samples:
        return LossTest()

    def computed() -> list[_Computed]:
        return [_compute(model, loss, batch, size) for batch, size in zip(batches, sizes, strict=True)]

    device = next(model.parameters()).device
    with ExitStack() as undo:
        undo.callback(remembered(model, device))
        for module in model.modules():
            undo.callback(setattr, module, "training", module.training)
        model.eval()
        before = Generators.at(device)
        still = computed()
        draws = before.has_drawn(device)
        kind, off = _kind(still, draws=draws)
        targets = still[0].count / samples if kind == "mean" else 0.0
        if kind != "coupled" and not draws and first >= least_samples(model):
            for norm in batch_norms(model):
                norm.train()
            off = _off(computed(), by=kind)
    return LossTest(kind=kind, first=first, second=samples - first, off=off, targets_per_sample=targets)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Computed:
    """The gradient of a part of a batch, with its samples and its count: what the loss states, or its targets.

    Attributes:
        gradient: flat gradient in double precision on the CPU; of a sharded model this device's part.
        samples: number of samples, the same on all devices of a sharded model.
        count: count that the loss is a mean over; 0: not recognised.
        is_stated: whether the loss states the count.
        is_part: whether the model is sharded.
    """

    gradient: Tensor
    samples: int
    count: float
    is_stated: bool
    is_part: bool

    def weight(self, by: Kind) -> float:
        return {"sum": 1.0, "counted": self.count}.get(by, float(self.samples))


def _compute(model: nn.Module, loss: Callable[[nn.Module, Batch], Loss], batch: Batch, samples: int) -> _Computed:
    """Compute a loss's gradient over a batch, and what the loss counted (0: not recognised); gradients are removed."""
    returned = loss(model, batch)
    mean = mean_of(returned)
    is_stated = isinstance(returned, tuple)
    count = returned[1] if is_stated else cross_entropy_weight(mean)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    mean.backward()  # type: ignore[no-untyped-call]  # torch's gap
    pieces = [
        (torch.zeros_like(held(parameter)) if parameter.grad is None else held(parameter.grad)).flatten().cpu().double()
        for parameter in parameters
    ]
    model.zero_grad(set_to_none=True)
    return _Computed(
        gradient=torch.cat(pieces),
        samples=samples,
        count=float(count or 0.0),
        is_stated=is_stated,
        is_part=is_sharded(parameters),
    )


def _kind(computed: Sequence[_Computed], *, draws: bool) -> tuple[Kind, float]:
    """Return the kind of a loss by the parts' gradients, and their relative difference from the whole.

    A loss that draws random numbers is not compared. Coupled: no kind explains it.
    """
    whole, *parts = computed
    per_sample = whole.count / whole.samples
    uneven = any(abs(part.count - per_sample * part.samples) > TOLERANCE * whole.count for part in parts)
    kind: Kind = "counted" if whole.is_stated or uneven else "mean"
    off = 0.0 if draws else _off(computed, by=kind)
    if off <= TOLERANCE:
        return kind, off
    is_sum = not whole.is_stated and _off(computed, by="sum") <= TOLERANCE
    return "sum" if is_sum else "coupled", off


def _off(computed: Sequence[_Computed], *, by: Kind) -> float:
    """Return the relative difference of two parts' gradient from the whole batch's, weighted as losses of kind ``by``.

    ``computed`` is of the whole batch, the first and the second part.

    All devices of a sharded model must call it.
    """
    whole, first, second = computed
    total = 1.0 if by == "sum" else first.weight(by) + second.weight(by)
    mean = (first.weight(by) * first.gradient + second.weight(by) * second.gradient) / (total or 1.0)
    squares = torch.stack([(mean - whole.gradient).square().sum(), whole.gradient.square().sum()])
    if whole.is_part:
        dist.all_reduce(squares)
    return math.sqrt(float(squares[0] / squares[1].clamp(min=1e-60)))


FEWEST_TRIED = 4
"""Fewest samples that a loss is tested with, even for a smaller share: two parts that BatchNorm can normalise."""


def build_model(task: Task, device: torch.device, seed: int) -> nn.Module:
    """Seed torch; return the task's new model on ``device``, in training mode, with rank 0's values; all must call it.

    Raises:
        BadInput: blocks are to be computed again, and the model has none.
    """
    torch.manual_seed(seed)
    model = make_model(task).to(device)
    if dist.is_initialized():
        take_parameters([*model.parameters(), *model.buffers()])
    model.train()
    return model


def make_feed(context: WorkerContext, dataset: MapDataset, *, is_sharing: bool = False) -> SampleFeed:
    """Return this worker's feed of micro-batches, at the start of the data.

    Args:
        context: context of this worker.
        dataset: training data.
        is_sharing: whether devices share the model, so that all of them compute equally many micro-batches.

    Raises:
        BadInput: the data cannot be partitioned as the spec says.
    """
    spec, limits = context.spec, [worker.max_local_batch_size for worker in context.spec.workers]
    reader = BatchReader(
        dataset=dataset,
        device=context.device,
        seed=spec.seed,
        max_samples=min((n for n in limits if n), default=None) if is_sharing else context.worker.max_local_batch_size,
        unit=micro_batch_size(spec),
        ranks=context.world_size if is_sharing else 1,
    )
    # A GPU computes by itself: whatever the host does meanwhile is gained. A gather from memory is soon done.
    is_worth = spec.prefetch == "on" or context.device.type != "cpu" or not hasattr(dataset, "gather")
    return SampleFeed(
        reader=reader,
        rank=context.rank,
        cursor=make_cursor(context, dataset),
        reads_ahead=spec.prefetch != "off" and spec.stream is None and is_worth,
        injector=None if spec.injection is None or context.world_size == 1 else Injector(spec.injection, spec.seed),
    )


def build_sharded(context: WorkerContext, task: Task) -> tuple[nn.Module, Shards]:
    """Return the task's model, sharded if run or task say so, and the layout of its shards; every worker must call it.

    Raises:
        BadInput: something in the run does not go with a sharded model, or the model has no blocks to shard.
    """
    spec, wish = context.spec, wish_of(context.spec, task.shard)
    model = build_model(task, context.device if wish == "none" else torch.device("cpu"), spec.seed)
    shards = share(model, wish, spec, context.rank, context.device, task.blocks)
    return (model.to(context.device) if shards is WHOLE else model), shards


def make_cursor(context: WorkerContext, dataset: MapDataset) -> AnyCursor:
    """Return a cursor at the start of the training data: over one order for all, parts of the workers, or a stream.

    Raises:
        BadInput: a worker would have no sample, or there are too few labels, or none.
    """
    spec, size, rank, workers = context.spec, len(dataset), context.rank, context.world_size
    weights, parts = first_shares(spec), None
    if workers > 1 and spec.partition.name != "global":
        labels = labels_of(dataset) if spec.partition.name in NEED_LABELS else None
        parts = make_parts(spec.partition, size=size, weights=weights, seed=spec.seed, labels=labels)
    if spec.stream is not None:
        everything = every_nth_of_all(size, spec.seed, rank, workers)
        order = everything if parts is None else partial(parts, rank)
        return StreamCursor(spec.stream, rank, order=order, dataset_size=size)
    return SampleCursor(size, spec.seed) if parts is None else PartitionedCursor(parts, size, weights=weights)


def make_worker_pace(context: WorkerContext) -> Slowdown:
    """Return the waits that make this worker as slow as its spec says, by a factor or a declared time.

    Without either the waits are none.

    Args:
        context: context of this worker; conditions of a rehearsal are read from the run's folder as it goes on.
    """
    return make_pace(
        context.worker,
        context.device,
        conditions=conditions_in(context.run_dir),
        own_core=len(context.spec.workers) <= len(os.sched_getaffinity(0)),  # paced workers share one machine,
    )


def make_step(
    context: WorkerContext,
    task: Task,
    module: LossModule,
    compression: Compression,
    *,
    feed: SampleFeed,
    stopwatch: Stopwatch,
    pace: Slowdown,
    samples: int,
    shards: Shards = WHOLE,
) -> tuple[ExchangeConfig, FusedStep]:
    """Test the task's loss, and return the run's gradient exchange and training step, warmed up; all must call it.

    Rank 0 prints where shares differ from one machine. A share that does not fit into memory is learned by ``feed``.

    Args:
        context: context of this worker.
        task: task whose loss is tested.
        module: model with its loss, on the device.
        compression: compression of the run.
        feed: feed of the training data.
        stopwatch: clock of the device.
        pace: waits that make this worker as slow as its spec says.
        samples: number of samples to warm up with: this worker's local batch size.
        shards: layout of the model's shards.

    Raises:
        BadInput: nothing in the model can be trained, the loss does not depend on it or is a sum over samples, the
            compression does not suit it, or the workers are about to exchange in different ways.
        RunFailed: not even one sample fits into memory.
    """
    spec, device, is_alone = context.spec, context.device, context.spec.is_local
    parameters = trainable_parameters(module.model)
    pieces = [held(parameter) for parameter in parameters]
    parts, numel = parts_of(pieces), sum(piece.numel() for piece in pieces)
    # What the workers do next depends on these: those that disagree would wait for each other for ever.
    if context.world_size > 1:
        policies = f"ratio policy {spec.ratio_policy}, collective {spec.collective_policy}, {spec.sync.name}"
        asked = compression.model_dump_json(exclude={"name", "ratio"})
        size = f"{sum(parameter.numel() for parameter in parameters)} elements, {feed.cursor.dataset_size} samples"
        meet(f"{way_name(compression)}, {policies} ({size}, {spec.precision}) {asked}")
    group, devices = shards.counterparts, shards.devices
    # A loss that does not depend on the model is refused by all ranks, before one of them tries it in parts.
    samples = max(samples, FEWEST_TRIED)
    # Held by no name, as its gradient is as large as that of the step which follows.
    _fit(
        feed,
        FusedStep(module=module, reader=feed, stopwatch=stopwatch, pace=pace, devices=devices).warm_up,
        samples,
        context.rank,
    )
    module.zero_grad(set_to_none=True)
    _try_loss(context, task, module, feed, samples)
    # What a loss counts is known when backward begins: too late for buckets that are on their way by then.
    can = not is_alone and context.world_size > devices and can_overlap(device, context.world_size)
    overlaps = can and len(parts) > 1 and not module.is_counted
    # A GPU's kernels, and residuals under loss scaling, are the whole gradient's business.
    in_thread = device.type == "cpu" and spec.precision != "fp16"

    def in_buckets(way: Compression) -> BucketSum | None:
        """Return the sum of buckets under backward; None: this compression needs the whole gradient."""
        memory = combine(way.name, memory=way.memory, collective=way.collective).memory
        if way.name == IDENTITY and way.ratio == 1.0 and memory == "none":
            description = f"{way_name(way)} in {len(parts)} buckets of {numel} elements"
            return DenseBuckets(Guard(description, store=context.store, group=group), group)
        if way.name not in BUCKETWISE or not in_thread:
            return None
        return BucketExchange(way, parameters, seed=spec.seed, store=context.store, clock=context.clock, group=group)

    steered = is_steered(spec, compression)
    bucket_sum = in_buckets(compression) if overlaps and not steered else None
    if is_alone or bucket_sum is not None:
        config = ExchangeConfig(compression=compression, dense_bytes=VALUE_BYTES * numel)
    else:
        config = make_exchange(
            spec,
            compression,
            [tuple(piece.shape) for piece in pieces],
            device,
            store=context.store,
            clock=context.clock,
            buckets=len(parts) if overlaps else 1,
            bf16_in_buckets=in_thread and compression.memory == AUTO,  # buckets remember nothing
            tries_twins=True,
            group=group,
        )
    switch: Switch | None = None
    steering = config.steering
    if config.exchange is not None and steering is not None:
        ways = {each.compression.name for each in steering.candidates.all if each.in_buckets}
        plain = (Compression(name=name, memory="none") for name in (IDENTITY, BF16) if name in ways)
        sums = {way.name: bucket_sum for way in plain if (bucket_sum := in_buckets(way)) is not None}
        switch = switch_between(config.exchange, sums, lambda: steering.candidate)
    step = FusedStep(
        module=module,
        reader=feed,
        exchange=config.exchange,
        in_buckets=bucket_sum,
        switch=switch,
        stopwatch=stopwatch,
        pace=pace,
        norms=spec.sync.name == "selsync" if is_alone else steered and spec.ratio_policy == "accordion",
        way="" if is_alone else way_name(compression),
        counts="alone" if is_alone else "all",
        devices=devices,
    )
    return config, step


def _try_loss(context: WorkerContext, task: Task, module: LossModule, feed: SampleFeed, samples: int) -> None:
    """Probe the loss's denominator on rank 0 with as many first samples as fit into memory; all ranks then know it.

    Raises:
        BadInput: the loss is a sum over samples; on all ranks.
    """

    def read(places: Sequence[int]) -> Batch:
        return feed.read(MicroBatch(epoch=0, indices=places))

    shares = is_sharded(module.model.parameters())  # then all devices compute what the leader does
    part = feed.first_part(FEWEST_TRIED if shares else min(samples, MOST_SAMPLES))
    result, tried = LossTest(), len(part) if shares or context.is_leader else 0
    while tried > 1 and result.kind == "untested":
        try:
            result = probe_loss(module.model, task.loss, read, tried)
        except (RuntimeError, MemoryError) as error:
            if shares or not is_out_of_memory(error):
                raise
        tried //= 2
    test = LossTest(**json.loads(gather_texts(json.dumps(asdict(result)), context.world_size)[0]))
    if test.problem is not None and (context.world_size > 1 or feed.max_samples is not None):
        raise test.problem
    module.is_counted, module.targets_per_sample = test.kind == "counted", test.targets_per_sample
    if test.note and context.is_leader and context.world_size > 1:
        print(f"hetopt: {test.note}; {test.hint}.", file=sys.stderr, flush=True)


def _fit(feed: SampleFeed, compute: Callable[[MicroBatch], None], samples: int, rank: int) -> None:
    """Compute a share of ``samples`` samples, or, with a bound that ``feed`` learns, as much of it as fits into memory.

    Raises:
        RunFailed: not even one sample fits.
    """
    while True:
        try:
            compute(feed.first_part(samples))
            return
        except DoesNotFit as error:
            feed.learn_bound(half_of(error.samples, rank))


class Training(Engine):
    """The training of a task on one worker, step by step; what it decides is alike on all ranks.

    Args:
        context: context of this worker.
        task: task to train.
        data: data of the task.
        model: model on the device, the same on all workers; sharded as ``shards`` says.
        saver: writer of checkpoints.
        shards: layout of the model's shards.

    Attributes:
        milestones: rules for when things are due; they change when the samples of a step do.
        replay: the cursor of a stream on which samples arrive in time; None: all samples are there.
        feed: source of training samples.
        pace: waits that make this worker as slow as its spec says.
        optimizer: optimizer that applies gradients.
        computes: computation of a step, up to the gradient of all workers.
        unfinished: what a step changes before it is done, where the data stood and the random generators when it
            began; None: none is under way, or nobody would go on from there.
        loss_scale: factor on the loss, of fp16; None: another precision.
        memory_bounds: samples of the largest micro-batch that each worker learned to fit, in rank order; 0: not
            bounded.
        earlier_s: seconds trained by earlier attempts.
        begun_s: time when this attempt began to train, on the worker's clock.
        target_reached: whether the target was reached at the last evaluation.

    Raises:
        BadInput: as of `make_step`, `make_synchroniser` and `make_optimizer`; or the batch policy does not suit the
            run.
        RunFailed: not even one sample fits into memory.
    """

    def __init__(
        self,
        context: WorkerContext,
        task: Task,
        data: TaskData,
        model: nn.Module,
        saver: CheckpointSaver,
        shards: Shards = WHOLE,
    ) -> None:
        spec = context.spec
        self.task, self.shards = task, shards
        self.data = data
        self.model = model
        self.milestones = Milestones(
            stop=spec.stop,
            dataset_size=len(data.train),
            global_batch_size=samples_of_step(spec),
            evaluate_every_epochs=spec.evaluate_every_epochs,
            control_period_steps=spec.control_period_steps,
        )
        # A share has no upper bound: what exceeds a worker's memory is computed in micro-batches. BatchNorm cannot
        # normalise a single sample, so models that have it keep two on every worker where the global batch allows.
        least = least_share(model, spec.global_batch_size, len(spec.workers))
        policy = choose_policy(spec, minimum=least)
        if isinstance(policy, CriticalBatch):
            check_follows_noise(spec, devices=shards.devices, rule=task.learning_rate_rule)
            policy = replace(policy, most=max(policy.given, min(policy.most, len(data.train))))
        balance = Balance(spec, policy, minimum=least)
        self.feed = make_feed(context, data.train, is_sharing=shards.devices > 1)
        self.replay = self.feed.cursor if isinstance(self.feed.cursor, StreamCursor) else None
        self.pace = make_worker_pace(context)
        stopwatch = Stopwatch(context.device, context.clock)
        self.optimizer: Optimizer = make_optimizer(task, model)
        exchange, self.computes = make_step(
            context,
            task,
            LossModule(model, task.loss, spec.precision),
            take_momentum(spec.compression, self.optimizer),
            feed=self.feed,
            stopwatch=stopwatch,
            pace=self.pace,
            samples=balance.shares[context.rank],
            shards=shards,
        )
        super().__init__(
            context=context,
            exchange=exchange,
            balance=balance,
            stopwatch=stopwatch,
            synchroniser=make_synchroniser(
                spec,
                model,
                self.optimizer,
                device=context.device,
                clock=context.clock,
                stopwatch=stopwatch,
                dataset_size=len(data.train),
            ),
        )
        self.unfinished: tuple[dict[str, int], Generators] | None = None
        self.loss_scale: LossScale | None = LossScale() if spec.precision == "fp16" else None
        self._learning_rate = LearningRate(task, self.optimizer, spec.sync.stretch)
        self._saver = saver
        self.memory_bounds = (0,) * context.world_size
        self.earlier_s = 0.0  # trained by earlier attempts
        self.begun_s = context.clock()
        self.target_reached = False
        # Workers may draw (dropout) from here on, each its own sequence.
        torch.manual_seed(spec.seed + 7919 * (context.rank + 1))

    def take_over(self, shared: SharedState, rank_state: RankState, source: str) -> None:
        """Restore training from the common and this worker's own state.

        After an error some of it may be loaded already.

        Args:
            shared: state of all workers.
            rank_state: state of this worker alone.
            source: origin of the states, for errors, as "the checkpoint of step 5".

        Raises:
            BadInput: the states do not fit the task, its data or the exchange.
        """
        context = self.context
        if shared.cursor["dataset_size"] != len(self.data.train):
            raise BadInput(
                f"The run began with {shared.cursor['dataset_size']} training samples; "
                f"now there are {len(self.data.train)}.",
                hint="give the run the data that it started with",
            )
        try:
            weights, updates = cut_states(self.model, self.optimizer, shared.model, shared.optimizer)
            self.model.load_state_dict(weights)
            self.optimizer.load_state_dict(updates)
        except (RuntimeError, ValueError, KeyError):
            raise BadInput(
                f"{source[0].upper()}{source[1:]} does not fit the task's model or optimizer.",
                hint="give the run the task that it started with, or start over in another folder",
            ) from None
        rank_state.restore_generators(context.device)
        self.computes.residual.load_state(rank_state.memory)
        self.feed.cursor = self.feed.cursor.at(shared.cursor)
        if self.synchroniser is not None:
            self.synchroniser.resume(rank_state.local or {})
        self.loss_scale = None if shared.loss_scale is None else LossScale(**shared.loss_scale)
        self.exchange.resume(shared.steering)
        self.balance.resume(policy=shared.policy, shares=shared.shares, state=shared.controller)
        if len(shared.memory_bounds) == context.world_size:
            self.memory_bounds = shared.memory_bounds
            self.feed.recall_bound(shared.memory_bounds[context.rank])
        self.follow_shares()
        self.step = shared.step
        self.earlier_s = shared.training_s
        self.target_reached = shared.target_reached

    def shared_state(self) -> SharedState:
        """Return the training state common to all workers, not copied; of a sharded model every worker must call it.

        Its tensors are the very ones that training changes; of a sharded model they are whole, on the leader alone.
        """
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.shards.devices > 1:
            state = gathered(state, keep=self.context.is_leader)
        return SharedState(
            digest=run_digest(self.context.spec),
            step=self.step,
            training_s=self.training_s,
            shares=self.balance.shares,
            **state,
            cursor=self.feed.cursor.state(),
            policy=self.context.spec.batch_policy,
            controller=self.balance.state(),
            steering=None if self.exchange.steering is None else self.exchange.steering.state(),
            loss_scale=None if self.loss_scale is None else asdict(self.loss_scale),
            memory_bounds=self.memory_bounds,
            target_reached=self.target_reached,
        )

    def own_state(self) -> RankState:
        """Return the training state of this worker alone: compression residual, random generators and local SGD."""
        return RankState(
            memory=self.computes.residual.state(),
            local=None if self.synchroniser is None else self.synchroniser.state(),
            **vars(Generators.at(self.context.device)),
        )

    def one_model(self) -> AbstractContextManager[None]:
        """Return a context manager in which all workers hold one model; every worker must call and enter it.

        Local SGD's models are averaged inside it, and put back at its end. Otherwise the running statistics are
        averaged at once, and stay so.
        """
        if self.synchroniser is not None and self.synchroniser.is_begun:
            return self.synchroniser.averaged()
        shares = self.balance.shares
        weight = shares[self.context.rank] / sum(shares)
        average_buffers(self.model, weight, self.context.world_size)
        return nullcontext()

    def ended(self) -> str | None:
        """Return why the run is over by now, "target", "steps" or "epochs"; None: it is not over."""
        if self.context.spec.stop.target and self.target_reached:
            return "target"
        return self.milestones.ended_by(self.step, self.balance.progress(self.feed.cursor.position))

    @property
    def epoch(self) -> float:
        """Passes over the data completed, with fractions."""
        return self.feed.cursor.position / self.feed.cursor.dataset_size

    @property
    def learning_rate_scale(self) -> float:
        """Learning rate of the next step, over the task's own rate."""
        spec = self.context.spec
        if spec.stream is None:
            gain = self.balance.gain  # AdaScale's rate; of Adam its root, as AdaptDL has it
            return spec.learning_rate_scale * (gain if isinstance(self.optimizer, SGD) else math.sqrt(gain))
        batch_size = sum(self.balance.shares)
        return spec.learning_rate_scale * stream_learning_rate_scale(spec.stream, batch_size, spec.global_batch_size)

    def follow_shares(self) -> None:
        """Set in `milestones` the samples of a step, and those by which progress is behind, from the present shares."""
        position, drawn = self.feed.cursor.position, self.feed.drawn(self.balance.shares)
        behind = position - self.balance.progress(position)
        self.milestones = replace(self.milestones, global_batch_size=sum(drawn), behind=behind)

    @property
    def training_s(self) -> float:
        """Seconds of training by all attempts, evaluations and checkpoints included, start-up not."""
        return self.earlier_s + self.context.clock() - self.begun_s

    def run_period(self, steps: int, *, learning_rate_scale: float, all_meet: bool, checkpoint_s: float) -> Gathering:
        """Train ``steps`` steps; return the started all-gather of all workers' figures. Every worker must call it.

        Args:
            steps: number of steps, at least one.
            learning_rate_scale: factor on the task's learning rate in these steps.
            all_meet: whether the workers wait for each other after the last step anyway, see `begin`.
            checkpoint_s: time when the last checkpoint began, on this worker's clock.

        Raises:
            RunFailed: not even one sample fits into memory, or a stream is too slow.
            BadInput: the loss cannot be used, or the optimizer keeps whole tensors of a sharded model.
            HungPeer: another worker did not come in time.
            LostPeer: another worker left in the middle.
        """
        self.begin(steps, all_meet=all_meet)
        gathering: Gathering | None = None
        while not self.is_over:
            if self._done == self._reported_steps < self._steps:  # the row travels under the next step
                gathering = self.gather_all(checkpoint_s)
            self.train_step(learning_rate_scale)
        return gathering or self.gather_all(checkpoint_s)

    def gather_all(self, checkpoint_s: float) -> Gathering:
        """Start the all-gather of all figures that a task's loop decides by; every worker must call it.

        Args:
            checkpoint_s: time when the last checkpoint began, on this worker's clock.
        """
        begun_s = self.context.clock()
        is_apart = self.synchroniser is not None and self.synchroniser.is_begun
        mark = 0 if is_apart else tensors_mark(map(held, parameters_of(self.optimizer)))
        self.control_s += self.context.clock() - begun_s
        return self.gather(
            pace_use=self.pace.use(),
            memory_bound=self.feed.learned_bound or 0,
            stop_wished=self.context.stop_requested(),
            since_checkpoint_s=begun_s - checkpoint_s,
            checkpoint_part=self._saver.progress,
            model_mark=mark,
            **({} if self.replay is None else self.replay.flow()),
        )

    def train_step(self, learning_rate_scale: float) -> None:
        """Train one optimizer step on this worker's share of the batch, at a scaled learning rate; all must call it.

        A micro-batch that does not fit into memory is computed again in halves.

        The gradient that the optimizer sees is ``sum_i g_i``: g_i the gradient of rank i's mean loss times its part
        ``b_i / B`` of the batch. Sent as a whole it is that of one machine with all B samples.

        Args:
            learning_rate_scale: factor on the task's learning rate.

        Raises:
            RunFailed: not even one sample fits into memory, or a stream is too slow.
            BadInput: the loss cannot be used, or the optimizer keeps whole tensors of a sharded model.
            HungPeer: another worker did not come in time.
            LostPeer: another worker left in the middle.
        """
        shares = self.balance.shares  # samples of every rank, ``sum b_i = B``
        epoch = self.balance.progress(self.feed.cursor.position) / self.feed.cursor.dataset_size
        self._learning_rate.apply(self.optimizer, epoch, learning_rate_scale)
        if self.context.spec.is_elastic:
            self.unfinished = dict(self.feed.cursor.state()), Generators.at(self.context.device)
        scale = self.loss_scale
        parts = self.feed.take(shares)  # micro-batches
        computed = self.feed.sizes  # of every rank, with copies that were handed on
        synchroniser = self.synchroniser
        trace: StepTrace | None = None
        while trace is None:
            try:  # forward, backward, weight, compress, reduce, decompress
                drifted = None if synchroniser is None else synchroniser.look(partial(self.computes.gradient, parts))
                trace = self.computes.run(
                    parts, sum(computed), None if scale is None else scale.value, self.look_at, self.wants_norms
                )
            except DoesNotFit as error:
                too_many = error.samples
            if trace is None:  # out here, where the error no longer holds on to what filled the memory
                parts = self.feed.learn_bound(half_of(too_many, self.context.rank))
        if synchroniser is not None and self.computes.is_alone:
            weight = computed[self.context.rank] / max(1, sum(computed))
            if self.exchange.steering is not None:
                synchroniser.begin(weight, self.exchange.steering.candidate.every_steps)
            if drifted is not None:
                synchroniser.looked(drifted, self.computes.flat, weight)
        if trace.finite:
            self.optimizer.step()
        if scale is not None:
            self.loss_scale = scale.after(finite=trace.finite)
        self.unfinished = None
        self.after(trace, computed)
        if self.shards.devices > 1 and self.step == 1:
            refuse_whole_states(self.optimizer)

    def close(self) -> None:
        """End the threads that read samples ahead and write checkpoints.

        A read or a write that is under way is waited for.
        """
        self.feed.close()
        self._saver.close()


def try_twins(training: Training, ratio: float) -> Verdict:
    """Train a dense and a sparsified copy of the model for some steps, and compare their losses; all must call it.

    The training itself stays as it is; the outcome is logged. A worker whose memory does not hold two more models says
    so by a loss that is not a number, which makes the verdict ``harmful``.

    Args:
        training: training whose model and data are taken.
        ratio: fraction of the elements that the sparsified copy applies.

    Returns:
        Verdict, the same on all workers.
    """
    context, feed, begun_s = training.context, training.feed, training.context.clock()
    samples = [max(LEAST_SAMPLES, share // PART) for share in training.balance.shares]
    cursor = feed.cursor.at(feed.cursor.state())
    reader = BatchReader(
        dataset=training.data.train, device=context.device, seed=context.spec.seed, max_samples=feed.max_samples
    )
    trial = PairedTrial(ratio=ratio)
    verdict: Verdict | None = None
    with torch.random.fork_rng(devices=[context.device] if context.device.type == "cuda" else []):
        twins: list[Callable[[Sequence[Sequence[MicroBatch]]], float]] = []
        with suppress(torch.OutOfMemoryError):
            twins = [_twin(training, reader, part) for part in (1.0, ratio)]
        while verdict is None:
            steps = [reader.cut(cursor.take(samples), context.rank) for _ in range(CHUNK_STEPS)]
            losses = [math.nan, math.nan]
            for place, train in enumerate(twins):
                torch.manual_seed(context.spec.seed + cursor.position)  # both draw alike, where a model draws
                with suppress(DoesNotFit, torch.OutOfMemoryError):
                    losses[place] = train(steps)
            verdict = trial.after(gather_numbers([*losses, float(samples[context.rank])], context.world_size))
    took_s = round(context.clock() - begun_s, 6)
    context.events.write("twins_tried", step=training.step, ratio=ratio, says=verdict.says, took_s=took_s)
    return verdict


def _twin(training: Training, reader: BatchReader, ratio: float) -> Callable[[Sequence[Sequence[MicroBatch]]], float]:
    """Return a function that trains a copy of model and optimizer for some steps, and returns the mean loss.

    Args:
        training: training under way, whose model and optimizer are copied.
        reader: reader of the training samples.
        ratio: fraction of the gradient's elements that a step applies, the others later; 1: all.
    """
    context, task = training.context, training.task
    model = make_model(task).to(context.device)
    model.load_state_dict(training.model.state_dict())
    optimizer = make_optimizer(task, model)
    rate = LearningRate(task, optimizer)
    optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))  # it keeps what it is given
    rate.apply(optimizer, training.epoch, training.learning_rate_scale)
    step = FusedStep(
        module=LossModule(model, task.loss, context.spec.precision),
        reader=reader,
        stopwatch=Stopwatch(context.device),
        pace=training.pace,
        counts="alone",
    )
    selection, residual = TopK(ratio), ErrorFeedback(step.flat.numel(), device=context.device)

    def train(steps: Sequence[Sequence[MicroBatch]]) -> float:
        """Train the copy on steps of micro-batches; return the mean loss over samples; DoesNotFit: memory ran out.

        With a ratio, by what it keeps of each gradient.
        """
        losses, samples = 0.0, 0
        for parts in steps:
            size = sum(map(len, parts))
            losses += float(step.run(parts, size, None).loss_sum)
            samples += size
            if ratio < 1:
                sent = selection.encode(residual.prepare(step.flat), Turn(Channel()))
                step.flat.copy_(sent.dense())
                residual.commit(sent)
            optimizer.step()
        return losses / samples

    return train
