"""Which of several equally good exchanges is the cheapest on the network as it is now, and when to change to it.

The rules published for switching between collectives (arXiv 2312.02493, equation 5) compare two costs each, so the
cheapest of all costs says the same; here times are measured, and so is how sure they are. What both exchanges owe to
the same link cancels in their difference: the planner may be sure which is quicker while unsure how long either takes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hetopt.core.artifact import Record
from hetopt.core.comm.composition import METHODS, PLAIN
from hetopt.core.comm.cost import TRAINER, Algorithms, Operation, pipelined_s
from hetopt.core.comm.network_state import NetworkState
from hetopt.core.comm.payload_bytes import Shapes, operations
from hetopt.core.comm.way_text import way_in_words
from hetopt.core.names import known

COMPRESS_SD = 0.05
"""Relative standard deviation of a measured time to compress."""

KEPT: Mapping[str, float] = MappingProxyType({"identity": 1.0, "fp16": 1.0, "bf16": 1.0, "int8": 0.9998, "int4": 0.975})
"""Gradient energy that rounding keeps. Of whole codes: of values as heavy-tailed as cubes of normal ones; of normal
ones, and of rows of an embedding most of which are zero, it is more."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to exchange the gradient, for the workers there are.

    Attributes:
        compressor: its name; ``identity`` sends everything.
        collective: the name of the form it travels in.
        ratio: fraction of the elements that is sent.
        operations: of one exchange, of one bucket where there are several.
        compress_s: to compress and decompress the whole gradient, measured on the slowest worker.
        gain: retained gradient energy where it needs no measurement: 1 of what loses nothing to speak of, the ratio of
            a random choice. Absent: read off the gain curve that Top-k gives.
        buckets: 1: the whole gradient at once, after the backward pass; more: beside it.
        coding: of selected elements.

    Raises:
        ValueError: a ratio or gain outside (0, 1], a negative time, or no bucket.
    """

    compressor: str
    collective: str
    ratio: float
    operations: tuple[Operation, ...]
    compress_s: float = 0.0
    gain: float | None = None
    buckets: int = 1
    coding: str = PLAIN

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1 or (self.gain is not None and not 0 < self.gain <= 1):
            raise ValueError(f"ratio and gain are in (0, 1], not {self.ratio}, {self.gain}")
        if not 0 <= self.compress_s < math.inf or self.buckets < 1:
            raise ValueError(
                f"compress_s must be at least 0 and buckets at least 1, got {self.compress_s}, {self.buckets}"
            )

    @functools.cached_property
    def key(self) -> str:
        """Names the option among its peers; asked for a hundred times in every decision."""
        overlap = f" in {self.buckets} buckets" if self.buckets > 1 else ""
        coded = "" if self.coding == PLAIN else f", {self.coding}"
        method = METHODS.get(self.compressor)
        amount = "" if method is not None and not method.by_ratio else f" {self.ratio:g}"
        return f"{self.compressor}{amount} by {self.collective}{coded}{overlap}"

    def exchange_s(self, network: NetworkState, *, algorithms: Algorithms = TRAINER) -> float:
        """Seconds that the exchange is expected to take on this network, of all buckets."""
        return self.buckets * network.expected_s(self.operations, algorithms=algorithms)

    def step_s(self, *, compute_s: float, backward_s: float, compress_s: float, exchange_s: float) -> float:
        """Seconds of a step: buckets travel while the rest of the backward pass computes and compresses.

        Args:
            compute_s: of the slowest worker, its backward pass included.
            backward_s: the part of it that makes gradients.
            compress_s: see the attribute; another value where it was measured since.
            exchange_s: of all buckets.
        """
        return compute_s - backward_s + pipelined_s(backward_s + compress_s, exchange_s, self.buckets)


def make_option(
    name: str,
    collective: str,
    ratio: float,
    *,
    numel: int,
    workers: int,
    compress_s: float,
    shapes: Shapes | None = None,
    coding: str = PLAIN,
) -> Option:
    """The option of a compressor as the trainer exchanges it, a gradient of ``numel`` elements at once.

    Args:
        name: of the compressor.
        collective: of those that can carry it.
        ratio: fraction of the elements that is sent, 1 for those that send something of all of them.
        numel: elements of the gradient.
        workers: in the group.
        compress_s: as measured.
        shapes: of the parameters, for compressors that work by layer.
        coding: of selected elements.

    Raises:
        BadInput: no such compressor, or it cannot travel so.
        ValueError: nothing is known of the gain, and no Top-k curve tells it.
    """
    gain = ratio if name == "randomk" else KEPT.get(name)  # of what is rounded, and of a random choice
    if gain is None and not METHODS[known(name, METHODS, "compressor")].by_ratio:
        raise ValueError(f"how much of a gradient {name} keeps is not known")
    return Option(
        compressor=name,
        collective=collective,
        ratio=ratio,
        operations=operations(name, numel, ratio, workers=workers, collective=collective, shapes=shapes, coding=coding),
        compress_s=compress_s,
        gain=gain,
        coding=coding,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The option to use from now on, what it is expected to take, and in words why, if it has changed."""

    option: Option
    exchange_s: float
    reason: str | None = None

    @property
    def changed(self) -> bool:
        """Whether another option was in use before."""
        return self.reason is not None


