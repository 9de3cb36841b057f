"""Files of the disk cache that a disk, or somebody, has changed: what they held is fetched again."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import Place, steps, without_names, write_datasets
from servers.faults import FaultServer, Script

from streamload import StreamLoader

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

SIZES = [[100_000] * 12, [100_000] * 9]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_an_epoch_goes_on_with_the_right_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture, workers: int) -> None:
    made, cache = tmp_path / "made", tmp_path / "cache"
    forms = ["plain", "gz"] if workers == 0 else ["plain"]
    write_datasets(made, SIZES, ["gz"])

    def read(place: Place, form: str) -> object:
        urls = place.urls(form, range(len(SIZES)))
        with StreamLoader(
            urls, 4, fields=("npy", "cls"), num_workers=workers, cache_dir=cache, memory_budget="200MB"
        ) as loader:
            return without_names(steps(loader))

    with FaultServer(made) as server:
        for form in forms:
            right = read(Place(server.url), form)
            damaged = 0
            for file in (cache / "streamload-shards").iterdir():
                if file.is_file() and (content := bytearray(file.read_bytes())):
                    content[(-1, len(content) // 2)[damaged % 2]] ^= 1  # the last one is of a checksum
                    file.write_bytes(content)
                    damaged += 1
            assert damaged >= len(SIZES)
            caplog.clear()
            assert read(Place(server.url), form) == right
            removed = [record.getMessage() for record in caplog.records if "disk cache" in record.getMessage()]
            assert len(removed) == len(SIZES)
            assert all("does not hold what was fetched" in message for message in removed)
            server.play(Script())
            caplog.clear()
            assert read(Place(server.url), form) == right
            if form == "plain":
                assert server.report().sent_bytes == len(SIZES), "the file was made again"
            assert not caplog.records
