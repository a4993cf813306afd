"""Averages a model part by part, in turn, each under the step that follows: hardly anybody ever waits for an average.

A fragment of the parameters leaves every ``H / fragments`` steps, so each is averaged every H steps, and workers are
far apart in a part of the model only. It travels, in a thread of its own, while the next step is computed. What arrives
is the average of what the workers were when it left: they take it over and keep what they have learned since,

    x_i <- x_i + (average - what x_i was)

A step then takes as long as computing or as a fragment's journey, whichever is longer. (Streaming DiLoCo, arXiv
2501.18512, without its outer optimizer; fragments are runs of the flat vector, which are equally large in any model.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor

from hetopt.core.run_spec import Compression
from hetopt.core.synchronization import Synchronization
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.exchange import ExchangeStats, RoundedSum, average_parameters, weights_by_samples
from hetopt.trainer.policies.sync.periodic import LocalSgd
from hetopt.trainer.steps.step import StepTrace
from hetopt.trainer.sync.synchroniser import ModelVector, Own, Synchronizer, Told


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """A part of the flat model.

    Attributes:
        begin, end: of its elements.
        rounded: sums its updates in fewer bytes; None: in fp32.
    """

    begin: int
    end: int
    rounded: RoundedSum | None


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """What a fragment's journey brought: the average, how far workers were apart, and what this one sent."""

    mean: Tensor
    divergence: float
    sent_bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Flight:
    """A fragment on its way.

    Attributes:
        place: of the fragment.
        snapshot: what this worker's was when it left.
        arrival: what comes back.
    """

    place: int
    snapshot: Tensor
    arrival: Future[Arrival]

    def correction(self) -> Tensor:
        """What this worker has to add to its fragment, once the average is there."""
        return self.arrival.result().mean - self.snapshot


