"""A training run on paper whose exchange is steered for real: recorded jobs, networks with speeds of their own.

`SimulatedJob` is what a recorded profile says of a job: how long a step computes, what selecting and rounding take, and
which part of the gradient's energy Top-k keeps. `SimulatedNetwork` is what nobody tells the controller: the link over
the run, collectives that are slower beside training than they were timed, waits for cores that workers share.
`trained` drives `AdaptiveController` through them with the rows that workers would gather.

Progress is counted in steps of dense training, by the law that `hetopt.core.compression_slowdown` states, with a
coefficient (and a bend) that the controller is not told: a judge of its own.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hetopt.core.comm.cost import TRAINER, LinkSpeed, Operation
from hetopt.core.comm.options import Candidate, Candidates, CompressTime
from hetopt.core.compression_slowdown import MOST_LOST, distance
from hetopt.core.policy_settings import Settings
from hetopt.core.profile import Profile
from hetopt.core.run_spec import RatioPolicyName, RunSpec, StopRule, WorkerSpec
from hetopt.trainer.comm.network_tracker import Timed, measured
from hetopt.trainer.policies.ratio.gain_curve import interpolated
from hetopt.trainer.policies.ratio.paired_trial import PART, Verdict
from hetopt.trainer.steps.adaptive_controller import BACKWARD, AdaptiveController
from hetopt.trainer.steps.traffic import GroupTraffic, Traffic

PERIOD_STEPS, PERIOD_S = 20, 2.0
"""Of a control period, at most (`hetopt.trainer.milestones`)."""

NOISE = 0.04
"""Relative standard deviation of each part of a step around what it is."""

SETTLING = 0.1
"""How a residual moves gains: gain(c) = recorded(c) ^ ((c / c0) ^ SETTLING) with the residual of c0."""

TWIN_STEPS = 10
"""That a trial of twins takes, of each."""


@dataclass(frozen=True, kw_only=True)
class SimulatedJob:
    """What a recorded profile says of a job.

    Attributes:
        name: of the profile.
        numel: elements of the gradient.
        compute_s: of a step on each worker.
        gains: ratios, and the energy that Top-k keeps at each.
        select_s: to select and unpack so many elements: fixed, and for each element.
        buckets: that everything is sent in under backward.
        turning, bent: of the law of slowdown, as the job really is: 1 + turning * distance ^ bent.
    """

    name: str
    numel: int
    compute_s: float
    gains: tuple[tuple[float, float], ...]
    select_s: tuple[float, float]
    buckets: int
    turning: float
    bent: float = 1.0

    @classmethod
    def recorded(
        cls, profile: Profile, *, name: str, share: int, turning: float, bent: float = 1.0, buckets: int = 4
    ) -> SimulatedJob:
        """The job of a profile, with so many samples on each worker."""
        device = profile.devices[0]
        step = next(one for one in device.step_times if one.local_batch_size == share)
        selected = {one.ratio: one.compress_s + one.decompress_s for one in device.compressors if one.name == "topk"}
        numel = profile.job.parameters
        most, least = max(selected), min(selected)
        per_element_s = (selected[most] - selected[least]) / (numel * (most - least))
        gains = tuple(sorted((one.ratio, one.gain) for one in profile.gain if one.ratio < 1))
        return cls(
            name=name,
            numel=numel,
            compute_s=step.step_time_s,
            gains=gains,
            select_s=(selected[least], max(0.0, per_element_s)),
            buckets=buckets,
            turning=turning,
            bent=bent,
        )

    def gain(self, ratio: float, before: float) -> float:
        """Energy that is kept at a ratio, of a gradient with the residual of another ratio."""
        if ratio >= 1:
            return 1.0
        ratios, gains = zip(*self.gains, strict=True)
        return float(interpolated(ratios, gains, ratio) ** ((ratio / before) ** SETTLING))

    def slowdown(self, gain: float) -> float:
        """Steps at this gain over dense steps, as they really are."""
        return float(1 + self.turning * distance(max(1e-6, gain)) ** self.bent)


@dataclass(frozen=True, kw_only=True)
class SimulatedNetwork:
    """What the controller is not told.

    Attributes:
        name: for a table.
        workers: that exchange.
        link: by progress, in parts of the run.
        slower: factors on collectives beside training, by primitive.
        wait_s: that every exchange takes longer beside training.
        compress: factor on everything that a worker does itself.
    """

    name: str
    workers: int
    link: Callable[[float, random.Random], LinkSpeed]
    slower: tuple[tuple[str, float], ...] = ()
    wait_s: float = 0.0
    compress: float = 1.0


@dataclass(kw_only=True)
class SimulatedRun:
    """One run; what it took so far, and how far it is."""

    job: SimulatedJob
    network: SimulatedNetwork
    target: float
    seed: int = 0
    noise: float = NOISE
    step: int = 0
    elapsed_s: float = 0.0
    progress: float = 0.0
    residual_of: float = 1.0
    backlog: float = 0.0
    used: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @property
    def link(self) -> LinkSpeed:
        """As it is now; what wanders does so in the same way whatever is sent."""
        return self.network.link(min(1.0, self.progress / self.target), random.Random(self.seed))

    def parts_s(self, candidate: Candidate) -> tuple[float, float, float, float]:
        """Computing, own work, what of the exchange is waited for, and the whole of it."""
        option = candidate.option
        own_s = option.compress_s * self.network.compress
        link, slower = self.link, dict(self.network.slower)
        exchange_s = option.buckets * sum(
            link.time_s(one.terms(TRAINER)) * slower.get(one.primitive, 1.0) for one in option.operations
        )
        exchange_s += self.network.wait_s
        backward_s = BACKWARD * self.job.compute_s
        step_s = option.step_s(
            compute_s=self.job.compute_s, backward_s=backward_s, compress_s=own_s, exchange_s=exchange_s
        )
        exposed_s = step_s - self.job.compute_s
        if option.buckets > 1:
            own_s = 0.0  # in buckets all that shows is waited for
        return self.job.compute_s, own_s, max(0.0, exposed_s - own_s), exchange_s

    def take(self, candidate: Candidate) -> tuple[float, float, float, float]:
        """One step: computing, own work, waiting, and the gain."""
        option = candidate.option
        times = [self._around(one) for one in self.parts_s(candidate)[:3]]
        self.elapsed_s += sum(times)
        if option.gain is None:
            rate = min(1.0, 3 * option.ratio)
            self.residual_of = math.exp((1 - rate) * math.log(self.residual_of) + rate * math.log(option.ratio))
            gain = self.job.gain(option.ratio, self.residual_of)
        else:
            self.residual_of = 1.0
            gain = option.gain
        backlog = (1 - gain) * (1 + self.backlog)
        delivered, self.backlog = 1 + self.backlog - backlog, backlog
        self.progress += delivered - 1 + 1 / self.job.slowdown(gain)
        self.step += 1
        return times[0], times[1], times[2], gain

    @property
    def is_over(self) -> bool:
        """Whether the target is reached."""
        return self.progress >= self.target

    def timed(self, primitive: str, size: float) -> Timed:
        """A collective by itself."""
        operation = Operation(primitive=primitive, payload_bytes=size, members=self.network.workers)  # type: ignore[arg-type]
        return Timed(operation=operation, time_s=self._around(self.link.time_s(operation.terms(TRAINER))))

    def calibrated(self) -> tuple[Timed, ...]:
        """As before training."""
        largest = 4.0 * self.job.numel
        sizes = sorted({256.0, math.sqrt(256 * largest / 4), largest / 4, largest})
        return tuple(self.timed(one, size) for size in sizes for one in ("all_reduce", "all_gather", "broadcast"))

    def measured_again(self) -> tuple[Timed, ...]:
        """Sums of more and more bytes, until they are felt; training waits."""
        size, largest = 256.0, 4.0 * self.job.numel
        timings = [self.timed("all_reduce", size)]
        while timings[-1].time_s < max(0.01, 2 * timings[0].time_s) and size < largest:
            size = min(largest, 8 * size)
            timings.append(self.timed("all_reduce", size))
        self.elapsed_s += sum((one.time_s + 0.004) * (5 if one.time_s < 0.05 else 1) for one in timings)
        return tuple(timings)

    def tried(self, ratio: float) -> Verdict:
        """What twins say, and what they took."""
        self.elapsed_s += 2 * TWIN_STEPS * self.job.compute_s / PART
        harmless = self.job.slowdown(self.job.gain(ratio, ratio)) <= 1 + MOST_LOST
        return Verdict(ratio=ratio, says="harmless" if harmless else "harmful")

    def _around(self, value: float) -> float:
        return value * math.exp(self._random.gauss(0, self.noise)) if self.noise else value


def candidates_of(job: SimulatedJob, network: SimulatedNetwork) -> Candidates:
    """Everything that a run of this job may choose from, with what it is timed to take a worker."""
    run = spec_of(network)
    fixed_s, each_s = job.select_s
    bare = Candidates(
        asked=run.compression, chooses_collective=True, numel=job.numel, workers=network.workers, buckets=job.buckets
    )
    compress = {
        family: CompressTime(
            fixed_s=fixed_s * (1.2 if family[2] != "plain" else 1.0),
            per_element_s=each_s * (network.workers if family[1] == "all_gather" else 2),
        )
        for family in bare.families
    }
    rounded_s = {"bf16": 0.4 * fixed_s, "int8": 1.0 * fixed_s, "int4": 1.5 * fixed_s}
    return replace(bare, compress=compress, rounded_s=rounded_s, bf16_in_buckets=True)


def spec_of(network: SimulatedNetwork, policy: RatioPolicyName = "auto", settings: Settings | None = None) -> RunSpec:
    """A run to a target that leaves its exchange to a policy that weighs all there is."""
    workers = tuple(WorkerSpec(host=f"h{i}", type="t", local_batch_size=8) for i in range(network.workers))
    return RunSpec(
        task="digits",
        workers=workers,
        ratio_policy=policy,
        ratio_settings=settings or {},
        collective_policy="cheapest",
        stop=StopRule(max_steps=10**6, target=True),
    )


def trained(run: SimulatedRun, policy: RatioPolicyName = "auto", settings: Settings | None = None) -> SimulatedRun:
    """Drive the controller to the target."""
    candidates = candidates_of(run.job, run.network)
    spec = spec_of(run.network, policy, settings)
    steering = AdaptiveController(spec, candidates, measured(run.calibrated()), tries_twins=True)
    step_s = None
    while not run.is_over:
        if steering.try_ratio is not None:
            steering.heard(run.tried(steering.try_ratio))
        wished = 1 if step_s is None else max(1, min(PERIOD_STEPS, int(PERIOD_S / step_s)))
        traffic, step_s = _period(run, steering, steering.period_steps(wished))
        if steering.watch(traffic):
            steering.measured(run.measured_again())
        steering.judge(traffic, step=run.step, epoch=run.step / 100, learning_rate=0.1)
    return run


def _period(run: SimulatedRun, steering: AdaptiveController, steps: int) -> tuple[GroupTraffic, float]:
    """A control period; the first step of a way is slower than those that follow, and the row leaves before the last
    step."""
    candidate, looks = steering.candidate, steering.looks
    is_new = not run.used or run.used[-1][1] != candidate.option.key
    rows: list[tuple[float, float, float, float]] = []
    late = 0
    alarm_s = steering.alarm_s
    curve: Sequence[float] = ()
    told = steps if steps == 1 else steps - 1
    for place in range(steps):
        is_look = bool(steering.look_at) and place == told - 1
        row = run.take(candidate)
        if is_new and place == 0:
            run.elapsed_s += 0.3 * row[0]
            row = (1.3 * row[0], *row[1:])
        if is_look:
            curve = [run.job.gain(ratio, run.residual_of) for ratio in looks]
            run.elapsed_s += run.job.select_s[0]
        if place < told and not (is_look and candidate.in_buckets):
            rows.append(row)
        late = late + 1 if alarm_s is not None and row[2] > alarm_s else 0
        if late >= 2 and place < steps - 2:
            rows = rows[-2:]
            break
        if run.is_over:
            break
    run.used.append((run.step, candidate.option.key))
    if not rows:
        quiet = Traffic(look_energy=1.0 if curve else 0.0, look_energies=tuple(curve) or (0.0,) * len(looks))
        return GroupTraffic(rows=(quiet,) * run.network.workers), sum(row[:3])
    compute_s, own_s, wait_s = (statistics.median(row[k] for row in rows) for k in range(3))
    gain = statistics.fmean(row[3] for row in rows) * math.exp(run._random.gauss(0, run.noise / 4))
    one = Traffic(
        exchanges=len(rows),
        step_s=statistics.median(sum(row[:3]) for row in rows),
        compute_s=compute_s,
        compress_s=own_s,
        sync_s=wait_s,
        sent_bytes=candidate.sent_bytes,
        energy=1.0,
        kept_energy=1.0 if candidate.option.gain == 1 else min(1.0, gain),
        gradient_energy=1.0,
        look_energy=1.0 if curve else 0.0,
        look_energies=tuple(curve) or (0.0,) * len(looks),
    )
    return GroupTraffic(rows=(one,) * run.network.workers), one.step_s


def fixed_s(run: SimulatedRun, candidate: Candidate, *, patience: float = math.inf) -> float:
    """Seconds to the target with one way throughout; infinite where that takes longer than ``patience``."""
    while not run.is_over:
        run.take(candidate)
        if run.elapsed_s > patience:
            return math.inf
    return run.elapsed_s
