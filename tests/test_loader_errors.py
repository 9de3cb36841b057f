"""What a user sees when a sample is bad, a function raises, or a file is not what it was."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_shards import write_numbers
from transforms import raise_on_33

from streamload import ShardWriter, StreamLoader, TarDataset
from streamload.errors import (
    CollateError,
    DatasetIndexError,
    DecodeError,
    SampleError,
    ShardChangedError,
    ShardFormatError,
    ShardNotFoundError,
    TransformError,
    WorkerError,
)
from streamload.trainer import delivery

WORKERS = pytest.mark.parametrize(
    "options", [{"num_workers": 0}, {"num_workers": 1}, {"num_workers": 2, "executor": "thread"}]
)


@pytest.fixture
def source(tmp_path: Path) -> str:
    return write_numbers(tmp_path / "shards", [20, 30])


@WORKERS
def test_a_transform_that_raises(source: str, options: dict[str, Any]) -> None:
    got = []
    with StreamLoader(source, 10, fields=("cls",), transform={"cls": raise_on_33}, **options) as loader:
        with pytest.raises(TransformError) as caught:
            for batch in loader:
                got += batch[0].tolist()
    assert got == list(range(30)), "every batch before it is delivered"
    error = caught.value
    assert (error.key, os.path.basename(error.url or "")) == ("000033", "part001-000000.tar")
    with open(error.url or "", "rb") as shard:
        assert shard.read()[error.offset or 0 :].startswith(b"33")
    for part in ("000033", "part001-000000.tar", str(error.offset), "no: 33"):
        assert part in str(error)
    text = "".join(traceback.format_exception(error))
    assert "in raise_on_33" in text
    assert "PickyError" in text
    assert "000033" in "".join(error.__cause__.__notes__ if error.__cause__ else [])
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_the_users_exception_is_the_cause(source: str) -> None:
    def transform(sample: Any) -> Any:
        return {}["missing"] if sample[0] == 3 else sample

    with StreamLoader(source, 10, fields=("cls",), transform=transform, num_workers=1) as loader:
        with pytest.raises(TransformError) as caught:
            list(loader)
    assert isinstance(caught.value.__cause__, KeyError)


@WORKERS
def test_skip_and_replace(source: str, options: dict[str, Any]) -> None:
    common: dict[str, Any] = {"fields": ("cls",), "transform": {"cls": raise_on_33}, **options}
    with StreamLoader(source, 10, **common, on_error="skip") as loader:
        batches = [batch[0].tolist() for batch in loader]
        assert [len(batch) for batch in batches] == [10, 10, 10, 9, 10]
        assert 33 not in sum(batches, [])
        assert [error.key for error in loader.skipped] == ["000033"]
        assert loader.statistics().skipped_samples == 1
    with StreamLoader(source, 10, **common, on_error="replace") as loader:
        batches = [batch[0].tolist() for batch in loader]
        assert [len(batch) for batch in batches] == [10] * 5
        assert batches[3] == [30, 31, 32, 34, *range(34, 40)]
        assert [error.key for error in loader.skipped] == ["000033"]


def test_of_samples_that_were_left_out_the_newest_are_named_and_all_are_counted(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert delivery.MOST_KEPT == 10_000
    monkeypatch.setattr(delivery, "MOST_KEPT", 3)

    def transform(value: int) -> int:
        raise ValueError(value)

    common: dict[str, Any] = {"fields": ("cls",), "transform": {"cls": transform}, "num_workers": 0}
    with StreamLoader(source, 10, **common, on_error="skip") as loader:
        with pytest.raises(SampleError, match="every one of 50 samples has failed; the last: .*000049"):
            list(loader)
        assert [error.key for error in loader.skipped] == ["000047", "000048", "000049"]
        assert loader.statistics().skipped_samples == 50
    with (
        StreamLoader(source, 10, **common, on_error="skip", max_errors=20) as loader,
        pytest.raises(SampleError, match=r"21 failed samples, and max_errors=20; the last one: .*000020"),
    ):
        list(loader)


@WORKERS
def test_a_batch_of_which_nothing_is_left(source: str, options: dict[str, Any]) -> None:
    def transform(value: int) -> int:
        if 20 <= value < 30:
            raise ValueError(value)
        return value

    common: dict[str, Any] = {"fields": ("cls",), "transform": {"cls": transform}, **options}
    with StreamLoader(source, 10, **common, on_error="skip") as loader:
        assert [batch[0].tolist()[0] for batch in loader] == [0, 10, 30, 40]
        assert len(loader.skipped) == 10
    with (
        StreamLoader(source, 10, **common, on_error="replace") as loader,
        pytest.raises(SampleError, match="every sample"),
    ):
        list(loader)


def test_the_first_samples_of_all_fail(source: str) -> None:
    def transform(value: int) -> int:
        if value < 15:
            raise ValueError(value)
        return value

    with StreamLoader(
        source, 10, fields=("cls",), transform={"cls": transform}, num_workers=2, on_error="skip"
    ) as loader:
        assert sum((batch[0].tolist() for batch in loader), []) == list(range(15, 50))


def test_too_many_errors(source: str) -> None:
    def transform(value: int) -> int:
        if value % 5 == 0:
            raise ValueError(value)
        return value

    common: dict[str, Any] = {"fields": ("cls",), "transform": {"cls": transform}, "num_workers": 1}
    with StreamLoader(source, 10, **common, on_error="skip", max_errors=3) as loader:
        with pytest.raises(SampleError, match="max_errors=3"):
            list(loader)
        assert len(loader.skipped) == 4


def test_a_mistake_in_the_program_is_never_a_bad_sample(source: str) -> None:
    def transform(value: int) -> int:
        return value + undefined_name  # type: ignore[name-defined]  # noqa: F821

    with StreamLoader(
        source, 10, fields=("cls",), transform={"cls": transform}, num_workers=1, on_error="skip"
    ) as loader:
        with pytest.raises(TransformError, match="undefined_name"):
            list(loader)
        assert loader.skipped == []


@pytest.mark.parametrize(("on_error", "workers"), [("raise", 0), ("skip", 0), ("replace", 0), ("skip", 1)])
def test_why_a_mistake_in_the_program_is_not_skipped_is_said(tmp_path: Path, on_error: str, workers: int) -> None:
    with ShardWriter(tmp_path / "s") as writer:
        for number, caption in enumerate(["A cat", None, "A dog"]):
            writer.write({"__key__": str(number), "json": {"caption": caption}})

    def attribute(sample: Any) -> Any:
        return sample["caption"].lower()

    def value(sample: Any) -> Any:
        if sample["caption"] is None:
            raise ValueError("no caption")
        return sample["caption"].lower()

    def decoder(data: bytes) -> Any:
        return attribute(json.loads(data))

    common: dict[str, Any] = {"fields": ("json",), "on_error": on_error, "num_workers": workers}
    reason = (
        f"; on_error={on_error!r} is for samples that fail for their data, and AttributeError is taken for a "
        "mistake in the program: raise ValueError for samples that are to be left out"
    )
    for wrong in ({"transform": {"json": attribute}}, {"decode": {"json": decoder}}):
        with StreamLoader(tmp_path / "s", 3, **common, **wrong) as loader, pytest.raises(SampleError) as caught:
            list(loader)
        assert caught.value.key == "1"
        assert caught.value.message.endswith(reason) == (on_error != "raise")
        assert "no attribute 'lower'" in caught.value.message
    if on_error == "skip":
        with StreamLoader(tmp_path / "s", 3, **common, transform={"json": value}) as loader:
            assert [list(batch[0]) for batch in loader] == [["a cat", "a dog"]]
            assert "on_error=" not in loader.skipped[0].message


@WORKERS
def test_a_field_that_cannot_be_decoded(tmp_path: Path, options: dict[str, Any]) -> None:
    with ShardWriter(tmp_path / "s") as writer:
        writer.write({"__key__": "good", "json": b'{"a": 1}'})
        writer.write({"__key__": "bad", "json": b'{"a": '})
    with StreamLoader(tmp_path / "s", 1, fields=("json",), **options) as loader:
        with pytest.raises(DecodeError, match="json") as caught:
            list(loader)
    assert caught.value.key == "bad"


@WORKERS
def test_a_missing_field_is_an_error_of_its_sample(tmp_path: Path, options: dict[str, Any]) -> None:
    with ShardWriter(tmp_path / "s") as writer:
        writer.write({"__key__": "a", "cls": 1, "txt": "x"})
        writer.write({"__key__": "b", "cls": 2})
    with StreamLoader(tmp_path / "s", 1, fields=("cls", "txt"), **options) as loader:
        with pytest.raises(SampleError, match="no field 'txt'") as caught:
            list(loader)
    assert caught.value.key == "b"
    with StreamLoader(tmp_path / "s", 1, **options) as loader:
        assert [sorted(batch) for batch in loader] == [
            ["__key__", "__url__", "cls", "txt"],
            ["__key__", "__url__", "cls"],
        ]


def test_an_alternative_is_proposed_for_a_missing_field(tmp_path: Path) -> None:
    def message(fields: tuple[str, ...]) -> str:
        with StreamLoader(tmp_path / "s", 1, fields=fields, decode=False, on_error="skip", num_workers=0) as loader:
            assert len(list(loader)) == 1
        with TarDataset(tmp_path / "s", fields=fields, decode=False) as dataset:
            with pytest.raises(SampleError) as caught:
                dataset[0]
        (error,) = loader.skipped
        assert error.message == caught.value.message
        return error.message

    with ShardWriter(tmp_path / "s") as writer:
        writer.write({"__key__": "a", "seg.webp": b"", "png": b"", "flac": b"", "txt": ""})
        writer.write({"__key__": "b", "jpg": b"", "png": b"", "seg.png": b"", "wav": b"", "cls": 1})
    assert message(("jpg;jpeg",)) == (
        "the sample has no field 'jpg;jpeg'; it has seg.webp, png, flac, txt; to take either, write "
        '"jpg;jpeg;png" in fields'
    )
    assert message(("seg.png", "png")).endswith('"seg.png;seg.webp" in fields')
    assert message(("wav",)).endswith('"wav;flac" in fields')
    assert message(("jpg", "png")).endswith("flac, txt")  # the other image is wanted for itself
    assert message(("cls",)).endswith("flac, txt")


def test_a_sample_whose_name_is_split_at_another_dot_than_was_meant(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "s") as writer:
        writer.write({"__key__": "Track 1", "mp3": b"1"})
        writer.write({"__key__": "Track 2", "0.mp3": b"2"})
    with StreamLoader(tmp_path / "s", 1, fields=("mp3",), num_workers=0) as loader:
        with pytest.raises(
            SampleError, match=r"it has 0\.mp3\. Names are split at the first dot.*'x\.0\.mp3'"
        ) as caught:
            list(loader)
    assert caught.value.key == "Track 2"


def test_a_collate_fn_that_raises(source: str) -> None:
    def collate(rows: list[Any]) -> Any:
        raise RuntimeError("cannot put together")

    with StreamLoader(source, 10, fields=("cls",), collate_fn=collate, num_workers=1, on_error="skip") as loader:
        with pytest.raises(CollateError, match="cannot put together") as caught:
            list(loader)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_ragged_samples_are_refused_as_torch_refuses_them(source: str) -> None:
    with StreamLoader(source, 10, fields=("cls",), transform=lambda s: np.zeros(s[0]), num_workers=2) as loader:
        with pytest.raises(CollateError, match="not alike.* float64.0., number 1 is float64.1.") as caught:
            list(loader)
    assert caught.value.__cause__ is None, "the message says more than torch's, and in fewer lines"


@WORKERS
def test_batches_of_differing_shapes_are_fine_if_each_is_regular(source: str, options: dict[str, Any]) -> None:
    def transform(sample: Any) -> Any:
        return np.full(sample[0] // 10 + 1, sample[0])

    with StreamLoader(source, 10, fields=("cls",), transform=transform, **options) as loader:
        assert [tuple(batch.shape) for batch in loader] == [(10, 1), (10, 2), (10, 3), (10, 4), (10, 5)]
    with StreamLoader(source, 1, fields=("cls",), transform=transform, **options) as loader:
        assert [tuple(batch.shape) for batch in loader] == [(1, n // 10 + 1) for n in range(50)]


@WORKERS
def test_truncated_shard_without_an_index(tmp_path: Path, options: dict[str, Any]) -> None:
    source = write_numbers(tmp_path / "s", [20, 20], index=False)
    shard = sorted(Path(source).glob("*.tar"))[1]
    os.truncate(shard, shard.stat().st_size - 3000)
    with StreamLoader(source, 10, fields=("cls",), **options) as loader, pytest.raises(ShardFormatError) as caught:
        list(loader)
    assert caught.value.url == os.fspath(shard)
    assert caught.value.offset is not None


@pytest.mark.parametrize("workers", [0, 1])
def test_a_length_that_could_not_be_found_out_is_found_out_later(tmp_path: Path, workers: int) -> None:
    source = write_numbers(tmp_path / "bare", [7, 3], index=False)
    path = Path(source) / "part001-000000.tar"
    whole, times = path.read_bytes(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    path.write_bytes(b"x" * 512 + whole[512:])
    os.utime(path, ns=times)
    with StreamLoader(source, 2, fields=("cls",), num_workers=workers) as loader:
        with pytest.raises(ShardFormatError):
            len(loader)
        path.write_bytes(whole)
        os.utime(path, ns=times)
        assert len(loader) == 5
        assert [n for (labels,) in loader for n in labels.tolist()] == list(range(10))


def test_truncated_shard_with_an_index(source: str) -> None:
    shard = sorted(Path(source).glob("*.tar"))[1]
    os.truncate(shard, shard.stat().st_size - 512)
    with pytest.raises(DatasetIndexError, match="streamload index"):
        StreamLoader(source, 10)


def test_a_shard_replaced_while_in_use(source: str) -> None:
    with StreamLoader(source, 10, fields=("cls",), num_workers=1) as loader:
        for shard in sorted(Path(source).glob("*.tar")):
            shutil.copy(shard, f"{shard}.new")
            os.replace(f"{shard}.new", shard)
        with pytest.raises(ShardChangedError):
            list(loader)


def test_verify_finds_a_flipped_payload_byte(tmp_path: Path) -> None:
    source = write_numbers(tmp_path / "s", [20])
    shard = next(Path(source).glob("*.tar"))
    data = bytearray(shard.read_bytes())
    data[data.index(b"\x93NUMPY") + 128] ^= 1
    times = shard.stat()
    shard.write_bytes(data)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    with StreamLoader(source, 10, fields=("npy",), num_workers=1) as loader:
        assert len(list(loader)) == 2
    with StreamLoader(source, 10, fields=("npy",), num_workers=1, verify=True) as loader:
        with pytest.raises(DecodeError, match="crc32") as caught:
            list(loader)
        assert caught.value.key == "000000"


def test_verify_without_an_index_is_refused(tmp_path: Path) -> None:
    source = write_numbers(tmp_path / "s", [20], index=False)
    with StreamLoader(source, 10, fields=("npy",), num_workers=1, verify=True) as loader:
        with pytest.raises(DatasetIndexError, match="streamload index"):
            list(loader)


def test_a_typo_names_what_is_there(source: str) -> None:
    shard = next(Path(source).glob("*.tar"))
    with pytest.raises(ShardNotFoundError, match=shard.name):
        StreamLoader(f"{source}/{shard.name.replace('part', 'prt')}")
    with pytest.raises(ShardNotFoundError, match=r"nothing-\*\.tar"):
        StreamLoader(f"{source}/nothing-*.tar")


def test_worker_init_fn(source: str) -> None:
    def init(worker: int) -> None:
        os.environ["STREAMLOAD_TEST_WORKER"] = str(worker)

    def transform(value: int) -> int:
        return int(os.environ["STREAMLOAD_TEST_WORKER"])

    with StreamLoader(
        source, 1, fields=("cls",), transform={"cls": transform}, worker_init_fn=init, num_workers=2
    ) as loader:
        assert {int(batch[0]) for batch in loader} <= {0, 1}

    def failing(worker: int) -> None:
        raise OSError("no such device")

    with StreamLoader(source, 1, worker_init_fn=failing, num_workers=2) as loader:
        with pytest.raises(WorkerError, match="no such device") as caught:
            list(loader)
        assert isinstance(caught.value.__cause__, OSError)


ORIGINALS: list[Exception] = []


def fail_with_a_local(_: Any) -> Any:
    seen_in_the_debugger = "yes"
    try:
        raise KeyError(seen_in_the_debugger)
    except KeyError as error:
        ORIGINALS.append(error)
        raise


IN_USERS_CODE = [
    {"fields": ("cls",), "transform": {"cls": fail_with_a_local}},
    {"fields": ("cls",), "transform": fail_with_a_local},
    {"fields": ("cls",), "decode": {"cls": fail_with_a_local}},
    {"fields": ("cls",), "collate_fn": fail_with_a_local},
]


CASES = [("loader", options) for options in IN_USERS_CODE] + [("dataset", options) for options in IN_USERS_CODE[:3]]


@pytest.mark.parametrize(("how", "options"), CASES)
def test_a_debugger_reaches_the_users_frame_in_the_callers_process(
    source: str, how: str, options: dict[str, Any]
) -> None:
    ORIGINALS.clear()
    with pytest.raises(SampleError) as caught:
        if how == "dataset":
            with TarDataset(source, **options) as dataset:
                dataset[0]
        else:
            with StreamLoader(source, 10, num_workers=0, **options) as loader:
                next(iter(loader))
    cause = caught.value.__cause__
    assert cause is ORIGINALS[0]
    *_, (frame, _) = traceback.walk_tb(cause.__traceback__)
    assert frame.f_code.co_name == "fail_with_a_local"
    assert frame.f_locals["seen_in_the_debugger"] == "yes"
    assert any("sample '000000'" in note for note in cause.__notes__)
    ORIGINALS.clear()


def test_errors_that_are_left_out_hold_no_frames(source: str) -> None:
    options: dict[str, Any] = {"fields": ("cls",), "transform": {"cls": raise_on_33}, "on_error": "skip"}
    with StreamLoader(source, 10, num_workers=0, **options) as loader:
        list(loader)
    assert [error.key for error in loader.skipped] == ["000033"]
    assert loader.skipped[0].__cause__ is not None
    assert loader.skipped[0].__cause__.__traceback__ is None


def test_a_transform_that_ends_every_process_is_told_after_two_and_not_after_two_for_each_row(
    source: str, tmp_path: Path
) -> None:
    tried = str(tmp_path / "tried")

    def deadly(number: int) -> int:
        with open(tried, "a", encoding="ascii") as file:
            file.write(f"{number}\n")
        os._exit(3)

    with StreamLoader(source, 20, fields=("cls",), transform={"cls": deadly}, num_workers=1) as loader:
        with pytest.raises(SampleError, match="two workers died while they made this sample") as raised:
            next(iter(loader))
    assert raised.value.key == "000000"
    with open(tried, encoding="ascii") as file:
        assert [number for number in map(int, file) if number < 20] == [0, 0]
