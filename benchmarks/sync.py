"""Workers that average parameters now and then, against a sum of gradients in every step: time to the same quality.

Training is done for each policy, on unlimited links and as fast as the machine goes: what a step learns does not depend
on how long it takes. Early accuracies differ by two points from seed to seed, so those of several seeds are averaged,
the same seeds for each policy. Then, for each rate of the links, a step that synchronises and one that does not are
timed, and the times are put together. The last part gives every worker a single label, with samples handed on and
without. The full form trains all models; ``--only`` asks for one of them, or for the labels.

Policies that average take more steps to the same quality; in the published table they took them. hetopt's own has
half as many more, in which its learning rate falls as late; the others have as many as BSP.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks._composed import final, mean_curve, reached_s
from benchmarks._contenders import DIGITS, MODELS, WORKERS, Contender, Model, Runs, hosts
from benchmarks._outcome import Results, parser, publish, run_benchmark
from benchmarks._quality import data_folder
from benchmarks._rehearsal import Log, Side, need_namespaces, rehearse, step_time_s
from benchmarks._skewed_labels import show_skew, skew
from hetopt.core.run_spec import Compression, StopRule
from hetopt.core.synchronization import Partition, Synchronization

RATES, QUICK_RATES = (0.1, 1.0, 5.0, 20.0), (5.0, 20.0)
"""Time of a dense exchange over that of a step's computation. Where they are equal BSP hides most of it under backward:
nobody can be twice as fast. Published speed-ups are from 5 Gbps for models of 20 to 100 million parameters on V100s,
where an exchange takes several times as long as computing."""

LEAST = {5.0: 1.67, 20.0: 6.0}
"""Speed-up that is to be reached."""

HEADROOM = 1.3
"""Declared over measured computation, so that four workers do not wait for two cores."""

RING = 2 * (WORKERS - 1) / WORKERS
"""Bytes that each link carries for a byte of a dense exchange."""

ALLOWED = 0.5
"""Points that a policy may stay below BSP."""

WINDOW = 10
"""First steps that all synchronise where delta is fixed; 25 are published, for runs of ten thousand steps and more."""

BSP, BSP_IN_8_BITS, OWN, LATE = "bsp", "bsp, int8", "selsync(auto), int8", "ssp(3)"
Policy = tuple[Synchronization, Compression]
WHOLE, ROUNDED = Compression(), Compression(name="int8")
POLICIES: Mapping[str, Policy] = {
    BSP: (Synchronization(), WHOLE),
    BSP_IN_8_BITS: (Synchronization(), ROUNDED),
    OWN: (Synchronization(name="selsync", delta="auto", synchronised_share=0.2, stretch=1.5), ROUNDED),
    "selsync(auto)": (Synchronization(name="selsync", delta="auto"), WHOLE),
    "selsync(0.3)": (Synchronization(name="selsync", delta=0.3, window=WINDOW), WHOLE),
    "local-sgd(8)": (Synchronization(name="local-sgd", every_steps=8), WHOLE),
    "diloco(8)": (Synchronization(name="local-sgd", every_steps=8, outer_rate=0.7, outer_momentum=0.9), WHOLE),
    "fedavg(1,0.25)": (Synchronization(name="fedavg", participants=1.0, every_epochs=0.25), WHOLE),
    "fedavg(0.5,0.125)": (Synchronization(name="fedavg", participants=0.5, every_epochs=0.125), WHOLE),
    LATE: (Synchronization(name="ssp", staleness=3), WHOLE),
}
QUICK = (BSP, BSP_IN_8_BITS, OWN, "local-sgd(8)")
COMPARED = (BSP, BSP_IN_8_BITS, OWN)
SEEDS = 3
"""Of these; the others are trained once."""

LOCAL, SYNCHRONISED, IN_8_BITS = "a local step", "a step that synchronises", "the same in 8 bits"
TIMED: Mapping[str, Policy] = {
    BSP: (Synchronization(), WHOLE),
    BSP_IN_8_BITS: (Synchronization(), ROUNDED),
    LOCAL: (Synchronization(name="selsync", delta="never"), WHOLE),
    SYNCHRONISED: (Synchronization(name="selsync", delta=0.0), WHOLE),
    IN_8_BITS: (Synchronization(name="selsync", delta=0.0), ROUNDED),
    LATE: (Synchronization(name="ssp", staleness=3), WHOLE),
}
STEPS_TIMED, SMOKE_STEPS = 12, 6

STAND_IN, SKEW = "digits", "skew"


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What a run learned, whatever time that took.

    Attributes:
        stretches: how many steps in a row there were of each kind.
        evaluations: steps done, and the quality then; larger is better.
        sent_bytes: by one worker.
    """

    stretches: tuple[Mapping[str, int], ...]
    evaluations: tuple[tuple[int, float], ...]
    sent_bytes: float

    @property
    def steps(self) -> int:
        """Of the run."""
        return sum(sum(kinds.values()) for kinds in self.stretches)

    @property
    def synchronised(self) -> float:
        """Part of the steps that synchronised."""
        return 1 - sum(kinds.get(LOCAL, 0) for kinds in self.stretches) / self.steps

    def over(self, step_time_s: Mapping[str, float]) -> list[tuple[float, float]]:
        """Seconds until each evaluation, and the quality then, where a step of each kind takes so long."""
        found, done, done_s, left = [], 0, 0.0, list(self.evaluations)
        for kinds in self.stretches:
            steps = sum(kinds.values())
            mean_s = sum(step_time_s[kind] * count for kind, count in kinds.items()) / steps
            while left and left[0][0] <= done + steps:
                step, quality = left.pop(0)
                found.append((done_s + (step - done) * mean_s, quality))
            done, done_s = done + steps, done_s + steps * mean_s
        return found


