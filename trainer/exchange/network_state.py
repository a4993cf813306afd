"""The unknowns of a network and how sure they are: hops between and inside machines, and each collective's own factors.

Between machines, and again inside them, a link has a latency alpha and a time for a byte beta. What an exchange takes,

    t = sum over its operations of  m l_p alpha + x b_p beta,       m, x its `Terms`,

adds what the table of algorithms does not know about primitive p (a library's own overhead, a pipelined broadcast): the
factors l_p and b_p, near 1. One covariance over all unknowns of a link remembers which sums of them are known and which
are not: a payload that is exchanged again and again tells nothing new about any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from hetopt.profiler.artifact import Record
from hetopt.trainer.exchange.cost import GLOO, Algorithms, LinkSpeed, Operation, Primitive, Scope, Terms

FACTOR_SD = 0.3
"""Standard deviation of a primitive's factors where the table of algorithms is all there is."""

FIRST_NOISE = 0.1
"""Relative standard deviation of one exchange before any was seen."""

ALPHA, BETA = 0, 1  # where they are among a link's unknowns

_LEAST_OF_VALUE = 0.05  # one observation makes nothing smaller than this part of itself
_LEAST_OF_SD = 0.05  # nor smaller than this part of what is not known of it

Row = Mapping[int, float]
"""How a time changes with each of a link's unknowns; those that are left out do not matter to it."""


class LinkState(Record):
    """One hop between machines, or inside them, and each primitive over it.

    Attributes:
        values: alpha in seconds, beta in seconds a byte, then the factors l and b of each primitive.
        covariance: of the values.
        primitives: that were measured or used.
        proven: for each of them, exchanges with it that took about as long as was thought.
    """

    values: tuple[PositiveFloat, ...]
    covariance: tuple[tuple[float, ...], ...]
    primitives: tuple[Primitive, ...] = ()
    proven: tuple[NonNegativeInt, ...] = ()

    @classmethod
    def guessed(cls, latency_s: float, byte_s: float) -> LinkState:
        """A hop of which no more is known than the order of magnitude."""
        return cls(values=(latency_s, byte_s), covariance=((latency_s**2, 0.0), (0.0, byte_s**2)))

    @property
    def speed(self) -> LinkSpeed:
        """The hop itself."""
        return LinkSpeed(latency_s=self.values[ALPHA], bytes_per_s=1 / self.values[BETA])

    def place(self, primitive: Primitive) -> int:
        """Where l of a primitive is among the values; b follows it."""
        return 2 + 2 * self.primitives.index(primitive)

    def with_primitives(self, primitives: Sequence[Primitive]) -> LinkState:
        """The link with unknowns for all of these: the table of algorithms is right about new ones, more or less."""
        new = [primitive for primitive in dict.fromkeys(primitives) if primitive not in self.primitives]
        if not new:
            return self
        size, count = len(self.values), 2 * len(new)
        rows = [(*row, *(0.0,) * count) for row in self.covariance]
        rows += [tuple(FACTOR_SD**2 * (column == size + i) for column in range(size + count)) for i in range(count)]
        return LinkState(
            values=(*self.values, *(1.0,) * count),
            covariance=tuple(rows),
            primitives=(*self.primitives, *new),
            proven=(*self.proven, *(0 for _ in new)),
        )

    def time_s(self, primitive: Primitive, terms: Terms) -> float:
        """Of one operation."""
        latency, byte = self._factors(primitive)
        return terms.messages * latency * self.values[ALPHA] + terms.traffic_bytes * byte * self.values[BETA]

    def row(self, weighted: Sequence[tuple[float, Primitive, Terms]]) -> Row:
        """How the weighted sum of some operations' times changes with the unknowns; all primitives must have some."""
        found: dict[int, float] = {}
        for weight, primitive, terms in weighted:
            place = self.place(primitive)
            latency, byte = self._factors(primitive)
            messages, traffic = weight * terms.messages, weight * terms.traffic_bytes
            for index, slope in (
                (ALPHA, messages * latency),
                (BETA, traffic * byte),
                (place, messages * self.values[ALPHA]),
                (place + 1, traffic * self.values[BETA]),
            ):
                found[index] = found.get(index, 0.0) + slope
        return found

    def variance(self, row: Row) -> float:
        """Of a time, s^2."""
        return max(0.0, sum(a * b * self.covariance[i][j] for i, a in row.items() for j, b in row.items()))

    def drifted(self, hop: float, factors: float) -> LinkState:
        """The link when alpha and beta, and less so the factors, may have moved by so much, relatively."""
        return self._widened([(hop if index < 2 else factors) * value for index, value in enumerate(self.values)])

    def conditioned(self, row: Row, error_s: float, variance: float) -> LinkState:
        """The link once a time was seen to be ``error_s`` longer than thought, with that variance (Kalman 1960).

        What would become negative, or nearly so, is held where it may just be, and the others explain the rest.
        """
        link = self
        for _ in self.values:
            after = link._updated(row, error_s, variance)
            least = [link._least(i) for i in range(len(link.values))]
            short = [i for i, value in enumerate(after.values) if value < least[i] * (1 - 1e-12)]
            if not short:
                return after
            worst = min(short, key=lambda i: after.values[i] / link.values[i])
            held = link._updated({worst: 1.0}, least[worst] - link.values[worst], least[worst] ** 2)
            held = held.model_copy(update={"values": tuple(map(max, held.values, least))})
            error_s -= sum(slope * (held.values[i] - link.values[i]) for i, slope in row.items())
            link = held
        return link

    def _updated(self, row: Row, error_s: float, variance: float) -> LinkState:
        everywhere = range(len(self.values))
        toward = [sum(slope * self.covariance[i][j] for j, slope in row.items()) for i in everywhere]
        total = sum(slope * toward[i] for i, slope in row.items()) + variance
        if total <= 0:
            return self
        return self.model_copy(
            update={
                "values": tuple(self.values[i] + toward[i] / total * error_s for i in everywhere),
                "covariance": tuple(
                    tuple(self.covariance[i][j] - toward[i] * toward[j] / total for j in everywhere) for i in everywhere
                ),
            }
        )

    def _least(self, index: int) -> float:
        """How small a value may become in one observation: the less, the better it is known."""
        value = self.values[index]
        sd = math.sqrt(max(0.0, self.covariance[index][index]))
        return max(value * _LEAST_OF_VALUE, min(value, sd * _LEAST_OF_SD))

    def moved(self, changes: Mapping[int, tuple[float, float]]) -> LinkState:
        """The link with some values multiplied, and nothing more known of them than a relative standard deviation."""
        values = [value * changes[i][0] if i in changes else value for i, value in enumerate(self.values)]
        covariance = [
            [
                (changes[i][1] * values[i]) ** 2
                if i == j and i in changes
                else 0.0
                if {i, j} & changes.keys()
                else cell
                for j, cell in enumerate(row)
            ]
            for i, row in enumerate(self.covariance)
        ]
        return self.model_copy(update={"values": tuple(values), "covariance": tuple(tuple(row) for row in covariance)})

    def _factors(self, primitive: Primitive) -> tuple[float, float]:
        if primitive not in self.primitives:
            return 1.0, 1.0
        place = self.place(primitive)
        return self.values[place], self.values[place + 1]

    def _widened(self, sds: Sequence[float]) -> LinkState:
        covariance = tuple(
            tuple(cell + sds[i] ** 2 * (i == j) for j, cell in enumerate(row)) for i, row in enumerate(self.covariance)
        )
        return self.model_copy(update={"covariance": covariance})


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A predicted time, and its standard deviation from what is not known of the network (not from single hiccups)."""

    time_s: float
    sd_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What each link contributes to an exchange: the links, with unknowns for all its primitives, seconds and rows."""

    links: Mapping[Scope, LinkState]
    seconds: Mapping[Scope, float]
    rows: Mapping[Scope, Row]
    primitives: Mapping[Scope, frozenset[Primitive]]

    @property
    def time_s(self) -> float:
        """All links together."""
        return sum(self.seconds.values())

    @property
    def variance(self) -> float:
        """Of `time_s`, s^2."""
        return sum(self.links[scope].variance(row) for scope, row in self.rows.items())


