"""A run on paper: a network with its own speeds, gradients with a gain at every ratio, and progress that depends on it.

Progress is counted in steps of dense training. A ratio's gain is not there at once: the residual of the ratio before
drains or builds up first, over about 1 / ratio steps. What is held back is no progress until it is sent.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetopt.core.comm.cost import LinkSpeed, Operation, trainer_algorithm
from hetopt.core.comm.options import make_option
from hetopt.core.run_spec import Compression
from hetopt.core.training_laws import MOST_LOST, distance
from hetopt.trainer.comm.channel import Message
from hetopt.trainer.comm.network import Network
from hetopt.trainer.policies.ratio.auto import PART
from hetopt.trainer.policies.ratio.policy import GainCurve, RatioObservation, Verdict

PRIMITIVES = ("all_reduce", "all_gather", "broadcast")
RATIOS = (0.001, 0.0033, 0.01, 0.033, 0.1)


def options(numel, workers, ratios=RATIOS, compress_ns=2.0):
    """Dense, and Top-k both ways, with what compressing takes to first order."""
    found = [make_option(Compression(), numel=numel, workers=workers, compress_s=0.0)]
    for ratio in ratios:
        for collective, unpack in (("all_gather", workers), ("ar_topk_star", 1)):
            compress_s = 1e-9 * numel * (compress_ns + 4 * ratio * unpack)
            way = Compression(name="topk", ratio=ratio, collective=collective)
            found.append(make_option(way, numel=numel, workers=workers, compress_s=compress_s))
    return tuple(found)


@dataclass
class VirtualRun:
    """``links[k]`` holds from the step ``starts[k]`` on; ``slower`` are factors by primitive that nobody was told of.

    ``kept`` is the exponent of ``gain = ratio ** kept`` without a residual, ``settling`` what the residual adds to it.
    A gradient turns by ``turning`` over a distance of one step. A local step makes ``local`` of a dense one's progress.
    """

    workers: int
    links: Sequence[LinkSpeed]
    compute_s: float
    starts: Sequence[int] = (0,)
    kept: float = 0.1
    settling: float = 0.05
    turning: float = 0.3
    local: float = 1.0
    noise: float = 0.0
    seed: int = 0
    primitives: Mapping[str, float] = field(default_factory=dict)
    slower: Mapping[str, float] = field(default_factory=dict)
    compress: Mapping[str, float] = field(default_factory=dict)
    last_step: int | None = None

    def __post_init__(self):
        self.random = random.Random(self.seed)
        self.step = 0
        self.elapsed_s = 0.0
        self.progress = 0.0
        self.residual_of = 1.0
        self.backlog = 0.0

    @property
    def link(self):
        return self.links[max(k for k, start in enumerate(self.starts) if start <= self.step)]

    def operation_s(self, operation, hidden=True):
        factor = self.primitives.get(operation.primitive, 1.0)
        if hidden:
            factor *= self.slower.get(operation.primitive, 1.0)
        return self.link.time_s(operation.terms(trainer_algorithm)) * factor

    def exchange_s(self, option):
        return option.buckets * sum(self.operation_s(operation) for operation in option.operations)

    def compress_s(self, option):
        return option.compress_s * self.compress.get(option.compression.name, 1.0)

    def step_s(self, option):
        return option.step_s(
            compute_s=self.compute_s,
            backward_s=0.0,
            compress_s=self.compress_s(option),
            exchange_s=self.exchange_s(option),
        )

    def gain(self, ratio, residual_of):
        return ratio ** (self.kept * (1 / residual_of) ** self.settling)

    def settled(self, option):
        return option.gain if option.gain is not None else self.gain(option.ratio, option.ratio)

    def per_progress_s(self, option):
        """Seconds of a step's worth of dense progress once everything has settled."""
        if option.averages:
            return self.step_s(option) / self.local
        return self.step_s(option) * self.slowdown(self.settled(option))

    def slowdown(self, gain):
        """Steps at this gain over dense steps."""
        return 1 + self.turning * distance(gain)

    def around(self, value, noise=None):
        noise = self.noise if noise is None else noise
        return value * math.exp(self.random.gauss(0, noise)) if noise else value

    def fresh(self):
        """The network as timed between the workers before training."""
        sizes = (4096, 65536, 1 << 20)
        return Network.of([self.timed(primitive, size) for primitive in PRIMITIVES for size in sizes], self.workers)

    def timed(self, primitive, size):
        operation = Operation(primitive=primitive, payload_bytes=size, members=self.workers)
        return Message(primitive=primitive, payload_bytes=size, time_s=self.around(self.operation_s(operation, False)))

    def take(self, option):
        """One step; its compute, compress and exchange time, and its gain."""
        if option.averages:
            gain = self.local
        elif option.gain is None:
            rate = min(1.0, option.ratio * 3)
            self.residual_of = math.exp((1 - rate) * math.log(self.residual_of) + rate * math.log(option.ratio))
        else:
            self.residual_of = 1.0
        if not option.averages:
            gain = option.gain if option.gain is not None else self.gain(option.ratio, self.residual_of)
        times = (
            self.around(self.compute_s),
            self.around(self.compress_s(option)) / option.every_steps,
            self.around(self.exchange_s(option)) / option.every_steps,
        )
        self.elapsed_s += sum(times)
        backlog = 0.0 if option.averages else (1 - gain) * (1 + self.backlog)
        self.progress += self.backlog - backlog + (gain if option.averages else 1 / self.slowdown(gain))
        self.backlog = backlog
        self.step += 1
        return (*times, gain)

    def tried(self, ratio):
        """What twins show: whether this ratio costs more steps than may be lost."""
        self.elapsed_s += 2 * 10 * self.compute_s / PART
        harmless = self.slowdown(self.gain(ratio, ratio)) <= 1 + MOST_LOST
        return Verdict(ratio=ratio, says="harmless" if harmless else "harmful")

    def period(self, option, decision, network, steps, *, progress=math.inf, until_step=math.inf):
        """What a control period was observed like."""
        steps = decision.look_after_steps or steps
        verdict = None if decision.try_ratio is None else self.tried(decision.try_ratio)
        rows = []
        while len(rows) < steps and self.progress < progress and self.step < until_step:
            rows.append(self.take(option))
        medians = [sorted(column)[(len(column) - 1) // 2] for column in zip(*rows, strict=True)]
        curve = None
        if decision.measure_gain:
            kept = [self.gain(ratio, self.residual_of) for ratio in RATIOS]
            energies = [1.0 + 0.1 * rank for rank in range(self.workers)]
            curve = GainCurve(
                ratios=RATIOS, kept=tuple(tuple(e * g for g in kept) for e in energies), energy=tuple(energies)
            )
        gain = min(1.0, self.around(sum(row[3] for row in rows) / len(rows), self.noise / 2))
        return RatioObservation(
            step=self.step,
            steps=len(rows),
            epoch=self.step / 100,
            ratio=option.ratio,
            compute_s=medians[0],
            step_s=sum(medians[:3]),
            kept_energy=(gain,) * self.workers,
            energy=(1.0,) * self.workers,
            gradient_norm=1.0,
            gain_curve=curve,
            network=network,
            option=option.key,
            steps_left=None if self.last_step is None else max(1, self.last_step - self.step),
            verdict=verdict,
        )


def run(policy, virtual, *, progress=math.inf, until_step=math.inf, steps=20):
    """Run ``policy`` to so much progress, or to a step; the options it used, period by period, and its last state."""
    by_key = {option.key: option for option in policy.options}
    network = virtual.fresh()
    state, decision = policy.initial(), policy.first(network)
    used = []
    while virtual.progress < progress and virtual.step < until_step:
        option = by_key[decision.option]
        observation = virtual.period(option, decision, network, steps, progress=progress, until_step=until_step)
        used.append((virtual.step, option.key))
        state, decision = policy.decide(state, observation)
    return used, state


def fixed_s(virtual, option, *, progress):
    """Seconds that a run with one option alone takes on the network of the first step, settling included."""
    twin = alone(virtual)
    while twin.progress < progress:
        twin.take(option)
    return twin.elapsed_s


def alone(virtual):
    """The same run without noise, from the start, on the network of the first step."""
    return VirtualRun(
        workers=virtual.workers,
        links=virtual.links[:1],
        compute_s=virtual.compute_s,
        kept=virtual.kept,
        settling=virtual.settling,
        turning=virtual.turning,
        primitives=virtual.primitives,
        slower=virtual.slower,
        compress=virtual.compress,
        local=virtual.local,
    )
