"""The ways to exchange a gradient among which a run may choose, priced by the planner and done by the trainer."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from hetopt.core.comm.composition import (
    AR_TOPK,
    AUTO,
    CORRECTION,
    DENSE,
    FEEDBACK,
    GATHER,
    METHODS,
    NONE,
    PACKED_BF16,
    PLAIN,
    combine,
)
from hetopt.core.comm.compression_text import spell
from hetopt.core.comm.cost import Operation, pipelined_s
from hetopt.core.comm.payload_bytes import VALUE_BYTES, Shapes, kept_elements, operations
from hetopt.core.run_spec import Compression

COMPRESS_SD = 0.05
"""Relative standard deviation of a measured time to compress."""

KEPT: Mapping[str, float] = MappingProxyType({"identity": 1.0, "fp16": 1.0, "bf16": 1.0, "int8": 0.9998, "int4": 0.975})
"""Part of the gradient's energy that rounding keeps, by compressor. Of whole codes: of values as heavy-tailed as cubes
of normal ones; of normal ones, and of rows of an embedding most of which are zero, it is more."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option to exchange a gradient: its compression, collective operations, time to compress, and retained energy.

    Attributes:
        compression: the compression that the trainer does.
        collective: name of the collective that carries it.
        operations: the collective operations of one exchange, or of one bucket where there are several.
        compress_s: seconds to compress and decompress the whole gradient, measured on the slowest worker.
        gain: retained gradient energy where it needs no measurement: 1 of what loses nothing to speak of, the ratio of
            a random choice. None: read off the gain curve that Top-k gives.
        buckets: 1: the whole gradient at once, after the backward pass; more: in so many parts beside it.
        every_steps: above 1: workers train for themselves, and average their parameters after so many steps.
    """

    compression: Compression
    collective: str
    operations: tuple[Operation, ...]
    compress_s: float = 0.0
    gain: float | None = None
    buckets: int = 1
    every_steps: int = 1

    @property
    def averages(self) -> bool:
        """True where parameters are averaged now and then, and no gradients are summed."""
        return self.every_steps > 1

    @property
    def ratio(self) -> float:
        """The fraction of the elements that is sent, above 0 and at most 1."""
        return self.compression.ratio

    @property
    def in_buckets(self) -> bool:
        """True where the gradient travels in buckets under the backward pass."""
        return self.buckets > 1

    @functools.cached_property
    def key(self) -> str:
        """Name of the option among its candidates, as event logs have it; cached, as every decision asks for it."""
        rarely = f" every {self.every_steps} steps" if self.averages else ""
        return way_name(self.compression) + (f" in {self.buckets} buckets" if self.in_buckets else rarely)

    def step_s(self, *, compute_s: float, backward_s: float, compress_s: float, exchange_s: float) -> float:
        """Return the seconds of a step whose gradient buckets travel while backward computes and compresses the rest.

        Where the option averages parameters, the exchange is spread over its ``every_steps`` steps.

        Args:
            compute_s: seconds that the slowest worker computes, its backward pass included.
            backward_s: the part of ``compute_s`` that makes gradients.
            compress_s: seconds to compress and decompress, as predicted or as measured since.
            exchange_s: seconds to exchange all buckets.
        """
        if self.averages:
            return compute_s + (compress_s + exchange_s) / self.every_steps
        return compute_s - backward_s + pipelined_s(backward_s + compress_s, exchange_s, self.buckets)


def make_option(
    compression: Compression, *, numel: int, workers: int, compress_s: float, shapes: Shapes | None = None
) -> Option:
    """Return the option that exchanges a whole gradient of ``numel`` elements by a compression, in one bucket.

    Args:
        compression: the compression that the trainer does.
        numel: elements of the gradient.
        workers: number of workers in the group.
        compress_s: measured seconds to compress and decompress the gradient.
        shapes: shapes of the parameters, for compressors that work by layer; None: one vector.

    Raises:
        BadInput: there is no such compressor, or its memory, collective or width of codes do not go together.
    """
    return Option(
        compression=compression,
        collective=settled_collective(compression),
        operations=operations_of(compression, numel, workers=workers, shapes=shapes),
        compress_s=compress_s,
        # Of what is rounded, and of a random choice.
        gain=compression.ratio if compression.name in RANDOM else KEPT.get(compression.name),
    )


RATIOS = (0.1, 0.03, 0.01, 0.003, 0.001)
"""Ratios that are tried where nobody names one: 10x to 1000x, the range of the published methods."""

LOOK_AT = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
"""Ratios at which gain curves are read."""

COLLECTIVES = (GATHER, AR_TOPK)
"""Collectives by which selected elements are sent where nobody names one."""

CODINGS = (PLAIN, PACKED_BF16)
"""Codings of selected elements that are tried where nobody names one."""

IDENTITY = "identity"
BF16 = "bf16"
ROUNDED = (BF16, "int8", "int4")
"""Compressors that send everything in fewer bits; the first may travel under backward."""

AVERAGED = (IDENTITY, BF16, "int8")
"""Compressors by which averages of parameters may be rounded unasked. In int4 they cost two points of accuracy,
whatever is remembered of them (ResNet-20 and VGG-11 on a fifth of CIFAR-10, four workers)."""

LOSSLESS = (IDENTITY, "fp16", BF16)
"""Compressors that lose nothing as far as convergence can tell."""

RANDOM = ("randomk", "global_randomk_maxnorm", "global_randomk_two_scale")
"""Compressors that choose elements without looking: of the gradient's energy they keep the ratio."""

