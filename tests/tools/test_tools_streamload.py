"""`streamload index|ls|verify` as a user runs them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest
from image_folders import files_below, run
from indexed_shards import read_index, table_in, write_index

from streamload.cli import main as streamload
from streamload.index.dataset_index import IndexedShard
from streamload.index.listing import list_shards


def without_index(dataset: Path) -> Path:
    shutil.rmtree(dataset / ".streamload")
    return dataset


def test_ls_lists_shards_the_same_with_and_without_an_index(dataset: Path) -> None:
    status, with_index, _ = run(streamload.app, "ls", dataset)
    assert status == 0
    assert run(streamload.app, "ls", without_index(dataset)) == (0, with_index, "")
    lines = with_index.splitlines()
    assert lines[0].split() == ["SHARD", "BYTES", "SAMPLES", "FIELDS"]
    size = f"{(dataset / 'shard-000000.tar').stat().st_size:,}"
    assert lines[1].split() == ["shard-000000.tar", size, "5", "jpg", "cls", "png"]
    assert lines[-1].startswith("3 shards, 12 samples, ")


def test_ls_lists_samples(dataset: Path) -> None:
    status, out, _ = run(streamload.app, "ls", "--samples", f"{dataset}/shard-000000.tar")
    assert status == 0
    size = (dataset.parent / "source" / "bee" / "0.jpg").stat().st_size
    assert out.splitlines()[0] == f"shard-000000.tar  bee/0  jpg {size:,} B  cls 1 B"
    assert len(out.splitlines()) == 5


def test_ls_prints_no_control_characters(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("key\x1b[2J\nline.f\x1b[31m"))
    for options in ((), ("--samples",)):
        status, out, _ = run(streamload.app, "ls", *options, tmp_path)
        assert status == 0
        assert "\x1b" not in out
        assert r"f\x1b[31m" in out
    assert r"key\x1b[2J\nline" in out


def test_index_makes_what_shardify_made(dataset: Path, tmp_path: Path) -> None:
    before = files_below(dataset)
    status, out, _ = run(streamload.app, "index", without_index(dataset))
    assert (status, out) == (0, "indexed 3 shards, 12 samples\n")
    assert files_below(dataset).keys() == before.keys()
    assert list_shards(dataset).counts == (5, 5, 2)
    without_index(dataset)
    assert run(streamload.app, "index", dataset, "--output", tmp_path / "elsewhere")[0] == 0
    assert not (dataset / ".streamload").exists()
    assert list_shards(dataset, tmp_path / "elsewhere").counts == (5, 5, 2)
    assert run(streamload.app, "verify", dataset, "--index", tmp_path / "elsewhere")[0] == 0


def test_index_takes_the_place_of_a_stale_one_and_adds_to_another(dataset: Path) -> None:
    first = dataset / "shard-000000.tar"
    first.write_bytes((dataset / "shard-000002.tar").read_bytes())
    assert run(streamload.app, "ls", dataset)[0] == 1
    assert run(streamload.app, "index", first)[0] == 0
    assert list_shards(dataset).counts == (2, 5, 2)


def test_index_drops_shards_that_were_taken_away_and_says_so(dataset: Path) -> None:
    (dataset / "shard-000001.tar").unlink()
    for command in ("ls", "verify"):
        status, out, err = run(streamload.app, command, dataset)
        assert status == 1
        assert "drop it from the index with `streamload index" in out + err
    status, out, err = run(streamload.app, "index", dataset)
    assert (status, out) == (0, "indexed 2 shards, 7 samples\n")
    assert "note: dropped 1 shard from the index, such as 'shard-000001.tar', because their files do not exist" in err
    assert list_shards(dataset).counts == (5, 2)
    assert run(streamload.app, "verify", dataset)[0] == 0
    assert "note" not in run(streamload.app, "index", dataset)[2]


@pytest.mark.parametrize("command", ["ls", "verify", "stats", "index"])
def test_the_last_shard_that_was_taken_away_is_named(dataset: Path, command: str) -> None:
    for shard in dataset.glob("*.tar"):
        shard.unlink()
    status, _, err = run(streamload.app, command, dataset)
    said = "this shard does not exist, but its index names it; restore it, or remove .streamload"
    assert (status, err) == (1, f"error: {said} (at '{dataset}/shard-000000.tar')\n")


def test_verify_finds_nothing_in_what_is_whole(dataset: Path) -> None:
    assert run(streamload.app, "verify", dataset)[:2] == (0, "3 shards verified, no damage\n")
    status, out, _ = run(streamload.app, "verify", without_index(dataset))
    assert status == 0
    assert out.startswith("3 shards verified, no damage; of 3 shards without an index only the headers were checked; ")


def test_verify_finds_a_flipped_bit_in_a_payload_by_the_index(dataset: Path) -> None:
    path = dataset / "shard-000001.tar"
    table = table_in(read_index(dataset / ".streamload"), path.name)
    data = bytearray(path.read_bytes())
    data[int(table.member_offset[2]) + 3] ^= 1
    path.write_bytes(data)
    status, out, err = run(streamload.app, "verify", dataset)
    assert status == 1
    (line,) = out.splitlines()
    for part in ("crc32", str(path), table.key(1), f"offset {table.member_offset[2]}"):
        assert part in line
    assert "error: 1 fault in 3 shards" in err


def test_verify_names_every_damaged_shard(dataset: Path) -> None:
    paths = [dataset / f"shard-00000{number}.tar" for number in range(3)]
    paths[0].write_bytes(paths[0].read_bytes()[:-700])
    paths[1].write_bytes(b"")
    paths[2].unlink()
    status, out, _ = run(streamload.app, "verify", f"{dataset}/shard-*.tar")
    assert status == 1
    assert [sum(str(path) in line for line in out.splitlines()) for path in paths] == [1, 1, 1]


def test_verify_finds_an_index_of_other_shards(dataset: Path) -> None:
    folder = str(dataset / ".streamload")
    names, index = ("shard-000000.tar", "shard-000001.tar"), read_index(folder)
    tables = [table_in(index, name) for name in names[::-1]]
    write_index(
        folder,
        [(IndexedShard(name, table.shard_bytes, len(table)), table) for name, table in zip(names, tables, strict=True)],
    )
    assert run(streamload.app, "verify", dataset)[0] == 1


def test_listing_into_a_closed_pipe_is_quiet(dataset: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "streamload", "ls", "--samples", str(dataset)]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == ""


def test_python_m_streamload_is_the_command(dataset: Path) -> None:
    def output(*arguments: str) -> str:
        command = [sys.executable, "-m", "streamload", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout

    assert output("--version") == f"streamload {version('streamload')}\n"
    assert output("ls", str(dataset)) == run(streamload.app, "ls", dataset)[1]


@pytest.mark.parametrize("imported", ["streamload.pack.run", "pydantic"])
def test_ctrl_c_before_a_command_has_begun_is_quiet(imported: str, tmp_path: Path) -> None:
    """While modules are imported, and while arguments are parsed."""
    program = (
        "import os, signal, sys\n"
        "class OnTheWay:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == '{imported}':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, OnTheWay())\n"
        "from streamload.__main__ import streamload\n"
        "streamload()\n"
    )
    ran = [sys.executable, "-c", program, "ls", str(tmp_path)]
    done = subprocess.run(ran, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (("stats", "--field", "txt"), "--field: use `stats --pixels`"),
        (("bench", "--plot=run.png"), "--plot: use `loader.trace`"),
        (("index", "--record-size", 20), "--record-size: leave it out"),
    ],
)
def test_removed_options_are_refused_with_advice(tmp_path: Path, options: tuple[object, ...], advice: str) -> None:
    status, _, err = run(streamload.app, *options, tmp_path)
    assert (status, advice in err) == (2, True)
