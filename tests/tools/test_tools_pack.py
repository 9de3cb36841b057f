"""`pack`: a function's samples in shards; the same bytes for any number of workers and after a kill, or nothing."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from image_folders import files_below

from streamload import TarDataset, map_shards, pack
from streamload.errors import StreamloadError


def sampler() -> Callable[[int], Iterator[dict[str, Any]]]:
    """A function that travels by value: a worker need not import this module, which takes seconds."""

    def samples_of(number: int) -> Iterator[dict[str, Any]]:
        for copy in range(number % 3):
            yield {"__key__": f"{number:03d}_{copy}", "npy": np.full(4, number, np.int16), "cls": number}

    return samples_of


def test_samples_come_in_the_inputs_order_whatever_the_number_of_workers(tmp_path: Path) -> None:
    for workers in (1, 2):
        pack(sampler(), range(30), tmp_path / str(workers), workers=workers, max_count=8)
    assert files_below(tmp_path / "1") == files_below(tmp_path / "2")
    expected = [f"{number:03d}_{copy}" for number in range(30) for copy in range(number % 3)]
    dataset = TarDataset(str(tmp_path / "1"))
    assert [dataset[number]["__key__"] for number in range(len(dataset))] == expected


def _fails(number: int) -> Any:
    if number == 3:
        raise RuntimeError("no such sound")
    return {"__key__": str(number), "cls": number}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_fails, r"input 3 \(3\) cannot be packed: RuntimeError: no such sound.* at .*test_tools_pack.py:\d+"),
        (lambda number: number, r"input 0 \(0\) cannot be packed: TypeError: the function returned int"),
        (lambda number: {"cls": number}, r"input 0 \(0\) .* needs a '__key__'"),
        (lambda number: {"__key__": str(number), "cls": 0.5}, r"input 0 \(0\) .* field 'cls'"),
        (lambda _: {"__key__": "same", "cls": 1}, "two samples have the key 'same'"),
        (lambda _: None, "returned no sample for 5 inputs"),
    ],
)
def test_a_wrong_sample_names_its_input_and_leaves_nothing(
    tmp_path: Path, function: Callable[[int], Any], message: str
) -> None:
    with pytest.raises((StreamloadError, ValueError), match=message):
        pack(function, range(5), tmp_path / "shards", workers=1)
    assert not (tmp_path / "shards").exists()


def test_a_function_that_fails_in_a_worker_is_the_same_error(tmp_path: Path) -> None:
    shown = []
    for workers in (1, 2):
        with pytest.raises(StreamloadError, match=r"input 3 \(3\) cannot be packed: ZeroDivisionError") as caught:
            pack(lambda each: {"__key__": str(each), "cls": 1 // (each - 3)}, range(5), tmp_path / "s", workers=workers)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        shown.append("".join(traceback.format_exception(caught.value)))
    assert all("in <lambda>" in text for text in shown)
    assert "concurrent" not in shown[1]


def test_equal_keys_in_two_shards_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two samples have the key '0'"):
        pack(lambda number: {"__key__": str(number % 4), "cls": 1}, range(6), tmp_path / "s", workers=1, max_count=2)
    with pytest.raises(StreamloadError, match="not complete"):
        TarDataset(str(tmp_path / "s"))


def test_another_function_does_not_go_on_with_the_shards_of_the_first(tmp_path: Path) -> None:
    def first(number: int) -> dict[str, Any]:
        return {"__key__": str(number), "cls": 1 // (3 - number)}

    def second(number: int) -> dict[str, Any]:
        return {"__key__": str(number), "cls": 7}

    with pytest.raises(StreamloadError):
        pack(first, range(5), tmp_path / "s", workers=1, max_count=2)
    pack(second, range(5), tmp_path / "s", workers=1, max_count=2, resume=True)
    assert [row["cls"] for row in TarDataset(str(tmp_path / "s"))] == [7] * 5


def test_inputs_are_divided_so_that_shards_are_nearly_full(tmp_path: Path) -> None:
    def sample(number: int) -> dict[str, Any]:
        return {"__key__": f"{number:04d}", "bin": bytes(1000 + number * 7919 % 500)}

    pack(sample, range(1000), tmp_path / "s", workers=1, max_bytes=80_000)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "s").glob("*.tar"))]
    assert max(sizes) <= 80_000
    assert min(sizes[:-1]) > 60_000
    pack(sample, range(1000), tmp_path / "several", workers=1)
    assert len(list((tmp_path / "several").glob("*.tar"))) == 16, "so that sixteen processes have work"


def test_a_filesystem_is_written_to_in_this_process(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    try:
        pack(sampler(), range(30), "/packed/one", max_count=8, filesystem=memory)
        pack(sampler(), range(30), tmp_path / "here", max_count=8, workers=1)
        map_shards(lambda sample: sample, "/packed/one", "/packed/two", filesystem=memory)
        for folder in ("/packed/one", "/packed/two"):
            shards = {name.rpartition("/")[2]: memory.cat_file(name) for name in memory.glob(f"{folder}/*.tar")}
            assert shards == {path.name: path.read_bytes() for path in (tmp_path / "here").glob("*.tar")}
    finally:
        memory.rm("/packed", recursive=True)