LIKE_TOPK = ("topk", "mstopk")
"""Compressors that send the largest elements, of which pilots tell what they keep; the second up to how finely it
bisects."""

TRIED_RATIOS = (0.1, 0.01)
"""Ratios at which a profile follows other selections: a smaller one needs more steps to settle than a pilot has."""

RANKS = (1, 2, 4)
"""Ranks of PowerSGD's factors that are priced: those of its paper."""

LEVELS = (1, 7, 63)
"""Levels of summed codes at which a profile tries them: from as many workers as fit to two."""

SELECTOR = "topk"
"""The compressor of a run that leaves the choice to hetopt: exact, same size everywhere, and the fastest here."""


@dataclass(frozen=True, kw_only=True)
class CompressTime:
    """A worker's own time to compress and decompress ``k`` selected elements: ``fixed_s + per_element_s * k``.

    Both coefficients are in seconds; ``k`` is the number of selected elements.
    """

    fixed_s: float
    per_element_s: float

    def time_s(self, kept: int) -> float:
        """Return the seconds to compress and decompress ``kept`` selected elements."""
        return self.fixed_s + self.per_element_s * kept


Family = tuple[str, str, str]
"""Names of a compressor, a collective and a coding."""


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The options to exchange one gradient among which a group of workers may choose.

    Attributes:
        asked: compression that the run was asked for; what it names is never departed from.
        chooses_collective: whether the collective may change.
        numel: elements of the gradient.
        workers: number of workers in the group.
        shapes: shapes of the parameters, for compressors that work by layer; None: one vector.
        buckets: number of buckets in which everything is sent under the backward pass; 1: nothing is sent under it.
        compress: measured times to compress, by family; absent families count as free.
        rounded_s: measured seconds to round everything to fewer bits and back, by compressor; absent ones are no
            candidates.
        bf16_in_buckets: whether bf16 can be sent under the backward pass as well.
        every_steps: averages of parameters after so many steps are candidates, in 8 bits; empty: no averages.
    """

    asked: Compression
    chooses_collective: bool
    numel: int
    workers: int
    shapes: Shapes | None = None
    buckets: int = 1
    compress: Mapping[Family, CompressTime] = field(default_factory=dict)
    rounded_s: Mapping[str, float] = field(default_factory=dict)
    bf16_in_buckets: bool = False
    every_steps: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Name of the sparsifying compressor among the candidates: the one asked for, or ``topk``."""
        return self.asked.name if METHODS[self.asked.name].by_ratio else SELECTOR

    @property
    def memory(self) -> str:
        """Name of the gradient memory that keeps residuals through every change of ratio or collective."""
        memory = AUTO if self.asked.memory == NONE else self.asked.memory
        return combine(self.name, memory=memory, collective=self._collective).memory

    def at(self, ratio: float) -> tuple[Option, ...]:
        """Return the candidates that send ``ratio`` of the elements, one for each collective; dense alone from 1 on."""
        if ratio >= 1:
            return (self.dense,)
        coding = self.asked.coding or PLAIN
        return tuple(self._selected(ratio, collective, coding) for collective in self._collectives)

    @functools.cached_property
    def dense(self) -> Option:
        """Dense option: everything in fp32, residuals included."""
        part_bytes = VALUE_BYTES * self.numel / self.buckets
        return Option(
            compression=Compression(name=IDENTITY, memory=self.memory),
            collective=DENSE,
            operations=(Operation(primitive="all_reduce", payload_bytes=part_bytes, members=self.workers),),
            gain=1.0,
            buckets=self.buckets,
        )

    @functools.cached_property
    def all(self) -> tuple[Option, ...]:
        """All candidates: dense, rounded, averaged, and selected by every ratio, collective and coding."""
        ratios = sorted({*RATIOS, *((self.asked.ratio,) if self.asked.ratio < 1 else ())}, reverse=True)
        selected = [
            self._selected(ratio, collective, coding)
            for ratio in ratios
            for collective in self._collectives
            for coding in self._codings
        ]
        return (self.dense, *self._rounded, *self._averaged, *selected)

    def find(self, key: str) -> Option | None:
        """Return the candidate whose key, as event logs have it, is ``key``; None: there is none."""
        return next((option for option in self.all if option.key == key), None)

    def nearest(self, ratio: float) -> Option:
        """Return the candidate of the nearest ratio in log scale; of equals one by the collective asked for, if any is.

        From a ratio of 1 on that is dense. Near 1 it may be an option that sends all elements, rounded or in averages.

        Args:
            ratio: fraction of the elements to send, above 0.
        """
        if ratio >= 1:
            return self.dense
        asked = self._collective

        return min(self.all, key=lambda option: (abs(math.log(option.ratio / ratio)), option.collective != asked))

    @property
    def _collective(self) -> str:
        return self.asked.collective if self.asked.name == self.name else AUTO

    @property
    def _collectives(self) -> tuple[str, ...]:
        """The collectives to choose from for selected elements; one where the candidates do not choose it."""
        collective = combine(self.name, memory=self.memory, collective=self._collective).collective
        if not self.chooses_collective:
            return (collective,)
        fitting = METHODS[self.name].collectives
        return tuple(c for c in COLLECTIVES if c in fitting) or (collective,)

    @property
    def _codings(self) -> tuple[str, ...]:
        """The codings to choose from: the one asked for, else all that the compressor has."""
        if self.asked.coding is not None:
            return (self.asked.coding,)
        return CODINGS if "coding" in METHODS[self.name].options else (PLAIN,)

    @property
    def families(self) -> tuple[Family, ...]:
        """The compressor, collective and coding of each family whose compression time `all` needs."""
        return tuple((self.name, collective, coding) for collective in self._collectives for coding in self._codings)

    @property
    def _rounded(self) -> tuple[Option, ...]:
        """The timed options in a half to an eighth of the bytes, whose rounding errors stay in the residual."""
        options = []
        for name in ROUNDED:
            if name not in self.rounded_s or self.memory not in METHODS[name].memories:
                continue
            buckets = self.buckets if self.bf16_in_buckets and name == BF16 else 1
            part = make_option(
                Compression(name=name, memory=self.memory),
                numel=math.ceil(self.numel / buckets),
                workers=self.workers,
                compress_s=self.rounded_s[name],
                shapes=self.shapes if buckets == 1 else None,
            )
            options.append(replace(part, buckets=buckets))
        return tuple(options)

    @property
    def _averaged(self) -> tuple[Option, ...]:
        """The averages of parameters, one for each averaging period; what rounding leaves of one goes with the next."""
        name = AVERAGED[-1]
        time_s = self.rounded_s.get(name, 0.0)
        part = make_option(Compression(name=name), numel=self.numel, workers=self.workers, compress_s=time_s)
        return tuple(replace(part, gain=None, every_steps=steps) for steps in self.every_steps)

    def _selected(self, ratio: float, collective: str, coding: str) -> Option:
        """Return the option that sends ``ratio`` of the elements by a collective; compression not timed costs 0 s."""
        time = self.compress.get((self.name, collective, coding))
        kind = {"name": self.name, "ratio": ratio, "collective": collective, "memory": self.memory}
        options = self.asked.model_dump() if self.asked.name == self.name else {}
        if coding != PLAIN:
            options["coding"] = coding
        return make_option(
            Compression.model_validate({**options, **kind}),
            numel=self.numel,
            workers=self.workers,
            compress_s=0.0 if time is None else time.time_s(kept_elements(self.numel, ratio)),
            shapes=self.shapes,
        )


