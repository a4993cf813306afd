"""Configurations as columns: what each brings to the equations of a step, many at a time."""

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
from hetopt.core.step_samples import Compression, Configuration
from hetopt.core.synchronization import Synchronization, parse_sync
from hetopt.optimizer.step_time.local_options import PLANNED, communication, is_planned
from hetopt.optimizer.step_time.step_time import expected_maximum

Array = NDArray[np.float64]
Index = NDArray[np.intp]

NOMINAL_ELEMENTS = 10_000_000
"""Samples do not say how large the gradient is. Payloads are reckoned relative to the dense gradient of this many
elements; only what does not grow with the gradient (a few bytes a message) depends on the number."""

PITCH = 8
"""Batch sizes less than an eighth of an octave apart are taken for one where computation strays from its line."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The messages and relative traffic of one gradient exchange.

    Attributes:
        messages: in a row, of the slowest path.
        traffic: bytes over the slowest link, relative to the bytes of the dense gradient.
        compressor: what compresses; absent where the gradient goes as it is.
        overlapped: whether it runs beside the backward pass.
    """

    messages: float
    traffic: float
    compressor: str | None
    overlapped: bool


def exchange_of(workers: int, compression: Compression | None, sync: str | None = None) -> Exchange:
    """Return the exchange of a step; a single worker has none, and compresses nothing.

    Args:
        workers: that exchange.
        compression: of gradients; absent: none.
        sync: as `parse_sync` reads it; workers that average parameters now and then send as much in the mean of all
            steps.

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
    """Return the share of the steps that exchange anything."""
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
    """The machines and exchange of a run, which it has in common over its batch sizes.

    Attributes:
        machines: type and workers of each node, in no order.
        exchange: compressor, ratio and collective.
        sync: as `parse_sync` reads it; None: gradients are summed in every step.
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
    """Configurations as columns; ``group_*`` has one entry for each kind of worker (type, crowd, batch) of a row.

    Attributes:
        nodes, workers: counts.
        crowd: workers on the fullest node.
        expected_maximum: of as many standard normals as there are workers.
        layouts: the different ones; ``layout`` says which a row has.
        messages, traffic: see `Exchange`.
        fused: whether the exchange waits for the whole gradient.
        compressors: the different ones; ``compressor`` says which a row has, -1 for none.
        types: of the machines; ``has_type`` says which a row has.
        group_row: sorted; ``group_start`` is where each row's groups begin.
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
    """Return at least one configuration as columns.

    Args:
        configurations: the rows.
        types: types that come first in `Rows.types`, whether they occur or not.

    Raises:
        BadInput: an unknown compressor.
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
    """Return the type, workers on the node and samples of every different worker, in a fixed order."""
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
