"""A script as people have them: profiled unchanged, planned for, converted, launched on unequal workers, stopped."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import hetopt
from hetopt.api.backends import backend
from hetopt.api.launching import Changes, LaunchOptions, prepare
from hetopt.api.profiling_script import Script, profile_script
from hetopt.cli import follow, profile_view
from hetopt.core.errors import BadInput
from hetopt.core.profile import Profile
from hetopt.core.reporter import Reporter
from hetopt.core.run_status import RunState
from hetopt.optimizer.plan import Plan
from hetopt.profiler.script.gradients import FILE, differences
from hetopt.reports.plan_page import next_commands
from tests.disturbance import PATIENCE_S
from tests.docs.shown import assert_shown
from tests.face.conftest import start

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "script"
EPOCHS = 16
BATCH = 32
"""Half of what the script has by itself."""

EPOCH_STEPS = math.ceil(1500 / BATCH)

BEFORE = str(EXAMPLES / "train.py")


@pytest.fixture(scope="module")
def profile() -> Profile:
    return hetopt.profile(BEFORE, arguments=["--batch-size", str(BATCH)], time_budget_s=6)


@pytest.fixture(scope="module")
def plan(profile: Profile) -> Plan:
    return hetopt.recommend(profile, budget_usd=2, epochs=EPOCHS)


def test_what_a_plan_needs_is_measured(profile: Profile) -> None:
    job = profile.job
    assert (job.task, job.script) == ("train.py", (BEFORE, "--batch-size", "32"))
    assert (job.parameters, job.gradient_bytes, job.dataset_size, job.batch_size) == (38_282, 153_128, 1500, 32)
    assert job.operators_per_step > 10
    assert job.model_kind == "convolution"
    # Two for each product and sum, three passes; nobody asks for the gradient of the images.
    products = {"conv1": 64 * 9 * 16, "conv2": 64 * 9 * 16 * 32, "fc1": 512 * 64, "fc2": 64 * 10}
    assert job.flops_per_sample == 6 * sum(products.values()) - 2 * products["conv1"]
    alone, beside = profile.devices
    assert (alone.workers_per_host, beside.workers_per_host) == (1, 2)
    for device in (alone, beside):
        sizes = [point.local_batch_size for point in device.step_times]
        assert len(sizes) >= 2
        assert set(sizes) <= {2, 4, 8, 16, 32, 64, 128}
    memory = alone.memory
    assert memory is not None
    # The last batch of an epoch, which may be smaller, is counted too, and not timed.
    timed = {point.local_batch_size for point in alone.step_times}
    assert len({step.samples for step in memory.steps} - timed) <= 1
    assert max(step.samples for step in memory.steps) <= max(timed)
    assert memory.parameter_bytes == memory.gradient_bytes == memory.optimizer_bytes == 153_128
    grown = [step.computing_bytes for step in memory.steps]
    assert grown == sorted(grown)
    assert {link.collective for link in profile.links} == {"all_reduce", "all_gather", "broadcast"}
    assert profile.noise
    assert profile.noise[-1].gradient_variance > 0
    assert [point.ratio for point in profile.gain] == sorted(point.ratio for point in profile.gain)
    assert {cost.name for cost in alone.compressors} == {"topk", "bf16", "int8", "int4"}


def test_a_plan_is_of_the_scripts_own_batch_and_says_when_it_ends(profile: Profile, plan: Plan) -> None:
    with pytest.raises(BadInput, match="cannot see how long the script"):
        hetopt.recommend(profile, budget_usd=2)
    assert plan.run.global_batch_size == 32
    assert plan.run.script == profile.job.script


def test_what_is_typed_next_is_what_can_be_typed(profile: Profile, plan: Plan) -> None:
    assert not profile.job.has_session
    convert, launch = next_commands(plan, "plan.json")
    assert convert == f"hetopt convert {BEFORE} -- --batch-size 32"
    command, _, length = launch.partition("  # ")
    assert command.endswith(f" -- {EXAMPLES / 'train_hetopt.py'} --batch-size 32")
    assert length == f"and its own argument to train {plan.goal.amount:g} {plan.goal.ends}"
    job = profile.job.model_copy(update={"script": ("train_hetopt.py",), "has_session": True})
    converted = plan.model_copy(update={"profile": profile.model_copy(update={"job": job})})
    (only,) = next_commands(converted, "plan.json")
    assert profile.job.converts
    by_hand = profile.job.model_copy(update={"converts": False})
    hand, launch = next_commands(plan.model_copy(update={"profile": profile.model_copy(update={"job": by_hand})}), "p")
    assert hand.startswith("# write a session into")
    assert launch.partition("  # ")[0].endswith(f" -- {BEFORE} --batch-size 32")
    assert only.startswith("hetopt launch plan.json --on ")
    assert only.partition("  # ")[0].endswith(" -- train_hetopt.py")


def test_what_the_profile_says_is_of_a_script(profile: Profile, capsys: pytest.CaptureFixture[str]) -> None:
    profile_view.show(profile)
    told = capsys.readouterr().out
    assert "how long the script trains cannot be seen" in told
    assert "pilot" not in told


def test_it_is_launched_stopped_resumed_and_reported(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
        hetopt.launch(plan, on="local", slowdowns=(1, 3))
    refused = hetopt.launch(plan, on="local", script=[str(script), "--epochs", "1"])
    assert refused.wait().state is RunState.FAILED
    assert "The plan steps by 32 samples, and the loader of resumable.py gives 64." in str(refused.status().reason)
    assert refused.record().progress.step == 0
    arguments = ["--epochs", str(EPOCHS), "--batch-size", str(BATCH)]
    run = hetopt.launch(plan, on="local", script=[str(script), *arguments], slowdowns=(1, 3))
    until_s = time.monotonic() + PATIENCE_S
    while not (run.folder / "checkpoint" / "LATEST").exists() and time.monotonic() < until_s:
        time.sleep(0.2)
    run.stop()
    assert run.status().state is RunState.STOPPED
    stopped_at = run.record().progress.step
    assert 0 < stopped_at < EPOCHS * EPOCH_STEPS
    assert (run.folder / "checkpoint" / "LATEST").read_text() == f"step-{stopped_at}\n", "the wish to stop saves"
    assert run.model == run.folder / "model-unfinished.safetensors"
    resumed = hetopt.resume(run)
    told: list[str] = []
    assert resumed.wait(reporter=Reporter(note=told.append)).state is RunState.FINISHED
    accuracies = [line for line in told if line.startswith("accuracy ")]
    assert 0 < len(accuracies) < EPOCHS, "what the leader prints, of this session and once"
    progress = resumed.record().progress
    assert set(resumed.fetch_outputs().sizes) == {f"{epoch}.txt" for epoch in range(EPOCHS)}
    assert progress.sessions == 2
    assert progress.step == EPOCHS * EPOCH_STEPS
    assert progress.lost_steps == 0
    assert resumed.model == run.folder / "model.safetensors"
    assert progress.epoch == EPOCHS
    follow.finish(resumed, rented=False, as_json=False)
    ended = capsys.readouterr()
    said = rf"finished after {EPOCHS * EPOCH_STEPS} steps in .* of start-up: training loss [\d.]+"
    assert re.fullmatch(said, " ".join(ended.out.split()))
    assert "another length" not in ended.err, "its own number of epochs is that of the plan"
    quick, slow = hetopt.report(resumed).workers
    assert quick.local_batch_size > slow.local_batch_size


def test_what_begins_again_is_said(plan: Plan) -> None:
    assert any("train.py saves no checkpoint" in text for text in plan.explanation)
    local = backend("local", Reporter())

    def notes(script: Path, *arguments: str, **options: Any) -> str:
        changes = Changes(script=(str(script), *arguments))
        return " ".join(prepare(plan, local, "local", LaunchOptions(**options), changes).launch.notes)

    assert "train_hetopt.py saves no checkpoint: after a loss it begins again" in notes(EXAMPLES / "train_hetopt.py")
    assert "the plan has priced that" in notes(EXAMPLES / "train_hetopt.py")
    assert "which was not profiled" not in notes(EXAMPLES / "train_hetopt.py"), "what convert made of train.py"
    resumable = Path(__file__).with_name("resumable.py")
    assert "resumable.py goes on from checkpoints, and the plan reckons without" in notes(resumable)
    assert "The plan is of train.py: what it predicts is not of resumable.py" in notes(resumable)
    assert "begins again" not in notes(resumable, "{data}", data="x")
    for arguments, options in (((), {"data": "x"}), (("{data}",), {})):
        with pytest.raises(BadInput, match=r"told to a script by \{data\} among its arguments"):
            notes(resumable, *arguments, **options)


def test_gradients_are_compared_with_those_of_the_script_before(tmp_path: Path) -> None:
    process = start("convert", BEFORE, "-o", tmp_path / "after.py", "--", "--epochs", 1)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert re.search(r"^Shares differ from one machine by [1-9]e-[78]\.$", out, re.MULTILINE)
    assert_shown("script-to-spot.md", "hetopt convert", out)


def test_gradients_that_differ_are_found(tmp_path: Path) -> None:
    gradients = [torch.arange(1.0, 5.0, dtype=torch.float64)] * 2
    kept = {
        "right": [gradients],
        "off": [[gradients[0], 1.01 * gradients[1]]],
        "short": [gradients[:1]],
        "other": [[one[:3] for one in gradients]],
        "same": [gradients],
    }
    for name, one in kept.items():
        torch.save(one, tmp_path / FILE.format(name=name, rank=0))
    found = differences(tmp_path, "right", ("same", "off", "short", "other"))
    assert found.steps == 2
    assert found.largest == (0.0, pytest.approx(0.01), math.inf, math.inf)


def test_what_cannot_be_measured_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the script writes to where it runs
    script = tmp_path / "train.py"
    script.write_text("print('nothing to train')\n")
    options = {"workers": 1, "accelerators": 0, "time_budget_s": 5.0, "seed": 0, "machine_type": "local"}
    with pytest.raises(BadInput, match="nothing is trained that could be measured") as raised:
        profile_script(Script(path=script), told=Reporter(), **options)  # type: ignore[arg-type]  # a mapping's
    assert raised.value.hint


@pytest.mark.parametrize(
    ("arguments", "option", "size", "expected"),
    [
        (("--batch-size", "64", "--lr", "1"), "batch-size", 32, ("--lr", "1", "--batch-size", "32")),
        (("--bs=8",), "--bs", 4, ("--bs", "4")),
        ((), "b=16", 2, ("-b", "2")),
    ],
)
def test_the_batch_size_is_set_by_the_scripts_own_option(
    arguments: tuple[str, ...], option: str, size: int, expected: tuple[str, ...]
) -> None:
    script = Script(path=Path("train.py"), arguments=arguments, batch_argument=option)
    assert script.with_batch(size) == expected
    assert script.own_batch_size in (64, 8, 16)


def test_a_batch_size_that_is_not_typed_is_the_parsers_default(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    for given, known in (("default=8", 8), ("default=sizes[0]", None), ("required=True", None)):
        path.write_text(f"parser.add_argument('-b', '--batch_size', type=int, {given})\n")
        script = Script(path=path, batch_argument="batch_size")
        if known is not None:
            assert script.own_batch_size == known
        else:
            with pytest.raises(BadInput, match="do not say what --batch_size is"):
                _ = script.own_batch_size


def test_an_option_without_a_number_is_refused() -> None:
    script = Script(path=Path("train.py"), arguments=("--batch-size", "many"), batch_argument="batch-size")
    with pytest.raises(BadInput, match="'many' is no number of samples"):
        _ = script.own_batch_size
