"""The equations of a step, for columns of many configurations: computing, exchanging, and how far one hides the other.

    C_i = (a + c b_i) (1 + contention (1 - 1 / crowd_i)) (1 + straggling E_n)     one worker, among n
    T   = beta traffic (1 + growth log2(n / 2)) + alpha messages                  one exchange
    tau = f C + ((1-f)^p C^p + T^p)^(1/p) + compression,     C = max_i C_i        one step

The last line is `hetopt.optimizer.step_time.step_time`'s: ``f`` is the part of the computation that must be over
before the exchange can begin (the forward pass, mostly), ``p`` how well the rest hides it. Samples do not say how large
the last bucket is, so its share g is nothing here, and part of p.
The ring moves ``traffic = 2 (n-1)/n`` of the gradient in ``2 (n-1)`` messages (Patarasuk and Yuan 2009); other
collectives bring their own terms (`hetopt.core.comm.cost`). ``beta`` is seconds a dense gradient over one link.

    beta  = slower(share beta_1, beta_2 or beta_3),   alpha = slower(share alpha_1, alpha_2)       the slowest hop
    share = (m / 2)^sharing                                          m workers on the fullest node

The hops of a ring work at the same time, so that the slowest decides. GPUs that a switch joins have a link each
(``sharing`` 0); where exchanges go through the host's memory or its processors, all workers of the node share those, in
bytes as in messages (``sharing`` 1). Which it is, samples of few workers only hint at, and full nodes tell.
There are three regimes of links: inside a node, between two nodes, and between three or more, where
``ln beta_3 = ln beta_2 + relief ln(beta_1 / beta_2)``: two nodes have a single pair of hosts between them, and what
that pair's flows cannot carry (each is limited by its sender, receiver and path) is spread over more pairs from three
nodes on. Where links inside a node are the bottleneck, nothing is relieved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetopt.core.comm import composition
from hetopt.core.comm.composition import why_not_averaged
from hetopt.core.comm.cost import UNDER_BACKWARD
from hetopt.core.comm.payload_bytes import operations
from hetopt.core.errors import BadInput
from hetopt.core.plain_text import known
from hetopt.core.run_spec import Synchronization, parse_sync
from hetopt.core.step_samples import Compression, Configuration
from hetopt.optimizer.step_time.local_options import PLANNED, communication, is_planned
from hetopt.optimizer.step_time.step_time import expected_maximum, growth, overlapped, sharing, slower

Array = NDArray[np.float64]
Index = NDArray[np.intp]

NOMINAL_ELEMENTS = 10_000_000
"""Samples do not say how large the gradient is. Payloads are reckoned relative to the dense gradient of this many
elements; only what does not grow with the gradient (a few bytes a message) depends on the number."""

PITCH = 8
"""Batch sizes less than an eighth of an octave apart are taken for one where computation strays from its line."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Messages and traffic of the gradient exchange of one step, by which its seconds are computed.

    Attributes:
        messages: messages one after the other, on the slowest path.
        traffic: bytes over the slowest link, relative to the bytes of the dense gradient.
        compressor: name of the compressor; None: the gradient goes as it is.
        overlapped: whether the exchange runs beside the backward pass.
    """

    messages: float
    traffic: float
    compressor: str | None
    overlapped: bool


def exchange_of(workers: int, compression: Compression | None, sync: str | None = None) -> Exchange:
    """Return the messages and relative traffic of one step's exchange among ``workers``; none for a single worker.

    Args:
        workers: number of workers that exchange.
        compression: compressor of gradients; None: there is none.
        sync: policy of synchronization as `parse_sync` reads it; workers that average parameters now and then send as
            much in the mean of all steps. None: gradients are summed in every step.

    Raises:
        BadInput: an unknown compressor, one that does not go with the collective, or a sync whose mean is not known.
    """
    share = _communicating_share(compression, sync)
    name = "identity" if compression is None else compression.name
    if workers == 1:
        known(name, composition.METHODS, "compressor")
        return Exchange(messages=0.0, traffic=0.0, compressor=None, overlapped=True)
    parts = operations(
        name,
        NOMINAL_ELEMENTS,
        1.0 if compression is None else compression.ratio,
        workers=workers,
        collective=composition.AUTO if compression is None else compression.collective,
    )
    terms = [part.terms() for part in parts]
    return Exchange(
        messages=share * sum(term.messages for term in terms),
        traffic=share * sum(term.traffic_bytes for term in terms) / (4 * NOMINAL_ELEMENTS),
        compressor=None if name == "identity" else name,
        overlapped=name in UNDER_BACKWARD and share == 1,
    )


def _communicating_share(compression: Compression | None, sync: str | None) -> float:
    """Return the share of the steps that exchange anything; 1 where gradients are summed, also for None.

    Of local SGD that is one over its steps, of SelSync the share that it is steered to, else the published one.

    Raises:
        BadInput: there is no such sync, averages are compressed, or the share depends on more than the text: FedAvg's
            on the size of the data set; a SelSync that never averages has none.
    """
    wanted = Synchronization() if sync is None else parse_sync(sync, option="sync")
    if not wanted.is_local:
        return 1.0
    if compression is not None and compression.name != "identity":
        reason = why_not_averaged(compression.name)
        raise BadInput(
            reason or f"averages in {compression.name} are predicted when a run is launched, not here.",
            hint="leave sync or compression out",
        )
    if not is_planned(wanted):
        raise BadInput(
            f"the step time under {sync} depends on more than the configuration.",
            hint=f"sync can be {' or '.join(PLANNED)}",
        )
    return communication(wanted, dataset_size=1, global_batch_size=1).share


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Machines and exchange of a configuration, without batch sizes, which one launch can vary.

    Attributes:
        machines: type and workers of each node, as `Configuration.layout` orders them.
        exchange: compressor, ratio and collective.
        sync: policy of synchronization as `parse_sync` reads it; None: gradients are summed in every step.
    """

    machines: tuple[tuple[str, int], ...]
    exchange: tuple[str, float, str] | None
    sync: str | None = None

    @property
    def coordinates(self) -> tuple[float, float, float]:
        """Logs of the nodes, the workers and the workers on the fullest node: near layouts behave alike."""
        counts = [workers for _, workers in self.machines]
        return float(np.log(len(counts))), float(np.log(sum(counts))), float(np.log(max(counts)))


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Configurations as columns; ``group_*`` have an entry for each different worker (type, crowd, batch) of a row.

    Attributes:
        nodes, workers: counts.
        crowd: workers on the fullest node.
        expected_maximum: expectation of the largest of as many standard normals as there are workers.
        layouts: the different layouts; ``layout`` says which a row has.
        messages, traffic: see `Exchange`.
        fused: whether the exchange waits for the whole gradient.
        compressors: the different compressors; ``compressor`` says which a row has, -1 for none.
        types: types of the machines; ``has_type`` says which a row has.
        group_row: number of the row, ascending; ``group_start`` is where each row's groups begin.
        group_type: index in ``types``.
        group_crowd: workers on the worker's node.
        group_batch: samples of the worker.
        points: the different pairs of a type and a batch size, as `PITCH` of its log; ``group_point`` says which a
            group has.
    """

    nodes: Array
    workers: Array
    crowd: Array
    expected_maximum: Array
    layouts: tuple[Layout, ...]
    layout: Index
    messages: Array
    traffic: Array
    fused: NDArray[np.bool_]
    compressors: tuple[str, ...]
    compressor: Index
    types: tuple[str, ...]
    has_type: NDArray[np.bool_]
    group_row: Index
    group_start: Index
    group_type: Index
    group_crowd: Array
    group_batch: Array
    points: tuple[tuple[int, int], ...]
    group_point: Index

    def __len__(self) -> int:
        return len(self.nodes)


def make_rows(configurations: Sequence[Configuration], types: Sequence[str] = ()) -> Rows:
    """Return configurations as columns, one row each, in their order.

    Args:
        configurations: what the rows describe.
        types: machine types that come first in `Rows.types`, whether they occur or not.

    Raises:
        BadInput: an exchange of a configuration cannot be predicted, see `exchange_of`.
    """
    known_types = {name: index for index, name in enumerate(types)}
    layouts: dict[Layout, int] = {}
    compressors: dict[str, int] = {}
    points: dict[tuple[int, int], int] = {}
    exchanges: dict[tuple[int, Compression | None, str | None], Exchange] = {}
    layout_of, exchange_rows, starts = [], [], []
    groups: list[tuple[int, int, int, int, int]] = []
    for row, configuration in enumerate(configurations):
        compression = configuration.compression
        key = (configuration.workers, compression, configuration.sync)
        if key not in exchanges:
            exchanges[key] = exchange_of(*key)
        exchange = exchanges[key]
        if exchange.compressor is not None:
            compressors.setdefault(exchange.compressor, len(compressors))
        exchange_rows.append(exchange)
        layout = Layout(
            machines=configuration.layout,
            exchange=None if compression is None else (compression.name, compression.ratio, compression.collective),
            sync=configuration.sync,
        )
        layout_of.append(layouts.setdefault(layout, len(layouts)))
        starts.append(len(groups))
        for type_, crowd, batch in _kinds(configuration):
            type_index = known_types.setdefault(type_, len(known_types))
            point = points.setdefault((type_index, round(PITCH * math.log2(batch))), len(points))
            groups.append((row, type_index, crowd, batch, point))
    columns = np.array(groups, dtype=np.intp).reshape(-1, 5).T
    has_type = np.zeros((len(layout_of), len(known_types)), dtype=np.bool_)
    has_type[columns[0], columns[1]] = True
    return Rows(
        nodes=np.array([len(c.nodes) for c in configurations], dtype=np.float64),
        workers=np.array([c.workers for c in configurations], dtype=np.float64),
        crowd=np.array([max(node.workers for node in c.nodes) for c in configurations], dtype=np.float64),
        expected_maximum=np.array([expected_maximum(c.workers) for c in configurations]),
        layouts=tuple(layouts),
        layout=np.array(layout_of, dtype=np.intp),
        messages=np.array([e.messages for e in exchange_rows], dtype=np.float64),
        traffic=np.array([e.traffic for e in exchange_rows], dtype=np.float64),
        fused=np.array([not e.overlapped for e in exchange_rows], dtype=np.bool_),
        compressors=tuple(compressors),
        compressor=np.array([-1 if e.compressor is None else compressors[e.compressor] for e in exchange_rows]),
        types=tuple(known_types),
        has_type=has_type,
        group_row=columns[0],
        group_start=np.array(starts, dtype=np.intp),
        group_type=columns[1],
        group_crowd=columns[2].astype(np.float64),
        group_batch=columns[3].astype(np.float64),
        points=tuple(points),
        group_point=columns[4],
    )


def _kinds(configuration: Configuration) -> Iterable[tuple[str, int, int]]:
    """Return (type, workers on the node, samples) of every different worker of a configuration, in order of rank."""
    sizes = configuration.local_batch_size
    if isinstance(sizes, int):
        return dict.fromkeys((configuration.kind(node), node.workers, sizes) for node in configuration.nodes)
    kinds: dict[tuple[str, int, int], None] = {}
    first = 0
    for node in configuration.nodes:
        for size in sizes[first : first + node.workers]:
            kinds[configuration.kind(node), node.workers, size] = None
        first += node.workers
    return kinds


SHARED = (
    "contention",
    "straggling",
    "forward",
    "overlap",
    "network",
    "host_ratio",
    "relief",
    "rest",
    "host_latency",
    "network_latency",
    "host_sharing",
    "network_growth",
)
"""Parameters that all configurations share, in the order of the vector. Logs, but for ``forward`` (a logit),
``overlap`` (log of p - 1), ``host_ratio`` (ln beta_1 / beta_2), ``relief``, ``rest`` (a log factor on beta_3), and
``host_sharing``, a power."""

FARTHEST_RATIO = -2.0
"""Links inside a node that are faster still (NVSwitch) do not make the pair of hosts between two nodes any worse."""


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Positions in the parameter vector: shared ones, three blocks with one a machine type, then one a compressor."""

    types: int
    compressors: int

    def __len__(self) -> int:
        return len(SHARED) + 3 * self.types + self.compressors

    @property
    def fixed(self) -> slice:
        """Log of a, seconds, by type."""
        return slice(len(SHARED), len(SHARED) + self.types)

    @property
    def per_sample(self) -> slice:
        """Log of c, seconds a sample, by type."""
        return slice(self.fixed.stop, self.fixed.stop + self.types)

    @property
    def link(self) -> slice:
        """Log factor on beta between nodes, by type."""
        return slice(self.per_sample.stop, self.per_sample.stop + self.types)

    @property
    def compression(self) -> slice:
        """Log of the seconds to compress and decompress, by compressor."""
        return slice(self.link.stop, self.link.stop + self.compressors)


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """Mapping from machine types and compressors of `Rows` to the fitted ones whose parameters they use, scaled.

    Attributes:
        reference: index of the fitted type, [types of the rows].
        fixed, per_sample, link: log factors on that type's parameters, [types of the rows].
        compressor: index of the fitted compressor, [compressors of the rows].
    """

    reference: Index
    fixed: Array
    per_sample: Array
    link: Array
    compressor: Index

    @classmethod
    def unshared(cls, rows: Rows) -> Kinds:
        """Return the mapping in which every machine type and compressor of ``rows`` uses parameters of its own."""
        none = np.zeros(len(rows.types))
        return cls(
            reference=np.arange(len(rows.types)),
            fixed=none,
            per_sample=none,
            link=none,
            compressor=np.arange(len(rows.compressors)),
        )


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Predicted steps, a row each, in logs of seconds, with derivatives by computation and exchange.

    Attributes:
        log_step: tau.
        log_compute: the slowest worker's computation.
        log_exchange: the exchange, hidden or not.
        compress_s: compression and decompression.
        compute_share, exchange_share: derivatives of ``log_step`` by ``log_compute`` and ``log_exchange``.
        slowest: index of the group that computes longest.
    """

    log_step: Array
    log_compute: Array
    log_exchange: Array
    compress_s: Array
    compute_share: Array
    exchange_share: Array
    slowest: Index


def steps(
    vector: Array,
    where: Coordinates,
    rows: Rows,
    kinds: Kinds,
    *,
    compute_rest: Array | float = 0.0,
    exchange_rest: Array | float = 0.0,
) -> Steps:
    """Return each row's step by the model's equations: logs of its seconds, and the shares of computing and exchange.

    Args:
        vector: parameters, as `Coordinates` has them.
        where: positions in that vector.
        rows: configurations.
        kinds: parameters that their machine types and compressors use.
        compute_rest: log factor on the computation of each group of `Rows` that the equations do not explain.
        exchange_rest: log factor on the exchange of each row that they do not explain.
    """
    shared: dict[str, float] = dict(zip(SHARED, vector[: len(SHARED)].tolist(), strict=True))
    log_compute, slowest = _compute(vector, where, rows, kinds, shared, compute_rest)
    log_exchange = _exchange(vector, where, rows, kinds, shared) + exchange_rest
    compress = np.zeros(len(rows))
    if rows.compressors:
        some = rows.compressor >= 0
        compress[some] = np.exp(vector[where.compression][kinds.compressor[rows.compressor[some]]])
    forward = np.where(rows.fused, 1.0, 1 / (1 + np.exp(-shared["forward"])))
    both = overlapped(
        np.exp(log_compute), np.exp(log_exchange), forward=forward, power=1 + float(np.exp(shared["overlap"]))
    )
    step = both.time_s + compress
    exchange_share = both.by_exchange / step
    return Steps(
        log_step=np.log(step),
        log_compute=log_compute,
        log_exchange=log_exchange,
        compress_s=compress,
        compute_share=1 - exchange_share - compress / step,
        exchange_share=exchange_share,
        slowest=slowest,
    )


def _compute(
    vector: Array, where: Coordinates, rows: Rows, kinds: Kinds, shared: dict[str, float], rest: Array | float
) -> tuple[Array, Index]:
    """Return, by row, the log seconds of the slowest worker's computation, and its group (of equals the first)."""
    fixed = np.exp(vector[where.fixed][kinds.reference] + kinds.fixed)[rows.group_type]
    per_sample = np.exp(vector[where.per_sample][kinds.reference] + kinds.per_sample)[rows.group_type]
    crowded = 1 + np.exp(shared["contention"]) * (1 - 1 / rows.group_crowd)
    groups = np.log((fixed + per_sample * rows.group_batch) * crowded) + rest
    slowest_log = np.maximum.reduceat(groups, rows.group_start)
    # The first of each row's slowest: groups are in the order of their rows.
    slowest: Index = np.flatnonzero(groups == slowest_log[rows.group_row])
    slowest = slowest[np.diff(rows.group_row[slowest], prepend=-1) > 0]
    late = np.log1p(np.exp(shared["straggling"]) * rows.expected_maximum)
    return slowest_log + late, slowest


def _exchange(vector: Array, where: Coordinates, rows: Rows, kinds: Kinds, shared: dict[str, float]) -> Array:
    """Return the log seconds of the exchange; a billionth of a second stands for a single worker's, which has none."""
    single, several = rows.nodes == 1, rows.nodes > 2
    ratio = shared["host_ratio"]
    relief = shared["rest"] + shared["relief"] * np.clip(ratio, FARTHEST_RATIO, 0.0)
    links = np.where(rows.has_type, vector[where.link][kinds.reference] + kinds.link, -np.inf).max(axis=1)
    network = np.exp(shared["network"] + links)
    # A node with a single worker has no link inside, and a single node none between.
    inside = np.where(rows.crowd > 1, sharing(rows.crowd, shared["host_sharing"]), 0.0)
    between = np.where(single, 0.0, np.where(several, np.exp(relief), 1.0))
    beta = network * slower(inside * np.exp(ratio), between)
    alpha = slower(inside * np.exp(shared["host_latency"]), ~single * np.exp(shared["network_latency"]))
    more = growth(rows.workers, np.where(single, 0.0, np.exp(shared["network_growth"])))
    exchange: Array = np.log(np.maximum(beta * rows.traffic * more + alpha * rows.messages, 1e-9))
    return exchange
