"""Step samples that follow the equations exactly, or with known noise: the truth that a fit is held against."""

from __future__ import annotations

import numpy as np

from hetopt.core.step_samples import Compression, Configuration, Node, StepSample
from hetopt.optimizer.step_time.physics import SHARED, Coordinates, Kinds, make_rows, steps

SIZES = (8, 16, 32, 64, 128)
SMALL = ((1,), (2,), (4,), (1, 1), (2, 1), (2, 2))
LARGE = ((1, 1, 1), (2, 2, 2), (4,) * 4, (2,) * 8, (4,) * 8, (4,) * 16)

TRUTH = {
    "contention": -2.5,
    "straggling": -4.2,
    "forward": -0.8,
    "overlap": 1.3,
    "network": np.log(0.12),
    "host_ratio": -1.0,
    "relief": 0.2,
    "rest": 0.0,
    "host_latency": np.log(3e-5),
    "network_latency": np.log(1.5e-4),
    "host_sharing": 0.2,
    "network_growth": -2.7,
}
FIXED_S, PER_SAMPLE_S = 0.02, 0.0011


def configuration(
    layout: tuple[int, ...], batch: int | tuple[int, ...] = 32, *, type_: str = "gpu", topk: float | None = None
) -> Configuration:
    return Configuration(
        nodes=tuple(Node(type=type_, workers=workers) for workers in layout),
        local_batch_size=batch,
        compression=None if topk is None else Compression(name="topk", ratio=topk),
    )


def grid(layouts: tuple[tuple[int, ...], ...]) -> list[Configuration]:
    return [configuration(layout, size) for layout in layouts for size in SIZES]


def truth_vector(**changes: float) -> np.ndarray:
    shared = {**TRUTH, **changes}
    return np.array([*(shared[name] for name in SHARED), np.log(FIXED_S), np.log(PER_SAMPLE_S), 0.0])


def true_log_step(configurations: list[Configuration], **changes: float) -> np.ndarray:
    rows = make_rows(configurations)
    return steps(truth_vector(**changes), Coordinates(types=1, compressors=0), rows, Kinds.unshared(rows)).log_step


def measured(
    configurations: list[Configuration], *, noise: float = 0.0, seed: int = 0, **changes: float
) -> list[StepSample]:
    generator = np.random.default_rng(seed)
    logs = true_log_step(configurations, **changes) + noise * generator.standard_normal(len(configurations))
    return [
        StepSample(nodes=c.nodes, local_batch_size=c.local_batch_size, step_time_s=float(time_s))
        for c, time_s in zip(configurations, np.exp(logs), strict=True)
    ]
