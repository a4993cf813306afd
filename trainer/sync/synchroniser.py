"""Local SGD: averages of the parameters of workers that train for themselves, and the policies that say when.

The published order: the local step first, then the vote, then the average. With ``vote_lag`` 1 the votes of a step
travel while the next is computed, and what they ask for is done after that one: no step waits for a message of a few
bytes, nor, by that, for the slowest worker of each single step.

**Outer step** (DiLoCo, arXiv 2311.08105). The averaged update ``u`` of all workers, mean minus the last common
parameters ``x``, is taken as a gradient of its own, downhill. With the rate ``r`` and Nesterov's momentum ``m``::

    v <- m v + u
    x <- x + r (u + m v)

With ``r`` 1 and ``m`` 0 that is the average: local SGD. Every worker does the same to the same numbers, so that nothing
more is sent.

Under the ratio policy ``auto`` averages begin and end while a run goes on. They begin when all workers hold the same
parameters and optimizer states, and end with the averages of both.

**What local steps are worth.** Where workers have gone astray from each other their gradients no longer point where the
gradient of their mean does. After some averages each worker computes the gradient of its next samples twice: where it
had come by itself, ``g_i(x_i)``, and at the mean, which it trains on by. A step then makes

    sum_{i != j} g_i(x_i) g_j(x)  /  sum_{i != j} g_i(x) g_j(x)

of the progress of a step on summed gradients: samples of different workers share the signal, and no noise. The sums are
read off sketches of a few kilobytes (Charikar et al. 2002). With a small LSTM on characters and four workers this told
of 8 and 32 local steps 1.07 and 1.16 times the steps, which took 1.08 to 1.16 and 1.15 to 1.32 times as many.

**Policies** are pure functions, ``(state, observation) -> (state, decision)``, over values that all ranks hold alike,
asked after every step; the state is a small plain record, and travels in checkpoints. Local SGD and FedAvg average
after a number of steps that is known beforehand; SelSync while gradients change (2307.07950).

**SelSync.** A worker votes for a synchronisation where the relative change of its gradient's moving squared norm
reaches delta; as many as it takes decide for all. Asking whether at least m workers reach delta is asking whether the
m-th largest of their changes does: one number per step, and delta can be steered by it.

Where delta is steered (``auto``), only *when* is left to the votes, and *how often* is not. Left alone, large changes
come in bursts: averages right after an average bring next to nothing, and long stretches without one let workers drift
apart, most of all early, when gradients turn quickly (Lin et al. 2020, 1808.07217: early averages count most). So the
distance between two averages grows with the steps done, from one step to the wished mean, and is then kept between half
and twice of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from hetopt.core.artifact import Record
from hetopt.core.comm.options import AVERAGED
from hetopt.core.errors import BadInput
from hetopt.core.events.log import Event
from hetopt.core.run_rules import steps_of_epochs, why_not_local
from hetopt.core.run_spec import Compression, RunSpec, Synchronization
from hetopt.trainer.agreement import Gathering
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.exchange import Exchange, ExchangeStats, average_parameters, weights_by_samples
from hetopt.trainer.data.cursor import shuffled
from hetopt.trainer.steps.local_batch import samples_of_step
from hetopt.trainer.steps.step import StepTrace
from hetopt.trainer.steps.stopwatch import Stopwatch

Participants: TypeAlias = Sequence[int] | None
"""Ranks whose parameters enter an average now, which everyone receives; None: there is no average yet."""


class Rounds(Record):
    """State of `Periodic`: the number of averages so far.

    Attributes:
        done: number of averages so far.
    """

    done: int = 0


@dataclass(frozen=True, kw_only=True)
class Periodic:
    """Rule that averages parameters every H steps: of all workers (local SGD), or of some that are drawn anew (FedAvg).

    Local SGD is Stich 2018 (1805.09767), FedAvg McMahan et al. 2017 (1602.05629).

    H = 1 is BSP for optimizers that are linear in the gradient. In FedAvg some of the workers, drawn anew each time,
    enter an average that all receive. On devices the others rest. Machines that are paid for train on, and lose what
    they learned when they are not drawn.

    Attributes:
        every_steps: number of steps of a round, H.
        participants: fraction of the workers that enter an average, C; at least one worker does.
        workers: number of workers.
        seed: seed of the draws.
    """

    every_steps: int
    participants: float = 1.0
    workers: int = 1
    seed: int = 0

    initial: ClassVar[type[Rounds]] = Rounds
    """The state before the first round."""

    def decide(
        self, state: Rounds, step: int, local_steps: int, changes: tuple[float, ...] | None
    ) -> tuple[Rounds, Participants]:
        """Return the next state, and the ranks to average now; None: fewer than H ``local_steps`` were done.

        Args:
            state: state after the step before.
            step: not used.
            local_steps: steps since the last average, this one included.
            changes: not used.
        """
        if local_steps < self.every_steps:
            return state, None
        count = max(1, math.ceil(self.participants * self.workers - 1e-9))
        return Rounds(done=state.done + 1), sorted(shuffled(self.workers, self.seed, state.done)[:count].tolist())


STEERING_GAIN = 0.5
"""Speed at which ``auto`` moves the log of delta: two synchronisations that were not wished for raise it by a factor of
e, which at a share of 0.05 forty steps without one take back."""

LEAST_GAP, MOST_GAP = 0.5, 2.0
"""Fewest and most steps from one average to the next under ``auto``, over the wished mean."""

GROWTH = 0.5
"""Longest distance of averages under ``auto`` over the steps done, until the wished mean is reached: each stretch of
local steps is as long as the run before it."""


@dataclass(frozen=True, kw_only=True)
class GradientChange:
    """Relative change of the moving mean of one worker's squared gradient norm; not the same on all ranks.

        m_t = (1 - a) m_{t-1} + a |g_t|^2,    change_t = |m_t - m_{t-1}| / m_{t-1}        (SelSync, 2307.07950)

    The published weight of the newest, a, is a hundredth of the number of workers, 0.16 in its experiments. Here it is
    that number whatever the workers, so that a delta means the same on every cluster.

    Attributes:
        smoothing: weight of the newest squared norm, a.
        mean: moving mean of the squared norm; None: no step yet.
        change: relative change at the last step; 0 at the first.
    """

    smoothing: float
    mean: float | None = None
    change: float = 0.0

    def after(self, square_norm: float) -> GradientChange:
        """Return the change after a step of this squared gradient norm; infinite where the norm is not finite.

        A norm that is not finite leaves the mean as it was.
        """
        if not math.isfinite(square_norm):
            return replace(self, change=math.inf)
        if self.mean is None:
            return replace(self, mean=square_norm, change=0.0)
        mean = (1 - self.smoothing) * self.mean + self.smoothing * square_norm
        if self.mean == 0:
            return replace(self, mean=mean, change=0.0 if mean == 0 else math.inf)
        return replace(self, mean=mean, change=abs(mean - self.mean) / self.mean)


class SelSyncState(Record):
    """State of `SelSync`: the logarithm of delta, where that is steered.

    Attributes:
        log_delta: logarithm of delta; None: delta is fixed, or no change was seen yet.
    """

    log_delta: float | None = None


@dataclass(frozen=True, kw_only=True)
class SelSync:
    """Rule that averages parameters in steps where enough workers' gradient norms change enough (SelSync).

    With a fixed delta the first steps all average.

    Attributes:
        delta: relative change from which a worker votes; infinite: votes never count. None: it is steered.
        synchronised_share: fraction of the steps that are to average, where delta is steered.
        needed: number of workers that have to vote for an average.
        workers: number of workers.
        window: number of first steps, each of which averages while the moving norm settles; where delta is fixed.
        max_local_steps: most steps in a row without an average; None: any number.
    """

    delta: float | None
    synchronised_share: float
    needed: int
    workers: int
    window: int
    max_local_steps: int | None = None

    initial: ClassVar[type[SelSyncState]] = SelSyncState
    """The state before the first vote."""

    def threshold(self, state: SelSyncState) -> float | None:
        """Return delta, the relative change from which a worker votes.

        None: it is steered, and no change was seen yet.
        """
        if self.delta is not None:
            return self.delta
        return None if state.log_delta is None else math.exp(state.log_delta)

    def decide(
        self, state: SelSyncState, step: int, local_steps: int, changes: tuple[float, ...] | None
    ) -> tuple[SelSyncState, Participants]:
        """Return the next state, and all ranks if parameters are averaged now (else None); the same on all ranks.

        Args:
            state: state after the step before.
            step: number of steps since the run began, this one included.
            local_steps: steps since the last average, this one included.
            changes: relative change of each worker's gradient norm, in rank order; NaN counts as infinite. None: not
                known yet.
        """
        descending = sorted((math.inf if math.isnan(change) else change for change in changes or ()), reverse=True)
        # What the last of the needed votes depends on.
        change = descending[min(self.needed, len(descending)) - 1] if descending else None
        threshold = self.threshold(state)
        voted = change is not None and threshold is not None and threshold < math.inf and change >= threshold
        overdue = self.max_local_steps is not None and local_steps > self.max_local_steps
        if self.delta is None:
            state, is_due = self._paced(state, step, local_steps, change, voted=voted, overdue=overdue)
        else:
            is_due = voted or overdue or (step <= self.window and threshold != math.inf)
        return state, range(self.workers) if is_due else None

    def _paced(
        self, state: SelSyncState, step: int, gap: int, change: float | None, *, voted: bool, overdue: bool
    ) -> tuple[SelSyncState, bool]:
        """Return the next state, and whether to average now, where delta is steered: not too soon, nor too late.

        Args:
            state: state after the step before.
            step: number of steps since the run began, this one included.
            gap: steps since the last average, this one included.
            change: relative change that as many workers reach as votes are needed; None: not known.
            voted: whether ``change`` reaches delta.
            overdue: whether more local steps were done than the run allows.
        """
        mean = 1 / self.synchronised_share
        early = 1 + GROWTH * step
        if early < mean:
            return self._begun(state, change), overdue or gap >= early
        synchronise = overdue or gap >= MOST_GAP * mean or (voted and gap >= LEAST_GAP * mean)
        return self._steered(state, change, synchronised=synchronise), synchronise

    def _begun(self, state: SelSyncState, change: float | None) -> SelSyncState:
        """Return the state with delta set to a first ``change`` that is finite and above zero; else unchanged."""
        if state.log_delta is not None or change is None or not 0 < change < math.inf:
            return state
        return SelSyncState(log_delta=math.log(change))

    def _steered(self, state: SelSyncState, change: float | None, *, synchronised: bool) -> SelSyncState:
        """Return the state with delta moved to where the wished share of the steps synchronises.

        ``log delta += gain (synchronised - share)`` (Robbins and Monro 1951) is at rest where a step does so with the
        wished probability, whatever the scale of the changes, and follows them. Before a first change the state stays.
        """
        state = self._begun(state, change)
        if state.log_delta is None:
            return state
        return SelSyncState(log_delta=state.log_delta + STEERING_GAIN * (synchronised - self.synchronised_share))


SyncPolicy: TypeAlias = Periodic | SelSync
"""Rule that decides after every step, with the same arguments on every rank: its state; the steps done since the run
began and since the last average, this one included; and the relative change of the norm of each worker's gradient,
in rank order, of this step or of the one before (`Synchronization.vote_lag`). None: nobody asked, or there is none
yet. Not a number: taken as infinite, for whoever meets that had better say so."""


def choose_sync_policy(
    sync: Synchronization, *, workers: int, seed: int, dataset_size: int, global_batch_size: int
) -> SyncPolicy:
    """Return the rule for when parameters are averaged; not for ``bsp``, which never averages them.

    Args:
        sync: how and when workers synchronise; its name is not ``bsp``.
        workers: number of workers of the run.
        seed: seed of draws.
        dataset_size: number of samples of an epoch.
        global_batch_size: number of samples of a step.
    """
    match sync.name:
        case "local-sgd":
            return Periodic(every_steps=sync.every_steps, workers=workers)
        case "fedavg":
            return Periodic(
                every_steps=steps_of_epochs(sync.every_epochs, dataset_size, global_batch_size),
                participants=sync.participants,
                workers=workers,
                seed=seed,
            )
        case _:
            deltas = {"auto": None, "never": math.inf}
            needed = {"any": 1, "majority": workers // 2 + 1}
            return SelSync(
                delta=deltas[sync.delta] if isinstance(sync.delta, str) else sync.delta,
                synchronised_share=sync.synchronised_share,
                needed=needed.get(sync.votes, max(1, math.ceil(sync.quorum * workers - 1e-9))),
                workers=workers,
                window=sync.window,
                max_local_steps=sync.max_local_steps,
            )


VOTE_BYTES = 8


class ModelVector:
    """A model's trained parameters, then its floating-point buffers, as one flat fp32 vector to copy out and in.

    Its attribute ``parameters`` is the number of elements that are trained parameters.

    Args:
        model: module; parameters that are not trained, and counters, stay out of the vector.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._tensors = [*parameters, *(b for b in model.buffers() if b.is_floating_point() and b.numel())]
        self.parameters = sum(p.numel() for p in parameters)
        """Elements that are parameters; the first ones."""

    def read(self) -> Tensor:
        """Return a copy of trained parameters and buffers, [elements], fp32."""
        return torch.cat([tensor.detach().reshape(-1).float() for tensor in self._tensors])

    def write(self, flat: Tensor) -> None:
        """Overwrite the model's trained parameters and buffers, in place, with ``flat``, [elements]."""
        with torch.no_grad():
            parts = torch.split(flat, [tensor.numel() for tensor in self._tensors])
            for tensor, part in zip(self._tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


def outer_step(
    update: Tensor, velocity: Tensor, *, rate: float, momentum: float, parameters: int | None = None
) -> None:
    """Turn the workers' averaged update of the parameters into DiLoCo's outer step, in place, by Nesterov's momentum.

    Args:
        update: averaged update, 1-D; overwritten with the step to add to the last common parameters.
        velocity: momentum, as long as the parameters, or empty without momentum; overwritten with the next step's.
        rate: factor on the step.
        momentum: momentum of the outer step, in [0, 1); 0: ``velocity`` is not used.
        parameters: number of elements of the update that are parameters; running statistics behind them stay. None: all
            are.
    """
    update = update[:parameters]
    if momentum:
        velocity.mul_(momentum).add_(update)
        update.add_(velocity, alpha=momentum)
    update.mul_(rate)


SKETCH = 4096
"""Number of numbers in a sketch of a gradient: inner products are off by a 64th of the vectors' norms."""

LEAST_SIGNAL = 0.25
"""Least part of the summed gradient's energy that its signal is taken to be: in noise progress cannot be told."""

LOOKS_EVERY = 16
"""Averages from one look at what local steps are worth to the next; the first looks follow each other sooner."""


def sketched(vectors: Tensor, width: int = SKETCH) -> Tensor:
    """Return vectors, [n, elements], as sketches, [n, width], whose inner products are about those of the vectors.

    Elements are added up with random signs, the same on every worker.
    """
    numel = vectors.shape[1]
    signs = 2 * torch.randint(2, (numel,), dtype=torch.int8, generator=torch.Generator().manual_seed(numel)) - 1
    padded = functional.pad(vectors * signs.to(vectors.device), (0, -numel % width))
    return padded.view(len(vectors), -1, width).sum(1)


def progress_of(products: Sequence[float]) -> float:
    """Return the progress that a local step makes, over that of a step on summed gradients; the module has the formula.

    Args:
        products: four inner products: of the summed gradients at the mean with themselves, and with the gradients where
            the workers had come; then the sums of the same two of each worker's own.
    """
    whole, across, noise, noise_across = products
    signal, turned = whole - noise, across - noise_across
    return 1 + (turned - signal) / max(signal, LEAST_SIGNAL * whole, 1e-60)


class Synchronizer:
    """One worker's side of averaging parameters among local SGD workers.

    Asked after every step, on every rank, in the same order as everything else that workers do together.

    Args:
        model: model of this worker; now the same on all of them.
        optimizer: optimizer whose momentum is this worker's own.
        channel: returns a new channel to the other workers.
        stopwatch: clock of the device.
        sync: settings of what happens at an average.
        policy: rule for when to average.
        compression: compression by which updates are rounded.
        is_chosen: whether averages begin and end as the ratio policy says, and looks tell what they are worth.

    Attributes:
        is_begun: whether workers train for themselves now.

    Raises:
        BadInput: the compression's parts do not go together.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        channel: Callable[[], Channel],
        stopwatch: Stopwatch,
        sync: Synchronization,
        policy: SyncPolicy,
        compression: Compression,
        is_chosen: bool = False,
    ) -> None:
        self._is_chosen, self.is_begun = is_chosen, not is_chosen
        self._drifted: Tensor | None = None  # parameters before the last average, where the next step looks
        self._looked = (0.0, 0.0)  # weights of looks, and what they told, weighted
        self._sync = sync
        self._policy = policy
        self._state: Any = policy.initial()
        self._optimizer = optimizer
        self._vector = ModelVector(model)
        self._base = self._vector.read()
        self._velocity = self._base.new_zeros(self._vector.parameters if sync.outer_momentum else 0)
        self._outer_step = partial(
            outer_step,
            velocity=self._velocity,
            parameters=self._vector.parameters,
            rate=sync.outer_rate,
            momentum=sync.outer_momentum,
        )
        self._rounded: Exchange | None = None
        if compression.name != "identity":
            self._rounded = Exchange(compression, self._vector.parameters, device=self._base.device)
        self._local_model: Tensor | None = None  # while the average is in the model's place
        self._channel = channel
        self._stopwatch = stopwatch
        self._workers, self._rank = (c := channel()).workers, c.rank
        self._samples: tuple[int, ...] = (0,) * self._workers
        self._local_steps = 0
        self._change = GradientChange(smoothing=sync.smoothing)
        self._votes: Callable[[], list[list[float]]] | None = None
        # Step, bytes sent, and divergence where it averaged.
        self._unreported: deque[tuple[int, int, float | None]] = deque()

    def begin(self, weight: float, every_steps: int) -> None:
        """Have this worker train for itself, from parameters that all have alike; every worker must call it.

        Where it does so already, only the number of steps may change.

        Args:
            weight: weight of this worker's buffers in their mean, at the beginning.
            every_steps: steps from one average to the next.
        """
        self._policy = Periodic(every_steps=every_steps, workers=self._workers)
        if self.is_begun:
            return
        self._base = self._vector.read()
        buffers = self._base[self._vector.parameters :]
        if buffers.numel():
            self._channel().all_reduce(buffers.mul_(weight))
            self._vector.write(self._base)
        self._velocity.zero_()
        self.is_begun, self._state, self._looked = True, Rounds(), (0.0, 0.0)

    def end(self) -> None:
        """Leave all workers with the averages of their parameters and optimizer states, bit for bit; all must call it.

        What rounding held back is in them, and is owed no longer. Where averages are always made, or have not begun,
        nothing is done.
        """
        if not (self._is_chosen and self.is_begun):
            return
        weight, channel = weights_by_samples(self._samples)[self._rank], self._channel()
        parameters = self._vector.read()
        average_parameters(parameters, self._base, weight, channel, self._rounded, exactly=True)
        self._vector.write(parameters)
        for owed in {} if self._rounded is None else self._rounded.residual.kept().values():
            owed.zero_()
        kept = [
            value
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            for key, value in sorted(self._optimizer.state.get(parameter, {}).items())
            if key != "step" and isinstance(value, Tensor) and value.is_floating_point()
        ]
        if kept:
            flat = torch.cat([value.reshape(-1).float() for value in kept]).mul_(weight)
            channel.all_reduce(flat)
            for value, mean in zip(kept, torch.split(flat, [value.numel() for value in kept]), strict=True):
                value.copy_(mean.view(value.shape))
        self.is_begun, self._drifted = False, None
        self._samples, self._local_steps = (0,) * self._workers, 0

    def look(self, gradient: Callable[[], Tensor]) -> Tensor | None:
        """Return the gradient where this worker had come before the last average; None: no look is due.

        The model is put back afterwards.

        Args:
            gradient: computes the gradient, [elements], for the parameters that the model has then.
        """
        if self._drifted is None:
            return None
        mean = self._vector.read()
        self._vector.write(self._drifted)
        try:
            return gradient()
        finally:
            self._vector.write(mean)

    def looked(self, drifted: Tensor, gradient: Tensor, weight: float) -> None:
        """Learn what local steps are worth from a worker's two gradients of the same samples; all must call it.

        Args:
            drifted: gradient where this worker had come, [elements]; left as it is.
            gradient: gradient at the mean of all, [elements].
            weight: weight of this worker in the sum.
        """
        pair = torch.stack([gradient, drifted]).mul_(weight)
        message = torch.cat([sketched(pair).reshape(-1), pair @ pair[0]])
        self._channel().all_reduce(message)
        summed = message[:-2].view(2, -1)
        energy = progress_of([*(summed @ summed[0]).tolist(), *message[-2:].tolist()])
        self._looked = self._looked[0] / 2 + 1, self._looked[1] / 2 + energy
        self._drifted = None

    def after(self, step: int, trace: StepTrace, samples: Sequence[int]) -> StepTrace:
        """Vote after a step, average parameters if it is time, and return the step's trace with that; all must call it.

        Rounded averages raise as `average_parameters` does.

        Args:
            step: number of the step, from 1.
            trace: measurements of the step; with votes its ``gradient_energy`` must be there.
            samples: samples of the step of each worker, in rank order.

        Returns:
            Trace with what was sent and how long that took.
        """
        self._samples = tuple(before + now for before, now in zip(self._samples, samples, strict=True))
        self._local_steps += 1
        self._state, ranks = self._policy.decide(self._state, step, self._local_steps, self._voted(trace))
        sent_bytes = VOTE_BYTES if isinstance(self._policy, SelSync) else 0
        sync_s, work_s, divergence = 0.0, 0.0, None
        (weight, energy), is_known = self._looked, ranks is not None and self._looked[0] > 0
        if ranks is not None:
            channel = self._channel()
            begun_s = channel.now()
            divergence = self._synchronise(channel, ranks)
            sync_s = sum(message.time_s for message in channel.messages)
            work_s = channel.now() - begun_s - sync_s
            sent_bytes += sum(message.payload_bytes for message in channel.messages)
        self._unreported.append((step, sent_bytes, divergence))
        stats = ExchangeStats(
            sent_bytes=sent_bytes,
            compress_s=work_s,
            sync_s=sync_s,
            energy=weight if is_known else None,
            kept_energy=energy if is_known else None,
        )
        return replace(trace, reduce_end=self._stopwatch.mark(), exchange=stats)

    def _voted(self, trace: StepTrace) -> tuple[float, ...] | None:
        """Send this worker's gradient change, and return the changes of all workers, in rank order; all must call it.

        They are of this step where ``vote_lag`` is 0, else of the step before; the call waits for them. None: there was
        no step before, or another policy than `SelSync` decides, and nothing is sent.
        """
        if not isinstance(self._policy, SelSync):  # which alone goes by how gradients change
            return None
        assert trace.gradient_energy is not None
        self._change = self._change.after(trace.gradient_energy)
        arrived, now = self._votes, Gathering([self._change.change], self._workers).wait
        if self._sync.vote_lag == 0:
            return tuple(row[0] for row in now())
        rows = None if arrived is None else arrived()
        self._votes = now
        return None if rows is None else tuple(row[0] for row in rows)

    def _synchronise(self, channel: Channel, ranks: Sequence[int]) -> float:
        """Average the parameters of the workers ``ranks``, in place, on all; return how far all had come apart."""
        parameters = self._vector.read()
        rounds = self._state.done if self._is_chosen else 0
        if rounds and (rounds % LOOKS_EVERY == 0 or rounds & (rounds - 1) == 0):
            self._drifted = parameters.clone()
        weight = weights_by_samples(self._samples, ranks)[channel.rank]
        divergence = average_parameters(parameters, self._base, weight, channel, self._rounded, step=self._outer_step)
        self._vector.write(parameters)
        self._samples, self._local_steps = (0,) * self._workers, 0
        return divergence

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Make the model the average of all workers' inside, buffers included, then put it back; all must enter.

        Inside another such block it does nothing.
        """
        is_settled = self._local_steps == 0 and self._rounded is None
        if self._local_model is not None or is_settled:
            yield
            return
        mean, base = self._vector.read(), self._base.clone()
        weight = weights_by_samples(self._samples)[self._rank]
        average_parameters(mean, base, weight, self._channel(), self._rounded, exactly=True)
        self._local_model = self._vector.read()
        self._vector.write(mean)
        try:
            yield
        finally:
            self._vector.write(self._local_model)
            self._local_model = None

    def event(self, step: int) -> Event:
        """Return the field ``sync``: averages, bytes sent and divergence of the steps up to ``step`` not told before.

        Empty: there are no such steps.
        """
        entries = [self._unreported.popleft() for entry in list(self._unreported) if entry[0] <= step]
        if not entries:
            return {}
        divergences = [divergence for _, _, divergence in entries if divergence is not None]
        summary: Event = {
            "policy": self._sync.name,
            "synchronised": len(divergences),
            "local": len(entries) - len(divergences),
            "sent_bytes": sum(sent_bytes for _, sent_bytes, _ in entries),
        }
        if divergences:
            summary["divergence"] = round(sum(divergences) / len(divergences), 9)
        return {"sync": summary}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: this worker's model, optimizer, residual, and votes, which are waited for.

        Empty: workers do not train for themselves now, so all have the same. Tensors are not copied.
        """
        if not self.is_begun:
            return {}
        return {
            "policy": self._sync.name,
            "policy_state": self._state.model_dump(mode="json"),
            "own": self._vector.read() if self._local_model is None else self._local_model,
            "base": self._base,
            "outer": self._velocity,
            "optimizer": self._optimizer.state_dict(),
            "samples": list(self._samples),
            "held_back": {} if self._rounded is None else self._rounded.state(),
            "local_steps": self._local_steps,
            "mean": self._change.mean,
            "change": self._change.change,
            "votes": None if self._votes is None else self._votes(),
            "looked": list(self._looked),
            "drifted": self._drifted,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned.

        A state of another rule, or an empty one, leaves all but the base alone.

        The base is then the model as it is.

        Raises:
            BadInput: what rounding held back is of another model.
        """
        self._base = self._vector.read()
        if state.get("policy") != self._sync.name:
            return
        self._state = type(self._policy.initial()).model_validate(state["policy_state"])
        self.is_begun = True
        self._looked, self._drifted = (state["looked"][0], state["looked"][1]), state["drifted"]
        self._vector.write(state["own"].to(self._base))
        self._base = state["base"].to(self._base)
        self._velocity.copy_(state["outer"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._samples = tuple(int(count) for count in state["samples"])
        if self._rounded is not None:
            self._rounded.load_state(state["held_back"])
        self._local_steps = int(state["local_steps"])
        self._change = replace(self._change, mean=state["mean"], change=float(state["change"]))
        rows = state["votes"]
        self._votes = None if rows is None else lambda: rows


def make_synchroniser(
    spec: RunSpec,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    device: torch.device,
    clock: Callable[[], float],
    stopwatch: Stopwatch,
    dataset_size: int,
) -> Synchronizer | None:
    """Return the parameter averaging of a run.

    None: gradients are summed in every step (``bsp``), or one worker trains.

    Where the ratio policy chooses whether it is done, averages are rounded to 8 bits.

    Args:
        spec: spec of the run.
        model: model of this worker; now the same on all of them.
        optimizer: optimizer whose momentum is this worker's own.
        device: device of the model.
        clock: returns seconds.
        stopwatch: clock of the device.
        dataset_size: number of samples of an epoch.

    Raises:
        BadInput: something else that the run wants needs gradients to be exchanged.
    """
    if not (spec.is_local or spec.may_average) or len(spec.workers) == 1:
        return None
    reason = why_not_local(spec)
    if reason is not None:
        raise BadInput(reason, hint="use sync bsp, or leave the other out")
    policy = choose_sync_policy(
        spec.sync,
        workers=len(spec.workers),
        seed=spec.seed,
        dataset_size=dataset_size,
        global_batch_size=samples_of_step(spec),
    )
    return Synchronizer(
        model,
        optimizer,
        channel=partial(Channel, clock=clock, on=device),
        stopwatch=stopwatch,
        sync=spec.sync,
        policy=policy,
        compression=Compression(name=AVERAGED[-1]) if spec.may_average else spec.compression,
        is_chosen=spec.may_average,
    )
