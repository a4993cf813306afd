"""Puts the step together: the form that suits the whole cluster, and who steers what it exchanges."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from hetopt.core.comm.composition import combine
from hetopt.core.comm.cost import BUCKETWISE
from hetopt.core.comm.options import BF16, IDENTITY, way_name
from hetopt.core.run_spec import Compression
from hetopt.trainer.agreement import gather_numbers
from hetopt.trainer.comm.buckets import BucketExchange, BucketSum, DenseBuckets
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.network import Hosts
from hetopt.trainer.comm.peers import Guard, meet
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.data.fetch import Batch
from hetopt.trainer.data.micro_batch import MicroBatch
from hetopt.trainer.failure import is_out_of_memory
from hetopt.trainer.loss_test import MOST_SAMPLES, LossTest, probe_loss
from hetopt.trainer.steps.buckets import Part, parts_of
from hetopt.trainer.steps.exchange_assembly import ExchangeMaker, can_overlap, is_steered
from hetopt.trainer.steps.fused_step import DoesNotFit, FusedStep, LocalGradient, NoExchange, SwitchingStep, half_of
from hetopt.trainer.steps.local_batch import SampleFeed
from hetopt.trainer.steps.slowdown import Slowdown
from hetopt.trainer.steps.step import LossModule, trainable_parameters
from hetopt.trainer.steps.step_config import ExchangeConfig, StepConfig
from hetopt.trainer.steps.stopwatch import Stopwatch
from hetopt.trainer.task import Task

FEWEST_TRIED = 4
"""Samples that a loss is tested with, where a worker's share is smaller: two parts that BatchNorm can normalise."""


