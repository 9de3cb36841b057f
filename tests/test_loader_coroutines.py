"""`async def` transforms and decoders: a batch's samples are in flight together, and fail and draw as with others."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_shards import write_numbers
from torch.utils.data import DataLoader

from streamload import StreamLoader, TarDataset
from streamload.errors import DecodeError, TransformError

BATCH = 4
TOGETHER: dict[int, asyncio.Barrier] = {}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbers(tmp_path_factory.mktemp("coroutines"), [8])


async def all_in_flight() -> None:
    """Return once as many coroutines of this process wait here as a batch has samples."""
    async with asyncio.timeout(60):
        await TOGETHER.setdefault(os.getpid(), asyncio.Barrier(BATCH)).wait()


async def transformed(value: int) -> int:
    await all_in_flight()
    return 10 * value


async def decoded(data: bytes) -> int:
    return await transformed(int(data))


async def of_sample(sample: tuple[int]) -> tuple[int]:
    return (await transformed(sample[0]),)


class Callable_:
    async def __call__(self, value: int) -> int:
        return await transformed(value)


def loader_of(source: str, **options: Any) -> StreamLoader:
    return StreamLoader(source, BATCH, fields=("cls",), **{"num_workers": 0, **options})


def values(loader: StreamLoader) -> list[int]:
    with loader:
        return [value for (batch,) in loader for value in batch.tolist()]


FUNCTIONS: dict[str, dict[str, Any]] = {
    "of a field": {"transform": {"cls": transformed}},
    "of samples": {"transform": of_sample},
    "an object": {"transform": {"cls": Callable_()}},
    "a decoder": {"decode": {"cls": decoded}},
    "a decoder before a transform": {"decode": {"cls": decoded}, "transform": {"cls": lambda value: value}},
}


@pytest.mark.parametrize(
    ("name", "workers"), [*((name, 0) for name in FUNCTIONS), ("of samples", 1), ("a decoder before a transform", 1)]
)
def test_the_samples_of_a_batch_are_in_flight_together(source: str, name: str, workers: int) -> None:
    TOGETHER.clear()
    functions = FUNCTIONS[name]
    expected = [10 * number for number in range(8)]
    assert values(loader_of(source, num_workers=workers, **functions)) == expected
    if workers == 0:
        TOGETHER.clear()
        dataset = TarDataset(source, fields=("cls",), **functions)
        assert [value for start in (0, BATCH) for (value,) in dataset[start : start + BATCH]] == expected[:8]


async def test_they_run_beside_the_callers_event_loop(source: str) -> None:
    """As in a notebook, where one runs always."""
    before = threading.active_count()
    TOGETHER.clear()
    assert values(loader_of(source, transform=of_sample)) == [10 * number for number in range(8)]
    assert threading.active_count() == before


def odd_fail(kind: type[Exception]) -> Callable[..., Any]:
    async def function(value: Any) -> int:
        await asyncio.sleep(0)
        if int(value) % 2:
            raise kind("odd")
        return int(value)

    return function


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("decode", DecodeError, "cannot decode the bytes of field 'cls'"),
        ("transform", TransformError, "of field 'cls'"),
    ],
)
def test_a_failure_is_named_or_skipped_as_of_other_functions(source: str, name: str, kind: Any, said: str) -> None:
    functions: dict[str, Any] = {name: {"cls": odd_fail(ValueError)}}
    dataset = TarDataset(source, fields=("cls",), **functions)
    with pytest.raises(kind, match=rf"{said}.*ValueError: odd \(at '.*tar', sample '.*1', offset"):
        values(loader_of(source, **functions))
    with pytest.raises(kind, match=said):
        dataset[:2]
    dataset.close()
    with loader_of(source, on_error="skip", **functions) as loader:
        assert [batch.tolist() for (batch,) in loader] == [[0, 2], [4, 6]]
        assert len(loader.skipped) == 4
    with pytest.raises(kind, match="counts as a mistake in the program"):
        values(loader_of(source, on_error="skip", **{name: {"cls": odd_fail(TypeError)}}))


def test_none_exits_and_cancellations_are_errors_of_the_sample(source: str) -> None:
    async def nothing(value: int) -> None:
        await asyncio.sleep(0)

    async def leaves(value: int) -> None:
        await asyncio.sleep(0)
        raise SystemExit(3)

    async def cancels(value: Any) -> int:
        if int(value) == 1:
            task = asyncio.create_task(asyncio.sleep(1000))
            task.cancel()
            await task
        return int(value)

    with loader_of(source, on_error="skip", num_workers=1, transform={"cls": cancels}) as loader:
        assert [batch.tolist() for (batch,) in loader] == [[0, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(DecodeError, match=r"a coroutine was cancelled .*sample '.*1'"):
        values(loader_of(source, decode={"cls": cancels}))
    with pytest.raises(TransformError, match="returned None"):
        values(loader_of(source, transform={"cls": nothing}))
    with pytest.raises(SystemExit):
        values(loader_of(source, transform={"cls": leaves}))


def test_a_missing_optional_field_is_none(source: str) -> None:
    async def of_text(value: str) -> str:
        raise AssertionError

    with StreamLoader(source, 8, fields=("cls", "txt?"), transform={"txt": of_text}, num_workers=0) as loader:
        assert [texts for _, texts in loader] == [(None,) * 8]


def test_augmentation_does_not_depend_on_what_comes_first(source: str) -> None:
    """A generator `rng`, and the global ones until the first `await`, are of the sample."""

    def plain(value: int, rng: np.random.Generator) -> list[float]:
        return [value, rng.random(), rng.random()]

    async def waiting(value: int, rng: np.random.Generator) -> list[float]:
        first = rng.random()
        await asyncio.sleep(0.001 * (7 - value))
        return [value, first, rng.random()]

    async def of_globals(value: int) -> list[float]:
        drawn = [value, random.random(), float(np.random.rand()), float(torch.rand(()))]
        await asyncio.sleep(0)
        return drawn

    def of_globals_at_once(value: int) -> list[float]:
        return [value, random.random(), float(np.random.rand()), float(torch.rand(()))]

    async def waiting_decoder(data: bytes) -> int:
        await asyncio.sleep(0.001 * (7 - int(data)))
        return int(data)

    def batches(function: Any, **options: Any) -> list[Any]:
        with loader_of(source, shuffle=True, transform={"cls": function}, **options) as loader:
            return [[column.tolist() for column in batch] for (batch,) in loader]

    assert batches(waiting) == batches(plain)
    assert batches(of_globals) == batches(of_globals_at_once)
    assert batches(of_globals_at_once, decode={"cls": waiting_decoder}) == batches(of_globals_at_once)


def test_a_loop_is_kept_from_batch_to_batch_and_closed_with_its_owner(source: str) -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    tasks: list[asyncio.Task[Any]] = []

    async def remembers(value: int) -> int:
        loops.append(asyncio.get_running_loop())
        tasks.append(asyncio.create_task(asyncio.sleep(1000)))
        return value

    with loader_of(source, transform={"cls": remembers}) as loader:
        assert len(list(loader)) == 2
    dataset = TarDataset(source, fields=("cls",), transform={"cls": remembers})
    assert dataset[0], dataset[1]
    assert len(set(loops)) == 2
    del dataset, loader
    gc.collect()
    assert all(loop.is_closed() for loop in loops)
    assert all(task.cancelled() for task in tasks)


def test_a_fork_leaves_the_loop_to_its_parent(source: str) -> None:
    tasks: list[asyncio.Task[Any]] = []

    async def remembers(value: int) -> int:
        tasks.append(asyncio.create_task(asyncio.sleep(1000)))
        return value

    with TarDataset(source, fields=("cls",), transform={"cls": remembers}) as dataset:
        assert dataset[0]
        if (child := os.fork()) == 0:
            dataset.close()
            os._exit(tasks[0].done())
        assert os.waitpid(child, 0) == (child, 0)


def test_a_dataset_that_ran_coroutines_may_be_forked(source: str) -> None:
    async def reads(value: int) -> int:
        await asyncio.to_thread(Path(__file__).read_bytes)
        return value

    dataset = TarDataset(source, fields=("cls",), transform={"cls": reads})
    for _ in range(2):
        assert dataset[:2] == [(0,), (1,)]
        for (batch,) in DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="fork"):
            assert len(batch) == 4
