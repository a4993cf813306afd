"""What a run teaches about its job: step times of rented clusters, and how many steps the target took.

Both go back into the profile that the run was planned from: steps as step samples, which the step model is then fitted
to, and the way to the target as one more pilot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby

import numpy as np
from pydantic import ValidationError

from hetopt.core import formatting
from hetopt.core.artifact import faults
from hetopt.core.comm.compression_text import IDENTITY
from hetopt.core.errors import BadInput
from hetopt.core.events.fold import RunHistory
from hetopt.core.events.records import Evaluated, RunStarted, StepsLogged, TrainingStarted
from hetopt.core.profile import Evaluation, NoiseSample, Pilot, PilotCompression, PilotSync, Profile, Provisioned
from hetopt.core.run_spec import spell_sync
from hetopt.core.step_samples import Compression, Node, StepSample
from hetopt.core.training_laws import Moments, smoothed
from hetopt.optimizer.launch_record import OWN_PLACES, Launch
from hetopt.optimizer.step_time.model import RENTED

SAMPLES_OF_A_STRETCH = 5
"""Most step samples that one stretch of equal shares becomes: enough to show how steps scatter, and no more."""

NOISE_SAMPLES = 40
"""Most noise samples that one run becomes."""


def learn(profile: Profile, launch: Launch, history: RunHistory) -> tuple[Profile, list[str]]:
    """Return a job's profile with what a run measured, and a phrase for each thing learned.

    Neither the profile nor a file is changed.

    The same run twice adds nothing.

    Args:
        profile: profile of the same job; usually the one it was planned from, or what an earlier run made of that.
        launch: record of what was started.
        history: events of the run.

    Raises:
        BadInput: the profile is of another job, the run has nothing that the profile lacks, or its log has values that
            no profile allows.
    """
    job = launch.plan.profile.job
    if (profile.job.task, profile.job.parameters) != (job.task, job.parameters):
        raise BadInput(
            f"The run trained {job.task} of {formatting.counted(job.parameters, 'parameter')}, and the profile is of "
            f"{profile.job.task} of {formatting.count(profile.job.parameters)}.",
            hint="name another file, or a new one",
        )
    try:
        samples = [sample for sample in _samples(launch, history.steps) if sample not in profile.samples]
        pilot = _pilot(profile, launch, history)
    except ValidationError as error:
        raise BadInput(
            f"the event log of {launch.run_id} has values that no profile allows: {faults(error)[0]}.",
            hint="its lines are damaged; learn from another run",
        ) from None
    noise = _noise(history)
    if not noise or (profile.noise and profile.noise[-1].step >= noise[-1].step):
        noise = profile.noise
    pilots = [pilot] if pilot is not None and pilot not in profile.pilots else []
    seen = _provisioned(launch, history)
    launches = [seen] if seen is not None and seen.run not in {earlier.run for earlier in profile.provisioned} else []
    if not samples and not pilots and not launches and noise == profile.noise:
        raise BadInput(
            f"{launch.run_id} measured nothing that the profile lacks.",
            hint="step times are learned from rented machines or your own, steps to the target from evaluations",
        )
    news = []
    if samples:
        cluster = formatting.cluster((node.workers, node.type) for node in samples[0].nodes)
        news.append(f"{formatting.counted(len(samples), 'step time')} of {cluster}")
    news += [f"provisioning of {formatting.duration(launched.took_s)}" for launched in launches]
    if noise != profile.noise:
        news.append(f"the gradient's noise over {noise[-1].step} steps")
    news += [f"a run of {formatting.counted(pilot.global_batch_size, 'sample')} a step" for pilot in pilots]
    changed = profile.model_copy(
        update={
            "samples": (*profile.samples, *samples),
            "pilots": (*profile.pilots, *pilots),
            "noise": noise,
            "provisioned": (*profile.provisioned, *launches),
        }
    )
    return Profile.model_validate(changed.model_dump()), news


def _provisioned(launch: Launch, history: RunHistory) -> Provisioned | None:
    """Return the time from request to first step of a run that began once: later sessions find machines there.

    None: it was resumed, did no step, or ran on neither rented machines nor one's own.
    """
    took_s = history.run.startup_s
    is_own = launch.on in OWN_PLACES and all(group.is_own for group in launch.plan.chosen.groups)
    if not (launch.on == "ec2" or is_own) or launch.resumed_s or not took_s:
        return None
    types = dict.fromkeys(group.instance_type for group in launch.plan.chosen.groups)
    return Provisioned(run=launch.run_id, types=tuple(types), took_s=round(took_s, 1))


def _samples(launch: Launch, events: Sequence[StepsLogged]) -> Iterator[StepSample]:
    """Yield a run's steps as samples; none of a rehearsal, slowed workers, or types neither rented nor of the plan."""
    spec = launch.spec
    own_types = {group.instance_type for group in launch.plan.chosen.groups if group.is_own}
    if spec.miniature is not None or not all(
        worker.slowdown == 1 and worker.declared is None and (RENTED.fullmatch(worker.type) or worker.type in own_types)
        for worker in spec.workers
    ):
        return
    sync = spell_sync(spec.sync) if spec.sync.is_local else None
    hosts = {host: list(workers) for host, workers in groupby(spec.workers, key=lambda worker: worker.host)}
    nodes = tuple(Node(type=workers[0].type, workers=len(workers)) for workers in hosts.values())
    steps = [event for event in events if len(event.compute_s) == len(spec.workers)]
    for _, stretch in groupby(steps, key=lambda step: (step.local_batch_sizes, step.exchange and step.exchange.way)):
        # The first period of new shares is not yet itself: caches and allocators adapt.
        rows = list(stretch)[1:]
        for chunk in np.array_split(np.arange(len(rows)), min(SAMPLES_OF_A_STRETCH, len(rows))) if rows else ():
            sample = _sample([rows[index] for index in chunk], nodes, sync)
            if sample is not None:
                yield sample


