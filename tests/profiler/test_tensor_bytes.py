"""Live tensors are counted byte by byte: views once, until the last tensor on a storage is gone, at the highest."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st
from torch import Tensor

from hetopt.profiler.probe.facts import TensorBytes, bytes_of

CPU = torch.device("cpu")
Steps = st.lists(st.tuples(st.sampled_from(["make", "view", "drop", "double"]), st.integers(1, 999)), max_size=40)


@given(Steps)
def test_live_and_peak_bytes_are_those_of_a_known_history(steps: list[tuple[str, int]]) -> None:
    count = TensorBytes(CPU)
    alive: list[tuple[Tensor, int]] = []  # a tensor and the number of its storage
    sizes: list[int] = []
    peak = 0
    with count:
        for kind, number in steps:
            if kind == "make" or not alive:
                alive.append((torch.empty(number, dtype=torch.uint8), len(sizes)))
                sizes.append(number)
            elif kind == "view":
                tensor, storage = alive[number % len(alive)]
                alive.append((tensor[number % len(tensor) :], storage))
                del tensor
            elif kind == "drop":
                del alive[number % len(alive)]
            else:
                tensor, storage = alive[number % len(alive)]
                alive.append((torch.cat([tensor, tensor]), len(sizes)))
                sizes.append(2 * len(tensor))
                del tensor
            expected = sum(sizes[storage] for storage in {storage for _, storage in alive})
            peak = max(peak, expected)
            assert count.live_bytes == expected
        assert count.peak_bytes == peak
        alive.clear()
        assert count.live_bytes == 0
        count.begin_phase()
        assert count.peak_bytes == 0


def test_what_was_there_before_counts_where_it_is_held() -> None:
    before, held = torch.zeros(1000), torch.zeros(10)
    count = TensorBytes(CPU)
    count.hold([held, held[2:]])
    with count:
        part = before[5:]
        assert count.live_bytes == 40
        total = part + 1
        assert count.live_bytes == 40 + 4 * 995
        del total, held
        assert count.live_bytes == 0


def test_storages_count_once_and_sparse_tensors_by_what_they_hold() -> None:
    whole = torch.zeros(100)
    assert bytes_of([whole, whole[:3], None, "no tensor"]) == 400
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2, 5), (4, 5), check_invariants=True)
    assert bytes_of([sparse]) == 2 * 8 + 10 * 4
