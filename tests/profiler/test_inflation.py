"""The law of what compression costs: nothing where all is kept, and never less where less is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetopt.core.training_laws import distance


@given(st.floats(0.01, 1))
def test_the_less_is_kept_the_further_the_model_is_behind(gain: float) -> None:
    assert distance(1.0) == 0
    assert distance(gain) >= distance(min(1.0, gain * 1.1))