class NetworkState(Record):
    """All of it; the same on every rank if it is fed the same, and part of a checkpoint.

    Attributes:
        links: hops by scope.
        noise: relative variance of a single exchange.
        slower, faster: evidence that the network has jumped.
        jumps: how often it has.
        since_jump: observations since then, or since the start.
    """

    links: dict[Scope, LinkState] = Field(min_length=1)
    noise: NonNegativeFloat = FIRST_NOISE**2
    slower: NonNegativeFloat = 0.0
    faster: NonNegativeFloat = 0.0
    jumps: NonNegativeInt = 0
    since_jump: NonNegativeInt = 0

    def parts(self, terms: Sequence[tuple[float, Sequence[Operation]]], algorithms: Algorithms) -> Parts:
        """A weighted sum of exchanges, taken apart. A scope that was never measured is that of the other one."""
        found: dict[Scope, list[tuple[float, Primitive, Terms]]] = {}
        for weight, operations in terms:
            for operation in operations:
                scope = self._home(operation.scope)
                found.setdefault(scope, []).append((weight, operation.primitive, operation.terms(algorithms)))
        links = {scope: self.links[scope].with_primitives([p for _, p, _ in own]) for scope, own in found.items()}
        return Parts(
            links=links,
            seconds={scope: sum(w * links[scope].time_s(p, t) for w, p, t in own) for scope, own in found.items()},
            rows={scope: links[scope].row(own) for scope, own in found.items()},
            primitives={scope: frozenset(p for _, p, _ in own) for scope, own in found.items()},
        )

    def estimate(self, *terms: tuple[float, Sequence[Operation]], algorithms: Algorithms = GLOO) -> Estimate:
        """The weighted sum of exchanges' times, each term a weight and the exchange's operations.

        With weights 1 and -1 this is how much longer one exchange takes than another, and how sure that is: what both
        owe to the same link cancels.
        """
        parts = self.parts(terms, algorithms)
        return Estimate(time_s=parts.time_s, sd_s=math.sqrt(parts.variance))

    def expected_s(self, operations: Sequence[Operation], *, algorithms: Algorithms = GLOO) -> float:
        """Seconds that an exchange is expected to take."""
        return sum(self._link(o.scope).time_s(o.primitive, o.terms(algorithms)) for o in operations)

    def relative_sd(self, operations: Sequence[Operation], *, algorithms: Algorithms = GLOO) -> float:
        """How well the time of an exchange is known; 0 where there is nothing to exchange."""
        found = self.estimate((1.0, operations), algorithms=algorithms)
        return found.sd_s / found.time_s if found.time_s > 0 else 0.0

    def _home(self, scope: Scope) -> Scope:
        return scope if scope in self.links else next(iter(self.links))

    def _link(self, scope: Scope) -> LinkState:
        return self.links[self._home(scope)]
