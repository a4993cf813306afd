"""How far predicted steps on GPUs where a job was never run lie from public measurements, beside simpler rules.

The columns and the protocol are the data's own (`benchmarks._gpu_throughput`). A measured GPU is a step sample of a
machine type that carries it, another GPU a query, as in `hetopt profile --from-samples` and `hetopt predict`; what
answers knows nothing of the job, its whole family, or any row of the GPU that is asked for. Samples say the kind of
model and its operations, as a profile does, in the rows "model told", and neither of them in the others. Rules that are
compared with get the same cells. ``--fit`` writes what ships, from all jobs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from unittest import mock

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks._gpu_fit import fit
from benchmarks._gpu_throughput import Column, Machine, folder, read_columns, read_machines
from benchmarks._outcome import Outcome, parser, publish, run_benchmark
from benchmarks._utilisation_fit import large_columns
from hetopt.core.step_samples import Configuration, Node, StepSample
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.market.instance_type import Accelerator, AcceleratorModel, InstanceType
from hetopt.optimizer.step_time import gpu_transfer, model as step_model
from hetopt.optimizer.step_time.gpu_transfer import Gpu, GpuModel, JobFacts, Measured, save
from hetopt.optimizer.step_time.machine_bus import SWITCHED_FAMILIES
from hetopt.optimizer.step_time.model import StepTimeModel
from hetopt.optimizer.step_time.observed import observe
from hetopt.optimizer.step_time.priors import PRIORS, SWITCHED
from hetopt.optimizer.step_time.step_time import expected_maximum

QUICK_JOBS = 10
Z90 = 1.645
RENTED = {
    "T4 16 PCIe": "g4dn.xlarge",
    "T4G 16 PCIe": "g5g.xlarge",
    "A10G 24 PCIe": "g5.xlarge",
    "L4 24 PCIe": "g6.xlarge",
    "L40S 48 PCIe": "g6e.xlarge",
}
"""Types whose prices decide which GPU is the cheapest a sample, in the suite of AWS's own GPUs."""

RETIRED_USD_PER_HOUR = {"V100 16 SXM2": 3.06}
"""Of a p3.2xlarge, on demand in us-east-1 in 2024; catalogues no longer have it."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One predicted step: logs of predicted and true seconds, and half of the 90 % interval."""

    column: Column
    source: int
    target: int
    error: float
    half_width: float


Rule = Callable[[Measured, Measured], float]
"""Log of the seconds at the second place, whose time it must not read, from a step at the first."""


def scaled_by(rate: Callable[[Gpu, Measured], float]) -> Rule:
    """Return the rule that throughput follows a rate."""

    def predict(known: Measured, asked: Measured) -> float:
        ratio = rate(known.place.gpu, known) / rate(asked.place.gpu, asked)
        return math.log(known.step_time_s * asked.place.batch_size / known.place.batch_size * ratio)

    return predict


def peak(gpu: Gpu, cell: Measured) -> float:
    return gpu.tflops(cell.place.precision)


def half_each(known: Measured, asked: Measured) -> float:
    """Return the log seconds of a step by a simpler rule: half of it follows the fp32 peak, half the bandwidth."""
    ours, theirs = known.place.gpu, asked.place.gpu
    factor = (ours.fp32_tflops / theirs.fp32_tflops + ours.bandwidth_gb_per_s / theirs.bandwidth_gb_per_s) / 2
    return math.log(known.step_time_s * asked.place.batch_size / known.place.batch_size * factor)


RULES: dict[str, Rule] = {
    "peak rate": scaled_by(peak),
    "bandwidth": scaled_by(lambda gpu, cell: gpu.bandwidth_gb_per_s),
    "mean of both": scaled_by(lambda gpu, cell: math.sqrt(peak(gpu, cell) * gpu.bandwidth_gb_per_s)),
    "half each, as before": half_each,
}


