"""The unknowns of a network and how sure they are: hops between and inside machines, and each collective's own factors.

Between machines, and again inside them, a link has a latency alpha and a time for a byte beta. What an exchange takes,

    t = sum over its operations of  m l_p alpha + x b_p beta,  less a grace,       m, x its `Terms`,

adds what the table of algorithms does not know about primitive p (a library's own overhead, a pipelined broadcast): the
factors l_p and b_p, near 1. One covariance over all unknowns of a link remembers which sums of them are known and which
are not: a payload that is exchanged again and again tells nothing new about any other.

The grace is what bytes take that nobody has to wait for: a link that was idle lets some pass before it holds back to
its rate (clouds and rehearsals limit rates by a bucket of tokens), and latency hides others. It belongs to an exchange,
whose operations follow each other, and is measured once.

The updates are of our own: a handful of unknowns, which grow with the primitives in use and stay above zero. No
dependency has that, and for so few numbers plain Python is quicker than arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field, NonNegativeFloat, PositiveFloat

from hetopt.core.artifact import Record
from hetopt.core.comm.cost import TRAINER, Algorithms, LinkSpeed, Operation, Primitive, Scope, Terms

FACTOR_SD = 0.3
"""Standard deviation of a primitive's factors where the table of algorithms is all there is."""

ALPHA, BETA = 0, 1  # where they are among a link's unknowns

_LEAST_OF_VALUE = 0.05  # one observation makes nothing smaller than this part of itself
_LEAST_OF_SD = 0.05  # nor smaller than this part of what is not known of it

_LEAST_FELT = 0.05
"""Part of the bytes' time that is felt within the grace, so that a time always tells a little about them."""

Row = Mapping[int, float]
"""How a time changes with each of a link's unknowns; those that are left out do not matter to it."""

Part = tuple[Primitive, Terms]
"""One operation of an exchange."""


class LinkState(Record):
    """One hop between machines, or inside them, and each primitive over it.

    Attributes:
        values: alpha in seconds, beta in seconds a byte, then the factors l and b of each primitive.
        covariance: of the values.
        primitives: that were measured or used.
        grace_s: how much less bytes take than their number says.
    """

    values: tuple[PositiveFloat, ...]
    covariance: tuple[tuple[float, ...], ...]
    primitives: tuple[Primitive, ...] = ()
    grace_s: NonNegativeFloat = 0.0

    @classmethod
    def guessed(cls, latency_s: float, byte_s: float, grace_s: float = 0.0) -> LinkState:
        """A hop of which no more is known than the order of magnitude."""
        covariance = ((latency_s**2, 0.0), (0.0, byte_s**2))
        return cls(values=(latency_s, byte_s), covariance=covariance, grace_s=grace_s)

    @property
    def speed(self) -> LinkSpeed:
        """Latency in seconds and rate in bytes a second of one hop of this link."""
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
        return self.model_copy(
            update={
                "values": (*self.values, *(1.0,) * count),
                "covariance": tuple(rows),
                "primitives": (*self.primitives, *new),
            }
        )

    def time_s(self, operations: Sequence[Part]) -> float:
        """Of an exchange's operations over this link."""
        messages_s = bytes_s = 0.0
        for primitive, terms in operations:
            latency, byte = self._factors(primitive)
            messages_s += terms.messages * latency * self.values[ALPHA]
            bytes_s += terms.traffic_bytes * byte * self.values[BETA]
        return messages_s + self._felt(bytes_s)[0]

    def row(self, operations: Sequence[Part]) -> Row:
        """How that time changes with the unknowns; all primitives must have some."""
        found: dict[int, float] = {}
        bytes_s = sum(t.traffic_bytes * self._factors(p)[1] * self.values[BETA] for p, t in operations)
        slope = self._felt(bytes_s)[1]
        for primitive, terms in operations:
            place = self.place(primitive)
            latency, byte = self._factors(primitive)
            for index, change in (
                (ALPHA, terms.messages * latency),
                (BETA, slope * terms.traffic_bytes * byte),
                (place, terms.messages * self.values[ALPHA]),
                (place + 1, slope * terms.traffic_bytes * self.values[BETA]),
            ):
                found[index] = found.get(index, 0.0) + change
        return found

    def _felt(self, bytes_s: float) -> tuple[float, float]:
        """How much of the bytes' time is waited for, and how that grows with it."""
        beyond_s, least_s = bytes_s - self.grace_s, _LEAST_FELT * bytes_s
        return (beyond_s, 1.0) if beyond_s > least_s else (least_s, _LEAST_FELT)

    def variance(self, row: Row) -> float:
        """Variance of the time that ``row`` stands for, in s^2."""
        return max(0.0, sum(a * b * self.covariance[i][j] for i, a in row.items() for j, b in row.items()))

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

    @property
    def time_s(self) -> float:
        """Predicted time over all links, in seconds."""
        return sum(self.seconds.values())

    @property
    def variance(self) -> float:
        """Variance of `time_s`, in s^2."""
        return sum(self.links[scope].variance(row) for scope, row in self.rows.items())


