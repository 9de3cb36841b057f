"""Zeros at the end of a shard: the rest of a record is its end, and more are an error for every reader."""

from __future__ import annotations

import gzip
import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from servers.small_web_server import SmallWebServer
from typer.testing import CliRunner

from streamload import StreamLoader, TarDataset
from streamload.cli.main import app
from streamload.errors import ShardFormatError

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

KEPT = 1_004


def archive_of(members: int) -> bytes:
    """An archive of one-byte members, with the end of archive that Python writes."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number in range(members):
            info = tarfile.TarInfo(f"{number:05d}.cls")
            info.size = 1
            archive.addfile(info, io.BytesIO(b"7"))
    return file.getvalue()


ZEROED = archive_of(2_000)[: KEPT * 1024] + bytes((2_000 - KEPT) * 1024)
"""2,000 samples, of which all after the first 1,004 were overwritten by zeros."""


def samples(source: object, **options: Any) -> int:
    with StreamLoader(source, 100, fields=("cls",), **options) as loader:  # type: ignore[arg-type]
        return sum(len(labels) for (labels,) in loader)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def served(folder: Path) -> SmallWebServer:
    files = (path for path in folder.rglob("*") if path.is_file())
    return SmallWebServer({f"/{path.relative_to(folder)}": path.read_bytes() for path in files})


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "offset"),
    [
        ("a.tar", ZEROED, KEPT * 1024),
        ("a.tar.gz", gzip.compress(ZEROED, 1), KEPT * 1024),
        ("a.tar", bytes(1 << 20), 0),
        ("a.tar.gz", gzip.compress(bytes(1 << 20), 1), 0),
    ],
    ids=range(4),
)
def test_a_tail_of_zeros_is_refused(tmp_path: Path, name: str, content: bytes, offset: int, remote: bool) -> None:
    (tmp_path / name).write_bytes(content)
    with served(tmp_path) as server, pytest.raises(ShardFormatError, match="more zeros than tar writes") as caught:
        samples(f"http://{server.address}/{name}" if remote else tmp_path / name, num_workers=0)
    assert caught.value.offset == offset
    if name == "a.tar":
        with pytest.raises(ShardFormatError, match="more zeros than tar writes"):
            len(TarDataset(tmp_path / name))
    status, output = run("index", tmp_path)
    assert (status, "more zeros than tar writes" in output) == (1, True)


def test_larger_records_are_read_with_an_index_that_accepts_them(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.cls").write_text("7")
    for name, blocks in (("a", 20), ("b", 200)):
        command = ["tar", "-b", str(blocks), "-cf", f"{name}.tar", "0.cls", "1.cls", "2.cls"]
        subprocess.run(command, cwd=folder, check=True)
    (folder / "c.tar.gz").write_bytes(gzip.compress((folder / "b.tar").read_bytes()))
    assert samples(folder / "a.tar", num_workers=0) == 3
    for name in ("b.tar", "c.tar.gz"):
        with pytest.raises(ShardFormatError, match="`streamload index --record-size`"):
            samples(folder / name, num_workers=0)
    assert run("index", folder, "--record-size", 100 * 512)[0] == 1
    assert run("index", folder, "--record-size", 200 * 512)[0] == 0
    assert samples(folder, num_workers=0) == 9
    assert len(TarDataset(folder / "b.tar")) == 3
    assert run("ls", folder)[0] == 0
    assert run("verify", folder, "--record-size", 200 * 512)[0] == 0
    with served(folder) as server:
        names = [f"http://{server.address}/{name}" for name in ("a.tar", "b.tar", "c.tar.gz")]
        assert samples(names, num_workers=0) == 9


@pytest.mark.parametrize(("workers", "compressed"), [(0, True), (1, False)])
def test_a_missing_end_of_archive_marker_is_a_counted_warning(tmp_path: Path, workers: int, compressed: bool) -> None:
    content = archive_of(3)[: 3 * 1024]
    shard = tmp_path / ("a.tar.gz" if compressed else "a.tar")
    shard.write_bytes(gzip.compress(content) if compressed else content)
    with StreamLoader(shard, 3, fields=("cls",), num_workers=workers) as loader:
        with pytest.warns(UserWarning, match="^1 shard without an end-of-archive marker") as said:
            assert [labels.tolist() for (labels,) in loader] == [[7, 7, 7]]
        assert [warning.filename for warning in said] == [__file__]
        assert loader.statistics().skipped_members == {"missing end-of-archive marker": 1}
        assert len(list(loader)) == 1  # a second warning would be an error
    status, output = run("index", shard)
    assert (status, f"warning: {shard} has no end-of-archive marker" in output) == (0, True)
