"""Sentences on why a plan won, the parts of its step, its batch size, risks, and the evidence of its prediction."""

from __future__ import annotations

from collections.abc import Iterator

from hetopt.core import formatting
from hetopt.core.comm.composition import METHODS
from hetopt.core.comm.compression_text import spell
from hetopt.core.comm.options import IDENTITY
from hetopt.core.errors import setting
from hetopt.core.formatting import duration, listed, share, usd
from hetopt.core.profile import Profile
from hetopt.optimizer.convergence.compression_penalty import steps_in_words
from hetopt.optimizer.convergence.convergence import GivenSteps, equal_steps
from hetopt.optimizer.fit import FittedModel
from hetopt.optimizer.plan import EVIDENCE_IN_WORDS, Candidate, Sensitivity, limits_in_words
from hetopt.optimizer.search.exchange_menu import gain_of, least_gain, methods_left_out
from hetopt.optimizer.search.objective import BALANCED, FASTEST, Limits
from hetopt.optimizer.search.search import SearchResult, proved
from hetopt.optimizer.step_time.links import NETWORK_EFFICIENCY
from hetopt.optimizer.step_time.local_options import communication
from hetopt.optimizer.step_time.transfer import ReferenceHost

WORTH_AVERAGING = 0.3
"""Part of a step that communication must take for averages of parameters to be worth a try."""

USUAL_SYNC = "local-sgd(8, stretch=1.5)"
"""To be measured where nobody named one: of eleven policies the soonest at BSP's quality (2026-11-27, commit
81ffce4) where communication takes five times as long as computing, or longer."""


def explain(
    model: FittedModel,
    host: ReferenceHost,
    result: SearchResult,
    chosen: Candidate,
    limits: Limits,
    seen: Sensitivity,
    *,
    to_target: bool,
    equal_progress: bool,
) -> tuple[str, ...]:
    """Return the sentences that explain a plan, most important first: its choice, time, batch, risks and evidence.

    Args:
        model: fits of the profile.
        host: the profiled machine as the catalogue rates it.
        result: result of the search, with the choice.
        chosen: the plan's cluster.
        limits: budget and deadline.
        seen: probability that the choice keeps the limits.
        to_target: whether the run ends at a target; False: after given epochs or steps.
        equal_progress: whether the batch size was searched at equal progress, so that its cost in steps is counted.
    """
    return (
        _why(result, chosen, limits, seen),
        f"{proved(result).capitalize()}.",
        _time(chosen),
        *batch_note(model, chosen, priced=to_target or equal_progress),
        *_begins_again(model.profile),
        *_scarce(chosen),
        *_evidence(model, host, chosen),
        *_local(model, chosen, to_target=to_target),
        *_not_weighed(model, to_target=to_target),
    )


def _begins_again(profile: Profile) -> Iterator[str]:
    """Yield a sentence on lost work if the job saves no checkpoints, else nothing."""
    if not profile.job.resumes:
        yield (
            f"{profile.job.task} saves no checkpoint, so a loss of a machine costs all that was done before it, and "
            "that is in these numbers; with run.checkpoint and run.resume in it, profile it again."
        )


def _why(result: SearchResult, chosen: Candidate, limits: Limits, seen: Sensitivity) -> str:
    """Return a sentence on what the chosen plan is best at, and with which probability it keeps the limits."""
    prediction = chosen.prediction
    within = limits_in_words("the", limits.budget_usd, limits.deadline_s)
    machines = chosen.in_words
    what = {
        BALANCED: "balanced plan (a tenth less time would cost over a fifth more)",
        FASTEST: "fastest plan",
        1 - FASTEST: "cheapest plan",
    }.get(limits.time_weight, f"best plan (time counts {100 * limits.time_weight:.0f} %, cost the rest)")
    if not within:
        return f"{machines} is the {what} of those found, at about {usd(prediction.cost_usd.value)}."
    kept, wanted = formatting.chance(seen.chance or 0.0), formatting.chance(seen.asked)
    if result.safe:
        return (
            f"{machines} is the {what} of those found that stay within {within} with a probability of at least "
            f"{wanted}; its own is {kept}."
        )
    return (
        f"No plan found stays within {within} with a probability of {wanted}: {machines} is the best of the likeliest, "
        f"with {kept}. It should cost {usd(prediction.cost_usd.value)} and take {duration(prediction.total_s.value)}, "
        f"but may come to {usd(prediction.cost_usd.high)} and {duration(prediction.total_s.high)}, and would then be "
        "stopped unfinished."
    )