def machine(gpu: Gpu, count: int = 1, *, switched: bool = False) -> InstanceType:
    """Return a machine with so many of a GPU; its family says whether a switch joins them, as in catalogues."""
    name, memory, form = gpu.key.rsplit(" ", 2)
    named = f"{name} PCIe" if form == "PCIe" and name in gpu_transfer.SOCKETED and name != "P100" else name
    model = AcceleratorModel(
        name=named,
        memory_gib=float(memory),
        aliases=(),
        manufacturer="NVIDIA",
        fp32_tflops=gpu.fp32_tflops,
        tf32_tensor_tflops=gpu.tf32_tflops,
        fp16_tensor_tflops=gpu.fp16_tflops,
        memory_bandwidth_gb_per_s=gpu.bandwidth_gb_per_s,
        confidence="high",
        source="gpus.csv",
        compute_capability=f"{gpu.capability:.1f}",
    )
    accelerator = Accelerator(
        name=named, manufacturer="NVIDIA", count=count, fraction=1.0, memory_gib=float(memory), model=model
    )
    named = f"{SWITCHED_FAMILIES[0]}.{count}" if switched else type_name(gpu)
    return InstanceType(
        name=named, vcpus=8, memory_gib=64, network_baseline_gbps=10, accelerator=accelerator, source="-"
    )


def type_name(gpu: Gpu) -> str:
    return f"{gpu.key.lower().replace(' ', '-')}.one"


def asked(cell: Measured, workers: int = 1) -> Configuration:
    """Return the configuration of a measured step, on so many GPUs of one machine; the batch is 1 at least."""
    node = Node(type=type_name(cell.place.gpu), workers=workers)
    precision = None if cell.place.precision == "default" else cell.place.precision
    return Configuration(nodes=(node,), local_batch_size=max(1, round(cell.place.batch_size)), precision=precision)


def sample(cell: Measured) -> StepSample:
    job_facts = {"model_kind": None if cell.kind == "other" else cell.kind, "flops_per_sample": cell.flops_per_sample}
    return StepSample.model_validate({**asked(cell).model_dump(), **job_facts, "step_time_s": cell.step_time_s})


Beliefs = Mapping[JobFacts, GpuModel]
"""By what is told of a job."""


@contextmanager
def believing(believed: Beliefs, *, jobs: Sequence[str], gpu: str | None = None) -> Iterator[None]:
    """Predict from these models, without some jobs and any row of one GPU, in place of the shipped ones.

    ``gpu`` None: every GPU's rows of the other jobs.
    """

    @cache
    def left(facts: JobFacts) -> GpuModel:
        return believed[facts].without(jobs=jobs, gpu=gpu)

    gpu_transfer.steps_elsewhere.cache_clear()
    with mock.patch.object(gpu_transfer, "gpu_model", left):
        yield
    gpu_transfer.steps_elsewhere.cache_clear()


@dataclass(frozen=True, kw_only=True)
class Models:
    """The step-time models of sets of measured steps, whatever is believed of other GPUs.

    Attributes:
        types: machines that carry the GPUs.
        fitted: by the configurations and seconds of the steps; what is trained is no part of such a fit.
    """

    types: Mapping[str, InstanceType]
    fitted: dict[tuple[tuple[Configuration, float], ...], StepTimeModel] = field(default_factory=dict)

    def of(self, column: Column, sources: Sequence[int]) -> StepTimeModel:
        """Return the step-time model of the sources' steps.

        Fitted once for the same steps.
        """
        cells = [column.cells[index] for index in sources]
        key, observed = tuple((asked(cell), cell.step_time_s) for cell in cells), observe([sample(c) for c in cells])
        if key not in self.fitted:
            self.fitted[key] = StepTimeModel.fit(observed, self.types)
        model = self.fitted[key]
        return replace(model, posterior=replace(model.posterior, observed=observed))

    def answers(self, column: Column, sources: Sequence[int], targets: Iterable[int]) -> list[Answer]:
        """Return the answers for steps on the targets, from those of the sources.

        A target that is a source is left out.
        """
        wanted = [index for index in targets if index not in sources]
        predicted = self.of(column, sources).predict([asked(column.cells[index]) for index in wanted]) if wanted else []
        return [
            Answer(
                column=column,
                source=sources[0],
                target=index,
                error=math.log(step.step_time_s / column.cells[index].step_time_s),
                half_width=math.log(step.step_time_high_s / step.step_time_s),
            )
            for index, step in zip(wanted, predicted, strict=True)
        ]

    def from_one(self, columns: Sequence[Column]) -> list[Answer]:
        """Return the answers for every GPU from every other."""
        return [
            answer
            for column in columns
            for source in range(len(column.cells))
            for answer in self.answers(column, [source], range(len(column.cells)))
        ]

    def from_two(self, columns: Sequence[Column]) -> list[Answer]:
        """Return the answers for every GPU from every other and a second one, drawn at random."""
        lots, answered = np.random.default_rng(0), list[Answer]()
        for column in columns:
            everyone = range(len(column.cells))
            for source in everyone:
                others = [index for index in everyone if index != source]
                answered += self.answers(column, [source, int(lots.choice(others))], everyone)
        return answered


