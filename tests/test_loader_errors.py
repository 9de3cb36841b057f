"""What a user sees when a sample is bad, a function raises, or a file is not what it was."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_shards import write_numbers, write_samples
from PIL import Image
from processes import children
from transforms import raise_on_33, slow

from streamload import StreamLoader, TarDataset
from streamload.errors import (
    CollateError,
    DatasetIndexError,
    DecodeError,
    SampleError,
    ShardChangedError,
    ShardNotFoundError,
    TransformError,
    WorkerError,
)
from streamload.images import Resize
from streamload.trainer import epoch_iterator


@pytest.fixture
def source(tmp_path: Path) -> str:
    return write_numbers(tmp_path / "shards", [20, 30])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_transform_that_raises(source: str, workers: int) -> None:
    got = []
    with StreamLoader(source, 10, fields=("cls",), transform={"cls": raise_on_33}, num_workers=workers) as loader:
        with pytest.raises(TransformError) as caught:
            for batch in loader:
                got += batch[0].tolist()
        assert not children(), "its processes have ended with the pass"
    assert got == list(range(30)), "every batch before it is delivered"
    error = caught.value
    assert (error.key, os.path.basename(error.url or "")) == ("000033", "part001-000000.tar")
    with open(error.url or "", "rb") as shard:
        assert shard.read()[error.offset or 0 :].startswith(b"33")
    for part in ("000033", "part001-000000.tar", str(error.offset), "no: 33"):
        assert part in str(error)
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert names == ["test_a_transform_that_raises", "__next__", "_turn"], "what the user sees of the inside"
    text = "".join(traceback.format_exception(error))
    assert "in raise_on_33" in text
    assert ("field_reader.py" in text) == (workers == 0), "a worker sends the frames from the user's function on"
    assert "PickyError" in text
    assert "000033" in "".join(error.__cause__.__notes__ if error.__cause__ else [])
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_an_error_of_the_constructor_shows_no_inner_frames(tmp_path: Path) -> None:
    with pytest.raises(ShardNotFoundError, match="no such shard or folder") as caught:
        StreamLoader(tmp_path / "nowhere", 1)
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][1:] == ["checked", "__init__"]


def test_a_sample_that_fails_is_replaced(source: str) -> None:
    options: dict[str, Any] = {"fields": ("cls",), "transform": {"cls": raise_on_33}, "on_error": "replace"}
    with StreamLoader(source, 10, num_workers=0, **options) as loader:
        batches = [batch[0].tolist() for batch in loader]
        assert [len(batch) for batch in batches] == [10] * 5
        assert batches[3] == [30, 31, 32, 34, *range(34, 40)]
        assert [error.key for error in loader.skipped] == ["000033"]
        assert loader.skipped[0].__cause__ is not None
        assert loader.skipped[0].__cause__.__traceback__ is None, "it holds no frames"


def test_worker_init_fn(source: str) -> None:
    def init(worker: int) -> None:
        os.environ["STREAMLOAD_TEST_WORKER"] = str(worker)

    def number_of_worker(_: int) -> int:
        return int(os.environ["STREAMLOAD_TEST_WORKER"])

    options = {"fields": ("cls",), "transform": {"cls": number_of_worker}, "num_workers": 1}
    with StreamLoader(source, 1, worker_init_fn=init, **options) as loader:
        assert {int(batch[0]) for batch in loader} == {0}

    def failing(worker: int) -> None:
        raise OSError("no such device")

    with StreamLoader(source, 1, worker_init_fn=failing, num_workers=1) as loader:
        with pytest.raises(WorkerError, match="no such device") as caught:
            list(loader)
        assert isinstance(caught.value.__cause__, OSError)


def test_the_newest_samples_left_out_are_named_and_all_are_counted(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert epoch_iterator.MOST_KEPT == 10_000
    monkeypatch.setattr(epoch_iterator, "MOST_KEPT", 3)

    def transform(value: int) -> int:
        raise ValueError(value)

    common: dict[str, Any] = {"fields": ("cls",), "transform": {"cls": transform}, "num_workers": 0}
    with StreamLoader(source, 10, **common, on_error="skip") as loader:
        with pytest.raises(SampleError, match="every one of 50 samples has failed; the last: .*000049") as caught:
            list(loader)
        assert isinstance(caught.value.__cause__, ValueError), "one cause, since the message holds the sample's error"
        assert [error.key for error in loader.skipped] == ["000047", "000048", "000049"]
        assert loader.statistics().skipped_samples == 50


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("lacking", ["a", "b"])
def test_a_field_that_only_some_samples_of_a_batch_have(tmp_path: Path, lacking: str, on_error: str) -> None:
    """torch would drop it for the whole batch if the first sample lacks it, and raise a KeyError if another does."""
    samples = [{"__key__": key, "cls": 1, "json": [1]} | ({} if key == lacking else {"txt": key}) for key in "abc"]
    with StreamLoader(write_samples(tmp_path, samples), 3, num_workers=0, on_error=on_error) as loader:
        with pytest.raises(CollateError) as caught:
            next(iter(loader))
    assert caught.value.key == "b"
    assert caught.value.message == (
        "this sample cannot be collated: it is not like sample 'a', the first of its batch in ['txt']: "
        + ("the first is missing, this one is str" if lacking == "a" else "the first is str, this one is missing")
        + "; make samples alike in transform=, limit fields= to those that all samples have, or give a collate_fn="
    )


def test_an_alternative_is_proposed_for_a_missing_field(tmp_path: Path) -> None:
    write_samples(tmp_path / "s", [{"seg.webp": b"", "png": b"", "txt": ""}, {"jpg": b"", "cls": 1}])
    said = (
        "^the sample has no field 'jpg;jpeg'; it has seg.webp, png, txt; write \"jpg;jpeg;OTHER\" in fields to read "
        r'another field if it is missing, or "jpg;jpeg\?" to include samples without it'
    )
    options: dict[str, Any] = {"fields": ("jpg;jpeg",), "decode": False}
    with StreamLoader(tmp_path / "s", 1, num_workers=0, **options) as loader, pytest.raises(SampleError, match=said):
        next(iter(loader))
    with TarDataset(tmp_path / "s", **options) as dataset, pytest.raises(SampleError, match=said):
        dataset[0]


def test_a_shard_that_is_gone_takes_effect_at_its_batch(tmp_path: Path) -> None:
    source = write_numbers(tmp_path / "s", [4] * 4)
    with StreamLoader(source, 4, fields=("cls",), transform={"cls": slow}, num_workers=2) as loader:
        sorted(Path(source).glob("*.tar"))[2].unlink()
        batches = iter(loader)
        assert [next(batches)[0].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(ShardNotFoundError):
            next(batches)


def test_a_shard_replaced_while_in_use(source: str) -> None:
    with StreamLoader(source, 10, fields=("cls",), num_workers=0) as loader:
        for shard in sorted(Path(source).glob("*.tar")):
            shutil.copy(shard, f"{shard}.new")
            os.replace(f"{shard}.new", shard)
        with pytest.raises(ShardChangedError, match=r"had \d+ bytes \(mtime .* has .* make a new loader"):
            list(loader)


def test_verify_finds_a_flipped_payload_byte(tmp_path: Path) -> None:
    source = write_numbers(tmp_path / "s", [20])
    shard = next(Path(source).glob("*.tar"))
    data = bytearray(shard.read_bytes())
    data[data.index(b"\x93NUMPY") + 128] ^= 1
    times = shard.stat()
    shard.write_bytes(data)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    with StreamLoader(source, 10, fields=("npy",), num_workers=0) as loader:
        assert len(list(loader)) == 2
    with StreamLoader(source, 10, fields=("npy",), num_workers=0, verify=True) as loader:
        with pytest.raises(DecodeError, match="crc32") as caught:
            list(loader)
        assert caught.value.key == "000000"


def test_verify_without_an_index_is_refused(tmp_path: Path) -> None:
    source = write_numbers(tmp_path / "s", [20], index=False)
    with StreamLoader(source, 10, fields=("npy",), num_workers=0, verify=True) as loader:
        with pytest.raises(DatasetIndexError, match="streamload index"):
            list(loader)


@pytest.mark.parametrize("given", ["transform of a field", "transform", "decode", "collate_fn"])
def test_a_debugger_reaches_the_users_frame_in_the_callers_process(source: str, given: str) -> None:
    originals: list[Exception] = []

    def fail_with_a_local(_: Any) -> Any:
        seen_in_the_debugger = "yes"
        originals.append(KeyError(seen_in_the_debugger))
        raise originals[-1]

    name, of_field = given.split()[0], given in ("transform of a field", "decode")
    options = {"fields": ("cls",), name: {"cls": fail_with_a_local} if of_field else fail_with_a_local}
    for make in [StreamLoader] if given == "collate_fn" else [StreamLoader, TarDataset]:
        workers = {"num_workers": 0} if make is StreamLoader else {}
        with make(source, **options, **workers) as made, pytest.raises(SampleError) as caught:
            next(iter(made))
        cause = caught.value.__cause__
        assert cause in originals
        *_, (frame, _) = traceback.walk_tb(cause.__traceback__)
        assert frame.f_locals["seen_in_the_debugger"] == "yes"
        assert any("sample '000000'" in note for note in cause.__notes__)


@pytest.mark.parametrize(("form", "shape"), [("JPEG", (3, 60_000)), ("PNG", (60_000, 3))])
def test_a_resized_image_may_not_be_larger_than_a_decoded_one(
    form: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    image = io.BytesIO()
    Image.fromarray(np.zeros((*shape, 3), np.uint8)).save(image, form)
    source = write_samples(tmp_path / "shards", [{"jpg": image.getvalue()}])
    with StreamLoader(source, 1, fields=("jpg",), transform={"jpg": Resize(300)}, num_workers=0) as loader:
        with pytest.raises(SampleError, match=r"(300 x 6000000|6000000 x 300).*178956970 pixels.*max_size") as caught:
            next(iter(loader))
    assert caught.value.key == "000000"
    with StreamLoader(source, 1, fields=("jpg",), transform={"jpg": Resize((30, 40))}, num_workers=0) as loader:
        assert next(iter(loader))[0].shape == (1, 30, 40, 3)


def test_resizing_takes_no_more_on_the_way_than_an_image_may_have() -> None:
    """Rows are resized first: a thin and high image would become wide before it becomes low."""
    thin = np.zeros((2_000_000, 1, 3), np.uint8)
    with pytest.raises(ValueError, match=r"2000000 x 1 pixels.*100 x 100.*178956970"):
        Resize((100, 100))(thin)


def test_escaped_braces_name_a_file_with_braces(tmp_path: Path) -> None:
    source = Path(write_numbers(tmp_path / "data", [3]))
    (source / "part000-000000.tar").rename(source / "{a,b}.tar")
    with StreamLoader(f"{source}/\\{{a,b\\}}.tar", 3, num_workers=0) as loader:
        assert len(list(loader)) == 1
