"""A script's own batches in unequal slices, audits of the slices, random numbers, run spec and open session.

Every worker draws the same batches, in the order in which one machine would, and computes its part of each. Which part
that is, a table of shares says, and from which batch on.

**Audit steps** measure how far shares are from one machine, whatever the script computes. In an audit step the leader
computes the whole batch and the other workers compute it in shares. All of them step by the leader's gradient, so that
the step is exact whatever is found; the distance of the shares' sum from it is the figure.

**Random numbers.** What a worker draws (augmentation, dropout, noise) belongs to its own samples. Orders of samples,
and streams that every worker reads whole, are drawn alike: with the numbers of rank 0 as an epoch begins, which are
those of one machine.
"""

from __future__ import annotations

import math
import os
import random
import socket
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.utils._pytree import tree_leaves

from hetopt.core import formatting
from hetopt.core.artifact import read_record
from hetopt.core.batch_partition import largest_remainder, within_memory
from hetopt.core.comm.composition import AUTO
from hetopt.core.comm.compression_text import parse_compression
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.events.log import EventLog
from hetopt.core.paths import host_name
from hetopt.core.run_rules import OF_SESSIONS, checked, why_shares_differ
from hetopt.core.run_spec import (
    Compression,
    RunSpec,
    StopRule,
    Synchronization,
    WorkerSpec,
    parse_sync,
)
from hetopt.trainer.context import States
from hetopt.trainer.engine import tensors_mark
from hetopt.trainer.sharding import facts_of_own_shards

_SEED_STRIDE = 7919
_NUMPY_SEEDS = 2**32


def draw_by_rank(rank: int) -> None:
    """Seed torch's, Python's and NumPy's generators by rank, but leave rank 0's; every worker must call it.

    Needs an initialised process group.
    """
    seed = torch.randint(2**31, (1,), generator=torch.default_generator.clone_state())
    dist.broadcast(seed, src=0)
    if rank:
        rank_seed = int(seed) + _SEED_STRIDE * rank
        torch.manual_seed(rank_seed)
        random.seed(rank_seed)
        np.random.seed(rank_seed % _NUMPY_SEEDS)


class CommonNumbers:
    """The random generators, as of rank 0, from which all workers draw alike in an epoch; every worker must make it.

    Args:
        states: states of the generators to begin with; those of rank 0 count.
        world_size: number of workers.
    """

    def __init__(self, states: States, world_size: int) -> None:
        vector = states.vector()
        if world_size > 1:
            dist.broadcast(vector, src=0)
        self._states = States.of(vector)

    @contextmanager
    def drawn(self, *, keep: bool = False) -> Iterator[None]:
        """Draw from the common generators inside; then put this worker's own generators back, unless ``keep``.

        Args:
            keep: whether this worker goes on with them, too, as one machine would.
        """
        before = States.now()
        self._states.use()
        try:
            yield
        finally:
            self._states = States.now()
            if not keep:
                before.use()


Audit: TypeAlias = Literal["warn", "stop", "off"]
"""What happens where an audit finds that shares differ from one machine by more than the tolerance."""

LEAST_WORKERS = 3
"""Fewest workers for an audit: one computes the whole batch, and at least two share it."""

ROUNDING = 1e-4
"""Relative distance of two float32 gradients of the same samples, summed in another order."""

LEAST_NOISY_AUDITS = 4
"""Fewest differences by which noise can be told from a difference that is always the same."""


