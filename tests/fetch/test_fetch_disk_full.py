"""The disk refuses something, or is slow: the right bytes still come, with one warning at most and nothing left."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from servers.faults import FaultServer, Script
from transforms import first_bytes

from streamload import ShardWriter, StreamLoader
from streamload.fetch import disk_cache
from streamload.storage import local_files

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

N_SHARDS, SAMPLES = 8, 10
LABELS = list(range(N_SHARDS * SAMPLES))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultServer]:
    """Shards of 120 kB."""
    folder = tmp_path_factory.mktemp("shards")
    with ShardWriter(folder / "shard", max_count=SAMPLES) as writer:
        for label in LABELS:
            writer.write({"__key__": f"{label:03d}", "bin": bytes([label]) * 10_000})
    for shard in list((folder / "shard").glob("*.tar")):
        shard.with_suffix(".tar.gz").write_bytes(gzip.compress(shard.read_bytes(), 0))
    with FaultServer(folder) as running:
        yield running


@contextmanager
def loader_of(server: FaultServer, cache: Path, ending: str = "tar", **options: Any) -> Iterator[StreamLoader]:
    urls = [f"{server.url}/shard/shard-{number:06d}.{ending}" for number in range(N_SHARDS)]
    how: dict[str, Any] = {"fields": ("bin",), "collate_fn": first_bytes, "num_workers": 0}
    with StreamLoader(urls, 5, **{**how, **options}, cache_dir=cache) as loader:
        yield loader


def labels_of(loader: StreamLoader) -> list[int]:
    return [int(label) for batch in loader for label in batch]


def shards_sent(server: FaultServer) -> int:
    """How often a byte of a shard behind its first was requested; the first tells which version there is."""
    report = server.report()
    server.play(Script())
    return sum(path.endswith(".tar") and requested != "bytes=0-0" for _, path, requested in report.log)


def files_in(cache: Path) -> tuple[int, int]:
    """How many files are whole, and how many are not."""
    top = cache / "streamload-shards"
    return len(list(top.glob("*.tar*"))), len(list((top / "partial").glob("*")))


def refuse(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, number: int, code: int) -> Callable[[], int]:
    """Let one function of the system, or of a module, fail from its n-th call on; gives the number of calls."""
    real = getattr(module if hasattr(module, name) else os, name)
    calls = 0

    def fails(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= number:
            if name == "write_fully" and calls == number:  # as a disk does it: the last bytes that fit, then the error
                real(arguments[0], bytes(arguments[1])[:10], arguments[2])
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    class Refusing:
        def __getattr__(self, wanted: str) -> Any:
            return fails if wanted == name else getattr(os, wanted)

    monkeypatch.setattr(module, *((name, fails) if hasattr(module, name) else ("os", Refusing())))
    return lambda: calls


@pytest.mark.parametrize(
    ("module", "name", "number", "ending"),
    [
        (disk_cache, "write_fully", 2, "tar"),
        (disk_cache, "write_fully", 3, "tar.gz"),
        (disk_cache, "replace", 3, "tar"),
        (disk_cache, "replace", 1, "tar.gz"),
        (disk_cache, "ftruncate", 2, "tar"),
        (disk_cache, "open", 2, "tar"),
        (disk_cache, "scandir", 3, "tar"),
        (local_files, "makedirs", 1, "tar"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)).rpartition(".")[2],
)
def test_the_disk_refuses(
    server: FaultServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    module: Any,
    name: str,
    number: int,
    ending: str,
) -> None:
    code = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)[number % 4]
    with monkeypatch.context() as refusing:
        calls = refuse(refusing, module, name, number, code)
        with loader_of(server, tmp_path, ending) as loader:
            assert [labels_of(loader) for _ in range(2)] == [LABELS] * 2
        assert calls() >= number
    (warning,) = [record.getMessage() for record in caplog.records]
    assert str(tmp_path) in warning
    assert os.strerror(code) in warning
    caplog.clear()
    with loader_of(server, tmp_path, ending) as loader:
        assert labels_of(loader) == LABELS
    assert not caplog.records
    assert files_in(tmp_path) == (N_SHARDS, 0)


def test_whole_files_are_still_read_where_the_disk_is_full(
    server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loader_of(server, tmp_path) as loader:
        labels_of(loader)
    next((tmp_path / "streamload-shards").glob("*.tar")).unlink()
    shards_sent(server)
    refuse(monkeypatch, disk_cache, "write_fully", 1, errno.ENOSPC)
    with loader_of(server, tmp_path) as loader:
        assert labels_of(loader) == LABELS
    assert shards_sent(server) <= 2, "the one that is missing, which cannot be written"
    assert files_in(tmp_path) == (N_SHARDS - 1, 0)


def test_what_a_run_has_kept_is_not_evicted_if_there_is_less_free(
    server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loader_of(server, tmp_path) as loader:
        labels_of(loader)
    kept = list((tmp_path / "streamload-shards").glob("*.tar"))
    free_bytes = sum(file.stat().st_size for file in kept)
    kept[0].unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free_bytes))
    with loader_of(server, tmp_path, cache_size=None) as loader:
        labels_of(loader)
    assert files_in(tmp_path) == (N_SHARDS, 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_folder_that_is_removed_meanwhile(server: FaultServer, tmp_path: Path, workers: int) -> None:
    with loader_of(server, tmp_path) as loader:
        labels_of(loader)
    with loader_of(server, tmp_path, num_workers=workers) as loader:
        batches = iter(loader)
        labels = [int(label) for label in next(batches)]
        shutil.rmtree(tmp_path / "streamload-shards", ignore_errors=True)
        labels += [int(label) for batch in batches for label in batch]
        assert [labels, labels_of(loader)] == [LABELS] * 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(server: FaultServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "streamload-shards").mkdir(mode=0o500)
    with loader_of(server, tmp_path) as loader:
        assert labels_of(loader) == LABELS
    assert len(caplog.records) == 1


@pytest.mark.parametrize("cache_size", [None, 100_000], ids=["disk", "cache_size"])
def test_a_cache_that_has_room_for_no_shard_says_so_once(
    server: FaultServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cache_size: int | None,
) -> None:
    nearly_full = 4096
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=nearly_full))
    with loader_of(server, tmp_path, cache_size=cache_size) as loader:
        assert [labels_of(loader) for _ in range(2)] == [LABELS] * 2
    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"{tmp_path}/streamload-shards may take {cache_size or nearly_full * 9 // 10:,} bytes" in warning
    assert "free space on that disk, give another cache_dir, or raise cache_size" in warning
    assert files_in(tmp_path) == (0, 0)
