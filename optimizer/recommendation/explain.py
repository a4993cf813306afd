"""Says why a plan won, where its time and money go, what is known and what is guessed, and what would change it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from hetopt.core import formatting
from hetopt.core.comm.composition import METHODS
from hetopt.core.comm.compression_text import spell
from hetopt.core.comm.options import IDENTITY
from hetopt.core.errors import setting
from hetopt.core.formatting import duration, usd
from hetopt.core.precision import Precision
from hetopt.core.profile import Profile
from hetopt.optimizer.convergence.convergence import statistical_efficiency
from hetopt.optimizer.convergence.local_penalty import steps_in_words
from hetopt.optimizer.convergence.precision_loss import precision_loss
from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.cost import mixing
from hetopt.optimizer.fit import FittedModel, times_as_long
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import EVIDENCE_IN_WORDS, Candidate, Sensitivity, limits_in_words
from hetopt.optimizer.search.objective import BALANCED, FASTEST, Limits, choose
from hetopt.optimizer.search.search import Found
from hetopt.optimizer.step_time.links import not_measured
from hetopt.optimizer.step_time.local_steps import communication
from hetopt.optimizer.step_time.transfer import ReferenceHost

WORTH_AVERAGING = 0.3
"""Part of a step that communication must take for averages of parameters to be worth a try."""

USUAL_SYNC = "local-sgd(8, stretch=1.5)"
"""To be measured where nobody named one: of the policies of `benchmarks.sync` the soonest at BSP's quality where
communication takes five times as long as computing, or longer."""

PROFILING_SHARE = 0.05
"""What profiling should cost at most of the job that it is for."""


def explain(
    model: FittedModel,
    host: ReferenceHost,
    found: Found,
    chosen: Candidate,
    candidate: Callable[[int], Candidate],
    limits: Limits,
    catalog: Catalog,
    seen: Sensitivity,
    left_out: Mapping[str, str],
    *,
    to_target: bool,
) -> tuple[str, ...]:
    """The sentences of a plan, most important first.

    Args:
        model: what the profile says.
        host: how the profiled machine was placed among the catalogue's.
        found: what was searched, with the choice.
        chosen: the choice as a record.
        candidate: makes the record of a row of ``found.forecast``.
        limits: budget and deadline.
        catalog: for prices on demand.
        seen: how sure the choice is, and what it depends on.
        left_out: ways to exchange that could not be chosen, and why.
        to_target: whether the run ends at a target.
    """
    return (
        _why(found, chosen, limits, seen),
        *_chance(seen),
        *_against_uniform(found, chosen, candidate, limits, seen),
        *_on_demand(chosen, catalog),
        _time(chosen),
        *_precision(model, chosen, to_target=to_target),
        *_batch(model, chosen, to_target=to_target),
        _money(chosen),
        *_begins_again(model.profile),
        *_scarce(found, chosen),
        *_mixing(chosen),
        *_evidence(model, host, chosen),
        *_local(model, chosen, to_target=to_target),
        *_not_on_the_menu(left_out, chosen),
        _profiling(model.profile, chosen),
    )


def _begins_again(profile: Profile) -> Iterator[str]:
    if not profile.job.resumes:
        yield (
            f"{profile.job.task} saves no checkpoint, so a loss of a machine costs all that was done before it, and "
            "that is in these numbers; with run.checkpoint and run.resume in it, profile it again."
        )


def _why(found: Found, chosen: Candidate, limits: Limits, seen: Sensitivity) -> str:
    told = chosen.prediction
    within = limits_in_words("the", limits.budget_usd, limits.deadline_s)
    machines = chosen.in_words
    what = {
        BALANCED: "balanced plan (a tenth less time would cost over a fifth more)",
        FASTEST: "fastest plan",
        1 - FASTEST: "cheapest plan",
    }.get(limits.time_weight, f"best plan (time counts {100 * limits.time_weight:.0f} %, cost the rest)")
    if not within:
        return f"{machines} is the cheapest plan found, at about {usd(told.cost_usd.value)}."
    kept, wanted = formatting.chance(seen.chance or 0.0), formatting.chance(seen.asked)
    if found.safe:
        return (
            f"{machines} is the {what} of those found that stay within {within} with a probability of at least "
            f"{wanted}; its own is {kept}."
        )
    return (
        f"No plan found stays within {within} with a probability of {wanted}: {machines} is the best of the likeliest, "
        f"with {kept}. It should cost {usd(told.cost_usd.value)} and take {duration(told.total_s.value)}, but may come "
        f"to {usd(told.cost_usd.high)} and {duration(told.total_s.high)}, and would then be stopped unfinished."
    )


def _chance(seen: Sensitivity) -> Iterator[str]:
    if seen.chance is not None:
        yield (
            f"Nine of ten simulated runs cost at most {usd(seen.cost_90_usd)} and take at most "
            f"{duration(seen.total_90_s)}."
        )


def _against_uniform(
    found: Found, chosen: Candidate, candidate: Callable[[int], Candidate], limits: Limits, seen: Sensitivity
) -> Iterator[str]:
    if len(chosen.groups) == 1:
        yield _no_better_mix(found, seen)
        return
    best, _ = choose(found.forecast.take(slice(found.uniform)), limits)
    if best is None:
        yield "No cluster of a single machine type fits."
    else:
        yield f"The best cluster of a single machine type is {candidate(best)}."


def _no_better_mix(found: Found, seen: Sensitivity) -> str:
    proof = found.proof
    if proof is None or seen.gap is None:
        if not found.mixes:
            return "No mix of machine types was tried."
        return f"None of the {found.mixes:,} mixes of machine types that were tried did better by more than 2 %."
    types = "two" if proof.types == 2 else "up to three"
    return f"No mix of {types} machine types is better by more than {100 * seen.gap:.1f} %: all were considered."


def dearer_on_spot(chosen: Candidate, catalog: Catalog) -> Iterator[str]:
    """Which of the machines are on demand because spot costs no less."""
    dear = [group.instance_type for group in chosen.groups if catalog.listing(group.instance_type).spot_is_dearer]
    if dear:
        yield f"Spot costs no less than on demand for {' and '.join(dear)}: on demand is taken."


def _on_demand(chosen: Candidate, catalog: Catalog) -> Iterator[str]:
    yield from dearer_on_spot(chosen, catalog)
    spot = demand = spread = 0.0
    for group in chosen.groups:
        price, quoted = (catalog.price(group.instance_type, market) for market in ("on-demand", "spot"))
        if group.market != "spot" or price is None or quoted is None:
            return
        spot += group.machines * group.price_usd_per_hour
        demand += group.machines * price.usd_per_hour
        spread = max(spread, quoted.log_sd)
    on_demand = f"The same machines on demand cost {demand / spot:.2g} times as much an hour, and are not preempted"
    if demand <= spot * math.exp(Z90 * spread):
        yield (
            f"Spot may save nothing here: the price is {100 * (spot / demand):.0f} % of on demand, and spot prices "
            f"differ by "
            f"more than that between zones and days. {on_demand}: compare with `market='on-demand'`."
        )
    else:
        yield f"{on_demand}."


def _time(chosen: Candidate) -> str:
    told = chosen.prediction
    step = told.step_time_s.value
    compression = formatting.exchange(chosen.compression, chosen.sync)
    parts = (
        f"Of a step of {duration(step)}, {100 * (told.compute_s / step):.0f} % is computing (workers wait "
        f"{100 * (told.waiting_s / step):.0f} % on average for the slowest) and "
        f"{100 * (told.communication_s / step):.0f} % communication "
        f"that computing does not hide ({compression}, {chosen.collective.replace('_', '-')})"
    )
    if sum(len(group.local_batch_sizes) for group in chosen.groups) == 1:
        parts = f"One worker trains alone, with steps of {duration(step)}"
    return f"{parts}; {told.steps.value:.0f} steps of {chosen.global_batch_size} samples are needed."


def _precision(model: FittedModel, chosen: Candidate, *, to_target: bool) -> Iterator[str]:
    """What the plan computes in, where it had a choice, beside what else was measured; or that it might have one."""
    usual, own = model.whole.precisions[0], chosen.precision
    if own != usual:
        compared = _beside(model, own, usual)
        loss = f" Steps to the target are {precision_loss(model.whole, own).in_words}." if to_target else ""
        yield f"Workers compute in {own}{compared or ', as measured steps have it'}.{loss}"
        return
    others = [f"{other} was measured{_beside(model, other, usual)}" for other in model.whole.precisions if other != own]
    may_choose = not model.whole.is_counted and not model.whole.job.script
    if others:
        yield f"Workers compute in {own}: {'; '.join(others)}."
    elif model.reference.device.kind == "cuda" and own == "fp32" and may_choose:
        yield (
            "Only fp32 was measured, and GPUs often compute in bf16 in half the time: profile with "
            f"{setting('precision', 'auto')}."
        )


def _beside(model: FittedModel, precision: Precision, usual: Precision) -> str:
    """Steps of a precision beside the usual one's, on the profiled machine; empty where they were not measured."""
    if precision not in model.whole.precisions:
        return ""
    here, there = (model.computing_in(one).reference for one in (precision, usual))
    samples = min(here.largest_measured, there.largest_measured)
    longer = times_as_long(here.time_s, there.time_s, samples)
    return f", in which a step of {samples} samples took the profiled machine {longer:.2g} times as long as in {usual}"


