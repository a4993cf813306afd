"""A training run on paper whose exchange is steered for real: recorded jobs, networks with speeds of their own.

`SimulatedJob` is what a recorded profile says of a job: how long a step computes, what selecting and rounding take, and
which part of the gradient's energy Top-k keeps. `SimulatedNetwork` is what nobody tells the controller: the link over
the run, collectives that are slower beside training than they were timed, waits for cores that workers share.
`trained` drives `AdaptiveController` through them with the rows that workers would gather.

Progress is counted in steps of dense training, by the law that `hetopt.core.compression_slowdown` states, with a
coefficient (and a bend) that the controller is not told: a judge of its own. The loss is a power law of progress, which
twins and the guard against a rising loss see with noise.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hetopt.core.comm.cost import TRAINER, LinkSpeed, Operation
from hetopt.core.comm.options import Candidate, Candidates, CompressTime
from hetopt.core.compression_slowdown import distance
from hetopt.core.policy_settings import Settings
from hetopt.core.profile import Profile
from hetopt.core.run_spec import RatioPolicyName, RunSpec, StopRule, WorkerSpec
from hetopt.trainer.comm.network_tracker import Timed, measured
from hetopt.trainer.policies.ratio import paired_trial
from hetopt.trainer.policies.ratio.gain_curve import interpolated
from hetopt.trainer.steps.adaptive_controller import BACKWARD, AdaptiveController
from hetopt.trainer.steps.traffic import GroupTraffic, Traffic

PERIOD_STEPS, PERIOD_S = 20, 2.0
"""Of a control period, at most (`hetopt.trainer.milestones`)."""

NOISE = 0.04
"""Relative standard deviation of each part of a step around what it is."""

SETTLING = 0.1
"""How a residual moves gains: gain(c) = recorded(c) ^ ((c / c0) ^ SETTLING) with the residual of c0."""

LEARNED, FALLS = 20.0, 0.5
"""Of the loss after so much progress: (1 + progress / LEARNED) ^ -FALLS."""

LOSS_NOISE, APART = 0.03, 0.003
"""Relative standard deviation of the mean loss over a few steps, and of what twins' losses of the same samples differ
by for other reasons than that one learns less: 0.0005 to 0.005 on digits, Top-k of 30 and 10 %, from step 15 on."""

RISES, DIVERGED = 1.05, 2.0
"""What a step that holds something back multiplies the loss by where the learning rate is too high for that, and the
loss, times that of the first step, from which no run returns."""


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
        gains: exponents of the gains that were recorded, one after the other, each for as much progress.
        minds: factors on how much the job minds what is held back, likewise.
        disturbed: chance of each step that something else begins on the machines, steps that it lasts, and the factor
            that those take longer.
        is_unstable: for some time, which the seed says, the learning rate is too high for holding anything back.
        spikes: chance of each period that its loss is twice as high as the model's, for what its samples are.
        long: times as many steps as other runs.
    """

    name: str
    workers: int
    link: Callable[[float, random.Random], LinkSpeed]
    slower: tuple[tuple[str, float], ...] = ()
    wait_s: float = 0.0
    compress: float = 1.0
    gains: tuple[float, ...] = (1.0,)
    minds: tuple[float, ...] = (1.0,)
    disturbed: tuple[float, int, float] = (0.0, 0, 1.0)
    is_unstable: bool = False
    spikes: float = 0.0
    long: int = 1


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
    trials: int = 0
    used: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._machines = random.Random(self.seed)  # the same steps are disturbed whatever is sent
        self._disturbed = 0
        draw = random.Random(self.seed)
        begins = draw.uniform(0.1, 0.4)
        ends = begins + draw.uniform(0.2, 1.0)
        self._unstable = (begins * self.target, ends * self.target) if self.network.is_unstable else (0.0, 0.0)

    @property
    def part(self) -> float:
        """Of the way to the target that is done."""
        return min(1.0, max(0.0, self.progress / self.target))

    @property
    def link(self) -> LinkSpeed:
        """As it is now; what wanders does so in the same way whatever is sent."""
        return self.network.link(self.part, random.Random(self.seed))

    @property
    def loss(self) -> float:
        """Over that of the first step."""
        return _loss(self.progress)

    def gain(self, ratio: float) -> float:
        """Energy that is kept at a ratio now."""
        return float(self.job.gain(ratio, self.residual_of) ** _now(self.network.gains, self.part))

    def advanced(self, progress: float, gain: float, *, holds_back: bool) -> float:
        """Progress after a step from there."""
        if holds_back and self._unstable[0] <= self.step < self._unstable[1]:
            return _progress(RISES * _loss(progress))
        return progress + 1 / (1 + _now(self.network.minds, self.part) * (self.job.slowdown(gain) - 1))

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
        chance, steps, factor = self.network.disturbed
        self._disturbed = steps if self._machines.random() < chance else max(0, self._disturbed - 1)
        times = [self._around(one) * (factor if self._disturbed else 1.0) for one in self.parts_s(candidate)[:3]]
        self.elapsed_s += sum(times)
        if option.gain is None:
            rate = min(1.0, 3 * option.ratio)
            self.residual_of = math.exp((1 - rate) * math.log(self.residual_of) + rate * math.log(option.ratio))
            gain = self.gain(option.ratio)
        else:
            self.residual_of = 1.0
            gain = option.gain
        backlog = (1 - gain) * (1 + self.backlog)
        delivered, self.backlog = 1 + self.backlog - backlog, backlog
        self.progress = self.advanced(self.progress, gain, holds_back=option.gain is None) + delivered - 1
        self.step += 1
        return times[0], times[1], times[2], gain

    @property
    def has_diverged(self) -> bool:
        """Whether it will never reach the target."""
        return self.network.is_unstable and self.loss > DIVERGED

    @property
    def is_over(self) -> bool:
        """Whether the target is reached, or never will be."""
        return self.progress >= self.target or self.has_diverged

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

    def tried(self, ratio: float) -> paired_trial.Verdict:
        """What twins say, and what they took: what is held back at first shows in no loss, as measured on an LSTM."""
        trial, verdict = paired_trial.PairedTrial(ratio=ratio), None
        self.trials += 1
        draw = random.Random(f"{self.seed} {self.trials}")  # luck that does not depend on what went before
        whole = thin = self.progress
        gain = self.job.gain(ratio, ratio) ** _now(self.network.gains, self.part)
        noise = math.sqrt(paired_trial.PART / (paired_trial.CHUNK_STEPS * self.network.workers / 8))
        while verdict is None:
            losses = [0.0, 0.0]
            for _ in range(paired_trial.CHUNK_STEPS):
                losses = [losses[0] + _loss(whole), losses[1] + _loss(thin)]
                whole = self.advanced(whole, 1.0, holds_back=False)
                thin = self.advanced(thin, gain, holds_back=True)
            samples = math.exp(draw.gauss(0, LOSS_NOISE * noise)) / paired_trial.CHUNK_STEPS
            row = [samples * loss * math.exp(draw.gauss(0, APART * noise)) for loss in losses]
            verdict = trial.after([[*row, 1.0]])
        steps = len(trial.whole) * paired_trial.CHUNK_STEPS
        self.elapsed_s += 2 * steps * self.job.compute_s / paired_trial.PART
        return verdict

    def _around(self, value: float) -> float:
        return value * math.exp(self._random.gauss(0, self.noise)) if self.noise else value


def _now(phases: Sequence[float], part: float) -> float:
    return phases[min(len(phases) - 1, int(part * len(phases)))]


def _loss(progress: float) -> float:
    """Over that of the first step; beyond it where less than nothing was learned."""
    return float((1 + max(progress, -0.9 * LEARNED) / LEARNED) ** -FALLS)


def _progress(loss: float) -> float:
    """At which it is that high."""
    return float(LEARNED * (loss ** (-1 / FALLS) - 1))


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
        loss = run.loss * math.exp(run._random.gauss(0, LOSS_NOISE))
        if run.network.spikes and run._random.random() < run.network.spikes:
            loss *= 2
        steering.judge(traffic, step=run.step, epoch=run.step / 100, learning_rate=0.1, loss=loss)
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
            curve = [run.gain(ratio) for ratio in looks]
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
    return math.inf if run.has_diverged else run.elapsed_s