class NetworkState(Record):
    """All of it; the same on every rank if it is fed the same.

    Attributes:
        links: hops by scope.
    """

    links: dict[Scope, LinkState] = Field(min_length=1)

    def parts(self, terms: Sequence[tuple[float, Sequence[Operation]]], algorithms: Algorithms) -> Parts:
        """A weighted sum of exchanges, taken apart."""
        weighted = [(weight, self._by_scope(operations, algorithms)) for weight, operations in terms]
        used: dict[Scope, list[Primitive]] = {}
        for _, exchange in weighted:
            for scope, own in exchange.items():
                used.setdefault(scope, []).extend(primitive for primitive, _ in own)
        links: dict[Scope, LinkState] = {
            scope: self.links[scope].with_primitives(primitives) for scope, primitives in used.items()
        }
        seconds: dict[Scope, float] = dict.fromkeys(links, 0.0)
        rows: dict[Scope, dict[int, float]] = {scope: {} for scope in links}
        for weight, exchange in weighted:
            for scope, own in exchange.items():
                seconds[scope] += weight * links[scope].time_s(own)
                for index, slope in links[scope].row(own).items():
                    rows[scope][index] = rows[scope].get(index, 0.0) + weight * slope
        return Parts(links=links, seconds=seconds, rows=rows)

    def estimate(self, *terms: tuple[float, Sequence[Operation]], algorithms: Algorithms = TRAINER) -> Estimate:
        """The weighted sum of exchanges' times, each term a weight and the exchange's operations.

        With weights 1 and -1 this is how much longer one exchange takes than another, and how sure that is: what both
        owe to the same link cancels.
        """
        parts = self.parts(terms, algorithms)
        return Estimate(time_s=parts.time_s, sd_s=math.sqrt(parts.variance))

    def expected_s(self, operations: Sequence[Operation], *, algorithms: Algorithms = TRAINER) -> float:
        """Seconds that an exchange is expected to take."""
        return sum(self.links[scope].time_s(own) for scope, own in self._by_scope(operations, algorithms).items())

    def relative_sd(self, operations: Sequence[Operation], *, algorithms: Algorithms = TRAINER) -> float:
        """How well the time of an exchange is known; 0 where there is nothing to exchange."""
        found = self.estimate((1.0, operations), algorithms=algorithms)
        return found.sd_s / found.time_s if found.time_s > 0 else 0.0

    def _by_scope(self, operations: Sequence[Operation], algorithms: Algorithms) -> dict[Scope, list[Part]]:
        """An exchange, taken apart. A scope that was never measured is that of the other one."""
        found: dict[Scope, list[Part]] = {}
        for operation in operations:
            scope = operation.scope if operation.scope in self.links else next(iter(self.links))
            found.setdefault(scope, []).append((operation.primitive, operation.terms(algorithms)))
        return found