@dataclass(frozen=True, kw_only=True)
class Audits:
    """The rule for when the leader computes a whole batch to check the shares: at steps 1, 2, 4, ... and after changes.

    Attributes:
        every_step: whether all batches are audited, so that a run of several workers trains as one machine does.
        accumulate: number of batches of a step.
        largest: most samples that the leader's memory has room for; None: not known, and any batch is audited.
    """

    every_step: bool = False
    accumulate: int = 1
    largest: int | None = None

    def is_due(self, step: int, samples: int, *, changed: bool) -> bool:
        """Return whether a batch is audited.

        Args:
            step: number of the step that the batch is of, from 1.
            samples: number of samples of the batch.
            changed: whether the workers have other shares than in the batch before.
        """
        if self.every_step:
            return True
        fits = self.largest is None or samples <= self.largest
        return fits and (step & (step - 1) == 0 or (changed and self.accumulate == 1))


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """The result of an audit: how far the workers' summed gradient is from one machine's; the same on all workers.

    Attributes:
        distance: norm of the difference between the shares' gradient and the leader's, over the norm of the leader's.
        draws: whether random numbers were drawn while a worker computed (dropout, noise).
        audits: number k of audits so far in which random numbers were drawn.
        coherence: k |mean|^2 / mean |difference|^2 over the differences of these audits: about 1 where they are noise,
            and k where they are always the same.
    """

    distance: float
    draws: bool = False
    audits: int = 1
    coherence: float = 1.0

    @classmethod
    def of(cls, apart: Tensor, norm: float, *, draws: bool, before: list[Tensor]) -> AuditResult:
        """Return an audit's result from the gradient difference ``apart``; add it to ``before`` if it ``draws``.

        A norm of 0 gives a distance of 1 where the gradients differ, else 0, and ``before`` stays.

        Args:
            apart: [elements] the leader's gradient minus the sum of the others'.
            norm: norm of the leader's gradient.
            draws: whether random numbers were drawn.
            before: three sums over earlier audits, changed in place: of the differences over ``norm``, of their squared
                norms, and of 1; empty: no audit yet.
        """
        square = float(apart.square().sum())
        distance = math.sqrt(square) / norm if norm else float(square > 0)
        if not draws or not norm:
            return cls(distance=distance)
        now = [apart / norm, torch.tensor(square / norm**2), torch.tensor(1.0)]
        before[:] = [old + new for old, new in zip(before, now, strict=True)] if before else now
        total, squares, audits = before
        coherence = float(total.square().sum() / squares) if squares else 0.0
        return cls(distance=distance, draws=True, audits=int(audits), coherence=coherence)

    def differs(self, tolerance: float) -> bool:
        """Return whether shares compute another gradient than one machine: beyond a tolerance, and not by noise alone.

        Of k differences that are independent the coherence is about 1, of the same difference k times it is k: the
        square root of k lies between.
        """
        if not self.distance > tolerance:
            return False
        return not self.draws or (self.audits >= LEAST_NOISY_AUDITS and self.coherence > math.sqrt(self.audits))


