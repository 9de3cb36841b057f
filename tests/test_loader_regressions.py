"""Combinations that were wrong once: slow loops, chains with functions of the user's, deaths in an epoch ahead."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_shards import write_numbers
from transforms import noise

from streamload import ShardWriter, StreamLoader
from streamload.errors import LoaderClosedError
from streamload.images import Compose, Resize


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbers(tmp_path_factory.mktemp("regressions") / "shards", [500] * 4)


def test_a_loop_that_pauses_while_many_batches_are_ready(source: str) -> None:
    with StreamLoader(source, 5, fields=("npy", "cls"), num_workers=1, prefetch_batches=300) as loader:
        for number, (values, labels) in enumerate(loader):
            assert labels.tolist() == list(range(5 * number, 5 * number + 5))
            assert values[:, 0].tolist() == labels.tolist()
            if number == 0:
                time.sleep(0.3)


def test_functions_in_a_chain_are_seeded_as_they_are_alone(tmp_path: Path) -> None:
    with ShardWriter(tmp_path) as writer:
        for number in range(20):
            writer.write({"__key__": f"{number:02d}", "png": np.full((9, 9, 3), number, np.uint8)})

    def drawn(transform: Any, workers: int) -> list[int]:
        options: dict[str, Any] = {"fields": ("png",), "transform": {"png": transform}, "num_workers": workers}
        with StreamLoader(tmp_path, 5, **options) as loader:
            return [number for (batch,) in loader for number in batch.tolist()]

    alone = drawn(noise, 0)
    assert len(set(alone)) == 20
    assert drawn(Compose([noise]), 0) == drawn(Compose([Resize(4), noise]), 0) == alone
    assert drawn(Compose([Resize(4), noise]), 1) == alone


@pytest.mark.exhaustive
def test_code_that_imports_torch_in_a_worker_draws_seeded_numbers(tmp_path: Path) -> None:
    """And what it has changed in place before is not changed twice."""
    with ShardWriter(tmp_path / "s") as writer:
        for number in range(12):
            writer.write({"__key__": f"{number:02d}", "npy": np.ones(2), **({"txt": "x"} if number % 2 else {})})

    def draw(sample: Any) -> Any:
        sample["npy"] += 10

        import torch  # no worker has it before

        return [float(sample["npy"][0]), float(torch.rand(()))]

    def drawn(num_workers: int) -> list[Any]:
        with StreamLoader(tmp_path / "s", 2, num_workers=num_workers, transform=draw) as loader:
            return [[column.tolist() for column in batch] for batch in loader]

    assert drawn(1) == drawn(0)
    assert [values for values, _ in drawn(0)] == [[11.0, 11.0]] * 6


def test_a_closed_loader_starts_nothing(tmp_path: Path) -> None:
    loader = StreamLoader(write_numbers(tmp_path / "s", [5], index=False), 2)
    loader.close()
    for use in (len, iter):
        with pytest.raises(LoaderClosedError):
            use(loader)


def test_modules_of_the_current_folder_are_not_run(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    with StreamLoader(source, 500, num_workers=1) as loader:
        assert len(list(loader)) == 4


def test_loaders_cannot_be_copied(source: str) -> None:
    with StreamLoader(source, 10, num_workers=0) as loader, pytest.raises(TypeError, match="cannot be copied"):
        copy.copy(loader)
