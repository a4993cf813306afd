"""Workers that average parameters now and then, against a sum of gradients in every step: time to the same quality.

Real processes train; what their steps take over links of any rate is added up from the bytes that were sent
(`benchmarks._priced_steps`). The target is what BSP ends with, less half a point or as much as its seeds differ,
whichever is more. Speed-ups are pairs of runs with the same seed: the median, and the lowest and highest of them. The
models are siblings of published ones (`benchmarks._siblings`): ResNet-20 at 16 pixels, VGG-11 at a quarter of its
width, a ConvNet, and an LSTM on characters. The last part gives every worker a single label, with samples handed on
and without; and BSP is trained at other learning rates. ``--only`` asks for one part; any of them takes less than half
an hour on two cores, the learning rates an hour.

Policies that average take more steps to the same quality; in the published table they took them. hetopt's own, and
local SGD as its rival, have half as many more, in which the learning rate falls as late, and averages in 8 bits; the
others have as many as BSP.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks._contenders import DIGITS, MODELS, WORKERS, Contender, Model, Runs, hosts
from benchmarks._outcome import Results, options, publish, run_benchmark
from benchmarks._paired_runs import ALLOWED, PairedRuns, end, note_pairs
from benchmarks._priced_steps import PricedRun, PricedStep, evaluations_of, priced
from benchmarks._quality import data_folder
from benchmarks._rehearsal import Log, Side, need_namespaces, rehearse
from benchmarks._skewed_labels import show_skew, skew
from hetopt.core.run_spec import Compression, StopRule
from hetopt.core.synchronization import Partition, Synchronization

TASKS = ("convnet", "resnet", "vgg", "characters")
RATES = (0.1, 1.0, 5.0, 20.0)
"""Time of a dense sum over that of a step's computation. Where they are equal BSP hides most of it under backward:
nobody can be twice as fast. Published speed-ups are from 5 Gbps for models of 20 to 100 million parameters on V100s,
where an exchange takes several times as long as computing."""

LEAST = {5.0: 1.67, 20.0: 6.0}
"""Speed-up over BSP in 32 bits that is to be reached."""

WINDOW = 10
"""First steps that all synchronise where delta is fixed; 25 are published, for runs of ten thousand steps and more."""

BSP, BSP_IN_8_BITS, OWN, LATE = "bsp", "bsp, int8", "selsync(auto), int8", "ssp(3)"
RIVAL = "local-sgd(8), int8"
Policy = tuple[Synchronization, Compression]
WHOLE, ROUNDED = Compression(), Compression(name="int8")
POLICIES: Mapping[str, Policy] = {
    BSP: (Synchronization(), WHOLE),
    BSP_IN_8_BITS: (Synchronization(), ROUNDED),
    OWN: (Synchronization(name="selsync", delta="auto", synchronised_share=0.2, stretch=1.5), ROUNDED),
    "selsync(auto)": (Synchronization(name="selsync", delta="auto"), WHOLE),
    "selsync(0.3)": (Synchronization(name="selsync", delta=0.3, window=WINDOW), WHOLE),
    RIVAL: (Synchronization(name="local-sgd", every_steps=8, stretch=1.5), ROUNDED),
    "local-sgd(8)": (Synchronization(name="local-sgd", every_steps=8), WHOLE),
    "diloco(8)": (Synchronization(name="local-sgd", every_steps=8, outer_rate=0.7, outer_momentum=0.9), WHOLE),
    "fedavg(1,0.25)": (Synchronization(name="fedavg", participants=1.0, every_epochs=0.25), WHOLE),
    "fedavg(0.5,0.125)": (Synchronization(name="fedavg", participants=0.5, every_epochs=0.125), WHOLE),
    LATE: (Synchronization(name="ssp", staleness=3), WHOLE),
}
QUICK = (BSP, BSP_IN_8_BITS, OWN, RIVAL, "local-sgd(8)")
SEEDS = 3

STAND_IN, SKEW, LEARNING_RATES = "digits", "skew", "learning-rates"

FACTORS = (0.5, 1.0, 2.0)
"""Of the learning rate that a model's runs have: the base is to be as well tuned as its rivals."""


@dataclass(frozen=True, kw_only=True)
class Synchronised(PricedRun):
    """A run whose workers average; ``share`` is the part of the steps that did."""

    share: float


