"""A profile as a person reads it: how fast, how the workers talk, and what training runs have shown."""

from __future__ import annotations

from hetopt.cli import render
from hetopt.core import formatting
from hetopt.core.gradient_noise import Moments, noise_scale
from hetopt.core.profile import Device, Pilot, Profile, StepTime
from hetopt.core.throughput import Timing, summarize


def show(profile: Profile) -> None:
    """The profile as a person reads it."""
    job, host = profile.job, profile.host
    render.line(
        f"{job.task}: {formatting.count(job.parameters)} parameters ({formatting.bytes_(job.gradient_bytes)} of "
        "gradient), "
        f"{formatting.count(job.dataset_size)} samples an epoch",
        style="bold",
    )
    cost = f" for {formatting.usd(profile.profiling_usd)}" if profile.profiling_usd > 0 else ""
    render.line(
        f"  measured in {formatting.duration(profile.profiling_s)}{cost} on {host.accelerator or host.cpu_model}"
    )
    render.heading("Step time by local batch size")
    render.table(
        ["workers at once", "batch", "step", "spread", "samples/s each", "memory"],
        [row for device in profile.devices for row in _step_rows(device)],
        numbers={"batch", "step", "spread", "samples/s each", "memory"},
    )
    for link in profile.links:
        render.line(
            f"  {link.collective.replace('_', '-')} between {link.workers} workers: "
            f"{formatting.duration(link.latency_s)} + {formatting.bytes_(link.bytes_per_s)}/s"
        )
    render.heading("Training")
    for sentence in _training(profile):
        render.bullet(sentence)
    noisy = [point for device in profile.devices for point in device.step_times if _spread(point).is_noisy]
    if noisy:
        render.note(
            f"{len(noisy)} step times vary a lot: the machine was busy with other things. "
            "Measure again when it is quiet for narrower predictions."
        )


def _step_rows(device: Device) -> list[list[str]]:
    rows = []
    each = "GPU"
    if device.kind == "cpu":
        each = f"{device.threads_per_worker} thread{'s' if device.threads_per_worker > 1 else ''}"
    computing = "" if device.precision == "fp32" else f", {device.precision}"
    for point in device.step_times:
        timing = _spread(point)
        rows.append(
            [
                f"{device.workers_per_host} × {each}{computing}",
                formatting.count(point.local_batch_size),
                formatting.duration(point.step_time_s),
                f"±{100 * timing.spread_s / timing.median_s:.0f} %",
                formatting.count(round(point.local_batch_size / point.step_time_s)),
                formatting.bytes_(point.peak_memory_bytes) if point.peak_memory_bytes is not None else "",
            ]
        )
    return rows


def _training(profile: Profile) -> list[str]:
    """What the pilots say, a sentence each."""
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
            sentences.append(f"{kind}, {goal} not reached: {last.metric:.4g} after {formatting.count(last.step)} steps")
    for precision in profile.precisions[1:]:
        trials = [one for one in profile.precision_trials if one.precision == precision]
        own, usual = (
            ", ".join(formatting.count(round(steps)) for steps in column)
            for column in ([one.steps for one in trials], [one.usual_steps for one in trials])
        )
        sentences.append(
            f"in {precision}, {job.target_metric} after {own} steps as in {profile.precisions[0]} after {usual}"
            if trials
            else f"no pilot came far enough to compare {precision} with {profile.precisions[0]}"
        )
    if job.script:
        sentences.append("the script says itself when it ends: `hetopt recommend` wants --epochs or --steps")
    elif not profile.pilots:
        sentences.append(f"no pilot came far enough to say how many steps {goal} takes")
    if profile.noise:
        last_sample = profile.noise[-1]
        scale = noise_scale(
            Moments(gradient_variance=last_sample.gradient_variance, gradient_square=last_sample.gradient_square)
        )
        sentences.append(
            f"gradient noise scale {formatting.count(round(scale))} samples by the last sample"
            if scale is not None
            else "the gradient's signal could not be told from its noise by the last sample"
        )
    at_one_percent = [point for point in profile.gain if point.ratio == 0.01]
    sentences += [f"Top-k of 1 % keeps {100 * point.gain:.0f} % of the gradient's energy" for point in at_one_percent]
    return sentences


def _spread(point: StepTime) -> Timing:
    return summarize(point.samples_s)
