"""What the shard writer refuses, and what it leaves behind: whole shards or nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from indexed_shards import read_index, table_in
from written_shards import SAMPLES, STORED, assert_same_tables, digest, names_in, read_back, scanned, write

from streamload import ShardWriter
from streamload.errors import StorageError


class Interruption(dict[str, Any]):
    """A sample during which Ctrl-C is pressed."""

    def __contains__(self, _: object) -> bool:
        raise KeyboardInterrupt


NO_KEYS = ["", "a.b", "d/a.b", ".a", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a\0", "a\nb"]


@pytest.mark.parametrize("key", [*NO_KEYS, "__a__", "d/__a", "__d__/a", "\udc80"])
def test_keys_that_would_not_be_read_back_are_refused(tmp_path: Path, key: str) -> None:
    with ShardWriter(tmp_path) as writer, pytest.raises(ValueError, match="key"):
        writer.write({"__key__": key, "txt": "a"})
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("field", ["JPG", "", ".jpg", "jpg.", "a..b", "a/b", "a\nb", "Seg.png", "__", "___", "____"])
def test_fields_that_would_not_be_read_back_are_refused(tmp_path: Path, field: str) -> None:
    with ShardWriter(tmp_path) as writer, pytest.raises(ValueError, match="is not a field's name"):
        writer.write({"__key__": "a", "txt": "a", field: b"a"})


@pytest.mark.parametrize(
    ("sample", "error"),
    [
        ([("__key__", "a")], TypeError),
        ({"txt": "a"}, ValueError),
        ({"__key__": 3, "txt": "a"}, TypeError),
        ({"__key__": "a"}, ValueError),
        ({"__key__": "a", "__url__": "x"}, ValueError),
        ({"__key__": "a", 3: b""}, TypeError),
        ({"__key__": "a", "txt": object()}, TypeError),
    ],
)
def test_a_refused_sample_leaves_the_writer_as_it_was(tmp_path: Path, sample: Any, error: type[Exception]) -> None:
    with ShardWriter(tmp_path) as writer:
        writer.write(SAMPLES[0])
        with pytest.raises(error):
            writer.write(sample)
        writer.write(SAMPLES[1])
    assert read_back(writer.shards) == STORED[:2]


def test_a_key_comes_once_in_a_shard(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, max_count=2) as writer:
        writer.write({"__key__": "a", "txt": "1"})
        with pytest.raises(ValueError, match="two samples have the key 'a'"):
            writer.write({"__key__": "a", "txt": "2"})
        writer.write({"__key__": "b", "txt": "3"})
        writer.write({"__key__": "a", "txt": "4"})
    assert [key for key, _ in read_back(writer.shards)] == ["a", "b", "a"]


def test_names_between_underscores_are_skipped(tmp_path: Path) -> None:
    writer = write(tmp_path, [{"__key__": "a", "__url__": "x", "txt": "t", "__rank__": object()}])
    assert read_back(writer.shards) == [("a", [("txt", b"t")])]


def test_the_same_samples_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write(first, max_count=2)
    os.utime(first / "shard-000000.tar", (1, 1))
    write(second, max_count=2)
    assert digest(first) == digest(second)
    assert len(digest(first)) == 3 + 1 + 1


def test_an_exception_publishes_nothing_unfinished_and_no_index(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, [*SAMPLES[:5], Interruption()], max_count=2)
    assert names_in(tmp_path) == [".streamload-unfinished.json", "shard-000000.tar", "shard-000001.tar"]
    assert read_back(tuple(map(str, sorted(tmp_path.glob("*.tar"))))) == STORED[:4]


def test_until_it_is_whole_a_shard_does_not_look_like_one(tmp_path: Path) -> None:
    with ShardWriter(tmp_path) as writer:
        writer.write(SAMPLES[0])
        (name,) = names_in(tmp_path)
        assert name.startswith(".")
        assert not name.endswith(".tar")
    assert names_in(tmp_path) == [".streamload", "shard-000000.tar"]


def test_a_full_disk_is_a_storage_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    writer = ShardWriter(tmp_path, max_count=1)
    writer.write(SAMPLES[0])
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left on device"):
        writer.write(SAMPLES[1])
    monkeypatch.undo()
    writer.close()
    assert names_in(tmp_path) == []


def test_a_forgotten_close_warns_and_leaves_nothing(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path)
    writer.write(SAMPLES[0])
    with pytest.warns(UserWarning, match="without close"):
        del writer
    assert names_in(tmp_path) == []


def test_existing_shards_are_not_touched_unless_requested(tmp_path: Path) -> None:
    write(tmp_path, max_count=1)
    before = digest(tmp_path)
    with pytest.raises(StorageError, match=r"already holds 6 shards named like .*overwrite=True"):
        ShardWriter(tmp_path)
    assert digest(tmp_path) == before


def test_overwriting_leaves_no_old_shard_and_spares_the_others(tmp_path: Path) -> None:
    write(tmp_path, max_count=1)
    write(tmp_path, [{"__key__": "other", "txt": "o"}], prefix="other")
    (tmp_path / "shard-notes.tar").write_bytes(b"not ours")
    writer = write(tmp_path, SAMPLES[:2], max_count=1, overwrite=True)
    visible = [name for name in names_in(tmp_path) if not name.startswith(".")]
    assert visible == ["other-000000.tar", "shard-000000.tar", "shard-000001.tar", "shard-notes.tar"]
    assert len(names_in(tmp_path / ".streamload")) == 2, "index.json and a file with the tables"
    index = read_index(tmp_path / ".streamload")
    assert sorted(shard.name for shard in index.shards) == ["other-000000.tar", "shard-000000.tar", "shard-000001.tar"]
    assert_same_tables(table_in(index, "shard-000001.tar"), scanned(writer.shards[1]))
    assert len(table_in(index, "other-000000.tar")) == 1


def test_overwriting_removes_nothing_before_the_first_new_shard(tmp_path: Path) -> None:
    write(tmp_path)
    before = digest(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, [SAMPLES[0], Interruption()], overwrite=True)
    with pytest.warns(UserWarning, match="no sample was written"), ShardWriter(tmp_path, overwrite=True):
        pass
    assert digest(tmp_path) == before


def test_entries_of_shards_deleted_by_hand_do_not_stay_in_the_index(tmp_path: Path) -> None:
    for path in write(tmp_path, max_count=1).shards:
        os.unlink(path)
    write(tmp_path, SAMPLES[:1])
    assert [shard.name for shard in read_index(tmp_path / ".streamload").shards] == ["shard-000000.tar"]


def test_a_pattern_numbers_its_shards(tmp_path: Path) -> None:
    writer = write(tmp_path / "new" / "train-%03d-x.tar", max_count=5)
    assert [os.path.basename(path) for path in writer.shards] == ["train-000-x.tar", "train-001-x.tar"]
    with pytest.raises(StorageError):
        ShardWriter(tmp_path / "new" / "train-%03d-x.tar")


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        (("",), {}, TypeError),
        ((3,), {}, TypeError),
        (("a.tar",), {}, ValueError),
        (("%d-%d.tar",), {}, ValueError),
        ((".a%d.tar",), {}, ValueError),
        (("a",), {"prefix": ""}, ValueError),
        (("a",), {"prefix": ".hidden"}, ValueError),
        (("a",), {"prefix": "b/c"}, ValueError),
        (("a",), {"max_bytes": 0}, ValueError),
        (("a",), {"max_bytes": 1e9}, TypeError),
        (("a",), {"max_bytes": "1 elephant"}, ValueError),
        (("a",), {"max_count": 0}, ValueError),
        (("a",), {"max_count": True}, TypeError),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"pattern_or_folder|prefix|max_bytes|max_count|path"):
        ShardWriter(*arguments, **options)


def test_a_file_in_place_of_the_folder_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError):
        ShardWriter(tmp_path / "file")


def test_many_fields_are_refused_before_the_shard_breaks(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, index=False) as writer:
        with pytest.raises(ValueError, match="distinct fields"):
            writer.write({"__key__": "a", **{f"f{n}": b"" for n in range(65_537)}})
        writer.write(SAMPLES[0])
    assert read_back(writer.shards) == STORED[:1]