class PlanState(Record):
    """The option in use; none before the first plan."""

    chosen: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Planner:
    """Takes the cheapest option, and leaves it only for one that clearly saves.

    Args:
        least_saving: part of the time (compressing, exchanging, and what else the caller counts) worth a change.
        confidence: standard errors by which the saving must be sure.
        algorithms: behind the collectives.
    """

    least_saving: float = 0.05
    confidence: float = 1.0
    algorithms: Algorithms = TRAINER

    def __post_init__(self) -> None:
        if not (0 <= self.least_saving < 1 and 0 <= self.confidence < math.inf):
            raise ValueError(
                f"least_saving must be in [0, 1) and confidence at least 0, got {self.least_saving}, {self.confidence}"
            )

    def decide(
        self, state: PlanState, options: Sequence[Option], network: NetworkState, *, compute_s: float = 0.0
    ) -> tuple[PlanState, Plan]:
        """The next state and the plan.

        Args:
            state: before.
            options: what there is to choose from, all as good for the training; their order breaks ties.
            network: as tracked.
            compute_s: of a step; savings are then judged as a part of the step, not of its exchange alone.

        Raises:
            ValueError: there is nothing to choose from.
        """
        if not options:
            raise ValueError("a planner needs options")
        times_s = [self._time_s(option, network) for option in options]
        best = min(range(len(options)), key=times_s.__getitem__)
        used = next((i for i, option in enumerate(options) if option.key == state.chosen), None)
        if used is None:
            return self._take(
                options[best], network, f"{way_in_words(options[best].key)}: expected {_ms(times_s[best])}"
            )
        saving_s, whole_s = times_s[used] - times_s[best], compute_s + times_s[used]
        sd_s = self._difference_sd_s(options[used], options[best], network)
        if best == used or saving_s < self.least_saving * whole_s or saving_s < self.confidence * sd_s:
            return self._take(options[used], network, None)
        less = saving_s / whole_s
        reason = (
            f"{way_in_words(options[best].key)} instead of {way_in_words(options[used].key)}: "
            f"expected {_ms(times_s[best])} instead of {_ms(times_s[used])} "
            f"({100 * less:.0f} % less of {'a step' if compute_s else 'an exchange'})"
        )
        return self._take(options[best], network, reason)

    def _take(self, option: Option, network: NetworkState, reason: str | None) -> tuple[PlanState, Plan]:
        exchange_s = option.exchange_s(network, algorithms=self.algorithms)
        return PlanState(chosen=option.key), Plan(option=option, exchange_s=exchange_s, reason=reason)

    def _time_s(self, option: Option, network: NetworkState) -> float:
        return option.compress_s + option.exchange_s(network, algorithms=self.algorithms)

    def _difference_sd_s(self, one: Option, other: Option, network: NetworkState) -> float:
        difference = network.estimate(
            (float(one.buckets), one.operations), (-float(other.buckets), other.operations), algorithms=self.algorithms
        )
        return math.hypot(difference.sd_s, COMPRESS_SD * one.compress_s, COMPRESS_SD * other.compress_s)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