class StreamingSync(Synchronizer):
    """One worker's end (see `Synchronizer`).

    Args:
        own: of this worker.
        sync: local SGD in fragments.
        compression: how averages are rounded.
        beside: makes a channel of a group of its own, for collectives that run beside all others.
        clock: seconds.
    """

    def __init__(
        self,
        own: Own,
        *,
        sync: Synchronization,
        compression: Compression,
        beside: Callable[[], Channel],
        clock: Callable[[], float],
    ) -> None:
        policy = LocalSgd(every_steps=sync.every_steps // sync.fragments, rate_power=sync.rate_power)
        super().__init__(own, f"{sync.name} in {sync.fragments} fragments", sync=sync, policy=policy)
        self._fragments = _cut(self._vector, self._base, sync, compression)
        self._beside = beside
        self._clock = clock
        self._counted = [self._samples] * len(self._fragments)
        """Samples of each worker until each fragment last left."""
        self._steps_since = self._next = self._landed = 0
        self._flight: Flight | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hetopt-averages")

    def after(self, step: int, trace: StepTrace, samples: Sequence[int]) -> StepTrace:
        """Take in the fragment that left a step ago, and send the next if it is time to (see `Synchronizer`)."""
        self._count(samples)
        waited_s, arrival = self._land()
        told = Told(step=step)
        if arrival is not None:
            told = Told(step=step, sent_bytes=arrival.sent_bytes, divergence=arrival.divergence)
        self._told.append(told)
        self._steps_since += 1
        if self._decide(step, self._steps_since).synchronise:
            self._depart()
        stats = ExchangeStats(sent_bytes=told.sent_bytes, compress_s=0.0, sync_s=waited_s)
        return replace(trace, reduce_end=self._stopwatch.mark(), exchange=stats)

    def _depart(self) -> None:
        place, fragment = self._next, self._fragments[self._next]
        snapshot = self._vector.read(fragment.begin, fragment.end)
        weight = self._weight(place)
        self._counted[place] = self._samples
        self._steps_since, self._next = 0, (place + 1) % len(self._fragments)
        arrival = self._thread.submit(self._fly, fragment, snapshot.clone(), weight)
        self._flight = Flight(place=place, snapshot=snapshot, arrival=arrival)

    def _fly(self, fragment: Fragment, mean: Tensor, weight: float) -> Arrival:
        """In the thread: nobody else touches the fragment's base meanwhile."""
        channel = self._beside()
        base = self._base[fragment.begin : fragment.end]
        step = partial(self._outer.take, begin=fragment.begin)
        divergence = average_parameters(mean, base, weight, channel, fragment.rounded, step=step)
        sent_bytes = sum(message.payload_bytes for message in channel.messages)
        return Arrival(mean=mean, divergence=divergence, sent_bytes=sent_bytes)

    def _land(self) -> tuple[float, Arrival | None]:
        """Take in what has left, if something has; how long that had to be waited for, and what it was."""
        flight, self._flight = self._flight, None
        if flight is None:
            return 0.0, None
        begun_s = self._clock()
        arrival = flight.arrival.result()
        waited_s = self._clock() - begun_s
        fragment = self._fragments[flight.place]
        now = self._vector.read(fragment.begin, fragment.end)
        self._vector.write(now.add_(flight.correction()), begin=fragment.begin)
        return waited_s, arrival

    def _weight(self, place: int) -> float:
        """This worker's part of the samples since a fragment last left; equal parts where there were none."""
        counts = [now - then for now, then in zip(self._samples, self._counted[place], strict=True)]
        return weights_by_samples(counts if any(counts) else (1,) * self._workers)[self._rank]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The average of all workers' models, running statistics included (see `Synchronizer`).

        What is on its way counts as if it had arrived; it is taken in when it is due, whoever looks before.
        """
        if self._vector.is_replaced:
            yield
            return
        mean = self._vector.read()
        if self._flight is not None:
            flown = self._fragments[self._flight.place]
            mean[flown.begin : flown.end] += self._flight.correction()
        base = self._base.clone()
        channel = self._channel()
        for place, fragment in enumerate(self._fragments):
            span = slice(fragment.begin, fragment.end)
            average_parameters(mean[span], base[span], self._weight(place), channel, fragment.rounded, exactly=True)
        with self._vector.replaced_by(mean):
            yield

    def _averages(self, steps: int) -> int:
        """All fragments together are one average: of so many steps that take in a fragment one counts."""
        before, self._landed = self._landed, self._landed + steps
        return self._landed // len(self._fragments) - before // len(self._fragments)

    def state(self) -> dict[str, Any]:
        """As of `Synchronizer`, with what this worker holds back and what is on its way."""
        flight = None
        if self._flight is not None:
            arrival = self._flight.arrival.result()  # from here on, nobody changes what fragments remember
            flight = {"place": self._flight.place, "snapshot": self._flight.snapshot, **vars(arrival)}
        return {
            **super().state(),
            "held_back": [{} if one.rounded is None else one.rounded.residual.state() for one in self._fragments],
            "counted": [list(samples) for samples in self._counted],
            "steps_since": self._steps_since,
            "next": self._next,
            "landed": self._landed,
            "flight": flight,
        }

    def _go_on(self, state: Mapping[str, Any]) -> None:
        for fragment, held_back in zip(self._fragments, state["held_back"], strict=True):
            if fragment.rounded is not None:
                fragment.rounded.residual.load_state(held_back)
        self._counted = [tuple(int(count) for count in counts) for counts in state["counted"]]
        self._steps_since, self._next = int(state["steps_since"]), int(state["next"])
        self._landed = int(state["landed"])
        self._flight = None if state["flight"] is None else _flown(state["flight"], self._base)


def _flown(saved: Mapping[str, Any], like: Tensor) -> Flight:
    """A flight that is over, and not taken in yet."""
    arrival: Future[Arrival] = Future()
    arrival.set_result(
        Arrival(mean=saved["mean"].to(like), divergence=float(saved["divergence"]), sent_bytes=int(saved["sent_bytes"]))
    )
    return Flight(place=int(saved["place"]), snapshot=saved["snapshot"].to(like), arrival=arrival)


def _cut(vector: ModelVector, flat: Tensor, sync: Synchronization, compression: Compression) -> tuple[Fragment, ...]:
    """Fragments of as many parameters each; running statistics go with the last one, and are not rounded."""
    parameters = vector.parameters
    count = min(sync.fragments, parameters)
    starts = [parameters * place // count for place in range(count + 1)]
    return tuple(
        Fragment(
            begin=begin,
            end=flat.numel() if end == parameters else end,
            rounded=RoundedSum.of(compression, end - begin, device=flat.device),
        )
        for begin, end in pairwise(starts)
    )
