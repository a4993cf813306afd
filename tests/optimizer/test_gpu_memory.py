"""What a GPU holds at once follows from counted tensors; what it does not hold at once is computed in micro-batches."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hetopt.core.memory import ALONE, ExchangeMemory, StepMemory, TrainingMemory
from hetopt.core.profile import Profile
from hetopt.optimizer.fit import FittedModel, fit
from hetopt.optimizer.step_time.device_memory import room

RECORDED = Path(__file__).resolve().parents[1] / "recorded" / "digits.json"
MIB = 2**20
PROFILE = Profile.load(RECORDED)


def fitted(*, script: bool = False, least: int = 1, kept_mib: int = 10) -> FittedModel:
    """The recorded profile, with 3 ``kept_mib`` counted that stay, and one MiB a sample."""
    memory = TrainingMemory(
        parameter_bytes=kept_mib * MIB,
        buffer_bytes=0,
        gradient_bytes=kept_mib * MIB,
        optimizer_bytes=kept_mib * MIB,
        steps=tuple(StepMemory(samples=n, computing_bytes=n * MIB, updating_bytes=0) for n in (1, 8, 64)),
    )
    first, *others = PROFILE.devices
    job = PROFILE.job.model_copy(update={"script": ("train.py",) if script else (), "least_local_batch_size": least})
    devices = (first.model_copy(update={"memory": memory}), *others)
    return fit(PROFILE.model_copy(update={"devices": devices, "job": job}))


def held(model: FittedModel, usable: int, exchange: ExchangeMemory = ALONE) -> int | None:
    """Samples that a GPU with so much memory for training holds at once; 0: it is not planned with."""
    found = room(model, on_gpu=True, device_bytes=usable, usable=usable, exchange=exchange)
    return 0 if found is None else found.micro_batch


def test_counted_tensors_decide_where_there_are_any() -> None:
    assert held(fit(PROFILE), 100 * MIB) == 0, "a process takes more than that before its first sample"
    residual = ExchangeMemory(kept_bytes=20 * MIB)
    assert held(fitted(), 100 * MIB) == 70
    assert held(fitted(), 100 * MIB, residual) == 50
    assert held(fitted(), 40 * MIB, residual) == 10, "an exchange without a residual is left"
    assert held(fitted(), 30 * MIB) == 0


@given(st.integers(1, 200), st.integers(1, 40), st.booleans(), st.integers(1, 3))
def test_a_worker_never_has_more_than_fits_and_is_left_out_where_the_least_does_not(
    usable_mib: int, kept_mib: int, script: bool, least: int
) -> None:
    model = fitted(script=script, least=least, kept_mib=kept_mib)
    found = room(model, on_gpu=True, device_bytes=usable_mib * MIB, usable=usable_mib * MIB)
    left = usable_mib - 3 * kept_mib
    assert (found is None) == (left < least)
    if found is None:
        return
    assert found.micro_batch == left
    assert found.step_bytes <= found.free_bytes  # type: ignore[operator]  # counted
    if script:
        assert (found.part, found.most_samples) == (None, left), "it computes what its loader gives at once"
    elif found.part is not None:
        # The smallest part of any larger batch, cut evenly, still has the least samples.
        assert all(batch // -(-batch // left) >= least for batch in range(left + 1, 3 * left + 2))
    else:
        assert found.most_samples == left


@given(st.integers(31, 200), st.integers(31, 200))
def test_more_memory_never_holds_less(one: int, other: int) -> None:
    few, many = sorted((one, other))
    model = fitted()
    assert (held(model, few * MIB) or 0) <= (held(model, many * MIB) or 0)
