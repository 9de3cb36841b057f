"""A worker's heap keeps what users' functions free: they need it again for the next row."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from heap_mappings import mapped_for_one_value
from make_shards import write_numbers

from streamload import StreamLoader


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="a glibc of 2021 or later only")
def test_values_of_some_megabytes_come_from_the_heap(tmp_path: Path) -> None:
    source = write_numbers(tmp_path / "s", [8])
    with StreamLoader(source, 8, fields=("npy",), decode={"npy": mapped_for_one_value}, num_workers=1) as loader:
        ((mapped,),) = loader
    assert mapped.tolist() == [[0]] * 8
