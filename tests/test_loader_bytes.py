"""Batches of bytes and text: exact however they are made, and no burden on the feeder."""

from __future__ import annotations

from typing import Any

import pytest
from processes import children
from transforms import as_dict, refuse_thirds

from streamload import ShardWriter, StreamLoader

SIZE = 300_000
SAMPLES = 30


def payload(number: int) -> bytes:
    return bytes([number]) * (SIZE + number)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bytes") / "shards"
    with ShardWriter(folder, max_count=10) as writer:
        for number in range(SAMPLES):
            writer.write(
                {"__key__": f"{number:02d}", "bin": payload(number), "txt": "ü" * number * 1000, "cls": number}
            )
    return str(folder)


@pytest.mark.parametrize(
    "options",
    [{"num_workers": 2}, {"num_workers": 0}],
    ids=["processes", "here"],
)
def test_large_values_come_back_as_they_were(shards: str, options: dict[str, Any]) -> None:
    for _ in range(2):
        seen = []
        with StreamLoader(shards, 4, shuffle=True, fields=("bin", "txt", "cls"), **options) as loader:
            for data, texts, numbers in loader:
                seen += numbers.tolist()
                assert list(data) == [payload(number) for number in numbers]
                assert list(texts) == ["ü" * number * 1000 for number in numbers]
        assert sorted(seen) == list(range(SAMPLES))


@pytest.mark.parametrize("workers", [1, 0])
def test_large_values_of_a_collate_fn_come_back_as_they_were(shards: str, workers: int) -> None:
    fields = ("bin", "txt", "cls")
    with StreamLoader(shards, 4, fields=fields, collate_fn=as_dict, num_workers=workers) as loader:
        batches = list(loader)
    assert [number for batch in batches for number in batch["rest"]] == list(range(SAMPLES))
    for batch in batches:
        assert batch["data"] == [payload(number) for number in batch["rest"]]


def test_samples_are_left_out_of_batches_of_large_values(shards: str) -> None:
    options: dict[str, Any] = {"transform": {"cls": refuse_thirds}, "on_error": "skip", "num_workers": 1}
    with StreamLoader(shards, 4, fields=("bin", "cls"), **options) as loader:
        batches = list(loader)
    assert [n for _, numbers in batches for n in numbers.tolist()] == [n for n in range(SAMPLES) if n % 3]
    assert all(list(data) == [payload(n) for n in numbers] for data, numbers in batches)


def test_values_do_not_pass_through_the_feeder(shards: str) -> None:
    """What does stays on its heap and is in nobody's budget."""
    with StreamLoader(shards, 10, shuffle=True, fields=("bin",), num_workers=1, epoch_size=600) as loader:
        batches = iter(loader)
        next(batches)
        feeder = children("streamload.feeder")[0]
        before_bytes = feeder.memory_info().rss
        assert sum(len(data) for (data,) in batches) == 590
        assert feeder.memory_info().rss - before_bytes < 4 * SIZE