def eight_from_one(machines: Sequence[Machine], *, switched: bool) -> list[float]:
    """Return |predicted / measured throughput - 1| of eight GPUs in one machine, from a step of one.

    What is believed of machines with a switch is told by the other jobs.
    """
    errors = []
    for box in machines:
        others = [other for other in machines if model_of(other.job) != model_of(box.job)]
        types = {type_name(box.single.place.gpu): machine(box.single.place.gpu, 8, switched=switched)}
        told_by_others = {"contention": replace(PRIORS["contention"], mean=contention(others))} if others else SWITCHED
        with mock.patch.object(step_model, "SWITCHED", told_by_others):
            predicted = StepTimeModel.fit(observe([sample(box.single)]), types).predict([asked(box.single, 8)])[0]
        errors.append(abs(box.eight_s / predicted.step_time_s - 1))
    return errors


def model_of(job: str) -> str:
    """Return the name that a job shares with the same job trained by NVIDIA's scripts."""
    return job.removesuffix("-nvidia")


def contention(machines: Sequence[Machine]) -> float:
    """Return the log contention prior at which eight GPUs slow the median job down as measured."""
    ratios = defaultdict[str, list[float]](list)
    for box in machines:
        ratios[box.job].append(box.eight_s / box.single.step_time_s)
    straggling = PRIORS["straggling"].mean
    assert straggling is not None
    ratio = float(np.median([np.median(job) for job in ratios.values()]))
    crowded = ratio / (1 + math.exp(straggling) * expected_maximum(8))
    return math.log(max(0.01, (crowded - 1) / (1 - 1 / 8)))


def held_out(
    believed: Beliefs,
    columns: Sequence[Column],
    group: Callable[[Column], str],
    ask: Callable[[list[Column]], list[Answer]],
) -> list[Answer]:
    """Return the answers for each group of jobs, by a model fitted without the group."""
    groups = defaultdict[str, list[Column]](list)
    for column in columns:
        groups[group(column)].append(column)
    answered: list[Answer] = []
    for members in groups.values():
        with believing(believed, jobs=[c.job for c in members]):
            answered += ask(members)
    return answered


by_job, by_family = attrgetter("job"), attrgetter("kind")

CALIBRATION = 1.12
"""Factor on the intervals that ships: a little wide for a job left out, so that it is not too narrow for a new kind."""


def without_rows(believed: Beliefs, columns: Sequence[Column], models: Models) -> list[Answer]:
    """Return the answers for each GPU from every other, by a model without the job and without any row of that GPU."""
    answered: list[Answer] = []
    for key in sorted({cell.place.gpu.key for column in columns for cell in column.cells}):
        jobs: dict[str, list[tuple[Column, int]]] = defaultdict(list)
        for column in columns:
            for index, cell in enumerate(column.cells):
                if cell.place.gpu.key == key:
                    jobs[column.job].append((column, index))
        for job, places in jobs.items():
            with believing(believed, jobs=[job], gpu=key):
                for column, target in places:
                    for source in range(len(column.cells)):
                        answered += models.answers(column, [source], [target])
    return answered


def by_rule(columns: Sequence[Column], rule: Rule) -> list[Answer]:
    return [
        Answer(column=c, source=i, target=j, error=rule(known, cell) - math.log(cell.step_time_s), half_width=0.0)
        for c in columns
        for i, known in enumerate(c.cells)
        for j, cell in enumerate(c.cells)
        if i != j
    ]


def by_median_ratio(columns: Sequence[Column]) -> list[Answer]:
    """Return a rule's answers: the other jobs' median ratio of both GPUs in the same precision; else by bandwidth."""
    ratios: dict[tuple[str, str, bool], list[tuple[str, float]]] = defaultdict(list)
    for c in columns:
        for known in c.cells:
            for cell in c.cells:
                key = (known.place.gpu.key, cell.place.gpu.key, cell.place.half)
                ratios[key].append((c.job, throughput(cell) - throughput(known)))
    answered = []
    for c in columns:
        for i, known in enumerate(c.cells):
            for j, cell in enumerate(c.cells):
                if i == j:
                    continue
                others = ratios[known.place.gpu.key, cell.place.gpu.key, cell.place.half]
                of_others = [ratio for job, ratio in others if job != c.job]
                by_bandwidth = cell.place.gpu.bandwidth_gb_per_s / known.place.gpu.bandwidth_gb_per_s
                ratio = float(np.median(of_others)) if of_others else math.log(by_bandwidth)
                error = throughput(cell) - throughput(known) - ratio
                answered.append(Answer(column=c, source=i, target=j, error=error, half_width=0.0))
    return answered