@dataclass(kw_only=True)
class AuditRecord:
    """The settings of a run's audits, what happens beyond which tolerance, and whether a difference was reported.

    Attributes:
        mode: what happens beyond the tolerance: a warning in the log, the end of the run, or no audits.
        tolerance: relative distance that is accepted.
        hint: why shares may differ, and what may mend it.
        differed: whether a difference beyond the tolerance was reported.

    Raises:
        BadInput: ``mode`` is none of the three, or ``tolerance`` is not above 0.
    """

    mode: Audit
    tolerance: float
    hint: str = why_shares_differ(is_ddp=False, normalises=False)
    differed: bool = False

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            BadInput: mode or tolerance cannot be.
        """
        if self.mode not in get_args(Audit):
            raise BadInput(f"`audit` must be 'warn', 'stop' or 'off', got {self.mode!r}.", hint="see hetopt.session")
        if not self.tolerance > 0:
            raise BadInput(
                f"`audit_tolerance` must be above 0, got {self.tolerance:g}.",
                hint=f"leave it out for {ROUNDING:g}, the rounding of float32 sums",
            )

    def tell(self, result: AuditResult, step: int, events: EventLog) -> None:
        """Log an audit's finite result; the first time that it differs, log a warning or stop the run.

        It differs as `AuditResult.differs` says: beyond the tolerance and, where random numbers are drawn, by more than
        noise.

        Args:
            result: result of the audit.
            step: number of the step, from 1.
            events: log of the run.

        Raises:
            RunFailed: the result differs, and ``mode`` is "stop"; all workers raise it.
        """
        if math.isfinite(result.distance):  # a step whose gradient overflows is no measurement
            events.write("audited", step=step, distance=result.distance, tolerance=self.tolerance)
        if self.differed or not result.differs(self.tolerance):
            return
        self.differed = True
        distance = f"shares differ from one machine by {formatting.distance(result.distance)} at step {step}"
        if self.mode == "stop":
            raise RunFailed(f"{distance}, and audit_tolerance is {self.tolerance:g}.", hint=self.hint)
        events.write("audit_differs", step=step, reason=f"{distance}: {self.hint}")


Shares: TypeAlias = tuple[int, ...]
Place: TypeAlias = tuple[int, int]
"""Epoch of a batch, and number of the batch in it; both from 0."""

_MARKED_ELEMENTS = 1024


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of a batch that one worker computes: its samples, their place in the batch, and all workers' shares.

    Attributes:
        samples: number of the batch's samples that are this worker's; where it has none it computes some that do not
            count.
        batch: number of samples of the whole batch.
        first: place of its first sample in the batch, from 0.
        shares: samples of all workers, in rank order; in an audit those that they would have without it.
        place: epoch and number of the batch.
        step: number of the step that the batch is of, among all of its loader, from 1; 0: hetopt does not share out
            this batch.
        is_last: whether it is the last of its epoch, as far as that is known.
        is_audit: whether the leader computes the whole batch and the others share it (see `Audits`).
        mark: fingerprint of the batch, or of the first sample of a stream's; 0: not known.
    """

    samples: int
    batch: int
    first: int = 0
    shares: Shares = ()
    place: Place = (0, 0)
    step: int = 0
    is_last: bool = False
    is_audit: bool = False
    mark: int = 0

    @property
    def weight(self) -> float:
        """Weight of this worker's mean gradient in that of the batch, ``samples / batch``."""
        return self.samples / self.batch

    @property
    def rows(self) -> int:
        """Number of samples that this worker computes; without a share of the batch, up to two whose weight is 0."""
        return self.samples or min(ROWS_WITHOUT_SHARE, self.batch)


ROWS_WITHOUT_SHARE = 2
"""Samples that a worker computes for nothing where it has none of a batch: BatchNorm cannot normalise one alone."""


