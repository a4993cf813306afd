"""Twins: what a trial says of their losses, and that training them changes nothing.

Training twins changes nothing of the training itself, and tells apart what holds a task back.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch

from hetopt.core.events.log import EventLog
from hetopt.core.run_spec import Compression, RunSpec, StopRule, WorkerSpec
from hetopt.trainer.checkpoints.folder import CheckpointSaver
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.policies.ratio.auto import CHUNK_STEPS, LEAST_DROP, MOST_STEPS, PairedTrial
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