@dataclass(kw_only=True)
class Comparison:
    """Of one model.

    Attributes:
        runs: of what, with the declared time of a step.
        learned: by policy, a run for each seed.
        dense_bytes: of a step's whole gradient.
        times: of steps, by rate and kind.
    """

    runs: Runs
    learned: dict[str, list[Learned]]
    dense_bytes: float
    times: dict[float, dict[str, float]] = field(default_factory=dict)

    def measured(self, policy: str, rate: float) -> list[tuple[float, float]]:
        """Quality over seconds, in the mean of the seeds: they are evaluated after the same steps."""
        return mean_curve([run.over(self.times[rate]) for run in self.learned[policy]])

    def ends_with(self, policy: str) -> float:
        """Quality at the end, in the mean of the seeds; larger is better."""
        runs = [[(float(step), quality) for step, quality in run.evaluations] for run in self.learned[policy]]
        return final(mean_curve(runs))

    def spread(self, policy: str) -> tuple[float, float]:
        """Of the seeds' qualities at the end, the worst and the best."""
        ends = [final([(float(step), quality) for step, quality in run.evaluations]) for run in self.learned[policy]]
        return min(ends), max(ends)

    def synchronised(self, policy: str) -> float:
        """Part of the steps that synchronised."""
        return statistics.fmean(run.synchronised for run in self.learned[policy])

    def sent(self, policy: str) -> float:
        """Bytes that a worker sent over those of BSP's dense gradients."""
        steps = statistics.fmean(run.steps for run in self.learned[BSP])
        return statistics.fmean(run.sent_bytes / (steps * self.dense_bytes) for run in self.learned[policy])

    @property
    def target(self) -> float:
        """A little less than BSP ends with."""
        return self.ends_with(BSP) - ALLOWED * self.runs.model.job.points

    def speed_up(self, policy: str, rate: float) -> float | None:
        """Over BSP, to the target; None: never."""
        own, bsp = (reached_s(self.measured(name, rate), self.target) for name in (policy, BSP))
        return None if own is None or bsp is None else bsp / own


