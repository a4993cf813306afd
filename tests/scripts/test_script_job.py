"""A script as people have them: profiled unchanged, planned for, converted, launched on unequal workers, stopped."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import hetopt as api
from hetopt.api.options import Local
from hetopt.api.profiling_script import profile_script
from hetopt.core.errors import BadInput
from hetopt.core.interruption import Reporter
from hetopt.core.profile import Profile
from hetopt.core.run_status import RunState
from hetopt.optimizer.plan import Plan
from tests.docs.shown import assert_shown
from tests.face.conftest import Answer, hetopt, until

__all__ = ["hetopt"]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "script"
EPOCHS = 3
BATCH = 32
"""Half of what the script has by itself."""

EPOCH_STEPS = math.ceil(1500 / BATCH)

BEFORE = str(EXAMPLES / "train.py")


@pytest.fixture(scope="module")
def profile() -> Profile:
    """In less time than a person may ask for."""
    return profile_script(
        EXAMPLES / "train.py",
        ("--batch-size", str(BATCH)),
        dataset_size=None,
        workers=2,
        accelerators=0,
        time_budget_s=2.0,
        seed=0,
        machine_type="local",
        reporter=Reporter(),
    )


@pytest.fixture(scope="module")
def plan(profile: Profile) -> Plan:
    return api.recommend(profile, budget_usd=2, epochs=EPOCHS)


def test_what_a_plan_needs_is_measured(profile: Profile) -> None:
    job = profile.job
    assert (job.task, job.script) == ("train.py", (BEFORE, "--batch-size", "32"))
    assert (job.parameters, job.gradient_bytes, job.dataset_size, job.batch_size) == (38_282, 153_128, 1500, 32)
    # Two for each product and sum, three passes; nobody asks for the gradient of the images.
    products = {"conv1": 64 * 9 * 16, "conv2": 64 * 9 * 16 * 32, "fc1": 512 * 64, "fc2": 64 * 10}
    assert job.flops_per_sample == 6 * sum(products.values()) - 2 * products["conv1"]
    alone, beside = profile.devices
    assert (alone.workers_per_host, beside.workers_per_host) == (1, 2)
    for device in (alone, beside):
        sizes = [point.local_batch_size for point in device.step_times]
        assert len(sizes) >= 2
        assert set(sizes) <= {2, 4, 8, 16, 32, 64, 128}
    # The last batch of an epoch, which may be smaller, is counted too, and not timed.
    assert {link.collective for link in profile.links} == {"all_reduce", "all_gather", "broadcast"}
    assert {cost.name for cost in alone.compressors} == {"topk", "bf16", "int8", "int4"}


def test_a_plan_is_of_the_scripts_own_batch_and_says_when_it_ends(profile: Profile, plan: Plan) -> None:
    with pytest.raises(BadInput, match="cannot see how long the script"):
        api.recommend(profile, budget_usd=2)
    assert plan.run.global_batch_size == 32
    assert plan.run.script == profile.job.script


def test_it_is_launched_stopped_resumed_and_reported(plan: Plan, tmp_path: Path) -> None:
    text = (EXAMPLES / "train_hetopt.py").read_text(encoding="utf-8")
    for before, after in (
        ("range(args.epochs)", 'range(run.resume({"schedule": scheduler}), args.epochs)'),
        (
            "scheduler.step()",
            'scheduler.step()\n            run.checkpoint({"schedule": scheduler})\n'
            '            if run.is_leader:\n                (run.outputs / f"{epoch}.txt").write_text("of the script")',
        ),
    ):
        assert text.count(before) == 1
        text = text.replace(before, after)
    script = tmp_path / "resumable.py"
    script.write_text(text, encoding="utf-8")
    with pytest.raises(BadInput, match="uses neither DistributedDataParallel nor a session"):
        api.launch(plan, on=Local(slowdowns=(1, 3)))
    refused = api.launch(plan, on="local", script=[str(script), "--epochs", "1"])
    assert refused.wait().state is RunState.FAILED
    assert "The plan steps by 32 samples, and resumable.py by 64." in str(refused.status().reason)
    arguments = ["--epochs", str(EPOCHS), "--batch-size", str(BATCH)]
    run = api.launch(plan, on=Local(slowdowns=(1, 3)), script=[str(script), *arguments])
    until((run.folder / "checkpoint" / "LATEST").exists)
    assert run.stop().state is RunState.STOPPED
    stopped_at = run.record().progress.step
    assert 0 < stopped_at < EPOCHS * EPOCH_STEPS
    assert (run.folder / "checkpoint" / "LATEST").read_text() == f"step-{stopped_at}\n", "the wish to stop saves"
    resumed = api.resume(run)
    told: list[str] = []
    assert resumed.wait(reporter=Reporter(note=told.append)).state is RunState.FINISHED
    accuracies = [line for line in told if line.startswith("accuracy ")]
    assert 0 < len(accuracies) < EPOCHS, "what the leader prints, of this session and once"
    progress = resumed.record().progress
    assert set(resumed.fetch_outputs().sizes) == {f"{epoch}.txt" for epoch in range(EPOCHS)}
    assert progress.clock.sessions == 2
    assert progress.step == EPOCHS * EPOCH_STEPS
    assert progress.lost_steps == 0
    quick, slow = api.report(resumed).workers
    assert quick.local_batch_size > slow.local_batch_size


def test_gradients_are_compared_with_those_of_the_script_before(tmp_path: Path, hetopt: Callable[..., Answer]) -> None:
    answer = hetopt("convert", BEFORE, "-o", tmp_path / "after.py", "--", "--epochs", 1)
    assert answer.code == 0, answer.err
    assert re.search(r"^Shares differ from one machine by [1-9]e-[78] ", answer.out, re.MULTILINE)
    assert_shown("script-to-spot.md", "hetopt convert", answer.out)