def _batch(model: FittedModel, chosen: Candidate, *, to_target: bool) -> Iterator[str]:
    """What another batch size than the job's own costs its samples, where nothing else counts that."""
    own, size, noise = model.profile.job.batch_size, chosen.global_batch_size, model.convergence.noise_scale
    if size == own:
        return
    if to_target:
        yield f"The batch size is {size}, not the job's own {own}: what that costs in steps is in their number."
        return
    if noise is None:
        worth = "what a sample is worth then is not known, as no gradient noise was measured"
    else:
        kept = statistical_efficiency(size, own, noise)
        told = formatting.count(round(noise))
        worth = f"a sample then brings the run {100 * kept:.0f} % of what it would (the noise scale is {told} samples)"
    yield (
        f"The batch size is {size}, not the job's own {own}: {worth}, and there are "
        f"{chosen.prediction.steps.value:.0f} updates; with {setting('batch_size', str(own))} it stays."
    )


def _money(chosen: Candidate) -> str:
    terms = ", ".join(f"{usd(term.usd)} {term.name}" for term in chosen.prediction.bill)
    estimates = any(group.price_is_estimate for group in chosen.groups)
    dates = sorted({group.price_date for group in chosen.groups})
    note = f"prices of {' and '.join(dates)}" + (
        ", spot estimated from the published saving: look at the live price before renting" if estimates else ""
    )
    return f"The {usd(chosen.prediction.cost_usd.value)} are {terms} ({note})."


