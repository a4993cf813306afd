"""Batch policies compared on small tasks that are really trained, with the time and price of one stated cluster.

One worker of the trainer's own loop stands for all; each step computes and exchanges for as long as the planner
predicts for its batch, and nothing else takes time.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor, nn
from torch.nn import functional

from benchmarks._composed import reached_s
from benchmarks._in_process import train_here
from benchmarks._outcome import Outcome
from benchmarks._toy import small_network
from hetopt.api.planning import PROFILES
from hetopt.api.step_times import StepTimes
from hetopt.core.errors import RunFailed
from hetopt.core.events.log import Event
from hetopt.core.run_spec import RunSpec, Settings, StopRule, WorkerSpec
from hetopt.core.step_samples import Configuration, Node
from hetopt.core.training_laws import Moments, NoiseCurve, step_worth
from hetopt.optimizer.convergence.convergence import (
    LARGEST_BATCH_FACTOR,
    Convergence,
    GivenSteps,
    equal_steps,
    noise_scale,
    surely_best,
)
from hetopt.optimizer.search.search_space import batch_ladder
from hetopt.trainer.data.fetch import Batch, TensorPairs, inputs_and_targets, samples_in
from hetopt.trainer.loop import Material
from hetopt.trainer.policies.policy import BatchDecision, CriticalBatch, ModelState, register
from hetopt.trainer.task import NO_TARGET, Loss, Task, TaskData
from hetopt.trainer.tasks.digits import digits_data
from hetopt.trainer.tasks.recipes import classification, sgd

TYPE, MACHINES, PRICED_AS = "c7i.xlarge", 8, "resnet20-cifar10"
"""The stated cluster, on demand in us-east-1, and the job whose steps are priced there."""

PROFILED_STEPS = 20
"""Of a run before, in which the noise is measured that the plan knows: as of the profile that ships."""

PERIOD = 5
"""Control period, steps: a hundredth of these runs."""

LENGTH = 2.0
"""Longest run over the given one, in epochs; of larger batches by the root of their size more."""

SEEDS, TUNED_WITH = tuple(range(5)), 100


class Clock:
    """Clock on which the cluster computes and exchanges; calling it returns its seconds.

    Args:
        given: global batch size of the job.

    Attributes:
        batches: samples of every step.
    """

    def __init__(self, given: int) -> None:
        self._known, self._step_s, alone_s = step_times(given)
        self._per_sample_s = (alone_s[-1] - alone_s[0]) / (self._known[-1] - self._known[0])
        self._fixed_s = alone_s[0] - self._per_sample_s * self._known[0]
        self._now_s, self._samples, self._is_warm = 0.0, 0, False
        self.batches = [0]

    def __call__(self) -> float:
        return self._now_s

    def step_s(self, batch: int) -> float:
        """Return the predicted seconds of a step of ``batch`` samples on all workers."""
        return float(np.interp(batch, self._known, self._step_s))

    def compute(self, samples: int) -> None:
        """Add the seconds in which the workers compute ``samples`` more samples of a step.

        The first call only warms up.
        """
        if self._is_warm:
            self._now_s += self._per_sample_s * samples + self._fixed_s * (not self._samples)
            self._samples += samples
        self._is_warm = True

    def exchange(self, *_: object) -> None:
        """End the step: add the rest of its seconds, note its samples in `batches`, and begin the next one."""
        computing_s = self._fixed_s + self._per_sample_s * self._samples
        self._now_s += max(0.0, self.step_s(self._samples) - computing_s)
        self.batches.append(self._samples)
        self._samples = 0


@functools.cache
def planner() -> StepTimes:
    """Return the planner's predictor of the stated job."""
    return StepTimes.of(PROFILES / f"{PRICED_AS}.json", market="on-demand")


