"""What a GPU holds at once follows from counted tensors, not from the process that was profiled on a CPU."""

from __future__ import annotations

from pathlib import Path

from hetopt.core.memory import StepMemory, TrainingMemory
from hetopt.core.profile import Profile
from hetopt.optimizer.fit import fit
from hetopt.optimizer.step_time.transfer import _most_samples

RECORDED = Path(__file__).resolve().parents[1] / "recorded" / "digits.json"
MIB = 2**20


def test_counted_tensors_decide_where_there_are_any() -> None:
    profile = Profile.load(RECORDED)
    before = _most_samples(fit(profile), 100 * MIB)
    assert before == 0, "a process takes more than that before its first sample"
    memory = TrainingMemory(
        parameter_bytes=10 * MIB,
        buffer_bytes=0,
        gradient_bytes=10 * MIB,
        optimizer_bytes=10 * MIB,
        steps=tuple(StepMemory(samples=n, computing_bytes=n * MIB, updating_bytes=0) for n in (1, 8, 64)),
    )
    first, *others = profile.devices
    counted = profile.model_copy(update={"devices": (first.model_copy(update={"memory": memory}), *others)})
    # 30 MiB are kept, 20 more by a residual: 50 samples of one MiB each are left.
    assert _most_samples(fit(counted), 100 * MIB) == 50
    assert _most_samples(fit(counted), 40 * MIB) == 0
