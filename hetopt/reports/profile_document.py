"""A profile as a document: how long steps take, and what the pilots say of the way to the target."""

from __future__ import annotations

from collections.abc import Iterator

from hetopt.core import formatting
from hetopt.core.calibration_benchmark import relative_spread
from hetopt.core.comm.cost import FASTEST_BYTES_PER_S
from hetopt.core.profile import Device, Link, Pilot, Profile
from hetopt.core.training_laws import Moments, noise_scale
from hetopt.reports.document import Block, Document, Heading, Line, Remarks, Table, columns

WORTH_SAYING = 1.15
"""Ratio of computing time to its processor time from which the page says that others used the machine."""


def page(profile: Profile) -> Document:
    """Return the document of a profile's whole page."""
    blocks = [*document(profile), Remarks(list(notes(profile)))]
    return Document(kind="hetopt profile", title=f"Profile of {profile}", blocks=blocks)


def document(profile: Profile) -> Iterator[Block]:
    """Yield the job, its step times by local batch size, and what its pilots say."""
    job, host = profile.job, profile.host
    cost = f" for {formatting.usd(profile.profiling_usd)}" if profile.profiling_usd > 0 else ""
    epoch = f"{formatting.counted(job.dataset_size, 'sample')} an epoch" if job.counts_epochs else "no epoch known"
    yield Line(
        f"{job.task}: {formatting.counted(job.parameters, 'parameter')} ({formatting.bytes_(job.gradient_bytes)} of "
        f"gradient), {epoch}",
        "strong",
    )
    yield Line(
        f"  measured in {formatting.duration(profile.profiling_s)}{cost} on {host.accelerator or host.cpu_model}"
    )
    yield Heading("Step time by local batch size")
    yield Table(
        name="step time by local batch size",
        columns=columns("workers at once, #batch, #step, #spread, #samples/s each, #memory"),
        rows=[row for device in profile.devices for row in _step_rows(device)],
    )
    for link in profile.links:
        yield Line(f"  {link.collective.replace('_', '-')} between {link.workers} workers: {_link_time(link)}")
    yield Heading("Training")
    yield Remarks(_training(profile))


def notes(profile: Profile) -> Iterator[str]:
    """Yield a sentence on each thing that makes the measurement less certain.

    Nothing is yielded where all is certain.
    """
    if (profile.contention or 1.0) >= WORTH_SAYING:
        yield (
            f"Other programs kept the processors busy: computing took {profile.contention:.1f} times its processor "
            "time. Step times are without that; the intervals of predictions for this machine include it."
        )


def _link_time(link: Link) -> str:
    """Return a link's latency and rate in words; between processes of a machine it may be one of them alone."""
    latency, rate = formatting.duration(link.latency_s), f"{formatting.bytes_(link.bytes_per_s)}/s"
    if link.bytes_per_s >= FASTEST_BYTES_PER_S:
        return f"{latency}, whatever the size"
    return f"{latency} + {rate}" if link.latency_s > 0 else rate


def _step_rows(device: Device) -> list[list[str]]:
    """Return a row for each local batch size that was timed on a device: workers, step, spread, rate and memory."""
    each = "GPU"
    if device.kind == "cpu":
        each = f"{device.threads_per_worker} thread{'s' if device.threads_per_worker > 1 else ''}"
    computing = "" if device.precision == "fp32" else f", {device.precision}"
    return [
        [
            f"{device.workers_per_host} × {each}{computing}",
            formatting.count(point.local_batch_size),
            formatting.duration(point.step_time_s),
            f"±{100 * relative_spread(point.samples_s):.0f} %",
            formatting.count(point.local_batch_size / point.step_time_s),
            formatting.bytes_(point.peak_memory_bytes) if point.peak_memory_bytes is not None else "",
        ]
        for point in device.step_times
    ]


def _training(profile: Profile) -> list[str]:
    """Return a sentence on each result of the pilots, such as the steps to the target by batch size and precision."""
    job = profile.job
    goal = f"{job.target_metric} {job.target_value:g}"
    sentences = []
    kinds: dict[str, list[Pilot]] = {}
    for pilot in profile.pilots:
        under = f" under {pilot.sync.policy} of {pilot.sync.workers} workers" if pilot.sync is not None else ""
        kinds.setdefault(f"at batch {pilot.global_batch_size}{under}", []).append(pilot)
    for kind, alike in kinds.items():
        reached = [
            formatting.count(round(pilot.steps_to_target)) for pilot in alike if pilot.steps_to_target is not None
        ]
        if reached:
            sentences.append(f"{kind}, {goal} after {', '.join(reached)} steps")
        else:
            last = alike[-1].evaluations[-1]
            sentences.append(
                f"{kind}, {goal} not reached: {last.metric:.4g} after {formatting.counted(last.step, 'step')}"
            )
    for precision in profile.precisions[1:]:
        trials = [trial for trial in profile.precision_trials if trial.precision == precision]
        trial_steps, usual = (
            ", ".join(formatting.count(round(steps)) for steps in column)
            for column in ([trial.steps for trial in trials], [trial.usual_steps for trial in trials])
        )
        sentences.append(
            f"in {precision}, {job.target_metric} after {trial_steps} steps as in {profile.precisions[0]} after {usual}"
            if trials
            else f"no pilot came far enough to compare {precision} with {profile.precisions[0]}"
        )
    if job.script:
        epochs = "`hetopt recommend --epochs N` or " if job.counts_epochs else ""
        how = f"{epochs}`hetopt recommend --steps N`"
        sentences.append(f"how long the script trains cannot be seen: say it to {how}")
    elif not profile.pilots:
        sentences.append(f"no pilot came far enough to say how many steps {goal} takes")
    if profile.noise:
        last_sample = profile.noise[-1]
        scale = noise_scale(
            Moments(gradient_variance=last_sample.gradient_variance, gradient_square=last_sample.gradient_square)
        )
        sentences.append(
            f"gradient noise scale: {formatting.counted(round(scale), 'sample')} at step {last_sample.step}; it grows "
            "while a model learns, and runs measure it (`hetopt report --learn`)"
            if scale is not None
            else "gradient noise scale: unknown, as the gradient was mostly noise when last measured"
        )
    at_one_percent = [point for point in profile.gain if point.ratio == 0.01]
    sentences += [
        f"the largest 1 % of the gradient's values hold {100 * point.gain:.0f} % of its energy (top-k)"
        for point in at_one_percent
    ]
    return sentences
