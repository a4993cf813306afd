"""What exchanging gradients takes where a plan is launched, and what a prediction of it has to assume.

A profile times Top-k and tells its gain; a run may use any compressor, and may change it on the way. Bytes and
collectives of all of them are known exactly (`hetopt.core.comm.payload_bytes`); the rest is assumed, and said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from hetopt.core import formatting
from hetopt.core.comm.composition import METHODS
from hetopt.core.comm.cost import Operation, Primitive, Terms
from hetopt.core.comm.options import (
    IDENTITY,
    LOSSLESS,
    ROUNDED,
    Candidates,
    operations_of,
    settled_collective,
    timed_as,
)
from hetopt.core.comm.ratio_controllers import CONTROLLERS
from hetopt.core.compression_slowdown import LEAST_GAIN, MOST_LOST, step_inflation
from hetopt.core.run_spec import Compression, RunSpec
from hetopt.optimizer.convergence.local_penalty import steps_in_words
from hetopt.optimizer.fit import MEASURED_LINK_LOG_SD, CompressorLine, FittedModel, LinkModel
from hetopt.optimizer.step_time.local_steps import communication, exposed_s, spread
from hetopt.optimizer.step_time.own_work import ENCODED_GB_PER_S, FORETOLD_LOG_SD, own_work
from hetopt.optimizer.step_time.step_time import NO_OVERLAP, Overlap, step_time

RANDOM = ("randomk", "global_randomk_maxnorm", "global_randomk_two_scale")
"""They choose without looking: of the gradient's energy they keep the ratio."""

TIMED = "topk"
"""The compressor that profiles time, and whose gain they tell."""

ASSUMED_LOG_SD = FORETOLD_LOG_SD
"""How well the time of an exchange is known where it changes on the way, or where compressing was not timed."""


