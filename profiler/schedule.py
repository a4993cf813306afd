"""The schedule of a probe within its time: batch sizes, divisions of the host, and pilots."""

from __future__ import annotations

from collections.abc import Sequence

from hetopt.core.memory import Precision
from hetopt.core.run_spec import CompressorProbe, NetworkProbe, PilotProbe, ProbeSchedule, Sweep


def batch_ladder(batch_size: int, *, dataset_size: int | None, below: int = 4, above: int = 2) -> tuple[int, ...]:
    """Return the local batch sizes to time, ascending: ``batch_size`` times powers of two, 2 to ``dataset_size``.

    1 only if ``batch_size`` is 1, as BatchNorm cannot normalise one sample.

    Args:
        batch_size: the task's global batch size, samples.
        dataset_size: samples in one epoch, which no size exceeds; None: not known.
        below: halvings of ``batch_size``.
        above: doublings of ``batch_size``, as one worker alone may have to take so many.
    """
    sizes = {max(min(2, batch_size), round(batch_size * 2.0**power)) for power in range(-below, above + 1)}
    return tuple(sorted({size if dataset_size is None else min(size, dataset_size) for size in sizes}))


SWEEP_SHARE = 0.35
PILOT_SHARE = 0.5
"""Part of a probe's time that pilots have; sweeps have `SWEEP_SHARE`, and the rest is for facts about the host, the
network and the compressors."""

NETWORK_SHARE = 0.15
"""Part of a probe's time that timing the collectives may take at most."""

COMPRESSING_SHARE = 0.05
"""Part of a probe's time that timing compressors may take; one that has begun is timed to its end."""

MAX_PILOT_EPOCHS = 50

PILOT_REPEATS = 3
"""Number of pilots at each batch size, with other seeds: steps to a target easily differ by a third between seeds."""


LATER_PASSES = 2
LATER_PASS_SHARE = 0.2
"""Part of a sweep's time that each of its `LATER_PASSES` later passes over the batch sizes has. Machines that share
hardware change their speed by 10 to 20 % over seconds; steps timed at one moment only show that moment's."""


def make_schedule(
    *,
    seed: int,
    workers: int,
    logical_cpus: int,
    batch_size: int,
    dataset_size: int,
    time_budget_s: float,
    accelerators: int = 0,
    syncs: Sequence[str] = (),
    precisions: Sequence[Precision] = ("fp32",),
    exchanges: Sequence[str] = (),
    timed: Sequence[str] = (),
) -> ProbeSchedule:
    """Return the schedule of a probe on one host of about ``time_budget_s`` seconds, start-up not included.

    Step times are swept twice: one worker with the whole host to itself, then all workers at once with the processors
    shared out. Pilots run at the task's batch size, at four times and twice that, and under each sync in ``syncs`` at
    the task's batch size, then again with other seeds, as far as the time goes. Each precision is swept, in an equal
    part of that time, and the first pilot is run again in each of the others.

    Args:
        seed: seed of weights, sample order and the probe's own choices.
        workers: worker processes of the probe.
        logical_cpus: processors that they share.
        batch_size: the task's own global batch size, samples.
        dataset_size: samples in one epoch.
        time_budget_s: the whole probe, in seconds. A slow task still gets a few steps at the two smallest batch sizes.
        accelerators: number of GPUs of the host; with any, a worker alone has one GPU and its part of the processors.
        syncs: ways to synchronise whose cost in steps is to be measured, as `PilotProbe.sync`; empty: none.
        precisions: precisions to compute in, at least one; all else is measured in the first.
        exchanges: compressions whose loss is to be measured on the pilots' gradients; empty: none.
        timed: compressions whose own work is to be timed, beside the usual ones; empty: none.
    """
    shared_threads = max(1, logical_cpus // workers)
    alone_threads = max(1, logical_cpus // accelerators) if accelerators else logical_cpus
    divisions = [(1, alone_threads)] + ([(workers, shared_threads)] if workers > 1 else [])
    ladder = batch_ladder(batch_size, dataset_size=dataset_size)
    sweeps = tuple(
        Sweep(
            concurrent_workers=concurrent,
            threads_per_worker=threads,
            local_batch_sizes=ladder,
            timed_steps=14,
            time_limit_s=SWEEP_SHARE * time_budget_s / (len(divisions) * len(precisions)),
            precision=precision,
        )
        for precision in precisions
        for concurrent, threads in divisions
    )
    batches = {size for size in (batch_size, 4 * batch_size, 2 * batch_size) if workers <= size <= dataset_size / 4}
    order = sorted(
        batches or {min(max(batch_size, workers), dataset_size)}, key=lambda size: (size != batch_size, -size)
    )
    steps_an_epoch = max(1, dataset_size // batch_size)
    usual, *others = precisions
    plain = [(size, None, usual) for size in order]
    compared = [(order[0], None, other) for other in others]  # behind the pilot that they are held against
    kinds: list[tuple[int, str | None, Precision]] = [
        *plain[:1],
        *compared,
        *plain[1:],
        *((order[0], sync, usual) for sync in syncs),
    ]
    pilots = tuple(
        PilotProbe(
            global_batch_size=size,
            # The first pilot carries the samples of noise and gain; a slow task spends half of its time there.
            time_limit_s=PILOT_SHARE
            * time_budget_s
            * ((0.5 if index == 0 and repeat == 0 else 0.35) if precision == usual else 0.35 / len(others)),
            max_epochs=MAX_PILOT_EPOCHS,
            sample_every_steps=min(10, max(1, steps_an_epoch // 4)),
            repeat=repeat,
            sync=sync,
            precision=precision,
        )
        for repeat in range(PILOT_REPEATS)
        for index, (size, sync, precision) in enumerate(kinds)
    )
    return ProbeSchedule(
        seed=seed,
        sweeps=sweeps,
        network=NetworkProbe() if workers > 1 else None,
        compressors=CompressorProbe(
            names=tuple(dict.fromkeys((*CompressorProbe().names, *timed))),
            time_limit_s=COMPRESSING_SHARE * time_budget_s / len(divisions),
        ),
        pilots=pilots,
        exchanges=tuple(exchanges),
        time_limit_s=time_budget_s,
    )
