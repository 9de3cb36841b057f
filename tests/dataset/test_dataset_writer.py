"""The shard writer: what it writes is what every reader reads, within its bounds, whole or not at all."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from streamload.dataset.index import DatasetIndex
from streamload.dataset.scan import scan_shard
from streamload.dataset.table import ShardTable
from streamload.dataset.tar_header import member_header
from streamload.dataset.writer import ShardWriter
from streamload.errors import StorageError

Sample = dict[str, Any]


class Interruption(dict[str, Any]):
    """A sample during which Ctrl-C is pressed."""

    def __contains__(self, _: object) -> bool:
        raise KeyboardInterrupt


def scanned(path: str) -> ShardTable:
    return scan_shard(memoryview(Path(path).read_bytes()), path, crc32=True, labels=True)


def read_back(paths: tuple[str, ...]) -> list[tuple[str, list[tuple[str, bytes]]]]:
    """Each sample's key and its fields in stored order, by our own scanner."""
    found = []
    for path in paths:
        data, table = Path(path).read_bytes(), scanned(path)
        for sample in range(len(table)):
            members = range(int(table.sample_start[sample]), int(table.sample_start[sample + 1]))
            fields = [
                (
                    table.fields[int(table.member_field[m])],
                    data[int(table.member_offset[m]) : int(table.member_offset[m] + table.member_size[m])],
                )
                for m in members
            ]
            found.append((table.key(sample), fields))
    return found


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


def same_tables(one: ShardTable, other: ShardTable) -> bool:
    arrays = ("member_offset", "member_size", "member_field", "sample_start", "key_bytes", "key_start", "member_crc32")
    return (
        one.shard_bytes == other.shard_bytes
        and one.fields == other.fields
        and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)
        and (one.labels is None) == (other.labels is None)
        and (one.labels is None or np.array_equal(one.labels, other.labels))
    )


SAMPLES: list[Sample] = [
    {"__key__": "cat/0", "jpg": b"\xff\xd8cat", "cls": 0, "seg.png": b""},
    {"__key__": "d.o.g/1", "cls": 1, "jpg": b"x" * 512},
    {"__key__": "é/2", "txt": "ü", "cls": -7},
    {"__key__": "a" * 80 + "/" + "b" * 80, "txt": "ustar prefix", "cls": 3},
    {"__key__": "c" * 180, "txt": "pax path", "cls": 4},
    {"__key__": "d" * 160 + "/" + "e" * 30, "txt": "pax path, too", "cls": "5"},
]
STORED = [
    (
        s["__key__"],
        [(f, v if isinstance(v, bytes) else str(v).encode()) for f, v in s.items() if f != "__key__"],
    )
    for s in SAMPLES
]


def write(folder: Path | str, samples: list[Sample] = SAMPLES, **options: Any) -> ShardWriter:
    with ShardWriter(folder, **options) as writer:
        for sample in samples:
            writer.write(sample)
    return writer


def test_our_scanner_reads_it_and_the_index_says_the_same(tmp_path: Path) -> None:
    writer = write(tmp_path, max_count=4)
    assert [os.path.basename(path) for path in writer.shards] == ["shard-000000.tar", "shard-000001.tar"]
    assert read_back(writer.shards) == STORED
    assert writer.samples == 6
    assert writer.bytes == sum(os.path.getsize(path) for path in writer.shards)
    index = DatasetIndex.load(str(tmp_path / ".streamload"))
    for path, (entry, table) in zip(writer.shards, writer.tables, strict=True):
        assert same_tables(table, scanned(path))
        assert same_tables(index.table(entry.name), scanned(path))
        assert (entry.bytes, entry.samples) == (os.path.getsize(path), len(table))
        assert table.labels is not None


