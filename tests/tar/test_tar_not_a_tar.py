"""Files that are no shards say what they are instead, at the first byte and in one message."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from pathlib import Path

import pytest
from matrix import exhaustive

from streamload import StreamLoader
from streamload.errors import ShardFormatError
from streamload.tar.header_chain import what_else

pytestmark = pytest.mark.usefixtures("feeders_in_threads")


def tar(mode: str = "w") -> bytes:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode=mode) as archive:
        for number in range(4):
            member = tarfile.TarInfo(f"{number}.cls")
            member.size = 1
            archive.addfile(member, io.BytesIO(b"1"))
    return memory.getvalue()


def zipped() -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        archive.writestr("0.cls", "1")
    return memory.getvalue()


PAGE = b"\n<!DOCTYPE html>\n<html><body>404 Not Found</body></html>\n"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 10240\n"
NO_SUCH_KEY = b'<?xml version="1.0"?><Error><Code>NoSuchKey</Code></Error>'


NO_SHARDS = [
    ("a.tar", PAGE, "a web page"),
    ("a.tar", PAGE * 50, "a web page"),
    ("a.tar.gz", PAGE, "a web page"),
    ("a.tar", POINTER, "a Git LFS pointer in place of the shard; run `git lfs pull`"),
    ("a.tar", NO_SUCH_KEY, "an XML document, perhaps a bucket's error"),
    ("a.tar", zipped(), "a zip archive, not a tar archive"),
    ("a.tar", tar("w:gz"), "this is gzip data, not a plain tar archive"),
    ("a.tar", tar("w:xz"), "this is xz data, not a plain tar archive"),
    ("a.tar", b"\x28\xb5\x2f\xfd" + bytes(600), "this is zstd data, not a plain tar archive"),
    ("a.tar.gz", tar(), "this is a plain tar archive, not a compressed one; name it .tar"),
    ("a.tar.bz2", tar(), "this is a plain tar archive"),
    ("a.tar.gz", tar("w:bz2"), "this is bzip2 data, which is not what its name says"),
]


@pytest.mark.parametrize(
    ("name", "content", "said", "num_workers"),
    [
        *((*case, 0) for case in NO_SHARDS),
        (*NO_SHARDS[0], 1),  # what it is, is found out where it is scanned, and travels as any error does
        *(exhaustive((*case, 1)) for case in NO_SHARDS[1:]),
    ],
    ids=lambda value: f"{len(value)} bytes" if isinstance(value, bytes) else None,  # archives hold the time
)
def test_what_is_no_shard_says_what_it_is(
    tmp_path: Path, name: str, content: bytes, said: str, num_workers: int
) -> None:
    (tmp_path / name).write_bytes(content)
    with (
        pytest.raises(ShardFormatError, match=said) as raised,
        StreamLoader(tmp_path / name, 2, num_workers=num_workers) as loader,
    ):
        list(loader)
    assert str(tmp_path / name) in str(raised.value)


def test_a_damaged_stream_of_the_right_kind_is_damaged_and_nothing_else() -> None:
    assert what_else(gzip.compress(b"1" * 1000), "gzip") is None
    assert what_else(tar()) is None
    assert what_else(b"") is None
    assert what_else(bytes(512)) is None