def _mixing(chosen: Candidate) -> Iterator[str]:
    told = mixing.in_words(chosen.groups)
    if told is not None:
        yield told


def _scarce(found: Found, chosen: Candidate) -> Iterator[str]:
    if found.chosen is None or all(group.market != "spot" for group in chosen.groups):
        return
    factor = float(found.forecast.scarce_factor[found.chosen])
    basis = "the interruption band suggests"
    seen = [
        f"{group.watched.in_words} of {group.instance_type} until {group.watched.until[:10]}"
        for group in chosen.groups
        if group.watched is not None
    ]
    if seen:
        basis += f", and with what was seen: {' and '.join(seen)}"
    yield (
        f"If a pool turns out to have a high preemption rate, as in recorded traces of sought-after types, training "
        f"takes {factor:.2f} times as long as without preemptions; the expected cost counts that with the "
        f"probability that {basis}."
    )


def _evidence(model: FittedModel, host: ReferenceHost, chosen: Candidate) -> Iterator[str]:
    told = chosen.prediction
    for tier, meaning in EVIDENCE_IN_WORDS.items():
        names = sorted({group.instance_type for group in chosen.groups if group.evidence == tier})
        if names:
            reach = told.step_time_s.high / told.step_time_s.value
            yield (
                f"Step time on {' and '.join(names)} is {meaning} (× or ÷ {reach:.2f} with 90 % probability)"
                + ("; profile there to know better." if tier != "measured" else ".")
            )
    for name, earlier in {group.instance_type: group.earlier for group in chosen.groups}.items():
        if earlier is not None:
            yield f"Counted in for {name}: {earlier.in_words}."
    for name, links in {group.instance_type: group.earlier_links for group in chosen.groups}.items():
        if links is not None:
            yield f"Counted in for links between {name}: {links.in_words}."
    if model.reference.device.kind == "cpu" and any(group.evidence != "measured" for group in chosen.groups):
        yield f"The profiled machine is placed among those of the catalogue by {host.basis}."
    wide = told.steps.high / told.steps.value
    doubt = f" (× or ÷ {wide:.2f})" if wide > 1.001 else ""
    yield f"The number of steps comes from {told.steps_source}{doubt}."
    if len(chosen.groups) > 1 or chosen.groups[0].machines > 1:
        unmeasured = {group.instance_type: None for group in chosen.groups if group.network == "catalogue"}
        if unmeasured:
            yield f"{not_measured(unmeasured)}."
    yield from _compressed(model, chosen)