def _time(chosen: Candidate) -> str:
    """Return a sentence on the parts of a step's time, and on the steps that are needed."""
    prediction = chosen.prediction
    step = prediction.step_time_s.value
    compression = formatting.exchange(chosen.compression, chosen.sync)
    parts = (
        f"Of a step of {duration(step)}, {100 * (prediction.compute_s / step):.0f} % is computing (workers wait "
        f"{100 * (prediction.waiting_s / step):.0f} % on average for the slowest) and "
        f"{100 * (prediction.communication_s / step):.0f} % communication "
        f"that computing does not hide ({compression}, {chosen.collective.replace('_', '-')})"
    )
    if sum(len(group.local_batch_sizes) for group in chosen.groups) == 1:
        parts = f"One worker trains alone, with steps of {duration(step)}"
    return f"{parts}; {prediction.steps.value:.0f} steps of {chosen.global_batch_size} samples are needed."


def batch_note(model: FittedModel, chosen: Candidate, *, priced: bool) -> Iterator[str]:
    """Yield a sentence on steps if the plan's batch size is not the job's own, else nothing.

    Args:
        model: fits of the profile.
        chosen: the plan's cluster.
        priced: whether the predicted steps include the other batch size's loss of progress; False: they do not, and the
            sentence says how many steps the same progress would take.
    """
    usual, size, steps = model.profile.job.batch_size, chosen.global_batch_size, chosen.prediction.steps.value
    if size == usual:
        return
    counted = f"the {steps:,.0f} steps count what that costs in progress"
    if not priced:
        equal = equal_steps(model.convergence, GivenSteps(amount=round(steps * size / usual)), usual)
        needed = float(equal.steps(size, 1.0))
        counted = (
            f"the same samples make {share(usual / size)} of the updates"
            + (", and the model may end worse" if needed > steps else "")
            + f". For the same progress: {needed:,.0f} steps, not {steps:,.0f}"
            + ("" if model.profile.job.script else f" ({setting('batch_size', 'auto')})")
        )
    yield f"Batches of {size:,}, not {usual:,}: {counted}."


def _scarce(chosen: Candidate) -> Iterator[str]:
    """Yield a sentence on how often spot machines may be taken away; nothing for a plan without them."""
    if all(group.market != "spot" for group in chosen.groups):
        return
    basis = "their interruption band suggests"
    seen = [
        f"{group.watched.in_words} of {group.instance_type} until {group.watched.until[:10]}"
        for group in chosen.groups
        if group.watched is not None
    ]
    if seen:
        basis += f", and with what was seen: {' and '.join(seen)}"
    yield (
        "Spot machines may be taken away often here, and no other be had for hours: the shown intervals count on that "
        f"as often as {basis}."
    )


