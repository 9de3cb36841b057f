"""What goes wrong with remote shards: a typed error that names the url and what to do, nothing left, and on again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from places import Place, in_memory, write_datasets
from servers.faults import FaultServer, Script
from servers.rclone import S3Server

from streamload import StreamLoader
from streamload.errors import ShardChangedError, ShardFormatError, ShardNotFoundError, StorageError, StreamloadError

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

SIZES = [[30_000] * 40] * 5
COMPRESSED = ["gz"]
LABELS = list(range(200))


def urls_of(server: FaultServer, form: str = "plain") -> list[str]:
    return Place(server.url).urls(form, range(5))


def loader_of(urls: Any, **options: Any) -> StreamLoader:
    defaults: dict[str, Any] = {"batch_size": 8, "fields": ("cls",), "num_workers": 0}
    return StreamLoader(urls, **{**defaults, **options})


def labels_of(loader: StreamLoader) -> list[int]:
    return [label for batch in loader for label in batch[0].tolist()]


def fails_and_goes_on(server: FaultServer, script: Script, kind: type[StreamloadError]) -> StreamloadError:
    """An epoch under a script ends with an error; without it the loader goes on to the end."""
    with loader_of(urls_of(server)) as loader:
        server.play(script)
        got = []
        with pytest.raises(kind) as caught:
            for batch in loader:
                got += batch[0].tolist()
        assert type(caught.value) is kind
        server.play(Script())
        assert got + labels_of(loader) == LABELS
    return caught.value


@pytest.mark.parametrize(
    ("script", "form", "workers"),
    [
        ({"cut_share": 0.7}, "gz", 0),
        ({"short_share": 0.3}, "plain", 0),
        ({"whole_share": 0.3}, "plain", 0),
        ({"wrong_range_share": 0.3}, "plain", 0),
        ({"reset_share": 0.5}, "indexed", 1),
    ],
)
def test_what_passes_is_not_seen(server: FaultServer, script: dict[str, float], form: str, workers: int) -> None:
    with loader_of(urls_of(server, form), num_workers=workers) as loader:
        server.play(Script(seed=11, **script))
        assert labels_of(loader) == LABELS


def test_a_server_that_never_serves_parts_is_given_up(server: FaultServer) -> None:
    server.play(Script(whole_share=1.0))
    advice = r"ignores range requests .*nginx, caddy, rclone serve.*copy the shards"
    with loader_of([url.replace("://", "://user:told@") for url in urls_of(server)]) as loader:
        with pytest.raises(StorageError, match=f"{advice}.*part00") as caught:
            labels_of(loader)
    assert "told" not in str(caught.value)
    requested = [path for method, path, _ in server.report().log if method == "GET"]
    assert max(requested.count(path) for path in requested) <= 6, "five times, and once to look at it"


def test_a_shard_that_is_denied(server: FaultServer) -> None:
    error = fails_and_goes_on(server, Script(status=403, status_share=1.0, only="part002-000000.tar"), StorageError)
    assert "access is denied" in str(error)
    assert error.url in urls_of(server)


@pytest.mark.parametrize("form", ["plain", "gz"])
def test_a_missing_shard_in_the_middle(server: FaultServer, form: str) -> None:
    urls = urls_of(server, form)
    urls[2] = urls[2].replace("part002", "part00x")
    with loader_of(urls) as loader:
        got: list[int] = []
        for _ in range(2):
            with pytest.raises(ShardNotFoundError) as caught:
                got += labels_of(loader)
            assert caught.value.url == urls[2]
    assert set(got) <= set(LABELS[:80])


def test_a_shard_that_is_swapped_while_it_is_read(tmp_path: Path) -> None:
    write_datasets(tmp_path / "data", [[900_000] * 30], [])
    with FaultServer(tmp_path / "data", Script(swap_at=3)) as server:
        url = Place(server.url).urls("plain", [0])[0]
        with loader_of(url) as loader:
            with pytest.raises(ShardChangedError, match=r"the shard was changed.*make a new loader") as caught:
                labels_of(loader)
            assert caught.value.url == url


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "longer"])
def test_a_shard_that_is_not_what_its_index_says(tmp_path: Path, cut: bool) -> None:
    """A new loader would not help: the index is older than the shard."""
    write_datasets(tmp_path / "data", [[30_000] * 40], [])
    shard = next((tmp_path / "data" / "indexed").glob("*.tar"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-20_480] if cut else whole + bytes(10_240))
    remedy = "rebuild the index with `streamload index`"
    said = f"if it was cut, fetch or pack it again; if it was rewritten, {remedy}" if cut else f"; {remedy}"
    with FaultServer(tmp_path / "data") as server:
        for place in (Place(server.url), in_memory(tmp_path / "data")):
            url = place.urls("indexed", [0])[0]
            with loader_of(url) as loader, pytest.raises(ShardChangedError, match="since it was indexed") as caught:
                labels_of(loader)
            assert caught.value.url == url
            assert said in str(caught.value)
            assert "new loader" not in str(caught.value)


@pytest.mark.parametrize("form", ["plain", "gz"])
def test_a_shard_that_is_cut_or_corrupt_is_an_error_in_its_turn(folder: Path, form: str) -> None:
    ending = "" if form == "plain" else f".{form}"
    files = {path.name: path.read_bytes() for path in sorted((folder / form).iterdir())}
    name, whole = f"part003-000000.tar{ending}", files[f"part003-000000.tar{ending}"]
    flipped = bytearray(whole)
    for place in range(len(whole) // 2, len(whole) // 2 + 64):
        flipped[place] ^= 0xFF
    # A flipped bit in the bytes of an uncompressed member shows in a checksum only, which an index has.
    for damaged in (whole[: len(whole) // 2], bytes(flipped))[: 1 if form == "plain" else 2]:
        with FaultServer({**{f"d/{n}": content for n, content in files.items()}, f"d/{name}": damaged}) as server:
            urls = [f"{server.url}/d/{n}" for n in files]
            with loader_of(urls) as loader:
                got: list[int] = []
                with pytest.raises(ShardFormatError) as caught:
                    for batch in loader:
                        got += batch[0].tolist()
                assert caught.value.url == urls[3]
                assert got == LABELS[: len(got)]
                assert len(got) <= 160


def test_an_empty_shard_is_the_same_error_as_a_local_one(folder: Path, tmp_path: Path) -> None:
    files = {"a.tar": next((folder / "plain").iterdir()).read_bytes(), "b.tar": b""}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with FaultServer({f"d/{name}": content for name, content in files.items()}) as server:
        errors = []
        for root in (tmp_path, f"{server.url}/d"):
            with loader_of([f"{root}/{name}" for name in files]) as loader, pytest.raises(ShardFormatError) as caught:
                labels_of(loader)
            assert caught.value.url == f"{root}/b.tar"
            errors.append((caught.value.message, caught.value.offset))
    assert errors[0] == errors[1]


def test_credentials_and_buckets_that_are_wrong(rclone_s3: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    (rclone_s3.folder / "rights").mkdir(exist_ok=True)
    with_tls = rclone_s3.endpoint.replace("http:", "https:")
    for url, options, kind, words in (
        ("s3://rights/a.tar", {"secret": "wrong"}, StorageError, "SignatureDoesNotMatch"),
        ("s3://rights/a.tar", {"key": "wrong"}, StorageError, "InvalidAccessKeyId"),
        ("s3://rights/a.tar", {"endpoint_url": "http://127.0.0.1:9"}, StorageError, r"endpoint_url.*s3://rights"),
        ("s3://rights/a.tar", {"endpoint_url": with_tls}, StorageError, "does not speak TLS; check https://"),
        ("s3://rights/a.tar", {}, ShardNotFoundError, "no such shard"),
        ("s3://no-such-bucket/a.tar", {}, ShardNotFoundError, "no such bucket.*no-such-bucket/a.tar"),
        ("s3://no-such-bucket/{000..003}.tar", {}, ShardNotFoundError, "bucket"),
    ):
        with pytest.raises(kind, match=words):
            loader_of(url, storage_options={**rclone_s3.options, **options})
    caplog.clear()  # a record holds its error, and so whatever that error's frames hold
