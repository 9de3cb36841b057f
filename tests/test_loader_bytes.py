"""Batches of bytes, text and ragged arrays: exact however they are made, and no burden on the feeder."""

from __future__ import annotations

from pathlib import Path

import pytest
from make_shards import write_samples
from processes import children
from transforms import slow

from streamload import StreamLoader

SIZE = 300_000
SAMPLES = 30


def payload(number: int) -> bytes:
    return bytes([number]) * (SIZE + number)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    samples = [{"bin": payload(number), "txt": "ü" * number * 1000, "cls": number} for number in range(SAMPLES)]
    return write_samples(tmp_path_factory.mktemp("bytes") / "shards", samples, max_count=10)


@pytest.mark.parametrize("workers", [0, 2])
def test_large_values_come_back_as_they_were(shards: str, workers: int) -> None:
    seen = []
    with StreamLoader(shards, 4, shuffle=True, fields=("bin", "txt", "cls"), num_workers=workers) as loader:
        for data, texts, numbers in loader:
            seen += numbers.tolist()
            assert list(data) == [payload(number) for number in numbers]
            assert list(texts) == ["ü" * number * 1000 for number in numbers]
    assert sorted(seen) == list(range(SAMPLES))


def test_values_do_not_pass_through_the_feeder(shards: str) -> None:
    """What does stays on its heap and is in nobody's budget."""
    with StreamLoader(shards, 10, shuffle=True, fields=("bin",), num_workers=1, epoch_size=600) as loader:
        batches = iter(loader)
        next(batches)
        feeder = children("streamload.feeder")[0]
        before_bytes = feeder.memory_info().rss
        assert sum(len(data) for (data,) in batches) == 590
        assert feeder.memory_info().rss - before_bytes < 4 * SIZE


def test_values_that_grow_a_thousandfold_within_a_batch_come_back(tmp_path: Path) -> None:
    """The first row of all is small, so the parts of the first batches have too little room."""
    texts = [f"ä{number}" * (1 if number < 3 else 5_000) for number in range(32)]
    write_samples(tmp_path, [{"txt": text, "bin": text.encode(), "cls": number} for number, text in enumerate(texts)])
    fields = ("__key__", "txt", "bin", "cls")
    with StreamLoader(str(tmp_path), 16, fields=fields, transform={"cls": slow}, num_workers=1) as loader:
        for _ in range(2):
            rows = [row for batch in loader for row in zip(*batch, strict=True)]
            assert rows == [(f"{number:06d}", text, text.encode(), number) for number, text in enumerate(texts)]


def test_one_large_first_sample_does_not_make_all_batches_large(tmp_path: Path) -> None:
    """Page-locked batches take all of their memory: 1 GB it was, for 200 samples as large as the first."""
    write_samples(tmp_path, [{"bin": bytes(1000 if number else 5_000_000)} for number in range(600)])
    mapped_bytes = 0
    with StreamLoader(str(tmp_path), 200, fields=("bin",), num_workers=1) as loader:
        for (batch,) in loader:
            assert {len(value) for value in batch} <= {1000, 5_000_000}
            for line in Path("/proc/self/maps").read_text().splitlines():
                if "/memfd:" in line:
                    start, end = line.split(" ")[0].split("-")
                    mapped_bytes = max(mapped_bytes, int(end, 16) - int(start, 16))
    assert 0 < mapped_bytes < 256 << 20