def _evidence(model: FittedModel, host: ReferenceHost, chosen: Candidate) -> Iterator[str]:
    """Yield sentences on the evidence of the prediction: step time by type, CPU speed, steps, network, compression.

    The network is left out for one machine, and where it was measured.
    """
    prediction = chosen.prediction
    for tier, meaning in EVIDENCE_IN_WORDS.items():
        names = sorted({group.instance_type for group in chosen.groups if group.evidence == tier})
        if names:
            reach = prediction.step_time_s.high / prediction.step_time_s.value
            yield (
                f"Step time on {' and '.join(names)} is {meaning} (× or ÷ {reach:.2f} with 90 % probability)"
                + ("; profile there to know better." if tier != "measured" else ".")
            )
    if model.reference.device.kind == "cpu" and any(group.evidence != "measured" for group in chosen.groups):
        yield f"The profiled machine is placed among those of the catalogue by {host.basis}."
    wide = prediction.steps.high / prediction.steps.value
    doubt = f" (× or ÷ {wide:.2f})" if wide > 1.001 else ""
    yield f"Number of steps: {prediction.steps_source}{doubt}."
    if len(chosen.groups) > 1 or chosen.groups[0].machines > 1:
        unmeasured = {group.instance_type: None for group in chosen.groups if group.network == "catalogue"}
        if unmeasured:
            yield (
                f"The network between machines of {' and '.join(unmeasured)} was not measured: the sustained rate of "
                f"the catalogue is taken at {100 * NETWORK_EFFICIENCY:.0f} %."
            )
    yield from _compressed(model, chosen)


def _compressed(model: FittedModel, chosen: Candidate) -> Iterator[str]:
    """Yield how much of the gradient the planned compression retains, and the steps that adds; nothing for dense."""
    way = chosen.compression
    if way.name == IDENTITY:
        return
    workers = sum(len(group.local_batch_sizes) for group in chosen.groups)
    by_ratio, gain = METHODS[way.name].by_ratio, gain_of(model, way) or 1.0
    stretch, _ = model.losses.stretch(way, workers)
    more = float(model.convergence.gate.penalty.inflation(gain)) * stretch - 1
    what = f"Sending {way.ratio:.3g} of the gradient" if by_ratio else f"Sending gradients as {spell(way)}"
    yield (
        f"{what} retains {100 * gain:.0f} % of its energy at once; a target should take about {100 * more:.1f} % more "
        "steps with it, which training measures."
    )


def _not_weighed(model: FittedModel, *, to_target: bool) -> Iterator[str]:
    """Yield a sentence on compressors that no plan could use, and why; nothing if there are none, or a described job.

    Raises:
        BadInput: as of `gain_of`.
    """
    if model.profile.is_counted:
        return
    methods: dict[str, list[str]] = {}
    for name, reason in methods_left_out(model, least_gain(model, to_target=to_target)).items():
        methods.setdefault(reason, []).append(name)
    if methods:
        yield f"Not weighed: {'; '.join(f'{listed(names)}: {reason}' for reason, names in methods.items())}."


def _local(model: FittedModel, chosen: Candidate, *, to_target: bool) -> Iterator[str]:
    """Yield sentences on the plan's averaging of parameters, or one that averaging might be worth measuring.

    Nothing is yielded for one worker, or for sums of gradients whose communication takes little.
    """
    prediction, job = chosen.prediction, model.profile.job
    workers = sum(len(group.local_batch_sizes) for group in chosen.groups)
    gate = model.convergence.local
    if workers == 1:
        return
    if not chosen.sync.is_local:
        exposed = prediction.communication_s / prediction.step_time_s.value
        if exposed > WORTH_AVERAGING and not gate.pilots:
            yield (
                f"Averaging parameters now and then instead would save most of the {100 * exposed:.0f} % that steps "
                f"spend on "
                f"communication; what that costs in steps was not measured: profile with {setting('sync', USUAL_SYNC)}."
            )
        return
    sync, measured = chosen.sync, gate.measured_share(chosen.sync)
    often = communication(
        sync, dataset_size=job.dataset_size, global_batch_size=chosen.global_batch_size, measured=measured
    )
    yield f"{often.note} {steps_in_words(gate.penalty(sync), often.share, workers, counts=to_target)}"
    objection = gate.objection(sync, often.share)
    if objection is not None:
        yield f"It was asked for: {objection}."