def operations_of(
    compression: Compression, numel: int, *, workers: int, shapes: Shapes | None = None
) -> tuple[Operation, ...]:
    """Return the collective operations, in order, that exchange a gradient of ``numel`` elements once.

    See `hetopt.core.comm.payload_bytes.operations`.

    Args:
        compression: compression of the gradient.
        numel: elements of the gradient.
        workers: number of workers that take part.
        shapes: shapes of the parameters, for compressors that work by layer; None: one vector.

    Raises:
        BadInput: compressor, memory and collective do not go together, or codes of the width overflow with so many
            workers.
    """
    return operations(
        compression.name,
        numel,
        compression.ratio,
        workers=workers,
        collective=compression.collective,
        bits=compression.bits,
        levels=compression.levels,
        rank=compression.rank or 1,
        coding=compression.coding or PLAIN,
        shapes=shapes,
    )


def whole_ways() -> tuple[Compression, ...]:
    """Return every registered compression that sends all elements in fewer bytes, uncompressed fp32 left out.

    Each stands once by each collective that carries it, and PowerSGD once at each rank of `RANKS`.
    """
    return tuple(
        Compression(name=name, rank=rank, collective=AUTO if collective == method.collectives[0] else collective)
        for name, method in METHODS.items()
        if name != IDENTITY and not method.by_ratio
        for collective in method.collectives
        for rank in (RANKS if "rank" in method.options else (None,))
    )