class ShareTable:
    """A table of all workers' local batch sizes, and from which batch on they hold; the same on all workers.

    Args:
        shares: samples of each worker in a full batch, at first.
        minimum: least share of a worker, in samples, in a batch with enough samples for that.
        audits: rule for which batches are computed twice; None: no batch is.

    Attributes:
        turns: whether each batch gives the shares of the one before to the next worker: what a check has, since shares
            change in a run too.
    """

    turns: ClassVar[bool] = False

    def __init__(self, shares: Shares, *, minimum: int = 1, audits: Audits | None = None) -> None:
        self._minimum = minimum
        self.audits = audits
        self._entries: list[tuple[Place, Shares]] = [((0, 0), shares)]

    def state(self) -> list[tuple[Place, Shares]]:
        """Return the last one or two entries for a checkpoint: ((epoch, batch) from which on, local batch sizes)."""
        return list(self._entries)

    def resume(self, entries: Sequence[tuple[Place, Shares]]) -> None:
        """Restore the entries that `state` returned."""
        self._entries = [(tuple(place), tuple(shares)) for place, shares in entries]  # type: ignore[misc]  # of two

    def change(self, shares: Shares, *, since: Place) -> None:
        """Use other local batch sizes, by rank, from the batch ``since`` (epoch, number) on, not drawn yet.

        Args:
            shares: samples of each worker in a full batch, in rank order.
            since: epoch and number of the first batch that they hold for; no worker may have drawn it yet.
        """
        self._entries = [*self._entries[-1:], (since, shares)]

    def of(self, place: Place, samples: int) -> Shares:
        """Return all workers' samples in a batch of ``samples``, by rank.

        In proportion to the shares if it is not full.

        Workers that would have fewer than the minimum have none then.

        Raises:
            BadInput: the batch cannot be shared out so.
        """
        wanted = self._wanted(place)
        return wanted if sum(wanted) == samples else self._in_proportion(wanted, samples)

    def _wanted(self, place: Place) -> Shares:
        """Return the shares that hold at a place, moved on by a worker from batch to batch if workers take turns."""
        shares = next(shares for since, shares in reversed(self._entries) if since <= place or since == (0, 0))
        turn = place[1] % len(shares) if self.turns else 0
        return shares[turn:] + shares[:turn]

    def _in_proportion(self, wanted: Shares, samples: int) -> Shares:
        """Return shares of at least the minimum; where a batch has less, only the largest shares are served."""
        count = max(1, min(len(wanted), samples // self._minimum))
        taking = sorted(range(len(wanted)), key=lambda rank: -wanted[rank])[:count]
        least = min(self._minimum, samples)
        minimum = [least if rank in taking else 0 for rank in range(len(wanted))]
        maximum = [None if rank in taking else 0 for rank in range(len(wanted))]
        return largest_remainder(wanted, samples, minimum=minimum, maximum=maximum)

    def part(self, rank: int, samples: int, place: Place, step: int, *, mark: int = 0, is_last: bool = False) -> Part:
        """Return the part of a batch of ``samples`` samples that a rank computes: rank 0 the whole in an audit.

        In an audit rank 0 has the whole batch, and the others share it among themselves.

        Args:
            rank: of the worker.
            samples: number of samples of the batch.
            place: epoch and number of the batch, from 0.
            step: number of the step that the batch is of, among all of its loader, from 1.
            mark: fingerprint of the batch; 0: not known.
            is_last: whether the batch is the last of its epoch.

        Raises:
            BadInput: the batch cannot be shared out so.
        """
        shares = self.of(place, samples)
        changed = place == self._entries[-1][0]
        is_audit = self.audits is not None and self.audits.is_due(step, samples, changed=changed)
        counts = (0, *self._in_proportion(self._wanted(place)[1:], samples)) if is_audit else shares
        first = sum(counts[:rank])
        return Part(
            samples=samples if is_audit and rank == 0 else counts[rank],
            batch=samples,
            first=first,
            shares=shares,
            place=place,
            step=step,
            is_last=is_last,
            is_audit=is_audit,
            mark=mark,
        )


def own_items(items: Sequence[Any], part: Part) -> Sequence[Any]:
    """Return the items of a batch that a worker computes.

    Where its part is empty, the first two, which do not count.
    """
    return items[part.first : part.first + part.samples] or items[:ROWS_WITHOUT_SHARE]


def mark_of(sample: object) -> int:
    """Return a checksum of the first 1,024 elements of a sample's arrays and plain values: equal for equal samples.

    Values of other types are left out; a sample without any has 0.
    """
    mark = 0
    for leaf in tree_leaves(sample):
        if isinstance(leaf, np.ndarray) and leaf.dtype != object:
            mark = zlib.crc32(leaf.reshape(-1)[:_MARKED_ELEMENTS].tobytes(), mark)
        elif isinstance(leaf, Tensor):
            mark ^= tensors_mark([leaf.detach().cpu().reshape(-1)[:_MARKED_ELEMENTS]])
        elif isinstance(leaf, (str, bytes, int, float)):
            mark = zlib.crc32(repr(leaf)[:_MARKED_ELEMENTS].encode(), mark)
    return mark


def with_batch(spec: RunSpec, batch_size: int, *, minimum: int = 1) -> RunSpec:
    """Return a run's spec with local batch sizes that sum to ``batch_size``, in proportion to those it has.

    Args:
        spec: spec whose local batch sizes weigh the shares; what a script does itself (its data, its end, its learning
            rate) does not count.
        batch_size: number of samples of a full batch.
        minimum: least share of a worker, in samples, in a batch with enough samples for that.

    Raises:
        BadInput: the batch does not fit into the workers' memory as the spec bounds it.
    """
    workers = len(spec.workers)
    least = min(minimum, batch_size // workers)
    weights = [worker.local_batch_size for worker in spec.workers]
    shares = largest_remainder(weights, batch_size, minimum=[least] * workers, maximum=[None] * workers)
    return with_shares(spec, within_memory(spec, shares))


def with_shares(spec: RunSpec, shares: Shares) -> RunSpec:
    """Return a run's spec with these local batch sizes, by rank, for policies and the head of logs.

    Raises:
        ValueError: there are not as many shares as workers.
    """
    workers = (
        worker.model_copy(update={"local_batch_size": share})
        for worker, share in zip(spec.workers, shares, strict=True)
    )
    return spec.model_copy(update={"workers": tuple(workers)})


def make_spec(
    world_size: int,
    *,
    compression: Compression | str,
    policy: str,
    sync: Synchronization | str,
    spec: RunSpec | Path | str | None,
) -> RunSpec:
    """Return a script's run spec for ``world_size`` workers: of its arguments or, where given, ``spec`` alone.

    Args:
        world_size: number of workers.
        compression: record or text of a compression; ``auto``: a policy chooses while training goes on.
        policy: name of the batch policy.
        sync: record or text of when workers synchronise.
        spec: run spec, or path of its file; None: one is made of the other arguments. Where it is given, those do not
            count.

    Raises:
        BadInput: the spec cannot be read, or is for another number of workers; or an argument is unknown or does not go
            with the others.
    """
    if spec is None:
        auto, host = compression == AUTO, host_name(socket.gethostname())
        together = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of this machine
        if isinstance(compression, str):
            compression = Compression() if auto else parse_compression(compression, option="compression")
        checked(compression)
        return RunSpec(
            task=OF_SESSIONS,
            workers=tuple(
                WorkerSpec(host=f"{host}-{rank // together}", type="local", local_batch_size=1)
                for rank in range(world_size)
            ),
            compression=compression,
            ratio_policy="auto" if auto else "fixed",
            collective_policy="cheapest" if auto else "fixed",
            sync=parse_sync(sync, option="sync") if isinstance(sync, str) else sync,
            batch_policy=policy,
            stop=StopRule(max_steps=1),
        )
    planned = (
        spec if isinstance(spec, RunSpec) else read_record(RunSpec, Path(spec), hint="write it with `hetopt export`")
    )
    if len(planned.workers) != world_size:
        raise BadInput(
            f"The run is planned for {len(planned.workers)} workers, but {world_size} were started.",
            hint=f"start torchrun with {len(planned.workers)} processes in all",
        )
    return planned


@dataclass
class Registry:
    """The register of this process's open session, and of how many sessions have begun.

    Attributes:
        open: tuple of the one open session; empty: no session is open.
        begun: number of sessions that have begun in this process.
        shares: facts on what devices are to share of the last session's model, and on its blocks; empty: nothing.
        store: store in which sessions of several workers meet, one after the other; None: none was opened.
    """

    open: tuple[Any, ...] = ()
    begun: int = 0
    shares: dict[str, Any] = field(default_factory=dict)
    store: Store | None = None

    def enter(self, session: object) -> None:
        """Register a session that begins.

        Raises:
            BadInput: another session is open.
        """
        if self.open:
            raise BadInput(
                "A session began while another was open.",
                hint="give one session all models and optimizers: session((G, D), (optimizer_g, optimizer_d))",
            )
        self.open, self.begun = (session,), self.begun + 1


REGISTRY = Registry()


def shared_by_script(modules: Iterable[nn.Module]) -> dict[str, Any]:
    """Return what a script's devices are to share of its model (``shard``), and facts on its blocks; empty: nothing.

    Args:
        modules: all modules of the process.
    """
    return REGISTRY.shares or facts_of_own_shards(modules)


class Stopped(BaseException):
    """The exception that ends a script whose run is to stop, on all workers between the same two steps.

    No ``except Exception`` of the script catches it."""
