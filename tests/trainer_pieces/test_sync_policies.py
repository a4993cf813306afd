"""Laws of the synchronisation policies, which are pure: when models are averaged."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings, strategies as st

from hetopt.core.run_rules import steps_of_epochs, why_not_local
from hetopt.core.run_spec import Compression, Synchronization
from hetopt.trainer.sync.synchroniser import GradientChange, SelSync, choose_sync_policy

from .runs import run_of

WORKERS = 4


def run(sync: Synchronization, changes, *, steps: int):
    """The steps that synchronise (from 1) and their decisions, where votes arrive at once."""
    policy = choose_sync_policy(sync, workers=WORKERS, seed=7, dataset_size=1000, global_batch_size=10)
    assert policy is not None
    state, local, found = policy.initial(), 0, {}
    for step in range(1, steps + 1):
        local += 1
        told = changes(step) if isinstance(policy, SelSync) else None
        state = type(state).model_validate(state.model_dump(mode="json"))  # as a checkpoint does
        state, decision = policy.decide(state, step, local, told)
        if decision is not None:
            found[step], local = decision, 0
    return found, state


@given(every=st.integers(1, 20), steps=st.integers(1, 100))
def test_local_sgd_averages_every_so_many_steps(every, steps):
    found, _ = run(Synchronization(name="local-sgd", every_steps=every), None, steps=steps)
    assert list(found) == list(range(every, steps + 1, every))


def test_fedavg_counts_its_rounds_in_epochs_and_draws_another_part_each_time():
    sync = Synchronization(name="fedavg", participants=0.5, every_epochs=0.1)
    found, _ = run(sync, None, steps=300)
    assert list(found) == list(range(10, 301, 10))
    drawn = list(map(tuple, found.values()))
    assert all(len(those) == 2 for those in drawn)
    assert {rank for those in drawn for rank in those} == set(range(WORKERS))
    assert len(set(drawn)) > 3
    everyone, _ = run(Synchronization(name="fedavg"), None, steps=50)
    assert set(map(tuple, everyone.values())) == {tuple(range(WORKERS))}
    assert steps_of_epochs(0.001, 100, 64) == 1


changes_of_all = st.lists(st.floats(0, 10), min_size=WORKERS, max_size=WORKERS).map(tuple)


@given(changes=changes_of_all, delta=st.floats(0, 10), votes=st.sampled_from(["any", "majority", "quantile"]))
def test_selsync_synchronises_exactly_where_enough_workers_vote(changes, delta, votes):
    sync = Synchronization(name="selsync", delta=delta, votes=votes, quorum=0.75, window=1)
    found, _ = run(sync, lambda step: changes, steps=3)
    asking = sum(change >= delta for change in changes)
    needed = {"any": 1, "majority": 3, "quantile": 3}[votes]
    assert (3 in found) == (asking >= needed)


@given(changes=changes_of_all)
def test_delta_0_always_synchronises_and_never_never_does(changes):
    always, _ = run(Synchronization(name="selsync", delta=0), lambda step: changes, steps=40)
    never, _ = run(Synchronization(name="selsync", delta="never"), lambda step: changes, steps=40)
    assert list(always) == list(range(1, 41))
    assert not never


def test_what_is_not_a_number_is_a_vote():
    found, _ = run(Synchronization(name="selsync", window=1), lambda step: (0.0, math.nan, 0.0, 0.0), steps=2)
    assert 2 in found


@given(scale=st.floats(1e-6, 1e6), share=st.floats(0.05, 0.6), seed=st.integers(0, 100))
@settings(max_examples=15, deadline=None)
def test_auto_finds_the_delta_of_a_wished_share_whatever_the_scale(scale, share, seed):
    draws = random.Random(seed)
    sync = Synchronization(name="selsync", delta="auto", synchronised_share=share, window=1)
    found, state = run(sync, lambda step: tuple(scale * draws.random() for _ in range(WORKERS)), steps=600)
    late = sum(step > 100 for step in found) / 500
    assert late == pytest.approx(share, abs=0.06)
    assert state.log_delta is not None


@given(norms=st.lists(st.floats(0, 1e6), min_size=1, max_size=50), smoothing=st.floats(0.01, 1))
def test_the_change_is_a_number_from_the_first_step_on(norms, smoothing):
    change = GradientChange(smoothing=smoothing)
    for norm in norms:
        before, change = change, change.after(norm)
        assert change.change >= 0
        assert not math.isnan(change.change)
        if before.mean:
            assert change.mean is not None
            assert change.change == pytest.approx(abs(change.mean - before.mean) / before.mean)
    assert change.after(math.nan).change == math.inf
    assert change.after(math.nan).mean == change.mean


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({}, None),
        ({"compression": Compression(name="topk", ratio=0.1)}, "leave most"),
        ({"compression": Compression(name="int8")}, None),
        ({"collective_policy": "cheapest"}, "nothing to decide"),
        ({"precision": "fp16"}, "bf16"),
    ],
)
def test_what_needs_exchanged_gradients_is_refused_with_a_reason(changes, key):
    reason = why_not_local(run_of(8, 8, sync=Synchronization(name="selsync"), **changes))
    assert reason is None if key is None else key in reason
