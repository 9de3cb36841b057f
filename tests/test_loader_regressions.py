"""Combinations that were wrong once: slow loops, transforms by kind, chains with functions of the user's, threads."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_shards import write_numbers
from matrix import exhaustive
from processes import children, wait_until
from transforms import noise

from streamload import ShardWriter, StreamLoader
from streamload.errors import LoaderClosedError, StorageError, TransformError, WorkerError
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
    with StreamLoader(source, 5, fields=("npy", "cls"), num_workers=2, prefetch_batches=300) as loader:
        for number, (values, labels) in enumerate(loader):
            assert labels.tolist() == list(range(5 * number, 5 * number + 5))
            assert values[:, 0].tolist() == labels.tolist()
            if number == 0:
                time.sleep(0.7)


def test_tables_from_an_index_that_do_not_all_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_numbers(tmp_path / "many", [100] * 20)
    monkeypatch.setattr("streamload.index.dataset.LEAST_TABLES_BYTES", 20_000)
    monkeypatch.setattr("streamload.index.dataset.MOST_TABLES_BYTES", 20_000)
    with StreamLoader(source, 50, True, fields=("cls",), num_workers=0) as loader:
        for _ in range(2):
            assert sorted(number for (labels,) in loader for number in labels.tolist()) == list(range(2000))


def test_functions_in_a_chain_are_seeded_as_they_are_alone(pictures: str) -> None:
    def drawn(transform: Any, workers: int) -> list[int]:
        with StreamLoader(
            pictures, 5, fields=("bmp;png",), transform={"bmp;png": transform}, num_workers=workers
        ) as loader:
            return [number for (batch,) in loader for number in batch.tolist()]

    alone = drawn(noise, 0)
    assert len(set(alone)) == 20
    for workers in (0, 1):
        assert drawn(Compose([noise]), workers) == alone
        assert drawn(Compose([Resize(4), noise]), workers) == alone


def test_each_alternative_has_its_own_transform(pictures: str) -> None:
    def values(transform: Any) -> list[int]:
        with StreamLoader(pictures, 20, fields=("bmp;png",), transform=transform, num_workers=0) as loader:
            return next(iter(loader))[0].tolist()

    one, two = (lambda image: 1), (lambda image: 2)
    assert values({"bmp": one, "png": two}) == [1, 2] * 10
    assert values({"bmp;png": one}) == [1] * 20


def test_a_mistake_behind_the_first_operation_of_a_chain_is_the_programs(pictures: str) -> None:
    chain = Compose([Resize(4), lambda image: image.no_such_attribute])
    with StreamLoader(
        pictures, 5, fields=("bmp;png",), transform={"bmp;png": chain}, num_workers=0, on_error="skip"
    ) as loader:
        with pytest.raises(TransformError, match="no_such_attribute"):
            list(loader)


@pytest.mark.parametrize("importer", ["transform", exhaustive(("collate_fn",))])
def test_code_that_imports_torch_in_a_worker_draws_seeded_numbers(tmp_path: Path, importer: str) -> None:
    source = write_numbers(tmp_path / "few", [12])

    def draw(value: Any) -> Any:
        import torch  # no worker has it before

        return {"drawn": float(torch.rand(()))}

    def drawn(num_workers: int) -> list[Any]:
        with StreamLoader(source, 2, num_workers=num_workers, **{importer: draw}) as loader:
            return [batch["drawn"] if importer == "collate_fn" else batch["drawn"].tolist() for batch in loader]

    assert drawn(1) == drawn(0)


def test_a_sample_that_is_made_again_is_read_again(tmp_path: Path) -> None:
    """What a transform has changed in place must not be changed twice."""
    with ShardWriter(tmp_path / "s") as writer:
        for number in range(6):
            writer.write({"__key__": str(number), "npy": np.ones(2), **({"txt": "x"} if number % 2 else {})})

    def transform(sample: dict[str, Any]) -> Any:
        import torch  # noqa: F401 - the first import of it in a worker

        sample["npy"] += 10
        return sample["npy"]

    with StreamLoader(tmp_path / "s", 2, transform=transform, num_workers=1) as loader:
        assert [value for batch in loader for value in batch[:, 0].tolist()] == [11.0] * 6


def test_a_worker_that_always_dies_on_the_way_to_its_task(source: str) -> None:
    def no_more_memory(worker: int) -> None:
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), resource.RLIM_INFINITY))

    big = write_numbers(Path(source).parent / "big", [1000], width=3000)
    with StreamLoader(big, 10, fields=("npy",), worker_init_fn=no_more_memory, num_workers=1) as loader:
        with pytest.raises(WorkerError, match="three workers died"):
            list(loader)


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


def test_a_closed_loader_starts_nothing(tmp_path: Path) -> None:
    loader = StreamLoader(write_numbers(tmp_path / "s", [5], index=False), 2)
    loader.close()
    for use in (len, iter):
        with pytest.raises(LoaderClosedError):
            use(loader)


def test_two_writers_of_one_name_do_not_destroy_each_others_shards(tmp_path: Path) -> None:
    first, second = ShardWriter(tmp_path / "s"), ShardWriter(tmp_path / "s")
    first.write({"__key__": "a", "cls": 1})
    first.close()
    second.write({"__key__": "b", "cls": 2})
    with pytest.raises(StorageError, match="exist"):
        second.close()
    with StreamLoader(tmp_path / "s", 1, fields=("__key__",), num_workers=0) as loader:
        assert list(loader) == [[("a",)]]
    assert sorted(set(os.listdir(tmp_path / "s")) - {".streamload-unfinished.json"}) == [
        ".streamload",
        "shard-000000.tar",
    ]


def test_modules_of_the_current_folder_are_not_run(source: str, tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit(3)")
    script = "import sys, streamload\nfor _ in streamload.StreamLoader(sys.argv[1], 500, num_workers=1): pass"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "train.py").write_text(script)
    command = [sys.executable, tmp_path / "elsewhere" / "train.py", source]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_every_sample_of_a_pass_fails(tmp_path: Path) -> None:
    def fails(value: int) -> int:
        raise ValueError("always")

    from streamload.errors import SampleError

    few = write_numbers(tmp_path / "few", [50, 70])
    with StreamLoader(few, 10, fields=("cls",), transform={"cls": fails}, num_workers=1, on_error="skip") as loader:
        with pytest.raises(SampleError, match="every one of 120 samples"):
            list(loader)


def test_a_transform_that_returns_nothing(source: str) -> None:
    with StreamLoader(source, 10, fields=("cls",), transform=lambda sample: None, num_workers=0) as loader:
        with pytest.raises(TransformError, match="returned None"):
            list(loader)


def test_functions_that_cannot_travel_and_loaders_that_cannot_be_copied(source: str) -> None:
    import copy

    numbers = (number for number in range(10))

    def counting(sample: Any) -> Any:
        next(numbers, None)
        return sample

    with StreamLoader(source, 10, fields=("cls",), transform=counting, num_workers=1) as loader:
        with pytest.raises(TypeError, match="transform= cannot be sent to the workers"):
            iter(loader)
        with pytest.raises(TypeError, match="cannot be copied"):
            copy.copy(loader)
    with StreamLoader(source, 1000, fields=("cls",), transform=counting, num_workers=0) as loader:
        assert len(list(loader)) == 2
