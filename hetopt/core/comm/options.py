"""The ways to exchange a gradient among which a run may choose, priced by the planner and done by the trainer."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
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
from hetopt.core.records import dataclass, field, replace
from hetopt.core.run_spec import Compression

COMPRESS_SD = 0.05
"""Relative standard deviation of a measured time to compress."""

KEPT: Mapping[str, float] = MappingProxyType({"identity": 1.0, "fp16": 1.0, "bf16": 1.0, "int8": 0.9998, "int4": 0.975})
"""Gradient energy that rounding keeps. Of whole codes: of values as heavy-tailed as cubes of normal ones; of normal
ones, and of rows of an embedding most of which are zero, it is more."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option to exchange a gradient: its compression, collective operations, time to compress, and retained energy.

    Attributes:
        compression: what the trainer does.
        collective: the name of the form it travels in.
        operations: of one exchange, of one bucket where there are several.
        compress_s: to compress and decompress the whole gradient, measured on the slowest worker.
        gain: retained gradient energy where it needs no measurement: 1 of what loses nothing to speak of, the ratio of
            a random choice. Absent: read off the gain curve that Top-k gives.
        buckets: 1: the whole gradient at once, after the backward pass; more: beside it.
        every_steps: above 1 workers train for themselves, and after so many steps average their parameters.
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
        """The fraction of the elements that is sent."""
        return self.compression.ratio

    @property
    def in_buckets(self) -> bool:
        """True where the gradient travels in buckets under the backward pass."""
        return self.buckets > 1

    @functools.cached_property
    def key(self) -> str:
        """Name of the option among its peers; cached, as every decision asks for it a hundred times."""
        rarely = f" every {self.every_steps} steps" if self.averages else ""
        return way_name(self.compression) + (f" in {self.buckets} buckets" if self.in_buckets else rarely)

    def step_s(self, *, compute_s: float, backward_s: float, compress_s: float, exchange_s: float) -> float:
        """Return the seconds of a step whose gradient buckets travel while backward computes and compresses the rest.

        Args:
            compute_s: of the slowest worker, its backward pass included.
            backward_s: the part of it that makes gradients.
            compress_s: see the attribute; another value where it was measured since.
            exchange_s: of all buckets.
        """
        if self.averages:
            return compute_s + (compress_s + exchange_s) / self.every_steps
        return compute_s - backward_s + pipelined_s(backward_s + compress_s, exchange_s, self.buckets)


def make_option(
    compression: Compression, *, numel: int, workers: int, compress_s: float, shapes: Shapes | None = None
) -> Option:
    """Return the option that exchanges a whole gradient of ``numel`` elements by a compression, in one bucket.

    Args:
        compression: what the trainer does.
        numel: elements of the gradient.
        workers: in the group.
        compress_s: measured seconds to compress and decompress it.
        shapes: of the parameters, for compressors that work by layer.

    Raises:
        BadInput: no such compressor, or it cannot travel so.
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
"""That are tried where nobody names one: 10x to 1000x, the range of the published methods."""

LOOK_AT = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
"""Where gain curves are read."""

COLLECTIVES = (GATHER, AR_TOPK)
"""That selected elements are sent by where nobody names one."""

CODINGS = (PLAIN, PACKED_BF16)

IDENTITY = "identity"
BF16 = "bf16"
ROUNDED = (BF16, "int8", "int4")
"""Everything, in fewer bits; the first may travel under backward."""

AVERAGED = (IDENTITY, BF16, "int8")
"""What averages of parameters are rounded by unasked. In int4 they cost two points of accuracy, whatever is remembered
of them (ResNet-20 and VGG-11 on a fifth of CIFAR-10, four workers)."""

LOSSLESS = (IDENTITY, "fp16", BF16)
"""As far as convergence can tell."""

RANDOM = ("randomk", "global_randomk_maxnorm", "global_randomk_two_scale")
"""They choose without looking: of the gradient's energy they keep the ratio."""

LIKE_TOPK = ("topk", "mstopk")
"""They send the largest elements, of which pilots tell what they keep; the second up to how finely it bisects."""

TRIED_RATIOS = (0.1, 0.01)
"""At which a profile follows other selections: a smaller one needs more steps to settle than a pilot has."""

RANKS = (1, 2, 4)
"""Of PowerSGD's factors, that are priced: those of its paper."""

LEVELS = (1, 7, 63)
"""Of codes that are summed, at which a profile tries them: from as many workers as fit to two."""

SELECTOR = "topk"
"""The compressor of a run that leaves the choice to hetopt: exact, same size everywhere, and the fastest here."""


