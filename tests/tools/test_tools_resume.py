"""What is left of a run of `shardify` that ended early, and what `--resume` and `--overwrite` make of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from image_folders import files_below, image_bytes, images, pack, packs, refusal

from streamload import TarDataset
from streamload import pack as pack_calls
from streamload.errors import DatasetIndexError

OPTIONS = ("--max-count", 2, "--no-shuffle", "--workers", 1)
RECORDS = ".streamload-packing"


def stopped(tmp_path: Path) -> tuple[Path, Path]:
    """A run of six shards, of which the fourth could not be packed; source, which is whole again, and destination."""
    source, dest = images(tmp_path), tmp_path / "dest"
    faulty = source / "cat" / "0.jpg"
    status, times = faulty.read_bytes(), faulty.stat()
    faulty.write_bytes(b"")
    ended, out, err = pack(source, dest, *OPTIONS)
    assert (ended, out) == (1, "")
    assert err.splitlines()[-1] == (
        "error: 1 of 12 files is damaged or of an unexpected type; repair or remove them, or leave them out with "
        "--skip-bad; finished shards are kept: go on with --resume (resume=True), or start over with --overwrite "
        "(overwrite=True)"
    )
    faulty.write_bytes(status)
    os.utime(faulty, ns=(times.st_atime_ns, times.st_mtime_ns))
    return source, dest


def completed(source: Path, dest: Path, *options: object, how: str = "--resume") -> str:
    """Complete a run to what a new one gives; what is said."""
    _, err = packs(source, dest, *options, how)
    packs(source, dest.with_name("whole"), *options)
    assert files_below(dest) == files_below(dest.with_name("whole"))
    return err


def inodes(dest: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in dest.glob("*.tar")}


def test_what_is_finished_stays_and_is_refused_until_the_rest_is_there(tmp_path: Path) -> None:
    source, dest = stopped(tmp_path)
    before = inodes(dest)
    assert sorted(before) == [f"shard-00000{number}.tar" for number in (0, 1, 2, 4, 5)]
    for urls in (dest, dest / "shard-000000.tar", f"{dest}/*.tar"):
        with pytest.raises(DatasetIndexError, match="not complete.*--resume"):
            TarDataset(str(urls))
    message = "holds an unfinished run; go on with --resume (resume=True), or discard it with"
    assert message in refusal(source, dest, *OPTIONS)
    assert "note: 5 of 6 tasks are already done" in completed(source, dest, *OPTIONS)
    assert inodes(dest).items() > before.items()


def test_bad_files_are_left_out_by_the_options_that_the_message_names(tmp_path: Path) -> None:
    source, dest = stopped(tmp_path)
    (source / "cat" / "0.jpg").write_bytes(b"")
    assert "11 samples" in packs(source, dest, *OPTIONS, "--skip-bad", "--resume")[0]


def test_overwriting_starts_over(tmp_path: Path) -> None:
    source, dest = stopped(tmp_path)
    completed(source, dest, "--max-count", 5, how="--overwrite")


@pytest.mark.parametrize(
    "change",
    [
        lambda source: (source / "bee" / "9.jpg").write_bytes(image_bytes(1)) and (),
        lambda source: (source / "bee" / "0.jpg").unlink() or (),
        lambda source: (source / "bee" / "0.jpg").write_bytes(image_bytes(77)) and (),
        lambda _: ("--seed", 3, "--shuffle"),
        lambda _: ("--resize", 4),
        lambda _: ("--max-count", 3),
        lambda _: ("--split", "a=0.5,b=0.5"),
    ],
)
def test_other_files_or_options_give_what_a_new_run_gives(
    tmp_path: Path, change: Callable[[Path], tuple[object, ...]]
) -> None:
    source, dest = stopped(tmp_path)
    assert "again to do: their files, options or shards have changed" in completed(
        source, dest, *OPTIONS, *change(source)
    )


def test_a_kept_shard_that_was_changed_is_packed_again(tmp_path: Path) -> None:
    source, dest = stopped(tmp_path)
    shard = dest / "shard-000001.tar"
    data = bytearray(shard.read_bytes())
    data[700] ^= 1
    shard.write_bytes(data)
    (dest / "shard-000002.tar").unlink()
    completed(source, dest, *OPTIONS)


def test_resuming_where_there_is_nothing_to_resume(tmp_path: Path) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    assert "note: there is no unfinished run to resume; packing from the start" in packs(source, dest, "--resume")[1]
    before = files_below(dest)
    status, out, err = pack(source, dest, "--resume")
    assert (status, out, files_below(dest)) == (0, "", before)
    assert "already holds 1 shard; to pack again, add --overwrite" in err


class AnotherRun:
    """Makes a sample of how another run into the same destination ends."""

    def __init__(self, source: Path, dest: Path) -> None:
        self.source, self.dest = source, dest

    def __call__(self, number: int) -> dict[str, object]:
        status, _, err = pack(self.source, self.dest, "--overwrite")
        assert "another packing run is writing to" in err
        return {"__key__": str(number), "cls": status}


def test_two_runs_do_not_meet_in_one_folder(tmp_path: Path) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    pack_calls(AnotherRun(source, dest), range(2), dest, workers=1)
    assert [row["cls"] for row in TarDataset(str(dest))] == [2, 2]


@pytest.mark.parametrize("unfinished", [False, True])
def test_a_shard_that_nobody_names_is_never_removed(tmp_path: Path, unfinished: bool) -> None:
    if unfinished:
        source, dest = stopped(tmp_path)
    else:
        source, dest = images(tmp_path), tmp_path / "dest"
        assert pack(source, dest)[0] == 0
    (dest / "shard-mine.tar").write_text("mine")
    message = "holds 'shard-mine.tar', which neither an index nor a packing run names"
    for how in ("--overwrite", "--resume"):
        assert message in refusal(source, dest, *OPTIONS, how)
    assert (dest / "shard-mine.tar").read_text() == "mine"