def _sample(rows: Sequence[StepsLogged], nodes: tuple[Node, ...], sync: str | None) -> StepSample | None:
    """Return the mean of logged steps as one sample; None: they took no time, or a worker had no samples.

    Args:
        rows: one or more, of the same local batch sizes and exchange.
        nodes: hosts that trained.
        sync: local SGD policy as it is written, for rows in which parameters were averaged; None: they were not.
    """
    weights = [event.steps for event in rows]
    total = math.fsum(weights)
    step_time_s = round(math.fsum(n * event.step_time_s for n, event in zip(weights, rows, strict=True)) / total, 7)
    sync_s = math.fsum(n * event.sync_s[0] for n, event in zip(weights, rows, strict=True)) / total
    if step_time_s <= 0 or min(rows[0].local_batch_sizes) < 1:
        return None
    exchange = rows[0].exchange
    return StepSample(
        nodes=nodes,
        local_batch_size=rows[0].local_batch_sizes,
        compression=None
        if exchange is None or exchange.compressor == IDENTITY
        else Compression(name=exchange.compressor, ratio=exchange.ratio, collective=exchange.collective),
        sync=None if rows[0].sync is None else sync,
        step_time_s=step_time_s,
        sync_time_s=round(min(sync_s, step_time_s), 7),
    )


def _pilot(profile: Profile, launch: Launch, history: RunHistory) -> Pilot | None:
    """Return the run as a pilot, all of its sessions together: what was done again from a checkpoint counts once.

    None where the log does not begin with the first step; where the run was never evaluated, or changed its batch or
    what it sent; where nothing of gradients was sent, averages do not match the spec, or their workers had own data.
    """
    job, spec = profile.job, launch.spec
    begun = next((entry.event for entry in history.others if isinstance(entry.event, RunStarted)), None)
    evaluated = _evaluations(history, job.target_metric)
    exchanges = [event.exchange for event in history.steps if event.exchange is not None]
    ways = {(exchange.compressor, exchange.ratio) for exchange in exchanges}
    synced = [event.sync for event in history.steps if event.sync is not None]
    averages = sum(record.synchronised for record in synced)
    if bool(averages) != spec.is_local or (averages and spec.partition.name != "global"):
        return None
    batches = {sum(event.local_batch_sizes) for event in history.steps}
    if begun is None or begun.resumed_step or not evaluated or max(len(ways), len(batches)) > 1:
        return None
    name, ratio = next(iter(ways), (IDENTITY, 1.0))
    gain = float(np.mean([exchange.gain for exchange in exchanges])) if exchanges else 1.0
    if name != IDENTITY and gain <= 0:
        return None

    def reached(value: float) -> bool:
        return value >= job.target_value if job.target_higher_is_better else value <= job.target_value

    return Pilot(
        global_batch_size=spec.global_batch_size,
        learning_rate_scale=spec.learning_rate_scale,
        seed=spec.seed,
        evaluations=tuple(Evaluation(step=step, metric=metric) for step, metric in evaluated.items()),
        steps_to_target=next((step for step, metric in evaluated.items() if step and reached(metric)), None),
        compression=None if name == IDENTITY else PilotCompression(name=name, ratio=ratio, gain=min(1.0, gain)),
        sync=PilotSync(
            policy=spell_sync(spec.sync),
            workers=len(spec.workers),
            share=averages / (averages + sum(record.local for record in synced)),
        )
        if spec.is_local
        else None,
    )


def _noise(history: RunHistory) -> tuple[NoiseSample, ...]:
    """Return the smoothed moments of the gradient at even distances over a run that began with its first step.

    Empty: the log begins later, or no noise was measured.
    """
    noisy = [(event, event.noise) for event in history.steps if event.noise is not None]
    if history.run.first_step:
        return ()
    averages = smoothed(Moments(**asdict(noise)) for _, noise in noisy)
    samples = [
        NoiseSample(step=event.step, samples_seen=event.step * sum(event.local_batch_sizes), **vars(average))
        for (event, _), average in zip(noisy, averages, strict=True)
    ]
    places = np.linspace(0, len(samples) - 1, min(NOISE_SAMPLES, len(samples))).astype(int)
    return tuple(samples[place] for place in places)


def _evaluations(history: RunHistory, metric: str) -> dict[int, float]:
    """Return the metric by step, ascending; steps done again after a checkpoint count as they were done last."""
    by_step: dict[int, float] = {}
    for event in (entry.event for entry in history.others):
        if isinstance(event, TrainingStarted):
            by_step = {step: value for step, value in by_step.items() if step <= event.step}
        elif isinstance(event, Evaluated) and metric in event.metrics:
            by_step[event.step] = event.metrics[metric]
    return dict(sorted(by_step.items()))
