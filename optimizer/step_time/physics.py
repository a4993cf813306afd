"""The equations of a step, of many configurations at once: computing, exchanging, and how far one hides the other.

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

from dataclasses import dataclass

import numpy as np

from hetopt.optimizer.step_time.design_matrix import Array, Index, Rows
from hetopt.optimizer.step_time.step_time import growth, sharing, slower, together

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
    """The place of each parameter in the vector: the shared ones, then three a machine type, then one a compressor."""

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
    """The parameters that the types and compressors of some rows use: their own, or another's, scaled.

    Attributes:
        reference: the type whose parameters are used, by the rows' types.
        fixed, per_sample, link: log factors on them.
        compressor: the compressor whose parameter is used, by the rows' compressors.
    """

    reference: Index
    fixed: Array
    per_sample: Array
    link: Array
    compressor: Index

    @classmethod
    def own(cls, rows: Rows) -> Kinds:
        """Return the mapping where every type and compressor has parameters of its own."""
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
    """Predicted steps, a row each, in logs of seconds.

    Attributes:
        log_step: tau.
        log_compute: the slowest worker's computation.
        log_exchange: the exchange, hidden or not.
        compress_s: compression and decompression.
        compute_share, exchange_share: derivatives of ``log_step`` by the two before.
        slowest: the group that computes longest.
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
    """Return the predicted steps of rows by the equations.

    Args:
        vector: parameters, as `Coordinates` has them.
        where: what is where.
        rows: configurations.
        kinds: of their machines and compressors.
        compute_rest: log factor on the computation of each group that the equations do not explain.
        exchange_rest: log factor on the exchange of each row.
    """
    shared: dict[str, float] = dict(zip(SHARED, vector[: len(SHARED)].tolist(), strict=True))
    log_compute, slowest = _compute(vector, where, rows, kinds, shared, compute_rest)
    log_exchange = _exchange(vector, where, rows, kinds, shared) + exchange_rest
    compress = np.zeros(len(rows))
    if rows.compressors:
        some = rows.compressor >= 0
        compress[some] = np.exp(vector[where.compression][kinds.compressor[rows.compressor[some]]])
    forward = np.where(rows.fused, 1.0, 1 / (1 + np.exp(-shared["forward"])))
    both = together(
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
    """Return the log of the slowest worker's computation, and which group that is."""
    fixed = np.exp(vector[where.fixed][kinds.reference] + kinds.fixed)[rows.group_type]
    per_sample = np.exp(vector[where.per_sample][kinds.reference] + kinds.per_sample)[rows.group_type]
    crowded = 1 + np.exp(shared["contention"]) * (1 - 1 / rows.group_crowd)
    groups = np.log((fixed + per_sample * rows.group_batch) * crowded) + rest
    slowest_log = np.maximum.reduceat(groups, rows.group_start)
    # The first of each row's slowest: groups are in the order of their rows.
    slowest: Index = np.flatnonzero(groups == slowest_log[rows.group_row])
    row = rows.group_row[slowest]
    slowest = slowest[np.diff(row, prepend=-1) > 0]
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