@functools.cache
def step_times(given: int) -> tuple[Sequence[int], Sequence[float], Sequence[float]]:
    """Return batch sizes from ``given`` to 16 times that, seconds of their steps, and of one machine alone."""
    sizes = [MACHINES * round(given * 2 ** (place / 2) / MACHINES) for place in range(9)]
    node = Node(type=TYPE, workers=1)
    asked = [
        Configuration(nodes=(node,) * machines, local_batch_size=size // MACHINES)
        for machines in (MACHINES, 1)
        for size in sizes
    ]
    seconds = [step.step_time_s for step in planner().predict(asked) if not isinstance(step, str)]
    return sizes, seconds[: len(sizes)], seconds[len(sizes) :]


class AdaScale(CriticalBatch):
    """The policy of one batch size whose learning rate follows its gain (Johnson et al. 2020)."""

    def believed(self, curve: NoiseCurve) -> Moments | None:
        """Return the average noise; None before the first sample of it."""
        return curve.recent if curve.samples else None

    def moved(self, kept: BatchDecision, model: ModelState, rest_s: float, noise: Moments) -> BatchDecision:
        """Return the shares as they are."""
        return kept


class Pollux(AdaScale):
    """The policy of the batch size of most goodput (Qiao et al. 2021), which knows the true time of steps."""

    def moved(self, kept: BatchDecision, model: ModelState, rest_s: float, noise: Moments) -> BatchDecision:
        """Return the shares of the best of fifty batch sizes if 5 % better than the present one, else ``kept``."""
        clock, times = Clock(self.given), np.geomspace(1, LARGEST_BATCH_FACTOR, 50)
        sizes = [sum(kept.local_batch_sizes), *(round(self.given * time) for time in times.tolist())]
        goodputs = [step_worth(noise, size, self.given) / clock.step_s(size) for size in sizes]
        best = goodputs.index(max(goodputs))
        is_better = goodputs[best] > 1.05 * goodputs[0]
        return BatchDecision(local_batch_sizes=(sizes[best],), reason="goodput") if is_better else kept


BATCHES = {"digits": 16, "characters": 32, "autoencoder": 32, "line": 256}
"""As given, by task."""

register(
    "adascale",
    "",
    lambda spec, minimum: AdaScale(given=BATCHES[spec.task], least=BATCHES[spec.task], most=spec.global_batch_size),
)
register(
    "pollux",
    "",
    lambda spec, minimum: Pollux(
        given=spec.global_batch_size, least=spec.global_batch_size, most=LARGEST_BATCH_FACTOR * spec.global_batch_size
    ),
)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Batch policy with its first batch size and learning rate, by its name in the table.

    Attributes:
        times: first batch size over the job's own.
        power: exponent of ``times`` in the factor on the learning rate.
        policy: name of the batch policy, which ``settings`` are of.
    """

    name: str
    times: float = 1
    power: float = 0.0
    policy: str = "static"
    settings: Settings = field(default_factory=dict, hash=False)


GIVEN = Contender(name="given")
LADDER = tuple(
    Contender(name=f"{times}x_batch_{rule}", times=times, power=power)
    for times in (2, 4, 8, 16)
    for rule, power in (("rate_by_root", 0.5), ("rate_in_proportion", 1.0))
)
POLLUX = Contender(name="pollux", policy="pollux")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A task that is trained until its evaluation loss reaches a target.

    Attributes:
        material: makes the task, at a learning rate of 1, and its data.
        epochs: of the run with the given batch.
        target: loss that counts.
        looks: evaluations in an epoch.
        rates: learning rates that the given batch is tried with.
    """

    material: Callable[[], Material]
    epochs: float
    target: float
    looks: int
    rates: Sequence[float]

    def run(self, contender: Contender, seed: int, rate: float) -> tuple[float, int, list[Event]]:
        """Return the cluster's seconds until the loss is reached, the largest batch, and events.

        A run that never reaches it counts as long as the longest one of the given batch: twice what was planned.

        Args:
            contender: batch policy and first batch size.
            seed: of the run.
            rate: factor on the task's learning rate at the given batch size.
        """
        task, data = self.material().task, self.material().data
        given, clock = task.batch_size, Clock(task.batch_size)
        curve: list[tuple[float, float]] = []
        events: list[Event] = []

        def loss(model: nn.Module, samples: Batch) -> Loss:
            """Return the task's loss of a batch; in training mode let the cluster's clock compute it first."""
            if model.training:  # before the run its loss is tried in evaluation mode
                clock.compute(samples_in(samples))
            return task.loss(model, samples)

        def optimizer(model: nn.Module) -> torch.optim.Optimizer:
            """Return the task's optimizer, each step of which lets the cluster's clock exchange."""
            stepping = task.optimizer(model)
            stepping.register_step_post_hook(clock.exchange)
            return stepping

        def metrics(sums: Mapping[str, float], samples: int) -> dict[str, float]:
            curve.append((clock(), -sums["loss"] / samples))
            return {"loss": sums["loss"] / samples}

        spec = RunSpec(
            task=task.name,
            workers=(WorkerSpec(host="all", type=TYPE, local_batch_size=round(given * contender.times), threads=1),),
            batch_policy=contender.policy,
            batch_settings=contender.settings,
            learning_rate_scale=rate * contender.times**contender.power,
            seed=seed,
            stop=StopRule(max_epochs=LENGTH * self.epochs * contender.times**0.5),
            evaluate_every_epochs=1 / self.looks,
            control_period_steps=PERIOD,
            checkpoint_every_s=1e9,
        )
        with tempfile.TemporaryDirectory() as folder, suppress(RunFailed):
            events += train_here(
                spec,
                Path(folder),
                stop_requested=lambda: reached_s(curve, -self.target) is not None,
                material=Material(replace(task, loss=loss, optimizer=optimizer, metrics=metrics), data),
                clock=clock,
            )
        seconds = reached_s(curve, -self.target)
        never_s = LENGTH * self.epochs * len(data.train) / given * clock.step_s(given)
        return never_s if seconds is None else seconds, max(clock.batches), events

    def ours(self, rate: float) -> Contender:
        """Return the plan of `recommend` with an adaptive batch, from the noise of a run's first steps."""
        noise = [
            Moments(**event["noise"])
            for event in self.run(Contender(name="profile", policy="adascale"), TUNED_WITH, rate)[2]
            if event.get("noise") and event["step"] <= PROFILED_STEPS
        ]
        given, known = (
            self.material().task.batch_size,
            Convergence(noise_scale=noise_scale(noise), pilot_batch_sizes=(), basis=""),
        )
        steps, clock = equal_steps(known, GivenSteps(amount=1000), given), Clock(given)
        sizes = batch_ladder(given, LARGEST_BATCH_FACTOR * given, given)
        step_s = [clock.step_s(size) for size in sizes]
        expected_s = np.multiply(step_s, steps.steps(sizes, 1.0))
        begin = sizes[surely_best(expected_s, steps.log_sd(sizes, 1.0), expected_s[0])]
        settings = steps.following(begin, sizes, step_s)
        return Contender(name="critical", times=begin / given, policy="critical", settings=settings)

    def mean_s(self, contender: Contender, seeds: Sequence[int], rate: float) -> float:
        """Return the mean seconds until the loss is reached."""
        return statistics.fmean(self.run(contender, seed, rate)[0] for seed in seeds)


@functools.cache
def digits() -> Material:
    """Return a small network that reads digits.

    Raises:
        ImportError: as of `digits_data`.
    """
    return classified("digits", small_network, digits_data(None))


@functools.cache
def characters() -> Material:
    """Return a small network that reads eight characters of a text and writes the next one."""
    loaders = (datasets.load_diabetes, datasets.load_digits, datasets.load_iris, datasets.load_wine)
    text = "".join(load().DESCR for load in (*loaders, datasets.load_breast_cancer))
    codes = torch.tensor([min(ord(letter), 127) for letter in text])
    read, written, evaluates = codes.unfold(0, 8, 1)[:-1], codes[8:], torch.arange(len(codes) - 8) % 20 == 0

    def model() -> nn.Module:
        return nn.Sequential(nn.Embedding(128, 8), nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 128))

    train, evaluation = (TensorPairs(read[part], written[part]) for part in (~evaluates, evaluates))
    return classified("characters", model, TaskData(train=train, evaluation=evaluation))


