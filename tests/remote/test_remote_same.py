"""Wherever shards lie, and however they are stored: same samples, same order, same state as from local files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from matrix import exhaustive, matrix
from places import Place, Step, in_memory, local, on_s3, on_web, steps, without_names, write_datasets
from servers.nginx import WebServer
from servers.rclone import S3Server

from streamload import StreamLoader

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

COUNTS = [60, 45, 80, 1, 64]
SHARDS = range(len(COUNTS))
LARGE_SHARDS = range(3)
REMOTE = ["s3", "web", "memory"]
FORMS = ["indexed", "plain", "gz", "zst"]


@pytest.fixture(scope="module")
def small(
    tmp_path_factory: pytest.TempPathFactory, rclone_s3: S3Server, nginx: WebServer
) -> Iterator[dict[str, Place]]:
    """Shards of one part each, in every place."""
    sizes = [[24] * count for count in COUNTS]
    folder = tmp_path_factory.mktemp("small")
    write_datasets(folder, sizes, ["gz", "zst", "xz", "bz2"])
    servers = {"s3": on_s3(rclone_s3, folder), "web": on_web(nginx, folder)}
    yield {"local": local(folder), "memory": in_memory(folder), **servers}
    fsspec.filesystem("memory").store.clear()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, rclone_s3: S3Server, nginx: WebServer) -> dict[str, Place]:
    """Shards of three parts of 8 MiB, with samples that cross from one to the next, and one that fills a part."""
    folder = tmp_path_factory.mktemp("large")
    write_datasets(folder, [[700_000] * 25, [9_000_000, *[100_000] * 80, 1_000_000], [2_500_000] * 7], ["gz"])
    return {"local": local(folder), "s3": on_s3(rclone_s3, folder), "web": on_web(nginx, folder)}


def loader_of(place: Place, urls: Any, **options: Any) -> StreamLoader:
    defaults: dict[str, Any] = {"batch_size": 7, "fields": ("npy", "cls"), "num_workers": 0, "seed": 3}
    return StreamLoader(urls, **{**defaults, **place.options, **options})


def seen(place: Place, form: str, shards: Any = SHARDS, epochs: int = 1, **options: Any) -> list[Step]:
    with loader_of(place, place.urls(form, shards), **options) as loader:
        return steps(loader, epochs)


def expected_of(
    place: Place, shards: Any = SHARDS, epochs: int = 1, form: str = "indexed", **options: Any
) -> list[Step]:
    """What a dataset gives, of these the local one with its index, read once for all tests that compare with it."""
    requested = repr((place.root, form, shards, epochs, sorted(options.items())))
    if requested not in _EXPECTED:
        _EXPECTED[requested] = seen(place, form, shards, epochs, **options)
    return _EXPECTED[requested]


_EXPECTED: dict[str, list[Step]] = {}


def assert_same(found: list[Step], expected: list[Step], form: str) -> None:
    if form != "indexed":  # without an index a web server says no sizes
        found, expected = without_names(found), without_names(expected)
    assert found == expected


PROMISED = itertools.product(["local", *REMOTE], FORMS, [0, 2], [1, 3], [True, False])


@pytest.mark.parametrize(
    ("place", "form", "workers", "world_size", "shuffle"),
    matrix(case for case in PROMISED if (case[0], case[2]) != ("memory", 2)),  # that memory is this process's own
)
def test_the_same_epochs_at_any_storage_compression_index_workers_ranks(
    small: dict[str, Place], place: str, form: str, workers: int, world_size: int, shuffle: bool
) -> None:
    for rank in [world_size - 1] if workers else range(world_size):
        options = {"rank": rank, "world_size": world_size, "shuffle": shuffle and 50, "epochs": 2}
        expected = expected_of(small["local"], **options)
        assert len(expected) == 2 * -(-sum(COUNTS) // (7 * world_size))
        assert_same(seen(small[place], form, num_workers=workers, **options), expected, form)


@pytest.mark.parametrize(("place", "form"), [("s3", "xz"), ("local", "bz2")])
def test_rarer_compressions(small: dict[str, Place], place: str, form: str) -> None:
    assert_same(seen(small[place], form, shuffle=50), expected_of(small["local"], shuffle=50), form)


@pytest.mark.parametrize(
    ("here", "first", "there", "second"),
    [
        ("local", "indexed", "s3", "plain"),
        ("s3", "plain", "local", "indexed"),
        ("web", "gz", "local", "gz"),
        ("memory", "indexed", "local", "plain"),
    ],
)
def test_a_state_saved_in_one_place_goes_on_in_another(
    small: dict[str, Place], here: str, first: str, there: str, second: str
) -> None:
    whole = expected_of(small[here], epochs=2, form=first, shuffle=50)
    with loader_of(small[here], small[here].urls(first, SHARDS), shuffle=50) as loader:
        begun = steps(loader, most=13)
    with loader_of(small[there], small[there].urls(second, SHARDS), shuffle=50) as loader:
        loader.load_state_dict(begun[-1][2])
        rest = steps(loader, epochs=2)
    assert begun == whole[:13]
    assert without_names(rest) == without_names(whole[13:])


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"rank": 1, "world_size": 3}])
def test_a_list_of_local_and_remote_shards(small: dict[str, Place], options: dict[str, Any]) -> None:
    s3, web, here = small["s3"], small["web"], small["local"]
    urls = [
        *here.urls("indexed", [0]),
        *s3.urls("plain", [1]),
        *web.urls("zst", [2]),
        *here.urls("gz", [3]),
        *s3.urls("indexed", [4]),
    ]
    storage_options = {"s3": s3.options["storage_options"]}
    with loader_of(here, urls, shuffle=50, storage_options=storage_options, **options) as loader:
        mixed = steps(loader, epochs=2)
    ranks = {name: options[name] for name in ("rank", "world_size") if name in options}
    assert_same(mixed, expected_of(here, epochs=2, shuffle=50, **ranks), "mixed")


@pytest.mark.parametrize(
    ("place", "form", "workers"),
    [
        ("s3", "indexed", 0),
        ("web", "gz", 2),
        *map(exhaustive, [("s3", "plain", 2), ("web", "indexed", 1), ("s3", "gz", 0), ("local", "gz", 0)]),
    ],
)
def test_shards_of_several_parts(large: dict[str, Place], place: str, form: str, workers: int) -> None:
    """Also resumed in the middle."""
    settings = {"shuffle": 20, "collate_fn": list}
    expected = expected_of(large["local"], LARGE_SHARDS, epochs=2, **settings)
    with loader_of(large[place], large[place].urls(form, LARGE_SHARDS), num_workers=workers, **settings) as loader:
        whole = steps(loader, 2)
        loader.load_state_dict(whole[8][2])
        rest = steps(loader)
    assert_same(whole, expected, form)
    assert rest == whole[9 : len(whole) // 2]
