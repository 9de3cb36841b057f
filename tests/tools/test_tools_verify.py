"""`streamload verify`: whether samples can be decoded."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from image_folders import image_bytes, run

from streamload import ShardWriter
from streamload.cli import main
from streamload.cli.shards import OnBytes, map_in_order


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards of images, two of which cannot be decoded, with the labels 0 to 5."""
    with ShardWriter(tmp_path / "data", max_count=3) as writer:
        for number in range(6):
            image = image_bytes(number)
            writer.write({"__key__": f"s{number}", "jpg": image[:200] if number in (1, 4) else image, "cls": number})
    return tmp_path / "data"


def test_samples_that_cannot_be_decoded_are_named(folder: Path) -> None:
    assert run(main.app, "verify", folder)[0] == 0
    status, out, err = run(main.app, "verify", folder, "--decode", "--workers", 1)
    first, second = out.splitlines()
    assert (status, "2 faults in 2 shards" in err) == (1, True)
    for line, shard, key in ((first, "shard-000000.tar", "s1"), (second, "shard-000001.tar", "s4")):
        assert shard in line
        assert f"sample {key!r}, offset " in line
    assert "decoding: 6 of 6 samples" in err


def test_no_more_shards_are_read_when_a_command_ends_early() -> None:
    """As in `streamload verify shards | head -1`."""
    read = []

    def read_slowly(number: int, on_bytes: OnBytes) -> None:
        read.append(number)
        time.sleep(0.01)
        on_bytes(0)

    with pytest.raises(BrokenPipeError), map_in_order(read_slowly, range(1000), workers=2) as results:
        next(results)
        raise BrokenPipeError
    assert len(read) < 50


def test_a_dataset_of_which_no_sample_can_be_decoded(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "data") as writer:
        for key in "ab":
            writer.write({"__key__": key, "npy": b"no array"})
    status, out, err = run(main.app, "verify", tmp_path / "data", "--decode", "--workers", 1)
    assert (status, out.count("cannot decode the bytes of field 'npy'")) == (1, 2)
    assert "2 faults in 1 shard" in err


@pytest.mark.exhaustive
def test_a_damaged_shard_is_not_decoded_and_the_others_are(folder: Path) -> None:
    with (folder / "shard-000000.tar").open("r+b") as file:
        file.write(b"x")
    status, out, _ = run(main.app, "verify", folder, "--decode", "--workers", 1)
    assert (status, "s1" in out, "s4" in out) == (1, False, True)