def compare(model: Model, *, quick: bool, smoke: bool) -> PairedRuns:
    """Train all of them.

    Raises:
        RunFailed: a run failed.
    """
    runs = Runs(model=model, quick=quick)
    names = (BSP, OWN) if smoke else QUICK if quick else tuple(POLICIES)
    note(f"training {len(names)} policies on unlimited links")
    epochs = 0.25 if smoke else runs.epochs
    seeds = range(1 if smoke else SEEDS)
    sides = [side(runs, name, POLICIES[name], epochs=epochs, seed=seed) for name in names for seed in seeds]
    logs = rehearse(hosts(None), sides, rounds=1)
    told = {name: [logs[_run_name(name, seed)][0] for seed in seeds] for name in names}
    summed = {name: [priced(log, model.job, WORKERS) for log in told[name]] for name in names}
    dense = next(event["exchange"] for event in told[BSP][0] if "exchange" in event)["dense_bytes"]
    steps = statistics.fmean(sum(each.steps for each in run.stretches) for run in summed[BSP])
    rounding = [run.stretches[0].own for run in summed.get(BSP_IN_8_BITS, [])]
    own = statistics.median(rounding) if rounding else 0.0
    found = PairedRuns(model=model, base=BSP)
    for name in names:
        is_rounded = POLICIES[name][1] == ROUNDED
        found.runs[name] = [
            synchronised(log, run, model, dense_bytes=dense, bsp_steps=steps, own=own if is_rounded else 0.0)
            for log, run in zip(told[name], summed[name], strict=True)
        ]
    return found


def synchronised(
    log: Log, run: PricedRun, model: Model, *, dense_bytes: float, bsp_steps: float, own: float
) -> Synchronised:
    """What a run's log says of it.

    Args:
        log: of the run.
        run: what it is where gradients are summed in every step.
        model: that was trained.
        dense_bytes: of a whole gradient.
        bsp_steps: of a run of BSP.
        own: what rounding takes a worker, over the computation of a step; averages are rounded as gradients are.
    """
    stretches, together, sent = [], 0, 0.0
    for event in log:
        told = event.get("sync")
        if event["event"] == "step" and told is not None:
            steps = int(event["steps"])
            met = steps if told["policy"] == "ssp" else int(told["synchronised"])
            traffic = told["sent_bytes"] / steps / dense_bytes
            hidden = told["policy"] == "ssp"  # updates travel while workers go on
            stretches.append(PricedStep(steps=steps, traffic=traffic, own=own * met / steps, hidden=hidden))
            together, sent = together + met, sent + told["sent_bytes"]
    if not stretches:
        steps = sum(each.steps for each in run.stretches)
        share = run.sent_share * steps / bsp_steps
        return Synchronised(stretches=run.stretches, evaluations=run.evaluations, sent_share=share, share=1.0)
    return Synchronised(
        stretches=tuple(stretches),
        evaluations=evaluations_of(log, model.job),
        sent_share=sent / (bsp_steps * dense_bytes),
        share=together / sum(each.steps for each in stretches),
    )


def tune(model: str, *, smoke: bool, results: Results) -> None:
    """What BSP ends with at its learning rate, half of that and twice as much, named as parts of its task's."""
    job, runs = MODELS[model].job, Runs(model=MODELS[model], quick=False)
    seeds = range(1 if smoke else SEEDS)
    epochs = 0.25 if smoke else runs.epochs
    sides = []
    for factor in FACTORS:
        for seed in seeds:
            whole = side(runs, f"{factor:g}", POLICIES[BSP], epochs=epochs, seed=seed)
            scaled = whole.spec.model_copy(update={"learning_rate_scale": factor * job.learning_rate_scale})
            sides.append(replace(whole, spec=scaled))
    note(f"training {model} at {len(FACTORS)} learning rates")
    logs = rehearse(hosts(None), sides, rounds=1)
    sign = 1 if job.higher_is_better else -1
    for factor in FACTORS:
        told = [logs[_run_name(f"{factor:g}", seed)][0] for seed in seeds]
        ends = [sign * end(priced(log, job, WORKERS)) for log in told]
        scale = f"{factor * job.learning_rate_scale:g}"
        apart = max(ends) - min(ends)
        print(
            f"{model}: {job.metric} {statistics.fmean(ends):.4g} at {scale} of its task's learning rate ({apart:.2g})"
        )
        label = f"{model}_final_{job.metric}_bsp_at_{key(scale)}_of_the_learning_rate"
        results.baselines[label] = round(statistics.fmean(ends), 4)
        results.baselines[f"{label}_apart"] = round(apart, 4)


def _run_name(policy: str, seed: int) -> str:
    return f"{policy}-{seed}"


