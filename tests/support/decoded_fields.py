"""Fields as files hold them, and what decoders make of one."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from streamload.decode.decoders import decoder_for
from streamload.tar.extensions import decodes_as_built_in

DTYPES = st.sampled_from(["u1", "<i2", ">i4", "<i8", "<f2", "<f4", "<f8", "?", "<c8", "<U3", "S5", "<M8[s]"])
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))


def npy_bytes(array: NDArray[Any], version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version, allow_pickle=True)
    return file.getvalue()


def decode(field: str, data: bytes, **options: Any) -> Any:
    own = decodes_as_built_in(field, options.get("decode", True))
    return decoder_for(field, **options)(memoryview(data) if own else data)


def assert_same(got: NDArray[Any], expected: NDArray[Any]) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.tobytes() == expected.tobytes()