@dataclass(frozen=True, kw_only=True)
class StepMaker:
    """Everything that steps are made of.

    Attributes:
        context: this worker.
        task: for its loss.
        module: the model with its loss, on the device.
        compression: of the run.
        feed: of the training data; learns here already if a share does not fit into memory.
        stopwatch: of the device.
        pace: of this worker.
    """

    context: WorkerContext
    task: Task
    module: LossModule
    compression: Compression
    feed: SampleFeed
    stopwatch: Stopwatch
    pace: Slowdown

    def make(self, samples: int) -> StepConfig:
        """The step for this run, warmed up: what a device does only the first time is start-up, not training.

        Args:
            samples: how many to warm up with; this worker's share.

        Raises:
            BadInput: nothing in the model can be trained, the loss does not depend on it, the compression does not suit
                it, or the workers are about to exchange in different ways.
            RunFailed: not even one sample fits into memory.
        """
        # What the workers do next depends on these: those that disagree would wait for each other for ever.
        if self.context.world_size > 1:
            meet(self._description, Channel())
        # A loss that does not depend on the model is refused by all ranks, before one of them tries it in parts.
        first = LocalGradient(
            model=self.module.model, forward=self.module, reader=self.feed, device=self.context.device
        )
        self._fit(first.try_out, 2)
        self.module.zero_grad(set_to_none=True)
        self._try_loss(samples)
        if self.context.spec.is_local:
            form = self._local()
        else:
            # What a loss counts is known when backward begins: too late for buckets that are on their way by then.
            buckets = self._may_bucket() and not self.module.is_counted
            make = self._steered if is_steered(self.context.spec, self.compression) else self._settled
            form = make(buckets)
        self._fit(form.step.warm_up, samples)
        return form

    def _local(self) -> StepConfig:
        """A step that exchanges nothing: every worker applies its own gradient."""
        alone = FusedStep(
            module=self.module,
            reader=self.feed,
            exchange=NoExchange(),
            stopwatch=self.stopwatch,
            pace=self.pace,
            norms=self.context.spec.sync.name == "selsync",
            counts="alone",
        )
        return StepConfig(step=alone, compression=self.compression, dense_bytes=self._exchanges.dense_bytes)

    def _settled(self, buckets: bool) -> StepConfig:
        """A step whose exchange stays as it is."""
        asked, context = self.compression, self.context
        chosen = combine(asked.name, memory=asked.memory, collective=asked.collective)
        everything = asked.name == IDENTITY and asked.ratio == 1.0 and chosen.memory == "none"
        in_buckets: BucketSum | None = None
        if buckets and everything:
            in_buckets = self._dense_buckets(way_name(asked))
        elif buckets and asked.name in BUCKETWISE and self._in_thread:
            in_buckets = self._in_buckets(asked)
        if in_buckets is None:
            config = self._exchanges.settled()
        else:
            config = ExchangeConfig(compression=asked, dense_bytes=self._exchanges.dense_bytes)
        by_noise = context.spec.learning_rate_rule == "adascale"
        step = FusedStep(
            module=self.module,
            reader=self.feed,
            exchange=config.exchange or NoExchange(),
            in_buckets=in_buckets,
            stopwatch=self.stopwatch,
            pace=self.pace,
            noise=("workers" if context.world_size > 1 else "micro-batches") if by_noise else None,
            way=way_name(asked),
        )
        return StepConfig(**{**vars(config), "step": step})

    def _steered(self, buckets: bool) -> StepConfig:
        """A step whose exchange is decided between control periods."""
        config = self._exchanges.steered(
            buckets=len(self._parts) if buckets else 1, bf16_in_buckets=self._in_thread, tries_twins=True
        )
        exchange, steering = config.exchange, config.steering
        assert exchange is not None
        assert steering is not None
        fused = FusedStep(
            module=self.module,
            reader=self.feed,
            exchange=exchange,
            stopwatch=self.stopwatch,
            pace=self.pace,
            norms=self.context.spec.ratio_policy == "accordion",
        )
        dense = self._dense_buckets(way_name(Compression())) if buckets else None
        bf16 = None
        candidates = steering.candidates
        if buckets and any(each.in_buckets and each.compression.name == BF16 for each in candidates.all):
            bf16 = self._in_buckets(Compression(name=BF16, memory=candidates.memory))
        step = SwitchingStep(fused=fused, exchange=exchange, dense=dense, first=steering.candidate, bf16=bf16)
        return StepConfig(**{**vars(config), "use": step.use, "step": step})

    @property
    def _exchanges(self) -> ExchangeMaker:
        """Of whole gradients."""
        context = self.context
        return ExchangeMaker(
            spec=context.spec,
            compression=self.compression,
            shapes=[tuple(parameter.shape) for parameter in self._parameters],
            device=context.device,
            store=context.store,
            hosts=Hosts(names=tuple(worker.host for worker in context.spec.workers)),
            clock=context.clock,
        )

    @property
    def _in_thread(self) -> bool:
        """Whether buckets may be compressed beside backward.

        A GPU's kernels, and residuals under loss scaling, are the whole gradient's business.
        """
        return self.context.device.type == "cpu" and self.context.spec.precision != "fp16"

    def _in_buckets(self, compression: Compression) -> BucketExchange:
        context = self.context
        return BucketExchange(
            compression,
            self._parameters,
            seed=context.spec.seed,
            store=context.store,
            clock=context.clock,
        )

    def _dense_buckets(self, way: str) -> DenseBuckets:
        description = f"{way} in {len(self._parts)} buckets of {self._numel} elements"
        return DenseBuckets(Guard(description, store=self.context.store))

    @property
    def _description(self) -> str:
        spec = self.context.spec
        policies = f"ratio policy {spec.ratio_policy}, collective {spec.collective_policy}, {spec.sync.name}"
        asked = self.compression.model_dump_json(exclude={"name", "ratio"})
        return f"{way_name(self.compression)}, {policies} ({self._numel} elements, {spec.precision}) {asked}"

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return trainable_parameters(self.module.model)

    @property
    def _parts(self) -> list[Part]:
        return parts_of(self._parameters)

    @property
    def _numel(self) -> int:
        return sum(parameter.numel() for parameter in self._parameters)

    def _may_bucket(self) -> bool:
        """Whether the whole cluster can sum buckets under backward, and gains by it; all ranks answer alike."""
        context = self.context
        overlaps = can_overlap(context.device, context.world_size)
        return overlaps and len(self._parts) > 1

    def _try_loss(self, samples: int) -> None:
        """Find out what the loss is a mean over, on rank 0 with its first samples; all ranks then know.

        Raises:
            BadInput: the loss is a sum over samples; on all ranks.
        """
        context = self.context
        own = LossTest()
        if context.is_leader:
            own = self._tried_loss(min(max(samples, FEWEST_TRIED), MOST_SAMPLES))
        test = LossTest.from_list(gather_numbers(own.to_list(), context.world_size)[0])
        if test.problem is not None and (context.world_size > 1 or self.feed.max_samples is not None):
            raise test.problem
        self.module.follow(counts=test.kind == "counted", targets_per_sample=test.targets_per_sample)
        if test.note and context.is_leader and context.world_size > 1:
            print(f"hetopt: {test.note}; {test.hint}.", file=sys.stderr, flush=True)

    def _tried_loss(self, samples: int) -> LossTest:
        """What the loss is a mean over, by the first so many samples, or as many of them as fit into memory."""
        places = list(self.feed.first_part(samples).indices)

        def read(some: Sequence[int]) -> Batch:
            return self.feed.read(MicroBatch(epoch=0, indices=[places[at] for at in some]))

        tried = len(places)
        while tried > 1:
            try:
                return probe_loss(self.module.model, self.task.loss, read, tried)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            tried //= 2
        return LossTest()

    def _fit(self, compute: Callable[[MicroBatch], None], samples: int) -> None:
        """Compute a share of so many samples, or as much of it as fits into memory at once."""
        while True:
            try:
                compute(self.feed.first_part(samples))
            except DoesNotFit as error:
                too_many = error.samples
            else:
                return
            self.feed.learn_bound(half_of(too_many, self.context.rank))
