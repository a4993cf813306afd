"""The quick way to the state of NumPy's generator does what `np.random.get_state` and `set_state` do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.trainer.session.numpy_state import NumPyState

DEEDS = st.lists(
    st.tuples(st.sampled_from(["draw", "pair", "seed", "keep", "use", "look"]), st.integers(0, 700)), max_size=30
)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = np.random.get_state()
    yield
    np.random.set_state(before)


@given(DEEDS)
def test_it_is_what_numpy_says(deeds: list[tuple[str, int]]) -> None:
    """Whatever is drawn between, by whoever: also the second of two normal numbers, which is kept for the next call."""
    ours, kept = NumPyState(), [np.random.get_state()]
    for deed, number in deeds:
        if deed == "draw":
            np.random.random_sample(number)
        elif deed == "pair":
            np.random.standard_normal(number % 4)
        elif deed == "seed":
            np.random.seed(number)
        elif deed == "keep":
            kept.append(ours.now())
        elif deed == "use":
            ours.use(kept[number % len(kept)])
            assert _same(np.random.get_state(), kept[number % len(kept)])
        assert deed != "look" or _same(ours.now(), np.random.get_state())
    assert _same(ours.now(), np.random.get_state())


def _same(one: Any, other: Any) -> bool:
    return one[0] == other[0] and bool((one[1] == other[1]).all()) and one[2:] == other[2:]
