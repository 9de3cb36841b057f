"""From one epoch to the next: its first batches are made ahead, and nobody notices but for the time."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from make_shards import write_numbers
from processes import wait_until
from servers.faults import FaultServer
from transforms import Noting

from streamload import StreamLoader

COUNTS = [40, 30, 50]
TOTAL = sum(COUNTS)


@pytest.fixture
def source(shard_folder: Path) -> str:
    return write_numbers(shard_folder, COUNTS)


def options(**others: Any) -> dict[str, Any]:
    return {"batch_size": 10, "shuffle": 25, "fields": ("cls",), "num_workers": 1, **others}


def numbers(loader: StreamLoader) -> list[int]:
    return [number for batch in loader for number in batch[0].tolist()]


def epochs_apart(source: str, *epochs: int) -> list[list[int]]:
    """What each epoch is when nothing is made ahead."""
    found = []
    for epoch in epochs:
        with StreamLoader(source, **options(num_workers=0)) as loader:
            loader.set_epoch(epoch)
            found.append(numbers(loader))
    return found


def test_the_next_epoch_is_begun_before_it_is_requested(source: str, tmp_path: Path) -> None:
    noting = Noting(tmp_path / "made")
    with StreamLoader(source, **options(transform={"cls": noting}, prefetch_batches=4)) as loader:
        first = numbers(loader)
        assert wait_until(lambda: noting.made() > TOTAL)
        assert [first, numbers(loader), numbers(loader)] == epochs_apart(source, 0, 1, 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_process_of_the_loop_has_no_further_thread(source: str, workers: int) -> None:
    with FaultServer(source) as server:
        for urls in (source, [f"{server.url}/{path.name}" for path in sorted(Path(source).glob("*.tar"))]):
            threads = psutil.Process().num_threads()
            with StreamLoader(urls, **options(num_workers=workers)) as loader:
                for _ in loader:
                    assert psutil.Process().num_threads() <= threads


def test_no_more_than_is_prefetched_is_made_ahead(source: str, tmp_path: Path) -> None:
    noting = Noting(tmp_path / "made", pause_s=0.003)
    with StreamLoader(source, **options(transform={"cls": noting}, collate_fn=list, prefetch_batches=1)) as loader:
        list(loader)
        assert wait_until(lambda: noting.made() > TOTAL)
        time.sleep(0.3)
        assert noting.made() <= TOTAL + 10 * 4, "two tasks for each worker and two more, of a batch each"


def test_epochs_in_any_order(source: str) -> None:
    found, epochs = [], (0, 3, 4, 4, 1, 2, 5, 5)
    with StreamLoader(source, **options()) as loader:
        for epoch in epochs:
            loader.set_epoch(epoch)
            found.append(numbers(loader))
    assert found == epochs_apart(source, *epochs)


def test_nothing_is_made_ahead_in_the_callers_thread(source: str, tmp_path: Path) -> None:
    noting = Noting(tmp_path / "made")
    with StreamLoader(source, **options(transform={"cls": noting}, num_workers=0)) as loader:
        for passes in (1, 2):
            list(loader)
            assert noting.made() == passes * TOTAL


def test_a_state_loaded_between_epochs(source: str) -> None:
    whole = epochs_apart(source, 0, 1)
    with StreamLoader(source, **options()) as loader:
        states = [loader.state_dict() for _ in loader]
        assert numbers(loader) == whole[1]
        loader.load_state_dict(states[3])
        assert numbers(loader) == whole[0][40:]
        assert numbers(loader) == whole[1]


def test_batches_made_far_ahead_survive_a_call_in_the_middle_of_the_loop(tmp_path: Path) -> None:
    """A call takes messages from the feeder ahead of the loop; slots retired by these may hold batches to come."""
    source = write_numbers(tmp_path / "shards", [200] * 4, index=False)
    made = tmp_path / "made"
    made.touch()

    def count(value: int) -> int:
        descriptor = os.open(made, os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, b".")
        os.close(descriptor)
        return value

    seen = []
    with StreamLoader(
        source, 1, fields=("cls",), transform={"cls": count}, num_workers=1, prefetch_batches=1000
    ) as loader:
        batches = iter(loader)
        for (number,) in batches:
            if not seen:
                while made.stat().st_size < 800:  # until all batches wait for the loop
                    time.sleep(0.01)
                batches.connection.wait_reason()
            seen.append(int(number))
    assert seen == list(range(800))
