"""Numbers, each once, as `np.unique` gives them."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from streamload.order.layout import distinct


@given(st.lists(st.integers(0, 9) | st.integers(0, 1 << 60), max_size=60))
@example([])
@example([0])
@example([3, 0, 3])
def test_each_number_comes_once_in_ascending_order(numbers: list[int]) -> None:
    found = distinct(np.array(numbers, np.int64))
    assert found.dtype == np.int64
    assert found.tolist() == sorted(set(numbers))
