"""What the shard writer writes is what every reader reads, within its bounds."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from indexed_shards import read_index, table_in
from written_shards import STORED, Sample, assert_same_tables, read_back, scanned, write

from streamload import ShardWriter
from streamload.errors import StorageError
from streamload.tar.header_writer import member_header


def test_our_scanner_reads_it_and_the_index_says_the_same(tmp_path: Path) -> None:
    writer = write(tmp_path, max_count=4)
    assert [os.path.basename(path) for path in writer.shards] == ["shard-000000.tar", "shard-000001.tar"]
    assert read_back(writer.shards) == STORED
    assert writer.samples == 6
    assert writer.bytes == sum(os.path.getsize(path) for path in writer.shards)
    index = read_index(tmp_path / ".streamload")
    for path, (entry, table) in zip(writer.shards, writer.tables, strict=True):
        assert_same_tables(table, scanned(path))
        assert_same_tables(table_in(index, entry.name), scanned(path))
        assert (entry.bytes, entry.samples) == (os.path.getsize(path), len(table))
        assert table.labels is not None


def test_labels_only_where_every_sample_has_one(tmp_path: Path) -> None:
    others: list[Sample] = [{"cls": b" 12\n"}, {"cls": b"12x"}, {"cls": b"9223372036854775808"}, {"txt": "no"}]
    for number, other in enumerate(others):
        writer = write(tmp_path / str(number), [{"__key__": "x", "cls": 1}, {"__key__": "y", **other}], index=False)
        assert (writer.tables[0][1].labels is not None) == (number == 0)
        assert_same_tables(writer.tables[0][1], scanned(writer.shards[0]))


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


def test_a_size_that_ustar_cannot_hold_goes_into_a_pax_record() -> None:
    header = member_header("a.bin", 9 * 2**30)
    info = tarfile.TarInfo.frombuf(header[1024:], "utf-8", "strict")
    assert (len(header), info.name, info.size) == (1536, "a.bin", 0)
    assert header[512:1024].rstrip(b"\0") == b"19 size=9663676416\n"
    assert len(member_header("a.bin", 8**11 - 1)) == 512


@settings(max_examples=20, deadline=None)
@given(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=300), st.integers(0, 8**11 - 1)
)
def test_headers_are_what_tarfile_reads(name: str, size: int) -> None:
    name = name.strip("/") or "x"
    header = member_header(name, size)
    assert len(header) % 512 == 0
    info = tarfile.TarInfo.frombuf(header[-512:], "utf-8", "strict")
    assert info.size == size
    assert info.name.isascii()
    if len(header) == 512:
        assert info.name == name
    else:
        length, record = header[512:-512].split(b" ", 1)
        assert record[: int(length) - len(length) - 1] == b"path=" + name.encode() + b"\n"


KEY = st.from_regex(r"([a-zé ._-]{1,60}/){0,3}[a-zA-Z0-9é _-]{1,90}", fullmatch=True).filter(
    lambda key: not any(part in (".", "..") or part.startswith("__") for part in key.split("/"))
)
FIELD = st.sampled_from(["jpg", "seg.png", "cls", "txt", "a.b.c", "été", "0"])


@settings(max_examples=20, deadline=None)
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
            assert_same_tables(table, scanned(path))


def test_a_sample_that_just_fits_fits_and_one_byte_less_of_room_does_not(tmp_path: Path) -> None:
    sample = {"__key__": "big", "bin": bytes(5000)}
    bytes_alone = 512 + 5120 + 1024
    assert len(write(tmp_path / "fits", [sample], max_bytes=bytes_alone).shards) == 1
    with ShardWriter(tmp_path / "not", max_bytes=bytes_alone - 1) as writer:
        with pytest.raises(ValueError, match=r"'big' alone makes a shard of 6,656 bytes.*a shard may have 6,655"):
            writer.write(sample)
        writer.write({"__key__": "small", "bin": b""})
    assert [key for key, _ in read_back(writer.shards)] == ["small"]
    two = write(tmp_path / "two", [{**sample, "__key__": "a"}, {**sample, "__key__": "b"}], max_bytes=2 * 5632 + 1024)
    assert len(two.shards) == 1
    two = write(tmp_path / "one", [{**sample, "__key__": "a"}, {**sample, "__key__": "b"}], max_bytes=2 * 5632 + 1023)
    assert len(two.shards) == 2


def test_a_shard_that_came_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="File exists"), ShardWriter(tmp_path) as writer:
        writer.write({"__key__": "a", "txt": "a"})
        (tmp_path / "shard-000000.tar").write_bytes(b"of another writer")
    assert (tmp_path / "shard-000000.tar").read_bytes() == b"of another writer"
    assert not list(tmp_path.glob(".*.partial"))


KILLED = """
import os, signal, sys
from streamload import ShardWriter
writer = ShardWriter(sys.argv[1])
writer.write({"__key__": "a", "txt": "a"})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_left_is_removed_by_the_next_of_its_names(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    (left,) = tmp_path.glob(".shard-*.partial")
    with ShardWriter(tmp_path, prefix="other") as other:
        other.write({"__key__": "a", "txt": "a"})
    assert left.exists(), "it is of another set"
    write(tmp_path)
    assert not left.exists()


def test_what_a_living_writer_has_open_is_not_removed(tmp_path: Path) -> None:
    with ShardWriter(tmp_path) as alive:
        alive.write({"__key__": "a", "txt": "a"})
        with pytest.raises(KeyError), ShardWriter(tmp_path) as writer:
            writer.write({"__key__": "b", "txt": "b"})
            raise KeyError
    assert [key for key, _ in read_back(alive.shards)] == ["a"]


def test_a_writer_that_fails_before_its_first_shard_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: str) -> None:
        with pytest.raises(KeyError), ShardWriter(folder, max_count=1) as writer:
            writer.write({"__key__": "a", "txt": "a"})
            if folder == "published":
                writer.write({"__key__": "b", "txt": "b"})
            raise KeyError

    monkeypatch.chdir(tmp_path)
    (tmp_path / "before").mkdir()
    for folder in ("new", "before", "before/new/deep", "published"):
        fail(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "published"]
    assert not list((tmp_path / "before").iterdir())
    assert list((tmp_path / "published").glob("*.tar"))