def classified(name: str, model: Callable[[], nn.Module], data: TaskData) -> Material:
    """Return a task of classes with its data."""
    task = classification(
        name=name, model=model, data=lambda _: data, optimizer=sgd(1.0), target=NO_TARGET, batch_size=BATCHES[name]
    )
    return Material(task, data)


@functools.cache
def autoencoder() -> Material:
    """Return a network that squeezes digits through twelve numbers.

    Raises:
        ImportError: as of `digits_data`.
    """

    def model() -> nn.Module:
        inner = nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 12), nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 64)
        return nn.Sequential(nn.Flatten(), *inner, nn.Unflatten(1, (1, 8, 8)))

    whole = digits_data(None)
    images = (cast(TensorPairs, part).inputs for part in (whole.train, whole.evaluation))
    train, evaluation = (TensorPairs(inputs, inputs) for inputs in images)
    return squares("autoencoder", model, TaskData(train=train, evaluation=evaluation), momentum=0.9)


@functools.cache
def line() -> Material:
    """Return a linear regression without an error: its noise is about as large as it has inputs, throughout."""
    draws = torch.Generator().manual_seed(0)
    inputs, weights = torch.randn(8192, 8, generator=draws), torch.randn(8, 1, generator=draws)
    samples = TensorPairs(inputs, inputs @ weights)
    return squares("line", lambda: nn.Linear(8, 1), TaskData(train=samples, evaluation=samples), momentum=0.0)


