"""Synthetic profiles with planted parameters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetopt.core.profile import (
    LOCAL,
    CompressorCost,
    Device,
    Evaluation,
    GainPoint,
    Host,
    Job,
    Link,
    NoiseSample,
    Pilot,
    Profile,
    StepTime,
)

GIB = 2**30
SIZES = (4, 8, 16, 32, 64, 128)


def make_device(
    *,
    fixed_s: float = 0.004,
    per_sample_s: float = 0.0004,
    noise: float = 0.0,
    seed: int = 0,
    type: str = LOCAL,
    workers_per_host: int = 1,
    threads: int = 2,
    parameters: int = 500_000,
    sizes: Sequence[int] = SIZES,
    kind: str = "cpu",
) -> Device:
    """A device whose step times lie on the line, each sample disturbed by ``noise`` (relative)."""
    random = np.random.default_rng(seed)
    points = []
    for size in sizes:
        time = fixed_s + per_sample_s * size
        samples = tuple(float(t) for t in time * np.exp(noise * random.standard_normal(20)))
        points.append(
            StepTime(
                local_batch_size=size,
                step_time_s=float(np.median(samples)),
                samples_s=samples,
                load_s=0.02 * time,
                forward_s=0.3 * time,
                backward_s=0.6 * time,
                optimizer_s=0.08 * time,
                peak_memory_bytes=400 * 2**20 + 2**20 * size,
            )
        )
    return Device(
        type=type,
        kind=kind,
        workers_per_host=workers_per_host,
        threads_per_worker=threads,
        step_times=tuple(points),
        memory_limit_bytes=4 * GIB,
        compressors=tuple(
            CompressorCost(name="topk", ratio=r, compress_s=2e-9 * parameters, decompress_s=4e-9 * parameters * r)
            for r in (0.1, 0.01, 0.001)
        ),
        matmul_flops_per_s=5e10,
        copy_bytes_per_s=1e10,
    )


def make_profile(
    *,
    parameters: int = 500_000,
    dataset_size: int = 50_000,
    batch_size: int = 64,
    minimum_steps: float = 400.0,
    minimum_samples: float = 400_000.0,
    pilots: Sequence[int] = (64, 256),
    reached: bool = True,
    noise_scale: float | None = 1000.0,
    gain: bool = True,
    devices: Sequence[Device] | None = None,
    fixed_s: float = 0.004,
    per_sample_s: float = 0.0004,
    cpu_model: str = "AMD EPYC 7R13 Processor",
    noise: float = 0.0,
    evaluation_s: float | None = 1.0,
    learning_rate_rule: str = "linear",
) -> Profile:
    """A job on a two-core host. Steps to the target are exactly ``minimum_steps + minimum_samples / B``."""
    if devices is None:
        devices = (
            make_device(fixed_s=fixed_s, per_sample_s=per_sample_s, parameters=parameters, noise=noise),
            make_device(
                fixed_s=1.1 * fixed_s,
                per_sample_s=1.8 * per_sample_s,
                parameters=parameters,
                workers_per_host=2,
                threads=1,
                noise=noise,
                seed=1,
            ),
        )
    payloads = (4_096, 65_536, 1_048_576, 8_388_608)
    return Profile(
        created="2026-01-02T03:04:05+00:00",
        hetopt_version="0.1.0",
        seed=0,
        host=Host(
            cpu_model=cpu_model,
            logical_cpus=2,
            memory_bytes=8 * GIB,
            operating_system="Linux",
            python_version="3.11",
            torch_version="2.13.0",
        ),
        job=Job(
            task="digits",
            parameters=parameters,
            gradient_bytes=4 * parameters,
            dataset_size=dataset_size,
            batch_size=batch_size,
            learning_rate_rule=learning_rate_rule,
            target_metric="accuracy",
            target_value=0.9,
            target_higher_is_better=True,
            operators_per_step=150,
            flops_per_sample=1e7,
        ),
        devices=tuple(devices),
        links=tuple(
            Link(
                scope="host",
                collective=collective,
                workers=2,
                payload_bytes=payloads,
                time_s=tuple(2e-4 + p / 8e8 for p in payloads),
                latency_s=2e-4,
                bytes_per_s=8e8,
            )
            for collective in ("all_reduce", "all_gather", "broadcast")
        ),
        noise=()
        if noise_scale is None
        else tuple(
            NoiseSample(step=10 * k, samples_seen=640 * k, gradient_square=1.0, gradient_variance=noise_scale)
            for k in range(5)
        ),
        gain=tuple(
            GainPoint(ratio=r, gain=min(1.0, r**0.1), gain_low=min(1.0, r**0.15)) for r in (0.001, 0.01, 0.1, 0.5, 1.0)
        )
        if gain
        else (),
        pilots=tuple(
            Pilot(
                global_batch_size=size,
                learning_rate_scale=size / batch_size,
                seed=0,
                evaluations=(Evaluation(step=100, metric=0.5), Evaluation(step=1000, metric=0.9 if reached else 0.6)),
                steps_to_target=minimum_steps + minimum_samples / size if reached else None,
            )
            for size in pilots
        ),
        evaluation_s=evaluation_s,
        startup_s=7.0,
        profiling_s=40.0,
    )
