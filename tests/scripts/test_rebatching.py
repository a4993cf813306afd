"""Loaders that give batches of another size than they were made for: every sample once, in the script's order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from hetopt.profiler.script.rebatching import Rebatched, rebatch, samples_given, samples_of

SAMPLES = st.integers(1, 60)
SIZES = st.integers(1, 9)


@given(samples=SAMPLES, size=SIZES, factors=st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]), min_size=1))
def test_every_sample_comes_once_and_in_order(samples: int, size: int, factors: list[float]) -> None:
    asked = iter(factors * 1000)
    inner = BatchSampler(SequentialSampler(range(samples)), size, drop_last=False)
    batches = list(Rebatched(inner, lambda: next(asked), lambda: False))
    assert [one for batch in batches for one in batch] == list(range(samples))
    assert all(batches)


@given(samples=SAMPLES, size=SIZES, factor=st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]))
def test_batches_are_so_many_times_as_large(samples: int, size: int, factor: float) -> None:
    inner = BatchSampler(SequentialSampler(range(samples)), size, drop_last=True)
    batches = list(Rebatched(inner, lambda: factor, lambda: False))
    assert all(len(batch) == max(1, round(size * factor)) for batch in batches[:-1])
    if factor == 1:
        assert batches == list(inner)


def test_an_endless_loader_begins_anew_and_says_the_length_that_the_script_expects() -> None:
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=4)
    endless = [True]
    assert rebatch(loader, lambda: 0.5, lambda: endless[0])
    assert len(loader) == 2
    taken = []
    for number, (batch,) in enumerate(loader):
        taken += batch.tolist()
        endless[0] = number < 6
    assert taken == [*range(8), *range(8)]
    assert samples_of(loader) == 8


@pytest.mark.parametrize("readers", [0, 2])
def test_samples_are_counted_as_they_are_drawn_whatever_a_collate_function_makes_of_them(readers: int) -> None:
    def collate(rows: list[tuple[torch.Tensor]]) -> torch.Tensor:
        return torch.stack([row for (row,) in rows], dim=1)

    loader = DataLoader(TensorDataset(torch.zeros(10, 7)), batch_size=4, collate_fn=collate, num_workers=readers)
    rebatch(loader, lambda: 1.0, lambda: False)
    for _ in range(2):
        next(iter(loader))  # an epoch that is left
        assert [(len(batch), samples_given(loader, batch)) for batch in loader] == [(7, 4), (7, 4), (7, 2)]