def no_overlap(compressor: str) -> Overlap:
    """No overlap of communication with the backward pass, whatever the compressor."""
    return NO_OVERLAP


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The workers that exchange, and what is known of the place.

    Attributes:
        model: of the job.
        workers: in the group.
        link: one hop of a primitive.
        compressors: as timed on workers like these.
        overlap: how computing hides an exchange with a compressor; workers whose exchange needs the very processors
            that they compute on hide nothing.
        crowding: how much longer a worker needs for its own work before an exchange.
        together: the same for work that all of them do at once, between the messages of a sum by slices and after them.
        steered_log_sd: standard deviation of the log of (true / foreseen) time where the exchange changes on the way.
    """

    model: FittedModel
    workers: int
    link: Callable[[Primitive], LinkModel]
    compressors: Mapping[str, CompressorLine]
    overlap: Callable[[str], Overlap] = no_overlap
    crowding: float = 1.0
    together: float = 1.0
    steered_log_sd: float = ASSUMED_LOG_SD

    @property
    def numel(self) -> int:
        """Number of elements of the gradient."""
        return self.model.profile.job.parameters

    def operations(self, compression: Compression) -> tuple[Operation, ...]:
        """Of one exchange.

        Raises:
            BadInput: so many workers cannot be served like that.
        """
        shapes = self.model.profile.job.parameter_shapes or None
        return operations_of(compression, self.numel, workers=self.workers, shapes=shapes)

    def exchange_s(self, compression: Compression) -> float:
        """Seconds of the operations, when nobody has to be waited for."""
        return sum(link.time_s(terms.messages, terms.traffic_bytes) for link, terms in self._hops(compression))

    def exchange_log_sd(self, compression: Compression) -> float:
        """Of the log of (true / foreseen) time: what all operations have in common is wrong for all of them."""
        total_s = self.exchange_s(compression)
        if total_s <= 0:
            return MEASURED_LINK_LOG_SD
        return sum(link.sd_s(terms.messages, terms.traffic_bytes) for link, terms in self._hops(compression)) / total_s

    def _hops(self, compression: Compression) -> Iterable[tuple[LinkModel, Terms]]:
        """Of each operation of one exchange: what it finds a link to be, and what it sends over it."""
        return ((self.link(operation.primitive), operation.terms()) for operation in self.operations(compression))

    def compress_s(self, compression: Compression) -> float:
        """Seconds of a worker's own work, as plans price it; else as long as Top-k's, or nothing."""
        copied, name = self.model.reference.device.copy_bytes_per_s, compression.name
        work = own_work(compression, self.compressors, numel=self.numel, copy_bytes_per_s=copied)
        crowding = self.together if name in ROUNDED else self.crowding
        if work is not None:
            return crowding * work.time_s(self.workers)
        line = self.compressors.get(TIMED)
        gathers = any(operation.primitive == "all_gather" for operation in self.operations(compression))
        return 0.0 if line is None else crowding * line.time_s(compression.ratio, self.workers if gathers else 1)

    def gain(self, compression: Compression) -> float:
        """Retained gradient energy: measured for Top-k, which stands for all that send the largest elements.

        What rounds or factors instead of selecting keeps what trials say, or 1; so does all where nothing was measured.
        The smallest gain that was measured counts for ratios below.
        """
        if compression.name in RANDOM:
            return compression.ratio
        curve = self.model.gain
        if not METHODS[compression.name].by_ratio:
            known = self.model.losses.gain(compression)
            return 1.0 if known is None else known
        if not curve.log_ratios:
            return 1.0
        return curve.gain(max(compression.ratio, math.exp(curve.log_ratios[0])))


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """The exchange that a prediction is made for.

    Attributes:
        compression: what is sent in every step.
        exchange_s, compress_s: of a step.
        overlap: how computing hides the exchange.
        gain: retained gradient energy.
        log_sd: standard deviation of the log of (true / foreseen) time.
        notes: what was assumed, a sentence each.
        stretch: steps to a target over those of summing gradients in every step.
        stretch_log_sd: spread of its log.
    """

    compression: Compression
    exchange_s: float
    compress_s: float
    overlap: Overlap
    gain: float
    log_sd: float
    notes: tuple[str, ...]
    stretch: float = 1.0
    stretch_log_sd: float = 0.0

    def taking(self, factor: float) -> Foreseen:
        """The same if it took so many times as long."""
        return replace(self, exchange_s=factor * self.exchange_s, compress_s=factor * self.compress_s)


def foresee(run: RunSpec, meeting: Meeting, *, compute_s: float, to_target: bool) -> Foreseen:
    """The exchange of a run, or the one that its policies should come to use most.

    Args:
        run: as it will be started.
        meeting: of its workers.
        compute_s: of the slowest worker in a step.
        to_target: whether the run ends at a target, so that what is held back costs steps.

    Raises:
        BadInput: so many workers cannot be served like that.
    """

    if run.is_local:
        return _foresee_local(run, meeting, compute_s=compute_s, to_target=to_target)

    def time_per_progress_s(compression: Compression) -> float:
        step = step_time(
            [compute_s],
            exchange_s=meeting.exchange_s(compression),
            compress_s=meeting.compress_s(compression),
            overlap=meeting.overlap(compression.name),
        )
        return step.step_time_s * _slowdown(run, meeting, compression)

    chosen = min(_candidates(run, meeting), key=time_per_progress_s)
    stretch, stretch_log_sd = meeting.model.losses.stretch(chosen, meeting.workers) if to_target else (1.0, 0.0)
    changes = meeting.workers > 1 and (run.ratio_policy != "fixed" or run.collective_policy != "fixed")
    return Foreseen(
        compression=chosen,
        exchange_s=meeting.exchange_s(chosen),
        compress_s=meeting.compress_s(chosen),
        overlap=meeting.overlap(chosen.name),
        gain=meeting.gain(chosen),
        log_sd=_log_sd(chosen, meeting, changes=changes),
        notes=tuple(_notes(run, chosen, meeting, to_target=to_target)),
        stretch=stretch,
        stretch_log_sd=stretch_log_sd,
    )


def _foresee_local(run: RunSpec, meeting: Meeting, *, compute_s: float, to_target: bool) -> Foreseen:
    """Of workers that train for themselves: the mean over steps that bring them together and steps that do not."""
    gate = meeting.model.convergence.local
    told = communication(
        run.sync,
        dataset_size=meeting.model.profile.job.dataset_size,
        global_batch_size=run.global_batch_size,
        measured=gate.measured_share(run.sync),
    )
    penalty, counts = gate.penalty(run.sync), to_target and run.sync.name != "ssp" and told.share > 0
    sent, notes = run.compression, (told.note, steps_in_words(penalty, told.share, meeting.workers, counts=counts))
    exchange_s = exposed_s(run.sync, told, exchange_s=meeting.exchange_s(sent), compute_s=compute_s)
    stretch, stretch_log_sd = meeting.model.losses.stretch(sent, meeting.workers) if counts else (1.0, 0.0)
    if counts:
        stretch *= float(penalty.inflation(told.share, meeting.workers))
        stretch_log_sd = math.hypot(stretch_log_sd, float(penalty.log_sd(told.share, meeting.workers)))
    return Foreseen(
        compression=sent,
        exchange_s=exchange_s,
        compress_s=told.share * meeting.compress_s(sent),
        overlap=NO_OVERLAP,
        gain=meeting.gain(sent),
        log_sd=spread(told, _log_sd(sent, meeting, changes=False)),
        notes=(*notes, *_notes_on_cost(sent, meeting)),
        stretch=stretch,
        stretch_log_sd=stretch_log_sd,
    )


def _candidates(run: RunSpec, meeting: Meeting) -> Iterable[Compression]:
    """What the run may use, as far as its policies choose."""
    asked = run.compression
    candidates = Candidates(
        asked=asked,
        chooses_collective=run.collective_policy == "cheapest",
        numel=meeting.numel,
        workers=meeting.workers,
        rounded_s={name: meeting.compress_s(Compression(name=name)) for name in ROUNDED},
    )
    if meeting.workers == 1:
        return [asked]
    if run.weighs_ways:
        if run.ratio_policy == "auto":
            # Thinner ones need a trial that shows them to be harmless, which nobody can foresee.
            return [
                each.compression
                for each in candidates.all
                if _slowdown(run, meeting, each.compression) <= 1 + MOST_LOST
            ]
        ungained = [each.compression for each in candidates.all if each.option.gain is None]
        return [each for each in ungained if meeting.gain(each) >= LEAST_GAIN] or ungained
    if run.collective_policy == "cheapest" and METHODS[asked.name].by_ratio:
        return [each.compression for each in candidates.at(asked.ratio)]
    return [asked]


def _slowdown(run: RunSpec, meeting: Meeting, compression: Compression) -> float:
    """Steps over those of dense training, as the run itself takes them to be before it has seen anything."""
    more = step_inflation(max(meeting.gain(compression), 1e-9), run.slowdown_coefficient)
    return more * meeting.model.losses.stretch(compression, meeting.workers)[0]


def _log_sd(chosen: Compression, meeting: Meeting, *, changes: bool) -> float:
    """Of the log of (true / foreseen) time of an exchange."""
    if _is_assumed(chosen, meeting):
        return ASSUMED_LOG_SD
    known = meeting.exchange_log_sd(chosen)
    return max(known, meeting.steered_log_sd) if changes else known


def _is_assumed(chosen: Compression, meeting: Meeting) -> bool:
    return chosen.name != IDENTITY and timed_as(chosen) not in meeting.compressors


def _notes(run: RunSpec, chosen: Compression, meeting: Meeting, *, to_target: bool) -> Iterable[str]:
    if meeting.workers == 1:
        return
    method, told = METHODS[chosen.name], formatting.compression(chosen.name, chosen.ratio)
    if chosen.name == IDENTITY:
        told = "sending everything"
    if run.ratio_policy != "fixed":
        yield (
            f"How much is sent is decided while training goes on ({run.ratio_policy}: "
            f"{CONTROLLERS[run.ratio_policy]}); the prediction is for {told} in every step."
        )
        if run.ratio_policy == "auto" and chosen.name != IDENTITY:
            yield "Should a trial show that sending less does this task no harm, steps become shorter than predicted."
    elif run.collective_policy != "fixed":
        by = settled_collective(chosen)
        yield f"The collective follows the network; the prediction is for {by} in every step."
    yield from _notes_on_cost(chosen, meeting)
    if chosen.name == "powersgd" and not meeting.model.profile.job.parameter_shapes:
        yield "The profile does not know the layers that powersgd works on: the prediction is for sending everything."
    if to_target and chosen.name not in LOSSLESS:
        yield from _notes_on_gain(chosen, by_ratio=method.by_ratio, meeting=meeting)


def _notes_on_cost(chosen: Compression, meeting: Meeting) -> Iterable[str]:
    """What a worker's own work is taken to be."""
    if _is_assumed(chosen, meeting):
        if chosen.name in ENCODED_GB_PER_S and meeting.compress_s(chosen) > 0:
            by = "what Top-k costs" if TIMED in meeting.compressors else "how fast it copies memory"
            yield f"What {chosen.name} costs a worker was not profiled: it is foretold from {by}."
        elif TIMED in meeting.compressors:
            yield f"What {chosen.name} costs a worker was not profiled: it is taken to be what Top-k costs."
        else:
            yield f"What {chosen.name} costs a worker was not profiled: it counts as nothing."


def _notes_on_gain(chosen: Compression, *, by_ratio: bool, meeting: Meeting) -> Iterable[str]:
    """What the number of steps to a target rests on."""
    measured = meeting.model.gain.log_ratios
    if chosen.name in RANDOM or (not by_ratio and meeting.model.losses.gain(chosen) is not None):
        return
    if not by_ratio or not measured:
        yield f"What {chosen.name} loses was not profiled: the steps to the target are those of dense training."
    elif chosen.ratio < math.exp(measured[0]) * (1 - 1e-9):
        yield (
            f"The smallest part of the gradient that was profiled is {100 * math.exp(measured[0]):.3f} %: the steps "
            f"to the "
            "target are those of sending that."
        )
    elif chosen.name != TIMED:
        yield f"What {chosen.name} keeps of the gradient is taken to be what Top-k keeps."
