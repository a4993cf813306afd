"""Fits the prior of utilisation to public throughputs: ``python -m benchmarks._utilisation_fit`` writes what ships.

Every column of the data whose job has counted operations says, by the model that relates GPUs, how long its step takes
on the reference GPU. A job counts once, however many suites and GPUs it has. Large language models, of which the data
have none, come in by the utilisation that their papers state.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import get_args

import numpy as np

from benchmarks._gpu_throughput import Column, folder, read_columns
from hetopt.optimizer.model_counts import Kind
from hetopt.optimizer.step_time.gpu_transfer import Measured, Place, steps_elsewhere
from hetopt.optimizer.step_time.utilisation import (
    REFERENCE,
    Utilisation,
    UtilisationPrior,
    key,
    save,
)

PUBLISHED = {
    # 530 billion parameters on 2,240 A100: 30.2 % (Chowdhery et al. 2022, table 3).
    "MT-NLG": 0.302,
    # 1.7 billion parameters on 32 A100: 137 of 312 TFLOP/s, of which a quarter is recomputed (Narayanan et al. 2021,
    # table 1 and its formula).
    "Megatron-LM": 137 / 312 * 3 / 4,
}
"""Utilisation of transformers in 16 bits on the reference GPU, whole clusters with their communication."""

GRID_S = np.geomspace(2e-3, 0.1, 24)
"""Fixed times that are tried."""

Z90 = 1.645


@dataclass(frozen=True, kw_only=True)
class Counted:
    """One column of a job whose operations are counted.

    Attributes:
        flops: of a step on the reference GPU; ``step_time_s``: how long it takes there, by all its GPUs.
    """

    column: Column
    kind: Kind
    half: bool
    flops_per_sample: float
    flops: float
    step_time_s: float

    @property
    def name(self) -> str:
        return key(self.kind, half=self.half)


def counted(data: Path) -> list[Counted]:
    """The transformers and convolutional networks of the data whose operations can be counted."""
    with (data / "jobs.csv").open(encoding="utf-8", newline="") as file:
        jobs = {row["job"]: row for row in csv.DictReader(file)}
    found = []
    for column in read_columns(data):
        job = jobs[column.job]
        kind: Kind | None = (
            "transformer" if "ransformer" in job["kind"] else "convolution" if "CNN" in job["kind"] else None
        )
        flops_per_sample = column.cells[0].flops_per_sample
        if kind is None or flops_per_sample is None:
            continue
        batch = statistics.median(cell.place.batch_size for cell in column.cells)
        half = column.cells[0].place.half
        place = Place(gpu=REFERENCE, precision="fp16" if half else "tf32", batch_size=batch)
        told, _ = steps_elsewhere(column.cells, [place])
        found.append(
            Counted(
                column=column,
                kind=kind,
                half=half,
                flops_per_sample=flops_per_sample,
                flops=flops_per_sample * batch,
                step_time_s=math.exp(float(told[0])),
            )
        )
    return found


def fit(
    rows: Sequence[Counted], measured: str = "", widened: Mapping[str, float] = MappingProxyType({})
) -> UtilisationPrior:
    """The prior of some columns: fixed time and shares on grids, by the least mean square of jobs' errors.

    Args:
        rows: the columns.
        measured: when they were measured, in words.
        widened: factors on the spread, by kind.
    """
    fixed_s = min(GRID_S.tolist(), key=lambda fixed: _loss(rows, fixed))
    shares = _shares(rows, fixed_s)
    spreads = {kind: _log_sd(rows, kind, fixed_s, shares) for kind in get_args(Kind)}
    by_kind = {
        name: Utilisation(
            share=share,
            log_sd=widened.get(name.split()[0], 1.0) * spreads[name.split()[0]],
            jobs=len(_squares(rows, name, fixed_s, share)),
        )
        for name, share in shares.items()
    }
    return UtilisationPrior(fixed_s=fixed_s, by_kind=by_kind, measured=measured)


def _log_sd(rows: Sequence[Counted], kind: Kind, fixed_s: float, shares: Mapping[str, float]) -> float:
    """Of another job of a kind than these, whose mean is known no better than from them."""
    squares = [
        square
        for name, share in shares.items()
        if name.startswith(kind)
        for square in _squares(rows, name, fixed_s, share)
    ]
    return math.sqrt(statistics.fmean(squares) * (len(squares) + 1) / max(1, len(squares) - 1))


def _error(row: Counted, fixed_s: float, share: float) -> float:
    peak = REFERENCE.tflops("fp16" if row.half else "tf32") * 1e12
    return math.log(row.step_time_s / (fixed_s + row.flops / (share * peak)))


def _squares(rows: Sequence[Counted], name: str, fixed_s: float, share: float) -> list[float]:
    """Of a kind and class of precision, the mean square of each job's errors."""
    jobs: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.name == name:
            jobs[row.column.job].append(_error(row, fixed_s, share) ** 2)
    if name == key("transformer", half=True):
        for job, stated in PUBLISHED.items():
            jobs[job].append(math.log(share / stated) ** 2)
    return [statistics.fmean(some) for some in jobs.values()]


