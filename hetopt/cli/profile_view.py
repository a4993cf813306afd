"""What `hetopt profile` says: of a profile, and of step times from elsewhere."""

from __future__ import annotations

import datetime
from importlib.metadata import version
from pathlib import Path

from hetopt.api.catalogs import in_use
from hetopt.api.sample_remarks import remarks
from hetopt.cli import lines, parse, render, terminal
from hetopt.core import formatting
from hetopt.core.gradient_noise import Moments, noise_scale
from hetopt.core.profile import Device, Link, Pilot, Profile, StepTime
from hetopt.core.step_samples import StepSample, StepSamples, read_samples
from hetopt.core.throughput import Timing, summarize

WORTH_SAYING = 1.15
"""Times its processor time that computing may take."""


def show(profile: Profile) -> None:
    """The profile as a person reads it."""
    job, host = profile.job, profile.host
    render.line(
        f"{job.task}: {formatting.counted(job.parameters, 'parameter')} ({formatting.bytes_(job.gradient_bytes)} of "
        "gradient), "
        f"{formatting.counted(job.dataset_size, 'sample')} an epoch",
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
        render.line(f"  {link.collective.replace('_', '-')} between {link.workers} workers: {_link_time(link)}")
    render.heading("Training")
    for sentence in _training(profile):
        render.bullet(sentence)
    noisy = [point for device in profile.devices for point in device.step_times if _spread(point).is_noisy]
    if noisy:
        render.note(f"{len(noisy)} step times vary a lot: measure again for narrower predictions.")
    if (profile.contention or 1.0) >= WORTH_SAYING:
        render.note(
            f"Other programs kept the processors busy: computing took {profile.contention:.1f} times its processor "
            "time. Steps are told without that; predictions for this machine reach as far."
        )


def _link_time(link: Link) -> str:
    """Latency and rate, as far as the measurement tells: between processes of a machine it may tell one alone."""
    from hetopt.core.comm.network_fit import FASTEST_BYTES_PER_S

    latency, rate = formatting.duration(link.latency_s), f"{formatting.bytes_(link.bytes_per_s)}/s"
    if link.bytes_per_s >= FASTEST_BYTES_PER_S:
        return f"{latency}, whatever the size"
    return f"{latency} + {rate}" if link.latency_s > 0 else rate


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
            sentences.append(
                f"{kind}, {goal} not reached: {last.metric:.4g} after {formatting.counted(last.step, 'step')}"
            )
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
        sentences.append("how long the script trains cannot be seen: give `hetopt recommend` --epochs or --steps")
    elif not profile.pilots:
        sentences.append(f"no pilot came far enough to say how many steps {goal} takes")
    if profile.noise:
        last_sample = profile.noise[-1]
        scale = noise_scale(
            Moments(gradient_variance=last_sample.gradient_variance, gradient_square=last_sample.gradient_square)
        )
        sentences.append(
            f"gradient noise scale: {formatting.counted(round(scale), 'sample')}; larger batches save few steps"
            if scale is not None
            else "gradient noise scale: unknown, as the gradient was mostly noise when last measured"
        )
    at_one_percent = [point for point in profile.gain if point.ratio == 0.01]
    sentences += [
        f"the largest 1 % of the gradient's values hold {100 * point.gain:.0f} % of its energy (top-k)"
        for point in at_one_percent
    ]
    return sentences


def _spread(point: StepTime) -> Timing:
    return summarize(point.samples_s)


def read_file(source: Path) -> tuple[StepSample, ...]:
    """The step samples of a file (JSON Lines, ``-`` for standard input), checked."""
    with lines.opened(source, "--from-samples") as (rows, _):
        return read_samples(rows, origin="standard input" if str(source) == "-" else str(source))


def import_samples(source: Path, output: Path | None, *, force: bool, json_: bool) -> None:
    """Read step samples (JSON Lines, ``-`` for standard input), check them, and write them as an artifact."""

    parse.ready_to_write(output, force=force)
    samples = read_file(source)
    imported = StepSamples(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        hetopt_version=version("hetopt"),
        source=source.name,
        samples=samples,
    )
    if output is not None:
        imported.save(output)
        render.note(f"wrote {output}")
    for remark in remarks(samples, in_use().catalog.instance_types):
        render.note(remark)
    if json_:
        terminal.write(imported.to_json())
        return
    layouts = {sample.layout for sample in samples}
    types = sorted({node.type for sample in samples for node in sample.nodes})
    sizes = [size for sample in samples for size in sample.batch_sizes]
    render.line(
        f"{formatting.counted(len(samples), 'step time')} of {formatting.counted(len(layouts), 'layout')}", style="bold"
    )
    render.facts(
        {
            "machine types": ", ".join(types),
            "nodes": f"up to {max(len(sample.nodes) for sample in samples)}",
            "workers": f"up to {max(sample.workers for sample in samples)}",
            "local batch": f"{min(sizes)} to {max(sizes)}",
        }
    )