def side(runs: Runs, name: str, policy: Policy, *, epochs: float, seed: int) -> Side:
    """A whole run of a policy with a seed."""
    sync, compression = policy
    spec = runs.spec(Contender(compression=compression), seed=seed)
    changes: dict[str, object] = {
        "sync": sync,
        "partition": Partition(name="seldp" if sync.is_local else "global"),
        "stop": StopRule(max_epochs=epochs * sync.stretch),
        "evaluate_every_epochs": min(spec.evaluate_every_epochs, epochs),
    }
    return Side(name=_run_name(name, seed), by="hetopt", spec=spec.model_copy(update=changes))


def show(model: str, found: PairedRuns) -> None:
    """The table for people."""
    job, sign = found.model.job, 1 if found.model.job.higher_is_better else -1
    print(
        f"\n{model}: time to {job.metric} {sign * found.target():.4g}, {found.tolerance:.3g} short of BSP (whose seeds "
        f"are {found.spread:.3g} apart); speed-up over BSP, lowest and highest seed"
    )
    print(
        f"{'':>20}" + "".join(f"{f'{rate:g}x':>21}" for rate in RATES) + f"{job.metric:>12}{'together':>10}{'bytes':>9}"
    )
    for name in found.runs:
        cells = "".join(f"{found.told(name, rate):>21}" for rate in RATES)
        ended, part, sent = sign * found.ends_with(name), together(found, name), found.sent(name)
        print(f"{name:>20}{cells}{ended:>12.4g}{part:>10.1%}{sent:>9.2%}")


def together(found: PairedRuns, name: str) -> float:
    """Part of the steps that synchronised."""
    return statistics.fmean(run.share for run in found.runs[name] if isinstance(run, Synchronised))


def record(model: str, found: PairedRuns, results: Results) -> None:
    """Figures and goals of a model."""
    job, sign = found.model.job, 1 if found.model.job.higher_is_better else -1
    results.figures[f"{model}_tolerance"] = round(found.tolerance, 4)
    results.baselines[f"{model}_{job.metric}_bsp_still_gains_at_the_end"] = round(found.still_gains, 4)
    for name in found.runs:
        place = results.figures if name == OWN else results.baselines
        label = key(name)
        ends = [sign * end(run) for run in found.runs[name]]
        place[f"{model}_final_{job.metric}_{label}"] = round(statistics.fmean(ends), 4)
        place[f"{model}_final_{job.metric}_{label}_apart"] = round(max(ends) - min(ends), 4)
        place[f"{model}_synchronised_share_{label}"] = round(together(found, name), 4)
        place[f"{model}_sent_over_dense_{label}"] = round(found.sent(name), 5)
        for rate in RATES:
            at = f"at_{key(f'{rate:g}')}x"
            note_pairs(place, f"{model}_{label}_over_bsp_{at}", found.speed_ups(name, BSP, rate))
            if name == OWN and BSP_IN_8_BITS in found.runs:
                ups = found.speed_ups(OWN, BSP_IN_8_BITS, rate)
                note_pairs(place, f"{model}_{label}_over_bsp_in_8_bits_{at}", ups)
    for rate in RATES:
        name = f"{model}_speed_up_at_{key(f'{rate:g}')}x"
        speed_up = statistics.median(found.speed_ups(OWN, BSP, rate) or [0.0])
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
    asked = options(__doc__, parts=[*TASKS, STAND_IN, SKEW, LEARNING_RATES])
    need_namespaces(or_skip=asked.smoke)
    results, quick = Results(), asked.quick
    for name in parts(asked.part, quick=quick, smoke=asked.smoke):
        if name == SKEW:
            show_skew(skew(smoke=asked.smoke), results)
        elif name == LEARNING_RATES:
            for each in TASKS:
                tune(each, smoke=asked.smoke, results=results)
        else:
            model = chosen(name, quick=quick)
            found = compare(MODELS.get(model, DIGITS), quick=quick, smoke=asked.smoke)
            show(model, found)
            record(model, found, results)
    publish(results.outcome("sync", quick=quick), asked.json_file, part=asked.part)


def parts(only: str | None, *, quick: bool, smoke: bool) -> tuple[str, ...]:
    """What is measured, in turn: models, and labels that are not mixed."""
    if smoke:
        return (only or STAND_IN,)
    if only is not None:
        return (only,)
    return ("convnet", SKEW) if quick else (*TASKS, SKEW, LEARNING_RATES)


if __name__ == "__main__":
    run_benchmark(main)
