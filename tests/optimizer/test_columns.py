"""Rows become the matrix that numpy would make of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hetopt.core.events.fold import matrix


@given(arrays.arrays(np.float64, st.tuples(st.integers(1, 9), st.integers(0, 9))))
def test_rows_are_kept(expected: np.ndarray) -> None:
    np.testing.assert_array_equal(matrix(expected.tolist()), expected, strict=True)


@pytest.mark.parametrize("rows", [[], [[1.0, 2.0], [1.0]], [[2.0, 2.0], [1.0], [1.0, 1.0, 1.0]]])
def test_what_is_no_matrix_is_refused(rows: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="unpack"):
        matrix(rows)