def _compressed(model: FittedModel, chosen: Candidate) -> Iterator[str]:
    """What the planned compression keeps of the gradient, and how that is known."""
    way = chosen.compression
    if way.name == IDENTITY:
        return
    if not METHODS[way.name].by_ratio:
        workers = sum(len(group.local_batch_sizes) for group in chosen.groups)
        gain = model.losses.gain(way) or 1.0
        stretch, log_sd = model.losses.stretch(way, workers)
        if stretch > 1:
            yield (
                f"Gradients travel as {spell(way)}: rounding makes their sum over {workers} workers noisier, for which "
                f"a target should take about {100 * (stretch - 1):.1f} % more steps, "
                f"{100 * (stretch * math.exp(Z90 * log_sd) - 1):.0f} % "
                "at the upper end."
            )
            return
        more = float(model.convergence.penalty.inflation(gain)) - 1
        yield (
            f"Gradients travel as {spell(way)}: {100 * gain:.2f} % of their energy arrives at once and the rest later, "
            f"for which a target should take about {100 * more:.1f} % more steps."
        )
        return
    gain = model.gain.gain(way.ratio)
    more = float(model.convergence.penalty.inflation(gain)) - 1
    seen = any(pilot.compression is not None for pilot in model.profile.pilots)
    basis = "by compressed pilots" if seen else "by what was measured on other tasks"
    yield (
        f"Sending {way.ratio:.3g} of the gradient retains {100 * gain:.0f} % of its energy, as measured in the "
        f"pilots. A "
        f"target should take about {100 * more:.0f} % more steps with it ({basis}); training measures that, and "
        f"sends more "
        "where it costs too much."
    )


def _not_on_the_menu(left_out: Mapping[str, str], chosen: Candidate) -> Iterator[str]:
    """Methods that the trainer has and the plan could not choose, by the reason."""
    if sum(len(group.local_batch_sizes) for group in chosen.groups) == 1:
        return
    reasons: dict[str, list[str]] = {}
    for name, why in left_out.items():
        reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        yield f"Not considered: {', '.join(names)}, because {why}."


def _local(model: FittedModel, chosen: Candidate, *, to_target: bool) -> Iterator[str]:
    """What averaging parameters now and then does here, or that it might be worth measuring."""
    told, job = chosen.prediction, model.profile.job
    workers = sum(len(group.local_batch_sizes) for group in chosen.groups)
    gate = model.convergence.local
    if workers == 1:
        return
    if not chosen.sync.is_local:
        exposed = told.communication_s / told.step_time_s.value
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
    elif workers > gate.most_workers(sync, often.share):
        yield f"It was asked for: no pilot had even a quarter of these {workers} workers."


def _profiling(profile: Profile, chosen: Candidate) -> str:
    """What it cost to know all this, beside the job that it is for."""
    share = profile.profiling_s / chosen.prediction.total_s.value
    price = f" and {usd(profile.profiling_usd)}" if profile.profiling_usd > 0 else ""
    told = (
        f"Profiling took {duration(profile.profiling_s)}{price}, {100 * share:.1f} % of the time that this plan takes"
    )
    if share > PROFILING_SHARE:
        return f"{told}: for a job as short as this, a smaller `time_budget_s` would do."
    return f"{told}."
