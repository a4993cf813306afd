"""Public throughputs of training jobs on GPUs (the shared data's `gpu-throughput`), as its README's protocol has them.

A column is one job in one class of precision (full: fp32, TF32; half) and one suite of runs, over GPUs.
"""

from __future__ import annotations

import csv
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks._step_traces import traces
from hetopt.core.memory import non_negative
from hetopt.optimizer.model_counts import CONTRIBUTION
from hetopt.optimizer.step_time.gpu_transfer import PRECISIONS, Gpu, Measured, Place

CAPABILITY = {
    "kepler": 3.7,
    "pascal": 6.1,
    "volta": 7.0,
    "turing": 7.5,
    "ampere-ga100": 8.0,
    "ampere-ga10x": 8.6,
    "ada": 8.9,
    "hopper": 9.0,
    "blackwell": 10.0,
    "blackwell-gb20x": 12.0,
}
ITEMS_A_SAMPLE = {
    "fastpitch": 558.0,
    "hifigan": 80.0,
    "se3transformer": 0.001,
    "tacotron2": 558.0,
    "transformerxllarge": 384.0,
}
"""Of what a throughput counts, in one sample of the batch, where it does not count samples: mel frames (an utterance of
LJSpeech has 558: the logs' frames a second, times the seconds of a step, over the batch size; HiFi-GAN's script counts
the 80 rows of a segment's spectrogram), tokens of a target (``tgt_len`` of the large Transformer-XL), and thousands of
molecules (SE(3)-Transformer's is in molecules a millisecond). By the scripts and pages of NVIDIA's
DeepLearningExamples."""

LEAST_BATCH = 8
"""A batch of this part of the column's median, or below it, is another job: Transformer-XL large at 2 beside 16, which
the data's README names. Only so are there the 982 cells that it counts, and its baselines come out as it says."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One job on several GPUs, one step each."""

    job: str
    kind: str
    model_kind: str
    suite: str
    cells: tuple[Measured, ...]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One job on one GPU and on eight of them in one machine, at the same local batch size.

    Attributes:
        interconnect: between the GPUs.
        single: the step of a single GPU; ``eight_s``: of eight.
    """

    job: str
    interconnect: str
    single: Measured
    eight_s: float


def folder() -> Path | None:
    """Return the folder of the data; None where they are not at hand."""
    root = traces()
    data = None if root is None else root.parent / "gpu-throughput"
    return data if data is not None and data.is_dir() else None


def read_gpus(data: Path) -> dict[tuple[str, str, str], Gpu]:
    """Return the facts of GPUs by (name, memory in GiB, form factor), as texts."""
    gpus = {}
    for row in _rows(data / "gpus.csv"):
        fp32 = float(row["fp32_tflops"])
        key = (row["gpu"], row["memory_gib"], row["form_factor"])
        gpus[key] = Gpu(
            key=" ".join(key),
            capability=6.0 if row["gpu"] == "P100" else CAPABILITY[row["architecture"]],
            fp32_tflops=fp32,
            tf32_tflops=float(row["tf32_tensor_tflops"] or fp32),
            fp16_tflops=float(row["fp16_tensor_tflops"] or fp32),
            bandwidth_gb_per_s=float(row["memory_bandwidth_gb_per_s"]),
            memory_gib=float(row["memory_gib"]),
        )
    return gpus


def read_columns(data: Path) -> tuple[Column, ...]:
    """Return the columns of the protocol: one GPU a machine, no laptops, at least two GPUs a column."""
    gpus = read_gpus(data)
    jobs = {row["job"]: row for row in _rows(data / "jobs.csv")}
    grouped: dict[tuple[str, ...], dict[tuple[str, str, str], list[dict[str, str]]]] = defaultdict(dict)
    for row in _rows(data / "throughput.csv"):
        if row["gpu_count"] == "1" and row["form_factor"] != "laptop":
            half = "half" if row["precision"] in ("fp16", "amp_fp16") else "full"
            batch = row["batch_size_per_gpu"] if row["suite"] == "gavel" else ""
            gpu = (row["gpu"], row["memory_gib"], row["form_factor"])
            grouped[row["job"], half, row["suite"], batch].setdefault(gpu, []).append(row)
    columns = []
    for (job, _, suite, _), cells in grouped.items():
        batches = {
            gpu: statistics.median(float(row["batch_size_per_gpu"] or 1) for row in rows) for gpu, rows in cells.items()
        }
        least = statistics.median(batches.values()) / LEAST_BATCH
        kept = [gpu for gpu in cells if batches[gpu] > least]
        if len(kept) > 1:
            columns.append(
                Column(
                    job=job,
                    kind=jobs[job]["kind"],
                    model_kind=model_kind(jobs[job]["kind"]),
                    suite=suite,
                    cells=tuple(_cell(jobs[job], gpus[gpu], batches[gpu], cells[gpu], suite) for gpu in kept),
                )
            )
    return tuple(columns)


def model_kind(kind: str) -> str:
    """Return one of `gpu_transfer.KINDS` for the data's words on a model."""
    if "recommender" in kind:
        return "embedding"
    if "transformer" in kind:
        return "transformer"
    if "recurrent" in kind:
        return "recurrent"
    return "convolution" if "CNN" in kind or "GAN" in kind else "other"


