"""Shares in columns against the solver of the trainer, and the level against everything in its box."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetopt.core.batch_partition import GroupShares, WorkerTime, solve_group_shares
from hetopt.core.errors import BadInput
from hetopt.optimizer.search.group_shares import Lines, earliest_finish, feasible, share

WORKERS = st.builds(
    WorkerTime,
    fixed_s=st.floats(0, 2),
    per_sample_s=st.floats(1e-4, 1),
    floor_s=st.sampled_from([0.0, 0.5]),
    max_samples=st.one_of(st.none(), st.integers(1, 40)),
)
GROUPS = st.lists(st.tuples(WORKERS, st.integers(1, 7)), min_size=1, max_size=3)

IN_PARTS = st.builds(
    lambda fixed_s, per_sample_s, floor_s, part, once: WorkerTime(
        fixed_s=fixed_s, per_sample_s=per_sample_s, floor_s=floor_s, micro_batch=part, once_s=once * fixed_s
    ),
    st.floats(0, 2),
    st.floats(1e-4, 1),
    st.sampled_from([0.0, 0.5]),
    st.integers(1, 20) | st.none(),
    st.floats(0, 1),
)


def columns(groups: list[tuple[WorkerTime, int]], width: int = 3) -> tuple[Lines, np.ndarray]:
    """One row, padded to ``width`` groups."""
    padded = [*groups, *[(groups[0][0], 0)] * (width - len(groups))]
    most = [np.inf if w.max_samples is None else w.max_samples for w, _ in padded]
    lines = Lines(
        fixed_s=np.array([[w.fixed_s for w, _ in padded]]),
        per_sample_s=np.array([[w.per_sample_s for w, _ in padded]]),
        floor_s=np.array([[w.floor_s for w, _ in padded]]),
        most=np.array([most], dtype=np.float64),
        together=np.array([[np.inf if w.micro_batch is None else w.micro_batch for w, _ in padded]]),
        once_s=np.array([[w.once_s for w, _ in padded]]),
    )
    return lines, np.array([[count for _, count in padded]])


def solved(groups: list[tuple[WorkerTime, int]], batch: int) -> GroupShares | None:
    try:
        return solve_group_shares(groups, batch)
    except BadInput:
        return None


@settings(max_examples=300)
@given(GROUPS, st.integers(1, 200))
def test_columns_solve_what_the_trainer_solves(groups: list[tuple[WorkerTime, int]], batch: int) -> None:
    lines, workers = columns(groups)
    exact = solved(groups, batch)
    assert bool(feasible(lines, workers, np.array([batch]))[0]) == (exact is not None)
    if exact is None:
        return
    found = share(lines, workers, np.array([batch]))
    np.testing.assert_allclose(found.compute_s[0], exact.compute_s, rtol=1e-9)
    assert int((workers * found.base + found.raised).sum()) == batch
    assert (found.raised < np.maximum(workers, 1)).all()


@settings(max_examples=100)
@given(st.lists(st.tuples(GROUPS, st.integers(1, 200)), min_size=1, max_size=8))
def test_rows_do_not_disturb_each_other(rows: list[tuple[list[tuple[WorkerTime, int]], int]]) -> None:
    possible = [(groups, batch) for groups, batch in rows if solved(groups, batch) is not None]
    if not possible:
        return
    parts = [columns(groups) for groups, _ in possible]
    lines = Lines(**{f: np.concatenate([getattr(p, f) for p, _ in parts]) for f in Lines.__dataclass_fields__})
    workers = np.concatenate([w for _, w in parts])
    together = share(lines, workers, np.array([batch for _, batch in possible]))
    for row, ((line, count), (_, batch)) in enumerate(zip(parts, possible, strict=True)):
        alone = share(line, count, np.array([batch]))
        np.testing.assert_array_equal(together.base[row], alone.base[0])
        assert together.compute_s[row] == alone.compute_s[0]


@settings(max_examples=80)
@given(GROUPS, st.integers(1, 120))
def test_nothing_in_a_box_finishes_before_its_level(groups: list[tuple[WorkerTime, int]], batch: int) -> None:
    lines, workers = columns(groups)
    bound = earliest_finish(lines, workers, np.array([batch]))[0]
    for counts in itertools.product(*(range(1, count + 1) for _, count in groups)):
        exact = solved([(worker, count) for (worker, _), count in zip(groups, counts, strict=True)], batch)
        if exact is not None:
            assert bound <= exact.compute_s * (1 + 1e-9)


@given(IN_PARTS, st.integers(1, 200))
def test_a_local_batch_in_micro_batches_takes_what_its_parts_take(worker: WorkerTime, samples: int) -> None:
    """Each part takes a step of its own, but for the update, which is done once; more samples take no less."""
    lines, _ = columns([(worker, 1)], width=1)
    took = float(lines.time_s(np.array([[float(samples)]]))[0, 0])
    parts = 1 if worker.micro_batch is None else -(-samples // worker.micro_batch)
    part_s = max(worker.floor_s, worker.fixed_s + worker.per_sample_s * samples / parts)
    assert took == pytest.approx(worker.time_s(samples))
    assert took == pytest.approx(parts * part_s - (parts - 1) * worker.once_s)
    assert worker.time_s(samples + 1) >= worker.time_s(samples) - 1e-12
    line_s = max(worker.floor_s, worker.fixed_s + worker.per_sample_s * samples)
    over = float(lines.most_over_line_s(np.array([[float(samples)]]))[0, 0])
    assert line_s - 1e-12 <= took <= line_s + over + 1e-9


@settings(max_examples=100)
@given(st.lists(st.tuples(IN_PARTS, st.integers(1, 7)), min_size=1, max_size=3), st.integers(1, 200))
def test_shares_in_columns_take_what_their_workers_take(groups: list[tuple[WorkerTime, int]], batch: int) -> None:
    lines, workers = columns(groups)
    if not feasible(lines, workers, np.array([batch]))[0]:
        return
    found = share(lines, workers, np.array([batch]))
    largest = found.base[0] + (found.raised[0] > 0)
    slowest = max(worker.time_s(int(samples)) for (worker, _), samples in zip(groups, largest, strict=False))
    assert float(found.compute_s[0]) == pytest.approx(slowest)