def compare(model: Model, *, quick: bool, smoke: bool) -> Comparison:
    """Train, time steps, and put both together.

    Raises:
        RunFailed: a run failed.
    """
    runs = Runs(model=model, quick=quick)
    names = QUICK if quick else tuple(POLICIES)
    names = (BSP, OWN) if smoke else names
    note(f"training {len(names)} policies on unlimited links")
    epochs = 0.25 if smoke else runs.epochs
    seeds = {name: range(SEEDS if name in COMPARED and not smoke else 1) for name in names}
    kinds = {name: policy for name, policy in TIMED.items() if name != LATE or LATE in names}
    sides = [side(runs, name, POLICIES[name], epochs=epochs, seed=seed) for name in names for seed in seeds[name]]
    # One crew is enough to see that it still runs, and its links are as good as any.
    beside = [side(runs, name, policy, steps=SMOKE_STEPS) for name, policy in kinds.items()] if smoke else []
    told = rehearse(hosts(None), [*sides, *beside], rounds=1)
    logs = {name: [told[_run_name(name, seed)][0] for seed in seeds[name]] for name in names}
    computed_s = HEADROOM * computation_s(logs[BSP][0])
    found = Comparison(
        runs=Runs(model=model, quick=quick, step_s=computed_s),
        learned={name: [learned(log, model, POLICIES[name]) for log in logs[name]] for name in names},
        dense_bytes=next(event["exchange"]["dense_bytes"] for event in logs[BSP][0] if "exchange" in event),
    )
    if smoke:
        found.times[0.0] = {name: step_time_s(told[name][0], from_step=3) for name in kinds}
        return found
    for rate in QUICK_RATES if quick else RATES:
        note(f"timing steps at {rate:g}x")
        bits_per_s = 8 * RING * found.dense_bytes / (rate * computed_s)
        sides = [side(found.runs, name, policy, steps=STEPS_TIMED) for name, policy in kinds.items()]
        timed = rehearse(hosts(bits_per_s), sides, rounds=1)
        found.times[rate] = {name: step_time_s(timed[name][0], from_step=3) for name in kinds}
    return found


def _run_name(policy: str, seed: int) -> str:
    return f"{policy}-{seed}"


def side(
    runs: Runs,
    name: str,
    policy: Policy,
    *,
    epochs: float | None = None,
    seed: int = 0,
    steps: int | None = None,
) -> Side:
    """A whole run of a policy with a seed, or so many steps to be timed."""
    sync, compression = policy
    spec = runs.spec(Contender(compression=compression), steps=steps)
    changes: dict[str, object] = {"sync": sync, "partition": Partition(name="seldp" if sync.is_local else "global")}
    if epochs is not None:
        name = _run_name(name, seed)
        changes["seed"] = seed
        changes["stop"] = StopRule(max_epochs=epochs * sync.stretch)
        changes["evaluate_every_epochs"] = min(spec.evaluate_every_epochs, epochs)
    return Side(name=name, by="hetopt", spec=spec.model_copy(update=changes))


def learned(log: Log, model: Model, policy: Policy) -> Learned:
    """What a run's log says of it."""
    together, summed = (IN_8_BITS, BSP_IN_8_BITS) if policy[1] == ROUNDED else (SYNCHRONISED, BSP)
    sign = 1 if model.job.higher_is_better else -1
    stretches: list[Mapping[str, int]] = []
    evaluations, sent = [], 0.0
    for event in log:
        if event["event"] == "step":
            told = event.get("sync")
            steps = int(event["steps"])
            if told is None or told["policy"] == "ssp":
                stretches.append({summed if told is None else LATE: steps})
            else:
                stretches.append({together: int(told["synchronised"]), LOCAL: int(told["local"])})
            sent += told["sent_bytes"] if told else event["steps"] * event.get("exchange", {}).get("sent_bytes", 0.0)
        elif event["event"] == "evaluated":
            evaluations.append((int(event["step"]), sign * float(event["metrics"][model.job.metric])))
    return Learned(stretches=tuple(stretches), evaluations=tuple(evaluations), sent_bytes=sent)


def computation_s(log: Log) -> float:
    """What a step's computation takes the slowest worker."""
    return float(statistics.median(max(event["compute_s"]) for event in log if event["event"] == "step"))


