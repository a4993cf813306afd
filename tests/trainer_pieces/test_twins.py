"""Twins: what a trial says of their losses, and that training them changes nothing.

Training twins changes nothing of the training itself, and tells apart what holds a task back.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, strategies as st

from hetopt.core.events.log import EventLog
from hetopt.core.run_spec import Compression, RunSpec, StopRule, WorkerSpec
from hetopt.core.training_laws import MOST_LOST
from hetopt.trainer.checkpoints.folder import CheckpointSaver
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.policies.ratio.auto import CHUNK_STEPS, HARMFUL, LEAST_DROP, MOST_STEPS, PairedTrial
from hetopt.trainer.tasks.load import load_task
from hetopt.trainer.training import Training, build_model, try_twins

CHUNKS = MOST_STEPS // CHUNK_STEPS


def said(whole, thin, samples=(8,)):
    """What a trial says of these losses by chunk, and after how many."""
    trial = PairedTrial(ratio=0.001)
    for chunk, pair in enumerate(zip(whole, thin, strict=True), start=1):
        verdict = trial.after([[*pair, size] for size in samples])
        if verdict is not None:
            return verdict.says, chunk
    return None, CHUNKS


def falling(drop):
    return [10.0 - drop * chunk for chunk in range(CHUNKS)]


FLAT = [2.3] * CHUNKS


@pytest.mark.parametrize(
    ("whole", "thin", "verdict"),
    [
        (falling(1.0), falling(1.0), ("harmless", 2)),
        # As soon as something was learned.
        (falling(0.2), falling(0.2), ("harmless", 1 + math.ceil(LEAST_DROP * 10 / 0.2 - 1e-9))),
        (falling(1.0), [10.0] * CHUNKS, ("harmful", 2)),
        # It drifts away before anything was learned.
        (FLAT, [2.3 + 0.05 * chunk for chunk in range(CHUNKS)], ("harmful", 2)),
        (FLAT, FLAT, ("undecided", CHUNKS)),
        (falling(1.0), [10.0, math.nan, math.nan] + [9.0] * (CHUNKS - 3), ("harmful", 2)),
        (falling(1.0), [10.0, math.inf, math.inf] + [9.0] * (CHUNKS - 3), ("harmful", 2)),
    ],
)
def test_what_a_twins_losses_say(whole, thin, verdict):
    assert said(whole, thin) == verdict


def test_a_worker_without_memory_for_two_more_models_says_no():
    trial = PairedTrial(ratio=0.01)
    rows = [[5.0, 5.0, 8.0], [math.nan, math.nan, 8.0]]
    assert trial.after(rows) is None
    verdict = trial.after(rows)
    assert verdict is not None
    assert verdict.says == "harmful"


@given(
    drops=st.lists(st.floats(-0.2, 1.0), min_size=CHUNKS, max_size=CHUNKS),
    lags=st.lists(st.floats(-1.0, 1.0), min_size=CHUNKS, max_size=CHUNKS),
    scale=st.floats(0.1, 100),
)
def test_units_of_the_loss_do_not_matter_and_it_always_ends(drops, lags, scale):
    whole = [10.0 - sum(drops[:chunk]) for chunk in range(CHUNKS)]
    thin = [one + lag for one, lag in zip(whole, lags, strict=True)]
    said_of = said(whole, thin)
    assert said_of[0] in ("harmless", "harmful", "undecided")
    scaled = said([scale * one for one in whole], [scale * one for one in thin])
    near = min(
        abs((t - w) - part * max(whole[0] - w, LEAST_DROP * 10))
        for w, t in zip(whole, thin, strict=True)
        for part in (MOST_LOST, HARMFUL)
    )
    if near > 1e-6 and min(abs(whole[0] - w - LEAST_DROP * 10) for w in whole) > 1e-6:
        assert scaled == said_of


@given(losses=st.lists(st.tuples(st.floats(1, 9), st.floats(1, 9)), min_size=3, max_size=3))
def test_workers_count_by_their_samples(losses):
    """A worker of 30 samples is three of 10 with its losses."""
    one, many = PairedTrial(ratio=0.01), PairedTrial(ratio=0.01)
    for whole, thin in losses:
        one.after([[whole, thin, 30.0], [5.0, 5.0, 10.0]])
        many.after([[whole, thin, 10.0]] * 3 + [[5.0, 5.0, 10.0]])
    assert one.whole == pytest.approx(many.whole)
    assert one.thin == pytest.approx(many.thin)


@pytest.fixture
def training(tmp_path):
    """A few steps into the bundled digits, by one worker alone."""
    spec = RunSpec(
        task="digits",
        workers=(WorkerSpec(host="h0", type="t", local_batch_size=64),),
        stop=StopRule(max_steps=50),
        compression=Compression(),
    )
    context = WorkerContext(
        spec=spec,
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        run_dir=tmp_path,
        events=EventLog(None),
        stop_requested=lambda: False,
    )
    task = load_task("digits")
    saver = CheckpointSaver(context)
    made = Training(context, task, task.data(None), build_model(task, context.device, spec.seed), saver)
    made.run_period(3, learning_rate_scale=1.0, all_meet=True, checkpoint_s=0.0).wait()
    yield made
    made.close()


def everything(training):
    shared, own = training.shared_state(), training.own_state()
    return copy.deepcopy(
        {
            "model": dict(shared.model),
            "optimizer": dict(shared.optimizer),
            "cursor": dict(shared.cursor),
            "memory": own.memory,
            "random": own.cpu_generator,
            "step": shared.step,
        }
    )


def test_it_changes_nothing(training):
    before = everything(training)
    try_twins(training, 0.01)
    torch.testing.assert_close(everything(training), before, rtol=0, atol=0)


def test_all_of_the_gradient_is_harmless_and_one_element_is_not(training):
    assert try_twins(training, 1.0).says == "harmless"
    assert try_twins(training, 1e-9).says == "harmful"