def test_labels_only_where_every_sample_has_one(tmp_path: Path) -> None:
    samples = [{"__key__": "0", "cls": b" 12\n"}, {"__key__": "1", "cls": b"12x"}, {"__key__": "2", "cls": 2**63}]
    for number, sample in enumerate([*samples, {"__key__": "3", "txt": "no"}]):
        for others in ([], [{"__key__": "x", "cls": 1}]):
            folder = tmp_path / f"{number}-{len(others)}"
            writer = write(folder, [*others, sample], index=False)
            assert (writer.tables[0][1].labels is not None) == (number == 0)
            assert same_tables(writer.tables[0][1], scanned(writer.shards[0]))


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_webdataset_reads_it(tmp_path: Path) -> None:
    writer = write(tmp_path)
    found = [
        (sample["__key__"], [(name, value) for name, value in sample.items() if not name.startswith("__")])
        for sample in webdataset.WebDataset(list(writer.shards), shardshuffle=False)
    ]
    assert found == STORED


def test_tarfile_and_gnu_tar_read_it(tmp_path: Path) -> None:
    (path,) = write(tmp_path).shards
    names = [f"{key}.{field}" for key, fields in STORED for field, _ in fields]
    with tarfile.open(path) as archive:
        assert archive.getnames() == names
        contents = [archive.extractfile(member).read() for member in archive]  # type: ignore[union-attr]
        owners = {(m.uid, m.gid, m.uname, m.gname, m.mtime, m.mode, m.isreg()) for m in archive}
    assert contents == [value for _, fields in STORED for _, value in fields]
    assert owners == {(0, 0, "", "", 0, 0o644, True)}
    listed = subprocess.run(
        ["tar", "--quoting-style=literal", "-tf", path],
        capture_output=True,
        check=True,
        env={"LC_ALL": "C.UTF-8", **os.environ},
    )
    assert listed.stdout.decode().splitlines() == names
    assert listed.stderr == b""


def test_the_end_is_two_zero_blocks_and_nothing_more(tmp_path: Path) -> None:
    (path,) = write(tmp_path, [{"__key__": "a", "txt": "b"}]).shards
    data = Path(path).read_bytes()
    assert len(data) == 512 + 512 + 1024
    assert data[-1024:] == bytes(1024)


def test_a_size_that_ustar_cannot_hold_goes_into_a_pax_record() -> None:
    header = member_header("a.bin", 9 * 2**30)
    info = tarfile.TarInfo.frombuf(header[1024:], "utf-8", "strict")
    assert (len(header), info.name, info.size) == (1536, "a.bin", 0)
    assert header[512:1024].rstrip(b"\0") == b"19 size=9663676416\n"
    assert len(member_header("a.bin", 8**11 - 1)) == 512


@settings(max_examples=60, deadline=None)
@given(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=300), st.integers(0, 8**11 - 1)
)
def test_headers_are_what_tarfile_reads(name: str, size: int) -> None:
    name = name.strip("/") or "x"
    header = member_header(name, size)
    assert len(header) % 512 == 0
    info = tarfile.TarInfo.frombuf(header[-512:], "utf-8", "strict")
    assert info.size == size
    if len(header) == 512:
        assert info.name == name
    else:
        length, record = header[512:-512].split(b" ", 1)
        assert record[: int(length) - len(length) - 1] == b"path=" + name.encode() + b"\n"