def squares(name: str, model: Callable[[], nn.Module], data: TaskData, *, momentum: float) -> Material:
    """Return a task of a mean squared error with its data."""

    def loss(network: nn.Module, samples: Batch) -> Tensor:
        inputs, targets = inputs_and_targets(samples)
        return functional.mse_loss(network(inputs), targets)

    optimizer, batch = sgd(1.0, momentum=momentum), BATCHES[name]
    return Material(
        Task(name=name, model=model, data=lambda _: data, loss=loss, optimizer=optimizer, batch_size=batch), data
    )


JOBS = (
    Job(material=digits, epochs=7, target=0.11, looks=6, rates=(0.025, 0.05, 0.1)),
    Job(material=characters, epochs=2.25, target=2.45, looks=12, rates=(0.05, 0.1, 0.2)),
    Job(material=autoencoder, epochs=6, target=0.0175, looks=6, rates=(1.0, 2.0, 3.0)),
)
CONTROL = Job(material=line, epochs=8, target=0.01, looks=8, rates=(0.01,))


def contest(results: Outcome, *, quick: bool) -> None:
    """Train every job by every contender, print the table, and record seconds, dollars and goals."""
    seeds, ladder = (SEEDS[:2], LADDER[:2] + LADDER[-2:]) if quick else (SEEDS, LADDER)
    results.seeds = f"{seeds[0]} to {seeds[-1]}, learning rates tuned with {TUNED_WITH}"
    price = planner().catalog.price(TYPE, "on-demand")
    assert price is not None
    usd_per_s = MACHINES * price.usd_per_hour / 3600
    print(f"\n{MACHINES} x {TYPE}, steps as of {PRICED_AS}: means of {len(seeds)} seeds, and over the given batch")
    for job in JOBS:
        task, samples = job.material().task, len(job.material().data.train)
        tried = {rate: job.mean_s(GIVEN, [TUNED_WITH], rate) for rate in job.rates}
        rate = min(job.rates, key=tried.__getitem__)
        ours = job.ours(rate)
        scores = {each: job.mean_s(each, seeds, rate) for each in (GIVEN, *ladder, POLLUX, ours)}
        given_s, best = scores[GIVEN], min((GIVEN, *ladder), key=scores.__getitem__)
        adascale = Contender(name="adascale", times=best.times, policy="adascale")
        scores[adascale] = job.mean_s(adascale, seeds, rate)
        part = given_s / (job.epochs * samples / task.batch_size * Clock(task.batch_size).step_s(task.batch_size))
        print(f"{task.name}, batch {task.batch_size}, rate {rate:g}: loss {job.target:g} after {part:.0%} of its run")
        for each, seconds in scores.items():
            mark = ", best in hindsight" if each == best else ""
            print(f"  {each.name + mark:45}{seconds:8.2f} s{seconds * usd_per_s:10.5f} USD{seconds / given_s:8.2f}")
            kept = results.figures if each == ours else results.baselines
            kept |= {
                f"{task.name}_seconds_{each.name}": round(seconds, 3),
                f"{task.name}_usd_{each.name}": round(seconds * usd_per_s, 6),
            }
        results.figures[f"{task.name}_given_there_after_part"] = round(part, 3)
        results.goal(f"{task.name}_over_best_in_hindsight", scores[ours] / scores[best], at_most=1.05)
        results.goal(f"{task.name}_over_given", scores[ours] / given_s, at_most=1.02)
    ours = CONTROL.ours(*CONTROL.rates)
    runs = [CONTROL.run(ours, seed, *CONTROL.rates) for seed in seeds]
    over = statistics.fmean(run[0] for run in runs) / CONTROL.mean_s(GIVEN, seeds, *CONTROL.rates)
    results.goal("control_largest_batch", max(run[1] for run in runs), at_most=BATCHES["line"])
    print(f"control, whose noise is small: {over:.3f} of the given batch's time")
    results.goal("control_over_given", over, at_most=1.02)