SHARES = np.geomspace(0.02, 1.0, 64)


def _shares(rows: Sequence[Counted], fixed_s: float) -> dict[str, float]:
    """By kind and class of precision, the share with the least mean square of jobs' errors."""

    def best(name: str) -> float:
        shares: list[float] = SHARES.tolist()
        return min(shares, key=lambda share: statistics.fmean(_squares(rows, name, fixed_s, share)))

    return {name: best(name) for name in sorted({row.name for row in rows})}


def _loss(rows: Sequence[Counted], fixed_s: float) -> float:
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

    row: Counted
    cell: Measured
    error: float
    prior_log_sd: float
    gpu_log_sd: float

    def is_covered(self, widened: float = 1.0) -> bool:
        """Whether it lies in the 90 % interval, the prior's spread widened by a factor."""
        return abs(self.error) <= Z90 * math.hypot(widened * self.prior_log_sd, self.gpu_log_sd)


def left_out(rows: Sequence[Counted], widened: Mapping[str, float] = MappingProxyType({})) -> Iterator[Estimated]:
    """Every measured step of every job, estimated from the other jobs, as `hetopt.estimate` does it."""
    for job in sorted({row.column.job for row in rows}):
        prior = fit([row for row in rows if row.column.job != job], widened=widened)
        for row in (row for row in rows if row.column.job == job):
            yield from estimated(row, prior)


def estimated(row: Counted, prior: UtilisationPrior) -> Iterator[Estimated]:
    """The steps of one column by a prior."""
    for cell in row.column.cells:
        precision = cell.place.precision
        step_s = prior.step_time_s(row.kind, precision, row.flops_per_sample * cell.place.batch_size)
        place = Place(gpu=REFERENCE, precision=precision, batch_size=cell.place.batch_size)
        counted = Measured(place=place, step_time_s=step_s, kind=row.kind, flops_per_sample=row.flops_per_sample)
        told, covariance = steps_elsewhere([counted], [cell.place])
        yield Estimated(
            row=row,
            cell=cell,
            error=math.log(cell.step_time_s) - float(told[0]),
            prior_log_sd=prior.of(row.kind, precision).log_sd,
            gpu_log_sd=math.sqrt(covariance[0, 0]),
        )


def coverage(found: Collection[Estimated], widened: float = 1.0) -> float:
    """Part of the steps within their intervals, every job weighing the same."""
    jobs: dict[str, list[bool]] = defaultdict(list)
    for one in found:
        jobs[one.row.column.job].append(one.is_covered(widened))
    return statistics.fmean(statistics.fmean(job) for job in jobs.values())


FACTORS = tuple(1 + place / 20 for place in range(61))
KEPT = 0.9


def calibration(found: Collection[Estimated]) -> dict[str, float]:
    """By kind, the least factor on the prior's spread with which 90 % of the steps of jobs left out are covered."""
    return {
        kind: next(factor for factor in FACTORS if coverage([o for o in found if o.row.kind == kind], factor) >= KEPT)
        for kind in get_args(Kind)
    }


def main() -> None:
    """Fit, say how the jobs left out lie, and write what ships."""
    data = folder()
    if data is None:
        raise SystemExit("the throughput data are not at hand")
    rows = counted(data)
    found = list(left_out(rows))
    widened = calibration(found)
    prior = fit(rows, measured="public throughputs of 2020 to 2024", widened=widened)
    for kind in get_args(Kind):
        own = [one for one in found if one.row.kind == kind]
        middle = math.exp(statistics.median(abs(one.error) for one in own))
        print(
            f"{kind}: left out x{middle:.2f} off in the median, {coverage(own):.0%} covered, "
            f"{coverage(own, widened[kind]):.0%} with spreads times {widened[kind]:g}"
        )
    print(f"fixed {prior.fixed_s * 1000:.1f} ms")
    save(prior)


if __name__ == "__main__":
    main()
