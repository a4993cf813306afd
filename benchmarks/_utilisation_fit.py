"""Fit the prior of utilisation to public throughputs: ``python -m benchmarks._utilisation_fit`` writes what ships.

Transformers: three numbers of a roofline, by least squares of logs over every GPU and precision at once; what a
source's scripts are better or worse than others' is a random effect of the source, and the spread of another person's
job is that of sources left out. Rows with activation checkpointing compute a third more (one forward more of three).

Convolutions: every column says, by the model that relates GPUs, how long its step takes on the reference GPU. A job
counts once, however many suites and GPUs it has.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks._gpu_throughput import Column, folder, read_columns, read_gpus
from hetopt.core.grammar import COUNT, quantity
from hetopt.optimizer.described_profile import OPERATORS_A_LAYER
from hetopt.optimizer.model_counts import CONTRIBUTION, ModelCount, of_parameters
from hetopt.optimizer.model_families import of_config
from hetopt.optimizer.step_time.gpu_transfer import Gpu, Measured, Place, Precision, steps_elsewhere
from hetopt.optimizer.step_time.priors import beside_others
from hetopt.optimizer.step_time.transfer import LAUNCH_S
from hetopt.optimizer.step_time.utilisation import (
    REFERENCE,
    Roofline,
    Utilisation,
    UtilisationPrior,
    precision_class,
    sample_s,
    save,
)

Z90 = 1.645
MEASURED = "public throughputs of 2020 to 2025"


def _bert(width: int, layers: int) -> ModelCount:
    """Return the counts of a BERT as NVIDIA's DeepLearningExamples train it."""
    config = {"model_type": "bert", "vocab_size": 30522, "hidden_size": width, "num_hidden_layers": layers}
    shape = {"num_attention_heads": width // 64, "intermediate_size": 4 * width}
    return of_config({**config, **shape, "architectures": ["BertForQuestionAnswering"]}, 384)


def _vit(width: int, layers: int, inner: int, patch: int) -> ModelCount:
    config = {"model_type": "vit", "hidden_size": width, "num_hidden_layers": layers, "intermediate_size": inner}
    return of_config({**config, "num_attention_heads": 16, "patch_size": patch, "image_size": 224}, None)


LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
MODELS: Mapping[str, ModelCount] = {
    "bert_base_squad": _bert(768, 12),
    "bert_large_squad": _bert(1024, 24),
    "cifar-vit_base_patch16_224": _vit(768, 12, 3072, 16),
    "cifar-vit_large_patch16_224": _vit(1024, 24, 4096, 16),
    "vit-g14-224": replace(_vit(1408, 40, 6144, 14), score_bytes=0.0),  # NeMo's attention is fused
    "llama3.1-8b-seq8192": of_config(LLAMA_8B, 8192),
}
"""By job; those of llm-foundry are counted from their parameters."""

SOURCES = {"lambda-v0": "lambda", "lambda-v1": "lambda", "lambda-v2": "lambda"}
"""Suites with the same scripts."""

ONE_MACHINE = 8
"""GPUs of the rows of large models: one machine, joined by a switch."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A measured step of a transformer."""

    source: str
    job: str
    model: ModelCount
    gpu: Gpu
    precision: Precision
    batch_size: float
    step_time_s: float
    gpus: int = 1
    recomputes: bool = False

    @property
    def cell(self) -> tuple[object, ...]:
        """Source and job, whose rows weigh as one together."""
        return SOURCES.get(self.source, self.source), self.job


def transformers(data: Path) -> list[Row]:
    """Return every measured step of a transformer whose shape is known, on GPUs with matrix units for its precision."""
    small = [
        Row(
            source=column.suite,
            job=column.job,
            model=MODELS[column.job],
            gpu=cell.place.gpu,
            precision=cell.place.precision,
            batch_size=cell.place.batch_size,
            step_time_s=cell.step_time_s,
        )
        for column in read_columns(data)
        if column.job in MODELS
        for cell in column.cells
    ]
    rows = [*small, *_large(data), *published(data)]
    return [row for row in rows if row.gpu.tflops(row.precision) > 1.5 * row.gpu.fp32_tflops]


FORMS = {"A100": "SXM4", "H100": "SXM5", "H200": "SXM5"}


def _large(data: Path) -> Iterator[Row]:
    """Yield steps of large models in bf16 on one machine of eight GPUs, whose sources publish the configuration."""
    gpus = {(gpu.key.split()[0], gpu.key.split()[2], round(gpu.memory_gib)): gpu for gpu in read_gpus(data).values()}
    with (data.parent / "llm-throughput" / "throughput.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row["gpu_count"] != str(ONE_MACHINE) or row["precision"] not in ("bf16", "amp_bf16"):
            continue
        memory = 80 if row["gpu"] == "H100" else int(row["memory_gib"])
        gpu = gpus.get((row["gpu"], FORMS.get(row["gpu"], ""), memory))
        model = MODELS.get(row["job"])
        if row["job"].startswith("mpt-"):
            model = of_parameters(float(row["parameters"]), int(row["tokens_per_sample"]))
        if gpu is None or model is None:
            continue
        batch_size = float(row["batch_size_per_gpu"] or 32)
        yield Row(
            source=row["suite"],
            job=row["job"].partition("-seq")[0],
            model=model,
            gpu=gpu,
            precision="bf16",
            batch_size=batch_size,
            step_time_s=batch_size * ONE_MACHINE / float(row["throughput"]),
            gpus=ONE_MACHINE,
            recomputes=row["activation_checkpointing"] in ("True", "selective"),
        )


RECOMPUTED = 4 / 3
"""Of a step that keeps no activations: one forward more of three."""


def large_columns(data: Path) -> tuple[Column, ...]:
    """Return large models as columns of GPUs, each in a whole machine, by tokens a sample; steps keep activations.

    Of several batch sizes on a GPU the fastest stands. What a job is a kind of is its model, whatever its tokens. Empty
    where those data are not at hand.
    """
    if not (data.parent / "llm-throughput").is_dir():
        return ()
    jobs: dict[tuple[str, str], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in _large(data):
        jobs[row.job, row.model.sample][row.gpu.key].append(row)
    columns = []
    for (job, sample), gpus in jobs.items():
        fastest = [max(rows, key=lambda row: row.batch_size / row.step_time_s) for rows in gpus.values()]
        cells = tuple(
            Measured(
                place=Place(gpu=row.gpu, precision=row.precision, batch_size=row.batch_size),
                step_time_s=row.step_time_s / (RECOMPUTED if row.recomputes else 1),
                kind="transformer",
                flops_per_sample=CONTRIBUTION * row.model.forward_flops,
            )
            for row in fastest
        )
        column = Column(job=f"{job}, {sample}", kind=job, model_kind="transformer", suite="large", cells=cells)
        columns += [column] if len(cells) > 1 else []
    return tuple(columns)


def published(data: Path) -> Iterator[Row]:
    """Yield whole trainings of transformers on one machine with published hours, each a source of its own.

    Hours that somebody computed from a published throughput are rows of its source already.
    """
    gpus = {f"{gpu.key.split()[0]}-{gpu.key.split()[1]}": gpu for gpu in read_gpus(data).values() if "SXM" in gpu.key}
    for line in (data.parent / "published-trainings.jsonl").read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        if run["params"] is None:
            model = of_config(run["config"], run["tokens"])
        else:
            model = of_parameters(quantity(run["params"], COUNT, "params"), run["tokens"])
        if model.kind == "transformer" and run["gpus"] <= ONE_MACHINE and run["figure"] == "hours as published":
            batch_size = run["batch_size"] / run["gpus"]
            yield Row(
                source=run["name"],
                job=run["name"],
                model=model,
                gpu=gpus[run["gpu"]],
                precision="bf16",
                batch_size=batch_size,
                step_time_s=3600 * run["true_hours"] * run["batch_size"] / run["samples"],
                gpus=run["gpus"],
            )


SOURCE_LOG_SD, NUMBER_LOG_SD = 0.3, 1.0
"""Priors: of what a source's scripts are better than others', and of the three numbers about `BEGIN`.

Of sources left out (2026-11-29), the spread of errors and the median job: 0.435 and 1.17 times; with half and twice of
the first prior 0.424 and 1.17, 0.451 and 1.28; of the second 0.436 and 1.18, 0.439 and 1.12; from 0.4, 8 and 1 as the
beginning 0.441 and 1.16; by a robust loss (soft L1) 0.437 and 1.19.
"""

BEGIN = {"share": 0.6, "passes": 15.0, "attention": 1.5}


def log_error(row: Row, law: Roofline) -> float:
    """Return the log of predicted over measured seconds of a step."""
    counted = law.counted(row.model, row.precision)
    if row.recomputes:
        counted = counted.model_copy(update={"flops": counted.flops * (1 + 1 / CONTRIBUTION)})
    fixed_s = LAUNCH_S * OPERATORS_A_LAYER * row.model.layers
    alone_s = fixed_s + row.batch_size * sample_s(counted, row.gpu, row.precision)
    return math.log(alone_s * beside_others(row.gpus) / row.step_time_s)


def share_of_peak(row: Row) -> float:
    """Return the share of the data sheet's rate that a row reaches, by the operations that the model counts to."""
    flops = CONTRIBUTION * row.model.forward_flops * row.batch_size
    return flops / (row.step_time_s * row.gpu.tflops(row.precision) * 1e12)


def fit_roofline(
    rows: Sequence[Row], log_sd: float = 1.0, gpu_log_sd: float = 1.0
) -> tuple[Roofline, dict[str, float]]:
    """Return the roofline fitted to rows, and each source's effect on the log of the seconds."""
    sources = sorted({str(row.cell[0]) for row in rows})
    alike = Counter(row.cell for row in rows)
    place = np.array([sources.index(str(row.cell[0])) for row in rows])
    weight = np.array([1 / math.sqrt(alike[row.cell]) for row in rows]) / 0.1
    names = list(BEGIN)
    usual = statistics.median(
        statistics.median(share_of_peak(row) for row in rows if row.cell == cell) for cell in alike
    )

    def law(logs: Any) -> Roofline:
        """Return the roofline whose numbers are those of `BEGIN` times the exponentials of ``logs``."""
        numbers = {name: BEGIN[name] * math.exp(log) for name, log in zip(names, logs[: len(names)], strict=True)}
        jobs = len({row.job for row in rows})
        return Roofline(**numbers, usual=usual, log_sd=log_sd, gpu_log_sd=gpu_log_sd, jobs=jobs)

    def residuals(logs: Any) -> Any:
        """Return the weighted errors of the rows, and the penalties on numbers and sources."""
        roofline = law(logs)
        errors = np.array([log_error(row, roofline) for row in rows]) + logs[len(names) :][place]
        return np.concatenate([weight * errors, logs[: len(names)] / NUMBER_LOG_SD, logs[len(names) :] / SOURCE_LOG_SD])

    fitted = least_squares(residuals, np.zeros(len(names) + len(sources))).x
    return law(fitted), dict(zip(sources, fitted[len(names) :].tolist(), strict=True))


def sources_left_out(rows: Sequence[Row]) -> Iterator[tuple[Row, float]]:
    """Yield every row with its log error by the roofline of the other sources."""
    for source in sorted({str(row.cell[0]) for row in rows}):
        law, _ = fit_roofline([row for row in rows if row.cell[0] != source])
        for row in rows:
            if row.cell[0] == source:
                yield row, log_error(row, law)


def spread_of(errors: Sequence[tuple[Row, float]]) -> float:
    """Return the standard deviation of a new job's error: every source weighs the same, and in it every job."""
    sources: dict[object, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row, error in errors:
        sources[row.cell[0]][row.job].append(error**2)
    return math.sqrt(
        statistics.fmean(statistics.fmean(map(statistics.fmean, jobs.values())) for jobs in sources.values())
    )


def gpu_spread_of(errors: Sequence[tuple[Row, float]]) -> float:
    """Return the standard deviation of a job's error on one GPU against another, every job weighing the same.

    Jobs measured on a single GPU say nothing.
    """
    jobs: dict[object, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row, error in errors:
        jobs[row.cell][row.gpu.key].append(error)
    apart = [
        statistics.fmean((left - right) ** 2 for left, right in combinations(map(statistics.fmean, gpus.values()), 2))
        for gpus in jobs.values()
        if len(gpus) > 1
    ]
    return math.sqrt(statistics.fmean(apart))


GRID_S = np.geomspace(2e-3, 0.1, 24)
"""Fixed times that are tried."""

SHARES = np.geomspace(0.02, 1.0, 64)


@dataclass(frozen=True, kw_only=True)
class Convolutions:
    """A convolutional job in one precision, with the operations and seconds of a step on the reference GPU."""

    column: Column
    half: bool
    flops_per_sample: float
    flops: float
    step_time_s: float

    @property
    def name(self) -> str:
        return precision_class("fp16" if self.half else "tf32")


def convolutions(data: Path) -> list[Convolutions]:
    """Return the convolutional networks of the data whose operations can be counted.

    Each is with its seconds of a step of the median batch on the reference GPU.
    """
    with (data / "jobs.csv").open(encoding="utf-8", newline="") as file:
        jobs = {row["job"]: row for row in csv.DictReader(file)}
    counted = []
    for column in read_columns(data):
        flops_per_sample = column.cells[0].flops_per_sample
        if "CNN" not in jobs[column.job]["kind"] or flops_per_sample is None:
            continue
        batch = statistics.median(cell.place.batch_size for cell in column.cells)
        half = column.cells[0].place.half
        place = Place(gpu=REFERENCE, precision="fp16" if half else "tf32", batch_size=batch)
        logs, _ = steps_elsewhere(tuple(column.cells), (place,))
        counted.append(
            Convolutions(
                column=column,
                half=half,
                flops_per_sample=flops_per_sample,
                flops=flops_per_sample * batch,
                step_time_s=math.exp(float(logs[0])),
            )
        )
    return counted


def fit_convolutions(rows: Sequence[Convolutions], widened: float = 1.0) -> tuple[float, dict[str, Utilisation]]:
    """Return fixed time and shares by the least mean square of jobs' errors; ``widened``: factor on the spread."""
    fixed_s = min(GRID_S.tolist(), key=lambda fixed: _loss(rows, fixed))
    shares = _shares(rows, fixed_s)
    squares = [square for name, share in shares.items() for square in _squares(rows, name, fixed_s, share)]
    log_sd = widened * math.sqrt(statistics.fmean(squares) * (len(squares) + 1) / max(1, len(squares) - 1))
    return fixed_s, {
        name: Utilisation(share=share, log_sd=log_sd, jobs=len(_squares(rows, name, fixed_s, share)))
        for name, share in shares.items()
    }


def _error(row: Convolutions, fixed_s: float, share: float) -> float:
    peak = REFERENCE.tflops("fp16" if row.half else "tf32") * 1e12
    return math.log(row.step_time_s / (fixed_s + row.flops / (share * peak)))


def _squares(rows: Sequence[Convolutions], name: str, fixed_s: float, share: float) -> list[float]:
    """Return the mean squared log error of each job in the class of precision ``name``, by a fixed time and a share."""
    jobs: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.name == name:
            jobs[row.column.job].append(_error(row, fixed_s, share) ** 2)
    return [statistics.fmean(some) for some in jobs.values()]


def _shares(rows: Sequence[Convolutions], fixed_s: float) -> dict[str, float]:
    """Return the share of peak throughput with the least mean square of jobs' errors, by class of precision."""

    def best(name: str) -> float:
        shares: list[float] = SHARES.tolist()
        return min(shares, key=lambda share: statistics.fmean(_squares(rows, name, fixed_s, share)))

    return {name: best(name) for name in sorted({row.name for row in rows})}


def _loss(rows: Sequence[Convolutions], fixed_s: float) -> float:
    return statistics.fmean(
        square for name, share in _shares(rows, fixed_s).items() for square in _squares(rows, name, fixed_s, share)
    )


@dataclass(frozen=True, kw_only=True)
class Estimated:
    """A measured step beside what was estimated without its job.

    Attributes:
        error: log of measured over estimated.
        prior_log_sd: of the prior, as it was told; ``gpu_log_sd``: of another GPU than the reference.
    """

    row: Convolutions
    cell: Measured
    error: float
    prior_log_sd: float
    gpu_log_sd: float


def jobs_left_out(rows: Sequence[Convolutions]) -> Iterator[Estimated]:
    """Yield every measured step of every job, estimated from the other jobs, as `hetopt.estimate` does it."""
    for job in sorted({row.column.job for row in rows}):
        fixed_s, shares = fit_convolutions([row for row in rows if row.column.job != job])
        for row in (row for row in rows if row.column.job == job):
            yield from estimated(row, fixed_s, shares[row.name])


def estimated(row: Convolutions, fixed_s: float, known: Utilisation) -> Iterator[Estimated]:
    """Yield the steps of one column, estimated by a fixed time and a share of the peak."""
    for cell in row.column.cells:
        peak = REFERENCE.tflops(cell.place.precision) * 1e12
        step_s = fixed_s + row.flops_per_sample * cell.place.batch_size / (known.share * peak)
        place = Place(gpu=REFERENCE, precision=cell.place.precision, batch_size=cell.place.batch_size)
        counted = Measured(place=place, step_time_s=step_s, kind="convolution", flops_per_sample=row.flops_per_sample)
        logs, covariance = steps_elsewhere((counted,), (cell.place,))
        yield Estimated(
            row=row,
            cell=cell,
            error=math.log(cell.step_time_s) - float(logs[0]),
            prior_log_sd=known.log_sd,
            gpu_log_sd=math.sqrt(covariance[0, 0]),
        )


def coverage(estimates: Sequence[Estimated], widened: float = 1.0) -> float:
    """Return the share of the steps within their intervals, every job weighing the same."""
    jobs: dict[str, list[bool]] = defaultdict(list)
    for estimate in estimates:
        half_width = Z90 * math.hypot(widened * estimate.prior_log_sd, estimate.gpu_log_sd)
        jobs[estimate.row.column.job].append(abs(estimate.error) <= half_width)
    return statistics.fmean(statistics.fmean(job) for job in jobs.values())


FACTORS = tuple(1 + place / 20 for place in range(61))
KEPT = 0.9


def main() -> None:
    """Fit the prior, print the errors of what was left out, and write the file that ships.

    Exits where the throughput data are not at hand.
    """
    data = folder()
    if data is None:
        raise SystemExit("the throughput data are not at hand")
    rows = transformers(data)
    left = list(sources_left_out(rows))
    spread = spread_of(left)
    law, effects = fit_roofline(rows, log_sd=spread, gpu_log_sd=gpu_spread_of(left))
    within = statistics.fmean(abs(error) <= Z90 * spread for _, error in left)
    print(f"transformers: {len(rows)} steps, {law}")
    print("  sources:", ", ".join(f"{name} x{math.exp(-effect):.2f}" for name, effect in effects.items()))
    print(f"  sources left out: x{math.exp(spread):.2f} off, {within:.0%} covered")
    networks = convolutions(data)
    elsewhere = list(jobs_left_out(networks))
    widened = next(factor for factor in FACTORS if coverage(elsewhere, factor) >= KEPT)
    fixed_s, shares = fit_convolutions(networks, widened)
    middle = math.exp(statistics.median(abs(estimate.error) for estimate in elsewhere))
    print(f"convolutions: left out x{middle:.2f} off in the median, spreads times {widened:g}, {shares}")
    save(UtilisationPrior(transformer=law, fixed_s=fixed_s, convolution=shares, measured=MEASURED))


if __name__ == "__main__":
    main()
