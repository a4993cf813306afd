"""A loss that is no number is told with its worker, its step and its samples."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from hetopt.trainer.data.fetch import TensorPairs
from hetopt.trainer.data.micro_batch import MicroBatch
from hetopt.trainer.divergence import MOST_NAMED, LossRecord, where_it_broke
from hetopt.trainer.normalisation import least_samples, least_share


def record_of(losses: list[float], samples: list[int]) -> LossRecord:
    record = LossRecord()
    for step, loss in enumerate(losses, start=1):
        parts = [MicroBatch(epoch=0, indices=samples[:2]), MicroBatch(epoch=0, indices=samples[2:])]
        record.add(step, torch.tensor(loss, dtype=torch.float64), parts)
    return record


@given(st.integers(1, 30), st.sampled_from([math.nan, math.inf, -math.inf]), st.lists(st.integers(0, 99), min_size=3))
def test_the_first_broken_step_and_its_samples_are_named(step: int, loss: float, samples: list[int]) -> None:
    record = record_of([*[1.0] * (step - 1), loss, math.nan], samples)
    data = TensorPairs(torch.zeros(100, 3), torch.zeros(100))
    told = where_it_broke(record, data, rank=0, world_size=1)
    assert told.startswith(f" on worker 0 at step {step}, over samples {samples[0]}, {samples[1]}, {samples[2]}")
    assert ("more" in told) == (len(samples) > MOST_NAMED)


def test_the_sample_at_fault_is_found_in_the_data() -> None:
    inputs = torch.zeros(100, 3)
    inputs[7, 1] = math.nan
    told = where_it_broke(
        record_of([1.0, math.nan], [5, 7, 9]), TensorPairs(inputs, torch.zeros(100)), rank=0, world_size=1
    )
    assert told == " on worker 0 at step 2: sample 7 of the training data holds a value that is not finite"


def test_nothing_is_told_where_all_is_well() -> None:
    assert where_it_broke(record_of([1.0], [1, 2, 3]), None, rank=0, world_size=1) == ""


@given(st.integers(1, 100), st.integers(1, 20))
def test_a_share_is_never_a_single_sample_where_batchnorm_needs_two(batch: int, workers: int) -> None:
    plain, normalised = torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    assert (least_samples(plain), least_samples(normalised)) == (1, 2)
    assert least_share(plain, batch, workers) == 1
    assert least_share(normalised, batch, workers) == (2 if batch >= 2 * workers else 1)
