"""A batch is the same however it is asked for: gathered, collated, or in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from hetopt.core.errors import BadInput
from hetopt.trainer.data.fetch import TensorPairs, fetch, inputs_and_targets, set_epoch, to_device

INPUTS = torch.arange(60, dtype=torch.float32).view(20, 3)
TARGETS = torch.arange(20)
PAIRS = TensorPairs(INPUTS, TARGETS)
INDICES = st.lists(st.integers(0, 19), min_size=1, max_size=30)


class Point(NamedTuple):
    x: Tensor
    y: Tensor


class Nested(Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return {"point": Point(INPUTS[index], TARGETS[index]), "both": [index, float(index)], "name": f"sample {index}"}


class Ragged(Nested):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(index)


class Foreign(Nested):
    def __getitem__(self, index: int) -> Any:
        return object()


@given(INDICES)
def test_gathering_collating_and_a_subset_agree(indices: list[int]) -> None:
    expected = (INPUTS[indices], TARGETS[indices])
    everything = Subset(TensorDataset(INPUTS, TARGETS), list(range(20)))
    for dataset in (PAIRS, TensorDataset(INPUTS, TARGETS), everything):
        inputs, targets = inputs_and_targets(fetch(dataset, indices))
        assert torch.equal(inputs, expected[0])
        assert torch.equal(targets, expected[1])


@given(INDICES, st.integers(0, 30))
def test_fetching_in_parts_equals_fetching_at_once(indices: list[int], cut: int) -> None:
    whole, _ = PAIRS.gather(indices)
    parts = [inputs_and_targets(fetch(PAIRS, part))[0] for part in (indices[:cut], indices[cut:]) if part]
    assert torch.equal(torch.cat(parts), whole)


def test_nested_samples_keep_their_nesting_on_the_way_to_a_device() -> None:
    batch = to_device(fetch(Nested(), [3, 1]), "meta")
    assert isinstance(batch, dict)
    point = batch["point"]
    assert isinstance(point, Point)
    assert point.x.shape == (2, 3)
    assert [part.device.type for part in (point.x, point.y, *batch["both"])] == ["meta"] * 4
    assert isinstance(batch["both"], list)
    assert batch["name"] == ["sample 3", "sample 1"], "leaves that are no tensors stay"


@pytest.mark.parametrize("dataset", [Ragged(), Foreign()])
def test_samples_that_cannot_be_collated_are_bad_input(dataset: Nested) -> None:
    with pytest.raises(BadInput, match=f"samples of {type(dataset).__name__} cannot be collated"):
        fetch(dataset, [1, 2])


def test_unequal_inputs_and_targets_are_bad_input() -> None:
    with pytest.raises(BadInput, match="20 inputs but 19 targets"):
        TensorPairs(INPUTS, TARGETS[1:])


def test_the_epoch_reaches_only_datasets_that_care() -> None:
    class Caring(TensorPairs):
        def set_epoch(self, epoch: int, seed: int, /) -> None:
            seen.append((epoch, seed))

        def gather(self, indices: Sequence[int], /) -> tuple[Tensor, Tensor]:
            return super().gather(indices)

    seen: list[tuple[int, int]] = []
    set_epoch(PAIRS, 1, 7)
    set_epoch(Caring(INPUTS, TARGETS), 2, 7)
    assert seen == [(2, 7)]
