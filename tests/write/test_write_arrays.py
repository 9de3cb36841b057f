"""`ShardWriter.write_arrays`: rows of arrays come back as they were, and columns that do not fit write nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamload import ShardWriter, TarDataset

X = np.arange(24, dtype=np.float32).reshape(6, 2, 2)
Y = np.array([3, 1, 4, 1, 5, 9])


def test_rows_come_back_with_shape_type_and_label(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "shards", max_count=4) as writer:
        writer.write_arrays(x=X[:5], cls=Y[:5])
        writer.write_arrays(x=X[5:], cls=Y[5:])
    dataset = TarDataset(str(tmp_path / "shards"))
    rows = [dataset[number] for number in range(len(dataset))]
    assert [row["__key__"] for row in rows] == [f"{number:09d}" for number in range(6)]
    assert all(row["x.npy"].dtype == np.float32 for row in rows)
    np.testing.assert_array_equal([row["x.npy"] for row in rows], X)
    assert [row["cls"] for row in rows] == Y.tolist()


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({}, ValueError, "needs arrays of equal length"),
        ({"x": X, "y": Y[:5]}, ValueError, r"\(x 6, y 5\)"),
        ({"x": 1}, TypeError, "column 'x' is .* must be an array of numbers"),
        ({"x": [object()]}, TypeError, "column 'x' is .* must be an array of numbers"),
        ({"cls": X}, TypeError, "column 'cls' is .* one integer per sample"),
        ({"x": X, "X": X}, ValueError, "names that differ in more than case"),
    ],
)
def test_columns_that_do_not_fit_write_nothing(
    tmp_path: Path, columns: dict[str, Any], error: type[Exception], message: str
) -> None:
    with ShardWriter(tmp_path / "shards") as writer:
        with pytest.raises(error, match=message):
            writer.write_arrays(**columns)
        assert writer.samples == 0
