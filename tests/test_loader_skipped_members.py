"""What belongs to no batch is reported where somebody may miss it: links, empty shards, an epoch without a batch."""

from __future__ import annotations

import gzip
import os
import subprocess
import tarfile
import warnings
from pathlib import Path

import pytest
from make_shards import write_numbers
from typer.testing import CliRunner

from streamload import StreamLoader, TarDataset
from streamload.cli.main import app
from streamload.errors import ShardFormatError

ADVICE = "tar --hard-dereference -h"


def pack(files: Path, shard: Path) -> str:
    """What `tar cf` makes of a folder's files, by name: of two that are one on the disk the second is a link."""
    with tarfile.open(shard, "w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(files.iterdir()):
            archive.add(path, arcname=path.name)
    return os.fspath(shard)


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two samples of their own, a hard link to the first, and two symbolic links."""
    folder = tmp_path_factory.mktemp("linked")
    files = folder / "files"
    files.mkdir()
    for name in ("a.cls", "b.cls"):
        (files / name).write_text("7")
    os.link(files / "a.cls", files / "c.cls")
    (files / "d.cls").symlink_to("a.cls")
    (files / "e.cls").symlink_to("b.cls")
    return pack(files, folder / "linked.tar")


@pytest.fixture(scope="module")
def only_links(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("links")
    (folder / "files").mkdir()
    for number in range(4):
        (folder / "files" / f"{number}.cls").symlink_to(f"/elsewhere/{number}.cls")
    return pack(folder / "files", folder / "links.tar")


@pytest.mark.parametrize("workers", [0, 1])
def test_links_are_reported_once_at_the_line_of_the_loop(linked: str, workers: int) -> None:
    with StreamLoader(linked, 1, fields=("cls",), num_workers=workers) as loader:
        with pytest.warns(UserWarning, match=f"^3 links skipped.*{ADVICE}") as said:
            assert len(list(loader)) == 2
        assert [warning.filename for warning in said] == [__file__]
        assert loader.statistics().skipped_members == {"link": 3}
        assert len(list(loader)) == 2  # a second warning would be an error


def test_a_warning_that_is_an_error_loses_no_sample(linked: str) -> None:
    with StreamLoader(linked, 1, fields=("cls",), num_workers=0) as loader:
        with warnings.catch_warnings(), pytest.raises(UserWarning, match=ADVICE):
            warnings.simplefilter("error")
            list(loader)
        assert len(list(loader)) == 2


def test_shards_of_nothing_but_links_are_no_empty_loop_in_silence(only_links: str) -> None:
    with StreamLoader(only_links, 2, fields=("cls",), num_workers=0) as loader:
        with pytest.warns(UserWarning, match="skipped") as said:
            assert list(loader) == []
        links, empty = (str(warning.message) for warning in said)
        assert links.startswith("4 links skipped")
        assert "the shards hold no samples: all their members were skipped (4 link); samples are files" in empty
        assert list(loader) == []
    with (
        pytest.warns(UserWarning, match="4 link"),
        pytest.raises(ValueError, match="no sample has 'cls'; there are none"),
    ):
        TarDataset(only_links, fields=("cls",))


def test_files_without_a_field_are_no_empty_loop_in_silence(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    for name in ("one", "two", ".hidden.jpg"):
        (tmp_path / "files" / name).write_text("x")
    shard = pack(tmp_path / "files", tmp_path / "s.tar")
    with StreamLoader(shard, 2, num_workers=0) as loader:
        with pytest.warns(UserWarning, match=r"skipped \(1 hidden, 2 no extension\).*KEY\.FIELD") as said:
            assert list(loader) == []
        assert [warning.filename for warning in said] == [__file__]
    with pytest.warns(UserWarning, match="KEY.FIELD"), TarDataset(shard) as dataset:
        assert len(dataset) == 0


@pytest.mark.parametrize("indexed", [False, True])
def test_empty_archives_are_no_empty_loop_in_silence(tmp_path: Path, indexed: bool) -> None:
    with tarfile.open(tmp_path / "s.tar", "w"):
        pass
    if indexed:
        assert CliRunner().invoke(app, ["index", os.fspath(tmp_path / "s.tar")]).exit_code == 0
    with StreamLoader(tmp_path / "s.tar", 2, num_workers=0) as loader:
        with pytest.warns(UserWarning, match="^the shards hold no samples"):
            assert list(loader) == []
        assert list(loader) == []  # a second warning would be an error
    with pytest.warns(UserWarning, match="the shards hold no samples"), TarDataset(tmp_path / "s.tar") as dataset:
        assert len(dataset) == 0


def test_a_dataset_by_number_reports_links(linked: str) -> None:
    with pytest.warns(UserWarning, match=f"^3 links skipped.*{ADVICE}") as said:
        dataset = TarDataset(linked, fields=("cls",))
    assert [warning.filename for warning in said] == [__file__]
    assert dataset[1] == (7,)
    dataset.close()


def test_the_command_that_indexes_reports_links(linked: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["index", linked, "--output", os.fspath(tmp_path / "index")])
    assert done.exit_code == 0
    assert "indexed 1 shard, 2 samples" in done.stdout
    assert "warning: skipped 3 links" in done.stderr
    assert ADVICE in done.stderr
    with StreamLoader(linked, 1, fields=("cls",), index=tmp_path / "index", num_workers=0) as loader:
        assert len(list(loader)) == 2  # who wrote the index was told


# -- the end of an archive -----------------------------------------------------------------------------------------


def samples(source: str | Path | list[str]) -> int:
    with StreamLoader(source, 100, fields=("cls",), num_workers=0) as loader:
        return sum(len(labels) for (labels,) in loader)


def test_larger_records_are_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "0.cls").write_text("7")
    for name, blocks in (("a", 20), ("b", 200)):
        subprocess.run(["tar", "-b", str(blocks), "-cf", f"{name}.tar", "0.cls"], cwd=tmp_path, check=True)
    (tmp_path / "c.tar.gz").write_bytes(gzip.compress((tmp_path / "b.tar").read_bytes()))
    assert samples(tmp_path / "a.tar") == 1
    for name in ("b.tar", "c.tar.gz"):
        with pytest.raises(ShardFormatError, match="without `tar -b`"):
            samples(tmp_path / name)


@pytest.mark.parametrize(("workers", "compressed"), [(0, True), (1, False)])
def test_a_missing_end_of_archive_marker_is_a_counted_warning(tmp_path: Path, workers: int, compressed: bool) -> None:
    (whole,) = Path(write_numbers(tmp_path, [3], index=False)).glob("*.tar")
    content = whole.read_bytes()[:-1024]
    shard = tmp_path / ("a.tar.gz" if compressed else "a.tar")
    shard.write_bytes(gzip.compress(content) if compressed else content)
    with StreamLoader(shard, 3, fields=("cls",), num_workers=workers) as loader:
        with pytest.warns(UserWarning, match="^an end-of-archive marker is missing in 1 shard") as said:
            assert [labels.tolist() for (labels,) in loader] == [[0, 1, 2]]
        assert [warning.filename for warning in said] == [__file__]
        assert loader.statistics().skipped_members == {"missing end-of-archive marker": 1}
        assert len(list(loader)) == 1  # a second warning would be an error
    done = CliRunner().invoke(app, ["index", str(shard)])
    assert (done.exit_code, f"warning: {shard} has no end-of-archive marker" in done.output) == (0, True)


# -- an epoch of which `drop_last` leaves nothing ------------------------------------------------------------------


@pytest.mark.parametrize(("indexed", "workers"), [(True, 0), (False, 1)])
def test_an_epoch_without_a_full_batch_is_warned_of_once(tmp_path: Path, indexed: bool, workers: int) -> None:
    source = write_numbers(tmp_path, [3, 2], index=indexed)
    with StreamLoader(source, 8, drop_last=True, num_workers=workers) as loader:
        with pytest.warns(UserWarning, match="5 samples, and one batch of batch_size=8 takes 8; give") as said:
            assert list(loader) == []
        assert [warning.filename for warning in said] == [__file__]
        assert list(loader) == []  # a second warning would be an error
    with (
        StreamLoader(source, 2, drop_last=True, num_workers=0, rank=1, world_size=3) as loader,
        pytest.warns(UserWarning, match="batch_size=2 on each of 3 ranks takes 6"),
    ):
        assert list(loader) == []


def test_nothing_is_said_where_nothing_was_lost(tmp_path: Path) -> None:
    source = write_numbers(tmp_path, [3, 2], index=False)
    with StreamLoader(source, 8, drop_last=True, num_workers=0) as loader:
        loader.load_state_dict({**loader.state_dict(), "position": 4})
        assert list(loader) == []
    with StreamLoader(source, 8, num_workers=0) as loader:
        assert len(list(loader)) == 1