def throughput(cell: Measured) -> float:
    """Return the log of the samples a second."""
    return math.log(cell.place.batch_size / cell.step_time_s)


def errors(answers: Sequence[Answer]) -> tuple[float, float]:
    """Return the median and 90th percentile of |predicted / measured throughput - 1|."""
    shares = [abs(math.expm1(-answer.error)) for answer in answers]
    return float(np.median(shares)), float(np.quantile(shares, 0.9))


def coverage(answers: Sequence[Answer]) -> tuple[float, float]:
    """Return the share of steps inside the 90 % interval, each job weighing the same, and its median factor."""
    inside: dict[str, list[bool]] = defaultdict(list)
    for answer in answers:
        inside[answer.column.job].append(abs(answer.error) <= answer.half_width)
    return float(np.mean([np.mean(job) for job in inside.values()])), float(
        np.exp(np.median([answer.half_width for answer in answers]))
    )


def regret(answers: Sequence[Answer], prices: Mapping[str, float]) -> float:
    """Return the mean extra cost a sample of the GPU predicted cheapest, from a measured one, over the cheapest.

    Only columns of the AWS suite count.
    """
    choices: dict[tuple[int, int], list[Answer]] = defaultdict(list)
    for answer in answers:
        if answer.column.suite == "aws":
            choices[id(answer.column), answer.source].append(answer)
    extra = []
    for options in choices.values():
        column, source = options[0].column, options[0].source
        true = {i: math.log(prices[cell.place.gpu.key]) - throughput(cell) for i, cell in enumerate(column.cells)}
        believed = {source: true[source]} | {answer.target: true[answer.target] + answer.error for answer in options}
        extra.append(math.exp(true[min(believed, key=lambda i: believed[i])] - min(true.values())) - 1)
    return float(np.mean(extra))


def row(results: Outcome, name: str, answers: Sequence[Answer], prices: Mapping[str, float]) -> None:
    """Print a line of the table and record its figures; answers without intervals are a baseline's."""
    key = name.lower().replace(" ", "_").replace(",", "")
    median, p90 = errors(answers)
    line = f"{name:34}{median:8.1%} /{p90:7.1%}"
    goals = WANTED.get(name.removesuffix(TOLD))
    line += " " * 21 if goals is None else f"{goals[0]:>11}{goals[1]:>10}"
    aws = [answer for answer in answers if answer.column.suite == "aws"]
    figures = {"median": median, "p90": p90}
    if aws:
        figures |= {"aws_median": errors(aws)[0], "aws_p90": errors(aws)[1], "aws_regret": regret(answers, prices)}
        line += f"{figures['aws_median']:10.1%} /{figures['aws_p90']:7.1%}{figures['aws_regret']:10.1%}"
    if any(answer.half_width for answer in answers):
        share, width = coverage(answers)
        figures |= {"coverage": share, "interval_factor": width}
        line += f"{share:10.0%}   x{width:.2f}"
        results.figures |= {f"{key}_{field}": round(value, 4) for field, value in figures.items()}
    else:
        results.baselines |= {f"{field}_by_{key}": round(value, 4) for field, value in figures.items()}
    print(line, flush=True)


WANTED = {
    "one measured": ("14 / 42", "11 / 35"),
    "kind held out": ("17 / 48", "14 / 42"),
    "two measured": ("12 / 36", "10 / 31"),
    "no row of the GPU": ("19 / 52", "15 / 45"),
    "large models": ("12 / 32", "9 / 25"),
}
"""Median and 90th percentile that a row must reach, and those that it aims at, in per cent, as they are printed."""

TOLD = ", model told"
"""Of rows whose samples say the kind of model and its operations."""

BEYOND = "must 11 / 27, 8 %, 86 to 95 %, x1.65; aim 9 / 22, 4 %, 88 to 93 %, x1.45"
"""For the suite of AWS's GPUs, the extra cost of the chosen one, and intervals."""

MACHINES = {"nvswitch": (0.07, 0.05), "pcie": (0.09, 0.07)}
"""Medians that eight GPUs from one must reach and aim at, by what is between them."""