@dataclass(frozen=True, kw_only=True)
class CompressTime:
    """A worker's own time to compress and decompress ``k`` selected elements: ``fixed_s + per_element_s * k``."""

    fixed_s: float
    per_element_s: float

    def time_s(self, kept: int) -> float:
        """Return the seconds to compress and decompress ``kept`` selected elements."""
        return self.fixed_s + self.per_element_s * kept


Family = tuple[str, str, str]
"""Compressor, collective and coding."""


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The options to exchange one gradient among which a group of workers may choose.

    Attributes:
        asked: compression that the run was asked for; what it names is never departed from.
        chooses_collective: its collective may change.
        numel: elements of the gradient.
        workers: in the group.
        shapes: of the parameters, where a compressor asks for them.
        buckets: that everything is sent in under the backward pass, where it can be; 1: it cannot.
        compress: measured times of families; those that are not there count as free.
        rounded_s: measured times to exchange everything in fewer bits, without the network; absent: not measured.
        bf16_in_buckets: whether the bf16 of them can be under the backward pass as well.
        every_steps: averages of parameters after so many steps are among the candidates, in 8 bits; none: no averages.
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
        """Name of the sparsifying compressor among the candidates."""
        return self.asked.name if METHODS[self.asked.name].by_ratio else SELECTOR

    @property
    def memory(self) -> str:
        """The error feedback that keeps residuals through every change of ratio or collective."""
        memory = AUTO if self.asked.memory == NONE else self.asked.memory
        return combine(self.name, memory=memory, collective=self._collective).memory

    def at(self, ratio: float) -> tuple[Option, ...]:
        """Return the candidates that send ``ratio`` (0 to 1) of the elements, one a collective; at 1 dense alone."""
        if ratio >= 1:
            return (self.dense,)
        coding = self.asked.coding or PLAIN
        return tuple(self._selected(ratio, collective, coding) for collective in self._collectives)

    @functools.cached_property
    def dense(self) -> Option:
        """Dense option: everything in fp32, and residuals with it."""
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
        """Dense, rounded and selected options: every ratio, collective and coding."""
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
        """Return the candidate of the nearest ratio in log scale, by the collective asked for if any; dense at 1."""
        if ratio >= 1:
            return self.dense
        asked = self._collective

        return min(self.all, key=lambda option: (abs(math.log(option.ratio / ratio)), option.collective != asked))

    @property
    def _collective(self) -> str:
        return self.asked.collective if self.asked.name == self.name else AUTO

    @property
    def _collectives(self) -> tuple[str, ...]:
        collective = combine(self.name, memory=self.memory, collective=self._collective).collective
        if not self.chooses_collective:
            return (collective,)
        fitting = METHODS[self.name].collectives
        return tuple(c for c in COLLECTIVES if c in fitting) or (collective,)

    @property
    def _codings(self) -> tuple[str, ...]:
        if self.asked.coding is not None:
            return (self.asked.coding,)
        return CODINGS if "coding" in METHODS[self.name].options else (PLAIN,)

    @property
    def families(self) -> tuple[Family, ...]:
        """The compressor, collective and coding of each family whose compression time `all` needs."""
        return tuple((self.name, collective, coding) for collective in self._collectives for coding in self._codings)

    @property
    def _rounded(self) -> tuple[Option, ...]:
        """The options in a half to an eighth of the bytes, whose rounding errors stay in the residual."""
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
        """The averages of parameters, what rounding leaves of one going with the next."""
        name = AVERAGED[-1]
        time_s = self.rounded_s.get(name, 0.0)
        part = make_option(Compression(name=name), numel=self.numel, workers=self.workers, compress_s=time_s)
        return tuple(replace(part, gain=None, every_steps=steps) for steps in self.every_steps)

    def _selected(self, ratio: float, collective: str, coding: str) -> Option:
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
        compression: of the gradient.
        numel: elements of the gradient.
        workers: that take part.
        shapes: of the parameters, for compressors that work by layer; absent: one vector.

    Raises:
        BadInput: what is asked of the compressor does not go together, or so many workers cannot be served like that.
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

    Once by each collective, and of factors at each rank of `RANKS`.
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
    """Return the name under which a profile keeps the time to compress by a compression; ratios share a name."""
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
    """Return the collective by which a compression travels: as it says, or for ``auto`` the compressor's default."""
    return combine(compression.name, memory=compression.memory, collective=compression.collective).collective


def way_name(compression: Compression) -> str:
    """Return the name of an exchange in event logs: ``topk 0.01 by all_gather``, with its coding if not plain."""
    coded = "" if compression.coding in (None, PLAIN) else f", {compression.coding}"
    amount = f" {compression.ratio:g}" if METHODS[compression.name].by_ratio else ""
    return f"{compression.name}{amount} by {settled_collective(compression)}{coded}"
