"""Combinations that were wrong once: slow loops, transforms by kind, chains with functions of the user's, threads."""

from __future__ import annotations

import copy
import gzip
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_shards import write_numbers
from processes import children, wait_until
from transforms import noise

from streamload import ShardWriter, StreamLoader
from streamload.errors import LoaderClosedError, ShardChangedError, TransformError
from streamload.images import Compose, Resize


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbers(tmp_path_factory.mktemp("regressions") / "shards", [500] * 4)


@pytest.fixture
def pictures(tmp_path: Path) -> str:
    with ShardWriter(tmp_path / "pictures") as writer:
        for number in range(20):
            pixels = np.full((9, 9, 3), number, np.uint8)
            writer.write(
                {"__key__": f"{number:02d}", ("png" if number % 2 else "bmp"): _encoded(pixels, number), "cls": number}
            )
    return str(tmp_path / "pictures")


def _encoded(pixels: np.ndarray, number: int) -> bytes:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG" if number % 2 else "BMP")
    return file.getvalue()


def test_a_loop_that_pauses_while_many_batches_are_ready(source: str) -> None:
    with StreamLoader(source, 5, fields=("npy", "cls"), num_workers=1, prefetch_batches=300) as loader:
        for number, (values, labels) in enumerate(loader):
            assert labels.tolist() == list(range(5 * number, 5 * number + 5))
            assert values[:, 0].tolist() == labels.tolist()
            if number == 0:
                time.sleep(0.3)


def test_functions_in_a_chain_are_seeded_as_they_are_alone(pictures: str) -> None:
    def drawn(transform: Any, workers: int) -> list[int]:
        with StreamLoader(
            pictures, 5, fields=("bmp;png",), transform={"bmp;png": transform}, num_workers=workers
        ) as loader:
            return [number for (batch,) in loader for number in batch.tolist()]

    alone = drawn(noise, 0)
    assert len(set(alone)) == 20
    assert drawn(Compose([noise]), 0) == drawn(Compose([Resize(4), noise]), 0) == alone
    assert drawn(Compose([Resize(4), noise]), 1) == alone


def test_each_alternative_has_its_own_transform(pictures: str) -> None:
    def values(transform: Any) -> list[int]:
        with StreamLoader(pictures, 20, fields=("bmp;png",), transform=transform, num_workers=0) as loader:
            return next(iter(loader))[0].tolist()

    one, two = (lambda image: 1), (lambda image: 2)
    assert values({"bmp": one, "png": two}) == [1, 2] * 10
    assert values({"bmp;png": one}) == [1] * 20


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


@pytest.mark.exhaustive
def test_rows_behind_one_that_kills_workers_are_those_of_its_batch_alone(source: str, tmp_path: Path) -> None:
    """Met in an epoch that was begun ahead and given up, it was held against a batch of the same epoch's rest."""
    folder = tmp_path / "met"
    folder.mkdir()

    def deadly(value: int) -> int:
        if value == 5 and len(met := os.listdir(folder)) < 3:
            (folder / f"{len(met)}").touch()
            if met:  # in the second epoch
                os._exit(3)
        return value

    options: dict[str, Any] = {"fields": ("cls",), "transform": {"cls": deadly}, "num_workers": 1}
    with StreamLoader(source, 4, **options) as loader:
        whole = [batch[0].tolist() for batch in loader]
        state = loader.state_dict()
        assert wait_until(lambda: len(os.listdir(folder)) == 3 and len(children("workers.worker")) == 1)
        loader.load_state_dict({**state, "epoch": 1, "position": 4})
        assert [batch[0].tolist() for batch in loader] == whole[1:]


def test_a_failure_in_the_epoch_begun_ahead_is_not_met_if_it_has_passed(tmp_path: Path) -> None:
    def slow(value: int) -> int:
        time.sleep(0.004)
        return value

    folder = write_numbers(tmp_path / "s", [20] * 12)
    changed = sorted(Path(folder).glob("*.tar"))[2]
    times = changed.stat()
    options: dict[str, Any] = {"fields": ("cls",), "transform": {"cls": slow}, "prefetch_batches": 4}
    with StreamLoader(folder, 20, num_workers=1, **options) as loader:
        for number, _ in enumerate(loader):
            time.sleep(0.2)
            if number == 4:
                os.utime(changed, (1, 1))
        time.sleep(0.3)
        os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert [labels.tolist() for (labels,) in loader] == [list(range(n, n + 20)) for n in range(0, 240, 20)]


def test_a_shard_that_has_changed_before_the_last_task_is_an_error(tmp_path: Path) -> None:
    (plain,) = Path(write_numbers(tmp_path / "one", [4])).glob("*.tar")
    compressed = tmp_path / "one.tar.gz"
    compressed.write_bytes(gzip.compress(plain.read_bytes()))
    (changed,) = Path(write_numbers(tmp_path / "other", [4])).glob("*.tar")
    urls = [str(compressed), str(changed)]
    with StreamLoader(urls, 4, fields=("cls",), num_workers=1, prefetch_batches=2) as loader:
        assert len(loader) == 2
        os.utime(changed, (1, 1))
        with pytest.raises(ShardChangedError):
            list(loader)


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


def test_a_transform_that_returns_nothing(source: str) -> None:
    with StreamLoader(source, 10, fields=("cls",), transform=lambda sample: None, num_workers=0) as loader:
        with pytest.raises(TransformError, match="returned None"):
            list(loader)


def test_loaders_cannot_be_copied(source: str) -> None:
    with StreamLoader(source, 10, num_workers=0) as loader, pytest.raises(TypeError, match="cannot be copied"):
        copy.copy(loader)
