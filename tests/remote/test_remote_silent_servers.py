"""Servers that are silent or answer something else, and programs that share a cache and are killed."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from matrix import exhaustive
from places import Place, write_datasets
from preloaded import Preloaded
from processes import wait_until
from servers.faults import FaultServer, Script
from through_fsspec import through_fsspec

from streamload import StreamLoader
from streamload.errors import StorageError
from streamload.fetch.resident import Fetching
from streamload.options import Options
from streamload.storage.download import Retries, RetryPolicy
from streamload.storage.storages import Storages

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

SHARDS = range(6)
SIZES = [[20_000] * 30 for _ in SHARDS]
LABELS = list(range(180))
SHORT_RETRIES = RetryPolicy(
    stall_timeout_s=0.3, give_up_timeout_s=0.9, tries=3, first_backoff_s=0.01, most_backoff_s=0.02
)


def have_policy(monkeypatch: pytest.MonkeyPatch, policy: RetryPolicy) -> None:
    """From now on loaders make requests again in this way."""
    usual = Options.fetching

    def fetching(options: Options) -> Fetching:
        storages = Storages(options.storage_options, options.filesystem, Retries(policy))
        return usual(options)._replace(storages=storages)

    monkeypatch.setattr(Options, "fetching", fetching)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders that give up soon."""
    have_policy(monkeypatch, SHORT_RETRIES)


def loader_of(server: FaultServer, form: str, **options: Any) -> StreamLoader:
    defaults: dict[str, Any] = {"batch_size": 9, "fields": ("npy", "cls"), "num_workers": 0}
    return StreamLoader(Place(server.url).urls(form, SHARDS), **{**defaults, **options})


def checked_labels(loader: StreamLoader) -> Iterator[int]:
    """The labels, while the bytes of each sample are held to what was written."""
    for arrays, labels in loader:
        for array, label in zip(arrays, labels.tolist(), strict=True):
            assert int(array[0]) == label % 251
            assert int(array[1]) == int(array[2]) == label % 251
            yield label


@pytest.mark.usefixtures("impatient")
def test_a_server_that_never_answers(server: FaultServer, tmp_path: Path) -> None:
    with loader_of(server, "plain", cache_dir=tmp_path) as loader:
        server.play(Script(silent_share=1.0))
        with pytest.raises(StorageError, match=r"requests in a row received no byte.*no byte for") as caught:
            list(checked_labels(loader))
        assert caught.value.url is not None
        assert caught.value.url.startswith(f"{server.url}/plain/")
        server.play(Script())
        assert list(checked_labels(loader)) == LABELS


def later_on(folder: Path, port: int) -> FaultServer:
    """A server after a second without one."""
    time.sleep(1.0)
    return FaultServer(folder, port=port)


@pytest.mark.parametrize(("kind", "workers"), [("http", 1), exhaustive(("s3", 0)), exhaustive(("fsspec-http", 0))])
def test_a_server_that_is_killed_and_started_again(
    kind: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The outage is told of once, in the training process, however many parts wait for its end."""
    have_policy(monkeypatch, RetryPolicy(warn_after_s=0.5))
    write_datasets(tmp_path, SIZES, [])
    with FaultServer(tmp_path, Script(bytes_per_s=2e6)) as server:
        s3 = {"key": "k", "secret": "s", "endpoint_url": server.url, "client_kwargs": {"region_name": "us-east-1"}}
        root, options = {
            "http": (server.url, {}),
            "s3": ("s3:/", {"storage_options": s3}),
            "fsspec-http": (server.url, {"filesystem": through_fsspec("http")}),
        }[kind]
        urls = Place(root).urls("plain", SHARDS)
        usual: dict[str, Any] = {"fields": ("npy", "cls"), **options}
        usual["memory_budget"] = "64MiB"  # so that shards are fetched one after the other
        with StreamLoader(urls, 9, num_workers=workers, **usual) as loader:
            labels = checked_labels(loader)
            got = [next(labels)]
            server.kill()
            with ThreadPoolExecutor(1) as later:
                started = later.submit(later_on, tmp_path, int(server.url.rpartition(":")[2]))
                got += labels
                started.result().close()
            assert loader.statistics().failed_requests
    assert got == LABELS
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"{root}/plain/part")
    assert "no connection to " in said or "the answer broke off" in said
    assert "retrying for up to" in said


def half_an_epoch_and_then(server: FaultServer, script: Script, loader: StreamLoader) -> None:
    """The second half of an epoch; the next one, whose first half was not fetched yet, is begun and fails."""
    loader.load_state_dict({**loader.state_dict(), "position": 90})
    server.play(script)
    assert list(checked_labels(loader)) == LABELS[90:]
    assert wait_until(lambda: any(path.endswith(script.only) for path, _, _ in server.report().spans))
    time.sleep(0.3)  # for the feeder to learn of it


@pytest.mark.exhaustive
@pytest.mark.usefixtures("impatient")
def test_a_storage_that_was_away_while_the_next_epoch_was_begun(server: FaultServer) -> None:
    with loader_of(server, "indexed", num_workers=1) as loader:
        half_an_epoch_and_then(server, Script(status=503, status_share=1.0, only="part002-000000.tar"), loader)
        server.play(Script())
        assert list(checked_labels(loader)) == LABELS


@pytest.mark.usefixtures("impatient")
def test_a_storage_that_stays_away_is_one_error(server: FaultServer) -> None:
    script = Script(status=403, status_share=1.0, only="part001-000000.tar")
    with loader_of(server, "indexed", num_workers=1) as loader:
        half_an_epoch_and_then(server, script, loader)
        server.play(script)
        with pytest.raises(StorageError, match="access is denied"):
            list(checked_labels(loader))
        assert server.report().requests, "it was tried again"
        server.play(Script())
        assert sorted(checked_labels(loader))[-90:] == LABELS[90:]


@pytest.mark.usefixtures("impatient")
def test_a_length_that_could_not_be_found_is_found_later(server: FaultServer) -> None:
    server.play(Script(status=404, status_share=1.0))
    with loader_of(server, "plain") as loader:
        for _ in range(2):
            with pytest.raises(StorageError, match="no such shard"):
                len(loader)
        server.play(Script())
        assert len(loader) == 20
        assert list(checked_labels(loader)) == LABELS


OTHER = textwrap.dedent(
    """
    import sys
    from streamload import StreamLoader

    loader = StreamLoader(sys.argv[2:], 9, fields=("npy", "cls"), num_workers=1, cache_dir=sys.argv[1])
    for step, _ in enumerate(loader):
        if step == 2:
            print("reads", flush=True)
            sys.stdin.read()
    """
)


def test_a_cache_that_is_shared_with_one_that_is_killed(
    preloaded: Preloaded, server: FaultServer, tmp_path: Path
) -> None:
    cache, urls = str(tmp_path / "cache"), Place(server.url).urls("indexed", SHARDS)
    server.play(Script(bytes_per_s=1e6))
    other = preloaded.start(OTHER, cache, *urls)
    assert other.stdout.readline() == "reads\n"
    with loader_of(server, "indexed", cache_dir=cache) as loader:
        labels = checked_labels(loader)
        got = [next(labels) for _ in range(20)]
        other.kill()
        got += labels
    other.communicate()
    assert got == LABELS
    server.play(Script())
    with loader_of(server, "indexed", cache_dir=cache) as loader:
        assert list(checked_labels(loader)) == LABELS
    requested = [(path, part) for _, path, part in server.report().log if path.endswith(".tar")]
    assert len(set(requested)) == len(requested), "the version of a shard is requested once"
    assert {part for _, part in requested} == {"bytes=0-0"}
