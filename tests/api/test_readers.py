"""What a loader's reader processes need of a machine is measured with the job, and held against it before a launch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import hetopt
from hetopt.backends import on_this_machine
from hetopt.backends.on_this_machine import FILES_OF_A_READER, LocalBackend, check_readers
from hetopt.backends.options import Local
from hetopt.core.errors import RunFailed
from hetopt.core.profile import Profile, Reading
from hetopt.profiler.script.observer import Observer
from hetopt.trainer.failure import Lines

PROFILE = Path(__file__).resolve().parents[1] / "recorded" / "digits.json"


@given(
    st.builds(
        Reading,
        processes=st.integers(1, 64),
        batches_ahead=st.integers(1, 8),
        sample_bytes=st.integers(0, 10**6),
        tensors=st.integers(0, 50),
    ),
    st.lists(st.integers(1, 512), min_size=1, max_size=8),
    st.data(),
)
def test_what_fits_exactly_is_taken_and_a_byte_or_a_file_less_is_refused(
    reading: Reading, samples: Sequence[int], data: st.DataObject
) -> None:
    ready = reading.processes * reading.batches_ahead
    need_bytes = round(sum(samples) * ready * reading.sample_bytes)
    files = ready * reading.tensors + reading.processes * FILES_OF_A_READER
    check_readers("box1", reading, samples, shared_bytes=need_bytes, open_files=files)
    check_readers("box1", reading, samples, shared_bytes=None, open_files=None)
    check_readers("box1", None, samples, shared_bytes=0, open_files=0)
    less = data.draw(st.integers(1, 10**6))
    if need_bytes:
        with pytest.raises(RunFailed, match=r"^box1 has .* of shared memory in /dev/shm"):
            check_readers("box1", reading, samples, shared_bytes=max(0, need_bytes - less), open_files=files)
    with pytest.raises(RunFailed, match=r"^box1 lets a process open .* files"):
        check_readers("box1", reading, samples, shared_bytes=need_bytes, open_files=max(0, files - less))


def test_a_profile_counts_what_readers_hand_on() -> None:
    images = torch.zeros(8, 3, 4)
    loader = DataLoader(TensorDataset(images, torch.zeros(8)), batch_size=8, num_workers=2, prefetch_factor=3)
    observer = Observer(iter(()), Lines("train.py"))  # type: ignore[arg-type]  # which it asks for no step
    observer.got_batch(loader, [images, {"label": torch.zeros(8)}, ["a name"] * 8])
    assert observer.reading == Reading(processes=2, batches_ahead=3, sample_bytes=3 * 4 * 4 + 4, tensors=2)


def test_a_launch_whose_batches_do_not_fit_in_shared_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = Profile.load(PROFILE)
    reading = Reading(processes=2, batches_ahead=2, sample_bytes=1e6, tensors=2)
    job = profile.job.model_copy(update={"reading": reading})
    plan = hetopt.recommend(
        profile.model_copy(update={"job": job}), budget_usd=2, epochs=8, types="c7i.*", batch_size=64, trials=0
    )
    assert plan.profile.job.reading == reading
    options = Local(slowdowns=(1.0, 1.0))
    monkeypatch.setattr(on_this_machine, "shared_bytes_here", lambda: 256_000_000)
    LocalBackend().prepare(plan, plan, options)
    monkeypatch.setattr(on_this_machine, "shared_bytes_here", lambda: 255_999_999)
    with pytest.raises(RunFailed, match=r"this machine has 256 MB of shared memory .* 256 MB in all") as refused:
        LocalBackend().prepare(plan, plan, options)
    assert "shm-size" in str(refused.value.hint)