def selection(name: str, ratio: float) -> Compression:
    """Return the compression by a selecting compressor as plans use it: error feedback, no momentum correction.

    Momentum stays with the optimizer, and is not corrected.

    Args:
        name: name of the compressor.
        ratio: fraction of the elements to send, in (0, 1].
    """
    memory = FEEDBACK if METHODS[name].memories[0] == CORRECTION else AUTO
    return Compression(name=name, ratio=ratio, memory=memory)


def tried_ways() -> tuple[Compression, ...]:
    """Return the compressions whose error a profile measures on pilots, the most important first.

    Summed codes have fewer levels the more workers there are. The last of `whole_ways` first: a pilot may be too short
    for all of them, and of `KEPT` something is known.
    """
    whole = tuple(
        way.model_copy(update={"levels": levels})
        for way in reversed(whole_ways())
        if way.name not in LOSSLESS
        for levels in (LEVELS if has_levels(way) else (None,))
    )
    looking = [name for name, method in METHODS.items() if method.by_ratio and name not in (*LIKE_TOPK, *RANDOM)]
    return (*whole, *(selection(name, ratio) for name in looking for ratio in TRIED_RATIOS))


def timed_ways() -> tuple[str, ...]:
    """Return the names of all compressions that a profile times, in the order in which it does while time is left."""
    by_ratio = (name for name, method in METHODS.items() if method.by_ratio)
    return tuple(dict.fromkeys((*(timed_as(way) for way in reversed(whole_ways())), *by_ratio)))


def has_levels(way: Compression) -> bool:
    """Return whether a compression's integer codes are summed by an all-reduce, so that workers limit its levels."""
    return "levels" in METHODS[way.name].options and settled_collective(way) == DENSE


@functools.cache
def timed_as(way: Compression) -> str:
    """Return the name under which a profile keeps the time to compress by a compression, whatever the ratio.

    A compressor that sends a part goes by its name alone, another by its rank and a collective that is not its default
    too.
    """
    method = METHODS[way.name]
    if method.by_ratio:
        return way.name
    collective = settled_collective(way)
    return spell(
        Compression(
            name=way.name,
            rank=(way.rank or 1) if "rank" in method.options else None,
            collective=AUTO if collective == method.collectives[0] else collective,
        )
    )


def settled_collective(compression: Compression) -> str:
    """Return the name of the collective by which a compression travels; ``auto`` is the compressor's default.

    Raises:
        BadInput: compressor, memory and collective do not go together.
    """
    return combine(compression.name, memory=compression.memory, collective=compression.collective).collective


def way_name(compression: Compression) -> str:
    """Return the name of an exchange in event logs: ``topk 0.01 by all_gather``, with its coding if not plain.

    Raises:
        BadInput: compressor, memory and collective do not go together.
    """
    coded = "" if compression.coding in (None, PLAIN) else f", {compression.coding}"
    amount = f" {compression.ratio:g}" if METHODS[compression.name].by_ratio else ""
    return f"{compression.name}{amount} by {settled_collective(compression)}{coded}"