KEY = st.from_regex(r"([a-zé ._-]{1,60}/){0,3}[a-zA-Z0-9é _-]{1,90}", fullmatch=True).filter(
    lambda key: not any(part in (".", "..") or part.startswith("__") for part in key.split("/"))
)
FIELD = st.sampled_from(["jpg", "seg.png", "cls", "txt", "a.b.c", "été", "0"])


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(KEY, st.dictionaries(FIELD, st.binary(max_size=1500), min_size=1, max_size=4)),
        max_size=12,
        unique_by=lambda sample: sample[0],
    ),
    st.integers(7_000, 30_000),
    st.one_of(st.none(), st.integers(1, 4)),
)
def test_what_is_written_is_read_back_within_the_bounds(
    samples: list[tuple[str, dict[str, bytes]]], max_bytes: int, max_count: int | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        given_samples = [{"__key__": key, **fields} for key, fields in samples]
        writer = write(folder, given_samples, max_bytes=max_bytes + 4096, max_count=max_count, index=False)
        assert read_back(writer.shards) == [(key, list(fields.items())) for key, fields in samples]
        for path, (entry, table) in zip(writer.shards, writer.tables, strict=True):
            assert os.path.getsize(path) == entry.bytes <= max_bytes + 4096
            assert 1 <= len(table) <= (max_count or len(samples))
            assert same_tables(table, scanned(path))


def test_a_sample_that_just_fits_fits_and_one_byte_less_of_room_does_not(tmp_path: Path) -> None:
    sample = {"__key__": "big", "bin": bytes(5000)}
    bytes_alone = 512 + 5120 + 1024
    assert len(write(tmp_path / "fits", [sample], max_bytes=bytes_alone).shards) == 1
    with ShardWriter(tmp_path / "not", max_bytes=bytes_alone - 1) as writer:
        with pytest.raises(ValueError, match=r"'big' makes a shard of 6,656 bytes.*max_bytes is 6,655"):
            writer.write(sample)
        writer.write({"__key__": "small", "bin": b""})
    assert [key for key, _ in read_back(writer.shards)] == ["small"]
    two = write(tmp_path / "two", [{**sample, "__key__": "a"}, {**sample, "__key__": "b"}], max_bytes=2 * 5632 + 1024)
    assert len(two.shards) == 1
    two = write(tmp_path / "one", [{**sample, "__key__": "a"}, {**sample, "__key__": "b"}], max_bytes=2 * 5632 + 1023)
    assert len(two.shards) == 2


@pytest.mark.parametrize(
    "key",
    [
        "",
        "a.b",
        "d/a.b",
        ".a",
        "/a",
        "a/",
        "a//b",
        ".",
        "..",
        "a/../b",
        "./a",
        "a\0",
        "a\nb",
        "__a__",
        "d/__a",
        "__d__/a",
        "\udc80",
    ],
)
def test_keys_that_would_not_be_read_back_are_refused(tmp_path: Path, key: str) -> None:
    with ShardWriter(tmp_path) as writer, pytest.raises(ValueError, match="key"):
        writer.write({"__key__": key, "txt": "a"})
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("field", ["JPG", "", ".jpg", "jpg.", "a..b", "a/b", "a\nb", "Seg.png"])
def test_fields_that_would_not_be_read_back_are_refused(tmp_path: Path, field: str) -> None:
    with ShardWriter(tmp_path) as writer, pytest.raises(ValueError, match="is no field"):
        writer.write({"__key__": "a", field: b"a"})


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


def test_what_cannot_be_encoded_is_named_by_sample_too(tmp_path: Path) -> None:
    with ShardWriter(tmp_path) as writer, pytest.raises(TypeError, match="field 'txt'") as caught:
        writer.write({"__key__": "k", "txt": object()})
    assert caught.value.__notes__ == ["in sample 'k'"]


def test_a_key_comes_once_in_a_shard(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, max_count=2) as writer:
        writer.write({"__key__": "a", "txt": "1"})
        with pytest.raises(ValueError, match="'a' stands in this shard already"):
            writer.write({"__key__": "a", "txt": "2"})
        writer.write({"__key__": "b", "txt": "3"})
        writer.write({"__key__": "a", "txt": "4"})
    assert [key for key, _ in read_back(writer.shards)] == ["a", "b", "a"]


def test_names_between_underscores_are_passed_over(tmp_path: Path) -> None:
    writer = write(tmp_path, [{"__key__": "a", "__url__": "x", "txt": "t", "__rank__": object()}])
    assert read_back(writer.shards) == [("a", [("txt", b"t")])]


def digest(folder: Path) -> dict[str, str]:
    return {
        os.path.relpath(os.path.join(top, name), folder): hashlib.sha256(Path(top, name).read_bytes()).hexdigest()
        for top, _, names in os.walk(folder)
        for name in names
    }


def test_the_same_samples_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write(first, max_count=2)
    os.utime(first / "shard-000000.tar", (1, 1))
    write(second, max_count=2)
    assert digest(first) == digest(second)
    assert len(digest(first)) == 3 + 3 + 1


def test_an_exception_publishes_nothing_unfinished_and_no_index(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, [*SAMPLES[:5], Interruption()], max_count=2)
    assert names_in(tmp_path) == ["shard-000000.tar", "shard-000001.tar"]
    assert read_back(tuple(str(tmp_path / name) for name in names_in(tmp_path))) == STORED[:4]


def test_a_closed_writer_takes_no_more(tmp_path: Path) -> None:
    writer = write(tmp_path)
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write(SAMPLES[0])


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
    with pytest.warns(ResourceWarning, match="without close"):
        del writer
    assert names_in(tmp_path) == []


def test_existing_shards_are_not_touched_unless_asked(tmp_path: Path) -> None:
    write(tmp_path, max_count=1)
    before = digest(tmp_path)
    with pytest.raises(StorageError, match=r"holds 6 shards of this name already.*overwrite=True"):
        ShardWriter(tmp_path)
    assert digest(tmp_path) == before


def test_overwriting_leaves_no_old_shard_and_spares_the_others(tmp_path: Path) -> None:
    write(tmp_path, max_count=1)
    write(tmp_path, [{"__key__": "other", "txt": "o"}], prefix="other")
    (tmp_path / "shard-notes.tar").write_bytes(b"not ours")
    writer = write(tmp_path, SAMPLES[:2], max_count=1, overwrite=True)
    visible = [name for name in names_in(tmp_path) if not name.startswith(".")]
    assert visible == ["other-000000.tar", "shard-000000.tar", "shard-000001.tar", "shard-notes.tar"]
    assert sorted(names_in(tmp_path / ".streamload")) == [
        "index.json",
        "other-000000.tar.npz",
        "shard-000000.tar.npz",
        "shard-000001.tar.npz",
    ]
    index = DatasetIndex.load(str(tmp_path / ".streamload"))
    assert sorted(shard.name for shard in index.shards) == ["other-000000.tar", "shard-000000.tar", "shard-000001.tar"]
    assert same_tables(index.table("shard-000001.tar"), scanned(writer.shards[1]))
    assert len(index.table("other-000000.tar")) == 1


def test_overwriting_removes_nothing_before_the_first_new_shard(tmp_path: Path) -> None:
    write(tmp_path)
    before = digest(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, [SAMPLES[0], Interruption()], overwrite=True)
    with ShardWriter(tmp_path, overwrite=True):
        pass
    assert digest(tmp_path) == before


def test_entries_of_shards_that_were_deleted_by_hand_do_not_stay_in_the_index(tmp_path: Path) -> None:
    for path in write(tmp_path, max_count=1).shards:
        os.unlink(path)
    write(tmp_path, SAMPLES[:1])
    assert [shard.name for shard in DatasetIndex.load(str(tmp_path / ".streamload")).shards] == ["shard-000000.tar"]


def test_a_pattern_numbers_its_shards(tmp_path: Path) -> None:
    writer = write(tmp_path / "new" / "train-%03d-x.tar", max_count=5)
    assert [os.path.basename(path) for path in writer.shards] == ["train-000-x.tar", "train-001-x.tar"]
    with pytest.raises(StorageError):
        ShardWriter(tmp_path / "new" / "train-%03d-x.tar")


def test_no_index_where_none_is_wanted(tmp_path: Path) -> None:
    write(tmp_path, index=False)
    assert names_in(tmp_path) == ["shard-000000.tar"]


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
        (("a",), {"max_bytes": "1GB"}, TypeError),
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