def show(model: str, found: Comparison) -> None:
    """The table for people."""
    job = found.runs.model.job
    sign = 1 if job.higher_is_better else -1
    print(f"\n{model}: time to {job.metric} {sign * found.target:.4g}, {ALLOWED:g} below BSP's; speed-up over BSP")
    print(f"columns: dense exchange over computation of a step, which takes {found.runs.step_s:.3f} s")
    columns = "".join(f"{f'{rate:g}x':>10}" for rate in found.times)
    print(f"{'':>20}{columns}{job.metric:>12}{'of seeds':>20}{'synchronised':>14}{'bytes':>9}")
    for name in found.learned:
        cells = "".join(f"{told(found.speed_up(name, rate)):>10}" for rate in found.times)
        seeds = " to ".join(f"{sign * end:.4g}" for end in found.spread(name))
        print(
            f"{name:>20}{cells}{sign * found.ends_with(name):>12.4g}{seeds:>20}"
            f"{found.synchronised(name):>14.1%}{found.sent(name):>9.2%}"
        )


def told(speed_up: float | None) -> str:
    """One cell of it."""
    return "never" if speed_up is None else f"{speed_up:.2f}"


def record(model: str, found: Comparison, results: Results) -> None:
    """Figures and goals of a model."""
    job = found.runs.model.job
    for name in found.learned:
        place = results.figures if name == OWN else results.baselines
        label = key(name)
        place[f"{model}_final_{job.metric}_{label}"] = round(abs(found.ends_with(name)), 4)
        place[f"{model}_synchronised_share_{label}"] = round(found.synchronised(name), 4)
        place[f"{model}_sent_over_dense_{label}"] = round(found.sent(name), 5)
        for rate in found.times:
            speed_up = found.speed_up(name, rate)
            if speed_up is not None and name not in (BSP, OWN):
                place[f"{model}_speed_up_{label}_at_{key(f'{rate:g}')}x"] = round(speed_up, 3)
    for rate in found.times:
        name, speed_up = f"{model}_speed_up_at_{key(f'{rate:g}')}x", found.speed_up(OWN, rate) or 0.0
        if rate in LEAST:
            results.goal(name, speed_up, at_least=LEAST[rate])
        else:
            results.figures[name] = round(speed_up, 3)
    below = (found.ends_with(BSP) - found.ends_with(OWN)) / job.points
    results.goal(f"{model}_final_points_below_bsp", below, at_most=ALLOWED)


def key(name: str) -> str:
    """A name as a part of a figure's."""
    return "".join(letter if letter.isalnum() else "_" for letter in name.lower()).strip("_")


def note(text: str) -> None:
    """Progress."""
    print(f"sync: {text}", file=sys.stderr, flush=True)


def chosen(name: str, *, quick: bool) -> str:
    """The model, or what stands for it where its data is not here."""
    if name == STAND_IN or data_folder(MODELS[name].job) is not None:
        return name
    where = f"the data of {name} is not here (HETOPT_SHARED_DATA says where it is)"
    if not quick:
        sys.exit(f"sync measures nothing: {where}")
    print(f"{where}: the bundled digits stand for it")
    return STAND_IN


def main() -> None:
    """Measure and publish."""
    shared = parser(__doc__)
    shared.add_argument("--only", choices=[*MODELS, STAND_IN, SKEW], help="measure this part alone")
    asked = shared.parse_args()
    need_namespaces(or_skip=asked.smoke)
    results, quick = Results(), asked.quick or asked.smoke
    for name in parts(asked.only, quick=quick, smoke=asked.smoke):
        if name == SKEW:
            show_skew(skew(smoke=asked.smoke), results)
        else:
            model = chosen(name, quick=quick)
            found = compare(MODELS.get(model, DIGITS), quick=quick, smoke=asked.smoke)
            show(model, found)
            record(model, found, results)
    publish(results.outcome("sync", quick=quick), asked.json, part=asked.only)


def parts(only: str | None, *, quick: bool, smoke: bool) -> tuple[str, ...]:
    """What is measured, in turn: models, and labels that are not mixed."""
    if smoke:
        return (only or STAND_IN,)
    if only is not None:
        return (only,)
    return ("resnet", SKEW) if quick else (*MODELS, SKEW)


if __name__ == "__main__":
    run_benchmark(main)