GOALS = {
    f"{name.lower().replace(' ', '_')}_{field}": (None, int(value) / 100)
    for name, (must, _) in WANTED.items()
    for field, value in zip(("median", "p90"), must.split(" / "), strict=True)
} | {
    "one_measured_aws_median": (None, 0.11),
    "one_measured_aws_p90": (None, 0.27),
    "one_measured_aws_regret": (None, 0.08),
    "one_measured_coverage": (0.86, 0.95),
    "one_measured_interval_factor": (None, 1.65),
    **{f"eight_gpus_from_one_{name}": (None, must) for name, (must, _) in MACHINES.items()},
}


def untold(columns: Sequence[Column]) -> list[Column]:
    """Return the columns without the kind of model and its operations."""
    return [
        replace(column, cells=tuple(replace(cell, kind=None, flops_per_sample=None) for cell in column.cells))
        for column in columns
    ]


def full_machines(results: Outcome, machines: Sequence[Machine]) -> None:
    """Record the errors of eight GPUs predicted from one, by what joins them.

    Does nothing for an interconnect without machines.
    """
    for interconnect, (must, aim) in MACHINES.items():
        pairs = [box for box in machines if box.interconnect == interconnect]
        if pairs:
            off = float(np.median(eight_from_one(pairs, switched=interconnect == "nvswitch")))
            print(f"{f'8 GPUs from 1, {interconnect}':34}{off:8.1%}{must:18.0%}{aim:10.0%}")
            results.figures[f"eight_gpus_from_one_{interconnect}"] = round(off, 4)


def with_goals(results: Outcome) -> Outcome:
    """Return the results with the goals of their figures.

    Changes them in place.
    """
    for name, (least, most) in GOALS.items():
        if name in results.figures:
            results.goal(name, results.figures[name], at_least=least, at_most=most)
    return results


def main() -> None:
    """Measure the predictions, and publish; with ``--fit`` write the fitted models to a file instead.

    Without the GPU throughputs it says so and publishes nothing.
    """
    shared = parser(__doc__)
    shared.add_argument("--fit", type=Path, metavar="FILE", help="write what all jobs tell to FILE, and end")
    options = shared.parse_args()
    quick = options.quick or options.smoke
    data = folder()
    if data is None:
        print("The GPU throughputs are not there (HETOPT_SHARED_DATA names the data folder).")
        return
    columns = read_columns(data)
    jobs = sorted({column.job for column in columns})
    some = set(jobs[:: max(1, len(jobs) // QUICK_JOBS)] if quick else jobs)
    results = Outcome(benchmark="transfer", quick=quick)
    large = large_columns(data)
    believed = fit([*columns, *large], CALIBRATION)
    if options.fit is not None:
        save(believed, options.fit)
        return
    scored_columns = [column for column in columns if column.job in some]
    types = {type_name(cell.place.gpu): machine(cell.place.gpu) for column in columns for cell in column.cells}
    catalog = load_catalog("us-east-1", None)
    prices = RETIRED_USD_PER_HOUR | {
        key: price.usd_per_hour
        for key, name in RENTED.items()
        if (price := catalog.price(name, "on-demand")) is not None
    }
    print(
        f"{'throughput of another GPU':34}{'median / p90':>18}{'must':>9}{'aim':>10}{'AWS suite':>21}{'regret':>10}"
        f"{'coverage':>10}   width\n{BEYOND:>132}"
    )
    for name, rule in RULES.items():
        row(results, name, by_rule(scored_columns, rule), prices)
    row(results, "median ratio of other jobs", by_median_ratio(columns), prices)
    for scored, suffix in ((untold(scored_columns), ""), (scored_columns, TOLD)):
        models = Models(types=types)
        answered = held_out(believed, scored, by_job, models.from_one)
        row(results, f"one measured{suffix}", answered, prices)
        if options.smoke:
            continue
        row(results, f"kind held out{suffix}", held_out(believed, scored, by_family, models.from_one), prices)
        row(results, f"two measured{suffix}", held_out(believed, scored, by_job, models.from_two), prices)
        row(results, f"no row of the GPU{suffix}", without_rows(believed, scored, models), prices)
    answered = held_out(believed, large, by_family, Models(types=types).from_one)
    row(results, "large models", answered, prices)
    full_machines(results, [box for box in read_machines(data) if box.job in some])
    publish(with_goals(results), options.json)


if __name__ == "__main__":
    # Of matrices as small as these, more threads take more processor time and no less of the clock's.
    with threadpool_limits(1):
        run_benchmark(main)