def read_machines(data: Path) -> tuple[Machine, ...]:
    """Return every machine with eight GPUs whose interconnect is known, beside a single GPU in the same runs."""
    gpus, jobs = read_gpus(data), {row["job"]: row for row in _rows(data / "jobs.csv")}
    same = ("suite", "job", "precision", "gpu", "memory_gib", "form_factor", "batch_size_per_gpu")
    singles: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    eights: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    for row in _rows(data / "throughput.csv"):
        key = tuple(row[name] for name in same)
        if row["gpu_count"] == "1" and row["form_factor"] != "laptop":
            singles[key].append(row)
        elif row["gpu_count"] == "8" and row["interconnect"] not in ("", "unknown"):
            eights[(*key, row["interconnect"])].append(row)
    machines = []
    for (*alike, interconnect), rows in eights.items():
        _, job, _, *gpu, batch = alike
        alone = singles.get(tuple(alike))
        if alone and batch:
            size = float(batch)
            single = _cell(jobs[job], gpus[gpu[0], gpu[1], gpu[2]], size, alone, "")
            eight_s = 8 * size / statistics.median(map(_samples_per_s, rows))
            machines.append(Machine(job=job, interconnect=interconnect, single=single, eight_s=eight_s))
    return tuple(machines)


def _cell(job: dict[str, str], gpu: Gpu, batch: float, rows: list[dict[str, str]], suite: str) -> Measured:
    """Return the median measured step over ``rows``; of suite `pollux` by the slope of a line through the rows."""
    named = Counter(row["precision"] for row in rows).most_common(1)[0][0]
    forward = job["forward_gflop_per_sample"]
    measured = Measured(
        place=Place(gpu=gpu, precision=PRECISIONS[named], batch_size=batch),
        step_time_s=batch / statistics.median(map(_samples_per_s, rows)),
        kind=model_kind(job["kind"]),
        flops_per_sample=CONTRIBUTION * 1e9 * float(forward) * _items(job["job"]) if forward else None,
    )
    if suite != "pollux":
        return measured
    sizes = [float(row["batch_size_per_gpu"]) for row in rows]
    times = [size / _samples_per_s(row) for size, row in zip(sizes, rows, strict=True)]
    design = np.array([(1 / seconds, size / seconds) for size, seconds in zip(sizes, times, strict=True)])
    return replace(measured, step_time_s=batch * float(non_negative(design)[1]))


def _items(job: str) -> float:
    return ITEMS_A_SAMPLE.get(job, 1.0)


def _samples_per_s(row: dict[str, str]) -> float:
    return float(row["throughput"]) / _items(row["job"])


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
